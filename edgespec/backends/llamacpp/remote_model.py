"""Load and run GGUF models with layers on workers, through llama.cpp's RPC backend."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp.devices import LayerPlacement, mtp_layer_count
from edgespec.backends.llamacpp.loading import check_vocabulary, load_files
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.backends.llamacpp.model import LlamaCppModel
from edgespec.backends.llamacpp.native import ggml, library
from edgespec.backends.llamacpp.rpc import add_devices, guard_against_aborts
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.engine.logits import Logits
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, MemoryBudgetError
from edgespec.model.base import Head, LanguageModel, LoadOptions, Progress, SelfDraft, Snapshot
from edgespec.model.base_model import BaseModel
from edgespec.options.methods import methods

__all__ = ["RemoteModel", "load_on_workers"]

_Result = TypeVar("_Result")
# The tensors that stay on this machine. llama.cpp places `output.weight` on the last device unless the
# pattern includes it.
_LOCAL_TENSORS = rb"^(output|token_embd)\.weight$"
_LOCAL_TENSORS_WITHOUT_OUTPUT = rb"^token_embd\.weight$"
_UNLIMITED_BYTES = 1 << 62
_MAX_DEVICES = 16
# Widths to which verify passes are padded: the root plus a draft of 0, 1, 2, 4, 8 or 16 tokens. Only a few
# widths are used, because the first pass of a new width takes eight more round trips with two workers, and
# each change of width resends the whole computation graph.
_PASS_WIDTHS = (1, 2, 3, 5, 9, 17)


def load_on_workers(
    path: str, name: str, options: LoadOptions, workers: ConnectedWorkers, progress: Progress | None
) -> LanguageModel:
    """Load a GGUF model with layers on workers.

    The token embedding stays on this machine, as does the output layer unless `options.output_on_worker` is
    set.

    Raises:
        WorkerLostError: A worker exited or hung.
        EdgespecError: Any error raised by `load`. The caller closes `workers` after an error.
    """
    guard_against_aborts(workers)
    placement = _placement(path, name, options)
    # Skip the memory checks, because the planner has already checked all machines. Allow only chain drafts,
    # because committing a tree would move KV cells over the network.
    own = replace(
        options,
        memory_bytes=_UNLIMITED_BYTES,
        initial_context_tokens=None,
        max_branches=1,
        own_head=False,
        workers=None,
        projector="",
    )

    def load() -> LlamaCppModel:
        place = _Placer(list(chain.from_iterable(add_devices(workers))), placement, mtp_layer_count(path))
        weights = load_files(path, name, own, progress, repack=False, place=place)
        check_vocabulary(weights, path)
        try:
            return LlamaCppModel(weights, path, name, own)
        except BaseException:
            library().llama_model_free(weights)
            raise

    return RemoteModel(workers.call(load), workers, placement)


def _placement(path: str, name: str, options: LoadOptions) -> LayerPlacement:
    estimator = GgufMemoryEstimator(path, name)
    try:
        return estimator.placement(options)
    finally:
        estimator.close()


class _Placer:
    """Sets the devices of a model's layers in llama.cpp's parameters, and keeps the C arrays alive."""

    def __init__(self, devices: Sequence[Any], placement: LayerPlacement, mtp_layers: int) -> None:
        # llama.cpp counts the output layer as an extra layer on the last device with layers, which always
        # holds the final norm. It also counts the multi-token prediction layers before it, which it does not
        # load.
        other_layers = mtp_layers + 1
        self._layers = sum(placement.remote) + other_layers
        counts = [float(count) for count in placement.remote]
        last = max((i for i, count in enumerate(counts) if count), default=len(counts) - 1)
        counts[last] += other_layers
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        self._split = (ctypes.c_float * _MAX_DEVICES)(*counts)
        buffer_type = ggml().ggml_backend_cpu_buffer_type
        local = _LOCAL_TENSORS_WITHOUT_OUTPUT if placement.has_remote_output else _LOCAL_TENSORS
        pattern = ctypes.cast(ctypes.c_char_p(local), ctypes.c_void_p)
        self._overrides = (ctypes.c_void_p * 4)(pattern, buffer_type(), None, None)

    def __call__(self, params: Any) -> None:
        params.n_gpu_layers = self._layers
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        params.tensor_split = self._split
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)


class RemoteModel(BaseModel):
    """A GGUF model whose layers are on workers.

    All llama.cpp calls run in the thread of `ConnectedWorkers`. Once a worker is lost, they raise
    WorkerLostError, and the model's memory on this machine is freed only when the process exits. After an
    interrupt, passes raise CancelledError immediately, and later calls wait until the thread has finished the
    interrupted pass.
    """

    why_blind = ("its layers are on workers", "omit --workers")

    def __init__(self, model: LlamaCppModel, workers: ConnectedWorkers, placement: LayerPlacement) -> None:
        self._model, self._workers = model, workers
        self.vocabulary = model.vocabulary
        facts = model.facts
        kv_bytes = max(0, facts.kv_bytes - placement.remote_cache_bytes)
        self.facts = replace(
            facts,
            weight_bytes=facts.weight_bytes - placement.remote_weight_bytes,
            kv_bytes=kv_bytes,
            requested_kv_bytes=kv_bytes,
            capabilities=replace(
                facts.capabilities,
                tree=False,
                pass_widths=_PASS_WIDTHS,
                has_slow_width_changes=True,
                reason="only drafts without branches are supported, because its layers are on workers",
                self_draft_methods=facts.capabilities.self_draft_methods.intersection(
                    each.name for each in methods() if each.works_on_workers
                ),
            ),
        )

    def _call(self, work: Callable[[], _Result], *, is_pass: bool = False) -> _Result:
        self._check(0)
        return self._workers.call(work, can_abandon=is_pass)

    @property
    def length(self) -> int:
        return self._model.length

    @property
    def threads(self) -> int:
        return self._model.threads

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        self._call(lambda: self._model.prefill(tokens, progress), is_pass=True)

    def prefill_prompt(self, tokens: Sequence[int], progress: Progress | None = None) -> Logits | None:
        return self._call(lambda: self._model.prefill_prompt(tokens, progress), is_pass=True)

    def embed(self, tokens: Sequence[int], progress: Progress | None = None) -> NDArray[np.float32]:
        return self._call(lambda: self._model.embed(tokens, progress), is_pass=True)

    def verify(self, tree: TokenTree, first: int = 0) -> Logits:
        padded = tree.padded(min(self.facts.capabilities.padded_width(tree.width), self.free_tokens))
        return self._call(lambda: self._model.verify(padded, first), is_pass=True)

    def commit(self, path: tuple[int, ...]) -> None:
        self._call(lambda: self._model.commit(path))

    def truncate(self, length: int) -> None:
        self._call(lambda: self._model.truncate(length))

    def remove_range(self, start: int, end: int) -> None:
        self._call(lambda: self._model.remove_range(start, end))

    def snapshot(self, start: int = 0, end: int | None = None) -> Snapshot:
        return self._call(lambda: self._model.snapshot(start, end))

    def restore(self, snapshot: Snapshot) -> None:
        self._call(lambda: self._model.restore(snapshot))

    def self_draft(self, method: SelfDraft) -> LanguageModel:
        if not isinstance(method, Head):
            return super().self_draft(method)
        if method.method not in self.facts.capabilities.self_draft_methods:
            raise CapabilityError(
                f"{self.facts.name} cannot use a draft head for the {method.method} method, because its"
                " layers are on workers",
                "use --head none, or omit --workers",
                code="head_not_supported",
            )
        # The head runs on this machine, so only the hidden states that it reads cross the network.
        return self._call(lambda: self._model.self_draft(method))

    def resize(self, context_tokens: int) -> None:
        raise MemoryBudgetError(
            f"cannot change the context of {self.facts.name} to {context_tokens:,} tokens, because its"
            " layers are on workers",
            "load the model again with another --context",
            code="context_fixed",
        )

    def interrupt(self, enabled: bool) -> None:
        self._workers.interrupt(enabled)
        if enabled:
            self._model.interrupt(True)
        else:
            # Clear the interrupt later, because it must also stop an abandoned pass that is still running.
            self._workers.run_later(lambda: self._model.interrupt(False))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.close(self._model.close)
