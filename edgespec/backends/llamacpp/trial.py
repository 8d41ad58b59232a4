"""Load a GGUF model or head and run a few tokens, to find out whether its files crash llama.cpp."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.loading import load_files
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.backends.llamacpp.metadata import LlamaVocabulary, vocabulary_size
from edgespec.backends.llamacpp.model import load
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import probe
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.model.base import Head, LoadOptions, Progress
from edgespec.model.hidden_states import HeadModel
from edgespec.model.model_facts import Adapter

__all__ = ["try_adapters", "try_head", "try_model", "try_split_model"]

# Load the model on the CPU with a small context, to save time and memory.
_OPTIONS = LoadOptions(context_tokens=256, gpu_layers=0, batch_tokens=64)
# Pass widths to test, in tokens. llama.cpp has different kernels for one, a few and many tokens.
_WIDTHS = (3, 1, 40)
# CPU time limit in seconds for all forward passes. Large models may not finish, which is acceptable because
# their layers all have the same structure.
_PASS_CPU_SECONDS = 0.3
_POLL_SECONDS = 0.02
_TEXT = "".join(map(chr, range(1, 0x250))) + " The quick brown fox. \u4f60\u597d \U0001f642"
_PIECES = 256
# Number of prompt tokens for testing a head, and the draft tree to run after them.
_HEAD_TOKENS = 40
_TREE = TokenTree((0, 1, 2, 3), (-1, 0, 0, 1), (None,) * 4)


def try_model(path: str, name: str, runs: bool, progress: Progress | None = None) -> None:
    """Estimate a GGUF model's memory use. If `runs` is set, also load its weights and run a few tokens.

    Raises:
        EdgespecError: The model cannot be loaded.
    """
    _plan(path, name, split=False)
    if not runs:
        return
    with ExitStack() as undo:
        weights = load_files(path, name, _OPTIONS, progress, repack=False)
        undo.callback(library().llama_model_free, weights)
        context = LlamaContext(weights, _OPTIONS, plan_context(weights, _OPTIONS), 1)
        undo.callback(context.close)
        _run_passes(context, weights)
        _use_vocabulary(weights)


def try_head(path: str, name: str, head: Head, progress: Progress | None = None) -> None:
    """Load a GGUF model and a head, prefill both with a few tokens, and run a draft tree with the head.

    Raises:
        EdgespecError: The model or the head cannot be loaded.
    """
    target = load(path, name, replace(_OPTIONS, own_head=head.path is None), progress)
    try:
        view = cast(HeadModel, target.self_draft(head))
        tokens = [target.facts.vocab_size * i // _HEAD_TOKENS for i in range(_HEAD_TOKENS)]
        with suppress(CancelledError), _interrupted_after(view.interrupt, _PASS_CPU_SECONDS):
            target.prefill(tokens)
            # Skip the first token, because no hidden state precedes it.
            view.start_at(view.first_position)
            view.prefill(tokens[view.first_position :])
            tree = _TREE.pruned(1 << 30, view.facts.capabilities.max_draft_length - 1)
            for end in range(1, tree.width + 1):
                view.verify(tree.pruned(1 << 30, 1 << 30, end), end - 1)
        view.close()
    finally:
        target.close()


def try_adapters(path: str, name: str, adapters: Sequence[Adapter], progress: Progress | None = None) -> None:
    """Load a GGUF model with adapters and run a few tokens.

    Raises:
        EdgespecError: The model or an adapter cannot be loaded.
    """
    model = load(path, name, replace(_OPTIONS, adapters=tuple(adapters)), progress)
    try:
        with suppress(CancelledError), _interrupted_after(model.interrupt, _PASS_CPU_SECONDS):
            for width in _WIDTHS:
                model.prefill([model.facts.vocab_size * i // width for i in range(width)])
    finally:
        model.close()


def try_split_model(folder: str, name: str, _runs: bool, _progress: Progress | None = None) -> None:
    """Estimate the memory use of a model that was split for early exit.

    Does not run the model, because the original file has already passed a trial load.

    Raises:
        EdgespecError: The model cannot be loaded.
    """
    _plan(folder, name, split=True)


def _plan(path: str, name: str, *, split: bool) -> None:
    estimator = GgufMemoryEstimator(path, name, split=split)
    try:
        estimator.estimate(LoadOptions())
    finally:
        estimator.close()


def _run_passes(context: LlamaContext, weights: Any) -> None:
    size = vocabulary_size(weights)
    with suppress(CancelledError), _interrupted_after(context.set_interrupt, _PASS_CPU_SECONDS):
        probe(context, weights, _OPTIONS)
        start = 0
        for width in _WIDTHS:
            width = min(width, context.max_width)
            tokens = [size * i // width for i in range(width)]
            context.run(tokens, range(start, start + width), [[0]] * width)
            start += width


@contextmanager
def _interrupted_after(interrupt: Callable[[bool], None], cpu_seconds: float) -> Iterator[None]:
    """Call `interrupt(True)` once `cpu_seconds` of CPU time have been used."""
    finished, began = threading.Event(), time.process_time()

    def watch() -> None:
        while not finished.wait(_POLL_SECONDS):
            if time.process_time() > began + cpu_seconds:
                interrupt(True)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _use_vocabulary(weights: Any) -> None:
    vocabulary = LlamaVocabulary(weights)
    for special in (False, True):
        vocabulary.tokenize(_TEXT, special=special, start=True)
    for token in range(0, vocabulary.size, max(1, vocabulary.size // _PIECES)):
        vocabulary.raw_piece(token)
        vocabulary.is_end(token)
