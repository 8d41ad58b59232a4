#!/usr/bin/env python3
"""One cell of the matrix, in a process of its own: given as JSON, what came of it is printed as JSON."""

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
from edgespec.backends.llamacpp.buffer_pool import BufferPool
from edgespec.backends.registry import process_bytes
from edgespec.backends.replay import ReplayModel
from edgespec.engine.tree import TokenTree
from edgespec.heap import release_free_memory
from edgespec.memory import budget
from edgespec.memory.limits import address_limit

__all__ = ["Cell"]

# Prefill in whole passes, then as wide a pass as one may be, then steps.
_LAST_TOKENS, _STEPS = 1100, 3
_BLOCK_ROWS, _WIDE_TOKENS = 256, 512
_WARM_TOKENS = 1024
# So many sequences of a context are left to what models remember of earlier moments.
_LEFT_SEQUENCES = 2
# Sequences that no model uses, and how much of a text four checkpoints hold: more than twice all of it.
_BEYOND, _HELD_SHARES = 100, (1.0, 1.0, 0.3)


@dataclass(frozen=True)
class Cell:
    """A model, and how it is loaded. full: fill the context, else read some passes only.

    warm: a model of hardly any size, which is loaded before anything is measured: then all is imported.
    address_bytes: the process may have so many addresses more from then on, and those of stacks.
    grows: the context grows with the text, in two steps of which the second copies what is in it.
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

    @property
    def is_mlx(self) -> bool:
        """Which backend runs it."""
        return Path(self.target).is_dir()

    @property
    def options(self) -> dict[str, Any]:
        """What `edgespec.plan` and `edgespec.load` are both given."""
        named = {"context": self.context, "kv_type": self.kv_type} if self.fixed else {}
        drafting = {"method": "model", "draft_window": 0} if self.draft != "none" else {"method": "none"}
        return {"target": self.target, "draft": self.draft, "prefix_cache": "none", **named, **drafting}


def planned(cell: Cell) -> dict[str, Any]:
    """What `edgespec plan --json` says of it."""
    if cell.address_bytes:
        _limit_addresses(_status(), cell.address_bytes)
    return edgespec.plan(**cell.options).plan.to_json()


def measured(cell: Cell) -> dict[str, Any]:
    """What loading it and filling its context took, in bytes, more than the process held before.

    Where loading was refused, why, and what the process held afterwards and at most meanwhile.
    """
    with edgespec.load(
        cell.warm, "none", method="none", prefix_cache="none", context=_WARM_TOKENS
    ) as smallest:
        list(smallest.stream_tokens([1, 2, 3], max_tokens=2))
        _read(smallest._target, cell)
    with suppress(edgespec.EdgespecError):  # what says that nothing fits is imported too
        edgespec.load(cell.warm, "none", memory="1MiB", method="none", prefix_cache="none").close()
    _forget_unused()
    _forget_peak()
    before = _status()
    limit = _limit_addresses(before, cell.address_bytes) if cell.address_bytes else 0
    try:
        runtime = edgespec.load(**cell.options, reserve_full_context=not cell.grows)
    except edgespec.EdgespecError as error:
        _forget_unused()
        after = _status()
        return {
            "refused": [type(error).__name__, error.what, error.next_step],
            "taken": after["VmRSS"] - before["VmRSS"],
            "looked": after["VmHWM"] - before["VmRSS"],
        }
    with runtime:
        loaded = _status()
        if cell.grows:
            _grow(runtime)
        else:
            for model in filter(None, (runtime._target, runtime._draft)):
                _read(model, cell)
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
    """Let the process have so many addresses more, and those of threads it may start, of what Python is
    planned to take and has not taken yet, and of the steps in which a budget counts. Returns the limit.
    """
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (before["VmSize"] + 2**40, most))
    found = address_limit(0, 0)
    stacks = found.stack_bytes or 0 if found else 0
    process = process_bytes()
    steps = min(before["VmRSS"], process) % budget.PROCESS_ADDRESS_STEP_BYTES + budget.ADDRESS_STEP_BYTES
    limit = before["VmSize"] + more_bytes + stacks + steps + max(0, process - before["VmRSS"])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


def _grow(runtime: edgespec.Runtime) -> None:
    """Read a text that fills less than half of the context, then one that goes on from it to the end."""
    context = runtime._target.facts.max_context_tokens
    for tokens in (context * 2 // 5, context - 280):
        list(runtime.stream_tokens(_text(tokens), max_tokens=4, temperature=0.0))
    for model in filter(None, (runtime._target, runtime._draft)):
        model.truncate(context - 280)
        _verify(model, 256)
    _forget_unused()


def _read(model: Any, cell: Cell) -> None:
    """Fill the context of a model; the last passes of each width see all of it."""
    room = model.facts.context_tokens - 8
    if cell.is_mlx and isinstance(model, ReplayModel):
        _read_turns(model, room if cell.full else _LAST_TOKENS)
    elif not cell.full or room <= 4 * _LAST_TOKENS:
        model.prefill(_text((room if cell.full else _LAST_TOKENS) - 260))
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
        # The widest pass there is sees all of the context.
        model.truncate(room - _WIDE_TOKENS)
        model.prefill(_text(_WIDE_TOKENS))
        model.truncate(room - 260)
    for width in (256, *[1] * _STEPS):
        _verify(model, width)
    _forget_unused()


def _verify(model: Any, width: int) -> None:
    """A pass that is so wide, or as wide as it may be; nothing of it is kept but the first token."""
    able = model.facts.capabilities
    tree = TokenTree.chain(5, range(6, 5 + min(width, able.max_width if able.rollback else 1)))
    if tree.width <= model.free_tokens:
        model.verify(tree).best(0, 1)
        model.commit(())


def _fill_cells(model: Any, room: int) -> None:
    """Read a part of what fits, and copy its cells until the rest has no more room than for the last passes.

    Attention goes over all cells of a context, whatever sequence they belong to.
    """
    context = getattr(model, "_inner", model)._context
    others = range(1, max(2, context.plan.sequences - _LEFT_SEQUENCES))
    part = (room - _LAST_TOKENS) // (len(others) + 1)
    model.prefill(_text(part))
    # Of a sequence the library copies no cell that lies before a window: those are copied window by window.
    parts = [context.export_sequence()] if context.plan.recurrent else context.export_cells(0, 0, part)
    for sequence in others:
        whole = context.plan.recurrent
        if not (context.import_sequence(parts[0], sequence) if whole else _put(context, parts, sequence)):
            raise SystemExit("the cells of a sequence could not be copied")
        if whole:
            _hold(context, sequence, part)
    # No text is ever copied like that: what the copy was written to is no part of a plan.
    del parts
    context._copies = BufferPool()
    _forget_unused()
    _forget_peak()
    model.prefill(_text(_LAST_TOKENS - 270))


def _hold(context: Any, sequence: int, tokens: int) -> None:
    """Let cells be held as often as those of a long text, over which checkpoints are spread (replay.py)."""
    for share, held in enumerate(_HELD_SHARES):
        context.copy(sequence, _BEYOND + share + len(_HELD_SHARES) * sequence, 0, int(held * tokens))


def _fill_rows(model: Any, room: int) -> None:
    """The same with MLX."""
    import mlx.core as mx

    model.prefill(_text(_LAST_TOKENS))
    # Rows move by whole blocks, of which windows are made.
    more = (room - 2 * _LAST_TOKENS) // _BLOCK_ROWS * _BLOCK_ROWS
    for cache in model.memory.attention:
        (start, end), arrays = cache.dump(0, model.length)
        if cache.window is None:
            again = mx.arange(end + more) % end
            arrays = [mx.take(array, again, axis=2) for array in arrays]
            mx.eval(arrays)
        cache.load([start if cache.window is None else start + more, end + more], arrays)
    model.memory.length += more
    model._passes.kept = model.memory.mark()
    del arrays
    mx.clear_cache()
    _forget_unused()
    _forget_peak()
    model.prefill(_text(room - 260 - model.length))


def _read_turns(model: ReplayModel, room: int) -> None:
    """States that recur are had by reading only: in turns, each of which leaves one to go back to."""
    text = _text(room - 260)
    for start in range(0, len(text), _BLOCK_ROWS):
        model.prefill(text[start : start + _BLOCK_ROWS])


def _put(context: Any, parts: Sequence[memoryview], sequence: int) -> bool:
    """As `LlamaContext.import_cells`, in another sequence than the first."""
    start = 0
    for part in parts:
        stop = start + (context.window or context.tokens)
        if not context.import_sequence(part, context._scratch):
            return False
        context.copy(context._scratch, sequence, start, stop)
        context.drop(context._scratch, 0)
        start = stop
    return True


def _text(tokens: int) -> list[int]:
    return [1, *(5 + (7 * i) % 199 for i in range(tokens - 1))]


def _mlx_peak() -> int:
    import mlx.core as mx

    return int(mx.get_peak_memory())


def _status() -> dict[str, int]:
    """Bytes, by the kernel's names."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    words = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in words}


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _forget_unused() -> None:
    gc.collect()
    release_free_memory()


if __name__ == "__main__":
    what, given = sys.argv[1], Cell(**json.loads(sys.argv[2]))
    try:
        print(json.dumps(planned(given) if what == "plan" else measured(given)))
    except edgespec.EdgespecError as error:
        print(json.dumps({"failed": [type(error).__name__, error.what, error.next_step]}))
