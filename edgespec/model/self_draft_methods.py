"""Methods for self-drafting: running fewer layers, running at lower precision, or using a head.

The attribute `method` of each class is the name of the drafting method.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

__all__ = ["EarlyExit", "Head", "LowBit", "SelfDraft"]


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """Self-drafting with the layers below `exit_layer` and the LM head (LayerSkip, arXiv 2404.16710).

    The verify pass reuses the hidden states computed by these layers.
    """

    method: ClassVar[str] = "layerskip"
    exit_layer: int


@dataclass(frozen=True, slots=True)
class LowBit:
    """Self-drafting with the target quantised to fewer bits, sharing its KV cache (QSpec, arXiv 2410.11305).

    Attributes:
        copy: Path to a copy of the model quantised to fewer bits. None if the loaded weights contain both
            precisions.
        sink_tokens: Number of initial tokens that the sparse attention window always includes (MagicDec,
            arXiv 2408.11049).
        window_tokens: Number of most recent tokens in the attention window. None attends to the whole
            context.
    """

    method: ClassVar[str] = "lowbit"
    copy: str | None = None
    sink_tokens: int = 4
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Drafting with a head, a small network that reads the target's hidden states.

    Attributes:
        method: Name of the drafting method, one of `head_names()`.
        path: Path of the head's file or folder. None means the head in the target's own files.
        converted_from: The folder that the file at `path` was converted from. None if it was not converted.
    """

    method: str
    path: Path | None = None
    converted_from: Path | None = None

    @property
    def shown_path(self) -> Path:
        """The head's display path. Use only for heads that are not in the target's own files."""
        path = self.converted_from or self.path
        assert path is not None
        return path


SelfDraft: TypeAlias = EarlyExit | LowBit | Head
