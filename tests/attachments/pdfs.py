"""Small handwritten PDF files, some valid and some hostile."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

_FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"


def pdf(objects: Sequence[bytes]) -> bytes:
    """Return a PDF file with these objects. The first object is the document catalogue."""
    file, offsets = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    head = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    size = len(objects) + 1
    return file + head + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(file))


def page_with(content: bytes, filters: bytes = b"") -> bytes:
    """Return a PDF file with one page that has this content."""
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
    """Return a PDF file that shows a text."""
    return page_with(b"BT /F 12 Tf 50 700 Td (%s) Tj ET" % text.encode("ascii"))


def expanding_pdf() -> bytes:
    """Return a file whose page decompresses to 4 GiB of content."""
    inner = zlib.compress(b"\n" * (64 << 20), 9)
    return page_with(zlib.compress(inner * 64, 9), b"/Filter [/FlateDecode /FlateDecode]")


def slow_pdf() -> bytes:
    """Return a file of 100 KiB whose page has millions of drawing commands."""
    return page_with(zlib.compress(b"q 1 0 0 1 0 0 cm Q\n" * 3_000_000, 9), b"/Filter /FlateDecode")


def circular_pdf() -> bytes:
    """Return a file whose page tree contains itself."""
    return pdf(
        (b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 1000000000 >>")
    )
