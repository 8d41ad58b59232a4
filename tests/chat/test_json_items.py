"""Reading a JSON list item by item."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.chat import importing as module
from edgespec.chat.importing import ItemTooLargeError, json_items

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.long
@given(st.lists(values), st.sampled_from([None, 2]))
def test_the_items_are_those_of_the_list(items: list[object], indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_CHARACTERS", 3)
        text = f" {json.dumps(items, indent=indent)}\n"
        assert list(json_items(io.StringIO(text), 10**9)) == items
        assert list(json_items(io.StringIO(json.dumps({"all": items})), 10**9)) == [{"all": items}]


@pytest.mark.parametrize("text", ["", " ", "[", "[1", "[1,", "[1,]", "[1 2]", "[1] 2", "{", '["', "]"])
def test_invalid_json_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(json_items(io.StringIO(text), 100))


def test_only_a_part_of_a_long_list_is_in_memory() -> None:
    stream = io.StringIO("[" + ",".join(['{"text": "%s"}' % ("x" * 1000)] * 5000) + "]")
    positions = [stream.tell() for _ in json_items(stream, 2000)]
    assert len(positions) == 5000
    assert positions[0] <= 1 << 20
    assert positions[2500] <= 3500 * 1016


def test_an_item_that_is_too_long_is_not_read_to_its_end() -> None:
    stream = io.StringIO(f'[{{"text": "{"x" * (1 << 24)}"}}]')
    with pytest.raises(ItemTooLargeError):
        list(json_items(stream, 1 << 20))
    assert stream.tell() <= 1 << 23
