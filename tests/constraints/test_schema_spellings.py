"""Schemas in other languages' and APIs' formats mean the same as in standard JSON Schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgespec.errors import OptionError
from edgespec.options.schemas.spellings import read_schema
from tests.constraints.test_enforceable_schemas import accepts
from tests.raising import raises

STRING = {"type": "string"}
OBJECT: Any = {"type": "object", "properties": {"a": STRING}, "required": ["a"]}


def nested(schema: Any) -> Any:
    """Return a schema that contains another one in several places."""
    return {
        "type": "object",
        "properties": {"deep": {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}},
        "$defs": {"d": schema},
    }


@pytest.mark.parametrize("wrap", [lambda schema: schema, nested])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        # PHP writes an empty map as [], and lists with gaps as objects.
        ({"type": "object", "properties": []}, {"type": "object", "properties": {}}),
        ({"type": "object", "$defs": []}, {"type": "object", "$defs": {}}),
        ({"type": "object", "additionalProperties": []}, {"type": "object", "additionalProperties": {}}),
        ({"properties": {"a": []}}, {"properties": {"a": {}}}),
        ({"type": "array", "items": []}, {"type": "array", "items": {}}),
        ({"enum": {"0": "x", "2": "y"}}, {"enum": ["x", "y"]}),
        ({**OBJECT, "required": {"1": "a"}}, OBJECT),
        # C# and Go write null for whatever is not set.
        (
            {"type": "object", "properties": None, "required": None, "additionalProperties": None},
            {"type": "object"},
        ),
        ({**STRING, "enum": None, "minLength": None, "format": None, "$ref": None, "anyOf": None}, STRING),
        ({"type": None, "const": None}, {"const": None}),
        ({"properties": {"a": None}}, {"properties": {"a": {}}}),
        ({"type": "array", "items": None}, {"type": "array"}),
        # Lua writes an empty list as {}.
        ({"type": "object", "required": {}}, {"type": "object", "required": []}),
        ({**STRING, "enum": {}, "allOf": {}, "oneOf": []}, STRING),
        # Early versions of JSON Schema.
        ({"type": "object", "properties": {"a": {**STRING, "required": True}}}, OBJECT),
        (
            {"type": "object", "properties": {"a": {**STRING, "required": False}}},
            {"type": "object", "properties": {"a": STRING}},
        ),
        ({**OBJECT, "required": "a"}, OBJECT),
        # The types of Google's APIs, OpenAPI and Python.
        ({"type": "STRING"}, STRING),
        ({"type": ["string", None]}, {"type": ["string", "null"]}),
        ({"type": ["Int", "FLOAT"]}, {"type": ["integer", "number"]}),
        ({"type": "dict"}, {"type": "object"}),
        ({"type": "any"}, {}),
        ({"type": []}, {}),
        # OpenAPI's way to allow null.
        ({**STRING, "nullable": True}, {"type": ["string", "null"]}),
        ({**STRING, "nullable": False}, STRING),
        (
            {"type": "INTEGER", "enum": [1, 2], "nullable": True},
            {"type": ["integer", "null"], "enum": [1, 2, None]},
        ),
        (
            {"type": ["string", "null"], "enum": [None], "nullable": True},
            {"type": ["string", "null"], "enum": [None]},
        ),
        ({"enum": ["a"], "nullable": True}, {"enum": ["a", None]}),
        ({"const": 5, "nullable": True}, {"anyOf": [{"const": 5}, {"type": "null"}]}),
        (
            {"anyOf": [STRING, OBJECT], "nullable": True},
            {"anyOf": [{"anyOf": [STRING, OBJECT]}, {"type": "null"}]},
        ),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": STRING}, "nullable": True},
            {"$defs": {"a": STRING}, "anyOf": [{"allOf": [{"$ref": "#/$defs/a"}]}, {"type": "null"}]},
        ),
        ({"properties": {"nullable": STRING}}, {"properties": {"nullable": STRING}}),
        ({"default": {"nullable": True}}, {"default": {"nullable": True}}),
        # Names of properties and data are left alone.
        (
            {"properties": {"required": STRING, "enum": {"const": []}}},
            {"properties": {"required": STRING, "enum": {"const": []}}},
        ),
        ({"enum": [None, [], {"type": None}]}, {"enum": [None, [], {"type": None}]}),
    ],
)
def test_spellings(wrap: Any, written: Any, meant: Any) -> None:
    assert read_schema(wrap(written), "schema") == wrap(meant)
    assert read_schema(wrap(meant), "schema") == wrap(meant)


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(OBJECT),
        {"name": "x", "schema": OBJECT, "strict": True},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}},
        {"type": "json_schema", "json_schema": {"schema": json.dumps(OBJECT)}},
        {"type": "json_schema", "schema": OBJECT},
        {"type": "json", "value": OBJECT},
    ],
)
def test_wrappers(written: Any) -> None:
    assert read_schema(written, "schema") == OBJECT


def test_the_order_of_keys_stays_the_same() -> None:
    schema = {"required": ["a"], "properties": {"b": STRING, "a": STRING}, "type": "object"}
    assert json.dumps(read_schema(schema, "schema")) == json.dumps(schema)


def test_a_property_can_have_the_name_of_a_wrapper() -> None:
    schema = {"type": "object", "properties": {"schema": STRING, "value": STRING}}
    assert read_schema(schema, "schema") == schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": [{"name": "a"}]}, "properties in s"),
        ({"properties": {"a/b": {"items": 5}}}, "#/properties/a~1b/items"),
        ({"properties": {"a": "string"}}, "a JSON schema"),
        ({"type": "text"}, "type in s"),
        ({"enum": "red"}, "enum in s"),
        ({"anyOf": {"a": {}}}, "anyOf in s"),
        ({"properties": {"a": {"nullable": "yes"}}}, "#/properties/a"),
        ("{", "valid JSON"),
        (5, "a JSON schema"),
        ([OBJECT], "a JSON schema"),
    ],
)
def test_what_is_uncertain_is_refused(schema: Any, message: str) -> None:
    with raises(OptionError, message, code="constraint_invalid"):
        read_schema(schema, "s")


def test_an_endless_schema_is_refused() -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"items": schema}
    with raises(OptionError, "nested", code="constraint_invalid"):
        read_schema(schema, "s")


def test_nullable_allows_null() -> None:
    parts = {"s": {"enum": ["x"], "nullable": True}, "r": {"$ref": "#/$defs/a", "nullable": True}}
    schema = read_schema({**OBJECT, "properties": parts, "required": ["s", "r"], "$defs": {"a": STRING}}, "s")
    for text, is_valid in (
        ("[null, null]", True),
        ('["x", "y"]', True),
        ("[5, null]", False),
        ("[null, 5]", False),
    ):
        first, second = json.loads(text)
        assert accepts(schema, json.dumps({"s": first, "r": second})) is is_valid


def test_replies_satisfy_what_is_meant() -> None:
    schema = read_schema({"type": "OBJECT", "properties": {"a": {"type": "INTEGER", "required": True}}}, "s")
    assert accepts(schema, '{"a": 1}')
    assert not accepts(schema, "{}")


@pytest.mark.parametrize(
    "example",
    [
        {"a": "string"},
        {"name": "string"},
        {"name": {"type": "string"}, "age": {"type": "integer"}},
        {"title": "string", "year": "number"},
        {"schema": {"foo": "string"}},
        '{"answer": 42}',
        {"name": "x", "strict": True},
    ],
)
def test_examples_of_answers_are_no_schemas(example: Any) -> None:
    with raises(OptionError, "not contain a schema", code="constraint_invalid"):
        read_schema(example, "s")


@pytest.mark.parametrize("schema", [{}, {"title": "Any"}, {"description": "x", "default": 1}, {"minimum": 1}])
def test_schemas_can_allow_almost_everything(schema: dict[str, Any]) -> None:
    assert read_schema(schema, "s") == schema
