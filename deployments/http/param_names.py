"""Errors that name a parameter as the request does."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import TypeVar

from hdserve.errors import RequestError

T = TypeVar("T")


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Within the block, make errors use the names that parameters have in the request.

    Replaced are internal names with an underscore anywhere in a message; others, which may be
    ordinary words, only at its beginning.

    Args:
        names: the request's names, by the internal ones; a field by its path, whose first name is
            the parameter.
    """
    try:
        yield
    except RequestError as error:
        message = error.message
        for inside, name in names.items():
            place = rf"\b{inside}\b" if "_" in inside else rf"^{inside}(?=:)"
            message = re.sub(place, name, message)
        found = names.get(error.param or "")
        param = error.param if found is None else found.partition(".")[0]
        if (message, param) == (error.message, error.param):
            raise
        raise type(error)(message, param) from error


async def with_params_named(
    names: Mapping[str, str], found: AsyncGenerator[T]
) -> AsyncGenerator[T]:
    """Yield the items of ``found``; names in its errors are replaced as by :func:`params_named`."""
    with params_named(names):
        async with aclosing(found):
            async for item in found:
                yield item
