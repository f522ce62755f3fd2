"""Errors that name a parameter as the request does."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from copy import copy
from typing import TypeVar

from hdserve.errors import RequestError

T = TypeVar("T")

_NAME_AND_COLON = re.compile(r"[\w.]+(?=:)")
_QUOTED_OR_WORD = re.compile(
    r"""(?<!\w)'(?:\\.|[^'\\])*(?:'|\\?\Z)|(?<!\w)"(?:\\.|[^"\\])*(?:"|\\?\Z)|`[^`]*(?:`|\Z)"""
    r"""|(?<![\w./-])\w+(?![\w/-]|\.\w)""",
    re.DOTALL,
)
"""What is between quotation marks, also where the second is cut off, or a word outside of paths."""


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, make errors use the names that parameters have in the request; all else of
    them stays.

    In messages internal names with an underscore are replaced; others, which may be ordinary words,
    only at the beginning, before a colon.  What a message quotes is not its own: words in quotation
    marks, parts of paths, and what follows a colon behind more than a name.

    Args:
        names: the request's names, by the internal ones; a field by its path, whose first name is
            the parameter.
    """
    try:
        yield
    except RequestError as error:
        message = _renamed(error.message, names)
        found = names.get(error.param or "")
        param = error.param if found is None else found.partition(".")[0]
        if (message, param) == (error.message, error.param):
            raise
        renamed = copy(error)
        renamed.message, renamed.args, renamed.param = message, (message,), param
        raise renamed from error


def _renamed(message: str, names: Mapping[str, str]) -> str:
    begin = _NAME_AND_COLON.match(message)
    own, colon, quoted = (message, "", "") if begin else message.partition(": ")

    def renamed(found: re.Match[str]) -> str:
        is_name = "_" in found[0] or (begin is not None and found.span() == begin.span())
        return names.get(found[0], found[0]) if is_name else found[0]

    return _QUOTED_OR_WORD.sub(renamed, own) + colon + quoted


async def with_params_named(
    names: Mapping[str, str], found: AsyncGenerator[T]
) -> AsyncGenerator[T]:
    """Yield the items of ``found``; names in its errors are replaced as by :func:`params_named`."""
    with params_named(names):
        async with aclosing(found):
            async for item in found:
                yield item
