"""Interpret properties in JSON schemas the way other servers do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["closed_objects"]

# Keywords grouped by the form of their value: one schema, a list of schemas, or a map from names to schemas.
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
_LISTS = ("prefixItems", "items", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "$defs", "definitions")
# Keywords that apply several schemas to the same object.
_COMBINING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "extends")
# Keywords whose schemas must not become stricter.
_CONDITIONS = ("not", "if", "dependentSchemas")
# Keywords that control which properties are allowed in addition to the named ones.
_OTHERS = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
# Keywords that control which values are allowed.
_ALLOWED_VALUES = ("type", "enum", "const")


def closed_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Restrict schemas that have properties to objects without additional properties.

    In JSON Schema, `properties` alone also allows a string or a number. Hugging Face's clients often omit the
    type, and llama.cpp and Ollama then generate objects.

    JSON Schema also allows additional properties by default, so a small model could keep inventing them
    forever. OpenAI requires schemas to forbid them, and Ollama never generates them. They stay allowed if
    the schema says so explicitly. A schema that combines several schemas for the same object is returned
    unchanged, because none of them lists all properties.
    """
    nodes = list(_nodes(schema))
    if any(_is_combined(node) for node in nodes):
        return dict(schema)
    closed: dict[str, Any] = _closed(schema)
    return closed


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, Mapping):
        yield schema
        for part in _parts(schema):
            yield from _nodes(part)


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    yield from (schema[name] for name in _SINGLE if name in schema)
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in _NAMED:
        if isinstance(schema.get(name), Mapping):
            yield from schema[name].values()


def _is_combined(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas apply to the same object."""
    combining = [name for name in _COMBINING if name in schema]
    several = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return (
        several
        or len(combining) + ("properties" in schema) > 1
        or any(each in schema for each in _CONDITIONS)
    )


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = _as_object(schema)
    for name in _SINGLE:
        if isinstance(schema.get(name), Mapping):
            closed[name] = _closed(schema[name])
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            closed[name] = [_closed(each) for each in schema[name]]
    for name in _NAMED:
        if isinstance(schema.get(name), Mapping):
            closed[name] = {key: _closed(each) for key, each in schema[name].items()}
    if _can_close(schema):
        closed["additionalProperties"] = False
    return closed


def _as_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Add the type `object` to a schema with properties but without `type`, `enum` or `const`."""
    is_object = schema.get("properties") and not any(name in schema for name in _ALLOWED_VALUES)
    return {**schema, "type": "object"} if is_object else dict(schema)


def _can_close(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema defines all its required properties and does not mention additional ones."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not properties or any(name in schema for name in _OTHERS):
        return False
    least = schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
        and isinstance(least, int)
        and least <= len(properties)
    )
