"""llama.cpp and MLX generate the same tokens with the same float32 weights, except at near-ties."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray

import edgespec
from edgespec import Reply, Runtime, SamplingParams
from edgespec.chat.prompt import PromptBuilder
from edgespec.engine.tree import TokenTree
from edgespec.losslessness.cases import Prompt, read_prompts
from edgespec.store.catalogue import models_folder
from tests.near_ties import score_gap

mx = pytest.importorskip("mlx.core")

SEED = 7
MAX_TOKENS = 40
# Without filters, the whole vocabulary takes part, so that any difference in the noise is visible.
SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0),
)
PROMPTS = read_prompts()
# Maximum error that may explain a difference. Both backends compute in single precision.
LARGEST_ERROR = 1e-3


class Pair(NamedTuple):
    llama: Runtime
    mlx: Runtime


def write_gguf(source: Path, path: Path) -> Path:
    """Write a copy of a GGUF file with all tensors as F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        of_items = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], of_items)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_mlx(source: Path, folder: Path) -> Path:
    """Write a copy of an MLX model with all weights as float32."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    form = config.pop("quantization")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    packed = mx.load(str(source / "model.safetensors"))
    weights = {}
    for name, array in packed.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and f"{module}.scales" in packed:
            scales, biases = (packed[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            array = mx.dequantize(array, scales, biases, form["group_size"], form["bits"])
        if part == "weight":
            weights[name] = array.astype(mx.float32)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("float32")
    file = write_gguf(models_folder() / "demo-target-q8_0.gguf", folder / "demo.gguf")
    checkpoint = write_mlx(models_folder() / "demo-mlx", folder / "demo-mlx")
    # Nothing is drafted, so neither the costs nor the exactness of wider passes matter.
    options: dict[str, Any] = {
        "context": 512,
        "method": "none",
        "measure_costs": False,
        "exactness": "off",
    }
    with (
        # On the CPU, flash attention uses half precision, whatever the cache type.
        edgespec.load(str(file), "none", kv_type="f32", flash_attention="off", **options) as llama,
        edgespec.load(str(checkpoint), "none", **options) as mlx,
    ):
        yield Pair(llama, mlx)


def tokens_of(runtime: Runtime, prompt: Prompt) -> list[int]:
    assert runtime.template is not None
    return PromptBuilder(runtime.template, runtime.vocabulary).build(prompt.messages).tokens


def reply_to(
    runtime: Runtime,
    tokens: list[int],
    params: SamplingParams,
    seed: int = SEED,
    max_tokens: int = MAX_TOKENS,
) -> Reply:
    stream = runtime.stream_tokens(
        tokens, method="none", max_tokens=max_tokens, seed=seed, **dataclasses.asdict(params)
    )
    for _ in stream:
        pass
    return stream.reply


def row_after(runtime: Runtime, tokens: list[int]) -> NDArray[np.float32]:
    """Return the logits after `tokens`."""
    with runtime.borrowed_target() as model:
        model.prefill(tokens[:-1])
        row = model.verify(TokenTree.chain(tokens[-1])).at(0, np.arange(model.facts.vocab_size))
        model.commit(())
    return row.astype(np.float32)


class Parting(NamedTuple):
    """The first difference between two replies: the larger score gap of both backends, and their error."""

    gap: float
    error: float

    @property
    def is_near_tie(self) -> bool:
        return self.error <= LARGEST_ERROR and self.gap <= 2 * self.error


def judged(
    pair: Pair, prompt: list[int], params: SamplingParams, llama: list[int], mlx: list[int]
) -> Parting:
    """Score the first different token again with both backends."""
    at = next((i for i, (a, b) in enumerate(zip(llama, mlx, strict=False)) if a != b), None)
    assert at is not None, "the replies differ in length only"
    history = [*prompt, *llama[:at]]
    rows = [row_after(runtime, history) for runtime in pair]
    gaps = [score_gap(row, params, SEED, history, llama[at], mlx[at]) for row in rows]
    return Parting(max(gaps), float(np.abs(rows[0] - rows[1]).max()))


@pytest.mark.long
@pytest.mark.parametrize("prompt", PROMPTS, ids=[prompt.name for prompt in PROMPTS])
def test_both_backends_tokenize_a_prompt_alike(pair: Pair, prompt: Prompt) -> None:
    assert tokens_of(pair.llama, prompt) == tokens_of(pair.mlx, prompt)


@pytest.mark.parametrize("every", [21, pytest.param(7, marks=pytest.mark.long)])
def test_both_backends_generate_the_same_tokens(pair: Pair, every: int) -> None:
    decoded = PROMPTS[::every]
    identical, near_ties, ended = 0, 0, 0
    largest_error = 0.0
    for prompt in decoded:
        tokens = tokens_of(pair.llama, prompt)
        for params in SETTINGS:
            llama, mlx = (reply_to(runtime, tokens, params) for runtime in pair)
            if llama.tokens == mlx.tokens:
                assert (llama.text, llama.finish_reason) == (mlx.text, mlx.finish_reason)
                identical += 1
                ended += llama.finish_reason == "stop"
                continue
            parting = judged(pair, tokens, params, list(llama.tokens), list(mlx.tokens))
            assert parting.is_near_tie, f"{prompt.name}, {params}: {parting}"
            near_ties += 1
        rows = [row_after(runtime, [*tokens, *llama.tokens]) for runtime in pair]
        largest_error = max(largest_error, float(np.abs(rows[0] - rows[1]).max()))
    replies = identical + near_ties
    print(f"{identical} of {replies} identical, {near_ties} near-ties; logits {largest_error:.1e} apart")  # noqa: T201
    assert replies == len(decoded) * len(SETTINGS)
    assert identical >= replies - 2
    assert 0 < ended < replies  # or where a reply ends was never compared
    assert 0 < largest_error <= LARGEST_ERROR


@pytest.mark.long
def test_both_backends_use_the_same_noise(pair: Pair) -> None:
    tokens = tokens_of(pair.llama, PROMPTS[6])
    one, other = (
        [reply_to(runtime, tokens, SETTINGS[2], seed).tokens for runtime in pair] for seed in (1, 2)
    )
    assert one[0] == one[1] != other[0] == other[1]


@pytest.mark.parametrize("params", SETTINGS, ids=lambda params: str(params.temperature))
def test_a_wrong_token_is_not_counted_as_a_near_tie(pair: Pair, params: SamplingParams) -> None:
    tokens = tokens_of(pair.llama, PROMPTS[0])
    right = list(reply_to(pair.llama, tokens, params, max_tokens=2).tokens)
    order = np.argsort(row_after(pair.llama, tokens))
    second = int(order[-2] if order[-1] == right[0] else order[-1])
    assert not judged(pair, tokens, params, right, [second, *right[1:]]).is_near_tie
