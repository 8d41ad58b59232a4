"""The one line about a reply: what runs, what that gains and why."""

from __future__ import annotations

import pytest

from edgespec import MethodReport


@pytest.mark.parametrize(
    ("report", "line", "short"),
    [
        (MethodReport("none", "none", "asked for"), "plain decoding: asked for", "plain"),
        (
            MethodReport("model+suffix", "model+suffix", "asked for"),
            "model+suffix: asked for",
            "model+suffix",
        ),
        (
            MethodReport("auto", "model+suffix", "guesses while that pays"),
            "model+suffix (asked for auto): guesses while that pays",
            "model+suffix",
        ),
        (
            MethodReport("auto", "model+suffix", "guesses pay here", "", 0.617, 0.083),
            "model+suffix (asked for auto): +62% ± 8% against plain decoding; guesses pay here",
            "model+suffix +62%",
        ),
        (
            MethodReport("suffix", "suffix", "guesses do not pay", "", -0.02, 0.002),
            "suffix: -2% ± 1% against plain decoding; guesses do not pay",
            "suffix -2%",
        ),
        (
            MethodReport("auto", "model", "guesses pay here", "", 0.004, 0.03),
            "model (asked for auto): +0% ± 3% against plain decoding; guesses pay here",
            "model +0%",
        ),
        (
            MethodReport("auto", "none", "this target is so small", "", -0.13, 0.03),
            "plain decoding (asked for auto): this target is so small; trying cost 13% ± 3% of its speed",
            "plain",
        ),
        (
            MethodReport("auto", "none", "the first token is plain", "", -0.9, 1.3),
            "plain decoding (asked for auto): the first token is plain",
            "plain",
        ),
    ],
)
def test_a_report_in_one_line(report: MethodReport, line: str, short: str) -> None:
    assert report.line == line
    assert report.short == short
