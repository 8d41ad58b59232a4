"""Start llama-server processes, one per configuration, and send them requests over HTTP."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from time import perf_counter as now
from typing import Any

import httpx2

from edgespec.errors import EdgespecError
from scripts.peers.replies import GenerationOptions, Run

_START_TIMEOUT_SECONDS = 300.0
_REPLY_TIMEOUT_SECONDS = 1800.0
_ERROR_LINE = re.compile(r"error|fail|invalid|unable|abort", re.IGNORECASE)


class LlamaServer:
    """A llama-server process without a prefix cache.

    Args:
        binary: The program.
        flags: Its flags.
        before_start: Called in the new process before the program starts, for example to enter a control
            group.
    """

    def __init__(
        self, binary: Path, flags: Sequence[str], before_start: Callable[[], None] | None = None
    ) -> None:
        self._binary = binary
        self._flags = tuple(flags)
        self._before_start = before_start
        self._process: subprocess.Popen[bytes] | None = None
        self._log = ""
        self._failed = False
        # Connections are not reused, because a suspended server may exceed the keep-alive timeout.
        self._client = httpx2.Client(
            limits=httpx2.Limits(max_keepalive_connections=0), timeout=_REPLY_TIMEOUT_SECONDS, trust_env=False
        )
        self._address = ""

    @property
    def pid(self) -> int:
        """Process id of the started server."""
        assert self._process
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until the model is loaded.

        Raises:
            EdgespecError: The server could not be started, exited, or was not ready in time. The message
                contains the last error line of its log.
        """
        port = _free_port()
        self._address = f"http://127.0.0.1:{port}"
        command = [str(self._binary), *self._flags, "--host", "127.0.0.1", "--port", str(port)]
        with tempfile.NamedTemporaryFile("wb", prefix="llama-server-", suffix=".log", delete=False) as log:
            self._log = log.name
            try:
                # Start a new session, so that Ctrl-C does not reach the server. The script stops it instead.
                self._process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    # The function only writes a file, so that it needs no lock of another thread.
                    preexec_fn=self._before_start,  # noqa: PLW1509
                )
            except OSError as error:
                raise EdgespecError(
                    f"{self._binary} cannot be started: {error.strerror}",
                    "build one with scripts/build_llama_server",
                ) from error
        deadline = monotonic() + _START_TIMEOUT_SECONDS
        while not self._ready():
            if self._process.poll() is not None:
                raise self._failure(
                    f"llama-server exited during startup with status {self._process.returncode}"
                )
            if monotonic() > deadline:
                raise self._failure(f"llama-server was not ready after {_START_TIMEOUT_SECONDS:.0f} s")
            sleep(0.05)

    def _ready(self) -> bool:
        try:
            return bool(self._client.get(f"{self._address}/health", timeout=5).status_code == 200)
        except httpx2.TransportError:
            return False

    def generate(self, prompt: Sequence[int], options: GenerationOptions) -> Run:
        """Generate a reply. Raises EdgespecError."""
        started = now()
        answer = self.request("/completion", request_body(prompt, options))
        return run_from_answer(answer, len(prompt), now() - started)

    def request(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and return the JSON object in the response. Raises EdgespecError."""
        try:
            response = self._client.post(f"{self._address}{path}", json=body)
        except httpx2.TransportError as error:
            raise self._failure(f"llama-server does not respond ({type(error).__name__})") from error
        if response.status_code != 200:
            raise self._failure(
                f"llama-server returned HTTP status {response.status_code}: {response.text[:200]}"
            )
        answer: dict[str, Any] = response.json()
        return answer

    def _failure(self, what: str) -> EdgespecError:
        self._failed = True
        lines = Path(self._log).read_text("utf-8", "replace").splitlines()
        error_lines = [line for line in lines if _ERROR_LINE.search(line)]
        last = (error_lines or lines or [""])[-1]
        return EdgespecError(f"{what}: {last}" if last else what, f"see its log {self._log}")

    def stop(self) -> None:
        """Kill the server. Its log is deleted unless a request or the start failed."""
        self._client.close()
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if not self._failed:
            Path(self._log).unlink(missing_ok=True)


def request_body(prompt: Sequence[int], options: GenerationOptions) -> dict[str, Any]:
    """Return the body of a /completion request, with the prompt as tokens and only the given samplers."""
    constraint = {"json_schema": json.loads(options.schema)} if options.schema else {}
    return {
        "prompt": list(prompt),
        "n_predict": options.max_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "samplers": ["top_k", "top_p", "min_p", "temperature"],
        "seed": options.seed,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
        **constraint,
    }


def run_from_answer(answer: Mapping[str, Any], prompt_tokens: int, seconds: float) -> Run:
    """Convert a response from /completion to measurements.

    llama-server counts the first token as part of the prompt, so `predicted_ms` covers only later tokens.

    Args:
        answer: The JSON object in the response.
        prompt_tokens: Number of tokens in the prompt.
        seconds: Duration of the whole request, measured by the caller.

    Raises:
        EdgespecError: A key is missing, or the server did not prefill the whole prompt.
    """
    try:
        tokens, timings = answer["tokens"], answer["timings"]
        generated, read = int(timings["predicted_n"]), int(timings["prompt_n"])
        later_seconds = float(timings["predicted_ms"]) / 1000
        accepted = int(timings.get("draft_n_accepted", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise EdgespecError(
            f"the response of llama-server has no key {error}",
            "use a version that returns tokens and timings",
        ) from error
    if read != prompt_tokens:
        raise EdgespecError(
            f"llama-server prefilled {read} of the {prompt_tokens} tokens of a prompt",
            "use a version that supports cache_prompt=false and prompts as tokens",
        )
    return Run(tuple(tokens), max(0, generated - 1), later_seconds, seconds, accepted, generated - accepted)


def enabled_features(system_info: str) -> list[str]:
    """Return the CPU features and build options that llama_print_system_info lists as enabled."""
    return list(dict.fromkeys(re.findall(r"\b([A-Z][A-Z0-9_]+) = 1\b", system_info)))


def binary_features(binary: Path) -> list[str]:
    """Return the enabled features of a llama-server binary.

    The server logs them before it loads the model, so it is started with a model path that does not exist.
    """
    with tempfile.TemporaryDirectory() as empty:
        command: list[str | Path] = [binary, "--log-verbosity", "4", "--offline", "--port", str(_free_port())]
        command += ["--model", f"{empty}/none.gguf"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = (completed.stdout + completed.stderr).splitlines()
    return enabled_features(next((line for line in lines if "system_info" in line), ""))


def binary_version(binary: Path) -> str:
    """Return the output of `llama-server --version` as one line.

    Raises:
        EdgespecError: The binary cannot be run.
    """
    try:
        completed = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EdgespecError(
            f"{binary} cannot be run: {error}", "build a llama-server with scripts/build_llama_server"
        ) from error
    return "; ".join((completed.stdout + completed.stderr).split("\n")).strip("; ")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
