"""`edgespec models list`: list the models in the catalogue and on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import interruptible
from edgespec.cli.models_shown import STORED_BY, entry_json, installed_json, prepared_json
from edgespec.cli.options import declared_options, json_option
from edgespec.cli.screen import is_terminal, note, print_json, print_table, rate, warn
from edgespec.errors import EdgespecError, ModelFileError, ModelNotFoundError
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    from edgespec.cli.checked_workers import CheckedWorker
    from edgespec.loading.model_list import AvailableModel
    from edgespec.loading.speed_prediction import SpeedPrediction
    from edgespec.store.catalogue import ModelEntry

__all__ = ["list_models"]

# Maximum number of models for which `models list` explains why they cannot be used.
_MAX_UNUSABLE = 3


@click.command(
    "list",
    cls=HelpfulCommand,
    short_help="List the models you can use.",
    params=declared_options("workers"),
    examples=(
        "edgespec models list",
        "edgespec models list --json",
        "edgespec models list --workers 192.168.1.20:50052=16GiB,local=8GiB",
    ),
)
@json_option
def list_models(as_json: bool, workers: str | None) -> None:
    """List the models that edgespec knows by name, the models on this machine, and your aliases and pairs.

    \b
    SIZE        size of the model's file; an estimate if nothing is downloaded
    DOWNLOADED  versions of the model on this machine; others are downloaded
                when you first use them
    TOKENS/S    expected speed with the recommended draft model, once `edgespec
                recommend` has measured this machine; "-" means that the model
                is too large, and "from disk" that it is larger than memory,
                so part of it is read from disk again and again
    FITS        with --workers: where the model, its draft model and a context
                of 8,192 tokens fit, judging by their sizes

    MLX models are listed only if MLX is installed. The second table lists models of Ollama, LM Studio and the
    Hugging Face cache, which edgespec uses without copying them. A narrow terminal shows fewer columns. For
    details of one model, run `edgespec models show MODEL`.
    """
    from edgespec.loading.model_list import list_models as list_available
    from edgespec.store.catalogue import load_catalogue, user_aliases, user_pairs
    from edgespec.store.installed import find_installed

    usable = (entry for entry in load_catalogue().entries if entry.file_format.runs_here)
    entries = sorted(usable, key=lambda entry: not entry.embedded_file)
    listed = [(entry, _files(entry)) for entry in entries]
    available = {model.entry.name: model for model in list_available() if model.entry}
    speeds = {entry.name: _speed(available.get(entry.name)) for entry in entries}
    streamed = {name for name, model in available.items() if model.is_streamed}
    own, pairs, installed = user_aliases(), user_pairs(), find_installed()
    checked, fits = _check(workers, entries) if workers is not None else ([], {})
    if as_json:
        print_json(
            {
                "models": [
                    entry_json(entry)
                    | {"on_this_machine": bool(files), "files": files}
                    | {"expected_speed": speed.to_json() if (speed := speeds[entry.name]) else None}
                    | {"larger_than_memory": entry.name in streamed}
                    | ({"fits": fits[entry.name]} if fits else {})
                    for entry, files in listed
                ],
                "local": [installed_json(model) for model in installed.models],
                "prepared": [prepared_json(prepared) for prepared in installed.prepared],
                "skipped": [{"name": skipped.name, "why": skipped.reason} for skipped in installed.unusable],
                "aliases": own,
                "pairs": pairs,
            }
            | ({"workers": [worker.to_json() for worker in checked]} if checked else {})
        )
        return
    columns = ["NAME", "ALSO CALLED", "FORMAT", "SIZE", "DOWNLOADED"]
    rows = [
        [
            entry.name,
            _short_names(entry),
            entry.format,
            _size(entry, files),
            ", ".join(files) or "-",
        ]
        for entry, files in listed
    ]
    if any(speeds.values()):
        columns.insert(-1, "TOKENS/S")
        for row, (name, speed) in zip(rows, speeds.items(), strict=True):
            from_disk = ", from disk" if name in streamed else ""
            row.insert(-1, f"{rate(speed.fastest_tokens_per_second)}{from_disk}" if speed else "-")
    if fits:
        columns.insert(-1, "FITS")
        for row, place in zip(rows, fits.values(), strict=True):
            row.insert(-1, place or "-")
    _print_list(
        ("WORKER", "MEMORY", "ROUND TRIP", "STATUS"),
        [
            (
                str(worker.address),
                format_bytes(worker.status.memory_bytes) if worker.status else "-",
                f"{worker.link.round_trip_seconds * 1e3:.2g} ms" if worker.link else "-",
                worker.error.what if worker.error else "ok",
            )
            for worker in checked
        ],
    )
    _print_list(columns, rows, optional=("FORMAT", "ALSO CALLED", "TOKENS/S"))
    _print_list(
        ("ON THIS MACHINE", "FORMAT", "SIZE", "QUANTISATION", "STORED BY"),
        [
            (
                model.reference,
                model.format,
                format_bytes(model.info.size_bytes),
                model.info.quantisation or "-",
                STORED_BY[model.place],
            )
            for model in installed.models
        ],
        optional=("FORMAT", "QUANTISATION", "STORED BY"),
    )
    _print_list(
        ("MADE BY EDGESPEC", "SIZE", "MADE FROM", "PATH"),
        [
            (p.kind, format_bytes(p.size_bytes), _short_path(p.source), _short_path(p.folder))
            for p in installed.prepared
        ],
        optional=("PATH",),
    )
    _print_list(("YOUR ALIAS", "MODEL"), sorted(own.items()))
    _print_list(("YOUR MODEL", "DRAFT MODEL"), sorted(pairs.items()))
    if not any(speeds.values()):
        note("To see how fast each model would be on this machine, run `edgespec recommend` once.")
    elif any(speed and speed.is_disturbed for speed in speeds.values()):
        warn(
            "TOKENS/S is probably too low, because other programs were busy when this machine was measured;"
            " run `edgespec recommend` again when they have finished"
        )
    note("To see which draft models and heads make a model faster, run `edgespec models show MODEL`.")
    if not own and not pairs:
        note("To give a model a shorter name, see `edgespec models alias --help`.")
    for each in installed.unusable[:_MAX_UNUSABLE]:
        note(f"Cannot use {each.name}: {each.reason}.")
    if len(installed.unusable) > _MAX_UNUSABLE:
        more = len(installed.unusable) - _MAX_UNUSABLE
        note(f"{more} more models cannot be used. `edgespec models list --json` shows why.")


def _speed(model: AvailableModel | None) -> SpeedPrediction | None:
    """Return the expected speed of a model, unless it is a toy or too large for this machine."""
    if model is None or not model.can_run or model.place == "embedded":
        return None
    return model.speed


def _check(workers: str, entries: Sequence[ModelEntry]) -> tuple[list[CheckedWorker], dict[str, str]]:
    """Check the workers, and return them with the result of `_fits` for each model."""
    from edgespec.api.machine import inspect_machine
    from edgespec.cli.checked_workers import check_workers
    from edgespec.cluster.machines import parse_machines

    machine = inspect_machine()
    checked = interruptible(lambda stop: check_workers(workers, machine.llama_cpp.version, stop))
    local_bytes = parse_machines("--workers", workers).local_bytes
    here_bytes = machine.memory_available_bytes
    return checked, {entry.name: _fits(entry, here_bytes, local_bytes, checked) for entry in entries}


def _fits(entry: ModelEntry, here_bytes: int, local_bytes: int, checked: Sequence[CheckedWorker]) -> str:
    """Return where a catalogue model fits: `this machine`, `workers`, or an empty string for nowhere.

    Args:
        entry: The model.
        here_bytes: Available memory of this machine.
        local_bytes: Memory of this machine for layers when the others are on workers.
        checked: The workers.
    """
    from edgespec.loading.speed_prediction import recommended_draft
    from edgespec.store.catalogue import needed_bytes

    draft = recommended_draft(entry)
    draft_bytes = draft.approximate_file_bytes if draft else 0
    if needed_bytes(entry.approximate_file_bytes + draft_bytes, entry.parameters) <= here_bytes:
        return "this machine"
    library = entry.file_format.worker_library
    shared = sum(worker.memory_for(library()) for worker in checked) if library else 0
    # The draft model is always on this machine.
    needed = needed_bytes(entry.approximate_file_bytes, entry.parameters)
    return "workers" if shared and needed <= shared + local_bytes else ""


def _size(entry: ModelEntry, files: Mapping[str, str]) -> str:
    """Return the size of a model's default version, estimated if its file is not on this machine."""
    from edgespec.store.installed import loaded_bytes

    path = files.get(entry.quantisation)
    if path is not None:
        with suppress(EdgespecError, OSError):
            return format_bytes(loaded_bytes(entry.file_format.read_info(Path(path)), entry))
    return format_bytes(entry.approximate_file_bytes)


def _short_names(entry: ModelEntry) -> str:
    """Return a catalogue model's first alias and, if different, its name in Ollama."""
    # Leave out aliases such as `qwen3:8b-mlx`, which are no shorter than the model's name.
    short = [alias for alias in entry.aliases if not (":" in alias and alias.endswith("-mlx"))]
    ollama = [alias for alias in short if ":" in alias]
    names = dict.fromkeys([*short[:1], *ollama[:1]])
    return ", ".join(names) or "-"


def _short_path(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _print_list(heads: Sequence[str], rows: Sequence[Sequence[str]], *, optional: Sequence[str] = ()) -> None:
    if rows:
        print_table(heads, rows, optional)
        if is_terminal(sys.stdout):
            click.echo()


def _files(entry: ModelEntry) -> dict[str, str]:
    """Return a catalogue model's files on this machine, keyed by quantisation."""
    from edgespec.store.reference import resolve

    files = {}
    for quantisation in dict.fromkeys((entry.quantisation, *entry.aliases.values())):
        wanted = f"{entry.name}:{quantisation}" if entry.file_format.one_file_per_quantisation else entry.name
        try:
            found = resolve(wanted, allow_download=False)
        except (ModelNotFoundError, ModelFileError):
            continue
        files[quantisation] = str(found.path)
    return files
