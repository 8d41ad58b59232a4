"""A head registered only by this test is found, planned, loaded, used, verified and measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgespec
from edgespec.api.loading import always_draft
from edgespec.backends.head_view import HeadView
from edgespec.backends.llamacpp.model import LlamaCppModel, load
from edgespec.engine.logits import HostLogits
from edgespec.engine.tree import TokenTree
from edgespec.methods.head_method import head_method
from edgespec.model.base import Head, LoadOptions
from edgespec.model.base_model import BaseModel
from edgespec.model.heads.tensor_files import read_folder_tensors
from edgespec.model.hidden_states import POST_NORM, HiddenStateLog
from edgespec.model.memory_estimate import MemoryEstimate, MemoryPart
from edgespec.model.model_facts import Capabilities
from edgespec.model.registry import HeadSupport, register_head
from edgespec.options.methods import HeadKind, MethodDocs, register
from edgespec.store.reference import resolve
from tests.made_up import PROMPT, check_commands
from tests.safetensors_files import write_safetensors

CONTEXT_TOKENS = 512
REPLY: dict[str, Any] = {"max_tokens": 40, "seed": 1}


class ParrotHead(HeadView[BaseModel]):
    """A matrix that predicts the token after next from the target's last hidden state."""

    def __init__(
        self, target: BaseModel, log: HiddenStateLog, release: Callable[[], None], matrix: NDArray[np.float32]
    ) -> None:
        super().__init__(target, log, release)
        self._matrix = matrix
        can = Capabilities(rollback=True, tree=True, max_draft_length=1)
        self.facts = replace(
            target.facts, name="the parrot", weight_bytes=matrix.nbytes, kv_bytes=0, capabilities=can
        )

    def _run_tree(self, tree: TokenTree, first: int) -> HostLogits:
        known = sum(depth <= max(self.log.end - self.length, 0) for depth in tree.depths)
        self._check_draft_length(tree.width - known + 1, 1)
        return HostLogits(self._logged_states(self.length, known)[first:] @ self._matrix)


class ParrotNetwork:
    """Implements `HeadNetwork`, and the `SharedHead` of the llama.cpp backend."""

    def __init__(self, matrix: NDArray[np.float32] | None = None) -> None:
        self._matrix = matrix

    def load_head(self, _target: Any, head: Head) -> ParrotNetwork:
        return ParrotNetwork(read_folder_tensors(head.shown_path)["matrix"].read())

    def estimate_head(self, head: Head, _target: Path, context_tokens: int) -> MemoryEstimate:
        size = read_folder_tensors(head.shown_path)["matrix"].size_bytes
        return MemoryEstimate(context_tokens, "f32", (MemoryPart("weights", size),))

    def view(self, target: BaseModel, release: Callable[[], None]) -> ParrotHead:
        assert self._matrix is not None
        return ParrotHead(target, target.log_hidden_states([POST_NORM]), release, self._matrix)

    def close(self) -> None:
        pass


METHOD = head_method(
    "parrot",
    label="parrot head",
    help_text="a parrot head trained for the target",
    docs=MethodDocs("a parrot head", "a head that was trained for the target", "the head"),
    order=105,
    head=HeadKind(kinds={"parrothead": "Parrot"}),
)
SUPPORT = HeadSupport(network=ParrotNetwork, formats=frozenset({"mlx"}), can_crash=False)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    unregister = [register(METHOD), register_head("gguf", "parrot", SUPPORT)]
    yield
    for each in unregister:
        each()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was fitted to one reply of the demo model."""
    with edgespec.load("demo", "none", context=CONTEXT_TOKENS, method="none") as runtime:
        tokens = runtime.generate(PROMPT, **REPLY).tokens
    target = load(str(resolve("demo").path), "demo", LoadOptions(context_tokens=CONTEXT_TOKENS))
    assert isinstance(target, LlamaCppModel)
    log = target.log_hidden_states([POST_NORM])
    target.prefill(tokens)
    goals = np.eye(target.facts.vocab_size, dtype=np.float32)[list(tokens[2:])]
    matrix = np.linalg.lstsq(log.rows(0, len(goals)), goals)[0].astype(np.float32)
    target.close()
    head = tmp_path_factory.mktemp("heads") / "parrot-demo"
    head.mkdir()
    sizes = {"hidden_size": len(matrix), "vocab_size": target.facts.vocab_size}
    config = {"model_type": "parrot", "architectures": ["ParrotHeadForCausalLM"], **sizes}
    (head / "config.json").write_text(json.dumps(config))
    write_safetensors(head / "model.safetensors", {"matrix": ("F32", matrix)})
    return head


def test_plan(folder: Path) -> None:
    plan = edgespec.plan("demo", "none", context=CONTEXT_TOKENS, method="parrot", head=str(folder)).plan
    weights = read_folder_tensors(folder)["matrix"].size_bytes
    assert weights in [item.bytes for item in plan.items if item.kind == "weights"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["parrot", "parrot+suffix"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replies_equal_plain_decoding(folder: Path, method: str, temperature: float) -> None:
    options: Any = {"context": CONTEXT_TOKENS, "method": method, "head": str(folder)}
    with always_draft(), edgespec.load("demo", "none", **options) as runtime:
        plain = runtime.generate(PROMPT, **REPLY, temperature=temperature, method="none")
        reply = runtime.generate(PROMPT, **REPLY, temperature=temperature)
        assert reply.tokens == plain.tokens
        assert reply.method.effective == method
        assert reply.stats.accepted_tokens
        assert [head.path for head in runtime.heads] == [str(folder)]


def test_auto_uses_a_head_beside_the_model(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "demo.gguf").symlink_to(resolve("demo").path)
    (tmp_path / "parrot-demo").symlink_to(folder)
    with edgespec.load(str(tmp_path / "demo.gguf"), "none", context=CONTEXT_TOKENS) as runtime:
        assert "parrot" in runtime.method.effective.split("+")


def test_the_command_line(folder: Path, tmp_path: Path) -> None:
    target = ("--target", "demo", "--draft", "none", "--context", str(CONTEXT_TOKENS), "--head", str(folder))
    check_commands(tmp_path / "prompts.jsonl", PROMPT, *target)


@pytest.mark.parametrize("network", ["parrot", "eagle"])
def test_a_network_is_registered_once(network: str) -> None:
    with pytest.raises(ValueError, match=network):
        register_head("gguf", network, SUPPORT)
