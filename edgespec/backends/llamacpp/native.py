"""Loads llama_cpp on first use, writes its log to a file, and interrupts running passes."""

from __future__ import annotations

import _thread
import ctypes
import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from logging.handlers import RotatingFileHandler
from types import ModuleType
from typing import Any

from edgespec.errors import BackendMissingError
from edgespec.files import log_folder

__all__ = ["Interrupt", "captured_log", "library", "recent_errors"]

_LOG = logging.getLogger("edgespec.llamacpp")
# Levels of ggml_log_level.
_WARN, _ERROR = 3, 4
# Delay before a Ctrl-C that arrived inside a callback is sent again. Chosen: the callback has usually
# returned by then, and otherwise the signal is sent once more.
_RESEND_SECONDS = 0.02
_errors: deque[str] = deque(maxlen=20)
# The lists that `captured_log` fills.
_captures: list[list[str]] = []
# ctypes does not keep a reference to a callback that C code holds.
_callbacks: list[Any] = []


@cache
def library() -> ModuleType:
    """Return the initialised llama_cpp module. Raises BackendMissingError if it cannot be imported."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendMissingError(
            f"llama-cpp-python, which runs GGUF models, cannot be imported: {error}",
            "install it with `pip install llama-cpp-python`, which needs a C++ compiler",
        ) from error
    _open_log()
    _resend_interrupts_in_callbacks()
    callback = llama_cpp.llama_log_callback(_on_line)
    _callbacks.append(callback)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def _open_log() -> None:
    _LOG.propagate = False
    _LOG.setLevel(logging.INFO)
    try:
        folder = log_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = RotatingFileHandler(
            folder / "llamacpp.log", maxBytes=1_000_000, backupCount=1, delay=True, encoding="utf-8"
        )
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _LOG.addHandler(handler)


def _resend_interrupts_in_callbacks() -> None:
    """Send Ctrl-C again if it arrives while C code runs one of our callbacks.

    ctypes prints and drops an exception in a callback, so the KeyboardInterrupt would be lost. It may even be
    raised before the callback's first instruction, where no `try` could catch it.
    """
    default_hook = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        module = getattr(unraisable.object, "__module__", None) or ""
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and module.startswith("edgespec."):
            timer = threading.Timer(_RESEND_SECONDS, _interrupt_main_thread)
            timer.daemon = True
            timer.start()
        else:
            default_hook(unraisable)

    sys.unraisablehook = hook


def _interrupt_main_thread() -> None:
    """Send Ctrl-C to the main thread, and wake it from a system call where the platform supports that."""
    main = threading.main_thread().ident
    if sys.platform != "win32" and main is not None:
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def _on_line(level: int, text: bytes, _user_data: object) -> None:
    line = text.decode("utf-8", "replace").strip()
    if not line or set(line) == {"."}:
        return
    if level == _ERROR:
        _errors.append(line)
    for lines in _captures:
        lines.append(line)
    # A log that cannot be written (disk full, folder deleted) must not fail a reply.
    logging.raiseExceptions = False
    _LOG.log(logging.WARNING if level in (_WARN, _ERROR) else logging.INFO, line)


def recent_errors(clear: bool = False) -> list[str]:
    """Return the last 20 errors that llama.cpp logged, oldest first. `clear` resets the list."""
    lines = list(_errors)
    if clear:
        _errors.clear()
    return lines


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect the lines that llama.cpp logs in any thread while the block runs."""
    lines: list[str] = []
    _captures.append(lines)
    try:
        yield lines
    finally:
        # Compare by identity, because two captures may hold equal lines.
        _captures[:] = [capture for capture in _captures if capture is not lines]


class Interrupt:
    """A flag that stops a running pass. Any thread may set it.

    llama.cpp calls an abort callback hundreds of times per pass. A Python callback would take the GIL each
    time. Instead the callback is C's `strlen` on a two-byte buffer, which returns 0 (continue) while the
    buffer is empty and 1 (abort) after a byte is set.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)

    @property
    def requested(self) -> bool:
        """Whether passes are stopped and refused."""
        return self._buffer.raw[0] != 0

    @requested.setter
    def requested(self, value: bool) -> None:
        self._buffer[0] = b"\x01" if value else b"\x00"

    def attach(self, context: Any) -> None:
        """Register this flag as the abort callback of a llama_context."""
        lib = library()
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, lib.ggml_abort_callback)
        lib.llama_set_abort_callback(context, strlen, ctypes.addressof(self._buffer))
