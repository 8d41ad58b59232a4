"""Run the comparison in shards. Each finished shard is a line in the results, and later runs skip it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import edgespec
from edgespec.assembly.loading import always_draft
from edgespec.chat.message import Message
from edgespec.losslessness import Prompt, read_prompts, verify

__all__ = ["CONFIGURATIONS", "TEMPERATURES", "Configuration", "Shards", "prepare_models"]

TEMPERATURES = (0.0, 0.7, 1.2)
# Number of blocks to run before loading the next configuration. More than one, because loading a model takes
# about a second.
_BLOCKS_PER_LOAD = 2
_PROMPTS_PER_BLOCK = 6
_DRAFT_LENGTHS = (4, 2, 7)
# Maximum reply length in tokens. Every reply of every second block reaches it.
_MAX_TOKENS = 192


@dataclass(frozen=True)
class Configuration:
    """A pair of models on one backend, with the methods that are compared with plain decoding.

    A configuration runs in every `interval`-th group of blocks, because some take much longer than others.
    """

    backend: str
    target: str
    draft: str
    methods: tuple[str, ...]
    load_options: dict[str, Any] = field(default_factory=dict)
    interval: int = 1


CONFIGURATIONS = (
    Configuration(
        "llama.cpp",
        "demo",
        "demo-draft",
        ("model", "ngram", "suffix", "lookahead", "lowbit", "model+suffix", "model+suffix+ngram", "auto"),
    ),
    Configuration(
        "llama.cpp, split model",
        "demo",
        "demo-draft",
        ("layerskip", "layerskip+suffix", "layerskip+model"),
    ),
    Configuration(
        "MLX",
        "demo-mlx",
        "demo-mlx-draft",
        ("model", "ngram", "suffix", "lookahead", "swift", "layerskip", "lowbit", "model+suffix", "auto"),
        {"exit_layer": 4},
        interval=16,
    ),
)


def prepare_models(data_folder: Path) -> None:
    """Create the files that `lowbit` and `layerskip` need in the data folder, unless they exist."""
    environment = os.environ | {"EDGESPEC_DATA_DIR": str(data_folder)}
    for arguments in (["lowbit", "demo"], ["layerskip", "demo", "--exit", "4"]):
        command = [sys.executable, "-m", "edgespec", "prepare", *arguments]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


class Shards:
    """The finished shards in a file of JSON lines. A shard is one backend, method, temperature and block.

    Args:
        path: The file.
        configurations: The model pairs and methods to compare.
        report: Called with one line after each group of shards.
    """

    def __init__(
        self,
        path: Path,
        configurations: Sequence[Configuration] = CONFIGURATIONS,
        report: Callable[[str], None] = print,
    ) -> None:
        self._path, self._configurations, self._report = path, configurations, report
        self.lines = list(_read_lines(path))

    @property
    def tokens(self) -> int:
        """Number of tokens compared so far."""
        return sum(line["tokens"] for line in self.lines)

    def run(self, tokens: int) -> None:
        """Run shards until `tokens` tokens have been compared or a shard has a violation."""
        start, before = time.monotonic(), self.tokens
        for first_block in count(0, _BLOCKS_PER_LOAD):
            blocks = range(first_block, first_block + _BLOCKS_PER_LOAD)
            for configuration in self._configurations:
                if (first_block // _BLOCKS_PER_LOAD + 1) % configuration.interval:
                    continue
                for line in self._missing(configuration, blocks, tokens):
                    self._append(line)
                    if line["violations"]:
                        return
                if self.tokens >= tokens:
                    return
                speed = (self.tokens - before) / (time.monotonic() - start)
                self._report(f"{self.tokens:,} tokens, {speed:.0f} per second")

    def _missing(
        self, configuration: Configuration, blocks: Sequence[int], tokens: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the shards of these blocks that are not finished. Load the models only if there are any."""
        finished = {
            (line["backend"], line["method"], line["temperature"], line["block"]) for line in self.lines
        }
        groups = {
            (block, temperature): methods
            for block in blocks
            for temperature in TEMPERATURES
            if (
                methods := [
                    method
                    for method in configuration.methods
                    if (configuration.backend, method, temperature, block) not in finished
                ]
            )
        }
        if not groups:
            return
        loaded = {"methods": configuration.methods, **configuration.load_options}
        with (
            always_draft(),
            edgespec.load(configuration.target, configuration.draft, **loaded) as runtime,
        ):
            for (block, temperature), methods in groups.items():
                if self.tokens < tokens:
                    yield from _compare(runtime, configuration.backend, block, temperature, methods)

    def _append(self, line: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)


def _compare(
    runtime: edgespec.Runtime, backend: str, block: int, temperature: float, methods: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield one shard per method. All are compared with the same plain replies."""
    start = time.monotonic()
    vocabulary = runtime.vocabulary
    ends = [token for token in range(vocabulary.size) if vocabulary.is_end(token)] if block % 2 else []
    report = verify(
        runtime,
        prompts_of(block),
        methods=methods,
        temperatures=(temperature,),
        draft_lengths=(_DRAFT_LENGTHS[block % len(_DRAFT_LENGTHS)],),
        max_tokens=_MAX_TOKENS,
        seed=block,
        idle_seconds=0.2,
        logit_bias=dict.fromkeys(ends, float("-inf")),
    )
    seconds = (time.monotonic() - start) / len(methods)
    for method, result in report.methods.items():
        yield {
            "backend": backend,
            "method": method,
            "temperature": temperature,
            "block": block,
            **asdict(result),
            "seconds": round(seconds, 2),
        }


def prompts_of(block: int) -> list[Prompt]:
    """Return the prompts of a block: evaluation prompts, most of them after one or two other turns.

    At temperature 0 the seed changes nothing, so different blocks need different prompts.
    """
    rng = Random(block)
    known = read_prompts()
    prompts = []
    for number in range(_PROMPTS_PER_BLOCK):
        *earlier, last = rng.sample(known, rng.choice((1, 2, 2, 3)))
        messages: list[Message] = []
        for each in earlier:
            messages += [*each.messages, Message("assistant", rng.choice(_ANSWERS))]
        prompts.append(Prompt(f"{block}-{number}-{last.name}", (*messages, *last.messages), last.category))
    return prompts


_ANSWERS = (
    "Use `man` to read the manual of a command:\n\n```sh\nman ls\n```",
    "The answer is 42.",
    "I do not know.",
    "def add(a, b):\n    return a + b",
)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the finished shards. Ignores an incomplete line of a killed run, so its shard is rerun."""
    if not path.exists():
        return
    with path.open("r+", encoding="utf-8") as file:
        text = file.read()
        if text and not text.endswith("\n"):
            file.write("\n")
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)
