"""The drafting methods: their records, the registry of records, and a parser for method names.

Each built-in method is a folder in `edgespec/methods/` whose `__init__.py` defines its record as `METHOD`.
Everything that depends on the set of methods reads these records: options, help, planning, loading, `auto`,
the chat and the documentation. `Wording` holds the drafting terms used in messages.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias

from edgespec.errors import OptionError
from edgespec.system.spelling import REMOVED_NAMES, nearest

__all__ = [
    "CHAT",
    "TERMS",
    "HeadKind",
    "HeadTraining",
    "Method",
    "MethodDocs",
    "Wording",
    "head_kinds",
    "head_names",
    "limit_text",
    "method",
    "method_names",
    "methods",
    "methods_by_need",
    "parse_method",
    "readers_of",
    "register",
    "sources_text",
]

Needs: TypeAlias = Literal["draft model", "head", "target", "copy", "nothing"]
"""What a method drafts with: another model, a head, the target itself, a copy of it, or none of these."""

# The order in which methods are listed for users.
_NEEDS: tuple[Needs, ...] = ("draft model", "head", "target", "copy", "nothing")
_PACKAGE = "edgespec.methods"
# Names are kept simple because they appear on command lines, in combinations such as `model+suffix`, and in
# sentences in the chat.
_NAME = re.compile(r"[a-z][a-z0-9]*")
_NOT_METHODS = ("auto", "none")


@dataclass(frozen=True, slots=True)
class MethodDocs:
    """A method's row in the table of `docs/methods.md`, in Markdown.

    Attributes:
        source: Where the draft tokens come from.
        requires: What the user must have, such as a model of a certain kind.
        memory: The memory that the method needs in addition to the target's.
    """

    source: str
    requires: str
    memory: str


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """The command that trains a kind of head.

    Attributes:
        command: Name of the command, such as `eagle3`.
        title: Name of the head with an article, such as `an EAGLE-3 head`.
        with_gguf: A sentence on how to use the head with a GGUF model.
    """

    command: str
    title: str
    with_gguf: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """The kinds of heads that a method can draft with.

    Attributes:
        kinds: Maps a name in a head's metadata or file name, such as `eagle3`, to the kind of head that users
            see, such as `EAGLE-3`. Longer names come before names that they contain. The first word of a kind
            identifies the method.
        network: Key in `FileFormat.networks` of the code that runs the heads. Methods can share a key. If
            empty, the key is the method's name.
        drafts_in_one_pass: Whether a head drafts all tokens in one pass, rather than one token per pass.
        training: How `edgespec train` trains such heads. None if it cannot.
    """

    kinds: Mapping[str, str]
    network: str = ""
    drafts_in_one_pass: bool = False
    training: HeadTraining | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A drafting method.

    Attributes:
        name: The name in `--method` and in reports: lower-case letters and digits.
        label: Where the draft tokens come from, in a few words for the chat, such as "EAGLE head".
        help: Where the draft tokens come from, phrased as a clause for the README.
        docs: The method's row in the documentation.
        order: The method's rank. Drafts of methods with lower numbers are merged first, and `auto` prefers
            these methods.
        make: Creates the drafter for a loaded target, given a `DrafterContext` (`methods/base.py`), or
            returns a `MissingDrafter` with the reason why there is none. For a method that needs a draft
            model, it is called only if one is loaded. Put its imports inside the function, because records
            are read at every start.
        needs: What the method drafts with.
        head: The heads that the method drafts with, if `needs` is `head`.
        reads: The options of `load` that the method uses. An option is rejected if no selected method uses
            it.
        uses_target_cache: Whether drafts are written to the target's KV cache. A reply can use only one such
            method.
        shares_passes: Whether the method can draft for several replies that share the target's passes.
        works_on_workers: Whether the method can draft for a target on several machines.
        always_loaded: Whether the drafter is created for every target (with a draft model, if it needs one),
            so that replies can use it even if the method was not named when loading the model.
        drafts_trees: Whether drafts are wide trees even without `--draft-branches`.
        only_constrained: Whether the method drafts only in replies that have a constraint.
        experimental: Whether the benefit is unproven. The documentation marks such methods.
        auto: How `auto` uses the method. `always` means whenever its drafter is available. `fallback` means
            only if no other method with a model or head is available, and no earlier fallback.
        is_ready: Returns whether `auto` can use the method as a fallback, given a `DrafterContext`, for
            example because a copy of the target has been prepared.
        preparation: Returns the command that prepares the target for the method, given a `DrafterContext`.
            Empty if there is nothing to prepare.
        find_target: Returns the files to load instead of the target's, given the target (`Resolved`) and
            whether the user named the method. None if the method always drafts with the target's own files.
        find_copy: Returns the copy of the target (`Resolved`) that the method drafts with, or None, given the
            target and whether the user named the method. The copy's memory is included in the plan.
        find_substitutes: Returns the sets of low-bit copies of the target's blocks (`Substitutes`) that the
            method can draft with while the target streams these blocks, the preferred one first. Takes the
            arguments of `find_copy`.
        estimate_bytes: Returns the memory that the drafter allocates in addition to models, heads and copies,
            given the target (`Resolved`) and the context size in tokens. Included in the plan if the user
            names the method.
    """

    name: str
    label: str
    help: str
    docs: MethodDocs
    order: int
    make: Callable[[Any], Any]
    needs: Needs = "nothing"
    head: HeadKind | None = None
    reads: frozenset[str] = frozenset()
    uses_target_cache: bool = False
    shares_passes: bool = True
    works_on_workers: bool = True
    always_loaded: bool = False
    drafts_trees: bool = False
    only_constrained: bool = False
    experimental: bool = False
    auto: Literal["never", "always", "fallback"] = "never"
    is_ready: Callable[[Any], bool] = lambda _context: False
    preparation: Callable[[Any], str] = lambda _context: ""
    find_target: Callable[[Any, bool], Any] | None = None
    find_copy: Callable[[Any, bool], Any] = lambda _target, _is_named: None
    find_substitutes: Callable[[Any, bool], Any] = lambda _target, _is_named: ()
    estimate_bytes: Callable[[Any, int], int] = lambda _target, _context_tokens: 0

    @property
    def runs_model(self) -> bool:
        """Whether the method drafts with a model or a head, rather than only by lookup."""
        return self.needs != "nothing"


_registered: list[Method] = []


@cache
def _built_in() -> tuple[Method, ...]:
    folders = pkgutil.iter_modules(import_module(_PACKAGE).__path__, f"{_PACKAGE}.")
    modules = [vars(import_module(folder.name)) for folder in folders if folder.ispkg]
    return tuple(module["METHOD"] for module in modules if "METHOD" in module)


def register(added: Method) -> Callable[[], None]:
    """Register a method that is defined outside edgespec. The built-in methods need no registration.

    Returns:
        A function that unregisters the method.

    Raises:
        ValueError: The name is taken or not a valid name.
    """
    if not _NAME.fullmatch(added.name) or added.name in (*_NOT_METHODS, *method_names()):
        raise ValueError(f"a method cannot be named {added.name!r}")
    _registered.append(added)

    def unregister() -> None:
        if added in _registered:
            _registered.remove(added)

    return unregister


def methods() -> tuple[Method, ...]:
    """Return all methods, in the order in which their drafts are merged."""
    return tuple(sorted((*_built_in(), *_registered), key=lambda each: each.order))


def method(name: str) -> Method:
    """Return the method with a given name. Raises KeyError if there is none."""
    return {each.name: each for each in methods()}[name]


def sources_text(drafters: str) -> str:
    """Describe where the tokens of drafters such as `model+suffix` come from."""
    labels = {each.name: each.label for each in methods()}
    return " + ".join(dict.fromkeys(labels.get(name, name) for name in drafters.split("+")))


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, in the order in which their drafts are merged."""
    return tuple(each.name for each in methods())


def head_names() -> tuple[str, ...]:
    """Return the names of the methods that draft with a head."""
    return tuple(each.name for each in methods() if each.needs == "head")


def head_kinds() -> dict[str, tuple[str, Method]]:
    """Map each head name in metadata and file names to its kind and method."""
    return {name: (kind, each) for each in methods() if each.head for name, kind in each.head.kinds.items()}


def methods_by_need() -> tuple[Method, ...]:
    """Return all methods in the order shown to users: grouped by what they draft with."""
    return tuple(sorted(methods(), key=lambda each: _NEEDS.index(each.needs)))


def readers_of(option: str) -> tuple[str, ...]:
    """Return the names of the methods that use a `load` option, or an empty tuple if all methods do."""
    return tuple(each.name for each in methods_by_need() if option in each.reads)


def parse_method(method: str) -> tuple[str, ...]:
    """Return the names of the drafters in a method. For `auto`, return the drafters that it always uses.

    Raises:
        OptionError: The method is not a string, contains an unknown or removed drafter or the same drafter
            twice, or contains two drafters that need the target's cache.
    """
    if not isinstance(method, str):
        raise OptionError(f"method must be a string, not {method!r}", "use a method such as 'model+ngram'")
    if method == "none":
        return ()
    known = {each.name: each for each in methods()}
    if method == "auto":
        return tuple(name for name, each in known.items() if each.auto == "always")
    names = tuple(method.split("+"))
    for name in names:
        if name not in known:
            if name in REMOVED_NAMES:
                raise OptionError(
                    f"method {name!r} was removed",
                    REMOVED_NAMES[name],
                    option="method",
                    code="option_removed",
                )
            near = nearest(name, (*_NOT_METHODS, *known))
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise OptionError(
                f"method {method!r} is unknown",
                f"{hint}choose `auto`, `none`, or one or more of these, joined by +: {', '.join(known)}",
                option="method",
            )
    for at, name in enumerate(names):
        if name in names[:at]:
            raise OptionError(
                f"method {method!r} contains {name} more than once",
                "list each method only once",
                option="method",
            )
    on_cache = [name for name in names if known[name].uses_target_cache]
    if len(on_cache) > 1:
        raise OptionError(
            f"method {method!r} combines {len(on_cache)} methods that need the model's own cache",
            f"use only one of {', '.join(on_cache)}",
            option="method",
        )
    return names


class Wording(NamedTuple):
    """The terms that messages use for drafting.

    Attributes:
        draft: The noun.
        drafts: The plural of `draft`.
        drafted: The participle.
        drafting: The activity.
        sources: Returns how messages refer to drafters such as `model+suffix`.
        subject: Returns the subject of a sentence about a reply with a method such as `auto`.
        without: The term for plain decoding, with which the subject is compared.
        limit: Where the maximum loss is set, in parentheses. Empty in the chat, which cannot change it.
    """

    draft: str
    drafts: str
    drafted: str
    drafting: str
    sources: Callable[[str], str]
    subject: Callable[[str], str]
    without: str
    limit: str


TERMS = Wording(
    draft="draft",
    drafts="drafts",
    drafted="drafted",
    drafting="drafting",
    sources=str,
    subject=str,
    without="plain decoding",
    limit=" (see --max-loss)",
)
"""The terms used by the command line, the API and the documentation."""

CHAT = Wording(
    draft="guess",
    drafts="guesses",
    drafted="guessed",
    drafting="guessing",
    sources=sources_text,
    subject=lambda method: f"With the speed-up ({method}), the reply",
    without="without it",
    limit="",
)
"""The terms used by the chat, which refers to drafters by the source of their tokens."""


def limit_text(source: str) -> str:
    """Describe where a memory limit comes from: an option that the user set, or the machine."""
    return f"chosen with {source}" if source.startswith("--") else source
