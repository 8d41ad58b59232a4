"""The control groups that this process is in (Linux): a container may have less than the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["ControlGroup", "control_groups"]


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group: its folder, its name as the process sees it, and whether it is of version 1."""

    folder: Path
    name: str
    version_1: bool

    def read(self, file: str) -> str:
        """A file of it; empty where there is none."""
        try:
            return (self.folder / file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """The groups of this process that may limit what `controller` is for, inner ones first.

    controller: `memory` or `cpu`. root: the folder under which /proc and /sys are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    # In a container the path may be that outside of it: then only the root is to be seen.
    for line in lines or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup"
        if controllers:
            folder /= controller
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            if ".." not in group.parts:
                shown = "" if str(group) == "." else str(group)
                yield ControlGroup(folder / group, f"/{shown}", bool(controllers))
