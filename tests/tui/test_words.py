"""Parts of the chat that need no screen: commands, settings, history, numbers, layouts and preferences."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from textual.content import Content

import edgespec
from edgespec.chat.saved_chat import Setting
from edgespec.cli.chat import command
from edgespec.errors import OptionError
from edgespec.loading.speed_prediction import SpeedPrediction
from edgespec.options.load_options import LOAD_OPTIONS
from edgespec.options.reply_options import REPLY_OPTIONS
from edgespec.store.catalogue import load_catalogue
from edgespec.system.files import format_bytes
from edgespec.tui import numbers
from edgespec.tui.commands import table
from edgespec.tui.open_chat import OpenChat, code_blocks
from edgespec.tui.preferences import Preferences
from edgespec.tui.screens.models import details_text, row_text
from edgespec.tui.settings import SCHEMA, SETTINGS, accepted, default_text, parse, setting_named, shown
from edgespec.tui.texts import _with_commands, sentences, show_rows
from edgespec.tui.widgets.details import StatusFacts, details_content, wrapped
from edgespec.tui.widgets.messages import pairs_content
from edgespec.tui.widgets.prompt import History
from tests.tui.scripted import METHOD, ScriptedRuntime, as_runtime, made_up_stats


def test_every_command_has_a_name_of_its_own() -> None:
    names = [name for command in table.COMMANDS for name in (command.name, *command.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [
        ("/help", "help", ""),
        ("/?", "help", ""),
        ("/SET temperature 0.5", "set", "temperature 0.5"),
        ("/bye  ", "quit", ""),
        ("/system Be brief.\nAnd kind.", "system", "Be brief.\nAnd kind."),
    ],
)
def test_commands_are_read(text: str, name: str, argument: str) -> None:
    typed = table.read(text)
    assert typed is not None
    assert typed.command is not None
    assert (typed.command.name, typed.argument) == (name, argument)


@pytest.mark.parametrize("text", ["/etc/hosts", " /help", "/* C */", "//", "/", "hello", "/usr/bin is full"])
def test_other_text_is_a_message(text: str) -> None:
    assert table.read(text) is None


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("regne", "regen"),
        ("hlep", "help"),
        ("sho", "show"),
        ("exti", "quit"),
        ("color", "colours"),
        ("xyzzy", ""),
    ],
)
def test_the_nearest_command(typed: str, name: str) -> None:
    assert table.nearest(typed) == name


def test_completion() -> None:
    assert table.completion("/reg") == "en"
    assert table.completion("/") == ""
    assert table.completion("/regen") == ""
    assert table.completion("reg") == ""


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("temp", "0", 0.0),
        ("top-k", "40", 40),
        ("num_predict", "128", 128),
        ("repeat_penalty", "1.1", 1.1),
        ("seed", "42", 42),
        ("stop", "END, \\n\\n", ["END", "\n\n"]),
        ("stop", "a\\cb, \\sc", ["a,b", " c"]),
        ("method", "Model+NGram", "model+ngram"),
        ("acceptance", "Rejection", "rejection"),
    ],
)
def test_settings_are_read_and_shown_again(name: str, text: str, value: Setting) -> None:
    name = setting_named(name)
    assert parse(name, text) == value
    assert parse(name, shown(value)) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("temperature", "warm"),
        ("top_k", "1.5"),
        ("top_p", "1.1"),
        ("max_tokens", "0"),
        ("seed", "-1"),
        ("seed", "99999999999999999999"),
        ("draft_length", "65"),
        ("stop", "a,,b"),
        ("method", "model ngram;"),
        ("acceptance", "maybe"),
    ],
)
def test_invalid_settings_raise_a_one_line_error(name: str, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(setting_named(name), text)
    assert "\n" not in str(caught.value)
    assert caught.value.next_step or " must be " in caught.value.what


@pytest.mark.parametrize("text", ["a, b", "\\", "\\n", " x ", "tab\tnew\nline", "\\\\n", "   "])
def test_any_stop_text_survives_being_shown(text: str) -> None:
    assert parse("stop", shown([text, "END"])) == [text, "END"]


def test_the_chat_reads_every_setting_that_its_command_line_offers() -> None:
    offered = {name for parameter in command.params if (name := parameter.name) in REPLY_OPTIONS}
    assert offered - LOAD_OPTIONS.keys() == {SCHEMA, *SETTINGS} - LOAD_OPTIONS.keys()


def test_every_setting_has_a_default_that_can_be_shown() -> None:
    with edgespec.load("demo", "none", context=256) as runtime:
        assert all(default_text(name, runtime, {}) for name in SETTINGS)


@pytest.mark.parametrize(
    ("settings", "draft_length"),
    [
        ({}, "up to 16"),
        ({"method": "none"}, "0"),
        ({"method": "suffix"}, "4"),
        ({"method": "lowbit"}, "up to 16"),
    ],
)
def test_every_setting_shows_the_value_that_is_used(settings: dict[str, Setting], draft_length: str) -> None:
    runtime = as_runtime(ScriptedRuntime(context_tokens=65536))
    defaults = {name: default_text(name, runtime, settings) for name in SETTINGS}
    assert "default" not in defaults.values()
    assert defaults["draft_length"] == draft_length
    assert (defaults["method"], defaults["acceptance"]) == ("auto", "invariant")
    assert (defaults["max_tokens"], defaults["seed"], defaults["stop"]) == ("8,192", "random", "none")


def test_a_saved_chats_settings_are_checked() -> None:
    kept, problems = accepted({"temperature": 0.5, "top_p": 7, "warp": 9, "stop": ["x"]})
    assert kept == {"temperature": 0.5, "stop": ["x"]}
    assert len(problems) == 2


def test_history_walks_back_and_forth_and_keeps_the_unsent_text() -> None:
    history = History()
    history.seed(["one", "two", "two", " "])
    assert history.older("draft") == "two"
    assert history.older("two") == "one"
    assert history.older("one") is None
    assert history.newer() == "two"
    assert history.newer() == "draft"
    assert history.newer() is None


def test_numbers_read_well() -> None:
    assert numbers.rate(212.4) == "212 tok/s"
    assert numbers.rate(3.14) == "3.1 tok/s"
    assert numbers.rate(0.0312) == "0.031 tok/s"
    assert numbers.rate(None) == "– tok/s"
    assert [numbers.seconds_text(s) for s in (None, 0.0047, 0.35, 12.3, 75)] == [
        "–", "4.7 ms", "0.35 s", "12 s", "1 m 15 s",
    ]  # fmt: skip
    assert numbers.parameters_text(11_540_736) == "11.5 M parameters"
    assert numbers.parameters_text(70_600_000_000) == "70.6 B parameters"
    assert numbers.count(1, "message") == "1 message"
    assert numbers.bar(0.5, 4) == "██  "
    assert numbers.bar(7, 3) == "███"
    assert len(numbers.bar(0.33, 10)) == 10


def test_ages_read_well() -> None:
    now = datetime(2025, 6, 15, 12, tzinfo=UTC)
    ages = [timedelta(seconds=5), timedelta(minutes=7), timedelta(hours=3)]
    assert [numbers.ago(now - age, now) for age in ages] == ["now", "7 min", "3 h"]
    assert numbers.ago(now - timedelta(days=3), now) == "Thu"
    assert numbers.ago(now - timedelta(days=30), now) == "16 May"
    assert numbers.ago(now - timedelta(days=400), now).endswith("2024")


@pytest.mark.parametrize("width", [20, 32, 40, 60, 78, 120])
def test_the_status_is_never_cut(width: int) -> None:
    facts = StatusFacts(
        speed_up="speed-up 1.6x",
        writing=True,
        tokens_per_second=312.5,
        acceptance_rate=0.71,
        context_used_tokens=31_234,
        context_tokens=32_768,
        memory_bytes=64 * 1024**3,
    )
    lines = wrapped(facts.segments(), width).plain.splitlines()
    assert " · ".join(lines) == " · ".join(text for text, _ in facts.segments())
    assert all(len(line) <= width for line in lines)
    if width >= 78:
        assert len(lines) == 1
    if width == 40:
        assert len(lines) <= 3


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [(9_999, "9,999"), (32_768, "32.8k"), (999_499, "999k"), (999_999, "1M"), (1_048_576, "1.05M")],
)
def test_long_contexts_are_short_in_the_status_line(tokens: int, shown: str) -> None:
    assert (f"context 0/{shown}", "") in StatusFacts(context_tokens=tokens).segments()


def test_the_status_line_shows_no_numbers_before_they_are_known() -> None:
    assert StatusFacts().segments() == [("starting", "")]


def test_parameters_just_below_a_unit_are_rounded_up_to_it() -> None:
    texts = [numbers.parameters_text(count) for count in (999_400_000, 999_600_000, 1_540_000_000)]
    assert texts == ["999 M parameters", "1 B parameters", "1.54 B parameters"]


def test_a_nearly_full_context_is_marked() -> None:
    assert StatusFacts(context_used_tokens=900, context_tokens=1024).context_nearly_full
    assert not StatusFacts(context_used_tokens=100, context_tokens=1024).context_nearly_full


@pytest.mark.parametrize("width", [20, 34, 60])
def test_details_fit_their_width(width: int) -> None:
    text = details_content(
        made_up_stats(23), width, method=METHOD, reply=None, rates=[], memory_bytes=1, loss_limits=None
    ).plain
    told = text[text.index("This reply") :].splitlines()
    assert max(Content(line).cell_length for line in told) <= max(width, 32)
    assert "92%" in text


def test_pairs_wrap_with_a_hanging_indent_or_stack() -> None:
    rows = [("label", "one two three four"), ("", "whole line")]
    assert pairs_content(rows, 16, label_style="").plain.splitlines()[:2] == [
        "label  one two",
        "       three",
    ]
    stacked = pairs_content(rows, 16, label_style="", stack_below=12).plain.splitlines()
    assert stacked == ["label  one two", "  three four", "whole line"]


def test_code_blocks_are_found() -> None:
    text = "x\n```sh\nls\n```\ny\n\n    indented\n\n~~~\nopen"
    assert code_blocks(text) == ["ls\n", "indented\n", "open"]


def test_preferences_are_saved_and_broken_ones_ignored(tmp_path: Path) -> None:
    path = tmp_path / "new" / "preferences.json"
    Preferences(theme="light", sidebar=True).write(path)
    assert Preferences.read(path) == Preferences(theme="light", sidebar=True)
    path.write_text(json.dumps({"light": "yes", "details": True, "else": 1}))
    assert Preferences.read(path) == Preferences(details=True)
    path.write_text("{")
    assert Preferences.read(path) == Preferences()
    Preferences().write(Path("/dev/null/preferences.json"))


def test_context_that_can_still_grow_shows_both_sizes() -> None:
    said = {
        most: dict(show_rows(as_runtime(ScriptedRuntime(context_tokens=most)), OpenChat(), METHOD, None))[
            "context"
        ]
        for most in (1024, 8192)
    }
    assert said == {1024: "1,024 tokens", 8192: "8,192 tokens; memory for 1,024 so far"}


def test_show_says_what_the_memory_is() -> None:
    with edgespec.load("demo", "none", threads=1, context=256, measure_costs=False) as runtime:
        memory = dict(show_rows(runtime, OpenChat(), METHOD, None))["memory"]
        assert runtime.plan is not None
        planned = format_bytes(runtime.plan.total_bytes)
    assert re.match(rf"[\d.]+ [MG]iB in use; planned: up to {re.escape(planned)}(,|$)", memory)


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_a_speed_from_a_busy_machine_is_marked_in_the_list_of_models(is_disturbed: bool) -> None:
    speed = SpeedPrediction(20.0, {}, 1.0, is_disturbed=is_disturbed)
    model = edgespec.AvailableModel(
        reference="large",
        place="hub",
        parameters=10**9,
        size_bytes=10**9,
        draft="",
        download_bytes=0,
        needed_bytes=10**9,
        fits=True,
        speed=speed,
    )
    row = row_text(model, 100, is_used=False, is_default=False, download=None).plain
    details = details_text(model, None, is_used=False, plan=None, drafters=None, is_downloading=False).plain
    assert ("20 tok/s?" in row) == ("other programs were busy" in details) == is_disturbed
    assert "?" not in details


@pytest.mark.parametrize("is_gated", [False, True])
def test_the_licence_of_a_gated_model_must_be_accepted_first(is_gated: bool) -> None:
    entry = replace(load_catalogue().entries[0], gguf_repository="some/model", is_gated=is_gated)
    model = edgespec.AvailableModel(
        reference="hf:some/model",
        place="search",
        parameters=10**9,
        size_bytes=10**9,
        draft="",
        download_bytes=10**9,
        needed_bytes=10**9,
        fits=True,
        speed=None,
        entry=entry,
    )
    details = details_text(model, None, is_used=False, plan=None, drafters=None, is_downloading=False).plain
    terms = " First, accept its licence at huggingface.co/some/model."
    assert (f"in the background.{terms}" in details) == is_gated


# Parts of the package whose texts the chat never shows, because only other commands or Python use them.
NOT_IN_CHAT = re.compile(
    r"(bench/(?!race\.py)|cli/|losslessness/|server/|train/|loading/(prepare/|recommendation|streamed_blocks)"
    r"|store/prepared_|cluster/(weight_cache|worker_server)|backends/(llamacpp/quantise|mlx/draft_trainer)"
    r"|options/(reply_options|settings)|methods/\w+/__init__|chat/prompt|system/installation|tui/browser)"
)
# Commands of other programs, and edgespec commands without a counterpart in the chat. They work in another
# terminal while the chat is open. The last two options belong to `edgespec worker`.
ELSEWHERE = re.compile(
    r"`(?!edgespec|--)[\w.-]+ [^`]*`"
    r"|`edgespec (prepare|doctor|delete-data|generate --raw|verify|models alias)\b[^`]*` in another terminal"
    r"|`edgespec (serve|worker)\b[^`]*`"
    r"|--listen|--i-trust-this-network"
)
# edgespec commands and command line options, which are dead ends in the chat.
DEAD_END = re.compile(
    r"\bedgespec (chat|run|bench|config|generate|models|plan|race|recommend|tune|verify)\b"
    r"|(?<![\w-])--[a-z][a-z-]+"
)


def raised_texts(shown: Callable[[str], bool] = lambda module: True) -> list[str]:
    """Return the texts of all errors and notes in modules accepted by `shown`, and the catalogue's notes."""
    texts, module = [], ""
    for line in Path("tests/messages.txt").read_text().splitlines():
        if line[:1].strip():
            module = line
        elif line.strip() and shown(module):
            texts.append(line.strip())
    return [*texts, *(entry.notice for entry in load_catalogue().entries)]


def screen_texts() -> Iterator[str]:
    """The texts in the chat's own code, without docstrings."""
    for path in Path("edgespec/tui").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        # The table in `texts.py` contains the advice that it replaces.
        if path.name != "texts.py" and not NOT_IN_CHAT.match(f"tui/{path.name}"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                    # Single words are arguments of other programs.
                    yield from [node.value] if len(node.value.split()) > 1 else []


def dead_ends(texts: Iterable[str]) -> list[str]:
    """Return the texts that mention an edgespec command or a command line option in the chat."""
    # Keep the backticks, which show where a command ends.
    left = ((text, ELSEWHERE.sub("", _with_commands(text))) for text in texts)
    return [text for text, shown in left if DEAD_END.search(shown)]


def test_texts_name_the_chats_own_way_instead_of_the_command_line() -> None:
    """Advice such as "use `edgespec models show`" is a dead end within the chat."""
    assert not dead_ends(raised_texts(lambda module: not re.match(f"{NOT_IN_CHAT.pattern}|tui/", module)))


def test_the_chats_own_texts_name_no_other_command() -> None:
    # This error is printed after the chat has ended.
    after_the_end = "report the traceback above, and run `edgespec chat --resume` to continue"
    assert dead_ends(screen_texts()) == [after_the_end]


@pytest.mark.parametrize("text", ["quit and run edgespec tune", "run `edgespec plan X`", "use --raw instead"])
def test_dead_ends_are_found(text: str) -> None:
    assert dead_ends([text])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("worse beyond that, so consider --context 8192", "so consider /context 8192."),
        (
            "did you mean x? `edgespec models show TARGET` lists the heads for a model",
            "/set head lists the heads for a model.",
        ),
        ("download it with `edgespec models pull qwen3:4b`", "Download it with /model qwen3:4b."),
        ("omit --draft-branches for this model", "Type /set draft-branches default for this model."),
        ("choose another model, or --mmproj none", "Choose another model, or /set mmproj none."),
        (
            "load its model with --target 8b-q4, and the head with --head 8b-head",
            "Load its model with /model 8b-q4, and the head with /set head 8b-head.",
        ),
        (
            "load the model with --method mtp (the option `method`)",
            "Load the model with /set method mtp (the option method).",
        ),
        (
            "it ignores system; to use them, set options such as --system",
            "to use them, set options such as /system.",
        ),
        ("`edgespec recommend` suggests larger ones", "/model suggests larger ones."),
        ("`edgespec config` shows all settings", "/show shows all settings."),
        ("if you trust it, `edgespec chat --trust` skips this", "/set trust on skips this."),
        ("--exact prevents that", "/set exactness bits prevents that."),
    ],
)
def test_advice_in_the_chat(text: str, shown: str) -> None:
    assert shown in sentences(text)
    assert "edgespec" not in sentences(text)


def test_commands_without_a_counterpart_in_the_chat_run_in_another_terminal() -> None:
    """Their own options keep their names, even if the chat has a setting of this name."""
    said = sentences("use another model, or `edgespec generate --raw --context 100`")
    assert said == "Use another model, or edgespec generate --raw --context 100 in another terminal."
    assert sentences("start `edgespec worker` there") == "Start edgespec worker there."
