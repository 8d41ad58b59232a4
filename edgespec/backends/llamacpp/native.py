"""The llama_cpp library: imported on first use, its log sent to a file and never over the screen."""

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
_WARN, _ERROR, _CONTINUED = 3, 4, 5
# By then C has gone on; should it call back again just then, this is done again.
_AGAIN_SECONDS = 0.02
_errors: deque[str] = deque(maxlen=20)
_listeners: list[list[str]] = []
# ctypes keeps no reference to a callback that C holds.
_callbacks: list[Any] = []


@cache
def library() -> ModuleType:
    """llama_cpp, ready to use. Raises BackendMissingError with the way to install it."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendMissingError(
            f"llama-cpp-python, which runs GGUF models, does not load: {error}",
            "install it with `pip install llama-cpp-python` (it compiles, so it needs a C++ compiler)",
        ) from error
    _open_log()
    _hear_interrupts()
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


def _hear_interrupts() -> None:
    """Let a Ctrl-C that comes while C calls back be raised afterwards.

    What a callback raises never gets through C: it would be printed, and lost. Even the first instruction of
    a callback may raise it, so no `try` in there would do.
    """
    before = sys.unraisablehook

    def heard(unraisable: sys.UnraisableHookArgs) -> None:
        module = getattr(unraisable.object, "__module__", None) or ""
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and module.startswith("edgespec."):
            again = threading.Timer(_AGAIN_SECONDS, _press_again)
            again.daemon = True
            again.start()
        else:
            before(unraisable)

    sys.unraisablehook = heard


def _press_again() -> None:
    """A Ctrl-C for the main thread, which wakes it up where the system can do that."""
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
    for lines in _listeners:
        lines.append(line)
    # A handler that cannot write (full disk, folder gone) must not stop a reply.
    logging.raiseExceptions = False
    _LOG.log(logging.WARNING if level in (_WARN, _ERROR) else logging.INFO, line)


def recent_errors(clear: bool = False) -> list[str]:
    """The last errors the library logged, oldest first."""
    lines = list(_errors)
    if clear:
        _errors.clear()
    return lines


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """What the library logs while this is open, whichever thread it works for."""
    lines: list[str] = []
    _listeners.append(lines)
    try:
        yield lines
    finally:
        # By identity: two that heard the same are equal.
        _listeners[:] = [each for each in _listeners if each is not lines]


class Interrupt:
    """A flag that llama.cpp reads between the nodes of a running pass.

    llama.cpp calls `abort(data)` hundreds of times a pass. A Python callback there would take the
    interpreter's lock each time, so the callback is C's own `strlen` over a two-byte buffer: it says 0
    (go on) while the buffer is empty and 1 (stop) once a byte is set.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)

    @property
    def requested(self) -> bool:
        return self._buffer.raw[0] != 0

    @requested.setter
    def requested(self, value: bool) -> None:
        self._buffer[0] = b"\x01" if value else b"\x00"

    def attach(self, context: Any) -> None:
        """Make a llama_context read this flag."""
        lib = library()
        strlen = ctypes.cast(ctypes.CDLL(None).strlen, lib.ggml_abort_callback)
        lib.llama_set_abort_callback(context, strlen, ctypes.addressof(self._buffer))
