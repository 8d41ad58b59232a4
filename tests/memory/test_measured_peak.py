"""Planned memory is close to the measured peak. scripts/bench_plan.py covers more cases."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgespec.model.base import LoadOptions
from edgespec.model.memory_estimate import MODEL_MEMORY_KINDS
from edgespec.store.reference import resolve
from edgespec.system.heap import release_free_memory
from scripts.matrix.gguf_models import Sizes, write_gguf
from tests.backends.tiny_models import write_llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's peak is read from /proc")

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def _ran(tmp_path: Path, **cell: object) -> dict[str, Any]:
    """Run scripts/matrix/cell.py, on the demo by default, and return its result."""
    given = {"target": str(resolve("demo").path), "warm": str(write_llama(tmp_path / "tiny.gguf")), **cell}
    program = [sys.executable, str(_SCRIPTS / "matrix" / "cell.py"), "run", json.dumps(given)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _own_bytes() -> int:
    """Return the anonymous memory of this process, which excludes pages of mapped files."""
    release_free_memory()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _planned_bytes(plan: dict[str, Any]) -> int:
    """Return the planned bytes of the models."""
    return sum(item["bytes"] for item in plan["items"] if item["kind"] in MODEL_MEMORY_KINDS)


def _check_near(planned: int, measured: int) -> None:
    """Check that a plan is within 3 % of the measured peak, or within 64 MiB if that is more."""
    assert abs(planned - measured) <= max(0.03 * measured, 64 * 2**20)


@pytest.mark.long
@pytest.mark.parametrize("quantisation", ["F16", "Q4_0"])
def test_the_measured_peak_is_near_the_plan(quantisation: str, tmp_path: Path) -> None:
    """Wide feed-forward layers need large conversion buffers. The model takes 200 MiB."""
    sizes = Sizes(vocab=4000, embedding=512, feed_forward=2**15, layers=2, heads=4, heads_kv=1)
    path = write_gguf(tmp_path / "wide.gguf", "gqa", quantisation, sizes)
    found = _ran(tmp_path, target=str(path))
    planned = _planned_bytes(found["plan"])
    _check_near(planned, found["peak"])
    headroom = sum(item["bytes"] for item in found["plan"]["items"] if item["kind"] == "headroom")
    assert found["peak"] <= planned + headroom


def test_the_demo_is_near_its_plan(tmp_path: Path) -> None:
    found = _ran(tmp_path)
    _check_near(_planned_bytes(found["plan"]), found["peak"])


_VOCABULARIES = """
import sys
from pathlib import Path
from edgespec.backends.mlx.weight_loading import _load_tokenizer
from edgespec.backends.mlx.vocabulary import MlxVocabulary
from tests.memory.test_measured_peak import _own_bytes

def vocabulary(folder):
    made = MlxVocabulary(_load_tokenizer(Path(folder), {}), int(sys.argv[3]))
    made.tokenize("the list of files", special=True, start=True)
    return made

kept = [vocabulary(sys.argv[1])]
before = _own_bytes()
kept.append(vocabulary(sys.argv[2]))
print(_own_bytes() - before)
"""


@pytest.mark.long
def test_mlx_vocabulary_estimate_matches_the_measured_memory(tmp_path: Path) -> None:
    """The estimate covers the copy in the tokenizers library and edgespec's tables."""
    pytest.importorskip("mlx.core")
    from edgespec.backends.mlx.memory_estimate import MlxMemoryEstimator
    from tests.backends.mlx.tiny_checkpoints import write_checkpoint

    tokens = 25_000
    small = write_checkpoint(tmp_path / "small", "llama")
    path = write_checkpoint(tmp_path / "large", "llama", config={"vocab_size": tokens})
    tokenizer = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    letters = [word for word in known if len(word) == 1]
    for pair in itertools.islice(itertools.product(letters, letters), tokens - 300):
        word = "".join(pair)
        if word not in known:
            known[word] = 300 + len(known)
            tokenizer["model"]["merges"].append(list(pair))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    options = LoadOptions(context_tokens=512)
    estimator = MlxMemoryEstimator(str(path), "large", options)
    planned = estimator.estimate(options).bytes_of("vocabulary")
    estimator.close()
    program = [sys.executable, "-c", _VOCABULARIES, str(small), str(path), str(tokens)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=_SCRIPTS.parent)
    assert planned == pytest.approx(int(done.stdout), rel=0.5)


@pytest.mark.long
def test_a_full_context_is_near_its_plan(tmp_path: Path) -> None:
    found = _ran(tmp_path, context=4096)
    _check_near(_planned_bytes(found["plan"]), found["peak"])


@pytest.mark.long
def test_every_architecture_is_near_its_plan() -> None:
    options = ["--types", "F16,Q4_0", "--contexts", "2048", "--kv-types", "q8_0", "--mlx-kinds", ""]
    program = [sys.executable, str(_SCRIPTS / "bench_plan.py"), *options]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_plans_that_fit_run_under_a_hard_limit_and_others_are_rejected() -> None:
    options = ["--limits", "--kinds", "gqa,jamba", "--types", "F16,Q4_0", "--contexts", "8192"]
    options += ["--kv-types", "", "--mlx-kinds", ""]
    program = [sys.executable, str(_SCRIPTS / "bench_plan.py"), *options]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_context_resize_frees_the_old_cache() -> None:
    options = ["--grows", "--kinds", "gqa", "--types", "F16", "--contexts", "8192"]
    program = [sys.executable, str(_SCRIPTS / "bench_plan.py"), *options, "--kv-types", "", "--mlx-kinds", ""]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
