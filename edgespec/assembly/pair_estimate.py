"""What a choice takes: the metadata of a target and of what drafts for it, added up."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import get_args

from edgespec.assembly.drafting_options import DraftingOptions
from edgespec.assembly.pairing import ModelPair, draft_load_options, options_in_pair
from edgespec.backends.base import LoadOptions
from edgespec.backends.memory_estimate import MemoryEstimator
from edgespec.catalog import (
    MetadataCache,
    Resolved,
    find_installed,
    read_model_info,
    smaller_quantisations,
)
from edgespec.drafters.windowed import AttentionWindow, choose_draft_window
from edgespec.errors import EdgespecError
from edgespec.memory import (
    Budget,
    Item,
    MemoryPlan,
    PairEstimate,
    PlanChoice,
    PlanOption,
    fit_to_budget,
    items_of,
)

__all__ = ["PairEstimator", "compute_headroom_bytes", "opened"]

# Left free of what was planned, for what no plan foresees: vocabularies, texts, fragments.
_HEADROOM_SHARE, _LEAST_HEADROOM_BYTES = 1 / 50, 8 * 2**20
_ROOM_BYTES = 1 << 62
# What a `Translation` takes for each token of both vocabularies: its bytes, and its number in the other.
# Measured over pairs of real ones, the most while they are put side by side.
_TRANSLATED_BYTES = 190
_EVERYTHING: frozenset[PlanOption] = frozenset(get_args(PlanOption))


class PairEstimator:
    """The metadata of a target and what drafts for it, opened while a plan is made."""

    def __init__(
        self, pair: ModelPair, drafting: DraftingOptions, options: LoadOptions, undo: ExitStack
    ) -> None:
        self._pair, self._drafting = pair, drafting
        self._options = replace(
            options, low_bits=pair.target.file_format.low_bit_weights and "lowbit" in drafting.named_drafters
        )
        self.target = opened(pair.target, self._options)
        undo.callback(self.target.close)
        self._undo = undo
        self._drafts: dict[str, tuple[Resolved, MemoryEstimator]] = {}
        if pair.draft:
            self._drafts[""] = pair.draft, self._opened_draft(pair.draft)
        self._translated: dict[str, int] = {}
        self._copy: MemoryEstimator | None = None
        if copy := _lowbit_copy(pair, drafting):
            self._copy = opened(copy, options)
            undo.callback(self._copy.close)
        self._process_bytes = max(
            each.backend.process_bytes for each in (pair.target, pair.draft) if each is not None
        )

    def _opened_draft(self, found: Resolved) -> MemoryEstimator:
        drafting = replace(self._options, low_bits=False, is_draft=True, adapter=None, exact=False)
        draft = opened(found, drafting)
        self._undo.callback(draft.close)
        return draft

    def plan(self, choice: PlanChoice, budget: Budget) -> MemoryPlan:
        """The plan of a choice as it stands, which may not fit. Raises OptionError and MemoryBudgetError."""
        return fit_to_budget(choice, self.estimate, budget, fixed=_EVERYTHING)[1]

    def smaller_drafts(self, start: PlanChoice, budget: Budget) -> list[str]:
        """Files of the draft with fewer bits that are here, by name; looked for where the memory is short."""
        if self._pair.draft is None or self.plan(start, budget).fits:
            return []
        for found in smaller_quantisations(self._pair.draft, find_installed()):
            with suppress(EdgespecError):
                self._drafts[found.name] = found, self._opened_draft(found)
        return [name for name in self._drafts if name]

    def draft_of(self, choice: PlanChoice) -> Resolved:
        """The file that drafts."""
        return self._drafts[choice.draft_form][0]

    def options_of(self, choice: PlanChoice) -> LoadOptions:
        """How the target is loaded."""
        return replace(
            self._options,
            context_tokens=choice.context_tokens,
            kv_type=choice.kv_type,
            gpu_layers=choice.gpu_layers,
        )

    def estimate(self, choice: PlanChoice) -> PairEstimate:
        """See `ladder.Measure`."""
        options = self.options_of(choice)
        pair = self._pair
        target_options = options_in_pair(pair.target, pair.draft, options)
        # MLX takes float32 wherever there is room for it.
        room = _ROOM_BYTES if choice.float32 else 0
        target = self.target.estimate(replace(target_options, memory_bytes=room))
        items = list(items_of("target", target))
        if self._drafts and choice.draft:
            found, draft = self._drafts[choice.draft_form]
            drafting = replace(
                draft_load_options(options, self._drafting, target.context_tokens, None),
                memory_bytes=_ROOM_BYTES,
                kv_type=choice.draft_kv_type or options.kv_type,
            )
            drafting = replace(
                options_in_pair(found, pair.target, drafting),
                choose_context_tokens=lambda trained: self._draft_tokens(
                    choice, target.context_tokens, trained
                ),
            )
            items += items_of("draft", draft.estimate(drafting))
            if translated := self._translated_bytes(found):
                items.append(Item("draft", "draft vocabulary, translated", "vocabulary", translated))
        if self._copy and choice.copy:
            tokens = self._copied_tokens(choice, target.context_tokens)
            items += items_of("low-bit copy", self._copy.estimate(replace(options, context_tokens=tokens)))
        taken = sum(item.bytes for item in items)
        items.append(Item("Python", "Python and its libraries", "process", self._process_bytes))
        items.append(Item("free", "headroom", "headroom", compute_headroom_bytes(taken)))
        return PairEstimate(tuple(items), target)

    def _translated_bytes(self, draft: Resolved) -> int:
        """What a `Translation` from the target to a draft takes; 0 where they have the same tokens."""
        if draft.name not in self._translated:
            known, tokens = MetadataCache(), 0
            with suppress(EdgespecError):  # then loading says what is wrong
                pair = (self._pair.target, draft)
                infos = [read_model_info(found, known) for found in pair]
                known.save()
                mine, its = (
                    (found.path, found.format, info.vocabulary)
                    for found, info in zip(pair, infos, strict=True)
                )
                if not known.same_token_ids(mine, its):
                    tokens = sum(info.vocab_size for info in infos)
            self._translated[draft.name] = tokens * _TRANSLATED_BYTES
        return self._translated[draft.name]

    def _window(self, choice: PlanChoice, target_tokens: int, trained_tokens: int) -> AttentionWindow | None:
        return choose_draft_window(
            target_tokens, trained_tokens, choice.draft_window, self._drafting.arguments["draft_sinks"]
        )

    def _draft_tokens(self, choice: PlanChoice, target_tokens: int, trained_tokens: int) -> int:
        """The context of the draft: the target's, or that of its window."""
        window = self._window(choice, target_tokens, trained_tokens)
        return window.context_tokens if window else target_tokens

    def draft_window(self, choice: PlanChoice, target_tokens: int) -> AttentionWindow | None:
        """What a draft sees of the target's context; None where it sees all, or there is none."""
        if not self._drafts or not choice.draft:
            return None
        trained = self._drafts[choice.draft_form][1].trained_context_tokens
        return self._window(choice, target_tokens, trained)

    def draft_sees(self, choice: PlanChoice) -> int:
        """The longest context of the target with which the draft sees the text as it does with this one.

        Without a window that is what it was trained for.
        """
        if not self._drafts or not choice.draft:
            return self.target.trained_context_tokens
        trained = self._drafts[choice.draft_form][1].trained_context_tokens
        window = self._window(choice, choice.context_tokens, trained)
        return self.target.trained_context_tokens if window or not trained else trained

    def _copied_tokens(self, choice: PlanChoice, target_tokens: int) -> int:
        """The context of a low-bit copy: as large as the target's, or its window and the drafts after it."""
        if not choice.draft_window:
            return target_tokens
        from edgespec.backends.llamacpp.lowbit import WINDOW_EXTRA_TOKENS

        return min(
            target_tokens, self._drafting.arguments["draft_sinks"] + choice.draft_window + WINDOW_EXTRA_TOKENS
        )


def opened(found: Resolved, options: LoadOptions) -> MemoryEstimator:
    """The metadata of a model, opened by the backend of its format. Raises what loading it would."""
    return found.file_format.open_estimator(str(found.path), found.name, options)


def _lowbit_copy(pair: ModelPair, drafting: DraftingOptions) -> Resolved | None:
    """The copy with fewer bits that will draft for a GGUF target: named, or `auto`'s for want of a draft.

    Raises ModelFileError where one that was named is damaged or stale.
    """
    asked = "lowbit" in drafting.named_drafters
    form = pair.target.file_format
    automatic = "auto" in drafting.methods and pair.draft is None and not form.fixed_exit
    if not form.low_bit_copy_format or not (asked or automatic):
        return None
    from edgespec.prepare.lowbit import check_lowbit, find_lowbit, find_valid_lowbit, lowbit_file

    prepared = find_lowbit(pair.target.path) if asked else find_valid_lowbit(pair.target.path)
    if prepared is None:
        return None
    check_lowbit(prepared, pair.target.path)
    return replace(
        pair.target,
        name=f"{pair.target.name} at low bits",
        path=lowbit_file(prepared),
        format=form.low_bit_copy_format,
    )


def compute_headroom_bytes(planned_bytes: int) -> int:
    """What is left free beside what was counted."""
    return max(_LEAST_HEADROOM_BYTES, int(planned_bytes * _HEADROOM_SHARE))
