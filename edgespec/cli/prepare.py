"""`edgespec prepare`: files made once from a model, for drafting that its own file does not allow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.help import HelpfulCommand, HelpfulGroup
from edgespec.cli.interrupt import interruptible
from edgespec.cli.options import json_option, model_reference
from edgespec.cli.screen import ProgressLine, note, print_json, print_table, printable
from edgespec.errors import OptionError
from edgespec.files import format_bytes

if TYPE_CHECKING:
    from edgespec.prepare.store import PreparedModel

__all__ = ["command"]

_to_option = click.option(
    "--to",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to make. By default one in edgespec's cache.",
)


@click.group(
    "prepare",
    cls=HelpfulGroup,
    short_help="Make what a model needs to draft for itself.",
    examples=("edgespec prepare layerskip demo", "edgespec prepare lowbit ./my-f16.gguf"),
)
def command() -> None:
    """Make, once, what a GGUF model needs to draft for itself. An interrupted run is gone on with."""


@command.command(
    "layerskip",
    cls=HelpfulCommand,
    short_help="Let a model draft with its lower layers.",
    examples=(
        "edgespec prepare layerskip demo",
        "edgespec prepare layerskip ./my.gguf --exit 8 --to ./my-layerskip",
    ),
)
@model_reference("reference")
@click.option(
    "--exit",
    "exit_layer",
    metavar="E|auto",
    default="auto",
    show_default=True,
    help="After which layer drafts leave; auto measures which pays best.",
)
@_to_option
@json_option
def layerskip(reference: str, exit_layer: str, to: Path | None, as_json: bool) -> None:
    """Write REF in two halves, below and above an exit, for `--method layerskip`.

    The halves together are the whole model: they are proved to say what it says, they serve every other
    method too, and the original file may be deleted afterwards.
    """
    from edgespec.prepare.layerskip import measured_exit, prepare_layerskip

    layer = _exit(exit_layer)

    def make(path: Path, progress: ProgressLine) -> PreparedModel:
        return prepare_layerskip(path, layer, to=to, progress=progress)

    prepared = _prepared(reference, make)
    exits = prepared.facts.get("exits", [])
    if as_json:
        print_json(_json(prepared))
        return
    if exits:
        print_table(("EXIT AFTER", "AGREES", "DRAFT LENGTH", "SPEED"), [_exit_row(found) for found in exits])
    found = measured_exit(prepared)
    if found and not found.pays:
        note(f"This model {found.shortfall}.")
    _say(prepared, f"exit after layer {prepared.settings['exit_layer']} of {prepared.facts['layer_count']}")


@command.command(
    "lowbit",
    cls=HelpfulCommand,
    short_help="Let a model draft with fewer bits.",
    examples=("edgespec prepare lowbit ./my-f16.gguf", "edgespec prepare lowbit ./my-f16.gguf --type Q2_K"),
)
@model_reference("reference")
@click.option(
    "--type",
    "type_name",
    metavar="TYPE",
    help="What the copy's weights become, such as Q2_K. [default: Q4_0]",
)
@_to_option
@json_option
def lowbit(reference: str, type_name: str | None, to: Path | None, as_json: bool) -> None:
    """Make a copy of REF with fewer bits, for `--method lowbit`. It drafts on the model's own cache.

    REF may be what `edgespec prepare layerskip` made, too.
    """

    def make(path: Path, progress: ProgressLine) -> PreparedModel:
        from edgespec.prepare.lowbit import DEFAULT_TYPE, prepare_lowbit

        return prepare_lowbit(path, type_name or DEFAULT_TYPE, to=to, progress=progress)

    prepared = _prepared(reference, make, halves=True)
    if as_json:
        print_json(_json(prepared))
        return
    _say(prepared, f"{prepared.facts['type']}, saves {format_bytes(prepared.facts['saved_bytes'])} a pass")


def _exit(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"--exit is {text!r}", "give the number of a layer, or auto") from None


def _prepared(
    reference: str, make: Callable[[Path, ProgressLine], PreparedModel], *, halves: bool = False
) -> PreparedModel:
    """Find the model, downloading it if it has to be, and prepare it; Ctrl-C stops either.

    halves: it may be one that was prepared for early exit.
    """
    from edgespec.catalog import resolve

    def work(stop: Any) -> PreparedModel:
        progress = ProgressLine(stop)
        try:
            found = resolve(reference, progress=progress)
            if found.format == "mlx":
                raise OptionError(
                    f"{found.name} is an MLX model and needs no preparing",
                    "use its methods right away, such as `edgespec chat --method layerskip`",
                )
            if found.format == "layerskip" and not halves:
                raise OptionError(
                    f"{found.path} is what was prepared already", "name the GGUF file that it was made from"
                )
            return make(found.path, progress)
        finally:
            progress.clear()

    return interruptible(work)


def _exit_row(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(found["exit_layer"]),
        f"{found['agreement']:.0%}",
        str(found["draft_length"]),
        f"{found['speed_up']:.2f}x",
    )


def _json(prepared: PreparedModel) -> dict[str, Any]:
    return {
        "kind": prepared.kind,
        "folder": str(prepared.folder),
        "source": str(prepared.source),
        "file_bytes": prepared.size_bytes,
        "settings": dict(prepared.settings),
        **prepared.facts,
    }


def _say(prepared: PreparedModel, what: str) -> None:
    click.echo(printable(f"{prepared.folder}  {format_bytes(prepared.size_bytes)}, {what}"))
