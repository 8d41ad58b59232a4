"""Detect JSON schemas that no finite value satisfies.

An example is an object with a required property whose schema is the object's own schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

__all__ = ["requires_endless_value"]


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
        """Return whether a finite value satisfies `schema`, as far as the search has found so far."""
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
