"""Verify that speculative decoding gives the same tokens as plain decoding."""

from edgespec.losslessness.cases import (
    Prompt,
    all_cases,
    check_at_once,
    count_replies,
    prompt_tokens,
    read_prompts,
)
from edgespec.losslessness.report import Divergence, MethodResult, VerifyReport
from edgespec.losslessness.verify import verify

__all__ = [
    "Divergence",
    "MethodResult",
    "Prompt",
    "VerifyReport",
    "all_cases",
    "check_at_once",
    "count_replies",
    "prompt_tokens",
    "read_prompts",
    "verify",
]
