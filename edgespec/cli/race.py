"""`edgespec race`: show plain decoding and a method side by side on the same prompt."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.failures import DONE
from edgespec.cli.help import HelpfulCommand
from edgespec.cli.interrupt import Stop, interruptible
from edgespec.cli.options import (
    LOAD_NAMES,
    REPLY_NAMES,
    WORKER_NAMES,
    OutputPath,
    PromptText,
    declared_options,
    drop_sampling_defaults,
    json_option,
    pick,
)
from edgespec.cli.running import loaded, reject_remember
from edgespec.cli.screen import ProgressLine, is_terminal, note, print_json, write_text

if TYPE_CHECKING:
    from edgespec.bench.race import Race
    from edgespec.bench.race_pictures import Picture

__all__ = ["command"]

# Reply options that `race` omits, because it cannot show their results.
_UNUSED = ("logprobs",)
_REPLY_NAMES = tuple(name for name in REPLY_NAMES if name not in _UNUSED)
# Minimum terminal width in columns. In a narrower terminal, two replies side by side would be unreadable, so
# only the result is printed.
_MIN_COLUMNS = 40
# Number of terminal rows reserved for the prompt, the headings and the result. The replies get the rest.
_OTHER_ROWS = 14


@click.command(
    "race",
    cls=HelpfulCommand,
    params=declared_options("target", "draft", "system", *_REPLY_NAMES, *LOAD_NAMES, *WORKER_NAMES),
    short_help="Show a reply with and without the speed-up, side by side.",
    examples=(
        'edgespec race "How do I list files by size?"',
        'edgespec race --target 8b-q4 --to race.svg "Write a Python class for a stack"',
        'edgespec race --method ngram --temperature 0 --json "Count to twenty"',
    ),
)
@click.argument("prompt", type=PromptText())
@click.option(
    "--to", type=OutputPath(path_type=Path), metavar="FILE",
    help="Also save a picture of the result (.svg).",
)  # fmt: skip
@json_option
def command(prompt: str, to: Path | None, as_json: bool, **options: Any) -> int:
    """Generate a reply twice, without and with the speed-up, and show both side by side.

    Both replies use the same seed and settings. They are generated one after the other, because otherwise
    they would slow each other down, and are then shown together at their measured speeds.

    A race is only a single measurement. For reliable numbers, use `edgespec bench`.
    """
    from edgespec.bench.race import DEFAULT_RACE_TOKENS, check_race
    from edgespec.bench.race_pictures import check_picture_path, save_picture

    reject_remember(options)
    check_race(options["method"], options)
    if to is not None:
        check_picture_path(to)
    if options["max_tokens"] is None:
        options["max_tokens"] = DEFAULT_RACE_TOKENS
    given = drop_sampling_defaults(options)
    race = interruptible(lambda stop: _race(stop, prompt, as_json, given))
    if to is not None:
        save_picture(race, prompt, to)
        note(f"saved {to}")
    if as_json:
        print_json({"prompt": prompt} | race.to_json())
    return DONE


def _race(stop: Stop, prompt: str, as_json: bool, options: dict[str, Any]) -> Race:
    """Load the models and run the race. Show it on the screen unless the result is printed as JSON."""
    from edgespec.bench.race import run_race
    from edgespec.bench.race_pictures import Picture

    settings = pick(options, ("system", *_REPLY_NAMES))
    wanted = pick(options, (*LOAD_NAMES, *WORKER_NAMES))
    with loaded(stop, **wanted) as runtime, ProgressLine(stop) as progress:
        race = run_race(
            lambda **each: runtime.stream(prompt, **each),
            settings,
            method=options["method"],
            progress=progress,
        )
    size = shutil.get_terminal_size()
    if as_json:
        return race
    if is_terminal(sys.stdout) and size.columns > _MIN_COLUMNS and size.lines > _OTHER_ROWS:
        _play(Picture(race, prompt, min(size.columns - 1, 120), size.lines - _OTHER_ROWS), stop)
    else:
        write_text("\n".join([race.headline(), *race.remarks()]) + "\n")
    return race


def _play(picture: Picture, stop: Stop) -> None:
    """Play the race below the cursor at its measured speeds. After a stop request, skip to the end."""
    from edgespec.bench.race_pictures import styled

    sys.stdout.write("\n" * picture.rows)
    began = monotonic()
    for event in picture.events:
        while (left := event.seconds - (monotonic() - began)) > 0 and not stop.requested:
            sys.stdout.flush()
            sleep(min(left, 0.05))
        up = picture.rows - event.row
        sys.stdout.write(f"\x1b[{up}A\x1b[{event.column + 1}G{styled(event)}\x1b[{up}B\x1b[1G")
    sys.stdout.flush()
