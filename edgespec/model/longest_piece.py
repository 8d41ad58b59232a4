"""Find the longest token of a vocabulary, which gives a lower bound on the token count of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["longest_piece_bytes"]

# Vocabulary entries for all bytes that UTF-8 uses, in GPT-2's format.
_BYTE_LEVEL = frozenset(map(chr, [*range(33, 127), *range(161, 173), *range(174, 324)])) - frozenset(
    map(chr, [0xC0, 0xC1, *range(0xF5, 0x100)])
)
_BYTE_FALLBACK = frozenset(
    f"<0x{byte:02X}>" for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5
)


def longest_piece_bytes(entries: Mapping[str, int], raw_piece: Callable[[int], bytes]) -> int:
    """Return the length of the longest token in bytes, or 0 if tokens can represent text of any length.

    Args:
        entries: The token id of each vocabulary entry. No token may be longer than its entry.
        raw_piece: Returns the bytes of a token.
    """
    if not (entries.keys() >= _BYTE_LEVEL or entries.keys() >= _BYTE_FALLBACK):
        return 0
    longest = 0
    for entry in sorted(entries, key=lambda entry: len(entry.encode()), reverse=True):
        if len(entry.encode()) <= longest:
            break
        longest = max(longest, len(raw_piece(entries[entry])))
    return longest
