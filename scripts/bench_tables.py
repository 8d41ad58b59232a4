#!/usr/bin/env python3
"""Compare edgespec with llama-server on real and padded models, and write the tables of docs/benchmarks.md.

    scripts/real_models --padded && scripts/build_llama_server ../llama
    scripts/bench_tables.py --llama-server ../llama/llama-server           # about an hour; rerun to resume
    scripts/bench_tables.py --tables --write                               # only the tables of finished runs

Each model is one run of scripts/bench_peers.py, whose command is printed before it starts. llama-server is
built from the same source, with its own kernels and memory layouts. Both get the same files, prompts,
sampling settings and seeds, and one thread per core. Prompts are chosen by one rule: every nth of the 34 in
models/eval_prompts.jsonl, starting with the first. Rows without a gain stay in the table.

Keep the machine idle. `--only TEXT` runs the models whose names contain it.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.peers.tables import comparison_table, read_results

_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = Path("build", "real-models")
_PAGE = _ROOT / "docs" / "benchmarks.md"
_BEGIN, _END = "<!-- peers -->\n", "<!-- peers, end -->\n"


@dataclass(frozen=True)
class Model:
    """A model to measure.

    Attributes:
        name: Its name in the table.
        file: Its file in build/real-models.
        draft: The draft model's file, or "none".
        every: Use every nth prompt.
        max_tokens: Maximum length of a reply.
        grid: Configurations of llama-server.
    """

    name: str
    file: str
    draft: str = "none"
    every: int = 4
    max_tokens: int = 96
    grid: str = "none,ngram-simple:3:8"

    @property
    def results(self) -> Path:
        return _ROOT / "build" / "bench" / f"{self.file.replace('/', '-').removesuffix('.gguf')}.json"

    def command(self, llama_server: str) -> list[str]:
        draft = self.draft if self.draft == "none" else str(_FOLDER / self.draft)
        return [
            *("scripts/bench_peers.py", "--llama-server", llama_server),
            *("--target", str(_FOLDER / self.file), "--draft", draft),
            *("--grid", self.grid, "--methods", "none,auto", "--every", str(self.every)),
            *("--max-tokens", str(self.max_tokens), "--json", str(self.results.relative_to(_ROOT))),
        ]


def _padded(name: str, file: str, every: int, max_tokens: int) -> Model:
    grid = "none,draft:3,draft:5,ngram-simple:3:8"
    return Model(name, f"padded/{file}", "smollm2-q4_0.gguf", every, max_tokens, grid)


MODELS = (
    Model("SmolLM2 135M Q4_1", "smollm2-q4_1.gguf"),
    Model("SmolLM2 135M Q8_0", "smollm2-q8_0.gguf"),
    Model("SmolLM2 135M Q4_0", "smollm2-q4_0.gguf"),
    Model("SmolLM2 135M Q4_K_M", "smollm2-q4_k_m.gguf"),
    Model("Gemma 3 270M Q4_K_M", "gemma3-270m-q4_k_m.gguf"),
    _padded("padded to 3B, Q4_0", "smollm2-q4_0.gguf", 11, 64),
    _padded("padded to 3B, Q4_K_M", "smollm2-q4_k_m.gguf", 11, 64),
    _padded("padded to 3B, Q8_0", "smollm2-q8_0.gguf", 17, 64),
    _padded("padded to 3B, F16", "smollm2-f16.gguf", 17, 48),
)


def main() -> int:
    """Run the missing measurements and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", help="the llama-server binary")
    parser.add_argument("--only", default="", metavar="TEXT", help="only models whose name contains TEXT")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--write", action="store_true", help="write the table to docs/benchmarks.md")
    args = parser.parse_args()
    chosen = [model for model in MODELS if args.only.lower() in model.name.lower()]
    if not (args.tables or args.llama_server):
        parser.error("give --llama-server FILE, or --tables to measure nothing")
    for model in chosen:
        if args.tables or model.results.exists():
            continue
        model.results.parent.mkdir(parents=True, exist_ok=True)
        command = model.command(args.llama_server)
        print(shlex.join(command), flush=True)
        # Write to another file first, so that an interrupted or incomplete measurement is repeated.
        part = model.results.with_suffix(".part")
        command[-1] = str(part)
        if (status := _run(command)) != 0:
            return status
        part.replace(model.results)
    found = comparison_table(
        (model.name, read_results(model.results)) for model in chosen if model.results.exists()
    )
    print(found)
    if args.write:
        before, _, rest = _PAGE.read_text("utf-8").partition(_BEGIN)
        _PAGE.write_text(before + _BEGIN + "\n" + found + "\n" + _END + rest.partition(_END)[2], "utf-8")
    return 0


def _run(command: list[str]) -> int:
    """Run a script, and return its exit status.

    On Ctrl-C, which reaches the script too, wait until it has stopped the programs that it started.
    """
    process = subprocess.Popen([sys.executable, *command], cwd=_ROOT)
    while True:
        with suppress(KeyboardInterrupt):
            return process.wait()


if __name__ == "__main__":
    sys.exit(main())
