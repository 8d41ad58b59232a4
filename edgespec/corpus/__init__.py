"""Texts that guesses are looked up in: earlier chats, and files a person names."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from edgespec.backends.base import Progress, Vocabulary
from edgespec.corpus.saved_replies import ReplyStore, forget_replies
from edgespec.corpus.user_files import Corpus, read_corpus
from edgespec.corpus.vocabulary import fingerprint
from edgespec.drafters.suffix import Known, Rule, SuffixDrafter, TextIndex

__all__ = ["Corpus", "ReplyStore", "fingerprint", "forget_replies", "read_corpus", "suffix_drafter"]


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
    mark = cache(lambda: fingerprint(vocabulary))
    given = read_corpus(corpus, vocabulary, mark(), progress=progress) if corpus is not None else None

    def known() -> Known:
        replies = ReplyStore(mark(), vocabulary.size) if remember else None
        texts = [*(given.texts if given else ()), *(replies.load() if replies else ())]
        return Known(TextIndex(texts) if texts else None, replies)

    drafter = SuffixDrafter(known, rule=Rule(can_branch=can_branch), is_end=vocabulary.is_end)
    return drafter, given.notice if given else ""
