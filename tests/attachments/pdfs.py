"""Small PDF files, good and hostile ones, written by hand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

_FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def pdf(objects: Sequence[bytes]) -> bytes:
    """A PDF file with these objects, of which the first is the catalogue."""
    file, offsets = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    size = len(objects) + 1
    return file + head + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(file))


def page_with(content: bytes, filters: bytes = b"") -> bytes:
    """A PDF file with one page of this content."""
    page = b"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F 4 0 R >> >> /Contents 5 0 R >>"
    stream = b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), filters, content)
    return pdf(
        (
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            page,
            _FONT,
            stream,
        )
    )


def text_pdf(text: str) -> bytes:
    """A PDF file that shows a text."""
    return page_with(b"BT /F 12 Tf 50 700 Td (%s) Tj ET" % text.encode("ascii"))


def expanding_pdf() -> bytes:
    """A file whose page has 4 GiB of content after decompression."""
    inner = zlib.compress(b"\n" * (64 << 20), 9)
    return page_with(zlib.compress(inner * 64, 9), b"/Filter [/FlateDecode /FlateDecode]")


def slow_pdf() -> bytes:
    """A file whose page has millions of drawing commands in 100 KiB."""
    return page_with(zlib.compress(b"q 1 0 0 1 0 0 cm Q\n" * 3_000_000, 9), b"/Filter /FlateDecode")


def circular_pdf() -> bytes:
    """A file whose page tree contains itself."""
    return pdf(
        (b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 1000000000 >>")
    )
