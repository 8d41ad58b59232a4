"""Child process that renders a chat template, with limits on time, memory and output size."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgespec.chat.template_worker import (
    CPU_SECONDS,
    encode,
    memory_limit_bytes,
    output_limit_bytes,
    read_message,
    write_message,
)
from edgespec.errors import EdgespecError, TemplateError
from edgespec.model.base import Progress
from edgespec.system.child_process import ChildProcess
from edgespec.system.files import format_bytes
from edgespec.system.waiting import check_cancelled, wait_for

__all__ = ["TemplateProcess"]

# Maximum number of 50 ms waits for a rendered prompt, about 20 seconds.
_MAX_POLLS = 400


class TemplateProcess:
    """A child process that compiles one chat template and renders it.

    Call `ask` from only one thread at a time, and `close` from any thread. `ChildProcess` describes when the
    process stops.

    Raises:
        TemplateError: The process cannot be started.
    """

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("template_worker.py"))
        try:
            self._process = ChildProcess([script, *_import_folders()])
        except EdgespecError as error:
            raise TemplateError(
                f"the model's chat template cannot be used: {error.what}",
                f"{error.next_step}, or use `edgespec generate --raw`",
                code=error.code,
            ) from error

    @property
    def alive(self) -> bool:
        """Whether the child process can still handle requests."""
        return self._process.alive

    def ask(self, request: dict[str, Any], progress: Progress | None = None) -> dict[str, str]:
        """Send a request to the child process and return its reply. Any exception stops the process.

        Raises:
            CancelledError: `progress` returned False.
            TemplateError: The template exceeded a limit.
        """
        data, process, polls = encode(request), self._process, 0

        def exchange() -> dict[str, str] | None:
            with suppress(OSError, ValueError):
                write_message(process.stdin, data)
                if reply := read_message(process.stdout, output_limit_bytes(len(data))):
                    return reply[0]
            return None

        def poll() -> None:
            nonlocal polls
            polls += 1
            check_cancelled(progress)
            if polls > _MAX_POLLS:
                raise _failure("rendering timed out after 20 seconds")
            if process.memory_bytes > memory_limit_bytes(len(data)):
                raise _failure(_too_much_memory(len(data)))

        try:
            reply = wait_for(exchange, poll)
            if reply is None:
                raise _failure(_exit_reason(process))
            match reply.get("error"):
                case "memory":
                    raise _failure(_too_much_memory(len(data)))
                case "output":
                    limit = format_bytes(output_limit_bytes(len(data)))
                    raise _failure(f"the output exceeds {limit}")
                case "nesting":
                    raise _failure("the template is too deeply nested")
            return reply
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the child process. Repeated calls have no effect."""
        self._process.close()


def _failure(reason: str) -> TemplateError:
    return TemplateError(
        f"the model's chat template cannot be used: {reason}",
        "use `edgespec generate --raw` or another model",
    )


def _too_much_memory(request_bytes: int) -> str:
    return f"rendering needs more than {format_bytes(memory_limit_bytes(request_bytes))} of memory"


def _exit_reason(process: ChildProcess) -> str:
    process.close()
    if process.exceeded_cpu_limit:
        return f"rendering used more than {CPU_SECONDS:g} seconds of CPU time"
    return f"the rendering process exited with status {process.wait(0)}"


def _import_folders() -> list[str]:
    """Return the folders that contain Jinja and its dependency."""
    specs = [find_spec(name) for name in ("jinja2", "markupsafe")]
    return [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
