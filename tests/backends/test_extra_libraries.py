"""Libraries next to llama-cpp-python: which ones are loaded, and what happens if loading fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from edgespec.backends.llamacpp.native import GpuLibrary, library, library_path, load_gpu_library


@pytest.fixture
def copy_in(tmp_path: Path) -> ModuleType:
    """Return a module in another folder that acts as the installed llama_cpp, without GPUs."""
    real = library()
    module = ModuleType("llama_cpp")
    module.__file__ = str(tmp_path / "__init__.py")
    module.__version__ = real.__version__  # type: ignore[attr-defined]
    module.llama_supports_gpu_offload = lambda: False  # type: ignore[attr-defined]
    (tmp_path / "lib").mkdir()
    return module


def test_without_a_library_nothing_is_loaded(copy_in: ModuleType) -> None:
    assert load_gpu_library(copy_in) == GpuLibrary()


def test_a_library_that_cannot_be_loaded_is_a_problem(copy_in: ModuleType) -> None:
    library_path(copy_in, "vulkan").write_bytes(b"not a library")
    found = load_gpu_library(copy_in)
    assert found.name == "vulkan"
    assert str(library_path(copy_in, "vulkan")) in found.problem


def test_a_library_of_another_version_is_ignored(copy_in: ModuleType) -> None:
    library_path(copy_in, "vulkan").write_bytes(b"not a library")
    copy_in.__version__ = "0.0.1"  # type: ignore[attr-defined]
    assert load_gpu_library(copy_in) == GpuLibrary()


def test_a_build_with_gpu_support_needs_no_library(copy_in: ModuleType) -> None:
    library_path(copy_in, "vulkan").write_bytes(b"not a library")
    copy_in.llama_supports_gpu_offload = lambda: True  # type: ignore[attr-defined]
    assert load_gpu_library(copy_in) == GpuLibrary()


def test_a_library_without_a_backend_is_a_problem(copy_in: ModuleType) -> None:
    base = next((Path(str(library().__file__)).parent / "lib").glob("libggml-base.*"))
    shutil.copy(base, library_path(copy_in, "cuda"))
    found = load_gpu_library(copy_in)
    assert found.name == "cuda"
    assert found.problem


_LOAD_RPC = """
import os, sys
from edgespec.backends.llamacpp.native import ggml, library
ggml().ggml_backend_load(os.fsencode(sys.argv[1]))
print(library().llama_supports_rpc())
"""


def test_llama_cpp_knows_the_libraries_that_are_loaded() -> None:
    """ggml must be loaded only once, because a second copy would have its own list of devices."""
    path = library_path(library(), "rpc")
    if not path.is_file():
        pytest.skip("the RPC library is not built; run scripts/setup dev")
    command = [sys.executable, "-c", _LOAD_RPC, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"
