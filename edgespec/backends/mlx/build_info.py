"""Import mlx and mlx-lm on demand, and report their versions and default device."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

from edgespec.errors import BackendError, BackendMissingError
from edgespec.system.installation import setup_command

__all__ = [
    "MlxBuildInfo",
    "build_info",
    "mlx_core",
    "mlx_lm_utils",
    "runs_on_cpu",
    "use_in_this_process",
]

# Raise the limit on open files to at least this value, because a model can consist of hundreds of files.
_MIN_OPEN_FILES = 2048


class MlxBuildInfo(NamedTuple):
    """Installed versions of mlx and mlx-lm, and properties of the default device.

    Attributes:
        device: `CPU` or `GPU`, followed by the device name if mlx reports one.
        metal: Whether this build of mlx can use Metal.
        cuda: Whether this build of mlx can use CUDA.
        working_set_bytes: Maximum memory use recommended by Metal, in bytes. 0 without Metal.
    """

    version: str
    lm_version: str
    device: str
    metal: bool
    cuda: bool
    working_set_bytes: int


@cache
def mlx_core() -> Any:
    """Import and return `mlx.core`. Raises BackendMissingError if that fails."""
    try:
        import mlx.core
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing("mlx", error) from error
    _first_user()
    return mlx.core


def use_in_this_process() -> None:
    """Prepare to compute with MLX. Raises BackendError if this process was forked after MLX was imported.

    After a fork, MLX would wait forever for threads that exist only in the parent.
    """
    if _first_user() != os.getpid():
        raise BackendError(
            f"MLX cannot run in this process, because it was forked from process {_first_user()}, which had"
            " already used MLX",
            "start the child process before you load an MLX model, or use multiprocessing's `spawn` method",
            code="process_forked",
        )


@cache
def _first_user() -> int:
    """Return the ID of the process that first imported MLX."""
    return os.getpid()


def runs_on_cpu() -> bool:
    """Return whether the CPU is mlx's default device."""
    mx = mlx_core()
    return bool(mx.default_device() == mx.cpu)


@cache
def mlx_lm_utils() -> Any:
    """Import and return `mlx_lm.utils`. Raises BackendMissingError if that fails."""
    mx = mlx_core()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with _preserve_open_file_limit():
            import mlx_lm.utils
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing("mlx-lm", error) from error
    if mx.metal.is_available():
        # Keep the weights in memory between passes. Otherwise, macOS could swap them out.
        mlx_lm.utils.maybe_set_recommended_wired_limit()
    return mlx_lm.utils


def _missing(library: str, error: Exception) -> BackendMissingError:
    return BackendMissingError(
        f"cannot load {library}, which is required for MLX models: {error}",
        f"install it with `{setup_command('mlx')}`, or use a GGUF model",
    )


@contextlib.contextmanager
def _preserve_open_file_limit() -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    import resource

    set_limits = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    minimum = _MIN_OPEN_FILES if hard == unlimited else min(_MIN_OPEN_FILES, hard)
    if soft != unlimited and soft < minimum:
        with contextlib.suppress(OSError, ValueError):
            set_limits(resource.RLIMIT_NOFILE, (minimum, hard))


def build_info() -> MlxBuildInfo:
    """Return the versions of mlx and mlx-lm, and properties of the default device.

    Raises:
        BackendMissingError: mlx or mlx-lm is not installed or cannot be loaded on this machine.
    """
    mx = mlx_core()
    try:
        lm_version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError as error:
        raise _missing("mlx-lm", error) from error
    device = mx.device_info()
    kind = "CPU" if runs_on_cpu() else "GPU"
    name = device.get("device_name") or device.get("architecture")
    return MlxBuildInfo(
        mx.__version__,
        lm_version,
        f"{kind} ({name})" if name else kind,
        mx.metal.is_available(),
        mx.cuda.is_available(),
        int(device.get("max_recommended_working_set_size") or 0),
    )
