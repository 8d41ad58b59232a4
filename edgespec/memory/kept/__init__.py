"""What several texts have read is kept, in memory and on disk, so that going back to one reads it no more."""

from edgespec.memory.kept.copies import RESERVE_BYTES, Copies, copy_bound, memory_bound
from edgespec.memory.kept.disk import KeptDisk, disk_bound, forget_kept
from edgespec.memory.kept.sure import PIECE_TOKENS, sure_tokens
from edgespec.memory.kept.texts import KeptTexts
from edgespec.memory.kept.use import KeptUse
from edgespec.memory.kept.worth import Worth

__all__ = [
    "PIECE_TOKENS",
    "RESERVE_BYTES",
    "Copies",
    "KeptDisk",
    "KeptTexts",
    "KeptUse",
    "Worth",
    "copy_bound",
    "disk_bound",
    "forget_kept",
    "memory_bound",
    "sure_tokens",
]
