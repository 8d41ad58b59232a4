"""Prepare a GGUF model for early-exit drafting by splitting it into a lower and an upper part.

The exit layer is chosen by measuring how often each layer agrees with the full model, and how long verify
passes take.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.llamacpp import load
from edgespec.backends.llamacpp.layerskip import hidden_states, load_layerskip
from edgespec.engine.tree import TokenTree
from edgespec.errors import BackendError, CapabilityError, ModelFileError, OptionError
from edgespec.loading.prepare.calibration import calibration_prompt
from edgespec.loading.prepare.gguf_parts import GgufParts, Metadata, Tensors, split_metadata, write_gguf
from edgespec.methods.costs.curve import measure_costs
from edgespec.methods.layerskip.drafter import EXIT_WIDTHS, Exit, ExitTable, exit_table, greedy_reply
from edgespec.model.base import LanguageModel, LoadOptions, Progress
from edgespec.model.formats import layerskip_files
from edgespec.model.formats.gguf_files import gguf_files
from edgespec.model.registry import format_at
from edgespec.model.trial_load import TrialModel, check_loadable
from edgespec.store.prepared_builder import BuildFolder, build, interrupted_settings
from edgespec.store.prepared_files import PreparedModel, check_prepared, find_prepared

_TEST_OPTIONS = LoadOptions(context_tokens=256, gpu_layers=0)
_TEST_PREFILL_TOKENS, _TEST_PASS_TOKENS, _TEST_STEPS = 40, 8, 8
# Maximum difference in logits between the split and original models, in standard deviations of the logits.
# Rounding errors are smaller.
_MAX_DIFFERENCE = 1e-3
_CONTEXT_TOKENS = 256
_MAX_EXITS = 16
# Number of rows of the output head to convert to floating point at a time, to limit memory use.
_HEAD_ROWS = 8192
# Minimum fraction of tokens in the model's greedy reply that the hidden states of its last layer must
# predict.
_MIN_LAST_LAYER_AGREEMENT = 0.9


def prepare_layerskip(
    path: Path,
    exit_layer: int | None = None,
    *,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Split a model at an exit layer for early-exit drafting (LayerSkip, arXiv 2404.16710).

    The lower part drafts, and the upper part verifies using the lower part's hidden states. Both share the
    embedding and the output head. Before the split model is published, its logits are compared with the
    original's. If a valid split model already exists, it is returned instead.

    Args:
        path: Path of a GGUF file.
        exit_layer: Number of layers in the lower part. If None, the fastest exit is found by measurement.
        to: Folder to create. Defaults to a folder in the store.
        progress: Reports progress while reading and writing.

    Returns:
        The split model. Its facts are `layer_count` and `exits`. The latter holds the measurements, and is
        empty if the model's hidden states cannot be read.

    Raises:
        OptionError: `exit_layer` is out of range for the model.
        CapabilityError: The model cannot be split, or no exit is faster than plain decoding.
        ModelFileError: The file is damaged or not a model, or there is not enough disk space.
        CancelledError: `progress` returned False.
    """
    source = GgufParts(gguf_files(path))
    _check_source(source, path)
    check_loadable([TrialModel(path.name, path, format_at(path), runs=True)], progress)
    exits: tuple[Exit, ...] | None = None
    if exit_layer is None:
        if to is None and (existing := _find_valid(path)):
            return existing
        exit_layer, exits = _choose_exit(source, path, progress)
    if not 1 <= exit_layer < source.layer_count:
        raise OptionError(
            f"--exit {exit_layer} is out of range: {path.name} has {source.layer_count} layers",
            f"use a layer from 1 to {source.layer_count - 1}, or `auto`",
        )
    needed_bytes = sum(one.n_bytes for one in source.tensors.values()) + 3 * source.header_bytes

    def write_files(build_folder: BuildFolder) -> Mapping[str, Any]:
        _write_parts(build_folder, source, path, exit_layer, progress)
        measured = exits or ()
        if exits is None:
            with suppress(CapabilityError):  # The measurements are optional.
                measured = measure_exits(path, source, exit_layer, progress).exits
        return {"layer_count": source.layer_count, "exits": [one.to_json() for one in measured]}

    settings = {"exit_layer": exit_layer}
    return build(
        "layerskip", path, settings, write_files, needed_bytes=needed_bytes, to=to, progress=progress
    )


def measured_exit(prepared: PreparedModel) -> Exit | None:
    """Return the measured speed-up of the prepared exit layer, or None if it was not measured."""
    exits = (Exit(**value) for value in prepared.facts.get("exits", ()))
    return next((one for one in exits if one.exit_layer == prepared.settings["exit_layer"]), None)


def _find_valid(path: Path) -> PreparedModel | None:
    with suppress(ModelFileError):
        if existing := find_prepared("layerskip", path):
            check_prepared(existing, path)
            return existing
    return None


def _choose_exit(
    source: GgufParts, path: Path, progress: Progress | None
) -> tuple[int, tuple[Exit, ...] | None]:
    settings = interrupted_settings("layerskip", path)
    if settings is not None:
        return int(settings["exit_layer"]), None
    table = measure_exits(path, source, progress=progress)
    if not table.is_faster:
        raise CapabilityError(
            f"{path.name}: {table.verdict}",
            f"use another method, or --exit {table.best.exit_layer} to prepare it anyway",
            code="early_exit_not_supported",
        )
    return table.best.exit_layer, table.exits


def _check_source(source: GgufParts, path: Path) -> None:
    """Raise CapabilityError if the model cannot be split into two parts."""
    reason = ""
    if source.layer_count < 2:
        reason = f"it has only {source.layer_count} layer"
    elif source.value("nextn_predict_layers", 0):
        reason = "its last layers only predict extra tokens (multi-token prediction)"
    elif source.value("attention.shared_kv_layers", 0):
        reason = "some of its layers share the KV cache of earlier layers"
    if reason:
        raise CapabilityError(
            f"{path.name} cannot be prepared for early exit: {reason}", code="early_exit_not_supported"
        )


def _write_parts(
    build_folder: BuildFolder, source: GgufParts, path: Path, exit_layer: int, progress: Progress | None
) -> None:
    expected, description = _original_logits(path, progress)
    shared, count = source.shared(), source.layer_count
    lower, upper = source.layers(0, exit_layer), source.layers(exit_layer, count)
    integer, string = gguf.GGUFValueType.UINT64, gguf.GGUFValueType.STRING
    parameters = sum(int(tensor.n_elements) for tensor in source.tensors.values())
    extra: Metadata = {
        layerskip_files.SHARED_BYTES_KEY: (sum(one.n_bytes for one in shared.values()), integer, None),
        layerskip_files.PARAMETERS_KEY: (parameters, integer, None),
        layerskip_files.DESCRIPTION_KEY: (description, string, None),
    }
    parts: list[tuple[str, Metadata, Tensors]] = [
        (layerskip_files.SHARED, split_metadata(1, 3, 0), shared),
        (layerskip_files.LOWER, split_metadata(2, 3, 0), lower),
        (layerskip_files.UPPER, split_metadata(2, 3, 0), upper),
    ]
    for name, begin, end, tensors in (
        (layerskip_files.LOWER_FIRST, 0, exit_layer, lower),
        (layerskip_files.UPPER_FIRST, exit_layer, count, upper),
    ):
        split = split_metadata(0, 3, len(shared) + len(tensors))
        parts.append((name, source.metadata(begin, end) | extra | split, {}))
    write = partial(write_gguf, architecture=source.architecture, progress=progress)
    for name, metadata, tensors in parts:
        build_folder.file(name, partial(write, metadata=metadata, tensors=tensors))
    _test_split_model(build_folder.folder, path, expected, progress)


def _original_logits(path: Path, progress: Progress | None) -> tuple[NDArray[np.float32], str]:
    model = load(str(path), path.name, _TEST_OPTIONS, progress)
    try:
        capabilities = model.facts.capabilities
        if not (capabilities.rollback and capabilities.tree):
            raise CapabilityError(
                f"{path.name} cannot be prepared for early exit: {capabilities.reason}",
                "use the original file",
                code="early_exit_not_supported",
            )
        return _test_logits(model), model.facts.description
    finally:
        model.close()


def _test_split_model(
    folder: Path, path: Path, expected: NDArray[np.float32], progress: Progress | None
) -> None:
    try:
        model = load_layerskip(str(folder), path.name, _TEST_OPTIONS, progress)
    except ModelFileError as error:
        raise CapabilityError(
            f"{path.name} cannot be prepared for early exit, because its two parts cannot be loaded:"
            f" {error.what}",
            code="early_exit_not_supported",
        ) from error
    try:
        actual = _test_logits(model)
    finally:
        model.close()
    difference = np.abs(actual - expected).max(axis=1) / expected.std(axis=1)
    if not np.isfinite(actual).all() or not (difference <= _MAX_DIFFERENCE).all():
        raise CapabilityError(
            f"early exit would change the output of {path.name} too much (the scores of its tokens differ by"
            f" {float(difference.max()):.2g} standard deviations)",
            "choose another exit layer with --exit",
            code="early_exit_not_supported",
        )


def _test_logits(model: LanguageModel) -> NDArray[np.float32]:
    size = model.facts.vocab_size
    count = _TEST_PREFILL_TOKENS + _TEST_PASS_TOKENS + _TEST_STEPS
    tokens = np.random.default_rng(0).integers(0, size, count).tolist()
    all_tokens = np.arange(size)
    model.prefill(tokens[:_TEST_PREFILL_TOKENS])
    drafted = tokens[_TEST_PREFILL_TOKENS : _TEST_PREFILL_TOKENS + _TEST_PASS_TOKENS]
    logits = model.verify(TokenTree.chain(drafted[0], drafted[1:]))
    rows = [logits.at(row, all_tokens) for row in range(len(drafted))]
    model.commit(tuple(range(1, len(drafted))))
    for token in tokens[-_TEST_STEPS:]:
        rows.append(model.verify(TokenTree.chain(token)).at(0, all_tokens))
        model.commit(())
    return np.array(rows, np.float32)


def measure_exits(
    path: Path, source: GgufParts, exit_layer: int | None = None, progress: Progress | None = None
) -> ExitTable:
    """Measure how often each exit layer predicts the next token of the model's own reply to a prompt.

    The cost of verify passes is measured on the device that the model normally runs on.

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
            f"cannot determine the fastest early-exit layer of {path.name}: {error.what}",
            "choose one with --exit N",
            code="early_exit_not_supported",
        ) from error
    chosen = _candidates(source.layer_count) if exit_layer is None else [exit_layer]
    layers = [*(layer - 1 for layer in chosen), source.layer_count - 1]
    *agreements, last = _agreement(source, hidden[layers], np.array(reply))
    if last < _MIN_LAST_LAYER_AGREEMENT:
        raise CapabilityError(
            f"cannot determine the fastest early-exit layer of {path.name}: even its last layer predicts"
            f" only {last:.0%} of the tokens correctly",
            "choose one with --exit N",
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

    `hidden` has the shape [layers, tokens, hidden size].
    """
    head, norm = source.output_head(), source.tensors.get("output_norm.weight")
    if head is None or norm is None:
        raise CapabilityError(
            "cannot determine the fastest early-exit layer, because the model lacks an output layer or a"
            " final norm",
            "choose one with --exit N",
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
