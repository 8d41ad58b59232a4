"""edgespec and mlx-lm, each configuration in a process of its own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

from edgespec.errors import EdgespecError
from scripts.peers.replies import Asked, Run

__all__ = ["Edgespec", "MlxLm", "Program", "Worker"]

Ask: TypeAlias = Callable[[Sequence[int], Asked], Run]


class Program(Protocol):
    """What can be loaded in another process, and asked there."""

    def opened(self) -> AbstractContextManager[Ask]:
        """Load the models."""
        ...


@dataclass(frozen=True)
class Edgespec:
    """edgespec with one method, and a draft length where one is given.

    threads: None where the backend chooses. kv_type: of the cache.
    """

    target: str
    draft: str
    method: str
    draft_length: int | None
    acceptance: str
    context: int
    threads: int | None
    kv_type: str

    @contextmanager
    def opened(self) -> Iterator[Ask]:
        """Load the models."""
        import edgespec
        from scripts.peers.replies import ours

        with edgespec.load(**vars(self)) as runtime:

            def ask(prompt: Sequence[int], asked: Asked) -> Run:
                return ours(runtime, prompt, vars(asked))

            yield ask


@dataclass(frozen=True)
class MlxLm:
    """mlx-lm itself, drafting so many tokens; None: plainly."""

    target: str
    draft: str
    draft_length: int | None

    @contextmanager
    def opened(self) -> Iterator[Ask]:
        """Load the models."""
        import mlx.core as mx
        from mlx_lm.sample_utils import make_sampler

        from scripts.bench_mlx import load_theirs, theirs

        model, tokenizer = load_theirs(self.target)
        drafting: dict[str, Any] = {}
        if self.draft_length is not None:
            drafting = {"draft_model": load_theirs(self.draft)[0], "num_draft_tokens": self.draft_length}

        def ask(prompt: Sequence[int], asked: Asked) -> Run:
            mx.random.seed(asked.seed)
            sampler = make_sampler(asked.temperature, asked.top_p, asked.min_p, top_k=asked.top_k)
            options = {"max_tokens": asked.max_tokens, "sampler": sampler, **drafting}
            return theirs(model, tokenizer, list(prompt), options)

        yield ask


class Worker:
    """A process that holds one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        context = multiprocessing.get_context("spawn")
        self._connection, self._far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(program, self._far_end), daemon=True)

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._process.pid
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until the models are loaded. Raises EdgespecError."""
        self._process.start()
        self._far_end.close()
        self._answer()

    def ask(self, prompt: Sequence[int], asked: Asked) -> Run:
        """A reply. Raises EdgespecError."""
        self._connection.send((list(prompt), asked))
        run = self._answer()
        assert isinstance(run, Run)
        return run

    def _answer(self) -> object:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise EdgespecError(
                f"the process of {type(self._program).__name__} ended (exit status {self._process.exitcode})"
            ) from error
        if isinstance(answer, str):
            raise EdgespecError(answer)
        return answer

    def stop(self) -> None:
        """End it, whatever it does."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(program: Program, connection: Connection) -> None:
    """In the other process: answer until nothing is asked any more. What fails is told as a text."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    try:
        with program.opened() as ask:
            connection.send(None)
            while True:
                connection.send(ask(*connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        connection.send(str(error) or repr(error))
