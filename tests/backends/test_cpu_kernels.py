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
@pytest.mark.parametrize(
    "kind", [1, 2, 6, 8, 12, 13, 14], ids=["F16", "Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
@pytest.mark.parametrize("threads", [1, 2, 9])
def test_tokens_are_multiplied_as_among_others(lib: Any, kind: int, threads: int) -> None:
    rows = 23  # The kernels for F16 and Q8_0 compute 2 or 4 rows at once.
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


def pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@needs_avx2
@pytest.mark.parametrize("kind", [1, 8], ids=["F16", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 17])
def test_rows_are_multiplied_like_llama_cpps_kernel_for_one(
    lib: Any, kind: int, rows: int, tokens: int
) -> None:
    kernels = cpu_kernels()
    assert kernels is not None
    dot, row_bytes = {
        1: (lib.ggml_vec_dot_f16, 2 * WIDTH),
        8: (lib.ggml_vec_dot_q8_0_q8_0, WIDTH // 32 * 34),
    }[kind]
    items = WIDTH if kind == 1 else WIDTH // 32

    def converted(count: int, seed: int) -> NDArray[np.uint8]:
        numbers = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
        numbers[0, 3], numbers[0, 32:96] = -40.0, 0.0
        found = np.empty((count, row_bytes), np.uint8)
        sizes = [ctypes.c_int64(number) for number in (0, count, WIDTH)]
        lib.ggml_quantize_chunk(kind, pointer(numbers), pointer(found), *sizes, None)
        return found

    weights, inputs = converted(rows, 1), converted(tokens, 2)
    found, expected = np.empty((tokens, rows), np.float32), np.empty((tokens, rows), np.float32)
    kernels.llamafile_sgemm.restype = ctypes.c_bool
    one_thread = (ctypes.c_int * 16)(0, 1)
    m, n, k = ctypes.c_int64(rows), ctypes.c_int64(tokens), ctypes.c_int64(items)
    a, b, c = pointer(weights), pointer(inputs), pointer(found)
    assert kernels.llamafile_sgemm(one_thread, m, n, k, a, k, b, k, c, m, kind, kind, F32)
    zero = ctypes.c_size_t(0)
    for token in range(tokens):
        for row in range(rows):
            at = ctypes.c_void_p(expected.ctypes.data + 4 * (token * rows + row))
            dot(WIDTH, at, zero, pointer(weights[row]), zero, pointer(inputs[token]), zero, 1)
    assert np.array_equal(found, expected)


@needs_avx2
def test_repacked_q4_0_weights_are_multiplied_like_llama_cpps_kernel(lib: Any) -> None:
    kernels, blocks = cpu_kernels(), WIDTH // 32
    assert kernels is not None
    random = np.random.default_rng(5)
    weights = np.empty((ROWS // 8, blocks), np.dtype([("scale", "<f2", 8), ("low", "u1", 128)]))
    weights["scale"] = random.uniform(-0.01, 0.01, (*weights.shape, 8))
    weights["low"] = random.integers(0, 256, (*weights.shape, 128))
    inputs = random.normal(size=(8, WIDTH)).astype(np.float32)
    stride, size = ctypes.c_size_t(ROWS), ctypes.c_int64(WIDTH)
    together = np.empty((8, ROWS), np.float32)
    four = np.empty((2, 136 * blocks), np.uint8)
    for half in range(2):
        of_half = pointer(inputs[4 * half :])
        lib.ggml_quantize_mat_q8_0_4x8(of_half, pointer(four[half]), size)
    arguments = (stride, pointer(weights), pointer(four), 8, ROWS)
    lib.ggml_gemm_q4_0_8x8_q8_0(WIDTH, pointer(together), *arguments)
    assert np.abs(together).max() > 0
    if hasattr(kernels, "ggml_gemm_q4_0_8x8_q8_0"):  # on processors with AVX-512
        ours = np.empty((8, ROWS), np.float32)
        kernels.ggml_gemm_q4_0_8x8_q8_0(WIDTH, pointer(ours), *arguments)
        assert np.array_equal(ours, together)
    for row in range(8):
        rounded = np.empty(34 * blocks, np.uint8)
        sizes = [ctypes.c_int64(number) for number in (0, 1, WIDTH)]
        lib.ggml_quantize_chunk(8, pointer(inputs[row]), pointer(rounded), *sizes, None)
        for multiply in (lib.ggml_gemv_q4_0_8x8_q8_0, kernels.ggml_gemv_q4_0_8x8_q8_0):
            alone = np.empty(ROWS, np.float32)
            multiply(WIDTH, pointer(alone), stride, pointer(weights), pointer(rounded), 1, ROWS)
            assert np.array_equal(alone, together[row])


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
    for first in (0, 4):
        four = np.ascontiguousarray(inputs[first : first + 4])
        rounded, together = np.empty(4 * 292 * blocks, np.uint8), np.empty((4, ROWS), np.float32)
        lib.ggml_quantize_mat_q8_K_4x8(pointer(four), pointer(rounded), size)
        stride = ctypes.c_size_t(ROWS)
        arguments = (pointer(weights), pointer(rounded), 4, ROWS)
        lib.ggml_gemm_q4_K_8x8_q8_K(WIDTH, pointer(together), stride, *arguments)
        ours = np.empty((4, ROWS), np.float32)
        if hasattr(kernels, "ggml_gemm_q4_K_8x8_q8_K"):  # on processors with AVX-512
            kernels.ggml_gemm_q4_K_8x8_q8_K(WIDTH, pointer(ours), stride, *arguments)
            assert np.array_equal(ours, together)
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


def test_the_kernels_are_loaded_whichever_library_is_needed_first() -> None:
    code = "from edgespec.backends.llamacpp.native import cpu_kernels, ggml; ggml(); assert cpu_kernels()"
    command = [sys.executable, "-W", "error", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
