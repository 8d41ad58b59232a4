"""Reasoning: markers are found at the start of a reply only, however its text is split."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat.message import reply_message
from edgespec.chat.reasoning import (
    ReasoningSplitter,
    opening_marker,
    piece_with_markers,
    split_reasoning,
)
from edgespec.model.base import Vocabulary

HARMONY = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes."


def streamed(pieces: Sequence[str], reply_start: str = "") -> tuple[str, str]:
    """Feed a reply piece by piece and return its reasoning and its answer."""
    splitter = ReasoningSplitter(reply_start)
    parts = [splitter.feed(piece) for piece in pieces]
    parts.append(splitter.finish())
    assert splitter.finish()[:2] == ("", "")
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


class TestMarkers:
    @pytest.mark.parametrize(
        "reply",
        [
            "<think>\nHm.\n</think>\n\nYes.",
            "\n <think>Hm.</think>Yes.",
            "[THINK]Hm.[/THINK]Yes.",
            "<seed:think>Hm.</seed:think>\nYes.",
            "<mm:think>Hm.</mm:think>Yes.",
            "<|START_THINKING|>Hm.<|END_THINKING|>Yes.",
            "<|channel>thought\nHm.\n<channel|>Yes.",
            HARMONY,
        ],
    )
    def test_published_formats(self, reply: str) -> None:
        assert split_reasoning(reply) == ("Hm.", "Yes.")
        assert streamed(list(reply)) == ("Hm.", "Yes.")

    @pytest.mark.parametrize(
        ("reply", "reasoning", "answer"),
        [
            ("<think>\n\n</think>\n\nYes.", "", "Yes."),
            ("<|channel|>final<|message|>Yes.", "", "Yes."),
            ("<think>Hm, one\n\ntwo ", "Hm, one\n\ntwo", ""),
            ("<think>Hm.</th", "Hm.</th", ""),
            ("<think>", "", ""),
            ("<think>a <think> b</think> c </think> d", "a <think> b", "c </think> d"),
            ("<think>a</think> ```\n<think>b</think>\n``` ", "a", "```\n<think>b</think>\n``` "),
            ("<think>a [/THINK] b</think>c", "a [/THINK] b", "c"),
        ],
    )
    def test_cases(self, reply: str, reasoning: str, answer: str) -> None:
        assert split_reasoning(reply) == streamed(list(reply)) == (reasoning, answer)

    @pytest.mark.parametrize(
        "reply",
        [
            "",
            " \n",
            "Yes. ",
            "\n\nYes.\n",
            "Models such as Qwen write <think> before they answer </think>.",
            "`<think>`",
            "```xml\n<think>\nHm.\n</think>\n```\n",
            "<thinking>Hm.</thinking>",
            "<",
            "  <thin",
            "[THIN",
            "</think>Yes.",
            "<THINK>Hm.</THINK>",
        ],
    )
    def test_text_without_a_marker_at_its_start_is_not_changed(self, reply: str) -> None:
        assert split_reasoning(reply) == streamed(list(reply)) == ("", reply)

    def test_ordinary_text_is_not_withheld(self) -> None:
        splitter = ReasoningSplitter()
        assert [splitter.feed(piece).answer for piece in ("Yes", " <", "think>", "\n")] == [
            "Yes", " <", "think>", "\n",
        ]  # fmt: skip

    @given(
        st.lists(
            st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a"]), max_size=12
        ),
        st.sampled_from(["", "<think>\n", "<think>a</think>"]),
        st.data(),
    )
    def test_the_split_does_not_depend_on_the_pieces(
        self, parts: list[str], reply_start: str, data: st.DataObject
    ) -> None:
        reply = "".join(parts)
        cuts = sorted(data.draw(st.lists(st.integers(0, len(reply)), max_size=8)))
        pieces = [reply[a:b] for a, b in zip([0, *cuts], [*cuts, len(reply)], strict=True)]
        reasoning, answer = split_reasoning(reply, reply_start)
        assert streamed(pieces, reply_start) == (reasoning, answer)
        assert reply.endswith(answer)
        assert reasoning == reasoning.strip()
        assert reasoning in reply
        message = reply_message(reply_start + reply)
        assert message.text == reply_start + reply
        assert (message.reasoning, message.content) == split_reasoning(reply_start + reply)

    @given(
        st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "think"]), max_size=8),
        st.integers(0, 40),
    )
    def test_a_continued_reply_is_split_like_a_whole_one(self, parts: list[str], cut: int) -> None:
        reply = "".join(["<think>", *parts])
        cut = max(len("<think>"), min(cut, len(reply)))
        answer = split_reasoning(reply)[1]
        assert answer.endswith(split_reasoning(reply[cut:], reply[:cut])[1])


class TestPromptsThatOpenTheReasoning:
    @pytest.mark.parametrize(
        ("reply", "reasoning", "answer"),
        [
            ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
            ("\nHm, and", "Hm, and", ""),
            ("</think>Yes.", "", "Yes."),
            ("<thin", "<thin", ""),
            (" ", "", ""),
        ],
    )
    def test_the_reply_starts_inside_the_reasoning(self, reply: str, reasoning: str, answer: str) -> None:
        assert (
            split_reasoning(reply, "<think>\n") == streamed(list(reply), "<think>\n") == (reasoning, answer)
        )

    @pytest.mark.parametrize(
        ("prompt", "opening"),
        [
            ("<|im_start|>assistant\n<think>\n", "<think>\n"),
            ("<|im_start|>assistant\n", ""),
            ("<|assistant|><think></think>", ""),
            ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
            ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", ""),
            ("<think><|assistant|>", ""),
            ("<|CHATBOT_TOKEN|><|START_THINKING|>", "<|START_THINKING|>"),
            ("<|start|>assistant<|channel|>final<|message|>", ""),
            ("", ""),
        ],
    )
    def test_the_end_of_the_prompt_decides(self, prompt: str, opening: str) -> None:
        assert opening_marker(prompt) == opening


@pytest.mark.parametrize(
    ("start", "rest"), [("<", "table>"), (" ", "Yes"), ("<thin", "g>"), ("Yes", " <think>")]
)
def test_the_start_of_a_continued_answer_is_not_repeated(start: str, rest: str) -> None:
    assert split_reasoning(rest, start) == streamed(list(rest), start) == ("", rest)


class MarkedVocabulary:
    """A vocabulary of characters, with control tokens."""

    size = 0x110000 + 3
    chat_template: str | None = None
    bos_text = eos_text = ""
    control = ("<|im_start|>", "[THINK]", "<|other|>")

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        for i, marker in enumerate(self.control):
            text = text.replace(marker, chr(0xE000 + i))
        return [0x110000 + ord(c) - 0xE000 if 0xE000 <= ord(c) < 0xE003 else ord(c) for c in text]

    def min_tokens(self, text: str) -> int:
        return 0

    def piece(self, token: int) -> bytes:
        return b"" if token >= 0x110000 else chr(token).encode()

    def raw_piece(self, token: int) -> bytes:
        return self.control[token - 0x110000].encode() if token >= 0x110000 else self.piece(token)

    def same_entries(self, other: Vocabulary) -> bool:
        return False

    def is_end(self, token: int) -> bool:
        return False


def test_only_markers_among_the_control_tokens_are_visible() -> None:
    vocabulary = MarkedVocabulary()
    tokens = vocabulary.tokenize("[THINK]a<|other|><|im_start|>b", special=True, start=False)
    assert b"".join(piece_with_markers(vocabulary, token) for token in tokens) == b"[THINK]ab"
