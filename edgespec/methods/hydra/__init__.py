"""Draft with Hydra heads, each of which also reads the previously drafted tokens."""

from __future__ import annotations

from edgespec.methods.head_method import head_method
from edgespec.options.methods import HeadKind, HeadTraining, MethodDocs

__all__ = ["METHOD"]

METHOD = head_method(
    "hydra",
    label="Hydra heads",
    help_text="Hydra draft heads: like Medusa heads, but each also reads the tokens drafted before its own",
    docs=MethodDocs(
        source="Hydra heads: like Medusa heads, but each head also reads the draft tokens before its own"
        " ([Hydra](https://arxiv.org/abs/2402.05109))",
        requires="the same as `medusa`",
        memory="the same as `medusa`, plus a KV cache for one layer with Hydra++ heads",
    ),
    order=80,
    head=HeadKind(
        kinds={"hydra": "Hydra"},
        network="residual",
        training=HeadTraining("hydra", "Hydra heads", "The heads do not need to be converted to GGUF."),
    ),
)
