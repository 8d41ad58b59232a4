"""Run the comparison in shards. Each finished shard is a line in the results, and later runs skip it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import edgespec
from edgespec.api.loading import always_draft
from edgespec.losslessness.cases import Prompt, prompt_tokens, read_prompts
from edgespec.losslessness.verify import verify
from scripts.proving.configurations import CONFIGURATIONS, Configuration
from scripts.proving.prompts import Range, draw_prompts

TEMPERATURES = (0.0, 0.8, 1.2)
_DRAFT_LENGTHS = (2, 3, 4, 4, 7, 7, 15)
_TREES: tuple[tuple[int, ...] | str, ...] = ((3, 2), "auto")
# Maximum reply length in tokens. If the end token is suppressed, every reply reaches it.
_MAX_TOKENS = 128
# Share of blocks in which the end token is suppressed.
_SUPPRESSED_ENDS_SHARE = 0.5
# Tokens of the context that are left free after prompt and reply, for the chat template and drafts.
_FREE_TOKENS = 160
_SCHEMAS = Path(__file__).resolve().parents[2] / "models" / "schema_prompts.jsonl"

Line = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """One or a few prompts for a configuration, and the settings of all replies to them."""

    number: int
    temperature: float
    draft_length: int
    branches: tuple[int, ...] | str
    suppresses_ends: bool

    @property
    def drafts(self) -> str:
        return "trees" if self.branches else "chains"

    @classmethod
    def of(cls, configuration: Configuration, number: int) -> Block:
        """Return a block of a configuration. Any six consecutive blocks cover all temperatures and shapes."""
        rng = Random(f"{configuration.name} {number}")
        # Configurations begin with different temperatures.
        first = Random(configuration.name).randrange(len(TEMPERATURES))
        return cls(
            number,
            TEMPERATURES[(number + first) % len(TEMPERATURES)],
            rng.choice(_DRAFT_LENGTHS),
            rng.choice(_TREES) if number % 2 and configuration.has_trees else (),
            rng.random() < _SUPPRESSED_ENDS_SHARE,
        )


def is_wrong(line: Line) -> bool:
    """Return whether a shard has a fault, or rounding although edgespec promised equal bits."""
    return bool(line["faults"] or (line["exact"] and line["rounding"]))


class Shards:
    """The finished shards in a file of JSON lines. A shard is a combination of a model, a method and a block.

    Args:
        path: The file.
        configurations: The models and methods to compare.
        report: Called with one line after each block.
        threads: Number of CPU threads for GGUF models. None lets edgespec choose.
        lengths: Range of prompt lengths in tokens, with one prompt per block. None draws all lengths.
        methods: Compare only these methods, unless empty.
        drafts: Compare only `chains` or `trees`. None compares both.
    """

    def __init__(
        self,
        path: Path,
        configurations: Sequence[Configuration] = CONFIGURATIONS,
        report: Callable[[str], None] = print,
        threads: int | None = 1,
        lengths: Range | None = None,
        methods: Sequence[str] = (),
        drafts: str | None = None,
    ) -> None:
        self._path, self._configurations, self._report = path, configurations, report
        self._threads = threads
        self._lengths = lengths
        self._methods = methods
        self._drafts = drafts
        self._prepared: set[str] = set()
        self.lines = list(read_lines(path))

    @property
    def tokens(self) -> int:
        """Number of tokens compared so far."""
        return sum(line["tokens"] for line in self.lines)

    def drop_wrong(self) -> None:
        """Discard the shards that are wrong, so that they run again."""
        self.lines = [line for line in self.lines if not is_wrong(line)]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in self.lines), "utf-8")

    def run(self, tokens: int, seconds: float = float("inf"), first_round: int = 0) -> None:
        """Run shards until `tokens` tokens have been compared, a shard is wrong, or the time is up.

        `first_round` selects the prompts, so a different number yields different blocks than an earlier run.
        """
        start, before = time.monotonic(), self.tokens
        for round_number in count(first_round):
            for configuration in self._configurations:
                elapsed = time.monotonic() - start
                if self.tokens >= tokens or elapsed >= seconds:
                    return
                if round_number % configuration.interval:
                    continue
                block = Block.of(configuration, round_number // configuration.interval)
                methods = self._missing(configuration, block)
                if not methods:
                    continue
                if self._run_block(configuration, block, methods):
                    return
                speed = (self.tokens - before) / (time.monotonic() - start)
                self._report(f"{self.tokens:,} tokens, {speed:.0f} per second ({configuration.name})")

    def _missing(self, configuration: Configuration, block: Block) -> list[str]:
        if self._drafts not in (None, block.drafts):
            return []
        key = configuration.backend, configuration.model, block.number
        finished = {
            line["method"] for line in self.lines if (line["backend"], line["model"], line["block"]) == key
        }
        methods = configuration.block_methods(block.number, self._methods)
        return [method for method in methods if method not in finished]

    def _run_block(self, configuration: Configuration, block: Block, methods: Sequence[str]) -> bool:
        """Run the missing shards of a block. Return whether one of them is wrong."""
        if configuration.name not in self._prepared:
            configuration.run_prepare(self._report)
            self._prepared.add(configuration.name)
        wrong = False
        for line in _compare(configuration, block, methods, self._threads, self._lengths):
            self._append(line)
            wrong |= is_wrong(line)
            for each in line["divergences"]:
                self._report(f"{each['verdict']}: {describe(line, each)}")
        return wrong

    def _append(self, line: Line) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.lines.append(line)


def describe(line: Line, divergence: dict[str, Any]) -> str:
    """Return one line about a reply that differs."""
    size = divergence["largest_difference"]
    parts = [
        f"{line['backend']}, {line['model']}, {line['method']}, block {line['block']}",
        f"prompt {divergence['prompt']}, temperature {line['temperature']:g}, {line['drafts']}",
        f"draft length {line['draft_length']}, position {divergence['position']}",
        f"token {divergence['other_token']} instead of {divergence['plain_token']}",
        divergence["reason"] or (f"up to {size:.3g} logits" if size is not None else ""),
    ]
    return ", ".join(filter(None, parts))


def _compare(
    configuration: Configuration,
    block: Block,
    methods: Sequence[str],
    threads: int | None,
    lengths: Range | None,
) -> Iterator[Line]:
    """Yield one shard per method. All are compared with the same plain replies, except for `grammar`."""
    options: dict[str, Any] = {"methods": configuration.methods, "draft_branches": block.branches}
    options |= configuration.load_options
    if configuration.has_threads:
        options["threads"] = threads
    with always_draft(), edgespec.load(configuration.target, configuration.draft, **options) as runtime:
        free = [method for method in methods if method != "grammar"]
        limit = min(configuration.max_prompt_tokens, runtime.context_tokens - _MAX_TOKENS - _FREE_TOKENS)
        seed = f"{configuration.name} {block.number}"
        if free:
            if lengths is None:
                prompts = draw_prompts(seed, configuration.prompts, runtime.vocabulary, limit)
            else:
                prompts = draw_prompts(seed, 1, runtime.vocabulary, limit, (lengths,))
            yield from _verified(runtime, configuration, block, free, prompts)
        if len(free) < len(methods):
            prompts = Random(seed).sample(read_prompts(_SCHEMAS), configuration.prompts)
            yield from _verified(runtime, configuration, block, ["grammar"], prompts)


def _verified(
    runtime: edgespec.Runtime,
    configuration: Configuration,
    block: Block,
    methods: Sequence[str],
    prompts: Sequence[Prompt],
) -> Iterator[Line]:
    start, vocabulary = time.monotonic(), runtime.vocabulary
    has_schema = any(prompt.schema for prompt in prompts)
    suppressed = block.suppresses_ends and not has_schema
    ends = [token for token in range(vocabulary.size) if vocabulary.is_end(token)] if suppressed else []
    report = verify(
        runtime,
        prompts,
        methods=methods,
        temperatures=(block.temperature,),
        draft_lengths=(block.draft_length,),
        max_tokens=_MAX_TOKENS,
        seed=block.number,
        idle_seconds=0.1,
        logit_bias=dict.fromkeys(ends, float("-inf")),
    )
    seconds = (time.monotonic() - start) / len(methods)
    lengths = {prompt.name: len(prompt_tokens(runtime, prompt)) for prompt in prompts}
    for method, result in report.methods.items():
        wrong = {divergence.prompt for divergence in result.divergences}
        yield {
            "backend": configuration.backend,
            "model": configuration.model,
            "method": method,
            "block": block.number,
            "temperature": block.temperature,
            "drafts": block.drafts,
            "branches": block.branches,
            "draft_length": block.draft_length,
            "suppresses_ends": suppressed,
            "exact": report.exact,
            "prompt_tokens": lengths,
            "commit": _commit(),
            **asdict(result),
            # The messages of prompts whose replies differ, so that they can be repeated after the documents
            # change.
            "messages": {each.name: _contents(each) for each in prompts if each.name in wrong},
            "seconds": round(seconds, 2),
        }


def _contents(prompt: Prompt) -> list[str]:
    return [str(message.content) for message in prompt.messages]


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder).stdout.strip()


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the finished shards, each once.

    An incomplete line of a killed run is ignored, so its shard is rerun.

    Two runs with different values of `--only` can write to the same file. A shard that both have run counts
    once.
    """
    if not path.exists():
        return
    with path.open("r+", encoding="utf-8") as file:
        text = file.read()
        if text and not text.endswith("\n"):
            file.write("\n")
    seen = set()
    for text_line in text.splitlines():
        with suppress(json.JSONDecodeError):
            line: Line = json.loads(text_line)
            key = line["backend"], line["model"], line["method"], line["block"]
            if key not in seen:
                yield line
            seen.add(key)
