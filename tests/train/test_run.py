"""Training a head: interrupts, and what is kept, written and rejected."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.backends.llamacpp.gguf_conversion import convert_eagle_head
from edgespec.errors import BusyError, CancelledError, ModelFileError, OptionError
from edgespec.system.files import file_state
from edgespec.train import TrainingResult
from tests.backends.mlx.tiny_checkpoints import ROWS
from tests.cases import first
from tests.model.heads.residual_files import RESIDUAL_METHODS
from tests.raising import raises
from tests.train.conftest import LAYERS, Stops, Train, arrays_of, same_head


def stopped(train: Train, folder: Path, after: int) -> None:
    with raises(CancelledError, "continue") as raised:
        train(folder, Stops(after))
    assert str(folder / "training") in raised.value.what


@pytest.fixture(scope="module")
def unfinished(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an interrupted training. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("unfinished")
    stopped(train, folder, 2)
    return folder


def trained_beside(finished: TrainingResult, unmeasured: Path, folder: Path) -> None:
    """Copy a finished head, with the unmeasured training of the same head next to it."""
    shutil.copytree(finished.folder, folder, dirs_exist_ok=True)
    shutil.copytree(unmeasured / "training", folder / "training")


def test_an_interrupted_training_continues_and_shares_no_folder(
    finished: TrainingResult, train: Train, tmp_path: Path
) -> None:
    """Another training that is denied the same folder changes nothing."""
    for after in (2, 3):
        stopped(train, tmp_path, after)
    announced: list[str] = []
    refused: list[str] = []

    def progress(_description: str, _fraction: float) -> bool:
        with raises(BusyError, tmp_path / "training") as raised:
            train(tmp_path)
        refused.append(raised.value.code)
        return False

    for _ in range(2):
        with pytest.raises(CancelledError):
            train(tmp_path, progress, announced=announced)
    assert refused == ["busy", "busy"]
    assert announced == [f"5 of {finished.curve[-1].steps} training steps are finished"] * 2


def test_written_conversations_are_counted(train: Train, tmp_path: Path) -> None:
    def progress(description: str, fraction: float) -> bool:
        fractions.append(fraction if description == "writing conversations" else 0.0)
        # The prompts are answered in the first batch. The tiny model writes no questions for another one.
        return not fractions[-1]

    fractions: list[float] = []
    announced: list[str] = []
    for _ in range(2):
        with pytest.raises(CancelledError):
            train(tmp_path, progress, tokens=5_000, announced=announced)
    (file,) = (tmp_path / "training").glob("conversations-*.npz")
    with np.load(file) as saved:
        tokens = len(saved["tokens"])
    expected = f"12 conversations with {tokens} tokens have been written (5,000 tokens are needed)"
    assert announced == ["", expected]
    assert [each for each in fractions if each] == [tokens / 5_000] * 2


@pytest.mark.long
def test_a_missing_file_of_conversations_is_written_again(
    finished: TrainingResult, train: Train, tmp_path: Path
) -> None:
    stopped(train, tmp_path, 2)
    (file,) = (tmp_path / "training").glob("conversations-*.npz")
    file.unlink()
    train(tmp_path)
    assert same_head(tmp_path, finished)


@pytest.mark.long
def test_an_interrupted_evaluation_continues_without_training_or_measuring_again(
    finished: TrainingResult, train: Train, tmp_path: Path
) -> None:
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    with pytest.raises(CancelledError):
        train(tmp_path, Stops(0, "measuring"))
    with pytest.raises(CancelledError):
        train(tmp_path, Stops(1, "measuring"))
    continued = Stops()
    result = train(tmp_path, continued)
    # Only the earlier head had not been measured.
    assert set(continued.seen) == {"measuring"}
    assert (result.curve, result.figures, result.earlier) == (
        finished.curve,
        finished.figures,
        finished.figures,
    )
    assert not result.kept
    assert not (tmp_path / "training").exists()


def test_a_head_that_borrows_the_targets_output_matrix_is_compared(
    finished: TrainingResult, train: Train, unmeasured: Path, tmp_path: Path
) -> None:
    trained_beside(finished, unmeasured, tmp_path)
    arrays = arrays_of(finished.folder)
    own = {name: array for name, array in arrays.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), own)
    earlier = train(tmp_path).earlier
    assert earlier is not None
    assert earlier.tokens_per_pass == pytest.approx(finished.figures.tokens_per_pass, abs=0.02)


@pytest.mark.long
def test_the_costs_are_measured_once(train: Train, tmp_path: Path) -> None:
    first, second = Stops(1), Stops(1)
    for progress in (first, second):
        with pytest.raises(CancelledError):
            train(tmp_path, progress)
    assert "estimating the time" in first.seen
    assert "estimating the time" not in second.seen


@pytest.mark.long
@pytest.mark.parametrize("method", RESIDUAL_METHODS)
def test_an_interrupted_training_of_other_heads_gives_the_same_heads(
    train: Train, tmp_path: Path, method: str
) -> None:
    whole = train(tmp_path / "whole", method=method)
    with pytest.raises(CancelledError):
        train(tmp_path / "parts", Stops(3), method=method)
    with raises(OptionError, "kind of", code="output_exists"):
        train(tmp_path / "parts")
    result = train(tmp_path / "parts", method=method)
    expected, found = (
        arrays_of(tmp_path / name, f"{method}_lm_head.safetensors") for name in ("whole", "parts")
    )
    assert found.keys() == expected.keys()
    assert all(mx.array_equal(array, expected[name]) for name, array in found.items())
    assert (result.curve, result.figures) == (whole.curve, whole.figures)
    again = train(tmp_path / "parts", method=method)
    assert again.earlier is not None


def test_the_head_is_measured_in_conversations_that_it_was_not_trained_with(finished: TrainingResult) -> None:
    assert finished.kept
    assert finished.earlier is None
    assert finished.figures.tokens_per_pass >= 1.0
    assert len(finished.figures.acceptance_per_depth) == 4
    # One conversation of the twelve, about the first prompt.
    assert finished.figures.tokens_per_pass_by_kind.keys() == {"code"}


def test_a_head_is_only_replaced_by_a_better_one(
    finished: TrainingResult, train: Train, unmeasured: Path, tmp_path: Path
) -> None:
    trained_beside(finished, unmeasured, tmp_path / "head")
    before = file_state(tmp_path / "head" / "model.safetensors")
    again = train(tmp_path / "head")
    assert not again.kept
    assert again.plot is None
    assert again.earlier is not None
    assert again.earlier == again.figures
    assert file_state(tmp_path / "head" / "model.safetensors") == before


def test_the_published_layout(finished: TrainingResult, tmp_path: Path) -> None:
    config = json.loads((finished.folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    shapes = {name: array.shape for name, array in arrays_of(finished.folder).items()}
    layer = {
        "input_layernorm": (64,), "hidden_norm": (64,), "post_attention_layernorm": (64,),
        "self_attn.q_proj": (64, 128), "self_attn.k_proj": (32, 128), "self_attn.v_proj": (32, 128),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }  # fmt: skip
    assert shapes == {
        "fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (ROWS, 64), "d2t": (ROWS,),
        "t2d": (ROWS,), **{f"midlayer.{name}.weight": shape for name, shape in layer.items()},
    }  # fmt: skip
    convert_eagle_head(finished.folder, LAYERS, tmp_path / "head.gguf")
    assert (tmp_path / "head.gguf").stat().st_size


@pytest.mark.long
def test_an_unfinished_training_is_not_mixed_with_another(train: Train, tmp_path: Path) -> None:
    stopped(train, tmp_path, 0)
    with raises(OptionError, "--tokens", code="output_exists"):
        train(tmp_path, tokens=600)


def test_other_files_are_not_deleted(train: Train, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "mine.txt").write_text("mine")
    with raises(OptionError, "contains files", code="output_exists"):
        train(tmp_path)
    assert (tmp_path / "training" / "mine.txt").read_text() == "mine"


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["settings.json", "progress.json", "state-*.safetensors", "conversations-*.npz"]
)
def test_a_damaged_training_is_reported(train: Train, unfinished: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "training").glob(name)
    file.write_bytes(file.read_bytes()[:40])
    with raises(ModelFileError, code="training_damaged"):
        train(tmp_path)


def test_a_training_of_another_version_is_not_continued_but_its_text_is_used(
    finished: TrainingResult, train: Train, unfinished: Path, tmp_path: Path
) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "training").glob("state-*.safetensors")
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    others = {name.replace("scaled_fc", "fc"): array for name, array in arrays.items()}
    mx.save_safetensors(str(file), others, metadata)
    with raises(ModelFileError, tmp_path / "training", code="training_outdated"):
        train(tmp_path)
    (tmp_path / "training" / "progress.json").unlink()
    announced: list[str] = []
    train(tmp_path, announced=announced)
    assert announced[0].startswith("12 conversations")
    assert same_head(tmp_path, finished)


@pytest.mark.parametrize("tokens", [np.full(1200, 10**6, np.int32), np.zeros((1200, 2), np.int32)])
def test_saved_tokens_are_checked(
    train: Train, unfinished: Path, tmp_path: Path, tokens: NDArray[np.int32]
) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "training").glob("conversations-*.npz")
    with np.load(file) as saved:
        arrays = dict(saved) | {"tokens": tokens}
    np.savez(file, **arrays)
    with raises(ModelFileError, code="training_damaged"):
        train(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"write_seconds": math.nan},
        {"step_seconds": -1.0},
        {"evaluate_seconds": 1e308},
        {"memory_bytes": 1 << 60},
        {"state_bytes": "much"},
    ],
)
def test_the_saved_costs_are_checked(
    train: Train, unfinished: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "training" / "costs.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with raises(ModelFileError, "costs.json", code="training_damaged"):
        train(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        '{"steps": "abc"}',
        '{"steps": -5}',
        '{"steps": 1e30}',
        '{"steps": 3}',
        '{"steps": 1000000}',
        f'{{"steps": {10**400}}}',
        '{"trained_tokens": 5}',
        '{"losses": [[]]}',
        '{"losses": [NaN, 1]}',
        '{"curve": [{"steps": 1}]}',
        '{"curve": [{"steps": 2, "trained_tokens": 1, "loss": 1, "tokens_per_pass": 1e30}], "losses": []}',
        '{"curve": [{"steps": 2, "trained_tokens": -1, "loss": 1, "tokens_per_pass": 1}], "losses": []}',
        '{"curve": null}',
    ],
)
def test_saved_progress_is_checked(train: Train, unfinished: Path, tmp_path: Path, changes: str) -> None:
    shutil.copytree(unfinished, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "training" / "progress.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | json.loads(changes)))
    with raises(ModelFileError, "progress.json", code="training_damaged"):
        train(tmp_path)


@pytest.mark.parametrize("tokens_per_pass", first(["NaN", "-1", "1e30", '"much"', "null"], 2))
def test_saved_figures_are_checked(
    finished: TrainingResult, train: Train, unmeasured: Path, tmp_path: Path, tokens_per_pass: str
) -> None:
    shutil.copytree(unmeasured, tmp_path, dirs_exist_ok=True)
    figures = json.dumps(finished.figures.to_json() | {"tokens_per_pass": 0.5})
    (tmp_path / "training" / "new.json").write_text(figures.replace("0.5", tokens_per_pass))
    with raises(ModelFileError, "new.json", code="training_damaged"):
        train(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"hidden_size": 32}, {"vocab_size": 99}, {"rope_theta": -1}, {"num_attention_heads": 3}]
)
def test_another_head_is_not_overwritten(
    finished: TrainingResult, train: Train, tmp_path: Path, changes: dict[str, object]
) -> None:
    shutil.copytree(finished.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with raises(ModelFileError, "EAGLE-3 head", "tiny", code="output_exists"):
        train(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_figures_as_json(finished: TrainingResult) -> None:
    facts = json.loads(json.dumps(finished.to_json()))
    assert facts["kept"]
    assert facts["conversations"] == 12
    assert facts["earlier"] is None
    assert facts["curve"][-1]["steps"] == facts["curve"][0]["steps"] * len(facts["curve"])
    assert Path(facts["plot"]).read_bytes().startswith(b"\x89PNG")
