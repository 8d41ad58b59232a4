"""Load and unload the models named in requests, within a single memory budget."""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import edgespec
from edgespec import MemoryPlan, RequestQueue, Runtime
from edgespec.api.sharing.base import Identity
from edgespec.errors import (
    BusyError,
    ClosedError,
    EdgespecError,
    ModelFileError,
    ModelNotFoundError,
    NotDownloadedError,
    WorkerLostError,
)
from edgespec.model.model_facts import ModelInfo
from edgespec.options.settings import LOAD_OPTIONS
from edgespec.server.settings import ServerSettings
from edgespec.store.catalogue import load_catalogue, user_aliases
from edgespec.store.download import fetch
from edgespec.store.installed import (
    RecommendedSetting,
    find_installed,
    model_info_or_none,
    recommended_sampling,
)
from edgespec.store.reference import (
    NameReference,
    PathReference,
    Resolved,
    parse_reference,
    resolve_with,
)
from edgespec.system.files import format_bytes

__all__ = ["FoundModel", "KnownModel", "LoadedModel", "ModelPool"]

# Seconds between checks for models that have been idle for `idle_unload_seconds`.
_IDLE_CHECK_SECONDS = 1.0
# Options that name files for one particular model, and therefore apply only to the target that the user
# chose.
_SINGLE_MODEL_OPTIONS = {name for name, option in LOAD_OPTIONS.items() if option.per_run} | {"head"}

_log = logging.getLogger(__name__)


# Cache lifetime of the list of model names, in seconds. Listing all models takes up to a second, which is too
# slow for a flood of requests with unknown names.
_NAMES_SECONDS = 5.0
# Maximum number of model names in an error message.
_MAX_SHOWN_NAMES = 10
_WRITTEN_AS_PATH = re.compile(r"[/\\]|^~|\.gguf$", re.IGNORECASE)
# Prefixes and suffixes that clients add to a model's name. Many Ollama clients append the tag, and gateways
# such as LiteLLM prepend the name of the server's API.
_ADDED = re.compile(
    r"^(?:openai|ollama|ollama_chat|anthropic|hosted_vllm|lm_studio|litellm_proxy|custom_openai)/|:latest$",
    re.IGNORECASE,
)
# Minimum `difflib` similarity at which an unknown name counts as a misspelt model name.
_MISSPELT_SIMILARITY = 0.7


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The model on this machine that a request's model name refers to.

    Attributes:
        name: The name to report in the reply: the one in the request, or that of the server's own model if
            the request names no model on this machine.
        reference: The reference for loading the model.
        resolved: The model's files.
    """

    name: str
    reference: str
    resolved: Resolved


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that requests can name.

    Attributes:
        name: The name.
        format: Name of its file format.
        created: Modification time of the model's file (Unix time in seconds).
        info: The metadata in the model's files, or None if they could not be read.
        loaded: The loaded model, or None if it is not loaded.
        recommended: The sampling settings that the model's makers recommend.
    """

    name: str
    format: str
    created: int
    info: ModelInfo | None
    loaded: LoadedModel | None
    recommended: Mapping[str, RecommendedSetting] = field(default_factory=dict)


class LoadedModel:
    """A loaded model and its request queue.

    Attributes:
        name: The name reported for the model in its first reply.
        runtime: The loaded model. Only the queue's threads may generate with it.
        queue: Runs the model's requests.
    """

    def __init__(self, name: str, runtime: Runtime, max_waiting: int) -> None:
        self.name = name
        self.runtime = runtime
        self.queue = RequestQueue(runtime, max_waiting=max_waiting)

    @property
    def memory_bytes(self) -> int:
        """Maximum system memory that the model uses, in bytes, excluding Python's own memory."""
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
    """The pool's record of a model, from the first request for it until it is selected for unloading.

    Attributes:
        found: The model.
        identity: What the model was loaded from. Set when loading begins.
        users: Number of requests that are waiting for the model or using it.
        unused: Set while there are no users.
        ready: The task that loads the model.
        last_used: Time of the last use in seconds (`time.monotonic`).
    """

    def __init__(self, found: FoundModel) -> None:
        self.found = found
        self.identity: Identity | None = None
        self.users = 0
        self.unused = asyncio.Event()
        self.ready: asyncio.Task[LoadedModel]
        self.last_used = time.monotonic()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request as a user for the duration of the `with` block."""
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
    """Lends loaded models to requests. Use only in the server's event loop.

    - Models are loaded and unloaded one at a time, in the order in which they are requested.
    - A model is loaded alongside others if it fits into the remaining memory budget without reductions, such
      as a shorter context. Otherwise, the least recently used models are unloaded first.
    - A model is unloaded only when no request is using it. Requests that arrive during unloading wait until
      it is loaded again, so that a busy model cannot keep others from being loaded.

    Attributes:
        own_name: The name of the server's own model in replies and lists.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._target = settings.model
        self.own_name = _name_of(self._target)
        path = Path(self._target).expanduser().absolute()
        # All model names, keyed by lower-case name, and the time at which they were read (`time.monotonic`).
        self._names, self._names_seconds = dict[str, str](), -math.inf
        # Clients may also use the path that the user passed, or the file name shown in the log, without its
        # suffix.
        self._path_names = (path.stem, str(path)) if _is_path(self._target) else ()
        # The loaded or loading models, keyed by the files of the model and its adapters.
        self._entries: dict[tuple[Path, ...], _Entry] = {}
        self._leaving: list[LoadedModel] = []
        # Held while a model is loaded or unloaded. Waiting tasks acquire it in FIFO order.
        self._turn = asyncio.Lock()
        # Keeps references to running tasks, because asyncio holds only weak ones.
        self._unloading: set[asyncio.Task[None]] = set()
        self._budget_bytes = 0
        # Whether the server's own model has been loaded. Until then, it may be downloaded.
        self._has_loaded_own = False
        self._stopping = threading.Event()
        # Copies packaged models, because requests that wait for a copy could occupy all threads of asyncio.
        self._copier = ThreadPoolExecutor(1, "edgespec-copy")

    @property
    def loaded(self) -> list[LoadedModel]:
        """The currently loaded models."""
        return [model for entry in self._entries.values() if (model := entry.loaded)]

    @asynccontextmanager
    async def borrow(self, wanted: FoundModel | str | None) -> AsyncIterator[LoadedModel]:
        """Lend a model, loading it first if necessary.

        Args:
            wanted: The result of `find`, a model name, or None for the server's own model.

        Raises:
            BusyError: Too many requests are waiting for the model.
            ClosedError: The server is stopping.
            EdgespecError: The model cannot be found or loaded.
        """
        found = wanted if isinstance(wanted, FoundModel) else await self.find(wanted)
        name, files = found.name, found.resolved.files
        if self._stopping.is_set():
            raise ClosedError("the server is stopping", "start it again")
        entry = self._entries.get(files)
        if entry is None:
            entry = self._entries[files] = _Entry(found)
            entry.ready = asyncio.create_task(self._load(found, entry))
            # Retrieve the exception even if no request is waiting. Otherwise, asyncio would log it.
            entry.ready.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif entry.loaded is None and entry.users > self._settings.max_waiting:
            raise BusyError(
                f"{entry.users} requests are already waiting for {name}", "try again later", code="queue_full"
            )
        with entry.in_use():
            try:
                # Shield the task, because other requests may be waiting for it.
                yield await asyncio.shield(entry.ready)
            except WorkerLostError:
                if self._entries.get(files) is entry:
                    # The next request loads the model again.
                    del self._entries[files]
                    self._in_background(self._close_lost(entry))
                raise

    async def find(self, name: str | None, *, prepare: bool = True) -> FoundModel:
        """Return the model to load for a request that names it, or the server's own model if `name` is None.

        The server's own model is downloaded if it is missing and has not been loaded yet.

        Args:
            name: The model's name.
            prepare: Whether to make the default copy of a packaged model. Only needed to load the model.

        Raises:
            CancelledError: The server was stopped during the download.
            ModelNotFoundError: There is no such model on this machine. The message lists the models.
        """
        found = await asyncio.to_thread(self._find, name, download=not self._has_loaded_own)
        entry = found.resolved.entry
        if prepare and entry and entry.package:
            find = partial(self._find, name, prepare=True)
            found = await asyncio.get_running_loop().run_in_executor(self._copier, find)
        return found

    def find_shared(self, wanted: Identity) -> FoundModel | None:
        """Return the model that a chat on this machine can share, or None. Can be called from any thread.

        The server's own model is shared even if it must be loaded again.
        """
        entries = list(self._entries.values())
        for entry in entries:
            draft = entry.loaded.runtime.draft if entry.loaded else None
            if entry.identity is not None and entry.identity.fits(wanted, draft.path if draft else "none"):
                return entry.found
        own = self._found(self.own_name, prepare=True)
        if any(entry.found.resolved.files == own.resolved.files for entry in entries):
            return None
        identity = Identity.of(self._options_for(own))
        return own if identity is not None and identity.fits(wanted, "none") else None

    async def known(self) -> list[KnownModel]:
        """Return the models on this machine that requests can name, starting with the server's own.

        A model with several names, such as the user's aliases, is listed under each of them.
        """
        return await asyncio.to_thread(self._known, self._loaded_by_files())

    async def describe(self, name: str | None) -> KnownModel:
        """Describe the model that `name` refers to. Raises ModelNotFoundError like `find`."""
        found = await asyncio.to_thread(self._find, name)
        return await asyncio.to_thread(_described, found.name, found.resolved, self._loaded_by_files())

    def _loaded_by_files(self) -> dict[tuple[Path, ...], LoadedModel]:
        return {files: model for files, entry in self._entries.items() if (model := entry.loaded)}

    def _known(self, loaded: Mapping[tuple[Path, ...], LoadedModel]) -> list[KnownModel]:
        installed = find_installed(include_embedded=True)
        known: dict[str, KnownModel] = {}
        for name in (self.own_name, *user_aliases()):
            with suppress(EdgespecError, OSError):
                resolved = self._found(name).resolved
                known.setdefault(name.lower(), _described(name, resolved, loaded))
        for each in installed.models:
            # Skip models without a name of their own, which can be used only through an alias.
            with suppress(EdgespecError, OSError):
                if not _is_path(each.reference):
                    created = int(each.path.stat().st_mtime)
                    model = KnownModel(
                        each.reference, each.format, created, each.info, loaded.get(each.files)
                    )
                    known.setdefault(each.reference.lower(), model)
        return list(known.values())

    def _find(self, name: str | None, *, prepare: bool = False, download: bool = False) -> FoundModel:
        found = partial(self._found, prepare=prepare, download=download)
        name = (name or "").strip() or self.own_name
        try:
            return found(name)
        except ModelNotFoundError as error:
            problem = error
        plain = _ADDED.sub("", name)
        if plain != name:
            with suppress(ModelNotFoundError):
                return replace(found(plain), name=name)
        names = self._recent_names()
        near = difflib.get_close_matches(name[:100].lower(), names, 2, _MISSPELT_SIMILARITY)
        others = [names[each] for each in near if each != self.own_name.lower()]
        unknown = _is_unknown(name)
        is_file = isinstance(problem, _FileNameError) and not (unknown and _is_path(name))
        if name in self._path_names or (self._settings.target and not others and not is_file and unknown):
            return found(self.own_name)
        if is_file:
            raise problem
        raise ModelNotFoundError(_reason(name, problem), _advice(problem, others, list(names.values())))

    def _recent_names(self) -> dict[str, str]:
        """Return all model names, keyed by lower-case name. They may be a few seconds old."""
        now = time.monotonic()
        if now - self._names_seconds > _NAMES_SECONDS:
            self._names = {each.name.lower(): each.name for each in self._known({})}
            self._names_seconds = now
        return self._names

    def _found(self, name: str, *, prepare: bool = False, download: bool = False) -> FoundModel:
        """Return the model with exactly this name.

        Args:
            name: The name.
            prepare: Whether to make the default copy of a packaged model. Do so before loading it. Otherwise,
                `load` would make the copy, and the next request would find and load the copy as another
                model.
            download: Whether to download the server's own model if it is missing.

        Raises:
            ModelNotFoundError: There is no such model.
        """

        def should_continue(_description: str, _fraction: float) -> bool:
            return not self._stopping.is_set()

        if name in (self.own_name, self._target):
            fetch_own = partial(fetch, allow_download=download, progress=should_continue)
            resolved = resolve_with(self._target, fetch_own, should_continue, prepare=prepare)
            return FoundModel(self.own_name, self._target, resolved)
        if _is_path(name):
            raise _FileNameError(name)
        never_fetch = partial(fetch, allow_download=False)
        resolved = resolve_with(name, never_fetch, should_continue, prepare=prepare)
        if resolved.source == "path" and name.lower() not in user_aliases():
            # The name matches a file in the current folder.
            raise _FileNameError(name)
        return FoundModel(name, name, resolved)

    async def _load(self, found: FoundModel, entry: _Entry) -> LoadedModel:
        files = found.resolved.files
        try:
            async with self._turn:
                if self._stopping.is_set():
                    raise ClosedError("the server is stopping", "start it again")
                entry.identity = await asyncio.to_thread(Identity.of, self._options_for(found))
                options = await self._make_room(self._options_for(found))
                runtime = await asyncio.to_thread(
                    edgespec.load, **options, progress=lambda *_: not self._stopping.is_set()
                )
                self._has_loaded_own |= found.reference == self._target
                if len(self.loaded) == 0 and runtime.plan:
                    self._budget_bytes = runtime.plan.budget.bytes
                _log.info("loaded %s%s", runtime.target.name, _memory_note(runtime.plan))
                if runtime.target.notice:
                    _log.info("%s: %s", runtime.target.name, runtime.target.notice)
                return LoadedModel(found.name, runtime, self._settings.max_waiting)
        except BaseException:
            if self._entries.get(files) is entry:
                del self._entries[files]
            raise

    def _options_for(self, found: FoundModel) -> dict[str, Any]:
        # Any request may use the `auto` method, which needs measured costs.
        options = {"target": found.reference, **self._settings.load_options, "methods": ("auto",)}
        if found.reference == self._target:
            return {**options, "draft": self._settings.draft}
        backend = found.resolved.backend
        # Drop options that the user chose for the server's own model, because this model may use another
        # backend.
        dropped = _SINGLE_MODEL_OPTIONS | backend.ignored_options
        if not backend.shares_kv_type:
            dropped |= {"kv_type"}
        own = {key: value for key, value in options.items() if key not in dropped}
        return {**own, "draft": "none" if self._settings.draft in (None, "none") else "auto"}

    async def _make_room(self, options: dict[str, Any]) -> dict[str, Any]:
        """Unload models until the next one fits. Return its load options, including a memory limit.

        If no other model is loaded, no limit is set, and the server's own budget applies.
        """
        while others := self.loaded:
            room = self._budget_bytes - sum(model.memory_bytes for model in others)
            beside = {**options, "memory": room}
            has_cards = any(model.runtime.plan and len(model.runtime.plan.pools) > 1 for model in others)
            # Unload the others if any is on a GPU, because a plan cannot be limited to part of a GPU's
            # memory.
            if not has_cards and room > 0 and await asyncio.to_thread(_fits, beside):
                return beside
            await self._unload(min(self._entries, key=self._last_used))
        return options

    def _last_used(self, files: tuple[Path, ...]) -> tuple[bool, bool, float]:
        """Return the sort key for unloading: models without users first, then the least recently used."""
        entry = self._entries[files]
        return (entry.loaded is None, entry.users > 0, entry.last_used)

    async def _unload(self, files: tuple[Path, ...]) -> None:
        """Unload a model once its last request has finished. The caller must hold `_turn`."""
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
        """Unload a model once its last request has finished. Has no effect if it is not loaded.

        The model is also unloaded if the caller is cancelled.

        Args:
            name: A reference to a model on this machine, or None for the server's own model.

        Raises:
            ModelNotFoundError: There is no such model.
        """
        found = await asyncio.to_thread(self._find, name)
        await asyncio.shield(self._in_background(self._unload_if_loaded(found.resolved.files)))

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
        # Close the queues first. This ends the replies that a loading model may be waiting for.
        for model in [*self.loaded, *self._leaving]:
            await asyncio.to_thread(model.queue.close)
        async with self._turn:
            for model in self.loaded:
                await asyncio.to_thread(model.close)
            self._entries.clear()


class _FileNameError(ModelNotFoundError):
    """Raised when a request names a file. Clients must not be able to open arbitrary files."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name[:100]} is the path of a file, but requests can use only models that `edgespec models"
            " list` shows",
            "give the model a name with `edgespec models alias NAME PATH`",
        )


def _name_of(target: str) -> str:
    path = Path(target).expanduser()
    return (path.name or path.resolve().name) if _is_path(target) else target


def _is_path(name: str) -> bool:
    try:
        return isinstance(parse_reference(name), PathReference)
    except ModelNotFoundError:
        return False


def _is_unknown(name: str) -> bool:
    """Return whether a name cannot refer to any model, on this machine or elsewhere."""
    try:
        reference = parse_reference(name)
    except ModelNotFoundError:
        return True
    if not isinstance(reference, NameReference):
        # A name such as `my model` is parsed as a path.
        return isinstance(reference, PathReference) and not _WRITTEN_AS_PATH.search(name)
    catalogue = load_catalogue()
    return name.lower() not in user_aliases() and not any(
        catalogue.find(each) or catalogue.find_head(each) for each in (reference.name, reference.full_name)
    )


def _reason(name: str, problem: ModelNotFoundError) -> str:
    alias = user_aliases().get(name.lower())
    if alias:
        return f"{name[:100]} stands for {alias}, but {problem.what}"
    if _is_unknown(name):
        return f"there is no model named {name[:100]} on this machine"
    is_short = isinstance(problem, NotDownloadedError) and isinstance(parse_reference(name), NameReference)
    return f"{name[:100]}: {problem.what}" if is_short else problem.what


def _advice(problem: ModelNotFoundError, near: Sequence[str], names: Sequence[str]) -> str:
    """Return advice for a request whose model was not found.

    Args:
        problem: The error that says why it was not found.
        near: Names of models on this machine that the client may have meant.
        names: Names of all models on this machine.
    """
    more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
    listed = f"use one of the models {', '.join(names[:_MAX_SHOWN_NAMES])}{more}"
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{problem.next_step}, or {listed}" if isinstance(problem, NotDownloadedError) else listed


def _described(
    name: str,
    resolved: Resolved,
    loaded: Mapping[tuple[Path, ...], LoadedModel],
) -> KnownModel:
    created = int(resolved.path.stat().st_mtime)
    return KnownModel(
        name,
        resolved.format,
        created,
        model_info_or_none(resolved),
        loaded.get(resolved.files),
        recommended_sampling(resolved, resolved.entry),
    )


def _memory_note(plan: MemoryPlan | None) -> str:
    """Return a log note about a loaded model's memory use, or an empty string if it was not planned."""
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
    """Return whether a model fits with these load options and without reductions.

    Raises:
        ModelFileError: The model cannot be loaded at all, so no other model should be unloaded for it.
    """
    try:
        plan = edgespec.plan(**options).plan
    except ModelFileError:
        raise
    except EdgespecError:
        return False
    return plan.fits_without_streaming and not plan.decisions
