"""The kernels of scripts/cpu_kernels.cpp, which compute a token alone exactly as among many."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.llamacpp.native import ContextParams, cpu_kernels, ggml, library

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="scripts/setup builds these kernels only on Linux"
)
Array = NDArray[np.float32]
KEYS, QUERIES = 224, 100
F32, F16 = 0, 1


@dataclass(frozen=True)
class Kind:
    """The sizes and parameters of an attention. `type` is that of keys and values."""

    key_size: int = 64
    value_size: int = 64
    heads: int = 6
    key_heads: int = 2
    type: int = F16
    max_bias: float = 0.0
    softcap: float = 0.0
    sinks: bool = False
    threads: int = 2
    keys: int = KEYS


@pytest.fixture
def lib() -> Any:
    library()
    return ggml()


def attention(lib: Any, kind: Kind, first: int, count: int) -> Array:
    """Return the attention of `count` queries [count, heads, value_size], computed in one graph."""
    memory = lib.ggml_init(ContextParams(64 << 20, None, False))
    random = np.random.default_rng(1)

    def tensor(values: Array, kind: int) -> ctypes.c_void_p:
        sizes = [ctypes.c_int64(size) for size in reversed(values.shape)]
        create = lib.ggml_new_tensor_4d
        create.restype = lib.ggml_get_data.restype = ctypes.c_void_p
        made = ctypes.c_void_p(create(ctypes.c_void_p(memory), kind, *sizes))
        data = np.ascontiguousarray(values.astype(np.float16 if kind == F16 else np.float32))
        ctypes.memmove(lib.ggml_get_data(made), data.ctypes.data, data.nbytes)
        return made

    def normal(*shape: int) -> Array:
        return random.normal(size=shape).astype(np.float32)

    queries = normal(1, kind.heads, QUERIES, kind.key_size)[:, :, first : first + count]
    keys = normal(1, kind.key_heads, kind.keys, kind.key_size)
    values = normal(1, kind.key_heads, kind.keys, kind.value_size)
    position = np.arange(QUERIES)[:, None] + kind.keys - 64 - QUERIES
    mask = np.where(np.arange(kind.keys) <= position, -0.25 * random.random(kind.keys), -np.inf)
    operands = [
        tensor(queries, F32),
        tensor(keys, kind.type),
        tensor(values, kind.type),
        tensor(mask[None, None, first : first + count].astype(np.float32), F16),
    ]
    build = lib.ggml_flash_attn_ext
    build.restype = lib.ggml_new_graph.restype = ctypes.c_void_p
    numbers = [ctypes.c_float(number) for number in (kind.key_size**-0.5, kind.max_bias, kind.softcap)]
    result = ctypes.c_void_p(build(ctypes.c_void_p(memory), *operands, *numbers))
    if kind.sinks:
        lib.ggml_flash_attn_ext_add_sinks(result, tensor(normal(1, 1, 1, kind.heads), F32))
    graph = ctypes.c_void_p(lib.ggml_new_graph(ctypes.c_void_p(memory)))
    lib.ggml_build_forward_expand(graph, result)
    lib.ggml_graph_compute_with_ctx(ctypes.c_void_p(memory), graph, kind.threads)
    found = np.empty((count, kind.heads, kind.value_size), np.float32)
    ctypes.memmove(found.ctypes.data, lib.ggml_get_data(result), found.nbytes)
    lib.ggml_free(ctypes.c_void_p(memory))
    return found


@pytest.mark.parametrize(
    "kind",
    [
        Kind(),
        Kind(threads=1),
        Kind(heads=3, key_heads=3, threads=5),
        Kind(heads=8, key_heads=1, key_size=576, value_size=512),
        Kind(key_size=80, value_size=96),
        Kind(key_size=256, value_size=256, softcap=30.0),
        Kind(heads=12, key_heads=4, max_bias=8.0),
        Kind(sinks=True),
        Kind(type=F32),
        Kind(keys=200),
        Kind(key_size=20, value_size=20, heads=2),
        Kind(key_size=24, value_size=24),
        # So many heads share a key that 63 tokens need more than 64 parts.
        Kind(heads=72, key_heads=1, key_size=32, value_size=16),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 7, 63])
def test_queries_are_computed_as_among_others(lib: Any, kind: Kind, count: int) -> None:
    together = attention(lib, kind, 0, QUERIES)
    first = 20
    alone = attention(lib, kind, first, count)
    assert np.array_equal(alone, together[first : first + count])
    assert np.isfinite(together).all()
    assert np.abs(together).max() > 0.1


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
@pytest.mark.parametrize("kind", [12, 13, 14], ids=["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_are_multiplied_as_among_others(lib: Any, kind: int, threads: int) -> None:
    weights = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype(np.float32)
    inputs = inputs_for(40)

    def product(first: int, count: int) -> Array:
        memory = ctypes.c_void_p(lib.ggml_init(ContextParams(64 << 20, None, False)))
        create, multiply = lib.ggml_new_tensor_2d, lib.ggml_mul_mat
        for function in (create, multiply, lib.ggml_get_data, lib.ggml_new_graph):
            function.restype = ctypes.c_void_p
        a = ctypes.c_void_p(create(memory, kind, ctypes.c_int64(WIDTH), ctypes.c_int64(ROWS)))
        b = ctypes.c_void_p(create(memory, F32, ctypes.c_int64(WIDTH), ctypes.c_int64(count)))
        sizes = [ctypes.c_int64(number) for number in (0, ROWS, WIDTH)]
        target = ctypes.c_void_p(lib.ggml_get_data(a))
        lib.ggml_quantize_chunk(kind, ctypes.c_void_p(weights.ctypes.data), target, *sizes, None)
        part = np.ascontiguousarray(inputs[first : first + count])
        ctypes.memmove(lib.ggml_get_data(b), part.ctypes.data, part.nbytes)
        result = ctypes.c_void_p(multiply(memory, a, b))
        graph = ctypes.c_void_p(lib.ggml_new_graph(memory))
        lib.ggml_build_forward_expand(graph, result)
        lib.ggml_graph_compute_with_ctx(memory, graph, threads)
        found = np.empty((count, ROWS), np.float32)
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
from edgespec.backends.llamacpp.context_plan import choose_kv_types
from edgespec.backends.llamacpp.native import ContextParams, cpu_kernels, ggml, library
assert library() is llama_cpp
assert cpu_kernels() is None
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "RuntimeWarning" in ended.stderr
