"""`edgespec models`: list, show, download, name and remove models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from edgespec.cli.failures import DONE, FAILED
from edgespec.cli.help import HelpfulGroup
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.models_shown import (
    STORED_BY,
    Shown,
    entry_json,
    installed_json,
    is_head_folder,
    prepared_json,
    published_head,
)
from edgespec.cli.options import declared_options, json_option, model_reference
from edgespec.cli.running import with_progress
from edgespec.cli.screen import (
    ProgressLine,
    is_terminal,
    line_of,
    note,
    print_json,
    print_table,
    printable,
    warn,
)
from edgespec.errors import (
    BackendMissingError,
    EdgespecError,
    MemoryBudgetError,
    ModelFileError,
    ModelNotFoundError,
    NotDownloadedError,
    OptionError,
)
from edgespec.system.files import format_bytes, format_number, format_rate

if TYPE_CHECKING:
    from edgespec import ModelFacts
    from edgespec.cli.checked_workers import CheckedWorker
    from edgespec.loading.model_list import AvailableModel
    from edgespec.loading.speed_prediction import SpeedPrediction
    from edgespec.store.catalogue import ModelEntry
    from edgespec.store.reference import Resolved

__all__ = ["command", "list_models", "write_name"]

# Maximum number of models for which `models list` explains why they cannot be used.
_MAX_UNUSABLE = 3
_LOOK_CONTEXT_TOKENS = 256


@click.group(
    "models",
    cls=HelpfulGroup,
    foreign_commands={"ls": "list", "rm": "remove MODEL", "cp": "alias", "download": "pull MODEL"},
    short_help="List, show, download, name and remove models.",
    examples=(
        "edgespec models list",
        "edgespec models show demo",
        "edgespec models show ./model.gguf",
        "edgespec models pull 8b-q4",
        "edgespec models alias big 70b-q4",
    ),
)
def command() -> None:
    """List, show, download, name and remove models."""


@command.command(
    "list",
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
            row.insert(-1, f"{format_rate(speed.fastest_tokens_per_second)}{from_disk}" if speed else "-")
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
                f"{format_number(worker.link.round_trip_seconds * 1e3, 2)} ms" if worker.link else "-",
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
    """Return a model's expected speed, or None if it is a bundled demo model or cannot run here."""
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
        here_bytes: Available memory on this machine.
        local_bytes: Memory on this machine for the layers that are not on workers.
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
    # Do not count the draft model, which always runs on this machine.
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


@command.command(
    "show",
    short_help="Show a model, and what can make it faster.",
    examples=(
        "edgespec models show demo",
        "edgespec models show 8b-q4 --json",
        "edgespec models show ./my.gguf --probe",
    ),
)
@model_reference("reference")
@click.option("--probe", is_flag=True, help="Also load the model, and test what it supports.")
@json_option
def show_model(reference: str, probe: bool, as_json: bool) -> int:
    """Show details of a model, and which draft models and heads can make it faster. MODEL can also be a head.

    Until two models have been used together, their expected speed-up is estimated from their sizes. The exit
    status is 1 if a file could not be read.
    """
    from edgespec.loading.recommendation import why_no_speedup
    from edgespec.model.formats.head_files import head_info
    from edgespec.store.catalogue import load_catalogue
    from edgespec.store.drafts import choose_draft, draft_options
    from edgespec.store.heads import head_options, published_heads, resolve_head
    from edgespec.store.installed import find_installed, read_model_info, recommended_sampling, refusal_of
    from edgespec.store.reference import resolve

    head = published_head(reference)
    is_head = head is not None or is_head_folder(reference)
    shown = Shown(reference, _catalogued(reference), head)
    try:
        find = resolve_head if is_head else resolve
        found = shown.found = find(reference, allow_download=False)
    except ModelNotFoundError as error:
        if shown.entry is None and head is None:
            raise
        # There is nothing to show for a version that does not exist, such as a missing quantisation.
        if shown.entry and not isinstance(error, NotDownloadedError) and not load_catalogue().find(reference):
            raise
        shown.missing, shown.next_step = error.what, error.next_step
        if shown.entry is not None:
            shown.heads = published_heads(shown.entry)
    else:
        shown.entry = found.entry or shown.entry
        installed = find_installed(include_embedded=True)
        try:
            shown.info = head_info(found.path) if is_head else read_model_info(found)
            shown.problem = refusal_of(found, shown.info)
        except ModelFileError as error:
            shown.problem = str(error)
        # Do not look for draft models and heads if the backend rejects the model.
        if not shown.info or (shown.info.kind == "model" and not shown.problem):
            shown.options, shown.choice = draft_options(found, installed), choose_draft(found)
            shown.heads = head_options(found)
            if shown.info and not shown.is_too_small and not any(head.head for head in shown.heads):
                shown.why_no_speedup = why_no_speedup(found, shown.choice.draft)
        if probe:
            has_gpu_layers = "gpu_layers" not in found.backend.ignored_options
            shown.facts, shown.problem = interruptible(lambda stop: _facts(stop, reference, has_gpu_layers))
    if not is_head:
        shown.sampling = recommended_sampling(shown.found, shown.entry)
    if as_json:
        print_json(shown.to_json())
    else:
        lines = shown.lines()
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            click.echo(f"{name:{width}}  {line_of(value)}")
    return FAILED if shown.problem else DONE


@command.command(
    "pull",
    short_help="Download a model.",
    examples=("edgespec models pull 8b-q4", "edgespec models pull hf:user/repo:Q4_K_M"),
)
@model_reference("reference")
@json_option
def pull_model(reference: str, as_json: bool) -> None:
    """Download a model or a head into the Hugging Face cache, unless it is already on this machine.

    If a download is interrupted, run the command again to continue it.
    """
    found = with_progress(lambda progress: _resolver(reference)(reference, progress=progress))
    if as_json:
        print_json(
            {"reference": reference, "path": str(found.path), "source": found.source, "note": found.note}
        )
    else:
        click.echo(printable(found.note))


@command.command(
    "alias",
    short_help="Give a model an alias of your choice.",
    examples=("edgespec models alias big hf:user/repo:Q4_K_M", "edgespec models alias fast llama3.2:1b"),
)
@click.argument("name")
@model_reference("reference")
@json_option
def set_alias(name: str, reference: str, as_json: bool) -> None:
    """Make NAME an alias for MODEL. Your aliases take precedence over the names in `edgespec models list`.

    To delete an alias, run `edgespec models remove NAME`.
    """
    from edgespec.store.aliases import check_alias

    remark = check_alias(name.strip(), reference.strip())
    write_name("aliases", name.strip(), reference.strip())
    value = {"alias": name, "reference": reference}
    _print_change(f"{name} is now an alias for {reference}.", remark, value, as_json)


@command.command(
    "pair",
    short_help="Choose which draft model to use with a model.",
    examples=(
        "edgespec models pair 70b-q4 1b-q4",
        "edgespec models pair 8b-q4 none",
        "edgespec models pair 70b-q4 --remove",
    ),
)
@model_reference("target")
@click.argument("draft", metavar="DRAFT", required=False)
@click.option(
    "--remove", is_flag=True, help="Remove your choice, so that edgespec chooses the draft model again."
)
@json_option
def set_pair(target: str, draft: str | None, remove: bool, as_json: bool) -> None:
    """Choose the draft model that edgespec uses with MODEL, unless a command names another one with --draft.

    If DRAFT is `none`, MODEL runs without a draft model.
    """
    from edgespec.store.aliases import check_pair

    if (draft is None) != remove:
        raise click.UsageError("specify either DRAFT or --remove")
    target = target.strip()
    remark = check_pair(target, draft.strip()) if draft is not None else ""
    write_name("pairs", target, draft.strip() if draft is not None else None)
    if draft is None:
        change = f"The draft model for {target} will be chosen automatically again."
    elif draft.strip() == "none":
        change = f"{target} now runs without a draft model."
    else:
        change = f"{target} now uses the draft model {draft}."
    _print_change(change, remark, {"target": target, "draft": draft}, as_json)


@command.command(
    "remove",
    short_help="Delete an alias or a downloaded model.",
    examples=("edgespec models remove big", "edgespec models remove hf:user/repo:Q4_K_M --yes"),
)
@model_reference("reference")
@click.option("--yes", is_flag=True, help="Delete a download without asking for confirmation.")
@json_option
def remove_model(reference: str, yes: bool, as_json: bool) -> None:
    """Delete an alias, or a model or head in the Hugging Face cache, which other programs may also use.

    Your own files, and models that belong to Ollama or LM Studio, are never deleted.
    """
    from edgespec.store.catalogue import user_aliases
    from edgespec.store.installed import plan_removal

    name = reference.strip()
    if name.lower() in user_aliases():
        write_name("aliases", name, None)
        _print_change(f"Deleted the alias {name}.", "", {"removed": name, "freed_bytes": 0}, as_json)
        return
    found = _resolver(name)(name, allow_download=False)
    removal = plan_removal(found)
    size = format_bytes(removal.size_bytes)
    if not yes:
        if as_json or not is_terminal(sys.stdin):
            raise OptionError(
                f"deleting {found.path} ({size}) needs confirmation",
                "add --yes to confirm",
                code="confirmation_needed",
            )
        click.confirm(f"Delete {found.path} ({size})?", abort=True, err=True)
    freed_bytes = removal.execute()
    _print_change(
        f"Deleted {name}: {size} freed.", "", {"removed": name, "freed_bytes": freed_bytes}, as_json
    )


def _resolver(reference: str) -> Callable[..., Resolved]:
    """Return `resolve_head` if the catalogue lists `reference` as a head, and `resolve` otherwise."""
    from edgespec.store.heads import resolve_head
    from edgespec.store.reference import resolve

    return resolve_head if published_head(reference) else resolve


def _print_change(what: str, remark: str, value: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(value | {"remark": remark})
    else:
        click.echo(printable(what))
        note(remark)


def _catalogued(reference: str) -> ModelEntry | None:
    """Return the catalogue entry for a name, alias or repository, whether or not the model is downloaded."""
    from edgespec.store.catalogue import load_catalogue, user_aliases

    catalogue = load_catalogue()
    text = reference.strip()
    for _ in range(10):
        text = user_aliases().get(text.lower(), text)
    text = text.removeprefix("hf:")
    for name in filter(None, (text, text.rpartition(":")[0])):
        if found := catalogue.find(name):
            return found[0]
        if entry := catalogue.of_repository(name):
            return entry
    return None


def _facts(stop: Stop, reference: str, has_gpu_layers: bool) -> tuple[ModelFacts | None, str]:
    import edgespec

    options: dict[str, Any] = {"context": _LOOK_CONTEXT_TOKENS, "method": "none"}
    if has_gpu_layers:
        options["gpu_layers"] = 0
    try:
        with (
            ProgressLine(stop) as progress,
            edgespec.load(reference, "none", **options, progress=progress) as runtime,
        ):
            return runtime.target, ""
    except (MemoryBudgetError, BackendMissingError) as error:
        return None, str(error)


def write_name(table: Literal["aliases", "pairs"], name: str, reference: str | None) -> None:
    """Set the reference for a name, or remove the name if `reference` is None. Ignores case.

    Raises:
        ModelNotFoundError: The name to remove does not exist.
        ConfigurationError: The file cannot be changed.
    """
    import difflib
    import tomllib

    from edgespec.options.settings_file import quoted, read_text, write_value
    from edgespec.store.catalogue import user_aliases, user_aliases_path, user_pairs

    names = user_aliases() if table == "aliases" else user_pairs()
    if reference is None and name.lower() not in names:
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
        raise ModelNotFoundError(
            f"there is no {'alias' if table == 'aliases' else 'draft model saved for'} {name}",
            f"did you mean {near[0]}?"
            if near
            else "`edgespec models list` shows your aliases and draft models",
        )
    path = user_aliases_path()
    written = tomllib.loads(read_text(path) or "").get(table, {})
    spelled = next((each for each in written if each.lower() == name.lower()), name)
    write_value(path, (table, spelled), None if reference is None else quoted(reference))
