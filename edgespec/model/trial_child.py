"""Load models on trial. `main` runs in a child process, because a damaged file may crash it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError, ModelFileError
from edgespec.model.base import Head
from edgespec.model.model_facts import Adapter
from edgespec.model.registry import format_of

__all__ = ["PASSED", "REFUSED", "encode_head", "main"]

# Outcomes that the child process prints, one line per model. If the backend rejects the model's files, the
# reason follows as a JSON string.
PASSED, REFUSED = "passed", "refused"
# Memory limit in bytes of the child process that loads models for a trial, excluding mapped files.
_MAX_MEMORY_BYTES = 4 * 2**30


def encode_head(head: Head | None) -> list[str | None] | None:
    """Encode a head as JSON values for the request to `main`."""
    return None if head is None else [head.method, None if head.path is None else str(head.path)]


def _decode_head(head: Sequence[str | None]) -> Head:
    method, path = head
    assert method is not None
    return Head(method, None if path is None else Path(path))


def main(request: dict[str, Any]) -> None:
    """Try to load each model in the request and print the outcome. Runs in the child process."""
    _limit_process(request["cpu_seconds"])
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for form_name, path, name, runs, head, adapters in request["models"]:
        form = format_of(form_name)
        try:
            if head and form.try_head is not None:
                form.try_head(path, name, _decode_head(head), _print_fraction)
            elif adapters and form.try_adapters is not None:
                form.try_adapters(path, name, [Adapter(*adapter) for adapter in adapters], _print_fraction)
            elif form.trial is not None:
                form.trial(path, name, runs, _print_fraction)
            _print(PASSED)
        except ModelFileError as error:
            _print(REFUSED + json.dumps(error.what))
        except EdgespecError:
            _print(REFUSED)
    os._exit(0)


def _limit_process(cpu_seconds: int) -> None:
    """Limit the process's CPU time and memory (excluding mapped files), and disable core dumps."""
    if sys.platform != "win32":
        import resource

        limits = (
            (resource.RLIMIT_CPU, cpu_seconds),
            (resource.RLIMIT_DATA, _MAX_MEMORY_BYTES),
            (resource.RLIMIT_CORE, 0),
        )
        for limit, value in limits:
            with suppress(OSError, ValueError):
                resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def _exit_with_parent() -> None:
    """Exit this process when the parent process exits, which closes stdin."""
    os.read(0, 1)
    os._exit(1)


def _print(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _print_fraction(_description: str, fraction: float) -> bool:
    _print(f"{fraction:.3f}")
    return True
