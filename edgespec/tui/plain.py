"""The plain chat: line by line, without colours or cursor movement, for screen readers and pipes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING

from edgespec.chat.saved_chat import Setting
from edgespec.errors import ChatFileError, EdgespecError, OptionError
from edgespec.tui import plain_commands
from edgespec.tui.archive import Archive
from edgespec.tui.commands import table
from edgespec.tui.commands.results import Context
from edgespec.tui.downloads import Downloads
from edgespec.tui.files.attachments import AttachmentReader
from edgespec.tui.numbers import rate
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.plain_files import with_files
from edgespec.tui.plain_streams import QUOTES, InputLines, ReplyPieces, ends_block, unquoted, write
from edgespec.tui.plain_tools import PlainTools
from edgespec.tui.preferences import Preferences
from edgespec.tui.settings import accepted
from edgespec.tui.texts import error_text, facts_line, notices, rounding_warning, sentences, speed_up_short
from edgespec.tui.worker import Ask, ChatState, LoadOther, ModelThread

if TYPE_CHECKING:
    from types import FrameType

    from edgespec import MethodReport, Runtime, Stats, TextChunk
    from edgespec.chat.store import StoredChat
    from edgespec.chat.tool_calls.calls import ToolCall

__all__ = ["PlainChat"]

_WAIT_SECONDS = 0.05
# Maximum time in seconds between two presses of Ctrl-C that quit the chat.
_TWICE_SECONDS = 2.0


class PlainChat:
    """A chat that reads lines from stdin and writes replies to stdout. Everything else goes to stderr.

    Runs in the main thread, which Ctrl-C interrupts. The model runs in its own thread, as in the full-screen
    chat.

    Args:
        thread: The model thread, in which the model is loaded.
        runtime: The loaded models.
        archive: The saved chats.
        load_other: Returns a function that loads another model, given a reference to it.
        model_name: The model reference, which presets contain.
        system: System prompt of new chats.
        settings: Settings of new chats.

    Attributes:
        current_chat: The open chat.
        tools: The tools that the model can call.
        downloads: The downloads of models.
        interrupted: Set when the user presses Ctrl-C. Whoever starts long work clears it first.
        switched_to: A reference to the loaded model. Empty if the user has not switched models.
        leaving: True once the chat is about to end.
        stats: Statistics of the last reply, or None.
        method: Drafting method of the last reply, or the default method.
    """

    def __init__(
        self,
        thread: ModelThread,
        runtime: Runtime,
        archive: Archive,
        *,
        load_other: LoadOther,
        model_name: str,
        system: str | None,
        settings: Mapping[str, Setting],
    ) -> None:
        self.model_thread, self.runtime, self.archive = thread, runtime, archive
        # Messages about unsaved chats that have already been shown.
        self.reported_failures: set[str] = set()
        self.load_other, self.model_name, self.switched_to = load_other, model_name, ""
        self.first_system, self.first_settings = system, dict(settings)
        self.current_chat = OpenChat(system, dict(settings))
        self.leaving = False
        self.interrupted = threading.Event()
        self.downloads = Downloads()
        self.tools: PlainTools = PlainTools(self)
        self.stats: Stats | None = None
        self.method: MethodReport = runtime.method
        self._interrupted_at = -_TWICE_SECONDS
        self._is_reading = False
        self._is_interactive = sys.stdin.isatty()
        self._input = InputLines()
        self._reader = AttachmentReader(runtime)

    def run(self, resume: str | None, *, tools: bool) -> None:
        """Read messages and commands until the input ends or the user quits.

        Args:
            resume: The ID or title of the saved chat to open, `last` for the newest, or None for a new chat.
            tools: Whether to start the MCP servers at once.
        """
        self.note(f"Model: {facts_line(self.runtime.target)}. Type /help for the commands, /quit to end.")
        if self._is_interactive:
            for notice in notices(self.runtime, "Type /model"):
                self.note(notice)
        elif warning := rounding_warning(self.runtime):
            self.note(warning)
        if resume is not None:
            self.resume(resume)
        if tools:
            self._take("/tools on")
        while not self.leaving and (text := self._read_message()) is not None:
            if text.strip():
                self._take(text)

    def on_interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle Ctrl-C: stop the reply, or quit if Ctrl-C was pressed twice.

        Raises an exception only while the chat waits for input, so that no other work is left half done.
        """
        now = monotonic()
        self.leaving = self.leaving or now - self._interrupted_at < _TWICE_SECONDS
        self._interrupted_at = now
        self.interrupted.set()
        self.model_thread.cancel()
        if self._is_reading:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        """Print a message from edgespec, as opposed to the model, to stderr."""
        write(sys.stderr, f"{text}\n")

    def answer(self, text: str) -> None:
        """Print the result of a command to stdout."""
        write(sys.stdout, f"{text}\n")

    def save(self) -> None:
        """Save the chat, or print why it cannot be saved. Each reason is printed only once."""
        try:
            self.archive.save_now(self.current_chat, self.runtime.target.name)
        except ChatFileError as error:
            if error.what not in self.reported_failures:
                self.reported_failures.add(error.what)
                self.note(sentences(error.what, error.next_step))

    def save_turn(self) -> None:
        """Save the unfinished reply, if one is being generated. Can be called from any thread."""
        chat = self.current_chat
        if chat.turn is not None:
            with suppress(ChatFileError):
                self.archive.save_now(chat, self.runtime.target.name, chat.turn)

    def resume(self, wanted: str) -> None:
        """Open the saved chat with this ID or title; `last` is the newest. Tell the user if there is none."""
        try:
            found = self.archive.find_now(wanted)
            if found is not None:
                self.open(found)
                return
        except ChatFileError as error:
            self.note(sentences(error.what, error.next_step))
            return
        missing = "there are no saved chats yet" if wanted == "last" else f"no saved chat {wanted!r}"
        self.note(f"There is {missing}, so this is a new chat. Type /load for the list of chats.")

    def open_new(self, chat: OpenChat) -> None:
        """Open an empty chat. The current one remains saved."""
        self.current_chat = chat
        self.stats, self.method = None, self.runtime.method
        self.note("This is a new chat.")

    def open(self, stored: StoredChat) -> None:
        """Open a saved chat, and print its last reply. Raises ChatFileError."""
        saved = self.archive.load_now(stored.id)
        settings, problems = accepted(saved.sampling)
        self.current_chat = OpenChat.opened(saved, settings)
        self.stats = None
        for problem in problems:
            self.note(sentences("One setting in this chat was ignored", problem))
        self.note(f"Opened “{stored.title}”. Its last reply:")
        if (last := self.current_chat.last_reply) is not None:
            self.answer(last.content.strip())
        if saved.unfinished:
            self.note("The last reply is unfinished. Type /continue to finish it.")

    def use_runtime(self, runtime: Runtime) -> None:
        """Continue the chat with another model. Remove settings that the model does not support."""
        self.runtime, self._reader = runtime, AttachmentReader(runtime)
        self.stats, self.method = None, runtime.method
        settings = self.current_chat.settings
        try:
            if "method" in settings:
                runtime.method_for(str(settings["method"]))
        except OptionError as error:
            self.note(sentences("The setting `method` was removed", error.what))
            del settings["method"]
        self.save()

    def ask(self, question: str, answers: Sequence[str]) -> str:
        """Ask a question until the user types one of the answers.

        Returns:
            The answer. Empty if the user pressed Ctrl-C or the input ended.
        """
        self.note(question)
        while True:
            line = self._read_line("? ")
            if not line:
                return ""
            if (answer := line.strip().lower()) in answers:
                return answer
            self.note(f"Type {', '.join(answers[:-1])} or {answers[-1]}.")

    def _read_line(self, prompt: str) -> str | None:
        """Return the next line of the input, or an empty string at its end. Return None after Ctrl-C."""
        if self._is_interactive:
            write(sys.stderr, prompt)
        try:
            self._is_reading = True
            return self._input.read_line()
        except KeyboardInterrupt:
            return None
        finally:
            self._is_reading = False

    def _read_message(self) -> str | None:
        """Return the next message, or None at the end of the input.

        A message in triple quotes can span several lines. See `ends_block`.
        """
        lines: list[str] = []
        while True:
            line = self._read_line("... " if lines else "> ")
            if line is None:
                lines.clear()
                if self.leaving:
                    return None
                self.note("\nPress Ctrl-C again to quit. The chat is saved.")
                continue
            if not line:
                if lines:
                    self.note(f"The message that starts with {QUOTES} is sent without closing quotes.")
                return "\n".join(lines).removeprefix(QUOTES) or None
            lines.append(line.rstrip("\r\n"))
            if not lines[0].startswith(QUOTES):
                return lines[0]
            if ends_block(lines):
                return unquoted(lines)

    def _take(self, text: str) -> None:
        typed = table.read(text)
        if typed is None:
            self._reporting(lambda: self._send(text.strip()))
        else:
            self._reporting(lambda: plain_commands.run(self, typed))

    def command_context(self, argument: str) -> Context:
        """Return what a slash command with these words sees of the chat."""
        return Context(
            argument=argument,
            chat=self.current_chat,
            new_chat=OpenChat(self.first_system, dict(self.first_settings)),
            runtime=self.runtime,
            model_name=self.model_name,
            model_thread=self.model_thread,
            method=self.method,
            stats=self.stats,
            writing=False,
            archive=self.archive,
            tools=self.tools,
            preferences=Preferences(),
            list_hint="Type /load for the list of chats",
        )

    def _reporting(self, work: Callable[[], None]) -> None:
        """Call `work`, and print the error if it fails."""
        try:
            work()
        except EdgespecError as error:
            self.note(sentences(error.what, error.next_step))

    def _send(self, text: str) -> None:
        message = with_files(text, self._reader, self.note)
        self.tools.answer_pending(self.current_chat)
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
        """Make the calls of a reply. Return the turn that sends the results, or None if the user stopped."""
        if not self.tools.make_calls(calls):
            return None
        place = self.current_chat.last_place("tool")
        assert place is not None
        return self.current_chat.continue_reply(place)

    def _take_one_turn(self, turn: RunningTurn) -> Sequence[ToolCall]:
        """Generate one reply and return its tool calls."""
        chat = self.current_chat
        self.archive.check_size(chat, turn)
        chat.begin_turn(turn)
        if turn.sent:
            self.save()
        ask = Ask(chat.system, turn.prompt, {**chat.settings, **self.tools.options}, turn.written)
        job = self.model_thread.ask(ask)
        self.archive.save_while_written(chat, self.runtime.target.name)
        thought_seconds = self._print_reply(job)
        try:
            state: ChatState | None = job.result()
        except Exception as error:
            state = None
            self.note("\n".join(error_text(error)))
        if (runtime := self.model_thread.runtime) is not None and runtime is not self.runtime:
            # The model was loaded again after it lost a worker.
            self.runtime, self._reader = runtime, AttachmentReader(runtime)
        reply = state.reply if state is not None else None
        entry = chat.finish_turn(reply, None if state is None else state.messages[-1], leaving=self.leaving)
        if entry is not None:
            entry.thought_seconds = thought_seconds
            self.save()
        if reply is not None:
            self.stats, self.method = reply.stats, reply.method
            if reply.finish_reason == "cancelled" and entry is not None and not self.leaving:
                self.note("Stopped. Type /continue to finish the reply.")
            elif reply.finish_reason == "length":
                self.note("The reply reached its maximum length. Type /continue to extend it.")
            self.note(f"({speed_up_short(reply.method, reply.stats)}, {rate(reply.stats.tokens_per_second)})")
        return () if reply is None or entry is None or self.leaving else entry.message.tool_calls

    def _print_reply(self, job: Future[ChatState]) -> float | None:
        """Print the reply while it is generated. Return how long the model reasoned, or None."""
        out = ReplyPieces()
        is_thinking = ended = False
        began, seconds = 0.0, None
        while not ended:
            # Check whether the reply has ended before reading its chunks, so that none are missed.
            ended = job.done()
            for chunk in self._new_chunks():
                if chunk.reasoning and not is_thinking:
                    self.note("The model is thinking.")
                    began = monotonic()
                elif is_thinking and not chunk.reasoning:
                    seconds = monotonic() - began
                is_thinking = chunk.reasoning
                if not chunk.reasoning:
                    out.write(chunk.text)
        out.end()
        return monotonic() - began if is_thinking else seconds

    def _new_chunks(self) -> Iterator[TextChunk]:
        """Yield the chunks of the reply that have arrived. Wait briefly if there are none yet."""
        queue = self.model_thread.chunks
        with suppress(Empty):
            yield queue.get(timeout=_WAIT_SECONDS)
            while True:
                yield queue.get_nowait()
