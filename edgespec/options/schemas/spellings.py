"""Read JSON schemas in the variants that programs send, and reject ambiguous ones.

Languages differ in how they serialise an empty map (`[]` in PHP), an empty list (`{}` in Lua) and an unset
field (`null` in C# and Go). OpenAPI, Google and Python have their own type names, and clients wrap schemas as
various APIs require. Each of these variants is an entry in a table in this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgespec.errors import OptionError, shorten

__all__ = ["SCHEMA_KEYS", "read_schema", "tidy_schema"]

# Keywords grouped by the form of their value: a map from names to schemas, one schema, or a list of schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = (
    *("additionalProperties", "additionalItems", "items", "contains", "propertyNames", "not", "if", "then"),
    *("else", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
# Keywords whose values are data, where null and empty lists are meaningful.
_DATA = ("const", "default", "example", "examples")
# Keywords that have no effect if their value is empty.
_SAY_NOTHING_EMPTY = (*_LISTS, "enum", "type", "dependentRequired", "dependencies")
# Keywords that can forbid null even if `type` and `enum` allow it.
_BESIDE_TYPE = {*_LISTS, "$ref", "const", "not", "if"}
# JSON Schema's equivalents of type names in Python, OpenAPI and other languages. Matching ignores case,
# because Google's APIs write types in capitals. None allows any type.
_TYPES: dict[str, str | None] = {
    "any": None,
    "array": "array",
    "bool": "boolean",
    "boolean": "boolean",
    "dict": "object",
    "double": "number",
    "float": "number",
    "int": "integer",
    "integer": "integer",
    "list": "array",
    "long": "integer",
    "none": "null",
    "null": "null",
    "number": "number",
    "object": "object",
    "str": "string",
    "string": "string",
}
# Keys that hold the schema in a wrapper, such as OpenAI's `{"type": "json_schema", "json_schema": {"name":
# ..., "schema": ...}}`.
SCHEMA_KEYS = (
    *("json_schema", "schema", "schema_definition", "value"),
    *("response_schema", "responseSchema", "jsonSchema", "json", "parameters"),
)
_BESIDE_SCHEMA = {*SCHEMA_KEYS, "type", "name", "description", "strict", "title"}
# Keys that occur only in wrappers. `description` and `title` are also JSON Schema keywords.
_ONLY_BESIDE_SCHEMA = {"name", "strict"}
# Keywords that restrict the answer, or refer to schemas that do. A schema without any of them allows every
# value, so if it has other keys, it is probably an example of the answer.
_RESTRICTING = {
    *(*_NAMED, *_SINGLE, *_LISTS, *_SAY_NOTHING_EMPTY, "const", "$ref", "$dynamicRef", "required", "format"),
    *("pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains"),
    *("minProperties", "maxProperties", "dependentSchemas", "contentEncoding", "contentMediaType"),
}
_NOTES = {"$schema", "$id", "$comment", "$anchor", "title", "description", "default", "example", "examples"}
_WRAPPER_TYPES = ("json", "json_object", "json_schema", None)
_MAX_WRAPPERS = 4


def read_schema(value: Any, what: str) -> dict[str, Any]:
    """Return the JSON schema that a client intended.

    Args:
        value: The schema or its JSON text, possibly in a wrapper such as OpenAI's `json_schema`.
        what: The name of the field that contains the schema, such as `response_format`, for error messages.

    Raises:
        OptionError: The value is not a schema, or part of it is ambiguous.
    """
    for _ in range(_MAX_WRAPPERS):
        value = _parsed(value, what)
        inner = _wrapped(value)
        if inner is None:
            break
        value = inner
    if isinstance(value, Mapping) and (
        (_is_wrapper(value) and value.keys() & _ONLY_BESIDE_SCHEMA)
        or not (value.keys() <= _NOTES or value.keys() & _RESTRICTING)
    ):
        raise OptionError(
            f"{what} does not contain a schema, only {_shown(value)}",
            f'write {{"type": "object", "properties": ...}}, or add {what}.schema',
            code="constraint_invalid",
        )
    return tidy_schema(value, what)


def tidy_schema(schema: Any, what: str) -> dict[str, Any]:
    """Convert a schema to standard JSON Schema. Like `read_schema`, but does not remove a wrapper."""
    schema = _parsed(schema, what)
    try:
        tidy = _tidy(schema, what, "#")
    except RecursionError:
        raise OptionError(
            f"{what} is nested too deeply",
            "use a schema with fewer levels of nesting",
            code="constraint_invalid",
        ) from None
    if isinstance(tidy, bool):
        raise _wrong(what, "#", "a JSON schema", schema)
    return tidy


def _parsed(value: Any, what: str) -> Any:
    if value in ("", []):
        return None
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        place = f" ({error})" if isinstance(error, json.JSONDecodeError) else ""
        raise OptionError(
            f"{what} is not valid JSON{place}",
            "fix the JSON, or pass an object",
            code="constraint_invalid",
        ) from None


def _wrapped(value: Any) -> Any:
    if not _is_wrapper(value):
        return None
    return next((value[key] for key in SCHEMA_KEYS if value.get(key) is not None), None)


def _is_wrapper(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and value.keys() <= _BESIDE_SCHEMA and value.get("type") in _WRAPPER_TYPES
    )


def _tidy(schema: Any, what: str, place: str) -> dict[str, Any] | bool:
    if schema is None or schema == []:
        return {}
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise _wrong(what, place, "a JSON schema", schema)
    tidy = {key: value for key, value in schema.items() if value is not None or key in _DATA}
    for key in _SAY_NOTHING_EMPTY:
        if key in tidy and tidy[key] in ([], {}):
            del tidy[key]
    _list_required(tidy, what, place)
    for key in _NAMED:
        if key in tidy:
            tidy[key] = _named(tidy[key], what, f"{place}/{key}")
    for key in _LISTS:
        if key in tidy:
            parts = _listed(tidy[key], what, f"{place}/{key}")
            tidy[key] = [_tidy(each, what, f"{place}/{key}/{at}") for at, each in enumerate(parts)]
    for key in _SINGLE:
        if key in tidy:
            tidy[key] = _single(tidy[key], what, f"{place}/{key}")
    if "enum" in tidy:
        tidy["enum"] = _listed(tidy["enum"], what, f"{place}/enum")
    _name_types(tidy, what, place)
    return _with_null(tidy, what, place)


def _named(value: Any, what: str, place: str) -> dict[str, Any]:
    if value in ([], {}):
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(what, place, "an object that maps names to schemas", value)
    return {name: _tidy(each, what, f"{place}/{_escaped(name)}") for name, each in value.items()}


def _single(value: Any, what: str, place: str) -> Any:
    if isinstance(value, list) and value and place.endswith("/items"):
        # Up to draft 2019-09, `items` could be a list with one schema per item.
        return [_tidy(each, what, f"{place}/{at}") for at, each in enumerate(value)]
    return _tidy(value, what, place)


def _listed(value: Any, what: str, place: str) -> list[Any]:
    """Convert a value to a list. PHP serialises lists with gaps as objects with keys such as "0" and "2"."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
        return list(value.values())
    raise _wrong(what, place, "a list", value)


def _name_types(schema: dict[str, Any], what: str, place: str) -> None:
    """Replace type names in `schema` with their JSON Schema equivalents, in place."""
    if "type" not in schema:
        return
    given = schema["type"]
    names = [given] if isinstance(given, str) else _listed(given, what, f"{place}/type")
    types: list[str] = []
    for name in names:
        known = str(name).lower() if isinstance(name, str | None) else ""
        if known not in _TYPES:
            raise _wrong(what, f"{place}/type", f"one of {', '.join(sorted(_json_types()))}", name)
        found = _TYPES[known]
        if found is None:
            del schema["type"]
            return
        types.append(found)
    schema["type"] = types[0] if isinstance(given, str) else types


def _with_null(schema: dict[str, Any], what: str, place: str) -> dict[str, Any]:
    """Apply OpenAPI's `nullable` by allowing null in the schema."""
    nullable = schema.pop("nullable", False)
    if not isinstance(nullable, bool):
        raise _wrong(what, f"{place}/nullable", "true or false", nullable)
    if not nullable:
        return schema
    if not schema.keys() & {"type", "enum"} or schema.keys() & _BESIDE_TYPE:
        definitions: dict[str, Any] = {
            key: schema.pop(key) for key in ("$defs", "definitions") if key in schema
        }
        return {**definitions, "anyOf": [schema, {"type": "null"}]}
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        schema["type"] = types if "null" in types else [*types, "null"]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema


def _list_required(schema: dict[str, Any], what: str, place: str) -> None:
    """Make `required` a list, in place. Early versions of JSON Schema set it to true in each property."""
    given = schema.get("required")
    if isinstance(given, bool):
        # The enclosing object schema adds this property's name to its own `required`.
        del schema["required"]
        return
    names = [given] if isinstance(given, str) else _listed(given or [], what, f"{place}/required")
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        names += [
            name
            for name, each in properties.items()
            if isinstance(each, Mapping) and each.get("required") is True and name not in names
        ]
    if names or given is not None:
        schema["required"] = names


def _json_types() -> set[str]:
    return {name for name in _TYPES.values() if name}


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _wrong(what: str, place: str, expected: str, value: Any) -> OptionError:
    keyword = place.rpartition("/")[2]
    name = what if place == "#" else f"{keyword} in {what}"
    return OptionError(
        f"{name} must be {expected}, not {_shown(value)} (in {place})",
        "correct the schema",
        code="constraint_invalid",
    )


def _shown(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False, default=str))
