#!/usr/bin/env python3
"""Kill chats, downloads and `edgespec prepare` at random times and check the data left behind.

    python scripts/kill_everything.py --kills 200

Chats are tested by kill_chats.py, with one program and with two at once. Downloads and preparations are
repeatedly started and killed. After each kill, every model that edgespec finds must be complete. At the end,
a run without a kill must succeed. Requires a system with fork.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import edgespec.backends.llamacpp  # Import once, before any fork.
from edgespec.errors import ModelNotFoundError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit, write_substitutes
from edgespec.store.catalogue import load_catalogue
from edgespec.store.download import fetch
from edgespec.store.installed import find_installed
from edgespec.store.prepared_files import (
    PreparedModel,
    check_prepared,
    list_prepared,
    read_prepared,
    store_folder,
)
from edgespec.store.reference import resolve
from scripts.kill_chats import fork

REPOSITORY = "someone/tiny-GGUF"
SINGLE_FILE, PART = "tiny-Q4_K_M.gguf", "parts/tiny-Q8_0-{:05}-of-00003.gguf"
# Each task's share of the kills.
SHARES = {
    "chats": 0.2,
    "shared-chats": 0.2,
    "downloads": 0.3,
    "layerskip": 0.1,
    "lowbit": 0.1,
    "substitutes": 0.1,
}
# Layers of the demo model to make low-bit copies of.
_STREAMED_LAYERS = (2, 4, 6, 8)
# Number of programs that use the same chats at once.
CHAT_PROCESSES = {"chats": 1, "shared-chats": 2}


@dataclass
class Work:
    """A task that the script starts and kills repeatedly.

    Attributes:
        run: Does the task once.
        check: Returns one message for each incomplete model that edgespec would use.
        is_complete: Returns whether the result of the task exists and is complete.
        reset: Deletes the result of the task.
        results: Number of kills, number of complete runs, and error messages.
    """

    run: Callable[[], object]
    check: Callable[[], list[str]]
    is_complete: Callable[[], bool]
    reset: Callable[[], object]
    results: dict[str, Any] = field(default_factory=lambda: {"kills": 0, "finished": 0, "errors": []})


def main() -> int:
    """Kill, check and print the results as JSON. Return 1 if any check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="number of kills of all tasks together (default: %(default)s)"
    )
    parser.add_argument("--only", choices=sorted(SHARES), help="run only one task")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shares = {args.only: 1.0} if args.only else SHARES
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hub_url, hub_pid = _start_hub(folder)
        os.environ |= {
            "EDGESPEC_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_ENDPOINT": hub_url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OLLAMA_MODELS": str(folder / "ollama"),
        }
        import huggingface_hub.constants  # reads the environment when it is imported  # noqa: F401

        works = {
            "downloads": _download_work(folder / "hub"),
            "layerskip": _prepare_work(folder, lambda path, to: prepare_layerskip(path, 4, to=to)),
            "lowbit": _prepare_work(folder, lambda path, to: prepare_lowbit(path, "Q4_0", to=to)),
            "substitutes": _prepare_work(
                folder, lambda path, to: write_substitutes(path, _STREAMED_LAYERS, {}, "Q4_0", to=to)
            ),
        }
        for kind, share in shares.items():
            kills = max(1, round(args.kills * share))
            if kind in CHAT_PROCESSES:
                results[kind] = _kill_chats(kills, args.seed, CHAT_PROCESSES[kind])
            else:
                _kill(works[kind], kills, random.Random(f"{kind} {args.seed}"))
                results[kind] = works[kind].results
        os.kill(hub_pid, signal.SIGKILL)
        os.waitpid(hub_pid, 0)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if any(each["errors"] for each in results.values()) else 0


def _kill_chats(kills: int, seed: int, processes: int) -> dict[str, Any]:
    script = Path(__file__).with_name("kill_chats.py")
    options = {"kills": kills, "check-every": max(1, kills // 20), "seed": seed, "processes": processes}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(script), *words]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    results: dict[str, Any] = json.loads(completed.stdout)
    if completed.returncode and not results["errors"]:
        results["errors"] = [f"{results['remaining_temporary_files']} temporary files were not deleted"]
    return results


def _kill(work: Work, kills: int, random_times: random.Random) -> None:
    """Kill runs at times spread over the duration of one run, and let some runs finish."""
    errors = work.results["errors"]
    work.reset()
    started = time.monotonic()
    errors += [f"the first run: {error}" for error in _run_to_end(work)]
    run_seconds = time.monotonic() - started
    work.reset()
    for kill in range(kills):
        child = fork(work.run)
        time.sleep(random_times.uniform(0.0, 1.1 * run_seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and status:
            errors.append(f"the run before kill {kill} ended with wait status {status}")
        work.results["kills"] += 1
        errors += [f"after kill {kill}: {error}" for error in work.check()]
        # A complete result ends a series of kills. Some series end earlier, to test that a run resumes.
        if work.is_complete() or random_times.random() < 0.1:
            errors += [f"the run after kill {kill}: {error}" for error in _run_to_end(work)]
            work.results["finished"] += 1
            work.reset()
    errors += [f"the last run: {error}" for error in _run_to_end(work)]
    work.results["finished"] += 1


def _run_to_end(work: Work) -> list[str]:
    """Run the task to its end and return the errors."""
    _, status = os.waitpid(fork(work.run), 0)
    if status:
        return [f"it ended with wait status {status}"]
    return [*work.check(), *([] if work.is_complete() else ["there is no complete result"])]


def _start_hub(folder: Path) -> tuple[str, int]:
    """Start a fake Hugging Face server in a child process. Return its URL and process id."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.store.stand_in_hub import StandInHub

    read_end, write_end = os.pipe()

    def serve() -> None:
        # Discard the tracebacks that the server prints for connections closed by a kill.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        hub = StandInHub(files=_hub_files())
        hub.start()
        os.write(write_end, hub.url.encode())
        signal.pause()

    folder.mkdir(exist_ok=True)
    pid = fork(serve)
    url = os.read(read_end, 100).decode()
    os.close(read_end)
    os.close(write_end)
    return url, pid


def _hub_files() -> dict[str, bytes]:
    """Return the files of the fake repository: a single-file model, a model in three parts and a README."""
    parts = {PART.format(i): b"GGUF" + bytes([i]) * 3_000_000 for i in (1, 2, 3)}
    return {"README.md": b"# tiny", SINGLE_FILE: _demo().read_bytes(), **parts}


def _demo() -> Path:
    path = next(entry.embedded_path for entry in load_catalogue().entries if entry.name == "demo")
    assert path is not None
    return path


def _download_work(cache: Path) -> Work:
    files = _hub_files()
    expected = {
        "Q4_K_M": [files[SINGLE_FILE]],
        "Q8_0": [data for name, data in sorted(files.items()) if name.startswith("parts/")],
    }

    def run() -> None:
        for quantisation in expected:
            fetch(REPOSITORY, quantisation)

    def downloaded(quantisation: str) -> Path | None:
        try:
            return resolve(f"{REPOSITORY}:{quantisation}", allow_download=False).path
        except ModelNotFoundError:
            return None

    def check() -> list[str]:
        errors = []
        for quantisation, parts in expected.items():
            first = downloaded(quantisation)
            single = len(parts) == 1
            names = [SINGLE_FILE] if single else [Path(PART.format(i)).name for i in (1, 2, 3)]
            if first and [first.with_name(name).read_bytes() for name in names] != parts:
                errors.append(f"{first} is incomplete and would be loaded")
        listed = [model.path for model in find_installed().models if model.place == "hub"]
        return errors + [f"{path} is incomplete and listed" for path in listed if not _is_demo(path)]

    return Work(run, check, lambda: all(map(downloaded, expected)), partial(_delete, cache))


def _is_demo(path: Path) -> bool:
    return path.read_bytes() == _demo().read_bytes()


def _prepare_work(folder: Path, prepare: Callable[[Path, Path | None], PreparedModel]) -> Work:
    """Return the task of preparing a model twice: in edgespec's store and in a user's folder."""
    user_folder = folder / "user" / "prepared"

    def run() -> None:
        prepare(_demo(), None)
        prepare(_demo(), user_folder)

    def check() -> list[str]:
        return [damage for prepared in list_prepared() if (damage := _damage(prepared))]

    def is_complete() -> bool:
        both_listed = len(list_prepared()) >= 2
        return both_listed and user_folder.is_dir() and not _damage(read_prepared(user_folder))

    def reset() -> None:
        _delete(store_folder())
        _delete(user_folder.parent)

    return Work(run, check, is_complete, reset)


def _damage(prepared: PreparedModel) -> str:
    """Check all data of a prepared model. Return the error message, or an empty string."""
    try:
        check_prepared(prepared, _demo(), full=True)
    except edgespec.EdgespecError as error:
        return str(error)
    return ""


def _delete(folder: Path) -> None:
    if folder.exists():
        subprocess.run(["rm", "-rf", "--", folder], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
