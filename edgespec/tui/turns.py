"""Send the messages of the open chat to the model thread, then show and save the replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic, thread_time
from typing import TYPE_CHECKING

from edgespec.errors import ChatFileError, OptionError
from edgespec.tui.open_chat import OpenChat, RunningTurn, version_label
from edgespec.tui.speed_history import SpeedHistory
from edgespec.tui.texts import sentences, was_cpu_busy
from edgespec.tui.widgets.messages import ReplyMessage, UserMessage
from edgespec.tui.worker import Ask, ChatState

if TYPE_CHECKING:
    from edgespec import Reply, Runtime
    from edgespec.tui.chat_view import ChatView

__all__ = ["Turns"]

_TICK_SECONDS = 1 / 25
# Update the details panel only after this many screen updates, so that its numbers are readable.
_TICKS_PER_DETAILS = 5
# Maximum fraction of CPU time for drawing.
_MAX_DRAWING_SHARE = 0.25
_MAX_PAUSE_SECONDS = 0.2


class Turns:
    """The turns of the open chat: sends messages to the model thread, and shows and saves the replies.

    Args:
        screen: The screen that shows the chat.
    """

    def __init__(self, screen: ChatView) -> None:
        self._screen = screen
        self._job: Future[ChatState] | None = None
        self._reply: ReplyMessage | None = None
        self._after_reply: Callable[[], Awaitable[None]] | None = None
        self._stopped = self._leaving = False
        self._said_while_writing = self._failure_shown = False
        self._ticks = 0
        self._is_cpu_busy = False
        self._drawn_at = self._spent_at = 0.0

    def start(self) -> None:
        """Open the current chat in the model thread. Called when the screen is mounted."""
        screen = self._screen
        self._tick_timer = screen.set_interval(_TICK_SECONDS, self._tick, pause=True)
        self._start(screen.model_thread.open_chat(screen.current_chat.system, ()))

    async def show_chat(self, chat: OpenChat) -> None:
        """Show `chat` instead of the current chat."""
        screen = self._screen
        screen.current_chat = chat
        screen.history.seed(entry.content for entry in chat.entries if entry.role == "user")
        await self._show_current_chat()

    async def use_runtime(self, runtime: Runtime) -> None:
        """Continue the current chat with another model. Remove settings that the model does not support."""
        screen = self._screen
        screen.runtime = runtime
        screen.chips.use_runtime(runtime)
        problem = ""
        try:
            if "method" in screen.current_chat.settings:
                runtime.method_for(str(screen.current_chat.settings["method"]))
        except OptionError as error:
            problem = sentences("The setting method was removed", error.what)
            del screen.current_chat.settings["method"]
        await self._show_current_chat()
        if problem:
            await screen.transcript.note(problem)
        await self.save()

    async def _show_current_chat(self) -> None:
        screen = self._screen
        chat = screen.current_chat
        screen.speeds = SpeedHistory()
        screen.last_stats = None
        self._failure_shown = False
        screen.leave_edit()
        await screen.transcript.show_chat(chat, welcome=screen.welcome())
        await screen.refresh_sidebar()
        screen.refresh_facts()
        screen.prompt.focus()
        screen.call_after_refresh(self.open_in_model, chat)

    def open_in_model(self, chat: OpenChat) -> None:
        """Count the chat's tokens in the model thread. Slow, so call this after the chat is drawn."""
        screen = self._screen
        if chat is screen.current_chat and not screen.writing:
            self._start(screen.model_thread.open_chat(chat.system, chat.messages))

    async def save(self, *, show_again: bool = False) -> bool:
        """Save the chat and refresh the list of chats. On failure, show the error and return False.

        Args:
            show_again: Whether to show an error that the user has seen already.
        """
        screen = self._screen
        if show_again:
            self._failure_shown = False
        with suppress(ChatFileError):
            await screen.archive.save(screen.current_chat, screen.runtime.target.name)
        if not await self._report_save():
            return False
        await screen.refresh_sidebar()
        return True

    def save_turn(self) -> None:
        """Save the reply in progress, if any. Works in any thread, even after the app has ended."""
        screen = self._screen
        chat = screen.current_chat
        if chat.turn is not None:
            with suppress(ChatFileError):
                screen.archive.save_now(chat, screen.runtime.target.name, chat.turn)

    async def _report_save(self) -> bool:
        """If the chat could not be saved, show the error once. Return whether saving succeeded."""
        screen = self._screen
        if screen.archive.branched:
            screen.archive.branched = False
            await screen.transcript.note(
                "Another program changed this chat. Your version was saved as a new chat."
            )
        error = screen.archive.unsaved.get(screen.current_chat.id)
        if error is not None and not self._failure_shown:
            advice = sentences(
                error.next_step, "To save a copy elsewhere, type /export and a path that ends in .json"
            )
            await screen.show_error(ChatFileError(error.what, advice))
        self._failure_shown = error is not None
        return error is None

    @property
    def idle(self) -> bool:
        return self._job is None and not self._screen.calling_tools

    def begin_leaving(self) -> None:
        """Prepare to quit: save stopped replies as unfinished. Can be called from any thread."""
        self._leaving = True

    def say_while_writing(self, text: str) -> None:
        """Show a short message that disappears when the reply ends, or after a few seconds."""
        self._screen.say(text)
        self._said_while_writing = True

    def stop_reply(self) -> None:
        screen = self._screen
        self._stopped = True
        screen.model_thread.cancel()
        screen.tool_use.stop()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` now, or once the running reply has been stopped."""
        if self._screen.writing:
            self._after_reply = action
            self.stop_reply()
        else:
            await action()

    async def finish(self, timeout_seconds: float) -> None:
        """Stop the reply and wait until the chat is saved or the timeout expires. Called before quitting."""
        screen = self._screen
        self.begin_leaving()
        self._after_reply = None
        if screen.writing or screen.archive.unsaved:
            # Save the text generated so far, because stopping the reply can take too long.
            with suppress(ChatFileError):
                await screen.archive.save(screen.current_chat, screen.runtime.target.name)
        self.stop_reply()
        deadline = monotonic() + timeout_seconds
        while not self.idle and monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def take_turn(self, turn: RunningTurn) -> None:
        """Save and show the user's message, and start the reply."""
        screen = self._screen
        transcript, chat = screen.transcript, screen.current_chat
        try:
            screen.archive.check_size(chat, turn)
        except OptionError as error:
            await transcript.note(sentences(error.what, error.next_step))
            screen.give_back_message(turn)
            return
        chat.begin_turn(turn)
        self._stopped = self._failure_shown = False
        screen.speeds = SpeedHistory()
        if turn.sent:
            with suppress(ChatFileError):
                await screen.archive.save(chat, screen.runtime.target.name)
        await transcript.remove_notes()
        await transcript.keep(len(turn.prompt) - bool(turn.sent))
        if turn.sent:
            label = version_label(turn.tree, turn.tree.path[-1])
            await transcript.add(UserMessage(turn.sent, turn.prompt[-1].files, label))
        self._reply = await transcript.start_reply(resume=turn.continued is not None)
        await self._report_save()
        options = {**chat.settings, **screen.tool_use.options}
        self._start(screen.model_thread.ask(Ask(chat.system, turn.prompt, options, turn.written)))
        if self._stopped:
            screen.model_thread.cancel()
        screen.archive.save_while_written(chat, screen.runtime.target.name)
        screen.refresh_facts()

    def _start(self, job: Future[ChatState]) -> None:
        self._job = job
        self._tick_timer.resume()

    async def _tick(self) -> None:
        # Draw less often if drawing is slow, to leave CPU time for the model.
        now, spent = monotonic(), thread_time()
        pause = min((spent - self._spent_at) / _MAX_DRAWING_SHARE, _MAX_PAUSE_SECONDS)
        if now - self._drawn_at < pause:
            return
        self._drawn_at, self._spent_at = now, spent
        job, reply = self._job, self._reply
        # Check for the end before reading the last chunks, so that none are missed.
        ended = job is not None and job.done()
        if reply is not None:
            await self._write_chunks(reply)
            await self._report_save()
        if ended and job is not None and job is self._job:
            self._reply = None
            await self._end_job(job, reply)
            if self._after_reply is not None:
                action, self._after_reply = self._after_reply, None
                await action()
            if self._job is job:
                self._job = None
        self._ticks += 1
        self._screen.refresh_facts(details=ended or self._ticks % _TICKS_PER_DETAILS == 0)
        if self.idle:
            self._tick_timer.pause()

    async def _write_chunks(self, reply: ReplyMessage) -> None:
        screen = self._screen
        queue = screen.model_thread.chunks
        if chunks := [queue.get_nowait() for _ in range(queue.qsize())]:
            screen.speeds.add(sum(chunk.token_count for chunk in chunks))
            await reply.write(chunks)
        else:
            reply.show_preparing(*screen.model_thread.preparing)

    async def _end_job(self, job: Future[ChatState], reply: ReplyMessage | None) -> None:
        screen = self._screen
        failure = None
        if self._said_while_writing:
            self._said_while_writing = False
            screen.app.clear_notifications()
        try:
            screen.chat_state = job.result()
        except Exception as error:
            failure = error
        if (runtime := screen.model_thread.runtime) is not None and runtime is not screen.runtime:
            # The model was loaded again after it lost a worker.
            screen.runtime = runtime
            screen.chips.use_runtime(runtime)
        if reply is not None and (turn := screen.current_chat.turn) is not None:
            await self._end_turn(None if failure else screen.chat_state, turn, reply)
        screen.transcript.set_dropped(screen.chat_state.dropped_messages)
        if failure is not None:
            await screen.show_error(failure)

    async def _end_turn(self, state: ChatState | None, turn: RunningTurn, reply: ReplyMessage) -> None:
        screen = self._screen
        chat, transcript = screen.current_chat, screen.transcript
        ended = state.reply if state is not None else None
        message = state.messages[-1] if state is not None else None
        entry = chat.finish_turn(ended, message, leaving=self._leaving)
        if entry is None:
            # No text was generated, so show the previous conversation again.
            await reply.finish(reply.text, reply.reasoning, None)
            screen.give_back_message(turn)
            await transcript.show_chat(chat, welcome=screen.welcome())
            if (turn.edited is not None or not turn.sent) and not self._leaving:
                await self.save()
            return
        if ended is not None:
            screen.last_stats = ended.stats
        transcript.follow()
        versions = version_label(chat.tree, chat.tree.path[-1])
        await reply.finish(entry.content, entry.reasoning, ended, versions)
        entry.chunks = tuple(reply.chunks)
        entry.thought_seconds = reply.thoughts.seconds
        if ended is not None:
            await transcript.prune()
            await self._report_ending(ended, turn)
        await self.save()
        if ended is not None and entry.message.tool_calls and self._after_reply is None and not self._leaving:
            screen.tool_use.begin(entry.message.tool_calls)

    async def _report_ending(self, ended: Reply, turn: RunningTurn) -> None:
        """Tell the user if a reply was already complete, was slowed down, or can be continued."""
        screen = self._screen
        if turn.continued is not None and not ended.text:
            screen.say("The reply was already complete.")
        elif was_cpu_busy(ended.stats) and not self._is_cpu_busy:
            await screen.transcript.note(
                "This reply was slower than usual, because other programs use the processor."
            )
        elif ended.finish_reason == "cancelled" and not self._leaving and self._after_reply is None:
            screen.say("Stopped. Type /continue to finish the reply.")
        self._is_cpu_busy = was_cpu_busy(ended.stats)

    async def after_calls(self, *, stopped: bool) -> None:
        """Let the model continue after its tool calls, unless the user stopped them."""
        screen = self._screen
        if self._after_reply is not None:
            action, self._after_reply = self._after_reply, None
            await action()
        elif not (stopped or self._leaving):
            place = screen.current_chat.last_place("tool")
            assert place is not None
            await self.take_turn(screen.current_chat.continue_reply(place))
        screen.refresh_facts()
