"""Subjects with planted bugs, which the fuzzer must find."""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

from scripts.fuzzing.worker import Files

_LEAKED: list[bytes] = []


class _Letters:
    """Some letters, of which few inputs have an X."""

    @staticmethod
    def make(rng: Random) -> Files:
        return {"input": "".join(rng.choice("abcdefgX") for _ in range(2)).encode()}


def _has_x(folder: Path) -> bool:
    return b"X" in (folder / "input").read_bytes()


class Crash(_Letters):
    @staticmethod
    def run(folder: Path) -> None:
        if _has_x(folder):
            os.abort()


class Hang(_Letters):
    @staticmethod
    def run(folder: Path) -> None:
        if _has_x(folder):
            time.sleep(60)


class Traceback(_Letters):
    """Raises an error that is not edgespec's."""

    @staticmethod
    def run(folder: Path) -> None:
        if _has_x(folder):
            raise ValueError(folder)


class Leak:
    """Keeps 1 MiB for each input."""

    @staticmethod
    def make(rng: Random) -> Files:
        return {"input": rng.randbytes(4)}

    @staticmethod
    def run(folder: Path) -> None:
        _LEAKED.append((folder / "input").read_bytes() * 2**18)
