"""The methods that draft with a head, a small network that reads the target's hidden states.

All of them run their heads with `ModelDrafter`. The backends contain the networks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.options.methods import HeadKind, HeadTraining, Method, MethodDocs

if TYPE_CHECKING:
    from edgespec.methods.base import Drafter, DrafterContext, MissingDrafter

__all__ = ["METHODS", "head_method"]

_NEEDS_HEAD = "a draft head trained for the model you run (see [Models](models.md#heads))"
_HEAD_MEMORY = "the draft head, its KV cache, and working memory for 2,048 tokens"


def head_method(
    name: str,
    *,
    label: str,
    help_text: str,
    docs: MethodDocs,
    order: int,
    head: HeadKind,
    works_on_workers: bool = True,
) -> Method:
    """Create a `Method` record for drafting with a head. The arguments are fields of `Method`."""

    def make(context: DrafterContext) -> Drafter | MissingDrafter:
        # Import lazily, because `edgespec --help` loads all method records.
        from edgespec.methods.model.making import make_head_drafter

        return make_head_drafter(context, name)

    return Method(
        name=name,
        label=label,
        help=help_text,
        docs=docs,
        order=order,
        make=make,
        needs="head",
        head=head,
        reads=frozenset({"draft_confidence", "draft_branches", "head"}),
        works_on_workers=works_on_workers,
        experimental=True,
        auto="always",
    )


METHODS = (
    head_method(
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
    ),
    head_method(
        "eagle",
        label="EAGLE head",
        help_text="an EAGLE draft head for the model you run",
        docs=MethodDocs(
            source="an EAGLE head: a network with one layer that reads the target's hidden states "
            "([EAGLE-1](https://arxiv.org/abs/2401.15077), "
            "[EAGLE-2](https://arxiv.org/abs/2406.16858), "
            "[EAGLE-3](https://arxiv.org/abs/2503.01840))",
            requires=_NEEDS_HEAD,
            memory=_HEAD_MEMORY,
        ),
        order=50,
        head=HeadKind(
            kinds={"eagle3": "EAGLE-3", "eagle2": "EAGLE-2", "eagle": "EAGLE"},
            training=HeadTraining("eagle3", "an EAGLE-3 head", "The head is then also converted to GGUF."),
        ),
    ),
    head_method(
        "dflash",
        label="DFlash head",
        help_text="a DFlash or DSpark draft head for the model you run; it predicts several tokens at once",
        docs=MethodDocs(
            source="a DFlash or DSpark head: a few layers that read the target's hidden states and predict a"
            " block of tokens in one pass ([DFlash](https://arxiv.org/abs/2602.06036), "
            "[DSpark](https://arxiv.org/abs/2607.05147))",
            requires=_NEEDS_HEAD,
            memory=_HEAD_MEMORY,
        ),
        order=60,
        head=HeadKind(kinds={"dflash": "DFlash", "dspark": "DFlash"}, drafts_in_one_pass=True),
    ),
    head_method(
        "medusa",
        label="Medusa heads",
        help_text="Medusa draft heads for the model you run; each predicts one token further ahead than the"
        " last",
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
    ),
    head_method(
        "hydra",
        label="Hydra heads",
        help_text="Hydra draft heads: like Medusa heads, but each also reads the tokens drafted before its"
        " own",
        docs=MethodDocs(
            source="Hydra heads: like Medusa heads, but each head also reads the draft tokens before its own"
            " ([Hydra](https://arxiv.org/abs/2402.05109))",
            requires="the same as `medusa`",
            memory="the same as `medusa`, plus a KV cache for one layer with Hydra++ heads",
        ),
        order=80,
        head=HeadKind(
            kinds={"hydra": "Hydra"},
            network="residual",
            training=HeadTraining("hydra", "Hydra heads", "The heads do not need to be converted to GGUF."),
        ),
    ),
)
