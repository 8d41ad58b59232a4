"""Rewrite JSON schemas so that llguidance enforces them exactly, and reject those that it cannot enforce.

This module also rejects schemas that no finite value satisfies, such as an object with a required property
whose schema is the object's own schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from math import copysign, inf, nextafter
from typing import Any, TypeGuard
from urllib.parse import unquote

from edgespec.errors import OptionError

__all__ = ["enforceable_schema", "requires_endless_value", "subschemas"]

# Keywords whose values map names to schemas, and keywords whose values contain no schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples", "required", "dependentRequired")
# The formats defined by JSON Schema. All others are annotations without effect.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
# Keyword values that have no effect.
_NEUTRAL = {"uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"})}
# Above the first number, float64 cannot represent every integer. At and above the second, converting a
# number to float64 or changing it slightly could overflow.
_MAX_EXACT, _MAX_BOUND = 1 << 53, 1 << 1023
# Relative distance between a bound and its replacement, chosen to be small.
_STEP = 1e-9


def enforceable_schema(schema: Any, *, lenient: bool = False) -> Any:
    """Return a schema that llguidance enforces exactly, and whose values satisfy the given schema.

    Removes unknown keywords that have no effect. Narrows bounds that llguidance would enforce inexactly,
    which rules out a few numbers next to them. Removes `$schema`, because llguidance ignores keywords that do
    not exist in the version given there, such as `const` in draft 4.

    Args:
        schema: The JSON schema to rewrite.
        lenient: Whether to keep parts of the schema that cannot be enforced, instead of raising OptionError.

    Raises:
        OptionError: llguidance would accept the schema, but could generate values that violate it.
    """
    schema = deepcopy(schema)
    for place, part in subschemas(schema):
        part.pop("$schema", None)
        _replace_draft_3(part)
        _remove_neutral(part)
        _narrow_bounds(part)
        if not lenient:
            _check(part, place)
    return schema


def subschemas(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON pointer and contents of a schema and of every schema within it.

    Callers may modify each schema before requesting the next one.
    """
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            yield from subschemas(each, f"{place}/{index}")
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            for name, each in value.items():
                escaped = name.replace("~", "~0").replace("/", "~1")
                yield from subschemas(each, f"{place}/{key}/{escaped}")
        elif key not in _DATA:
            yield from subschemas(value, f"{place}/{key}")


def _replace_draft_3(schema: dict[str, Any]) -> None:
    """Replace JSON Schema draft 3 keywords, which llguidance ignores, with their equivalents."""
    if _is_number(schema.get("divisibleBy")):
        schema.setdefault("multipleOf", schema.pop("divisibleBy"))
    if isinstance(schema.get("extends"), dict | list):
        extended = schema.pop("extends")
        schema["allOf"] = [
            *schema.get("allOf", []),
            *(extended if isinstance(extended, list) else [extended]),
        ]
    if isinstance(schema.get("disallow"), str | list):
        schema.setdefault("not", {"type": schema.pop("disallow")})


def _remove_neutral(schema: dict[str, Any]) -> None:
    for keyword, values in _NEUTRAL.items():
        if keyword in schema and schema[keyword] in values:
            del schema[keyword]
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        del schema["format"]


def _narrow_bounds(schema: dict[str, Any]) -> None:
    """Narrow bounds that llguidance enforces inexactly.

    llguidance parses bounds with many digits inexactly. It also allows 2 for the schema `{"type": "number",
    "exclusiveMinimum": 2, "maximum": 2.5}`.
    """
    types = schema.get("type", "number")
    allows_fractions = "number" in (types if isinstance(types, list) else [types])
    for inclusive, exclusive, inwards in (
        ("minimum", "exclusiveMinimum", inf),
        ("maximum", "exclusiveMaximum", -inf),
    ):
        for keyword in (inclusive, exclusive):
            bound = schema.get(keyword)
            if _is_number(bound) and not _is_exact(bound) and abs(bound) < _MAX_BOUND:
                schema[keyword] = _inside(bound, inwards)
        if not allows_fractions:
            continue
        # In draft 4, `exclusiveMinimum` is a Boolean that makes `minimum` exclusive.
        bound = schema.get(inclusive if schema.get(exclusive) is True else exclusive)
        if not _is_whole(bound):
            continue
        del schema[exclusive]
        bounds = [_inside(float(bound), inwards)]
        if _is_number(schema.get(inclusive)):
            bounds.append(schema[inclusive])
        schema[inclusive] = max(bounds) if inwards > 0 else min(bounds)


def _check(schema: dict[str, Any], place: str) -> None:
    for keyword in ("const", "enum", "multipleOf"):
        for number in _numbers(schema.get(keyword)):
            if not _is_exact(number):
                raise OptionError(
                    f"the JSON schema cannot be used: the number {str(number)[:40]} in {keyword} has too many"
                    f" digits (in {place})",
                    "use a number with fewer digits, or a string",
                    code="constraint_not_supported",
                )
    least, required = schema.get("minProperties"), schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if _is_integer(least) and least > len(names) + 1:
        raise OptionError(
            f"the JSON schema cannot be used: minProperties {least} cannot be enforced, because the model"
            f" could repeat a property (in {place})",
            "name the properties in `required`, or set minProperties to 1",
            code="constraint_not_supported",
        )


def _inside(bound: float, inwards: float) -> float:
    """Move a bound inwards to a nearby value that llguidance represents exactly.

    Args:
        bound: The bound to move.
        inwards: The direction in which numbers are allowed: positive or negative infinity.
    """
    if isinstance(bound, int):
        nearest = float(bound)
        is_outside = nearest < bound if inwards > 0 else nearest > bound
        return int(nextafter(nearest, inwards) if is_outside else nearest)
    return float(f"{bound + copysign(_STEP * (abs(bound) or 1), inwards):.12g}")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))
    elif _is_number(value):
        yield value


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    return _is_integer(value) or isinstance(value, float)


def _is_whole(value: Any) -> TypeGuard[float]:
    return _is_number(value) and abs(value) < _MAX_EXACT and value == int(value)


def _is_exact(number: float) -> bool:
    """Return whether llguidance represents a number exactly: as a float64 of up to 15 digits."""
    if isinstance(number, int):
        return abs(number) < _MAX_BOUND and int(float(number)) == number
    return float(f"{number:.15g}") == number


def requires_endless_value(schema: Any) -> bool:
    """Return whether no finite value satisfies a schema, because each value must contain another one.

    llguidance accepts such schemas, but the reply would never end. Unknown keywords are assumed to be
    satisfiable.
    """
    search = _Search(schema)
    try:
        # Repeat until nothing changes: references found to be finite in one pass can make others finite in
        # the next.
        while search.finds_more():
            if search.is_finite(schema):
                return False
    except RecursionError:
        return False
    return True


class _Search:
    """Finds references whose targets have finite values.

    Args:
        root: The whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._finite: set[str] = set()
        self._visited: set[str] = set()
        self._found = -1

    def finds_more(self) -> bool:
        """Start another pass. Return False if the last pass found nothing new."""
        self._visited.clear()
        found, self._found = self._found, len(self._finite)
        return self._found > found

    def is_finite(self, schema: Any) -> bool:
        """Return whether a finite value is already known to satisfy `schema`."""
        if not isinstance(schema, Mapping):
            return True
        if isinstance(schema.get("$ref"), str) and not self._is_finite_reference(schema["$ref"]):
            return False
        if not all(map(self.is_finite, _list(schema, "allOf"))):
            return False
        choices = [_list(schema, name) for name in ("anyOf", "oneOf")]
        if not all(any(map(self.is_finite, each)) for each in choices if each):
            return False
        match schema.get("type"):
            case "object":
                return self._is_finite_object(schema)
            case "array":
                return self._is_finite_array(schema)
        return True

    def _is_finite_reference(self, reference: str) -> bool:
        if reference not in self._visited:
            self._visited.add(reference)
            if self.is_finite(_target(self._root, reference)):
                self._finite.add(reference)
        return reference in self._finite

    def _is_finite_object(self, schema: Mapping[str, Any]) -> bool:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return True
        required = [name for name in _list(schema, "required") if isinstance(name, str)]
        return all(self.is_finite(properties.get(name)) for name in required)

    def _is_finite_array(self, schema: Mapping[str, Any]) -> bool:
        least, first = schema.get("minItems", 0), _list(schema, "prefixItems")
        if not isinstance(least, int):
            return True
        others = [schema.get("items")] if least > len(first) else []
        return all(map(self.is_finite, [*first[:least], *others]))


def _list(schema: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _target(root: Any, reference: str) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/node` points to, or None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, Mapping):
            node = node.get(name)
        else:
            return None
    return node
