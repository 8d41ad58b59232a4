"""`edgespec generate`: the contract for scripts, attached files, and reasoning."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

import edgespec
from edgespec import ReplyStream
from edgespec.api.runtime import Runtime
from edgespec.cli import generate, screen
from tests.cases import first
from tests.cli.conftest import ROOT, Run, Start, json_of, one_line_error
from tests.forced import Begin

QUESTION = "How do I list files by size?"
STATS = {
    "prompt_tokens", "cached_prompt_tokens", "generated_tokens", "target_passes", "drafted_tokens",
    "accepted_tokens", "accepted_per_position", "acceptance_rate", "tokens_per_target_pass", "draft_seconds",
    "verify_seconds", "rollback_seconds", "sampling_seconds", "overhead_seconds", "prefill_seconds",
    "growth_seconds", "ttft_seconds", "tpot_seconds", "tokens_per_second", "speedup_estimate",
    "draft_weight_bytes",
    "draft_kv_bytes", "draft_other_bytes", "peak_memory_bytes",
}  # fmt: skip


def answer(run: Run, *args: str, **settings: Any) -> dict[str, Any]:
    return json_of(run("generate", "--json", "--seed", "7", "-n", "24", *args, **settings))


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    """The reply to QUESTION, once it was generated."""
    return []


@pytest.fixture
def plain(run: Run, made: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply to QUESTION without other options, generated once."""
    if not made:
        made.append(answer(run, QUESTION))
    return made[0]


def test_json_holds_the_contract(plain: dict[str, Any]) -> None:
    reply = plain
    keys = {
        "text",
        "reasoning",
        "answer",
        "tokens",
        "finish_reason",
        "seed",
        "target",
        "draft",
        "heads",
        "method",
        "exactness",
        "stats",
    }
    assert keys == reply.keys()
    assert reply["stats"].keys() >= STATS
    assert reply["method"].keys() == {
        "requested", "effective", "reason", "note", "gain", "gain_uncertainty", "loss_limits",
    }  # fmt: skip
    assert (reply["target"], reply["draft"], reply["seed"]) == ("demo", "demo-draft", 7)
    assert reply["finish_reason"] in ("stop", "length")
    assert 0 < len(reply["tokens"]) <= 24


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "requested", "effective"),
    [
        ([], "auto", "bits"),
        (["--exact"], "bits", "bits"),
        (["--exactness", "off"], "off", "rounding"),
        (["--acceptance", "rejection"], "auto", "rounding"),
        (["--acceptance", "rejection", "--temperature", "0"], "auto", "bits"),
    ],
)
def test_json_says_whether_replies_are_identical(
    run: Run, options: list[str], requested: str, effective: str
) -> None:
    exactness = answer(run, "--temperature", "0.8", "--draft", "none", *options, QUESTION)["exactness"]
    assert (exactness["requested"], exactness["effective"]) == (requested, effective)
    assert ("identical" if effective == "bits" else "can differ") in exactness["reason"]
    assert bool(exactness["widths"]) == (effective == "bits")
    assert set(exactness) == {"requested", "effective", "reason", "widths", "expected_speed"}


def test_the_text_is_the_json_text_and_ends_with_a_newline(run: Run, plain: dict[str, Any]) -> None:
    result = run("generate", "--seed", "7", "-n", "24", QUESTION)
    assert result.exit_code == 0
    assert result.stdout == plain["text"].removesuffix("\n") + "\n"
    assert result.stderr == "", "in a pipe there is nothing but the reply"


@pytest.mark.parametrize("temperature", first(["0.8", "0", "1.2"]))
def test_every_method_gives_the_same_tokens(run: Run, temperature: str) -> None:
    said = []
    for method, length in [("none", "1"), ("model", "3"), ("ngram", "5"), ("model+ngram", "8")]:
        options = ["--temperature", temperature, "--method", method, "--draft-length", length]
        said.append(answer(run, *options, QUESTION)["tokens"])
    assert said == [said[0]] * 4


@pytest.mark.long
def test_the_context_grows_unless_all_of_it_is_taken_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.loading.load_request.INITIAL_CONTEXT_TOKENS", 256)
    long = "Repeat: " + "tar -xzf archive.tar.gz " * 15
    grown = answer(run, long)
    whole = answer(run, "--reserve-full-context", long)
    assert grown["tokens"] == whole["tokens"]
    assert grown["stats"]["growth_seconds"] > 0.0 == whole["stats"]["growth_seconds"]


@pytest.mark.long
@pytest.mark.parametrize("args", [["-"], []])
def test_the_prompt_may_come_from_stdin(run: Run, plain: dict[str, Any], args: list[str]) -> None:
    assert answer(run, *args, input=QUESTION + "\n")["tokens"] == plain["tokens"]


def test_no_prompt_on_a_terminal_is_wrong_usage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "is_terminal", lambda stream: True)
    assert one_line_error(run("generate"), 2).startswith("no prompt was given")


def test_an_unquoted_prompt_says_so(run: Run) -> None:
    one_line_error(run("generate", "list", "files"), 2, "quotes", code="option_invalid")


def test_stdin_that_is_no_text(run: Run) -> None:
    one_line_error(run("generate", "-", input=b"ab\xff"), 2, "byte 3", code="invalid_encoding")


def test_unicode_goes_in_and_out(run: Run) -> None:
    reply = answer(run, "--raw", "Grüße 😀 漢字")
    assert reply["stats"]["prompt_tokens"] > 3


@pytest.mark.long
def test_a_system_prompt_is_part_of_the_prompt(run: Run, plain: dict[str, Any]) -> None:
    instructed = answer(run, "--system", "Be brief.", QUESTION)
    assert instructed["stats"]["prompt_tokens"] > plain["stats"]["prompt_tokens"]


def test_raw_leaves_the_template_out(run: Run, plain: dict[str, Any]) -> None:
    assert answer(run, "--raw", QUESTION)["stats"]["prompt_tokens"] < plain["stats"]["prompt_tokens"]


@pytest.mark.long
def test_a_model_without_a_chat_template_says_that_it_only_continues_the_prompt(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "template", None)
    said = run("generate", "-n", "4", QUESTION).stderr
    assert said.count("has no chat template") == 1
    assert "no chat template" not in run("generate", "-n", "4", "--raw", QUESTION).stderr


def test_stop_texts_end_the_reply(run: Run, plain: dict[str, Any]) -> None:
    text = plain["text"]
    stopped = answer(run, "--stop", "never said", "--stop", text[5:12], QUESTION)
    assert stopped["text"] == text[:5]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.long
def test_a_schema_file_constrains_the_answer(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}', "utf-8")
    reply = answer(run, "--schema", str(schema), "--method", "grammar", QUESTION)
    assert json.loads(reply["text"])["n"] == 7
    assert reply["method"]["effective"] == "grammar"
    assert 0 < reply["stats"]["accepted_tokens"] == reply["stats"]["drafted_tokens"]


@pytest.mark.long
def test_a_regex_a_grammar_and_choices_constrain_the_answer(run: Run, tmp_path: Path) -> None:
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "a" /[0-9]{2}/', "utf-8")
    assert answer(run, "--choice", "yes", "--choice", "no", QUESTION)["text"] in ("yes", "no")
    assert re.fullmatch(r"\d{3}", answer(run, "--regex", r"[0-9]{3}", QUESTION)["text"])
    assert re.fullmatch(r"a\d\d", answer(run, "--grammar", str(grammar), QUESTION)["text"])


def test_log_probabilities_are_part_of_the_json_object(run: Run) -> None:
    reply = answer(run, "--logprobs", "2", QUESTION)
    assert [each["token"] for each in reply["logprobs"]] == reply["tokens"]
    first = reply["logprobs"][0]
    assert first.keys() == {"token", "text", "logprob", "top"}
    assert len(first["top"]) == 2
    assert first["top"][0].keys() == {"token", "text", "logprob"}
    assert "--logprobs needs --json" in run("generate", "--logprobs", "2", QUESTION).stderr


@pytest.mark.parametrize(
    ("args", "quoted", "code"),
    [
        (("--schema", "missing.json"), "'missing.json'", "file_not_read"),
        (("--schema", '{"type": "object"}'), "not JSON", "constraint_invalid"),
        (("--schema", "bad.json"), "line 1, column 13", "constraint_invalid"),
        (("--schema", "list.json"), "JSON object", "constraint_invalid"),
        (("--regex", "(a"), "unclosed group", "constraint_invalid"),
        (("--adapter", "bad.json=loud"), "'loud'", "option_invalid"),
        (("--regex", "a", "--choice", "b"), "regex and choice", "option_conflict"),
    ],
)
def test_options_that_are_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], quoted: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"type": "a"')
    Path("list.json").write_text("[1]")
    one_line_error(run("generate", *args, QUESTION), 2, quoted, code=code)


@pytest.mark.long
def test_logit_bias_forbids_a_token(run: Run) -> None:
    first = answer(run, "--temperature", "0", QUESTION)["tokens"][0]
    assert answer(run, "--temperature", "0", "--logit-bias", f"{first}=-inf", QUESTION)["tokens"][0] != first


def test_a_tree_of_drafts_changes_nothing(run: Run, plain: dict[str, Any]) -> None:
    tree = answer(run, "--draft-branches", "3,2", "--draft-confidence", "0.1", "--method", "model", QUESTION)
    assert tree["tokens"] == plain["tokens"]


@pytest.mark.long
def test_a_path_with_spaces_and_a_draft_that_is_the_target(
    run: Run, plain: dict[str, Any], tmp_path: Any
) -> None:
    path = tmp_path / "a b ü" / "mödel 😀.gguf"
    path.parent.mkdir()
    path.write_bytes((ROOT / "models" / "demo-target-q8_0.gguf").read_bytes())
    reply = answer(run, "--target", str(path), "--draft", str(path), "--method", "model", "-n", "9", QUESTION)
    assert reply["stats"]["acceptance_rate"] == 1.0
    assert reply["tokens"] == plain["tokens"][:9]


def test_no_draft(run: Run) -> None:
    reply = answer(run, "--draft", "none", QUESTION)
    assert reply["draft"] is None
    assert reply["method"]["effective"] in ("suffix", "none")


def test_a_terminal_gets_notes_and_a_summary(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    notes = run("generate", "-n", "8", "--seed", "3", "--method", "model+suffix", QUESTION).stderr
    assert "model: demo -> " in notes
    assert "draft model: demo-draft -> " in notes
    assert "demo" in notes
    assert "8 tokens, " in notes
    assert "seed 3" in notes
    assert notes.rstrip().endswith("\x1b[2mmodel+suffix: as requested\x1b[0m")
    assert "\x1b[2m" in notes


def test_each_notice_is_on_its_own_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    notes = run("generate", "-n", "4", "--draft-window", "24", "--context", "512", QUESTION).stderr
    (line,) = (line for line in notes.splitlines() if "sees only the first 4 and the last 24" in line)
    assert " · " not in line


def test_the_error_names_the_head_that_fits(run: Run) -> None:
    result = run("generate", "--target", "demo-mlx", "--head", "demo-head", QUESTION)
    one_line_error(result, 1, "--head demo-mlx-head", code="head_mismatch")


@pytest.mark.long
@pytest.mark.parametrize("head", ["demo-head", "demo-mlx-head"])
def test_the_head_is_shown_and_reported(
    run: Run, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    assert answer(run, "--head", head, QUESTION)["heads"] == [head]
    assert plain["heads"] == []
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    notes = run("generate", "-n", "4", "--head", head, QUESTION).stderr
    # The other backend's head is converted to GGUF.
    assert re.search(rf"head: {head} -> \S+\.gguf\b", notes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-n", "4"], "the reply reached --max-tokens (4)"),
        (
            ["--context", "256", "-n", "4000", "--logit-bias", "1=-inf"],
            "the context is full; use a larger --context",
        ),
    ],
)
def test_a_terminal_is_told_why_a_reply_was_cut_off(
    run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
) -> None:
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    assert f"stopped: {reason}" in run("generate", *options, QUESTION).stderr


def test_a_terminal_is_told_what_of_a_corpus_is_not_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "large.txt").write_bytes(b"a" * 3_000_000)
    (tmp_path / "corpus" / "binary").write_bytes(b"\xff\x00")
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    result = run("generate", "hello", "-n", "2", "--draft", "none", "--corpus", str(tmp_path / "corpus"))
    assert "0 files, 0 tokens; skipped: 1 too large, 1 not readable as text" in result.stderr


def test_no_colour_when_it_is_not_wanted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
    monkeypatch.setenv("NO_COLOR", "1")
    result: Result = run("generate", "-n", "2", QUESTION)
    assert "\x1b[2m" not in result.stderr


@pytest.mark.long
def test_a_reader_that_leaves_is_no_error(start: Start) -> None:
    options = ("--draft", "none", "--context", "4000", "--logit-bias", "1=-inf", "-n", "3000")
    process = start("generate", "--threads", "1", *options, "hi")
    assert isinstance(process.stdout, io.BufferedReader)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(120) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_files_come_before_the_prompt(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("print(1)\n")
    Path("b.py").write_text("print(2)\n")
    options = ("generate", "--json", "--seed", "3", "-n", "8")
    with_files = json_of(run(*options, "--file", "a.py", "--file", "b*", "Explain."))
    as_text = json_of(run(*options, edgespec.attach("Explain.", "a.py", "b.py")))
    assert with_files["tokens"] == as_text["tokens"]
    assert with_files["stats"]["prompt_tokens"] == as_text["stats"]["prompt_tokens"] > 20


def test_a_file_that_cannot_be_attached_is_named(run: Run, tmp_path: Path) -> None:
    result = run("generate", "--file", str(tmp_path / "missing.txt"), "Explain.")
    one_line_error(result, 1, "missing.txt", code="attachment_not_found")


def test_files_that_do_not_fit_are_refused_with_both_sizes(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "big.txt"
    path.write_text("word " * 100_000)
    result = run("generate", "--file", str(path), "Explain.")
    one_line_error(result, 1, "488 KiB", code="context_length_exceeded")


THOUGHT = "<think>\nThe user wants `ls`.\n</think>\n\nUse"


@pytest.fixture
def reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every reply start with reasoning."""
    stream = Runtime.stream

    def reason_first(runtime: Runtime, prompt: str, **options: Any) -> ReplyStream:
        tokens = runtime.vocabulary.tokenize(THOUGHT, special=False, start=False)
        return stream(runtime, prompt, processors=[Begin(tokens)], **options)

    monkeypatch.setattr(Runtime, "stream", reason_first)


@pytest.mark.usefixtures("reasoning")
class TestReasoning:
    @pytest.mark.long
    def test_a_pipe_gets_the_answer_only(self, run: Run) -> None:
        result = run("generate", "--seed", "7", "-n", "40", QUESTION)
        assert result.stdout.startswith("Use")
        assert result.stderr == ""

    @pytest.mark.long
    def test_json_has_both(self, run: Run) -> None:
        reply = json_of(run("generate", "--json", "--seed", "7", "-n", "40", QUESTION))
        assert reply["reasoning"] == "The user wants `ls`."
        assert reply["answer"].startswith("Use")
        assert reply["text"] == THOUGHT.removesuffix("Use") + reply["answer"]

    @pytest.mark.long
    def test_a_terminal_shows_the_reasoning_dimmed(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(screen, "is_terminal", lambda stream: True)
        result = run("generate", "--seed", "7", "-n", "40", QUESTION)
        assert result.stdout.startswith("Use")
        shown = result.stderr.replace("\x1b[0m\x1b[2m", "")
        assert "\x1b[2mThe user wants `ls`.\n\n" in shown
        assert "<think>" not in result.output


def test_a_reply_without_an_answer_says_why(run: Run) -> None:
    result = run("generate", "--raw", "--seed", "7", "-n", "4", f"{QUESTION} <think>")
    assert (result.exit_code, result.stdout) == (0, "\n")
    assert result.stderr == (
        "warning: the reply ended while the model was still reasoning, so there is no answer; use a larger"
        " --max-tokens or --context\n"
    )


@pytest.mark.parametrize("words", [[QUESTION], QUESTION.split()])
def test_run_with_a_prompt_prints_one_reply_as_in_ollama(
    run: Run, plain: dict[str, Any], words: list[str]
) -> None:
    options = ("--json", "--threads", "1", "--seed", "7", "-n", "24")
    assert json_of(run("run", *options, "demo", *words))["text"] == plain["text"]
    assert json_of(run("run", "demo", *words, *options))["text"] == plain["text"]


def test_run_with_a_prompt_reads_stdin_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answered(_stop: object, prompt: Any, _raw: bool, _as_json: bool, options: dict[str, Any]) -> Any:
        asked.append((options["target"], prompt[0]))
        return SimpleNamespace(finish_reason="stop")

    monkeypatch.setattr(generate, "_answer", answered)
    assert run("run", "8b-q4", "Sum", "up", input="a text").exit_code == 0
    assert run("run", "8b-q4", "-", input="a text").exit_code == 0
    assert asked == [("8b-q4", "a text\n\nSum up"), ("8b-q4", "a text")]
    one_line_error(run("run", "8b-q4", "Hi", "--target", "demo"), 2, "both '8b-q4' and --target")
    # Options of the chat need no prompt.
    one_line_error(run("run", "8b-q4", "Hi", "--resume"), 2, code="option_invalid")
