#!/usr/bin/env python3
"""Compare llama.cpp's CPU kernels with those of scripts/cpu_kernels.cpp on whole passes of a model.

    scripts/bench_kernels.py build/real-models/padded/smollm2-q4_k_m.gguf model-2.gguf --widths 1,2,4,8

Prints the milliseconds of passes over 1, 2, 4 and 8 tokens (their width) after a short prompt, with llama.cpp
as installed and with the kernels of edgespec. Each runs in new processes, alternately. The fastest pass
counts. Keep the machine idle. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from edgespec.system.cores import usable_cores

_ROOT = Path(__file__).resolve().parents[1]
_CHILD = """
import json, sys, time
path, widths, threads, ours = json.loads(sys.argv[1])
if ours:
    from edgespec.backends.llamacpp.native import cpu_kernels
    assert cpu_kernels(), "the library of CPU kernels was not built; run scripts/setup"
    from edgespec.backends.llamacpp.native import library
    library()
import llama_cpp
options = {"n_ctx": 256, "n_threads": threads, "n_threads_batch": threads, "flash_attn": True}
model = llama_cpp.Llama(path, verbose=False, **options)
model.eval(list(range(100, 130)))
fastest = []
for width in widths:
    times = []
    while len(times) < 3 or (sum(times) < 3 and len(times) < 50):
        model.n_tokens = 30
        began = time.perf_counter()
        model.eval([100 + i for i in range(width)])
        times.append(time.perf_counter() - began)
    fastest.append(min(times))
print(json.dumps(fastest))
"""


def main() -> int:
    """Run both kinds of kernels on each model, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--widths", default="1,2,4,8", help="tokens per pass (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind (default: %(default)s)")
    args = parser.parse_args()
    widths = [int(width) for width in args.widths.split(",")]
    print("| model | kernels | " + " | ".join(f"width {width}, ms" for width in widths) + " |")
    print("| --- |" + " --- |" * (len(widths) + 1))
    for model in args.models:
        fastest = [[float("inf")] * len(widths) for _ in range(2)]
        for _ in range(args.rounds):
            for ours in (False, True):
                found = _measure(model, widths, ours)
                fastest[ours] = [min(pair) for pair in zip(fastest[ours], found, strict=True)]
        for row, name in enumerate(("llama.cpp", "edgespec")):
            cells = [f"{1000 * seconds:.1f}" for seconds in fastest[row]]
            print(f"| {model.stem} | {name} | " + " | ".join(cells) + " |", flush=True)
    return 0


def _measure(model: Path, widths: list[int], ours: bool) -> list[float]:
    request = json.dumps([str(model.resolve()), widths, usable_cores(), ours])
    child = [sys.executable, "-c", _CHILD, request]
    ended = subprocess.run(child, cwd=_ROOT, capture_output=True, text=True, check=True)
    return [float(seconds) for seconds in json.loads(ended.stdout.splitlines()[-1])]


if __name__ == "__main__":
    sys.exit(main())
