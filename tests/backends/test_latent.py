"""Models that store keys and values as one vector need the same type for both."""

from __future__ import annotations

import pytest

from edgespec.backends.base import LoadOptions
from edgespec.backends.llamacpp.kv_types import choose_kv_types
from edgespec.errors import OptionError


def test_keys_and_values_have_the_same_type() -> None:
    few = 2**20
    assert choose_kv_types(LoadOptions(), few, same_type=True).text == "f16"
    assert choose_kv_types(LoadOptions(kv_type="q8_0"), few, same_type=True).text == "q8_0"
    with pytest.raises(OptionError, match="keys and values as one vector"):
        choose_kv_types(LoadOptions(kv_type="q8_0/f16"), few, same_type=True)
