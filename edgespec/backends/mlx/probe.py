"""Test a loaded model's capabilities with a few short passes.

mlx-lm implements each of its 100+ architectures separately. Some ignore the attention mask, and some cannot
process several tokens in one pass. We therefore enable a capability only if it produces the same logits as
single-token passes, up to rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.mlx.attention_cache import AttentionCache
from edgespec.backends.mlx.logits import DeviceLogits
from edgespec.backends.mlx.model import MlxModel
from edgespec.backends.mlx.partial_models import PartialDraft
from edgespec.engine.tree import TokenTree
from edgespec.errors import CancelledError, EdgespecError, ModelFileError, WorkerLostError
from edgespec.model.base import EarlyExit, LowBit, Progress
from edgespec.model.model_facts import Capabilities
from edgespec.model.registry import format_of

__all__ = ["PROBE_TOKENS", "ProbeResult", "probe"]

# Number of tokens that the capability tests run through the model.
PROBE_TOKENS = 8
# Maximum relative error of logits that counts as rounding: the larger of this many machine epsilons and this
# fraction.
_MAX_EPSILONS, _MAX_LOGIT_SHARE = 32, 1e-3

_PARTIAL_METHODS = (EarlyExit.method, LowBit.method)


class ProbeResult(NamedTuple):
    """Result of testing a model's capabilities.

    Attributes:
        capabilities: The capabilities that produced correct logits.
        rollback: Description of how rejected tokens are removed from the cache.
        needs_replay: Whether a rollback must restore a checkpoint and rerun the accepted tokens.
        kv_bytes_for: Maps a context length in tokens to the size of the full caches in bytes.
        unavailable_self_drafts: Reasons why self-draft methods are unavailable, keyed by method name.
    """

    capabilities: Capabilities
    rollback: str
    needs_replay: bool
    kv_bytes_for: Callable[[int], int]
    unavailable_self_drafts: dict[str, str]


def probe(model: MlxModel, progress: Progress | None = None) -> ProbeResult:
    """Test all of a model's capabilities. The cache must be empty, and is empty again afterwards.

    Args:
        model: The model.
        progress: Called between passes. Returning False cancels the test.

    Raises:
        CancelledError: `progress` returned False.
        ModelFileError: The model cannot run single-token passes, or its logits are not finite.
        WorkerLostError: A worker was lost.
    """
    tokens = [(37 * i + 11) % model.vocabulary.size for i in range(PROBE_TOKENS)]
    try:
        rows = []
        for token in tokens:
            _check_progress(model, progress)
            rows.append(_step(model, token))
        steps = np.stack(rows)
    except (WorkerLostError, CancelledError):
        raise
    except EdgespecError as error:
        raise ModelFileError(f"{model.facts.name} cannot be run: {error}", "choose another model") from error
    if not np.isfinite(steps).all():
        raise ModelFileError(
            f"{model.facts.name} produced values that are not finite", "download the model again"
        )
    caches = model.caches
    kv_bytes_for, recurrent = caches.bytes_by_context(), bool(caches.recurrent)
    model.truncate(0)
    checks = _Checks(model, tokens, steps, progress)
    problem = f"the model's {caches.unsupported_kinds} cannot roll back exactly" if caches.unsupported else ""
    for check in (checks.wide_pass, checks.replay if recurrent else checks.rollback):
        problem = problem or checks.find_problem(check)
    why_chains_only = model.why_chains_only
    if problem or recurrent or why_chains_only:
        tree_problem = (
            problem
            or why_chains_only
            or ("the model's recurrent state does not support drafts with branches")
        )
        reason = problem or why_chains_only or "a recurrent state cannot be shared with a draft model"
        unavailable = dict.fromkeys(_PARTIAL_METHODS, reason)
        rollback = "not possible" if problem else "checkpoints of the recurrent state, and replay"
    else:
        tree_problem = checks.find_problem(checks.tree)
        checks.supports_trees = not tree_problem
        problems = {
            EarlyExit.method: checks.find_problem(checks.early_exit),
            LowBit.method: checks.find_problem(checks.low_bits),
        }
        unavailable = {name: reason for name, reason in problems.items() if reason}
        extra = f"; sliding windows keep {AttentionCache.slack} extra tokens" if caches.windowed else ""
        rollback = f"by offset{extra}"
    heads = format_of("mlx").heads
    if why_no_heads := problem or why_chains_only or checks.find_problem(checks.hidden_states):
        unavailable |= dict.fromkeys(heads, why_no_heads)
    unsuitable = (name for name in heads if not heads[name].runs_for(model.facts.architecture))
    for name in unsuitable:
        unavailable.setdefault(
            name, "with MLX, edgespec does not support this kind of draft head for its architecture"
        )
    capabilities = Capabilities(
        rollback=not problem,
        tree=not tree_problem,
        reason=tree_problem,
        max_width=model.facts.capabilities.max_width,
        self_draft_methods=frozenset({*_PARTIAL_METHODS, *heads} - unavailable.keys()),
        trainable=not (problem or recurrent or why_chains_only),
        partial_truncate=caches.truncatable,
    )
    return ProbeResult(capabilities, rollback, recurrent and not problem, kv_bytes_for, unavailable)


def _check_progress(model: MlxModel, progress: Progress | None) -> None:
    # The weights are loaded, and only a few passes remain.
    if progress and not progress(f"loading {model.facts.name}", 1.0):
        raise CancelledError(f"loading {model.facts.name} was cancelled")


def _step(model: MlxModel, token: int) -> NDArray[np.float64]:
    logits = model.verify(TokenTree.chain(token))
    row = logits.at(0, np.arange(model.vocabulary.size))
    model.commit(())
    return row


class _Checks:
    """Capability checks. Each returns a description of the problem, or an empty string if it passes.

    Attributes:
        supports_trees: Whether the model supports token trees. If so, self-drafting is also tested with
            trees.
    """

    def __init__(
        self, model: MlxModel, tokens: list[int], steps: NDArray[np.float64], progress: Progress | None
    ) -> None:
        self._model = model
        self._progress = progress
        self._tokens = tokens
        # Expected logits [tokens, vocab], computed one token at a time.
        self._steps = steps
        self.supports_trees = True

    def find_problem(self, check: Callable[[], str]) -> str:
        """Run a check with an empty cache. Return its result, or the error message if it raises."""
        self._model.truncate(0)
        try:
            return check()
        except (WorkerLostError, CancelledError):
            raise
        except EdgespecError as error:
            return error.what
        finally:
            self._model.truncate(0)

    def wide_pass(self) -> str:
        return self._differs("a multi-token pass", self._chain(0, 1, 2, 3, 4), range(5))

    def rollback(self) -> str:
        self._chain(0, 1, 5, 6, 7)
        self._model.commit((1,))
        return self._differs("rollback", self._chain(2, 3, 4), [2, 3, 4])

    def replay(self) -> str:
        model = self._model
        model.prefill(self._tokens[:2])
        checkpoint = model.checkpoint()
        self._chain(5, 6, 7)
        model.commit((1, 2))
        model.rewind(checkpoint)
        return self._differs("rewinding to a checkpoint", self._chain(2, 3, 4), [2, 3, 4])

    def tree(self) -> str:
        model = self._model
        model.prefill(self._tokens[:2])
        # Tokens 2, 3 and 4 form the correct path. Tokens 6 and 7 form a wrong branch.
        nodes, parents = [2, 6, 3, 7, 4], (-1, 0, 0, 1, 2)
        logits = model.verify(self._tree(nodes[:3], parents))
        problem = self._differs("a token tree", logits, [2, 3], rows=[0, 2])
        logits = model.verify(self._tree(nodes, parents), 3)
        problem = problem or self._differs("a token tree", logits, [4], rows=[1])
        model.commit((2, 4))
        return problem or self._differs("keeping one path of a tree", self._chain(5), [5])

    def early_exit(self) -> str:
        layers = self._model.layer_count
        if layers < 2:
            return "the model has only one layer"
        return self._self_draft(EarlyExit(1)) or self._self_draft(EarlyExit(layers - 1))

    def low_bits(self) -> str:
        low_bits = self._model.partial_models.low_bits
        if low_bits is None:
            return "the model was loaded without low_bits"
        if not low_bits.weights:
            return "none of the model's weights can be used at lower precision"
        return self._self_draft(LowBit())

    def hidden_states(self) -> str:
        """Check that passes of different widths give the same hidden states and unchanged logits."""
        model = self._model
        # Check only three hidden states, because logging all of them would take gigabytes for large models.
        log = model.log_hidden_states((0, model.layer_count // 2, model.layer_count))
        try:
            model.prefill(self._tokens[:2])
            problem = self._differs("recording hidden states", self._chain(2, 3, 4), [2, 3, 4])
            model.commit((1, 2))
            rows = log.rows(0, 5)
            model.truncate(0)
            model.prefill(self._tokens[:5])
            difference = float(np.abs(log.rows(0, 5) - rows).max())
        finally:
            model.stop_logging(log)
        if problem or difference <= self._share * float(np.abs(rows).max()):
            return problem
        return f"its hidden states vary with the number of tokens per pass (by up to {difference:.2g})"

    def _self_draft(self, method: PartialDraft) -> str:
        """Check that self-drafting does not change the model's logits."""
        model, subject = self._model, "self-drafting"
        partial_model = model.partial_models.create(method, model.facts.name)
        model.truncate(0)
        model.prefill(self._tokens[:2])
        for end in (1, 2, 3):
            _check_progress(model, self._progress)
            model.draft(partial_model, self._tree([2, 3, 6][:end], range(-1, 2)), end - 1)
        problem = self._differs(subject, self._chain(2, 3, 4), [2, 3, 4])
        model.commit((1, 2))
        if problem or not self.supports_trees:
            return problem or self._differs(subject, self._chain(5), [5])
        model.truncate(2)
        nodes, parents = [2, 6, 3, 7, 4, 5], (-1, 0, 0, 1, 2, 4)
        for first, end in ((0, 1), (1, 3), (3, 5)):
            model.draft(partial_model, self._tree(nodes[:end], parents), first)
        logits = model.verify(self._tree(nodes, parents))
        problem = self._differs(subject, logits, [2, 3, 4, 5], rows=[0, 2, 4, 5])
        model.commit((2, 4, 5))
        return problem or self._differs(subject, self._chain(6), [6])

    def _chain(self, *indices: int) -> DeviceLogits:
        _check_progress(self._model, self._progress)
        return self._model.verify(self._tree(indices, range(-1, len(indices))))

    def _tree(self, indices: Sequence[int], parents: Sequence[int]) -> TokenTree:
        count = len(indices)
        return TokenTree(
            tuple(self._tokens[index] for index in indices), tuple(parents[:count]), (None,) * count
        )

    @property
    def _share(self) -> float:
        return max(_MAX_EPSILONS * self._model.rounding, _MAX_LOGIT_SHARE)

    def _differs(
        self, subject: str, logits: DeviceLogits, steps: Sequence[int], rows: Sequence[int] | None = None
    ) -> str:
        """Describe how logits differ from those of single-token passes by more than rounding errors.

        Each of `rows`, by default all, must match the single-token pass with the same place in `steps`.
        """
        all_tokens = np.arange(self._model.vocabulary.size)
        got = np.stack([logits.at(row, all_tokens) for row in rows or range(len(logits))])
        difference = float(np.abs(got - self._steps[list(steps)]).max())
        if difference <= self._share * float(np.abs(self._steps).max()):
            return ""
        return f"{subject} produces different logits than single-token passes (by up to {difference:.2g})"
