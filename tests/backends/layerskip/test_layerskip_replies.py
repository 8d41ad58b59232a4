"""A split model that drafts with its lower layers gives the replies of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.api.runtime import Runtime
from edgespec.backends import llamacpp
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.decode.drafter_set import DrafterSet
from edgespec.methods.base import DrafterMemory
from edgespec.methods.model.drafter import ModelDrafter
from edgespec.model.base import EarlyExit, LoadOptions
from tests.backends.layerskip.conftest import EXITS
from tests.cases import covering
from tests.tables import lookups

PROMPTS = ("How do I list files by size?", "Write the numbers 1 to 20, then write the numbers 1 to 20 again.")


@pytest.fixture(scope="module")
def plain(demo_target: Path) -> Iterator[Runtime]:
    model = llamacpp.load(str(demo_target), "demo", LoadOptions(context_tokens=512))
    with Runtime(model, None, DrafterSet(model)) as runtime:
        yield runtime


def _drafting(folder: Path, branches: tuple[int, ...] = (), **options: Any) -> Runtime:
    """Return a runtime of the split model that drafts with its lower layers."""
    model = load_layerskip(str(folder), "demo", LoadOptions(context_tokens=512, **options))
    view = model.self_draft(EarlyExit(model.exit_layer))
    drafter = ModelDrafter(view, model.facts.vocab_size, branches=branches, name="layerskip")
    assert drafter.memory_use == DrafterMemory()
    return Runtime(model, None, DrafterSet(model, {**lookups(), "layerskip": drafter}))


class TestSameReplies:
    @pytest.mark.long
    @pytest.mark.parametrize(("exit_layer", "branches"), covering(EXITS, ((), (3, 2))))
    def test_replies_equal_plain_decoding(
        self, plain: Runtime, folders: dict[int, Path], exit_layer: int, branches: tuple[int, ...]
    ) -> None:
        with _drafting(folders[exit_layer], branches) as runtime:
            for prompt, temperature in zip(PROMPTS, (0.0, 0.8), strict=True):
                asked: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_tokens": 24}
                expected = plain.generate(prompt, method="none", **asked)
                for method in ("none", "layerskip", "layerskip+ngram"):
                    reply = runtime.generate(prompt, method=method, **asked)
                    assert reply.text == expected.text
                    if method == "layerskip":
                        assert reply.stats.drafted_tokens > 0

    @pytest.mark.long
    def test_replies_with_a_quantised_kv_cache(self, folders: dict[int, Path]) -> None:
        with _drafting(folders[4], kv_type="q8_0") as runtime:
            for prompt in PROMPTS:
                for temperature in (0.0, 0.8):
                    asked: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 24}
                    expected = runtime.generate(prompt, method="none", **asked)
                    assert runtime.generate(prompt, method="layerskip", **asked).text == expected.text

    @pytest.mark.long
    def test_replies_in_rejection_mode_at_temperature_0(
        self, plain: Runtime, folders: dict[int, Path]
    ) -> None:
        with _drafting(folders[4], (2,)) as runtime:
            for prompt in PROMPTS:
                asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "acceptance": "rejection"}
                expected = plain.generate(prompt, method="none", **asked)
                for method in ("layerskip", "layerskip+ngram"):
                    assert runtime.generate(prompt, method=method, **asked).text == expected.text
