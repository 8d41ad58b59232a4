"""Format numbers, rates and times for display."""

from __future__ import annotations

from datetime import datetime

from edgespec.system.files import format_rate

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def count(number: int, noun: str = "") -> str:
    """Format 1234 as '1,234', or with a noun as '1 message' and '2 messages'."""
    if not noun:
        return f"{number:,}"
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def rate(tokens_per_second: float | None) -> str:
    """Format 212.3 as '212 tok/s' and 0.0312 as '0.031 tok/s'."""
    if tokens_per_second is None:
        return "– tok/s"
    return f"{format_rate(tokens_per_second)} tok/s"


def percent(fraction: float | None) -> str:
    """Format 0.714 as '71%'."""
    return "–" if fraction is None else f"{fraction * 100:.0f}%"


def seconds_text(seconds: float | None) -> str:
    """Format 0.0047 as '4.7 ms', 0.35 as '0.35 s' and 75 as '1 m 15 s'."""
    if seconds is None:
        return "–"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} m {rest:02d} s"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 0.1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms"


def time_left(seconds: float) -> str:
    """Format 40 as '40 s', 400 as '7 min' and 40000 as '11 h'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.0f} h"


def parameters_text(parameters: int) -> str:
    """Format 11540736 as '11.5 M parameters'."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        # A number just below the unit would be rounded to 1,000 of the smaller one.
        if parameters >= 0.9995 * size:
            return f"{parameters / size:.3g} {unit} parameters"
    return count(parameters, "parameter")


def ago(then: datetime, now: datetime) -> str:
    """Format a time in the past as 'now', '5 min', '3 h', 'Tue', '12 Mar' or '12 Mar 2024'."""
    seconds = (now - then).total_seconds()
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 24 * 3600:
        return f"{seconds / 3600:.0f} h"
    local = then.astimezone()
    if seconds < 6 * 24 * 3600:
        return local.strftime("%a")
    year = "" if local.year == now.astimezone().year else f" {local.year}"
    return f"{local.day} {local.strftime('%b')}{year}"


def bar(fraction: float, width: int) -> str:
    """Return a text progress bar of `width` cells, accurate to an eighth of a cell."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, part = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    return text.ljust(width)
