"""Manage the target's KV cache: save its contents, and prefill the prompt before each reply.

This module also scores prompts, which means computing the log-probability of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter as now

from edgespec.engine.logits import Logits, TokenLogprob, token_logprobs
from edgespec.engine.loop import Verifier
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree, common_prefix_length
from edgespec.errors import CancelledError, EdgespecError
from edgespec.memory.constants import IDLE_READ_TOKENS, READ_TOKENS, SCORED_TOKENS
from edgespec.memory.context_resize import ResizableContext
from edgespec.memory.prefix_cache.cache import HeadState, PrefixCache
from edgespec.memory.prefix_cache.store import reusable_tokens
from edgespec.memory.pressure import MemoryPressure
from edgespec.model.base import LanguageModel, Progress
from edgespec.model.base_model import scaled_progress
from edgespec.model.image_tokens import end_of_images, token_runs, whole_images
from edgespec.model.model_facts import Capabilities

__all__ = ["TargetCache", "read_prompt", "score"]


class TargetCache:
    """Tracks which tokens are in the target's KV cache. Use only on the thread that runs the model.

    A reply can be interrupted at any step, so the recorded tokens and the KV cache can differ in length.
    However, one is always a prefix of the other.
    """

    def __init__(
        self,
        target: LanguageModel,
        prefix_cache: PrefixCache | None,
        context: ResizableContext,
        memory_pressure: MemoryPressure,
        heads: Sequence[HeadState] = (),
    ) -> None:
        self._target, self._heads = target, heads
        self._prefix_cache = prefix_cache
        self._context = context
        self._memory_pressure = memory_pressure
        self._tokens: list[int] = []
        self._reuse_is_exact = target.facts.capabilities.prefix_reuse_exact
        self._reusable = partial(reusable_tokens, target.facts.capabilities)
        self._prefilled_tokens = 0
        self._adapter_scales = self._loaded_scales = tuple(adapter.scale for adapter in target.facts.adapters)

    def use_adapters(self, scales: tuple[float, ...]) -> bool:
        """Set the adapter scales for the next reply, and return whether they changed.

        A KV cache is valid only for the scales that it was computed with. The prefix cache holds sequences
        for the scales that the target was loaded with, and is bypassed for any others.

        Raises:
            CapabilityError: The scales of the target's adapters are fixed.
        """
        if scales == self._adapter_scales:
            return False
        self.set_aside()
        self._target.set_adapter_scales(scales)
        self._adapter_scales = scales
        return True

    def use_loaded_adapters(self) -> bool:
        """Restore the scales that the target was loaded with, and return whether they changed."""
        return self.use_adapters(self._loaded_scales)

    def set_aside(self) -> None:
        """Clear the target's cache, saving its tokens to the prefix cache if there is one."""
        if self._cache and self._tokens:
            self._truncate_to_reusable()
            self._cache.add(self._tokens)
        self._tokens = []
        self._target.truncate(0)

    @property
    def _cache(self) -> PrefixCache | None:
        return self._prefix_cache if self._adapter_scales == self._loaded_scales else None

    @property
    def saves_to_disk(self) -> bool:
        return self._cache is not None and self._cache.saves_to_disk

    def common_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` are in the target's cache."""
        return common_prefix_length(self._tokens, tokens)

    def sync_length(self) -> None:
        """Discard the record of tokens that are no longer in the target's KV cache. Call between passes."""
        self._tokens = self._tokens[: self._target.length]

    def invalidate(self) -> None:
        """Forget which tokens are in the target's cache, so that the next prompt is prefilled completely."""
        self._tokens = []

    def save(self) -> None:
        """Save the target's cached tokens on disk, if the prefix cache uses the disk."""
        if self._cache and self._cache.saves_to_disk:
            self.sync_length()
            self._truncate_to_reusable()
            self._cache.add(self._tokens)

    @property
    def has_reply_to_read(self) -> bool:
        """Whether `read_reply` would let the next prompt reuse more tokens."""
        if self._reuse_is_exact:
            return False
        tokens = self._tokens
        prefilled = min(self._prefilled_tokens, len(tokens))
        return self._reusable(tokens, len(tokens)) > self._reusable(tokens, prefilled)

    def read_reply(self, should_continue: Callable[[], bool]) -> None:
        """Reprocess the last reply in the same passes that the next prompt would use for it.

        Decoding can compute slightly different KV cells than prefill. Without this call, the next prompt
        could reuse only the last prompt's tokens, and would have to reprocess the reply first.

        Args:
            should_continue: Called between passes. Returning False ends the call.
        """
        self.sync_length()
        if not self.has_reply_to_read or not should_continue():
            return
        tokens = self._tokens
        end = self._reusable(tokens, len(tokens))
        self._truncate_to_reusable()
        step = max(IDLE_READ_TOKENS, self._target.facts.capabilities.reuse_block_tokens)
        with suppress(EdgespecError):
            while (begin := self._target.length) < end and should_continue():
                self._target.prefill(tokens[begin : min(begin + step, end)])
        self._prefilled_tokens = self._target.length
        self._tokens = tokens[: self._target.length]

    def reclaim_idle(self) -> None:
        """Free memory if other programs need it.

        This may remove tokens from the end of the target's cache.
        """
        self.sync_length()
        self._memory_pressure.reclaim_idle()
        self.sync_length()

    def prepare(
        self, tokens: list[int], extra_tokens: int, stats: Stats, progress: Progress | None
    ) -> Logits | None:
        """Prefill all prompt tokens except the last, and verify the last in the same pass if possible.

        Args:
            tokens: The prompt. The caller appends the reply's tokens to this list.
            extra_tokens: Number of reply tokens to reserve space for.
            stats: Records the time spent on resizing and the number of tokens that were already cached.
            progress: Called with the fraction of the prompt processed so far. Returns False to cancel.

        Returns:
            The logits after the last token, or None if it still has to be verified. See
            `LanguageModel.prefill_prompt`.

        Raises:
            ContextFullError: There is not enough memory for a context of this length.
        """
        target, cache = self._target, self._cache
        self._truncate_to_reusable()
        shared = self._reusable(tokens, min(common_prefix_length(self._tokens, tokens), len(tokens) - 1))
        if cache and shared < len(self._tokens):
            cache.add(self._tokens, shared)
        self._tokens = self._tokens[:shared]
        target.truncate(shared)
        self._make_room(len(tokens), max(extra_tokens, target.facts.capabilities.padding_tokens), stats)
        if cache and (segment := cache.find(tokens, target.length)):
            self._tokens = []
            cache.restore(segment, tokens, target.length)
        if (whole := self._reusable(tokens, target.length)) < target.length:
            target.truncate(whole)
            # If a recurrent model has kept fewer tokens than `whole`, clear the KV cache.
            if target.length < whole:
                target.truncate(0)
        cached = stats.cached_prompt_tokens = self._keep_for_heads(tokens)
        self._tokens = tokens
        self._prefilled_tokens = cached
        last, done = len(tokens) - 1, 0.0
        if cache and (branch := self._reusable(tokens, cache.branch_point(tokens, cached))) > cached:
            done = (branch - cached) / (last - cached)
            started = now()
            _prefill(target, tokens[:branch], progress and scaled_progress(progress, 0.0, done))
            self._record_prefill(branch, branch - cached, started)
            cache.add_branch_point(tokens[:branch])
        begin, started = target.length, now()
        logits = read_prompt(target, tokens, progress and scaled_progress(progress, done, 1.0 - done))
        self._record_prefill(last, last - begin, started)
        return logits

    def _make_room(self, prompt_tokens: int, extra_tokens: int, stats: Stats) -> None:
        """Grow the context to fit a prompt and `extra_tokens` more. Raises ContextFullError."""
        stats.growth_seconds += self._memory_pressure.drop_prefixes()
        self._memory_pressure.begin_reply()
        stats.growth_seconds += self._context.grow_to(prompt_tokens + extra_tokens)
        self._context.check_fits(prompt_tokens)

    def score(
        self, tokens: Sequence[int], count: int, stats: Stats, progress: Progress | None
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probability of each prompt token after the first, given the preceding tokens.

        The values are the same as those from single-token passes. Scoring does not affect the next reply.

        Args:
            tokens: The prompt.
            count: Number of most likely tokens whose log-probabilities to return at each position.
            stats: Records the time spent on resizing.
            progress: Called with the fraction of the prompt processed so far. Returns False to cancel.

        Raises:
            CancelledError: `progress` returned False, or the target was interrupted.
            ContextFullError: There is not enough memory for a context of this length.
        """
        target, capabilities = self._target, self._target.facts.capabilities
        self.set_aside()
        self._make_room(len(tokens), capabilities.padding_tokens, stats)
        target.run_ahead(False)
        target.pipeline_with(None)
        scores: list[TokenLogprob] = []
        for computed in score(target, tokens, count, max_width=_scoring_width(capabilities)):
            scores += computed
            if progress and not progress("reading the prompt", len(scores) / (len(tokens) - 1)):
                raise CancelledError("prompt processing was cancelled")
        if capabilities.exact and self._reuse_is_exact and not self._heads:
            self._tokens = list(tokens[: target.length])
        else:
            # Clear the cache, because a reply splits the prompt into different passes, whose results may be
            # rounded differently.
            target.truncate(0)
        return tuple(scores)

    def _truncate_to_reusable(self) -> None:
        if not self._reuse_is_exact:
            reusable = self._reusable(self._tokens, min(self._prefilled_tokens, len(self._tokens)))
            self._tokens = self._tokens[:reusable]
            self._target.truncate(reusable)
            self.sync_length()

    def _keep_for_heads(self, tokens: list[int]) -> int:
        """Drop the last token if a head needs its hidden state, and return how many tokens are left.

        Rerunning the token recomputes the hidden state, without which the head could not use its KV cache.
        """
        length, capabilities = self._target.length, self._target.facts.capabilities
        # Exclude recurrent models, which can neither be truncated partially nor verify token trees, because
        # truncating them loses all tokens since their last checkpoint.
        can_drop = self._reuse_is_exact and (capabilities.partial_truncate or capabilities.tree)
        if can_drop and any(head.needs_last_state(tokens[:length]) for head in self._heads):
            self._target.truncate(whole_images(tokens, length - 1))
        return self._target.length

    def _record_prefill(self, end: int, tokens: int, started: float) -> None:
        self._prefilled_tokens = end
        if self._prefix_cache:
            self._prefix_cache.reuse_costs.record_prefill(tokens, now() - started)


def _scoring_width(capabilities: Capabilities) -> int:
    """Return the pass width for scoring a prompt. Passes of this width need no padding.

    Passes wider than one token are used only if they are bit-exact. On SmolLM2, passes that were not
    bit-exact changed log-probabilities by up to 0.5.
    """
    limit = min(capabilities.max_width, SCORED_TOKENS) if capabilities.exact and capabilities.rollback else 1
    return max((width for width in capabilities.pass_widths if width <= limit), default=limit)


def read_prompt(
    target: LanguageModel, tokens: Sequence[int], progress: Progress | None = None
) -> Logits | None:
    """Prefill the prompt tokens that are not in the target's cache yet, except the last.

    The resulting KV cells and logits depend only on the prompt, not on how much of it was cached.

    Args:
        target: The target. Its cache holds a reusable prefix of the prompt (see `reusable_tokens`).
        tokens: The whole prompt.
        progress: Called with the fraction of the prompt processed so far. Returns False to cancel.

    Returns:
        The logits after the last token, or None if it still has to be verified. See
        `LanguageModel.prefill_prompt`.
    """
    if target.facts.capabilities.prefix_reuse_exact:
        return target.prefill_prompt(tokens[target.length :], progress)
    # Run the last token in its own pass, because its logits are rounded differently in a pass over several
    # tokens. Some heads and prepared models cannot get the logits from such a pass, but a reply must not
    # depend on which of these are loaded.
    _prefill(target, tokens[:-1], progress)
    return None


def _prefill(target: LanguageModel, tokens: Sequence[int], progress: Progress | None) -> None:
    """Append the tokens that are not cached yet, in passes whose boundaries depend only on the positions."""
    begin, end = target.length, len(tokens)
    for stop in _pass_ends(tokens, begin, target.facts.capabilities.reuse_block_tokens):
        start = target.length
        if start < stop:
            part = progress and scaled_progress(
                progress, (start - begin) / (end - begin), (stop - start) / (end - begin)
            )
            target.prefill(tokens[start:stop], part)


def _pass_ends(tokens: Sequence[int], begin: int, block: int) -> Iterator[int]:
    """Yield the end of each pass over the tokens from position `begin`, given the model's block size."""
    if block > 1 and begin < len(tokens):
        # Count blocks from the end of the last image, as in `reusable_tokens`.
        block_start = end_of_images(tokens[:begin])
        for start, stop, is_image in token_runs(tokens[begin:]):
            start, stop = begin + start, begin + stop
            if is_image:
                block_start = stop
            else:
                whole = stop - (stop - block_start) % block
                yield from range(start + READ_TOKENS, whole, READ_TOKENS)
                if whole > start:
                    yield whole
            yield stop
    yield len(tokens)


def score(
    target: Verifier, tokens: Sequence[int], count: int, *, max_width: int
) -> Iterator[tuple[TokenLogprob, ...]]:
    """Compute the log-probability of each token after the first, given the preceding tokens.

    Afterwards, the target's KV cache contains all tokens except the last.

    Args:
        target: The target. Its KV cache must be empty.
        tokens: The text's tokens.
        count: Number of most likely tokens whose log-probabilities to return at each position.
        max_width: Maximum number of tokens in a pass.

    Yields:
        The log-probabilities computed by one pass.
    """
    end = len(tokens) - 1
    for start in range(0, end, max_width):
        chain = tokens[start : min(start + max_width, end)]
        nodes = range(len(chain))
        logits = target.verify(TokenTree.chain(chain[0], chain[1:]))
        computed = token_logprobs(logits, nodes, tokens[start + 1 :], count)
        target.commit(tuple(nodes[1:]))
        yield computed
