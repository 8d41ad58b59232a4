"""Models of Ollama with adapters are loaded with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

import edgespec
from edgespec.errors import TemplateError
from tests.api.questions import HOWTO
from tests.backends.gguf_adapters import write_gguf_adapter
from tests.backends.tiny_models import write_llama
from tests.raising import raises
from tests.server.conftest import running
from tests.store.fake_stores import OllamaStore

OPTIONS: dict[str, Any] = {"max_tokens": 24, "seed": 7}


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_target: Path) -> Path:
    """An adapter, also in an Ollama store with the models `base` and `tuned`, which share weights."""
    adapter = write_gguf_adapter(tmp_path / "style.gguf", demo_target, size=1.0)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    store = OllamaStore(tmp_path / "ollama")
    store.add("base", "latest", demo_target.read_bytes())
    store.add("tuned", "latest", demo_target.read_bytes(), ("adapter", adapter.read_bytes()))
    return adapter


def replies(target: str, **options: Any) -> list[tuple[int, ...]]:
    methods = ("none", "suffix")
    with edgespec.load(
        target, "none", context=512, methods=methods, measure_costs=False, **options
    ) as runtime:
        return [
            tuple(runtime.generate(HOWTO, method=method, temperature=temperature, **OPTIONS).tokens)
            for method in methods
            for temperature in (0.0, 0.8)
        ]


@pytest.mark.long
def test_the_adapter_is_applied(adapter: Path) -> None:
    tuned = replies("ollama:tuned")
    assert tuned == replies("base", adapter=str(adapter))
    assert tuned[:2] == tuned[2:]
    assert tuned[0] != replies("base")[0]
    # The user's own adapters are added to it.
    twice = {str(adapter): 1.0}
    assert replies("tuned", adapter=twice) != tuned


@pytest.mark.long
def test_the_plan_counts_it(adapter: Path) -> None:
    plans = [edgespec.plan("tuned", "none"), edgespec.plan("base", "none", adapter=str(adapter))]
    assert plans[0].plan.total_bytes == plans[1].plan.total_bytes
    assert plans[0].plan.total_bytes > edgespec.plan("base", "none").plan.total_bytes


@pytest.mark.long
def test_the_server_tells_both_models_apart(adapter: Path) -> None:
    options = {"context": 256, "method": "none", "memory": "600MiB", "headroom": "0"}
    with (
        running(target="base", draft="none", load_options=options) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        body = {"prompt": "To list files", "max_tokens": 16, "temperature": 0}
        texts = [
            http.post("/v1/completions", json={"model": name, **body}).json()["choices"][0]["text"]
            for name in ("base", "tuned", "base", "tuned")
        ]
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]
        names = {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert {"base", "tuned:latest"} <= names


def test_a_template_that_only_ollama_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    store = OllamaStore(tmp_path / "ollama")
    parameters = ("params", b'{"temperature": 0.5, "stop": ["<|im_end|>"]}')
    bare = write_llama(tmp_path / "bare.gguf", template=None).read_bytes()
    store.add("bare", "latest", bare, ("system", b"Be brief."), parameters)
    with edgespec.load("bare", "none", context=256, measure_costs=False) as runtime:
        assert (
            "edgespec ignores these Ollama settings of bare: system prompt; to use them, set options"
            " such as --system" in runtime.target.notice
        )
        assert runtime.recommended_sampling["temperature"] == (0.5, "Ollama")
        with raises(TemplateError, "Ollama's", code="template_missing"):
            runtime.reply([{"role": "user", "content": "Hi"}])
        assert "in Ollama's manifest" in runtime.why_no_template
    with edgespec.load(str(tmp_path / "bare.gguf"), "none", context=256, measure_costs=False) as runtime:
        assert "Ollama" not in runtime.why_no_template
        assert runtime.why_no_template.startswith("bare.gguf has no chat template; choose an instruct model")
        assert "not used" not in runtime.target.notice


@pytest.mark.long
def test_usual_parts_of_ollama_are_no_reason_for_a_notice(adapter: Path) -> None:
    with edgespec.load("base", "none", context=256, measure_costs=False) as runtime:
        assert "Ollama" not in runtime.target.notice
        assert runtime.why_no_template == ""
