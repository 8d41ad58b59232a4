#!/usr/bin/env python3
"""Plan or run one case of scripts/bench_plan.py in this process. Reads and prints JSON."""

from __future__ import annotations

import gc
import json
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgespec
from edgespec.backends.replay import ReplayModel
from edgespec.engine.tree import TokenTree
from edgespec.memory.constants import DEFAULT_RESERVE_BYTES
from edgespec.system.heap import release_free_memory

# Number of tokens at the end of the context that are prefilled instead of copied, and number of single-token
# passes after them.
_LAST_TOKENS, _STEPS = 1100, 3
# Number of tokens by which MLX caches grow, and number of tokens in the widest prefill pass.
_BLOCK_ROWS, _WIDE_TOKENS = 256, 512
# Context size of the tiny model that is loaded before the measurement.
_WARM_TOKENS = 1024
# The memory budget rounds the free address space down by less than this.
_ROUNDING_BYTES = 4 * 2**20
# Number of sequences in a llama.cpp context that are left free for checkpoints.
_FREE_SEQUENCES = 2
# First sequence id that models do not use, and the shares of a long prompt that its checkpoints contain.
_FIRST_UNUSED_SEQUENCE, _CHECKPOINT_SHARES = 100, (1.0, 1.0, 0.3)


@dataclass(frozen=True)
class Cell:
    """One case: a model and how to load it.

    Attributes:
        target: the model's path.
        draft: the draft model's path, or `none`.
        context: the context length in tokens.
        kv_type: type of the KV cache.
        grows: resize the context twice instead of allocating it in full.
        full: fill the context. Otherwise only a few passes run.
        warm: a tiny model that is loaded and closed before the measurement, so that all imports are done.
        address_bytes: address space that the measured load may use; 0 for no limit.
        fixed: pass `context` and `kv_type` to the load. Otherwise the planner chooses them.
        mmproj: path of the target's projector, or `none`.
        images: paths of the images that the target sees, one after the other.
    """

    target: str
    draft: str = "none"
    context: int = 2048
    kv_type: str = "auto"
    grows: bool = False
    full: bool = True
    warm: str = "demo"
    address_bytes: int = 0
    fixed: bool = True
    mmproj: str = "none"
    images: Sequence[str] = ()

    @property
    def is_mlx(self) -> bool:
        """Whether the model is an MLX checkpoint."""
        return Path(self.target).is_dir()

    @property
    def options(self) -> dict[str, Any]:
        """The options for both `edgespec.plan` and `edgespec.load`."""
        named = {"context": self.context, "kv_type": self.kv_type} if self.fixed else {}
        drafting = {"method": "model", "draft_window": 0} if self.draft != "none" else {"method": "none"}
        named |= {"target": self.target, "draft": self.draft, "mmproj": self.mmproj}
        return {**named, "prefix_cache": "none", **drafting}


def planned(cell: Cell) -> dict[str, Any]:
    """Return the plan of a case, as `edgespec plan --json` prints it."""
    if cell.address_bytes:
        _limit_addresses(_status(), cell.address_bytes)
    return edgespec.plan(**cell.options).plan.to_json()


def measured(cell: Cell) -> dict[str, Any]:
    """Load the model, fill its context, and return the increase in memory use in bytes.

    If the load fails, return the error, and the increases in memory use after it and at the peak of planning.
    """
    with edgespec.load(
        cell.warm, "none", method="none", prefix_cache="none", context=_WARM_TOKENS
    ) as smallest:
        list(smallest.stream_tokens([1, 2, 3], max_tokens=2))
        _read(smallest._target, cell)
    with suppress(edgespec.EdgespecError):  # Also import the code that rejects a load.
        edgespec.load(cell.warm, "none", memory="1MiB", method="none", prefix_cache="none").close()
    for image in cell.images:  # Also import Pillow.
        edgespec.Image.read(Path(image).read_bytes())
    _free_unused()
    _reset_peak()
    before = _status()
    limit = _limit_addresses(before, cell.address_bytes) if cell.address_bytes else 0
    try:
        runtime = edgespec.load(**cell.options, reserve_full_context=not cell.grows)
    except edgespec.EdgespecError as error:
        _free_unused()
        after = _status()
        return {
            "error": [type(error).__name__, error.what, error.next_step],
            "left_bytes": after["VmRSS"] - before["VmRSS"],
            "planning_bytes": after["VmHWM"] - before["VmRSS"],
        }
    with runtime:
        loaded = _status()
        if cell.grows:
            _grow(runtime)
        else:
            for model in filter(None, (runtime._target, runtime._draft)):
                _read(model, cell)
        for image in cell.images:
            runtime.generate("the file", images=[image], max_tokens=_STEPS)
        after = _status()
        plan = runtime.plan.to_json() if runtime.plan else {}
        context = runtime.context_tokens
    return {
        "plan": plan,
        "context": context,
        "peak": max(loaded["VmHWM"], after["VmHWM"]) - before["VmRSS"],
        "loaded": loaded["VmRSS"] - before["VmRSS"],
        "file": after["RssFile"] - before["RssFile"],
        "own": after["RssAnon"] - before["RssAnon"],
        "addresses": after["VmPeak"] - before["VmSize"],
        "limit": limit - before["VmSize"] if limit else 0,
        "library_peak": _mlx_peak() if cell.is_mlx else 0,
    }


def _limit_addresses(before: dict[str, int], more_bytes: int) -> int:
    """Limit the address space to its current size plus `more_bytes` and the reserve. Return the limit."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = before["VmSize"] + more_bytes + min(more_bytes // 19, DEFAULT_RESERVE_BYTES) + _ROUNDING_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    return limit


def _grow(runtime: edgespec.Runtime) -> None:
    """Prefill a prompt for less than half of the context, then extend it to the end of the context."""
    context = runtime._target.facts.max_context_tokens
    for tokens in (context * 2 // 5, context - 280):
        list(runtime.stream_tokens(_prompt(tokens), max_tokens=4, temperature=0.0))
    for model in filter(None, (runtime._target, runtime._draft)):
        model.truncate(context - 280)
        _verify(model, 256)
    _free_unused()


def _read(model: Any, cell: Cell) -> None:
    """Fill the context of a model, and run passes of several widths that attend to all of it."""
    room = model.facts.context_tokens - 8
    if cell.is_mlx and isinstance(model, ReplayModel):
        _read_turns(model, room if cell.full else _LAST_TOKENS)
    elif not cell.full or room <= 4 * _LAST_TOKENS:
        model.prefill(_prompt((room if cell.full else _LAST_TOKENS) - 260))
    elif cell.is_mlx:
        _fill_rows(model, room)
    else:
        _fill_cells(model, room)
    if (
        cell.full
        and not cell.is_mlx
        and model.facts.capabilities.partial_truncate
        and room > 2 * _WIDE_TOKENS
    ):
        # The widest prefill pass attends to the whole context.
        model.truncate(room - _WIDE_TOKENS)
        model.prefill(_prompt(_WIDE_TOKENS))
        model.truncate(room - 260)
    for width in (256, *[1] * _STEPS):
        _verify(model, width)
    _free_unused()


def _verify(model: Any, width: int) -> None:
    """Run a verify pass over `width` tokens, or the model's maximum, and keep only the first token."""
    capabilities = model.facts.capabilities
    tree = TokenTree.chain(
        5, range(6, 5 + min(width, capabilities.max_width if capabilities.rollback else 1))
    )
    if tree.width <= model.free_tokens:
        model.verify(tree).best(0, 1)
        model.commit(())


def _fill_cells(model: Any, room: int) -> None:
    """Prefill part of the context, and copy its cells to other sequences until only `_LAST_TOKENS` are free.

    This is faster than prefilling everything. llama.cpp allocates the same buffers, because its attention
    runs over the cells of all sequences.
    """
    context = getattr(model, "_inner", model)._context
    others = range(1, max(2, context.plan.sequences - _FREE_SEQUENCES))
    part = (room - _LAST_TOKENS) // (len(others) + 1)
    model.prefill(_prompt(part))
    # llama.cpp exports no cells before the attention window of a sequence, so cells are copied per window.
    parts = [context.export_sequence()] if context.plan.recurrent else context.export_cells(0, 0, part)
    for sequence in others:
        whole = context.plan.recurrent
        if not (
            context.import_sequence(parts[0], sequence) if whole else _import_cells(context, parts, sequence)
        ):
            raise SystemExit("the cells of a sequence could not be copied")
        if whole:
            _add_checkpoints(context, sequence, part)
    # Real replies never copy cells like this, so the buffers of the copy are not part of the plan.
    del parts
    _free_unused()
    _reset_peak()
    model.prefill(_prompt(_LAST_TOKENS - 270))


def _add_checkpoints(context: Any, sequence: int, tokens: int) -> None:
    """Share the cells with other sequences, as the checkpoints of a long prompt do (replay.py)."""
    for number, share in enumerate(_CHECKPOINT_SHARES):
        copy = _FIRST_UNUSED_SEQUENCE + number + len(_CHECKPOINT_SHARES) * sequence
        context.copy(sequence, copy, 0, int(share * tokens))


def _fill_rows(model: Any, room: int) -> None:
    """Prefill part of an MLX model's context, and copy its cache entries until the context is nearly full."""
    import mlx.core as mx

    model.prefill(_prompt(_LAST_TOKENS))
    # Copy whole blocks only, because sliding-window caches consist of blocks.
    more = (room - 2 * _LAST_TOKENS) // _BLOCK_ROWS * _BLOCK_ROWS
    for cache in model.caches.attention:
        (start, end), arrays = cache.dump(0, model.length)
        if cache.window is None:
            again = mx.arange(end + more) % end
            arrays = [mx.take(array, again, axis=2) for array in arrays]
            mx.eval(arrays)
        cache.load([start if cache.window is None else start + more, end + more], arrays)
    model.caches.length += more
    model._runner.committed = model.caches.checkpoint()
    del arrays
    mx.clear_cache()
    _free_unused()
    _reset_peak()
    model.prefill(_prompt(room - 260 - model.length))


def _read_turns(model: ReplayModel, room: int) -> None:
    """Prefill a recurrent model in several turns, each of which leaves a checkpoint."""
    text = _prompt(room - 260)
    for start in range(0, len(text), _BLOCK_ROWS):
        model.prefill(text[start : start + _BLOCK_ROWS])


def _import_cells(context: Any, parts: Sequence[memoryview], sequence: int) -> bool:
    """Import cells like `LlamaContext.import_cells`, but into the given sequence."""
    start = 0
    for part in parts:
        stop = start + (context.window or context.tokens)
        if not context.import_sequence(part, context._scratch):
            return False
        context.copy(context._scratch, sequence, start, stop)
        context.drop(context._scratch, 0)
        start = stop
    return True


def _prompt(tokens: int) -> list[int]:
    return [1, *(5 + (7 * i) % 199 for i in range(tokens - 1))]


def _mlx_peak() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())


def _status() -> dict[str, int]:
    """Return the sizes in /proc/self/status in bytes, by name."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    words = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _free_unused() -> None:
    gc.collect()
    release_free_memory()


if __name__ == "__main__":
    action, given = sys.argv[1], Cell(**json.loads(sys.argv[2]))
    try:
        print(json.dumps(planned(given) if action == "plan" else measured(given)))
    except edgespec.EdgespecError as error:
        print(json.dumps({"failed": [type(error).__name__, error.what, error.next_step]}))
