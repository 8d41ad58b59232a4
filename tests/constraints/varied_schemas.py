"""Sixty JSON schemas that use the keywords of real ones, as in JSONSchemaBench."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 12}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 99}


def record(properties: Schema, *, required: list[str] | None = None, **more: Any) -> Schema:
    """Return the schema of an object without other properties. All properties are required by default."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required is None else required,
        "additionalProperties": False,
        **more,
    }


def recursive(name: str, definition: Schema, **schema: Any) -> Schema:
    return {"$defs": {name: definition}, **(schema or {"$ref": f"#/$defs/{name}"})}


STRINGS: dict[str, Schema] = {
    "string-short": {"type": "string", "maxLength": 8},
    "string-length": {"type": "string", "minLength": 3, "maxLength": 6},
    "string-pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}$"},
    "string-pattern-inside": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 12},
    "string-pattern-choice": {"type": "string", "pattern": "^(GET|PUT|POST) /[a-z/]{1,12}$"},
    "string-pattern-version": {"type": "string", "pattern": r"^v?\d{1,2}(\.\d{1,2}){1,2}(-(alpha|beta))?$"},
    "string-pattern-unicode": {"type": "string", "pattern": "^[äöüß€]{1,4}$"},
    "string-pattern-escapes": {"type": "string", "pattern": '^[\\\\"/]{1,3}$'},
    "format-date": {"type": "string", "format": "date"},
    "format-date-time": {"type": "string", "format": "date-time"},
    "format-time": {"type": "string", "format": "time"},
    "format-email": {"type": "string", "format": "email", "maxLength": 30},
    "format-ipv4": {"type": "string", "format": "ipv4"},
    "format-ipv6": {"type": "string", "format": "ipv6"},
    "format-uuid": {"type": "string", "format": "uuid"},
}
NUMBERS: dict[str, Schema] = {
    "integer-range": {"type": "integer", "minimum": -5, "maximum": 1234},
    "integer-exclusive": {"type": "integer", "exclusiveMinimum": 17, "exclusiveMaximum": 20},
    "integer-negative": {"type": "integer", "minimum": -300, "maximum": -20},
    "integer-multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 25},
    "number-range": {"type": "number", "minimum": 0, "maximum": 1},
    "number-exclusive": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    "number-or-null": {"type": ["number", "null"], "minimum": 0, "maximum": 10},
    "coordinates": record(
        {
            "lat": {"type": "number", "minimum": -90, "maximum": 90},
            "lon": {"type": "number", "minimum": -180, "maximum": 180},
        }
    ),
}
CHOICES: dict[str, Schema] = {
    "enum-strings": {"enum": ["small", "medium", "large", "extra large"]},
    "enum-mixed": {"enum": [1, "one", None, True, [1, 2], {"one": 1}]},
    "const-object": {"const": {"version": 2, "tags": ["a", "b"], "empty": {}}},
    "any-of-types": {"anyOf": [COUNT, {"type": "boolean"}, {"type": "null"}]},
    "any-of-objects": {
        "anyOf": [
            record({"kind": {"const": "circle"}, "radius": COUNT}),
            record({"kind": {"const": "box"}, "width": COUNT, "height": COUNT}),
        ]
    },
    "one-of-tagged": {
        "oneOf": [
            record({"type": {"const": "text"}, "text": TEXT}),
            record({"type": {"const": "image"}, "url": {"type": "string", "pattern": "^/[a-z]{1,8}$"}}),
        ]
    },
    "all-of-bounds": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "all-of-objects": {
        "allOf": [{"properties": {"a": COUNT}, "required": ["a"]}, record({"a": {"type": "integer"}})]
    },
    "types": {"type": ["boolean", "null"]},
    "nullable-enum": record({"level": {"enum": ["low", "high", None]}}),
}
ARRAYS: dict[str, Schema] = {
    "array-bounds": {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 4},
    "array-exact": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "array-empty": {"type": "array", "items": TEXT, "maxItems": 0},
    "array-tuple": {"type": "array", "prefixItems": [TEXT, COUNT], "items": False, "minItems": 2},
    "array-tuple-rest": {"type": "array", "prefixItems": [{"const": "x"}], "items": COUNT, "maxItems": 3},
    "array-nested": {
        "type": "array",
        "items": {"type": "array", "items": COUNT, "minItems": 1, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "array-objects": {
        "type": "array",
        "items": record({"id": COUNT, "name": TEXT}),
        "minItems": 1,
        "maxItems": 2,
    },
    "array-any-of": {"type": "array", "items": {"anyOf": [COUNT, TEXT]}, "minItems": 1, "maxItems": 3},
}
OBJECTS: dict[str, Schema] = {
    "object-empty": record({}),
    "object-optional": record({"a": COUNT, "b": TEXT, "c": {"type": "boolean"}}, required=["b"]),
    "object-all-optional": record({"a": COUNT, "b": COUNT}, required=[]),
    "object-typed-others": {
        "type": "object",
        "properties": {"name": TEXT},
        "required": ["name"],
        "additionalProperties": {"type": "integer"},
    },
    "object-open": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
    "object-pattern-properties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,4}$": COUNT},
        "additionalProperties": False,
    },
    "object-odd-names": record({'a "quoted" name': COUNT, "π": TEXT, "": {"type": "null"}, "a\nb": COUNT}),
    "object-nested": record({"user": record({"name": TEXT, "home": record({"city": TEXT, "zip": COUNT})})}),
    "object-wide": record({f"field_{index}": {"type": "boolean"} for index in range(12)}),
}
REFERENCES: dict[str, Schema] = {
    "ref-shared": recursive(
        "point",
        record({"x": COUNT, "y": COUNT}),
        **record(
            {
                "from": {"$ref": "#/$defs/point"},
                "to": {"$ref": "#/$defs/point"},
            }
        ),
    ),
    "ref-definitions": {"definitions": {"name": TEXT}, **record({"name": {"$ref": "#/definitions/name"}})},
    "ref-list": recursive(
        "list", record({"head": COUNT, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}})
    ),
    "ref-tree": recursive(
        "tree",
        record(
            {"value": COUNT, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}
        ),
    ),
    "ref-mutual": {
        "$defs": {
            "folder": record(
                {
                    "name": TEXT,
                    "items": {
                        "type": "array",
                        "items": {"$ref": "#/$defs/item"},
                        "maxItems": 2,
                    },
                }
            ),
            "item": {"anyOf": [TEXT, {"$ref": "#/$defs/folder"}]},
        },
        "$ref": "#/$defs/folder",
    },
    "ref-root": record({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
}
PROGRAMS: dict[str, Schema] = {
    "tool-call": record(
        {
            "name": {"enum": ["list_files", "read_file"]},
            "arguments": record({"path": {"type": "string", "pattern": "^/[a-z/]{1,16}$"}}),
        }
    ),
    "invoice": record(
        {
            "number": {"type": "string", "pattern": "^INV-[0-9]{4}$"},
            "date": {"type": "string", "format": "date"},
            "lines": {
                "type": "array",
                "items": record(
                    {
                        "item": TEXT,
                        "quantity": COUNT,
                        "price": {"type": "number", "minimum": 0, "maximum": 100},
                    }
                ),
                "minItems": 1,
                "maxItems": 2,
            },
            "paid": {"type": "boolean"},
        }
    ),
    "configuration": record(
        {
            "server": record(
                {
                    "host": {"type": "string", "format": "ipv4"},
                    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                }
            ),
            "log": {"enum": ["debug", "info", "error"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "maxItems": 3},
        },
        required=["server", "log"],
    ),
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/review.json",
        "title": "Review",
        "description": "A review of a film.",
        **record(
            {
                "stars": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 5,
                    "description": "Number of stars.",
                    "default": 3,
                },
                "text": {**TEXT, "examples": ["good"]},
            }
        ),
    },
}
SCHEMAS = STRINGS | NUMBERS | CHOICES | ARRAYS | OBJECTS | REFERENCES | PROGRAMS
