"""The names of the drafters, and a parser for method names such as `model+suffix`, which combine drafters."""

from __future__ import annotations

from edgespec.errors import OptionError
from edgespec.spelling import nearest

__all__ = ["DRAFTER_NAMES", "DRAFT_MODEL_USERS", "HEADS", "SELF_DRAFTS", "parse_method"]

# Drafters that run a head, a small network that reads the target's hidden states.
HEADS = ("mtp", "eagle", "dflash", "medusa", "hydra")

# The names of all drafters, in the order their drafts are merged.
DRAFTER_NAMES = ("layerskip", "lowbit", "swift", *HEADS, "model", "lookahead", "grammar", "suffix", "ngram")
# Drafters that use the target's own weights and KV cache. A method can include at most one of them.
SELF_DRAFTS = ("layerskip", "lowbit", "swift")
# Drafters that cannot work without the model passed as `--draft`.
DRAFT_MODEL_USERS = frozenset({"model"})
_AUTOMATIC = (*HEADS, "model", "grammar", "suffix")


def parse_method(method: str) -> tuple[str, ...]:
    """Return the names of the drafters in a method. For `auto`, return all drafters that it can use.

    Raises:
        OptionError: The method is not a string, contains an unknown drafter or the same drafter twice, or
            contains two drafters that need the target's cache.
    """
    if not isinstance(method, str):
        raise OptionError(f"method must be a string, not {method!r}", "use a method such as 'model+ngram'")
    if method == "none":
        return ()
    if method == "auto":
        return _AUTOMATIC
    names = tuple(method.split("+"))
    for name in names:
        if name not in DRAFTER_NAMES:
            near = nearest(name, ("auto", "none", *DRAFTER_NAMES))
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(DRAFTER_NAMES)
            raise OptionError(
                f"method {method!r} is unknown", f"{hint}choose auto, none, or {known} joined by +"
            )
    for at, name in enumerate(names):
        if name in names[:at]:
            raise OptionError(f"method {method!r} contains {name} twice", "list each drafter once")
    self_drafts = [name for name in names if name in SELF_DRAFTS]
    if len(self_drafts) > 1:
        raise OptionError(
            f"method {method!r} contains {len(self_drafts)} drafters that need the target's own cache",
            f"use only one of {', '.join(self_drafts)}",
        )
    return names
