"""Replies satisfy a schema even if llguidance alone would violate it, or the schema is rejected.

Exactly the schemas that no finite value satisfies are detected.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.constraints.compiler import ConstraintCompiler
from edgespec.constraints.matcher import Constraint
from edgespec.errors import OptionError
from edgespec.options.schemas.enforceable import enforceable_schema, requires_endless_value
from tests.constraints.vocabularies import END, ByteVocabulary
from tests.raising import raises

VOCABULARY = ByteVocabulary()
COMPILER = ConstraintCompiler(VOCABULARY, VOCABULARY.size)
BIG = 9007199254740993  # 2**53 + 1, the first integer that float64 cannot represent
BOUNDS = [str(value / 4) for value in range(-12, 13)] + ["-0.001", "0.001", "9", "9.99", "-1e-7", "99", "100"]


def accepts(schema: Any, text: str) -> bool:
    """Return whether a reply can be `text`."""
    constrained = COMPILER.processor(Constraint("schema", json.dumps(schema)), [END])
    for token in [*VOCABULARY.tokenize(text, special=False, start=False), END]:
        if constrained.apply((np.array([token]), np.zeros(1)))[0].tolist() != [token]:
            return False
        constrained.push(token)
    return True


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0"),
        ({"type": "number", "exclusiveMaximum": -2, "minimum": -2.5}, "-2.25", "-2"),
        ({"type": ["number", "null"], "exclusiveMinimum": 9, "exclusiveMaximum": 9.99}, "9.5", "9"),
        ({"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}], "type": "number"}, "1.25", "1"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0.25", "0"),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 5}, "1", "0"),
        ({"type": "integer", "minimum": BIG}, str(BIG + 1), str(BIG - 1)),
        ({"type": "integer", "minimum": 1 - 2**63, "maximum": 2**63 - 1}, "-5", str(2**63)),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": False}, "[null, null]", "[1]"),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"a": 1}', "[]"),
        ({"type": "string", "format": "path", "maxLength": 3}, '"a/b"', '"a/bc"'),
        ({"properties": {"format": {"const": "path"}}, "type": "object"}, '{"format": "path"}', "1"),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, '{"a": 1, "b": 1}', '{"a": 1}'),
        ({"type": "integer", "divisibleBy": 3}, "6", "7"),
        ({"type": "integer", "extends": {"minimum": 5}}, "6", "4"),
        ({"type": "integer", "extends": [{"minimum": 5}], "allOf": [{"maximum": 7}]}, "6", "8"),
    ],
)
def test_allowed_and_forbidden_replies(schema: Any, allowed: str, forbidden: str) -> None:
    assert accepts(schema, allowed)
    assert not accepts(schema, forbidden)


VERSIONS = [
    *(f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4, 6, 7)),
    *(f"https://json-schema.org/draft/{number}/schema" for number in ("2019-09", "2020-12")),
    "https://json-schema.org/draft-04/schema",
    "https://spec.openapis.org/oas/3.1/dialect/base",
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_of_a_schema_switches_no_keyword_off(version: str) -> None:
    """llguidance ignores keywords that do not exist in the version given by `$schema`."""
    for schema, allowed, forbidden in (
        ({"const": "a"}, '"a"', '"b"'),
        ({"items": {"const": 1}, "type": "array"}, "[1]", "[2]"),
        ({"prefixItems": [{"type": "string"}], "type": "array"}, '["a"]', "[1]"),
        ({"items": [{"type": "string"}], "additionalItems": False, "type": "array"}, '["a"]', '["a", 1]'),
        ({"minimum": 5, "exclusiveMinimum": True, "type": "integer"}, "6", "5"),
        ({"definitions": {"a": {"const": 1}}, "$ref": "#/definitions/a"}, "1", "2"),
        ({"properties": {"a": {"$schema": version, "const": 1}}, "type": "object"}, '{"a": 1}', '{"a": 2}'),
    ):
        assert accepts({"$schema": version, **schema}, allowed)
        assert not accepts({"$schema": version, **schema}, forbidden)
    for keyword, value in (
        ("contains", {"const": 1}),
        ("propertyNames", {"pattern": "^a$"}),
        ("if", {"type": "string"}),
        ("dependentRequired", {"a": ["b"]}),
        ("unevaluatedProperties", False),
        ("$recursiveRef", "#"),
        ("$dynamicRef", "#"),
        ("disallow", "string"),
    ):
        schema = {"$schema": version, "properties": {"a": {keyword: value}}}
        name = "not" if keyword == "disallow" else keyword
        with raises(OptionError, name, code="constraint_not_supported"):
            COMPILER.check(Constraint("schema", json.dumps(schema)))


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]),
        st.sampled_from(BOUNDS),
        min_size=1,
    )
)
def test_bounds(bounds: dict[str, str]) -> None:
    schema = {"type": "number", **{keyword: json.loads(bound) for keyword, bound in bounds.items()}}
    try:
        COMPILER.check(Constraint("schema", json.dumps(schema)))
    except OptionError as error:
        assert "Unsatisfiable" in error.what  # noqa: PT017
        return
    for text in ("0", "-0", *bounds.values(), *(f"{bound}.0" for bound in bounds.values())):
        if text.count(".") < 2 and "e" not in text and accepts(schema, text):
            number = Decimal(text)
            assert number >= Decimal(bounds.get("minimum", "-inf"))
            assert number > Decimal(bounds.get("exclusiveMinimum", "-inf"))
            assert number <= Decimal(bounds.get("maximum", "inf"))
            assert number < Decimal(bounds.get("exclusiveMaximum", "inf"))


@pytest.mark.parametrize(
    ("schema", "quoted"),
    [
        ({"properties": {"a/b": {"const": BIG}}}, (BIG, "#/properties/a~1b")),
        ({"enum": ["a", {"b": [0.1234567890123456789]}]}, ("digits",)),
        ({"type": "object", "minProperties": 2}, ("minProperties 2", "(in #)")),
        ({"items": {"not": {"type": "null"}}}, (": not", "#/items")),
        ({"$defs": {"d": {"if": {}, "then": {}}}, "$ref": "#/$defs/d"}, ("if, then", "#/$defs/d")),
        ({"prefixItems": [{"type": "string", "format": "regex"}]}, ("format regex", "#/prefixItems/0")),
        ({"anyOf": [{"oneOf": [{"type": "integer"}, {"type": "number"}]}]}, ("oneOf", "#/anyOf/0")),
    ],
)
def test_refused_parts_have_a_place(schema: Any, quoted: tuple[str, ...]) -> None:
    with raises(OptionError, *quoted, code="constraint_not_supported"):
        COMPILER.check(Constraint("schema", json.dumps(schema)))


def test_data_is_unchanged() -> None:
    data = {"uniqueItems": False, "format": "path", "exclusiveMinimum": 0, "items": {"uniqueItems": False}}
    for keyword, value in (("const", data), ("enum", [data]), ("default", data), ("examples", [data])):
        assert enforceable_schema({keyword: value}) == {keyword: value}


def test_lenient_schemas_keep_what_cannot_be_enforced() -> None:
    schema = {"minProperties": 2, "uniqueItems": False, "exclusiveMinimum": 0}
    assert enforceable_schema(schema, lenient=True) == {"minProperties": 2, "minimum": 1e-9}


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
