"""The declaration of one option, and the options that loading a model and a reply share."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_type_hints

from edgespec.option_kinds import Choice, Integer, Kind, MethodName

__all__ = [
    "ACCEPTANCE",
    "ACCEPTANCES",
    "DRAFT_LENGTH",
    "MAX_DRAFT_LENGTH",
    "METHOD",
    "Group",
    "Option",
    "declared_options",
]

ACCEPTANCES = ("invariant", "rejection")
MAX_DRAFT_LENGTH = 64

Group: TypeAlias = Literal["model", "prefix_cache", "drafting", "method", "sampling", "reply"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option.

    Attributes:
        kind: How its value is read from text and checked.
        help: One or two sentences for `--help` and the documentation.
        group: The heading under which it is listed.
        default: The value that holds where none is given.
        default_text: The default in words, where the value itself does not say it.
        flags: Short forms on the command line, such as `-n`.
        read_by: The drafters that read it. Given for a method without one of them, it is refused. Empty
            where every method reads it.
        per_run: Whether it belongs to one model or one run, so that no setting for all runs is offered.
        api_only: Whether only Python code can give it.
    """

    kind: Kind
    help: str
    group: Group
    default: Any = None
    default_text: str = ""
    flags: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    per_run: bool = False
    api_only: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return a value in its usual form. Raises OptionError."""
        return self.default if value is None and self.default is None else self.kind.check(name, value)


METHOD = Option(
    kind=MethodName(),
    group="method",
    default="auto",
    help="How tokens are drafted. auto: with the draft model and earlier text, while that makes replies"
    " faster. none: not at all. Otherwise drafters joined by +, used whatever the speed: model, layerskip,"
    " lowbit, swift, lookahead, suffix, ngram.",
)
DRAFT_LENGTH = Option(
    kind=Integer(1, MAX_DRAFT_LENGTH, metavar="K", hint=", or method none"),
    group="method",
    default_text="4; with auto up to 16, as the speed allows",
    help=f"Tokens to draft ahead, 1 to {MAX_DRAFT_LENGTH}. With auto the most it may draft.",
)
ACCEPTANCE = Option(
    kind=Choice(ACCEPTANCES),
    group="method",
    default="invariant",
    help="invariant: a seed gives the same reply with every method. rejection: only the distribution of"
    " replies is the same; a seed repeats a reply with one named drafter, but not with auto, which measures"
    " time.",
)


def declared_options(arguments: type) -> dict[str, Option]:
    """Return the options that annotate the keys of a TypedDict."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
