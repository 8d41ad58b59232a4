"""Combine several drafters by merging their drafts into one tree, which is verified in one pass.

Tokens that are not worth a wider pass are pruned from the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from numpy.typing import NDArray

from edgespec.engine.acceptance import Acceptance
from edgespec.engine.logits import Logits
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree, TreeBuilder
from edgespec.methods.auto.constants import MAX_PROB_SUM
from edgespec.methods.auto.drafter_stats import DrafterStats
from edgespec.methods.auto.model_selection import ModelSelector, RoundEstimate
from edgespec.methods.base import Drafter, DrafterMemory, ForcedDraft
from edgespec.methods.costs.curve import CostFunction, PassLimits, assumed_cost
from edgespec.methods.running_stats import RunningMean

__all__ = ["ChosenTokens", "CombinedDrafter", "UnusedDrafter", "merge_trees", "prune_optional"]


class UnusedDrafter(NamedTuple):
    """A drafter that is loaded and runs a model, but has drafted nothing in a reply.

    Attributes:
        name: Name of the drafter, such as "model".
        token_cost: Time to draft a token, relative to a single-token target pass. 0 if unknown.
        acceptance_rate: Share of its drafts' first tokens that were accepted. None if not measured.
        speed_up: Expected speed with this drafter alone, relative to plain decoding. None if not measured.
    """

    name: str
    token_cost: float
    acceptance_rate: float | None
    speed_up: float | None


class ChosenTokens:
    """The draft tokens chosen by the drafter itself, rather than determined by a constraint.

    Only these tokens count towards acceptance rates and draft lengths.

    Attributes:
        tree: The draft tree without tokens that a constraint determines. Their children are attached to the
            nearest chosen ancestor.
        nodes: For each node of `tree`, the corresponding node of the draft.
    """

    def __init__(self, draft: ForcedDraft) -> None:
        self._draft = draft
        tree, forced = draft
        builder = TreeBuilder(tree.tokens[:1])
        self.nodes = [0]
        chosen = [
            0
        ]  # For each node of the draft, the node of `tree` for it or the last chosen token before it.
        for node in range(1, tree.width):
            parent = chosen[tree.parents[node]]
            if node in forced:
                chosen.append(parent)
            else:
                chosen.append(builder.add(parent, tree.tokens[node], tree.draft_probs[node]))
                self.nodes.append(node)
        self.tree: TokenTree = builder.build()

    def emitted(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the emitted tokens, except those determined by a constraint."""
        tree, forced = self._draft
        path = tree.walk(tokens)
        accepted = len(path) - 1
        chosen = [token for token, node in zip(tokens, path[1:], strict=False) if node not in forced]
        # Include the token after the accepted ones, because it shows that the drafter's other tokens were
        # rejected.
        if forced.isdisjoint(tree.children(path[-1])):
            chosen += tokens[accepted : accepted + 1]
        return tuple(chosen)


@dataclass(frozen=True)
class _Proposal:
    draft: ForcedDraft
    chosen: ChosenTokens
    # For each node, the probability that it is accepted, given that its parent is accepted.
    node_probs: list[float]
    # The nodes that may be pruned.
    optional: Container[int]

    @property
    def tree(self) -> TokenTree:
        return self.draft.tree

    @cached_property
    def levels(self) -> tuple[list[float], list[int]]:
        reach_probs, rows = [0.0] * max(self.tree.depths), [0] * max(self.tree.depths)
        path_probs = [1.0]
        for node in range(1, self.tree.width):
            path_probs.append(path_probs[self.tree.parents[node]] * self.node_probs[node])
            level = self.tree.depths[node] - 1
            reach_probs[level] = min(reach_probs[level] + path_probs[node], 1.0)
            rows[level] += 1
        return reach_probs, rows


class CombinedDrafter(Drafter):
    """Runs each drafter whose draft is expected to save time, and merges the drafts into one tree.

    Lookup drafters run first, in every round. Then a `ModelSelector` chooses at most one of the drafters that
    run a model (draft models and heads). If `grammar` is among the drafters, draft models also draft the
    tokens that a constraint determines. Such tokens and those from lookups are dropped if they are unlikely
    to be accepted. Other drafts are kept whole, because dropping sampled tokens would bias rejection
    sampling.

    Args:
        drafters: The drafters, in the order in which their drafts are merged.
        limits: Maximum width and number of branches of a verify pass. Without branches, only the most
            promising chain is verified.
        v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
        allowance_seconds: Returns how much time the next round may lose compared with plain decoding.
        exploration_seconds: Returns how much time may be lost to a draft that is not expected to save time.
        clock: Returns the time in seconds.

    Attributes:
        selector: Chooses the drafter whose model runs, and prefills it.
        model_name: Name of the drafter whose model ran in the last call to `propose`, or None.
        drafted_levels: Depth of the draft from that drafter.
        contributors: Names of the drafters that contributed tokens to the last non-empty draft.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        limits: PassLimits | None = None,
        v: CostFunction = assumed_cost,
        allowance_seconds: Callable[[], float] = lambda: inf,
        exploration_seconds: Callable[[], float] = lambda: inf,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self.model_name: str | None = None
        self.drafted_levels = 0
        self.contributors: tuple[str, ...] = ()
        self._stats = tuple(DrafterStats(drafter) for drafter in drafters)
        self._lookups = tuple(stats for stats in self._stats if stats.is_lookup)
        self._models = {stats.drafter.name: stats for stats in self._stats if not stats.is_lookup}
        self._has_grammar = any(drafter.name == "grammar" for drafter in drafters)
        self._limits = limits or PassLimits()
        self._v = v
        self._clock = clock
        self._target_step_seconds = RunningMean()
        self._proposed_at: float | None = None
        self._proposals: dict[DrafterStats, _Proposal] = {}
        self._last_token = 0
        self.selector = ModelSelector(
            self._models,
            self._target_step_seconds,
            self._limits,
            v,
            allowance_seconds,
            exploration_seconds,
            clock,
        )

    @property
    def memory_use(self) -> DrafterMemory:
        return sum((drafter.memory_use for drafter in self.parts), DrafterMemory())

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return tuple(stats.drafter for stats in self._stats)

    @property
    def has_lookup(self) -> bool:
        return bool(self._lookups)

    @property
    def model_pass_seconds(self) -> dict[str, float]:
        """Single-token pass duration of each drafter that runs a model, in seconds, keyed by name.

        Measured before the first draft. Unmeasured durations are 0.
        """
        return {name: stats.drafter.pass_seconds for name, stats in self._models.items()}

    def unused_models(self, used: Container[str], target_step_seconds: float) -> tuple[UnusedDrafter, ...]:
        """Describe the drafters that run a model, except for those in `used`.

        Args:
            used: Names of drafters.
            target_step_seconds: Duration of a single-token target pass.
        """
        return tuple(
            UnusedDrafter(
                name,
                (stats.acceptance.level_seconds or stats.drafter.pass_seconds) / target_step_seconds,
                stats.acceptance.reach_probs(1)[0] if stats.is_measured else None,
                self.selector.expected_speed_up(stats),
            )
            for name, stats in self._models.items()
            if name not in used
        )

    def select_text_kind(self, kind: str) -> None:
        for stats in self._stats:
            stats.select_text_kind(kind)

    def saved_statistics(self) -> dict[str, NDArray[Any]]:
        """Return the statistics of all drafters as named arrays, to be saved for later runs."""
        saved: dict[str, NDArray[Any]] = {"plain": self._target_step_seconds.saved()}
        for stats in self._stats:
            saved |= stats.saved_statistics()
        return saved

    def restore_statistics(self, saved: Mapping[str, NDArray[Any]]) -> None:
        """Restore statistics from `saved_statistics`. Raises KeyError or ValueError if they are damaged."""
        for stats in self._stats:
            stats.restore_statistics(saved)
        self._target_step_seconds.restore(saved["plain"])

    def begin(self, tokens: Sequence[int]) -> None:
        self._proposals = {}
        self._last_token = tokens[-1]
        for stats in self._stats:
            stats.begin(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        lengths = dict.fromkeys(self._models, draft_length)
        return self.propose_within(sampler, acceptance, draft_length, lengths)

    def propose_within(
        self,
        sampler: Sampler,
        acceptance: Acceptance,
        lookup_length: int,
        model_lengths: Mapping[str, int],
    ) -> TokenTree:
        """Propose a draft, with a separate length limit for each drafter.

        Args:
            sampler: See `propose`.
            acceptance: See `propose`.
            lookup_length: Maximum length of a lookup drafter's draft.
            model_lengths: Maximum draft length of each drafter that runs a model, by name.
        """
        self._proposals = {}
        self.model_name, self.drafted_levels = None, 0
        for stats in self._lookups:
            self._ask(stats, sampler, acceptance, lookup_length)
        other_estimate = self._estimate(without="grammar")
        if chosen := self.selector.choose(model_lengths, self._estimate(), other_estimate):
            self.model_name = chosen.drafter.name
            self._ask(chosen, sampler, acceptance, model_lengths[self.model_name])
            self.drafted_levels = max(self._proposals[chosen].chosen.tree.depths)
        proposals = self._proposals
        tree = self._merged_tree() if proposals else TokenTree.chain(self._last_token)
        if tree.drafted:
            drafted = (stats for stats in self._asked if proposals[stats].tree.drafted)
            self.contributors = tuple(stats.drafter.name for stats in drafted)
        self._proposed_at = self._clock()
        return tree

    def _ask(self, stats: DrafterStats, sampler: Sampler, acceptance: Acceptance, length: int) -> None:
        started = self._clock()
        drafter = stats.drafter
        draft = (
            drafter.propose_with_forced(sampler, acceptance, length)
            if self._has_grammar
            else ForcedDraft(drafter.propose(sampler, acceptance, length))
        )
        chosen = ChosenTokens(draft)
        stats.record_draft(chosen.tree, length, self._clock() - started)
        node_probs = [1.0] * draft.tree.width
        for node, prob in zip(chosen.nodes, stats.acceptance.node_probs(chosen.tree), strict=True):
            node_probs[node] = prob
        optional = range(draft.tree.width) if stats.is_lookup else draft.forced
        self._proposals[stats] = _Proposal(draft, chosen, node_probs, optional)

    @property
    def _asked(self) -> list[DrafterStats]:
        return [stats for stats in self._stats if stats in self._proposals]

    def _merged_tree(self) -> TokenTree:
        chosen = self._asked if self._limits.can_branch else self._best_chain()
        proposals = [self._proposals[stats] for stats in chosen]
        return prune_optional(
            merge_trees([each.tree for each in proposals]),
            [each.node_probs for each in proposals],
            [each.optional for each in proposals],
            self._limits,
            self._v,
            sum(self.selector.draft_cost(stats) for stats in chosen),
        )

    def _best_chain(self) -> list[DrafterStats]:
        drafted = [stats for stats in self._asked if self._proposals[stats].tree.drafted]
        if models := [stats for stats in drafted if not stats.is_lookup]:
            return models[:1]
        return [max(drafted or self._proposals, key=lambda stats: sum(self._proposals[stats].node_probs))]

    def _estimate(self, without: str = "") -> RoundEstimate:
        estimate = RoundEstimate()
        for stats, proposal in self._proposals.items():
            if stats.drafter.name != without:
                estimate = estimate.with_draft(*proposal.levels, self.selector.draft_cost(stats))
        return estimate

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        if self._proposed_at is not None:
            self._target_step_seconds.add((self._clock() - self._proposed_at) / self._v(tree.width))
        self._proposed_at = None
        for drafter in self.parts:
            drafter.observe(tree, logits, sampler)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for stats, proposal in self._proposals.items():
            tree, chosen = proposal.tree, proposal.chosen
            stats.acceptance.record_outcome(chosen.tree, chosen.emitted(tokens))
            if tree.drafted and len(tree.walk(tokens)) > max(tree.depths):
                stats.retries.retry_next_round()
        self._proposals = {}
        if tokens:
            self._last_token = tokens[-1]
        for drafter in self.parts:
            drafter.commit(tokens)

    def note(self) -> str:
        return "; ".join(note for drafter in self.parts if (note := drafter.note()))


class MergedTree(NamedTuple):
    """Several draft trees merged into one. `node_maps[i][n]` is the merged node for node n of tree i."""

    tree: TokenTree
    node_maps: tuple[tuple[int, ...], ...]


def merge_trees(trees: Sequence[TokenTree]) -> MergedTree:
    """Merge draft trees that share a root into one.

    Siblings with the same token become one node, unless they were sampled (SpecInfer, arXiv 2305.09781).
    """
    drafted = [tree for tree in trees if tree.drafted]
    if len(drafted) < 2:
        only = drafted[0] if drafted else trees[0]
        return MergedTree(only, tuple(tuple(range(tree.width)) for tree in trees))
    builder = TreeBuilder(trees[0].tokens[:1])
    node_maps: list[list[int]] = [[0] for _ in trees]
    for i in sorted(range(len(trees)), key=lambda i: all(probs is None for probs in trees[i].draft_probs)):
        tree = trees[i]
        for node in range(1, tree.width):
            parent, token, probs = node_maps[i][tree.parents[node]], tree.tokens[node], tree.draft_probs[node]
            existing = builder.child(parent, token) if probs is None else None
            node_maps[i].append(builder.add(parent, token, probs) if existing is None else existing)
    return MergedTree(builder.build(), tuple(map(tuple, node_maps)))


def prune_optional(
    merged: MergedTree,
    node_probs: Sequence[Sequence[float]],
    optional: Sequence[Container[int]],
    limits: PassLimits,
    v: CostFunction,
    draft_cost: float,
) -> TokenTree:
    """Prune optional nodes that exceed the limits or are unlikely to be accepted.

    The most likely optional nodes are kept, up to the number that maximises the expected decoding speed S =
    (1 + sum of path probabilities) / (draft cost + v(rows)), as in Sequoia (arXiv 2402.12374).

    Args:
        merged: The merged drafts, as returned by `merge_trees`.
        node_probs: For each node of each input tree, the acceptance probability given that its parent is
            accepted.
        optional: For each input tree, the nodes that may be dropped unless a node below them is kept.
        limits: Maximum width and number of branches of a verify pass.
        v: Returns the duration of a verify pass of a given width, relative to a single-token target pass.
        draft_cost: Duration of drafting, relative to a single-token target pass.
    """
    tree = merged.tree
    probs = [0.0] * tree.width
    is_required = [False] * tree.width
    for node_map, tree_probs, tree_optional in zip(merged.node_maps, node_probs, optional, strict=True):
        for node, merged_node in enumerate(node_map):
            probs[merged_node] = max(probs[merged_node], tree_probs[node])
            is_required[merged_node] |= node not in tree_optional or merged_node == 0
    for node in range(tree.width - 1, 0, -1):
        is_required[tree.parents[node]] |= is_required[node]
    if all(is_required):
        return tree
    path_probs = _path_probs(tree, probs, is_required)
    kept = {node for node in range(tree.width) if is_required[node]}
    parents = {tree.parents[node] for node in kept}
    leaves, tokens = len(kept - parents), sum(path_probs[node] for node in kept)
    best_speed, best_count, added = tokens / (draft_cost + v(len(kept))), 0, list[int]()
    for node in sorted(set(range(tree.width)) - kept, key=lambda node: (-path_probs[node], node)):
        parent = tree.parents[node]
        forks = parent in parents
        if parent not in kept or len(kept) >= limits.max_width or leaves + forks > limits.max_branches:
            continue
        kept.add(node)
        parents.add(parent)
        added.append(node)
        leaves, tokens = leaves + forks, tokens + path_probs[node]
        speed = tokens / (draft_cost + v(len(kept)))
        if speed > best_speed:
            best_speed, best_count = speed, len(added)
    kept -= set(added[best_count:])
    return tree if len(kept) == tree.width else tree.subtree(sorted(kept))


def _path_probs(tree: TokenTree, probs: Sequence[float], is_required: Sequence[bool]) -> list[float]:
    """Return, for each node, the probability that it and all its ancestors are accepted.

    A prunable node is accepted only if all of its required siblings are rejected.
    """
    required_sums = [0.0] * tree.width
    for node in range(1, tree.width):
        if is_required[node]:
            parent = tree.parents[node]
            required_sums[parent] = min(required_sums[parent] + probs[node], MAX_PROB_SUM)
    path_probs = [1.0]
    for node in range(1, tree.width):
        prob, required = probs[node], required_sums[tree.parents[node]]
        if not is_required[node]:
            prob = prob * (1.0 - required) / (1.0 - prob * required)
        path_probs.append(path_probs[tree.parents[node]] * prob)
    return path_probs
