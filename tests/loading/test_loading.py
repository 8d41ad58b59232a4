"""Loading a Runtime from references: the choice of the backend, and options rejected before loading."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import edgespec
from edgespec.api.loading import _acceptance_recorder
from edgespec.errors import BackendMissingError, EdgespecError, OptionError
from edgespec.loading.drafting_options import DraftingOptions
from edgespec.loading.pair_loading import _load_models
from edgespec.loading.pairing import draft_load_options, find_pair, options_in_pair
from edgespec.model.base import LoadOptions
from edgespec.model.formats import mlx_files
from edgespec.model.model_facts import Adapter, Capabilities, ModelFacts
from edgespec.store.reference import resolve
from tests.raising import raises

FACTS = ModelFacts(
    name="m", path="p", architecture="a", description="d", parameters=1, file_bytes=1, weight_bytes=100,
    kv_bytes=20, quantisation="q", trained_context_tokens=8, context_tokens=4, vocab_size=2,
    chat_template=True, capabilities=Capabilities(True, True),
)  # fmt: skip


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Replace both backends by ones that record what they load."""
    import edgespec.backends as backends
    from edgespec.backends import llamacpp

    calls: list[tuple[str, Any]] = []
    for package, name in ((backends, "mlx"), (llamacpp, "model")):
        backend = "mlx" if name == "mlx" else "llamacpp"

        def load(*arguments: Any, backend: str = backend) -> SimpleNamespace:
            calls.append((backend, arguments))
            return SimpleNamespace()

        stand_in = ModuleType(f"{package.__name__}.{name}")
        stand_in.load = load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        monkeypatch.setattr(package, name, stand_in, raising=False)
    monkeypatch.setattr(mlx_files, "mlx_installed", lambda: True)
    return calls


@pytest.mark.parametrize(("reference", "backend"), [("demo", "llamacpp"), ("demo-mlx", "mlx")])
def test_the_format_chooses_the_backend(loaded: list[tuple[str, Any]], reference: str, backend: str) -> None:
    found, options = resolve(reference), LoadOptions()
    _load_models(found, options, None)
    assert loaded == [(backend, (str(found.path), found.name, options, None))]


def test_without_mlx_the_error_names_the_setup_command(
    loaded: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_files, "mlx_installed", lambda: False)
    with raises(BackendMissingError, "demo-mlx", "scripts/setup mlx"):
        _load_models(resolve("demo-mlx"), LoadOptions(), None)
    assert not loaded


@pytest.mark.parametrize("library", ["mlx", "mlx_lm"])
def test_mlx_counts_as_installed_only_with_mlx_lm(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert not mlx_files.mlx_installed()


@pytest.mark.long  # `tests/cli/test_startup.py` checks the same of the command line in each test run.
@pytest.mark.parametrize(
    ("reference", "draft", "unwanted"),
    [
        ("demo", "demo-draft", ("mlx", "mlx_lm", "transformers")),
        ("demo-mlx-draft", "demo-mlx-draft", ("llama_cpp",)),
    ],
)
def test_loading_imports_one_backend_only(reference: str, draft: str, unwanted: tuple[str, ...]) -> None:
    if reference == "demo-mlx-draft" and not mlx_files.mlx_installed():
        pytest.skip("MLX is not installed")
    script = (
        "import sys, edgespec\n"
        f"with edgespec.load({reference!r}, {draft!r}, context=256, measure_costs=False) as runtime:\n"
        "    assert runtime.draft is not None\n"
        "    runtime.generate('hi', max_tokens=2)\n"
        f"assert not sys.modules.keys() & {set(unwanted)!r}, 'the other backend was imported'\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_is_no_adapter_for_a_gguf(loaded: list[tuple[str, Any]], tmp_path: Path) -> None:
    with raises(EdgespecError, ".gguf", code="adapter_unusable") as caught:
        edgespec.load("demo", adapter=str(tmp_path))
    assert caught.value.next_step
    assert not loaded


def test_a_missing_adapter_is_rejected(loaded: list[tuple[str, Any]], tmp_path: Path) -> None:
    with raises(EdgespecError, code="adapter_unusable"):
        edgespec.load("demo-mlx", adapter=str(tmp_path / "none"))
    assert not loaded


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": ["suffix"]}, "['suffix']"),
        ({"method": 3}, "method must"),
        ({"methods": "suffix"}, "'suffix'"),
        ({"methods": None}, "None"),
        ({"methods": [None]}, "None"),
        ({"draft_branches": 2.5}, "2.5"),
        ({"draft_branches": None}, "None"),
    ],
)
def test_an_option_of_the_wrong_type_is_rejected(
    loaded: list[tuple[str, Any]], options: dict[str, Any], says: str
) -> None:
    with raises(OptionError, says):
        edgespec.load("demo", **options)
    assert loaded == []


def test_load_options_of_a_draft() -> None:
    options = LoadOptions(threads=3, memory_bytes=1000, adapters=(Adapter("a"),), max_branches=9)
    expected = replace(options, context_tokens=4, memory_bytes=880, is_draft=True, exact=False, adapters=())
    assert draft_load_options(options, DraftingOptions.of(), 4, 880) == replace(expected, max_logit_rows=96)
    assert draft_load_options(options, DraftingOptions.of(draft_branches="auto"), 4, 880) == replace(
        expected, max_logit_rows=96
    )
    assert draft_load_options(options, DraftingOptions.of(draft_branches=(4,)), 4, 880) == expected, (
        "trees may be as wide as named"
    )


def test_options_of_llama_cpp_reach_only_the_gguf_model_of_a_pair() -> None:
    gguf, mlx = resolve("demo"), resolve("demo-mlx")
    options = LoadOptions(
        context_tokens=4, threads=3, gpu_layers=1, kv_type="q8_0", mmap=False, max_branches=9
    )
    without = LoadOptions(context_tokens=4, kv_type="q8_0", max_branches=9)
    for found, other, wanted in (
        (gguf, None, options),
        (gguf, mlx, options),
        (mlx, gguf, without),
        (mlx, mlx, options),
        (mlx, None, options),
    ):
        assert options_in_pair(found, other, options) == wanted
    draft = replace(options, is_draft=True)
    assert options_in_pair(mlx, gguf, draft) == replace(without, is_draft=True, kv_type="auto")


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        ({"draft_length": 3, "kv_type": "q8_0"}, True),
        ({"draft_branches": 2}, False),
        ({"draft_confidence": 0.5}, False),
        ({"learn": True}, False),
    ],
)
def test_acceptance_is_recorded_only_if_it_applies_to_the_plain_pair(
    options: dict[str, Any], recorded: bool
) -> None:
    drafting = DraftingOptions.of(**options)
    pair = find_pair("demo-mlx", "demo-mlx-draft", drafting, None)
    assert (_acceptance_recorder(pair, drafting, LoadOptions()) is not None) == recorded
    assert _acceptance_recorder(pair, drafting, LoadOptions(adapters=(Adapter("a"),))) is None


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("target", 3, "name such as demo"),
        ("target", b"demo", "name such as demo"),
        ("draft", 3, "auto, none"),
        ("kv_type", 3, "auto, f16"),
        ("flash_attention", 3, "auto, on, off"),
        ("corpus", 3, "one path"),
        ("corpus", b"x", "one path"),
        ("corpus", ["x"], "one path"),
        ("adapter", 3, "a path or a list of paths"),
        ("draft_confidence", "x", "a number from 0 to below 1"),
        ("draft_confidence", None, "a number from 0 to below 1"),
        ("draft_sinks", None, "an integer from 0"),
        ("gpu_layers", "x", "an integer from 0"),
        ("mmap", "no", "True or False"),
        ("mlock", 1, "True or False"),
        ("remember", "yes", "True or False"),
        ("learn", "yes", "True or False"),
        ("progress", 3, "a function"),
    ],
)
def test_a_wrong_type_is_reported_in_one_line(
    loaded: list[tuple[str, Any]], option: str, value: Any, advice: str
) -> None:
    with pytest.raises(OptionError) as caught:
        edgespec.load(**{"draft": "none", option: value})
    assert str(caught.value).startswith(f"{option} must be ")
    assert f"not {value!r}" in caught.value.what
    assert advice in str(caught.value)
    assert not loaded


def test_a_corpus_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    with edgespec.load(draft="none", method="suffix", corpus=tmp_path, context=256) as runtime:
        assert f"corpus {tmp_path}: 1 file, " in runtime.target.notice
