"""Send the messages of the open chat to the model thread, then show and save the replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any

from textual.message import Message as Event
from textual.timer import Timer

from edgespec.errors import ChatFileError, EdgespecError, OptionError
from edgespec.tui.archive import REFUSALS
from edgespec.tui.background import in_thread
from edgespec.tui.chat_view import ChatView
from edgespec.tui.open_chat import OpenChat, RunningTurn, version_label
from edgespec.tui.repetition import REPETITION_NOTE
from edgespec.tui.settings import remove_unsupported_method
from edgespec.tui.texts import notices, sentences, takeover_note, was_cpu_busy
from edgespec.tui.tool_use import ToolUse
from edgespec.tui.widgets.details import SpeedHistory
from edgespec.tui.widgets.messages import ReplyMessage, UserMessage
from edgespec.tui.worker import Ask, ChatState

if TYPE_CHECKING:
    from edgespec import Reply
    from edgespec.api.sharing.base import ChatModel

_TICK_SECONDS = 1 / 25
# Number of screen updates per update of the details panel. Updating it less often keeps its numbers readable.
_TICKS_PER_DETAILS = 5
# Maximum fraction of one CPU core's time to spend on drawing.
_MAX_DRAWING_SHARE = 0.25
_MAX_PAUSE_SECONDS = 0.2


class TurnScreen(ChatView):
    """The chat screen without key bindings and commands. It generates, shows and saves replies."""

    tool_use: ToolUse
    # Whether messages must wait even if no reply is being generated, because another model is loaded or the
    # program is ending.
    holds_waiting = False
    _job: Future[ChatState] | None = None
    _reply: ReplyMessage | None = None
    _unsent = ""
    _stopped = False
    # Whether the program is ending.
    is_leaving = False
    _said_while_writing = False
    _failure_shown = False
    _ticks = 0
    _is_cpu_busy = False
    _drawn_at = _spent_at = 0.0

    class Free(Event):
        """Posted when a reply has ended and the next message can be sent."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Actions that wait for the end of the running reply, in order.
        self.after_reply: list[Callable[[], Awaitable[None]]] = []
        # Messages that are sent once their files have been read.
        self.texts_being_read: list[str] = []
        # The timers after which deleted chats are permanently removed, keyed by chat ID.
        self.deletion_timers: dict[str, Timer] = {}
        self.tool_use = ToolUse(self, save=self.save, after_calls=self._after_calls)

    def on_mount(self) -> None:
        self._tick_timer = self.set_interval(_TICK_SECONDS, self._tick, pause=True)
        self._start(self.model_thread.open_chat(self.current_chat.system, ()))

    async def show_chat(self, chat: OpenChat) -> None:
        """Show `chat` instead of the current chat."""
        if self.editing is not None:
            self.history.add(self.prompt.whole_text)
            self.leave_edit()
        self.current_chat = chat
        self.history.seed(entry.content for entry in chat.entries if entry.role == "user")
        await self._show_current_chat()
        if self.waiting.texts:
            # The waiting messages were written for the previous chat, so put them back into the input.
            self.prompt.replace_text("\n\n".join(filter(None, (self.waiting.take_all(), self.prompt.text))))

    async def use_runtime(
        self, runtime: ChatModel, *, is_saved: bool = True, methods_error: EdgespecError | None = None
    ) -> None:
        """Continue the current chat with another model. Remove settings that the model does not support.

        Args:
            runtime: The loaded models.
            is_saved: Whether to save that the chat uses them. If not, a saved chat keeps its own models,
                which could not be loaded now, until the next reply.
            methods_error: See `remove_unsupported_method`.
        """
        self.runtime = runtime
        if runtime.target.path not in self.model_paths:
            self.model_paths.append(runtime.target.path)
        # Finding the models on this machine reads other programs' folders, which can be slow.
        self._notices = await in_thread(partial(notices, runtime))
        self.chips.use_runtime(runtime)
        # New chats begin with `first_settings`.
        all_settings = self.first_settings, self.current_chat.settings
        why_removed = remove_unsupported_method(runtime, *all_settings, methods_error=methods_error)
        await self._show_current_chat()
        if why_removed:
            await self.transcript.note(sentences(*why_removed))
        if is_saved:
            await self.save()

    def load_model(
        self,
        reference: str,
        changed: Mapping[str, Any] | None = None,
        *,
        is_other: bool = False,
        note: str = "",
    ) -> None:
        """Ask the app to load a model on this machine. Messages wait until it is loaded.

        See `ModelChosen` for the arguments.
        """
        if self.is_leaving:
            return
        self.holds_waiting = True
        self.post_message(self.ModelChosen(reference, changed, is_other or changed is None, note))

    async def _show_current_chat(self) -> None:
        chat = self.current_chat
        self.speeds = SpeedHistory()
        self._last_stats = None
        self._failure_shown = False
        await self.transcript.show_chat(chat, welcome=self._welcome())
        self.mark_explained()
        await self.refresh_sidebar()
        self.refresh_facts()
        self.prompt.focus()
        self.call_after_refresh(self.open_in_model, chat)

    def open_in_model(self, chat: OpenChat) -> None:
        """Count the chat's tokens in the model thread. This is slow, so call it after the chat is drawn."""
        if chat is self.current_chat and not self.writing:
            self._start(self.model_thread.open_chat(chat.system, chat.messages))

    async def save(self, *, show_again: bool = False) -> bool:
        """Save the chat and refresh the list of chats. On failure, show the error and return False.

        Args:
            show_again: Whether to show an error that the user has seen already.
        """
        if show_again:
            self._failure_shown = False
        with suppress(ChatFileError):
            await asyncio.to_thread(self.archive.save, self.current_chat, self.runtime.target.name)
        if not await self._report_save():
            return False
        await self.refresh_sidebar()
        return True

    def save_turn(self) -> None:
        """Save the reply in progress, if any. Can be called from any thread, even after the app has ended."""
        chat = self.current_chat
        if chat.turn is not None:
            with suppress(ChatFileError):
                self.archive.save(chat, self.runtime.target.name, chat.turn)

    async def _report_save(self) -> bool:
        """If the chat could not be saved, show the error once. Return whether saving succeeded."""
        if self.archive.branched:
            self.archive.branched = False
            await self.transcript.note(
                "Another program changed this chat. Your version was saved as a new chat."
            )
        error = self.archive.unsaved.get(self.current_chat.id)
        if error is not None and not self._failure_shown:
            advice = sentences(
                error.next_step, "To save a copy elsewhere, type /export and a path that ends in .json"
            )
            await self.show_error(ChatFileError(error.what, advice, code=error.code))
        self._failure_shown = error is not None
        return error is None

    @property
    def idle(self) -> bool:
        return self._job is None and not self.calling_tools

    def begin_leaving(self) -> None:
        """Prepare to quit: save stopped replies as unfinished. Can be called from any thread."""
        self.is_leaving = self.holds_waiting = True

    def say_while_writing(self, text: str) -> None:
        """Show a short message that disappears when the reply ends, or after a few seconds."""
        self.say(text)
        self._said_while_writing = True

    def stop_reply(self) -> None:
        self._stopped = True
        self.model_thread.cancel()
        self.tool_use.stop()

    async def when_free(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run `action` now, or once the running reply has been stopped."""
        if self.writing:
            self.after_reply.append(action)
            self.stop_reply()
        else:
            await action()

    async def _act_after_reply(self) -> None:
        """Run the waiting actions after a reply. If one starts a reply and others remain, stop it too."""
        while self.after_reply and not self.writing:
            await self.after_reply.pop(0)()
        if self.after_reply:
            self.stop_reply()

    async def finish(self, timeout_seconds: float) -> None:
        """Stop the reply and wait until the chat is saved or the timeout expires. Called before quitting."""
        self.begin_leaving()
        if self.writing or self.archive.unsaved:
            # Save the text generated so far, in case stopping the reply takes too long.
            with suppress(ChatFileError):
                await asyncio.to_thread(self.archive.save, self.current_chat, self.runtime.target.name)
        self.stop_reply()
        deadline = monotonic() + timeout_seconds
        while not self.idle and monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def take_turn(self, turn: RunningTurn) -> None:
        """Save and show the user's message, and start the reply.

        If another model is about to be loaded, or the program is ending, put the message back into the input
        instead. If the user has typed something there meanwhile, the message waits.
        """
        transcript, chat = self.transcript, self.current_chat
        is_refused = self.holds_waiting
        if not is_refused:
            try:
                self.archive.check_size(chat, turn)
            except OptionError as error:
                await transcript.note(sentences(error.what, error.next_step))
                is_refused = True
        if is_refused:
            # No chat contains this message yet.
            if not self._give_back_text(turn) and turn.sent and turn.edited is None:
                self.waiting.add(turn.sent)
            return
        chat.turn, chat.models = turn, self.models
        self._stopped = self._failure_shown = False
        self.speeds = SpeedHistory()
        if turn.sent:
            with suppress(ChatFileError):
                await asyncio.to_thread(self.archive.save, chat, self.runtime.target.name)
        await transcript.remove_notes()
        await transcript.keep(len(turn.prompt) - bool(turn.sent))
        if turn.sent:
            label = version_label(turn.tree, turn.tree.path[-1])
            await transcript.add(UserMessage(turn.sent, turn.prompt[-1].files, label))
        self._reply = await transcript.start_reply(resume=turn.continued is not None)
        await self._report_save()
        options = {**chat.settings, **self.tool_use.options}
        self._start(self.model_thread.ask(Ask(chat.system, turn.prompt, options, turn.written)))
        if self._stopped:
            self.model_thread.cancel()
        if self.tool_use.is_starting:
            self.say("Some tools are still starting. The model cannot call them in this reply.")
        self.archive.save_while_written(chat, self.runtime.target.name)
        self.refresh_facts()

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
            is_failed = await self._end_job(job, reply)
            await self._act_after_reply()
            if self._job is job:
                self._job = None
            # After an error, hold waiting messages until the user presses Enter, because sending the next one
            # would replace the error on the screen.
            if not (self.writing or is_failed):
                self.post_message(self.Free())
        self._ticks += 1
        self.refresh_facts(details=ended or self._ticks % _TICKS_PER_DETAILS == 0)
        if self.idle:
            self._tick_timer.pause()

    async def _write_chunks(self, reply: ReplyMessage) -> None:
        queue = self.model_thread.chunks
        if chunks := [queue.get_nowait() for _ in range(queue.qsize())]:
            self.speeds.add(sum(chunk.token_count for chunk in chunks))
            await reply.write(chunks)
        else:
            reply.show_preparing(*self.model_thread.preparing)

    async def _end_job(self, job: Future[ChatState], reply: ReplyMessage | None) -> bool:
        """Show the result of a job in the model thread. Return whether it failed."""
        failure = None
        if self._said_while_writing:
            self._said_while_writing = False
            self.app.clear_notifications()
        try:
            self._state = job.result()
        except Exception as error:
            failure = error
        await self.use_reloaded_model()
        if reply is not None and (turn := self.current_chat.turn) is not None:
            await self._end_turn(None if failure else self._state, turn, reply, failure)
        self.transcript.set_dropped(self._state.dropped_messages)
        if failure is not None:
            await self.show_error(failure)
        return failure is not None

    async def use_reloaded_model(self) -> None:
        """Use the reloaded model if a worker or the program that shared the model was lost."""
        if (runtime := self.model_thread.runtime) is not None and runtime is not self.runtime:
            note, self.runtime = takeover_note(self.runtime), runtime
            self.chips.use_runtime(runtime)
            if note:
                await self.transcript.note(note)

    async def _end_turn(
        self, state: ChatState | None, turn: RunningTurn, reply: ReplyMessage, failure: Exception | None
    ) -> None:
        chat, transcript = self.current_chat, self.transcript
        ended = state.reply if state is not None else None
        message = state.message if state is not None else None
        entry = chat.finish_turn(ended, message, leaving=self.is_leaving)
        if entry is None:
            # No new text was generated, so show the previous conversation again.
            if not self.is_leaving:  # Otherwise, the message stays in the saved chat.
                self._give_back_text(turn)
            await transcript.show_chat(chat, welcome=self._welcome())
            if (turn.edited is not None or not turn.sent) and not self.is_leaving:
                await self.save()
            elif isinstance(failure, REFUSALS):
                with suppress(ChatFileError):
                    await asyncio.to_thread(self.archive.withdraw, chat, self.runtime.target.name)
                await self.refresh_sidebar()
            return
        if ended is not None:
            self._last_stats = ended.stats
        transcript.follow()
        await reply.finish(entry, version_label(chat.tree, chat.tree.path[-1]))
        entry.chunks = tuple(reply.chunks)
        entry.thought_seconds = reply.thoughts.seconds
        if ended is not None:
            await transcript.prune()
            await self._report_ending(ended, turn, is_repetitive=state is not None and state.is_repetitive)
        await self.save()
        is_free = not (self.after_reply or self.is_leaving or self.holds_waiting)
        if ended is not None and entry.message.tool_calls and is_free:
            self.tool_use.begin(entry.message.tool_calls)

    async def _report_ending(self, ended: Reply, turn: RunningTurn, *, is_repetitive: bool) -> None:
        """Tell the user if a reply was already complete, was slowed down, or can be continued."""
        if is_repetitive:
            await self.transcript.note(REPETITION_NOTE)
        elif ended.finish_reason == "cancelled":
            if not self.is_leaving and not self.after_reply:
                self.say("Stopped. Type /continue to finish the reply.")
        elif turn.continued is not None and not ended.text:
            self.say("The reply was already complete.")
        if ended.text and was_cpu_busy(ended.stats) and not self._is_cpu_busy:
            await self.transcript.note(
                "This reply was slower than usual, because other programs were using the processor."
            )
        self._is_cpu_busy = was_cpu_busy(ended.stats)

    async def _after_calls(self, is_stopped: bool) -> None:
        """Let the model continue after its tool calls, unless the user stopped them."""
        if self.after_reply:
            await self._act_after_reply()
        elif not (is_stopped or self.is_leaving or self.holds_waiting):
            place = self.current_chat.last_place("tool")
            assert place is not None
            await self.take_turn(self.current_chat.continue_reply(place))
        else:
            self.post_message(self.Free())
        self.refresh_facts()

    def _give_back_text(self, turn: RunningTurn) -> bool:
        """Put a message that got no reply back into the input, so that the user can resend it.

        Returns:
            Whether the message is in the input. If not, there was none, or the user has typed something else.
        """
        is_back = bool(turn.sent) and self.give_back_message(turn.sent, turn.edited)
        if is_back:
            self._unsent = ""
        return is_back

    def give_back(self, text: str, editing: int | None = None) -> bool:
        """Put rejected text back into the input box, unless the user has typed something meanwhile.

        Args:
            text: The text.
            editing: Index of the message that the user was editing, or None if the text is a new message.
        """
        if self.prompt.text:
            return False
        self.editing = editing
        self.prompt.replace_text(text)
        return True

    def give_back_message(self, text: str, editing: int | None = None) -> bool:
        """Put an unsent message back into the input, along with the messages that waited for its reply.

        See `give_back` for the arguments and the result.
        """
        is_back = self.give_back(text, editing)
        if is_back and editing is None and self.waiting.texts:
            self.prompt.replace_text(f"{text}\n\n{self.waiting.take_all()}")
        return is_back

    @property
    def unsent_texts(self) -> list[str]:
        """The messages that wait, the text in the input, and the drafts that it has replaced there."""
        drafts, text = [self.history.draft], self.prompt.whole_text
        if text == self.history.shown:
            text = ""  # The user has not changed the earlier message.
        if self.editing is not None:
            drafts.append(self._unsent)
            if text == self.current_chat.tree.messages[self.editing].content:
                text = ""  # The user has not changed the message.
        return [*self.texts_being_read, *self.waiting.texts, *drafts, text]

    def leave_edit(self) -> None:
        """Stop editing a message and restore the previous input text."""
        if self.editing is not None:
            self.editing = None
            self.prompt.replace_text(self._unsent)
            self.refresh_facts()

    def begin_edit(self, place: int) -> None:
        """Copy a message into the input for editing."""
        if self.editing is None:
            self._unsent = self.prompt.whole_text
        self.editing = place
        self.prompt.replace_text(self.current_chat.tree.messages[place].content)
        self.prompt.focus()
        self.refresh_facts()
