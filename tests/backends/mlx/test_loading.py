"""Tests of load options that the probe must not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import ModelFileError
from tests.backends.mlx.tiny_checkpoints import write_checkpoint
from tests.raising import raises


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_the_smallest_context(tmp_path: Path, kind: str) -> None:
    context = 256
    folder = str(write_checkpoint(tmp_path, kind))
    with edgespec.load(folder, folder, context=context) as runtime:
        assert runtime.context_tokens == context
        said = {}
        for method in ("none", "model"):
            stream = runtime.stream_tokens([7] * max(1, context - 3), temperature=0, method=method)
            for _ in stream:
                pass
            said[method] = stream.reply.tokens
        assert said["model"] == said["none"]
        assert len(said["none"]) == context - max(1, context - 3) + 1


def test_a_tokenizer_that_fails_when_it_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    with raises(ModelFileError, "be loaded"):
        edgespec.load(str(folder))
