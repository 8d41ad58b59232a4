"""The kernels of scripts/cpu_kernels.cpp, which compute a token alone exactly as among many."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ContextParams, cpu_kernels, ggml, library

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="scripts/setup builds these kernels only on Linux"
)
Array = NDArray[np.float32]
F32 = 0


@pytest.fixture
def lib() -> Any:
    library()
    return ggml()


needs_avx2 = pytest.mark.skipif(
    not hasattr(cpu_kernels(), "quantize_row_q8_K"), reason="the processor has no AVX2"
)
# Numbers of elements and rows of the weights.
WIDTH, ROWS = 768, 24


def inputs_for(rows: int) -> Array:
    """Return random inputs with a few large ones of both signs, zeros, and ties for the largest."""
    random = np.random.default_rng(2)
    inputs = random.normal(size=(rows, WIDTH)).astype(np.float32)
    inputs[1, 5], inputs[2, 7], inputs[3, :256] = 40.0, -40.0, 0.0
    inputs[4, 3], inputs[4, 100] = 50.0, -50.0
    inputs[5, 3], inputs[5, 100] = -50.0, 50.0
    return inputs


@needs_avx2
@pytest.mark.parametrize("kind", [1, 12, 13, 14], ids=["F16", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_are_multiplied_as_among_others(lib: Any, kind: int, threads: int) -> None:
    rows = 23  # The F16 kernel computes 2 or 4 rows at once.
    weights = np.random.default_rng(3).normal(size=(rows, WIDTH)).astype(np.float32)
    inputs = inputs_for(40)

    def product(first: int, count: int) -> Array:
        memory = ctypes.c_void_p(lib.ggml_init(ContextParams(64 << 20, None, False)))
        create, multiply = lib.ggml_new_tensor_2d, lib.ggml_mul_mat
        for function in (create, multiply, lib.ggml_get_data, lib.ggml_new_graph):
            function.restype = ctypes.c_void_p
        a = ctypes.c_void_p(create(memory, kind, ctypes.c_int64(WIDTH), ctypes.c_int64(rows)))
        b = ctypes.c_void_p(create(memory, F32, ctypes.c_int64(WIDTH), ctypes.c_int64(count)))
        sizes = [ctypes.c_int64(number) for number in (0, rows, WIDTH)]
        target = ctypes.c_void_p(lib.ggml_get_data(a))
        lib.ggml_quantize_chunk(kind, ctypes.c_void_p(weights.ctypes.data), target, *sizes, None)
        part = np.ascontiguousarray(inputs[first : first + count])
        ctypes.memmove(lib.ggml_get_data(b), part.ctypes.data, part.nbytes)
        result = ctypes.c_void_p(multiply(memory, a, b))
        graph = ctypes.c_void_p(lib.ggml_new_graph(memory))
        lib.ggml_build_forward_expand(graph, result)
        lib.ggml_graph_compute_with_ctx(memory, graph, threads)
        found = np.empty((count, rows), np.float32)
        ctypes.memmove(found.ctypes.data, lib.ggml_get_data(result), found.nbytes)
        lib.ggml_free(memory)
        return found

    together = product(0, 40)
    assert np.abs(together - inputs @ weights.T).max() < 0.15 * np.abs(together).max()
    for first, count in ((0, 1), (3, 7), (4, 1), (5, 2), (7, 8), (20, 20)):
        assert np.array_equal(product(first, count), together[first : first + count])


@needs_avx2
def test_repacked_weights_are_multiplied_as_for_four_tokens(lib: Any) -> None:
    kernels, blocks = cpu_kernels(), WIDTH // 256
    assert kernels is not None
    inputs = inputs_for(8)
    random = np.random.default_rng(4)
    eight = np.dtype(
        [("scale", "<f2", 8), ("min_scale", "<f2", 8), ("scales", "u1", 96), ("low", "u1", 1024)]
    )
    weights = np.empty((ROWS // 8, blocks), eight)
    weights["scale"], weights["min_scale"] = (
        random.uniform(0.001, 0.01, (*weights.shape, 8)) for _ in range(2)
    )
    weights["scales"] = random.integers(0, 256, (*weights.shape, 96))
    weights["low"] = random.integers(0, 256, (*weights.shape, 1024))
    size = ctypes.c_int64(WIDTH)

    def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    for first in (0, 4):
        four = np.ascontiguousarray(inputs[first : first + 4])
        rounded, together = np.empty(4 * 292 * blocks, np.uint8), np.empty((4, ROWS), np.float32)
        lib.ggml_quantize_mat_q8_K_4x8(pointer(four), pointer(rounded), size)
        stride = ctypes.c_size_t(ROWS)
        arguments = (pointer(weights), pointer(rounded), 4, ROWS)
        lib.ggml_gemm_q4_K_8x8_q8_K(WIDTH, pointer(together), stride, *arguments)
        for row in range(4):
            alone, rounded = np.empty(ROWS, np.float32), np.empty(292 * blocks, np.uint8)
            kernels.quantize_row_q8_K(pointer(four[row]), pointer(rounded), size)
            arguments = (pointer(weights), pointer(rounded), 1, ROWS)
            kernels.ggml_gemv_q4_K_8x8_q8_K(WIDTH, pointer(alone), stride, *arguments)
            assert np.array_equal(alone, together[row])
            assert np.isfinite(alone).all()


def test_the_kernels_are_not_used_if_llama_cpp_was_imported_before() -> None:
    code = """
import llama_cpp
from edgespec.backends.llamacpp.native import ContextParams, cpu_kernels, ggml, library
assert library() is llama_cpp
assert cpu_kernels() is None
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeWarning" in ended.stderr
