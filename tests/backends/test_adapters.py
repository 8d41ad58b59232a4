"""LoRA adapters of GGUF models change replies, and speculation does not change them further."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends import llamacpp
from edgespec.errors import CapabilityError, ModelFileError, OptionError
from edgespec.model.base import LoadOptions
from edgespec.model.model_facts import Adapter
from tests.backends.contract import step
from tests.backends.gguf_adapters import write_gguf_adapter
from tests.cases import first
from tests.raising import raises

PROMPT = "How do I list files by size?"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, demo_target: Path) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        str(write_gguf_adapter(folder / f"{name}.gguf", demo_target, seed=seed, size=1.0))
        for seed, name in enumerate(("style", "tone"))
    ]


def load(**options: Any) -> edgespec.Runtime:
    return edgespec.load("demo", context=512, threads=1, **options)


def ask(runtime: edgespec.Runtime, **options: Any) -> tuple[int, ...]:
    settings: dict[str, Any] = {"max_tokens": 32, "temperature": 0.0, "seed": 4, **options}
    return runtime.generate(PROMPT, **settings).tokens


@pytest.mark.parametrize("temperature", first([0.8, 0.0]))
def test_replies_with_adapters_do_not_depend_on_the_method(adapters: list[str], temperature: float) -> None:
    methods = ("model", "suffix", "lookahead", "model+suffix")
    with (
        always_draft(),
        load(adapter=[adapters[0], f"{adapters[1]}=-0.5"], method="auto", methods=methods) as it,
    ):
        plain = ask(it, method="none", temperature=temperature)
        for method in ("auto", *methods):
            assert ask(it, method=method, temperature=temperature) == plain
        trees = load(adapter=adapters, draft_branches=(3, 2), method="model")
        with trees:
            assert ask(trees, temperature=temperature) == ask(trees, method="none", temperature=temperature)
    with load(draft="none") as without:
        assert ask(without, temperature=temperature) != plain


@pytest.mark.long
def test_scales_of_a_reply_act_like_scales_of_the_load(adapters: list[str]) -> None:
    def loaded(**options: Any) -> tuple[int, ...]:
        with load(draft="none", **options) as runtime:
            return ask(runtime)

    base, style = loaded(), loaded(adapter=adapters[0])
    both = loaded(adapter={adapters[0]: 0.5, adapters[1]: 1.0})
    assert len({base, style, both}) == 3
    with load(adapter=adapters, method="suffix") as runtime:
        for _ in range(2):
            assert ask(runtime, adapter_scales={}) == base
            assert ask(runtime, adapter_scales={"style": 1.0}) == style
            assert ask(runtime, adapter_scales={"style": 0.5, "tone": 1.0}) == both
            assert ask(runtime) == loaded(adapter=adapters)


def test_prefixes_are_reused_only_with_the_same_scales(adapters: list[str]) -> None:
    with load(draft="none", adapter=adapters[0]) as runtime:

        def cached(**options: Any) -> int:
            return runtime.generate(PROMPT, max_tokens=4, **options).stats.cached_prompt_tokens

        assert cached() == 0
        assert cached() > 0
        assert cached(adapter_scales={"style": 0.5}) == 0
        assert cached(adapter_scales={"style": 0.5}) > 0
        assert cached(adapter_scales={"style": 0.25}) == 0
        runtime.generate(PROMPT, max_tokens=4)
        assert cached() > 0


def test_adapters_survive_a_resize(demo_target: Path, adapters: list[str]) -> None:
    logits = []
    for resized in (False, True):
        options = LoadOptions(context_tokens=256, adapters=(Adapter(adapters[0], 0.7),), threads=1)
        model = llamacpp.load(str(demo_target), "demo", options)
        if resized:
            model.resize(512)
        model.prefill([5, 6, 7])
        logits.append(step(model, 8))
        model.close()
    np.testing.assert_array_equal(logits[0], logits[1])


def test_concurrent_replies_use_the_adapter(adapters: list[str]) -> None:
    with load(draft="none", adapter=adapters[0]) as alone:
        expected = ask(alone)
    with load(draft="none", adapter=adapters[0], parallel=2) as runtime, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: ask(runtime), range(2))) == [expected] * 2
        for scales in ({}, {"style": 0.5}):
            with raises(CapabilityError, "it generates several replies", code="parallel_not_supported"):
                runtime.generate(PROMPT, adapter_scales=scales)
        assert ask(runtime, adapter_scales={"style": 1.0}) == expected


@pytest.mark.long
def test_the_plan_counts_adapters(adapters: list[str]) -> None:
    def weights(**options: Any) -> int:
        items = edgespec.plan("demo", "none", context=512, **options).plan.items
        return next(item.bytes for item in items if item.name == "target weights")

    size_bytes = Path(adapters[0]).stat().st_size
    assert weights(adapter=adapters[0]) - weights() == size_bytes
    with load(draft="none", adapter=adapters[0]) as runtime, load(draft="none") as without:
        assert runtime.target.weight_bytes - without.target.weight_bytes == size_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "qwen2"}, "'qwen2'"),
        ({"kind": "control"}, "a LoRA"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, demo_target: Path, options: dict[str, Any], says: str
) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", demo_target, **options)
    with raises(ModelFileError, says, code="adapter_unusable"):
        load(adapter=path)


@pytest.mark.long
def test_damaged_files_are_refused(tmp_path: Path, demo_target: Path, demo_draft: Path) -> None:
    path = write_gguf_adapter(tmp_path / "a.gguf", demo_target)
    data = path.read_bytes()
    with raises(ModelFileError, "a LoRA", code="adapter_unusable"):
        load(adapter=demo_target)
    with raises(ModelFileError, "none.gguf", code="model_file_unreadable"):
        load(adapter=tmp_path / "none.gguf")
    with raises(ModelFileError, "a.gguf", code="adapter_unusable"):
        load(adapter=write_gguf_adapter(path, demo_draft))
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    with raises(ModelFileError, "LoRA adapter", code="wrong_file"):
        load(adapter=text)
    for size in (10, len(data) // 2, len(data) - 100):
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match="a.gguf"):
            load(adapter=path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adapter": 3}, "paths"),
        ({"adapter": {"a.gguf": "loud"}}, "a.gguf"),
        ({"adapter": {"a.gguf": float("nan")}}, "a.gguf"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], says: str) -> None:
    with raises(OptionError, says):
        load(**options)


def test_unknown_names_are_refused(adapters: list[str]) -> None:
    with load(draft="none", adapter=adapters[0]) as runtime:
        with raises(OptionError, "'tone'"):
            ask(runtime, adapter_scales={"tone": 1.0})
        with raises(OptionError, option="adapter_scales"):
            ask(runtime, adapter_scales=[1.0])
    with load(draft="none") as runtime, raises(OptionError, "load the adapter"):
        ask(runtime, adapter_scales={"style": 1.0})


def test_early_exit_with_an_adapter_is_refused(adapters: list[str]) -> None:
    with raises(OptionError, "'layerskip'", code="option_not_supported", option="method"):
        load(adapter=adapters[0], method="layerskip")


@pytest.mark.long
def test_a_reply_says_what_the_draft_model_lacks(adapters: list[str]) -> None:
    def note(**options: Any) -> str:
        with always_draft(), load(method="model", **options) as runtime:
            return runtime.generate(PROMPT, max_tokens=300, temperature=0.0).method.note

    assert "adapter" not in note()
    assert "the draft model runs without the adapter; " in note(adapter=adapters[0])
    with load(method="model") as runtime:
        for seed in range(12):
            runtime.generate("Explain tar.", max_tokens=200, seed=seed)
    assert re.search(
        r"; \d+% of its first tokens were accepted, compared with \d+% without", note(adapter=adapters[0])
    )


def test_embeddings_do_not_depend_on_the_adapters_of_the_last_reply(adapters: list[str]) -> None:
    with load(draft="none", adapter=adapters[0], measure_costs=False) as runtime:
        before = runtime.embed(["x"])[0].vector
        ask(runtime, adapter_scales={}, max_tokens=1)
        np.testing.assert_array_equal(runtime.embed(["x"])[0].vector, before)
