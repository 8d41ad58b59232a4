"""Load Medusa heads (arXiv 2401.10774) and Hydra heads (arXiv 2402.05109), for all backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from edgespec.backends.base import LoadOptions
from edgespec.backends.base_model import BaseModel
from edgespec.backends.hidden_state_log import MAX_LOGGED_TOKENS, POST_NORM
from edgespec.backends.memory_check import check_weights_fit
from edgespec.backends.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.backends.model_facts import Capabilities, ModelFacts
from edgespec.backends.residual_head_view import PrefixHeadView, ResidualHeadView
from edgespec.errors import CapabilityError
from edgespec.heads.prefix_layer import AttentionShape, PrefixLayer
from edgespec.heads.products import Array, MakeProduct, Product, WeightLoader
from edgespec.heads.residual_layout import AttentionLayer, ResidualHeads, read_residual_heads
from edgespec.heads.residual_network import ResidualNetwork

__all__ = [
    "LoadedResidualHeads",
    "ResidualHeadTarget",
    "WeightBytes",
    "estimate_residual_heads",
    "load_residual_heads",
]

# Function that returns the memory in bytes for the weights of heads.
WeightBytes: TypeAlias = Callable[[ResidualHeads], int]

_FLOAT32_BYTES = 4
# Number of rows of logits to reserve memory for. Enough for one level of a large draft tree.
_MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class ResidualHeadTarget:
    """The parts of a target that Medusa and Hydra heads use.

    Attributes:
        model: The target.
        memory_bytes: Memory limit of the target, its KV cache and its heads. None if there is no limit.
        layers: Number of layers in the target.
        attention: Settings of the target's attention layers, which Hydra++ heads use too.
        embed: Returns the token embeddings [tokens, size] for token ids.
        make_product: Returns a function that multiplies by one of the heads' matrices.
        output: Returns a function that multiplies by the target's LM head, for heads without output matrices.
        weight_bytes: Function that returns the memory in bytes for the weights of the heads.
    """

    model: BaseModel
    memory_bytes: int | None
    layers: int
    attention: AttentionShape
    embed: Callable[[Sequence[int]], Array]
    make_product: MakeProduct
    output: Callable[[], Product]
    weight_bytes: WeightBytes

    def made_for_another(self, path: Path, what: str, needed: int, own: int) -> CapabilityError:
        return CapabilityError(
            f"the head {path} was made for another target: it needs {what} of size {needed:,}, not"
            f" {own:,} as in {self.model.facts.name}",
            "choose the head that was published for this target",
        )


def load_residual_heads(target: ResidualHeadTarget, path: Path) -> LoadedResidualHeads:
    """Load the Medusa or Hydra heads at a path for a target.

    Raises:
        CapabilityError: The heads were made for another target, or the target's hidden states cannot be read.
        ModelFileError: The files are damaged.
        MemoryBudgetError: The heads do not fit in memory.
    """
    heads, model = read_residual_heads(path), target.model.facts
    if heads.vocab_size not in (0, model.vocab_size):
        raise target.made_for_another(path, "a vocabulary", heads.vocab_size, model.vocab_size)
    if heads.layers_before_last >= target.layers:
        raise CapabilityError(
            f"the head {path} was made for another target: it reads the hidden states before the last"
            f" {heads.layers_before_last} layers, but {model.name} has only {target.layers} layers",
            "choose the head that was published for this target",
        )
    facts = _facts(target, heads, path)
    if target.memory_bytes is not None:
        left = target.memory_bytes - model.weight_bytes - model.max_kv_bytes
        check_weights_fit(facts.name, facts.weight_bytes, LoadOptions(memory_bytes=max(0, left)))
    state = target.layers - heads.layers_before_last if heads.layers_before_last else POST_NORM
    log = target.model.log_hidden_states([state])
    try:
        if heads.state_size != log.row_size:
            raise target.made_for_another(path, "hidden states", heads.state_size, log.row_size)
        return LoadedResidualHeads(target, heads, path, state, facts)
    finally:
        target.model.stop_logging(log)


class LoadedResidualHeads:
    """The weights of Medusa or Hydra heads, which the views of all replies share.

    Args:
        target: The target.
        heads: The heads' layout.
        path: The heads' path.
        state: The hidden state that the heads read, numbered as in `HiddenStateSource`.
        facts: Properties of the heads.

    Raises:
        CapabilityError: The heads were made for another target.
        ModelFileError: The files are damaged.
    """

    def __init__(
        self, target: ResidualHeadTarget, heads: ResidualHeads, path: Path, state: int, facts: ModelFacts
    ) -> None:
        self._state, self._facts = state, facts
        loader = WeightLoader(heads.file, target.make_product)
        self._embed = target.embed if heads.reads_tokens else None
        if self._embed:
            self._embed([0])  # Report unreadable embeddings now, rather than during a reply.
        self._network = ResidualNetwork(heads, loader, None if heads.vocab_size else target.output())
        self._prefix: PrefixLayer | None = None
        if heads.prefix:
            _check_attention(target, heads, heads.prefix, path)
            self._prefix = PrefixLayer(heads.prefix, target.attention, loader)

    def view(self, target: BaseModel, release: Callable[[], None] = lambda: None) -> ResidualHeadView:
        """Return a view of the heads, with a KV cache of its own if they have one.

        Args:
            target: The target, or one of the replies that share it.
            release: Called when the view is closed.
        """
        log = target.log_hidden_states([self._state])
        parts = target, log, release, self._facts, self._network, self._embed
        if self._prefix is None:
            return ResidualHeadView(*parts)
        return PrefixHeadView(*parts, self._prefix.with_own_cache())

    def close(self) -> None:
        """See `SharedHead` of the llama.cpp backend. Python frees the weights together with the last view."""


def _check_attention(
    target: ResidualHeadTarget, heads: ResidualHeads, prefix: AttentionLayer, path: Path
) -> None:
    """Raise CapabilityError if the attention layer of Hydra++ heads does not fit the target's head size."""
    size, heads_of_target, keys = heads.state_size, target.attention.heads, prefix.k_proj.shape[0]
    head_size = size // heads_of_target if heads_of_target else 0
    if not head_size or head_size % 2 or size % head_size or keys % head_size or size % keys:
        raise CapabilityError(
            f"the head {path} was made for another target: its keys of size {keys:,} cannot be divided among"
            f" the {heads_of_target} attention heads of {target.model.facts.name}",
            "choose the head that was published for this target",
        )


def _facts(target: ResidualHeadTarget, heads: ResidualHeads, path: Path) -> ModelFacts:
    model = target.model.facts
    return replace(
        model,
        name=f"the head of {model.name}",
        path=str(path),
        description=f"{len(heads.heads)} heads, {heads.parameters / 1e6:,.1f} M weights",
        parameters=heads.parameters,
        file_bytes=heads.file.stat().st_size,
        weight_bytes=target.weight_bytes(heads),
        kv_bytes=_token_bytes(heads) * model.context_tokens,
        capabilities=Capabilities(
            rollback=True,
            tree=model.capabilities.tree,
            max_branches=model.capabilities.max_branches,
            max_draft_length=len(heads.heads),
        ),
        notice="",
        requested_context_tokens=0,
        requested_kv_bytes=0,
    )


def _token_bytes(heads: ResidualHeads) -> int:
    """Return the heads' KV cache size in bytes per token."""
    return 2 * heads.prefix.k_proj.shape[0] * _FLOAT32_BYTES if heads.prefix else 0


def estimate_residual_heads(
    path: Path, context_tokens: int, vocab_size: int, weight_bytes: WeightBytes
) -> MemoryEstimate:
    """Estimate the memory for Medusa or Hydra heads, including the log of hidden states that they read.

    Args:
        path: The heads' folder or file.
        context_tokens: The target's context size.
        vocab_size: The target's vocabulary size.
        weight_bytes: Function that returns the memory in bytes for the weights of the heads.

    Raises:
        CapabilityError: The heads are of a kind that edgespec cannot run.
        ModelFileError: The files are missing or damaged.
    """
    heads = read_residual_heads(path)
    state_bytes = MAX_LOGGED_TOKENS * heads.state_size * _FLOAT32_BYTES
    return MemoryEstimate(
        context_tokens,
        "f32",
        (
            MemoryPart("weights", weight_bytes(heads)),
            MemoryPart("cache", _token_bytes(heads) * context_tokens, per_reply=True),
            MemoryPart("compute", state_bytes, per_reply=True),
            MemoryPart("output", _MAX_ROWS * vocab_size * _FLOAT32_BYTES, per_reply=True),
        ),
    )
