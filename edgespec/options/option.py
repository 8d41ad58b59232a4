"""The `Option` class, and the options shared by `load` and replies."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_origin, get_type_hints

from edgespec.errors import about_option
from edgespec.options.methods import methods_by_need
from edgespec.options.option_kinds import Choice, Integer, Kind, MethodName, Share

__all__ = [
    "ACCEPTANCE",
    "ACCEPTANCES",
    "DRAFT_LENGTH",
    "MAX_DRAFT_LENGTH",
    "MAX_LOSS",
    "METHOD",
    "Group",
    "Option",
    "declared_options",
]

ACCEPTANCES = ("invariant", "rejection")
MAX_DRAFT_LENGTH = 64

Group: TypeAlias = Literal["model", "workers", "prefix_cache", "drafting", "method", "sampling", "reply"]


@dataclass(frozen=True)
class Option:
    """Declaration of an option.

    Attributes:
        kind: Parses and checks the value.
        group: The help section that lists the option, unless it is `common`.
        help: A description of one or two sentences for `--help` and the documentation.
        default: The default value.
        default_text: A description of the default, if the value alone is not clear.
        flags: Short forms on the command line, such as `-n`.
        common: Whether the option is one of the few that most users need. `--help` lists these first.
        per_run: Whether the option applies to a single model or run and therefore cannot be set for all runs.
        api_only: Whether the option is available only in Python.
        in_chat: The label and hint in the chat's settings form. None if the chat cannot change the option.
    """

    kind: Kind
    group: Group
    help: str
    _: KW_ONLY
    default: Any = None
    default_text: str = ""
    flags: tuple[str, ...] = ()
    common: bool = False
    per_run: bool = False
    api_only: bool = False
    in_chat: tuple[str, str] | None = None

    def check(self, name: str, value: Any) -> Any:
        """Check and normalise a value. Raises OptionError if it is invalid."""
        with about_option(name):
            return self.default if value is None and self.default is None else self.kind.check(name, value)


# fmt: off
METHOD = Option(MethodName(), "method",
    "How to speed up replies. `auto` uses the draft model and repeated text whenever that is faster. `none`"
    " turns the speed-up off. You can also name one or more methods joined by +, which are then used even"
    " when they are slower: " + ", ".join(each.name for each in methods_by_need()) + ".",
    default="auto", common=True, in_chat=("Speed-up method", "auto, none, or e.g. model+suffix"))
DRAFT_LENGTH = Option(Integer(1, MAX_DRAFT_LENGTH, metavar="K", hint=", or method none"), "method",
    f"Number of tokens that the draft model proposes at a time, from 1 to {MAX_DRAFT_LENGTH}. With `auto`,"
    " this is the maximum.",
    default_text="4; up to 16 with auto, depending on speed",
    in_chat=("Draft length", "tokens to guess at a time, 1 to 64"))
ACCEPTANCE = Option(Choice(ACCEPTANCES), "method",
    "How the model decides which proposed tokens to accept. `invariant`: the same seed gives the same reply"
    " with every method. `rejection`: every reply is as likely as without the speed-up, but the same seed can"
    " give a different reply with another method, and, with `auto` or several methods, each time.",
    default="invariant", in_chat=("Acceptance", "invariant (same seed, same reply)"))
MAX_LOSS = Option(Share(), "drafting",
    "How much slower than without the speed-up a reply may become, such as 5%. The time of two tokens is"
    " allowed in addition. If set, this also applies to methods other than `auto`.",
    default_text="2% for auto, no limit for other methods")
# fmt: on


def declared_options(arguments: type) -> dict[str, Option]:
    """Return the `Option` annotations of a TypedDict, keyed by field name."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}
