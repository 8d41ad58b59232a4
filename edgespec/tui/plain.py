"""The plain chat: line by line, without colours or cursor movement, for screen readers and pipes.

The user approves each tool call by typing an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import ModelReferences, SavedChat, Setting
from edgespec.chat.tool_calls.calls import ToolCall
from edgespec.errors import (
    AttachmentError,
    ChatFileError,
    ConfigurationError,
    EdgespecError,
    OptionError,
)
from edgespec.tools.connection import Toolbox
from edgespec.tools.tool import Tool, ToolResult, visible
from edgespec.tui.archive import REFUSALS, Archive
from edgespec.tui.attachments import Attachment, AttachmentReader
from edgespec.tui.downloads import Downloads
from edgespec.tui.input_syntax import find_references, missing_files
from edgespec.tui.numbers import count, rate, seconds_text
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.plain_console import PlainConsole, ReplyPieces
from edgespec.tui.preferences import Preferences, preferences_path
from edgespec.tui.repetition import REPETITION_NOTE
from edgespec.tui.settings import accepted, remove_unsupported_method
from edgespec.tui.texts import (
    drafting_explanation,
    error_text,
    missing_models_text,
    not_found_text,
    sentences,
    speed_up_short,
    takeover_note,
)
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
from edgespec.tui.worker import Ask, ChatState, LoadOther, ModelThread, PlanModel

if TYPE_CHECKING:
    from edgespec import MethodReport, Stats, TextChunk
    from edgespec.api.sharing.base import ChatModel
    from edgespec.chat.store import StoredChat

_WAIT_SECONDS = 0.05
# Maximum number of missing files to list by name.
_MAX_NAMED_FILES = 5
_ANSWERS: dict[str, CallDecision] = {
    "yes": "once", "chat": "chat", "always": "always", "no": "refuse", "stop": "stop",
}  # fmt: skip


class PlainChat:
    """The plain chat: the open chat, and the model that replies. Replies are written to stdout.

    Runs in the main thread, which Ctrl-C interrupts. The model runs in its own thread, as in the full-screen
    chat.

    Args:
        thread: The model thread, in which the model is loaded.
        runtime: The loaded models.
        archive: The saved chats.
        load_other: Returns a function that loads another model, given a reference to it.
        plan_other: Plans another model, given a reference to it and load options.
        models: The references to the models that the user chose.
        changed: Load options of the chat to resume that have been applied.
        is_fallback: Whether the chat opens with other models than it should, which are not remembered.
        system: System prompt for new chats.
        settings: Settings for new chats.

    Attributes:
        console: Prints notes and prompts the user.
        current_chat: The open chat.
        tools: The tools that the model can call.
        downloads: The model downloads.
        stats: Statistics of the last reply, or None.
        method: Drafting method of the last reply, or the default method.
    """

    def __init__(
        self,
        thread: ModelThread,
        runtime: ChatModel,
        archive: Archive,
        *,
        load_other: LoadOther,
        plan_other: PlanModel,
        models: ModelReferences,
        changed: Mapping[str, Any],
        is_fallback: bool,
        system: str | None,
        settings: Mapping[str, Setting],
    ) -> None:
        self.model_thread, self.runtime, self.archive = thread, runtime, archive
        self.console = PlainConsole(thread.cancel)
        self.load_other, self.plan_other = load_other, plan_other
        self.models, self.first_models = models, models
        self.changed_load_options, self.is_fallback = changed, is_fallback
        # Paths of the models that this program has loaded.
        self.model_paths = [runtime.target.path]
        self.first_system, self.first_settings = system, dict(settings)
        self.current_chat = OpenChat(system, dict(settings))
        self.downloads = Downloads()
        self.tools = _PlainTools(self.console, self.save)
        self.stats: Stats | None = None
        self.method: MethodReport = runtime.method
        # IDs of unsaved chats that the user has already been told about.
        self._reported_unsaved: set[str] = set()
        self._reader = AttachmentReader(runtime)

    @property
    def preferences(self) -> Preferences:
        """The saved preferences."""
        return Preferences.read(preferences_path(self.archive.store))

    def remember_models(self) -> None:
        """Save the user's choice of models for the next chat, unless input comes from a pipe or a file."""
        if self.console.is_interactive and not self.is_fallback:
            self.preferences.remember(self.models, preferences_path(self.archive.store))

    def explain_drafting(self) -> None:
        """Explain drafting to a new user if the model drafts, unless input comes from a pipe or a file."""
        if not self.console.is_interactive:
            return
        preferences = self.preferences
        explanation = drafting_explanation(self.runtime)
        if explanation and not preferences.knows_drafting:
            self.console.note(explanation)
            preferences.knows_drafting = True
            preferences.write(preferences_path(self.archive.store))

    def save(self) -> None:
        """Save the chat, or print why saving failed. Repeated failures are reported only once."""
        chat = self.current_chat
        try:
            self.archive.save(chat, self.runtime.target.name)
        except ChatFileError as error:
            if chat.id not in self._reported_unsaved:
                self._reported_unsaved.add(chat.id)
                self.console.note(sentences(error.what, error.next_step))
        else:
            self._reported_unsaved.discard(chat.id)

    def save_turn(self) -> None:
        """Save the unfinished reply, if one is being generated. Can be called from any thread."""
        chat = self.current_chat
        if chat.turn is not None:
            with suppress(ChatFileError):
                self.archive.save(chat, self.runtime.target.name, chat.turn)

    def resume(self, wanted: str, overrides: Mapping[str, Any]) -> None:
        """Open the saved chat with this ID or title; `last` is the newest. Tell the user if there is none.

        Args:
            wanted: The ID or title.
            overrides: Settings, or the system prompt, that replace those of the chat.
        """
        try:
            found = self.archive.find(wanted)
            if found is not None:
                saved = self.open(found)
                self.current_chat.override(overrides)
                self.remove_unsupported_method(self.current_chat.settings)
                target = self.runtime.target.name
                # The command line has already chosen the models.
                if note := missing_models_text(saved, target, None):
                    self.console.note(note)
                return
        except ChatFileError as error:
            self.console.note(sentences(error.what, error.next_step))
            return
        self.console.note(f"{not_found_text(wanted)}. Type /load for the list of chats.")

    def open_new(self, chat: OpenChat, note: str) -> None:
        """Open a new chat. If it has messages, save it and print `note`. The current chat remains saved."""
        self.current_chat = chat
        if chat.entries:
            self.save()
            self.console.answer(note)
        else:
            self.stats, self.method = None, self.runtime.method
            self.console.note("This is a new chat.")

    def open(self, stored: StoredChat) -> SavedChat:
        """Open a saved chat, print its last reply, and return the saved chat. Raises ChatFileError."""
        # If the last save failed, the file lacks the last messages.
        unsaved = self.archive.unsaved_chat(stored.id)
        saved = self.archive.load(stored.id)
        settings, problems = accepted(saved.sampling)
        self.current_chat = unsaved or OpenChat.opened(saved, settings)
        self.stats = None
        for problem in problems:
            self.console.note(sentences("One setting in this chat was ignored", problem))
        self.console.note(f"Opened “{stored.title}”. Its last reply:")
        if (last := self.current_chat.last_reply) is not None:
            self.console.answer(last.content.strip())
        if self.current_chat.unfinished:
            self.console.note("The last reply is unfinished. Type /continue to finish it.")
        elif last is not None and last.message.ended_early == "cancelled":
            self.console.note("This reply was stopped. Type /continue to finish it.")
        return saved

    def use_runtime(
        self, runtime: ChatModel, *, is_saved: bool = True, methods_error: EdgespecError | None = None
    ) -> None:
        """Continue the chat with another model. Remove settings that the model does not support.

        Args:
            runtime: The loaded models.
            is_saved: Whether to save that the chat uses them. If not, a saved chat keeps its own models,
                which could not be loaded now, until the next reply.
            methods_error: See `remove_unsupported_method`.
        """
        self.runtime, self._reader = runtime, AttachmentReader(runtime)
        if runtime.target.path not in self.model_paths:
            self.model_paths.append(runtime.target.path)
        self.stats, self.method = None, runtime.method
        # New chats begin with `first_settings`.
        self.remove_unsupported_method(
            self.first_settings, self.current_chat.settings, methods_error=methods_error
        )
        if is_saved:
            self.save()

    def remove_unsupported_method(
        self, *chat_settings: dict[str, Setting], methods_error: EdgespecError | None = None
    ) -> None:
        """Remove the setting `method` where the model does not support its value, and say so."""
        if why := remove_unsupported_method(self.runtime, *chat_settings, methods_error=methods_error):
            self.console.note(sentences(*why))

    def use_reloaded_model(self) -> None:
        """Use the reloaded model if a worker or the program that shared the model was lost."""
        if (runtime := self.model_thread.runtime) is not None and runtime is not self.runtime:
            if note := takeover_note(self.runtime):
                self.console.note(note)
            self.runtime, self._reader = runtime, AttachmentReader(runtime)

    def send(self, text: str) -> None:
        """Send a message with the files that it refers to, and print the reply. Raises EdgespecError."""
        message = _with_files(text, self._reader, self.console.note)
        self.tools.answer_pending(self.current_chat, self.runtime.context_tokens)
        self.take_turn(self.current_chat.send(message))

    def take_turn(self, turn: RunningTurn) -> None:
        """Generate, print and save a reply. If it calls tools, run them and let the model continue.

        Raises:
            OptionError: The chat is too long for another message.
        """
        while calls := self._take_one_turn(turn):
            if (following := self.make_calls(calls)) is None:
                return
            turn = following

    def make_calls(self, calls: Sequence[ToolCall]) -> RunningTurn | None:
        """Run a reply's tool calls. Return the turn that sends the results, or None if they were stopped."""
        if not self.tools.make_calls(self.current_chat, calls, self.runtime.context_tokens):
            return None
        place = self.current_chat.last_place("tool")
        assert place is not None
        return self.current_chat.continue_reply(place)

    def _take_one_turn(self, turn: RunningTurn) -> Sequence[ToolCall]:
        """Generate one reply and return its tool calls."""
        chat = self.current_chat
        self.archive.check_size(chat, turn)
        chat.turn, chat.models = turn, self.models
        if turn.sent:
            self.save()
        ask = Ask(chat.system, turn.prompt, {**chat.settings, **self.tools.options}, turn.written)
        job = self.model_thread.ask(ask)
        self.archive.save_while_written(chat, self.runtime.target.name)
        thought_seconds = self._print_reply(job)
        failure: Exception | None = None
        try:
            state: ChatState | None = job.result()
        except Exception as error:
            state, failure = None, error
            self.console.note("\n".join(filter(None, error_text(error))))
        self.use_reloaded_model()
        reply = state.reply if state is not None else None
        message = state.message if state is not None else None
        entry = chat.finish_turn(reply, message, leaving=self.console.leaving)
        if entry is not None:
            entry.thought_seconds = thought_seconds
            self.save()
        elif turn.sent and isinstance(failure, REFUSALS):
            with suppress(ChatFileError):
                self.archive.withdraw(chat, self.runtime.target.name)
        if reply is not None:
            self.stats, self.method = reply.stats, reply.method
            if state is not None and state.is_repetitive:
                self.console.note(REPETITION_NOTE)
            elif reply.finish_reason == "cancelled" and entry is not None and not self.console.leaving:
                self.console.note("Stopped. Type /continue to finish the reply.")
            elif reply.finish_reason == "length":
                self.console.note("The reply reached its maximum length. Type /continue to extend it.")
            speed_up = speed_up_short(reply.method, reply.stats)
            speed = ", ".join(filter(None, (speed_up, rate(reply.stats.tokens_per_second))))
            self.console.note(f"({speed})")
        return () if reply is None or entry is None or self.console.leaving else entry.message.tool_calls

    def _print_reply(self, job: Future[ChatState]) -> float | None:
        """Print the reply as it is generated, and return the seconds spent reasoning, if any."""
        out = ReplyPieces()
        is_thinking = ended = False
        began, seconds = 0.0, None
        while not ended:
            # Check whether the reply has ended before reading its chunks, so that none are missed.
            ended = job.done()
            for chunk in self._new_chunks():
                if chunk.reasoning and not is_thinking:
                    self.console.note("The model is thinking.")
                    began = monotonic()
                elif is_thinking and not chunk.reasoning:
                    seconds = monotonic() - began
                is_thinking = chunk.reasoning
                if not chunk.reasoning:
                    out.write(chunk.text)
        out.end()
        return monotonic() - began if is_thinking else seconds

    def _new_chunks(self) -> Iterator[TextChunk]:
        """Yield the reply chunks that have arrived, waiting briefly if there are none yet."""
        queue = self.model_thread.chunks
        with suppress(Empty):
            yield queue.get(timeout=_WAIT_SECONDS)
            while True:
                yield queue.get_nowait()


def _with_files(text: str, reader: AttachmentReader, note: Callable[[str], None]) -> Message:
    """Return a user message with the files that its text refers to.

    Args:
        text: The message.
        reader: Reads the files.
        note: Prints which files are attached, and which do not exist.

    Raises:
        AttachmentError: A file cannot be attached.
    """
    references = find_references(text)
    attachments = reader.read(references) if references else ()
    for each in attachments:
        if (problem := each.problem) is not None:
            raise AttachmentError(
                f"the message was not sent: {problem.what}", problem.next_step, code=problem.code
            )
    for each in attachments:
        note(_attached_text(each))
    found = {attachment.path for attachment in attachments}
    if missing := [path for path in missing_files(references) if path not in found]:
        names = ", ".join(f"@{path}" for path in missing[:_MAX_NAMED_FILES])
        note(f"No file matches {names}, so this is sent as text.")
    files = tuple(file for attachment in attachments for file in attachment.files)
    return Message("user", text, files=files)


def _attached_text(attachment: Attachment) -> str:
    files = "" if len(attachment.files) == 1 else f", {count(len(attachment.files), 'file')}"
    skipped = f", {attachment.skipped} skipped (no text)" if attachment.skipped else ""
    images = [file.image for file in attachment.files if file.image]
    name = images[0].label if images else attachment.path
    return f"Attached {name} ({count(attachment.token_count, 'token')}{files}{skipped})."


class _PlainTools(ToolAccess):
    """Tool use in the plain chat. Runs in the chat's thread.

    Args:
        console: Prints notes and prompts the user.
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
        """Run a reply's tool calls, and save their results. Return whether the model should continue."""
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
        """Run a call if the user allows it, and return its result."""
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
        """Return the user's decision, or `once` if the user has already allowed such calls."""
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
