"""An honest client, whose replies must stay the same during the attack."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

_SECONDS = 300
# Seconds to wait when the server is busy, and maximum number of retries.
_RETRY_SECONDS, _RETRIES = 0.2, 1500


class HonestClient:
    """Asks fixed questions over several protocols. Each question contains a unique word.

    Args:
        port: The server's port.
        expected: The replies before the attack, if they are already known.

    Attributes:
        expected: The replies before the attack.
        count: Number of replies during the attack.
        problems: Descriptions of failures and of replies that differed from the expected ones.
    """

    def __init__(self, port: int, expected: Sequence[str] = ()) -> None:
        self.expected = list(expected)
        self.count = 0
        self.problems: list[str] = []
        self._port = port

    async def prepare(self) -> None:
        """Ask each question for its expected reply, and check that asking again gives the same reply."""
        async with self._client() as http:
            replies = [await _reply(http, *each) for each in _QUESTIONS]
            again = [await _reply(http, *each) for each in _QUESTIONS]
        self.expected = self.expected or replies
        self.problems += _differences(self.expected, replies) + _differences(self.expected, again)

    async def run(self, stop: asyncio.Event) -> None:
        """Ask the questions repeatedly until `stop` is set."""
        async with self._client() as http:
            while not stop.is_set():
                try:
                    replies = [await _reply(http, *each) for each in _QUESTIONS]
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.problems.append(f"honest client: {type(error).__name__} {error}")
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                self.count += len(replies)
                self.problems += _differences(self.expected, replies)
                await asyncio.sleep(0.1)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", timeout=_SECONDS)


def _messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


# Path and body of each question, and the keys that lead to the text in the reply.
_QUESTIONS: tuple[tuple[str, dict[str, Any], tuple[Any, ...]], ...] = (
    (
        "/v1/chat/completions",
        {"messages": _messages("How do I list files by size? honestone"), "max_tokens": 24},
        ("choices", 0, "message", "content"),
    ),
    (
        "/v1/completions",
        {"prompt": "honesttwo To list files by size, run", "max_tokens": 24},
        ("choices", 0, "text"),
    ),
    (
        "/v1/messages",
        {
            "messages": _messages("How do I find honestthree?"),
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": 7,
        },
        ("content", 0, "text"),
    ),
    (
        "/api/chat",
        {
            "messages": _messages("How do I list files by size? honestfour"),
            "stream": False,
            "format": {"type": "object", "properties": {"command": {"type": "string", "maxLength": 40}}},
        },
        ("message", "content"),
    ),
    ("/v1/messages/count_tokens", {"messages": _messages("Count honestfive.")}, ("input_tokens",)),
)


async def _reply(http: httpx.AsyncClient, path: str, body: dict[str, Any], place: tuple[Any, ...]) -> str:
    for _ in range(_RETRIES):
        response = await http.post(path, json=body)
        if response.status_code not in (429, 503):
            value = response.raise_for_status().json()
            for key in place:
                value = value[key]
            return str(value)
        await asyncio.sleep(_RETRY_SECONDS)
    raise ValueError(f"the server stayed busy for {path}")


def _differences(expected: Sequence[str], replies: Sequence[str]) -> list[str]:
    return [
        f"honest client: {reply!r} instead of {right!r}"
        for right, reply in zip(expected, replies, strict=True)
        if right != reply
    ]
