"""Tests of online training: replies keep their tokens, acceptance improves, and nothing leaks."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from edgespec import Runtime
from edgespec.backends import mlx
from edgespec.backends.mlx.model import MlxModel
from edgespec.decode import idle
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError
from edgespec.methods.costs.curve import PassLimits, assumed_cost
from edgespec.methods.draft_cache import DraftCache
from edgespec.methods.model import online as online_drafting
from edgespec.methods.model.online import OnlineDrafter, OnlineTrainer
from edgespec.methods.tree_growth import AdaptiveTreeGrowth
from edgespec.model.base import LoadOptions
from edgespec.model.drafter_training import TrainingExample
from edgespec.store.catalogue import models_folder
from edgespec.store.saved_arrays import SavedArrays, delete_saved_arrays
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.raising import raises
from tests.tables import Chosen

OPTIONS = LoadOptions(context_tokens=400)
ASKED = ("How do I list files by size?", "How do I list files by name?", "How do I list hidden files?")


def load(path: Path) -> MlxModel:
    model = mlx.load(str(path), path.name, OPTIONS)
    assert isinstance(model, MlxModel)
    assert model.facts.capabilities.trainable
    return model


def online(target: MlxModel, draft: MlxModel, notes: SavedArrays | None = None) -> OnlineDrafter:
    trainer = OnlineTrainer(DraftCache(draft), draft.trainer(), store=notes)
    return OnlineDrafter(draft, target.facts.vocab_size, trainer)


def paired(target: MlxModel, draft: MlxModel, notes: SavedArrays | None = None) -> Runtime:
    return Runtime(target, None, Chosen(target, online(target, draft, notes)))


@pytest.fixture
def demo() -> tuple[MlxModel, MlxModel]:
    return load(models_folder() / "demo-mlx"), load(models_folder() / "demo-mlx-draft")


@pytest.fixture
def tiny(folder: Path) -> Iterator[MlxModel]:
    model = load(write_checkpoint(folder / "taught", "llama", quantisation=("affine", 4, 32)))
    yield model
    model.close()


def lesson(seed: int = 0) -> TrainingExample:
    random = np.random.default_rng(seed)
    tokens = tuple(random.integers(0, 200, 24).tolist())
    best = np.stack([random.permutation(200)[:4] for _ in range(3)]).astype(np.int64)
    probs = np.full((3, 4), 0.25, np.float32)
    return TrainingExample(tokens, (3, 9, 20), best, probs)


def logits(model: MlxModel, tokens: list[int]) -> Any:
    model.truncate(0)
    rows = model.verify(TokenTree.chain(tokens[0], tokens[1:]))
    found = np.stack([rows.at(row, np.arange(model.facts.vocab_size)) for row in range(len(tokens))])
    model.truncate(0)
    return found


class TestTrainer:
    @pytest.mark.long
    def test_the_loss_falls(self, tiny: MlxModel) -> None:
        trainer = tiny.trainer()
        losses = [trainer.train_step(lesson()) for _ in range(30)]
        assert losses[-1] < losses[0] - 0.05

    def test_without_the_adapter_the_model_is_exactly_as_loaded(self, tiny: MlxModel) -> None:
        tokens = [5, 7, 9, 11]
        before, names = logits(tiny, tokens), dict(tree_flatten(tiny._net.parameters()))
        trainer = tiny.trainer()
        for _ in range(5):
            trainer.train_step(lesson())
        assert np.array_equal(logits(tiny, tokens), before)
        trainer.set_adapted(True)
        assert not np.array_equal(logits(tiny, tokens), before)
        trainer.set_adapted(False)
        assert np.array_equal(logits(tiny, tokens), before)
        after = dict(tree_flatten(tiny._net.parameters()))
        assert set(after) == set(names)
        assert all(mx.array_equal(after[name], names[name]).item() for name in names)

    def test_an_untrained_adapter_changes_nothing(self, tiny: MlxModel) -> None:
        before = logits(tiny, [5, 7, 9, 11])
        tiny.trainer().set_adapted(True)
        assert np.array_equal(logits(tiny, [5, 7, 9, 11]), before)

    def test_training_leaves_the_cache_unchanged(self, tiny: MlxModel) -> None:
        tiny.prefill([4, 5, 6, 7])
        trainer = tiny.trainer()
        expected = tiny.verify(TokenTree.chain(8)).at(0, np.arange(200))
        trainer.train_step(lesson())
        trainer.count_hits(lesson().tokens, 5, adapted=True)
        assert tiny.length == 4
        assert np.array_equal(tiny.verify(TokenTree.chain(8)).at(0, np.arange(200)), expected)

    def test_hits_count_the_top_1_tokens(self, tiny: MlxModel) -> None:
        tokens = [5, 7, 9, 11, 13]
        rows = logits(tiny, tokens)
        tokens = [*tokens, int(rows[-1].argmax())]
        expected = [int(rows[i].argmax()) == tokens[i + 1] for i in range(5)]
        trainer = tiny.trainer()
        assert trainer.count_hits(tokens, 1, adapted=False) == sum(expected)
        assert trainer.count_hits(tokens, 5, adapted=False) == 1

    def test_an_adapter_can_be_saved_and_loaded(self, tiny: MlxModel, tmp_path: Path) -> None:
        trainer = tiny.trainer()
        for _ in range(3):
            trainer.train_step(lesson())
        file = SavedArrays("online", trainer.identity, tmp_path)
        file.save(trainer.adapter_weights())
        trainer.set_adapted(True)
        expected = logits(tiny, [5, 7, 9])
        trainer.set_adapted(False)
        other = tiny.trainer()
        assert other.load_adapter(SavedArrays("online", other.identity, tmp_path).load())
        other.set_adapted(True)
        assert np.array_equal(logits(tiny, [5, 7, 9]), expected)

    def test_load_adapter_rejects_other_shapes_and_nan(self, tiny: MlxModel) -> None:
        trainer = tiny.trainer()
        own = trainer.adapter_weights()
        name = next(iter(own))
        assert not trainer.load_adapter({})
        assert not trainer.load_adapter({**own, name: own[name][:-1]})
        assert not trainer.load_adapter({**own, name: own[name] * np.nan})
        assert trainer.load_adapter(own)

    def test_an_infinite_loss_changes_nothing(self, tiny: MlxModel) -> None:
        trainer = tiny.trainer()
        before = trainer.adapter_weights()
        bad = lesson()
        with raises(BackendError, code="training_diverged"):
            trainer.train_step(TrainingExample(bad.tokens, bad.rows, bad.best, bad.probs * np.nan))
        after = trainer.adapter_weights()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert not trainer.adapted


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train one step per example, which is enough to change the adapter."""
    monkeypatch.setattr(online_drafting, "_STEPS_PER_EXAMPLE", 1)


class TestReplies:
    @pytest.mark.usefixtures("few_steps")
    def test_the_same_tokens_over_several_turns(self, demo: tuple[MlxModel, MlxModel]) -> None:
        with paired(*demo) as runtime:
            chat, alone = runtime.chat(), runtime.chat()
            for seed, (text, temperature) in enumerate(zip(ASKED, (0.0, 0.8, 0.8), strict=True)):
                options: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_tokens": 16}
                got = chat.ask(text, draft_length=4, **options)
                runtime._session.run_idle_work(lambda: True)
                note = runtime._session.report().note
                assert alone.ask(text, method="none", **options).tokens == got.tokens
                assert got.stats.drafted_tokens
            assert "steps on" in note

    @pytest.mark.long
    def test_training_improves_acceptance_on_repeated_text(self, demo: tuple[MlxModel, MlxModel]) -> None:
        accepted: list[tuple[int, int]] = []
        with paired(*demo) as runtime:
            for _ in range(2):
                turn = (0, 0)
                for text in ASKED:
                    stats = runtime.generate(text, temperature=0.0, max_tokens=64, draft_length=3).stats
                    turn = (turn[0] + stats.accepted_tokens, turn[1] + stats.drafted_tokens)
                    runtime._session.run_idle_work(lambda: True)
                accepted.append(turn)
        rates = [right / drafted for right, drafted in accepted]
        assert rates[-1] > rates[0] + 0.04, rates

    @pytest.mark.long
    def test_the_original_weights_are_used_if_they_predict_better(
        self, tmp_path: Path, demo: tuple[MlxModel, MlxModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(online_drafting, "_MIN_EVALUATION_TOKENS", 16)
        monkeypatch.setattr(online_drafting, "_MAX_STEPS", 1)
        target, draft = demo
        notes = SavedArrays("online", "pair", tmp_path)
        with paired(target, draft, notes) as runtime:
            drafters = runtime._session.drafters
            drafter = drafters.choose(drafters.resolve("model"))
            assert isinstance(drafter, OnlineDrafter)
            trainer = drafter.trainer._trainer
            ruined = {name: array + 0.3 for name, array in trainer.adapter_weights().items()}
            assert trainer.load_adapter(ruined)
            drafter.trainer._steps = 1
            trainer.set_adapted(True)
            for text in ASKED[:2]:
                runtime.generate(text, temperature=0.0, max_tokens=32, draft_length=3)
                runtime._session.run_idle_work(lambda: True)
            before, after, tokens = drafter.trainer.evaluation
            assert tokens >= 16
            assert after < before
            assert not trainer.adapted
            said = runtime._session.report().note
            assert "uses the original draft model" in said
            again = load(models_folder() / "demo-mlx-draft")
            later = online(target, again, notes)
            assert not later.trainer._trainer.adapted, "another run knows that it was worse"
            assert later.note() == said
            later.close()

    def test_a_reply_without_rejections_is_scored(self) -> None:
        target, draft = (load(models_folder() / "demo-mlx-draft") for _ in range(2))
        with paired(target, draft) as runtime:
            drafters = runtime._session.drafters
            drafter = drafters.choose(drafters.resolve("model"))
            assert isinstance(drafter, OnlineDrafter)
            drafter.trainer._steps = 1
            stats = runtime.generate(ASKED[0], temperature=0.0, max_tokens=24, draft_length=3).stats
            runtime._session.run_idle_work(lambda: True)
            assert 0 < stats.accepted_tokens == stats.drafted_tokens
            assert drafter.trainer.evaluation == (stats.generated_tokens,) * 3

    @pytest.mark.long
    @pytest.mark.usefixtures("few_steps")
    def test_memory_of_training_is_reported(self, demo: tuple[MlxModel, MlxModel]) -> None:
        target, draft = demo
        with paired(target, draft) as runtime:
            trainer = draft.trainer()
            changes = sum(array.nbytes for array in trainer.adapter_weights().values())
            counted = []
            for text in ASKED[:2]:
                stats = runtime.generate(text, temperature=0.0, max_tokens=32, draft_length=3).stats
                counted.append((stats.draft_weight_bytes, stats.draft_kv_bytes, stats.draft_other_bytes))
                runtime._session.run_idle_work(lambda: True)
            facts = draft.facts
        assert counted[0] == (facts.weight_bytes, facts.kv_bytes, 3 * changes)
        logits_bytes = 4 * facts.vocab_size * online_drafting.EXAMPLE_TOKENS
        assert counted[1][:2] == counted[0][:2]
        assert logits_bytes < counted[1][2] - counted[0][2] < 16 * logits_bytes

    @pytest.mark.long
    def test_adaptive_drafts_train_the_same_adapter(self, demo: tuple[MlxModel, MlxModel]) -> None:
        target, draft = demo
        usual = online(target, draft)
        limits = PassLimits.of(target.facts.capabilities, draft.facts.capabilities)
        grown = usual.with_growth(lambda able: AdaptiveTreeGrowth(limits, assumed_cost, siblings=1))
        assert (usual.chooses_length, grown.chooses_length) == (False, True)
        assert grown.trainer is usual.trainer
        text = target.vocabulary.tokenize(ASKED[0] * 10, special=False, start=True)
        grown.begin(text)
        assert grown.pending_tokens == grown.full_pending_tokens == len(text) - 2
        grown.prefill(40)
        assert (grown.pending_tokens, grown.full_pending_tokens) == (0, len(text))
        assert 30 < draft.length <= 40
        grown.prefill(len(text))
        assert (grown.pending_tokens, grown.full_pending_tokens, draft.length) == (0, 0, len(text) - 1)
        with Runtime(target, None, Chosen(target, grown)) as runtime:
            for text_asked in ASKED:
                runtime.generate(text_asked, temperature=0.0, max_tokens=20)
            runtime._session.run_idle_work(lambda: True)
            assert usual.note().startswith("the draft model was trained for")
            kept = grown.saved_statistics()
            assert kept
            usual.with_growth(
                lambda able: AdaptiveTreeGrowth(limits, assumed_cost, siblings=1)
            ).restore_statistics(kept)

    @pytest.mark.usefixtures("few_steps")
    def test_a_later_run_continues_training(self, tmp_path: Path, demo: tuple[MlxModel, MlxModel]) -> None:
        notes = SavedArrays("online", "pair", tmp_path)
        target, draft = demo
        drafter = online(target, draft, notes)
        with Runtime(target, None, Chosen(target, drafter)) as runtime:
            for text in ASKED[:2]:
                runtime.generate(text, temperature=0.0, max_tokens=24, draft_length=3)
                runtime._session.run_idle_work(lambda: True)
            weights = drafter.trainer._trainer.adapter_weights()
            drafter.close()
        again = load(models_folder() / "demo-mlx-draft")
        later = online(target, again, notes)
        weights_of = later.trainer._trainer.adapter_weights
        adapted = [later.trainer._trainer.adapted]
        assert all(np.array_equal(weights_of()[name], weights[name]) for name in weights)
        later.close()
        delete_saved_arrays(tmp_path)
        loaded = load(models_folder() / "demo-mlx-draft")
        anew = online(target, loaded, notes)
        adapted.append(anew.trainer._trainer.adapted)
        assert adapted == [True, False]
        anew.close()


class TestInTheBackground:
    @pytest.mark.long
    def test_a_reply_interrupts_idle_training(
        self, demo: tuple[MlxModel, MlxModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Training and layer search run in background threads, and the next reply stops them anywhere."""
        monkeypatch.setattr(idle, "QUIET_SECONDS", 0.0)
        with paired(*demo) as runtime:
            expected = {
                text: runtime.generate(text, method="none", seed=1, max_tokens=32).tokens
                for text in ASKED[:2]
            }
            for i, text in enumerate(ASKED[:2] * 3):
                assert runtime.generate(text, seed=1, max_tokens=32, draft_length=4).tokens == expected[text]
                threading.Event().wait(0.1 * i)
            assert "stopped learning" not in runtime._session.report().note

    @pytest.mark.long
    @pytest.mark.parametrize("delay", [0.0, 0.5])
    def test_the_process_may_end_during_idle_training(self, delay: float) -> None:
        code = f"""
import time
from edgespec.decode import idle
from tests.backends.mlx.test_lora_trainer import ASKED, load, models_folder, paired
idle.QUIET_SECONDS = 0.0
runtime = paired(load(models_folder() / "demo-mlx"), load(models_folder() / "demo-mlx-draft"))
runtime.generate(ASKED[0], max_tokens=48, draft_length=4, temperature=0.8)
time.sleep({delay})
"""
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
