"""`--preset`: the settings of a preset, the options that override them, and errors in preset files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.cli.options import preset_option
from edgespec.errors import ConfigurationError
from edgespec.options.presets import Preset, preset_names, preset_path, read_preset, write_preset
from tests.cli.conftest import Run, one_line_error
from tests.cli.settings_places import file as file
from tests.cli.settings_places import own_settings as own_settings
from tests.cli.settings_places import reply
from tests.cli.test_chat import Opened
from tests.cli.test_chat import opened as opened
from tests.raising import raises

pytestmark = pytest.mark.usefixtures("own_settings")


def write(text: str, name: str = "reviewer") -> Path:
    path = preset_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.mark.long
def test_a_preset_overrides_the_settings_and_the_command_line_overrides_the_preset(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('seed = 5\nmethod = "none"\n')
    monkeypatch.setenv("EDGESPEC_SEED", "6")
    write('target = "demo-draft"\nseed = 7\nmax_tokens = 3\n')
    found = reply(run, "--preset", "reviewer")
    assert (found["target"], found["seed"], len(found["tokens"])) == ("demo-draft", 7, 3)
    assert found["method"]["requested"] == "none"
    assert reply(run, "--preset", "reviewer", "--seed", "8")["seed"] == 8


def test_the_chat_opens_with_the_preset(run: Run, opened: Opened) -> None:
    write('system = "Be brief."\ntarget = "8b-q4"\ntemperature = 0.2\nstop = ["END"]\n')
    opened.end = opened.end._replace(resume="last")
    result = run("chat", "--preset", "reviewer", "--top-k", "5")
    assert (opened.options["system"], opened.options["models"].target) == ("Be brief.", "8b-q4")
    assert opened.options["settings"] == {"temperature": 0.2, "stop": ["END"], "top_k": 5}
    assert result.stdout.rstrip().endswith("chat --preset reviewer --resume")


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ('system = """\nBe\nbrief."""\ntemprature = 1\n', 4, "temperature?"),
        ("seed = 1\ntop_p = 2\n", 2, "top_p"),
        ("seed = 1\n\nsystem = 3\n", 3, "system"),
        ("seed = \n", 1, "invalid value"),
        ("[chat]\nseed = 1\n", 1, "'chat'"),
    ],
)
def test_what_is_wrong_in_a_preset(run: Run, text: str, line: int, problem: str) -> None:
    path = write(text)
    result = run("generate", "--preset", "reviewer", "Hi")
    one_line_error(result, 1, f"{path}, line {line}", problem, code="configuration_invalid")


def test_missing_presets(run: Run) -> None:
    one_line_error(run("generate", "--preset", "reviewer", "Hi"), 2, "create the", code="option_invalid")
    write("seed = 1\n")
    one_line_error(run("generate", "--preset", "reviewr", "Hi"), 2, "reviewer?", code="option_invalid")
    one_line_error(run("generate", "--preset", "../x", "Hi"), 2, "preset", code="option_invalid")


def test_an_error_caused_by_a_preset_names_its_file(run: Run) -> None:
    path = write('target = "no-such-model-anywhere"\n')
    one_line_error(run("generate", "--preset", "reviewer", "Hi"), 1, str(path), code="model_not_found")


def test_a_preset_keeps_all_values() -> None:
    settings = {
        "system": 'Say "hi" \\n\n\tand """quote""" \x7f\n\nEnd\\',
        "temperature": 0.25,
        "max_tokens": 7,
        "stop": ("a\nb", "c"),
        "target": "8b-q4",
    }
    write_preset(Preset("one", settings))
    assert read_preset("one").settings == settings
    write_preset(Preset("Two", {"seed": 1}))
    assert preset_names() == ["one", "Two"]


def test_a_preset_that_could_not_be_read_again_is_not_written() -> None:
    write_preset(Preset("long", {"system": "x" * 65_000}))
    assert read_preset("long").settings["system"] == "x" * 65_000
    with raises(ConfigurationError, "65,548", "65,536", code="input_too_large"):
        write_preset(Preset("long", {"system": "x" * 65_536}))
    assert read_preset("long").settings["system"] == "x" * 65_000


def test_the_option_completes_names() -> None:
    write("seed = 1\n")

    @preset_option
    def command() -> None: ...

    option = command.__click_params__[0]  # type: ignore[attr-defined]
    assert [item.value for item in option.shell_complete(None, "rev")] == ["reviewer"]
