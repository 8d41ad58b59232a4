"""JSON schemas with keywords, combinations and values that real schemas use less often.

`edgespec` may refuse a schema, but its replies must not violate it. See `test_varied_schemas.py`.
"""

from __future__ import annotations

from tests.constraints.varied_schemas import COUNT, TEXT, Schema, record, recursive

FLAG: Schema = {"type": "boolean"}
DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"


def nested(depth: int, inner: Schema) -> Schema:
    """Return the schema of objects in objects."""
    for level in range(depth):
        inner = record({f"level_{level}": inner})
    return inner


def nested_arrays(depth: int, inner: Schema) -> Schema:
    for _ in range(depth):
        inner = {"type": "array", "items": inner, "minItems": 1, "maxItems": 1}
    return inner


LENGTHS: dict[str, Schema] = {
    "string-empty": {"type": "string", "maxLength": 0},
    "string-one": {"type": "string", "minLength": 1, "maxLength": 1},
    "string-long": {"type": "string", "minLength": 60, "maxLength": 80},
    "length-without-type": {"minLength": 2, "maxLength": 4, "enum": ["a", "abc", "abcdef", 7]},
    "pattern-and-length": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
    "pattern-open-and-length": {"type": "string", "pattern": "ab", "minLength": 4, "maxLength": 8},
    "pattern-start": {"type": "string", "pattern": "^ID", "maxLength": 8},
    "pattern-end": {"type": "string", "pattern": "!$", "maxLength": 8},
    "pattern-empty": {"type": "string", "pattern": "", "maxLength": 8},
    "pattern-or": {"type": "string", "pattern": "^a|b$", "maxLength": 6},
    "pattern-group": {"type": "string", "pattern": "^(?:ab|cd){2,3}$"},
    "pattern-dot": {"type": "string", "pattern": "^.{3}$"},
    "pattern-word": {"type": "string", "pattern": r"^\w{2,6}$"},
    "pattern-digit": {"type": "string", "pattern": r"^\d{2,6}$"},
    "pattern-space": {"type": "string", "pattern": r"^a\sb$"},
    "pattern-negated": {"type": "string", "pattern": "^[^a-z]{2,4}$"},
    "pattern-hyphen": {"type": "string", "pattern": r"^[\w.-]{1,8}$"},
    "pattern-slash": {"type": "string", "pattern": r"^\/[a-z]{1,4}\/$"},
    "pattern-unicode-escape": {"type": "string", "pattern": "^[\\u00e4-\\u00fc]{1,3}$"},
    "pattern-look-ahead": {"type": "string", "pattern": "^(?!a)[a-z]{1,4}$"},
    "pattern-back-reference": {"type": "string", "pattern": r"^([ab])\1$"},
    "pattern-boundary": {"type": "string", "pattern": r"\bcat\b", "maxLength": 9},
    "pattern-escaped-dollar": {"type": "string", "pattern": r"^\$[0-9]{1,4}$"},
    "pattern-lazy": {"type": "string", "pattern": "^a{1,3}?b$"},
    "pattern-and-format": {"type": "string", "pattern": "^2", "format": "date"},
    "pattern-newline": {"type": "string", "pattern": "^a\nb$"},
    "pattern-control": {"type": "string", "pattern": "^\\x01{1,2}$"},
    "pattern-astral": {"type": "string", "pattern": "^[😀-😄]{1,2}$"},
    "pattern-twice": {"allOf": [{"pattern": "^a"}, {"pattern": "b$"}], "type": "string", "maxLength": 6},
}
FORMATS: dict[str, Schema] = {
    f"format-{name}": {"type": "string", "format": name, "maxLength": 40}
    for name in (
        *("date", "date-time", "time", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "duration"),
        *("regex", "json-pointer", "idn-email", "uri-reference", "iri", "unknown-format"),
    )
}
BOUNDS: dict[str, Schema] = {
    "integer-any": {"type": "integer"},
    "integer-one-value": {"type": "integer", "minimum": 7, "maximum": 7},
    "integer-large": {"type": "integer", "minimum": 10**15, "maximum": 10**15 + 20},
    "integer-fraction-bounds": {"type": "integer", "minimum": 1.5, "maximum": 4.5},
    "integer-both-minimums": {"type": "integer", "minimum": 3, "exclusiveMinimum": 3, "maximum": 6},
    "integer-no-value": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    "integer-zero": {"type": "integer", "minimum": -0.0, "maximum": 0},
    "integer-multiple-negative": {"type": "integer", "minimum": -40, "maximum": -5, "multipleOf": 15},
    "integer-multiple-seven": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 10**6},
    "integer-multiple-two": {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"},
    "number-any": {"type": "number"},
    "number-multiple": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 3},
    "number-small": {"type": "number", "minimum": 1e-7, "maximum": 1e-5},
    "number-negative": {"type": "number", "exclusiveMaximum": 0},
    "number-tight": {"type": "number", "minimum": 0.123, "maximum": 0.124},
    "number-huge": {"type": "number", "minimum": 1e20},
    "minimum-without-type": {"minimum": 5, "maximum": 9},
    "exclusive-draft-4": {
        "$schema": DRAFT_4,
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 5,
    },
    "integer-or-text": {"type": ["integer", "string"], "minimum": 3, "maximum": 8, "maxLength": 2},
}
VALUES: dict[str, Schema] = {
    "enum-one": {"enum": ["only"]},
    "enum-prefixes": {"enum": ["a", "ab", "abc", "abcd"]},
    "enum-typed": {"type": "integer", "enum": [1, "one", 2, None, 3.5]},
    "enum-no-value": {"type": "integer", "enum": ["one", "two"]},
    "enum-unicode": {
        "enum": ["zażółć", "日本", "🙂", 'quo"te', "back\\slash", "line\nbreak", "\u007f\u0001"]
    },
    "enum-numbers": {"enum": [1, 1.5, -2, 1e3, 0]},
    "enum-objects": {"enum": [{"a": 1, "b": [True, None]}, [], {}, [[]], ""]},
    "enum-large": {"enum": [f"item {index:03d}" for index in range(300)]},
    "enum-empty": {"enum": []},
    "const-null": {"const": None},
    "const-text": {"const": 'a "quoted" / \\ text\twith ünicode'},
    "const-float": {"const": 1.0},
    "const-and-type": {"type": "string", "const": 5},
    "const-and-enum": {"const": "b", "enum": ["a", "b"]},
    "const-deep": {"const": {"a": {"b": {"c": [1, {"d": None}]}}}},
    "true": {"type": "array", "items": True, "maxItems": 0},
    "anything": {"maxLength": 5, "type": ["string", "null"], "title": "Anything", "default": None},
    "type-empty": {"type": []},
    "nothing": {"not": {}},
}
COMBINATIONS: dict[str, Schema] = {
    "not-const": {"type": "integer", "minimum": 1, "maximum": 3, "not": {"const": 2}},
    "not-type": {"not": {"type": "string"}},
    "not-required": record({"a": COUNT, "b": COUNT}, required=[], **{"not": {"required": ["a", "b"]}}),
    "if-then": record(
        {"kind": {"enum": ["a", "b"]}, "size": COUNT},
        required=["kind"],
        **{"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["size"]}},
    ),
    "if-then-else": {
        "type": "integer",
        "minimum": 0,
        "maximum": 9,
        "if": {"maximum": 4},
        "then": {"multipleOf": 2},
        "else": {"multipleOf": 3},
    },
    "dependent-required": record({"a": COUNT, "b": COUNT}, required=[], dependentRequired={"a": ["b"]}),
    "dependent-schemas": record(
        {"a": COUNT, "b": COUNT}, required=[], dependentSchemas={"a": {"required": ["b"]}}
    ),
    "dependencies-draft-7": {
        "$schema": DRAFT_7,
        **record({"a": COUNT, "b": COUNT}, required=[], dependencies={"a": ["b"]}),
    },
    "one-of-overlap": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]},
    "one-of-bounds": {
        "oneOf": [
            {"type": "integer", "minimum": 0, "maximum": 9},
            {"type": "integer", "minimum": 10, "maximum": 19},
        ]
    },
    "one-of-required": {
        "type": "object",
        "properties": {"a": COUNT, "b": COUNT},
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "one-of-consts": {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
    "one-of-same": {"oneOf": [{"const": "a"}, {"const": "a"}, {"const": "b"}]},
    "one-of-lengths": {"type": "string", "oneOf": [{"maxLength": 3}, {"minLength": 2, "maxLength": 6}]},
    "any-of-required": {
        "type": "object",
        "properties": {"a": COUNT, "b": COUNT},
        "additionalProperties": False,
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "any-of-beside": {"type": "integer", "minimum": 3, "anyOf": [{"maximum": 4}, {"multipleOf": 50}]},
    "any-of-impossible": {"type": "string", "anyOf": [{"type": "integer"}, {"maxLength": 3}]},
    "any-of-empty": {"anyOf": []},
    "all-of-closed": {"allOf": [record({"a": COUNT}), record({"b": COUNT})]},
    "all-of-open": {
        "allOf": [
            {"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
            {"type": "object", "properties": {"b": FLAG}, "required": ["b"]},
        ],
        "additionalProperties": False,
    },
    "all-of-unevaluated": {
        "allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]}],
        "properties": {"b": FLAG},
        "required": ["b"],
        "unevaluatedProperties": False,
    },
    "all-of-enums": {"allOf": [{"enum": ["a", "b", "c"]}, {"enum": ["b", "c", "d"]}]},
    "all-of-impossible": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "all-of-any-of": {
        "allOf": [
            {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "null"}]},
            {"anyOf": [{"minimum": 3}, {"type": "boolean"}]},
        ]
    },
}
LISTS: dict[str, Schema] = {
    "array-open": {"type": "array", "items": COUNT},
    "array-minimum": {"type": "array", "items": FLAG, "minItems": 5, "maxItems": 5},
    "array-large": {"type": "array", "items": {"type": "null"}, "minItems": 20, "maxItems": 20},
    "array-nothing": {"type": "array", "items": {"not": {}}},
    "array-items-false": {"type": "array", "items": False},
    "array-unique": {"type": "array", "items": COUNT, "uniqueItems": True, "maxItems": 3},
    "array-not-unique": {"type": "array", "items": COUNT, "uniqueItems": False, "maxItems": 3},
    "array-contains": {"type": "array", "contains": {"const": 1}, "items": COUNT, "maxItems": 3},
    "array-bounds-crossed": {"type": "array", "items": COUNT, "minItems": 3, "maxItems": 2},
    "array-prefix-short": {"type": "array", "prefixItems": [COUNT, FLAG, TEXT], "maxItems": 2},
    "array-prefix-optional": {"type": "array", "prefixItems": [COUNT, FLAG], "items": False},
    "array-prefix-rest": {
        "type": "array",
        "prefixItems": [COUNT],
        "items": FLAG,
        "minItems": 3,
        "maxItems": 4,
    },
    "array-draft-7-tuple": {
        "$schema": DRAFT_7,
        "type": "array",
        "items": [COUNT, FLAG],
        "additionalItems": False,
        "minItems": 2,
    },
    "array-unevaluated": {"type": "array", "prefixItems": [COUNT], "unevaluatedItems": False},
    "array-deep": nested_arrays(12, COUNT),
    "array-without-type": {"items": COUNT, "minItems": 1, "maxItems": 2},
    "array-of-enums": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
    "array-of-any-of-arrays": {
        "type": "array",
        "items": {"anyOf": [{"type": "array", "items": FLAG, "maxItems": 2}, COUNT]},
        "minItems": 1,
        "maxItems": 3,
    },
}
RECORDS: dict[str, Schema] = {
    "object-any": {"type": "object"},
    "object-required-only": {"type": "object", "required": ["a", "b"]},
    "object-required-unknown": record({"a": COUNT}, required=["b"]),
    "object-required-twice": record({"a": COUNT}, required=["a", "a"]),
    "object-required-typed": {
        "type": "object",
        "required": ["z", "a"],
        "properties": {"a": COUNT},
        "additionalProperties": FLAG,
    },
    "object-unicode-names": record(
        {"名前": TEXT, "größe": COUNT, "🙂": FLAG, "tab\tname": COUNT, "\\": FLAG}
    ),
    "object-prefix-names": record({"a": COUNT, "ab": COUNT, "abc": COUNT}, required=["ab"]),
    "object-forbidden-name": {
        "type": "object",
        "properties": {"a": COUNT, "b": False},
        "required": ["a"],
        "additionalProperties": False,
    },
    "object-true-property": record({"a": {"const": 1}, "b": True}, required=["a"]),
    "object-minimum": {
        "type": "object",
        "additionalProperties": COUNT,
        "minProperties": 2,
        "maxProperties": 3,
    },
    "object-maximum": {"type": "object", "additionalProperties": FLAG, "maxProperties": 1},
    "object-property-names": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$"},
        "additionalProperties": COUNT,
    },
    "object-map": {"type": "object", "additionalProperties": record({"x": COUNT})},
    "object-two-patterns": {
        "type": "object",
        "patternProperties": {"^a": COUNT, "^b": FLAG},
        "additionalProperties": False,
    },
    "object-overlapping-patterns": {
        "type": "object",
        "patternProperties": {"a": {"type": "integer"}, "b": {"maximum": 5}},
        "additionalProperties": False,
    },
    "object-pattern-and-property": {
        "type": "object",
        "properties": {"ab": {"type": "integer"}},
        "patternProperties": {"^a": {"maximum": 5, "minimum": 0}},
        "required": ["ab"],
        "additionalProperties": False,
    },
    "object-pattern-others": {
        "type": "object",
        "properties": {"a": COUNT},
        "patternProperties": {"^x": FLAG},
        "additionalProperties": {"type": "null"},
    },
    "object-unevaluated": {**record({"a": COUNT}), "unevaluatedProperties": False},
    "object-without-type": {"properties": {"a": COUNT}, "required": ["a"], "additionalProperties": False},
    "object-or-null": {"type": ["object", "null"], "properties": {"a": COUNT}, "additionalProperties": False},
    "object-many": record({f"name_{index}": {"type": "null"} for index in range(40)}),
    "object-many-optional": record({f"n{index}": FLAG for index in range(40)}, required=["n39"]),
    "object-deep": nested(25, COUNT),
    "object-read-only": record(
        {"id": {**COUNT, "readOnly": True, "deprecated": True, "$comment": "An id", "examples": [1]}}
    ),
    "object-unknown-keyword": record({"id": {**COUNT, "x-order": 3, "unit": "m"}}),
    "object-nullable": record({"id": {**COUNT, "nullable": True}}),
}
POINTERS: dict[str, Schema] = {
    "ref-beside": {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 9},
    "ref-chain": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": COUNT},
        **record({"v": {"$ref": "#/$defs/a"}}),
    },
    "ref-escaped": {"$defs": {"a/b~c d": COUNT}, **record({"v": {"$ref": "#/$defs/a~1b~0c%20d"}})},
    "ref-property": record({"a": COUNT, "b": {"$ref": "#/properties/a"}}),
    "ref-item": {
        "type": "array",
        "prefixItems": [COUNT, {"$ref": "#/prefixItems/0"}],
        "items": False,
        "minItems": 2,
    },
    "ref-anchor": {"$defs": {"n": {"$anchor": "num", **COUNT}}, **record({"v": {"$ref": "#num"}})},
    "ref-missing": record({"v": {"$ref": "#/$defs/none"}}),
    "ref-remote": record({"v": {"$ref": "https://example.com/schema.json"}}),
    "ref-id": {
        "$id": "https://example.com/root.json",
        "$defs": {"n": COUNT},
        **record({"v": {"$ref": "root.json#/$defs/n"}}),
    },
    "ref-loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "ref-dynamic": {
        "$dynamicAnchor": "node",
        **record({"next": {"anyOf": [{"$dynamicRef": "#node"}, {"type": "null"}]}}),
    },
    "ref-in-any-of": {
        "$defs": {"a": record({"k": {"const": "a"}}), "b": record({"k": {"const": "b"}})},
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    },
    "ref-expression": recursive(
        "expression",
        {
            "anyOf": [
                COUNT,
                record(
                    {
                        "operator": {"enum": ["+", "-"]},
                        "left": {"$ref": "#/$defs/expression"},
                        "right": {"$ref": "#/$defs/expression"},
                    }
                ),
            ]
        },
    ),
    "ref-optional-self": record({"name": TEXT, "child": {"$ref": "#"}}, required=["name"]),
    "ref-map-of-self": {"type": "object", "additionalProperties": {"$ref": "#"}},
    "ref-json": recursive(
        "json",
        {
            "anyOf": [
                *({"type": name} for name in ("null", "boolean", "integer")),
                TEXT,
                {"type": "array", "items": {"$ref": "#/$defs/json"}, "maxItems": 3},
                {"type": "object", "additionalProperties": {"$ref": "#/$defs/json"}},
            ]
        },
    ),
    "ref-one-of": {
        "$defs": {"cat": record({"meow": FLAG}), "dog": record({"bark": FLAG})},
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
    },
}
UNUSUAL: dict[str, Schema] = LENGTHS | FORMATS | BOUNDS | VALUES | COMBINATIONS | LISTS | RECORDS | POINTERS
# Schemas that cannot be enforced exactly, or that no value satisfies.
REFUSED = {
    *("pattern-look-ahead", "pattern-back-reference", "pattern-boundary", "format-regex"),
    *("format-json-pointer", "format-idn-email", "format-uri-reference", "format-iri"),
    *("integer-no-value", "number-huge", "enum-no-value", "enum-empty", "const-and-type", "type-empty"),
    *("nothing", "not-const", "not-type", "not-required", "if-then", "if-then-else"),
    *("dependent-required", "dependent-schemas", "dependencies-draft-7", "one-of-overlap"),
    *("one-of-bounds", "one-of-required", "one-of-same", "one-of-lengths", "any-of-empty"),
    *("all-of-closed", "all-of-open", "all-of-unevaluated", "all-of-impossible", "array-nothing"),
    *("array-unique", "array-contains", "array-bounds-crossed", "array-unevaluated"),
    *("object-required-unknown", "object-minimum", "object-property-names"),
    *("object-overlapping-patterns", "object-unevaluated", "ref-missing", "ref-remote", "ref-loop"),
    *("ref-dynamic",),
}
