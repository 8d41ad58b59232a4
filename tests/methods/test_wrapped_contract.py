"""Windowed and translated models fulfil the contract of `LanguageModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.backends import llamacpp
from edgespec.methods.model.translated import TranslatedModel
from edgespec.methods.model.translation import TokenTranslation
from edgespec.methods.model.windowed import AttentionWindow, WindowedModel
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends import test_contract
from tests.backends.contract import Rows
from tests.backends.rewindable import StateModel, replayed_table
from tests.backends.tiny_models import write_llama
from tests.methods.vocabularies.pieces import Pieces, speaking
from tests.tabular import LetterVocabulary, TabularModel

CONTEXT = 512
# A table model depends only on two tokens, so no window changes its logits.
WINDOW = AttentionWindow(4, 300)
WIDE = AttentionWindow(4, CONTEXT)


def windowed_table(folder: Path) -> LanguageModel:
    table = speaking(Pieces([*"abcdefghij", "<end>"]), 0, end=0.0)._table
    return WindowedModel(TabularModel(table, context_tokens=CONTEXT), WINDOW, CONTEXT)


def windowed_replay(folder: Path) -> LanguageModel:
    return WindowedModel(replayed_table(StateModel(context_tokens=CONTEXT)), WINDOW, CONTEXT)


def windowed_llama(folder: Path) -> LanguageModel:
    path = write_llama(folder / "model.gguf")
    inner = llamacpp.load(str(path), "tiny", LoadOptions(context_tokens=WIDE.context_tokens, max_branches=8))
    return WindowedModel(inner, WIDE, CONTEXT)


def translated_table(folder: Path) -> LanguageModel:
    """Share every token under another id. Room is reserved for two tokens of 16 draft tokens each."""
    letters = LetterVocabulary(11)
    inner = speaking(Pieces([*"jihgfedcba", "k"]), 0, end=0.0, context_tokens=CONTEXT + 30)
    return TranslatedModel(inner, letters, TokenTranslation(letters, inner.vocabulary))


MODELS: dict[str, Callable[[Path], LanguageModel]] = {
    "window over a table": windowed_table,
    "window over a state": windowed_replay,
    "window over llama.cpp": windowed_llama,
    "translated table": translated_table,
}


@pytest.fixture(params=list(MODELS.values()), ids=list(MODELS))
def own_model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LanguageModel]:
    made: LanguageModel = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture
def model(own_model: LanguageModel) -> LanguageModel:
    return own_model


class TestPrefillAndSteps(test_contract.TestPrefillAndSteps):
    @pytest.fixture
    def stepped(self, model: LanguageModel) -> dict[int, Rows]:
        return test_contract.rows_of_steps(model)


class TestTrees(test_contract.TestTrees):
    pass


class TestSnapshots(test_contract.TestSnapshots):
    pass


class TestLimits(test_contract.TestLimits):
    pass


class TestInterrupt(test_contract.TestInterrupt):
    pass


class TestClosing(test_contract.TestClosing):
    pass
