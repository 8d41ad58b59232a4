"""The KV caches of the target and the draft model across replies, including after a backend error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec import Runtime
from edgespec.backends import llamacpp
from edgespec.decode.drafter_set import DrafterSet
from edgespec.engine.logits import Logits
from edgespec.errors import BackendError, BusyError
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import LanguageModel, LoadOptions
from tests.api.questions import HOWTO, REPEATS
from tests.raising import raises
from tests.tables import PROMPT, lookups, near, runtime, table


class Recording:
    """A model that records the number of tokens in each prefill."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.prefilled: list[int] = []

    def prefill(self, tokens: Sequence[int], progress: Any = None) -> None:
        self.prefilled.append(len(tokens))
        self._model.prefill(tokens, progress)

    def prefill_prompt(self, tokens: Sequence[int], progress: Any = None) -> Logits | None:
        self.prefilled.append(len(tokens) - 1)
        return self._model.prefill_prompt(tokens, progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TestCacheReuse:
    @pytest.fixture
    def pair(self, demo_target: Path, demo_draft: Path) -> Iterator[tuple[Runtime, Recording, Recording]]:
        options = LoadOptions(context_tokens=1024)
        target: Any = Recording(llamacpp.load(str(demo_target), "target", options))
        draft: Any = Recording(llamacpp.load(str(demo_draft), "draft", options))
        drafter = ModelDrafter(draft, target.facts.vocab_size)
        drafters = DrafterSet(target, {**lookups(), "model": drafter}, chain_model=draft)
        with Runtime(target, draft, drafters) as runtime:
            yield runtime, target, draft

    @pytest.mark.long
    @pytest.mark.parametrize("method", ["model", "model+ngram"])
    def test_a_second_turn_prefills_only_what_is_new_in_both_caches(
        self, pair: tuple[Runtime, Recording, Recording], method: str
    ) -> None:
        runtime, target, draft = pair
        chat = runtime.chat(system="Be brief.")
        turns = [HOWTO, "And by name?", "What about hidden files?"]
        known = 0
        for turn in turns:
            target.prefilled.clear()
            draft.prefilled.clear()
            reply = chat.ask(turn, method=method, max_tokens=60, temperature=0.7, seed=2)
            new = reply.stats.prompt_tokens - known
            assert reply.stats.cached_prompt_tokens >= known - 1
            assert sum(target.prefilled) == reply.stats.prompt_tokens - reply.stats.cached_prompt_tokens - 1
            # The draft model must also catch up with what other drafters guessed, a few tokens at a time.
            assert draft.prefilled[0] <= new + 2
            assert sum(draft.prefilled) <= new + 2 + len(reply.tokens)
            known = reply.stats.prompt_tokens + len(reply.tokens) - 1

    def test_the_same_prompt_again_prefills_nothing(self, pair: tuple[Runtime, Recording, Recording]) -> None:
        runtime, target, draft = pair
        runtime.generate(REPEATS, max_tokens=20, method="model")
        target.prefilled.clear()
        draft.prefilled.clear()
        reply = runtime.generate(REPEATS, max_tokens=20, method="model")
        assert reply.stats.cached_prompt_tokens == reply.stats.prompt_tokens - 1
        assert sum(target.prefilled) == 0
        assert sum(draft.prefilled) <= 1

    def test_cleared_cache_is_read_again(self, pair: tuple[Runtime, Recording, Recording]) -> None:
        runtime, target, draft = pair
        first = runtime.generate(REPEATS, max_tokens=20, method="model+ngram", seed=1)
        runtime.clear_cache()
        assert target.length == draft.length == 0
        target.prefilled.clear()
        draft.prefilled.clear()
        reply = runtime.generate(REPEATS, max_tokens=20, method="model+ngram", seed=1)
        assert reply.tokens == first.tokens
        assert reply.stats.cached_prompt_tokens == 0
        assert sum(target.prefilled) == reply.stats.prompt_tokens - 1
        assert draft.prefilled[0] == reply.stats.prompt_tokens

    def test_a_running_reply_keeps_its_caches(self, pair: tuple[Runtime, Recording, Recording]) -> None:
        runtime, *_ = pair
        stream = runtime.stream(REPEATS, max_tokens=8)
        next(stream)
        with pytest.raises(BusyError):
            runtime.clear_cache()
        stream.close()
        runtime.clear_cache()


class Failing:
    """A model that fails on its n-th pass from now on, or never if n is 0."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.at = 0

    def _count(self) -> None:
        self.at -= 1
        if self.at == 0:
            raise BackendError("the graphics card has left the building", "restart the machine")

    def prefill(self, tokens: Sequence[int], progress: Any = None) -> None:
        self._count()
        self._model.prefill(tokens, progress)

    def verify(self, tree: Any, first: int = 0) -> Any:
        self._count()
        return self._model.verify(tree, first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TestFailingBackends:
    @pytest.mark.parametrize("who", ["target", "draft"])
    def test_reply_after_a_failure_is_unchanged(self, who: str) -> None:
        target: Any = Failing(table(1))
        draft: Any = Failing(near(table(1), 2))
        with runtime(target, draft) as pair:
            expected = pair.generate(PROMPT, method="none", seed=1, max_tokens=30).tokens
            for at in range(1, 9):
                (target if who == "target" else draft).at = at
                with raises(BackendError, "left the building"):
                    pair.generate(PROMPT, seed=1, max_tokens=30, method="model")
                (target if who == "target" else draft).at = 0
                assert pair.generate(PROMPT, seed=1, max_tokens=30).tokens == expected
