"""The messages that an MLX target and a worker exchange to load and run a block of layers.

The target sends, in this order:

1. The model's JSON files and the headers of its weight files. The worker builds the same model, and reports
   whether it has a weight cache. If every layer is split across the workers, they form a ring, and each
   worker also reports the address where it will listen for its predecessor.
2. In a ring, the addresses of all workers. The worker answers once it has joined the ring.
3. A message for each weight in the block. If the worker has a cache, the target sends the digest of a large
   weight first, and the worker reports whether it has that weight. It also confirms each weight that it
   stores.
4. A message without an array. The worker answers once it is ready.
5. The block's input for each pass, with the number of cached tokens before it. The worker first drops all
   cached tokens after that number, so a rollback needs no message of its own. It answers with the block's
   output. In a ring, all workers compute the same output, so only the first one sends it.

If a worker cannot handle a message, it answers with an error. Arrays are sent as raw bytes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from edgespec.cluster.layer_child import Buffer

__all__ = [
    "JSON_FILES",
    "MAX_FILES_BYTES",
    "MAX_STATES_BYTES",
    "PROTOCOL",
    "array_bytes",
    "array_header",
    "read_array",
]

# Version of the protocol. Increase it whenever the messages change.
PROTOCOL = 2
# The JSON files from which mlx-lm builds a model.
JSON_FILES = ("config.json", "hf_quant_config.json")
# Maximum size in bytes of a message with files, and of a message with hidden states. The headers of a model
# with many experts take several MB. Hidden states for 512 tokens take 32 MiB at 16384 float32 values each.
MAX_FILES_BYTES, MAX_STATES_BYTES = 1 << 27, 1 << 28

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.uint16, mx.uint32, mx.int8, mx.int16, mx.int32,
        mx.bool_,
    )
}  # fmt: skip


def array_header(array: mx.array) -> dict[str, Any]:
    """Return the message header fields that describe an array."""
    return {"dtype": str(array.dtype), "shape": list(array.shape)}


def array_bytes(array: mx.array) -> Buffer:
    """Return the bytes of an evaluated array, copying them only if the array is not contiguous."""
    flat = mx.contiguous(array.reshape(-1)).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]


def read_array(header: dict[str, Any], data: Buffer) -> mx.array:
    """Return the unevaluated array in a message.

    Raises:
        ValueError: The message is invalid.
    """
    dtype, shape = _DTYPES.get(str(header.get("dtype"))), header.get("shape")
    if dtype is None or not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError("a message has no valid data type and shape")
    size = dtype.size
    for each in shape:
        size *= each
    if min(shape, default=1) < 1 or size != len(data):
        raise ValueError(f"an array of shape {shape} and type {header['dtype']} has {len(data):,} bytes")
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
