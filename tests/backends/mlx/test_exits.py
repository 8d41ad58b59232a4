"""Which early exit of an MLX model is fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.backends import mlx
from edgespec.engine.tree import TokenTree
from edgespec.methods.layerskip.drafter import exit_table
from edgespec.model.base import EarlyExit, LoadOptions
from edgespec.store.catalogue import models_folder
from tests.backends.mlx.test_self_drafts import PROMPT, loaded


class TestExits:
    def test_measure_exits_finds_the_best_exit_and_leaves_the_cache_unchanged(self) -> None:
        model: Any = mlx.load(str(models_folder() / "demo-mlx"), "demo", LoadOptions(context_tokens=512))
        text = "The river ran down from the hills and through the old town, where the market was."
        tokens = model.vocabulary.tokenize(text, special=False, start=True)
        model.prefill(PROMPT)
        before = model.snapshot().data
        agreements, layer_bytes, head_bytes = model.measure_exits(tokens)
        assert model.snapshot().data == before
        assert list(agreements) == list(range(1, 12))
        assert len(layer_bytes) == 12
        assert min(*layer_bytes, head_bytes) > 0
        assert sum(layer_bytes) + head_bytes <= model.facts.weight_bytes
        view = model.self_draft(EarlyExit(4))
        rows = view.verify(TokenTree.chain(tokens[0], tokens[1:]))
        early = [rows.top(node, 1)[0][0] for node in range(len(tokens))]
        rows = model.verify(TokenTree.chain(tokens[0], tokens[1:]))
        whole = [rows.top(node, 1)[0][0] for node in range(len(tokens))]
        assert agreements[4] == np.mean(np.array(early) == np.array(whole))
        model.close()

    def test_the_verdict_for_a_model_not_trained_for_early_exit(self, folder: Path) -> None:
        model = loaded(folder, "qwen3", config={"num_hidden_layers": 4})
        table = exit_table(*model.measure_exits([(31 * i + 7) % 200 + 3 for i in range(64)]))
        assert not table.is_faster
        assert "was not trained for early exit, so it would not be faster here" in table.verdict
        model.close()
