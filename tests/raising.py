"""Assert which error is raised, by class, code and option, but not by its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from edgespec.errors import EdgespecError


@contextmanager
def raises(
    kind: type[EdgespecError], *quoted: object, code: str = "", option: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Check that the `with` block raises an error.

    Args:
        kind: The class of the error.
        quoted: Values that the message quotes, such as a path, or a word that tells apart errors with the
            same code.
        code: The code. Defaults to that of the class.
        option: The option that the error refers to, if it matters.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == (code or kind.code), repr(error)
    for value in quoted:
        assert str(value) in str(error), repr(error)
    if option is not None:
        assert error.option == option, repr(error)
