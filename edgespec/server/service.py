"""The state shared by all request handlers: settings, models, metrics and items of recent responses."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from edgespec import Embedding
from edgespec.server.generation import ChatPrompt, Generation, GenerationRequest
from edgespec.server.metrics import Metrics
from edgespec.server.models import ModelPool
from edgespec.server.settings import ServerSettings

__all__ = ["Service", "StoredItems"]

# Maximum total size of all stored items in bytes, enough for about 400 replies of the default maximum length.
_MAX_STORED_BYTES = 16 * 2**20


class Service:
    """The server's state. Use only in the event loop.

    Attributes:
        settings: The server's settings.
        models: The loaded models.
        metrics: Counts requests and replies.
        stored_items: Items of recent responses that later requests can refer to.
        buffered_bytes: Total size of the request bodies currently being received.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.models = ModelPool(settings)
        self.metrics = Metrics()
        self.stored_items = StoredItems()
        self.buffered_bytes = 0

    @asynccontextmanager
    async def generate(
        self, model: str | None, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[Generation]:
        """Load a model if necessary and queue replies. Cancels unfinished replies on exit.

        Args:
            model: Reference to the model, or None for the server's own model.
            requests: The replies to generate. Their options override those in the settings.

        Raises:
            BusyError: Too many requests are waiting.
            EdgespecError: The model cannot be loaded, or an option is invalid.
        """
        defaults = self.settings.reply_options
        requests = [replace(each, options={**defaults, **each.options}) for each in requests]
        found = await self.models.find(model)
        async with self.models.borrow(found) as loaded:
            generation = Generation(loaded, requests, self.metrics.count_reply, found.name)
            try:
                await generation.start()
                yield generation
            finally:
                generation.cancel()

    async def embed(
        self,
        model: str | None,
        texts: Sequence[str | Sequence[int]],
        *,
        truncate: bool = False,
        dimensions: int | None = None,
    ) -> tuple[str, list[Embedding]]:
        """Load a model if necessary and embed texts. Stops if the caller is cancelled.

        Args:
            model: Reference to the model, or None for the server's own model.
            texts: The texts, each as a string or as token ids.
            truncate: Whether to drop the end of texts that do not fit in the context.
            dimensions: Number of dimensions to keep, or None for all.

        Returns:
            The model's name, and the embedding of each text.

        Raises:
            BusyError: Too many requests are waiting.
            EdgespecError: The model cannot be loaded or cannot embed texts, or a text is invalid.
        """
        found = await self.models.find(model)
        async with self.models.borrow(found) as loaded:
            queued = loaded.queue.embed(texts, truncate=truncate)
            try:
                embeddings = await asyncio.wrap_future(queued.future)
            finally:
                queued.cancel()
        if dimensions:
            embeddings = [each.shortened(dimensions) for each in embeddings]
        return found.name, embeddings

    async def count_tokens(self, model: str | None, prompt: ChatPrompt, thinking: str | None = None) -> int:
        """Load a model if necessary and return the number of tokens in a prompt.

        A partial reply is counted as a message, which adds a few tokens.

        Args:
            model: Reference to the model, or None for the server's own model.
            prompt: The prompt.
            thinking: The reply option `thinking`. Defaults to the value in the settings.

        Raises:
            EdgespecError: The model cannot be loaded, or the prompt is invalid.
        """
        begun = [{"role": "assistant", "content": prompt.reply_start}] if prompt.reply_start else []
        async with self.models.borrow(model) as loaded:
            count = partial(
                loaded.runtime.count_tokens,
                [*prompt.messages, *begun],
                tools=prompt.tools,
                tool_choice=prompt.tool_choice,
                thinking=thinking or self.settings.reply_options.get("thinking", "auto"),
            )
            counting = asyncio.ensure_future(asyncio.to_thread(count))
            try:
                return await asyncio.shield(counting)
            finally:
                # Wait for the thread even if the client disconnects, because the thread is still using the
                # model.
                await asyncio.wait({counting})


class StoredItems:
    """Items of recent responses, as JSON, keyed by id. Use only in the event loop.

    The oldest items are removed when the total size exceeds `max_bytes`. Any client that knows an item's id
    can use it, so ids must be unguessable.

    Args:
        max_bytes: Maximum total size of the items in bytes.
    """

    def __init__(self, max_bytes: int = _MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._size_bytes = 0

    def add(self, item: Mapping[str, Any]) -> None:
        """Store an item, which must have a unique `id`."""
        data = json.dumps(item, ensure_ascii=False).encode("utf-8", "replace")
        self._items[item["id"]] = data
        self._size_bytes += len(data)
        while self._size_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._size_bytes -= len(oldest)

    def get(self, item_id: str) -> bytes | None:
        """Return an item as JSON, or None if there is none with this id."""
        return self._items.get(item_id)
