"""Two vocabularies, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.backends.base import MAX_VOCAB_PADDING, Vocabulary
from edgespec.drafters.vocabularies.translation import TokenTranslation
from edgespec.errors import VocabularyMismatchError

__all__ = ["MappingKind", "VocabularyComparison", "compare_vocabularies"]

# From this share of the target's tokens on a draft's ids are translated; below it, its text is.
_MIN_TRANSLATED_FRACTION = 0.5
# Below this share the user is told to expect less of the draft.
_POOR_BELOW = 0.9

MappingKind = Literal["same", "translated", "retokenised"]


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """How a draft's vocabulary relates to the target's.

    first_difference: in words; empty when ids mean the same in both. shared_fraction: of the target's tokens,
    those that the draft has too, under whatever id. translation: None when ids mean the same in both.
    """

    target_name: str
    draft_name: str
    first_difference: str
    shared_fraction: float
    translation: TokenTranslation | None

    @property
    def mapping(self) -> MappingKind:
        """How the draft can be used: as it is, with its ids translated, or its text tokenized again."""
        if self.translation is None:
            return "same"
        return "translated" if self.shared_fraction >= _MIN_TRANSLATED_FRACTION else "retokenised"

    @property
    def explanation(self) -> str:
        """One line about what the difference means; empty when there is none."""
        if self.translation is None:
            return ""
        share = _share(self.translation, self.target_name)
        if self.mapping == "retokenised":
            return (
                f"{self.draft_name} has only {share}: its text is put into the target's tokens, so expect"
                " fewer of them to be accepted than of a draft of the same family"
            )
        less = ", so expect less of it than of a draft of the same family"
        return (
            f"{self.draft_name} has {share}, under other ids: only those are drafted"
            f"{less if self.shared_fraction < _POOR_BELOW else ''}"
        )


def _share(translation: TokenTranslation, target_name: str) -> str:
    """How many of the target's tokens a draft has; never rounded to all of them, or to none."""
    shared, total = len(translation.targets), translation.target_tokens
    percent = round(100 * shared / total)
    said = f"{percent} %"
    if percent == 100 and shared < total:
        said = f"all but {total - shared:,}"
    elif percent == 0:
        said = f"{shared:,}"
    return f"{said} of {target_name}'s tokens"


def compare_vocabularies(
    target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str
) -> VocabularyComparison:
    """Compare two vocabularies. Raises VocabularyMismatchError when they have no token in common.

    One may be longer than the other by some padding; ids only one of them knows are never drafted.
    """
    difference = _first_difference(target, draft, target_name, draft_name)
    if not difference:
        return VocabularyComparison(target_name, draft_name, "", 1.0, None)
    translation = TokenTranslation(target, draft)
    if not len(translation.targets):
        raise VocabularyMismatchError(
            f"{draft_name} cannot draft for {target_name}: they have no token in common, {difference}",
            "choose a draft of the same family, or --draft none",
        )
    share = len(translation.targets) / translation.target_tokens
    return VocabularyComparison(target_name, draft_name, difference, share, translation)


def _first_difference(target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str) -> str:
    for token in range(min(target.size, draft.size)):
        mine, its = target.raw_piece(token), draft.raw_piece(token)
        if mine != its:
            return (
                f"token {token} is {mine.decode('utf-8', 'replace')!r} in {target_name}"
                f" and {its.decode('utf-8', 'replace')!r} in {draft_name}"
            )
    if abs(target.size - draft.size) > MAX_VOCAB_PADDING:
        return f"{target_name} has {target.size} tokens and {draft_name} has {draft.size}"
    return ""
