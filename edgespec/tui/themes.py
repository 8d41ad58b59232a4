"""The built-in colour themes."""

from __future__ import annotations

from textual.theme import Theme

__all__ = ["DARK", "HIGH_CONTRAST", "LIGHT", "THEMES"]

DARK = Theme(
    name="edgespec-dark",
    dark=True,
    primary="#7aa2c8",
    success="#8ec07c",
    warning="#e5b567",
    error="#e06c75",
    foreground="#d5d8de",
    background="#15171c",
    surface="#1b1e25",
    panel="#20242c",
    variables={
        "muted": "#868d9a",
        "faint": "#3a404c",
        "code": "#1d2129",
        "border-blurred": "#3a404c",
        "scrollbar": "#3a404c",
        "scrollbar-background": "#15171c",
        "scrollbar-background-hover": "#15171c",
        "scrollbar-background-active": "#15171c",
        "block-cursor-text-style": "none",
    },
)

LIGHT = Theme(
    name="edgespec-light",
    dark=False,
    primary="#2c6392",
    success="#2f7420",
    warning="#9a6200",
    error="#b3362f",
    foreground="#24272d",
    background="#fbfaf7",
    surface="#f3f1eb",
    panel="#eceae2",
    variables={
        "muted": "#6a6f78",
        "faint": "#cfccc2",
        "code": "#f1efe8",
        "border-blurred": "#cfccc2",
        "scrollbar": "#cfccc2",
        "scrollbar-background": "#fbfaf7",
        "scrollbar-background-hover": "#fbfaf7",
        "scrollbar-background-active": "#fbfaf7",
        "block-cursor-text-style": "none",
    },
)

# Black, white, and colours with a contrast of at least 7:1 against the background.
HIGH_CONTRAST = Theme(
    name="edgespec-high-contrast",
    dark=True,
    primary="#6cf0ff",
    success="#5dff5d",
    warning="#ffd83d",
    error="#ff9a9a",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#1a1a1a",
    variables={
        "muted": "#d8d8d8",
        "faint": "#8a8a8a",
        "code": "#1a1a1a",
        "border-blurred": "#d8d8d8",
        "scrollbar": "#d8d8d8",
        "scrollbar-background": "#000000",
        "scrollbar-background-hover": "#000000",
        "scrollbar-background-active": "#000000",
        "block-cursor-text-style": "none",
    },
)

THEMES = {"dark": DARK, "light": LIGHT, "high-contrast": HIGH_CONTRAST}
