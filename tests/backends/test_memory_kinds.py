"""Models with recurrent layers or sliding windows, as targets and as draft models.

Their rollback is exact, so speculation gives the tokens of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgespec
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.context_plan import choose_kv_types
from edgespec.backends.llamacpp.kv_cells import Checkpoints
from edgespec.backends.replay import MAX_CHECKPOINTS
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError, OptionError
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.contract import cut, fresh, same, step, tokens_for
from tests.backends.tiny_models import write_gemma2, write_jamba, write_lfm2, write_mamba
from tests.backends.tiny_mtp_models import write_deepseek4
from tests.raising import raises

KINDS: dict[str, Callable[..., Path]] = {
    "mamba": write_mamba,
    "hybrid": write_jamba,
    "short convolution": write_lfm2,
    "compressed keys": write_deepseek4,
    "window": write_gemma2,
}
RECURRENT = ["mamba", "hybrid", "short convolution", "compressed keys"]
# Longer than a sliding window of 16 tokens, and repetitive so that prompt lookup finds matches.
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 3 + [5, 6, 7]


def load(path: Path, name: str, context: int = 512) -> LanguageModel:
    return llamacpp.load(str(path), name, LoadOptions(context_tokens=context))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return {name: write(folder / f"{name}.gguf") for name, write in KINDS.items()}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[LanguageModel]:
    model = load(files[request.param], request.param)
    yield model
    model.close()


class Round(NamedTuple):
    width: int
    kept: int
    seed: int
    then: str


rounds = st.lists(
    st.builds(
        Round,
        st.integers(1, 40),
        st.integers(0, 39),
        st.integers(0, 99),
        st.sampled_from([""] * 9 + ["back", "far back", "save", "restore"]),
    ),
    max_size=20,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds)
def test_drafts_wider_than_windows_and_checkpoints_roll_back_exactly(
    kind: LanguageModel, history: list[Round]
) -> None:
    kind.truncate(0)
    held: list[int] = []
    saved = (kind.snapshot(), held)
    for each in history:
        if each.width > kind.free_tokens:
            continue
        tokens = tokens_for(kind, each.width, each.seed)
        kind.verify(TokenTree.chain(tokens[0], tokens[1:]))
        kept = 1 + each.kept % each.width
        kind.commit(tuple(range(1, kept)))
        held = held + tokens[:kept]
        if each.then == "save":
            saved = (kind.snapshot(), held)
        elif each.then == "restore":
            kind.restore(saved[0])
            held = saved[1]
        elif each.then:
            held = held[: max(0, len(held) - 30) if each.then == "back" else each.seed % 10]
            cut(kind, held)
        assert kind.length == len(held)
    if kind.free_tokens:
        same(kind, step(kind, 4), fresh(kind, [*held, 4]))


def test_the_facts_describe_the_rollback(files: dict[str, Path]) -> None:
    rollbacks = {
        "mamba": "checkpoints and replay, 4 held",
        "hybrid": "checkpoints and replay, 4 held",
        "short convolution": "the last 8 tokens in place, else checkpoints and replay, 4 held",
        "compressed keys": "the last 8 tokens in place, else checkpoints and replay, 4 held",
        "window": "in place; sliding windows are kept whole",
    }
    for name, path in files.items():
        model = load(path, name)
        capabilities = model.facts.capabilities
        assert model.facts.rollback == rollbacks[name]
        assert capabilities.rollback
        assert capabilities.tree == (name == "window")
        assert capabilities.reason == (
            "" if name == "window" else "its recurrent layers do not support branches"
        )
        model.close()


def test_kv_bytes_include_states_and_checkpoints(files: dict[str, Path]) -> None:
    """The expected sizes are those of the tensors; llama.cpp adds some metadata per cell."""
    states = {
        "mamba": (3 * 64 + 8 * 64) * 4 * (MAX_CHECKPOINTS + 1),
        "hybrid": (3 * 64 + 8 * 64) * 4 * (MAX_CHECKPOINTS + 1),
        "short convolution": 2 * 32 * 4 * (MAX_CHECKPOINTS + 1) * 9,
        # The keys for groups of 4 tokens, the indexer's keys, and the keys for groups of 128 tokens.
        "compressed keys": (8 * 2 * 16 + 8 * 2 * 64 + 128 * 16) * 2 * 4 * (MAX_CHECKPOINTS + 9),
    }
    keys_and_values = {
        "mamba": 0,
        "hybrid": 2 * 16 * 2,
        "short convolution": 2 * 16 * 2,
        "compressed keys": 2 * 16 * 2 + (16 + 64) * 2 // 4,
        "window": 2 * 2 * 16 * 2,
    }
    for name, path in files.items():
        for context in (256, 512):
            model = load(path, name, context)
            by_hand = states.get(name, 0) + keys_and_values[name] * context
            assert by_hand <= model.facts.kv_bytes <= by_hand * 1.4
            model.close()


@pytest.mark.parametrize("name", ["mamba", "hybrid"])
def test_an_inexact_restore_disables_speculation(
    name: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "restore", lambda self, checkpoint: None)
    with edgespec.load(str(files[name]), draft=None, context=256) as runtime:
        assert runtime.method.effective == "none"
        assert "restoring its recurrent state is not exact" in runtime.method.reason
        replies = [
            ended(runtime.stream_tokens(PROMPT, max_tokens=20, seed=3, method=method))
            for method in ("none", "ngram", "auto", "none")
        ]
        assert len({reply.tokens for reply in replies}) == 1
        edited = ended(runtime.stream_tokens([*PROMPT[:9], 99], max_tokens=10, seed=1))
        assert edited.stats.cached_prompt_tokens == 0
    with raises(CapabilityError, code="rollback_not_supported"):
        edgespec.load(str(files["window"]), str(files[name]), context=256)


@pytest.mark.parametrize("work", ["prefill", "step", "draft"])
@pytest.mark.parametrize("name", RECURRENT)
def test_a_cancelled_pass_leaves_the_cache_unchanged(
    name: str, work: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(files[name], name)
    tokens = tokens_for(model, 50)
    expected = fresh(model, tokens)
    model.truncate(0)
    model.prefill(tokens[:20])
    model.verify(TokenTree.chain(tokens[20], [99, 98]))
    model.commit(())
    passes: dict[str, Callable[[], object]] = {
        "prefill": lambda: model.prefill(tokens[21:]),
        "step": lambda: model.verify(TokenTree.chain(99)),
        "draft": lambda: model.verify(TokenTree.chain(99, [98] * 5)),
    }
    native = model._inner._context  # type: ignore[attr-defined]
    decode = native._lib.llama_decode

    def interrupted(context: object, batch: object) -> int:
        native.interrupt.requested = True
        return int(decode(context, batch))

    with monkeypatch.context() as patch:
        patch.setattr(native._lib, "llama_decode", interrupted)
        with pytest.raises(CancelledError):
            passes[work]()
    model.interrupt(False)
    assert model.length == 21
    model.prefill(tokens[21:-1])
    same(model, step(model, tokens[-1]), expected)
    model.close()


def test_a_restored_sliding_window_can_be_truncated_beyond_its_size(files: dict[str, Path]) -> None:
    model = load(files["window"], "window")
    tokens = tokens_for(model, 100)
    model.prefill(tokens)
    snapshot = model.snapshot()
    model.truncate(0)
    model.restore(snapshot)
    for token in tokens[:10]:
        step(model, token)
    for kept in (60, 3):
        model.truncate(kept)
        assert model.length == kept
        same(model, step(model, 4), fresh(model, [*tokens[:kept], 4]))
        model.restore(snapshot)
    model.close()


def ended(stream: edgespec.ReplyStream) -> edgespec.Reply:
    for _ in stream:
        pass
    return stream.reply


def replies_of(
    target: Path, draft: Path | None, methods: Sequence[str], prompts: Sequence[Sequence[int]]
) -> dict[str, list[edgespec.Reply]]:
    """Return the replies of each method to all prompts in order, from one runtime."""
    with edgespec.load(str(target), str(draft) if draft else None, context=512) as runtime:
        return {
            method: [
                ended(
                    runtime.stream_tokens(
                        list(prompt),
                        max_tokens=10,
                        seed=7,
                        temperature=temperature,
                        method=method,
                        draft_length=5,
                    )
                )
                for temperature in (0.0, 0.8)
                for prompt in prompts
            ]
            for method in methods
        }


class TestReplies:
    """Speculative replies equal plain ones, across turns that continue, roll back and change the prompt."""

    PROMPTS = (PROMPT, [*PROMPT, 20, 21], [*PROMPT[:20], 30], PROMPT)

    @pytest.mark.long
    @pytest.mark.parametrize("name", list(KINDS))
    def test_replies_as_target(self, name: str, files: dict[str, Path], tmp_path: Path) -> None:
        other = KINDS[name](tmp_path / "other.gguf", seed=1)
        for draft in (files[name], other):
            methods = ("none", "model", "model+ngram", *(("ngram",) if draft == other else ()))
            found = replies_of(files[name], draft, methods, self.PROMPTS)
            plain = [reply.tokens for reply in found.pop("none")]
            for replies in found.values():
                assert [reply.tokens for reply in replies] == plain
                assert sum(reply.stats.drafted_tokens for reply in replies) > 0
            if draft == files[name]:
                rates = [reply.stats.acceptance_rate for reply in found["model"]]
                # The draft's passes are not exact, so a random model may draft badly once.
                assert sum(rate is not None and rate > 0.99 for rate in rates[:4]) >= 3

    @pytest.mark.long
    @pytest.mark.parametrize("name", RECURRENT)
    def test_replies_as_draft_of_another_kind(self, name: str, files: dict[str, Path]) -> None:
        found = replies_of(files["window"], files[name], ("none", "model"), self.PROMPTS[:2])
        assert [reply.tokens for reply in found["model"]] == [reply.tokens for reply in found["none"]]

    @pytest.mark.long
    @pytest.mark.parametrize("name", RECURRENT)
    def test_cached_prompt_tokens_are_correct(self, name: str, files: dict[str, Path]) -> None:
        with edgespec.load(str(files[name]), draft=None, context=512) as runtime:

            def cached(prompt: list[int]) -> int:
                reply = ended(runtime.stream_tokens(prompt, max_tokens=30, seed=1, method="ngram"))
                turns.append([*prompt, *reply.tokens])
                return reply.stats.cached_prompt_tokens

            turns: list[list[int]] = []
            assert cached(PROMPT) == 0
            assert cached(PROMPT) == len(PROMPT) - 1
            longer = [*turns[-1], 40, 41, 42]
            assert cached(longer) >= len(longer) - 4 - 8
            assert cached([*longer[:-1], 50, 51]) <= len(longer) - 1
            assert cached([99, *PROMPT]) == 0


def test_keys_and_values_have_the_same_type() -> None:
    assert choose_kv_types(LoadOptions(), same_type=True).text == "f16"
    assert choose_kv_types(LoadOptions(kv_type="q8_0"), same_type=True).text == "q8_0"
    with raises(OptionError, code="option_not_supported", option="kv_type"):
        choose_kv_types(LoadOptions(kv_type="q8_0/f16"), same_type=True)
