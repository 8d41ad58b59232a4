"""Drafting with a model that has another vocabulary than the target.

Implements both methods of Timor et al. 2025 (arXiv 2502.05202): token-level intersection (TLI), where ids of
shared tokens are translated, and drafting of text that is tokenized again for the target, as in Universal
Assisted Generation (UAG).
"""

from edgespec.drafters.vocabularies.comparison import VocabularyComparison, compare_vocabularies
from edgespec.drafters.vocabularies.retokenised import RetokenisedDrafter
from edgespec.drafters.vocabularies.translated import TranslatedModel
from edgespec.drafters.vocabularies.translation import TokenTranslation

__all__ = [
    "RetokenisedDrafter",
    "TokenTranslation",
    "TranslatedModel",
    "VocabularyComparison",
    "compare_vocabularies",
]
