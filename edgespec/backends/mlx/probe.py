"""What a loaded model can really do, found out with a few tiny passes.

mlx-lm has over a hundred architectures, each its own file: some do not look where they are told to, some
cannot be run wider than one token. So nothing is believed: a method is allowed when its rows are those of
single steps, up to the rounding of the model's own number format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Capabilities, LowBit
from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.partial_models import PartialModel
from edgespec.engine.tree import TokenTree
from edgespec.errors import EdgespecError, ModelFileError

__all__ = ["PROBE_TOKENS", "ProbeResult", "probe"]

PROBE_TOKENS = 8
# Passes of different widths add up in different orders: so many units of the last place, or such a share of
# the largest logit, at most: in float32 the former is less than what scans and quantised products round.
_MOST_ROUNDING, _MOST_SHARE = 32, 1e-3


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the probe found.

    rollback: in words, how tokens are taken back. replays: rollback is by going back to a checkpoint and
    running again what was right. kv_bytes_for: bytes of the caches when a context of so many tokens is full.
    no_self_draft: by name, why it cannot draft for itself that way.
    """

    capabilities: Capabilities
    rollback: str
    replays: bool
    kv_bytes_for: Callable[[int], int]
    no_self_draft: dict[str, str]


def probe(model: MlxModel) -> ProbeResult:
    """Try everything on a fresh model; its memory is empty before and after.

    Raises ModelFileError when the model cannot even be run one token at a time.
    """
    tokens = [(37 * i + 11) % model.vocabulary.size for i in range(PROBE_TOKENS)]
    try:
        steps = np.stack([_step(model, token) for token in tokens])
    except EdgespecError as error:
        raise ModelFileError(f"{model.facts.name} cannot be run: {error}", "choose another model") from error
    if not np.isfinite(steps).all():
        raise ModelFileError(f"the logits of {model.facts.name} are not numbers", "download the model again")
    kv_bytes_for = model.memory.sizes()
    width = model.facts.capabilities.max_width
    expected = _Expected(tokens, steps)
    foreign, replays = ", ".join(sorted(model.memory.foreign)), bool(model.memory.recurrent)
    trouble = f"its {foreign} cannot be taken back exactly" if foreign else ""
    for check in (_check_wide, _check_replay if replays else _check_rollback):
        trouble = trouble or _trouble(model, expected, check)
    taps = not _trouble(model, expected, _check_taps)
    if trouble:
        capabilities = Capabilities(
            False, False, trouble, hidden_states=taps, partial_truncate=model.memory.cuts
        )
        return ProbeResult(
            capabilities, "not possible", False, kv_bytes_for, dict.fromkeys(_SELF_DRAFTS, trouble)
        )
    if replays:
        reason = "its recurrent state takes chains only"
        capabilities = Capabilities(True, False, reason, width, hidden_states=taps, partial_truncate=False)
        missing = dict.fromkeys(_SELF_DRAFTS, "a recurrent state cannot be shared with a draft")
        rollback = "checkpoints of the recurrent state, and replay"
        return ProbeResult(capabilities, rollback, True, kv_bytes_for, missing)
    trouble = _trouble(model, expected, _check_tree)
    rollback = "by offset"
    if model.memory.windowed:
        rollback += f"; windows keep {AttentionCache.slack} tokens more"
    expected = replace(expected, trees=not trouble)
    tried = {name: _trouble(model, expected, check) for name, check in _SELF_DRAFTS.items()}
    missing = {name: why for name, why in tried.items() if why}
    can = frozenset(tried.keys() - missing.keys())
    cuts = not model.memory.windowed
    capabilities = Capabilities(
        True,
        not trouble,
        trouble,
        width,
        hidden_states=taps,
        self_draft_methods=can,
        trainable=True,
        partial_truncate=cuts,
    )
    return ProbeResult(capabilities, rollback, False, kv_bytes_for, missing)


@dataclass(frozen=True, slots=True)
class _Expected:
    """Tokens, and the logits after each when they are run one by one. trees: whether to try those too."""

    tokens: list[int]
    steps: NDArray[np.float64]
    trees: bool = True


def _trouble(model: MlxModel, expected: _Expected, check: Callable[[MlxModel, _Expected], str]) -> str:
    """What is wrong, or nothing. The memory is empty before and after."""
    model.truncate(0)
    try:
        return check(model, expected)
    except EdgespecError as error:
        return error.what
    finally:
        model.truncate(0)


def _check_wide(model: MlxModel, expected: _Expected) -> str:
    logits = model.verify(TokenTree.chain(expected.tokens[0], expected.tokens[1:5]))
    return _differs(model, "passes of several tokens", logits, [0, 1, 2, 3, 4], expected, [0, 1, 2, 3, 4])


def _check_rollback(model: MlxModel, expected: _Expected) -> str:
    tokens = expected.tokens
    model.verify(TokenTree.chain(tokens[0], [tokens[1], *tokens[5:8]]))
    model.commit((1,))
    logits = model.verify(TokenTree.chain(tokens[2], tokens[3:5]))
    return _differs(model, "taking tokens back", logits, [0, 1, 2], expected, [2, 3, 4])


def _check_replay(model: MlxModel, expected: _Expected) -> str:
    tokens = expected.tokens
    model.prefill(tokens[:2])
    checkpoint = model.checkpoint()
    model.verify(TokenTree.chain(tokens[5], tokens[6:8]))
    model.commit((1, 2))
    model.rewind(checkpoint)
    logits = model.verify(TokenTree.chain(tokens[2], tokens[3:5]))
    return _differs(model, "going back to a checkpoint", logits, [0, 1, 2], expected, [2, 3, 4])


def _check_tree(model: MlxModel, expected: _Expected) -> str:
    tokens = expected.tokens
    model.prefill(tokens[:2])
    # The right path is 0, 2, 4; nodes 1 and 3 are wrong turns beside it.
    upper = TokenTree((tokens[2], tokens[6], tokens[3]), (-1, 0, 0), (None,) * 3)
    logits = model.verify(upper)
    trouble = _differs(model, "a token tree", logits, [0, 2], expected, [2, 3])
    lower = TokenTree((*upper.tokens, tokens[7], tokens[4]), (*upper.parents, 1, 2), (None,) * 5)
    logits = model.verify(lower, 3)
    trouble = trouble or _differs(model, "a token tree", logits, [1], expected, [4])
    model.commit((2, 4))
    logits = model.verify(TokenTree.chain(tokens[5]))
    return trouble or _differs(model, "keeping a path of a tree", logits, [0], expected, [5])


def _check_taps(model: MlxModel, expected: _Expected) -> str:
    """Each layer runs once and hands what it says to the next; the logits do not notice."""
    tokens, taps = expected.tokens, model.taps()
    with taps.on(range(taps.count)):
        logits = model.verify(TokenTree.chain(tokens[0]))
    if sorted(taps.outputs) != list(range(taps.count)):
        return f"{taps.count - len(taps.outputs)} of its layers did not run"
    for layer in range(taps.count - 1):
        if not mx.array_equal(taps.outputs[layer], taps.inputs[layer + 1]).item():
            return f"layer {layer + 1} is not given what layer {layer} says"
    return _differs(model, "reading hidden states", logits, [0], expected, [0])


def _check_exit(model: MlxModel, expected: _Expected) -> str:
    layers = model.layer_count
    if layers < 2:
        return "it has one layer"
    for exit_layer in {1, layers - 1}:
        trouble = _check_part(model, expected, model.parts.leaving(exit_layer, model.facts.name))
        if trouble:
            return trouble
    return ""


def _check_skipping(model: MlxModel, expected: _Expected) -> str:
    layers = model.layer_count
    if layers < 3:
        return "it has no layers between the first and the last"
    skipped = range(1, layers - 1)
    return _check_part(model, expected, model.parts.skipping(skipped, model.facts.name))


def _check_low_bits(model: MlxModel, expected: _Expected) -> str:
    low_bits = model.parts.low_bits
    if low_bits is None:
        return "it was loaded without low_bits"
    if not low_bits.weights:
        return "its weights have no fewer bits to be read at"
    return _check_part(model, expected, model.parts.lowered(LowBit(), model.facts.name))


def _check_part(model: MlxModel, expected: _Expected, part: PartialModel) -> str:
    """The target does not notice a round drafted before its own, of which it may take over a part."""
    tokens, what = expected.tokens, "drafting for itself"
    model.truncate(0)
    model.prefill(tokens[:2])
    for width in (1, 2, 3):  # the last guess is wrong
        model.draft(part, TokenTree.chain(tokens[2], [tokens[3], tokens[6]][: width - 1]), width - 1)
    logits = model.verify(TokenTree.chain(tokens[2], tokens[3:5]))
    trouble = _differs(model, what, logits, [0, 1, 2], expected, [2, 3, 4])
    model.commit((1, 2))
    if trouble or not expected.trees:
        return trouble or _differs(model, what, model.verify(TokenTree.chain(tokens[5])), [0], expected, [5])
    model.truncate(2)
    nodes, parents = (tokens[2], tokens[6], tokens[3], tokens[7], tokens[4]), (-1, 0, 0, 1, 2)
    for first, end in ((0, 1), (1, 3), (3, 5)):
        model.draft(part, TokenTree(nodes[:end], parents[:end], (None,) * end), first)
    logits = model.verify(TokenTree((*nodes, tokens[5]), (*parents, 4), (None,) * 6))
    trouble = _differs(model, what, logits, [0, 2, 4, 5], expected, [2, 3, 4, 5])
    model.commit((2, 4, 5))
    return trouble or _differs(model, what, model.verify(TokenTree.chain(tokens[6])), [0], expected, [6])


_SELF_DRAFTS = {"layerskip": _check_exit, "swift": _check_skipping, "lowbit": _check_low_bits}


def _differs(
    model: MlxModel, what: str, logits: DeviceLogits, rows: list[int], expected: _Expected, steps: list[int]
) -> str:
    """A sentence with the largest difference, if it is more than rounding."""
    everything = np.arange(model.vocabulary.size)
    got = np.stack([logits.at(row, everything) for row in rows])
    worst = float(np.abs(got - expected.steps[steps]).max())
    limit = max(_MOST_ROUNDING * model.rounding, _MOST_SHARE) * float(np.abs(expected.steps).max())
    return "" if worst <= limit else f"{what} gives other logits than single steps (by {worst:.2g})"


def _step(model: MlxModel, token: int) -> NDArray[np.float64]:
    logits = model.verify(TokenTree.chain(token))
    row = logits.at(0, np.arange(model.vocabulary.size))
    model.commit(())
    return row
