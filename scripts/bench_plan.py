#!/usr/bin/env python3
"""Compare planned with measured memory, over model kinds, weight and cache types, and context lengths.

    scripts/bench_plan.py                                       # GGUF and MLX: an hour
    scripts/bench_plan.py --kinds gqa,jamba --types F16,Q4_0 --contexts 2048,131072
    scripts/bench_plan.py --small --mlx-kinds ""                # models of 3 to 17 MiB
    scripts/bench_plan.py --limits                              # the same models under hard limits

Models with random weights, 130 to 300 MB each in F16, are written to a temporary folder. Each is planned in
one process (`edgespec.plan`) and loaded in another, where its context is filled and the widest passes run.

- planned: all items of the models, without the process and the headroom.
- measured: the peak of the process (VmHWM) above its memory after a tiny model of the same kind and type was
  loaded and closed. Pages of mapped files are included.

A row is near if planned and measured differ by at most 3 %, or by 64 MiB if that is more. Long contexts are
filled by copying their own cells, except for MLX states. For MLX, the peak that the library counts is printed
too. With --grows, resizing the context copies the cache, which is allowed on top of the plan. Linux only.

--limits sets RLIMIT_AS to shares of the plan. A plan that fits must run with its context full. One that does
not fit must be refused, with at most 2 MiB more in use afterwards. Contexts that were not named may shrink.
The exit status is 1 if a row is not near or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matrix.cell import Cell
from matrix.gguf_models import KINDS, Sizes, write_gguf
from matrix.mlx_models import MLX_KINDS, write_mlx

_MIB = 2**20
_NEAR_SHARE, _NEAR_BYTES = 0.03, 64 * _MIB
_OTHER_KINDS = ("process", "headroom")
_PROGRAM = Path(__file__).parent / "matrix" / "cell.py"
# So much of what a plan says is given. What is refused may hold so much more afterwards.
_LIMITS = (0.5, 0.9, 1.03, 1.3)
_LEFT_BYTES = 2 * _MIB
_NO_LIMIT = 2**42
_SMALL = Sizes(vocab=4000, embedding=256, feed_forward=512, inner=512)
_TINY = Sizes(vocab=300, embedding=256, feed_forward=256, layers=2, heads=1, heads_kv=1, inner=512)


@dataclass(frozen=True)
class Row:
    """A cell and what came of it, in bytes."""

    name: str
    cell: Cell
    plan: dict[str, Any]
    run: dict[str, Any]

    @property
    def planned(self) -> int:
        """What the plan says, without what is no model's."""
        return sum(item["bytes"] for item in self.plan["items"] if item["kind"] not in _OTHER_KINDS)

    @property
    def measured(self) -> int:
        return int(self.run["peak"])

    @property
    def ratio(self) -> float:
        return self.planned / self.measured

    @property
    def near(self) -> bool:
        grain = max(_NEAR_SHARE * self.measured, _NEAR_BYTES)
        # What is copied is given back before the wide passes, in the place of whose buffers it lies.
        copied = max(0.0, self.of("cache") / 2 - self.of("compute", "output")) if self.cell.grows else 0.0
        return self.planned - grain <= self.measured <= self.planned + grain + copied * _MIB

    def of(self, *kinds: str) -> float:
        """MiB of some kinds in the plan."""
        return sum(item["bytes"] for item in self.plan["items"] if item["kind"] in kinds) / _MIB


def main() -> int:
    """Print the table, or JSON; 1 where a cell is not near."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of GGUF models")
    parser.add_argument("--types", default="F16,Q8_0,Q4_0,Q4_K_M", help="of their weights")
    parser.add_argument("--contexts", default="2048,8192,32768,131072", help="the longest for F16 only")
    parser.add_argument("--small", action="store_true", help="GGUF models of 3 to 17 MiB")
    parser.add_argument("--kv-types", default="f16,q8_0,q4_0", help="of caches, with the second context")
    parser.add_argument("--mlx-kinds", default=",".join(MLX_KINDS))
    parser.add_argument("--mlx-types", default="float16,8,4")
    parser.add_argument("--mlx-contexts", default="2048,8192", help="of float16, the first for all")
    parser.add_argument("--grows", action="store_true", help="let the contexts grow with the text instead")
    parser.add_argument("--limits", action="store_true", help="run under hard limits instead")
    parser.add_argument("--folder", type=Path, help="where models are written and kept")
    parser.add_argument("--json", type=Path, help="also write all there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgespec-matrix-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        shop = _Models(folder, _SMALL if args.small else None)
        cells = [*_gguf_cells(args, shop), *_mlx_cells(args, shop)]
        if args.grows:
            cells = [(f"{name}, growing", replace(cell, grows=True)) for name, cell in cells]
        if args.limits:
            return _under_limits(cells)
        rows = [row for name, cell in cells if (row := _run(name, cell))]
    if args.json:
        every = [asdict(row) | {"planned": row.planned, "ratio": row.ratio} for row in rows]
        args.json.write_text(json.dumps(every, indent=1), encoding="utf-8")
    bad = [row.name for row in rows if not row.near]
    if rows:
        worst = max(rows, key=lambda row: abs(row.planned - row.measured) / row.measured)
        print(f"\n{len(rows)} of {len(cells)} cells; worst {worst.ratio:.3f} ({worst.name}); far: {bad or 0}")
    return 1 if bad or len(rows) < len(cells) else 0


class _Models:
    """Writes each model once, when it is asked for."""

    def __init__(self, folder: Path, usual: Sizes | None) -> None:
        self._folder, self._usual = folder, usual

    def gguf(self, kind: str, type_name: str, sizes: Sizes | None = None, name: str = "") -> Path:
        name = name or (f"small-{kind}" if self._usual else kind)
        path = self._folder / f"{name}-{type_name}.gguf"
        return path if path.exists() else write_gguf(path, kind, type_name, sizes or self._usual)

    def tiny(self, kind: str, type_name: str) -> str:
        """A model of a kind and type of hardly any size."""
        return str(self.gguf(kind, type_name, _TINY, f"tiny-{kind}"))

    def mlx(self, kind: str, type_name: str, name: str = "") -> Path:
        path = self._folder / f"{name or kind}-mlx-{type_name}"
        return path if path.exists() else write_mlx(path, kind, type_name, tiny=bool(name))


def _gguf_cells(args: argparse.Namespace, shop: _Models) -> Iterator[tuple[str, Cell]]:
    contexts = [int(context) for context in args.contexts.split(",")]
    for kind in filter(None, args.kinds.split(",")):
        for type_name in args.types.split(","):
            basic = Cell(str(shop.gguf(kind, type_name)), warm=shop.tiny(kind, type_name))
            for context in contexts if type_name == "F16" else contexts[:1]:
                yield f"{kind} {type_name}", replace(basic, context=context)
        for kv_type in filter(None, args.kv_types.split(",") if kind != "mamba" else ()):
            first = args.types.split(",")[0]
            basic = Cell(str(shop.gguf(kind, first)), warm=shop.tiny(kind, first))
            context = contexts[-1 if len(contexts) < 2 else 1]
            yield f"{kind} {first}", replace(basic, context=context, kv_type=kv_type)
    if "gqa" in args.kinds.split(","):
        sizes = replace(_SMALL, layers=1) if args.small else Sizes(embedding=256, feed_forward=512)
        draft = str(shop.gguf("gqa", "F16", sizes, "draft"))
        for context in contexts[:2]:
            target, warm = str(shop.gguf("gqa", "F16")), shop.tiny("gqa", "F16")
            yield "gqa F16 with a draft", Cell(target, draft, context, warm=warm)


def _mlx_cells(args: argparse.Namespace, shop: _Models) -> Iterator[tuple[str, Cell]]:
    for kind in filter(None, args.mlx_kinds.split(",")):
        for type_name in args.mlx_types.split(","):
            basic = Cell(str(shop.mlx(kind, type_name)), warm=str(shop.mlx(kind, type_name, f"tiny-{kind}")))
            contexts = [int(context) for context in args.mlx_contexts.split(",")]
            for context in contexts if type_name == "float16" else contexts[:1]:
                yield f"{kind} MLX {type_name}", replace(basic, context=context)


def _run(name: str, cell: Cell) -> Row | None:
    """Plan and run a cell, and print its row."""
    plan, run = _asked("plan", cell), _asked("run", cell)
    label = f"{name}, {cell.context:,}, {cell.kv_type}"
    if "items" not in plan or "peak" not in run:
        print(f"{label}: failed: {plan if 'items' not in plan else run}", flush=True)
        return None
    row = Row(label, cell, plan, run)
    kinds = (("weights",), ("cache",), ("compute", "output"), ("vocabulary",))
    sizes = " + ".join(f"{row.of(*some):,.1f}" for some in kinds)
    of_library = f" (MLX: {run['library_peak'] / _MIB:,.1f})" if run["library_peak"] else ""
    print(
        f"| {label} | {sizes} | {row.planned / _MIB:,.1f} | {row.measured / _MIB:,.1f}{of_library} |"
        f" {row.ratio:.3f} |{'' if row.near else ' not near'}",
        flush=True,
    )
    return row


def _asked(what: str, cell: Cell) -> dict[str, Any]:
    """What the program of a cell says."""
    with tempfile.TemporaryDirectory() as data:
        done = subprocess.run(
            [sys.executable, str(_PROGRAM), what, json.dumps(asdict(cell))],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "EDGESPEC_DATA_DIR": data},
        )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": done.returncode, "said": done.stderr[-500:]}
    return found


def _under_limits(cells: list[tuple[str, Cell]]) -> int:
    """Run each cell under several limits of its addresses; 1 where any ended otherwise than it was told."""
    counts = {"ran": 0, "ran with less": 0, "refused": 0, "failed": 0}
    for name, cell in cells:
        # Where addresses are limited more of them is planned than is touched.
        plan = _asked("plan", replace(cell, address_bytes=_NO_LIMIT))
        if "total_bytes" not in plan:
            print(f"{name}: not planned: {plan}")
            counts["failed"] += 1
            continue
        beside = sum(item["bytes"] for item in plan["items"] if item["kind"] == "process")
        for share in _LIMITS:
            for fixed in (True, False):
                limit = int(share * (plan["total_bytes"] - beside))
                run = _asked("run", replace(cell, address_bytes=limit, fixed=fixed))
                how = _outcome(run, whole=fixed and share > 1)
                counts[how] += 1
                wished = "as named" if fixed else "free"
                label = f"{name}, {cell.context:,}, {share:.2f} of the plan, {wished}"
                print(f"{label}: {how}; {_told(run) if how != 'failed' else run}", flush=True)
    print(", ".join(f"{how} {count}" for how, count in counts.items()))
    return 1 if counts["failed"] else 0


def _outcome(run: dict[str, Any], *, whole: bool) -> str:
    """whole: all of it fits, and nothing has to be given up."""
    if "peak" in run:
        return "ran with less" if run["plan"]["decisions"] else "ran"
    early = run.get("refused", [""])[0] == "MemoryBudgetError" and run["taken"] <= _LEFT_BYTES
    return "refused" if early and not whole else "failed"


def _told(run: dict[str, Any]) -> str:
    if "refused" in run:
        looked = f"{run['looked'] / _MIB:,.1f} MiB at most to look at it"
        return f"{run['taken'] / _MIB:,.1f} MiB more held afterwards, {looked}: {run['refused'][1]}"
    decided = "".join(f", {decision['what']}" for decision in run["plan"]["decisions"])
    return (
        f"{run['addresses'] / _MIB:,.1f} of {run['limit'] / _MIB:,.1f} MiB of addresses taken,"
        f" a context of {run['context']:,} tokens filled{decided}"
    )


if __name__ == "__main__":
    sys.exit(main())
