"""A tiny Llama model, shared by the tests in a file, and what tests do with models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends import mlx
from edgespec.engine.tree import TokenTree
from edgespec.model.base import LanguageModel, LoadOptions
from tests.backends.mlx.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Iterator[LanguageModel]:
    model = mlx.load(
        str(write_checkpoint(folder / "llama", "llama")), "llama", LoadOptions(context_tokens=512)
    )
    yield model
    model.close()


def row(model: LanguageModel, tree: TokenTree, node: int = 0) -> NDArray[np.float64]:
    """Return the logits of one node of a tree."""
    return model.verify(tree).at(node, np.arange(model.vocabulary.size))


T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in another thread, where evaluating an array that was left lazy would raise an error."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
