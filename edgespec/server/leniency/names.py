"""Tell which unknown fields must not be ignored, because they ask for a constraint on the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["CONSTRAINT_HINT", "asks_for_constraint"]

CONSTRAINT_HINT = "use response_format for a JSON schema, or regex, grammar or choice"

# Words in the names of fields that constrain the answer, such as `guided_decoding` and `responseSchema`.
_WORDS = re.compile("constrain|ebnf|grammar|guided|schema|structur|^response_?format$", re.IGNORECASE)
# Number of levels of nested objects to search, as in `{"extra_body": {"nvext": {"guided_json": ...}}}`. The
# value was chosen, not measured.
_MAX_LEVELS = 3


def asks_for_constraint(name: str, value: Any, levels: int = _MAX_LEVELS) -> bool:
    """Return whether the name of a field, or of a field nested in its value, suggests a constraint."""
    if value in (None, False, "", [], {}):
        return False
    if _WORDS.search(name):
        return True
    inner = value.items() if levels and isinstance(value, Mapping) else ()
    return any(asks_for_constraint(str(key), each, levels - 1) for key, each in inner)
