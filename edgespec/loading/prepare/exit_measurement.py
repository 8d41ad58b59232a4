"""Measure how often a GGUF model's exit layers agree with the full model, and the cost of verify passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp import load
from edgespec.backends.llamacpp.layerskip import hidden_states
from edgespec.errors import BackendError, CapabilityError
from edgespec.loading.prepare.calibration import calibration_prompt
from edgespec.loading.prepare.gguf_parts import GgufParts
from edgespec.methods.costs.curve import measure_costs
from edgespec.methods.layerskip.drafter import EXIT_WIDTHS, ExitTable, exit_table, greedy_reply
from edgespec.model.base import LoadOptions, Progress

__all__ = ["measure_exits"]

_CONTEXT_TOKENS = 256
_MAX_EXITS = 16
# Number of rows of the output head to convert to floating point at a time. Limits memory use.
_HEAD_ROWS = 8192
# Minimum fraction of the model's greedy reply that the hidden states of its last layer must predict.
_MIN_LAST_LAYER_AGREEMENT = 0.9


def measure_exits(
    path: Path, source: GgufParts, exit_layer: int | None = None, progress: Progress | None = None
) -> ExitTable:
    """Measure how often each exit layer predicts the next token of the model's own reply to a prompt.

    Verify pass costs are measured on the device that the model normally runs on.

    Args:
        path: The GGUF file.
        source: The model in that file, for reading its tensors.
        exit_layer: Measure only this exit layer. If None, measure up to 16 exit layers.
        progress: Reports progress while loading the model.

    Raises:
        CapabilityError: The model's hidden states cannot be read.
        ModelFileError: The model cannot be loaded.
    """
    model = load(str(path), path.name, LoadOptions(context_tokens=_CONTEXT_TOKENS), progress)
    try:
        prompt = calibration_prompt(model.vocabulary)
        reply = greedy_reply(model, prompt)
        curve = measure_costs(model, EXIT_WIDTHS)
    finally:
        model.close()
    # Omit the last token of the reply, because there is no token after it to predict.
    tokens = [*prompt, *reply[:-1]]
    # Read hidden states on the CPU, which every llama.cpp build supports.
    options = LoadOptions(context_tokens=_CONTEXT_TOKENS, gpu_layers=0)
    try:
        hidden = hidden_states(str(path), path.name, tokens, options, progress)[:, len(prompt) - 1 :]
    except BackendError as error:
        raise CapabilityError(
            f"the fastest early-exit layer of {path.name} cannot be measured: {error.what}",
            "choose the early-exit layer yourself with --exit N",
            code="early_exit_not_supported",
        ) from error
    chosen = _candidates(source.layer_count) if exit_layer is None else [exit_layer]
    layers = [*(layer - 1 for layer in chosen), source.layer_count - 1]
    *agreements, last = _agreement(source, hidden[layers], np.array(reply))
    if last < _MIN_LAST_LAYER_AGREEMENT:
        raise CapabilityError(
            f"the fastest early-exit layer of {path.name} cannot be measured: predictions from its last layer"
            f" are correct for only {last:.0%} of the tokens",
            "choose the early-exit layer yourself with --exit N",
            code="early_exit_not_supported",
        )
    return exit_table(dict(zip(chosen, agreements, strict=True)), *_layer_bytes(source), curve.v)


def _candidates(layer_count: int) -> list[int]:
    step = -(-(layer_count - 1) // _MAX_EXITS)
    return list(range(step, layer_count, step))


def _layer_bytes(source: GgufParts) -> tuple[list[int], int]:
    layers = [source.layers(at, at + 1).values() for at in range(source.layer_count)]
    head = source.output_head()
    return [sum(tensor.n_bytes for tensor in layer) for layer in layers], head.n_bytes if head else 0


def _agreement(source: GgufParts, hidden: NDArray[np.float32], expected: NDArray[np.int64]) -> list[float]:
    """Return the fraction of positions at which each layer's top token is the expected one.

    The shape of `hidden` is (layers, tokens, embedding).
    """
    head, norm = source.output_head(), source.tensors.get("output_norm.weight")
    if head is None or norm is None:
        raise CapabilityError(
            "the fastest early-exit layer cannot be measured, because the model has no output head or no"
            " final norm",
            "choose the early-exit layer yourself with --exit N",
            code="early_exit_not_supported",
        )
    states = _normed(source, hidden, norm, source.tensors.get("output_norm.bias"))
    flat = states.reshape(-1, states.shape[-1])
    count = len(flat)
    best, token = np.full(count, -np.inf, np.float32), np.zeros(count, np.int64)
    for start in range(0, len(head.data), _HEAD_ROWS):
        rows = _floats(head, start, start + _HEAD_ROWS)
        logits = flat @ rows.T
        winner = logits.argmax(axis=1)
        value = logits[np.arange(count), winner]
        better = value > best
        best[better], token[better] = value[better], winner[better] + start
    agrees = token.reshape(states.shape[:2]) == expected
    return list(map(float, agrees.mean(axis=1)))


def _normed(source: GgufParts, hidden: NDArray[np.float32], weight: Any, bias: Any) -> NDArray[np.float32]:
    epsilon = source.value("attention.layer_norm_rms_epsilon", None)
    if epsilon is None:
        epsilon = source.value("attention.layer_norm_epsilon", 1e-5)
        hidden = hidden - hidden.mean(axis=-1, keepdims=True)
    scale = np.sqrt((hidden.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + epsilon)
    normed: NDArray[np.float32] = (hidden / scale * _floats(weight)).astype(np.float32)
    return normed if bias is None else normed + _floats(bias)


def _floats(tensor: Any, start: int = 0, end: int | None = None) -> NDArray[np.float32]:
    data: NDArray[np.float32] = gguf.quants.dequantize(tensor.data[start:end], tensor.tensor_type)
    return data
