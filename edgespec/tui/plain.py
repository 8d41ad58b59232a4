"""The plain chat: line by line, without colours or cursor movement, for screen readers and pipes."""

from __future__ import annotations

import _thread
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import Setting
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError, EdgespecError
from edgespec.tui import commands, plain_commands
from edgespec.tui.archive import Archive
from edgespec.tui.chat_end import ChatEnd, resume_value
from edgespec.tui.controls import without_controls
from edgespec.tui.ending import EndWatch
from edgespec.tui.numbers import rate
from edgespec.tui.open_chat import OpenChat, RunningTurn
from edgespec.tui.settings import accepted
from edgespec.tui.texts import error_text, facts_line, sentences, speed_up_short
from edgespec.tui.worker import Ask, ChatState, Load, ModelThread

if TYPE_CHECKING:
    from types import FrameType

    from edgespec import MethodReport, Runtime, Stats, TextChunk
    from edgespec.chat.store import StoredChat

__all__ = ["PlainChat", "run_plain_chat"]

_WAIT_SECONDS = 0.05
# Maximum time in seconds between two presses of Ctrl-C that quit the chat.
_TWICE_SECONDS = 2.0
_QUIT_SECONDS = 5.0
# Maximum time in seconds until the chat reacts to a signal while it waits for input.
_SIGNAL_SECONDS = 0.2
# Minimum number of characters to write at once. Screen readers pause between pieces, so short ones are hard
# to follow.
_PIECE_CHARACTERS = 60
_QUOTES = '"""'


class PlainChat:
    """A chat that reads lines from stdin and writes replies to stdout. Everything else goes to stderr.

    Runs in the main thread, which Ctrl-C interrupts. The model runs in its own thread, as in the full-screen
    chat.

    Args:
        thread: The model thread, in which the model is loaded.
        runtime: The loaded models.
        archive: The saved chats.
        system: System prompt of new chats.
        settings: Settings of new chats.

    Attributes:
        current_chat: The open chat.
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
        system: str | None,
        settings: Mapping[str, Setting],
    ) -> None:
        self.model_thread, self.runtime, self.archive = thread, runtime, archive
        self.first_system, self.first_settings = system, dict(settings)
        self.current_chat = OpenChat(system, dict(settings))
        self.leaving = False
        self.stats: Stats | None = None
        self.method: MethodReport = runtime.method
        self._interrupted_at = -_TWICE_SECONDS
        self._is_reading = False
        self._is_interactive = sys.stdin.isatty()
        self._input = _InputLines()

    def run(self, resume: str | None) -> None:
        """Read messages and commands until the input ends or the user quits."""
        self.note(f"Model: {facts_line(self.runtime.target)}. Type /help for the commands, /quit to end.")
        if resume is not None:
            self.resume(resume)
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
        self.model_thread.cancel()
        if self._is_reading:
            raise KeyboardInterrupt

    def note(self, text: str) -> None:
        """Print a message from edgespec, as opposed to the model, to stderr."""
        _write(sys.stderr, f"{text}\n")

    def answer(self, text: str) -> None:
        """Print the result of a command to stdout."""
        _write(sys.stdout, f"{text}\n")

    def save(self) -> None:
        """Save the chat, or print why it cannot be saved."""
        try:
            self.archive.save_now(self.current_chat, self.runtime.target.name)
        except ChatFileError as error:
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
                self._open(found)
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

    def _open(self, stored: StoredChat) -> None:
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

    def _read_message(self) -> str | None:
        """Return the next message, or None at the end of the input. Triple quotes enclose several lines."""
        lines: list[str] = []
        while True:
            if self._is_interactive:
                _write(sys.stderr, "... " if lines else "> ")
            try:
                self._is_reading = True
                line = self._input.read_line()
            except KeyboardInterrupt:
                lines.clear()
                if self.leaving:
                    return None
                self.note("\nPress Ctrl-C again to quit. The chat is saved.")
                continue
            finally:
                self._is_reading = False
            if not line:
                return "\n".join(lines) or None
            lines.append(line.rstrip("\r\n"))
            text = "\n".join(lines)
            if not text.startswith(_QUOTES):
                return text
            if text.endswith(_QUOTES) and len(text) >= 2 * len(_QUOTES):
                return text[len(_QUOTES) : -len(_QUOTES)]

    def _take(self, text: str) -> None:
        typed = commands.read(text)
        try:
            if typed is None:
                self.take_turn(self.current_chat.send(Message("user", text.strip())))
            else:
                plain_commands.run(self, typed)
        except EdgespecError as error:
            self.note(sentences(error.what, error.next_step))

    def take_turn(self, turn: RunningTurn) -> None:
        """Generate a reply, print it as it arrives, and save it."""
        chat = self.current_chat
        chat.begin_turn(turn)
        if turn.sent:
            self.save()
        ask = Ask(chat.system, turn.prompt, dict(chat.settings), turn.written)
        job = self.model_thread.ask(ask)
        self.archive.save_while_written(chat, self.runtime.target.name)
        self._print_reply(job)
        try:
            state: ChatState | None = job.result()
        except Exception as error:
            state = None
            self.note("\n".join(error_text(error)))
        reply = state.reply if state is not None else None
        entry = chat.finish_turn(reply, None if state is None else state.messages[-1], leaving=self.leaving)
        if entry is not None:
            self.save()
        if reply is not None:
            self.stats, self.method = reply.stats, reply.method
            if reply.finish_reason == "cancelled" and entry is not None and not self.leaving:
                self.note("Stopped. Type /continue to finish the reply.")
            elif reply.finish_reason == "length":
                self.note("The reply reached its maximum length. Type /continue to extend it.")
            self.note(f"({speed_up_short(reply.method, reply.stats)}, {rate(reply.stats.tokens_per_second)})")

    def _print_reply(self, job: Future[ChatState]) -> None:
        """Print the reply while it is generated."""
        out = _Pieces()
        is_thinking = ended = False
        while not ended:
            # Check whether the reply has ended before reading its chunks, so that none are missed.
            ended = job.done()
            for chunk in self._new_chunks():
                if chunk.reasoning and not is_thinking:
                    self.note("The model is thinking.")
                is_thinking = chunk.reasoning
                if not chunk.reasoning:
                    out.write(chunk.text)
        out.end()

    def _new_chunks(self) -> Iterator[TextChunk]:
        """Yield the chunks of the reply that have arrived. Wait briefly if there are none yet."""
        queue = self.model_thread.chunks
        with suppress(Empty):
            yield queue.get(timeout=_WAIT_SECONDS)
            while True:
                yield queue.get_nowait()


class _Pieces:
    """Writes a growing text to stdout: whole lines, or long pieces that end at a space."""

    def __init__(self) -> None:
        self._text = ""
        self._last = "\n"

    def write(self, text: str) -> None:
        self._text += text
        end = self._text.rfind("\n") + 1
        if len(self._text) - end >= _PIECE_CHARACTERS:
            end = max(end, self._text.rfind(" ") + 1)
        self._flush(end)

    def end(self) -> None:
        """Write the rest of the text, and a line break unless the text ends with one."""
        self._flush(len(self._text))
        if self._last != "\n":
            _write(sys.stdout, "\n")

    def _flush(self, end: int) -> None:
        if end:
            _write(sys.stdout, self._text[:end])
            self._last, self._text = self._text[end - 1], self._text[end:]


def _write(stream: TextIO, text: str) -> None:
    stream.write(without_controls(text))
    stream.flush()


class _InputLines:
    """Reads stdin line by line.

    Python runs a signal handler only after the current system call. A signal that arrives just before
    `sys.stdin.readline()` blocks would wait for the next line. So on POSIX, this waits in short steps.
    """

    def __init__(self) -> None:
        self._unread = b""

    def read_line(self) -> str:
        """Return the next line, or an empty string at the end of the input."""
        if sys.platform == "win32":
            return sys.stdin.readline()
        number = sys.stdin.fileno()
        while b"\n" not in self._unread:
            if not select.select([number], [], [], _SIGNAL_SECONDS)[0]:
                continue
            new = os.read(number, 1 << 16)
            self._unread += new
            if not new:
                break
        line, newline, self._unread = self._unread.partition(b"\n")
        return (line + newline).decode(sys.stdin.encoding, "replace")


def run_plain_chat(
    load: Load,
    *,
    model_name: str,
    system: str | None = None,
    settings: Mapping[str, Setting] | None = None,
    resume: str | None = None,
    store: ChatStore | None = None,
) -> ChatEnd:
    """Run the plain chat until the user quits or the input ends. See `ChatApp` for the arguments.

    Raises:
        CancelledError: Loading was cancelled.
        ChatFileError: A chat could not be saved.
        EdgespecError: Loading failed.
    """
    store = store if store is not None else ChatStore()
    thread, archive = ModelThread(load), Archive(store)
    chat: PlainChat | None = None

    def save() -> None:
        if chat is not None:
            chat.save_turn()

    def leave() -> bool:
        if chat is not None:
            chat.leaving = True
        thread.cancel_load()
        thread.cancel()
        _interrupt_main()
        return True

    def stop() -> bool:
        thread.close()
        return thread.join(_QUIT_SECONDS)

    with EndWatch(save, leave, stop) as watch:
        try:
            _write(sys.stderr, f"Loading {model_name}.\n")
            chat = PlainChat(thread, _loaded(thread), archive, system=system, settings=settings or {})
            # From now on, Ctrl-C stops the reply. Other signals still end the chat.
            signal.signal(signal.SIGINT, chat.on_interrupt)
            chat.run(resume)
        finally:
            save()
            if not stop():
                sys.stdout.flush()
                # A normal exit would wait for the model thread, which is still running.
                os._exit(130)
    archive.check_saved()
    return ChatEnd(watch.signalled, resume_value(chat.current_chat, store))


def _loaded(thread: ModelThread) -> Runtime:
    """Load the model. Ctrl-C and other signals cancel loading."""
    signal.signal(signal.SIGINT, lambda _number, _frame: thread.cancel_load())
    return thread.start().result()


def _interrupt_main() -> None:
    """Raise KeyboardInterrupt in the main thread, even while it waits for a line of input."""
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
