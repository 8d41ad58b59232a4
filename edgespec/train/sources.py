"""Read prompts for training from a file or from the user's saved chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.chat.message import Message
from edgespec.chat.saved_chat import read_chat
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError, OptionError
from edgespec.losslessness import read_prompts
from edgespec.methods.auto.text_kind import text_kind

__all__ = ["TrainingPrompt", "chat_prompts", "file_prompts", "own_prompt"]


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """Messages for the target to answer. The last message is from the user.

    Attributes:
        messages: The messages, oldest first.
        kind: Kind of text, such as `code`.
    """

    messages: tuple[Message, ...]
    kind: str


def file_prompts(path: Path) -> list[TrainingPrompt]:
    """Read prompts from a JSON Lines file in the format of `edgespec bench --prompts`.

    Raises:
        OptionError: The file cannot be read or is invalid.
    """
    return [TrainingPrompt(each.messages, each.category) for each in read_prompts(path)]


def chat_prompts(store: ChatStore | None = None) -> list[TrainingPrompt]:
    """Return one prompt for each of the user's messages in the saved chats, skipping damaged chats.

    Args:
        store: The saved chats. None for the default store.

    Raises:
        OptionError: There are no saved chats.
    """
    prompts = []
    for stored in (store or ChatStore()).list():
        try:
            chat = read_chat(stored.path, stored.id)
        except ChatFileError:
            continue
        system = [Message("system", chat.system)] if chat.system else []
        for end, message in enumerate(chat.messages, 1):
            if message.role == "user":
                prompts.append(own_prompt([*system, *chat.messages[:end]]))
    if not prompts:
        raise OptionError(
            "there are no saved chats to train with", "omit --chats", code="training_data_missing"
        )
    return prompts


def own_prompt(messages: Sequence[Message]) -> TrainingPrompt:
    """Create a prompt, detecting the kind of text from the last message."""
    return TrainingPrompt(tuple(messages), text_kind(messages[-1].content))
