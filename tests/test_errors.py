"""Errors cross process boundaries unchanged, each with its HTTP status."""

from __future__ import annotations

import copy
import pickle

import pytest

from hdserve import errors
from hdserve.errors import HdserveError, RequestError

STATUSES = {
    "HdserveError": 500,
    "ConfigError": 500,
    "DatabaseError": 500,
    "SnapshotError": 500,
    "DatabaseGone": 503,
    "DatabaseInUse": 503,
    "UnsupportedModel": 500,
    "UnequalResults": 500,
    "EngineStopped": 503,
    "EngineGone": 503,
    "ShuttingDown": 503,
    "RequestTimeout": 504,
    "RequestError": 500,
    "InvalidRequest": 400,
    "PromptTooLong": 400,
    "Unsupported": 400,
    "Unauthorized": 401,
    "Forbidden": 403,
    "ModelNotFound": 404,
    "NamespaceNotFound": 404,
    "BodyTooSlow": 408,
    "BodyTooLarge": 413,
    "Overloaded": 429,
    "GrammarsOverloaded": 429,
}

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, HdserveError)
}


def test_every_class_is_known_here() -> None:
    """A new error gets a status, a line in the drawing and a row in this test."""
    assert CLASSES.keys() == STATUSES.keys()
    for name in CLASSES:
        assert name in (errors.__doc__ or "")


@pytest.mark.parametrize("name", STATUSES)
def test_pickling_keeps_everything(name: str) -> None:
    """Class, message, parameter and attributes survive pickling and copying."""
    made = CLASSES[name]
    error = made("it is wrong: ü")
    if issubclass(made, RequestError):
        error = made("it is wrong: ü", "top_p")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is made
        assert again.message == str(again) == "it is wrong: ü"
        assert vars(again) == vars(error)


@pytest.mark.parametrize("name", STATUSES)
def test_statuses(name: str) -> None:
    """The gateway answers each error with the documented status and a slug."""
    assert CLASSES[name].status == STATUSES[name]
    slug = CLASSES[name].code
    assert slug == slug.lower()
    assert " " not in slug


def test_slugs_are_distinct() -> None:
    """A client can tell the errors apart by ``code``."""
    slugs = [CLASSES[name].code for name in STATUSES if name not in {"RequestError"}]
    assert len(slugs) == len(set(slugs))
