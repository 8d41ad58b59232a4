"""The history of sent prompts, stored in a file so that later chats can recall them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from edgespec.system.files import (
    data_folder,
    delete_files,
    read_regular_file,
    regular_file_bytes,
    write_private_file,
)

__all__ = ["PromptHistory", "delete_prompt_history"]

_FILE_NAME = "prompt-history.jsonl"
_MAX_PROMPTS = 500
# Maximum length of a saved prompt in characters. Longer prompts are mostly pasted text.
_MAX_CHARACTERS = 10_000
# Maximum size of the file in bytes. When a larger file is read, the oldest prompts are removed from it.
_MAX_BYTES = 1 << 20
_MAX_READ_BYTES = 64 << 20


class PromptHistory:
    """A private JSONL file of prompts. Errors are ignored, because the chat works without the file.

    Args:
        folder: The folder that contains the file. Except in tests, this is the user's data folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE_NAME

    def read(self) -> list[str]:
        """Return the saved prompts, oldest first, skipping damaged lines."""
        try:
            data = read_regular_file(self._path, _MAX_READ_BYTES)
        except OSError:
            return []
        prompts = []
        for line in data.splitlines():
            with suppress(ValueError, RecursionError):
                if isinstance(prompt := json.loads(line), str):
                    prompts.append(prompt)
        prompts = prompts[-_MAX_PROMPTS:]
        if len(data) > _MAX_BYTES:
            with suppress(OSError):
                write_private_file(self._path, *map(_line, prompts))
        return prompts

    def add(self, prompt: str) -> bool:
        """Append a prompt to the file. Return False if it is too long or cannot be written."""
        if len(prompt) > _MAX_CHARACTERS:
            return False
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._path.exists():
                regular_file_bytes(self._path)  # Opening a pipe would wait for a program that reads it.
            # Append the line in a single write, so that it does not interleave with other processes' lines.
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, _line(prompt))
            finally:
                os.close(handle)
            return True
        return False


def _line(prompt: str) -> bytes:
    return json.dumps(prompt).encode() + b"\n"


def delete_prompt_history() -> int:
    """Delete the history file and return the number of bytes freed. Raises OSError if that fails."""
    return delete_files([data_folder() / _FILE_NAME])
