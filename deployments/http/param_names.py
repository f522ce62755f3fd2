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
    """Have errors that are raised within speak of parameters by the names they have in the request.

    Their messages name only parameters whose name is no word of the language, or that they begin
    with.

    Args:
        names: what the request calls them, by what they are called inside; a field by the way to
            it, of which the parameter is the first name.
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
    """Yield what ``found`` gives; its errors are as :func:`params_named` has them."""
    with params_named(names):
        async with aclosing(found):
            async for item in found:
                yield item
