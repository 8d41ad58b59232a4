"""Draft with the target's own layers for multi-token prediction (MTP)."""

from __future__ import annotations

from edgespec.methods.head_method import head_method
from edgespec.options.methods import HeadKind, MethodDocs

__all__ = ["METHOD"]

METHOD = head_method(
    "mtp",
    label="the model's built-in layers that predict several tokens",
    help_text="the model's own layers for multi-token prediction",
    docs=MethodDocs(
        source="the model's own layers for *multi-token prediction* (MTP), which read its hidden states "
        "([DeepSeek-V3](https://arxiv.org/abs/2412.19437))",
        requires="a model with MTP layers, in its own files or in a separate file (see "
        "[Models](models.md#layers-for-multi-token-prediction))",
        memory="the MTP layers, their KV cache, and working memory for 2,048 tokens",
    ),
    order=40,
    head=HeadKind(kinds={"gemma4-assistant": "MTP"}),
    works_on_workers=False,
)
