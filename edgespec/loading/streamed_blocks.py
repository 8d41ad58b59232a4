"""Decide which blocks of a model need low-bit copies, and prepare them (`prepare lowbit --for-memory`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgespec.errors import CapabilityError, MemoryBudgetError, OptionError
from edgespec.loading.load_request import LoadRequest
from edgespec.loading.pairing import find_pair
from edgespec.loading.planning import LoadPlan, plan_pair
from edgespec.loading.prepare.lowbit import estimate_substitutes, write_substitutes
from edgespec.memory.budget import Budget
from edgespec.methods.lowbit.drafter import DEFAULT_TYPE, Substitutes
from edgespec.model.base import Progress
from edgespec.model.registry import format_at
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.store.prepared_files import PreparedModel
from edgespec.system.files import format_bytes


def prepare_substitutes(
    path: Path,
    memory_bytes: int,
    type_name: str | None = None,
    *,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Make low-bit copies of the blocks that a model would stream, or return existing valid copies.

    Args:
        path: A GGUF file.
        memory_bytes: The `--memory` value that the model will be used with.
        type_name: Quantisation type for the copies, by default Q4_0.
        to: Folder to create. Defaults to a folder in the store.
        progress: Reports progress while reading and writing.

    Returns:
        The copies. Besides the facts of `write_substitutes`, they have `for_memory_bytes` and
        `streamed_without_copies_bytes`, the number of bytes that each pass would read from disk without the
        copies.

    Raises:
        OptionError: The type is unknown, the copies would not be smaller, or the whole model fits in memory.
        MemoryBudgetError: The model does not fit even if it is streamed.
        CapabilityError: The type needs an importance matrix, or the model cannot be streamed.
        ModelFileError: The model cannot be read, or there is not enough disk space.
        BackendError: llama.cpp failed.
        CancelledError: `progress` returned False.
    """
    from edgespec.backends.llamacpp.lowbit import check_can_share_cache
    from edgespec.backends.llamacpp.quantise import parse_quantisation_type
    from edgespec.backends.llamacpp.weight_stream import can_stream, streamable_layers

    type_name = parse_quantisation_type(type_name or DEFAULT_TYPE)
    if path.is_dir():
        raise OptionError(
            f"{path} was prepared for early exit, so it cannot run from disk",
            "use the GGUF file that it was made from, or omit --for-memory",
        )
    check_loadable([TrialModel(path.name, path, format_at(path), runs=False)], progress)
    check_can_share_cache(path)
    available = [layer.layer for layer in streamable_layers(path)] if can_stream() else []
    if not available:
        raise CapabilityError(f"{path.name} cannot run from disk on this machine", "omit --for-memory")
    copies = estimate_substitutes(path, available, type_name)
    layers = _streamed(_plan(path, memory_bytes, copies, progress), path, memory_bytes)
    without = _plan(path, memory_bytes, None, progress).plan.streaming
    facts = {
        "for_memory_bytes": memory_bytes,
        "streamed_without_copies_bytes": without.bytes_per_pass if without else 0,
    }
    return write_substitutes(path, layers, facts, type_name, to=to, progress=progress)


def _plan(path: Path, memory_bytes: int, copies: Substitutes | None, progress: Progress | None) -> LoadPlan:
    """Plan how `load` would load the model with the given memory and copies, and no other drafter."""
    request = LoadRequest.read(path, "none", {"memory": memory_bytes, "method": "none"})
    pair = find_pair(request.target, request.draft, request.drafting, progress, request.options)
    return plan_pair(
        pair,
        request.drafting,
        request.options,
        Budget(memory_bytes, "--for-memory"),
        replace(request.plan, substitutes=copies),
    )


def _streamed(planned: LoadPlan, path: Path, memory_bytes: int) -> list[int]:
    """Return the layers that the plan streams. Raises OptionError or MemoryBudgetError if it streams none."""
    from edgespec.backends.llamacpp.weight_stream import choose_streamed, streamable_layers

    plan = planned.plan
    if plan.fits_without_streaming:
        raise OptionError(
            f"{path.name} fits in {format_bytes(memory_bytes)} of memory, so no part needs a low-bit copy",
            "use a smaller --for-memory, or omit it to make a copy of the whole model",
            option="for_memory",
            code="option_without_effect",
        )
    if not plan.fits or plan.streaming is None or not plan.streaming.substitute_bytes:
        raise MemoryBudgetError(
            f"{path.name} with low-bit copies of its layers does not fit in {format_bytes(memory_bytes)}",
            "use a larger --for-memory, or choose a lower-bit --type",
        )
    return [each.layer for each in choose_streamed(streamable_layers(path), planned.options)]
