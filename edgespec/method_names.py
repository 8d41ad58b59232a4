"""The names of methods and drafters, and how a method's name is read."""

from __future__ import annotations

import difflib

from edgespec.errors import OptionError

__all__ = ["DRAFTER_NAMES", "SELF_DRAFTS", "parse_method"]

# The order in which drafts are merged. A self-draft comes first, because the target can then reuse its
# computation. Lookups come last, because tokens drawn from a distribution must be merged before them.
DRAFTER_NAMES = ("layerskip", "lowbit", "swift", "model", "lookahead", "suffix", "ngram")
# Drafters that use the target's own weights and cache. A method may name only one of them.
SELF_DRAFTS = ("layerskip", "lowbit", "swift")
_AUTOMATIC = ("model", "suffix")


def parse_method(method: str) -> tuple[str, ...]:
    """Return the drafters that a method names: for `auto` those it may use, for `none` none.

    Raises:
        OptionError: A name is unknown or repeated, or two of the drafters share the target's KV cache.
    """
    if not isinstance(method, str):
        raise OptionError(f"method is {method!r}", "give a text such as model+ngram")
    if method == "none":
        return ()
    if method == "auto":
        return _AUTOMATIC
    names = tuple(method.split("+"))
    for name in names:
        if name not in DRAFTER_NAMES:
            near = difflib.get_close_matches(name, ("auto", "none", *DRAFTER_NAMES), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise OptionError(
                f"method {method!r} is unknown",
                f"{hint}choose auto, none, or {', '.join(DRAFTER_NAMES)} joined by +",
            )
    if len(set(names)) < len(names):
        raise OptionError(f"method {method!r} names a drafter twice", "name each once")
    own_drafts = [name for name in names if name in SELF_DRAFTS]
    if len(own_drafts) > 1:
        raise OptionError(
            f"method {method!r} drafts on the target's KV cache in {len(own_drafts)} ways",
            f"name one of {', '.join(own_drafts)}",
        )
    return names
