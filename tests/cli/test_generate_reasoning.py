"""`edgespec generate` with a model that reasons before it answers."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec import ReplyStream, Runtime
from edgespec.cli import screen
from tests.cli.conftest import Run, json_of
from tests.forced import Begin

QUESTION = "How do I list files by size?"
THOUGHT = "<think>\nThe user wants `ls`.\n</think>\n\nUse"


@pytest.fixture
def reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every reply start with reasoning."""
    stream = Runtime.stream

    def reason_first(runtime: Runtime, prompt: str, **options: Any) -> ReplyStream:
        tokens = runtime.vocabulary.tokenize(THOUGHT, special=False, start=False)
        return stream(runtime, prompt, processors=[Begin(tokens)], **options)

    monkeypatch.setattr(Runtime, "stream", reason_first)


@pytest.mark.usefixtures("reasoning")
class TestReasoning:
    @pytest.mark.long
    def test_a_pipe_gets_the_answer_only(self, run: Run) -> None:
        result = run("generate", "--seed", "7", "-n", "40", QUESTION)
        assert result.stdout.startswith("Use")
        assert result.stderr == ""

    @pytest.mark.long
    def test_json_has_both(self, run: Run) -> None:
        reply = json_of(run("generate", "--json", "--seed", "7", "-n", "40", QUESTION))
        assert reply["reasoning"] == "The user wants `ls`."
        assert reply["answer"].startswith("Use")
        assert reply["text"] == THOUGHT.removesuffix("Use") + reply["answer"]

    @pytest.mark.long
    def test_a_terminal_shows_the_reasoning_dimmed(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
        result = run("generate", "--seed", "7", "-n", "40", QUESTION)
        assert result.stdout.startswith("Use")
        shown = result.stderr.replace("\x1b[0m\x1b[2m", "")
        assert "\x1b[2mThe user wants `ls`.\n\n" in shown
        assert "<think>" not in result.output


def test_a_reply_without_an_answer_says_why(run: Run) -> None:
    result = run("generate", "--raw", "--seed", "7", "-n", "4", f"{QUESTION} <think>")
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr == (
        "warning: the reply ended while the model was still reasoning, so there is no answer; use a larger"
        " --max-tokens or --context\n"
    )
