"""What works where, proved on tiny models of every kind of memory; README.md holds what came out.

A cell is not what a model claims. Every mark in it stands for replies that were made and compared. What a
model does not claim to do leaves a mark out, with the model's own reason; a wrong token is a failure.
`EDGESPEC_WRITE_README=1 pytest tests/test_parity.py` writes the tables into README.md.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec import EdgespecError, Reply, Runtime, SamplingParams
from edgespec.backends import llamacpp, mlx
from edgespec.backends.base import LanguageModel, LoadOptions
from edgespec.engine.sampling import Sampler
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError
from edgespec.methods import Drafters
from tests.backends import tiny_models

mx = pytest.importorskip("mlx.core")
tiny_checkpoints = pytest.importorskip("tests.backends.mlx.tiny_checkpoints")

README = Path(__file__).parent.parent / "README.md"
CONTEXT = 128
MAX_TOKENS = 16
# Passes of other widths add up in another order; logits here are a few units large.
ROUNDING = 1e-4

# Which tiny models stand for a kind of memory; what is said of the kind is true of all of them.
KINDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("llama.cpp", "full"): ("llama",),
    ("llama.cpp", "window"): ("gemma2",),
    ("llama.cpp", "recurrent"): ("jamba", "lfm2", "mamba"),
    ("MLX", "full"): ("llama",),
    ("MLX", "window"): ("gemma3", "llama_sliding"),
    ("MLX", "recurrent"): ("lfm2", "mamba2", "qwen3_next"),
    ("MLX", "chunked"): ("llama4",),
}
COLUMNS = list(KINDS)
BACKENDS = ("llama.cpp", "MLX")


class Row(NamedTuple):
    """A way of guessing: the method, and the shape of what the draft model grows."""

    title: str
    method: str
    branches: tuple[int, ...] = ()


ROWS = (
    Row("`none`", "none"),
    Row("`model`, chains", "model"),
    Row("`model`, trees", "model", (2, 2)),
    Row("`ngram`", "ngram"),
    Row("`model+ngram`", "model+ngram"),
)


class Cell(NamedTuple):
    """Marks of what was proved; `reason` says why one is missing that might be expected."""

    marks: str
    reason: str = ""


NOTHING = "–"


# -- Models ------------------------------------------------------------------------------------------------


def tensors_of(path: Path) -> dict[str, Any]:
    """The arrays of a GGUF file, to be written into."""
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}


def write_tiny(backend: str, name: str, folder: Path) -> Path:
    if backend == "MLX":
        return Path(tiny_checkpoints.write_checkpoint(folder / "target", name))
    write: Callable[[Path], Path] = getattr(tiny_models, f"write_{name}")
    return write(folder / "target.gguf")


def write_like(path: Path, copy: Path) -> Path:
    """A GGUF file or MLX folder whose head is a little off: a draft that is often right and often wrong."""
    random = np.random.default_rng(1)
    if path.is_file():
        shutil.copy(path, copy)
        tensors = tensors_of(copy)
        head = tensors["output.weight" if "output.weight" in tensors else "token_embd.weight"]
        head *= 1 + 0.3 * random.normal(size=head.shape)
        return copy
    shutil.copytree(path, copy)
    weights = mx.load(str(path / "model.safetensors"))
    for name, array in weights.items():
        if array.shape[0] == tiny_checkpoints.ROWS:
            noise = 1 + 0.3 * random.normal(size=array.shape).astype(np.float32)
            weights[name] = array * mx.array(noise)
    mx.save_safetensors(str(copy / "model.safetensors"), weights, {"format": "mlx"})
    return copy


class Watched:
    """A model that remembers whether a pass ever had branches."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.branched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def verify(self, tree: TokenTree, first: int = 0) -> Any:
        self.branched |= not tree.is_chain
        return self._model.verify(tree, first)


class Ask(NamedTuple):
    """What a reply is asked for. `few`: only two tokens may be said, so that they come again soon."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int = 1
    few: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        bias = {"logit_bias": dict.fromkeys((70, 80), 60.0)} if self.few else {}
        return {"temperature": self.temperature, "seed": self.seed} | bias


# The first repeats itself; all are longer than a window.
_SOME = np.random.default_rng(0).integers(65, 200, 60).tolist()
PROMPTS = (tuple(_SOME[:9] * 4), tuple(_SOME[9:40]), tuple(_SOME[15:60]))
ASKED = (
    Ask(PROMPTS[0], 0.0),
    Ask(PROMPTS[1], 0.0),
    Ask(PROMPTS[1], 0.8, 2),
    Ask(PROMPTS[2], 0.8, 3),
    Ask(PROMPTS[2], 0.0, few=True),
    Ask(PROMPTS[0], 0.8, few=True),
)


class Tiny:
    """A tiny model and its draft of the same kind, each loaded when it is first needed."""

    def __init__(self, folder: Path, backend: str, name: str) -> None:
        self._backend = backend
        self._name = name
        self._folder = folder / f"{backend}-{name}"
        self._folder.mkdir()
        self._made: list[LanguageModel] = []
        self._plain: dict[Ask, tuple[int, ...]] = {}

    @cached_property
    def path(self) -> Path:
        return write_tiny(self._backend, self._name, self._folder)

    @cached_property
    def target(self) -> LanguageModel:
        return self._load(self.path)

    @cached_property
    def draft(self) -> LanguageModel:
        return self._load(write_like(self.path, self.path.with_stem("draft")))

    def plain(self, ask: Ask) -> tuple[int, ...]:
        """The tokens of plain decoding."""
        if ask not in self._plain:
            runtime = Runtime(self.target, None, Drafters(self.target, None))
            self._plain[ask] = reply_to(runtime, ask, "none").tokens
        return self._plain[ask]

    def _load(self, path: Path) -> LanguageModel:
        load = mlx.load if self._backend == "MLX" else llamacpp.load
        model = load(str(path), self._name, LoadOptions(context_tokens=CONTEXT))
        self._made.append(model)
        return model

    def close(self) -> None:
        for model in self._made:
            model.close()


class Zoo:
    """All tiny models, and what was proved with them: each cell once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tiny: dict[tuple[str, str], Tiny] = {}
        self._cells: dict[tuple[str, tuple[str, str]], Cell] = {}
        self._reasons: dict[tuple[Any, ...], str] = {}

    def tiny(self, backend: str, name: str) -> Tiny:
        if (backend, name) not in self._tiny:
            self._tiny[backend, name] = Tiny(self.folder, backend, name)
        return self._tiny[backend, name]

    def of(self, column: tuple[str, str]) -> list[Tiny]:
        return [self.tiny(column[0], name) for name in KINDS[column]]

    def cell(self, row: Row, column: tuple[str, str]) -> Cell:
        """What all models of a kind were proved to do."""
        if (row.title, column) not in self._cells:
            cells = [prove(tiny, row) for tiny in self.of(column)]
            assert len(set(cells)) == 1, f"{KINDS[column]} differ: {cells}"
            self._cells[row.title, column] = cells[0]
        return self._cells[row.title, column]

    def of_models(self, what: str, column: tuple[str, str]) -> str:
        """Why models of that kind cannot do it; empty when all were proved to."""
        if (what, column) not in self._reasons:
            reasons = {OF_MODELS[what](tiny.target) for tiny in self.of(column)}
            assert len(reasons) == 1, f"{KINDS[column]} differ: {reasons}"
            self._reasons[what, column] = reasons.pop()
        return self._reasons[what, column]

    def of_backend(self, what: str, backend: str) -> str:
        """Why a backend cannot do it; empty when it was proved to."""
        if (what, backend) not in self._reasons:
            self._reasons[what, backend] = OF_BACKENDS[what](self, backend)
        return self._reasons[what, backend]

    def close(self) -> None:
        for tiny in self._tiny.values():
            tiny.close()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    found = Zoo(tmp_path_factory.mktemp("zoo"))
    yield found
    found.close()


# -- Methods -----------------------------------------------------------------------------------------------


def prove(tiny: Tiny, row: Row) -> Cell:
    """Make replies by a method and hold them against plain decoding."""
    if row.method == "none":
        check_plain(tiny)
        return Cell("0 s r")
    can = tiny.target.facts.capabilities
    if not can.rollback:
        report = Drafters(tiny.target, None).choose("ngram")[1]
        assert report.effective == "none"
        assert can.reason in report.reason
        return Cell(NOTHING, can.reason)
    if row.branches and not can.tree:
        return Cell(NOTHING, can.reason)
    plain = [tiny.plain(ask) for ask in ASKED]
    target: Any = Watched(tiny.target)
    draft: Any = Watched(tiny.draft) if "model" in row.method else None
    runtime = Runtime(target, None, Drafters(target, draft, branches=row.branches))
    replies = [reply_to(runtime, ask, row.method) for ask in ASKED]
    for ask, reply, tokens in zip(ASKED, replies, plain, strict=True):
        assert reply.tokens == tokens, f"{row.title} of {tiny.path}: {ask}"
    assert reply_to(runtime, ASKED[0], row.method, acceptance="rejection").tokens == plain[0]
    # That these follow the right law is enumerated in tests/engine: here it is enough that they come.
    drawn = reply_to(runtime, ASKED[-1], row.method, acceptance="rejection")
    assert drawn.tokens
    assert drawn.stats.drafted_tokens
    check_shared_out(replies)
    if row.branches:
        assert target.branched
        assert draft.branched
    return Cell("0 s r t" if target.branched else "0 s r")


def check_shared_out(replies: Sequence[Reply]) -> None:
    """Drafts were partly right and partly wrong: or nothing was taken back, or nothing kept."""
    drafted = sum(reply.stats.drafted_tokens for reply in replies)
    accepted = sum(reply.stats.accepted_tokens for reply in replies)
    assert 0 < accepted < drafted, f"{accepted} of {drafted}"


def check_plain(tiny: Tiny) -> None:
    """Plain decoding says what fresh prefills of all that was said would choose."""
    model = tiny.target
    for ask in ASKED[:4]:
        tokens = list(tiny.plain(ask))
        for at in range(0, len(tokens), 3):
            before = [*ask.prompt, *tokens[:at]]
            model.truncate(0)
            model.prefill(before[:-1])
            logits = model.verify(TokenTree.chain(before[-1]))
            params = SamplingParams(temperature=ask.temperature)
            assert Sampler(params, ask.seed, before).token(logits, 0) == tokens[at]
        model.truncate(0)
    greedy = tiny.plain(ASKED[0])
    runtime = Runtime(model, None, Drafters(model, None))
    assert reply_to(runtime, ASKED[0], "none", acceptance="rejection").tokens == greedy
    assert reply_to(runtime, ASKED[-1], "none", acceptance="rejection").tokens


def reply_to(runtime: Runtime, ask: Ask, method: str, **options: Any) -> Reply:
    stream = runtime.stream_tokens(
        ask.prompt, method=method, max_tokens=MAX_TOKENS, **ask.sampling, **options
    )
    for _ in stream:
        pass
    assert stream.reply.method.effective == method
    return stream.reply


@pytest.mark.parametrize("column", COLUMNS, ids=" ".join)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title.replace("`", ""))
def test_a_method_says_what_plain_decoding_says(zoo: Zoo, row: Row, column: tuple[str, str]) -> None:
    cell = zoo.cell(row, column)
    assert (cell.marks == NOTHING) == bool(cell.reason)


# -- Capabilities of the backends --------------------------------------------------------------------------


def row_of(model: LanguageModel, logits: Any, row: int) -> NDArray[np.float64]:
    return np.array(logits.at(row, np.arange(model.facts.vocab_size)))


def step(model: LanguageModel, token: int) -> NDArray[np.float64]:
    found = row_of(model, model.verify(TokenTree.chain(token)), 0)
    model.commit(())
    return found


def fresh(model: LanguageModel, tokens: Sequence[int]) -> NDArray[np.float64]:
    model.truncate(0)
    model.prefill(tokens[:-1])
    return step(model, tokens[-1])


def same(got: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=ROUNDING)


TEXT = list(range(70, 110))


def prefill_in_pieces(model: LanguageModel) -> str:
    expected = fresh(model, TEXT)
    model.truncate(0)
    for start, end in ((0, 1), (1, 18), (18, 39)):
        model.prefill(TEXT[start:end])
    same(step(model, TEXT[-1]), expected)
    return ""


def wide_passes(model: LanguageModel) -> str:
    can = model.facts.capabilities
    if not can.rollback:
        return can.reason
    expected = [fresh(model, TEXT[: i + 1]) for i in range(30, 35)]
    model.truncate(0)
    model.prefill(TEXT[:30])
    logits = model.verify(TokenTree.chain(TEXT[30], TEXT[31:35]))
    for i in range(5):
        same(row_of(model, logits, i), expected[i])
    return ""


def tree_rows(model: LanguageModel) -> str:
    can = model.facts.capabilities
    if not can.tree:
        return can.reason
    tree = TokenTree((70, 80, 81, 82, 83, 84), (-1, 0, 0, 1, 1, 2), (None,) * 6)
    paths = [[70], [70, 80], [70, 81], [70, 80, 82], [70, 80, 83], [70, 81, 84]]
    expected = [fresh(model, [*TEXT, *path]) for path in paths]
    model.truncate(0)
    model.prefill(TEXT)
    logits = model.verify(tree)
    for node in range(tree.width):
        same(row_of(model, logits, node), expected[node])
    model.commit((2, 5))
    assert model.length == len(TEXT) + 3
    same(step(model, 90), fresh(model, [*TEXT, *paths[5], 90]))
    return ""


def rollback(model: LanguageModel) -> str:
    can = model.facts.capabilities
    if not can.rollback:
        return can.reason
    expected = fresh(model, [*TEXT, 90, 91, 95])
    for kept in (2, 0, 1):
        model.truncate(0)
        model.prefill(TEXT)
        model.verify(TokenTree.chain(90, [91, 99, 98]))
        model.commit((1, 2)[:kept])
        assert model.length == len(TEXT) + 1 + kept
        model.truncate(len(TEXT) + 1)
        if model.length < len(TEXT) + 1:
            model.prefill([*TEXT, 90][model.length :])
        step(model, 91)
        same(step(model, 95), expected)
    return ""


def snapshots(model: LanguageModel) -> str:
    expected = fresh(model, [*TEXT, 90])
    model.truncate(0)
    model.prefill(TEXT)
    try:
        snapshot = model.snapshot()
    except EdgespecError as error:
        return error.what
    model.truncate(0)
    model.prefill([5, 6, 7])
    model.restore(snapshot)
    assert model.length == len(TEXT)
    same(step(model, 90), expected)
    return ""


def cancelling(model: LanguageModel) -> str:
    expected = fresh(model, [*TEXT, 90])
    model.truncate(0)
    model.prefill(TEXT)
    model.interrupt(True)
    for work in (lambda: model.prefill([5, 6]), lambda: model.verify(TokenTree.chain(5))):
        with pytest.raises(CancelledError):
            work()
    model.interrupt(False)
    assert model.length == len(TEXT)
    same(step(model, 90), expected)
    return ""


OF_MODELS: dict[str, Callable[[LanguageModel], str]] = {
    "a prompt in pieces": prefill_in_pieces,
    "several tokens in one pass": wide_passes,
    "branches in one pass": tree_rows,
    "tokens taken back": rollback,
    "snapshot and restore": snapshots,
    "cancel, then go on": cancelling,
}

# The embedded draft: the smallest model with a vocabulary both backends share, here in any part.
SMALL = {"llama.cpp": "demo-draft", "MLX": "demo-mlx-draft"}


def check_small_pair(target: str, draft: str, **options: Any) -> None:
    with edgespec.load(target, draft, context=CONTEXT, **options) as runtime:
        for temperature in (0.0, 0.8):
            replies = [
                runtime.generate(
                    "What does tar do?", max_tokens=10, temperature=temperature, seed=3, method=method
                )
                for method in ("model", "none")
            ]
            assert replies[0].tokens == replies[1].tokens
            assert replies[0].stats.accepted_tokens > 0


def quantised_cache(zoo: Zoo, backend: str) -> str:
    for kv_type in ("q8_0", "q4_0"):
        check_small_pair(SMALL[backend], SMALL[backend], kv_type=kv_type)
    return ""


def adapter(zoo: Zoo, backend: str) -> str:
    """An adapter changes what is said, and speculation does not."""
    tiny = zoo.tiny(backend, "llama")
    checkpoint = zoo.tiny("MLX", "llama").path
    folder = zoo.folder / f"adapter-{backend}"
    tiny_checkpoints.write_adapter(folder, checkpoint)
    try:
        with edgespec.load(str(tiny.path), str(tiny.path), adapter=str(folder), context=CONTEXT) as runtime:
            ask = Ask(PROMPTS[0], 0.8, few=True)
            got, plain = (reply_to(runtime, ask, method) for method in ("model", "none"))
            assert got.tokens == plain.tokens
            assert got.stats.drafted_tokens
            with runtime.borrowed_target() as model:
                changed = fresh(model, TEXT)
    except EdgespecError as error:
        return error.what.partition(",")[0]
    assert np.abs(changed - fresh(tiny.target, TEXT)).max() > 100 * ROUNDING
    return ""


def mixed_target(zoo: Zoo, backend: str) -> str:
    other = BACKENDS[1 - BACKENDS.index(backend)]
    check_small_pair(SMALL[backend], SMALL[other])
    return ""


def mixed_draft(zoo: Zoo, backend: str) -> str:
    return mixed_target(zoo, BACKENDS[1 - BACKENDS.index(backend)])


OF_BACKENDS: dict[str, Callable[[Zoo, str], str]] = {
    "a quantised cache (q8_0, q4_0)": quantised_cache,
    "a LoRA adapter on the target": adapter,
    "target of a mixed pair": mixed_target,
    "draft of a mixed pair": mixed_draft,
}


@pytest.mark.parametrize("column", COLUMNS, ids=" ".join)
@pytest.mark.parametrize("what", OF_MODELS)
def test_a_model_does_what_it_says(zoo: Zoo, what: str, column: tuple[str, str]) -> None:
    reason = zoo.of_models(what, column)
    assert not reason or column[1] in ("recurrent", "chunked")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", OF_BACKENDS)
def test_a_backend_does_what_it_says(zoo: Zoo, what: str, backend: str) -> None:
    reason = zoo.of_backend(what, backend)
    assert not reason or "adapter" in reason


# -- The tables in README.md -------------------------------------------------------------------------------

MARKERS = ("<!-- parity -->\n", "<!-- /parity -->")
TITLES = {column: column[1] for column in COLUMNS} | {
    (backend, "full"): f"{backend}: full" for backend in BACKENDS
}
LEGEND = """\
By the target's memory: *full* attention, sliding *window*, *recurrent* (hybrids too), *chunked* attention.
`0` temperature 0, `s` sampled with a seed: the very tokens of plain decoding. `r` speculative sampling: at
temperature 0 the same, above it runs (its law is enumerated in `tests/engine`). `t` branches were verified.
"""


_MARKS = "①②③④⑤⑥⑦⑧⑨"


class Notes:
    """Footnotes, numbered as they come up."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return _MARKS[self._texts.index(text)]

    def lines(self) -> str:
        return " \\\n".join(f"{self.mark(text)} {text}" for text in self._texts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def methods_table(zoo: Zoo, notes: Notes) -> str:
    rows = []
    for row in ROWS:
        cells = [zoo.cell(row, column) for column in COLUMNS]
        rows.append(
            [row.title, *(cell.marks + (notes.mark(cell.reason) if cell.reason else "") for cell in cells)]
        )
    return table(["method", *TITLES.values()], rows)


def capabilities_table(zoo: Zoo, notes: Notes) -> str:
    rows = [
        [what, *(kinds_that_can(zoo, backend, what, notes) for backend in BACKENDS)] for what in OF_MODELS
    ]
    for what in OF_BACKENDS:
        reasons = [zoo.of_backend(what, backend) for backend in BACKENDS]
        rows.append([what, *(NOTHING + notes.mark(reason) if reason else "yes" for reason in reasons)])
    return table(["what", *BACKENDS], rows)


def kinds_that_can(zoo: Zoo, backend: str, what: str, notes: Notes) -> str:
    reasons = {column[1]: zoo.of_models(what, column) for column in COLUMNS if column[0] == backend}
    can = [kind for kind, reason in reasons.items() if not reason]
    return ", ".join(can) + "".join(sorted(notes.mark(reason) for reason in reasons.values() if reason))


def proved_on() -> str:
    """The architectures that stand for the kinds."""
    lines = []
    for backend in BACKENDS:
        names = [name for column in COLUMNS if column[0] == backend for name in KINDS[column]]
        lines.append(f"{backend}: {', '.join(names)}")
    return "Proved on tiny models. " + ";\n".join(lines) + ".\n"


def test_the_readme_shows_what_came_out(zoo: Zoo) -> None:
    notes = Notes()
    tables = [methods_table(zoo, notes), LEGEND, capabilities_table(zoo, notes)]
    block = "\n".join([*tables, notes.lines(), proved_on()])
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKERS[0])
    shown, found, after = rest.partition(MARKERS[1])
    assert found, f"README.md has no {MARKERS[1]}"
    if os.environ.get("EDGESPEC_WRITE_README"):
        README.write_text(f"{before}{MARKERS[0]}{block}{MARKERS[1]}{after}", encoding="utf-8", newline="\n")
        return
    lines = difflib.unified_diff(shown.splitlines(), block.splitlines(), "README.md", "proved", lineterm="")
    assert shown == block, "\n".join(["EDGESPEC_WRITE_README=1 pytest tests/test_parity.py", *lines])
