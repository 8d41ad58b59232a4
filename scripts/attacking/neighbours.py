"""Clients whose replies share forward passes with those of hostile clients, and must be the same as alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx

# Largest difference between the scores of two tokens that counts as a near-tie. Sharing a pass changes each
# score of the demo model by at most about 0.1 (see docs/exactness.md).
_NEAR_TIE = 0.2
_CLIENTS, _SECONDS, _RETRY_SECONDS = 3, 300, 0.2
_SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["command"],
}
_PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 12}},
    "required": ["path"],
}
_TOOL = {"type": "function", "function": {"name": "run", "description": "Run it", "parameters": _PARAMETERS}}
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"schema": _SCHEMA},
    {"tools": [_TOOL], "tool_choice": "required"},
    {"regex": "[a-z ]{5,30}"},
)
_METHODS: tuple[dict[str, Any], ...] = (
    *({}, {"method": "none"}, {"method": "suffix"}, {"method": "ngram"}),
    *({"method": "model", "draft_length": length} for length in (1, 3, 8)),
)
_WORDS = ("list", "find", "count", "copy", "sort", "files", "users", "lines", "disks", "ports", "logs")

Tokens = list[tuple[str, float]]


@dataclass(frozen=True)
class _Asked:
    body: dict[str, Any]
    tokens: Tokens


class Neighbours:
    """Sends requests with unique prompts during an attack, and repeats each of them afterwards.

    Args:
        port: The server's port.
        draw: The random number generator.
    """

    def __init__(self, port: int, draw: random.Random) -> None:
        self._draw = draw
        self._asked: list[_Asked] = []
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_SECONDS)

    async def run(self, stop: asyncio.Event) -> None:
        """Send requests until `stop` is set."""
        await asyncio.gather(*(self._client(stop) for _ in range(_CLIENTS)))

    async def compare(self) -> tuple[int, list[str], list[str]]:
        """Repeat all requests one after the other.

        Returns:
            The number of compared replies, and descriptions of the near-ties and of all other differences.
        """
        near_ties, problems = [], []
        for asked in self._asked:
            alone = await self._tokens(asked.body)
            found = difference(alone, asked.tokens)
            if found > _NEAR_TIE:
                problems.append(f"neighbour: {asked.body} gave {asked.tokens}, alone {alone}")
            elif found:
                first, other = next(
                    pair for pair in zip(alone, asked.tokens, strict=False) if pair[0][0] != pair[1][0]
                )
                near_ties.append(
                    f"{asked.body} gave {other[0]!r} ({other[1]:.4f}), alone {first[0]!r} ({first[1]:.4f})"
                )
        await self._http.aclose()
        return len(self._asked), near_ties, problems

    async def _client(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            words = " ".join(self._draw.choices(_WORDS, k=4))
            body = {
                "messages": [{"role": "user", "content": f"How do I {words} {self._draw.getrandbits(32)}?"}],
                "max_tokens": self._draw.choice((8, 24, 40)),
                "logprobs": True,
                **self._draw.choice(_VARIANTS),
                **self._draw.choice(_METHODS),
            }
            self._asked.append(_Asked(body, await self._tokens(body)))

    async def _tokens(self, body: dict[str, Any]) -> Tokens:
        while True:
            response = await self._http.post("/v1/chat/completions", json=body)
            if response.status_code not in (429, 503):
                break
            await asyncio.sleep(_RETRY_SECONDS)
        content = response.raise_for_status().json()["choices"][0]["logprobs"]["content"]
        return [(each["token"], each["logprob"]) for each in content]


def difference(alone: Tokens, shared: Tokens) -> float:
    """Return the difference between the scores of the first two tokens that differ, or 0 if none do."""
    for (token, score), (other, other_score) in zip(alone, shared, strict=False):
        if token != other:
            return max(abs(score - other_score), 1e-9)
    return 0.0 if len(alone) == len(shared) else float("inf")
