"""Colour themes: the built-in ones, the user's files, and errors in those files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.color import Color

from edgespec.errors import ConfigurationError, OptionError
from edgespec.tui.preferences import Preferences
from edgespec.tui.themes import HIGH_CONTRAST, THEMES, find_theme, theme_names
from tests.tui.driving import driving
from tests.tui.scripted import ScriptedRuntime, loading


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's themes."""
    monkeypatch.setenv("EDGESPEC_CONFIG_DIR", str(tmp_path / "config"))
    themes = tmp_path / "config" / "themes"
    themes.mkdir(parents=True)
    return themes


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, as defined by WCAG."""

    def luminance(colour: str) -> float:
        parts = [value / 255 for value in Color.parse(colour).rgb]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", THEMES)
def test_text_can_be_read(name: str) -> None:
    theme = THEMES[name]
    least = 7.0 if theme is HIGH_CONTRAST else 4.0
    for colour in (theme.foreground, theme.primary, theme.success, theme.warning, theme.error):
        assert contrast(str(colour), str(theme.background)) >= least, colour
    assert contrast(theme.variables["muted"], str(theme.background)) >= least


def test_a_theme_changes_only_what_its_file_names(folder: Path) -> None:
    (folder / "mine.toml").write_text('dark = false\nprimary = "#123456"\n[variables]\nmuted = "gray"\n')
    theme = find_theme("mine")
    assert (theme.primary, theme.dark, theme.background) == ("#123456", False, THEMES["light"].background)
    assert theme.variables["muted"] == "gray"
    assert theme.variables["code"] == THEMES["light"].variables["code"]
    assert theme_names() == ["dark", "light", "high-contrast", "mine"]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('dark = true\nprimry = "#123456"', 2, "primary"),
        ('\n\nprimary = "#12345"', 3, "#12345"),
        ("primary = 5", 1, "5"),
        ('[variables]\nblock-cursor-text-style = "bolt"', 2, "'bolt', which is not a text style"),
        ('[variables]\nblock-cursor-text-style = "bold; color: red"', 2, "not a text style"),
        ('[variables]\nblock-cursor-text-style = "bold none"', 2, "not a text style"),
        ("[variables]\nblock-cursor-text-style = 5", 2, "5, which is not a text style"),
        ('dark = "yes"', 1, "true or false"),
        ('[variables]\nmuted = "#fff"\nmutedd = "#fff"', 3, "muted"),
        ('[variables]\nmuted = "no colour"', 2, "no colour"),
        ('variables = "red"', 1, "[variables]"),
        ("primary = \n", 1, ""),
    ],
)
def test_a_bad_file_is_refused_with_its_line(folder: Path, text: str, line: int, said: str) -> None:
    (folder / "bad.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        find_theme("bad")
    assert f"bad.toml, line {line}" in caught.value.what
    assert said in f"{caught.value.what} {caught.value.next_step}"


@pytest.mark.parametrize("name", ["drak", "../dark", "", "x" * 100])
def test_an_unknown_theme_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(OptionError):
        find_theme(name)


async def test_themes_are_listed_chosen_and_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "mine.toml").write_text('background = "#102030"\n')
    (folder / "bad.toml").write_text("primry = 1\n")
    async with driving(loading(ScriptedRuntime()), tmp_path, size=(100, 30)) as d:
        await d.say("/theme")
        await d.said("dark (in use), light, high-contrast, bad, mine")
        await d.say("/theme mine")
        await d.pilot.pause(0.1)
        assert d.app.theme == "user-mine"
        assert d.chat.styles.background.hex == "#102030"
        (folder / "mine.toml").write_text('background = "#112233"\n')
        await d.say("/theme mine")
        await d.pilot.pause(0.1)
        assert d.chat.styles.background.hex == "#112233"
        await d.say("/theme bad")
        await d.said("bad.toml, line 1")
        d.chat.prompt.clear()
        assert d.app.theme == "user-mine"
        await d.say("/theme high-contrast")
        await d.pilot.pause(0.1)
        assert d.chat.styles.background.hex == "#000000"
        await d.press("f8")
        await d.pilot.pause(0.1)
        assert d.app.theme == "edgespec-light"
        await d.say("/theme mine")
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        assert d.app.theme == "user-mine"
    (folder / "mine.toml").unlink()
    async with driving(loading(ScriptedRuntime()), tmp_path) as d:
        assert d.app.theme == "edgespec-dark"
        await d.sees("no theme 'mine'")


def test_earlier_preferences_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "preferences.json"
    path.write_text(json.dumps({"light": True, "details": True, "theme": "light"}))
    assert Preferences.read(path).theme == "light"
    path.write_text(json.dumps({"light": True, "sidebar": 1}))
    assert Preferences.read(path) == Preferences(theme="light")
    path.write_text(json.dumps({"theme": True}))
    assert Preferences.read(path) == Preferences()
