"""Text files and streams that begin with a byte order mark, as editors on Windows write them."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.generate import read_stdin
from edgespec.losslessness.cases import read_prompts
from edgespec.options.option import JsonSchema, TextFile
from edgespec.options.settings_file import read_text
from edgespec.store import catalogue
from edgespec.tui.settings import read_schema

SCHEMA = '{"type": "object"}'
PROMPTS = '{"prompt": "one\\u2028two"}\n{"prompt": "three"}\n'


def aliases(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(catalogue, "user_aliases_path", lambda: path)
    return catalogue.user_aliases()


READERS: dict[str, tuple[str, Callable[[Path, pytest.MonkeyPatch], Any], Any]] = {
    "schema": (SCHEMA, lambda path, _: JsonSchema().parse(str(path)), SCHEMA),
    "schema in the chat": (
        SCHEMA,
        lambda path, _: json.loads(str(read_schema(str(path)))),
        json.loads(SCHEMA),
    ),
    "grammar": ('root ::= "a"', lambda path, _: TextFile().parse(str(path)), 'root ::= "a"'),
    "prompts": (
        PROMPTS,
        lambda path, _: [prompt.messages[0].content for prompt in read_prompts(path)],
        ["one\u2028two", "three"],
    ),
    "aliases": ('[aliases]\nbig = "demo"\n', aliases, {"big": "demo"}),
    "settings": ("threads = 1", lambda path, _: read_text(path), "threads = 1"),
}


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "marked"])
@pytest.mark.parametrize("name", READERS)
def test_a_mark_at_the_start_of_a_file_is_skipped(
    name: str, mark: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, read, expected = READERS[name]
    path = tmp_path / "file.txt"
    path.write_bytes(mark + text.encode())
    assert read(path, monkeypatch) == expected


def test_a_mark_on_stdin_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(codecs.BOM_UTF8 + b"Hi\n")))
    assert read_stdin() == "Hi"
