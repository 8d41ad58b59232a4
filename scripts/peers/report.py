"""Tables of what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.peers.configurations import Configuration
from scripts.peers.figures import Measured, Speeds, alike, compare, decode_speed, fastest, whole_speed

__all__ = ["OURS", "report"]

OURS = "edgespec"
_HEADER = (
    f"  {'tokens/s':40} {'decode':>8} {'whole':>8} {'per pass':>9} {'equal to theirs, to own plain':>30}"
)


def report(order: Sequence[Configuration], measured: Sequence[Measured]) -> str:
    """The tables of one temperature, in this order of the configurations."""
    decode, whole = Speeds(measured, decode_speed), Speeds(measured, whole_speed)
    prompts = len({each.prompt for each in measured})
    present = [each for each in order if any(one.configuration == each for one in measured)]
    lines = [f"\nT {measured[0].temperature:g}, {prompts} prompts", _HEADER]
    lines += [_row(each, present, measured, decode, whole) for each in present]
    ours = [each for each in present if each.program == OURS]
    plain = Configuration(OURS, "none")
    for speeds, what in ((decode, "decode"), (whole, "whole")):
        best = fastest(speeds, [each for each in present if each.program != OURS])
        for other in (best, plain):
            ratios = list(_ratios(speeds, ours, other)) if other in present else []
            lines += [f"{what}, ratios to {other}:", *ratios] if ratios else []
    return "\n".join(lines)


def _row(
    each: Configuration,
    present: Sequence[Configuration],
    measured: Sequence[Measured],
    decode: Speeds,
    whole: Speeds,
) -> str:
    runs = [one.run for one in measured if one.configuration == each]
    per_pass = sum(len(run.tokens) for run in runs) / max(1, sum(run.passes for run in runs))
    theirs = [one for one in present if one.program != OURS and one.name == "none"]
    own = [one for one in present if one == Configuration(each.program, "none")]
    same = ["{} of {}".format(*alike(measured, each, plain[0])) if plain else "-" for plain in (theirs, own)]
    speeds = [f"{mean:.1f}" if (mean := some.mean(each)) else "-" for some in (decode, whole)]
    # What ran is told where it is not what was asked for.
    ran = sorted({run.method for run in runs if run.method} - {each.name.partition(":")[0]})
    return f"  {each!s:40} {speeds[0]:>8} {speeds[1]:>8} {per_pass:>9.2f} {same[0]:>16}, {same[1]:>12}" + (
        f"  ran: {', '.join(ran)}" if ran else ""
    )


def _ratios(speeds: Speeds, ours: Sequence[Configuration], other: Configuration) -> Iterator[str]:
    for each in ours:
        found = compare(speeds, each, other) if each != other else None
        if found:
            categories = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.categories.items())
            yield f"  {each!s:20} {found}, worst prompt {found.worst:.2f}x; {categories}"
