"""Run edgespec and mlx-lm, with one process per configuration."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol, TypeAlias

from edgespec.errors import EdgespecError
from scripts.peers.replies import GenerationOptions, Run, TokenClock

Generate: TypeAlias = Callable[[Sequence[int], GenerationOptions], Run]


class Program(Protocol):
    """A program that a `Worker` loads and runs in its process."""

    def load(self) -> AbstractContextManager[Generate]:
        """Load the models. The context manager returns the function that generates a reply."""
        ...


@dataclass(frozen=True)
class EdgespecProgram:
    """edgespec with one method. The attributes are options of `edgespec.load`."""

    target: str
    draft: str
    head: str
    method: str
    draft_length: int | None
    draft_branches: Literal["auto"] | tuple[()]
    acceptance: str
    context: int
    threads: int | None
    kv_type: str

    @contextmanager
    def load(self) -> Iterator[Generate]:
        import edgespec
        from scripts.peers.replies import edgespec_reply

        with edgespec.load(**vars(self)) as runtime:

            def generate(prompt: Sequence[int], options: GenerationOptions) -> Run:
                return edgespec_reply(runtime, prompt, vars(options))

            yield generate


@dataclass(frozen=True)
class MlxLmProgram:
    """mlx-lm, with a draft model or, if the draft length is None, without one."""

    target: str
    draft: str
    draft_length: int | None

    @contextmanager
    def load(self) -> Iterator[Generate]:
        import mlx.core as mx
        from mlx_lm.sample_utils import make_sampler

        model, tokenizer = _load_with_mlx_lm(self.target)
        drafting: dict[str, Any] = {}
        if self.draft_length is not None:
            draft_model, _ = _load_with_mlx_lm(self.draft)
            drafting = {"draft_model": draft_model, "num_draft_tokens": self.draft_length}

        def generate(prompt: Sequence[int], options: GenerationOptions) -> Run:
            if options.schema:
                raise EdgespecError("mlx-lm does not support JSON schemas", "use prompts without a schema")
            mx.random.seed(options.seed)
            sampler = make_sampler(options.temperature, options.top_p, options.min_p, top_k=options.top_k)
            arguments = {"max_tokens": options.max_tokens, "sampler": sampler, **drafting}
            return _mlx_lm_reply(model, tokenizer, list(prompt), arguments)

        yield generate


def _load_with_mlx_lm(reference: str) -> tuple[Any, Any]:
    """Load a model and its tokenizer with mlx-lm, in float32 if MLX runs on the CPU."""
    import mlx.core as mx
    from mlx_lm.utils import load

    from edgespec.store.reference import resolve

    model, tokenizer, *_ = load(str(resolve(reference).path))
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model, tokenizer


def _mlx_lm_reply(model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any]) -> Run:
    from mlx_lm import stream_generate

    tokens, accepted, clock = [], 0, TokenClock()
    for chunk in stream_generate(model, tokenizer, prompt, **options):
        clock.add(1, chunk.from_draft)
        tokens.append(chunk.token)
        accepted += chunk.from_draft
    # Count passes by the target's own tokens. Each pass ends with one, unless the length limit cuts it off.
    return clock.finish(tokens, accepted, len(tokens) - accepted + chunk.from_draft)


class Worker:
    """A child process that runs one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        context = multiprocessing.get_context("spawn")
        self._connection, self._child_connection = context.Pipe()
        self._process = context.Process(target=_serve, args=(program, self._child_connection), daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the started process."""
        assert self._process.pid
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until the models are loaded. Raises EdgespecError."""
        self._process.start()
        self._child_connection.close()
        self._receive()

    def generate(self, prompt: Sequence[int], options: GenerationOptions) -> Run:
        """Generate a reply. Raises EdgespecError."""
        self._connection.send((list(prompt), options))
        run = self._receive()
        assert isinstance(run, Run)
        return run

    def _receive(self) -> object:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise EdgespecError(
                f"the process of {type(self._program).__name__} ended with status {self._process.exitcode}"
            ) from error
        if isinstance(answer, str):
            raise EdgespecError(answer)
        return answer

    def stop(self) -> None:
        """Kill the process."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(program: Program, connection: Connection) -> None:
    """Answer requests in the child process until the connection is closed.

    Sends None after loading, then one `Run` per request. An error is sent as a string.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    try:
        with program.load() as generate:
            connection.send(None)
            while True:
                connection.send(generate(*connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        connection.send(str(error) or repr(error))
