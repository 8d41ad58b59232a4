"""Files that make llama.cpp or MLX crash raise ModelFileError, because a child process tries them first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import psutil
import pytest

import edgespec
from edgespec.errors import BackendError, CancelledError, ModelFileError
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.loading.prepare.lowbit import prepare_lowbit
from edgespec.model import trial_load
from edgespec.model.registry import format_of
from edgespec.store.catalogue import models_folder
from edgespec.system.facts import Facts
from tests.backends.test_header_validation import altered
from tests.backends.tiny_heads import write_eagle
from tests.backends.tiny_models import write_jamba, write_llama, write_mamba, write_moe
from tests.cases import first
from tests.raising import raises
from tests.saved_facts import saved_facts

_known = trial_load._known  # before `conftest.py` replaces it


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """Test files as in production, with an empty cache folder. Return the processes that tested files."""
    monkeypatch.setattr(trial_load, "_known", _known)
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path / "cache"))
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            # Chat templates are rendered in child processes, too.
            if any("trial_load" in each for each in arguments[0]):
                started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    return started


def crashing(folder: Path) -> Path:
    """Write a complete model whose architecture needs experts, but which has none."""
    return write_llama(folder / "model.gguf", architecture="smallthinker")


def load(path: Path, **options: Any) -> str:
    """Load a model and return a reply and its notices."""
    defaults: dict[str, Any] = {"context": 256, "measure_costs": False, "exactness": "off"}
    with edgespec.load(str(path), "none", **defaults | options) as runtime:
        runtime.generate("files", raw=True, max_tokens=2)
        return runtime.target.notice


def results() -> list[Any]:
    """Return the saved trial results: whether tokens were decoded, the crash, and the rejection."""
    return [tuple(value.values()) for value in saved_facts("trial")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "architecture", "reason"),
    # A message while loading, a failed assertion while running, and a signal. The long tests cover more.
    [
        (write_llama, "smallthinker", "n_expert must be > 0"),
        (write_llama, "paddleocr", "GGML_ASSERT(sections"),
        (write_mamba, "olmo2", "SIGFPE"),
        pytest.param(write_llama, "llada-moe", "n_expert must be > 0", marks=pytest.mark.long),
        pytest.param(write_mamba, "phimoe", "SIGFPE", marks=pytest.mark.long),
    ],
)
def test_a_changed_architecture_is_reported(
    write: Callable[..., Path], architecture: str, reason: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", architecture=architecture)
    with raises(ModelFileError, reason):
        load(path)


def test_crashing_files_are_reported_by_plans_and_preparations(tmp_path: Path) -> None:
    path = crashing(tmp_path)
    with raises(ModelFileError, "crashed"):
        edgespec.plan(str(path), None)
    with raises(ModelFileError, "crashed"):
        prepare_lowbit(path)


def test_a_crashing_mlx_model_is_reported(children: list[Any], tmp_path: Path) -> None:
    """mlx-lm computes a group size of 0 for weights wider than the model, and MLX divides by it."""
    pytest.importorskip("mlx_lm")
    folder = tmp_path / "model"
    shutil.copytree(models_folder() / "demo-mlx-draft", folder)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 1}))
    for use in (edgespec.plan, edgespec.load):
        with raises(ModelFileError, "MLX", "SIGFPE"):
            use(str(folder), None)
    assert len(children) == 1


@pytest.mark.long
def test_a_crashing_draft_model_is_reported(demo_target: Path, tmp_path: Path) -> None:
    draft = crashing(tmp_path)
    with raises(ModelFileError, draft):
        edgespec.load(str(demo_target), str(draft), context=256)


@pytest.mark.long
def test_a_crash_is_remembered(children: list[Any], tmp_path: Path) -> None:
    path = crashing(tmp_path)
    for _ in range(2):
        with raises(ModelFileError, "crashed"):
            load(path)
    assert len(children) == 1


# Jamba's layers have attention, recurrent states and experts.
@pytest.mark.long
@pytest.mark.parametrize("write", first([write_llama, write_jamba, write_moe, write_mamba], 2))
def test_good_files_are_tried_once(
    write: Callable[[Path], Path], children: list[Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf")
    assert not load(path)
    assert not load(path)
    assert len(children) == 1
    assert results() == [(True, "", "")]


@pytest.mark.long
def test_target_and_draft_model_are_tried_together(
    children: list[Any], demo_target: Path, demo_draft: Path
) -> None:
    edgespec.load(str(demo_target), str(demo_draft), context=256, measure_costs=False).close()
    assert len(children) == 1
    assert len(results()) == 2


@pytest.mark.long
def test_a_changed_file_is_tried_again(children: list[Any], tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    load(path)
    status = path.stat()
    crashing(tmp_path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with raises(ModelFileError, "crashed"):
        load(path)
    write_llama(path, seed=1)
    load(path)
    assert len(children) == 3


@pytest.mark.long
def test_a_plan_does_not_count_as_running_the_model(children: list[Any], tmp_path: Path) -> None:
    """This architecture crashes only when it runs a token."""
    path = write_llama(tmp_path / "model.gguf", architecture="paddleocr")
    edgespec.plan(str(path), None)
    with raises(ModelFileError, "crashed"):
        load(path)
    assert len(children) == 2


def test_trust_skips_the_trial(children: list[Any], tmp_path: Path) -> None:
    load(write_llama(tmp_path / "model.gguf"), trust=True)
    edgespec.plan(str(tmp_path / "model.gguf"), None, trust=True)
    assert not children


@pytest.mark.long
def test_refused_files_are_not_recorded(tmp_path: Path) -> None:
    with raises(ModelFileError, "not 0"):
        load(altered(tmp_path, "block_count", 0))
    assert not results()


@pytest.mark.long
def test_a_damaged_result_is_found_again(children: list[Any], tmp_path: Path) -> None:
    model = trial_load.TrialModel("model", write_llama(tmp_path / "model.gguf"), format_of("gguf"), runs=True)
    trial_load.check_loadable([model])
    damaged: Any
    for damaged in ([], {"ran": 1}, {"ran": True, "failure": None, "refusal": ""}):
        Facts().put("trial", {str(trial_load._key(model)): damaged})
        assert trial_load._known(str(trial_load._key(model))) is None
    trial_load.check_loadable([model])
    assert results() == [(True, "", "")]
    assert len(children) == 2


def test_a_killed_trial_is_not_remembered(children: list[Any], tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")

    def kill(description: str, _fraction: float) -> bool:
        assert description == "checking model.gguf (first load only)"
        children[-1].kill()
        return True

    with raises(BackendError, "killed by SIGKILL", code="trial_failed"):
        load(path, progress=kill)
    assert not results()
    load(path)


def test_a_slow_trial_is_given_up(
    children: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trial_load, "_MAX_SECONDS", 0)
    with raises(BackendError, "timed", code="trial_failed"):
        load(write_llama(tmp_path / "model.gguf"))
    assert children[0].returncode is not None
    assert not results()


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="CPU time limits are POSIX only")
def test_a_trial_that_never_ends_blames_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Damaged vocabularies make llama.cpp's tokenizer loop forever."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, -1))\nwhile True: pass"
    monkeypatch.setattr(trial_load, "module_arguments", lambda _: ["-c", code])
    with raises(BackendError, "time", code="trial_failed"):
        load(write_llama(tmp_path / "model.gguf"))
    assert not results()


def test_a_trial_that_takes_all_memory_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other programs can be the cause, so the file may be good."""
    code = "import os; os.write(2, b'  what():  std::bad_alloc'); os.abort()"
    monkeypatch.setattr(trial_load, "module_arguments", lambda _: ["-c", code])
    with raises(BackendError, "out of memory", code="trial_failed"):
        load(write_llama(tmp_path / "model.gguf"))
    assert not results()


def test_a_cancelled_trial_leaves_no_process(children: list[Any], tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    with raises(CancelledError, "was cancelled"):
        load(path, progress=lambda *_: False)

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, progress=interrupt)
    assert [child.returncode for child in children] == [-signal.SIGKILL] * 2
    assert not results()


@pytest.mark.parametrize("program", ["", "/missing/python", "/bin/false"])
def test_models_load_if_no_process_can_be_started(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    notice = load(write_llama(tmp_path / "model.gguf"))
    assert "could not be checked in a separate process before loading: " in notice
    assert not results()


@pytest.mark.long
def test_the_trial_imports_nothing_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("json", "numpy", "llama_cpp", "edgespec"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')\nraise ImportError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.syspath_prepend("")
    assert not load(write_llama(tmp_path / "model.gguf"))
    assert not Path("imported").exists()


@pytest.mark.long
def test_prepared_models_are_tried(children: list[Any], tmp_path: Path) -> None:
    folder = prepare_layerskip(write_llama(tmp_path / "model.gguf", layers=3), 1).folder
    load(folder)
    assert len(children) == 2
    assert len(results()) == 2


def command(path: Path) -> subprocess.Popen[bytes]:
    """Start `edgespec generate` as from a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "edgespec", "generate", "--target", str(path), "hi"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A shell that runs the tests in the background makes its programs ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )


@pytest.mark.long
def test_the_command_reports_a_crash(tmp_path: Path) -> None:
    with command(crashing(tmp_path)) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith(b"error: ")
    assert errors.count(b"\n") == 1
    assert b"--trust" in errors


@pytest.mark.long
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_ended_command_leaves_no_process(sent: signal.Signals, status: int, tmp_path: Path) -> None:
    with command(write_llama(tmp_path / "model.gguf")) as process:
        deadline = time.monotonic() + 60
        while not (found := psutil.Process(process.pid).children()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        # On a busy machine, the trial could otherwise end before the command receives the signal.
        found[0].suspend()
        process.send_signal(sent)
        found[0].resume()
        assert process.wait(60) == status
        psutil.wait_procs(found, timeout=60)
        assert not any(child.is_running() for child in found)


@pytest.mark.long
def test_a_head_that_crashes_llama_cpp_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    target = write_llama(tmp_path / "target.gguf", layers=3)
    head = write_eagle(tmp_path / "head.gguf", layers=(0, 1, 2))
    load(target, method="eagle", head=head)
    assert len(children) == 1
    load(target, method="eagle", head=head)
    assert len(children) == 1  # The results are saved.
    # A head with its own vocabulary must have its own output matrix.
    add_tensor = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda writer, name, data: None if name == "output.weight" else add_tensor(writer, name, data),
    )
    write_eagle(head, layers=(0, 1, 2))
    for _ in range(2):
        with raises(ModelFileError, "head.gguf", "llama.cpp"):
            load(target, method="eagle", head=head)
        assert len(children) == 2


def test_a_head_beside_the_model_that_crashes_llama_cpp_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_llama(tmp_path / "target.gguf", layers=3)
    add_tensor = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda writer, name, data: None if name == "output.weight" else add_tensor(writer, name, data),
    )
    head = write_eagle(tmp_path / "eagle3-target.gguf", layers=(0, 1, 2))
    for _ in range(2):
        notice = load(target)
        assert f"{head} is damaged or not supported: llama.cpp crashed" in notice
        assert "using the draft head" not in notice
