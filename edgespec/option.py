"""The `Option` class, and the options shared by `load` and by replies."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_origin, get_type_hints

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
    """Declaration of an option.

    Attributes:
        kind: Parses and checks the value.
        help: A description of one or two sentences for `--help` and the documentation.
        group: The section in which the option is listed.
        default: The default value.
        default_text: The default in words, if the value alone does not explain it.
        flags: Short forms on the command line, such as `-n`.
        read_by: Names of the drafters that use the option. Methods without any of them reject it. Empty if
            every method uses the option.
        per_run: Whether the option applies only to a single model or run and therefore cannot be set for all
            runs.
        api_only: Whether the option is available only in Python.
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
        """Check and normalise a value. Raises OptionError if it is invalid."""
        return self.default if value is None and self.default is None else self.kind.check(name, value)


METHOD = Option(
    kind=MethodName(),
    group="method",
    default="auto",
    help="How tokens are drafted. auto: with the draft model and earlier text, while that makes replies"
    " faster. none: no drafting. Otherwise, drafters joined by +, used whatever their speed: model,"
    " layerskip, lowbit, swift, lookahead, suffix, ngram.",
)
DRAFT_LENGTH = Option(
    kind=Integer(1, MAX_DRAFT_LENGTH, metavar="K", hint=", or method none"),
    group="method",
    default_text="4; with auto up to 16, as the speed allows",
    help=f"Tokens to draft ahead, 1 to {MAX_DRAFT_LENGTH}. With auto, the maximum.",
)
ACCEPTANCE = Option(
    kind=Choice(ACCEPTANCES),
    group="method",
    default="invariant",
    help="invariant: a seed gives the same reply with every method. rejection: only the distribution of"
    " replies is the same. Then a seed reproduces a reply with one named drafter, but not with auto, whose"
    " choices depend on measured times.",
)


def declared_options(arguments: type) -> dict[str, Option]:
    """Return the `Option` annotations of a TypedDict, keyed by field name."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}
