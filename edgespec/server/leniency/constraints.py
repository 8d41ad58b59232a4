"""Parse answer constraints from every field and format that clients use.

A constraint must never be ignored, because the client could then get text that violates it. Every endpoint
therefore accepts all of these fields and formats, and `fields.py` rejects unknown fields whose names suggest
a constraint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from pydantic import Field

from edgespec.errors import OptionError
from edgespec.options.reply_options import CONSTRAINT_NAMES
from edgespec.options.schemas.other_properties import closed_objects
from edgespec.options.schemas.spellings import SCHEMA_KEYS, read_schema
from edgespec.server.errors import invalid_request
from edgespec.server.fields import Ignored, RequestFields

__all__ = ["ConstraintFields", "answer_constraint", "constraints_in"]

_FORMAT = "The format of the answer: text, any JSON object, or JSON that satisfies a schema."


class AnswerSettings(RequestFields):
    """Answer settings: `text` in OpenAI's Responses API, and `output_config` in Anthropic's API."""

    format: Any = Field(default=None, description=_FORMAT)
    verbosity: Ignored
    effort: Ignored

    def _own_ignored_fields(self) -> list[str]:
        return [*super()._own_ignored_fields(), *_unread_in_formats(self, "format")]


class StructuredOutputs(RequestFields):
    """vLLM's `structured_outputs` field, which holds a single constraint on the answer."""

    # Do not ignore unknown fields, because they may be constraints.
    ignores_unknown = False

    json_: Any = Field(default=None, alias="json", description="Same as schema.")
    json_object: bool | None = Field(default=None, description="true makes the answer a JSON object.")
    regex: str | None = Field(default=None, description="Same as the request's regex field.")
    choice: list[str] | None = Field(default=None, description="Same as the request's choice field.")
    grammar: str | None = Field(default=None, description="Same as the request's grammar field.")


class GuidedFields(RequestFields):
    """Constraint fields of older vLLM versions. NVIDIA's servers nest them in `nvext`."""

    guided_json: Any = Field(default=None, description="Same as schema.")
    guided_regex: str | None = Field(default=None, description="Same as regex.")
    guided_choice: list[str] | None = Field(default=None, description="Same as choice.")
    guided_grammar: str | None = Field(default=None, description="Same as grammar.")


class ConstraintFields(GuidedFields):
    """The fields that clients of other APIs and servers use to constrain the answer."""

    response_format: Any = Field(default=None, description=_FORMAT)
    format: Any = Field(default=None, description=f"{_FORMAT} As in Ollama's API.")
    text: AnswerSettings | None = None
    output_format: Any = Field(default=None, description=f"{_FORMAT} As in Anthropic's API.")
    output_config: AnswerSettings | None = None
    json_schema: Any = Field(default=None, description="Same as schema, as in llama.cpp and SGLang.")
    response_schema: Any = Field(default=None, description="Same as schema, as in Google's API.")
    output_schema: Any = Field(default=None, description="Same as schema.")
    structured_outputs: StructuredOutputs | None = None
    nvext: GuidedFields | None = None

    def _own_ignored_fields(self) -> list[str]:
        formats = _unread_in_formats(self, "response_format", "format", "output_format")
        return [*super()._own_ignored_fields(), *formats]


_Reader: TypeAlias = Callable[[Any, str], dict[str, Any]]


def _schema(value: Any, place: str) -> dict[str, Any]:
    return {"schema": closed_objects(read_schema(value, place))}


def _object(value: Any, _place: str) -> dict[str, Any]:
    return {"schema": {"type": "object"}} if value else {}


def _option(name: str) -> _Reader:
    return lambda value, _: {name: value}


# Keywords whose presence shows that a `json_object` response format is itself the schema.
_INLINE_KEYWORDS = frozenset({"properties", "required", "anyOf", "oneOf", "allOf", "$ref"})
# Constraints that a response format of a different type must not contain.
_OTHER_CONSTRAINTS = ("regex", "grammar", "choice")
_FORMAT_HINT = "use text, json_object or json_schema"


def _format(value: Any, place: str) -> dict[str, Any]:
    """Parse a response format: `json`, an object with a type such as `json_schema`, or the schema itself."""
    if value == "text" or _is_unset(value):
        return {}
    if value in ("json", "json_object"):
        return _object(True, place)
    if isinstance(value, str):
        if not value.lstrip().startswith("{"):
            raise OptionError(
                f"{place} {value[:40]!r} is not supported", _FORMAT_HINT, code="constraint_invalid"
            )
        return _schema(value, place)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind.lower() not in _SCHEMA_TYPES:
        for other in _OTHER_CONSTRAINTS:
            if other != kind and value.get(other):
                raise OptionError(
                    f"{place} has the type {kind[:40]}, but also a {other} field",
                    f"leave out {place}, and set {other} in the request instead",
                    code="option_conflict",
                )
    given = [key for key in SCHEMA_KEYS if isinstance(kind, str) and value.get(key) is not None]
    key = next((each for each in given if not _is_unset(value[each])), next(iter(given), None))
    is_set = key is not None and not _is_unset(value[key])
    match kind:
        case "text":
            inline = next(iter(_INLINE_KEYWORDS & value.keys()), None)
            if inline or is_set:
                raise OptionError(
                    f"{place} has the type text, but also a {key if is_set else inline} field",
                    "use the type json_schema",
                    code="option_conflict",
                )
            return {}
        case "json" | "json_object" | "json_schema" if not is_set and _INLINE_KEYWORDS & value.keys():
            inner = {name: each for name, each in value.items() if name not in _FORMAT_KEYS}
            return _schema({**inner, "type": "object"}, place)
        case "json" | "json_object" if not is_set:
            return _object(True, place)
        case "json" | "json_object" | "json_schema":
            if key is None or not (is_set or _allows_any(key, value[key])):
                is_nested = key == "json_schema" or place == "response_format"
                missing = f"{place}.json_schema.schema" if is_nested else f"{place}.schema"
                raise OptionError(
                    f"{place} has the type json_schema, but no schema",
                    f"add {missing}, or use the type json_object for any JSON object",
                    code="constraint_invalid",
                )
            return _schema(value[key], f"{place}.{key}")
        case "regex" | "grammar":
            constraint = value.get(kind) or value.get("value")
            if not isinstance(constraint, str):
                raise OptionError(
                    f"{place} has type {kind}, but no {kind}",
                    f"add {place}.{kind}",
                    code="constraint_invalid",
                )
            return {kind: constraint}
    if isinstance(kind, str) and kind.lower() not in _SCHEMA_TYPES:
        raise OptionError(
            f"{place}.type {kind[:40]!r} is not supported", _FORMAT_HINT, code="constraint_invalid"
        )
    return _schema(value, place)


def _allows_any(key: str, value: Any) -> bool:
    """Return whether the schema under a response format's key is `{}`, which allows any JSON."""
    return value == {} if key != "json_schema" else isinstance(value, Mapping) and value.get("schema") == {}


def _is_unset(value: Any) -> bool:
    """Return whether a value means that a field is not set. C# and Go send empty values for unset fields."""
    if isinstance(value, Mapping):
        return value.keys() <= _FORMAT_KEYS and all(
            each in (None, "", [], {}) or (key == "strict" and each is False) for key, each in value.items()
        )
    return value is False or value in (None, "", [])


# Fields of a response format. The answer always satisfies the schema, with or without `strict`.
_FORMAT_KEYS = frozenset({"type", "name", "description", "strict", *_OTHER_CONSTRAINTS, *SCHEMA_KEYS})
_MAX_LISTED_KEYS = 20


def _unread_in_formats(fields: RequestFields, *names: str) -> list[str]:
    """Return the locations of unknown fields in response formats that are not themselves a schema."""
    return [
        f"{name}.{key[:64]}"
        for name in names
        if isinstance(value := getattr(fields, name, None), Mapping)
        and value.get("type") in ("text", "json", "json_object", "json_schema")
        and not _INLINE_KEYWORDS & value.keys()
        for key in list(value)[:_MAX_LISTED_KEYS]
        if key not in _FORMAT_KEYS and value[key] is not None
    ]


_SCHEMA_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# The fields in which clients specify constraints, each with the function that parses it.
_PLACES: Mapping[str, _Reader] = {
    "response_format": _format,
    "format": _format,
    "text.format": _format,
    "output_format": _format,
    "output_config.format": _format,
    "json_schema": _schema,
    "response_schema": _schema,
    "output_schema": _schema,
    "structured_outputs.json_": _schema,
    "structured_outputs.json_object": _object,
    "structured_outputs.regex": _option("regex"),
    "structured_outputs.choice": _option("choice"),
    "structured_outputs.grammar": _option("grammar"),
    **{
        f"{parent}guided_{name}": reader
        for parent in ("", "nvext.")
        for name, reader in (
            ("json", _schema),
            ("regex", _option("regex")),
            ("choice", _option("choice")),
            ("grammar", _option("grammar")),
        )
    },
}


def constraints_in(
    fields: ConstraintFields, options: Mapping[str, Any], parent: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the constraints in a request as reply options, keyed by field name.

    Args:
        fields: The fields of the request, or of an object in it.
        options: The reply options that these fields set, such as `regex`.
        parent: The prefix of that object's field names in errors, such as `options.`.

    Raises:
        ApiError: A constraint is invalid.
    """
    found = {f"{parent}{name}": {name: options[name]} for name in CONSTRAINT_NAMES if options.get(name)}
    for path, read in _PLACES.items():
        value: Any = fields
        for name in path.split("."):
            value = getattr(value, name, None)
        if value in ("", [], {}) or value is None:
            continue
        place = parent + path.rstrip("_")
        try:
            option = read(value, place)
        except OptionError as error:
            raise invalid_request(str(error), param=place, code=error.code) from None
        if option:
            found[place] = option
    return found


def answer_constraint(found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the reply option for the constraints in a request, or an empty dictionary if there are none.

    Programs that do not know which server they are talking to may send the same constraint in several fields.

    Args:
        found: The constraints, from `constraints_in`.

    Raises:
        ApiError: Two constraints differ.
    """
    for first, second in pairwise(found):
        if _comparable(found[first]) != _comparable(found[second]):
            raise invalid_request(
                f"{first} and {second} cannot be used together, because they ask for different formats;"
                " leave one of them out",
                param=second,
                code="option_conflict",
            )
    # Prefer a mapping. A schema given as text in the field `schema` also allows properties that it does not
    # list.
    return min(found.values(), key=lambda option: isinstance(option.get("schema"), str), default={})


def _comparable(option: Mapping[str, Any]) -> Any:
    """Return a canonical form of a constraint, for comparing constraints."""
    ((name, value),) = option.items()
    if name == "schema":
        return name, closed_objects(json.loads(value) if isinstance(value, str) else value)
    return name, list(value) if name == "choice" else value
