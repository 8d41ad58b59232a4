"""The Protocol of a model that a backend has loaded: a target, or the model behind a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree

__all__ = [
    "MOST_PADDING",
    "Capabilities",
    "EarlyExit",
    "LanguageModel",
    "LoadOptions",
    "LowBit",
    "ModelFacts",
    "Progress",
    "SelfDraft",
    "SkippedLayers",
    "Snapshot",
    "Vocabulary",
]

# So many tokens more at the end of a vocabulary are padding of an embedding table, and no difference.
MOST_PADDING = 1024

# Called with (what, fraction from 0 to 1); False asks for a stop.
Progress = Callable[[str, float], bool]


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Draft with the layers below `exit_layer`, the final norm and the head (LayerSkip, arXiv 2404.16710).

    What those layers computed is not computed again when the target verifies.
    """

    exit_layer: int


@dataclass(frozen=True, slots=True)
class LowBit:
    """Draft with the same weights at fewer bits on the target's keys and values (QSpec, arXiv 2410.11305).

    copy: the file of a copy with fewer bits; None where the loaded weights hold both precisions.
    sink_tokens, window_tokens: look at the first few and this many last tokens only (MagicDec,
    arXiv 2408.11049); a window of None looks at everything.
    """

    copy: str | None = None
    sink_tokens: int = 4
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SkippedLayers:
    """Draft without some layers, on the target's own keys and values (SWIFT, arXiv 2410.06916)."""

    layers: tuple[int, ...]


SelfDraft: TypeAlias = EarlyExit | LowBit | SkippedLayers


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded.

    context_tokens: the size of the KV cache; None takes the model's default. context_for: that size, given
    the tokens that the model was trained for (0: unknown), where it depends on them. first_tokens: the size
    to begin with, where `resize` is to make more of it when it is needed; None makes all of it at once.
    gpu_layers: layers put on an accelerator; None puts all there that the backend can.
    kv_type: of keys and values, such as `f16` or `q8_0`, or of each: `q8_0/f16`; `auto`: the backend's.
    flash_attention: `auto`, `on` or `off`.
    max_branches: how many leaves a token tree may have.
    memory_bytes: what weights and cache of this model may take together; None is no limit of ours.
    rows: so many rows of a pass are to have logits at most; None: as many as the backend makes passes wide.
    draft: it is to draft: `auto` choices need not care how exactly its passes round.
    adapter: a folder with a LoRA or DoRA adapter to put on the weights.
    exact: `auto` choices take what lets passes of all widths agree to the bit, whatever that costs.
    low_bits: be ready to draft at fewer bits (`LowBit` without a copy); plain decoding then uses the same
    split weights that verification does.
    """

    context_tokens: int | None = None
    context_for: Callable[[int], int] | None = None
    first_tokens: int | None = None
    threads: int | None = None
    gpu_layers: int | None = None
    kv_type: str = "auto"
    flash_attention: str = "auto"
    mmap: bool = True
    mlock: bool = False
    batch_tokens: int = 512
    max_branches: int = 8
    memory_bytes: int | None = None
    rows: int | None = None
    draft: bool = False
    adapter: str | None = None
    exact: bool = False
    low_bits: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do, checked at load and not promised.

    rollback: cached tokens can be taken back exactly; without it nothing can be drafted.
    cuts: they can be taken back to any of them, at once; otherwise `truncate` may keep fewer than asked.
    tree: a pass may hold branches.
    reason: one line that says why something is missing; empty when nothing is.
    max_width, max_branches: the most rows, and the most leaves of a tree, that one pass takes.
    taps: hidden states between its layers can be read.
    self_drafts: the ways of `self_draft` that were tried at load and are exact: `layerskip` (EarlyExit),
    `lowbit` (LowBit), `swift` (SkippedLayers; such a model is Skippable).
    learns: as a draft it can be adapted to what a target says (such a model is Trainable).
    exact: it is held to passes that give the logits of single steps to the last bit, see `agreement`.
    continues: a text may be gone on from however it came into the cache: what follows is the same but for
    rounding, and where `exact` to the bit. Where False, it is the same to the bit only if the text is read in
    the same passes from its beginning, and what was written is read again (`memory.cached` does so).
    """

    rollback: bool
    tree: bool
    reason: str = ""
    max_width: int = 1 << 20
    max_branches: int = 1 << 20
    taps: bool = False
    self_drafts: frozenset[str] = frozenset()
    learns: bool = False
    cuts: bool = True
    exact: bool = False
    continues: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known about a loaded model. Sizes in bytes and tokens.

    kv_bytes: all that is remembered of past tokens: keys, values, recurrent states and copies of them.
    rollback: in words, how tokens are taken back. context_tokens, kv_bytes: as the context is now.
    grows_to_tokens, grown_kv_bytes: as it was asked for, where it was made smaller at first; else 0.
    cache_form: in words, what of its cache depends on more than the model and its options.
    """

    name: str
    path: str
    architecture: str
    description: str
    parameters: int
    file_bytes: int
    weight_bytes: int
    kv_bytes: int
    quantisation: str
    trained_context_tokens: int
    context_tokens: int
    vocab_size: int
    chat_template: bool
    capabilities: Capabilities
    notice: str = ""
    rollback: str = ""
    grows_to_tokens: int = 0
    grown_kv_bytes: int = 0
    cache_form: str = ""

    @property
    def max_context_tokens(self) -> int:
        """How large the context is to become, if it has to."""
        return max(self.grows_to_tokens, self.context_tokens)

    @property
    def most_kv_bytes(self) -> int:
        """`kv_bytes` by then."""
        return max(self.grown_kv_bytes, self.kv_bytes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cache of a model at one moment, to be restored into the same model.

    length: the tokens the cache held. start: how many of the first are not in here.
    """

    length: int
    data: bytes = field(repr=False)
    start: int = 0


class Vocabulary(Protocol):
    """The tokens of a model and the way to and from text."""

    size: int
    chat_template: str | None
    start_text: str
    end_text: str

    def tokenize(self, text: str, *, special: bool, start: bool) -> list[int]:
        """Text to tokens. `special`: control tokens written in the text count as such.

        `start`: put the model's start token first if it wants one.
        """

    def piece(self, token: int) -> bytes:
        """The bytes a token adds to the text; control tokens add none."""

    def raw_piece(self, token: int) -> bytes:
        """The token as it stands in the vocabulary, control tokens included."""

    def is_end(self, token: int) -> bool:
        """True for tokens that end a reply."""


class LanguageModel(Protocol):
    """A loaded model with one KV cache.

    The cache holds `length` tokens. `verify` puts a tree after them for the time of a round; `commit`
    keeps one path of it. Every method but `interrupt` belongs to one thread. After `close`, every call
    raises ClosedError; closing again does nothing.
    """

    facts: ModelFacts
    vocabulary: Vocabulary

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def room(self) -> int:
        """How many more tokens the context takes."""

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """Append tokens to the cache without computing their logits.

        Raises ContextFullError when they do not fit (the cache is as before), CancelledError after
        `interrupt` (the cache holds what was done; see `length`).
        """

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        """Run nodes `first` and up of a tree after the cache; row i of the logits follows node first + i.

        With `first` > 0 the nodes before it were run by earlier calls of this round, so that a drafter
        can grow its tree level by level. The logits are valid until the next pass.
        Raises ContextFullError, CapabilityError (branches the model cannot hold) and CancelledError;
        after any of them the cache is as before the round.
        """

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the root and the nodes of `path`, in order from the root; drop the rest of the round."""

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` cached tokens; see `length` for how many were kept.

        Also ends the round: `truncate(length)` with the present length keeps every token. A memory that
        can only go back to some of its moments keeps fewer, and none where it can go back to none.
        """

    def forget(self, start: int, end: int) -> None:
        """Take tokens [start, end) out of the cache: what follows them moves down to their place.

        What follows was computed while they were there, and stays as it was but for its positions
        (StreamingLLM, arXiv 2309.17453). Also ends the round. Raises CapabilityError where the memory
        cannot do so; then nothing changed.
        """

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        """A copy of the cache, of tokens [start, end) where it `cuts` and else of all; ends the round."""

    def restore(self, snapshot: Snapshot) -> None:
        """Make the cache what it was.

        A snapshot without its first tokens goes after these, the very `start` tokens the cache must hold.
        BackendError when the snapshot is of another model or context; the cache then holds `start` tokens,
        or none.
        """

    def resize(self, context_tokens: int) -> None:
        """Make the context larger or smaller, and keep the cache exactly as it is; ends the round.

        A backend may round up. Views of `self_draft` follow as far as memory allows. Raises ContextFullError
        when the cache does not fit the new size, MemoryBudgetError when that does not fit the memory; the
        cache is as before, but for earlier moments that a recurrent memory could have gone back to.
        """

    def run_ahead(self, wanted: bool) -> None:
        """A hint: whether the token after the next pass will be its best one, and run alone.

        A backend that computes in the background may then start that step before it is asked to. What
        comes out is the same.
        """

    def follow(self, draft: LanguageModel | None) -> None:
        """A hint: chains that `draft` grows will be verified here as they stand; None takes it back.

        Where both compute in the background on one device, the pass may then be started before the last
        guess has come back from it. What comes out is the same.
        """

    def self_draft(self, how: SelfDraft) -> LanguageModel:
        """This model as its own draft: a view that drafts on the target's memory.

        The view's `length` is the target's. Its `verify` runs a round of its own, which the target's next
        `verify`, `commit` or `truncate` ends, taking over what it can use; its own `prefill`, `commit`,
        `truncate` and `close` leave the target as it is. One view drafts in a round.
        Raises CapabilityError with the reason where this model cannot.
        """

    def interrupt(self, wanted: bool) -> None:
        """Stop the running pass and refuse new ones with CancelledError until called with False.

        Safe from any thread.
        """

    def close(self) -> None:
        """Free everything."""
