"""`edgespec generate`: answer one prompt and exit.

Reading stdin does not hang on a pipe that stays silent.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from contextlib import closing
from copy import copy
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgespec.cli.failures import DONE, INTERRUPTED, usage_error
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import (
    LOAD_NAMES,
    REPLY_NAMES,
    WORKER_NAMES,
    PromptText,
    declared_options,
    drop_sampling_defaults,
    json_option,
    pick,
    preset_option,
)
from edgespec.cli.running import loaded
from edgespec.cli.screen import ProgressLine, is_terminal, note, print_json, warn, write_text
from edgespec.cli.settings import ignore_setting
from edgespec.errors import EdgespecError, OptionError
from edgespec.system.files import format_bytes, format_rate
from edgespec.system.stdio import decode_input

if TYPE_CHECKING:
    from edgespec import AttachedFile, Image, Reply, ReplyStream

__all__ = ["command", "read_stdin", "with_model_argument"]

# Seconds to wait for the first byte from a pipe. Editors and schedulers often start programs with an open
# pipe to which they never write.
_WAIT_SECONDS = 10.0
# Seconds to wait for piped text before printing that edgespec is waiting.
_NOTICE_SECONDS = 2.0
# Maximum size of the text read from stdin, far larger than any context.
_MAX_BYTES = 64 << 20


@click.command(
    "generate",
    cls=HelpfulCommand,
    params=declared_options("target", "draft", "system", *REPLY_NAMES, *LOAD_NAMES, *WORKER_NAMES),
    short_help="Answer one prompt and exit.",
    examples=(
        'edgespec generate "How do I list files by size?"',
        'cat notes.txt | edgespec generate "Summarise this text"',
        'edgespec generate --file notes.pdf --file "src/**/*.py" "What is missing?"',
        'edgespec generate --image photo.jpg "What is in this picture?"',
        'git diff | edgespec generate --system "Write a commit message" -',
        'edgespec generate --target 8b-q4 --temperature 0 -n 200 "What does tar do?"',
        "git diff | edgespec generate --preset reviewer -",
        'edgespec generate --json --seed 1 --method none "Hello"',
    ),
)
@click.argument("words", type=PromptText(), metavar="[PROMPT] [-]", nargs=-1)
@click.option(
    "--file", "paths", metavar="PATH", multiple=True,
    help="Attach a text or PDF file, an image, a folder, or a pattern such as 'src/**/*.py'. Can be"
    " repeated.",
)  # fmt: skip
@click.option(
    "--image", "images", metavar="PATH", multiple=True,
    help="Show a PNG, JPEG, WebP or GIF image to the model, before the prompt. Can be repeated.",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the model's chat template.")
@preset_option
@json_option
def command(
    words: tuple[str, ...],
    paths: tuple[str, ...],
    images: tuple[str, ...],
    as_json: bool,
    raw: bool,
    **options: Any,
) -> int:
    """Answer one prompt.

    The reply is streamed to stdout. Reasoning is printed to stderr, if that is a terminal. Press Ctrl-C to
    stop the reply early.

    Text piped or redirected to stdin is prepended to the prompt, with a blank line between them. edgespec
    waits up to 10 seconds for text from a pipe. To wait longer, add - after the prompt. If the prompt is
    omitted or just -, stdin is the whole prompt. To ignore stdin, add </dev/null.
    """
    if len([word for word in words if word != "-"]) > 1:
        raise usage_error(
            "the prompt must be a single argument", "enclose it in quotes", click.get_current_context()
        )
    if options["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json", click.get_current_context())
    prompt = _with_files(_prompt_text(words), paths, images)
    given = drop_sampling_defaults(options)
    reply = interruptible(lambda stop: _answer(stop, prompt, raw, as_json, given))
    if as_json:
        print_json(reply.to_json())
    return INTERRUPTED if reply.finish_reason == "cancelled" else DONE


def with_model_argument() -> click.Command:
    """Return the command as `edgespec run MODEL PROMPT`, whose prompt can be several words, as in Ollama."""

    def answer(model: str, words: tuple[str, ...], **options: Any) -> int:
        context = click.get_current_context()
        if context.get_parameter_source("target") is ParameterSource.COMMANDLINE:
            raise usage_error(f"both {model!r} and --target name a model", "omit one of them", context)
        ignore_setting(context, "target")
        prompt = " ".join(word for word in words if word != "-")
        given = (prompt, *(word for word in words if word == "-")) if prompt else words
        assert command.callback is not None
        status: int = command.callback(words=given, **{**options, "target": model})
        return status

    renamed = copy(command)
    renamed.params = [click.Argument(["model"]), *command.params]
    renamed.callback = answer
    return renamed


def _prompt_text(words: tuple[str, ...]) -> str:
    """Return the prompt: text from stdin, the prompt argument, or both, separated by a blank line."""
    must_read = "-" in words or not words
    if not words and (sys.stdin is None or is_terminal(sys.stdin)):
        raise usage_error(
            "no prompt was given", "add one, or use - to read it from stdin", click.get_current_context()
        )
    text = read_stdin() if must_read else _read_piped_text()
    prompt = "\n\n".join(part for part in (text, *words) if part.strip() and part != "-")
    if not prompt:
        raise OptionError("the prompt is empty", "enter at least one word", code="prompt_empty")
    return prompt


def read_stdin() -> str:
    """Read all text from stdin, without the trailing line break. Waits until the writer closes the pipe.

    Raises:
        OptionError: The text is not UTF-8, is larger than 64 MiB, or cannot be read.
    """
    if sys.stdin is None:
        return ""
    try:
        data = sys.stdin.buffer.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OptionError(
            f"cannot read standard input: {(error.strerror or str(error)).lower()}",
            "pipe text into it, or redirect it from a text file",
            code="file_not_read",
        ) from error
    if len(data) > _MAX_BYTES:
        raise OptionError(
            f"standard input contains more than {format_bytes(_MAX_BYTES)} of text",
            "shorten it to fit the model's context",
            code="input_too_large",
        )
    return decode_input(data).removesuffix("\n").removesuffix("\r")


def _read_piped_text() -> str:
    """Read the text that a pipe or a file supplies on stdin, or return an empty string.

    Returns an empty string immediately for terminals, devices such as /dev/null, and a closed stdin. If a
    pipe stays silent for 10 seconds, prints a note to stderr and returns an empty string.

    Raises:
        OptionError: As for `read_stdin`.
    """
    if sys.stdin is None:
        return ""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except io.UnsupportedOperation:
        return read_stdin()
    except (OSError, ValueError):
        return ""
    if stat.S_ISREG(mode):
        return read_stdin()
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return ""
    if _has_data(number):
        return read_stdin()
    click.echo(
        f"stdin is an open pipe that delivered nothing for {_WAIT_SECONDS:.0f} seconds, so only the prompt"
        " is used; to wait for the pipe, add - after the prompt; to ignore it, add </dev/null",
        err=True,
    )
    return ""


def _has_data(number: int) -> bool:
    """Wait until a pipe has data or is closed by its writer. Return False after 10 seconds."""
    if _is_ready(number, _NOTICE_SECONDS):
        return True
    click.echo(f"waiting up to {_WAIT_SECONDS:.0f} seconds for input on stdin", err=True)
    return _is_ready(number, _WAIT_SECONDS - _NOTICE_SECONDS)


def _is_ready(number: int, seconds: float) -> bool:
    try:
        return bool(select.select([number], [], [], seconds)[0])
    except (OSError, ValueError):
        return True  # `select` does not support pipes on Windows.


def _with_files(prompt: str, paths: tuple[str, ...], images: tuple[str, ...]) -> tuple[str, list[Image]]:
    """Return the prompt with its files, and the images that precede it. Print the files in each folder."""
    from edgespec.attachments import as_image, read_files
    from edgespec.chat.message import with_files

    files: list[AttachedFile] = []
    for path in paths:
        read = read_files(path)
        files += read.files
        if read.skipped or len(read.files) > 1:
            left_out = f", {read.skipped} skipped (no text)" if read.skipped else ""
            note(f"{path}: {len(read.files)} files{left_out}")
    attached = (file.image for file in files if file.image)
    return with_files(prompt, files), [*map(as_image, images), *attached]


def _answer(
    stop: Stop, prompt: tuple[str, list[Image]], raw: bool, as_json: bool, options: dict[str, Any]
) -> Reply:
    with loaded(stop, **pick(options, (*LOAD_NAMES, *WORKER_NAMES))) as runtime:
        if runtime.why_no_template and not raw:
            warn(f"the prompt is continued as plain text, because {runtime.why_no_template}")
        progress = ProgressLine(stop, in_pipe=False)
        with progress:
            settings = pick(options, ("system", *REPLY_NAMES))
            text, images = prompt
            stream = runtime.stream(text, raw=raw, images=images, progress=progress, **settings)
        stop.on_request(stream.cancel)
        with closing(stream):
            _write(stream, progress, silent=as_json)
        if stream.reply.reasoning and not stream.reply.answer:
            warn(
                "the reply ended while the model was still reasoning, so there is no answer; use a larger"
                " --max-tokens or --context"
            )
        if stream.reply.finish_reason == "length" and (stream.reply.answer or not stream.reply.reasoning):
            note(_why_cut_off(stream.reply))
        for line in (summary(stream.reply), stream.reply.method.note, stream.reply.method.summary):
            note(line)
        return stream.reply


def _why_cut_off(reply: Reply) -> str:
    if reply.context_full:
        return "stopped: the context is full; use a larger --context"
    return f"stopped: the reply reached --max-tokens ({len(reply.tokens)})"


def _write(stream: ReplyStream, progress: ProgressLine, silent: bool) -> None:
    """Print the answer as it arrives, and the reasoning to stderr. Always end with a newline."""
    last, reasoning = "", False
    try:
        with progress:
            for chunk in stream:
                progress.clear()
                if not chunk.text or silent:
                    continue
                if chunk.reasoning:
                    note(chunk.text, end="")
                else:
                    note("\n\n" if reasoning else "", end="")
                    write_text(chunk.text)
                    last = chunk.text
                reasoning = chunk.reasoning
            note("\n" if reasoning else "", end="")
    except EdgespecError:
        if last and not last.endswith("\n"):
            write_text("\n")
        raise
    if not silent and not last.endswith("\n"):
        write_text("\n")


def summary(reply: Reply) -> str:
    """Return a one-line summary of a reply: tokens, speed, acceptance and seed."""
    stats = reply.stats
    parts = []
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.generated_tokens} tokens, {format_rate(stats.tokens_per_second, 1)} tokens/s")
    elif stats.generated_tokens:
        parts.append("1 token")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafted tokens accepted")
    if stats.tokens_per_target_pass is not None:
        parts.append(f"{stats.tokens_per_target_pass:.1f} tokens per pass")
    parts.append(f"seed {reply.seed}")
    return " · ".join(parts)
