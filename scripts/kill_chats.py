#!/usr/bin/env python3
"""Kill chat programs at random times and check that no data is lost or damaged.

    python scripts/kill_chats.py --kills 200 --processes 2

A child process continues several chats with the prefix cache on disk and saves each turn, until it is killed.
Then another process checks that

- every saved chat can be opened and contains every saved turn,
- a reply that continues a chat is the same as without a prefix cache,
- no lock is still held, and the next program that writes deletes incomplete files.

With `--processes 2`, two programs share the chats and the prefix cache, and one is killed while the other
runs. `kill_terminal_chats.py` kills the chat in a terminal instead. Requires a system with fork.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import edgespec
import edgespec.api.loading
import edgespec.backends.llamacpp  # Import once, before any fork.
from edgespec.api.requests import ReplyRequest
from edgespec.chat.saved_chat import MessageTree
from edgespec.chat.store import ChatStore
from edgespec.decode.reply import Reply
from edgespec.errors import ChatFileError
from edgespec.tui.archive import Archive
from edgespec.tui.open_chat import ChatEntry, OpenChat

QUESTIONS = (
    "How do I list files by size?",
    "And by name?",
    "How do I unpack a tar file?",
    "What does chmod do?",
)
LOAD_OPTIONS: dict[str, Any] = {"draft": "none", "method": "none", "threads": 1, "context": 1024}


def main() -> int:
    """Kill, check and print the results as JSON. Return 1 if any check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo")
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default: %(default)s)")
    parser.add_argument("--check-every", type=int, default=1, help="kills between checks (default: 1)")
    parser.add_argument(
        "--max-seconds", type=float, default=0.6, help="longest time before a kill (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=1, help="programs that run at once (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random_times = random.Random(args.seed)
    results: dict[str, Any] = {
        "kills": 0,
        "checks": 0,
        "chats": 0,
        "replies": 0,
        "errors": [],
        "max_temporary_files": 0,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["EDGESPEC_DATA_DIR"] = name
        running: list[int] = []
        for kill in range(args.kills):
            while len(running) < args.processes:
                seed = 1000 * args.seed + kill * args.processes + len(running)
                # Kill most programs during a reply, and some while they load the model.
                wait = random_times.random() < 0.9
                running.append(_start(args.target, seed, folder, wait_until_loaded=wait))
            time.sleep(random_times.uniform(0.0, args.max_seconds))
            _kill(running.pop(random_times.randrange(len(running))), results)
            temporary = len(_temporary_files(folder))
            results["max_temporary_files"] = max(results["max_temporary_files"], temporary)
            if kill % args.check_every == 0 or kill == args.kills - 1:
                while running:
                    _kill(running.pop(), results)
                _check(args.target, kill, folder, results)
        results["files"] = len(list(folder.rglob("*.kept")))
        results["remaining_temporary_files"] = len(_temporary_files(folder / "kept"))
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    return 1 if results["errors"] or results["remaining_temporary_files"] else 0


def _start(target: str, seed: int, folder: Path, *, wait_until_loaded: bool) -> int:
    """Start a program that chats, and return its process id."""
    read_end, write_end = os.pipe()
    pid = fork(lambda: _chat(target, seed, write_end, folder / f"{seed}.turns"))
    os.close(write_end)
    if wait_until_loaded:
        os.read(read_end, 1)
    os.close(read_end)
    return pid


def _kill(pid: int, results: dict[str, Any]) -> None:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    results["kills"] += 1
    if os.WIFEXITED(status):
        code = os.WEXITSTATUS(status)
        results["errors"].append(f"a program exited with status {code} before kill {results['kills']}")


def _temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child process and return the process id.

    The child exits with status 0, or with 1 and a traceback on stderr if `work` raised an exception.
    """
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


def _chat(target: str, seed: int, loaded: int, log: Path) -> None:
    """Start and continue chats, saving each turn, until the process is killed.

    Args:
        target: The model.
        seed: Seed of all choices.
        loaded: File descriptor to which one byte is written when the model is loaded.
        log: File that records each saved turn.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # The parent may have closed its end of the pipe.
    choices = random.Random(seed)
    store = ChatStore()
    archive = Archive(store)
    quota = choices.choice(("12MB", "24MB"))
    with edgespec.load(target, prefix_cache="disk", prefix_cache_disk=quota, **LOAD_OPTIONS) as runtime:
        prompts = _recorded_prompts(runtime)
        with suppress(BrokenPipeError):
            os.write(loaded, b"1")
        while True:
            saved_chat = _choose_chat(store, archive, choices)
            chat = runtime.chat(saved_chat.system, saved_chat.messages)
            for _ in range(choices.randint(1, 2)):
                reply_seed = choices.randint(0, 99)
                reply = chat.ask(choices.choice(QUESTIONS), seed=reply_seed, max_tokens=12)
                if choices.random() < 0.3:
                    reply_seed = choices.randint(0, 99)
                    reply = _finish(chat.regenerate(seed=reply_seed, max_tokens=12))
                saved_chat.change_messages(MessageTree.linear(map(ChatEntry, chat.messages)))
                archive.save(saved_chat, target)
                contents = [message.content for message in saved_chat.messages]
                _append(log, [saved_chat.id, contents, list(prompts[-1]), reply_seed, list(reply.tokens)])
            runtime.save_prefix_cache()
            if choices.random() < 0.02:
                edgespec.delete_data("prefix-cache")


def _choose_chat(store: ChatStore, archive: Archive, choices: random.Random) -> OpenChat:
    """Return a new chat, a saved one, or a copy of a saved one that branches off after its first turn."""
    saved = [chat for chat in store.list() if not chat.problem and chat.message_count < 12]
    if len(saved) <= 3:
        return OpenChat("You are a helper in a terminal. Be brief.")
    chat = OpenChat.opened(archive.load(choices.choice(saved[:4]).id), {})
    if choices.random() < 0.2:
        chat.id = ""
        chat.tree = chat.tree.ending_at(chat.tree.path[:2][-1])
    return chat


def _recorded_prompts(runtime: edgespec.Runtime) -> list[Sequence[int]]:
    """Return a list to which the prompt of each later reply is appended."""
    prompts: list[Sequence[int]] = []
    stream = runtime._stream

    def recording(
        request: ReplyRequest, tokens: Sequence[int], *arguments: Any, **options: Any
    ) -> edgespec.ReplyStream:
        prompts.append(tokens)
        return stream(request, tokens, *arguments, **options)

    runtime._stream = recording  # type: ignore[method-assign]
    return prompts


def _finish(stream: edgespec.ReplyStream) -> Reply:
    for _ in stream:
        pass
    return stream.reply


def _append(path: Path, value: object) -> None:
    """Append one line of JSON with a single write, so that a kill cannot leave half a line."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, json.dumps(value).encode() + b"\n")
    os.close(handle)


def _saved_turns(folder: Path) -> Iterator[list[Any]]:
    for path in sorted(folder.glob("*.turns")):
        yield from map(json.loads, path.read_text().splitlines())


def _check(target: str, kill: int, folder: Path, results: dict[str, Any]) -> None:
    """Check the data in a new process, as if the program had been restarted."""
    report = folder / "report.json"
    child = fork(lambda: report.write_text(json.dumps(_check_data(target, kill, folder))))
    _, status = os.waitpid(child, 0)
    if status:
        results["errors"].append(f"after kill {kill} the next program ended with wait status {status}")
        return
    checked = json.loads(report.read_text())
    results["checks"] += 1
    results["chats"], results["turns_saved"] = checked["chats"], checked["turns_saved"]
    results["replies"] += checked["replies"]
    results["errors"] += checked["errors"]


def _check_data(target: str, kill: int, folder: Path) -> dict[str, Any]:
    choices = random.Random(2000 + kill)
    store = ChatStore()
    chats = store.list()
    turns = list(_saved_turns(folder))
    errors = [f"{chat.id}: {chat.problem}" for chat in chats if chat.problem]
    errors += [
        f"chat {chat_id} lost a turn"
        for chat_id, contents, *_ in turns
        if not _begins_with(store, chat_id, contents)
    ]
    errors += [f"{lock} is still held" for lock in folder.rglob("*lock") if not _is_free(lock)]
    # Check replies of the killed programs, and new replies that continue saved chats with the prefix cache.
    replies = [tuple(each) for _, _, *each in choices.sample(turns, min(6, len(turns)))]
    with edgespec.load(target, prefix_cache="disk", prefix_cache_disk="24MB", **LOAD_OPTIONS) as runtime:
        prompts = _recorded_prompts(runtime)
        for entry in choices.sample(chats, min(3, len(chats))):
            chat = store.load(entry.id)
            reply = runtime.chat(chat.system, chat.messages).ask(QUESTIONS[0], seed=kill, max_tokens=12)
            replies.append((prompts[-1], kill, list(reply.tokens)))
        runtime.save_prefix_cache()
    with edgespec.load(target, prefix_cache="none", **LOAD_OPTIONS) as runtime:
        for prompt, seed, tokens in replies:
            runtime.clear_cache()
            reply = _finish(runtime.stream_tokens(prompt, seed=seed, max_tokens=12))
            if list(reply.tokens) != list(tokens):
                errors.append(
                    f"the reply to a prompt of {len(prompt)} tokens differs without the prefix cache"
                )
    errors = [f"after kill {kill}: {error}" for error in errors]
    return {"chats": len(chats), "turns_saved": len(turns), "replies": len(replies), "errors": errors}


def _begins_with(store: ChatStore, chat_id: str, contents: list[str]) -> bool:
    """Return whether the first messages of a saved chat have the given contents."""
    try:
        return [message.content for message in store.load(chat_id).messages[: len(contents)]] == contents
    except ChatFileError:
        return False


def _is_free(lock: Path) -> bool:
    try:
        FileLock(lock, timeout=0).acquire().lock.release()
    except Timeout:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
