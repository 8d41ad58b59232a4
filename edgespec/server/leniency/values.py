"""Normalise field values that other languages and servers represent differently.

PHP serialises an empty map as `[]`, and Lua an empty list as `{}`. JavaScript and Lua do not distinguish 64
from 64.0. Forms, settings files and environment variables contain numbers as text. Some servers use -1 for
"no limit" or "off". Unknown fields are ignored, unless their names suggest that they constrain the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import TypeAliasType

__all__ = ["CONSTRAINT_HINT", "Repair", "asks_for_constraint", "repair_for", "token_biases"]

CONSTRAINT_HINT = "use response_format for a JSON schema, or regex, grammar or choice"

# Matches names of fields that seem to constrain the answer, such as `guided_decoding` and `responseSchema`.
_WORDS = re.compile("constrain|ebnf|grammar|guided|schema|structur|^response_?format$", re.IGNORECASE)
# Maximum nesting depth of objects to search, as in `{"extra_body": {"nvext": {"guided_json": ...}}}`. The
# limit was chosen, not measured.
_MAX_LEVELS = 3


Repair: TypeAlias = Callable[[Any], Any]
"""A function that repairs a value. It returns values that need no repair unchanged."""

# Values with a special meaning on other servers, keyed by field. None means the default.
_SPECIAL_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "max_tokens": {-1: None},
    "max_completion_tokens": {-1: None},
    "max_output_tokens": {-1: None},
    "num_predict": {-1: None, -2: None},  # In Ollama, -2 fills the context. Our default does that, too.
    "seed": {-1: None},
    "min_tokens": {-1: 0},
    "top_k": {-1: 0},  # vLLM's value for "off".
    "stop": {"": None},
    "regex": {"": None},
    "grammar": {"": None},
    "schema": {"": None},
    "choice": {"": None},
}
# Fields whose empty items are dropped. An empty stop string would end every reply immediately.
_WITHOUT_EMPTY_ITEMS = frozenset({"stop", "stop_sequences"})
# Fields in which an empty list or map counts as unset.
_UNSET_IF_EMPTY = frozenset({"choice"})

_NO_EMPTY_VALUE = object()

_NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")


def repair_for(name: str, hint: Any) -> Repair | None:
    """Return the function that repairs a field's values, or None if they need no repair.

    Args:
        name: Name of the field.
        hint: The field's type.
    """
    types = _alternatives(hint)
    whole = int in types and float not in types
    special = _SPECIAL_VALUES.get(name, {})
    empty = None if name in _UNSET_IF_EMPTY else _empty_value(types)
    can_be_text = str in types or not types & {int, float, bool}
    if can_be_text and not (whole or special or empty is not _NO_EMPTY_VALUE):
        return None

    def repair(value: Any) -> Any:
        if isinstance(value, list) and name in _WITHOUT_EMPTY_ITEMS:
            value = [each for each in value if each not in ("", None)]
        if isinstance(value, list | dict):
            return value if value or empty is _NO_EMPTY_VALUE else empty
        if isinstance(value, str) and not can_be_text:
            value = _from_text(value.strip(), types)
        if whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int | str) and not isinstance(value, bool):
            return special.get(value, value)
        return value

    return repair


def _from_text(text: str, types: set[Any]) -> Any:
    """Convert text to a number or boolean if possible, or to None if it is empty."""
    if not text and NoneType in types:
        return None
    if bool in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if types & {int, float} and (number := _NUMBER.fullmatch(text)):
        return float(text) if number[1] or number[2] else int(text)
    return text


def _empty_value(types: set[Any]) -> Any:
    """Return the value that an empty list or map stands for in a field of these types."""
    classes = [each for each in types - {str} if isinstance(each, type)]
    maps, lists, objects = (
        any(issubclass(each, kind) for each in classes) for kind in (Mapping, Sequence, BaseModel)
    )
    if maps or lists:
        return _NO_EMPTY_VALUE if maps and lists else {} if maps else []
    if objects:
        # Treat an empty optional object as missing, because it may have required fields.
        return None if NoneType in types else {}
    return None if types == {NoneType} else _NO_EMPTY_VALUE


def _alternatives(hint: Any) -> set[Any]:
    if isinstance(hint, TypeAliasType):
        return _alternatives(hint.__value__)
    origin = get_origin(hint)
    if origin is Annotated:
        return _alternatives(get_args(hint)[0])
    if origin in (Union, UnionType):
        return {each for argument in get_args(hint) for each in _alternatives(argument)}
    return {NoneType if hint is None else origin or hint}


def token_biases(value: Any) -> Any:
    """Convert `logit_bias` to a map from token ids to numbers, if it is in a known format.

    JSON keys are always strings. llama.cpp also accepts pairs, with false for forbidden tokens.
    """
    if isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value):
        if not all(type(token) is int for token, _ in value):
            return value
        return {token: -math.inf if bias is False else _bias(bias) for token, bias in value}
    if isinstance(value, dict):
        return {_token_id(key): _bias(item) for key, item in value.items()}
    return value


def _token_id(key: Any) -> Any:
    is_id = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
    return int(key) if is_id else key


def _bias(value: Any) -> Any:
    return _from_text(value.strip(), {float}) if isinstance(value, str) else value


def asks_for_constraint(name: str, value: Any, levels: int = _MAX_LEVELS) -> bool:
    """Return whether the name of a field, or of a field nested in its value, suggests a constraint."""
    if value in (None, False, "", [], {}):
        return False
    if _WORDS.search(name):
        return True
    inner = value.items() if levels and isinstance(value, Mapping) else ()
    return any(asks_for_constraint(str(key), each, levels - 1) for key, each in inner)
