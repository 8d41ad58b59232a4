"""Load the models that requests name, and unload them, within one memory budget."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgespec
from edgespec import MemoryPlan, RequestQueue, Runtime
from edgespec.catalog import ModelInfo, Resolved, find_installed, resolve
from edgespec.catalog.catalogue import user_aliases
from edgespec.catalog.reference_parsing import PathReference, parse_reference
from edgespec.errors import BusyError, ClosedError, EdgespecError, ModelNotFoundError, WorkerLostError
from edgespec.files import format_bytes
from edgespec.options import LOAD_OPTIONS
from edgespec.server.settings import ServerSettings

__all__ = ["KnownModel", "LoadedModel", "ModelPool", "without_latest"]

# Seconds between checks for models that were not used for `idle_unload_seconds`.
_IDLE_CHECK_SECONDS = 1.0
# Options that name files of one model. They apply to the target that the user chose, not to other models.
_SINGLE_MODEL_OPTIONS = {name for name, option in LOAD_OPTIONS.items() if option.per_run} | {"head"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that requests can name.

    Attributes:
        name: The name.
        format: Name of its file format, or an empty string if unknown.
        created: Modification time of the model's file (Unix time in seconds), or 0 if unknown.
        info: The metadata in the model's files, or None if they could not be read.
        loaded: The loaded model, or None if it is not loaded.
    """

    name: str
    format: str
    created: int
    info: ModelInfo | None
    loaded: LoadedModel | None


def without_latest(name: str) -> str:
    """Return a model name without the tag `:latest`, which many of Ollama's clients add."""
    return name.removesuffix(":latest")


class LoadedModel:
    """A loaded model and the queue of its requests.

    Attributes:
        name: The name used in the first request for the model.
        runtime: The loaded model. Only the queue's threads may generate with it.
        queue: Runs the model's requests.
    """

    def __init__(self, name: str, runtime: Runtime, max_waiting: int) -> None:
        self.name = name
        self.runtime = runtime
        self.queue = RequestQueue(runtime, max_waiting=max_waiting)

    @property
    def memory_bytes(self) -> int:
        """Maximum system memory of the model in bytes, excluding Python's own memory."""
        plan = self.runtime.plan
        if plan is None:
            return 0
        python = sum(item.bytes for item in plan.items if item.kind == "process")
        return plan.planned_bytes("memory") - python + plan.prefix_cache_bytes

    def close(self) -> None:
        """Cancel all replies and free the model."""
        self.queue.close()
        self.runtime.close()


class _Entry:
    """The pool's record of a model, from the first request for the model until it is chosen for unloading.

    Attributes:
        users: Number of requests that wait for the model or use it.
        unused: Set while there are no users.
        ready: The task that loads the model.
        last_used: Time of the last use in seconds (`time.monotonic`).
    """

    def __init__(self) -> None:
        self.users = 0
        self.unused = asyncio.Event()
        self.ready: asyncio.Task[LoadedModel]
        self.last_used = time.monotonic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request as a user until the end of the `with` block."""
        self.users += 1
        self.unused.clear()
        try:
            yield
        finally:
            self.users -= 1
            self.last_used = time.monotonic()
            if not self.users:
                self.unused.set()

    @property
    def loaded(self) -> LoadedModel | None:
        """The model, or None if it is still loading or could not be loaded."""
        if not self.ready.done() or self.ready.cancelled() or self.ready.exception():
            return None
        return self.ready.result()


class ModelPool:
    """Lends loaded models to requests. Used in the server's event loop only.

    - Models are loaded and unloaded one at a time, in the order of the requests for them.
    - A model is loaded beside others if it fits into the rest of the memory budget without reductions, such
      as a shorter context. Otherwise, the models that were not used for the longest time are unloaded first.
    - A model is unloaded only when no request uses it. Requests that arrive during unloading wait until it is
      loaded again, so that a busy model cannot keep others from being loaded.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        # The keys are the files of the models and of their adapters.
        self._entries: dict[tuple[Path, ...], _Entry] = {}
        self._leaving: list[LoadedModel] = []
        # Held while a model is loaded or unloaded. Waiting tasks acquire it in order.
        self._turn = asyncio.Lock()
        # Keeps references to running tasks, which asyncio does not.
        self._unloading: set[asyncio.Task[None]] = set()
        self._budget_bytes = 0
        self._stopping = threading.Event()

    @property
    def loaded(self) -> list[LoadedModel]:
        """The models that are loaded now."""
        return [model for entry in self._entries.values() if (model := entry.loaded)]

    @asynccontextmanager
    async def borrow(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """Lend a model, after loading it if necessary.

        Args:
            name: A reference to a model on this machine, or None for the server's own model.

        Raises:
            BusyError: Too many requests wait for the model.
            ClosedError: The server is stopping.
            EdgespecError: The model cannot be found or loaded.
        """
        name = name or self._settings.target
        files = await asyncio.to_thread(self._find, name)
        if self._stopping.is_set():
            raise ClosedError("the server is stopping", "start it again")
        entry = self._entries.get(files)
        if entry is None:
            entry = self._entries[files] = _Entry()
            entry.ready = asyncio.create_task(self._load(name, files, entry))
            # Retrieve the exception even if no request is waiting, because asyncio would log it otherwise.
            entry.ready.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif entry.loaded is None and entry.users > self._settings.max_waiting:
            raise BusyError(f"{entry.users} requests are already waiting for {name}", "try again later")
        with entry.in_use():
            try:
                # Other requests may wait for the same task, so it continues if this request is cancelled.
                yield await asyncio.shield(entry.ready)
            except WorkerLostError:
                if self._entries.get(files) is entry:
                    # The next request loads the model again.
                    del self._entries[files]
                    self._in_background(self._close_lost(entry))
                raise

    async def known(self) -> list[KnownModel]:
        """Return the models on this machine that requests can name, the server's own first."""
        loaded = {files: model for files, entry in self._entries.items() if (model := entry.loaded)}
        return await asyncio.to_thread(self._known, loaded)

    def _known(self, loaded: Mapping[tuple[Path, ...], LoadedModel]) -> list[KnownModel]:
        installed = {each.reference: each for each in find_installed(include_embedded=True).models}
        known: dict[tuple[Path, ...], KnownModel] = {}
        for name in (self._settings.target, *user_aliases(), *installed):
            try:
                files = installed[name].files if name in installed else self._find(name)
                if name in installed:
                    self._check_name(name)
                created = int(files[0].stat().st_mtime)
            except (EdgespecError, OSError):
                continue
            model = next((each for each in installed.values() if each.path == files[0]), None)
            info, form = (model.info, model.format) if model else (None, "")
            known.setdefault(files, KnownModel(name, form, created, info, loaded.get(files)))
        return list(known.values())

    def _check_name(self, name: str, found: Resolved | None = None) -> None:
        """Raise ModelNotFoundError if requests may not use a model name of this kind.

        Args:
            name: The name.
            found: The model that the name refers to, if known. The model can be a file in the current folder.
        """
        is_path = isinstance(parse_reference(name), PathReference)
        is_file = found is not None and found.source == "path" and name.lower() not in user_aliases()
        if name != self._settings.target and (is_path or is_file):
            # Clients must not be able to open arbitrary files on this machine.
            raise ModelNotFoundError(
                f"{name[:100]} is the path of a file, but requests can only name models that `edgespec models"
                " list` shows",
                "name the model with `edgespec models alias NAME PATH`",
            )

    def _find(self, name: str) -> tuple[Path, ...]:
        """Return the files of a model on this machine, which identify it."""
        self._check_name(name)
        try:
            found = resolve(name, allow_download=name == self._settings.target)
        except ModelNotFoundError as error:
            if (plain := without_latest(name)) != name:
                return self._find(plain)
            if name in error.what:
                raise
            # The error is about the name behind the client's alias, so add the name that the client used.
            raise ModelNotFoundError(f"{name[:100]}: {error.what}", error.next_step) from error
        self._check_name(name, found)
        return found.files

    async def _load(self, name: str, files: tuple[Path, ...], entry: _Entry) -> LoadedModel:
        try:
            async with self._turn:
                if self._stopping.is_set():
                    raise ClosedError("the server is stopping", "start it again")
                options = await self._make_room(self._options_for(name))
                runtime = await asyncio.to_thread(
                    edgespec.load, **options, progress=lambda *_: not self._stopping.is_set()
                )
                if len(self.loaded) == 0 and runtime.plan:
                    self._budget_bytes = runtime.plan.budget.bytes
                _log.info("loaded %s%s", runtime.target.name, _memory_note(runtime.plan))
                if runtime.target.notice:
                    _log.info("%s: %s", runtime.target.name, runtime.target.notice)
                return LoadedModel(name, runtime, self._settings.max_waiting)
        except BaseException:
            if self._entries.get(files) is entry:
                del self._entries[files]
            raise

    def _options_for(self, name: str) -> dict[str, Any]:
        # Any request may use the `auto` method, which needs measured costs.
        options = {"target": name, **self._settings.load_options, "methods": ("auto",)}
        if name == self._settings.target:
            return {**options, "draft": self._settings.draft}
        own = {key: value for key, value in options.items() if key not in _SINGLE_MODEL_OPTIONS}
        return {**own, "draft": "none" if self._settings.draft in (None, "none") else "auto"}

    async def _make_room(self, options: dict[str, Any]) -> dict[str, Any]:
        """Unload models until the next one fits. Return its load options, with a memory limit.

        The limit is not set if no other model is loaded. The server's own budget then applies.
        """
        while others := self.loaded:
            room = self._budget_bytes - sum(model.memory_bytes for model in others)
            beside = {**options, "memory": room}
            has_cards = any(model.runtime.plan and len(model.runtime.plan.pools) > 1 for model in others)
            # A plan that uses a GPU cannot be limited to part of the GPU's memory.
            if not has_cards and room > 0 and await asyncio.to_thread(_fits, beside):
                return beside
            await self._unload(min(self._entries, key=self._last_used))
        return options

    def _last_used(self, files: tuple[Path, ...]) -> tuple[bool, bool, float]:
        """Sort key for unloading: models without users first, then the least recently used."""
        entry = self._entries[files]
        return (entry.loaded is None, entry.users > 0, entry.last_used)

    async def _unload(self, files: tuple[Path, ...]) -> None:
        """Unload a model after its last request. The caller must hold `_turn`."""
        await self._close_unused(self._entries.pop(files))

    async def _close_lost(self, entry: _Entry) -> None:
        async with self._turn:
            await self._close_unused(entry)

    async def _close_unused(self, entry: _Entry) -> None:
        model = await entry.ready
        self._leaving.append(model)
        await entry.unused.wait()
        await asyncio.to_thread(model.close)
        self._leaving.remove(model)
        _log.info("unloaded %s", model.name)

    async def unload(self, name: str | None) -> None:
        """Unload a model after its last request. Has no effect if it is not loaded.

        The model is also unloaded if the caller is cancelled.

        Args:
            name: A reference to a model on this machine, or None for the server's own model.

        Raises:
            ModelNotFoundError: There is no such model.
        """
        files = await asyncio.to_thread(self._find, name or self._settings.target)
        await asyncio.shield(self._in_background(self._unload_if_loaded(files)))

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)
        return task

    async def _unload_if_loaded(self, files: tuple[Path, ...]) -> None:
        async with self._turn:
            entry = self._entries.get(files)
            if entry and entry.loaded:
                await self._unload(files)

    async def unload_idle(self) -> None:
        """Unload models that have not been used for a while. Runs until it is cancelled."""
        limit_seconds = self._settings.idle_unload_seconds
        while limit_seconds:
            await asyncio.sleep(min(_IDLE_CHECK_SECONDS, limit_seconds))
            async with self._turn:
                idle_since = time.monotonic() - limit_seconds
                for files, entry in list(self._entries.items()):
                    if entry.loaded and not entry.users and entry.last_used < idle_since:
                        await self._unload(files)

    async def close(self) -> None:
        """Cancel loading and all replies, and free all models."""
        self._stopping.set()
        # Close the queues first. This ends their replies, which a model that is being loaded may be waiting
        # for.
        for model in [*self.loaded, *self._leaving]:
            await asyncio.to_thread(model.queue.close)
        async with self._turn:
            for model in self.loaded:
                await asyncio.to_thread(model.close)
            self._entries.clear()


def _memory_note(plan: MemoryPlan | None) -> str:
    """Return text for the log about a loaded model's memory. Empty if its memory was not planned."""
    if plan is None:
        return ""
    note = f": uses up to {format_bytes(plan.total_bytes)} of memory"
    if plan.prefix_cache_bytes:
        note += (
            f", plus up to {format_bytes(plan.prefix_cache_bytes)} for the cache of earlier chats"
            " (--prefix-cache-memory)"
        )
    return note


def _fits(options: dict[str, Any]) -> bool:
    """Return whether a model can be loaded with these options without reductions."""
    try:
        plan = edgespec.plan(**options).plan
    except EdgespecError:
        return False
    return plan.fits and not plan.decisions
