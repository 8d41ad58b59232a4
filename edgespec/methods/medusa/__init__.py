"""Draft with Medusa heads, each of which predicts one more token ahead."""

from __future__ import annotations

from edgespec.methods.head_method import head_method
from edgespec.options.methods import HeadKind, HeadTraining, MethodDocs

__all__ = ["METHOD"]

METHOD = head_method(
    "medusa",
    label="Medusa heads",
    help_text="Medusa draft heads for the model you run; each predicts one token further ahead than the last",
    docs=MethodDocs(
        source="Medusa heads: small networks that read the target's last hidden state. The first "
        "predicts the token after next, and each additional head one token further ahead "
        "([Medusa](https://arxiv.org/abs/2401.10774))",
        requires="draft heads trained for the model you run (see [Models](models.md#heads))",
        memory="the draft heads, and working memory for 2,048 tokens",
    ),
    order=70,
    head=HeadKind(
        kinds={"medusa": "Medusa"},
        network="residual",
        drafts_in_one_pass=True,
        training=HeadTraining("medusa", "Medusa heads", "The heads do not need to be converted to GGUF."),
    ),
)
