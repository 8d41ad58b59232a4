"""Read this process's Linux control groups, which can limit its CPU time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["ControlGroup", "control_groups"]


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A Linux control group.

    Attributes:
        folder: Folder of the group below /sys/fs/cgroup.
        name: Path of the group as seen by this process, such as `/app.slice/chat`.
        version_1: Whether the group belongs to a cgroup v1 hierarchy.
    """

    folder: Path
    name: str
    version_1: bool

    def read(self, file: str) -> str:
        """Return the contents of a file in the control group's folder, or "" if it cannot be read."""
        try:
            return (self.folder / file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control groups whose limits for `controller` apply to this process, innermost first.

    Args:
        controller: `memory` or `cpu`.
        root: The folder that contains `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    for line in lines or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / "sys/fs/cgroup"
        if controllers:
            folder /= controller
        innermost = PurePosixPath(path.lstrip("/"))
        for group in (innermost, *innermost.parents):
            if ".." not in group.parts:
                name = "" if str(group) == "." else str(group)
                yield ControlGroup(folder / group, f"/{name}", bool(controllers))
