"""`edgespec train`: train a head or a draft model for a given model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from edgespec.cli.help import HelpfulGroup
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import Decorator, KindType, OutputPath, json_option, model_reference
from edgespec.cli.running import duration_text, prompts_option
from edgespec.cli.screen import ProgressLine, note, print_json, print_table, printable
from edgespec.errors import CancelledError
from edgespec.options.methods import HeadTraining, methods
from edgespec.options.option import Integer
from edgespec.system.files import format_bytes

if TYPE_CHECKING:
    from edgespec.train import DrafterFigures, TrainingEstimate, TrainingPrompt, TrainingResult

__all__ = ["command", "print_result"]

_MIN_TOKENS = 1_000
# Minimum tokens per pass for a drafter to be useful. With fewer, drafting and wider passes use up most of the
# time saved. This value was chosen as a heuristic.
_USEFUL_TOKENS_PER_PASS = 2.0
# Say how to make training faster if the training steps take longer than this, in seconds. The value was
# chosen rather than measured.
_LONG_SECONDS = 600.0
_CONTINUE = "run the same command again to continue"


@click.group(
    "train",
    cls=HelpfulGroup,
    short_help="Train a draft model or draft head that makes your model faster.",
    examples=(
        "edgespec train eagle3 demo-mlx --to my-head",
        "edgespec train draft demo-mlx --to my-draft",
    ),
)
def command() -> None:
    """Train a draft model or draft head that makes your model faster.

    A head is a small network that, like a draft model, proposes tokens for your model to check. It is trained
    for one model and works only with it. If a command is interrupted, run it again to continue.
    """


class _Request(NamedTuple):
    """A request to train a head or a draft model.

    Attributes:
        kind: Name of the command, such as `eagle3` or `draft`.
        draft: Reference to the draft model to train. None for heads.
        lora: Whether to train a LoRA adapter instead of the draft model's weights.

    The other attributes are the options added by `_training_options`.
    """

    kind: str
    reference: str
    folder: Path
    weights: Path | None
    tokens: int
    prompts: Path | None
    chats: bool
    as_json: bool
    draft: str | None = None
    lora: bool = False


def _training_options(example: str) -> Decorator:
    """Return a decorator that adds the options shared by all training commands.

    Args:
        example: Example of an output folder.
    """
    options = (
        model_reference("reference"),
        click.option(
            "--to",
            "folder",
            metavar="DIR",
            required=True,
            type=OutputPath(example=example, path_type=Path, file_okay=False),
            help="Folder in which to save the result. An earlier result there is replaced only by a better"
            " one.",
        ),
        click.option(
            "--weights",
            metavar="DIR",
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder with MODEL in MLX or Hugging Face format, which is needed if MODEL is a GGUF file.",
        ),
        click.option(
            "--tokens",
            type=KindType(Integer(_MIN_TOKENS)),
            metavar="N",
            default=1_000_000,
            show_default=True,
            help="Number of tokens to train with, at least"
            f" {_MIN_TOKENS:,}. More tokens take longer and give a better result.",
        ),
        prompts_option(
            help="JSON Lines file with a `prompt` or `messages` on each line. The model answers these first,"
            " and then questions that it writes itself."
        ),
        click.option(
            "--chats", is_flag=True, help="Also let the model answer the messages in your saved chats."
        ),
        json_option,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _add_head_command(training: HeadTraining, method: str) -> None:
    name, title = training.command, training.title

    @command.command(
        name,
        short_help=f"Train {title}.",
        help=f"""Train {title} that makes MODEL faster, with `--method {method}`.

        No data is needed. MODEL writes both the questions and the replies, and the head learns to predict the
        replies. Training takes hours for a model with several billion parameters. Press Ctrl-C to stop, and
        run the same command again to continue.

        If MODEL is a GGUF file, training also needs the model in MLX or Hugging Face format (--weights).
        {training.with_gguf}
        """,
        examples=(
            f"edgespec train {name} demo-mlx --to my-head",
            f"edgespec train {name} demo --weights ./demo-hf --to my-head",
            f"edgespec train {name} ./Qwen3-4B-MLX-4bit --prompts my-prompts.jsonl --to qwen3-4b-head",
        ),
    )
    @_training_options("my-head")
    def train(**options: Any) -> None:
        request = _Request(name, **options)
        result = _run(request)
        if request.as_json:
            print_json({"kind": "head", "method": name, **result.to_json()})
            return
        print_result(result, "head")
        if result.kept:
            used = result.gguf or request.folder
            note(printable(f"Use it with: edgespec chat --target {request.reference} --head {used}"))


for _method in methods():
    if _method.head and _method.head.training:
        _add_head_command(_method.head.training, _method.name)


@command.command(
    "draft",
    short_help="Train a draft model.",
    help="""Train a draft model, so that MODEL accepts more of the tokens that it proposes.

    No data is needed. MODEL writes both the questions and the replies. The draft model learns from these
    replies, and from how MODEL would continue the draft model's own text. Training takes hours for a model
    with several billion parameters, and begins with an estimate of the time. Press Ctrl-C to stop, and run
    the same command again to continue.

    The draft model must be in MLX or Hugging Face format, and have the vocabulary of MODEL. Its own files are
    not changed. If MODEL is a GGUF file, training also needs the model in MLX or Hugging Face format
    (--weights).
    """,
    examples=(
        "edgespec train draft demo-mlx --to my-draft",
        "edgespec train draft ./Qwen3-8B-MLX-4bit --draft ./Qwen3-0.6B-MLX-8bit --to my-draft",
        "edgespec train draft ./Qwen3-8B-MLX-4bit --draft ./Qwen3-0.6B-MLX-8bit --lora --to my-draft",
    ),
)
@click.option(
    "--draft",
    metavar="MODEL",
    default="auto",
    show_default=True,
    help="Draft model to train. `auto` chooses the one that `edgespec chat` uses for MODEL.",
)
@click.option(
    "--lora",
    is_flag=True,
    help="Train a LoRA adapter instead of all weights. This needs less memory, but usually improves the draft"
    " model less.",
)
@_training_options("my-draft")
def _train_draft(draft: str, lora: bool, **options: Any) -> None:
    request = _Request("draft", draft=draft, lora=lora, **options)
    result = _run(request)
    if request.as_json:
        print_json({"kind": "draft", "method": "model", **result.to_json()})
        return
    print_result(result, "draft model")
    if result.kept:
        note(printable(f"Use it with: edgespec chat --target {request.reference} --draft {request.folder}"))


def _run(request: _Request) -> TrainingResult:
    """Train the requested head or draft model until training finishes or the user presses Ctrl-C."""
    from edgespec.train import chat_prompts, file_prompts

    prompts: list[TrainingPrompt] = file_prompts(request.prompts) if request.prompts else []
    prompts += chat_prompts() if request.chats else []
    return interruptible(
        lambda stop: _train(stop, request, prompts),
        first_message="stopping after this step; press Ctrl-C again to stop now",
        second_message=f"interrupted: the work since the progress was last saved is lost; {_CONTINUE}",
    )


def _train(stop: Stop, request: _Request, prompts: Sequence[TrainingPrompt]) -> TrainingResult:
    """Train in the worker thread. See `_run`."""
    from edgespec.store.reference import resolve
    from edgespec.train import DraftToTrain, TrainingSettings, find_draft, load_target, train_drafter

    def announce(estimate: TrainingEstimate | None, continued: str) -> None:
        progress.clear()
        if continued:
            path = printable(str(folder / "training"))
            click.echo(f"continuing the training in {path}: {continued}", err=True)
        if estimate:
            _print_estimate(estimate, is_rest=bool(continued))
            if target.teacher.why_slow and estimate.train_seconds > _LONG_SECONDS:
                note(target.teacher.why_slow)

    reference, folder = request.reference, request.folder
    with _hint_to_continue(), ProgressLine(stop) as progress:
        found = resolve(reference, progress=progress)
        trained = (
            DraftToTrain(find_draft(found, request.draft, folder, progress), request.lora)
            if request.draft is not None
            else None
        )
        with load_target(found.path, reference, request.weights, progress) as target:
            student = trained.student(target) if trained else target.teacher.head(request.kind)
            settings = TrainingSettings(
                request.kind,
                target.identity,
                request.tokens,
                hashlib.sha256(repr(prompts).encode()).hexdigest() if prompts else "",
                trained.identity if trained else "",
                request.lora,
                target.writer_identity,
            )
            return train_drafter(target, student, settings, prompts, folder, progress, announce)


def _print_estimate(estimate: TrainingEstimate, *, is_rest: bool) -> None:
    part, total = ("the rest of the training takes", "") if is_rest else ("the training takes", " in all")
    works = {
        "write conversations": estimate.write_seconds,
        "train": estimate.train_seconds,
        "evaluate": estimate.evaluate_seconds,
    }
    parts = ", ".join(f"{duration_text(seconds)} to {work}" for work, seconds in works.items() if seconds)
    click.echo(f"{part} about {duration_text(estimate.seconds)}{total} ({parts})", err=True)
    memory, disk = format_bytes(estimate.memory_bytes), format_bytes(estimate.disk_bytes)
    click.echo(f"it needs about {memory} of memory, and {disk} of disk space until it is finished", err=True)


@contextmanager
def _hint_to_continue() -> Iterator[None]:
    try:
        yield
    except CancelledError as error:
        raise CancelledError(error.what, _CONTINUE) from error


def print_result(result: TrainingResult, title: str) -> None:
    drafters = {"new": result.figures, "earlier": result.earlier}
    measured = {name: figures for name, figures in drafters.items() if figures}
    kinds = sorted({kind for each in measured.values() for kind in each.tokens_per_pass_by_kind})
    depths = range(1, len(result.figures.acceptance_per_depth) + 1)
    headings = (
        title.upper(),
        "TOKENS PER PASS",
        "IN TREES",
        *(f"TOKEN {depth}" for depth in depths),
        *(kind.upper() for kind in kinds),
    )
    print_table(headings, [_row(name, figures, kinds) for name, figures in measured.items()])
    best, last = result.best, result.curve[-1]
    if result.kept:
        click.echo(f"\n{_verdict(result.figures.tokens_per_pass, title)}")
        click.echo(
            f"\nThe new {title} has the weights after training step {best.steps:,} of {last.steps:,}, the"
            " best of all evaluations during training."
        )
    else:
        click.echo(f"\nThe earlier {title} is at least as accurate, so the new one was not saved.")
    figures = result.figures
    if figures.coverage < 1:
        click.echo(
            f"\nIts draft vocabulary has {figures.draft_tokens:,} tokens, which make up"
            f" {figures.coverage:.1%} of the held-out replies."
        )
    if result.plot:
        click.echo(printable(f"\nThe training curve is in {result.plot}"))


def _verdict(tokens_per_pass: float, title: str) -> str:
    measured = f"With the new {title}, the model writes {tokens_per_pass:.2f} tokens per pass instead of 1"
    if tokens_per_pass >= _USEFUL_TOKENS_PER_PASS:
        return f"{measured}, so it can make replies faster."
    return (
        f"{measured}. This is too little to make replies much faster, and a better {title} needs more text"
        " (a larger --tokens)."
    )


def _row(name: str, figures: DrafterFigures, kinds: Sequence[str]) -> list[str]:
    by_kind = figures.tokens_per_pass_by_kind
    return [
        name,
        f"{figures.tokens_per_pass:.2f}",
        f"{figures.tokens_per_pass_in_trees:.2f}",
        *(f"{share:.0%}" for share in figures.acceptance_per_depth),
        *(f"{by_kind[kind]:.2f}" if kind in by_kind else "-" for kind in kinds),
    ]
