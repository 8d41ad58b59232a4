"""How much of a model lies on graphics cards, reckoned for cards that are not here."""

from __future__ import annotations

import pytest

from edgespec.backends.gguf_header import read_header
from edgespec.backends.llamacpp.device_split import device_split
from edgespec.backends.llamacpp.devices import cards
from edgespec.catalog import resolve

_LAYERS = 12


def _path() -> str:
    return str(resolve("demo").path)


def test_all_layers_are_all_but_the_embedding() -> None:
    there, share, twice = device_split(_path(), _LAYERS, None)
    assert share == 1.0
    assert 0 < there < resolve("demo").path.stat().st_size
    names = {tensor.name for tensor in read_header(resolve("demo").path).tensors}
    assert "token_embd.weight" in names
    assert (twice > 0) == ("output.weight" not in names)


@pytest.mark.parametrize("layers", range(_LAYERS + 1))
def test_the_last_layers_go_first_and_the_output_before_them(layers: int) -> None:
    there, share, _ = device_split(_path(), _LAYERS, layers)
    more, larger, _ = device_split(_path(), _LAYERS, layers + 1)
    assert there < more
    assert share == max(0, layers - 1) / _LAYERS
    assert larger == layers / _LAYERS


def test_where_there_are_no_cards_nothing_is_there() -> None:
    assert device_split(_path(), 0, None) == (0, 0.0, 0)
    assert device_split(_path(), _LAYERS, 0) == (0, 0.0, 0)
    assert all(card.free_bytes <= card.total_bytes for card in cards())
