"""MLX targets on workers, and ways to lose a worker."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

import edgespec
from edgespec.backends import mlx
from edgespec.cluster.connected import ConnectedWorkers
from edgespec.cluster.machines import MLX, Library, installed_mlx, parse_machines
from edgespec.model.base import LanguageModel, LoadOptions
from edgespec.options.load_options import LoadArguments
from tests.cluster.conftest import Worker

PROMPT = "How do I list files by size, and how do I count the lines of each?"


def tokens(workers: str | None, *methods: str) -> list[list[list[int]]]:
    """Load the demo model and return the replies of each method at two temperatures."""
    draft, method = ("none", "none") if methods == ("none",) else ("auto", "model")
    # Passes on workers are never tested for exactness, and plain decoding on this machine has only one width.
    options: LoadArguments = {"workers": workers, "context": 1024, "method": method, "exactness": "off"}
    with edgespec.load("demo-mlx", draft, **options) as runtime:
        return replies_of(runtime, *methods)


def replies_of(runtime: edgespec.Runtime, *methods: str) -> list[list[list[int]]]:
    """Return the replies of each method at two temperatures."""
    replies = [
        [
            runtime.generate(PROMPT, max_tokens=24, seed=3, temperature=each, method=method)
            for each in (0.0, 0.8)
        ]
        for method in methods
    ]
    for method, both in zip(methods, replies, strict=True):
        accepted = sum(reply.stats.accepted_tokens for reply in both)
        assert accepted or method in ("none", "auto")
    return [[list(reply.tokens) for reply in both] for both in replies]


def load_tiny(
    folder: Path, workers: str | None, kv_type: str = "auto", *, split_tensors: bool = False
) -> LanguageModel:
    options = LoadOptions(context_tokens=1024, kv_type=kv_type, split_tensors=split_tensors)
    with ExitStack() as undo:
        if workers is not None:
            connected = ConnectedWorkers(parse_machines("workers", workers), Library(MLX, installed_mlx()))
            undo.callback(connected.close)
            options = replace(options, workers=connected)
        model = mlx.load(str(folder), folder.name, options)
        undo.pop_all()
    return model


def layer_server(worker: Worker) -> psutil.Process:
    """Return the process that runs a target's layers, which is the most recently started one."""
    return max(psutil.Process(worker.process.pid).children(), key=lambda process: process.create_time())


def lose(worker: Worker, how: str) -> None:
    if how == "killed worker":
        worker.process.kill()
    elif how == "killed process":
        layer_server(worker).kill()
    elif how == "frozen worker":
        psutil.Process(worker.process.pid).suspend()
    else:
        layer_server(worker).suspend()
