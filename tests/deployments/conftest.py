"""What the tests of several files ask: a server, which is started once, grammars, and an actor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import openai
import pytest

from actors.statistics_database import StatisticsClient, StatisticsDatabaseActor
from hdserve.engine.structured_output import grammar
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.serving import ServedApplication


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who asks the shared server comes last, so that it does not run beside all others."""
    items.sort(key=lambda item: "bundled_application" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="package", autouse=True)
def tried_grammars() -> Iterator[None]:
    """Each grammar is tried once in a process of its own, not again after each text that it does
    not allow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "memory_bytes", cache(grammar.memory_bytes))
        yield


@pytest.fixture(scope="package")
def bundled_application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """The default application's models, which draft on a machine too busy for drafts to pay, and
    are exact, so that answers can be compared.

    The second takes prompts in short chunks: however they are cut, answers are the same.
    """
    drafting = {"adapts_budget": False}
    tiny = {
        "name": "hdserve-tiny",
        "model": "hdserve-tiny",
        "num_cpus": 0.2,
        "drafting": drafting,
        "engine": {"exact": True},
    }
    mini = {
        "name": "hdserve-mini",
        "model": "hdserve-mini",
        "num_cpus": 0.2,
        "drafting": drafting,
        "engine": {"exact": True, "dtype": "float32", "prefill_chunk_tokens": 48},
    }
    with ServedApplication(tmp_path_factory.mktemp("serve"), {"models": [tiny, mini]}) as served:
        yield served


@pytest.fixture(scope="module")
def application(bundled_application: ServedApplication) -> ServedApplication:
    """The server of the files that have none of their own."""
    return bundled_application


@pytest.fixture(scope="module")
def mini_application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    """One model, as it is without options."""
    config = {"models": [{"name": "hdserve-mini", "model": "hdserve-mini"}]}
    with ServedApplication(tmp_path_factory.mktemp("serve"), config) as served:
        yield served


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer("hdserve-mini")


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    """Grammars of ``tokenizer``, each of which is compiled once."""
    return Grammars(tokenizer, tokenizer.vocab_size, {2})


@pytest.fixture
def statistics_actor(monkeypatch: pytest.MonkeyPatch) -> StatisticsDatabaseActor:
    """One of this process, where a replica would ask that of the cluster."""
    actor = StatisticsDatabaseActor()

    def ask(_client: StatisticsClient, _timeout_s: float, method: str, *args: object) -> object:
        return getattr(actor, method)(*args)

    monkeypatch.setattr(StatisticsClient, "_ask", ask)
    return actor


@pytest.fixture(scope="module")
def client(application: ServedApplication) -> openai.OpenAI:
    """The OpenAI client of the ``application`` of a file."""
    return application.client()
