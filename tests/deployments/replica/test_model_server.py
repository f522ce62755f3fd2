"""What a replica sends, message by message."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from deployments.generation import Delta, GenerationRequest, Summary
from deployments.off_loop import MAX_SHARED_SIZE
from deployments.request_faults import RequestFault
from hdserve.config.deployed import deployment_name
from hdserve.databases.statistics_info import INFO_NAME
from hdserve.errors import InvalidRequest, Overloaded, PromptTooLong
from tests.clusters import connected_cluster
from tests.serving import ServedApplication
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "hdserve-mini"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of statistics databases."""
    return tmp_path_factory.mktemp("statistics")


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Any]:
    """Of a served model, past the gateway."""
    model = {"name": MODEL, "model": MODEL, "num_cpus": 0.2}
    config = {
        "models": [model],
        "model_database": {"is_enabled": False},
        "statistics_root": str(root),
    }
    directory = tmp_path_factory.mktemp("serve")
    with connected_cluster(2) as cluster, ServedApplication(directory, config, cluster.address):
        found = serve.get_deployment_handle(deployment_name(MODEL), "hdserve")
        yield found.options(stream=True)


def test_a_prompts_log_probabilities_are_sent_once(handle: Any) -> None:
    """However many choices it has, and whichever of them is first."""
    request = GenerationRequest(
        "r",
        prompts=("I want to book a table", "Is there a train?"),
        sampling={"max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 2},
        prompt_logprobs_param="prompt_logprobs",
        num_choices=4,
    )
    messages = list(handle.generate.remote(request))
    deltas = [record for message in messages for record in message if isinstance(record, Delta)]
    assert len({(delta.prompt_index, delta.choice_index) for delta in deltas}) == 8
    for prompt_index in (0, 1):
        own = [delta for delta in deltas if delta.prompt_index == prompt_index]
        assert [bool(delta.prompt_logprobs) for delta in own] == [True] + [False] * (len(own) - 1)


def test_no_delta_waits_for_the_counts_of_a_prediction(handle: Any) -> None:
    """The summary, which has them, comes by itself."""
    request = GenerationRequest(
        "r",
        messages=({"role": "user", "content": "Where is the museum?"},),
        sampling={"max_tokens": 8, "ignore_eos": True},
        num_choices=2,
        prediction="The museum is in the centre of the town.",
    )
    *messages, last = handle.generate.remote(request)
    assert [type(record) for record in last] == [Summary]
    records = [record for message in messages for record in message]
    assert {type(record) for record in records} == {Delta}
    assert sum(len(record.token_ids) for record in records) == 16


def test_a_request_at_fault_is_answered(handle: Any) -> None:
    """By a value: Ray Serve would log a traceback of what is raised, and count it as an error of
    the replica."""
    long = GenerationRequest("r", prompts=("word " * 5000,))
    (message,) = handle.generate.remote(long)
    assert isinstance(message, RequestFault)
    assert isinstance(message.error, PromptTooLong)
    unary = handle.options(stream=False)
    answer = unary.detokenize.remote([10**9], "tokens").result()
    assert isinstance(answer, RequestFault)
    assert answer.error.param == "tokens"
    answer = unary.check_statistics.remote("anywhere").result()
    assert isinstance(answer, RequestFault)


def test_a_replica_that_shares_nothing_forgets(handle: Any) -> None:
    """What it generated in one namespace, and nothing of another."""
    unary = handle.options(stream=False)

    def num_entries() -> float:
        samples = unary.report.remote().result().samples
        (found,) = (
            sample.value
            for sample in samples
            if (sample.name, sample.labels) == ("hdserve_database_entries", ("model",))
        )
        return float(found)

    def generate(namespace: str) -> None:
        sampling = {"max_tokens": 16, "ignore_eos": True}
        prompts = ("Where is the museum?",)
        request = GenerationRequest("r", prompts=prompts, sampling=sampling, namespace=namespace)
        num_before = num_entries()
        assert list(handle.generate.remote(request))
        eventually(lambda: num_entries() > num_before)

    generate("kept")
    num_kept = num_entries()
    generate("forgotten")
    assert unary.forget.remote("nobody").result() is None
    assert num_entries() > num_kept
    assert unary.forget.remote("forgotten").result() is None
    assert num_entries() == num_kept


def test_few_large_texts_wait_and_the_replica_still_answers(handle: Any) -> None:
    """One after the other is read; more than some are refused, and a place is free again."""
    unary, large = handle.options(stream=False), "word " * 60_000
    waiting = [unary.tokenize.remote(large, True) for _ in range(24)]
    assert unary.describe.remote().result().num_slots
    found = [each.result() for each in waiting]
    refused = [answer.error for answer in found if isinstance(answer, RequestFault)]
    assert {type(error) for error in refused} == {Overloaded}
    assert len(found) - len(refused) >= 16
    token_ids = unary.tokenize.remote(large, True).result()
    assert len(token_ids) > 60_000
    many = token_ids * (1 + MAX_SHARED_SIZE // len(token_ids))
    waiting = [unary.token_texts.remote(many) for _ in range(24)]
    texts = [each.result() for each in waiting]
    assert {len(each) for each in texts if isinstance(each, list)} == {len(many)}
    assert any(isinstance(each, RequestFault) for each in texts)


def test_checks_of_statistics_that_hang_hold_up_no_request(handle: Any, root: Path) -> None:
    """However many are asked for: while one reads a volume that hangs, the others are refused."""
    unary, hanging = handle.options(stream=False), root / "hanging"
    hanging.mkdir()
    os.mkfifo(hanging / INFO_NAME)
    checks = [unary.check_statistics.remote("hanging") for _ in range(8)]
    try:
        assert len(unary.tokenize.remote("word " * 2000, True).result(timeout_s=WAIT_S)) >= 2000
    finally:
        with (hanging / INFO_NAME).open("r+b", buffering=0):
            shutil.rmtree(hanging)
    refusals = {type(check.result(timeout_s=WAIT_S).error) for check in checks}
    assert refusals == {InvalidRequest, Overloaded}
    refusal = unary.check_statistics.remote("hanging").result().error
    assert isinstance(refusal, InvalidRequest)
