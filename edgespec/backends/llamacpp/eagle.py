"""Draft with EAGLE heads, one-layer models that read the target's hidden states.

llama.cpp runs EAGLE-3 heads (arXiv 2503.01840), but not EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077 and
2406.16858). edgespec runs the latter in NumPy, but uses ggml for their matrix products, including those with
the target's LM head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.head_view import (
    AttentionCells,
    HeadView,
    check_finite_logits,
    check_sizes,
    load_most_accurate,
)
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.head import PairHead
from edgespec.backends.llamacpp.head_loading import (
    BATCH_TOKENS,
    EagleContext,
    HeadFile,
    head_memory,
    head_options,
    load_head_file,
    target_layers,
)
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.loading import check_file, threads_for
from edgespec.backends.llamacpp.matrices import FileMatrix, GgmlProducts, product_bytes
from edgespec.backends.llamacpp.metadata import architecture_metadata
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.residual_target import EMBEDDINGS, lm_head
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError
from edgespec.model.base import Head, LoadOptions
from edgespec.model.base_model import BaseModel
from edgespec.model.formats.gguf_header import read_header
from edgespec.model.formats.gguf_metadata import read_gguf_info
from edgespec.model.formats.mlx_metadata import read_head_info
from edgespec.model.heads.eagle_files import EagleFiles, read_eagle
from edgespec.model.heads.layer_config import invalid_settings
from edgespec.model.heads.numpy_layers import (
    Array,
    CachedAttention,
    Product,
    Projections,
    Rotation,
    TreeNodes,
    WeightLoader,
    rms_norm,
    silu,
)
from edgespec.model.hidden_states import MAX_LOGGED_TOKENS, POST_NORM, HiddenStateLog
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart, check_weights_fit
from edgespec.model.model_facts import Capabilities, ModelFacts

__all__ = ["Eagle1Head", "estimate_head", "load_head"]

# Approximate compute buffer size of a head in bytes, per batch token and vocabulary entry.
_COMPUTE_BYTES_PER_LOGIT = 7
_FLOAT32_BYTES = 4


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load an EAGLE-3 head from a GGUF file, or an EAGLE-1 or EAGLE-2 head from a folder.

    Raises:
        CapabilityError: The head was made for a different target, or the target's hidden states cannot be
            read.
        ModelFileError: The head is damaged or not supported.
        MemoryBudgetError: The head does not fit in memory.
    """
    if head.path is not None and head.path.is_dir():
        return _load_eagle1_head(target, head.path)

    def make(weights: Any, options: LoadOptions, name: str) -> HeadFile:
        size = architecture_metadata(weights, "target_hidden_size") or library().llama_model_n_embd(weights)
        layers = target_layers(target, weights, head.shown_path, int(size))
        _check_rotations(weights, head.shown_path)
        path, plan = head.path or head.shown_path, plan_context(weights, options)

        def open_context(file: HeadFile, target: HeadTarget, row_size: int) -> EagleContext:
            threads = threads_for(weights, options)
            return EagleContext(weights, options, file.plan_for(target), threads, target.context, row_size)

        make_view = partial(PairHead, encodes=True)
        return HeadFile(weights, path, head.shown_path, name, options, plan, layers, open_context, make_view)

    return load_head_file(target, head, "eagle3", "an EAGLE-3 head", make)


def estimate_head(head: Head, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate a head's memory use, converting the head to GGUF first if necessary. See `HeadNetwork`."""
    path = head.path
    assert path is not None
    if path.is_dir():
        return _estimate_published(path, target, context_tokens)
    header = read_header(path)
    state_size = header.architecture_number("target_hidden_size") or header.architecture_number(
        "embedding_length"
    )
    return head_memory(
        context_tokens,
        weight_bytes=check_file(str(path)),
        token_bytes=read_gguf_info(path).kv_bytes,
        vocabulary=header.architecture_number("vocab_size"),
        state_size=np.size(header.architecture_value("target_layers", ())) * state_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


def _estimate_published(folder: Path, target: Path, context_tokens: int) -> MemoryEstimate:
    info = read_head_info(folder)
    if "EAGLE-1" in info.heads:
        return _estimate_eagle1_head(read_eagle(folder), target, context_tokens)
    return head_memory(
        context_tokens,
        weight_bytes=info.size_bytes,
        token_bytes=info.kv_bytes,
        vocabulary=info.vocab_size,
        state_size=len(info.read_layers) * info.hidden_size,
        bytes_per_logit=_COMPUTE_BYTES_PER_LOGIT,
    )


def _check_rotations(head: Any, path: Path) -> None:
    """Raise ModelFileError for RoPE dimensions that would make llama.cpp hang or abort."""
    rotated, key_length = (
        int(architecture_metadata(head, key) or 0) for key in ("rope.dimension_count", "attention.key_length")
    )
    if rotated % 2 or not 0 < rotated <= key_length:
        raise ModelFileError(
            f"the draft head {path} is damaged: its rope.dimension_count must be an even number up to the key"
            f" length of {key_length:,}, not {rotated:,}",
            "download it again, or use --head none",
        )


class Eagle1Network:
    """A transformer layer whose inputs are a token's embedding and the preceding hidden state.

    The layer has no norm before its attention and no final norm. EAGLE-1 and EAGLE-2 heads share this
    layout.

    Args:
        files: The head's configuration and tensors.
        loader: Loads the head's weights.

    Raises:
        ModelFileError: The weights are unreadable, or contain infinite values or NaN.
        ValueError, KeyError, TypeError, ArithmeticError: A setting is missing, invalid or not supported.

    Attributes:
        attention: The layer's attention, with the KV cache.
    """

    def __init__(self, files: EagleFiles, loader: WeightLoader) -> None:
        config, tensors = files.config, files.tensors

        def linear(name: str) -> Product:
            return loader.linear(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        rotation = Rotation(config.rope, config.head_size)
        self._fc = linear("fc")
        self._gate, self._up, self._down = (
            linear(f"layer.mlp.{name}_proj") for name in ("gate", "up", "down")
        )
        self._norm = loader.vector(tensors["layer.post_attention_layernorm.weight"])
        self._epsilon = config.norm_eps
        self.attention = CachedAttention(
            Projections(*(linear(f"layer.self_attn.{name}_proj") for name in "qkvo")),
            rotation,
            config.heads,
            config.kv_heads,
            config.head_size,
        )

    def with_own_cache(self) -> Eagle1Network:
        """Return a copy that shares the weights but has its own, empty KV cache."""
        other = copy(self)
        other.attention = self.attention.with_own_cache()
        return other

    def append(self, embeddings: Array, states: Array) -> None:
        """Append tokens to the KV cache, without computing their hidden states. See `run`."""
        with np.errstate(over="ignore", invalid="ignore"):
            self.attention.append(self._fused(embeddings, states))

    def run(self, embeddings: Array, states: Array, nodes: TreeNodes | None = None) -> Array:
        """Append tokens to the KV cache, and return the head's hidden states [tokens, size].

        Args:
            embeddings: The embedding of each token [tokens, size].
            states: For each token, the hidden state of the preceding token [tokens, size].
            nodes: The tokens' nodes in a draft tree. None if they follow the last token in the cache.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            states = self._fused(embeddings, states)
            states = states + self.attention.run(states, nodes)
            x = rms_norm(states, self._norm, self._epsilon)
            return states + self._down(silu(self._gate(x)) * self._up(x))

    def _fused(self, embeddings: Array, states: Array) -> Array:
        return self._fc(np.concatenate([embeddings, states], axis=1))


class Eagle1Head(HeadView[BaseModel]):
    """A head that takes pairs of a token and the preceding hidden state.

    The token at position p is run with the target's hidden state at position p - 1. Draft tokens have no such
    state yet, so the head uses its own hidden state instead. After verification, `commit` removes the cache
    rows of draft tokens, and the next prefill reruns accepted tokens with the target's hidden states.

    Args:
        target: The model to draft for.
        log: The log of the target's hidden states. See `HeadView`.
        release: Called when the view is closed.
        facts: Properties of the head.
        network: The head's network, with a KV cache of its own.
        embed: Returns the embeddings of token ids.
        output: Multiplies by the target's LM head.
    """

    def __init__(
        self,
        target: BaseModel,
        log: HiddenStateLog,
        release: Callable[[], None],
        facts: ModelFacts,
        network: Eagle1Network,
        embed: Callable[[Sequence[int]], Array],
        output: Product,
    ) -> None:
        super().__init__(target, log, release, AttentionCells(network.attention))
        self.facts = facts
        self._network, self._embed, self._output = network, embed, output
        self._keep(0)

    def _keep(self, length: int) -> None:
        super()._keep(length)
        # The head's own hidden state [size] after each node of the current draft tree.
        self._own_states: list[Array] = []

    def _append(self, tokens: Sequence[int]) -> None:
        self._network.append(self._embed(tokens), self._logged_states(self.length, len(tokens)))

    def _run_tree(self, tree: TokenTree, first: int) -> HostLogits:
        self._add_nodes(tree, first)
        with np.errstate(over="ignore", invalid="ignore"):
            logits = self._output(np.array(self._own_states[first:]))
        # Very large hidden states can make logits overflow. Replacing NaN and infinity makes the drafts
        # useless but valid.
        return HostLogits(logits if np.isfinite(logits).all() else np.nan_to_num(logits))

    def _add_nodes(self, tree: TokenTree, first: int) -> None:
        """Run the head on the tree's nodes, starting at `first`, and append its states to `_own_states`."""
        start, visible = first, _ancestors(tree.parents)
        if first == 0:
            self._keep(self.length)
            # During warm-up, run the root even though the target has not processed any tokens.
            known = max(self.log.end - self.length, 0)
            start = self._known_nodes = sum(depth <= known for depth in tree.depths)
            self._run_nodes(tree, visible, (0, start), self._logged_states(self.length, start))
        for begin, end in tree.independent_ranges(start):
            parents = tree.parents[begin:end]
            states = np.array([self._own_states[parent] for parent in parents])
            self._run_nodes(tree, visible, (begin, end), states)

    def _run_nodes(
        self, tree: TokenTree, visible: NDArray[np.bool_], nodes: tuple[int, int], states: Array
    ) -> None:
        """Run the head on a range of nodes, given the hidden state that precedes each of them."""
        self._check_not_interrupted()
        begin, end = nodes
        places = TreeNodes(self.length + np.array(tree.depths[begin:end]), visible[begin:end, :end])
        self._own_states.extend(self._network.run(self._embed(tree.tokens[begin:end]), states, places))


def _ancestors(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Return a mask [i, j] that is True where node j is node i or one of its ancestors."""
    result = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        result[node] |= result[parent]
    return result


def _load_eagle1_head(target: HeadTarget, folder: Path) -> LoadedEagle1Head:
    files, path = read_eagle(folder), Path(target.facts.path)
    config, lib, (weights,) = files.config, library(), target.weights
    if config.version != 1:
        raise CapabilityError(
            f"{folder} is an EAGLE-3 head in Hugging Face format, which GGUF models cannot use directly",
            "convert it with `edgespec prepare head`, and pass the resulting file with --head",
            code="head_not_supported",
        )
    size = lib.llama_model_n_embd(weights)
    check_sizes(
        target,
        folder,
        [
            ("hidden states", size, config.target_size),
            ("embeddings", size, config.hidden_size),
            ("a vocabulary", target.facts.vocab_size, config.vocab_size),
        ],
    )
    facts = _facts(target, files, folder)
    check_weights_fit(facts.name, facts.weight_bytes, head_options(target))
    products = GgmlProducts(lambda: target.threads)
    loader = WeightLoader(folder, products.product)
    with invalid_settings(folder):
        network = Eagle1Network(files, loader)
    own = files.tensors.get("embed_tokens.weight")
    embed = FileMatrix(path, EMBEDDINGS).rows if own is None else loader.rows(own)
    embed([0])  # Report unreadable embeddings now, rather than during a reply.
    matrix = lm_head(path)
    output = products.stored_product(matrix.stored(), matrix.kind, *matrix.shape)

    check_finite_logits(output(network.run(embed([0]), np.zeros((1, size), np.float32))), folder)

    return LoadedEagle1Head(folder, facts, network, embed, output)


class LoadedEagle1Head:
    """The weights of an EAGLE-1 or EAGLE-2 head, shared by its views. Implements `SharedHead`.

    Args:
        folder: The head's folder.
        facts: Properties of the head.
        network: The head's network.
        embed: See `Eagle1Head`.
        output: See `Eagle1Head`.
    """

    def __init__(
        self,
        folder: Path,
        facts: ModelFacts,
        network: Eagle1Network,
        embed: Callable[[Sequence[int]], Array],
        output: Product,
    ) -> None:
        self._folder, self._facts, self._network = folder, facts, network
        self._embed, self._output = embed, output
        # The hidden state that the head reads, determined when the first view is opened.
        self._chosen: int | None = None

    def view(self, target: HeadTarget, release: Callable[[], None]) -> Eagle1Head:
        """Return a view of the head. The target's cache must be empty when the first view is created."""
        if self._chosen is None:
            self._chosen = self._most_accurate(target)
        return self._reading(target, self._chosen, release)

    def _most_accurate(self, target: HeadTarget) -> int:
        tried: dict[Eagle1Head, int] = {}

        def tried_head(state: int) -> Eagle1Head:
            head = self._reading(target, state, lambda: None)
            tried[head] = state
            return head

        def choices() -> Iterator[Eagle1Head]:
            # Most heads read the hidden state after the final norm, as in EAGLE's own code. Some read the
            # state before the norm, which is not available for all architectures.
            yield tried_head(POST_NORM)
            with suppress(CapabilityError):
                yield tried_head(library().llama_model_n_layer(target.weights[0]))

        best = load_most_accurate(target, choices(), self._folder)
        best.close()
        return tried[best]

    def _reading(self, target: HeadTarget, state: int, release: Callable[[], None]) -> Eagle1Head:
        log = target.log_hidden_states([state])
        description = f"EAGLE-1 head that reads the hidden states {[state]}"
        facts, network = replace(self._facts, description=description), self._network.with_own_cache()
        return Eagle1Head(target, log, release, facts, network, self._embed, self._output)

    def close(self) -> None:
        """Do nothing. The weights are garbage-collected together with the last view."""


def _facts(target: HeadTarget, files: EagleFiles, folder: Path) -> ModelFacts:
    model, config = target.facts, files.config
    return replace(
        model,
        name=f"the draft head of {model.name}",
        path=str(folder),
        architecture="eagle1",
        parameters=sum(math.prod(tensor.shape) for tensor in files.tensors.values()),
        file_bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
        weight_bytes=_weight_bytes(files, Path(model.path)),
        kv_bytes=config.kv_bytes_per_token * model.context_tokens,
        capabilities=Capabilities(
            rollback=True,
            tree=model.capabilities.tree,
            max_width=min(BATCH_TOKENS, model.capabilities.max_width),
            max_branches=model.capabilities.max_branches,
        ),
        trained_context_tokens=config.context_tokens,
        chat_template=False,
        notice="",
        rollback="in place",
        requested_context_tokens=0,
        requested_kv_bytes=0,
    )


def _estimate_eagle1_head(files: EagleFiles, target: Path, context_tokens: int) -> MemoryEstimate:
    """Estimate an EAGLE-1 head's memory use with a GGUF target, including the hidden-state log."""
    config = files.config
    values = 8 * config.hidden_size + 3 * config.feed_forward_size
    compute = BATCH_TOKENS * values + MAX_LOGGED_TOKENS * config.target_size
    output = BATCH_TOKENS * read_gguf_info(target).vocab_size
    return MemoryEstimate(
        context_tokens,
        "f32",
        (
            MemoryPart("weights", _weight_bytes(files, target)),
            MemoryPart("cache", config.kv_bytes_per_token * context_tokens, per_reply=True),
            MemoryPart("compute", compute * _FLOAT32_BYTES, per_reply=True),
            MemoryPart("output", output * _FLOAT32_BYTES, per_reply=True),
        ),
    )


def _weight_bytes(files: EagleFiles, target: Path) -> int:
    """Return the size in bytes of the head's weights and a copy of the target's LM head."""
    return lm_head(target).stored_bytes + sum(
        math.prod(tensor.shape) * (product_bytes(tensor.dtype) if len(tensor.shape) > 1 else _FLOAT32_BYTES)
        for tensor in files.tensors.values()
    )
