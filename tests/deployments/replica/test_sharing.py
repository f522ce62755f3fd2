"""What replicas have learned of drafting reaches the others, until it is flushed, and what they
generate those that draft from their model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors import model_database
from actors.stop import stop_actors
from deployments.replica import sharing
from deployments.replica.sharing import ClusterSharing
from hdserve.config import DraftingConfig, ModelConfig, ModelDatabaseConfig
from hdserve.core import SamplingParams, Sequence
from hdserve.databases.snapshot import DatabaseKey
from hdserve.drafting.registry import merge_drafter_states
from hdserve.engine.async_engine import AsyncEngine
from hdserve.engine.host import ModelHost
from tests.clusters import local_ray
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAMESPACE = "tenant"


class Replica:
    """A model server without its server."""

    def __init__(
        self,
        name: str,
        config: ModelDatabaseConfig,
        model_name: str = "shared-model",
        draft_from: tuple[str, ...] = (),
    ) -> None:
        model = ModelConfig(
            name=model_name,
            model="hdserve-tiny",
            draft_from=draft_from,
            drafting=DraftingConfig(adapts_budget=False),  # a pause is no time to learn
        )
        self.host = ModelHost(model, on_output=self._publish)
        self.engine = AsyncEngine(self.host.make_engine, 8)
        self.engine.start()
        self.sharing = ClusterSharing(self.host, self.engine, config, name)
        self.sharing.start()
        self.sharing.use(NAMESPACE)
        self._num_requests = 0

    def _publish(self, namespace: str, token_ids: list[int]) -> None:
        self.sharing.publish(namespace, token_ids)

    def generate(self, num_tokens: int) -> None:
        asyncio.run(self._generate(num_tokens))

    async def _generate(self, num_tokens: int) -> None:
        self._num_requests += 1
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=self._num_requests)
        seq = Sequence(str(self._num_requests), [5, 6, 7], params, namespace=NAMESPACE)
        async for _ in self.engine.generate(seq):
            pass

    @property
    def num_learned_tokens(self) -> int:
        """Of the namespace, here and elsewhere."""

        async def ask() -> int:
            return await self.engine.ask(
                lambda engine: engine.drafters._drafters[0].calibration(NAMESPACE).num_tokens  # type: ignore[attr-defined]
            )

        return asyncio.run(ask())

    def close(self) -> None:
        self.engine.close()
        self.sharing.close()


@pytest.fixture
def config(tmp_path: Path) -> Iterator[ModelDatabaseConfig]:
    with local_ray():
        yield ModelDatabaseConfig(
            snapshot_dir=tmp_path, publish_interval_s=0.05, poll_interval_s=0.1
        )


def test_a_flush_returns_drafting_to_the_prior_everywhere(config: ModelDatabaseConfig) -> None:
    """Also in the actor, so that a replica that comes later does not get it."""
    one, two = (Replica(name, config) for name in ("one", "two"))
    key = DatabaseKey("shared-model", one.host.tokenizer.fingerprint)
    try:
        one.generate(1500)
        eventually(lambda: two.num_learned_tokens >= 1000)
        actor = model_database.get_or_create(key, config, merge_drafter_states)
        ray.get(actor.flush.remote(NAMESPACE), timeout=WAIT_S)
        eventually(lambda: two.num_learned_tokens == 0)
        eventually(lambda: one.num_learned_tokens == 0)
        late = Replica("late", config)
        try:
            assert late.sharing._mirror.wait_until_current(WAIT_S)
            assert late.num_learned_tokens == 0
        finally:
            late.close()
    finally:
        one.close()
        two.close()
        stop_actors(model=key.model)


def test_what_was_learned_elsewhere_survives_a_replica_whose_messages_wait(
    config: ModelDatabaseConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learns last says that it was learned after what it learned first, so both have to
    reach the actor."""
    monkeypatch.setattr(sharing, "_STATES_INTERVAL_S", 0.0)
    waiting = Replica("waiting", config.model_copy(update={"publish_interval_s": 3600.0}))
    other = Replica("other", config)
    key = DatabaseKey("shared-model", other.host.tokenizer.fingerprint)
    try:
        waiting.generate(1100)
        num_first = waiting.num_learned_tokens
        waiting.generate(1100)
        other.generate(1050)
        num_other = other.num_learned_tokens
        actor = model_database.get_or_create(key, config, merge_drafter_states)
        eventually(lambda: NAMESPACE in ray.get(actor.info.remote(), timeout=WAIT_S)["namespaces"])
        assert num_first < waiting.num_learned_tokens
        waiting.sharing.close()
        eventually(lambda: other.num_learned_tokens > num_other)
        assert other.num_learned_tokens == num_first + num_other
    finally:
        waiting.close()
        other.close()
        stop_actors(model=key.model)


def test_what_another_model_generates_arrives_where_it_is_drafted_from(
    config: ModelDatabaseConfig,
) -> None:
    """In a database of its own."""
    other = Replica("other", config, "other-model")
    reader = Replica("reader", config, draft_from=("other-model",))
    try:
        other.generate(50)
        eventually(lambda: reader.host.databases["other-model"].num_entries == 1)
        assert reader.host.own_database.num_entries == 0
    finally:
        other.close()
        reader.close()
        for model in ("other-model", "shared-model"):
            stop_actors(model=model)
