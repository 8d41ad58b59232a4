"""Tests of low-bit weights: their memory, that no bits are lost, and what draft passes read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from edgespec.backends import mlx
from edgespec.backends.mlx.low_bit_weights import SplitEmbedding, SplitLinear, merge_halves
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, MemoryBudgetError
from edgespec.model.base import LoadOptions, LowBit
from edgespec.model.model_facts import Adapter
from edgespec.store.catalogue import models_folder
from tests.backends.mlx.tiny_checkpoints import write_adapter, write_checkpoint
from tests.raising import raises

TREE = TokenTree((5, 6, 7, 8), (-1, 0, 0, 2), (None,) * 4)


def load(path: Path, **options: Any) -> Any:
    return mlx.load(str(path), path.name, LoadOptions(context_tokens=512, **options))


def logits(model: Any) -> Any:
    """Return the logits of every node of a tree after some tokens, float64 [nodes, vocab]."""
    model.truncate(0)
    model.prefill([9, 10, 11, 12])
    rows = model.verify(TREE)
    found = np.stack([rows.at(node, np.arange(model.vocabulary.size)) for node in range(TREE.width)])
    model.truncate(0)
    return found


class TestSplit:
    @pytest.fixture(scope="class")
    def pair(self) -> Iterator[tuple[Any, Any]]:
        folder = models_folder() / "demo-mlx"
        whole, split = load(folder), load(folder, low_bits=True)
        yield whole, split
        split.close()
        whole.close()

    @pytest.mark.long
    def test_split_weights_hold_every_bit(self, pair: tuple[Any, Any]) -> None:
        whole, split = (dict(model._net.named_modules()) for model in pair)
        found = 0
        for name, module in split.items():
            if isinstance(module, SplitLinear | SplitEmbedding):
                assert isinstance(whole[name], QuantizedLinear | QuantizedEmbedding)
                assert mx.array_equal(merge_halves(module.high, module.low), whole[name].weight).item()
                assert mx.array_equal(module.scales, whole[name].scales).item()
                assert mx.array_equal(module.biases, whole[name].biases).item()
                found += 1
        assert (
            found == 12 * 7 + 1
        )  # The linear weights of the layers, and the embedding table that is also the head.

    def test_logits_equal_the_8_bit_model_up_to_rounding(self, pair: tuple[Any, Any]) -> None:
        """The split product adds two sums, so float32 rounding differs."""
        whole, split = (logits(model) for model in pair)
        np.testing.assert_allclose(split, whole, rtol=0, atol=2e-5 * np.abs(whole).max())

    def test_split_weights_add_the_bytes_of_their_scales_only(self, pair: tuple[Any, Any]) -> None:
        whole, split = pair
        assert split.facts.weight_bytes == whole.facts.weight_bytes
        scales = {
            name: (one.scales.shape, one.scales.nbytes)
            for name, one in whole._net.named_modules()
            if isinstance(one, QuantizedLinear | QuantizedEmbedding)
        }
        zeros = dict(scales.values())
        extra = 2 * sum(nbytes for _, nbytes in scales.values()) + sum(zeros.values())
        view = split.self_draft(LowBit())
        assert view.facts.weight_bytes == extra
        assert view.facts.kv_bytes == 0
        logits(split)
        assert sum(array.nbytes for array in split.partial_models.low_bits.zeros.values()) == sum(
            zeros.values()
        )
        assert split.facts.quantisation == whole.facts.quantisation
        assert split.facts.parameters == whole.facts.parameters

    def test_a_draft_pass_reads_the_high_bits_only(self, pair: tuple[Any, Any]) -> None:
        split = pair[1]
        linear = next(one for _, one in split._net.named_modules() if isinstance(one, SplitLinear))
        x = mx.random.normal((3, linear.scales.shape[1] * linear.group_size))
        codes = mx.dequantize(linear.high, linear.high_scales, linear.draft_biases, linear.group_size, 4)
        split.partial_models.low_bits.low = True
        got = linear(x)
        split.partial_models.low_bits.low = False
        np.testing.assert_allclose(np.array(got), np.array(x @ codes.T), rtol=1e-3, atol=1e-3)
        assert not np.allclose(np.array(got), np.array(linear(x)), atol=1e-3)


class TestCopies:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("quantisation", "bits"),
        [(None, 4), (("affine", 6, 32), 3), (("affine", 4, 32), 3), (("affine", 3, 32), 2), (("mxfp8",), 4)],
    )
    def test_other_weights_get_a_low_bit_copy(self, folder: Path, quantisation: Any, bits: int) -> None:
        path = write_checkpoint(folder / f"copied {bits} {quantisation}", "llama", quantisation=quantisation)
        plain, ready = load(path), load(path, low_bits=True)
        np.testing.assert_array_equal(logits(plain), logits(ready))
        assert {one.copy_bits for one in ready.partial_models.low_bits.weights} == {bits}
        assert ready.facts.weight_bytes == plain.facts.weight_bytes
        held = mx.array([array.nbytes for array in arrays(ready)]).sum().item()
        extra = ready.self_draft(LowBit()).facts.weight_bytes
        assert held == plain.facts.weight_bytes + extra
        for model in (plain, ready):
            model.close()

    def test_copies_count_towards_the_memory_limit(self, folder: Path) -> None:
        path = write_checkpoint(folder / "counted", "llama")
        plain = load(path, memory_bytes=10**6)
        room = plain.facts.weight_bytes + plain.facts.kv_bytes
        plain.close()
        load(path, memory_bytes=room).close()
        with pytest.raises(MemoryBudgetError):
            load(path, memory_bytes=room, low_bits=True)

    def test_2_bit_weights_have_no_low_bit_version(self, folder: Path) -> None:
        path = write_checkpoint(folder / "two", "llama", quantisation=("affine", 2, 32))
        model = load(path, low_bits=True)
        with raises(CapabilityError, "model's weights"):
            model.self_draft(LowBit())
        model.close()


def arrays(model: Any) -> list[mx.array]:
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(model._net.parameters())
    return [leaf for _, leaf in leaves]


@pytest.mark.long
@pytest.mark.parametrize("quantisation", [None, ("affine", 8, 32)])
def test_an_adapter_still_applies(folder: Path, quantisation: Any) -> None:
    path = write_checkpoint(folder / f"adapted {quantisation}", "llama", quantisation=quantisation)
    adapters = (Adapter(str(write_adapter(folder / f"adapter {quantisation}", path))),)
    plain, ready, bare = (
        load(path, adapters=adapters),
        load(path, adapters=adapters, low_bits=True),
        load(path),
    )
    np.testing.assert_allclose(logits(ready), logits(plain), rtol=0, atol=1e-3)
    assert np.abs(logits(bare) - logits(plain)).max() > 0.1
    before = logits(ready)
    ready.self_draft(LowBit()).verify(TREE)
    np.testing.assert_array_equal(logits(ready), before)
    for model in (plain, ready, bare):
        model.close()


class TestWindowedDrafts:
    """Drafts that attend only to the first and the last cached tokens (MagicDec)."""

    @pytest.mark.parametrize("kv_type", ["auto", "q8_0"])
    def test_a_windowed_draft_attends_to_a_constant_number_of_tokens(
        self, folder: Path, kv_type: str
    ) -> None:
        path = write_checkpoint(folder / f"cost {kv_type}", "llama", config={"head_dim": 32})
        model = load(path, low_bits=True, kv_type=kv_type)
        view = model.self_draft(LowBit(sink_tokens=4, window_tokens=16))
        seen: list[int] = []
        cache = model.caches.attention[1]
        append = cache.update_and_fetch

        def counted(keys: Any, values: Any) -> Any:
            keys, values = append(keys, values)
            seen.append((keys if isinstance(keys, mx.array) else keys[0]).shape[2])
            return keys, values

        for length in (12, 40, 90):
            model.truncate(0)
            model.prefill([5 + i % 50 for i in range(length)])
            cache = model.caches.attention[1]
            append, cache.update_and_fetch = cache.update_and_fetch, counted
            seen.clear()
            view.verify(TREE)
            assert seen == [min(length, 20) + 4]
            model.verify(TREE)
            assert seen[1] == length + 4
        model.close()

    def test_a_short_context_is_attended_to_completely(self, folder: Path) -> None:
        model = load(write_checkpoint(folder / "short", "llama"), low_bits=True)
        rows = []
        for how in (
            LowBit(),
            LowBit(sink_tokens=2, window_tokens=10),
            LowBit(sink_tokens=2, window_tokens=9),
        ):
            model.truncate(0)
            model.prefill(list(range(5, 17)))
            found = model.self_draft(how).verify(TREE)
            rows.append(found.at(3, np.arange(model.vocabulary.size)))
        np.testing.assert_array_equal(rows[0], rows[1])
        assert not np.array_equal(rows[0], rows[2])
        model.close()


def test_impossible_low_bit_options_are_rejected(llama: Any, folder: Path) -> None:
    with raises(CapabilityError, "without low_bits"):
        llama.self_draft(LowBit())
    model = load(folder / "llama", low_bits=True)
    with raises(CapabilityError, code="lowbit_not_supported"):
        model.self_draft(LowBit(copy="other"))
    model.close()
