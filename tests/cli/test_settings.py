"""Settings from the file, the environment and the command line, in increasing precedence, and errors."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.cli.doctor import _settings
from edgespec.cli.help import COMMANDS
from edgespec.cli.options import MODEL_NAMES, SAMPLING_NAMES, every_setting
from edgespec.cli.program import program
from edgespec.cli.settings import VARIABLES, Settings, settings_of, variable_of
from edgespec.errors import CancelledError
from tests.cli.conftest import ROOT, Run, Start, json_of, one_line_error
from tests.cli.settings_places import file as file
from tests.cli.settings_places import own_settings as own_settings
from tests.cli.settings_places import reply


def options_got(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """Return the options that a command receives. The command itself does nothing from now on."""
    got: dict[str, Any] = {}
    command = program.get_command(click.Context(program), name)
    assert command is not None
    monkeypatch.setattr(command, "callback", lambda **options: got.update(options))
    return got


def json_of_failed(run: Run, *words: str) -> dict[str, Any]:
    result = run(*words)
    assert result.exit_code == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


# Strength


@pytest.mark.long
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
    monkeypatch.delenv("EDGESPEC_DRAFT_BRANCHES")
    file.write_text("draft_branches = 3\n")
    run("generate", "hi")
    assert got["draft_branches"] == 3


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
    """The prompts of `tune` and `bench` are always the same, so they reject --remember."""
    file.write_text('remember = true\nseed = 3\nmax_tokens = 2\nmethod = "none"\ntarget = "demo-mlx"\n')
    got = options_got(monkeypatch, name)
    assert run(name).exit_code == 0
    assert (got["target"], got["remember"], got.get("seed", 1)) == ("demo-mlx", False, 1)
    assert got["max_tokens"] > 2
    assert got.get("method", "auto") == "auto"


def test_the_python_api_ignores_settings(file: Path) -> None:
    file.write_text('target = "no such model"\n')
    with edgespec.load(context=256, threads=1, draft="none") as runtime:
        assert runtime.target.name == "demo"


def test_settings_that_the_method_does_not_read_are_left_out(run: Run, file: Path) -> None:
    """On the command line, such an option is an error, but settings apply to all commands."""
    file.write_text("draft_window = 100\ndraft_confidence = 0.3\n")
    assert reply(run, "--method", "suffix", "-n", "2")["method"]["requested"] == "suffix"
    result = run("generate", "--method", "suffix", "--draft-window", "100", "hi")
    one_line_error(result, 2, "draft_window", "suffix", code="option_without_effect")


# What is wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "place", "quoted"),
    [
        ('seed = 1\ntemprature = 1\n', "line 2", "temperature?"),
        ("gpu-layers = 1", "line 1", "gpu_layers?"),
        ("schema = 'a.json'", "line 1", "schema"),
        ("zzz = 1", "line 1", "'zzz'"),
        ("[chta]\nseed = 1", "line 1", "chat?"),
        ("[chat]\n\ntop_q = 1", "line 3", "'top_q'"),
        ("[chat]\nlogit_bias = []", "line 2", "'logit_bias'"),
        ("[doctor]\n", "line 1", "doctor"),
        ("[aliases]\nbig = 'demo'", "line 1", "aliases"),
        ("[pairs]\nbig = 'demo'", "line 1", "pairs"),
        ("context = 'much'", "line 1", "'much'"),
        ("context = 4096.5", "line 1", "4096.5"),
        ("context = true", "line 1", "context"),
        ("context = [1]", "line 1", "(1,)"),
        ("target = 8", "line 1", "target"),
        ("target = 2020-01-01", "line 1", "target"),
        ("[target]\n", "line 1", "{}"),
        ("mmap = 'perhaps'", "line 1", "'perhaps'"),
        ("stop = 3", "line 1", "(3,)"),
        ("stop = ['']", "line 1", "('',)"),
        ("logit_bias = ['5']", "line 1", "logit_bias"),
        ("logit_bias = [5]", "line 1", "logit_bias"),
        ("prefix_cache_disk = -1", "line 1", "prefix_cache_disk"),
        ("prefix_cache_memory = '-4'", "line 1", "prefix_cache_memory"),
        ("memory = 'much'", "line 1", "'much'"),
        ("memory = true", "line 1", "memory"),
        ("temperature = -1", "line 1", "temperature"),
        ("method = 'modle'", "line 1", "'model'?"),
        ("flash_attention = 'of'", "line 1", "'of'"),
        ("chat = 3", "line 1", "'chat'"),
        ("seed = 1\ntarget = demo\n", "line 2, column 10", "invalid value"),
        ("seed = 1\nseed = 2\n", "line 2, column 9", "overwrite"),
        ('seed = 1\nsystem = """\n', "line 2", ""),
        ("seed = " + "[" * 5000, "config.toml", "nested"),
        ("remember" + ".a" * 5000 + " = 1\n", "config.toml", "100 dots"),
        (f"seed = {'9' * 5000}", "config.toml", "digits"),
        ("k" * 5000 + " = 1", "line 1", "k" * 60),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(run: Run, file: Path, text: str, place: str, quoted: str) -> None:
    file.write_text(text)
    result = run("generate", "hi")
    said = one_line_error(result, 1, f"{place}:", quoted, code="configuration_invalid")
    assert said.startswith(str(file))


def test_config_shows_what_is_wrong_in_the_file(run: Run, file: Path) -> None:
    file.write_text("zzz = 1")
    assert one_line_error(run("generate", "hi"), 1) in run("config").stderr


def test_quotes_and_lists_of_one_are_optional(file: Path) -> None:
    file.write_text("context = '4096'\nmmap = 'no'\nstop = '###'\nlogit_bias = '5=-inf'\nmax_loss = '5 %'\n")
    settings = Settings.read()
    assert not settings.problems
    found = {name: each.value for name, each in settings.file[""].items()}
    assert (found["context"], found["mmap"], found["max_loss"]) == (4096, False, 0.05)
    assert (found["stop"], found["logit_bias"]) == (("###",), ((5, float("-inf")),))


def test_a_size_may_be_a_number_of_bytes(run: Run, file: Path) -> None:
    file.write_text("memory = 300_000_000\n")
    assert json_of(run("plan", "--json"))["budget_bytes"] == 300_000_000


def test_a_file_that_is_not_utf8(run: Run, file: Path) -> None:
    file.write_bytes(b"seed = 1\nsystem = 'caf\xe9'\n")
    one_line_error(run("generate", "hi"), 1, f"{file}, line 2:", code="invalid_encoding")
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
        one_line_error(run(*command), 1, file, code="file_not_read")
    file.rmdir()
    os.mkfifo(file)
    one_line_error(run("generate", "hi"), 1, "regular file", code="file_not_read")


@pytest.mark.parametrize(
    ("variable", "value", "quoted", "code"),
    [
        ("EDGESPEC_TEMPRATURE", "1", "EDGESPEC_TEMPERATURE?", "option_unknown"),
        ("EDGESPEC_DATADIR", "/x", "EDGESPEC_DATA_DIR?", "option_unknown"),
        ("EDGESPEC_Q", "1", "EDGESPEC_Q", "option_unknown"),
        ("EDGESPEC_CONTEXT", "much", "'much'", "option_invalid"),
        ("EDGESPEC_MMAP", "maybe", "'maybe'", "option_invalid"),
        ("EDGESPEC_MIN_P", "3", "3.0", "option_invalid"),
    ],
)
def test_a_variable_that_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, quoted: str, code: str
) -> None:
    monkeypatch.setenv(variable, value)
    said = one_line_error(run("generate", "hi"), 1, variable, quoted, code=code)
    assert json_of_failed(run, "config", "--json")["problems"] == [said]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('kv_type = "q9"', "option_invalid"),
        ('target = "nonesuch"', "model_not_found"),
        ('head = "nonesuch"', "head_not_found"),
        ('target = "nonesuch\\n"', "model_not_found"),
        ("learn = true", "option_not_supported"),
    ],
)
def test_an_error_while_loading_names_the_place_of_the_setting(
    file: Path, run: Run, line: str, code: str
) -> None:
    file.write_text(line)
    result = CliRunner().invoke(program, ["generate", "hi"])
    one_line_error(result, 1, f"({line.split()[0]} is set in {file});", code=code)
    option = "--kv-type=q8" if "kv" in line else "--context=no"
    assert str(file) not in one_line_error(run("generate", option, "hi"), 2)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_damaged_model_names_the_setting(file: Path, run: Run, tmp_path: Path, name: str) -> None:
    model = tmp_path / "short.gguf"
    model.write_bytes((ROOT / "models" / f"demo-{name}-q8_0.gguf").read_bytes()[:-1000])
    file.write_text(f'{name} = "{model}"')
    one_line_error(run("generate", "hi"), 1, f"({name} is set in {file})", code="model_file_damaged")


def test_cancelling_is_not_blamed_on_a_setting(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert f"{file}, line 1" in check["finding"]
    assert check["next_step"]
    file.write_text("")
    assert _settings().ok


# What there is


def test_the_options_of_load_and_of_sampling_can_be_set() -> None:
    """All but those that belong to one model."""
    settings = every_setting()
    per_run = {"adapter", "exit_layer", "mmproj"}
    assert {*MODEL_NAMES, *SAMPLING_NAMES, "method", "seed"} - settings.keys() == per_run
    for name in COMMANDS:
        assert settings_of(name).keys() <= settings.keys()


def test_every_variable_of_the_program_is_known() -> None:
    text = "".join(path.read_text("utf-8") for path in (ROOT / "edgespec").rglob("*.py"))
    named = set(re.findall(r"\bEDGESPEC_[A-Z_]*[A-Z]\b", text))
    assert named == {*VARIABLES, "EDGESPEC_TARGET"}
    assert not VARIABLES.keys() & {variable_of(name) for name in every_setting()}


def test_reading_settings_needs_no_screen(start: Start, file: Path) -> None:
    file.write_text("threads = 1\n")
    code = "import sys\nfrom edgespec.cli.settings import Settings\nSettings.read()\nprint(*sys.modules)"
    stdout, stderr = start(code=code).communicate(timeout=120)
    assert not stderr
    assert not {"textual", "rich", "numpy", "llama_cpp"} & set(stdout.decode().split()), sys.path
