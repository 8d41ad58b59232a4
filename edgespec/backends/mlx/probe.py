"""Test the capabilities of a loaded model with a few short passes.

mlx-lm has separate implementations of over a hundred architectures. Some ignore the attention mask, and some
cannot process several tokens in one pass. We therefore enable a capability only if it produces the same
logits as passes over single tokens, up to rounding errors.
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

# Number of tokens used to test a model.
PROBE_TOKENS = 8
# Maximum difference between logits that counts as a rounding error, relative to the largest logit: the given
# number of machine epsilons or the given share, whichever is larger. Rounding differs because the order of
# additions depends on the number of tokens in a pass. In float32 the share is larger, because recurrent
# layers and quantised products are less precise than the data type. Both limits were chosen.
_MAX_EPSILONS, _MAX_LOGIT_SHARE = 32, 1e-3


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of testing the capabilities of a model.

    Attributes:
        capabilities: Capabilities that produced correct logits.
        rollback: Description of how rejected tokens are removed from the cache.
        needs_replay: Whether a rollback has to restore a checkpoint and run the accepted tokens again.
        kv_bytes_for: Function that maps a context length in tokens to the size of the full caches in bytes.
        unavailable_self_drafts: Reasons why self-draft methods are unavailable, keyed by method name.
    """

    capabilities: Capabilities
    rollback: str
    needs_replay: bool
    kv_bytes_for: Callable[[int], int]
    unavailable_self_drafts: dict[str, str]


def probe(model: MlxModel) -> ProbeResult:
    """Test all capabilities of a model. Its cache must be empty, and will be empty again afterwards.

    Raises:
        ModelFileError: The model cannot run passes over single tokens, or its logits are not finite.
    """
    tokens = [(37 * i + 11) % model.vocabulary.size for i in range(PROBE_TOKENS)]
    try:
        steps = np.stack([_step(model, token) for token in tokens])
    except EdgespecError as error:
        raise ModelFileError(f"{model.facts.name} cannot be run: {error}", "choose another model") from error
    if not np.isfinite(steps).all():
        raise ModelFileError(
            f"{model.facts.name} produced logits that are not finite", "download the model again"
        )
    kv_bytes_for = model.caches.bytes_by_context()
    width = model.facts.capabilities.max_width
    expected = _Expected(tokens, steps)
    unknown, recurrent = ", ".join(sorted(model.caches.unknown_kinds)), bool(model.caches.recurrent)
    problem = f"its {unknown} cannot roll back exactly" if unknown else ""
    for check in (_check_wide_pass, _check_replay if recurrent else _check_rollback):
        problem = problem or _find_problem(model, expected, check)
    hooks_work = not _find_problem(model, expected, _check_hooks)
    if problem:
        capabilities = Capabilities(
            False, False, problem, hidden_states=hooks_work, partial_truncate=model.caches.truncatable
        )
        unavailable = dict.fromkeys(_SELF_DRAFT_CHECKS, problem)
        return ProbeResult(capabilities, "not possible", False, kv_bytes_for, unavailable)
    if recurrent:
        capabilities = Capabilities(
            True,
            False,
            "its recurrent state supports only chains",
            width,
            hidden_states=hooks_work,
            partial_truncate=False,
        )
        unavailable = dict.fromkeys(_SELF_DRAFT_CHECKS, "a recurrent state cannot be shared with a draft")
        rollback = "checkpoints of the recurrent state, and replay"
        return ProbeResult(capabilities, rollback, True, kv_bytes_for, unavailable)
    problem = _find_problem(model, expected, _check_tree)
    rollback = "by offset"
    if model.caches.windowed:
        rollback += f"; sliding windows keep {AttentionCache.slack} extra tokens"
    expected = replace(expected, trees=not problem)
    problems = {name: _find_problem(model, expected, check) for name, check in _SELF_DRAFT_CHECKS.items()}
    unavailable = {name: reason for name, reason in problems.items() if reason}
    capabilities = Capabilities(
        True,
        not problem,
        problem,
        width,
        hidden_states=hooks_work,
        self_draft_methods=frozenset(problems.keys() - unavailable.keys()),
        trainable=True,
        partial_truncate=not model.caches.windowed,
    )
    return ProbeResult(capabilities, rollback, False, kv_bytes_for, unavailable)


@dataclass(frozen=True, slots=True)
class _Expected:
    """Reference logits that the results of all checks are compared with.

    Attributes:
        tokens: Tokens used to test the model.
        steps: Logits [tokens, vocab] after each token, computed by passes over single tokens.
        trees: Whether the model supports token trees. If so, self-drafting is tested with trees as well.
    """

    tokens: list[int]
    steps: NDArray[np.float64]
    trees: bool = True


def _find_problem(model: MlxModel, expected: _Expected, check: Callable[[MlxModel, _Expected], str]) -> str:
    """Run a check with an empty cache. Return a description of the problem, or an empty string if none."""
    model.truncate(0)
    try:
        return check(model, expected)
    except EdgespecError as error:
        return error.what
    finally:
        model.truncate(0)


def _check_wide_pass(model: MlxModel, expected: _Expected) -> str:
    logits = model.verify(TokenTree.chain(expected.tokens[0], expected.tokens[1:5]))
    return _differs(model, "a multi-token pass", logits, [0, 1, 2, 3, 4], expected, [0, 1, 2, 3, 4])


def _check_rollback(model: MlxModel, expected: _Expected) -> str:
    tokens = expected.tokens
    model.verify(TokenTree.chain(tokens[0], [tokens[1], *tokens[5:8]]))
    model.commit((1,))
    logits = model.verify(TokenTree.chain(tokens[2], tokens[3:5]))
    return _differs(model, "rollback", logits, [0, 1, 2], expected, [2, 3, 4])


def _check_replay(model: MlxModel, expected: _Expected) -> str:
    tokens = expected.tokens
    model.prefill(tokens[:2])
    checkpoint = model.checkpoint()
    model.verify(TokenTree.chain(tokens[5], tokens[6:8]))
    model.commit((1, 2))
    model.rewind(checkpoint)
    logits = model.verify(TokenTree.chain(tokens[2], tokens[3:5]))
    return _differs(model, "rewinding to a checkpoint", logits, [0, 1, 2], expected, [2, 3, 4])


def _check_tree(model: MlxModel, expected: _Expected) -> str:
    tokens = expected.tokens
    model.prefill(tokens[:2])
    # Nodes 0, 2 and 4 form the correct path. Nodes 1 and 3 are a wrong branch.
    upper = TokenTree((tokens[2], tokens[6], tokens[3]), (-1, 0, 0), (None,) * 3)
    logits = model.verify(upper)
    problem = _differs(model, "a token tree", logits, [0, 2], expected, [2, 3])
    lower = TokenTree((*upper.tokens, tokens[7], tokens[4]), (*upper.parents, 1, 2), (None,) * 5)
    logits = model.verify(lower, 3)
    problem = problem or _differs(model, "a token tree", logits, [1], expected, [4])
    model.commit((2, 4))
    logits = model.verify(TokenTree.chain(tokens[5]))
    return problem or _differs(model, "keeping one path of a tree", logits, [0], expected, [5])


def _check_hooks(model: MlxModel, expected: _Expected) -> str:
    """Check that the output of each layer is the input of the next, and that hooks do not change logits."""
    tokens, hooks = expected.tokens, model.hidden_state_hooks()
    with hooks.on(range(hooks.count)):
        logits = model.verify(TokenTree.chain(tokens[0]))
    if sorted(hooks.outputs) != list(range(hooks.count)):
        return f"{hooks.count - len(hooks.outputs)} of its layers did not run"
    for layer in range(hooks.count - 1):
        if not mx.array_equal(hooks.outputs[layer], hooks.inputs[layer + 1]).item():
            return f"the input of layer {layer + 1} is not the output of layer {layer}"
    return _differs(model, "reading hidden states", logits, [0], expected, [0])


def _check_early_exit(model: MlxModel, expected: _Expected) -> str:
    layers = model.layer_count
    if layers < 2:
        return "it has only one layer"
    for exit_layer in {1, layers - 1}:
        partial_model = model.partial_models.early_exit(exit_layer, model.facts.name)
        problem = _check_partial_model(model, expected, partial_model)
        if problem:
            return problem
    return ""


def _check_skipped_layers(model: MlxModel, expected: _Expected) -> str:
    layers = model.layer_count
    if layers < 3:
        return "it has no layers between the first and the last"
    partial_model = model.partial_models.skipped_layers(range(1, layers - 1), model.facts.name)
    return _check_partial_model(model, expected, partial_model)


def _check_low_bits(model: MlxModel, expected: _Expected) -> str:
    low_bits = model.partial_models.low_bits
    if low_bits is None:
        return "it was loaded without low_bits"
    if not low_bits.weights:
        return "none of its weights can be read at fewer bits"
    return _check_partial_model(model, expected, model.partial_models.low_bit(LowBit(), model.facts.name))


def _check_partial_model(model: MlxModel, expected: _Expected, partial_model: PartialModel) -> str:
    """Check that drafting with a partial model does not change the target's logits."""
    tokens, subject = expected.tokens, "drafting for itself"
    model.truncate(0)
    model.prefill(tokens[:2])
    for width in (1, 2, 3):  # The last drafted token is wrong.
        model.draft(partial_model, TokenTree.chain(tokens[2], [tokens[3], tokens[6]][: width - 1]), width - 1)
    logits = model.verify(TokenTree.chain(tokens[2], tokens[3:5]))
    problem = _differs(model, subject, logits, [0, 1, 2], expected, [2, 3, 4])
    model.commit((1, 2))
    if problem or not expected.trees:
        return problem or _differs(
            model, subject, model.verify(TokenTree.chain(tokens[5])), [0], expected, [5]
        )
    model.truncate(2)
    nodes, parents = (tokens[2], tokens[6], tokens[3], tokens[7], tokens[4]), (-1, 0, 0, 1, 2)
    for first, end in ((0, 1), (1, 3), (3, 5)):
        model.draft(partial_model, TokenTree(nodes[:end], parents[:end], (None,) * end), first)
    logits = model.verify(TokenTree((*nodes, tokens[5]), (*parents, 4), (None,) * 6))
    problem = _differs(model, subject, logits, [0, 2, 4, 5], expected, [2, 3, 4, 5])
    model.commit((2, 4, 5))
    return problem or _differs(model, subject, model.verify(TokenTree.chain(tokens[6])), [0], expected, [6])


_SELF_DRAFT_CHECKS = {
    "layerskip": _check_early_exit,
    "swift": _check_skipped_layers,
    "lowbit": _check_low_bits,
}


def _differs(
    model: MlxModel,
    subject: str,
    logits: DeviceLogits,
    rows: list[int],
    expected: _Expected,
    steps: list[int],
) -> str:
    """Compare rows of logits with the reference.

    Returns:
        A description of the largest difference if it is not a rounding error, otherwise an empty string.
    """
    all_tokens = np.arange(model.vocabulary.size)
    got = np.stack([logits.at(row, all_tokens) for row in rows])
    difference = float(np.abs(got - expected.steps[steps]).max())
    limit = max(_MAX_EPSILONS * model.rounding, _MAX_LOGIT_SHARE) * float(np.abs(expected.steps).max())
    if difference <= limit:
        return ""
    return f"{subject} produces different logits than single-token passes (by up to {difference:.2g})"


def _step(model: MlxModel, token: int) -> NDArray[np.float64]:
    logits = model.verify(TokenTree.chain(token))
    row = logits.at(0, np.arange(model.vocabulary.size))
    model.commit(())
    return row
