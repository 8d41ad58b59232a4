"""The mlx libraries: imported on first use and without their chatter; what they and this machine are."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import psutil

from edgespec.errors import BackendMissingError

__all__ = ["MlxBuildInfo", "build_info", "core", "lm"]

_OPEN_FILES = 2048


@dataclass(frozen=True, slots=True)
class MlxBuildInfo:
    """The installed libraries, and the device that models run on by default.

    recommended_working_set_bytes: what Metal keeps in place at most; 0 where there is no such limit.
    """

    version: str
    mlx_lm_version: str
    device: str
    metal: bool
    cuda: bool
    memory_bytes: int
    recommended_working_set_bytes: int


@cache
def core() -> Any:
    """mlx.core. Raises BackendMissingError with the way to install it."""
    try:
        import mlx.core
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing("mlx", error) from error
    return mlx.core


@cache
def lm() -> Any:
    """mlx_lm.utils. Raises BackendMissingError with the way to install it."""
    mlx = core()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Without torch, transformers says so on stderr; its tokenizers warn of forks when they use threads.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with _open_files_kept():
            import mlx_lm.utils
    except (ImportError, OSError, RuntimeError) as error:
        raise _missing("mlx-lm", error) from error
    if mlx.metal.is_available():
        # Metal may page weights out between passes unless told how much to keep in place.
        mlx_lm.utils.maybe_set_recommended_wired_limit()
    return mlx_lm.utils


def _missing(library: str, error: Exception) -> BackendMissingError:
    return BackendMissingError(
        f"{library}, which runs MLX models, does not load: {error}",
        'install it with `pip install "edgespec[mlx]"`, or choose a GGUF model',
    )


@contextlib.contextmanager
def _open_files_kept() -> Iterator[None]:
    """mlx_lm sets the limits of open files when imported, which lowers high ones and fails on low ones."""
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
    wanted = _OPEN_FILES if hard == unlimited else min(_OPEN_FILES, hard)
    if soft not in (unlimited, -1) and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            set_limits(resource.RLIMIT_NOFILE, (wanted, hard))


def build_info() -> MlxBuildInfo:
    """The facts of the installed libraries. Raises BackendMissingError."""
    mx = core()
    try:
        mlx_lm_version = metadata.version("mlx-lm")
    except metadata.PackageNotFoundError as error:
        raise _missing("mlx-lm", error) from error
    facts = mx.device_info()
    kind = "CPU" if mx.default_device() == mx.cpu else "GPU"
    name = facts.get("device_name") or facts.get("architecture")
    return MlxBuildInfo(
        version=mx.__version__,
        mlx_lm_version=mlx_lm_version,
        device=f"{kind} ({name})" if name else kind,
        metal=mx.metal.is_available(),
        cuda=mx.cuda.is_available(),
        memory_bytes=int(facts.get("memory_size") or psutil.virtual_memory().total),
        recommended_working_set_bytes=int(facts.get("max_recommended_working_set_size") or 0),
    )
