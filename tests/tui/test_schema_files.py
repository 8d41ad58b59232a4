"""Files that `/schema` and `--schema` must not read in full."""

from __future__ import annotations

import os
from pathlib import Path

from edgespec.errors import OptionError
from edgespec.options.option import TextFile
from edgespec.tui.settings import read_schema
from tests.raising import raises


def test_pipes_devices_and_folders_are_no_schema(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        with raises(OptionError, code="file_not_read"):
            read_schema(path)


def test_an_endless_file_is_refused() -> None:
    with raises(OptionError, "16.0", code="file_not_read"):
        TextFile().parse("/dev/zero")


def test_a_text_from_a_pipe_is_read_without_the_line_ends_of_windows() -> None:
    read, write = os.pipe()
    os.write(write, "é\r\n".encode())
    os.close(write)
    assert TextFile().parse(f"/dev/fd/{read}") == "é\n"
    os.close(read)
