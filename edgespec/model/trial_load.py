"""Test new model files in a child process before loading them, because damaged files can cause crashes.

`main` runs in the child process.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, NamedTuple

from edgespec.errors import BackendError, CancelledError, EdgespecError, ModelFileError
from edgespec.model.base import Head, Progress
from edgespec.model.model_facts import Adapter
from edgespec.model.registry import FileFormat, all_files, backend_of, format_of
from edgespec.system.child_process import CRASH_SIGNALS, ChildProcess, module_arguments
from edgespec.system.facts import Facts
from edgespec.system.files import file_state
from edgespec.system.heap import limit_malloc_arenas
from edgespec.system.installation import package_version

# Maximum number of characters of llama.cpp's output to quote in an error message.
_MAX_REASON = 200
# Time limit of a trial load: a fixed number of seconds, plus the time to read the model's files at this many
# bytes per second.
_MAX_SECONDS, _SLOW_DISK = 60, 10 * 2**20
# CPU time limit of a trial load in seconds: a fixed amount, plus an amount per GiB of model files.
_MAX_CPU_SECONDS, _MAX_CPU_SECONDS_PER_GIB = 10, 2
# Seconds between progress reports while the child process prints nothing.
_PROGRESS_SECONDS = 0.1
# Name of the C++ exception for a failed allocation, which does not indicate a damaged model file.
_OUT_OF_MEMORY = "std::bad_alloc"
# Outcomes that the child process prints, one line per model. If the backend rejects the model's files, the
# reason follows as a JSON string.
_PASSED, _REFUSED = "passed", "refused"
# Memory limit of the trial's child process in bytes, excluding mapped files.
_MAX_MEMORY_BYTES = 4 * 2**30


class TrialModel(NamedTuple):
    """A model, or a head with its target, to test in a child process that may crash.

    Attributes:
        name: The model's name, for messages.
        path: Path of the model.
        form: The model's file format.
        runs: Whether to load the weights and run a few tokens, rather than only read the metadata.
        head: The head to test with the model, which has already passed its own test. None to test only the
            model.
        adapters: The adapters to test with the model, which has already passed its own test.
    """

    name: str
    path: Path
    form: FileFormat
    runs: bool
    head: Head | None = None
    adapters: tuple[Adapter, ...] = ()

    @property
    def tested_path(self) -> Path:
        """The path to blame for a crash: the adapter's or head's if one is tested, or else the model's."""
        if self.adapters:
            return Path(self.adapters[0].path)
        return self.head.path if self.head and self.head.path else self.path

    @property
    def files(self) -> list[Path]:
        """The files of the model, the head and the adapters. Raises OSError or ModelFileError on failure."""
        head = self.head.path if self.head else None
        adapters = [Path(adapter.path) for adapter in self.adapters]
        return [*self.form.files(self.path), *(all_files(head) if head else ()), *adapters]


def check_loadable(models: Sequence[TrialModel], progress: Progress | None = None) -> str:
    """Check in a child process that models can be loaded, unless their files have been checked before.

    Some damaged files make a backend abort, which cannot be caught. The result is saved and stays valid until
    a file or the backend's version changes.

    Args:
        models: The models to test.
        progress: Called during the trial. Returning False cancels it.

    Returns:
        A user-facing notice if the models could not be tested, or an empty string.

    Raises:
        ModelFileError: A file crashed the child process, now or in an earlier trial.
        BackendError: The child process was killed or took too long, or a file needs too much CPU time.
        BackendMissingError: A model's backend is not installed.
        CancelledError: `progress` returned False.
    """
    untried = {}
    for model in models:
        if (
            model.form.trial is None
            or (model.head and not (model.form.try_head and model.form.heads[model.head.method].can_crash))
            or (model.adapters and model.form.try_adapters is None)
        ):
            continue
        backend_of(model.form.name).require(model.name)
        key = _key(model)
        if key is None:
            continue
        known = _known(key)
        if known and known.failure:
            raise _failure(model, known.failure)
        if known is None or (model.runs and not known.ran):
            untried[key] = model
    if not untried:
        return ""
    limit_malloc_arenas()
    with ExitStack() as stack:
        try:
            child = stack.enter_context(_start_child(list(untried.values())))
        except OSError as error:
            return _not_tried(models, error.strerror or str(error))
        except EdgespecError as error:
            return _not_tried(models, error.what)
        for model in untried.values():
            # Import the backend while the child process runs, because loading the model needs it later
            # anyway.
            backend_of(model.form.name).preload()
        for key, model in untried.items():
            outcome = child.wait_for(model, progress)
            if outcome == _PASSED:
                _remember(key, _Result(model.runs))
            elif outcome == "":
                crash = child.crash(model)
                if not crash:
                    return _not_tried(models, "the process failed to start")
                _remember(key, _Result(model.runs, crash))
                raise _failure(model, crash)
    return ""


def why_refused(models: Sequence[TrialModel]) -> list[str]:
    """Return why the backend rejects each model, or an empty string if it may be able to load it.

    Only the metadata is loaded, in a child process. The results are saved and stay valid until a file or the
    backend's version changes.
    """
    reasons = [""] * len(models)
    untried: list[tuple[int, str]] = []
    for i, model in enumerate(models):
        if model.form.trial is None or (key := _key(model)) is None:
            continue
        if known := _known(key):
            reasons[i] = known.refusal or (known.failure and _failure(model, known.failure).what)
        else:
            untried.append((i, key))
    while untried:
        try:
            with _start_child([models[i] for i, _ in untried]) as child:
                outcome = _PASSED
                while untried and outcome:
                    i, key = untried.pop(0)
                    outcome = child.wait_for(models[i], None)
                    if outcome == _PASSED:
                        _remember(key, _Result(False))
                    elif outcome:
                        # Save only rejections that state a reason. Others may have a temporary cause, such as
                        # low memory.
                        if reason := outcome.removeprefix(_REFUSED):
                            reasons[i] = json.loads(reason)
                            _remember(key, _Result(False, refusal=reasons[i]))
                    elif crash := child.crash(models[i]):
                        # A new child process tests the remaining models.
                        reasons[i] = _failure(models[i], crash).what
                        _remember(key, _Result(False, crash))
        except (OSError, EdgespecError):
            break  # The models cannot be tried now. Loading them will report what is wrong.
    return reasons


def _not_tried(models: Sequence[TrialModel], why: str) -> str:
    names = " and ".join(model.name for model in models)
    return f"{names} could not be checked in a separate process before loading: {why}"


def _failure(model: TrialModel, reason: str) -> ModelFileError:
    return ModelFileError(
        f"{model.tested_path} is damaged or not supported:"
        f" {backend_of(model.form.name).name} crashed while loading it ({reason})",
        "download it again or choose another model (`edgespec chat --trust` skips this check, but then"
        " edgespec itself could crash)",
    )


def _key(model: TrialModel) -> str | None:
    """Return a digest of a model's files and backend version, or None if a file cannot be read."""
    try:
        states = [file_state(file) for file in model.files]
    except (OSError, ModelFileError):
        return None
    versions = [package_version(package) for package in backend_of(model.form.name).packages]
    head = (model.head.method, str(model.head.path)) if model.head else ()
    adapters = [adapter.path for adapter in model.adapters]
    parts = (os.path.abspath(model.path), states, versions, *head, *adapters)
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a trial load.

    Attributes:
        ran: Whether tokens were decoded.
        failure: Description of the crash. Empty if there was none.
        refusal: Why the backend rejected the files. Empty if it did not, or if the reason is unknown.
    """

    ran: bool
    failure: str = ""
    refusal: str = ""


def _known(key: str) -> _Result | None:
    """Return the saved trial result for this digest, or None if there is none."""
    match Facts().get("trial", key):
        case {"ran": bool(ran), "failure": str(failure), "refusal": str(refusal)}:
            return _Result(ran, failure, refusal)
    return None


def _remember(key: str, result: _Result) -> None:
    Facts().put("trial", {key: asdict(result)})


class _Child:
    """A running child process that loads models one by one. Created by `_start_child`.

    Args:
        process: The process. It prints progress and outcomes to stdout.
        errors: The file that receives the process's stderr.
        max_seconds: Combined time limit of all trials.
        cpu_seconds: Combined CPU time limit of all trials, set by the process itself.
    """

    def __init__(
        self, process: ChildProcess, errors: IO[bytes], max_seconds: float, cpu_seconds: int
    ) -> None:
        self._process, self._errors = process, errors
        self._max_seconds, self._cpu_seconds = max_seconds, cpu_seconds
        self._began = time.monotonic()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_lines, args=(process.stdout, self._lines.put))
        self._reader.start()

    def end(self) -> None:
        self._process.close()
        self._reader.join()

    def wait_for(self, model: TrialModel, progress: Progress | None) -> str:
        """Return the outcome of loading a model, or an empty string if the process exited first."""
        fraction = 0.0
        while True:
            if progress and not progress(f"checking {model.name} (first load only)", fraction):
                raise CancelledError(f"loading {model.name} was cancelled")
            if time.monotonic() > self._began + self._max_seconds:
                raise _stopped(model, f"timed out after {self._max_seconds:.0f} seconds")
            try:
                line = self._lines.get(timeout=_PROGRESS_SECONDS)
            except queue.Empty:
                continue
            if line is None or line == _PASSED or line.startswith(_REFUSED):
                return line or ""
            with suppress(ValueError):
                fraction = min(1.0, max(0.0, float(line)))

    def crash(self, model: TrialModel) -> str:
        """Return a description of the crash, or an empty string if the process exited with an error status.

        Raises:
            BackendError: The process was killed from outside, or used too much CPU time.
        """
        status = self._process.wait()
        assert status is not None  # because there is no timeout
        if 0 <= status <= 0xFF:
            return ""
        name = _signal_name(status)
        if name == "SIGXCPU":
            # Do not report the timeout as a crash, because the CPU may just be slow.
            raise BackendError(
                f"{model.tested_path} seems to be damaged or not supported:"
                f" {backend_of(model.form.name).name} needed more than {self._cpu_seconds} seconds of CPU"
                " time to load it and generate a few tokens",
                "download it again or choose another model; if you trust this file, `edgespec chat --trust`"
                " skips this check",
                code="trial_failed",
            )
        if status < 0 and -status not in CRASH_SIGNALS:
            raise _stopped(model, f"killed by {name}")
        message = self._crash_message()
        if _OUT_OF_MEMORY in message:
            raise _stopped(model, "out of memory")
        return message or name

    def _crash_message(self) -> str:
        """Return the failed assertion, or else the last line that the process printed."""
        self._errors.seek(0)
        lines = self._errors.read(2**20).decode("utf-8", "replace").split("\n")
        found = [line.strip() for line in lines if line.strip()]
        asserted = [line for line in found if "GGML_ASSERT" in line or "GGML_ABORT" in line]
        last = (asserted or found or [""])[-1]
        return re.sub(r"^\S*[/\\](?=[\w.-]+:\d+: )", "", last)[:_MAX_REASON]


@contextmanager
def _start_child(models: Sequence[TrialModel]) -> Iterator[_Child]:
    """Run a child process that tries to load models, and stop it at the end of the `with` block.

    Raises:
        OSError, ModelFileError: A file cannot be read.
        EdgespecError: The process cannot be started.
    """
    size_bytes = sum(file.stat().st_size for model in models for file in model.files)
    cpu_seconds = int(_MAX_CPU_SECONDS + _MAX_CPU_SECONDS_PER_GIB * size_bytes / 2**30)
    request = {
        "models": [
            (
                model.form.name,
                str(model.path),
                model.name,
                model.runs,
                _encode_head(model.head),
                [(adapter.path, adapter.scale) for adapter in model.adapters],
            )
            for model in models
        ],
        "cpu_seconds": cpu_seconds,
    }
    with tempfile.TemporaryFile() as errors:
        process = ChildProcess(
            [*module_arguments("edgespec.model.trial_load"), json.dumps(request)],
            errors=errors,
            # Keep ggml from starting a debugger to print a backtrace when it aborts.
            environment={"GGML_NO_BACKTRACE": "1"},
        )
        child = _Child(process, errors, _MAX_SECONDS + size_bytes / _SLOW_DISK, cpu_seconds)
        try:
            yield child
        finally:
            child.end()


def _stopped(model: TrialModel, why: str) -> BackendError:
    return BackendError(
        f"edgespec could not test {model.tested_path} in a separate process: {why}",
        "close other programs and try again; if you trust this file, `edgespec chat --trust` skips this"
        " check",
        code="trial_failed",
    )


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status:#x}"


def _read_lines(stream: IO[bytes], put: Callable[[str | None], None]) -> None:
    with suppress(ValueError):  # The stream was closed while lines were left in it.
        for line in stream:
            put(line.decode("ascii", "replace").strip())
    put(None)


def _encode_head(head: Head | None) -> list[str | None] | None:
    """Encode a head as JSON values for the request to `main`."""
    return None if head is None else [head.method, None if head.path is None else str(head.path)]


def _decode_head(head: Sequence[str | None]) -> Head:
    method, path = head
    assert method is not None
    return Head(method, None if path is None else Path(path))


def main() -> None:
    """Test each model in the request and print the outcome. Runs in the child process."""
    request = json.loads(sys.argv[-1])
    _limit_process(request["cpu_seconds"])
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for form_name, path, name, runs, head, adapters in request["models"]:
        form = format_of(form_name)
        try:
            if head and form.try_head is not None:
                form.try_head(path, name, _decode_head(head), _print_fraction)
            elif adapters and form.try_adapters is not None:
                form.try_adapters(path, name, [Adapter(*adapter) for adapter in adapters], _print_fraction)
            elif form.trial is not None:
                form.trial(path, name, runs, _print_fraction)
            _print(_PASSED)
        except ModelFileError as error:
            _print(_REFUSED + json.dumps(error.what))
        except EdgespecError:
            _print(_REFUSED)
    os._exit(0)


def _limit_process(cpu_seconds: int) -> None:
    """Limit the process's CPU time and memory (excluding mapped files), and disable core dumps."""
    if sys.platform != "win32":
        import resource

        limits = (
            (resource.RLIMIT_CPU, cpu_seconds),
            (resource.RLIMIT_DATA, _MAX_MEMORY_BYTES),
            (resource.RLIMIT_CORE, 0),
        )
        for limit, value in limits:
            with suppress(OSError, ValueError):
                resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def _exit_with_parent() -> None:
    """Exit this process when the parent process exits, which closes stdin."""
    os.read(0, 1)
    os._exit(1)


def _print(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _print_fraction(_description: str, fraction: float) -> bool:
    _print(f"{fraction:.3f}")
    return True
