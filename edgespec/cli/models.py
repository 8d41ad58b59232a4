"""`edgespec models`: the models edgespec knows by name, and what is known about one. Downloads nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.help import HelpfulCommand, HelpfulGroup
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import json_option, model_reference
from edgespec.cli.screen import (
    ProgressLine,
    note,
    print_json,
    print_table,
    printable,
    terminal_width,
)
from edgespec.errors import BackendMissingError, MemoryBudgetError, ModelFileError, ModelNotFoundError
from edgespec.files import size_text

if TYPE_CHECKING:
    from edgespec import ModelFacts
    from edgespec.catalog import ModelEntry, ModelFormat, Resolved

__all__ = ["command"]

_WIDE, _MEDIUM = 140, 90
_LOOK_CONTEXT_TOKENS = 256
_FORMATS = {
    "gguf": "GGUF, run by llama.cpp",
    "mlx": "MLX, run by mlx-lm",
    "layerskip": "GGUF prepared for early exit, run by llama.cpp",
}


@click.group(
    "models",
    cls=HelpfulGroup,
    short_help="List the models known by name, or show one.",
    examples=("edgespec models list", "edgespec models show demo", "edgespec models show ./model.gguf"),
)
def command() -> None:
    """The models edgespec knows by name. Nothing is downloaded here."""


@command.command(
    "list",
    cls=HelpfulCommand,
    short_help="List the models known by name.",
    examples=("edgespec models list", "edgespec models list --json"),
)
@json_option
def list_models(as_json: bool) -> None:
    """List the catalogue, the embedded models first, and your own aliases.

    HERE names the quantisations that are on this machine; the others are downloaded when they are used.
    """
    from edgespec.catalog import load_catalogue
    from edgespec.catalog.catalogue import user_aliases, user_aliases_path

    entries = sorted(load_catalogue().entries, key=lambda entry: not entry.embedded_file)
    listed = [(entry, _files(entry)) for entry in entries]
    own = user_aliases()
    if as_json:
        print_json(
            {"models": [_entry_json(entry) | _here_json(files) for entry, files in listed], "aliases": own}
        )
        return
    rows = [_row(entry, files) for entry, files in listed]
    heads = ("NAME", "FORMAT", "SIZE", "HERE", "ALSO", "QUANT", "DRAFT", "CONTEXT", "FAMILY", "LICENCE")
    width = terminal_width()
    shown = len(heads) if width is None or width >= _WIDE else 7 if width >= _MEDIUM else 4
    print_table(heads[:shown], [row[:shown] for row in rows])
    if own:
        print_table(("YOUR ALIAS", "STANDS FOR"), sorted(own.items()))
    else:
        note(f"Names of your own go into {user_aliases_path()}.")


@command.command(
    "show",
    cls=HelpfulCommand,
    short_help="Show what is known about a model.",
    examples=(
        "edgespec models show demo",
        "edgespec models show 8b-q4 --json",
        "edgespec models show ./my.gguf",
    ),
)
@model_reference("reference")
@json_option
def show_model(reference: str, as_json: bool) -> None:
    """Show what REF stands for, what the catalogue says, and the facts of its file if that is here."""
    from edgespec.catalog import resolve

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
    facts, problem = None, ""
    if found is not None:
        model_format = found.format
        facts, problem = interruptible(lambda stop: _facts(stop, reference, model_format))
    if as_json:
        print_json(
            {
                "reference": reference,
                "on_this_machine": found is not None,
                "path": str(found.path) if found else None,
                "source": found.source if found else None,
                "format": found.format if found else entry.format if entry else None,
                "note": found.note if found else missing,
                "catalogue": _entry_json(entry) if entry else None,
                "model": _facts_json(facts) if facts else None,
                "problem": problem,
            }
        )
        return
    lines = [("reference", found.note if found else reference), *_entry_lines(entry)]
    if found is not None:
        lines.append(("format", _FORMATS[found.format]))
    elif entry is not None:
        lines.append(("format", _FORMATS[entry.format]))
    if found is None:
        lines.append(("on this machine", f"no: `edgespec generate --target {reference} hello` downloads it"))
    if facts is not None:
        lines += _facts_lines(facts, found.format if found else "gguf")
    if problem:
        lines.append(("problem", problem))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        click.echo(f"{name:{width}}  {printable(value)}")


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


def _row(entry: ModelEntry, files: dict[str, str]) -> tuple[str, ...]:
    return (
        entry.name,
        entry.format,
        size_text(entry.approximate_file_bytes),
        ", ".join(files) or "-",
        ", ".join(entry.aliases) or "-",
        entry.quantisation,
        entry.drafts[0] if entry.drafts else "-",
        str(entry.context_tokens),
        entry.family,
        entry.licence,
    )


def _entry_json(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "format": entry.format,
        "aliases": dict(entry.aliases),
        "family": entry.family,
        "parameters": entry.parameters,
        "quantisation": entry.quantisation,
        "file_bytes": entry.approximate_file_bytes,
        "context_tokens": entry.context_tokens,
        "licence": entry.licence,
        "chat_template": entry.chat_template,
        "embedded": bool(entry.embedded_file),
        "gguf": entry.gguf_repository,
        "mlx": entry.mlx_repository,
        "drafts": list(entry.drafts),
        "notice": entry.notice,
    }


def _here_json(files: dict[str, str]) -> dict[str, Any]:
    return {"on_this_machine": bool(files), "files": files}


def _facts_json(facts: ModelFacts) -> dict[str, Any]:
    return {
        "architecture": facts.architecture,
        "description": facts.description,
        "parameters": facts.parameters,
        "quantisation": facts.quantisation,
        "file_bytes": facts.file_bytes,
        "weight_bytes": facts.weight_bytes,
        "trained_context_tokens": facts.trained_context_tokens,
        "vocab_size": facts.vocab_size,
        "kv_bytes_per_1000_tokens": facts.kv_bytes * 1000 // facts.context_tokens,
        "chat_template": facts.chat_template,
        "capabilities": asdict(facts.capabilities) | {"self_drafts": sorted(facts.capabilities.self_drafts)},
        "rollback": facts.rollback,
    }


def _entry_lines(entry: ModelEntry | None) -> list[tuple[str, str]]:
    if entry is None:
        return []
    lines = [
        ("catalogue name", ", ".join((entry.name, *entry.aliases))),
        ("family", f"{entry.family}, {entry.parameters / 1e9:.3g} B parameters"),
        ("default file", f"{entry.quantisation}, about {size_text(entry.approximate_file_bytes)}"),
        ("context", f"{entry.context_tokens} tokens"),
        ("template", entry.chat_template),
        ("drafts", ", ".join(entry.drafts) or "none recommended"),
        ("source", entry.repository or "embedded"),
        ("licence", entry.licence),
    ]
    return [*lines, ("notice", entry.notice)] if entry.notice else lines


def _facts_lines(facts: ModelFacts, model_format: ModelFormat) -> list[tuple[str, str]]:
    can = facts.capabilities
    at = ", at f16" if model_format == "gguf" else ""
    able = "drafts can be verified" + (", trees too" if can.tree else f", no trees: {can.reason}")
    return [
        ("file", f"{facts.architecture}, {facts.quantisation}, {size_text(facts.file_bytes)}"),
        ("parameters", f"{facts.parameters:,}"),
        ("trained context", f"{facts.trained_context_tokens} tokens"),
        ("vocabulary", f"{facts.vocab_size} tokens"),
        ("cache", f"{size_text(facts.kv_bytes * 1000 // facts.context_tokens)} for 1000 tokens{at}"),
        ("chat template", "yes" if facts.chat_template else "no: use `edgespec generate --raw`"),
        ("can do", able if can.rollback else f"plain decoding only: {can.reason}"),
        ("takes back", facts.rollback),
    ]
