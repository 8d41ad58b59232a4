"""The cases that `verify` compares, and the number of replies that it generates for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgespec.errors import OptionError
from edgespec.losslessness.prompts import Prompt

__all__ = ["DEFAULT_SAMPLES", "Case", "all_cases", "check_at_once", "count_case_replies", "count_replies"]

# Default number of replies per prompt, method, temperature and draft length in rejection mode.
DEFAULT_SAMPLES = 200


class Case(NamedTuple):
    method: str
    prompt: Prompt
    temperature: float
    draft_length: int

    def is_sampled(self, acceptance: str) -> bool:
        """Return whether `verify` compares the distribution of replies instead of their tokens."""
        return acceptance == "rejection" and self.temperature > 0


def all_cases(
    prompts: Sequence[Prompt],
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_lengths: Sequence[int],
) -> list[Case]:
    """Return one case per prompt, temperature, method and draft length."""
    return [
        Case(method, prompt, temperature, draft_length)
        for prompt in prompts
        for temperature in temperatures
        for method in methods
        for draft_length in (draft_lengths if method != "none" else draft_lengths[:1])
    ]


def count_replies(
    prompts: Sequence[Prompt],
    *,
    methods: Sequence[str],
    temperatures: Sequence[float],
    draft_lengths: Sequence[int],
    acceptance: str = "invariant",
    samples: int = DEFAULT_SAMPLES,
) -> int:
    """Return the number of replies that `verify` generates with these arguments.

    Args:
        prompts: The prompts.
        methods: The methods to compare.
        temperatures: The temperatures of the replies.
        draft_lengths: The draft lengths of the replies.
        acceptance: The acceptance rule: `invariant` or `rejection`.
        samples: Number of replies per case in rejection mode, as for `verify`.
    """
    return sum(
        count_case_replies(all_cases(prompts, methods, temperatures, draft_lengths), acceptance, samples)
    )


def count_case_replies(cases: Sequence[Case], acceptance: str, samples: int) -> tuple[int, int]:
    """Return how many replies are compared token by token, and how many are sampled."""
    sampled = [case for case in cases if case.is_sampled(acceptance)]
    plain = {(case.prompt.name, case.temperature) for case in cases if not case.is_sampled(acceptance)}
    return len(plain) + len(cases) - len(sampled), samples * len(sampled)


def check_at_once(acceptance: str, cases: int) -> None:
    """Raise OptionError if `verify` cannot generate concurrent replies with these arguments.

    Args:
        acceptance: The acceptance rule.
        cases: The number of cases.
    """
    if acceptance != "invariant":
        raise OptionError(
            f"--acceptance {acceptance} cannot be combined with --parallel",
            "omit one of them, because concurrent replies are compared token by token",
            option="acceptance",
            code="option_conflict",
        )
    if cases < 2:
        raise OptionError(
            "there is only one reply, so --parallel has no effect",
            "use more prompts",
            code="option_without_effect",
        )
