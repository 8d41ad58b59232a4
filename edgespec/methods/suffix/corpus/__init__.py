"""Create a suffix drafter that drafts from earlier chats' replies and from the user's files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from edgespec.methods.suffix.corpus.saved_replies import SavedReplies
from edgespec.methods.suffix.corpus.user_files import read_user_files
from edgespec.methods.suffix.drafter import SuffixConfig, SuffixCorpus, SuffixDrafter
from edgespec.methods.suffix.indexes import SuffixArray
from edgespec.model.base import Progress, Vocabulary

__all__ = ["suffix_drafter", "vocabulary_fingerprint"]


def suffix_drafter(
    vocabulary: Vocabulary,
    *,
    corpus: str | Path | None = None,
    remember: bool = False,
    can_branch: bool = True,
    progress: Progress | None = None,
) -> tuple[SuffixDrafter, str]:
    """Create a suffix drafter for a target model with this vocabulary.

    Args:
        vocabulary: The target's vocabulary.
        corpus: A text file or a folder of text files, read and tokenized before this function returns.
        remember: Whether to draft from replies in earlier chats and save new replies in the user's data
            folder. Saved replies are loaded when the first reply begins. If False, saved replies are neither
            read nor written.
        can_branch: Whether to draft trees of tokens instead of single chains.
        progress: Called to report progress while the corpus is being read. Returns False to cancel.

    Returns:
        The drafter, and a notice about the corpus for the user (empty if there is no corpus).

    Raises:
        OptionError: The corpus cannot be read.
        CancelledError: `progress` returned False.
    """
    fingerprint = cache(lambda: vocabulary_fingerprint(vocabulary))
    user_files = None
    if corpus is not None:
        user_files = read_user_files(corpus, vocabulary, fingerprint(), progress=progress)

    def load_corpus() -> SuffixCorpus:
        replies = SavedReplies(fingerprint(), vocabulary.size) if remember else None
        texts = [*(user_files.texts if user_files else ()), *(replies.load() if replies else ())]
        return SuffixCorpus(SuffixArray(texts) if texts else None, replies)

    config = SuffixConfig(can_branch=can_branch, is_end=cache(vocabulary.is_end))
    return SuffixDrafter(load_corpus, config=config), user_files.notice if user_files else ""


def vocabulary_fingerprint(vocabulary: Vocabulary) -> str:
    """Return the SHA-256 hash of all tokens in id order, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for token in range(vocabulary.size):
        piece = vocabulary.raw_piece(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()
