"""`edgespec models`: what is on this machine and what can be fetched, and what is known about one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE, FAILED
from edgespec.cli.help import HelpfulCommand, HelpfulGroup
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.models_shown import (
    Shown,
    catalogue_row,
    entry_json,
    installed_json,
    installed_row,
    prepared_json,
)
from edgespec.cli.options import json_option, model_reference
from edgespec.cli.screen import (
    ProgressLine,
    is_terminal,
    line_of,
    note,
    print_json,
    print_table,
    printable,
    terminal_width,
)
from edgespec.errors import (
    BackendMissingError,
    MemoryBudgetError,
    ModelFileError,
    ModelNotFoundError,
    OptionError,
)
from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec import ModelFacts
    from edgespec.catalog import ModelEntry, ModelFormat, Resolved

__all__ = ["command"]

_WIDE, _MEDIUM = 140, 90
_CATALOGUE_HEADS: Sequence[str] = (
    "NAME", "FORMAT", "SIZE", "HERE", "ALSO", "QUANT", "DRAFT", "CONTEXT", "FAMILY", "LICENCE",
)  # fmt: skip
_SHELF_HEADS = ("ON THIS MACHINE", "FORMAT", "SIZE", "QUANT", "PARAMETERS", "KEPT BY", "WHERE")
_LOOK_CONTEXT_TOKENS = 256


@click.group(
    "models",
    cls=HelpfulGroup,
    short_help="List the models that are here or known, or show one.",
    examples=(
        "edgespec models list",
        "edgespec models show demo",
        "edgespec models show ./model.gguf",
        "edgespec models pull 8b-q4",
        "edgespec models alias big 70b-q4",
    ),
)
def command() -> None:
    """The models on this machine, whoever put them there, and those edgespec knows by name."""


@command.command(
    "list",
    cls=HelpfulCommand,
    short_help="List the models that are here or known.",
    examples=("edgespec models list", "edgespec models list --json"),
)
@json_option
def list_models(as_json: bool) -> None:
    """List the catalogue, what is on this machine, and the names and pairs that are yours.

    HERE names the quantisations of the catalogue that are on this machine; the others are downloaded when
    they are used. Below the catalogue is what Ollama, LM Studio and the Hugging Face cache hold, with what to
    type for it: those models are used where they are, nothing is copied.
    """
    from edgespec.catalog import find_installed, load_catalogue
    from edgespec.catalog.catalogue import user_aliases, user_aliases_path, user_pairs

    entries = sorted(load_catalogue().entries, key=lambda entry: not entry.embedded_file)
    listed = [(entry, _files(entry)) for entry in entries]
    own, pairs, shelf = user_aliases(), user_pairs(), find_installed()
    if as_json:
        print_json(
            {
                "models": [entry_json(entry) | _here_json(files) for entry, files in listed],
                "local": [installed_json(shelved) for shelved in shelf.models],
                "prepared": [prepared_json(prepared) for prepared in shelf.prepared],
                "skipped": [{"name": skipped.name, "why": skipped.why} for skipped in shelf.skipped],
                "aliases": own,
                "pairs": pairs,
            }
        )
        return
    width, heads = terminal_width(), _CATALOGUE_HEADS
    rows = [catalogue_row(entry, files) for entry, files in listed]
    shown = len(heads) if width is None or width >= _WIDE else 7 if width >= _MEDIUM else 4
    print_table(heads[:shown], [row[:shown] for row in rows])
    if shelf.models:
        if is_terminal(sys.stdout):
            click.echo()
        heads = _SHELF_HEADS
        shown = len(heads) if width is None or width >= _WIDE else 6 if width >= _MEDIUM else 4
        print_table(heads[:shown], [installed_row(shelved)[:shown] for shelved in shelf.models])
    if shelf.prepared:
        print_table(
            ("PREPARED", "SIZE", "OF", "WHERE"),
            [(p.kind, format_bytes(p.size_bytes), str(p.source), str(p.folder)) for p in shelf.prepared],
        )
    if own:
        print_table(("YOUR ALIAS", "STANDS FOR"), sorted(own.items()))
    if pairs:
        print_table(("YOUR PAIR", "DRAFT"), sorted(pairs.items()))
    if not own and not pairs:
        note(f"Names of your own go into {user_aliases_path()}: see `edgespec models alias --help`.")
    if shelf.skipped:
        what = ", ".join(one.name for one in shelf.skipped[:3]) + (", ..." if len(shelf.skipped) > 3 else "")
        note(f"Left out as not usable: {what}. `edgespec models list --json` says why.")


@command.command(
    "show",
    cls=HelpfulCommand,
    short_help="Show what is known about a model.",
    examples=(
        "edgespec models show demo",
        "edgespec models show 8b-q4 --json",
        "edgespec models show ./my.gguf --probe",
    ),
)
@model_reference("reference")
@click.option("--probe", is_flag=True, help="Load the model too, and say what it can do.")
@json_option
def show_model(reference: str, probe: bool, as_json: bool) -> int:
    """Show what REF stands for, what its files and the catalogue say of it, and what can draft for it.

    Its files are looked into, not loaded. Drafts are compared by their tokens; what may be expected of one is
    a guess by the sizes of both. The exit status is 1 when something could not be found out.
    """
    from edgespec.catalog import choose_draft, draft_options, find_installed, read_model_info, resolve

    found: Resolved | None = None
    missing = ""
    entry = _catalogued(reference)
    try:
        found = resolve(reference, allow_download=False)
        entry = found.entry or entry
    except ModelNotFoundError as error:
        if entry is None:
            raise
        missing = error.what
    shown = Shown(reference, entry, found, missing)
    if found is not None:
        model_format, shelf = found.format, find_installed(include_embedded=True)
        try:
            shown = replace(shown, info=read_model_info(found, shelf.known))
        except ModelFileError as error:
            shown = replace(shown, problem=str(error))
        shown = replace(shown, options=draft_options(found, shelf), choice=choose_draft(found))
        if probe:
            facts, problem = interruptible(lambda stop: _facts(stop, reference, model_format))
            shown = replace(shown, facts=facts, problem=problem)
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
    cls=HelpfulCommand,
    short_help="Download a model.",
    examples=("edgespec models pull 8b-q4", "edgespec models pull hf:user/repo:Q4_K_M"),
)
@model_reference("reference")
@json_option
def pull_model(reference: str, as_json: bool) -> None:
    """Download REF into the Hugging Face cache, unless it is on this machine already.

    What is interrupted is taken up where it stopped.
    """
    from edgespec.catalog import resolve

    def fetch(stop: Stop) -> Resolved:
        progress = ProgressLine(stop)
        try:
            return resolve(reference, progress=progress)
        finally:
            progress.clear()

    found = interruptible(fetch)
    if as_json:
        print_json(
            {"reference": reference, "path": str(found.path), "source": found.source, "note": found.note}
        )
    else:
        click.echo(printable(found.note))


@command.command(
    "alias",
    cls=HelpfulCommand,
    short_help="Give a model a name of your own.",
    examples=("edgespec models alias big hf:user/repo:Q4_K_M", "edgespec models alias fast llama3.2:1b"),
)
@click.argument("name")
@model_reference("reference")
@json_option
def set_alias(name: str, reference: str, as_json: bool) -> None:
    """Let NAME stand for REF. A name of yours wins over the catalogue's.

    `edgespec models remove NAME` forgets it.
    """
    from edgespec.catalog.aliases import check_alias
    from edgespec.cli.own_names import write_name

    remark = check_alias(name.strip(), reference.strip())
    write_name("aliases", name.strip(), reference.strip())
    _said(f"{name} stands for {reference}", remark, {"alias": name, "reference": reference}, as_json)


@command.command(
    "pair",
    cls=HelpfulCommand,
    short_help="Choose the draft that --draft auto takes for a target.",
    examples=(
        "edgespec models pair 70b-q4 1b-q4",
        "edgespec models pair 8b-q4 none",
        "edgespec models pair 70b-q4 --remove",
    ),
)
@model_reference("target")
@click.argument("draft", metavar="DRAFT", required=False)
@click.option("--remove", is_flag=True, help="Let edgespec choose again.")
@json_option
def set_pair(target: str, draft: str | None, remove: bool, as_json: bool) -> None:
    """Choose DRAFT (or none) as what `--draft auto` takes for the target REF."""
    from edgespec.catalog.aliases import check_pair
    from edgespec.cli.own_names import write_name

    if (draft is None) != remove:
        raise click.UsageError("give a DRAFT, or --remove without one")
    target = target.strip()
    remark = check_pair(target, draft.strip()) if draft is not None else ""
    write_name("pairs", target, draft.strip() if draft is not None else None)
    what = (
        f"{target} drafts with {draft}" if draft is not None else f"{target} has no draft of yours any more"
    )
    _said(what, remark, {"target": target, "draft": draft}, as_json)


@command.command(
    "remove",
    cls=HelpfulCommand,
    short_help="Forget a name of yours, or delete a download.",
    examples=("edgespec models remove big", "edgespec models remove hf:user/repo:Q4_K_M --yes"),
)
@model_reference("reference")
@click.option("--yes", is_flag=True, help="Delete a download without asking.")
@json_option
def remove_model(reference: str, yes: bool, as_json: bool) -> None:
    """Forget an alias, or delete a model from the Hugging Face cache, which other programs may use as well.

    What Ollama and LM Studio keep, and files of your own, are left to you.
    """
    from edgespec.catalog import resolve
    from edgespec.catalog.removal import plan_removal
    from edgespec.cli.own_names import is_named, write_name

    name = reference.strip()
    if is_named("aliases", name):
        write_name("aliases", name, None)
        _said(f"{name} stands for nothing any more", "", {"removed": name, "freed_bytes": 0}, as_json)
        return
    found = resolve(name, allow_download=False)
    removal = plan_removal(found)
    size = format_bytes(removal.size_bytes)
    if not yes:
        if as_json or not is_terminal(sys.stdin):
            raise OptionError(f"{found.path} ({size}) would be deleted", "add --yes")
        click.confirm(f"Delete {found.path} ({size})?", abort=True, err=True)
    freed_bytes = removal.execute()
    _said(f"{name} is deleted: {size} freed", "", {"removed": name, "freed_bytes": freed_bytes}, as_json)


def _said(what: str, remark: str, value: dict[str, Any], as_json: bool) -> None:
    """The result of a change, and what to know of it."""
    if as_json:
        print_json(value | {"remark": remark})
        return
    click.echo(printable(what))
    note(remark)


def _files(entry: ModelEntry) -> dict[str, str]:
    """The quantisations of a catalogue model that are on this machine, with their files."""
    from edgespec.catalog import resolve

    files = {}
    for quantisation in dict.fromkeys((entry.quantisation, *entry.aliases.values())):
        wanted = f"{entry.name}:{quantisation}" if entry.format == "gguf" else entry.name
        try:
            found = resolve(wanted, allow_download=False)
        except (ModelNotFoundError, ModelFileError):
            continue
        files[quantisation] = str(found.path)
    return files


def _catalogued(reference: str) -> ModelEntry | None:
    """The catalogue's model of that name, alias or repository, whether it is here or not."""
    from edgespec.catalog import load_catalogue
    from edgespec.catalog.catalogue import user_aliases

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


def _facts(stop: Stop, reference: str, model_format: ModelFormat) -> tuple[ModelFacts | None, str]:
    """The facts of a model file, or why it cannot be looked into."""
    import edgespec

    progress = ProgressLine(stop)
    try:
        with edgespec.load(
            reference,
            "none",
            context=_LOOK_CONTEXT_TOKENS,
            gpu_layers=0 if model_format == "gguf" else None,
            method="none",
            progress=progress,
        ) as runtime:
            return runtime.target, ""
    except (MemoryBudgetError, BackendMissingError) as error:
        return None, str(error)
    finally:
        progress.clear()


def _here_json(files: dict[str, str]) -> dict[str, Any]:
    return {"on_this_machine": bool(files), "files": files}
