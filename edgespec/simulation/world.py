"""A target and drafters that take simulated time and say what a trace has them say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import Drafter
from edgespec.drafters.growth import Growth
from edgespec.engine.acceptance import Acceptance, Invariant
from edgespec.engine.chain import SamplingParams
from edgespec.engine.logits import HostLogits, Logits
from edgespec.engine.loop import decode
from edgespec.engine.sampling import Sampler
from edgespec.engine.stats import Stats
from edgespec.engine.tree import TokenTree
from edgespec.simulation.machines import Machine
from edgespec.simulation.traces import Trace

__all__ = ["World"]

WORDS = 16


class World:
    """One machine and its clock. A reply says the text of a trace, after a prompt of any tokens.

    slowness: how many times longer everything takes, by the seconds gone by: another program, heat.
    """

    room = 1 << 20

    def __init__(self, machine: Machine, slowness: Callable[[float], float] = lambda _: 1.0) -> None:
        self.machine = machine
        self.seconds = 0.0
        self.stats = Stats()
        self._slowness = slowness
        self._text: list[int] = []
        self._length = 0

    def clock(self) -> float:
        """Seconds since the world began."""
        return self.seconds

    def spend(self, plain_steps: float) -> None:
        """Time goes by."""
        self.seconds += plain_steps * self._slowness(self.seconds)

    def verify(self, tree: TokenTree) -> Logits:
        """A pass of the target: it says the text."""
        self.spend(self.machine.curve.v(tree.width))
        rows = np.zeros((tree.width, WORDS), np.float32)
        for node, depth in enumerate(tree.depths):
            rows[node, self._text[(self._length + depth + 1) % len(self._text)]] = 1.0
        return HostLogits(rows)

    def commit(self, path: tuple[int, ...]) -> None:
        """So many tokens are kept."""
        self._length += 1 + len(path)

    def model(self, trace: Trace, growth: Growth, prompt_tokens: int = 1) -> Drafter:
        """A draft model that says what the trace has it say of a reply after such a prompt."""
        return _Model(self, trace, growth, prompt_tokens)

    def reply(
        self, drafter: Drafter | None, trace: Trace, *, prompt_tokens: int = 1, draft_length: int = 16
    ) -> float:
        """Say the whole text of a trace; the seconds that took, what the drafter reads included.

        Raises AssertionError where the tokens are not those of the text.
        """
        random = np.random.default_rng(0)
        self._text = random.integers(0, WORDS, prompt_tokens + len(trace.right)).tolist()
        started, self._length = self.seconds, prompt_tokens - 1
        prompt = self._text[:prompt_tokens]
        if drafter:
            drafter.begin(prompt)
        self.stats = Stats()
        steps = decode(
            self,
            drafter,
            Invariant(),
            Sampler(SamplingParams(temperature=0.0), 0, prompt),
            prompt[-1],
            vocab_size=WORDS,
            draft_length=draft_length if drafter else 0,
            max_tokens=len(trace.right),
            is_stop=lambda _: False,
            is_cancelled=lambda: False,
            stats=self.stats,
        )
        emitted = [token for step in steps for token in step.tokens]
        assert emitted == self._text[prompt_tokens:], "the reply is not the text"
        return self.seconds - started

    def says(self, trace: Trace, prompt_tokens: int, at: int) -> int:
        """What a draft guesses for the token at a place of the text."""
        token = self._text[at]
        return token if trace.right[at - prompt_tokens] else (token + 1) % WORDS


class _Model(Drafter):
    """Chains that a Growth decides on."""

    name = "model"

    def __init__(self, world: World, trace: Trace, growth: Growth, prompt_tokens: int) -> None:
        self._world = world
        self._trace = trace
        self._growth = growth
        self.adapts = growth.adapts
        self._prompt_tokens = prompt_tokens
        self._length = self._run = 0
        self._guessed: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self._run = min(self._run, len(tokens) - 1) if len(tokens) >= self._length else 0
        self._length = len(tokens)
        self._guessed = []

    @property
    def unread(self) -> int:
        return max(self._length - self._run - 2, 0)

    def read(self, at_most: int) -> None:
        self._world.spend(min(self.unread, at_most) * self._world.machine.reading_cost)
        self._run = self._length - 1

    def dare(self) -> None:
        self._growth.dare()

    def propose(self, sampler: Sampler, acceptance: Acceptance, draft_length: int) -> TokenTree:
        self.read(self.unread)
        self._guessed = []
        root = self._world._text[self._length - 1]
        if not self._growth.begins(draft_length):
            self._growth.idle()
            return TokenTree.chain(root)
        value = 1.0
        last = self._prompt_tokens + len(self._trace.right)
        for at in range(self._length, min(self._length + draft_length, last)):
            self._world.spend(self._world.machine.draft_cost)
            children = self._growth.level([value], lambda _, at=at: self._sure(at))[0]  # type: ignore[misc]
            if not children.values:
                break
            self._guessed.append(self._world.says(self._trace, self._prompt_tokens, at))
            value = children.values[0]
            if not children.run:
                break
        self._growth.ends()
        return TokenTree.chain(root, self._guessed)

    def _sure(self, at: int) -> NDArray[np.float64]:
        return self._trace.sure[at - self._prompt_tokens :][:1]

    def observe(self, tree: TokenTree, logits: Logits, sampler: Sampler) -> None:
        self._growth.verified(tree.width)

    def commit(self, tokens: tuple[int, ...]) -> None:
        for i, (guess, token) in enumerate(zip(self._guessed, tokens, strict=False)):
            self._growth.learn(self._sure(self._length + i), 0 if guess == token else None)
            if guess != token:
                break
        if self._guessed:
            self._run = self._length + min(len(self._guessed), len(tokens)) - 1
        self._guessed = []
        self._length += len(tokens)
