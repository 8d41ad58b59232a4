"""Random changes to bytes, JSON values and texts, with which all subjects create their inputs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

NASTY_INTEGERS = (
    *(0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**63 - 1, 2**63, 2**64 - 1, 10**30, -(2**31), -(2**63)),
)

_TEXTS = (
    "",
    " ",
    "\0",
    "a" * 5000,
    "../../etc/passwd",
    "/",
    "~",
    "%s%n",
    "\x1b[2J\x1b]0;title\x07",
    "\ud800",
    "\udfff\ud800",
    "\u202eevil\u202c",
    "e\u0301" * 50,
    "\u200d\ufe0f",
    "👩‍👩‍👧‍👦",
    "\U0010ffff",
    "\ufeff",
    "\r\n\x85\u2028",
    "İıſß",
    "𝕬" * 9,
    "<|im_start|>system",
    "<|im_end|>",
    "</s>",
    "<think>",
    "</think>",
    "<s>",
    "<|endoftext|>",
    "{{ 7 * 7 }}",
    "{% raw",
    "nan",
    "inf",
    "1e999",
    "true",
    "null",
    "2038-01-19T03:14:08Z",
    "9999-12-31T23:59:59+23:59",
    "0001-01-01",
    "{",
    "[[",
)


def several(rng: Random, value: Any, change: Callable[[Random, Any], Any]) -> Any:
    """Apply a change once or a few times, mostly once."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        value = change(rng, value)
    return value


def nasty_text(rng: Random) -> str:
    """Return a text that programs often handle wrongly, or random characters."""
    if rng.random() < 0.7:
        return rng.choice(_TEXTS) * rng.choice((1, 1, 1, 2, 40))
    return "".join(
        chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(rng.randrange(40))
    )


def nasty_value(rng: Random) -> Any:
    """Return a JSON value of a random type."""
    kind = rng.randrange(8)
    if kind < 2:
        return rng.choice(NASTY_INTEGERS)
    if kind < 4:
        return nasty_text(rng)
    if kind == 4:
        return rng.choice((0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf")))
    return rng.choice((None, True, False, [], {}, [None], [[]], {"": None}, [1, "a"]))


def damage(rng: Random, data: bytes, where: tuple[int, int] | None = None) -> bytes:
    """Flip, overwrite, remove, repeat or cut bytes, within the range `where` if there is one."""
    start, end = where or (0, len(data))
    at = rng.randrange(start, max(start + 1, end))
    size = rng.choice((1, 1, 2, 4, 8, 64, 1024))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[:at] + data[at : at + size] * 2 + data[at + size :]
    if kind == 3:
        return data[:at] + rng.randbytes(size) + data[at:]
    if kind == 4:
        width = rng.choice((1, 2, 4, 8))
        number: int = rng.choice(NASTY_INTEGERS) % 256**width
        return data[:at] + number.to_bytes(width, "little") + data[at + width :]
    if kind == 5:
        return data[:at] + bytes(size) + data[at + size :]
    flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 1])
    return data[:at] + flipped + data[at + 1 :]


def damage_json(rng: Random, value: Any) -> Any:
    """Return a copy with one value replaced, removed or repeated, or with one name changed."""
    whole = {"": copy.deepcopy(value)}
    parent: Any = whole
    key: Any = ""
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.75:
        parent = parent[key]
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
    kind = rng.randrange(6)
    if kind < 3 or parent is whole:
        parent[key] = nasty_value(rng)
    elif kind == 3:
        del parent[key]
    elif kind == 4 and isinstance(parent, dict):
        parent[nasty_text(rng)] = parent.pop(key)
    elif isinstance(parent, list):
        parent.extend([parent[key]] * rng.choice((1, 3, 300)))
    else:
        parent[key] = [parent[key]]
    return whole[""]


def nested_json(rng: Random, value: Any) -> bytes:
    """Return JSON text, sometimes with a value that is nested deeply or written with thousands of digits."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    if rng.random() < 0.05:
        depth = rng.choice((10, 500, 1_000, 5_000, 100_000))
        inner = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth))
        at = rng.choice([i for i, letter in enumerate(text) if letter in ":[,"] or [0]) + 1
        text = text[:at] + inner + rng.choice(("", ",")) + text[at:]
    return text.encode("utf-8", "surrogatepass")
