"""Interfaces to a chat's loaded model, whether it was loaded by this process or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack

from edgespec.errors import EdgespecError
from edgespec.options.settings import LOAD_OPTIONS
from edgespec.store.reference import resolve
from edgespec.system.files import file_state

if TYPE_CHECKING:
    from edgespec import (
        Exactness,
        Image,
        MemoryPlan,
        MemoryUse,
        Message,
        MethodReport,
        ModelFacts,
        Reply,
        ReplyArguments,
        TextChunk,
    )
    from edgespec.decode.request import StreamArguments
    from edgespec.engine.stats import Stats
    from edgespec.store.installed import RecommendedSetting

__all__ = ["ChatModel", "ChatReply", "Head", "Identity", "NamedHead", "Tokenizer"]

# Options that do not affect replies. They may differ from those of the program that loaded the model.
_IGNORED_OPTIONS = ("prefix_cache", "prefix_cache_memory", "prefix_cache_disk", "remember")
# Options that control how much text a program retains, with their values from least to most. A program must
# not share a model with one that retains more.
_RETENTION_OPTIONS = {"prefix_cache": ("none", "memory", "disk"), "remember": (False, True)}
# Options that must match even when left at their defaults. They affect rounding, which can change replies.
_EXACTNESS_OPTIONS = ("parallel", "exactness", "exact")
_PATH_OPTIONS = ("head", "corpus")


class ChatReply(Protocol):
    """A reply that is being generated. See `edgespec.ReplyStream`."""

    stats: Stats
    method: MethodReport
    prompt_tokens: int
    dropped_messages: int
    reply_start: str

    @property
    def reply(self) -> Reply: ...

    def __iter__(self) -> Iterator[TextChunk]: ...

    def wait(self) -> Reply: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Counts the tokens in texts. See `edgespec.model.base.Vocabulary`."""

    def tokenize(self, text: str, *, special: bool, start: bool) -> Sequence[int]: ...

    def min_tokens(self, text: str) -> int: ...


class Head(Protocol):
    """A head: a small network that drafts tokens for one particular model."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


class ChatModel(Protocol):
    """A loaded model that a chat can use. See `edgespec.Runtime` for the attributes and methods."""

    plan: MemoryPlan | None
    method: MethodReport

    @property
    def target(self) -> ModelFacts: ...

    @property
    def draft(self) -> ModelFacts | None: ...

    @property
    def heads(self) -> Sequence[Head]: ...

    @property
    def drafters(self) -> tuple[str, ...]: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def loss_limits(self) -> tuple[float, float] | None: ...

    @property
    def pass_costs(self) -> Mapping[int, float]: ...

    @property
    def recommended_sampling(self) -> Mapping[str, RecommendedSetting]: ...

    @property
    def vocabulary(self) -> Tokenizer: ...

    def check_template(self) -> None: ...

    def has_thinking_switch(self) -> bool: ...

    def check_options(self, **options: Unpack[StreamArguments]) -> None: ...

    def method_for(self, method: str) -> MethodReport: ...

    def exactness_for(
        self, *, acceptance: str | None = None, temperature: float | None = None
    ) -> Exactness | None: ...

    def reply_defaults(self, method: str | None = None) -> ReplyArguments: ...

    def image_tokens(self, image: Image) -> int: ...

    def memory(self) -> MemoryUse: ...

    def memory_bytes(self) -> int: ...

    def count_tokens(self, messages: Sequence[Message]) -> int: ...

    @property
    def stream_messages(self) -> Callable[..., ChatReply]: ...

    def close(self) -> None: ...


class NamedHead(NamedTuple):
    """The name and path of a head that another process has loaded."""

    name: str
    path: str


@dataclass(frozen=True)
class Identity:
    """The files and options that identify a loaded model, or one to be loaded.

    Attributes:
        files: The paths of the target and its adapters, each with its file state (see `file_state`).
        draft: `auto`, `none` or the path of the draft model.
        options: The values of the load options, as text.
        retention: How much text the program retains: the index of each option's value in
            `_RETENTION_OPTIONS`.
        chosen: Names of the options whose values must match for another program to share the model.
    """

    files: tuple[str, ...]
    draft: str
    options: Mapping[str, str]
    retention: tuple[int, ...]
    chosen: tuple[str, ...]

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Identity | None:
        """Return the identity of the model that these `edgespec.load` arguments would load.

        Returns None if the model cannot be shared, because it is not on this machine, or because an option is
        invalid or applies to one run only, such as `workers`.
        """
        options, retention, chosen = {}, [], []
        for name, option in LOAD_OPTIONS.items():
            value = arguments.get(name, option.default)
            value = tuple(value) if isinstance(value, list) else value
            if option.per_run and value != option.default:
                return None
            if name in _PATH_OPTIONS and value and Path(str(value)).exists():
                value = str(Path(str(value)).resolve())
            options[name] = repr(value)
            if values := _RETENTION_OPTIONS.get(name):
                if value not in values:
                    return None
                retention.append(values.index(value))
            is_chosen = value != option.default and name not in _IGNORED_OPTIONS
            if is_chosen or name in _EXACTNESS_OPTIONS:
                chosen.append(name)
        draft = arguments.get("draft", "auto") or "none"
        try:
            files = resolve(str(arguments["target"]), allow_download=False).files
            if draft not in ("auto", "none"):
                draft = str(resolve(str(draft), allow_download=False).path)
        except (EdgespecError, OSError):
            return None
        states = tuple(f"{path} {file_state(path)}" for path in files)
        return cls(states, str(draft), options, tuple(retention), tuple(chosen))

    def fits(self, wanted: Identity, draft: str) -> bool:
        """Return whether another program can use a loaded model with this identity.

        Options that the other program leaves at their defaults may have any value.

        Args:
            wanted: The model and options that the other program needs.
            draft: The path of the loaded draft model, or `none`.
        """
        return (
            self.files == wanted.files
            and wanted.draft in ("auto", self.draft, draft)
            and all(own <= other for own, other in zip(self.retention, wanted.retention, strict=True))
            and all(self.options[name] == wanted.options[name] for name in wanted.chosen)
        )
