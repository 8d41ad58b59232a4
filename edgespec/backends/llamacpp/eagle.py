"""Draft with an EAGLE-3 head, a one-layer model that reads the target's hidden states (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LoadOptions, Progress
from edgespec.backends.base_model import in_batches
from edgespec.backends.gguf_header import read_header
from edgespec.backends.gguf_metadata import read_gguf_info
from edgespec.backends.hidden_state_log import MAX_LOGGED_TOKENS, HiddenStateLog
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.eagle_context import HeadContext
from edgespec.backends.llamacpp.kv_cells import KvCells
from edgespec.backends.llamacpp.loading import check_file, describe, load_weights, threads_for
from edgespec.backends.llamacpp.metadata import architecture_metadata, metadata, vocabulary_size
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import ProbeResult
from edgespec.backends.llamacpp.resizing import check_resize_fits, rebuild_context
from edgespec.backends.llamacpp.staging_api import StagingApi, staging_api
from edgespec.backends.memory_check import check_tokens_fit, check_weights_fit
from edgespec.backends.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.backends.self_draft_view import SelfDraftView
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import (
    BackendError,
    CancelledError,
    CapabilityError,
    ContextFullError,
    MemoryBudgetError,
    ModelFileError,
)

if TYPE_CHECKING:
    from edgespec.backends.llamacpp.model import LlamaCppModel

__all__ = ["EagleHead", "estimate_eagle_head", "load_eagle_head"]

_ARCHITECTURE = "eagle3"
# Maximum number of tokens per pass of a head. Its buffers grow with this number and with the vocabulary.
_BATCH_TOKENS = 64
# Approximate size of a head's compute buffer, in bytes per token of a batch and per token of the vocabulary.
_COMPUTE_BYTES_PER_LOGIT = 7


def load_eagle_head(target: LlamaCppModel, path: Path) -> EagleHead:
    """Load an EAGLE-3 head for a target.

    Raises:
        CapabilityError: The file is not an EAGLE-3 head, or was made for another target.
        ModelFileError: The file is damaged, or its logits are not finite.
        MemoryBudgetError: The head does not fit in memory.
    """
    api = staging_api()
    if api is None or "eagle" not in target.facts.capabilities.self_draft_methods:
        raise CapabilityError(
            f"{target.facts.name} cannot use the head {path}, because it cannot be rolled back, or because"
            " this version of llama.cpp cannot run EAGLE-3 heads",
            "choose another method, such as model or suffix",
        )
    options, name = _head_options(target.options), f"the head of {target.facts.name}"
    if options.memory_bytes is not None:
        left = options.memory_bytes - target.facts.weight_bytes - target.facts.max_kv_bytes
        options = replace(options, memory_bytes=max(0, left))
    options = replace(options, context_tokens=target.max_plan.tokens)
    check_weights_fit(name, check_file(str(path)), options)
    weights = load_weights(str(path), name, options, None)
    try:
        layers = _check_made_for(target, weights, path, api)
        _check_token_ids(path, vocabulary_size(target.weights[0]))
        head = EagleHead(target, weights, str(path), layers, options, name)
    except BaseException:
        library().llama_model_free(weights)
        raise
    try:
        _check_finite(head, path)
    except BaseException:
        head.close()
        raise
    return head


def _check_token_ids(path: Path, vocab_size: int) -> None:
    """Raise ModelFileError if a head's `d2t` maps a draft token to none of the target's tokens.

    llama.cpp would end the process.
    """
    header = read_header(path)
    found = next((tensor for tensor in header.tensors if tensor.name == "d2t"), None)
    if found is None:
        return
    import gguf  # Imported lazily because importing gguf takes 0.2 seconds.

    ids = next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "d2t")
    if ids.dtype != np.int64 or not (ids.size and 0 <= ids.min() <= ids.max() < vocab_size):
        raise ModelFileError(
            f"the head {path} is damaged, or was made for another target: its d2t contains token ids outside"
            f" the target's vocabulary of {vocab_size:,} tokens",
            "download it again, or choose the head that was published for this target",
        )


def _check_finite(head: EagleHead, path: Path) -> None:
    """Run a token. Raise ModelFileError if its logits are not numbers."""
    logits = head.verify(TokenTree.chain(0)).at(0, np.arange(head.facts.vocab_size))
    head.truncate(0)
    # Tokens outside the head's own vocabulary have the logit -inf.
    if np.isnan(logits).any() or not np.isfinite(logits).any():
        raise ModelFileError(
            f"the head {path} is damaged: its logits are not finite", "download it again, or omit --head"
        )


def estimate_eagle_head(path: Path, context_tokens: int) -> MemoryEstimate:
    """Return the memory used by a head and by the hidden states that are kept for it.

    Raises:
        ModelFileError: The file is missing or damaged.
    """
    header = read_header(path)
    size = int(header.architecture_value("embedding_length", 0))
    state_size = int(header.architecture_value("target_hidden_size", size))
    layers = len(header.architecture_value("target_layers", ()))
    vocabulary = int(header.architecture_value("vocab_size", 0))
    hidden_bytes = MAX_LOGGED_TOKENS * layers * state_size * 4
    return MemoryEstimate(
        context_tokens,
        "f16",
        (
            MemoryPart("weights", check_file(str(path))),
            MemoryPart("cache", read_gguf_info(path).kv_bytes * context_tokens),
            MemoryPart("compute", _BATCH_TOKENS * vocabulary * _COMPUTE_BYTES_PER_LOGIT + hidden_bytes),
            MemoryPart("output", _BATCH_TOKENS * vocabulary * 4),
        ),
    )


def _head_options(options: LoadOptions) -> LoadOptions:
    """Return the load options of a head, given those of its target."""
    return replace(
        options.for_draft(),
        choose_context_tokens=None,
        batch_tokens=_BATCH_TOKENS,
        max_logit_rows=_BATCH_TOKENS,
        kv_type="auto",
    )


def _check_made_for(target: LlamaCppModel, head: Any, path: Path, api: StagingApi) -> list[int]:
    """Return the target's layers whose inputs the head reads.

    Raises:
        CapabilityError: The file is not an EAGLE-3 head, or was made for another target.
        ModelFileError: The file is damaged.
    """
    lib, (weights,) = library(), target.weights
    architecture = metadata(head, "general.architecture")
    if architecture != _ARCHITECTURE:
        raise CapabilityError(
            f"{path} is not an EAGLE-3 head, but a model with the architecture {architecture!r}",
            "pass a head with --head, and draft models with --draft",
        )
    layers = list(api.model_target_layer_ids(head)[: api.model_target_layer_ids_n(head)])
    size, count = lib.llama_model_n_embd(weights), lib.llama_model_n_layer(weights)
    head_size = int(architecture_metadata(head, "target_hidden_size") or lib.llama_model_n_embd(head))
    for what, own, needed in (
        ("hidden states", size, head_size),
        ("vocabularies", vocabulary_size(weights), vocabulary_size(head)),
    ):
        if own != needed:
            raise CapabilityError(
                f"the head {path} was made for another target: it needs {what} of size {needed:,}, but those"
                f" of {target.facts.name} have {own:,}",
                "choose the head that was published for this target",
            )
    rotated, key_length = (
        int(architecture_metadata(head, key) or 0) for key in ("rope.dimension_count", "attention.key_length")
    )
    # llama.cpp would end the process or hang.
    if rotated % 2 or not 0 < rotated <= key_length:
        raise ModelFileError(
            f"the head {path} is damaged: its rope.dimension_count is {rotated:,}, but must be an even number"
            f" up to the key length of {key_length:,}",
            "download it again, or omit --head",
        )
    if not layers or not all(0 <= layer < count for layer in layers):
        raise CapabilityError(
            f"the head {path} was made for another target: it reads the layers {layers}, but"
            f" {target.facts.name} has {count}",
            "choose the head that was published for this target",
        )
    return layers


class EagleHead(SelfDraftView["LlamaCppModel"]):
    """A draft model with its own KV cache, which predicts from the target's hidden states.

    The token at position p is run with the target's hidden state at position p - 1. For drafted tokens, that
    does not exist yet, so the head uses its own. When the draft has been verified, `commit` removes their KV
    cells, and they are run again with the target's hidden states.
    """

    def __init__(
        self,
        target: LlamaCppModel,
        weights: Any,
        path: str,
        layers: Sequence[int],
        options: LoadOptions,
        name: str,
    ) -> None:
        super().__init__(target)
        self._weights, self._options = weights, options
        self.vocabulary = target.vocabulary
        max_plan = plan_context(weights, options)
        plan = max_plan.with_tokens(target.facts.context_tokens)
        self._log: HiddenStateLog = target.log_hidden_states(layers)
        try:
            self._context = HeadContext(
                weights, options, plan, threads_for(weights, options), target.context, self._log.row_size
            )
        except BaseException:
            target.stop_logging(self._log)
            raise
        self._cells = KvCells(self._context, options.max_branches)
        # The head's own hidden states after each node of the tree that is being run.
        self._own_states: list[NDArray[np.float32]] = []
        # Number of nodes of that tree that were run with hidden states of the target.
        self._known_nodes = 0
        capabilities = Capabilities(
            rollback=True,
            tree=options.max_branches > 1,
            max_width=self._context.max_width,
            max_branches=options.max_branches,
        )
        facts = describe(
            weights, path, name, max_plan, self.vocabulary, ProbeResult(capabilities, "in place")
        )
        self.facts = replace(
            facts,
            context_tokens=plan.tokens,
            kv_bytes=plan.kv_bytes,
            vocab_size=self.vocabulary.size,
            notice="",
        )

    @property
    def length(self) -> int:
        return self._cells.length

    @property
    def free_tokens(self) -> int:
        return max(0, self._context.tokens - self.length)

    @property
    def threads(self) -> int:
        return self._context.threads

    @property
    def first_position(self) -> int:
        """The first position at which a token can be run with a hidden state of the target."""
        return self._log.start + 1

    @property
    def last_position(self) -> int:
        """The last position at which a token can be run with a hidden state of the target."""
        return self._log.end

    def start_at(self, position: int) -> None:
        """Empty the KV cache, and let it begin at a position. Tokens before it are never run."""
        self._check()
        self._context.clear()
        self._cells.clear_round()
        self._cells.length = position

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._check()
        check_tokens_fit(self, len(tokens))
        self._cells.end_round()
        for batch in in_batches(tokens, _BATCH_TOKENS, progress):
            start = self.length
            positions = range(start, start + len(batch))
            try:
                states = self._target_states(start, len(batch))
                self._context.run_pairs(batch, states, positions, [(0,)] * len(batch), logits=False)
            except (BackendError, ContextFullError, CancelledError):
                self._cells.truncate(start)
                raise
            self._cells.length += len(batch)

    def _target_states(self, start: int, count: int) -> NDArray[np.float32]:
        """Return the target's encoded hidden states before each of `count` tokens."""
        return self._context.encode(self._log.rows(start - 1, start - 1 + count), start)

    def verify(self, tree: TokenTree, first: int = 0) -> HostLogits:
        self._check()
        try:
            check_tokens_fit(self, tree.width)
            if tree.width > self.facts.capabilities.max_width:
                raise CapabilityError(
                    f"a draft of {tree.width} tokens exceeds the limit of"
                    f" {self.facts.capabilities.max_width} per pass",
                    "use a shorter --draft-length or fewer --draft-branches",
                )
            if first == 0:
                self._cells.end_round()
                self._own_states = []
            positions, sequences = self._cells.place_tree(tree, first)
            states = self._states_before(tree, first, positions)
            logits = self._context.run_pairs(tree.tokens[first:], states, positions, sequences)
            self._own_states.extend(self._context.last_states(len(positions)))
            return HostLogits(logits)
        except (BackendError, ContextFullError, CancelledError):
            self._cells.end_round()
            raise

    def _states_before(self, tree: TokenTree, first: int, positions: Sequence[int]) -> NDArray[np.float32]:
        """Return the hidden states before the tree's nodes: the target's if known, else the head's own."""
        known = 0
        if first == 0:
            # The root is run even before the target has run any tokens, to warm up.
            last = max(self._log.end, positions[0])
            known = self._known_nodes = sum(position <= last for position in positions)
        own = [self._own_states[tree.parents[first + node]] for node in range(known, len(positions))]
        return np.array([*(self._target_states(positions[0], known) if known else ()), *own])

    def commit(self, path: tuple[int, ...]) -> None:  # noqa: ARG002
        """Keep the tokens that were run with hidden states of the target."""
        self._check()
        if self._known_nodes:
            self._cells.commit(tuple(range(1, self._known_nodes)))
        self._cells.end_round()

    def truncate(self, length: int) -> None:
        self._check()
        self._cells.truncate(min(length, self.length))

    def resized(self) -> None:
        """Resize the head's context to match the target's, or keep its size if memory is short."""
        tokens = self._target.facts.context_tokens
        before = self._context.plan
        plan = before.with_tokens(tokens)
        try:
            check_resize_fits([before], [plan], self.facts.weight_bytes, self._options)
        except MemoryBudgetError:
            plan = before
        try:
            length = min(self.length, plan.tokens)
            self._cells.truncate(length)
            rebuild_context(self._context, plan, length)
        except (MemoryBudgetError, BackendError):
            self._cells.length = 0
        self.facts = replace(
            self.facts, context_tokens=self._context.plan.tokens, kv_bytes=self._context.plan.kv_bytes
        )

    def interrupt(self, enabled: bool) -> None:
        self._context.interrupt.requested = enabled

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._target.stop_logging(self._log)
        self._context.close()
        library().llama_model_free(self._weights)
