"""One message of a conversation, shared by the conversation, the store and the screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Message", "Role"]

Role = Literal["user", "assistant", "system"]


@dataclass(frozen=True, slots=True)
class Message:
    """Who said it, and what was said."""

    role: Role
    content: str
