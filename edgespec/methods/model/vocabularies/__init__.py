"""Draft with a model whose vocabulary differs from the target's.

Implements two methods from Timor et al. 2025 (arXiv 2502.05202). Token-level intersection (TLI) translates
the ids of tokens that both vocabularies contain. The other method retokenizes the drafted text for the
target, as in Universal Assisted Generation (UAG).
"""
