#!/usr/bin/env python3
"""Chats that are killed at random instants, and what is left of them.

A child process talks in several chats, keeps what it reads and saves each turn, until it is killed. Then
another one looks: every saved chat must open, a reply that goes on from it must be that of a fresh run, and
nothing half written may be left but what the next writer clears away. On systems that fork.

    python scripts/kill_chats.py --kills 200
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import edgespec
import edgespec.assembly.loading
import edgespec.backends.llamacpp  # here, so that no child has to
from edgespec.chat.store import ChatStore, SavedChat

ASKED = (
    "How do I list files by size?",
    "And by name?",
    "How do I unpack a tar file?",
    "What does chmod do?",
)
LOADED: dict[str, Any] = {"draft": "none", "method": "none", "threads": 1, "context": 1024}


def main() -> int:
    """Kill, look, and say what was found as JSON; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--looks", type=int, default=0, help="look after so many kills [default: each]")
    parser.add_argument("--longest", type=float, default=0.6, help="seconds until a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    luck = random.Random(asked.seed)
    found: dict[str, Any] = {"kills": 0, "looks": 0, "chats": 0, "replies": 0, "wrong": [], "most_litter": 0}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_DATA_DIR"] = folder
        for kill in range(asked.kills):
            told, tells = os.pipe()
            child = forked(lambda seed=kill, told=tells: _talk(asked.target, seed, told))  # type: ignore[misc]
            os.close(tells)
            # Most are killed while they talk, some while they load.
            if luck.random() < 0.9:
                os.read(told, 1)
            os.close(told)
            time.sleep(luck.uniform(0.0, asked.longest))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            found["kills"] += 1
            found["most_litter"] = max(found["most_litter"], len(_litter(Path(folder))))
            if kill % max(1, asked.looks) == 0 or kill == asked.kills - 1:
                _looked(asked.target, kill, Path(folder), found)
        found["files"] = len(list(Path(folder).rglob("*.kept")))
        found["litter_after_the_last_look"] = len(_litter(Path(folder) / "kept"))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong"] or found["litter_after_the_last_look"] else 0


def _litter(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def forked(work: Callable[[], object]) -> int:
    """Do this in a child process; its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _talk(target: str, seed: int, loaded: int) -> None:
    """Chats without end: new ones, old ones gone on with, each turn saved. `loaded` hears when they begin."""
    luck = random.Random(1000 + seed)
    store = ChatStore()
    with edgespec.load(target, keep="disk", keep_disk="24MB", **LOADED) as runtime:
        os.write(loaded, b"1")
        while True:
            saved = [chat for chat in store.list() if not chat.problem and chat.message_count < 12]
            chat = store.load(luck.choice(saved[:4]).id) if len(saved) > 3 else _new(store)
            talk = runtime.chat(chat.system, chat.messages)
            for _ in range(luck.randint(1, 2)):
                talk.ask(luck.choice(ASKED), seed=luck.randint(0, 99), max_tokens=12)
                now = datetime.now(UTC)
                store.save(SavedChat(chat.id, tuple(talk.messages), chat.created, now, system=chat.system))
            runtime.save_texts()


def _new(store: ChatStore) -> SavedChat:
    now = datetime.now(UTC)
    return SavedChat(store.new_id(), (), now, now, system="You are a helper in a terminal. Be brief.")


def _looked(target: str, kill: int, folder: Path, found: dict[str, Any]) -> None:
    """Look in a process of its own, as the next run would."""
    told = folder / "told.json"
    child = forked(lambda: told.write_text(json.dumps(_look(target, kill))))
    _, status = os.waitpid(child, 0)
    if status:
        found["wrong"].append(f"after kill {kill} the next run ended with {status}")
        return
    seen = json.loads(told.read_text())
    found["looks"] += 1
    found["chats"] = seen["chats"]
    found["replies"] += seen["replies"]
    found["wrong"] += seen["wrong"]


def _look(target: str, kill: int) -> dict[str, Any]:
    luck = random.Random(2000 + kill)
    store = ChatStore()
    chats = store.list()
    wrong = [f"after kill {kill}: {chat.id}: {chat.problem}" for chat in chats if chat.problem]
    replies: list[tuple[Sequence[int], int, Sequence[int]]] = []
    with edgespec.load(target, keep="disk", keep_disk="24MB", **LOADED) as runtime:
        stream_tokens = runtime.stream_tokens

        def noted(tokens: Sequence[int], **options: Any) -> edgespec.ReplyStream:
            prompts.append(tokens)
            return stream_tokens(tokens, **options)

        runtime.stream_tokens = noted  # type: ignore[method-assign]
        prompts: list[Sequence[int]] = []
        for entry in luck.sample(chats, min(3, len(chats))):
            chat = store.load(entry.id)
            reply = runtime.chat(chat.system, chat.messages).ask(ASKED[0], seed=kill, max_tokens=8)
            replies.append((prompts[-1], kill, reply.tokens))
        runtime.save_texts()
    with edgespec.load(target, keep="none", **LOADED) as runtime:
        for prompt, seed, tokens in replies:
            runtime.forget()
            stream = runtime.stream_tokens(prompt, seed=seed, max_tokens=8)
            for _ in stream:
                pass
            if stream.reply.tokens != tokens:
                wrong.append(f"after kill {kill}: another reply to {len(prompt)} tokens")
    return {"chats": len(chats), "replies": len(replies), "wrong": wrong}


if __name__ == "__main__":
    raise SystemExit(main())
