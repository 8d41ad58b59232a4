"""Files attached to messages: their text in the prompt, and drafts taken from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec import AttachedFile, Message, Runtime
from edgespec.chat.message import as_attached_files, as_message
from edgespec.errors import ContextFullError, OptionError
from tests.cases import covering
from tests.forced import Begin
from tests.raising import raises

CODE = Path(__file__).read_text(encoding="utf-8")[:900]


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with edgespec.load("demo", threads=1) as runtime:
        yield runtime


def test_a_message_with_files_is_the_prompt_with_their_text(demo: Runtime) -> None:
    file = AttachedFile("a.py", "print(1)\n")
    with_file = [Message("user", "Explain.", files=(file,))]
    as_text = [Message("user", f"{file.block}\n\nExplain.")]
    assert demo.count_tokens(with_file) == demo.count_tokens(as_text)
    replies = [demo.reply(messages, max_tokens=8, seed=3) for messages in (with_file, as_text)]
    assert replies[0].tokens == replies[1].tokens


def test_messages_as_json_keep_their_files() -> None:
    file = AttachedFile("a.py", "print(1)\n", 5)
    item = json.loads(json.dumps({"role": "user", "content": "Explain.", "files": [file.to_json()]}))
    assert as_message(1, item) == Message("user", "Explain.", files=(file,))
    assert as_message(1, item | {"role": "assistant"}).files == ()


@pytest.mark.parametrize(
    "items", ["a.py", [1], [{"name": "a"}], [{"name": "a", "text": "", "token_count": "5"}]]
)
def test_damaged_files_of_a_message_are_reported(items: object) -> None:
    with raises(OptionError, "3 must", code="messages_invalid"):
        as_attached_files(3, items)


@pytest.mark.parametrize(("method", "temperature"), covering(["suffix", "auto"], [0.8, 0]))
def test_a_reply_that_copies_a_file_is_drafted_from_it(
    demo: Runtime, method: str, temperature: float
) -> None:
    message = Message("user", "Correct the file.", files=(AttachedFile("a.py", CODE),))
    copied = demo.vocabulary.tokenize(CODE, special=False, start=False)

    def reply(method: str) -> edgespec.Reply:
        return demo.reply(
            [message],
            method=method,
            temperature=temperature,
            seed=7,
            max_tokens=len(copied) + 16,
            processors=[Begin(copied)],
        )

    drafted, plain = reply(method), reply("none")
    assert drafted.tokens == plain.tokens
    if method == "suffix":
        # The first tokens are not drafted, because they do not yet identify the repeated part of the prompt.
        assert drafted.stats.accepted_tokens > 0.7 * len(copied)
        assert drafted.stats.target_passes < plain.stats.target_passes / 2


def test_files_that_do_not_fit_are_refused_with_both_sizes(demo: Runtime) -> None:
    file = AttachedFile("big.txt", "word " * 100_000)
    with raises(ContextFullError, "context holds"):
        demo.reply([Message("user", "Explain.", files=(file,))])


def test_neither_names_nor_texts_of_files_end_the_code_block() -> None:
    assert AttachedFile("a.`py", "x\r````\r").block == "a.`py:\n`````\nx\r````\r\n`````"
    assert AttachedFile("a.c++", "x").block == "a.c++:\n```c++\nx\n```"
