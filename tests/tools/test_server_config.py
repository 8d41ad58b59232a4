"""The file `tools.toml`: the servers in valid files, and the errors for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import ConfigurationError
from edgespec.tools.server_config import ServerConfig, allow_always, read_servers, servers_path


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the file, which does not exist yet."""
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path))
    return servers_path()


GOOD = """\
# My notes
[notes]
command = "npx"
args = ["-y", "server-filesystem", "~/notes"]
env = { LANG = "C" }

[search]
url = "https://example.org/mcp"
timeout = 10
[search.headers]
Authorization = "Bearer x"
"""


def test_servers(file: Path) -> None:
    assert read_servers() == ()
    file.write_text(GOOD)
    notes, search = read_servers()
    assert notes == ServerConfig("notes", "npx", ("-y", "server-filesystem", "~/notes"), {"LANG": "C"})
    assert search == ServerConfig(
        "search", url="https://example.org/mcp", headers={"Authorization": "Bearer x"}, timeout=10
    )


def test_allowed_tools_are_saved_and_the_rest_is_kept(file: Path) -> None:
    file.write_text(GOOD)
    allow_always("notes", "read_file")
    allow_always("notes", "read_file")
    allow_always("notes", "list")
    allow_always("search", "find")
    notes, search = read_servers()
    assert (notes.allow, search.allow) == (("read_file", "list"), ("find",))
    assert "# My notes" in file.read_text()
    assert search.headers == {"Authorization": "Bearer x"}


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('[notes]\ncommand = "x"\nargz = []\n', 3, "did you mean args?"),
        ('[notes]\ncommand = "x"\nargs = "y"\n', 3, "args must be a list of strings"),
        ('[notes]\ncommand = "x"\nenv = { A = 1 }\n', 3, "env must be a table of strings"),
        ('[notes]\nurl = "ftp://x"\n', 2, "url must be an http or https address"),
        ('[notes]\nurl = "http://x"\ntimeout = 0\n', 3, "timeout must be a number of seconds"),
        (
            '[notes]\nurl = "http://x"\nargs = []\n',
            3,
            "args has no effect for a server that is set up with `url`",
        ),
        ('[notes]\ncommand = "x"\nurl = "http://x"\n', 1, "needs either `command` or `url`"),
        ("[notes]\n", 1, "needs either `command` or `url`"),
        ('[my_notes]\ncommand = "x"\n', 1, "is not a valid server name"),
        ("\nnotes = 1\n", 2, "is not in a section"),
        ("[notes\n", 1, ""),
    ],
)
def test_what_is_wrong(file: Path, text: str, line: int, problem: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_servers()
    assert f"{file}, line {line}" in caught.value.what
    assert problem in str(caught.value)
