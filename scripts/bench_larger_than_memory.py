#!/usr/bin/env python3
"""Compare edgespec with stock llama.cpp on a model that is larger than the memory of a Linux control group.

    sudo scripts/bench_larger_than_memory.py big.gguf --draft small.gguf --shares 0.75,0.55

Each program runs in a new control group whose memory limit is a fraction of the size of the target's file.
All
replies have the same prompt, length and temperature (0). `llama.cpp` is the installed llama-cpp-python, which
maps the file into memory, with flash attention and a thread for each core. Every configuration runs
`--repeats` times, interleaved, and its first reply is not counted, because it includes tests of the model and
measurements. Before each reply, the model files are removed from the page cache, because cached pages do not
count towards the limit of a program that did not read them.

tokens/s   tokens after the first one per second: the median, the slowest and the fastest reply
passes     target passes of the median reply
peak       peak memory of the control group, which includes the page cache
killed     replies that ended because the kernel killed the process

Needs permission to create control groups (root).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgespec.model.formats.gguf_files import gguf_files
from edgespec.system.cores import usable_cores

_ROOT = Path("/sys/fs/cgroup")
_PROMPT = "Write a short story about a lighthouse keeper."
_LLAMA_CPP = """
import json, sys, time
from llama_cpp import Llama
path, prompt, count, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = Llama(
    path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
)
began, times = time.perf_counter(), []
for _ in model.create_chat_completion(
    [{"role": "user", "content": prompt}], max_tokens=count, temperature=0, stream=True
):
    times.append(time.perf_counter())
# The first chunk has no text, and the last one only tells why the reply ended.
tokens = len(times) - 2
print(json.dumps({"tokens_per_second": (tokens - 1) / (times[-1] - times[1]), "target_passes": tokens}))
"""


@dataclass(frozen=True)
class _Group:
    """A control group (version 1 or 2) with a memory limit.

    Each run needs its own group, because not every kernel can reset the recorded peak.
    """

    folder: Path
    is_v1: bool

    @classmethod
    def create(cls, limit_bytes: int) -> _Group:
        is_v1 = (_ROOT / "memory").is_dir()
        group = cls((_ROOT / "memory" if is_v1 else _ROOT) / f"edgespec-bench-{os.getpid()}", is_v1)
        group.folder.mkdir()
        group._file("memory.limit_in_bytes", "memory.max").write_text(str(limit_bytes))
        return group

    def _file(self, v1: str, v2: str) -> Path:
        return self.folder / (v1 if self.is_v1 else v2)

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        return int(self._file("memory.max_usage_in_bytes", "memory.peak").read_text())


def main() -> int:
    """Print the results as text or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the GGUF model")
    parser.add_argument("--draft", default="none", help="the draft model (default: none)")
    parser.add_argument(
        "--shares", default="0.75,0.55", help="limits, relative to the file (default: 0.75,0.55)"
    )
    parser.add_argument("--methods", default="none,auto", help="edgespec's methods (default: none,auto)")
    parser.add_argument("--tokens", type=int, default=48, help="length of a reply (default: 48)")
    parser.add_argument("--repeats", type=int, default=3, help="replies that count (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for share in map(float, args.shares.split(",")):
            results += _compare(args, int(args.target.stat().st_size * share), share, folder)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        _print(results)
    return 0


def _run(
    command: Sequence[str], environment: Mapping[str, str], limit_bytes: int, files: Sequence[Path]
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Run a program under a memory limit. Return its result, and its peak memory in bytes."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    group = _Group.create(limit_bytes)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, preexec_fn=group.enter, check=False
        )
        return done, group.peak_bytes()
    finally:
        group.folder.rmdir()


def _compare(args: argparse.Namespace, limit_bytes: int, share: float, folder: str) -> list[dict[str, Any]]:
    files = [*gguf_files(args.target), *([Path(args.draft)] if Path(args.draft).is_file() else [])]
    settings = (str(args.target), _PROMPT, str(args.tokens), str(usable_cores()))
    commands: dict[str, Sequence[str]] = {"llama.cpp": (sys.executable, "-c", _LLAMA_CPP, *settings)}
    for method in args.methods.split(","):
        commands[f"edgespec {method}"] = (
            *(sys.executable, "-m", "edgespec", "generate", "--json", "--target", str(args.target)),
            *(
                "--draft",
                args.draft,
                "--method",
                method,
                "--temperature",
                "0",
                "-n",
                str(args.tokens),
                _PROMPT,
            ),
        )
    environment = os.environ | {
        "EDGESPEC_CACHE_DIR": f"{folder}/cache",
        "EDGESPEC_DATA_DIR": f"{folder}/data",
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    killed = dict.fromkeys(commands, 0)
    peaks = dict.fromkeys(commands, 0)
    for repeat in range(args.repeats + 1):
        for name, command in commands.items():
            run, peak_bytes = _run(command, environment, limit_bytes, files)
            peaks[name] = max(peaks[name], peak_bytes)
            if run.returncode:
                killed[name] += run.returncode < 0
                print(f"{name}: {run.stderr.strip()[-300:]}", file=sys.stderr)
            elif repeat:
                reply = json.loads(run.stdout)
                found[name].append(reply.get("stats", reply) | {"tokens": reply.get("tokens")})
    texts = [reply["tokens"] for name in commands for reply in found[name] if reply["tokens"] is not None]
    if any(text != texts[0] for text in texts):
        print("edgespec's replies differ", file=sys.stderr)
    return [
        {
            "share": share,
            "program": name,
            "tokens_per_second": sorted(reply["tokens_per_second"] for reply in found[name]),
            "target_passes": median(reply["target_passes"] for reply in found[name]) if found[name] else None,
            "peak_bytes": peaks[name],
            "killed": killed[name],
        }
        for name in commands
    ]


def _print(results: Sequence[dict[str, Any]]) -> None:
    row_format = "{:>6}  {:<22}{:>9}{:>9}{:>9}{:>8}{:>10}{:>8}"
    print(
        row_format.format(
            "limit", "program", "tokens/s", "slowest", "fastest", "passes", "peak MiB", "killed"
        )
    )
    for row in results:
        speeds = row["tokens_per_second"] or [float("nan")]
        shown = (f"{speed:.2f}" for speed in (median(speeds), speeds[0], speeds[-1]))
        peak, passes = round(row["peak_bytes"] / 2**20), round(row["target_passes"] or 0)
        print(row_format.format(f"{row['share']:.0%}", row["program"], *shown, passes, peak, row["killed"]))


if __name__ == "__main__":
    sys.exit(main())
