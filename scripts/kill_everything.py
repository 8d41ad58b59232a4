#!/usr/bin/env python3
"""Whatever takes long is killed at random instants: chats and saves, downloads, and what is prepared.

Chats are `kill_chats.py`'s, of one program and of two at once. A download, or the making of halves or of a
copy, is begun again and again and killed; after each kill what is there must be whole or not be there, and in
the end a run that nobody kills must finish. On systems that fork.

    python scripts/kill_everything.py --kills 200
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

from kill_chats import forked

import edgespec.backends.llamacpp  # here, so that no child has to
from edgespec.catalog import find_installed, resolve
from edgespec.catalog.catalogue import load_catalogue
from edgespec.catalog.download import fetch
from edgespec.errors import ModelNotFoundError
from edgespec.prepare.layerskip import prepare_layerskip
from edgespec.prepare.lowbit import prepare_lowbit
from edgespec.prepare.store import PreparedModel, check_prepared, list_prepared, read_prepared, store_folder

REPOSITORY = "someone/tiny-GGUF"
WHOLE, PARTS = "tiny-Q4_K_M.gguf", "parts/tiny-Q8_0-{:05}-of-00003.gguf"
SHARES = {"chats": 0.2, "together": 0.2, "downloads": 0.3, "layerskip": 0.15, "lowbit": 0.15}

# How many programs have the same chats.
TOGETHER = {"chats": 1, "together": 2}


@dataclass
class Work:
    """Something that takes long. run: does it. look: what is wrong with what is there, for who comes next."""

    run: Callable[[], object]
    look: Callable[[], list[str]]
    there: Callable[[], bool]
    again: Callable[[], object]
    found: dict[str, Any] = field(default_factory=lambda: {"kills": 0, "finished": 0, "wrong": []})


def main() -> int:
    """Kill, look, and say what was found as JSON; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of all kinds together")
    parser.add_argument("--only", choices=sorted(SHARES), help="one kind")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    shares = {asked.only: 1.0} if asked.only else SHARES
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hub, stop = _hub(folder)
        os.environ |= {
            "EDGESPEC_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_ENDPOINT": hub,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OLLAMA_MODELS": str(folder / "ollama"),
        }
        import huggingface_hub.constants  # reads the environment once  # noqa: F401

        works = {
            "downloads": _downloads(folder / "hub"),
            "layerskip": _preparing(folder, lambda path, to: prepare_layerskip(path, 4, to=to)),
            "lowbit": _preparing(folder, lambda path, to: prepare_lowbit(path, "Q4_0", to=to)),
        }
        for kind, share in shares.items():
            kills = max(1, round(asked.kills * share))
            if kind in TOGETHER:
                found[kind] = _chats(kills, asked.seed, TOGETHER[kind])
            else:
                _kill(works[kind], kills, random.Random(f"{kind} {asked.seed}"))
                found[kind] = works[kind].found
        os.kill(stop, signal.SIGKILL)
        os.waitpid(stop, 0)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if any(each["wrong"] for each in found.values()) else 0


def _chats(kills: int, seed: int, together: int) -> dict[str, Any]:
    script = Path(__file__).with_name("kill_chats.py")
    told = {"kills": kills, "looks": max(1, kills // 20), "seed": seed, "together": together}
    options = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(script), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    if done.returncode and not found["wrong"]:
        found["wrong"] = ["something half written was left"]
    return found


def _kill(work: Work, kills: int, luck: random.Random) -> None:
    """Begin and kill so many times, at instants spread over what one run takes; then let one finish."""
    wrong = work.found["wrong"]
    work.again()
    began = time.monotonic()
    wrong += [f"the first run: {said}" for said in _ended(work)]
    takes = time.monotonic() - began
    work.again()
    for kill in range(kills):
        child = forked(work.run)
        time.sleep(luck.uniform(0.0, 1.1 * takes))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and status:
            wrong.append(f"the run before kill {kill} ended with {status}")
        work.found["kills"] += 1
        wrong += [f"after kill {kill}: {said}" for said in work.look()]
        # What is whole is done with; and now and then a run must finish what those before it left.
        if work.there() or luck.random() < 0.1:
            wrong += [f"the run after kill {kill}: {said}" for said in _ended(work)]
            work.found["finished"] += 1
            work.again()
    wrong += [f"the last run: {said}" for said in _ended(work)]
    work.found["finished"] += 1


def _ended(work: Work) -> list[str]:
    """What is wrong after a run that nobody killed."""
    _, status = os.waitpid(forked(work.run), 0)
    if status:
        return [f"it ended with {status}"]
    return [*work.look(), *([] if work.there() else ["nothing is there"])]


def _hub(folder: Path) -> tuple[str, int]:
    """A hub in a process of its own: its address, and the number of the process."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.catalog.stand_in_hub import StandInHub

    told, tells = os.pipe()

    def serve() -> None:
        # That a client is gone is no news here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        hub = StandInHub(files=_files())
        hub.start()
        os.write(tells, hub.url.encode())
        signal.pause()

    folder.mkdir(exist_ok=True)
    stop = forked(serve)
    url = os.read(told, 100).decode()
    os.close(told)
    os.close(tells)
    return url, stop


def _files() -> dict[str, bytes]:
    """A model that is one file, one in three parts, and what lies beside them."""
    target = _demo().read_bytes()
    parts = {PARTS.format(i): b"GGUF" + bytes([i]) * 3_000_000 for i in (1, 2, 3)}
    return {"README.md": b"# tiny", WHOLE: target, **parts}


def _demo() -> Path:
    path = next(entry.embedded_path for entry in load_catalogue().entries if entry.name == "demo")
    assert path is not None
    return path


def _downloads(cache: Path) -> Work:
    files = _files()
    wanted = {
        "Q4_K_M": [files[WHOLE]],
        "Q8_0": [data for name, data in sorted(files.items()) if name.startswith("parts/")],
    }

    def run() -> None:
        for quantisation in wanted:
            fetch(REPOSITORY, quantisation)

    def here(quantisation: str) -> Path | None:
        try:
            return resolve(f"{REPOSITORY}:{quantisation}", allow_download=False).path
        except ModelNotFoundError:
            return None

    def seen() -> list[str]:
        wrong = []
        for quantisation, parts in wanted.items():
            first = here(quantisation)
            names = [PARTS.format(i).rpartition("/")[2] for i in (1, 2, 3)] if len(parts) > 1 else [WHOLE]
            if first and [first.with_name(name).read_bytes() for name in names] != parts:
                wrong.append(f"{first} is used and is not whole")
        shelf = [one.path for one in find_installed().models if one.place == "hub"]
        return wrong + [f"{path} is on the shelf and is not whole" for path in shelf if not _is_demo(path)]

    return Work(run, seen, lambda: all(map(here, wanted)), partial(_cleared, cache))


def _is_demo(path: Path) -> bool:
    return path.read_bytes() == _demo().read_bytes()


def _preparing(folder: Path, prepare: Callable[[Path, Path | None], PreparedModel]) -> Work:
    """In the store and in a folder that the user named, one after the other."""
    own = folder / "own" / "made"

    def run() -> None:
        prepare(_demo(), None)
        prepare(_demo(), own)

    def seen() -> list[str]:
        return [said for prepared in list_prepared() if (said := _damage(prepared))]

    def there() -> bool:
        return len(list_prepared()) >= 2 and own.is_dir() and not _damage(read_prepared(own))

    def again() -> None:
        _cleared(store_folder())
        _cleared(own.parent)

    return Work(run, seen, there, again)


def _damage(prepared: PreparedModel) -> str:
    try:
        check_prepared(prepared, _demo(), full=True)
    except edgespec.EdgespecError as error:
        return str(error)
    return ""


def _cleared(folder: Path) -> None:
    if folder.exists():
        subprocess.run(["rm", "-rf", "--", folder], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
