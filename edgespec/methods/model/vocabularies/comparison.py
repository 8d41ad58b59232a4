"""Compare the vocabularies of a target and a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgespec.errors import VocabularyMismatchError
from edgespec.methods.constants import MIN_GOOD_FRACTION, MIN_TRANSLATED_FRACTION
from edgespec.methods.model.vocabularies.translation import TokenTranslation
from edgespec.model.base import MAX_VOCAB_PADDING, Vocabulary

__all__ = ["MappingKind", "VocabularyComparison", "compare_vocabularies"]


MappingKind = Literal["same", "translated", "retokenised"]


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """The result of comparing a draft model's vocabulary with the target's.

    Attributes:
        target_name: Name of the target.
        draft_name: Name of the draft model.
        shared_fraction: Fraction of the target's tokens that the draft model also has, under any id.
        translation: Translates token ids between the vocabularies. None if all token ids match.
    """

    target_name: str
    draft_name: str
    shared_fraction: float
    translation: TokenTranslation | None

    @property
    def mapping(self) -> MappingKind:
        """How to use the draft model's tokens: with the same ids, with translated ids, or by retokenizing."""
        if self.translation is None:
            return "same"
        return "translated" if self.shared_fraction >= MIN_TRANSLATED_FRACTION else "retokenised"

    @property
    def explanation(self) -> str:
        """User-facing explanation of how the vocabularies affect drafting. Empty if all token ids match."""
        if self.translation is None:
            return ""
        shared, total = len(self.translation.target_ids), self.translation.target_token_count
        share = f"{shared:,} of {self.target_name}'s {total:,} tokens"
        fewer = "ewer of its tokens will be accepted than with a draft model from the same family"
        if self.mapping == "retokenised":
            return f"{self.draft_name} has only {share}. Its text is tokenized again, and f{fewer}"
        warning = f". F{fewer}" if self.shared_fraction < MIN_GOOD_FRACTION else ""
        return f"{self.draft_name} has {share}, under other ids, and drafts only those{warning}"


def compare_vocabularies(
    target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str
) -> VocabularyComparison:
    """Compare the vocabularies of a target and a draft model.

    Vocabulary sizes may differ by a few padding tokens. Ids that exist in only one vocabulary are never
    drafted.

    Raises:
        VocabularyMismatchError: The vocabularies have no tokens in common.
    """
    difference = _first_difference(target, draft, target_name, draft_name)
    if not difference:
        return VocabularyComparison(target_name, draft_name, 1.0, None)
    translation = TokenTranslation(target, draft)
    if not len(translation.target_ids):
        raise VocabularyMismatchError(
            f"{draft_name} cannot be the draft model of {target_name}: they have no tokens in common"
            f" ({difference})",
            "choose a draft model from the same family, or use --draft none",
        )
    fraction = len(translation.target_ids) / translation.target_token_count
    return VocabularyComparison(target_name, draft_name, fraction, translation)


def _first_difference(target: Vocabulary, draft: Vocabulary, target_name: str, draft_name: str) -> str:
    common = 0 if target.same_entries(draft) else min(target.size, draft.size)
    for token in range(common):
        target_piece, draft_piece = target.raw_piece(token), draft.raw_piece(token)
        if target_piece != draft_piece:
            return (
                f"token {token} is {target_piece.decode('utf-8', 'replace')!r} in {target_name}"
                f" and {draft_piece.decode('utf-8', 'replace')!r} in {draft_name}"
            )
    if abs(target.size - draft.size) > MAX_VOCAB_PADDING:
        return f"{target_name} has {target.size} tokens and {draft_name} has {draft.size}"
    return ""
