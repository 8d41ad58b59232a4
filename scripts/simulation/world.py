"""A target and drafters on a simulated clock, which generate given replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.engine.acceptance import Acceptance, Invariant
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.loop import decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.sampling_params import SamplingParams
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.methods.base import Drafter
from edgespec.methods.tree_growth import TreeGrowth
from scripts.simulation.machines import SimulatedMachine
from scripts.simulation.traces import Text, Trace

WORDS = 16


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A further draft model or head. Costs are in target steps.

    Attributes:
        name: Name of the drafter. `Text.others` holds its predictions under this name.
        draft_cost: Cost of drafting a token.
        prefill_cost: Cost of prefilling a token of the prompt.
    """

    name: str
    draft_cost: float
    prefill_cost: float


# Share of correct predictions that remain correct if the draft model has processed only the end of the
# prompt.
_TRUNCATED_SHARE = 0.8


class World:
    """A simulated machine with its clock and the current reply. The decode loop uses it as its target.

    Args:
        machine: The machine.
        slowness: Returns the factor by which everything takes longer, given the seconds elapsed.

    Attributes:
        seconds: Time elapsed.
        replies: Number of replies generated.
        stats: Statistics of the running reply.
        moments: When each token of the running reply was emitted, in seconds after the start of the reply.
    """

    free_tokens = 1 << 20

    def __init__(self, machine: SimulatedMachine, slowness: Callable[[float], float] = lambda _: 1.0) -> None:
        self.machine = machine
        self.seconds = 0.0
        self.replies = 0
        self.stats = Stats()
        self.moments: list[float] = []
        self.text = Text("", Trace(np.zeros(0, np.bool_), np.zeros(0)))
        self._slowness = slowness
        self._tokens: list[int] = []
        self._length = 0

    def clock(self) -> float:
        return self.seconds

    def spend(self, target_steps: float) -> None:
        """Advance the clock by a number of target steps."""
        self.seconds += target_steps * self._slowness(self.seconds)

    def pass_cost(self, rows: int) -> float:
        """Return the cost of the target's next pass, in target steps."""
        return self.machine.curve.v(rows)

    def draft_cost(self) -> float:
        """Return the cost of drafting the next token, in target steps."""
        return self.machine.draft_cost

    def prefill_cost(self) -> float:
        """Return the cost of prefilling a token in the draft model, in target steps."""
        return self.machine.prefill_cost

    def verify(self, tree: TokenTree) -> Logits:
        """Run a target pass. Its logits rank the reply's tokens highest."""
        self.spend(self.pass_cost(tree.width))
        rows = np.zeros((tree.width, WORDS), np.float32)
        for node, depth in enumerate(tree.depths):
            rows[node, self._tokens[(self._length + depth + 1) % len(self._tokens)]] = 1.0
        return HostLogits(rows)

    def commit(self, path: tuple[int, ...]) -> None:
        self._length += 1 + len(path)

    def model(self, growth: TreeGrowth, simulated: SimulatedModel | None = None) -> Drafter:
        """Return a draft model that drafts chains whose length is determined by the growth rule.

        By default, it is the machine's draft model.
        """
        return _Model(self, growth, simulated)

    def lookup(self) -> Drafter:
        """Return the lookup drafter, which takes no time and drafts up to the next missing prediction."""
        return _Lookup(self)

    def reply(self, drafter: Drafter | None, text: Text, draft_length: int = 16) -> float:
        """Generate a reply and return its duration in seconds."""
        random = np.random.default_rng(self.replies)
        self.replies += 1
        self.text, self.stats, self.moments = text, Stats(), []
        self._tokens = random.integers(0, WORDS, text.prompt_tokens + text.length).tolist()
        started, self._length = self.seconds, text.prompt_tokens - 1
        prompt = self._tokens[: text.prompt_tokens]
        if drafter:
            drafter.begin(prompt)
        emitted: list[int] = []
        for step in decode(
            self,
            drafter,
            Invariant(),
            Sampler(SamplingParams(temperature=0.0), 0, prompt),
            prompt[-1],
            vocab_size=WORDS,
            draft_length=draft_length if drafter else 0,
            max_tokens=text.length,
            is_stop=lambda _: False,
            is_cancelled=lambda: False,
            stats=self.stats,
        ):
            emitted += step.tokens
            self.moments += [self.seconds - started] * len(step.tokens)
        assert emitted == self._tokens[text.prompt_tokens :], "the emitted tokens differ from the reply"
        return self.seconds - started

    def token_before(self, at: int) -> int:
        return self._tokens[at - 1]

    @property
    def end(self) -> int:
        return len(self._tokens)

    def predict(self, trace: Trace, at: int, *, wrong: int, whole: bool = True) -> int:
        """Return the token that a drafter predicts at position `at`.

        Args:
            trace: The drafter's predictions.
            at: The position.
            wrong: Difference between the token ids of wrong and right predictions.
            whole: Whether the drafter has processed the whole prompt.
        """
        token, place = self._tokens[at], at - self.text.prompt_tokens
        # Choose the errors with multiples of the golden ratio modulo 1, which are spread evenly and the same
        # in every run.
        right = trace.is_right[place] and (whole or place * 0.618034 % 1.0 < _TRUNCATED_SHARE)
        return token if right else (token + wrong) % WORDS


class _Model(Drafter):
    def __init__(self, world: World, growth: TreeGrowth, simulated: SimulatedModel | None) -> None:
        self._world = world
        self._growth = growth
        self._simulated = simulated
        self.name = simulated.name if simulated else "model"
        self.chooses_length = growth.chooses_length
        self._reply = self._length = self._run = 0
        self._whole = True  # True if the model has processed the whole sequence, not only its end.
        self._drafted: list[int] = []
        # As measured by `ModelDrafter.warm_up`. The simulated clock counts target steps.
        self.pass_seconds, self.prefill_token_seconds = self._draft_cost(), self._prefill_cost()

    def _draft_cost(self) -> float:
        return self._simulated.draft_cost if self._simulated else self._world.draft_cost()

    def _prefill_cost(self) -> float:
        return self._simulated.prefill_cost if self._simulated else self._world.prefill_cost()

    @property
    def _trace(self) -> Trace:
        text = self._world.text
        return text.others[self.name] if self._simulated else text.model

    def begin(self, tokens: Sequence[int]) -> None:
        if self._reply != self._world.replies:
            self._reply, self._run, self._whole = self._world.replies, 0, True
        self._length = len(tokens)
        self._drafted = []

    @property
    def pending_tokens(self) -> int:
        return max(self._length - self._run - 2, 0)

    @property
    def full_pending_tokens(self) -> int:
        return self.pending_tokens if self._whole else self._length

    def prefill(self, max_tokens: int) -> None:
        if max_tokens >= self.full_pending_tokens and not self._whole:
            self._run, self._whole = 0, True
        if self.pending_tokens > max_tokens:
            self._whole = False
        self._world.spend(min(self.pending_tokens, max_tokens) * self._prefill_cost())
        self._run = self._length - 1

    def force_draft(self) -> None:
        self._growth.force_draft()

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        if self.pending_tokens:
            self.prefill(self._length)
        self._drafted = []
        root = self._world.token_before(self._length)
        if not self._growth.begin_round(draft_length):
            return TokenTree.chain(root)
        value = 1.0
        for at in range(self._length, min(self._length + draft_length, self._world.end)):
            self._world.spend(self._draft_cost())
            children = self._growth.grow_level([value], lambda _, at=at: self._confidence(at))[0]  # type: ignore[misc]
            if not children.path_probs:
                break
            self._drafted.append(self._world.predict(self._trace, at, wrong=1, whole=self._whole))
            value = children.path_probs[0]
            if not children.expand_count:
                break
        self._growth.finish_draft()
        return TokenTree.chain(root, self._drafted)

    def _confidence(self, at: int) -> NDArray[np.float64]:
        return self._trace.confidence[at - self._world.text.prompt_tokens :][:1]

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        self._growth.record_verify_pass(tree.width)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for i, (guess, token) in enumerate(zip(self._drafted, tokens, strict=False)):
            self._growth.record_outcome(self._confidence(self._length + i), 0 if guess == token else None)
            if guess != token:
                break
        if self._drafted:
            self._run = self._length + min(len(self._drafted), len(tokens)) - 1
        self._drafted = []
        self._length += len(tokens)


class _Lookup(Drafter):
    name = "lookup"
    is_lookup = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._length = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self._length = len(tokens)

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        world, trace, drafted = self._world, self._world.text.lookup, list[int]()
        if trace is not None and trace.has_draft is not None:
            for at in range(self._length, min(self._length + draft_length, world.end)):
                if not trace.has_draft[at - world.text.prompt_tokens]:
                    break
                drafted.append(world.predict(trace, at, wrong=2))
        return TokenTree.chain(world.token_before(self._length), drafted)

    def commit(self, tokens: tuple[int, ...]) -> None:
        self._length += len(tokens)
