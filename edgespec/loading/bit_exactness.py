"""Determine by trial which pass widths of a loaded model agree bit for bit.

A multi-token kernel can sum numbers in a different order than the single-token kernel. The last bits then
differ, and because weights and activations are quantised, the difference grows from layer to layer until the
logits differ by 0.5 or more, which changes the text. Pass widths therefore fall into classes whose logits and
KV cells agree bit for bit. Which widths agree depends on the model, the library build, the device and the
options, and can be determined only by trial.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import cycle
from statistics import median
from time import perf_counter as now
from typing import NamedTuple

import numpy as np

from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, CapabilityError
from edgespec.loading.constants import (
    ANY_SPLIT,
    BLOCK_SPLIT,
    BLOCK_TOKENS,
    CONFIRMED_POSITIONS,
    EQUAL_PASSES,
    FAST_STEP_SECONDS,
    FEWER_PASSES,
    FEWER_POSITIONS,
    LONG_CONTEXT,
    LONGEST_CONTEXT,
    LONGEST_SECONDS,
    MAX_SHARE_OF_SINGLE_PASSES,
    MAX_TESTED_WIDTH,
    PASSES,
    PHASE_SHARES,
    POSITIONS,
    POSITIONS_AGAIN,
    SHORT_CONTEXT,
    SLOW_PASS_POSITIONS,
    SLOW_PASS_SECONDS,
    SLOW_PASS_WIDTHS,
    SLOW_STEP_SECONDS,
    SPLIT_TOKENS,
    STEPS_AFTER,
    SURELY_TESTED_WIDTH,
    TRIAL_SECONDS,
    TRIAL_STEPS,
    UNPADDED_TOKENS,
    WIDE_PASSES,
    WIDTHS_AGAIN,
)
from edgespec.memory.constants import READ_TOKENS
from edgespec.model.base import EarlyExit, LanguageModel, Progress
from edgespec.model.model_facts import Capabilities


@dataclass(frozen=True, slots=True)
class WidthClass:
    """A set of pass widths whose logits and KV cells agree bit for bit.

    Attributes:
        widths: The pass widths in tokens, in ascending order. Never empty.
        trees: Whether passes over token trees agree as well.
        block_tokens: Prompts must be processed in multiples of this many tokens per pass, so that their KV
            cells do not depend on how the prompt is split. 1 if any split, including decoding, gives the same
            cells.
        any_threads: Whether the results are independent of the number of CPU threads.
        is_complete: Whether the class contains all widths that could save time.
        is_cut_short: Whether time ran out before the next width was tested or, if the class has several
            widths, before trees were.
    """

    widths: tuple[int, ...]
    trees: bool = False
    block_tokens: int = READ_TOKENS
    any_threads: bool = True
    is_complete: bool = False
    is_cut_short: bool = False

    @property
    def max_width(self) -> int:
        return self.widths[-1]

    @property
    def is_contiguous(self) -> bool:
        """Whether the class contains all widths from 1 to `max_width`."""
        return self.widths == tuple(range(1, self.max_width + 1))

    @property
    def text(self) -> str:
        """The widths, such as `1 to 3` or `2, 4 to 6`."""
        runs: list[list[int]] = []
        for width in self.widths:
            if runs and width == runs[-1][-1] + 1:
                runs[-1].append(width)
            else:
                runs.append([width])
        return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def find_width_classes(model: LanguageModel, progress: Progress | None = None) -> list[WidthClass]:
    """Find the width classes that are usable for decoding: those that contain width 1 or width 2.

    If passes are slow, for example because they read weights from disk, a wide pass may take little longer
    than a single-token pass. The widest pass can then be a class of its own, to which all other passes are
    padded. If such a model cannot run its first layers alone, only a few widths are tested.

    The trial processes a few hundred tokens and compares the logits and KV cells at dozens of positions in a
    short and a long context. It runs about 60 single-token passes and up to 90 wider ones. Where the model
    supports it, these run only the first layers and the output layer. A narrow and the widest pass are then
    confirmed over all layers. The result is valid only for this model with these options, on this machine and
    build. The cache is empty afterwards.

    The trial has a time limit, which is checked before each pass. When it runs out, the classes contain only
    the widths whose tests were finished.

    Args:
        model: The loaded model. Its passes must not be restricted or padded.
        progress: Called between passes. Returning False cancels the trial.

    Returns:
        The class of width 1, followed by the class of width 2, or of the widest pass, if it is different. A
        model that cannot roll back has only width 1.

    Raises:
        CancelledError: `progress` returned False, or the model was interrupted.
    """
    model.truncate(0)
    try:
        return _Trial(model, progress).classes()
    finally:
        model.fix_threads(False)
        model.run_first_layers(False)


def restricted_to(capabilities: Capabilities, found: WidthClass) -> Capabilities:
    """Return a model's capabilities when restricted to passes of one class.

    Passes of other widths are padded to the next width in the class. Early exit runs the lower layers one
    token at a time, and the target keeps the resulting KV cells, so it requires a class without gaps.
    """
    restricted = replace(capabilities, exact=True, reuse_block_tokens=found.block_tokens)
    if not capabilities.rollback:
        return restricted
    # A model that rolls back by rerunning tokens may rerun them in a pass of any width.
    replays_exactly = capabilities.partial_truncate or found.block_tokens == 1
    if found.max_width == 1 or not replays_exactly:
        reason = _refusal("checking several tokens at once", "checking them one by one", found)
        return replace(
            restricted,
            rollback=False,
            tree=False,
            max_width=1,
            reason=reason,
            self_draft_methods=frozenset(),
            self_draft_refusals=dict.fromkeys(capabilities.self_draft_methods, reason),
        )
    refused = set() if found.is_contiguous else capabilities.self_draft_methods & {EarlyExit.method}
    reason = (
        "its results must not depend on how many tokens are checked at once, but on this machine, they are"
        f" identical only for {found.text} tokens at once"
    )
    no_trees = _refusal("checking drafts with branches", "checking single tokens", found)
    return replace(
        restricted,
        max_width=min(found.max_width, capabilities.max_width),
        tree=capabilities.tree and found.trees,
        reason=capabilities.reason or ("" if found.trees else no_trees),
        pass_widths=() if found.is_contiguous else found.widths,
        self_draft_methods=capabilities.self_draft_methods - refused,
        self_draft_refusals=dict.fromkeys(refused, reason),
    )


def _refusal(what: str, plain: str, found: WidthClass) -> str:
    gives = (
        f"there was no time to test whether {what} gives" if found.is_cut_short else f"{what} does not give"
    )
    return f"{gives} exactly the same results as {plain}"


class _Reference(NamedTuple):
    """Reference results for passes of one width after one context.

    Attributes:
        logits: Digests of the logits at each tested position.
        cells: Digests of the KV cells of the first n tested positions, keyed by n.
    """

    logits: list[bytes]
    cells: dict[int, bytes]


class _OutOfTimeError(Exception):
    """The trial's time limit ran out before the next pass."""


@dataclass
class _Trial:
    """The state of a trial, such as the test tokens, reference results and the widths that disagreed."""

    model: LanguageModel
    progress: Progress | None
    tokens: list[int] = field(init=False)
    positions: int = POSITIONS
    # Whether passes run only a few layers. See `LanguageModel.run_first_layers`.
    is_partial: bool = False
    repeats: bool = False
    has_slow_passes: bool = False
    seconds: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    disagreeing: set[int] = field(default_factory=set)
    references: dict[tuple[int, int], _Reference] = field(default_factory=dict)
    done_passes: int = 0
    # When the trial began, how long it may take, and when passes must stop for now. See `_allow`.
    began: float = field(init=False)
    limit_seconds: float = TRIAL_SECONDS
    until: float = float("inf")
    is_cut_short: bool = False

    def __post_init__(self) -> None:
        self.began = now()
        vocab_size = self.model.facts.vocab_size
        count = min(LONGEST_CONTEXT + POSITIONS + STEPS_AFTER, self.model.free_tokens)
        random = np.random.default_rng(1)
        self.tokens = random.integers(vocab_size // 8, vocab_size, count).tolist()

    def classes(self) -> list[WidthClass]:
        model, able = self.model, self.model.facts.capabilities
        contexts = self._read_contexts() if able.rollback else []
        if not contexts:
            return [WidthClass((1,))]
        limit = min(MAX_TESTED_WIDTH, able.max_width)
        alone, wide, other = set(range(1, limit + 1)), set(range(2, limit + 1)), 2
        if self.is_reduced:
            alone &= set(SLOW_PASS_WIDTHS)
        if self.has_slow_passes:
            wide, other = {max(alone)}, max(alone)
        # Let the thread count follow the machine's load unless results depend on it, because a pass with too
        # many threads takes ten times as long.
        any_threads = not self.is_reduced and self._threads_agree(contexts[0], min(5, limit))
        if not any_threads:
            model.fix_threads(True)
            model.truncate(0)
            contexts = self._read_contexts()
        # Digest of the prompt's KV cells when the prompt is processed in one large pass.
        whole = b"" if self.is_reduced or contexts[0] < SPLIT_TOKENS else self._cells(0, SPLIT_TOKENS)
        first_share, contexts_share, whole_share = PHASE_SHARES
        for length in contexts:
            self._allow(contexts_share if length == contexts[-1] else first_share)
            agreeing = self._agreeing if length == contexts[0] else self._still_agreeing
            alone = agreeing(1, alone, length)
            if other in alone or limit < 2 or not able.partial_truncate:
                wide = set()
            if wide:
                wide = agreeing(other, wide, length)
        if not able.partial_truncate:
            # Replaying accepted tokens makes passes wider, so only a set of widths without gaps can be used.
            alone = {width for width in alone if alone >= set(range(1, width))}
        self._allow(whole_share)
        found, are_widths_cut_short = [], self.is_cut_short
        for base, members in ((1, alone), *([(other, wide)] if wide else [])):
            widths = tuple(sorted(members))
            self.is_cut_short = False
            trees = able.tree and self._trees_agree(base, widths, contexts[-1])
            is_cut_short = self.is_cut_short
            if len(widths) == 1:
                is_cut_short = are_widths_cut_short and base + 1 not in self.disagreeing
            block = self._block_tokens(widths, whole)
            is_complete = not self.disagreeing & set(range(base, MAX_TESTED_WIDTH + 1)) and base == 1 < limit
            found.append(WidthClass(widths, trees, block, any_threads, is_complete, is_cut_short))
        return self._confirmed(found) if self.is_partial else found

    def _allow(self, share: float) -> None:
        """Let passes start until this share of the trial's time limit has passed."""
        self.until = self.began + share * self.limit_seconds

    def _confirmed(self, classes: Sequence[WidthClass]) -> list[WidthClass]:
        """Return the classes, excluding widths whose passes over all layers differ.

        Only a narrow and the widest pass of each class are compared, because the layers that have not been
        tested yet run the same kernels. If one of them differs, all widths are compared, as far as there is
        time.
        """
        self.is_partial = self.model.run_first_layers(False)
        self.positions = CONFIRMED_POSITIONS
        confirmed = []
        for found in classes:
            self.references.clear()
            base, widths = found.widths[0], found.widths
            # These few passes are always run, because none of the widths can be used without them.
            self.until = float("inf")
            if not all(self._all_layers_agree(base, width) for width in sorted({*widths[1:2], widths[-1]})):
                self.until = now() + self.limit_seconds
                widths = (base, *self._agreeing_over_all_layers(base, widths[1:]))
                # Trees and splits of prompts were compared only in the layers that agree.
                found = WidthClass(widths, any_threads=found.any_threads)
            confirmed.append(found)
        return confirmed

    def _agreeing_over_all_layers(self, base: int, widths: Sequence[int]) -> Iterator[int]:
        for width in widths:
            try:
                if self._all_layers_agree(base, width):
                    yield width
            except _OutOfTimeError:
                return

    def _all_layers_agree(self, base: int, width: int) -> bool:
        """Return whether one pass over all layers agrees with passes of width `base`."""
        reference = self._reference(base, 0)
        self._restore_context(0)
        return self._agrees(reference, 0, 0, self._pass(width, min(width, len(reference.logits))))

    def _begin_pass(self) -> None:
        """Report progress. Raise _OutOfTimeError if there is no time for another pass."""
        if now() > self.until:
            self.is_cut_short = True
            raise _OutOfTimeError
        self.done_passes += 1
        # The total number of passes is unknown, so the fraction approaches 1 without reaching it.
        fraction = self.done_passes / (self.done_passes + 100)
        if self.progress and not self.progress(
            "testing the model on this machine (first time only)", fraction
        ):
            raise CancelledError("loading the model was cancelled")

    def _read_contexts(self) -> list[int]:
        """Process the longest context that the time limit allows, and return the context lengths to test."""
        model = self.model
        step_seconds = self._step_seconds()
        if not self.is_partial:
            self.has_slow_passes = step_seconds > SLOW_PASS_SECONDS
            self.is_partial = model.run_first_layers(True)
            step_seconds = self._step_seconds() if self.is_partial else step_seconds
        is_slow = self.is_partial or step_seconds >= SLOW_STEP_SECONDS
        self.positions = FEWER_POSITIONS if is_slow else POSITIONS
        if self.is_reduced:
            self.positions = SLOW_PASS_POSITIONS
        # If passes are slow, `_reference` can compare twice as many positions as the widest pass has.
        positions = max(self.positions, 2 * MAX_TESTED_WIDTH if self.has_slow_passes else 0)
        most = len(self.tokens) - positions - STEPS_AFTER
        if most < 1:
            return []
        self.limit_seconds = max(TRIAL_SECONDS, TRIAL_STEPS * step_seconds)
        began = now()
        self._prefill(min(SHORT_CONTEXT, most))
        token_seconds = (now() - began) / model.length
        self.repeats = model.length == SHORT_CONTEXT and model.repeat_cached(min(LONGEST_CONTEXT, most))
        # Without this check, reading a longer context in a single pass could exceed the time limit.
        has_time = token_seconds * LONG_CONTEXT < PHASE_SHARES[0] * self.limit_seconds
        if has_time and not (self.repeats or self.is_reduced):
            self._prefill(min(LONG_CONTEXT, most))
            if (now() - began) * LONGEST_CONTEXT / model.length < LONGEST_SECONDS:
                self._prefill(min(LONGEST_CONTEXT, most))
        return list(dict.fromkeys((model.length, min(SHORT_CONTEXT, model.length))))

    def _step_seconds(self) -> float:
        self._step(0)
        self.seconds.clear()
        self._step(1)
        self.model.truncate(0)
        return self.seconds[1][0]

    def _prefill(self, end: int) -> None:
        if self.model.length < end:
            self._begin_pass()
            self.model.prefill(self.tokens[self.model.length : end])

    def _restore_context(self, length: int) -> None:
        """Make the cache hold only the first `length` tokens of the longest processed context."""
        self.model.truncate(length)
        if self.model.length < length and self.repeats:
            self.model.truncate(SHORT_CONTEXT)
            self._prefill(SHORT_CONTEXT)
            self.model.repeat_cached(length)
        self._prefill(length)

    def _run(self, tree: TokenTree) -> list[bytes]:
        self._begin_pass()
        began = now()
        logits = self.model.verify(tree)
        digests = [_digest(logits, row) for row in range(tree.width)]
        self.seconds[tree.width].append(now() - began)
        return digests

    def _step(self, position: int) -> bytes:
        (digest,) = self._run(TokenTree.chain(self.tokens[position]))
        self.model.commit(())
        return digest

    def _pass(self, width: int, real: int | None = None) -> list[bytes]:
        """Run the next `width` tokens in one pass, and keep the first `real` (all if None) in the cache."""
        first, real = self.model.length, width if real is None else real
        root, *rest = self.tokens[first : first + real]
        digests = self._run(TokenTree.chain(root, [*rest, *self.tokens[: width - real]]))
        self.model.commit(tuple(range(1, real)))
        return digests[:real]

    def _cells(self, start: int, end: int) -> bytes:
        """Return a digest of the KV cells at positions [start, end), or b"" if they cannot be copied."""
        if not self.model.facts.capabilities.partial_truncate:
            return b""
        try:
            return blake2b(self.model.snapshot(start, end).data).digest()
        except CapabilityError:
            return b""

    def _reference(self, base: int, length: int) -> _Reference:
        """Return digests of the logits and KV cells at all tested positions, for passes of width `base`."""
        if (base, length) not in self.references:
            is_first = all(tested == length for _, tested in self.references)
            positions = self.positions if is_first else min(self.positions, POSITIONS_AGAIN)
            if self.has_slow_passes:
                # Wide passes compute more positions in the same time, so test more positions.
                positions = max(positions, 2 * base)
            self._restore_context(length)
            found = _Reference([], {})
            while (at := self.model.length - length) < positions:
                found.logits.extend(self._pass(base, min(base, positions - at)))
                # Partially rolled-back passes can end at any position, so record the cells up to each one.
                for end in range(at + 1, self.model.length - length + 1):
                    found.cells[end] = self._cells(length, length + end)
            # Save it only now, because time can run out before all positions have been computed.
            self.references[base, length] = found
        return self.references[base, length]

    def _agrees(self, reference: _Reference, length: int, at: int, digests: Sequence[bytes]) -> bool:
        """Return whether all KV cells and the logits of the last pass, which began at `at`, agree."""
        end = at + len(digests)
        return (
            list(digests) == reference.logits[at:end]
            and self._cells(length, length + end) == reference.cells[end]
        )

    def _agreeing(self, base: int, candidates: Iterable[int], length: int) -> set[int]:
        """Return the candidates whose passes agree with passes of width `base` after `length` tokens.

        If time runs out, return those that were found to agree until then. Width 1 needs no test.
        """
        agreeing = set(candidates) | {base}
        width = base
        try:
            reference = self._reference(base, length)
            for width in sorted(agreeing):
                if width != base and not self._is_worth_testing(width, agreeing):
                    agreeing.discard(width)
                elif not self._width_agrees(width, reference, length, self._equal_passes * (width == base)):
                    if width == base:
                        # Even identical passes disagree, for example because the device does not sum in a
                        # fixed order.
                        return {base}
                    agreeing.discard(width)
                    self.disagreeing.add(width)
        except _OutOfTimeError:
            return {tested for tested in agreeing if tested < width or tested == 1}
        return agreeing

    def _still_agreeing(self, base: int, candidates: set[int], length: int) -> set[int]:
        """Return the candidates, which agree after another context, that also agree after this one.

        Only the attention kernels can differ. If passes run only a few layers, they are quick, but there are
        many, so only some widths are compared unless one of them differs. If time runs out, return the
        candidates up to the last compared width.
        """
        if self.is_partial:
            compared = 1
            try:
                reference = self._reference(base, length)
                for width in sorted(candidates & {*WIDTHS_AGAIN, max(candidates)}):
                    if not self._width_agrees(width, reference, length):
                        return self._agreeing(base, candidates, length)
                    compared = width
            except _OutOfTimeError:
                return {width for width in candidates if width <= compared}
            return candidates
        return self._agreeing(base, candidates, length)

    @property
    def is_reduced(self) -> bool:
        """Whether passes are so slow that only a few widths should be tested."""
        return self.has_slow_passes and not self.is_partial

    @property
    def _equal_passes(self) -> int:
        return FEWER_PASSES if self.is_reduced or self.is_partial else EQUAL_PASSES

    def _width_agrees(self, width: int, reference: _Reference, length: int, passes: int = 0) -> bool:
        """Return whether consecutive passes of one width agree with `reference` at all tested positions.

        The output layer rounds activations to 8 bits, which hides small differences: about half of the rows
        from a different kernel have identical logits by chance. Differences in the KV cells, however, add up
        from pass to pass. The hidden states of the first layers show nearly every difference.
        """
        self._restore_context(length)
        positions = len(reference.logits)
        is_first = positions == self.positions and not (self.is_reduced or self.is_partial)
        is_wide = width > SURELY_TESTED_WIDTH and not self.is_reduced
        most = passes or (WIDE_PASSES if is_wide else PASSES if is_first else FEWER_PASSES)
        for count in range(most):
            at = self.model.length - length
            if at + width > positions:
                break
            # Alternate between partially rolled-back passes and passes that are kept in full, so that
            # positions fall into different rows of a pass than in the reference.
            real = width - 1 if width > 2 and most > 1 and count % 2 == 0 else width
            if not self._agrees(reference, length, at, self._pass(width, real)):
                return False
        return True

    def _is_worth_testing(self, width: int, agreeing: set[int]) -> bool:
        """Return whether passes of this width could agree and save time, judging by narrower passes."""
        if width <= SURELY_TESTED_WIDTH or self.is_reduced:
            return True
        if width - 1 not in agreeing:
            return False
        # Compare the median single-token pass with the fastest wider one, because other programs delay some
        # passes.
        single = median(self.seconds[1])
        fastest = min(
            (min(self.seconds[each]) / each for each in range(width // 2, width) if each in self.seconds),
            default=float("inf"),
        )
        return single < FAST_STEP_SECONDS or fastest <= MAX_SHARE_OF_SINGLE_PASSES * single

    def _trees_agree(self, base: int, widths: Sequence[int], length: int) -> bool:
        """Return whether tree passes agree with passes of width `base`. If time runs out, return False.

        Also checks a normal pass after one branch of the last tree has been kept.
        """
        try:
            return self._compare_trees(base, widths, length)
        except _OutOfTimeError:
            return False

    def _compare_trees(self, base: int, widths: Sequence[int], length: int) -> bool:
        reference = self._reference(base, length)
        narrowest = min((width for width in widths if width >= 3), default=0)
        for width in (narrowest,) if self.is_reduced else (narrowest, widths[-1]):
            if width < 3:
                return False
            self._restore_context(length)
            for at in (0,) if self.is_reduced else (0, 2, 4):
                root, right = self.tokens[length + at : length + at + 2]
                wrong = self.tokens[at]
                filler = tuple(range(1, width - 2))
                tree = TokenTree(
                    (root, wrong, right, *([wrong] * len(filler))), (-1, 0, 0, *filler), (None,) * width
                )
                digests = self._run(tree)
                self.model.commit((2,))
                if not self._agrees(reference, length, at, (digests[0], digests[2])):
                    return False
            after = self.model.length - length
            if not self._agrees(reference, length, after, self._pass(base)):
                return False
        return True

    def _threads_agree(self, length: int, wide: int) -> bool:
        """Return whether the results of passes of 1 and `wide` tokens are independent of the thread count."""
        model = self.model
        if (threads := model.max_threads) <= 1:
            return True
        found = []
        model.fix_threads(True)
        try:
            for count in (threads, 1):
                model.set_max_threads(count)
                self._restore_context(length)
                digests = [self._step(length), self._step(length + 1)]
                found.append([*digests, *self._pass(wide)])
        finally:
            model.set_max_threads(threads)
            model.fix_threads(False)
        return found[0] == found[1]

    def _block_tokens(self, widths: Sequence[int], whole: bytes) -> int:
        """Return the size of the blocks into which prompts must be split. See `WidthClass.block_tokens`.

        If time runs out, return the largest size, which is always safe.
        """
        try:
            return self._compare_splits(widths, whole)
        except _OutOfTimeError:
            return READ_TOKENS

    def _compare_splits(self, widths: Sequence[int], whole: bytes) -> int:
        if not whole and self.model.facts.capabilities.partial_truncate:
            # No wide prefill pass was run, so its kernels are untested.
            return READ_TOKENS
        count = min(SPLIT_TOKENS, len(self.tokens) - STEPS_AFTER)
        expected = (whole,) if whole else self._split_digest(count, (count,), self.model.prefill)

        def decode(tokens: Sequence[int]) -> None:
            if len(tokens) in widths:
                self._pass(len(tokens))
            else:
                self.model.prefill(tokens)

        # If single-token passes do not agree with any wider pass, they do not agree with prefill either, even
        # if the logits after a prefill happen to be equal.
        if (
            len(widths) > 1
            and self._split_digest(count, ANY_SPLIT, decode) == expected
            and self._unpadded_passes_agree(widths, count, expected)
            and self._prompt_pass_agrees(count)
        ):
            return 1
        split = self._split_digest(count, BLOCK_SPLIT, self.model.prefill)
        return BLOCK_TOKENS if split == expected else READ_TOKENS

    def _unpadded_passes_agree(self, widths: Sequence[int], count: int, expected: tuple[bytes, ...]) -> bool:
        """Return whether prefill passes of widths that are not in the class agree with those that are.

        Verify passes of such widths are padded, but passes over a prompt are not. Only the narrowest and the
        widest are compared.
        """
        missing = sorted((self.disagreeing | set(range(1, widths[-1]))) - set(widths))
        return all(
            self._split_digest(count, (width, UNPADDED_TOKENS - width), self.model.prefill) == expected
            for width in dict.fromkeys((*missing[:1], *missing[-1:]))
        )

    def _split_digest(
        self, count: int, sizes: Sequence[int], read: Callable[[Sequence[int]], None]
    ) -> tuple[bytes, ...]:
        """Process tokens in passes of the given sizes, and return digests of KV cells or of next logits."""
        self.model.truncate(0)
        for size in cycle(sizes):
            first = self.model.length
            if first >= count:
                break
            self._begin_pass()
            read(self.tokens[first : min(first + size, count)])
        if cells := self._cells(0, count):
            return (cells,)
        return tuple(self._step(count + i) for i in range(STEPS_AFTER))

    def _prompt_pass_agrees(self, count: int) -> bool:
        """Return whether processing a prompt in one pass ends with the same logits as a single-token pass."""
        self._begin_pass()
        self.model.truncate(0)
        if self.model.prefill_prompt(self.tokens[:1]) is None:
            # The model does not compute logits together with a prompt.
            return True
        self.model.truncate(0)
        logits = self.model.prefill_prompt(self.tokens[:count])
        assert logits is not None
        together = _digest(logits, 0)
        self.model.truncate(count - 1)
        return self._step(count - 1) == together


def _digest(logits: Logits, row: int) -> bytes:
    # Add 0 to make negative zeros positive, because the two are equivalent.
    return blake2b((logits.at(row, np.arange(logits.vocab_size)) + 0.0).tobytes()).digest()
