"""llama.cpp's own server: a process for each configuration, asked over HTTP."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from time import perf_counter as now
from typing import Any

import httpx2

from edgespec.errors import EdgespecError
from scripts.peers.replies import Asked, Run

__all__ = ["LlamaServer", "body_for", "kernels_of", "kernels_of_binary", "run_of", "version_of"]

_START_SECONDS = 300.0
_REPLY_SECONDS = 1800.0
_TELLING = re.compile(r"error|fail|invalid|unable|abort", re.IGNORECASE)


class LlamaServer:
    """One llama-server. Nothing of a prompt is kept for the next one."""

    def __init__(self, binary: Path, flags: Sequence[str]) -> None:
        self._binary = binary
        self._flags = tuple(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = ""
        self._failed = False
        # No kept connections: the server may be held still for longer than it would keep them.
        self._client = httpx2.Client(
            limits=httpx2.Limits(max_keepalive_connections=0), timeout=_REPLY_SECONDS, trust_env=False
        )
        self._address = ""

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        assert self._process
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until the model is loaded. Raises EdgespecError with what it said last."""
        port = _free_port()
        self._address = f"http://127.0.0.1:{port}"
        command = [str(self._binary), *self._flags, "--host", "127.0.0.1", "--port", str(port)]
        with tempfile.NamedTemporaryFile("wb", prefix="llama-server-", suffix=".log", delete=False) as log:
            self._log = log.name
            try:
                # A session of its own: Ctrl-C is ours to handle.
                self._process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                raise EdgespecError(
                    f"{self._binary} cannot be started: {error.strerror}",
                    "scripts/build_llama_server builds one",
                ) from error
        until = monotonic() + _START_SECONDS
        while not self._ready():
            if self._process.poll() is not None:
                raise self._failure(
                    f"llama-server ended at its start (exit status {self._process.returncode})"
                )
            if monotonic() > until:
                raise self._failure(f"llama-server was not ready after {_START_SECONDS:.0f} s")
            sleep(0.05)

    def _ready(self) -> bool:
        try:
            return bool(self._client.get(f"{self._address}/health", timeout=5).status_code == 200)
        except httpx2.TransportError:
            return False

    def ask(self, prompt: Sequence[int], asked: Asked) -> Run:
        """A reply. Raises EdgespecError."""
        body = body_for(prompt, asked)
        started = now()
        try:
            response = self._client.post(f"{self._address}/completion", json=body)
        except httpx2.TransportError as error:
            raise self._failure(f"llama-server does not answer ({type(error).__name__})") from error
        seconds = now() - started
        if response.status_code != 200:
            raise self._failure(
                f"llama-server answers with status {response.status_code}: {response.text[:200]}"
            )
        return run_of(response.json(), len(prompt), seconds)

    def _failure(self, what: str) -> EdgespecError:
        self._failed = True
        said = Path(self._log).read_text("utf-8", "replace").splitlines()
        telling = [line for line in said if _TELLING.search(line)]
        last = (telling or said or [""])[-1]
        return EdgespecError(f"{what}: {last}" if last else what, f"its log is {self._log}")

    def stop(self) -> None:
        """End it, whatever it does. The log stays only where it failed."""
        self._client.close()
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if not self._failed:
            Path(self._log).unlink(missing_ok=True)


def body_for(prompt: Sequence[int], asked: Asked) -> dict[str, Any]:
    """The request: the very tokens, and only the samplers that were asked for."""
    return {
        "prompt": list(prompt),
        "n_predict": asked.max_tokens,
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "samplers": ["top_k", "top_p", "min_p", "temperature"],
        "seed": asked.seed,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def run_of(answer: Mapping[str, Any], prompt_tokens: int, seconds: float) -> Run:
    """What an answer of /completion tells; `seconds` by our clock. Raises EdgespecError.

    The server counts the first token as made with the prompt: its time for the reply holds the others.
    """
    try:
        tokens, timings = answer["tokens"], answer["timings"]
        generated, read = int(timings["predicted_n"]), int(timings["prompt_n"])
        later_seconds = float(timings["predicted_ms"]) / 1000
        accepted = int(timings.get("draft_n_accepted", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise EdgespecError(
            f"the answer of llama-server has no {error}", "use a version that answers with tokens and timings"
        ) from error
    if read != prompt_tokens:
        raise EdgespecError(
            f"llama-server read {read} tokens of a prompt of {prompt_tokens}",
            "the figures would not be alike",
        )
    return Run(tuple(tokens), max(0, generated - 1), later_seconds, seconds, accepted, generated - accepted)


def kernels_of(text: str) -> str:
    """The instructions and build options that llama_print_system_info tells, wherever it was printed."""
    found = re.findall(r"\b([A-Z][A-Z0-9_]+) = 1\b", text)
    return " ".join(dict.fromkeys(found))


def kernels_of_binary(binary: Path) -> str:
    """What it tells of itself before it finds that the model is not there."""
    with tempfile.TemporaryDirectory() as empty:
        told = [binary, "--log-verbosity", "4", "--offline", "--port", str(_free_port())]
        told += ["--model", f"{empty}/none.gguf"]
        said = subprocess.run(told, capture_output=True, text=True, timeout=60, check=False)
    lines = (said.stdout + said.stderr).splitlines()
    return kernels_of(next((line for line in lines if "system_info" in line), ""))


def version_of(binary: Path) -> str:
    """What it calls itself. Raises EdgespecError where it cannot be run."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EdgespecError(
            f"{binary} cannot be run: {error}", "scripts/build_llama_server builds a llama-server"
        ) from error
    return "; ".join((said.stdout + said.stderr).split("\n")).strip("; ")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
