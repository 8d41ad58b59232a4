"""Draft with an EAGLE head, a one-layer network that reads the target's hidden states."""

from __future__ import annotations

from edgespec.methods.head_method import head_method
from edgespec.options.methods import HeadKind, HeadTraining, MethodDocs

__all__ = ["METHOD"]

METHOD = head_method(
    "eagle",
    label="EAGLE head",
    help_text="an EAGLE draft head for the model you run",
    docs=MethodDocs(
        source="an EAGLE head: a network with one layer that reads the target's hidden states "
        "([EAGLE-1](https://arxiv.org/abs/2401.15077), "
        "[EAGLE-2](https://arxiv.org/abs/2406.16858), "
        "[EAGLE-3](https://arxiv.org/abs/2503.01840))",
        requires="a draft head trained for the model you run (see [Models](models.md#heads))",
        memory="the draft head, its KV cache, and working memory for 2,048 tokens",
    ),
    order=50,
    head=HeadKind(
        kinds={"eagle3": "EAGLE-3", "eagle2": "EAGLE-2", "eagle": "EAGLE"},
        training=HeadTraining("eagle3", "an EAGLE-3 head", "The head is then also converted to GGUF."),
    ),
)
