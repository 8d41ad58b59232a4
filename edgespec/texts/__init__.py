"""Texts that guesses are looked up in: earlier replies, and files a person names."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.base import Progress, Vocabulary
from edgespec.drafters.suffix import Rule, SuffixDrafter, TextIndex
from edgespec.texts.corpus import Corpus, read_corpus
from edgespec.texts.replies import ReplyStore, forget_replies
from edgespec.texts.vocabulary import fingerprint

__all__ = ["Corpus", "ReplyStore", "fingerprint", "forget_replies", "read_corpus", "suffix_drafter"]


def suffix_drafter(
    vocabulary: Vocabulary,
    *,
    corpus: str | Path | None = None,
    remember: bool = False,
    can_branch: bool = True,
    progress: Progress | None = None,
) -> tuple[SuffixDrafter, str]:
    """A suffix drafter for a target's vocabulary, and what there is to say about its texts.

    corpus: a text file or a folder of them. remember: read earlier replies, and keep new ones, in the user's
    data folder; without it no file of theirs is touched. Raises OptionError, CancelledError.
    """
    mark = fingerprint(vocabulary) if corpus is not None or remember else ""
    given = read_corpus(corpus, vocabulary, mark, progress=progress) if corpus is not None else None
    replies = ReplyStore(mark, vocabulary.size) if remember else None
    texts = [*(given.texts if given else ()), *(replies.load() if replies else ())]
    drafter = SuffixDrafter(
        TextIndex(texts) if texts else None,
        replies,
        rule=Rule(can_branch=can_branch),
        is_end=vocabulary.is_end,
    )
    notices = (given.notice if given else "", replies.notice if replies else "")
    return drafter, " · ".join(filter(None, notices))
