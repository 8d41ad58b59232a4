"""Models that store keys and values as one vector need the same type for both."""

from __future__ import annotations

from edgespec.backends.llamacpp.context_plan import choose_kv_types
from edgespec.errors import OptionError
from edgespec.model.base import LoadOptions
from tests.raising import raises


def test_keys_and_values_have_the_same_type() -> None:
    assert choose_kv_types(LoadOptions(), same_type=True).text == "f16"
    assert choose_kv_types(LoadOptions(kv_type="q8_0"), same_type=True).text == "q8_0"
    with raises(OptionError, code="option_not_supported", option="kv_type"):
        choose_kv_types(LoadOptions(kv_type="q8_0/f16"), same_type=True)
