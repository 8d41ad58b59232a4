"""Extract a reply's constraint from its options, and create llguidance matchers to enforce it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.errors import OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

__all__ = ["Constraint", "as_expression", "constraint_from", "new_matcher", "readable", "text_of"]

# Parts of llguidance's messages to strip: an internal marker and the trailing stack trace.
_NOISE = re.compile(r"<non-verbose/>|<backtrace>.*", re.DOTALL)
# Make the model write JSON on one line, as Python's `json.dumps` does. If arbitrary whitespace were allowed,
# a model could emit it forever.
_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Characters that must be escaped in a regular expression in a Lark grammar.
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def text_of(constraint: Constraint) -> str:
    """Return a constraint as the text that llguidance compiles."""
    return _choices(constraint.value) if constraint.option == "choice" else constraint.value


def as_expression(option: str, text: str) -> str:
    """Return a constraint as an expression in llguidance's Lark format, for use in a larger grammar.

    Args:
        option: Name of the option that sets the constraint.
        text: The constraint as text, from `text_of`.
    """
    match option:
        case "schema":
            return f"%json {json.dumps({**json.loads(text), 'x-guidance': _STYLE})}"
        case "grammar":
            return f"%lark {{\n{text}\n}}"
        case _:
            # In Lark, a slash or a line break ends a regular expression.
            escaped = re.sub(r"(?s)\\.|/|\n", lambda found: _ESCAPED.get(found[0], found[0]), text)
            return f"/{escaped}/"


def new_matcher(option: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Create a matcher at the start of the reply. If the constraint is invalid, its `get_error` says why.

    Creating a matcher can crash the process or take minutes. See `trial_worker.py`.

    Args:
        option: Name of the option that sets the constraint: `schema`, `regex`, `grammar` or `choice`.
        text: The constraint as text, from `text_of`.
        tokenizer: The vocabulary.

    Raises:
        ValueError: llguidance rejects the constraint.
    """
    from llguidance import LLMatcher, LLParserLimits

    match option:
        case "schema":
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=_STYLE)
        case "grammar":
            grammar = LLMatcher.grammar_from_lark(text)
        case _:
            grammar = LLMatcher.grammar_from_regex(text)
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
    matcher.compute_bitmask()
    return matcher


def readable(message: str) -> str:
    """Strip the parts of an llguidance error message that do not help users."""
    return _NOISE.sub("", message).strip()


def _choices(texts: Sequence[str]) -> str:
    """Return a regular expression that matches any of the texts.

    A regular expression is used because a grammar would be limited to 2,000 alternatives.
    """
    return "|".join(re.escape(text) for text in texts)


class Constraint(NamedTuple):
    """A constraint on a reply: the name of the option that sets it, and the option's validated value."""

    option: str
    value: Any


def constraint_from(values: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint that options of a reply set, or None if they set none.

    Raises:
        OptionError: Several options set a constraint.
    """
    given = [Constraint(name, value) for name, value in values.items() if value not in (None, ())]
    if len(given) > 1:
        names = " and ".join(constraint.option for constraint in given)
        raise OptionError(
            f"{names} cannot be used together", "choose one of them for each reply", code="option_conflict"
        )
    return given[0] if given else None
