"""Draft with the target itself at lower precision (QSpec)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter
    from edgespec.methods.lowbit.drafter import Substitutes
    from edgespec.store.reference import Resolved

__all__ = ["METHOD"]


def _make(context: DrafterContext) -> Drafter | MissingDrafter:
    from edgespec.methods.lowbit.drafter import make

    return make(context)


def _is_ready(context: DrafterContext) -> bool:
    if context.substitutes is not None:
        return True
    return context.has_room_for_copy and _find_copy(context.files, False) is not None


def _preparation(context: DrafterContext) -> str:
    from edgespec.methods.lowbit.drafter import preparation

    return preparation(context)


def _find_copy(target: Resolved, is_named: bool) -> Resolved | None:
    from edgespec.methods.lowbit.drafter import lowbit_model

    return lowbit_model(target, is_named=is_named)


def _find_substitutes(target: Resolved, is_named: bool) -> list[Substitutes]:
    from edgespec.methods.lowbit.drafter import find_usable_substitutes

    return find_usable_substitutes(target, is_named=is_named)


METHOD = Method(
    name="lowbit",
    label="a low-precision copy of the model",
    help="the model itself at lower precision",
    docs=MethodDocs(
        source="the target at lower precision, sharing its KV cache "
        "([QSpec](https://arxiv.org/abs/2410.11305))",
        requires="any MLX model; for GGUF, `edgespec prepare lowbit MODEL`, with `--for-memory` if the model"
        " is larger than memory",
        memory="for 8-bit MLX models, only scaling factors; for others, the whole copy",
    ),
    order=20,
    make=_make,
    needs="copy",
    reads=frozenset({"draft_confidence", "draft_branches", "draft_window", "draft_sinks"}),
    uses_target_cache=True,
    shares_passes=False,
    works_on_workers=False,
    auto="fallback",
    is_ready=_is_ready,
    preparation=_preparation,
    find_copy=_find_copy,
    find_substitutes=_find_substitutes,
)
