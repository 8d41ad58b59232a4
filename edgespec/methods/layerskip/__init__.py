"""Draft with the first layers of the target itself (LayerSkip)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter
    from edgespec.store.reference import Resolved

__all__ = ["METHOD"]


def _make(context: DrafterContext) -> Drafter | MissingDrafter:
    from edgespec.methods.layerskip.drafter import make

    return make(context)


def _is_ready(context: DrafterContext) -> bool:
    return context.file_format.fixed_exit


def _preparation(context: DrafterContext) -> str:
    from edgespec.methods.layerskip.drafter import preparation

    return preparation(context)


def _find_target(target: Resolved, is_named: bool) -> Resolved:
    from edgespec.methods.layerskip.drafter import find_split_model

    return find_split_model(target, is_named=is_named)


METHOD = Method(
    name="layerskip",
    label="first layers of the model",
    help="the first layers of the model itself (requires a model trained for early exit)",
    docs=MethodDocs(
        source="the target's first layers; verification starts from their output "
        "([LayerSkip](https://arxiv.org/abs/2404.16710))",
        requires="a model trained for early exit; for GGUF, also `edgespec prepare layerskip MODEL`",
        memory="none for MLX models, about 32 MB for GGUF models",
    ),
    order=10,
    make=_make,
    needs="target",
    reads=frozenset({"draft_confidence", "draft_branches", "exit_layer"}),
    uses_target_cache=True,
    shares_passes=False,
    works_on_workers=False,
    auto="fallback",
    is_ready=_is_ready,
    preparation=_preparation,
    find_target=_find_target,
)
