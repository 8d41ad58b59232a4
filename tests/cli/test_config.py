"""Settings: the file, the environment, the command line, in that order of strength; how they are changed."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.doctor import _settings
from edgespec.cli.options import MODEL_NAMES, SAMPLING_NAMES, every_setting
from edgespec.cli.program import COMMANDS, program
from edgespec.cli.settings import VARIABLES, Settings, settings_of, variable_of
from edgespec.errors import CancelledError
from tests.cli.conftest import ROOT, Run, Start, json_of, one_line_error


@pytest.fixture
def file(own_home: Path) -> Path:
    """Where the settings are looked for; the folder is there, the file is not."""
    path = own_home / "config" / "config.toml"
    path.parent.mkdir()
    return path


@pytest.fixture(autouse=True)
def own_settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        if name not in ("EDGESPEC_DATA_DIR", "EDGESPEC_CACHE_DIR"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(file.parent))


def reply(run: Run, *options: str) -> dict[str, Any]:
    return json_of(run("generate", "--json", *options, "hi"))


def options_got(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """What a command is given, which does nothing else from now on."""
    got: dict[str, Any] = {}
    command = program.get_command(click.Context(program), name)
    assert command is not None
    monkeypatch.setattr(command, "callback", lambda **options: got.update(options))
    return got


# Strength


def test_the_command_line_wins_then_the_environment_then_the_file(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        'target = "demo-draft"\nmethod = "suffix"\nseed = 5\nmax_tokens = 3\n[generate]\nseed = 6\n'
    )
    found = reply(run)
    assert (found["target"], found["method"]["requested"], found["seed"]) == ("demo-draft", "suffix", 6)
    assert len(found["tokens"]) == 3
    monkeypatch.setenv("EDGESPEC_TARGET", "demo")
    monkeypatch.setenv("EDGESPEC_METHOD", "ngram")
    monkeypatch.setenv("EDGESPEC_SEED", "7")
    found = reply(run)
    assert (found["target"], found["method"]["requested"], found["seed"]) == ("demo", "ngram", 7)
    found = reply(run, "--target", "demo-draft", "--method", "none", "--seed", "8")
    assert (found["target"], found["method"]["requested"], found["seed"]) == ("demo-draft", "none", 8)


def test_switches_lists_and_texts(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of value, as the command gets it."""
    got = options_got(monkeypatch, "generate")
    file.write_text(
        'mmap = false\nlearn = true\nstop = ["a b", "c"]\nlogit_bias = ["5=-inf"]\ndraft_branches = [3, 2]\n'
        'max_loss = "5%"\ntemperature = 1\ncorpus = "~/x"\n'
    )
    run("generate", "hi")
    assert (got["mmap"], got["learn"], got["stop"]) == (False, True, ("a b", "c"))
    assert (got["logit_bias"], got["draft_branches"]) == ({5: float("-inf")}, (3, 2))
    assert (got["max_loss"], got["temperature"], got["corpus"]) == (0.05, 1.0, "~/x")
    monkeypatch.setenv("EDGESPEC_MMAP", "true")
    monkeypatch.setenv("EDGESPEC_STOP", "one text, with blanks")
    monkeypatch.setenv("EDGESPEC_DRAFT_BRANCHES", "auto")
    monkeypatch.setenv("EDGESPEC_MAX_LOSS", "")
    run("generate", "--no-learn", "hi")
    assert (got["mmap"], got["learn"], got["stop"]) == (True, False, ("one text, with blanks",))
    assert (got["draft_branches"], got["max_loss"]) == ("auto", 0.05)


def test_a_section_is_for_its_command(file: Path) -> None:
    file.write_text("remember = true\n[chat]\nremember = false\ntemperature = 0.5\n")
    settings = Settings.read()
    assert not settings.problems
    found = {name: settings.find(name, "remember") for name in ("chat", "generate")}
    assert {name: each and each.value for name, each in found.items()} == {"chat": False, "generate": True}
    assert settings.find("generate", "temperature") is None


@pytest.mark.parametrize("name", ["tune", "bench", "verify"])
def test_a_measuring_command_has_own_seeds_and_remembers_nothing(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The prompts of `tune` and `bench` are always the same: they refuse --remember."""
    file.write_text('remember = true\nseed = 3\nmax_tokens = 2\nmethod = "none"\ntarget = "demo-mlx"\n')
    got = options_got(monkeypatch, name)
    assert run(name).exit_code == 0
    assert (got["target"], got["remember"], got.get("seed", 1)) == ("demo-mlx", False, 1)
    assert got["max_tokens"] > 2
    assert got.get("method", "auto") == "auto"


def test_a_script_says_itself_what_it_wants(file: Path) -> None:
    file.write_text('target = "no such model"\n')
    with edgespec.load(context=64, threads=1, draft="none") as runtime:
        assert runtime.target.name == "demo"


def test_what_the_method_does_not_read_is_left_out(run: Run, file: Path) -> None:
    """Written, it is refused; what is set for all runs has to fit the others only."""
    file.write_text("draft_window = 100\ndraft_confidence = 0.3\n")
    assert reply(run, "--method", "suffix", "-n", "2")["method"]["requested"] == "suffix"
    error = one_line_error(run("generate", "--method", "suffix", "--draft-window", "100", "hi"), 2)
    assert error.startswith("draft_window is for model")


# What is wrong


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('seed = 1\ntemprature = 1\n', "line 2: there is no setting 'temprature'; did you mean temperature?"),
        ("gpu-layers = 1", "line 1: there is no setting 'gpu-layers'; did you mean gpu_layers?"),
        ("zzz = 1", "line 1: there is no setting 'zzz'; `edgespec config` shows all there are"),
        ("[chta]\nseed = 1", "line 1: there is no setting 'chta'; did you mean chat?"),
        ("[chat]\n\ntop_q = 1", "line 3: chat has no setting 'top_q'; did you mean top_p?"),
        ("[chat]\nlogit_bias = []", "line 2: chat has no setting 'logit_bias'"),
        ("[doctor]\n", "line 1: doctor has no settings; take the section out"),
        ("[aliases]\nbig = 'demo'", "line 1: aliases are not settings; put them into "),
        ("[pairs]\nbig = 'demo'", "line 1: pairs are not settings; put them into "),
        ("context = '4096'", "line 1: context: '4096' is a text: write it without quotes; correct it, or"),
        ("context = 4096.5", "line 1: context: '4096.5' is not a whole number from 1 up; correct it, or"),
        ("context = true", "line 1: context: True is not what this setting takes"),
        ("context = [1]", "line 1: context: [1] is a list, and this takes one value"),
        ("target = 8", "line 1: target: 8 is not a text: write \"8\""),
        ("target = 2020-01-01", "line 1: target: datetime.date(2020, 1, 1) is not what this setting takes"),
        ("[target]\n", "line 1: target: {} is not what this setting takes"),
        ("mmap = 'yes'", "line 1: mmap: 'yes' is neither true nor false, without quotes"),
        ("stop = '###'", "line 1: stop: '###' is not a list, such as stop = [...]"),
        ("temperature = -1", "line 1: temperature is -1.0; give a number from 0"),
        ("method = 'modle'", "line 1: method 'modle' is unknown; did you mean 'model'?"),
        ("flash_attention = 'of'", "line 1: flash_attention: 'of' is not one of 'auto', 'on', 'off'"),
        ("chat = 3", "line 1: there is no setting 'chat'"),
        ("seed = 1\ntarget = demo\n", "line 2, column 10: invalid value; write lines such as target"),
        ("seed = 1\nseed = 2\n", "line 2, column 9: cannot overwrite a value"),
        ('seed = 1\nsystem = """\n', "line 2: "),
        ("seed = " + "[" * 5000, "config.toml: it is nested too deeply"),
        (f"seed = {'9' * 5000}", "config.toml: exceeds the limit"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(run: Run, file: Path, text: str, error: str) -> None:
    file.write_text(text)
    said = one_line_error(run("generate", "hi"), 1)
    assert said.startswith(str(file))
    assert error in said
    assert said in run("config").stderr


def test_a_file_of_other_bytes(run: Run, file: Path) -> None:
    file.write_bytes(b"seed = 1\nsystem = 'caf\xe9'\n")
    assert f"{file}, line 2: this is not UTF-8 text; save it" in one_line_error(run("generate", "hi"), 1)
    file.write_bytes("seed = 1\n".encode("utf-8-sig"))
    assert not Settings.read().problems


def test_an_empty_file_and_a_missing_folder(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(b"")
    assert json_of(run("config", "--json"))["exists"]
    for place in ("/dev/null", str(file.parent / "none")):
        monkeypatch.setenv("EDGESPEC_CONFIG_DIR", place)
        assert not json_of(run("config", "--json"))["exists"]


def test_a_folder_or_a_pipe_in_place_of_the_file(run: Run, file: Path) -> None:
    file.mkdir()
    for command in (["generate", "hi"], ["config", "set", "seed", "1"]):
        error = one_line_error(run(*command), 1)
        assert re.search(f"{file} cannot be read: .*; make it a readable file, or move it away", error)
    file.rmdir()
    os.mkfifo(file)
    assert "it is not a regular file" in one_line_error(run("generate", "hi"), 1)


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("EDGESPEC_TEMPRATURE", "1", "EDGESPEC_TEMPRATURE; did you mean EDGESPEC_TEMPERATURE?"),
        ("EDGESPEC_DATADIR", "/x", "EDGESPEC_DATADIR; did you mean EDGESPEC_DATA_DIR?"),
        ("EDGESPEC_Q", "1", "EDGESPEC_Q; `edgespec config` shows all there are"),
        (
            "EDGESPEC_CONTEXT",
            "much",
            "EDGESPEC_CONTEXT: context: 'much' is not a whole number from 1 up; correct",
        ),
        (
            "EDGESPEC_MMAP",
            "maybe",
            "EDGESPEC_MMAP: mmap: 'maybe' is neither true nor false; correct it, or unset",
        ),
        ("EDGESPEC_MIN_P", "3", "EDGESPEC_MIN_P: min_p is 3.0; give a number from 0 to 1"),
    ],
)
def test_a_variable_that_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: str
) -> None:
    monkeypatch.setenv(variable, value)
    said = one_line_error(run("generate", "hi"), 1)
    assert error in said
    assert json_of_failed(run, "config", "--json")["problems"] == [said]


def json_of_failed(run: Run, *words: str) -> dict[str, Any]:
    result = run(*words)
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('kv_type = "q9"', "kv_type is 'q9' (kv_type is set in {file}); choose auto"),
        ('memory = "much"', "memory is 'much' (memory is set in {file}); write it like 8GiB"),
        ('target = "nonesuch"', "no model is called nonesuch (target is set in {file}); "),
        ('keep_disk = "-4"', "keep_disk is '-4' (keep_disk is set in {file}); write it like 8GiB"),
        ('target = "nonesuch\\n"', "no model is called nonesuch (target is set in {file}); "),
        ("learn = true", "(learn is set in {file}); "),
        ("threads = 5000", "threads is 5000 (threads is set in {file}); give a whole number from 1 to 1024"),
    ],
)
def test_what_only_loading_finds_wrong_is_told_with_its_place(
    file: Path, run: Run, line: str, error: str
) -> None:
    file.write_text(line)
    said = one_line_error(CliRunner().invoke(program, ["generate", "hi"]), 1)
    assert error.format(file=file) in said
    option = "--kv-type=q8" if "kv" in line else "--context=no"
    assert str(file) not in one_line_error(run("generate", option, "hi"), 2)


def test_an_end_that_was_asked_for_is_no_fault_of_a_setting(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*args: object, **options: object) -> None:
        raise CancelledError("loading demo was cancelled")

    file.write_text('target = "demo"\n')
    monkeypatch.setattr(edgespec, "load", cancelled)
    result = run("generate", "hi")
    assert (result.exit_code, result.stderr) == (130, "interrupted: loading demo was cancelled\n")


def test_help_and_other_commands_work_beside_a_broken_file(run: Run, file: Path) -> None:
    file.write_text("[[[")
    for words in (["--help"], ["generate", "--help"], ["config", "path"], ["models", "list"], ["--version"]):
        assert run(*words).exit_code == 0, words
    shown = json_of_failed(run, "config", "--json")
    assert shown["settings"]["target"] == {"value": "demo", "from": "default", "where": None}
    doctor = json_of(run("doctor", "--json"))
    check = next(check for check in doctor["checks"] if check["name"] == "settings")
    assert not check["ok"]
    assert f"{file}, line 1" in check["says"]
    assert check["next_step"]
    file.write_text("")
    assert _settings().ok


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
            "keep": {"value": "disk", "from": "default", "where": None},
        }
    }
    assert shown["variables"]["EDGESPEC_CONFIG_DIR"]["value"] == str(file.parent)
    rows = {line.split()[0]: line for line in run("config").stdout.splitlines()}
    assert re.fullmatch(rf"target +8b-q4 +{file}", rows["target"])
    assert re.fullmatch(r"threads +2 +EDGESPEC_THREADS", rows["threads"])
    assert re.fullmatch(r"context +as trained, at most 8192 +default", rows["context"])
    assert re.fullmatch(rf"chat.target +demo +{file}", rows["chat.target"])
    assert rows.keys() >= every_setting().keys() | VARIABLES.keys()


def test_the_options_of_load_and_of_sampling_can_be_set() -> None:
    """All but those that belong to one model."""
    settings = every_setting()
    assert {*MODEL_NAMES, *SAMPLING_NAMES, "method", "seed"} - settings.keys() == {"adapter", "exit_layer"}
    for name in COMMANDS:
        assert settings_of(name).keys() <= settings.keys()


def test_every_variable_of_the_program_is_known() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "edgespec").rglob("*.py"))
    named = set(re.findall(r"\bEDGESPEC_[A-Z_]*[A-Z]\b", text))
    assert named == {*VARIABLES, "EDGESPEC_TARGET"}
    assert not VARIABLES.keys() & {variable_of(name) for name in every_setting()}


def test_the_path(run: Run, file: Path) -> None:
    assert run("config", "path").stdout == f"{file}\n"
    assert json_of(run("config", "path", "--json")) == {"path": str(file), "exists": False}


# How it is changed


def test_what_is_set_holds_and_comments_stay(run: Run, file: Path) -> None:
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
    ("words", "error"),
    [
        (["set", "temprature", "1"], "there is no setting 'temprature'; did you mean temperature?"),
        (["set", "chta.seed", "1"], "there is no command 'chta' with settings; did you mean chat?"),
        (["set", "doctor.seed", "1"], "there is no command 'doctor' with settings"),
        (["set", "chat.seed.x", "1"], "'chat.seed.x' is no key"),
        (["set", "seed"], "missing argument"),
        (["set", "seed", "1", "2"], "seed takes one value, and these are 2"),
        (["set", "seed", "x"], "seed: 'x' is not a whole number from 0"),
        (["set", "mmap", "x"], "mmap: 'x' is neither true nor false"),
        (["set", "temperature", "-1"], "temperature is -1.0; give a number from 0"),
        (["set", "system", "\udce9"], "is not UTF-8 text"),
        (["unset", "zzz"], "there is no setting 'zzz'"),
        (["sett", "seed"], "did you mean 'set'?"),
    ],
)
def test_wrong_usage(run: Run, file: Path, words: list[str], error: str) -> None:
    assert error in one_line_error(run("config", *words), 2)
    assert not file.exists()


def test_what_was_mistyped_can_be_taken_out(run: Run, file: Path) -> None:
    file.write_text("gpu-layers = 1\n[chta]\nseed = 1\n")
    run("config", "unset", "gpu-layers")
    run("config", "unset", "chta.seed")
    assert tomllib.loads(file.read_text()) == {"chta": {}}


def test_a_file_that_cannot_be_changed_stays(run: Run, file: Path) -> None:
    for text, error in (
        ("chat = { seed = 1 }", "chat.seed is written in .* change it in an editor"),
        ("seed = [", "config.toml, line 1"),
    ):
        file.write_text(text)
        assert re.search(error, one_line_error(run("config", "set", "chat.seed", "2"), 1))
        assert file.read_text() == text


def test_the_file_is_its_owners_and_a_link_stays_one(run: Run, file: Path, tmp_path: Path) -> None:
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


def test_a_place_that_cannot_be_written(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "file").touch()
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(file.parent / "file" / "folder"))
    assert "cannot be written: not a directory; make room" in one_line_error(
        run("config", "set", "seed", "1"), 1
    )


def test_a_write_that_fails_leaves_the_file(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("seed = 1\n")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "cannot be written: no space left" in one_line_error(run("config", "set", "seed", "2"), 1)
    assert file.read_text() == "seed = 1\n"


def test_several_at_once_lose_nothing(start: Start, file: Path) -> None:
    code = (
        "import sys\nfrom edgespec.cli.config import _change\n"
        "for at in range(20): _change((sys.argv[1], 'seed'), str(at))\n"
    )
    commands = ("chat", "generate", "verify")
    processes = [start(name, code=code) for name in commands]
    for process in processes:
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert tomllib.loads(file.read_text()) == {name: {"seed": 19} for name in commands}


def test_reading_settings_needs_no_screen(start: Start, file: Path) -> None:
    file.write_text("threads = 1\n")
    code = "import sys\nfrom edgespec.cli.settings import Settings\nSettings.read()\nprint(*sys.modules)"
    stdout, stderr = start(code=code).communicate(timeout=30)
    assert not stderr
    assert not {"textual", "rich", "numpy", "llama_cpp"} & set(stdout.decode().split()), sys.path
