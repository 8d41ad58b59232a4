"""Load heads of every kind for GGUF targets."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.backends.llamacpp.dflash import load_dflash_head
from edgespec.backends.llamacpp.eagle import load_eagle_head
from edgespec.backends.llamacpp.head_target import HeadTarget, SharedHead
from edgespec.backends.llamacpp.mtp import load_mtp_head
from edgespec.backends.llamacpp.residual_target import load_gguf_residual_heads
from edgespec.model.self_draft_methods import Head

__all__ = ["load_head"]

# Maps each drafting method to the function that loads its heads, given the target and the head.
_LOADERS: dict[str, Callable[[HeadTarget, Head], SharedHead]] = {
    "mtp": load_mtp_head,
    "eagle": load_eagle_head,
    "dflash": load_dflash_head,
    "medusa": load_gguf_residual_heads,
    "hydra": load_gguf_residual_heads,
}


def load_head(target: HeadTarget, head: Head) -> SharedHead:
    """Load a head for a target, whose cache must be empty. Raises EdgespecError."""
    return _LOADERS[head.method](target, head)
