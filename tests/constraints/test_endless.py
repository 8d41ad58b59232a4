"""Exactly the schemas that no finite value satisfies are detected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.constraints import Constraint, ConstraintCompiler
from edgespec.errors import OptionError
from edgespec.options.schemas.enforceable import requires_endless_value
from tests.constraints.vocabularies import ByteVocabulary
from tests.raising import raises


def node(**schema: Any) -> dict[str, Any]:
    """Return the schema of an object whose property `next` is required."""
    return {"type": "object", "properties": {"next": schema}, "required": ["next"]}


ENDLESS = [
    node(**{"$ref": "#"}),
    node(anyOf=[{"$ref": "#"}, node(**{"$ref": "#"})]),
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": node(**{"$ref": "#/$defs/b~1c"}), "b/c": node(**{"$ref": "#/$defs/a"})},
    },
    {"allOf": [node(**{"$ref": "#"}), {"type": "object"}]},
]
FINITE = [
    {"type": "object", "properties": {"next": {"$ref": "#"}}},
    node(anyOf=[{"$ref": "#"}, {"type": "null"}]),
    node(type=["object", "null"]),
    # A string satisfies this schema, because the schema restricts only objects.
    {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
    {"type": "array", "items": {"$ref": "#"}},
    {"$defs": {"a": {"$anchor": "b", "type": "null"}}, "$ref": "#b"},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    # This schema needs several passes of the search.
    {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"anyOf": [node(**{"$ref": "#/$defs/b"}), node(**{"$ref": "#/$defs/c"})]},
            "b": node(**{"$ref": "#/$defs/a"}),
            "c": {"anyOf": [node(**{"$ref": "#/$defs/b"}), {"type": "null"}]},
        },
    },
    node(**{"$ref": "#/nowhere"}),
    node(**{"$ref": "https://example.com/schema"}),
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_endless(schema: dict[str, Any]) -> None:
    assert requires_endless_value(schema)


@pytest.mark.parametrize("schema", FINITE)
def test_finite(schema: dict[str, Any]) -> None:
    assert not requires_endless_value(schema)


def test_they_are_refused() -> None:
    vocabulary = ByteVocabulary(())
    compiler = ConstraintCompiler(vocabulary, vocabulary.size)
    with raises(OptionError, "satisfies", code="constraint_not_supported"):
        compiler.check(Constraint("schema", json.dumps(ENDLESS[0])))
    compiler.check(Constraint("schema", json.dumps(FINITE[1])))
