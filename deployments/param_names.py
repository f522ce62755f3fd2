"""Errors that name a parameter as the request does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hdserve.errors import RequestError


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised within speak of parameters by the names they have in the request.

    Args:
        names: what the request calls them, by what they are called inside.
    """
    try:
        yield
    except RequestError as error:
        message = error.message
        for inside, name in names.items():
            message = re.sub(rf"\b{inside}\b", name, message)
        param = names.get(error.param or "", error.param)
        if (message, param) == (error.message, error.param):
            raise
        raise type(error)(message, param) from error
