"""Draft with a smaller model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext

__all__ = ["METHOD"]


def _make(context: DrafterContext) -> Drafter:
    from edgespec.methods.model.making import make

    return make(context)


METHOD = Method(
    name="model",
    label="draft model",
    help="a smaller model, with the same or a different vocabulary",
    docs=MethodDocs(
        source="a smaller model",
        requires="a draft model with any vocabulary",
        memory="the draft model and its KV cache",
    ),
    order=90,
    make=_make,
    needs="draft model",
    reads=frozenset(
        {"draft_confidence", "draft_branches", "draft_window", "draft_sinks", "draft_gpu_layers", "learn"}
    ),
    always_loaded=True,
    auto="always",
)
