"""Tool calls in the plain chat, where the user allows each call by a typed answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import ConfigurationError, OptionError
from edgespec.tools.connection import Toolbox
from edgespec.tools.tool import Tool, ToolResult, visible
from edgespec.tui.numbers import count, seconds_text
from edgespec.tui.open_chat import OpenChat
from edgespec.tui.plain_console import PlainConsole
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
    readable_arguments,
    unanswered_calls,
)

__all__ = ["PlainTools"]

_WAIT_SECONDS = 0.05
_ANSWERS: dict[str, CallDecision] = {
    "yes": "once", "chat": "chat", "always": "always", "no": "refuse", "stop": "stop",
}  # fmt: skip


class PlainTools(ToolAccess):
    """Tool use in the plain chat. Runs in the chat's thread.

    Args:
        console: Prints notes and asks the user.
        save: Saves the open chat.
    """

    def __init__(self, console: PlainConsole, save: Callable[[], None]) -> None:
        super().__init__()
        self._console = console
        self._save = save

    def stop_servers(self) -> None:
        """Stop all servers, so that the model has no tools."""
        toolbox, self.toolbox = self.toolbox, Toolbox(())
        toolbox.close()

    def start_servers(self) -> None:
        """Start all servers. Print how many tools there are, and which servers failed."""
        self._console.note("Starting the tools.")
        wait([self.toolbox.start(name) for name in self.toolbox.servers])
        for problem in self.start_problems():
            self._console.note(problem)
        if text := self.started_text("Type /tools to list them, or /tools off."):
            self._console.answer(text)

    def make_calls(self, chat: OpenChat, calls: Sequence[ToolCall], context_tokens: int) -> bool:
        """Make the calls of a reply, and save their results. Return whether the model should go on."""
        chat.unfinished = True
        too_many, stopped = call_rounds(chat) > MAX_ROUNDS, False
        for call in calls:
            result = TOO_MANY if too_many else STOPPED if stopped else self._make_call(chat, call)
            stopped = stopped or result.veto == "stopped"
            added = add_result(chat, call, result, context_tokens)
            self._console.note(_result_text(call, added))
            self._save()
        chat.unfinished = False
        self._save()
        if too_many:
            self._console.note(
                f"Stopped after {MAX_ROUNDS} rounds of tool calls. Type /continue for an answer."
            )
        return not (too_many or stopped or self._console.leaving)

    def answer_pending(self, chat: OpenChat, context_tokens: int) -> None:
        """Add a result to each call that was not run, because chat templates expect one for every call."""
        for call in unanswered_calls(chat):
            add_result(chat, call, STOPPED, context_tokens)

    def _make_call(self, chat: OpenChat, call: ToolCall) -> ToolResult:
        """Return the result of a call, after asking the user."""
        checked = self.check(call)
        if isinstance(checked, ToolResult):
            return checked
        decision = self._decide(chat, checked.tool, call)
        if decision == "stop":
            return STOPPED
        if decision == "refuse":
            return REFUSED
        self._console.interrupted.clear()
        return self._until_interrupted(self.toolbox.call(checked.tool, checked.arguments))

    def _until_interrupted(self, future: Future[ToolResult]) -> ToolResult:
        while not wait([future], _WAIT_SECONDS).done:
            if self._console.interrupted.is_set():
                future.cancel()
                return INTERRUPTED
        return future.result()

    def _decide(self, chat: OpenChat, tool: Tool, call: ToolCall) -> CallDecision:
        """Return the user's decision, or `once` if the user has allowed such calls before."""
        if self.is_allowed(tool, chat):
            return "once"
        question = (
            f"The model wants to call the tool {visible(tool.name)} of the server {tool.server} with these"
            f" arguments:\n{readable_arguments(call.arguments)}\nAllow it? Type yes, no, chat (yes, in this"
            " chat), always (yes, from now on) or stop (stop the reply)."
        )
        answer = self._console.ask(question, tuple(_ANSWERS))
        decision = _ANSWERS.get(answer, "stop")
        try:
            if note := self.remember(tool, decision):
                self._console.note(note)
        except (ConfigurationError, OptionError) as error:
            self._console.note(sentences(error.what, error.next_step))
        return decision


def _result_text(call: ToolCall, result: ToolResult) -> str:
    took = f" in {seconds_text(result.seconds)}" if result.seconds else ""
    if result.failed:
        return f"Tool {visible(call.name)} failed{took}. {visible(result.problem)}"
    return f"Tool {visible(call.name)} returned {count(len(result.text), 'character')}{took}."
