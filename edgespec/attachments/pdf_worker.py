"""Child-process script that extracts the text of one PDF file.

Reads the file from stdin and writes a JSON array `[text, error]` to stdout. One of the two is always empty.
"""

from __future__ import annotations

import io
import json
import signal
import sys
from contextlib import suppress

__all__ = ["main"]

# Maximum CPU time of this process in seconds, and maximum size of its address space in bytes.
_CPU_SECONDS = 30.0
_MEMORY_BYTES = 1 << 30
_MAX_PAGES = 2_000


def main() -> None:
    """Extract the text of the PDF file on stdin."""
    _set_limits()
    try:
        text, problem = _extracted(sys.stdin.buffer.read())
    except MemoryError:
        text, problem = "", "extracting its text needs too much memory"
    except Exception:
        # pypdf can raise almost any exception on a damaged file.
        text, problem = "", "the file is damaged"
    sys.stdout.write(json.dumps([text, problem]))


def _extracted(data: bytes) -> tuple[str, str]:
    """Return the text of a PDF file and an error message. One of the two is empty."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    reader = PdfReader(io.BytesIO(data))
    try:
        if len(reader.pages) > _MAX_PAGES:
            return "", f"it has {len(reader.pages):,} pages, but edgespec reads at most {_MAX_PAGES:,}"
        pages = [page.extract_text().strip() for page in reader.pages]
    except (DependencyError, FileNotDecryptedError):
        return "", "it is password-protected"
    text = "\n\n".join(filter(None, pages))
    return (
        (text, "")
        if text
        else ("", "the file contains no text, perhaps because the pages are scanned images")
    )


def _set_limits() -> None:
    if sys.platform != "win32":
        import resource

        signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
        # macOS does not support this limit.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
