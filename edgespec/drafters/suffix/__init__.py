"""Suffix decoding: trees of what followed the last tokens before."""

from edgespec.drafters.suffix.drafter import Replies, SuffixDrafter
from edgespec.drafters.suffix.guess import Rule
from edgespec.drafters.suffix.index import TextIndex

__all__ = ["Replies", "Rule", "SuffixDrafter", "TextIndex"]
