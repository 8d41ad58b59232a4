"""Fuzz the prompts, messages and options that are passed to a loaded model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import edgespec
from edgespec.options.settings import REPLY_OPTIONS
from scripts.fuzzing.mutations import damage_json, nasty_text, nasty_value
from scripts.fuzzing.worker import Files


def make(rng: Random) -> Files:
    """Return a prompt, messages, tokens and a few options."""
    roles = [rng.choice(("user", "assistant", "system")) for _ in range(rng.randrange(4))]
    value: Any = {
        "way": rng.choice(("prompt", "messages", "tokens")),
        "prompt": nasty_text(rng),
        "messages": [{"role": role, "content": nasty_text(rng)} for role in [*roles, "user"]],
        "tokens": [rng.randrange(8192) for _ in range(rng.choice((0, 1, 30, 500)))],
        "stop_after": rng.choice((0, 1, 9)),
    }
    if rng.random() < 0.2:
        value = damage_json(rng, value)
    options: dict[str, Any] = {}
    for _ in range(rng.choice((0, 0, 1, 2))):
        options[rng.choice(sorted(REPLY_OPTIONS))] = nasty_value(rng)
    if rng.random() < 0.9:
        options["max_tokens"] = rng.randrange(4)
    return {"input.json": json.dumps({"value": value, "options": options}).encode()}


@cache
def _runtime() -> edgespec.Runtime:
    return edgespec.load("demo", "demo-draft", context=512, threads=1, prefix_cache="none", method="model")


def run(folder: Path) -> None:
    """Generate a short reply, and abandon it early or read it to the end."""
    given = json.loads((folder / "input.json").read_bytes())
    options, runtime = given["options"], _runtime()
    value: Any = given["value"] if isinstance(given["value"], dict) else {"prompt": given["value"]}
    prompt, messages, tokens = (value.get(name) for name in ("prompt", "messages", "tokens"))
    if value.get("way") == "tokens":
        stream = runtime.stream_tokens(tokens, **options)
    elif value.get("way") == "messages":
        stream = runtime.stream_messages(messages, **options)
    else:
        stream = runtime.stream(prompt, **options)
    for number, _ in enumerate(stream):
        if number == value.get("stop_after"):
            break
    stream.close()
