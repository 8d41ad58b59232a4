"""Texts that guesses are looked up in: earlier chats, and files a person names."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from edgespec.backends.base import Progress, Vocabulary
from edgespec.corpus.saved_replies import SavedReplies, delete_saved_replies
from edgespec.corpus.user_files import UserFiles, read_user_files
from edgespec.corpus.vocabulary import vocabulary_fingerprint
from edgespec.drafters.suffix import SuffixArray, SuffixConfig, SuffixCorpus, SuffixDrafter

__all__ = [
    "SavedReplies",
    "UserFiles",
    "delete_saved_replies",
    "read_user_files",
    "suffix_drafter",
    "vocabulary_fingerprint",
]


def suffix_drafter(
    vocabulary: Vocabulary,
    *,
    corpus: str | Path | None = None,
    remember: bool = False,
    can_branch: bool = True,
    progress: Progress | None = None,
) -> tuple[SuffixDrafter, str]:
    """A suffix drafter for a target's vocabulary, and what there is to say about its corpus.

    corpus: a text file or a folder of them, read at once. remember: read earlier chats when the first reply
    begins, and keep new replies and what is new of their prompts, in the user's data folder; without it no
    file of theirs is touched. What is wrong with those files is in the drafter's note. Raises OptionError,
    CancelledError.
    """
    mark = cache(lambda: vocabulary_fingerprint(vocabulary))
    given = read_user_files(corpus, vocabulary, mark(), progress=progress) if corpus is not None else None

    def known() -> SuffixCorpus:
        replies = SavedReplies(mark(), vocabulary.size) if remember else None
        texts = [*(given.texts if given else ()), *(replies.load() if replies else ())]
        return SuffixCorpus(SuffixArray(texts) if texts else None, replies)

    drafter = SuffixDrafter(known, rule=SuffixConfig(can_branch=can_branch), is_end=vocabulary.is_end)
    return drafter, given.notice if given else ""
