"""Plot the training curve of a drafter as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.train.evaluation import DEPTH

if TYPE_CHECKING:
    from edgespec.train.state import CurvePoint

__all__ = ["plot_training"]


def plot_training(curve: Sequence[CurvePoint], name: str, path: Path) -> bool:
    """Plot loss and tokens per pass against the number of trained tokens.

    Args:
        curve: The points to plot.
        name: Name of the drafter, for the title.
        path: PNG file to write.

    Returns:
        Whether the file was written. False if matplotlib is not installed.

    Raises:
        OSError: The file cannot be written.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    trained = [point.trained_tokens for point in curve]
    upper.plot(trained, [point.tokens_per_pass for point in curve], marker="o")
    upper.set_ylabel(f"tokens per pass (drafts of {DEPTH} tokens)")
    upper.set_title(f"{name}: accuracy on held-out conversations")
    lower.plot(trained, [point.loss for point in curve], marker="o", color="tab:orange")
    lower.set_ylabel("loss per predicted token")
    lower.set_xlabel("trained tokens, including repetitions")
    figure.savefig(path, dpi=120)
    return True
