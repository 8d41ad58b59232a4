"""Preparing a GGUF model for early exit: its layers in two halves, which both use one set of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LanguageModel, LoadOptions, Progress
from edgespec.backends.gguf_files import gguf_files
from edgespec.backends.llamacpp import layerskip_files, load
from edgespec.backends.llamacpp.layerskip import load_layerskip
from edgespec.engine.tree import TokenTree
from edgespec.errors import CapabilityError, ModelFileError, OptionError
from edgespec.prepare.builder import BuildFolder, interrupted_settings, make
from edgespec.prepare.exit_measurement import measure_exits
from edgespec.prepare.exit_table import Exit
from edgespec.prepare.gguf_parts import GgufModel, write_metadata_part, write_tensor_part
from edgespec.prepare.store import PreparedModel, check_prepared, find_prepared

__all__ = ["measured_exit", "prepare_layerskip"]

_PROOF_CONTEXT_TOKENS = 256
_PROOF_PREFILL, _PROOF_WIDE, _PROOF_STEPS = 40, 8, 8
# How far two computations of one row may differ, in standard deviations of the row: the order of sums only.
_ROUNDING = 1e-3


def prepare_layerskip(
    path: Path,
    exit_layer: int | None = None,
    *,
    to: Path | None = None,
    progress: Progress | None = None,
) -> PreparedModel:
    """Write the model at `path` in two halves, below and from layer `exit_layer` on, and prove them.

    exit_layer: None measures which exit pays best. to: the folder to make, by default one in the store.
    What was prepared before is not made again. The facts of what is returned: `layer_count`, and `exits`,
    what was measured (empty where the model cannot be read between its layers).
    Raises OptionError (no such layer), CapabilityError with the reason where the halves are not the model,
    or where no exit pays and none was named, ModelFileError (the file is no model, damaged, or does not
    fit the disk) and CancelledError.
    """
    source = GgufModel(gguf_files(path))
    _check_source(source, path)
    exits: tuple[Exit, ...] | None = None
    if exit_layer is None:
        if to is None and (there := _present(path)):
            return there
        exit_layer, exits = _chosen(source, path, progress)
    if not 1 <= exit_layer < source.layer_count:
        raise OptionError(
            f"--exit is {exit_layer}, and {path.name} has {source.layer_count} layers",
            f"give a layer from 1 to {source.layer_count - 1}, or auto",
        )
    written = sum(tensor.size_bytes for tensor in source.tensors) + 3 * source.header_bytes

    def write(bench: BuildFolder) -> Mapping[str, Any]:
        _write(bench, source, path, exit_layer, progress)
        measured = _measured(source, path, exit_layer, progress) if exits is None else exits
        return {"layer_count": source.layer_count, "exits": [found.to_json() for found in measured]}

    settings = {"exit_layer": exit_layer}
    return make("layerskip", path, settings, write, needed_bytes=written, to=to, progress=progress)


def measured_exit(prepared: PreparedModel) -> Exit | None:
    """What was measured of the exit that was prepared; None where it could not be."""
    exits = map(Exit.from_json, prepared.facts.get("exits", ()))
    return next((found for found in exits if found.exit_layer == prepared.settings["exit_layer"]), None)


def _present(path: Path) -> PreparedModel | None:
    """What was prepared from this file at any exit, if it is still right."""
    there = find_prepared("layerskip", path)
    try:
        if there is not None:
            check_prepared(there, path)
    except ModelFileError:
        return None
    return there


def _chosen(source: GgufModel, path: Path, progress: Progress | None) -> tuple[int, tuple[Exit, ...] | None]:
    """The exit that pays best, and what was measured. Raises CapabilityError when none pays."""
    begun = interrupted_settings("layerskip", path)
    if begun is not None:
        return int(begun["exit_layer"]), None
    table = measure_exits(path, source, progress=progress)
    best = table.best
    if not table.saves_time:
        raise CapabilityError(
            f"{path.name}: {table.summary}",
            f"use another method, or --exit {best.exit_layer} to prepare it nevertheless",
        )
    return best.exit_layer, table.exits


def _measured(source: GgufModel, path: Path, exit_layer: int, progress: Progress | None) -> tuple[Exit, ...]:
    try:
        return measure_exits(path, source, exit_layer, progress).exits
    except CapabilityError:
        return ()  # it works; what it is worth is not known


def _check_source(source: GgufModel, path: Path) -> None:
    """Raises CapabilityError for what is known beforehand not to come apart."""
    reason = ""
    if source.layer_count < 2:
        reason = f"it has {source.layer_count} layer"
    elif source.value("nextn_predict_layers", 0):
        reason = "its last layers predict further tokens and are not run in line"
    elif source.value("attention.shared_kv_layers", 0):
        reason = "some of its layers use the keys and values of earlier ones"
    if reason:
        raise CapabilityError(f"{path.name} cannot be prepared for early exit: {reason}")


def _write(
    bench: BuildFolder, source: GgufModel, path: Path, exit_layer: int, progress: Progress | None
) -> None:
    expected, description = _asked_whole(path, progress)
    shared = source.shared()
    count, architecture = source.layer_count, source.architecture
    extra: dict[str, int | str] = {
        layerskip_files.SHARED_BYTES_KEY: sum(tensor.size_bytes for tensor in shared),
        layerskip_files.PARAMETERS_KEY: sum(tensor.parameters for tensor in source.tensors),
        layerskip_files.DESCRIPTION_KEY: description,
    }
    for name, tensors, number in (
        (layerskip_files.SHARED, shared, 1),
        (layerskip_files.LOWER, source.layers(0, exit_layer), 2),
        (layerskip_files.UPPER, source.layers(exit_layer, count), 2),
    ):
        bench.file(
            name,
            lambda file, tensors=tensors, number=number: write_tensor_part(  # type: ignore[misc]
                file, architecture, tensors, number, 3, progress
            ),
            progress,
        )
    for name, begin, end in (
        (layerskip_files.LOWER_FIRST, 0, exit_layer),
        (layerskip_files.UPPER_FIRST, exit_layer, count),
    ):
        tensor_count = len(shared) + len(source.layers(begin, end))
        metadata = source.metadata(begin, end)
        bench.file(
            name,
            lambda file, metadata=metadata, tensor_count=tensor_count: write_metadata_part(  # type: ignore[misc]
                file, architecture, metadata, extra, tensor_count, 3
            ),
        )
    _prove(bench.folder, path, expected, progress)


def _options() -> LoadOptions:
    return LoadOptions(context_tokens=_PROOF_CONTEXT_TOKENS, gpu_layers=0)


def _asked_whole(path: Path, progress: Progress | None) -> tuple[NDArray[np.float32], str]:
    """What the whole model says to the proof's tokens, and its description."""
    model = load(str(path), path.name, _options(), progress)
    try:
        able = model.facts.capabilities
        if not (able.rollback and able.tree):
            raise CapabilityError(
                f"{path.name} cannot be prepared for early exit: {able.reason}",
                "its own file can still be used",
            )
        return _rows(model), model.facts.description
    finally:
        model.close()


def _prove(folder: Path, path: Path, expected: NDArray[np.float32], progress: Progress | None) -> None:
    """Raises CapabilityError unless the halves say what the whole model says."""
    try:
        model = load_layerskip(str(folder), path.name, _options(), progress)
    except ModelFileError as error:
        raise CapabilityError(f"{path.name} cannot be run in two halves: {error.what}") from error
    try:
        got = _rows(model)
    finally:
        model.close()
    apart = np.abs(got - expected).max(axis=1) / expected.std(axis=1)
    if not np.isfinite(got).all() or not (apart <= _ROUNDING).all():
        raise CapabilityError(
            f"{path.name} says something else in two halves (by {float(apart.max()):.2g} of the spread of its"
            " logits): what its layers compute depends on where they stand",
            "try another --exit; nothing was kept",
        )


def _rows(model: LanguageModel) -> NDArray[np.float32]:
    """Logits after a prefill, by a wide pass and by single steps: float32 [n, vocab]."""
    size = model.facts.vocab_size
    tokens = np.random.default_rng(0).integers(0, size, _PROOF_PREFILL + _PROOF_WIDE + _PROOF_STEPS).tolist()
    everything = np.arange(size)
    model.prefill(tokens[:_PROOF_PREFILL])
    wide = tokens[_PROOF_PREFILL : _PROOF_PREFILL + _PROOF_WIDE]
    logits = model.verify(TokenTree.chain(wide[0], wide[1:]))
    rows = [logits.at(row, everything) for row in range(len(wide))]
    model.commit(tuple(range(1, len(wide))))
    for token in tokens[-_PROOF_STEPS:]:
        rows.append(model.verify(TokenTree.chain(token)).at(0, everything))
        model.commit(())
    return np.array(rows, np.float32)
