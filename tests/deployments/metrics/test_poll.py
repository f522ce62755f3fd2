"""Who is silent is left out of ``/metrics``, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deployments.metrics.poll import MetricsPoll
from deployments.metrics.samples import Report, Sample
from deployments.runtime import actor_options
from tests.clusters import connected_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_REPLICAS = 3
WAIT_S = 60.0


class Reporting:
    """A replica of a model, or a gateway; one of them can be made to say nothing more."""

    def __init__(self, metric: str, labels: tuple[str, ...]) -> None:
        self._sample = Sample(metric, 1, labels)
        self._is_silent = False

    async def report(self) -> Report:
        if self._is_silent:
            await asyncio.Event().wait()
        return Report(self.name, (self._sample,))

    async def fall_silent(self) -> str:
        """Who does from now on."""
        self._is_silent = True
        return self.name

    @property
    def name(self) -> str:
        return serve.get_replica_context().replica_id.unique_id


class Polling:
    """A gateway that is asked for metrics."""

    def __init__(self, model: Any, gateways: Any) -> None:
        self._asked = {"model": model.options(_by_reference=False), "gateway": gateways}
        self._poll = MetricsPoll({"m": self._asked["model"]}, gateways)

    async def text(self) -> str:
        return (await self._poll.text()).decode()

    async def silence(self, kind: str) -> str:
        """One replica of a model, or one gateway."""
        name: str = await self._asked[kind].fall_silent.remote()
        return name

    async def forget(self) -> None:
        """What was heard until now."""
        self._poll = MetricsPoll({"m": self._asked["model"]}, self._asked["gateway"])


@pytest.fixture(scope="module")
def polling() -> Iterator[Any]:
    options = actor_options(0.1, 1000)

    def deployment(name: str) -> Any:
        decorate = serve.deployment(name=name, num_replicas=NUM_REPLICAS, ray_actor_options=options)
        return decorate(Reporting)

    model = deployment("model").bind("vllm:prompt_tokens", ())
    gateways = deployment("gateways").bind("hdserve_request_timeouts", ("m",))
    application = serve.deployment(ray_actor_options=options)(Polling).bind(model, gateways)
    with connected_cluster(2):
        try:
            serve.start(proxy_location="Disabled")
            yield serve.run(application, route_prefix=None)
        finally:
            serve.shutdown()


def heard(polling: Any, label: str) -> set[str]:
    """Who is in the text."""
    text = polling.text.remote().result(timeout_s=WAIT_S)
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels[label] for sample in samples if label in sample.labels}


@pytest.mark.parametrize(("kind", "label"), [("model", "engine"), ("gateway", "gateway")])
def test_a_silent_replica_hides_no_other(polling: Any, kind: str, label: str) -> None:
    everybody = heard(polling, label)
    assert len(everybody) == NUM_REPLICAS
    silent = polling.silence.remote(kind).result(timeout_s=WAIT_S)
    polling.forget.remote().result(timeout_s=WAIT_S)
    assert heard(polling, label) == everybody - {silent}
