#!/usr/bin/env python3
"""Compare planned with measured memory for many kinds of models, weight and cache types, and context lengths.

    scripts/bench_plan.py                                       # GGUF and MLX: an hour
    scripts/bench_plan.py --kinds gqa,jamba --types F16,Q4_0 --contexts 2048,131072
    scripts/bench_plan.py --limits                              # the same models under hard limits
    scripts/bench_plan.py --projectors                          # models that see images: ten minutes

Models with random weights, 130 to 300 MB each in F16, are written to a temporary folder. Each case is planned
in one process (`edgespec.plan`) and loaded in another, which fills the context and runs the widest passes.

- planned: the planned memory of the models, without that of the process and the headroom.
- measured: the peak memory of the process (VmHWM), minus its memory after it has loaded and closed a tiny
  model of the same kind and type. Pages of memory-mapped files are included.

A case passes if planned and measured memory differ by at most 3% or 64 MiB, whichever is more. Otherwise, its
row is marked `not near`. To save time, long contexts are filled by copying parts of the KV cache, except for
recurrent models on MLX. For MLX, the peak reported by MLX is printed too. With --grows, the context is
resized, and the copy of the cache that a resize makes may exceed the plan. Runs only on Linux.

--projectors measures projectors (mmproj files) with random F16 weights instead: CLIP ViT-L/14, whose weights
take the most memory, and fewer or narrower layers of Gemma 3's and Qwen2.5-VL's encoders, whose buffers do.
Each one encodes two photos of 12 megapixels, because the second is decoded while the buffers for the first
are still allocated. Planned and measured memory must differ by at most 5%.

--limits sets address space limits (RLIMIT_AS) below and above the planned memory. If the plan fits, the model
must run with a full context. Otherwise, the load must be rejected and leave at most 2 MiB in use. Each case
runs with fixed options and with free options, which the planner may reduce. The exit status is 1 if a case
fails.
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

from edgespec.model.memory_estimate import MODEL_MEMORY_KINDS
from scripts.matrix.cell import Cell
from scripts.matrix.gguf_models import KINDS, Sizes, write_gguf
from scripts.matrix.mlx_models import MLX_KINDS, write_mlx

_MIB = 2**20
_NEAR_SHARE, _NEAR_BYTES = 0.03, 64 * _MIB
_NEAR_PROJECTOR_SHARE = 0.05
_PROGRAM = Path(__file__).parent / "matrix" / "cell.py"
# Address space limits for --limits, relative to the planned memory: two below it and two above.
_LIMITS = (0.5, 0.9, 1.03, 1.3)
# Maximum memory that a rejected load may leave in use, chosen as a heuristic.
_MAX_LEFT_BYTES = 2 * _MIB
_TINY = Sizes(vocab=300, embedding=256, feed_forward=256, layers=2, heads=1, heads_kv=1, inner=512)


@dataclass(frozen=True)
class Row:
    """The planned and measured memory of a case.

    Attributes:
        name: model kind, types and context length, for the table.
        cell: the model and its load options.
        plan: the plan as JSON.
        run: the result of `matrix/cell.py`.
    """

    name: str
    cell: Cell
    plan: dict[str, Any]
    run: dict[str, Any]

    @property
    def planned(self) -> int:
        """The planned bytes of the models."""
        return sum(item["bytes"] for item in self.plan["items"] if item["kind"] in MODEL_MEMORY_KINDS)

    @property
    def measured(self) -> int:
        """The peak of the process above its memory before the load."""
        return int(self.run["peak"])

    @property
    def ratio(self) -> float:
        """Planned divided by measured bytes."""
        return self.planned / self.measured

    @property
    def near(self) -> bool:
        """Whether planned and measured bytes differ as little as the module's docstring says."""
        if self.cell.images:
            return abs(self.planned - self.measured) <= _NEAR_PROJECTOR_SHARE * self.measured
        tolerance = max(_NEAR_SHARE * self.measured, _NEAR_BYTES)
        # A resize frees its copy of half the cache before the widest passes allocate their buffers, so the
        # copy only raises the peak if it is larger than those buffers.
        copy_mib = (
            max(0.0, self.mib_of("cache") / 2 - self.mib_of("compute", "output")) if self.cell.grows else 0.0
        )
        max_measured = self.planned + tolerance + copy_mib * _MIB
        return self.planned - tolerance <= self.measured <= max_measured

    def mib_of(self, *kinds: str) -> float:
        """Return the planned MiB of the given item kinds."""
        sizes: list[int] = [item["bytes"] for item in self.plan["items"] if item["kind"] in kinds]
        return sum(sizes) / _MIB


def main() -> int:
    """Run all cases and print the table. Return 1 if a case failed or is not near its plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of GGUF models")
    parser.add_argument("--types", default="F16,Q8_0,Q4_0,Q4_K_M", help="weight types of GGUF models")
    parser.add_argument(
        "--contexts",
        default="2048,8192,32768,131072",
        help="context lengths; types other than F16 run the first only",
    )
    parser.add_argument(
        "--kv-types", default="f16,q8_0,q4_0", help="KV cache types, each with the second context length"
    )
    parser.add_argument("--mlx-kinds", default=",".join(MLX_KINDS), help="kinds of MLX models")
    parser.add_argument("--mlx-types", default="float16,8,4", help="dtypes or bits of MLX models")
    parser.add_argument("--mlx-contexts", default="2048,8192", help="like --contexts, for MLX")
    parser.add_argument("--grows", action="store_true", help="start with small contexts that are resized")
    parser.add_argument("--limits", action="store_true", help="run under hard memory limits instead")
    parser.add_argument("--projectors", action="store_true", help="measure projectors instead")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgespec-matrix-") as temporary:
        models = _Models(Path(temporary))
        if args.projectors:
            cells = [*_projector_cells(Path(temporary))]
        else:
            cells = [*_gguf_cells(args, models), *_mlx_cells(args, models)]
        if args.grows:
            cells = [(f"{name}, growing", replace(cell, grows=True)) for name, cell in cells]
        if args.limits:
            return _run_under_limits(cells)
        rows = [row for name, cell in cells if (row := _run(name, cell))]
    if args.json:
        every = [asdict(row) | {"planned": row.planned, "ratio": row.ratio} for row in rows]
        args.json.write_text(json.dumps(every, indent=1), encoding="utf-8")
    bad = [row.name for row in rows if not row.near]
    if rows:
        worst = max(rows, key=lambda row: abs(row.planned - row.measured) / row.measured)
        print(f"\n{len(rows)} of {len(cells)} cases, not near: {bad or 0}")
        print(f"worst ratio {worst.ratio:.3f}: {worst.name}")
    return 1 if bad or len(rows) < len(cells) else 0


class _Models:
    """Writes each model with random weights when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def gguf(self, kind: str, type_name: str, sizes: Sizes | None = None, name: str = "") -> Path:
        """Return the path of a GGUF model, with the default sizes unless others are given."""
        path = self._folder / f"{name or kind}-{type_name}.gguf"
        return path if path.exists() else write_gguf(path, kind, type_name, sizes)

    def tiny(self, kind: str, type_name: str) -> str:
        """Return the path of a tiny GGUF model of the given kind and type."""
        return str(self.gguf(kind, type_name, _TINY, f"tiny-{kind}"))

    def mlx(self, kind: str, type_name: str, name: str = "") -> Path:
        """Return the folder of an MLX checkpoint, which is tiny if `name` is not empty."""
        path = self._folder / f"{name or kind}-mlx-{type_name}"
        return path if path.exists() else write_mlx(path, kind, type_name, tiny=bool(name))


def _gguf_cells(args: argparse.Namespace, models: _Models) -> Iterator[tuple[str, Cell]]:
    """Yield the names and settings of all GGUF cases."""
    contexts = [int(context) for context in args.contexts.split(",")]
    for kind in filter(None, args.kinds.split(",")):
        for type_name in args.types.split(","):
            basic = Cell(str(models.gguf(kind, type_name)), warm=models.tiny(kind, type_name))
            for context in contexts if type_name == "F16" else contexts[:1]:
                yield f"{kind} {type_name}", replace(basic, context=context)
        for kv_type in filter(None, args.kv_types.split(",") if kind != "mamba" else ()):
            first = args.types.split(",")[0]
            basic = Cell(str(models.gguf(kind, first)), warm=models.tiny(kind, first))
            context = contexts[-1 if len(contexts) < 2 else 1]
            yield f"{kind} {first}", replace(basic, context=context, kv_type=kv_type)
    if "gqa" in args.kinds.split(","):
        draft = str(models.gguf("gqa", "F16", Sizes(embedding=256, feed_forward=512), "draft"))
        for context in contexts[:2]:
            target, warm = str(models.gguf("gqa", "F16")), models.tiny("gqa", "F16")
            yield "gqa F16 with a draft", Cell(target, draft, context, warm=warm)


def _mlx_cells(args: argparse.Namespace, models: _Models) -> Iterator[tuple[str, Cell]]:
    """Yield the names and settings of all MLX cases."""
    for kind in filter(None, args.mlx_kinds.split(",")):
        for type_name in args.mlx_types.split(","):
            basic = Cell(
                str(models.mlx(kind, type_name)), warm=str(models.mlx(kind, type_name, f"tiny-{kind}"))
            )
            contexts = [int(context) for context in args.mlx_contexts.split(",")]
            for context in contexts if type_name == "float16" else contexts[:1]:
                yield f"{kind} MLX {type_name}", replace(basic, context=context)


def _projector_cells(folder: Path) -> Iterator[tuple[str, Cell]]:
    """Yield the names and settings of all cases with a projector."""
    from tests.backends.tiny_vision import (
        EncoderSizes,
        VisionKind,
        picture,
        png_bytes,
        write_projector,
        write_vision_model,
    )

    # A square photo, because it is reduced to the largest number of patches.
    photos = [folder / f"{seed}.png" for seed in range(2)]
    for seed, photo in enumerate(photos):
        photo.write_bytes(png_bytes(picture(3464, 3464, seed=seed)))
    encoders: dict[VisionKind, EncoderSizes] = {
        "llava": EncoderSizes(1024, 4096, layers=23, side=24, is_half=True),
        "gemma3": EncoderSizes(1152, 4304, layers=4, side=64, merge=4, is_half=True),
        "qwen2.5vl": EncoderSizes(640, 1710, layers=2, side=40, is_half=True),
    }
    for kind, sizes in encoders.items():
        files = write_vision_model(folder / kind, kind, context=8192)
        write_projector(files.projector, kind, sizes)
        model, images = str(files.model), [*map(str, photos)]
        yield (
            f"{kind} projector",
            Cell(model, context=4608, warm=model, full=False, mmproj=str(files.projector), images=images),
        )


def _run(name: str, cell: Cell) -> Row | None:
    """Plan and run a case, and print its row. Return None if it failed."""
    plan, run = _run_cell("plan", cell), _run_cell("run", cell)
    label = f"{name}, {cell.context:,}, {cell.kv_type}"
    if "items" not in plan or "peak" not in run:
        print(f"{label}: failed: {plan if 'items' not in plan else run}", flush=True)
        return None
    row = Row(label, cell, plan, run)
    kinds = (("weights",), ("cache",), ("compute", "output"), ("vocabulary",))
    sizes = " + ".join(f"{row.mib_of(*group):,.1f}" for group in kinds)
    library_peak = f" (MLX: {run['library_peak'] / _MIB:,.1f})" if run["library_peak"] else ""
    print(
        f"| {label} | {sizes} | {row.planned / _MIB:,.1f} | {row.measured / _MIB:,.1f}{library_peak} |"
        f" {row.ratio:.3f} |{'' if row.near else ' not near'}",
        flush=True,
    )
    return row


def _run_cell(action: str, cell: Cell) -> dict[str, Any]:
    """Run `matrix/cell.py` with the action `plan` or `run`, and return its JSON."""
    with tempfile.TemporaryDirectory() as data:
        done = subprocess.run(
            [sys.executable, str(_PROGRAM), action, json.dumps(asdict(cell))],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "EDGESPEC_DATA_DIR": data},
        )
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": done.returncode, "stderr": done.stderr[-500:]}
    return result


def _run_under_limits(cells: list[tuple[str, Cell]]) -> int:
    """Run each case under several address space limits. Returns 1 if any did not end as planned."""
    counts = {"ran": 0, "ran with less": 0, "rejected": 0, "failed": 0}
    for name, cell in cells:
        plan = _run_cell("plan", cell)
        if "total_bytes" not in plan:
            print(f"{name}: not planned: {plan}")
            counts["failed"] += 1
            continue
        process_bytes = sum(item["bytes"] for item in plan["items"] if item["kind"] == "process")
        for share in _LIMITS:
            for fixed in (True, False):
                limit = int(share * (plan["total_bytes"] - process_bytes))
                run = _run_cell("run", replace(cell, address_bytes=limit, fixed=fixed))
                outcome = _outcome(run, must_fit=fixed and share > 1)
                counts[outcome] += 1
                options = "fixed options" if fixed else "free options"
                label = f"{name}, {cell.context:,}, {share:.2f} of the plan, {options}"
                print(f"{label}: {outcome}; {_describe(run) if outcome != 'failed' else run}", flush=True)
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.items()))
    return 1 if counts["failed"] else 0


def _outcome(run: dict[str, Any], *, must_fit: bool) -> str:
    """Return how a run under a limit ended. If `must_fit` is set, a rejected load counts as a failure."""
    if "peak" in run:
        return "ran with less" if run["plan"]["decisions"] else "ran"
    is_clean = run.get("error", [""])[0] == "MemoryBudgetError" and run["left_bytes"] <= _MAX_LEFT_BYTES
    return "rejected" if is_clean and not must_fit else "failed"


def _describe(run: dict[str, Any]) -> str:
    """Return a one-line description of a run that did not fail."""
    if "error" in run:
        planning = f"{run['planning_bytes'] / _MIB:,.1f} MiB at the peak of planning"
        return f"{run['left_bytes'] / _MIB:,.1f} MiB still in use afterwards, {planning}: {run['error'][1]}"
    decisions = "".join(f", {decision['what']}" for decision in run["plan"]["decisions"])
    return (
        f"{run['addresses'] / _MIB:,.1f} of {run['limit'] / _MIB:,.1f} MiB of addresses used,"
        f" a context of {run['context']:,} tokens filled{decisions}"
    )


if __name__ == "__main__":
    sys.exit(main())
