"""`edgespec train`: train a head for the user's own model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from edgespec.cli.help import HelpfulGroup
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.measuring import duration_text, prompts_option
from edgespec.cli.options import KindType, OutputPath, json_option, model_reference
from edgespec.cli.screen import ProgressLine, note, print_json, print_table, printable
from edgespec.option_kinds import Integer

if TYPE_CHECKING:
    from edgespec.train import HeadFigures, TrainingPrompt, TrainingResult

__all__ = ["command"]

_GGUF_NAME = "head.gguf"
_MIN_TOKENS = 1_000


@click.group(
    "train",
    cls=HelpfulGroup,
    short_help="Train a head that drafts for your own model.",
    examples=("edgespec train eagle3 demo-mlx --to my-head",),
)
def command() -> None:
    """Train a head that drafts for your own model.

    If the command is interrupted, run it again to continue.
    """


class _Kind(NamedTuple):
    """A kind of head.

    Attributes:
        name: Name of the command, such as `eagle3`.
        title: Name with its article, such as `an EAGLE-3 head`.
        method: Name of the drafting method.
    """

    name: str
    title: str
    method: str


def _add_command(kind: _Kind) -> None:
    """Add the command that trains a kind of head."""

    @command.command(
        kind.name,
        short_help=f"Train {kind.title}.",
        help=f"""Train {kind.title} for REF, for `--method {kind.method}`.

        No data is needed. REF writes both the questions and the replies, and the head learns to predict the
        replies. Training takes hours for a model with several billion parameters. Press Ctrl-C to stop, and
        run the same command again to continue.

        If REF is a GGUF model, training needs its MLX or Hugging Face form (--weights). EAGLE-3 heads are
        then also converted to GGUF.
        """,
        examples=(
            f"edgespec train {kind.name} demo-mlx --to my-head",
            f"edgespec train {kind.name} demo --weights ./demo-hf --to my-head",
            f"edgespec train {kind.name} ./Qwen3-4B-MLX-4bit --prompts my-prompts.jsonl --to qwen3-4b-head",
        ),
    )
    @model_reference("reference")
    @click.option(
        "--to",
        "folder",
        metavar="DIR",
        required=True,
        type=OutputPath(path_type=Path, file_okay=False),
        help="Folder in which to save the head. A head that is already there is replaced only by a better"
        " one.",
    )
    @click.option(
        "--weights",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder with the MLX or Hugging Face form of REF, if REF is a GGUF model.",
    )
    @click.option(
        "--tokens",
        type=KindType(Integer(_MIN_TOKENS)),
        metavar="N",
        default=1_000_000,
        show_default=True,
        help="Number of conversation tokens to train with. More tokens take longer and make a better head.",
    )
    @prompts_option(
        help="JSON Lines file with `prompt` or `messages` on each line. The model answers these first, and"
        " then writes its own questions."
    )
    @click.option("--chats", is_flag=True, help="Also let the model answer the messages in your saved chats.")
    @json_option
    def train(
        reference: str,
        folder: Path,
        weights: Path | None,
        tokens: int,
        prompts: Path | None,
        chats: bool,
        as_json: bool,
    ) -> None:
        from edgespec.train import chat_prompts, file_prompts

        given: list[TrainingPrompt] = file_prompts(prompts) if prompts else []
        given += chat_prompts() if chats else []
        result, converted = interruptible(
            lambda stop: _train(stop, kind.name, reference, folder, weights, tokens, given)
        )
        if as_json:
            file = converted and str(converted)
            print_json({"kind": "head", "method": kind.name, **result.to_json(), "gguf": file})
            return
        _print(result)
        if result.kept:
            used = converted or folder
            note(printable(f"Use it with: edgespec chat --target {reference} --head {used}"))


for _kind in (
    _Kind("eagle3", "an EAGLE-3 head", "eagle"),
    _Kind("medusa", "Medusa heads", "medusa"),
    _Kind("hydra", "Hydra heads", "hydra"),
):
    _add_command(_kind)


def _train(
    stop: Stop,
    kind: str,
    reference: str,
    folder: Path,
    weights: Path | None,
    tokens: int,
    prompts: Sequence[TrainingPrompt],
) -> tuple[TrainingResult, Path | None]:
    """Train the head. Return the result, and the path of the converted GGUF file, if any."""
    from edgespec.catalog import resolve
    from edgespec.prepare.head import needs_conversion, prepare_head
    from edgespec.train import TrainingSettings, load_target, train_head

    def announce(seconds: float) -> None:
        progress.clear()
        click.echo(f"about {duration_text(seconds)} left", err=True)

    with ProgressLine(stop) as progress:
        path = resolve(reference, progress=progress).path
        with load_target(path, reference, weights, progress) as target:
            asked = hashlib.sha256(repr(prompts).encode()).hexdigest() if prompts else ""
            settings = TrainingSettings(kind, target.identity, tokens, asked)
            result = train_head(target, settings, prompts, folder, progress, announce)
            gguf = target.gguf
        if not (gguf and result.kept and needs_conversion(folder, gguf)):
            return result, None
        prepare_head(folder, gguf, folder / _GGUF_NAME)
        return result, folder / _GGUF_NAME


def _print(result: TrainingResult) -> None:
    heads = {"new": result.figures, "earlier": result.earlier}
    measured = {name: figures for name, figures in heads.items() if figures}
    kinds = sorted({kind for each in measured.values() for kind in each.tokens_per_pass_by_kind})
    depths = range(1, len(result.figures.acceptance_per_depth) + 1)
    headings = (
        "HEAD",
        "TOKENS PER PASS",
        *(f"TOKEN {depth}" for depth in depths),
        *(kind.upper() for kind in kinds),
    )
    print_table(headings, [_row(name, figures, kinds) for name, figures in measured.items()])
    if not result.kept:
        click.echo("\nThe earlier head is at least as accurate, so it was kept.")
    if result.plot:
        click.echo(printable(f"\nThe training curve is in {result.plot}"))


def _row(name: str, figures: HeadFigures, kinds: Sequence[str]) -> list[str]:
    by_kind = figures.tokens_per_pass_by_kind
    return [
        name,
        f"{figures.tokens_per_pass:.2f}",
        *(f"{share:.0%}" for share in figures.acceptance_per_depth),
        *(f"{by_kind[kind]:.2f}" if kind in by_kind else "-" for kind in kinds),
    ]
