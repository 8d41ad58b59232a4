"""Fuzz saved chats, which are JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from edgespec.chat.store import ChatStore
from edgespec.tui.open_chat import OpenChat
from scripts.fuzzing.mutations import damage, damage_json, nasty_text, nested_json, several
from scripts.fuzzing.worker import Files

_CHAT = {
    "version": 1,
    "id": "chat",
    "title": "How do I list files?",
    "created": "2026-11-23T10:00:00+00:00",
    "updated": "2026-11-23T10:01:00.123456+00:00",
    "target": "demo",
    "system": "You are a helper.",
    "messages": [
        {"role": "user", "content": "How do I list files by size?"},
        {"role": "assistant", "content": "Use `ls -S`.", "reasoning": "The user wants a list."},
        {"role": "user", "content": "And by name?"},
        {"role": "assistant", "content": "Use `ls`."},
    ],
    "sampling": {"temperature": 0.7, "top_k": 40, "stop": ["a", "b"], "seed": 1, "stream": True},
}


def make(rng: Random) -> Files:
    """Return a damaged chat file, sometimes with a second one whose name is unusual."""
    messages = [{"role": rng.choice(("user", "assistant")), "content": nasty_text(rng)} for _ in range(3)]
    chat: dict[str, object] = {**_CHAT, "title": nasty_text(rng), "messages": messages}
    if rng.random() < 0.7:
        chat = several(rng, chat, damage_json)
    text = nested_json(rng, chat)
    if rng.random() < 0.2:
        text = several(rng, text, damage)
    files = {"chats/chat.json": text}
    if rng.random() < 0.1:
        name = "".join(letter for letter in nasty_text(rng) if letter.isprintable() and letter not in "/.")[
            :50
        ]
        files[f"chats/{name}x.json"] = text
    return files


def run(folder: Path) -> None:
    """List the chats, open one, and check that saving it again does not change it."""
    store = ChatStore(folder / "chats")
    store.list()
    chat = store.load("chat")
    OpenChat.opened(chat, {})
    store.save(chat)
    again = store.load("chat")
    assert _as_saved(chat.to_json()) == _as_saved(again.to_json()), "the saved chat differs"


def _as_saved(value: object) -> bytes:
    # UTF-8 cannot encode lone surrogates, so they are saved as question marks.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
