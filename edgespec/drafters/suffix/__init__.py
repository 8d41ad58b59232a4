"""Suffix decoding: trees of what followed the last tokens before."""

from edgespec.drafters.suffix.automaton import Follower, SuffixAutomaton
from edgespec.drafters.suffix.drafter import Known, Replies, SuffixDrafter
from edgespec.drafters.suffix.scoring import Rule
from edgespec.drafters.suffix.suffix_array import TextIndex

__all__ = ["Follower", "Known", "Replies", "Rule", "SuffixAutomaton", "SuffixDrafter", "TextIndex"]
