"""Drafts whose vocabulary is not the target's: how much is shared, and two ways to use them.

Source: "Accelerating LLM inference with lossless speculative decoding for heterogeneous vocabularies"
(arXiv 2502.05202).
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
