"""llama.cpp's weight layouts: one of them is removed, and a child process tests whether it works.

AMX itself needs a CPU that supports it. These tests use the layout `CPU_REPACK` or a fake array instead.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from edgespec.backends.llamacpp import weight_layouts
from edgespec.backends.llamacpp.build_info import build_identity
from edgespec.backends.llamacpp.loading import model_params
from edgespec.backends.llamacpp.native import ggml, library
from edgespec.backends.llamacpp.quantise import quantise
from edgespec.backends.llamacpp.weight_layouts import (
    AMX,
    amx_added_bytes,
    choose_layouts,
    layout_names,
    remove_layout,
    why_layout_fails,
)
from edgespec.model.formats.gguf_header import GgufTensor
from edgespec.store.catalogue import models_folder
from edgespec.system.child_process import CRASH_SIGNALS

_REPACK = "CPU_REPACK"
# Loads a model before and after a layout is removed, and prints llama.cpp's buffers.
_REMOVE = """
import json, sys
from edgespec.backends.llamacpp.loading import load_skeleton
from edgespec.backends.llamacpp.native import captured_log, library
from edgespec.backends.llamacpp.weight_layouts import layout_names, remove_layout

def buffers():
    with captured_log() as lines:
        library().llama_model_free(load_skeleton(sys.argv[1], 0))
    return [line.split()[1] for line in lines if "model buffer size" in line]

before = layout_names(), buffers()
remove_layout(sys.argv[2])
print(json.dumps([before, (layout_names(), buffers())]))
"""

needs_repack = pytest.mark.skipif(_REPACK not in layout_names(), reason="llama.cpp repacks nothing here")


@pytest.fixture(scope="module")
def repacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repacked") / "q4_0.gguf"
    quantise(models_folder() / "demo-draft-q8_0.gguf", path, "Q4_0")
    return path


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Replace llama.cpp's array of layouts with a fake one, as on a CPU with AMX, and return it."""
    monkeypatch.setenv("EDGESPEC_CACHE_DIR", str(tmp_path))
    names = [AMX, _REPACK]
    array = (ctypes.c_void_p * 3)(1, 2, None)
    monkeypatch.setattr(weight_layouts, "_array", lambda: array)
    monkeypatch.setattr(weight_layouts, "_name", lambda layout: names[layout - 1])
    weight_layouts._choose_layouts.cache_clear()
    yield
    weight_layouts._choose_layouts.cache_clear()


@needs_repack
def test_llama_cpp_stops_using_a_layout_that_is_removed(repacked: Path) -> None:
    """This modifies llama.cpp's own array, so it runs in another process."""
    command = [sys.executable, "-c", _REMOVE, str(repacked), _REPACK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (names, buffers), (names_after, buffers_after) = json.loads(done.stdout)
    assert _REPACK in buffers
    assert names_after == [name for name in names if name != _REPACK]
    assert _REPACK not in buffers_after
    assert buffers_after


@pytest.mark.usefixtures("made_up")
def test_only_the_named_layout_is_removed() -> None:
    remove_layout("another")
    assert layout_names() == [AMX, _REPACK]
    remove_layout(_REPACK)
    assert layout_names() == [AMX]
    remove_layout(AMX)
    remove_layout(AMX)
    assert layout_names() == []


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("problem", ["", "it crashed in a test (SIGILL)"])
def test_amx_is_used_only_if_it_passes_its_test(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    tested = []

    def test(layout: str) -> str:
        tested.append(layout)
        return problem

    monkeypatch.setattr(weight_layouts, "why_layout_fails", test)
    assert model_params(0).use_extra_bufts
    assert choose_layouts() == problem
    assert layout_names() == ([_REPACK] if problem else [AMX, _REPACK])
    # The result is saved for later processes.
    weight_layouts._choose_layouts.cache_clear()
    assert weight_layouts._amx_problem() == problem
    assert tested == [AMX]


@pytest.mark.usefixtures("made_up")
def test_amx_is_off_and_tried_again_later_if_it_cannot_be_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert choose_layouts()
    assert layout_names() == [_REPACK]
    monkeypatch.setattr(weight_layouts, "why_layout_fails", lambda _layout: "")
    assert weight_layouts._amx_problem() == ""


@pytest.mark.usefixtures("made_up")
def test_measurements_with_and_without_amx_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    features = library().llama_print_system_info() + b" AMX_INT8 = 1 |"
    monkeypatch.setattr(library(), "llama_print_system_info", lambda: features)
    identities = set()
    for problem in ("", "it crashed in a test (SIGILL)"):
        weight_layouts._choose_layouts.cache_clear()
        monkeypatch.setattr(weight_layouts, "_amx_problem", lambda problem=problem: problem)
        identities.add(build_identity())
    assert len(identities) == 2


@pytest.mark.parametrize("number", sorted(CRASH_SIGNALS))
def test_every_crash_of_the_child_process_is_named(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -number))
    assert number.name in why_layout_fails(AMX)


@pytest.mark.parametrize(
    ("kind", "shape", "added_bytes"),
    [
        # Compared with the sizes of the blocks in a file: 34, 18, 144, 176, 210 and 136 bytes.
        ("Q8_0", (256, 64), 64 * 8 * (38 - 34)),
        ("Q8_0", (96, 32), 32 * 3 * (38 - 34)),
        ("Q4_0", (256, 64), 0),
        ("Q4_K", (512, 64), 64 * 2 * (148 - 144)),
        ("Q5_K", (512, 64), 64 * 2 * (180 - 176)),
        ("Q6_K", (512, 64), 0),
        ("IQ4_XS", (512, 64), 64 * 2 * (138 - 136)),
        ("F16", (256, 64), 0),
        # The layout cannot hold matrices of these shapes and types, nor experts.
        ("Q8_0", (256, 48), None),
        ("Q4_K", (288, 64), None),
        ("Q5_0", (256, 64), None),
        ("Q8_0", (256, 64, 4), None),
    ],
)
def test_a_matrix_takes_more_bytes_in_the_layout_of_amx(
    kind: str, shape: tuple[int, ...], added_bytes: int | None
) -> None:
    tensor = GgufTensor("blk.0.attn_q.weight", shape, GGMLQuantizationType[kind], 0)
    assert amx_added_bytes(tensor) == added_bytes


@needs_repack
def test_a_layout_that_works_passes_its_test() -> None:
    assert why_layout_fails(_REPACK, ["Q4_0"]) == ""


@needs_repack
def test_a_layout_that_crashes_fails_its_test() -> None:
    """llama.cpp never repacks F32 weights, and dereferences a null pointer if forced to."""
    assert "SIGSEGV" in why_layout_fails(_REPACK, ["F32"])


def test_a_layout_that_is_missing_cannot_be_tested() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        why_layout_fails("another")


def test_wrong_products_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ggml().ggml_backend_cpu_buffer_type()
    assert all(weight_layouts._is_right(layout, kind) for kind in weight_layouts._KINDS)
    monkeypatch.setattr(weight_layouts, "_MAX_DIFFERENCE", -1.0)
    assert not weight_layouts._is_right(layout, "Q4_0")
