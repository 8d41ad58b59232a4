"""The first screen suggests a real model that fits the memory edgespec may use."""

from __future__ import annotations

import edgespec
from edgespec.tui.texts import notices


def test_the_first_screen_suggests_a_model_that_fits() -> None:
    with edgespec.load("demo", threads=1, memory="1GiB") as runtime:
        assert notices(runtime) == [runtime.target.notice]
    with edgespec.load("demo", threads=1, memory="12GiB") as runtime:
        (notice,) = notices(runtime)
        assert notice == (
            "The demo is a toy for offline use. Press F9 to choose and download a real model. These fit this"
            " machine: 1b-q4 (772 MiB), 3b-q4 (2.6 GiB), 8b-q4 (5.3 GiB)."
        )
