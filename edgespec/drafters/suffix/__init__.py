"""Suffix decoding: find where the last tokens occurred before, and draft what usually followed."""

from edgespec.drafters.suffix.automaton import SuffixAutomaton
from edgespec.drafters.suffix.drafter import ReplyRecorder, SuffixCorpus, SuffixDrafter
from edgespec.drafters.suffix.scoring import SuffixConfig
from edgespec.drafters.suffix.suffix_array import SuffixArray

__all__ = ["ReplyRecorder", "SuffixArray", "SuffixAutomaton", "SuffixConfig", "SuffixCorpus", "SuffixDrafter"]
