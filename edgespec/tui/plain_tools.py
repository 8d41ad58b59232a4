"""Tool calls in the plain chat, where the user allows each call by a typed answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import ConfigurationError, OptionError
from edgespec.tools.result import ToolResult
from edgespec.tools.tool import Tool, visible
from edgespec.tools.toolbox import Toolbox
from edgespec.tui.numbers import count, seconds_text
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.screens.approval import readable_arguments
from edgespec.tui.texts import sentences
from edgespec.tui.tool_access import (
    INTERRUPTED,
    MAX_ROUNDS,
    REFUSED,
    STOPPED,
    TOO_MANY,
    CallDecision,
    ToolAccess,
    add_result,
    call_rounds,
    unanswered_calls,
)

if TYPE_CHECKING:
    from edgespec.tui.plain import PlainChat

__all__ = ["PlainTools"]

_WAIT_SECONDS = 0.05
_ANSWERS: dict[str, CallDecision] = {
    "yes": "once", "chat": "chat", "always": "always", "no": "refuse", "stop": "stop",
}  # fmt: skip


class PlainTools(ToolAccess):
    """Tool use in the plain chat. Runs in the chat's thread."""

    def __init__(self, chat: PlainChat) -> None:
        super().__init__()
        self._chat = chat

    def stop_servers(self) -> None:
        """Stop all servers, so that the model has no tools."""
        toolbox, self.toolbox = self.toolbox, Toolbox(())
        toolbox.close()

    def start_servers(self) -> None:
        """Start all servers. Print how many tools there are, and which servers failed."""
        self._chat.note("Starting the tools.")
        wait([self.toolbox.start(name) for name in self.toolbox.servers])
        for problem in self.start_problems():
            self._chat.note(problem)
        if text := self.started_text("Type /tools to list them, or /tools off."):
            self._chat.answer(text)

    def make_calls(self, calls: Sequence[ToolCall]) -> bool:
        """Make the calls of a reply, and save their results. Return whether the model should go on."""
        chat = self._chat.current_chat
        chat.unfinished = True
        too_many, stopped = call_rounds(chat) > MAX_ROUNDS, False
        for call in calls:
            result = TOO_MANY if too_many else STOPPED if stopped else self._make_call(call)
            stopped = stopped or result in (STOPPED, INTERRUPTED)
            added = add_result(chat, call, result, self._chat.runtime.context_tokens)
            self._chat.note(_result_text(call, added))
            self._chat.save()
        chat.unfinished = False
        self._chat.save()
        if too_many:
            self._chat.note(f"Stopped after {MAX_ROUNDS} rounds of tool calls. Type /continue for an answer.")
        return not (too_many or stopped or self._chat.leaving)

    def answer_pending(self, chat: OpenChat) -> None:
        """Add a result to each call that was not run, because chat templates expect one for every call."""
        for call in unanswered_calls(chat):
            add_result(chat, call, STOPPED, self._chat.runtime.context_tokens)

    def _make_call(self, call: ToolCall) -> ToolResult:
        """Return the result of a call, after asking the user."""
        checked = self.check(call)
        if isinstance(checked, ToolResult):
            return checked
        decision = self._decide(checked.tool, call)
        if decision == "stop":
            return STOPPED
        if decision == "refuse":
            return REFUSED
        self._chat.interrupted.clear()
        return self._until_interrupted(self.toolbox.call(checked.tool, checked.arguments))

    def _until_interrupted(self, future: Future[ToolResult]) -> ToolResult:
        while not wait([future], _WAIT_SECONDS).done:
            if self._chat.interrupted.is_set():
                future.cancel()
                return INTERRUPTED
        return future.result()

    def _decide(self, tool: Tool, call: ToolCall) -> CallDecision:
        """Return the user's decision, or `once` if the user has allowed such calls before."""
        if self.is_allowed(tool, self._chat.current_chat):
            return "once"
        question = (
            f"The model wants to call the tool {visible(tool.name)} of the server {tool.server} with these"
            f" arguments:\n{readable_arguments(call.arguments)}\nAllow it? Type yes, no, chat (yes, in this"
            " chat), always (yes, from now on) or stop (stop the reply)."
        )
        answer = self._chat.ask(question, tuple(_ANSWERS))
        decision = _ANSWERS.get(answer, "stop")
        try:
            if note := self.remember(tool, decision):
                self._chat.note(note)
        except (ConfigurationError, OptionError) as error:
            self._chat.note(sentences(error.what, error.next_step))
        return decision


def _result_text(call: ToolCall, result: ToolResult) -> str:
    took = f" in {seconds_text(result.seconds)}" if result.seconds else ""
    if result.failed:
        return f"Tool {visible(call.name)} failed{took}. {visible(result.problem)}"
    return f"Tool {visible(call.name)} returned {count(len(result.text), 'character')}{took}."
