"""`edgespec train`: its results, its errors, and that it can be interrupted and continued."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.cli.train import print_result
from edgespec.options.methods import methods
from edgespec.train.evaluation import DrafterFigures
from edgespec.train.run import TrainingResult
from edgespec.train.state import CurvePoint
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.backends.tiny_models import write_llama
from tests.cases import needs_methods
from tests.cli.conftest import Run, Start, json_of, one_line_error

TRAINED = [each.head.training.command for each in methods() if each.head and each.head.training]
PROMPTS = "".join(json.dumps({"prompt": f"list {n} files", "category": "talk"}) + "\n" for n in range(64))
STOPPING = "stopping after this step; press Ctrl-C again to stop now"
# Reports when the training has started, and waits, so that an interrupt arrives before the last step.
SLOW_STEPS = """
import os, sys, time
from edgespec.backends.mlx.head_trainer import MlxHeadTrainer
from edgespec.cli.program import program
from edgespec.train import conversations

conversations._MAX_REPLY_TOKENS = 40
step, seconds = MlxHeadTrainer.step, float(os.environ.get("STEP_SECONDS", "0.2"))

def slow_step(*args):
    loss = step(*args)
    print("step", file=sys.stderr, flush=True)
    time.sleep(seconds)
    return loss

MlxHeadTrainer.step = slow_step
program()
"""


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write little text to train with."""
    monkeypatch.setattr("edgespec.train.conversations._MAX_REPLY_TOKENS", 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "tiny", "llama", config={"num_hidden_layers": 6})


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    """The arguments of the smallest training."""
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    asked = ("--prompts", str(tmp_path / "prompts.jsonl"), "--tokens", "1000")
    return ["train", "eagle3", str(model), *asked]


def test_an_interrupt_and_its_continuation(
    start: Start, run: Run, arguments: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    process = start(*arguments, "--to", str(folder), code=SLOW_STEPS)
    assert process.stderr is not None
    # The costs are measured in the first nine steps, or fewer on a busy machine.
    for _ in range(12):
        while (line := process.stderr.readline()) != b"step\n":
            assert line
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read().decode().splitlines()
    assert process.wait() == 130
    assert rest[0] == STOPPING
    assert rest[-1] == (
        f"interrupted: the training in {folder / 'training'} is not finished, but its progress has been"
        " saved; run the same command again to continue"
    )
    assert list((folder / "training").glob("state-*.safetensors"))
    continued = run(*arguments, "--to", str(folder), "--json")
    facts = json_of(continued)
    place = re.escape(f"continuing the training in {folder / 'training'}: ")
    finished = r"\d+ of \d+ training steps are finished\n"
    time_left = r"the rest of the training takes about \d.*\n"
    needs = r"it needs about \d.* of memory, and \d.* of disk space"
    assert re.match(f"{place}{finished}{time_left}{needs}", continued.stderr)
    assert facts["kept"]
    assert facts["tokens"] >= 1_000
    assert facts["tokens_per_pass_by_kind"].keys() == {"talk"}
    assert not (folder / "training").exists()
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "training.png"}


def test_a_second_interrupt_ends_the_first_step(start: Start, arguments: list[str], tmp_path: Path) -> None:
    to = ("--to", str(tmp_path / "head"))
    process = start(*arguments, *to, code=SLOW_STEPS, env={"STEP_SECONDS": "100"})
    assert process.stderr is not None
    while (line := process.stderr.readline()) != b"step\n":
        assert line
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().decode() == f"{STOPPING}\n"
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    # Each step takes 100 seconds.
    assert time.monotonic() - began < 80
    assert process.stderr.read().decode() == (
        "interrupted: the work since the progress was last saved is lost; run the same command again to"
        " continue\n"
    )


@pytest.mark.parametrize("kind", [*TRAINED, "draft"])
def test_the_help_is_about_one_kind(run: Run, kind: str) -> None:
    shown = " ".join(run("train", kind, "--help").stdout.split())
    is_eagle = kind == "eagle3"
    assert ("EAGLE" in shown, "also converted to GGUF" in shown) == (is_eagle, is_eagle)


@pytest.mark.long
@needs_methods("medusa")
def test_medusa_heads_are_trained_and_used(
    run: Run, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "head"
    facts = json_of(run("train", "medusa", *arguments[2:], "--to", str(folder), "--json"))
    assert (facts["method"], facts["kept"], facts["gguf"]) == ("medusa", True, None)
    shown = run("generate", "--target", str(model), "--head", str(folder), "list files", "--max-tokens", "12")
    plain = run("generate", "--target", str(model), "list files", "--max-tokens", "12", "--method", "none")
    assert shown.stdout == plain.stdout


@pytest.mark.long
def test_a_draft_model_is_trained_and_used(
    run: Run, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    # Use a different last layer, so that there is something to learn.
    draft = write_checkpoint(tmp_path / "draft", "llama", config={"num_hidden_layers": 5})
    folder = tmp_path / "new"
    options = ("--draft", str(draft), "--to", str(folder))
    facts = json_of(run("train", "draft", *arguments[2:], *options, "--json"))
    assert (facts["kind"], facts["earlier"] is None) == ("draft", False)
    assert facts["kept"] == (facts["tokens_per_pass"] > facts["earlier"]["tokens_per_pass"])
    assert folder.exists() == facts["kept"]
    asked = ("generate", "--target", str(model), "list files", "--max-tokens", "12")
    shown = run(*asked, "--draft", str(folder if facts["kept"] else draft), "--method", "model")
    assert shown.stdout == run(*asked, "--method", "none").stdout


def test_a_draft_model_must_be_trainable(run: Run, model: Path, tmp_path: Path) -> None:
    train = ("train", "draft", str(model), "--to", str(tmp_path / "new"))
    one_line_error(run(*train), 2, code="draft_missing")
    gguf = write_llama(tmp_path / "model.gguf")
    one_line_error(run(*train, "--draft", str(gguf)), 2, code="model_not_trainable")
    one_line_error(run(*train, "--draft", "demo-mlx-draft"), 2, code="vocabulary_mismatch")
    assert not (tmp_path / "new").exists()


def test_a_gguf_model_needs_its_other_form(run: Run, tmp_path: Path) -> None:
    gguf = write_llama(tmp_path / "model.gguf", layers=6)
    result = run("train", "eagle3", str(gguf), "--to", str(tmp_path / "head"))
    one_line_error(result, 2, "--weights", code="model_not_trainable")
    assert not (tmp_path / "head").exists()


def test_weights_of_another_model_are_refused(run: Run, model: Path, tmp_path: Path) -> None:
    gguf = write_llama(tmp_path / "model.gguf", layers=6)
    to = ("--to", str(tmp_path / "head"))
    for config, expected in (
        ({"num_hidden_layers": 5}, "5 layers"),
        ({"num_hidden_layers": 6}, "size 64"),
        ({"num_hidden_layers": 6, "hidden_size": 32}, "vocabularies"),
    ):
        other = write_checkpoint(tmp_path / expected, "llama", config=config)
        result = run("train", "eagle3", str(gguf), "--weights", str(other), *to)
        one_line_error(result, 2, expected, code="model_mismatch")
    result = run("train", "eagle3", str(gguf), "--weights", str(tmp_path / "none"), *to)
    one_line_error(result, 2, "--weights", code="wrong_file")
    result = run("train", "eagle3", str(model), "--weights", str(model), *to)
    one_line_error(result, 2, "--weights", code="option_not_supported")


@pytest.mark.parametrize(
    ("more", "quoted", "code"),
    [
        (("--tokens", "999"), "--tokens", "option_invalid"),
        (("--prompts", "missing.jsonl"), "missing.jsonl", "file_not_read"),
        (("--to", ""), "--to", "option_invalid"),
        (("--chats",), "--chats", "training_data_missing"),
    ],
)
def test_wrong_usage(
    run: Run, model: Path, tmp_path: Path, more: tuple[str, ...], quoted: str, code: str
) -> None:
    result = run("train", "eagle3", str(model), "--to", str(tmp_path / "head"), *more)
    one_line_error(result, 2, quoted, code=code)


@pytest.mark.parametrize(("kind", "example"), [(TRAINED[-1], "my-head"), ("draft", "my-draft")])
def test_a_missing_folder_is_explained(run: Run, kind: str, example: str) -> None:
    error = run("train", kind, "demo-mlx").stderr
    assert error.startswith(f"error: missing option '--to'. Add a new folder, such as `--to {example}`\n")


@pytest.mark.parametrize(
    ("tokens_per_pass", "expected"),
    [(1.94, "1.94 tokens per pass instead of 1. This is too little"), (2.0, "can make replies faster.")],
)
def test_the_result_is_judged(
    capsys: pytest.CaptureFixture[str], tokens_per_pass: float, expected: str
) -> None:
    point = CurvePoint(3, 900, 1.0, tokens_per_pass)
    figures = DrafterFigures(tokens_per_pass, (0.5,), {}, 2.5, 8_192, 0.987)
    result = TrainingResult(Path("my-head"), True, figures, None, [point], point, 9, 900, None, None)
    print_result(result, "head")
    shown = capsys.readouterr().out
    assert expected in shown
    assert "2.50" in shown
    assert "8,192 tokens, which make up 98.7%" in shown
    print_result(replace(result, kept=False), "head")
    assert expected not in capsys.readouterr().out


def test_the_folder_is_no_file(run: Run, model: Path) -> None:
    result = run("train", "eagle3", str(model), "--to", str(model / "config.json"))
    one_line_error(result, 2, "config.json", code="option_invalid")
