"""The `/race` command, which compares the chat's drafting method with plain decoding on the same message."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.bench.race import DEFAULT_RACE_TOKENS, Race, run_race
from edgespec.chat.message import Message
from edgespec.errors import OptionError

if TYPE_CHECKING:
    from edgespec.api.sharing.base import ChatModel, ChatReply
    from edgespec.tui.open_chat import OpenChat
    from edgespec.tui.worker import ModelThread

__all__ = ["RaceProgress", "StartedRace", "race_method", "start_race"]


@dataclass(slots=True)
class RaceProgress:
    """Progress of a race, written by the model thread and read by the UI."""

    description: str = "waiting for the model"
    fraction: float = 0.0

    def report(self, description: str, fraction: float) -> None:
        self.description, self.fraction = description, fraction


class StartedRace(NamedTuple):
    """A race that is running in the model thread."""

    prompt: str
    race: Future[Race]
    progress: RaceProgress


def race_method(runtime: ChatModel, chat: OpenChat) -> str:
    """Return the method to race against plain decoding: the chat's method, or `auto` if it is `none`."""
    method = str(chat.settings.get("method") or runtime.method.requested)
    return "auto" if method == "none" else method


def start_race(thread: ModelThread, chat: OpenChat, method: str, argument: str) -> StartedRace:
    """Start a race in the model thread. It uses the chat's messages and settings without changing the chat.

    Args:
        thread: The model thread.
        chat: The open chat.
        method: The method to race against plain decoding.
        argument: The message to reply to. Defaults to the chat's last user message if empty.

    Raises:
        OptionError: There is no message.
    """
    messages = chat.messages
    if argument:
        messages = (*messages, Message("user", argument))
    while messages and messages[-1].role != "user":
        messages = messages[:-1]
    if not messages:
        raise OptionError(
            "There is no message to race with yet",
            "Type /race followed by a message",
            code="command_unavailable",
        )
    options = {name: value for name, value in chat.settings.items() if name != "method"}
    # Limit the reply length, because long races are slow to run and to draw.
    options["max_tokens"] = min(int(str(options.get("max_tokens", DEFAULT_RACE_TOKENS))), DEFAULT_RACE_TOKENS)
    progress = RaceProgress()
    race = thread.submit(_work(chat.system, messages, method, options, progress), progress.report)
    return StartedRace(messages[-1].content, race, progress)


def _work(
    system: str | None,
    messages: tuple[Message, ...],
    method: str,
    options: dict[str, Any],
    progress: RaceProgress,
) -> Callable[[ChatModel, Callable[[], bool]], Race]:
    """Return the function that runs `/race` in the model thread."""

    def work(runtime: ChatModel, is_cancelled: Callable[[], bool]) -> Race:
        def start(**each: Any) -> ChatReply:
            return runtime.chat(system, messages).continue_reply(**each)

        def report(description: str, fraction: float) -> bool:
            progress.report(description, fraction)
            return not is_cancelled()

        return run_race(start, options, method=method, progress=report)

    return work
