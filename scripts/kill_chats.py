#!/usr/bin/env python3
"""Chats that are killed at random instants, and what is left of them.

A child process talks in several chats, keeps what it reads and saves each turn, until it is killed. Then
another one looks: every saved chat must open and have each turn that was saved, a reply that goes on from it
must be that of a fresh run, and nothing half written may be left but what the next writer clears away. With
`--together 2` two programs have the same chats and kept texts at once, and one of them is killed while the
other goes on. On systems that fork.

    python scripts/kill_chats.py --kills 200 --together 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import edgespec
import edgespec.assembly.loading
import edgespec.backends.llamacpp  # here, so that no child has to
from edgespec.chat.store import ChatStore
from edgespec.errors import ChatFileError
from edgespec.reply import Reply
from edgespec.tui.archive import Archive
from edgespec.tui.open_chat import OpenChat

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
    parser.add_argument("--together", type=int, default=1, help="programs that run at once [default: 1]")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    luck = random.Random(asked.seed)
    found: dict[str, Any] = {"kills": 0, "looks": 0, "chats": 0, "replies": 0, "wrong": [], "most_litter": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["EDGESPEC_DATA_DIR"] = name
        running: list[int] = []
        for kill in range(asked.kills):
            while len(running) < asked.together:
                talks = 1000 * asked.seed + kill * asked.together + len(running)
                running.append(_begun(asked.target, talks, folder, waits=luck.random() < 0.9))
            time.sleep(luck.uniform(0.0, asked.longest))
            _killed(running.pop(luck.randrange(len(running))), found)
            found["most_litter"] = max(found["most_litter"], len(_litter(folder)))
            if kill % max(1, asked.looks) == 0 or kill == asked.kills - 1:
                while running:
                    _killed(running.pop(), found)
                _looked(asked.target, kill, folder, found)
        found["files"] = len(list(folder.rglob("*.kept")))
        found["litter_after_the_last_look"] = len(_litter(folder / "kept"))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong"] or found["litter_after_the_last_look"] else 0


def _begun(target: str, talks: int, folder: Path, *, waits: bool) -> int:
    """A program that talks. waits: until it has loaded; most are killed while they talk, some before."""
    told, tells = os.pipe()
    child = forked(lambda: _talk(target, talks, tells, folder / f"{talks}.said"))
    os.close(tells)
    if waits:
        os.read(told, 1)
    os.close(told)
    return child


def _killed(child: int, found: dict[str, Any]) -> None:
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    found["kills"] += 1
    if os.WIFEXITED(status):
        found["wrong"].append(f"a program ended with {os.WEXITSTATUS(status)} before kill {found['kills']}")


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


def _talk(target: str, talks: int, loaded: int, said: Path) -> None:
    """Chats without end: new ones, old ones gone on with, each turn saved. `loaded` hears when they begin."""
    # Nobody may listen any more.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    luck = random.Random(talks)
    store = ChatStore()
    archive = Archive(store)
    with edgespec.load(
        target, prefix_cache="disk", prefix_cache_disk=luck.choice(("12MB", "24MB")), **LOADED
    ) as runtime:
        prompts = _noting(runtime)
        with suppress(BrokenPipeError):
            os.write(loaded, b"1")
        while True:
            session = _session(store, archive, luck)
            talk = runtime.chat(session.system, session.messages)
            for _ in range(luck.randint(1, 2)):
                seed = luck.randint(0, 99)
                reply = talk.ask(luck.choice(ASKED), seed=seed, max_tokens=12)
                if luck.random() < 0.3:
                    seed = luck.randint(0, 99)
                    reply = _whole(talk.regenerate(seed=seed, max_tokens=12))
                session.follow(talk.messages)
                asyncio.run(archive.save(session, target))
                contents = [message.content for message in session.messages]
                _note(said, [session.id, contents, list(prompts[-1]), seed, list(reply.tokens)])
            runtime.save_prefix_cache()
            if luck.random() < 0.02:
                edgespec.delete_data("kept")


def _session(store: ChatStore, archive: Archive, luck: random.Random) -> OpenChat:
    """A new chat, one that is gone on with, or one that parts from another after its first turn."""
    saved = [chat for chat in store.list() if not chat.problem and chat.message_count < 12]
    if len(saved) <= 3:
        return OpenChat("You are a helper in a terminal. Be brief.")
    session = OpenChat.opened(asyncio.run(archive.load(luck.choice(saved[:4]).id)), {})
    if luck.random() < 0.2:
        session.id = ""
        del session.entries[2:]
    return session


def _noting(runtime: edgespec.Runtime) -> list[Sequence[int]]:
    """The prompts of all replies from now on."""
    prompts: list[Sequence[int]] = []
    stream_tokens = runtime.stream_tokens

    def noted(tokens: Sequence[int], **options: Any) -> edgespec.ReplyStream:
        prompts.append(tokens)
        return stream_tokens(tokens, **options)

    runtime.stream_tokens = noted  # type: ignore[method-assign]
    return prompts


def _whole(stream: edgespec.ReplyStream) -> Reply:
    for _ in stream:
        pass
    return stream.reply


def _note(path: Path, what: object) -> None:
    """At once: a line is there, or it is not."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, json.dumps(what).encode() + b"\n")
    os.close(handle)


def _noted(folder: Path) -> Iterator[list[Any]]:
    for path in sorted(folder.glob("*.said")):
        yield from map(json.loads, path.read_text().splitlines())


def _looked(target: str, kill: int, folder: Path, found: dict[str, Any]) -> None:
    """Look in a process of its own, as the next run would."""
    told = folder / "told.json"
    child = forked(lambda: told.write_text(json.dumps(_look(target, kill, folder))))
    _, status = os.waitpid(child, 0)
    if status:
        found["wrong"].append(f"after kill {kill} the next run ended with {status}")
        return
    seen = json.loads(told.read_text())
    found["looks"] += 1
    found["chats"], found["turns_saved"] = seen["chats"], seen["turns_saved"]
    found["replies"] += seen["replies"]
    found["wrong"] += seen["wrong"]


def _look(target: str, kill: int, folder: Path) -> dict[str, Any]:
    luck = random.Random(2000 + kill)
    store = ChatStore()
    chats = store.list()
    noted = list(_noted(folder))
    wrong = [f"{chat.id}: {chat.problem}" for chat in chats if chat.problem]
    wrong += [f"{chat_id} has lost a turn" for chat_id, said, *_ in noted if not _has(store, chat_id, said)]
    wrong += [f"{lock} is still held" for lock in folder.rglob("*lock") if not _free(lock)]
    # What was said beside others, and what is said now.
    replies = [tuple(each) for _, _, *each in luck.sample(noted, min(6, len(noted)))]
    with edgespec.load(target, prefix_cache="disk", prefix_cache_disk="24MB", **LOADED) as runtime:
        prompts = _noting(runtime)
        for entry in luck.sample(chats, min(3, len(chats))):
            chat = store.load(entry.id)
            reply = runtime.chat(chat.system, chat.messages).ask(ASKED[0], seed=kill, max_tokens=12)
            replies.append((prompts[-1], kill, list(reply.tokens)))
        runtime.save_prefix_cache()
    with edgespec.load(target, prefix_cache="none", **LOADED) as runtime:
        for prompt, seed, tokens in replies:
            runtime.clear_cache()
            reply = _whole(runtime.stream_tokens(prompt, seed=seed, max_tokens=12))
            if list(reply.tokens) != list(tokens):
                wrong.append(f"another reply to {len(prompt)} tokens")
    wrong = [f"after kill {kill}: {each}" for each in wrong]
    return {"chats": len(chats), "turns_saved": len(noted), "replies": len(replies), "wrong": wrong}


def _has(store: ChatStore, chat_id: str, said: list[str]) -> bool:
    """Whether a chat still begins with what was saved of it."""
    try:
        return [message.content for message in store.load(chat_id).messages[: len(said)]] == said
    except ChatFileError:
        return False


def _free(lock: Path) -> bool:
    try:
        FileLock(lock, timeout=0).acquire().lock.release()
    except Timeout:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
