#!/usr/bin/env python3
"""Compare edgespec with llama-server on a model that is larger than the memory of a Linux control group.

    scripts/build_llama_server ../llama
    sudo scripts/bench_larger_than_memory.py big.gguf --draft small.gguf --llama-server ../llama/llama-server

Each program runs in a new control group whose memory limit is a fraction of the size of the target's file.
All replies have the same prompt tokens, length and temperature (0). `llama-server` maps the file into memory.
If it repacks weights, they do not fit, and the kernel kills it, so it also runs with `--no-repack`. Before
each run, the model files are removed from the page cache, because cached pages do not count towards the limit
of a program that did not read them. Run the script on copies of the files that no other program has mapped.

edgespec loads each configuration twice: its first load includes tests of the model and measurements, so its
reply is short and not counted. `lowbit` drafts with low-bit copies of the streamed layers and without a draft
model. They are prepared for the limit if there are none.

tokens/s   tokens after the first pass per second
s/pass     seconds per target pass. Without drafts, this is the time per token
read       bytes that the process reads from the disk per pass, including the pass over the prompt
disk       read speed of the disk: the median of measurements just before and after the reply
of disk    seconds per pass, divided by the time needed to read its bytes at this speed
peak       peak memory of the control group, which includes its page cache
killed     whether the kernel killed the process
equal      whether the tokens are those of edgespec's plain decoding with enough memory (`--reference`)

Needs permission to create control groups (root).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edgespec.errors import EdgespecError
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.system.cores import usable_cores
from edgespec.system.disks import read_bytes_per_second
from scripts.peers.configurations import server_flags
from scripts.peers.llama_server import LlamaServer
from scripts.peers.replies import GenerationOptions

_ROOT = Path("/sys/fs/cgroup")
_PROMPT = "Write a short story about a lighthouse keeper."
_REPOSITORY = Path(__file__).resolve().parents[1]
# Share of the memory limit for which low-bit copies are prepared. `find_budget` reserves 5 % of the limit for
# other programs, and a plan with slightly less memory than the copies were made for would not use them.
_COPIES_SHARE = 0.94
# Number of tokens of edgespec's first reply, which is not counted. It is long enough for `auto` to draft.
_FIRST_TOKENS = 8
# Number of measurements of the disk before and after each reply. Each takes 0.3 seconds.
_DISK_MEASUREMENTS = 2
# Share of the model's pages that may be left in the page cache, because other programs have mapped the file.
_MAX_CACHED_SHARE = 0.01


class _Group:
    """A control group (version 1 or 2) with a memory limit.

    Each run needs its own group, because not every kernel can reset the recorded peak.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._is_v1 = (_ROOT / "memory").is_dir()
        self._folder = (_ROOT / "memory" if self._is_v1 else _ROOT) / f"edgespec-bench-{os.getpid()}"
        self._folder.mkdir()
        self._file("memory.limit_in_bytes", "memory.max").write_text(str(limit_bytes))

    def _file(self, v1: str, v2: str) -> Path:
        return self._folder / (v1 if self._is_v1 else v2)

    def enter(self) -> None:
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        return int(self._file("memory.max_usage_in_bytes", "memory.peak").read_text())

    def kills(self) -> int:
        lines = self._file("memory.oom_control", "memory.events").read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def remove(self) -> None:
        self._folder.rmdir()


@dataclass(frozen=True)
class _Reply:
    """Measurements of one reply.

    Attributes:
        later_tokens: Tokens after the first target pass.
        later_seconds: Time of these tokens.
        passes: Target passes of these tokens.
        pass_seconds: Total time of these passes, without drafting. llama-server does not report it, so it is
            the same as `later_seconds` there.
        read_bytes: Bytes read from the disk, including those for the prompt's pass.
        notice: What edgespec says about the model.
        widths: Number of tokens in each pass, if the program reports it.
    """

    tokens: tuple[int, ...]
    later_tokens: int
    later_seconds: float
    passes: int
    pass_seconds: float
    read_bytes: int
    notice: str = ""
    widths: tuple[int, ...] = ()


def main() -> int:
    """Print the results as text, or save them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, help="the GGUF model")
    parser.add_argument("--draft", default="none", help="the draft model (default: none)")
    parser.add_argument("--llama-server", type=Path, help="the llama-server binary")
    parser.add_argument(
        "--shares", default="0.75,0.55", help="limits, relative to the file (default: %(default)s)"
    )
    parser.add_argument(
        "--grid",
        default="none,draft:3,draft:5,draft:8,draft:16",
        help="configurations of llama-server, as in bench_peers.py (default: %(default)s)",
    )
    parser.add_argument(
        "--repack", action="store_true", help="run llama-server also with its own layouts of the weights"
    )
    parser.add_argument(
        "--methods", default="none,auto,lowbit", help="edgespec's methods (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="length of a reply (default: %(default)s)")
    parser.add_argument(
        "--plain-tokens", type=int, help="length of a reply without drafts (default: that of all replies)"
    )
    parser.add_argument(
        "--reference", action="store_true", help="also generate the reply with enough memory, and compare"
    )
    parser.add_argument("--data", type=Path, help="folder for edgespec's measurements, to use them again")
    parser.add_argument("--json", type=Path, help="append each result to this file, as a line of JSON")
    parser.add_argument("--reply", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reply:
        print(json.dumps(asdict(_edgespec_reply(json.loads(args.reply)))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        data = args.data or Path(folder)
        environment = {
            "EDGESPEC_CACHE_DIR": str(data / "cache"),
            "EDGESPEC_DATA_DIR": str(data / "data"),
            "PYTHONPATH": str(_REPOSITORY),
        }
        _Comparison(args, os.environ | environment).run()
    return 0


def _edgespec_reply(settings: Mapping[str, Any]) -> _Reply:
    """Generate a reply in this process."""
    import edgespec

    with edgespec.load(settings["target"], settings["draft"], method=settings["method"]) as runtime:
        read_before = _read_bytes(os.getpid())
        reply = runtime.generate(_PROMPT, max_tokens=settings["max_tokens"], temperature=0)
        read_bytes = _read_bytes(os.getpid()) - read_before
        stats = reply.stats
        return _Reply(
            reply.tokens,
            stats.decoded_tokens,
            stats.decode_seconds,
            stats.target_passes,
            stats.verify_seconds,
            read_bytes,
            runtime.target.notice,
            tuple(len(each.tokens) for each in stats.rounds),
        )


def _read_bytes(pid: int) -> int:
    """Return how many bytes a process has read from disks."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


class _Comparison:
    """Runs all configurations, and prints a line for each of them."""

    _FORMAT = "{:>6}  {:<30}{:>9}{:>7}{:>8}{:>10}{:>7}{:>9}{:>10}{:>8}{:>7}"

    def __init__(self, args: argparse.Namespace, environment: Mapping[str, str]) -> None:
        self._args, self._environment = args, environment
        self._files = [*gguf_files(args.target), *([Path(args.draft)] if args.draft != "none" else [])]
        self._prompt: list[int] = []
        self._reference: tuple[int, ...] = ()

    def run(self) -> None:
        args = self._args
        if args.reference:
            self._reference = self._edgespec("none", args.tokens, None).tokens
        columns = "tokens/s,passes,s/pass,read MiB,GB/s,of disk,peak MiB,killed,equal"
        print(self._FORMAT.format("limit", "program", *columns.split(",")))
        for share in map(float, args.shares.split(",")):
            limit_bytes = int(args.target.stat().st_size * share)
            if args.llama_server:
                for name in filter(None, args.grid.split(",")):
                    for flags in ([], ["--no-repack"]) if args.repack else (["--no-repack"],):
                        program = " ".join(("llama-server", name, *flags))
                        with self._limited(share, program, limit_bytes) as run:
                            run.reply = self._server_reply(name, flags, run.group)
            for method in filter(None, args.methods.split(",")):
                if method == "lowbit":
                    self._prepare_copies(int(limit_bytes * _COPIES_SHARE))
                with self._limited(share, f"edgespec {method}", limit_bytes) as run:
                    self._edgespec(method, _FIRST_TOKENS, run.group)
                    run.forget()
                    run.reply = self._edgespec(method, self._length(method), run.group)

    def _length(self, name: str) -> int:
        return int((self._args.plain_tokens if name == "none" else None) or self._args.tokens)

    @contextmanager
    def _limited(self, share: float, name: str, limit_bytes: int) -> Iterator[_LimitedRun]:
        run = _LimitedRun(self._files, limit_bytes)
        try:
            yield run
        except EdgespecError as error:
            run.error = str(error)
        finally:
            result = run.finish()
        reply = run.reply
        equal = None
        if reply and self._reference:
            equal = reply.tokens == self._reference[: len(reply.tokens)]
        row = {"share": share, "program": name, **result, "equal": equal}
        print(
            self._FORMAT.format(
                f"{share:.0%}",
                name,
                *(
                    f"{reply.later_tokens / reply.later_seconds:.2f}" if reply else "-",
                    reply.passes if reply else "-",
                    f"{result['pass_seconds']:.3f}" if reply else "-",
                    round(result["bytes_per_pass"] / 2**20) if reply else "-",
                    f"{result['disk_bytes_per_second'] / 1e9:.2f}",
                    f"{result['of_disk']:.2f}" if reply else "-",
                    round(result["peak_bytes"] / 2**20),
                    "yes" if result["kills"] else "no",
                    {None: "-", True: "yes", False: "no"}[equal],
                ),
            ),
            flush=True,
        )
        if run.error:
            print(f"        {run.error}", flush=True)
        if self._args.json:
            with self._args.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"reply": asdict(reply) if reply else None}) + "\n")

    def _server_reply(self, name: str, flags: Sequence[str], group: _Group) -> _Reply:
        args, threads = self._args, str(usable_cores())
        common = [
            *("--model", str(args.target), "--ctx-size", "2048", "--parallel", "1", "--cache-ram", "0"),
            *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--offline"),
        ]
        server = LlamaServer(
            args.llama_server, [*common, *flags, *server_flags(name, args.draft)], before_start=group.enter
        )
        try:
            server.start()
            prompt = self._server_prompt(server)
            read_before = _read_bytes(server.pid)
            options = GenerationOptions(self._length(name), 0.0, 1, 0, 1.0, 0.0)
            run = server.generate(prompt, options)
            read_bytes = _read_bytes(server.pid) - read_before
        finally:
            server.stop()
        # The first token comes from the pass over the prompt.
        passes = max(1, run.passes - 1)
        return _Reply(run.tokens, run.later_tokens, run.later_seconds, passes, run.later_seconds, read_bytes)

    def _server_prompt(self, server: LlamaServer) -> list[int]:
        if not self._prompt:
            messages = [{"role": "user", "content": _PROMPT}]
            text = server.request("/apply-template", {"messages": messages})["prompt"]
            body = {"content": text, "add_special": False, "parse_special": True}
            self._prompt = server.request("/tokenize", body)["tokens"]
        return self._prompt

    def _edgespec(self, method: str, max_tokens: int, group: _Group | None) -> _Reply:
        args = self._args
        draft = args.draft if method in ("auto", "model") else "none"
        settings = {"target": str(args.target), "draft": draft, "method": method, "max_tokens": max_tokens}
        command = [sys.executable, __file__, str(args.target), "--reply", json.dumps(settings)]
        enter = group.enter if group else None
        return _Reply(**json.loads(self._output(command, enter)))

    def _prepare_copies(self, memory_bytes: int) -> None:
        prepare = ("prepare", "lowbit", str(self._args.target), "--for-memory", str(memory_bytes))
        self._output([sys.executable, "-m", "edgespec", *prepare])

    def _output(self, command: Sequence[str], enter: Any = None) -> str:
        done = subprocess.run(
            command,
            env=self._environment,
            capture_output=True,
            text=True,
            preexec_fn=enter,
            check=False,
        )
        if done.returncode:
            raise EdgespecError(f"status {done.returncode}: {done.stderr.strip()[-300:]}", "see above")
        return done.stdout.splitlines()[-1] if done.stdout else ""


class _LimitedRun:
    """The run of one configuration in a control group, with the speed of the disk before and after it."""

    def __init__(self, files: Sequence[Path], limit_bytes: int) -> None:
        self._files = files
        self._speeds: list[float] = []
        self.reply: _Reply | None = None
        self.error = ""
        self.forget()
        self.group = _Group(limit_bytes)

    def forget(self) -> None:
        """Remove the models from the page cache, and measure the disk."""
        for file in self._files:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if (cached := _cached_share(file)) > _MAX_CACHED_SHARE:
                print(f"warning: another program keeps {cached:.0%} of {file} in memory", file=sys.stderr)
        self._speeds.clear()
        self._measure_disk()

    def _measure_disk(self) -> None:
        self._speeds += [read_bytes_per_second(self._files[0]) for _ in range(_DISK_MEASUREMENTS)]

    def finish(self) -> dict[str, Any]:
        """Return the results, and remove the control group."""
        self._measure_disk()
        speed = median(self._speeds)
        result: dict[str, Any] = {
            "disk_bytes_per_second": speed,
            "peak_bytes": self.group.peak_bytes(),
            "kills": self.group.kills(),
        }
        self.group.remove()
        if self.reply:
            seconds = self.reply.pass_seconds / self.reply.passes
            read_bytes = self.reply.read_bytes / (self.reply.passes + 1)
            result |= {
                "pass_seconds": seconds,
                "bytes_per_pass": read_bytes,
                "of_disk": seconds / (read_bytes / speed) if read_bytes else 0.0,
            }
        return result


def _cached_share(file: Path) -> float:
    """Return the share of a file's pages that are in the page cache."""
    size_bytes = file.stat().st_size
    pages = -(-size_bytes // mmap.PAGESIZE)
    found = np.zeros(pages, np.uint8)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size_bytes, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in (view, found)]
        failed = ctypes.CDLL(None).mincore(addresses[0], ctypes.c_size_t(size_bytes), addresses[1])
        # Release the view, because a mapping with views cannot be closed.
        del view
    return 0.0 if failed else float((found & 1).mean())


if __name__ == "__main__":
    sys.exit(main())
