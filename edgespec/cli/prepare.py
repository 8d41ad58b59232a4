"""`edgespec prepare`: create the extra files that some drafting methods need, once per model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.help import HelpfulGroup
from edgespec.cli.options import (
    Decorator,
    KindType,
    OutputPath,
    head_reference,
    json_option,
    model_reference,
)
from edgespec.cli.running import with_progress
from edgespec.cli.screen import ProgressLine, note, print_json, print_table, printable, warn
from edgespec.errors import OptionError
from edgespec.options.option import Size
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    from edgespec.store.prepared_files import PreparedModel

__all__ = ["command"]

_to_option = click.option(
    "--to",
    metavar="DIR",
    type=OutputPath(path_type=Path, file_okay=False),
    help="Folder in which to save the result. [default: a folder in edgespec's cache]",
)


@click.group(
    "prepare",
    cls=HelpfulGroup,
    short_help="Prepare the files that some speed-up methods need.",
    examples=("edgespec prepare layerskip demo --exit 4", "edgespec prepare lowbit ./my-f16.gguf"),
)
def command() -> None:
    """Create the files that some speed-up methods need for a GGUF model, once per model.

    Other methods, such as a draft model in GGUF format, need no preparation. `edgespec models show MODEL`
    lists what works with a model. If a command is interrupted, run it again to continue.
    """


@command.command(
    "layerskip",
    short_help="Prepare a model so that its first layers can act as its draft model.",
    examples=(
        "edgespec prepare layerskip demo --exit 4",
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
    help="Number of first layers to use. `auto` tries several numbers and chooses the fastest.",
)
@_to_option
@json_option
def layerskip(reference: str, exit_layer: str, to: Path | None, as_json: bool) -> None:
    """Split MODEL into two files, so that its first layers can serve as its draft model.

    With `--method layerskip`, this speeds up models that were trained for early exit. edgespec checks that
    the two files give the same replies as the original, which you can then delete: all other methods work
    with the two files too.
    """
    from edgespec.loading.prepare.layerskip import measured_exit, prepare_layerskip

    layer = _exit(exit_layer)

    def make(path: Path, progress: ProgressLine) -> PreparedModel:
        return prepare_layerskip(path, layer, to=to, progress=progress)

    prepared = _resolve_and_prepare(reference, "layerskip", make)
    exits = prepared.facts.get("exits", [])
    found = measured_exit(prepared)
    if found and not found.is_faster:
        warn(f"this model {found.shortfall}; use another method, or delete {prepared.folder}")
    if as_json:
        print_json(_json(prepared))
        return
    if exits:
        print_table(
            ("EXIT LAYER", "SAME TOKEN", "DRAFT LENGTH", "SPEED-UP"), [_exit_row(found) for found in exits]
        )
    _print_result(
        prepared, f"exit after layer {prepared.settings['exit_layer']} of {prepared.facts['layer_count']}"
    )


@command.command(
    "lowbit",
    short_help="Make a smaller copy of a model to use as its draft model.",
    examples=(
        "edgespec prepare lowbit ./my-f16.gguf",
        "edgespec prepare lowbit ./my-f16.gguf --type Q2_K",
        "edgespec prepare lowbit 70b-q8 --for-memory 48GiB",
    ),
)
@model_reference("reference")
@click.option(
    "--type", "type_name", metavar="TYPE", help="Quantisation of the copy, such as Q2_K. [default: Q4_0]"
)
@click.option(
    "--for-memory",
    type=KindType(Size()),
    metavar="SIZE",
    help="Copy only the parts of the model that are read from disk with this --memory, such as 12GiB.",
)
@_to_option
@json_option
def lowbit(
    reference: str, type_name: str | None, for_memory: str | None, to: Path | None, as_json: bool
) -> None:
    """Make a copy of MODEL with fewer bits per weight, to use as its draft model.

    The copy is used with `--method lowbit`. MODEL can also be a folder made by `edgespec prepare layerskip`.

    With --for-memory, the copy is for a model that is larger than memory. It contains only the parts of the
    model that are read from disk for every token, and stays in memory. `--method auto` uses it.
    """

    def make(path: Path, progress: ProgressLine) -> PreparedModel:
        from edgespec.loading.prepare.lowbit import prepare_lowbit
        from edgespec.loading.streamed_blocks import prepare_substitutes

        if for_memory is not None:
            memory_bytes = Size().check("for_memory", for_memory)
            return prepare_substitutes(path, memory_bytes, type_name, to=to, progress=progress)
        return prepare_lowbit(path, type_name, to=to, progress=progress)

    prepared = _resolve_and_prepare(reference, "lowbit", make)
    if as_json:
        print_json(_json(prepared))
        return
    if for_memory is not None:
        from edgespec.loading.constants import MAX_READS_WITH_COPIES

        facts = prepared.facts
        before = facts["streamed_without_copies_bytes"]
        if facts["streamed_bytes"] > MAX_READS_WITH_COPIES * before:
            warn(
                f"the copies take so much memory that {format_bytes(facts['streamed_bytes'])} are read from"
                f" disk for each token instead of {format_bytes(before)}, so auto does not use them; use"
                " --method lowbit, or choose a lower-bit --type"
            )
        _print_result(
            prepared,
            f"{facts['type']} copies of {len(facts['layer_bytes'])} layers, instead of"
            f" {format_bytes(facts['streamed_bytes'])} that are read from disk for each token",
        )
        return
    _print_result(
        prepared,
        f"{prepared.facts['type']}, reads {format_bytes(prepared.facts['saved_bytes'])} less than the model"
        " for"
        " each token",
    )


def _output_option(thing: str) -> Decorator:
    return click.option(
        "--to",
        metavar="FILE",
        required=True,
        type=OutputPath(path_type=Path, dir_okay=False),
        help=f"GGUF file in which to save the {thing}.",
    )


@command.command(
    "head",
    short_help="Convert a draft head (EAGLE-3, DFlash or DSpark) to GGUF.",
    examples=(
        "edgespec prepare head demo-mlx-head demo --to eagle3-demo.gguf",
        "edgespec prepare head ./Qwen3-8B_eagle3 ./qwen3-8b-q4.gguf --to eagle3-qwen3-8b.gguf",
    ),
)
@head_reference("head")
@model_reference("reference")
@_output_option("head")
@json_option
def head(head: str, reference: str, to: Path, as_json: bool) -> None:
    """Convert a head to GGUF.

    A head is a small network that was trained to speed up one model. HEAD is an EAGLE-3, DFlash or DSpark
    head: its name in edgespec's catalogue, its Hugging Face repository, or a folder with its files. MODEL is
    the GGUF model that the head was trained for.
    """
    from edgespec.store.heads import prepare_head, resolve_head

    def find(progress: ProgressLine) -> Path:
        return resolve_head(head, progress=progress).path

    _convert("head", prepare_head, find, reference, to, as_json)


@command.command(
    "draft",
    short_help="Convert a draft model from the MLX or Hugging Face format to GGUF.",
    examples=("edgespec prepare draft ./my-draft ./qwen3-8b-q4.gguf --to my-draft.gguf",),
)
@click.argument("draft", type=click.Path(path_type=Path, file_okay=False))
@model_reference("reference")
@_output_option("draft model")
@json_option
def draft(draft: Path, reference: str, to: Path, as_json: bool) -> None:
    """Convert a draft model to GGUF, such as one trained with `edgespec train draft`.

    DRAFT is the folder of the draft model, in MLX or Hugging Face format. MODEL is the GGUF model to use it
    with, which must have the same vocabulary. Llama, Qwen2 and Qwen3 draft models can be converted.
    """
    from edgespec.loading.prepare.draft import prepare_draft

    _convert("draft", prepare_draft, lambda _progress: draft, reference, to, as_json)


def _convert(
    kind: str,
    convert: Callable[[Path, Path, Path], int],
    find: Callable[[ProgressLine], Path],
    reference: str,
    to: Path,
    as_json: bool,
) -> None:
    """Convert a head or a draft model for a target, and print how to use it.

    Args:
        kind: `head` or `draft`.
        convert: Converts a folder for a target, writes a file, and returns its size in bytes.
        find: Returns the folder to convert.
        reference: The target.
        to: The file to write.
        as_json: Whether to print the result as JSON.
    """
    from edgespec.store.reference import resolve

    size_bytes = with_progress(
        lambda progress: convert(find(progress), resolve(reference, progress=progress).path, to)
    )
    if as_json:
        print_json({"kind": kind, "file": str(to), "file_bytes": size_bytes})
        return
    click.echo(printable(f"{to}  {format_bytes(size_bytes)}"))
    note(printable(f"Use it with: edgespec chat --target {reference} --{kind} {to}"))


def _exit(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise OptionError(
            f"--exit must be a layer number or `auto`, not {text!r}", "for example, use --exit 8"
        ) from None


def _resolve_and_prepare(
    reference: str, kind: str, make: Callable[[Path, ProgressLine], PreparedModel]
) -> PreparedModel:
    """Resolve the model, downloading it if needed, and call `make` with its path."""
    from edgespec.store.reference import resolve

    def work(progress: ProgressLine) -> PreparedModel:
        found = resolve(reference, progress=progress)
        if not found.file_format.preparations:
            raise OptionError(
                f"{found.name} needs no preparation, because {found.backend.name} can draft with the"
                " original file",
                "use the method directly, for example `edgespec chat --method layerskip`",
            )
        if kind not in found.file_format.preparations:
            raise OptionError(f"{found.path} is already prepared", "pass the GGUF file that it was made from")
        return make(found.path, progress)

    return with_progress(work)


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


def _print_result(prepared: PreparedModel, what: str) -> None:
    click.echo(printable(f"{prepared.folder}  {format_bytes(prepared.size_bytes)}, {what}"))
