"""A backend registered only by this test can be planned, loaded, used, verified and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.program import program
from edgespec.errors import OptionError
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.model.registry import Backend, FileFormat, register
from tests.raising import raises
from tests.tabular import TabularModel

VOCAB = 8
CONTEXT_TOKENS = 4096


class ToyEstimator:
    """The memory of a toy model: only its table, and nothing for the context."""

    trained_context_tokens = CONTEXT_TOKENS
    layers = 0
    longrope_switch_tokens = 0
    streamable_layers = 0
    why_not_shared = "toys run one reply at a time"

    def __init__(self, path: str, name: str, _options: LoadOptions) -> None:
        self.name = name
        self._weight_bytes = _table(path).nbytes

    def streamed_bytes(self, _options: LoadOptions) -> dict[int, int]:
        return {}

    def expert_reads(self, _options: LoadOptions) -> None:
        return None

    def estimate(self, options: LoadOptions) -> MemoryEstimate:
        tokens = options.context_tokens or CONTEXT_TOKENS
        return MemoryEstimate(
            tokens, "none", (MemoryPart("weights", self._weight_bytes), MemoryPart("cache", 0))
        )

    def close(self) -> None:
        pass


def _table(path: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array(json.loads(Path(path).read_text()), np.float32)


def _load(path: str, name: str, options: LoadOptions, _progress: Progress | None) -> LanguageModel:
    model = TabularModel(_table(path), context_tokens=options.context_tokens or CONTEXT_TOKENS)
    model.facts = replace(model.facts, name=name, path=path)
    return model


TOY = Backend(
    name="toys",
    formats=(
        FileFormat(
            name="toy",
            label="a table, run by this test",
            recognise=lambda path: path.suffix == ".json",
            load=_load,
            open_estimator=ToyEstimator,
        ),
    ),
)


@pytest.fixture(autouse=True)
def toy_backend() -> Iterator[None]:
    unregister = register(TOY)
    yield
    unregister()


@pytest.fixture
def toy(tmp_path: Path) -> str:
    logits = np.random.default_rng(3).normal(size=(VOCAB**2, VOCAB)) * 2
    logits[:, -1] -= 4
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(logits.tolist()))
    return str(path)


def test_plan(toy: str) -> None:
    preview = edgespec.plan(toy)
    assert preview.plan.fits
    assert preview.plan.context_tokens == CONTEXT_TOKENS
    weights = [item for item in preview.plan.items if item.kind == "weights"]
    assert [item.bytes for item in weights] == [4 * VOCAB**3]


@pytest.mark.long
@pytest.mark.parametrize("method", ["auto", "suffix", "ngram", "lookahead+ngram"])
def test_the_reply_of_every_method_is_the_plain_one(toy: str, method: str) -> None:
    with edgespec.load(toy, method=method) as runtime:
        plain = runtime.generate("abcab", max_tokens=40, seed=1, method="none")
        assert len(plain.tokens) == 40
        assert runtime.generate("abcab", max_tokens=40, seed=1).tokens == plain.tokens
        assert runtime.target.name == "toy.json"


def test_a_toy_drafts_for_a_toy(toy: str) -> None:
    with edgespec.load(toy, draft=toy, method="model") as runtime:
        reply = runtime.generate("abcab", max_tokens=40, seed=1)
        assert reply.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("option", ["adapter", "learn", "workers"])
def test_features_it_lacks_are_refused(toy: str, option: str, tmp_path: Path) -> None:
    options = {
        "adapter": {"adapter": tmp_path},
        "learn": {"draft": toy, "learn": True},
        "workers": {"workers": "127.0.0.1:1"},
    }[option]
    with pytest.raises(OptionError):
        edgespec.load(toy, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["layerskip", "lowbit"])
def test_drafting_with_itself_is_refused_with_a_reason(toy: str, method: str) -> None:
    with raises(OptionError, code="method_unavailable", option="method"):
        edgespec.load(toy, method=method)


@pytest.mark.long
def test_the_command_line(toy: str) -> None:
    def run(*args: str) -> dict[str, Any]:
        result = CliRunner().invoke(program, [*args, "--target", toy, "--json"])
        assert result.exit_code == 0, result.output
        value: dict[str, Any] = json.loads(result.stdout)
        return value

    assert run("plan")["fits"] is True
    assert run("generate", "abcab", "-n", "20")["finish_reason"] == "length"
    proof = run("verify", "--max-tokens", "12", "--methods", "suffix,ngram", "--temperatures", "0,1")
    assert [method["faults"] for method in proof["methods"].values()] == [0, 0]
    bench = run("bench", "--max-tokens", "8", "--repeats", "1", "--categories", "code", "--methods", "suffix")
    assert bench["replies"]
