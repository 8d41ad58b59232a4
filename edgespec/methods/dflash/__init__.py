"""Draft with a DFlash or DSpark head, which predicts a block of tokens in one pass."""

from __future__ import annotations

from edgespec.methods.head_method import head_method
from edgespec.options.methods import HeadKind, MethodDocs

__all__ = ["METHOD"]

METHOD = head_method(
    "dflash",
    label="DFlash head",
    help_text="a DFlash or DSpark draft head for the model you run; it predicts several tokens at once",
    docs=MethodDocs(
        source="a DFlash or DSpark head: a few layers that read the target's hidden states and predict a"
        " block of tokens in one pass ([DFlash](https://arxiv.org/abs/2602.06036), "
        "[DSpark](https://arxiv.org/abs/2607.05147))",
        requires="a draft head trained for the model you run (see [Models](models.md#heads))",
        memory="the draft head, its KV cache, and working memory for 2,048 tokens",
    ),
    order=60,
    head=HeadKind(kinds={"dflash": "DFlash", "dspark": "DFlash"}, drafts_in_one_pass=True),
)
