"""Fuzz the user's alias file: TOML with aliases and pairs of models."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from random import Random

from edgespec.errors import EdgespecError
from edgespec.store.aliases import check_alias, check_pair
from edgespec.store.catalogue import load_catalogue, user_aliases, user_pairs
from edgespec.store.reference import resolve
from scripts.fuzzing.mutations import damage, nasty_text, several
from scripts.fuzzing.worker import Files

_REFERENCES = (
    "demo",
    "a/b",
    "hf:a/b:Q4_K_M",
    "ollama:a:b",
    "lmstudio:a/b",
    "8b-q4",
    "./x.gguf",
    "a",
    "b",
    "name:tag",
    "/",
)


def make(rng: Random) -> Files:
    """Return an alias file with chains, cycles, unusual names and damage."""
    lines: list[str] = []
    for table in rng.choice((["aliases"], ["pairs"], ["aliases", "pairs"], ["aliases", "aliases"])):
        lines.append(f"[{table}]")
        for _ in range(rng.randrange(6)):
            name, value = (
                rng.choice(_REFERENCES) if rng.random() < 0.7 else nasty_text(rng) for _ in range(2)
            )
            lines.append(f"{json.dumps(name)} = {json.dumps(value) if rng.random() < 0.9 else '[{}]'}")
    if rng.random() < 0.05:
        lines.append("a = " + "[" * rng.choice((100, 1_000, 10_000)))
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return {"aliases.toml": several(rng, text, damage) if rng.random() < 0.4 else text}


def run(folder: Path) -> None:
    """Read the file, and resolve every name and reference in it without downloading."""
    os.environ["EDGESPEC_CONFIG_DIR"] = str(folder)
    catalogue = load_catalogue()
    aliases, pairs = user_aliases(), user_pairs()
    problems: list[EdgespecError] = []
    for name, value in [*aliases.items(), *pairs.items()]:
        catalogue.find(name)
        catalogue.nearest(name[:100])
        for check in (check_alias, check_pair):
            with suppress(EdgespecError):
                check(name, value)
        for reference in (name, value):
            try:
                resolve(reference, allow_download=False)
            except EdgespecError as error:
                problems.append(error)
    for problem in problems:
        raise problem
