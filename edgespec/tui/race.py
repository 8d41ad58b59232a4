"""The `/race` command: generate a reply with plain decoding and with `auto`, and show both side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgespec.bench.race import DEFAULT_RACE_TOKENS, Race, run_race
from edgespec.chat.message import Message
from edgespec.errors import OptionError
from edgespec.tui.screens.race import RaceProgress, RaceScreen

if TYPE_CHECKING:
    from edgespec import ReplyStream, Runtime
    from edgespec.tui.chat_screen import ChatScreen

__all__ = ["open_race"]


async def open_race(screen: ChatScreen, argument: str) -> None:
    """Race the reply to `argument`, or to the last message if it is empty.

    The race continues this chat with its settings, but adds nothing to it.

    Raises:
        OptionError: There is no message, or a reply is being generated.
    """
    chat = screen.current_chat
    if screen.writing:
        raise OptionError("The reply is not finished yet", "Press Esc to stop it, then type /race again")
    messages = chat.messages
    if argument:
        messages = (*messages, Message("user", argument))
    while messages and messages[-1].role != "user":
        messages = messages[:-1]
    if not messages:
        raise OptionError("There is no message to race yet", "Type /race followed by a message")
    options = {name: value for name, value in chat.settings.items() if name != "method"}
    # Bounds the time of the race and the cost of drawing it.
    options["max_tokens"] = min(int(str(options.get("max_tokens", DEFAULT_RACE_TOKENS))), DEFAULT_RACE_TOKENS)
    progress = RaceProgress()
    race = screen.model_thread.submit(_work(chat.system, messages, options, progress))
    await screen.app.push_screen(RaceScreen(messages[-1].content, race, progress, screen.model_thread.cancel))


def _work(
    system: str | None,
    messages: tuple[Message, ...],
    options: dict[str, Any],
    progress: RaceProgress,
) -> Callable[[Runtime, Callable[[], bool]], Race]:
    """Return the function that runs the race in the model thread."""

    def work(runtime: Runtime, is_cancelled: Callable[[], bool]) -> Race:
        def start(**each: Any) -> ReplyStream:
            return runtime.chat(system, messages).continue_reply(**each)

        def report(description: str, fraction: float) -> bool:
            progress.description, progress.fraction = description, fraction
            return not is_cancelled()

        return run_race(start, options, progress=report)

    return work
