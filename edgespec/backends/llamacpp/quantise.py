"""Quantise GGUF files with llama.cpp in a child process.

llama.cpp's quantiser cannot be cancelled and may crash, so it runs in a child process. The child process runs
this module as `__main__`.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any

from edgespec.errors import BackendError, CancelledError, CapabilityError, OptionError
from edgespec.model.base import Progress
from edgespec.system.disks import append_error

__all__ = [
    "QuantisedSize",
    "importance_matrix_error",
    "parse_quantisation_type",
    "quantisation_types",
    "quantise",
    "quantised_size",
]

# llama.cpp file types that are not offered, because they are not quantised or need specially trained models.
_UNSUITABLE = {"F16", "BF16", "TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0", "Q2_0"}
# Name prefixes of quantisation types that usually need an importance matrix. Error messages do not suggest
# these types.
_MATRIX_PREFIXES = ("IQ1", "IQ2", "IQ3_X", "Q2_K_S")
_PREFIX = "LLAMA_FTYPE_MOSTLY_"
# Interval in seconds between the empty lines that the child process prints. At each line, the parent process
# checks for cancellation.
_HEARTBEAT_SECONDS = 0.2
_PARTIAL_SUFFIX = ".growing"
_SHORT_NAMES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


@dataclass(frozen=True, slots=True)
class QuantisedSize:
    """A model's size before and after quantisation, and whether it needs an importance matrix."""

    source_bytes: int
    copy_bytes: int
    needs_importance_matrix: bool


@cache
def quantisation_types() -> dict[str, int]:
    """Return the names of the supported quantisation types and their llama_ftype numbers.

    Raises:
        BackendMissingError: llama.cpp is not installed.
    """
    from edgespec.backends.llamacpp.native import library

    lib = library()
    names = [name.removeprefix(_PREFIX) for name in dir(lib) if name.startswith(_PREFIX)]
    return {name: getattr(lib, _PREFIX + name) for name in sorted(names) if name not in _UNSUITABLE}


def parse_quantisation_type(name: str) -> str:
    """Return the canonical name of a quantisation type, such as Q4_K_M for q4_k.

    Raises:
        OptionError: The type is unknown or not supported.
    """
    upper = name.upper()
    upper = _SHORT_NAMES.get(upper, upper)
    if upper not in quantisation_types():
        usable = (known for known in quantisation_types() if not known.startswith(_MATRIX_PREFIXES))
        raise OptionError(f"{name!r} is not a quantisation type", f"choose one of {', '.join(usable)}")
    return upper


def quantised_size(source: Path, type_name: str) -> QuantisedSize:
    """Return the size of a model before and after quantisation, without writing a copy.

    Raises:
        BackendError: llama.cpp cannot quantise the file.
    """
    # llama.cpp reports the sizes, and whether an imatrix is needed, only in its log.
    text = "\n".join(_run(source, None, type_name, None, "reading the weights"))
    sizes = [re.search(rf"{word} size *= *([0-9.]+) MiB", text) for word in ("model", "quant")]
    if sizes[0] is None or sizes[1] is None:
        raise BackendError(f"llama.cpp did not report the size of a {type_name} copy of {source}")
    source_bytes, copy_bytes = (int(float(size[1]) * 2**20) for size in sizes if size)
    return QuantisedSize(source_bytes, copy_bytes, "will require an imatrix" in text)


def quantise(source: Path, copy: Path, type_name: str, progress: Progress | None = None) -> None:
    """Write a quantised copy of a model. On failure, delete the copy.

    Raises:
        CapabilityError: The type requires an importance matrix.
        BackendError: llama.cpp failed to quantise the model.
        CancelledError: `progress` returned False.
        OSError: The copy cannot be written.
    """
    for leftover in copy.parent.glob(f"{glob.escape(copy.name)}.*{_PARTIAL_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    # Use a unique file name, because a quantiser killed in an earlier run may still be writing its file.
    partial = copy.with_name(f"{copy.name}.{token_hex(4)}{_PARTIAL_SUFFIX}")
    try:
        _run(source, partial, type_name, progress, f"making a {type_name} copy")
        partial.replace(copy)
    except BaseException as error:
        # llama.cpp does not report a full disk, so check whether the file is still writable.
        write_failure = append_error(partial) if isinstance(error, BackendError) else None
        partial.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        if write_failure:
            raise write_failure from error
        raise


def _run(source: Path, copy: Path | None, type_name: str, progress: Progress | None, what: str) -> list[str]:
    """Run the quantiser in a child process and return its output. If `copy` is None, do a dry run."""
    command = [
        sys.executable,
        "-m",
        __name__,
        str(source),
        str(copy or ""),
        str(quantisation_types()[type_name]),
    ]
    output: list[str] = []
    fraction = 0.0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if match := re.match(r"\[ *(\d+)/ *(\d+)\]", line):
                    # llama.cpp prints a tensor's number before quantising it, so only the preceding tensors
                    # are done.
                    fraction = (int(match[1]) - 1) / int(match[2])
                elif line.strip():
                    output.append(line.strip())
                if progress and not progress(what, fraction):
                    raise CancelledError(f"{what} was cancelled")
            status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
    if status == 0:
        return output
    # The exit status is the same for all causes, so only the output can tell them apart.
    text = " ".join(output)
    if re.search(r"requires an (imatrix|importance matrix)|Missing importance matrix", text):
        raise importance_matrix_error(type_name)
    reason = re.search(r"failed to quantize: (.*?)(?=  |$)", "  ".join(output))
    raise BackendError(
        f"llama.cpp could not create a {type_name} copy of {source}:"
        f" {reason[1] if reason else (output or ['llama.cpp reported no reason'])[-1]} (status {status})",
        "check that the file is complete and that there is enough free disk space, or choose another --type",
    )


def importance_matrix_error(type_name: str) -> CapabilityError:
    """Return the error for a type that requires an importance matrix."""
    return CapabilityError(
        f"{type_name} needs an importance matrix, which edgespec cannot create",
        "choose Q2_K, Q3_K_S, IQ4_NL or Q4_0",
    )


def _main(source: str, copy: str, type_number: str) -> int:
    """Quantise a model in the child process, printing llama.cpp's log and a periodic heartbeat to stdout.

    If stdout is closed, the parent process has exited, so the child exits too.
    """
    import llama_cpp

    # Ignore Ctrl-C, because the parent process handles it by killing this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = threading.Lock()

    def write(text: str) -> None:
        with lock:
            try:
                os.write(1, text.encode())
            except OSError:
                os._exit(1)

    def on_line(_level: int, text: bytes, _user_data: object) -> None:
        write(text.decode("utf-8", "replace"))

    def heartbeat() -> None:
        while True:
            time.sleep(_HEARTBEAT_SECONDS)
            write("\n")

    callback: Any = llama_cpp.llama_log_callback(on_line)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    threading.Thread(target=heartbeat, daemon=True).start()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(type_number)
    params.allow_requantize = True
    params.dry_run = not copy
    status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(copy), ctypes.byref(params))
    with lock:  # Hold the lock, so that the heartbeat thread cannot print while the process exits.
        os._exit(status)


if __name__ == "__main__":
    _main(*sys.argv[1:])
