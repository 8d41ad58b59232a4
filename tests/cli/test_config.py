"""`edgespec config`: how settings are shown, set and removed."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from pathlib import Path

import pytest

from edgespec.cli.options import every_setting
from edgespec.cli.settings import VARIABLES
from tests.cli.conftest import Run, Start, json_of, one_line_error
from tests.cli.settings_places import file as file
from tests.cli.settings_places import own_settings as own_settings
from tests.cli.settings_places import reply

# What is shown


def test_each_value_is_shown_with_its_place(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('target = "8b-q4"\nstop = ["a"]\nmax_loss = "5%"\n[chat]\ntarget = "demo"\n')
    monkeypatch.setenv("EDGESPEC_THREADS", "2")
    shown = json_of(run("config", "--json"))
    settings = shown["settings"]
    assert shown["path"] == str(file)
    assert settings["target"] == {"value": "8b-q4", "from": "file", "where": str(file)}
    assert settings["threads"] == {"value": 2, "from": "environment", "where": "EDGESPEC_THREADS"}
    assert settings["stop"]["value"] == ["a"]
    assert settings["max_loss"]["value"] == 0.05
    assert settings["context"] == {"value": None, "from": "default", "where": None}
    assert shown["commands"] == {
        "chat": {
            "target": {"value": "demo", "from": "file", "where": str(file)},
            "remember": {"value": True, "from": "default", "where": None},
            "prefix_cache": {"value": "disk", "from": "default", "where": None},
        }
    }
    assert shown["variables"]["EDGESPEC_CONFIG_DIR"]["value"] == str(file.parent)
    rows = {line.split()[0]: line for line in run("config").stdout.splitlines() if line}
    assert re.fullmatch(rf"target +8b-q4 +{file}", rows["target"])
    assert re.fullmatch(r"threads +2 +EDGESPEC_THREADS", rows["threads"])
    assert re.fullmatch(
        r"context +as many tokens as the model was trained for; more than 8192 .* +default", rows["context"]
    )
    assert re.fullmatch(rf"chat.target +demo +{file}", rows["chat.target"])
    assert rows.keys() >= every_setting().keys() | VARIABLES.keys()


def test_the_path(run: Run, file: Path) -> None:
    assert run("config", "path").stdout == f"{file}\n"
    assert json_of(run("config", "path", "--json")) == {"path": str(file), "exists": False}


# How it is changed


def test_one_value(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('target = "a\\nb"\n[chat]\nseed = 3\n')
    monkeypatch.setenv("EDGESPEC_CONTEXT", "999")
    keys = ("target", "chat.seed", "seed", "context", "prefix-cache", "chat.prefix-cache", "gpu-layers")
    said = [run("config", "get", key).stdout for key in keys]
    assert said == ["a b\n", "3\n", "random\n", "999\n", "memory\n", "disk\n", "as many as fit\n"]
    assert json_of(run("config", "get", "chat.seed", "--json")) == {
        "key": "chat.seed", "value": 3, "from": "file", "where": str(file),
    }  # fmt: skip
    file.write_text("seed = 'much'\n")
    done = run("config", "get", "target")
    assert (done.exit_code, done.stdout) == (1, "demo\n")
    assert "seed" in done.stderr


@pytest.mark.long
def test_set_changes_a_value_and_keeps_comments(run: Run, file: Path) -> None:
    file.write_text('# Mine.\ntarget = "8b-q4"  # large\n')
    assert run("config", "set", "target", "demo-draft").exit_code == 0
    assert json_of(run("config", "set", "max-tokens", "2", "--json")) == {
        "key": "max_tokens",
        "value": 2,
        "path": str(file),
    }
    run("config", "set", "generate.presence_penalty", "-0.5")
    run("config", "set", "stop", "###", 'a "b"\n')
    run("config", "set", "draft-branches", "3,2")
    run("config", "set", "remember", "no")
    assert file.read_text() == (
        '# Mine.\ntarget = "demo-draft"  # large\nmax_tokens = 2\nstop = ["###", "a \\"b\\"\\n"]\n'
        'draft_branches = "3,2"\nremember = false\n\n[generate]\npresence_penalty = -0.5\n'
    )
    found = reply(run, "--method", "none")
    assert (found["target"], len(found["tokens"])) == ("demo-draft", 2)
    assert "no longer in" in run("config", "unset", "max-tokens").stdout
    assert "is not in" in run("config", "unset", "max-tokens").stdout
    assert json_of(run("config", "unset", "generate.presence_penalty", "--json"))["removed"]
    assert "max_tokens" not in file.read_text()


@pytest.mark.parametrize(
    ("words", "quoted", "code"),
    [
        (["set", "temprature", "1"], "temperature?", "option_unknown"),
        (["set", "chta.seed", "1"], "chat?", "option_invalid"),
        (["set", "doctor.seed", "1"], "'doctor'", "option_invalid"),
        (["set", "chat.seed.x", "1"], "'chat.seed.x'", "option_invalid"),
        (["set", "seed"], "VALUE", "option_invalid"),
        (["set", "seed", "1", "2"], "one value", "option_invalid"),
        (["set", "seed", "x"], "seed", "option_invalid"),
        (["set", "mmap", "x"], "mmap", "option_invalid"),
        (["set", "temperature", "-1"], "-1.0", "option_invalid"),
        (["set", "system", "\udce9"], "UTF-8", "invalid_encoding"),
        (["unset", "zzz"], "'zzz'", "option_unknown"),
        (["set", "min_tokens", "5"], "min_tokens", "option_unknown"),
        (["get", "zzz"], "'zzz'", "option_unknown"),
        (["sett", "seed"], "'set'", "option_invalid"),
    ],
)
def test_wrong_usage(run: Run, file: Path, words: list[str], quoted: str, code: str) -> None:
    one_line_error(run("config", *words), 2, quoted, code=code)
    assert not file.exists()


def test_unset_removes_misspelt_lines(run: Run, file: Path) -> None:
    file.write_text("gpu-layers = 1\n[chta]\nseed = 1\n")
    run("config", "unset", "gpu-layers")
    run("config", "unset", "chta.seed")
    assert tomllib.loads(file.read_text()) == {"chta": {}}


def test_set_reports_other_problems_of_the_file(run: Run, file: Path) -> None:
    file.write_text("tempreature = 1\n")
    for words in (("set", "seed", "2"), ("unset", "seed")):
        done = run("config", *words)
        assert done.exit_code == 0
        assert "seed" in done.stdout
        assert "tempreature" in done.stderr
        assert "did you mean temperature?" in done.stderr


def test_a_file_that_cannot_be_changed_stays(run: Run, file: Path) -> None:
    for text, error in (
        ("chat = { seed = 1 }", "chat.seed cannot be changed in .* change it in a text editor"),
        ("seed = [", "config.toml, line 1"),
    ):
        file.write_text(text)
        assert re.search(error, one_line_error(run("config", "set", "chat.seed", "2"), 1))
        assert file.read_text() == text


def test_the_file_is_private_and_a_link_stays_a_link(run: Run, file: Path, tmp_path: Path) -> None:
    file.parent.rmdir()
    run("config", "set", "seed", "1")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    kept = file.rename(tmp_path / "dotfiles.toml")
    file.symlink_to(kept)
    run("config", "set", "seed", "2")
    assert file.is_symlink()
    assert kept.read_text() == "seed = 2\n"
    assert sorted(path.name for path in file.parent.iterdir()) == [".config.toml.lock", "config.toml"]


def test_an_unwritable_folder(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "file").touch()
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(file.parent / "file" / "folder"))
    one_line_error(run("config", "set", "seed", "1"), 1, code="file_not_written")


def test_a_write_that_fails_leaves_the_file(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("seed = 1\n")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    one_line_error(run("config", "set", "seed", "2"), 1, code="file_not_written")
    assert file.read_text() == "seed = 1\n"


@pytest.mark.long
def test_concurrent_changes_are_all_kept(start: Start, file: Path) -> None:
    code = (
        "import sys\nfrom edgespec.options.settings_file import settings_path\n"
        "from edgespec.options.settings_file import write_value\n"
        "for at in range(20): write_value(settings_path(), (sys.argv[1], 'seed'), str(at))\n"
    )
    commands = ("chat", "generate", "verify")
    processes = [start(name, code=code) for name in commands]
    for process in processes:
        assert process.wait(120) == 0, process.stderr and process.stderr.read()
    assert tomllib.loads(file.read_text()) == {name: {"seed": 19} for name in commands}
