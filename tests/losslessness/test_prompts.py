"""Reading files of prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec import Message
from edgespec.errors import OptionError
from edgespec.losslessness import cases
from edgespec.losslessness.cases import Prompt, read_prompts
from edgespec.store.catalogue import models_folder
from tests.raising import raises


class TestPrompts:
    def test_built_in_prompts(self) -> None:
        prompts = read_prompts()
        assert len(prompts) > 20
        assert len({prompt.name for prompt in prompts}) == len(prompts)
        assert all(prompt.messages[-1].role == "user" for prompt in prompts)

    def test_prompt_and_messages_lines(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text(
            '{"prompt": "Hello"}\n\n{"id": "b", "messages": [{"role": "user", "content": "Grüß dich 🙂"}]}\n',
            encoding="utf-8",
        )
        assert read_prompts(file) == [
            Prompt("line 1", (Message("user", "Hello"),)),
            Prompt("b", (Message("user", "Grüß dich 🙂"),)),
        ]

    def test_a_schema_keeps_the_order_of_its_properties(self) -> None:
        prompts = read_prompts(models_folder() / "schema_prompts.jsonl")
        assert len(prompts) == 10
        for prompt in prompts:
            assert prompt.schema is not None
            schema = json.loads(prompt.schema)
            assert list(schema["properties"]) == schema["required"]

    @pytest.mark.parametrize(
        "line",
        [
            "Hello",
            "[]",
            "[" * 100_000,
            "5",
            '{"text": "Hello"}',
            '{"prompt": ""}',
            '{"prompt": 5}',
            '{"messages": []}',
            '{"messages": [{"role": "assistant", "content": "Hi"}]}',
            '{"messages": [{"role": "robot", "content": "Hi"}]}',
            '{"messages": [{"content": "Hi"}]}',
            '{"messages": "Hi"}',
            '{"prompt": "Hi", "schema": "person.json"}',
        ],
    )
    def test_the_error_names_an_invalid_line(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "Hello"}\n' + line, encoding="utf-8")
        with raises(OptionError, "prompts.jsonl"):
            read_prompts(file)

    def test_a_file_that_never_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cases, "_MAX_BYTES", 1 << 20)
        with raises(OptionError, "/dev/zero", "1.0 MiB", code="input_too_large"):
            read_prompts("/dev/zero")

    def test_files_without_prompts(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").touch()
        (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
        unreadable = "file_not_read"
        for name, code in (("empty.jsonl", ""), ("binary.jsonl", unreadable), ("gone.jsonl", unreadable)):
            with raises(OptionError, name, code=code):
                read_prompts(tmp_path / name)
