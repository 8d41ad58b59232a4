"""Load a GGUF model and run a few tokens, to see whether its files make llama.cpp crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from edgespec.backends.base import LoadOptions, Progress
from edgespec.backends.llamacpp.context import LlamaContext
from edgespec.backends.llamacpp.context_planning import plan_context
from edgespec.backends.llamacpp.loading import load_files
from edgespec.backends.llamacpp.memory_estimate import GgufMemoryEstimator
from edgespec.backends.llamacpp.metadata import vocabulary_size
from edgespec.backends.llamacpp.native import library
from edgespec.backends.llamacpp.probe import probe
from edgespec.backends.llamacpp.vocabulary import LlamaVocabulary
from edgespec.errors import CancelledError

__all__ = ["try_model", "try_split_model"]

# The trial runs on the CPU, with mapped weights and a small context, so that it adds little to the memory and
# the time of the load that follows.
_OPTIONS = LoadOptions(context_tokens=256, gpu_layers=0)
# Numbers of tokens per pass. llama.cpp uses other kernels for a single token, a few and many.
_WIDTHS = (3, 1, 40)
# The limit of processor time for all passes. Passes of a large model are cut short, but its layers resemble
# each other, and llama.cpp checks the shapes of all of them before the first pass.
_PASS_CPU_SECONDS = 0.3
_POLL_SECONDS = 0.02
# Characters of one to four bytes.
_TEXT = "".join(map(chr, range(1, 0x250))) + " The quick brown fox. \u4f60\u597d \U0001f642"
# The number of tokens whose texts are read, spread over the vocabulary.
_PIECES = 256


def try_model(path: str, name: str, runs: bool, progress: Progress | None = None) -> None:
    """Plan a GGUF model's memory and, if `runs` is set, load its weights and run a few tokens.

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


def try_split_model(folder: str, name: str, _runs: bool, _progress: Progress | None = None) -> None:
    """Plan the memory of a model that was split for early exit.

    The model was split from a file that was tried before, so no tokens are run.

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
    """Run the passes of `probe` and a pass of each width, until the time limit is reached."""
    size = vocabulary_size(weights)
    with suppress(CancelledError), _interrupted_after(context, _PASS_CPU_SECONDS):
        probe(context, weights, _OPTIONS)
        start = 0
        for width in _WIDTHS:
            width = min(width, context.max_width)
            tokens = [size * i // width for i in range(width)]
            context.run(tokens, range(start, start + width), [[0]] * width)
            start += width


@contextmanager
def _interrupted_after(context: LlamaContext, cpu_seconds: float) -> Iterator[None]:
    """Interrupt the context's passes when they have taken this much processor time."""
    finished, began = threading.Event(), time.process_time()

    def interrupt() -> None:
        while not finished.wait(_POLL_SECONDS):
            if time.process_time() > began + cpu_seconds:
                context.interrupt.requested = True

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _use_vocabulary(weights: Any) -> None:
    """Tokenise a text of many characters, and read the texts of some tokens."""
    vocabulary = LlamaVocabulary(weights)
    for special in (False, True):
        vocabulary.tokenize(_TEXT, special=special, start=True)
    for token in range(0, vocabulary.size, max(1, vocabulary.size // _PIECES)):
        vocabulary.raw_piece(token)
        vocabulary.is_end(token)
