"""The program under test. It chats as requested by its parent process, and saves each message."""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import edgespec
from edgespec.chat.saved_chat import MessageTree, SavedChat
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError
from edgespec.memory.budget import available_bytes

# Number of messages after which a new chat starts.
_MESSAGES_PER_CHAT = 12
# The small prefix cache fills during the warm-up, so that memory use should not grow afterwards.
_LOAD_OPTIONS: dict[str, Any] = {
    "context": 1024,
    "threads": 1,
    "prefix_cache_memory": "16MB",
    "prefix_cache_disk": "16MB",
}


class Program:
    """A loaded model, the open chat, and the store of saved chats."""

    def __init__(self) -> None:
        self._store = ChatStore()
        self._runtime = edgespec.load("demo", "demo-draft", **_LOAD_OPTIONS)
        self._chat = self._runtime.chat()
        self._saved = self._new_file()

    def ask(self, question: str, seed: int, cancel_after: int | None = None) -> dict[str, Any]:
        """Ask a question and save the chat. Return the reply, and whether the chat could be saved."""
        if len(self._chat.messages) >= _MESSAGES_PER_CHAT and self._save():
            self._chat, self._saved = self._runtime.chat(), self._new_file()
        stream = self._chat.stream(question, seed=seed, max_tokens=64, temperature=0.7)
        for number, _ in enumerate(stream):
            if number == cancel_after:
                stream.cancel()
        return {"reply": stream.reply.text, "saved": self._save()}

    def reload(self) -> dict[str, Any]:
        """Close the model, load it again, and continue the chat."""
        messages = self._chat.messages
        self._runtime.close()
        self._runtime = edgespec.load("demo", "demo-draft", **_LOAD_OPTIONS)
        self._chat = self._runtime.chat(None, messages)
        return {}

    def disk(self, *, full: bool) -> dict[str, Any]:
        """Make all file writes fail, or let them succeed again and save the chat."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0 if full else hard, hard))
        return {} if full else {"saved": self._save()}

    def memory(self, *, low: bool) -> dict[str, Any]:
        """Simulate that other programs have used up all memory, or have freed it again."""
        pressure = self._runtime._session.memory_pressure
        pressure.available = (lambda: 0) if low else available_bytes
        return {}

    def _new_file(self) -> SavedChat:
        now = datetime.now(UTC)
        return SavedChat(self._store.new_id(), MessageTree(), created=now, updated=now, target="demo")

    def _save(self) -> bool:
        tree = MessageTree.linear(self._chat.messages)
        self._saved = replace(self._saved, tree=tree, updated=datetime.now(UTC))
        try:
            self._store.save(self._saved)
        except ChatFileError:
            return False
        return True


def main() -> None:
    """Read requests from stdin and write answers to stdout, each as a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = Program()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(program, request.pop("do"))(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
