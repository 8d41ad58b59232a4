"""Run the inputs of one subject in a child process. Each request and each answer is one line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from types import TracebackType
from typing import Any

import psutil

import edgespec
from edgespec.errors import EdgespecError

Files = Mapping[str, bytes]
"""The files of one input: their contents by path."""

PRODUCT = str(Path(edgespec.__file__).parent) + os.sep
"""The package's folder, with a trailing separator, because a checkout can also be named edgespec."""


def random_for(seed: int, subject: str, number: int) -> Random:
    """Return a random number generator for one input, seeded only by the arguments."""
    return Random(f"{seed}/{subject}/{number}")


def write_files(folder: Path, files: Files) -> None:
    """Replace the contents of a folder with these files."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def main(place: str, subject: str, folder: Path) -> None:
    """Answer requests from stdin until it is closed. Other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    failed_elsewhere: list[BaseException] = []
    threading.excepthook = lambda args: failed_elsewhere.append(args.exc_value or args.exc_type())
    sys.unraisablehook = lambda args: failed_elsewhere.append(args.exc_value or args.exc_type())
    process = psutil.Process()
    functions: Any = resolve_name(place)
    answers.write('{"outcome": "started"}\n')
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        input_folder = folder / "input"
        if "number" in request:
            write_files(input_folder, functions.make(random_for(request["seed"], subject, request["number"])))
        else:
            input_folder = Path(request["folder"])
        answer = _answer(functions, input_folder, failed_elsewhere)
        answer["resident_bytes"] = process.memory_info().rss
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(functions: Any, folder: Path, failed_elsewhere: list[BaseException]) -> dict[str, Any]:
    failed_elsewhere.clear()
    outcome = "accepted"
    try:
        functions.run(folder)
    except EdgespecError:
        outcome = "rejected"
    except BaseException as error:
        return _traceback(error)
    return _traceback(failed_elsewhere[0]) if failed_elsewhere else {"outcome": outcome}


def _traceback(error: BaseException) -> dict[str, Any]:
    return {
        "outcome": "traceback",
        "signature": f"{type(error).__name__} in {_place(error.__traceback__)}",
        "detail": "".join(traceback.format_exception(error))[-4000:],
    }


def _place(trace: TracebackType | None) -> str:
    """Return the innermost function of edgespec in a traceback, or else the innermost function."""
    frames = traceback.extract_tb(trace)
    ours = [frame for frame in frames if frame.filename.startswith(PRODUCT)]
    innermost = (ours or frames)[-1:]
    return "".join(f"{Path(frame.filename).name}, {frame.name}" for frame in innermost) or "unknown place"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
