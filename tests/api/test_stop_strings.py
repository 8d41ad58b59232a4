"""Stop strings and continued replies give the same tokens with every method."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import edgespec
from edgespec import Runtime
from tests.api.questions import HOWTO
from tests.cases import first
from tests.forced import Begin

MESSAGES: Any = [{"role": "user", "content": HOWTO}]
OPTIONS: dict[str, Any] = {"seed": 3, "max_tokens": 60, "temperature": 0.7}
THOUGHT = "<think>\nThe user wants `ls`.\n</think>\n\n"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "parameters": {"type": "object", "properties": {"path": {"type": "string", "maxLength": 9}}},
        },
    }
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with edgespec.load("demo", methods=("model", "ngram", "suffix")) as runtime:
        yield runtime


def processors(runtime: Runtime, text: str) -> list[Begin]:
    return [Begin(runtime.vocabulary.tokenize(text, special=False, start=False))]


@pytest.mark.parametrize("method", first(["model", "model+ngram", "ngram", "suffix"], 2))
class TestEveryMethod:
    @pytest.mark.long
    def test_the_answer_ends_and_the_reasoning_does_not(self, demo: Runtime, method: str) -> None:
        plain, drafted = (
            demo.reply(
                MESSAGES, stop=["user", "`"], method=each, processors=processors(demo, THOUGHT), **OPTIONS
            )
            for each in ("none", method)
        )
        assert drafted.tokens == plain.tokens
        assert (drafted.text, drafted.stop_string) == (plain.text, plain.stop_string)
        assert plain.reasoning == "The user wants `ls`."
        assert plain.stop_string
        assert plain.stop_string not in plain.answer

    @pytest.mark.long
    def test_a_constraint_outlasts_the_stop_string(self, demo: Runtime, method: str) -> None:
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}
        schema |= {"required": ["name"], "additionalProperties": False}  # type: ignore[dict-item]
        constraints: list[dict[str, Any]] = [
            {"schema": schema}, {"regex": "yes, it is|no, not so"}, {"choice": ["abc abc", "ab"]},
        ]  # fmt: skip
        for constraint in constraints:
            unstopped = demo.reply(MESSAGES, method="none", **OPTIONS, **constraint)
            for each in ("none", method):
                reply = demo.reply(MESSAGES, stop=["e", " ", '"', "a"], method=each, **OPTIONS, **constraint)
                assert (reply.tokens, reply.stop_string) == (unstopped.tokens, "")

    def test_a_stop_string_ends_an_answer_that_is_complete(self, demo: Runtime, method: str) -> None:
        replies = [
            demo.reply(MESSAGES, stop=["e"], method=each, regex="[a-z]+", **OPTIONS)
            for each in ("none", method)
        ]
        assert replies[0].tokens == replies[1].tokens
        assert replies[0].stop_string == replies[1].stop_string == "e"

    @pytest.mark.long
    def test_a_tool_call_is_not_cut(self, demo: Runtime, method: str) -> None:
        for each in ("none", method):
            reply = demo.reply(
                MESSAGES, tools=TOOLS, tool_choice="required", stop=['"', "e"], method=each, **OPTIONS
            )
            assert reply.tool_calls[0].name == "list_files"
            assert (reply.finish_reason, reply.stop_string) == ("stop", "")

    @pytest.mark.long
    def test_a_required_call_follows_the_text_before_it(self, demo: Runtime, method: str) -> None:
        whole = demo.reply(MESSAGES, tools=TOOLS, tool_choice="required", method="none", **OPTIONS).text
        for start in ("I look. ", "<think>\nHm\n</think>\n\nI look.", whole[:20]):
            replies = [
                demo.stream_messages(
                    MESSAGES, tools=TOOLS, tool_choice="required", reply_start=start, method=each, **OPTIONS
                ).wait()
                for each in ("none", method)
            ]
            assert replies[0].tokens == replies[1].tokens
            assert "list_files" in start + replies[0].text
            assert replies[0].finish_reason == "stop"

    @pytest.mark.long
    def test_a_continued_reply(self, demo: Runtime, method: str) -> None:
        def continued(start: str, each: str) -> tuple[int, ...]:
            demo.clear_cache()
            stream = demo.stream_messages(MESSAGES, reply_start=start, method=each, **OPTIONS)
            return stream.wait().tokens

        for start in ("Use `ls", "<think>\nHm", "<think>\nHm\n</think>\n\nUse", "🙂\ufffd"):
            assert continued(start, method) == continued(start, "none")


@pytest.mark.long
@pytest.mark.parametrize("text", ["🙂🙂 ok", "日本語 ok", "é ok"])
def test_a_reply_cut_at_any_byte_is_continued(demo: Runtime, text: str) -> None:
    encoded = text.encode()
    for cut in range(1, len(encoded)):
        start = encoded[:cut].decode("utf-8", "replace")
        for method in ("none", "model"):
            stream = demo.stream_messages(
                MESSAGES, reply_start=start, choice=[text], method=method, **OPTIONS
            )
            assert start.rstrip("\ufffd") + stream.wait().text == text


def test_raw_text_ends_at_any_stop_string(demo: Runtime) -> None:
    reply = demo.generate(HOWTO, raw=True, stop=["user"], processors=processors(demo, THOUGHT), **OPTIONS)
    assert reply.text == "<think>\nThe "
