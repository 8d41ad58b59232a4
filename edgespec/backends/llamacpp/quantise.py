"""Copies of GGUF files with fewer bits, made by llama.cpp's own quantiser.

The quantiser cannot be stopped from within, and a fault of its ends the process it runs in. So it runs in
a process of its own: this file is also that process's program.
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

from edgespec.backends.base import Progress
from edgespec.errors import BackendError, CancelledError, CapabilityError, OptionError

__all__ = [
    "QuantisedSize",
    "importance_matrix_error",
    "parse_quantisation_type",
    "quantisation_types",
    "quantise",
    "quantised_size",
]

# Of the library's types, those that are for keeping a model as it is, and those for training experiments.
_NOT_FOR_DRAFTS = {"F16", "BF16", "TQ1_0", "TQ2_0", "MXFP4_MOE", "NVFP4", "Q1_0", "Q2_0"}
# What the library refuses without an importance matrix; each refusal is its own, this only shortens a hint.
_NEED_MATRIX = ("IQ1", "IQ2", "IQ3_X", "Q2_K_S")
_PREFIX = "LLAMA_FTYPE_MOSTLY_"
_BEAT_SECONDS = 0.2
_GROWING = ".growing"
_WORDS = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}


@dataclass(frozen=True, slots=True)
class QuantisedSize:
    """Bytes of the weights now and as a copy; whether the type needs an importance matrix."""

    source_bytes: int
    copy_bytes: int
    needs_importance_matrix: bool


@cache
def quantisation_types() -> dict[str, int]:
    """The types a copy can have, and the library's numbers of them. Raises BackendMissingError."""
    from edgespec.backends.llamacpp.native import library

    lib = library()
    names = [name.removeprefix(_PREFIX) for name in dir(lib) if name.startswith(_PREFIX)]
    return {name: getattr(lib, _PREFIX + name) for name in sorted(names) if name not in _NOT_FOR_DRAFTS}


def parse_quantisation_type(name: str) -> str:
    """The type of that name, in any case and for short. Raises OptionError for one that is not there."""
    upper = name.upper()
    upper = _WORDS.get(upper, upper)
    if upper not in quantisation_types():
        usable = (known for known in quantisation_types() if not known.startswith(_NEED_MATRIX))
        raise OptionError(f"the type is {name!r}", f"choose one of {', '.join(usable)}")
    return upper


def quantised_size(source: Path, type_name: str) -> QuantisedSize:
    """What a copy would take, without making it. Raises BackendError when the file cannot be read."""
    text = "\n".join(_run(source, None, type_name, None, "looking at the weights"))
    sizes = [re.search(rf"{word} size *= *([0-9.]+) MiB", text) for word in ("model", "quant")]
    if sizes[0] is None or sizes[1] is None:
        raise BackendError(f"llama.cpp did not say how large a {type_name} copy of {source} is")
    source_bytes, copy_bytes = (int(float(size[1]) * 2**20) for size in sizes if size)
    return QuantisedSize(source_bytes, copy_bytes, "will require an imatrix" in text)


def quantise(source: Path, copy: Path, type_name: str, progress: Progress | None = None) -> None:
    """Write a copy of the model at `source` with the weights of a type.

    On any error, and on CancelledError when `progress` returns False, the copy is not there.
    Raises CapabilityError for a type that needs an importance matrix, BackendError with llama.cpp's reason.
    """
    # Under a name of its own: the quantiser of a run that was killed may write on for a moment.
    for leftover in copy.parent.glob(f"{glob.escape(copy.name)}.*{_GROWING}"):
        leftover.unlink(missing_ok=True)
    growing = copy.with_name(f"{copy.name}.{token_hex(4)}{_GROWING}")
    try:
        _run(source, growing, type_name, progress, f"making a {type_name} copy")
        growing.replace(copy)
    except BaseException:
        growing.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)
        raise


def _run(source: Path, copy: Path | None, type_name: str, progress: Progress | None, what: str) -> list[str]:
    """Run the quantiser in its own process; what it said. `copy` None: only say what would come out."""
    command = [
        sys.executable,
        "-m",
        __name__,
        str(source),
        str(copy or ""),
        str(quantisation_types()[type_name]),
    ]
    said: list[str] = []
    fraction = 0.0
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.match(r"\[ *(\d+)/ *(\d+)\]", line):
                    # The tensor of that number begins.
                    fraction = (int(found[1]) - 1) / int(found[2])
                elif line.strip():
                    said.append(line.strip())
                if progress and not progress(what, fraction):
                    raise CancelledError(f"{what} was cancelled")
            status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
    if status == 0:
        return said
    text = " ".join(said)
    if re.search(r"requires an (imatrix|importance matrix)|Missing importance matrix", text):
        raise importance_matrix_error(type_name)
    reason = re.search(r"failed to quantize: (.*?)(?=  |$)", "  ".join(said))
    raise BackendError(
        f"llama.cpp made no {type_name} copy of {source}:"
        f" {reason[1] if reason else (said or ['no reason was given'])[-1]} (status {status})",
        "check the file and the free space, or choose another --type",
    )


def importance_matrix_error(type_name: str) -> CapabilityError:
    """What to raise for a type that cannot be made without measuring the model on text first."""
    return CapabilityError(
        f"{type_name} needs an importance matrix, which edgespec does not make",
        "choose Q2_K, Q3_K_S, IQ4_NL or Q4_0",
    )


def _main(source: str, copy: str, type_number: str) -> int:
    """The program of the process: what llama.cpp says goes to stdout, and an empty line while it works.

    Whoever started it reads those lines; when nobody does any more it ends.
    """
    import llama_cpp

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            try:
                os.write(1, text.encode())
            except OSError:
                os._exit(1)

    def on_line(_level: int, text: bytes, _user_data: object) -> None:
        say(text.decode("utf-8", "replace"))

    def beat() -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            say("\n")

    callback: Any = llama_cpp.llama_log_callback(on_line)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    threading.Thread(target=beat, daemon=True).start()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = int(type_number)
    params.allow_requantize = True
    params.dry_run = not copy
    status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(copy), ctypes.byref(params))
    with lock:  # nothing more is said
        os._exit(status)


if __name__ == "__main__":
    _main(*sys.argv[1:])
