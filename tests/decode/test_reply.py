"""The one-line summary of the method that a reply used."""

from __future__ import annotations

import pytest

from edgespec import MethodReport


@pytest.mark.parametrize(
    ("report", "summary", "speed_up"),
    [
        (MethodReport("none", "none", "asked for"), "plain decoding: asked for", ""),
        (MethodReport("model+suffix", "model+suffix", "asked for"), "model+suffix: asked for", ""),
        (
            MethodReport("auto", "model+suffix", "drafts while it saves time"),
            "model+suffix (method auto): drafts while it saves time",
            "",
        ),
        (
            MethodReport("auto", "model+suffix", "drafts save time", "", 0.617, 0.083),
            "model+suffix (method auto): speed-up 1.62x ± 0.08; drafts save time",
            "1.62x ± 0.08",
        ),
        (
            MethodReport("suffix", "suffix", "drafts cost time", "", -0.02, 0.002),
            "suffix: speed-up 0.98x ± 0.01; drafts cost time",
            "0.98x ± 0.01",
        ),
        (
            MethodReport("auto", "none", "this is small", "", -0.13, 0.03),
            "plain decoding (method auto): this is small; trying drafts made the reply 13% ± 3% slower",
            "0.87x ± 0.03",
        ),
        (
            MethodReport("auto", "none", "no draft was right", "", -0.41, 0.23),
            "plain decoding (method auto): no draft was right",
            "0.59x ± 0.23",
        ),
        (
            MethodReport("auto", "none", "the first token has no draft", "", -0.9, 1.3),
            "plain decoding (method auto): the first token has no draft",
            "0.10x ± 1.30",
        ),
    ],
)
def test_report_in_one_line(report: MethodReport, summary: str, speed_up: str) -> None:
    assert report.summary == summary
    assert report.speed_up_text == speed_up
