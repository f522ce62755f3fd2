"""Replicas share what they generate through a real actor, whatever happens to it."""

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import ray

from actors import link as links
from actors import mirror as mirrors
from actors import model_database, settings
from actors.mirror import NAMESPACE_IDLE_S, Mirror
from actors.stop import stop_actors
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.output_files import database_directory
from hdserve.databases.snapshot import DatabaseKey
from tests.actors.readers import count_token
from tests.actors.replicas import Brittle, Replica, quick_config
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Cluster:
    """Mirrors of one model, and its actor."""

    def __init__(self, directory: Path, key: DatabaseKey) -> None:
        self.key = key
        self.config = quick_config(directory)
        self.mirrors: list[Mirror] = []

    def mirror(
        self,
        replica: Replica,
        *namespaces: str,
        key: DatabaseKey | None = None,
        draft_from: tuple[str, ...] = (),
    ) -> Mirror:
        mirror = Mirror(key or self.key, self.config, replica, draft_from=draft_from)
        self.mirrors.append(mirror)
        mirror.start()
        for namespace in namespaces:
            mirror.use(namespace)
        return mirror

    def actor(self) -> ray.actor.ActorHandle:
        return model_database.get_or_create(self.key, self.config)

    def pid(self) -> int:
        return ray.get(self.actor().info.remote(), timeout=WAIT_S)["pid"]

    def count(self, namespace: str, token_id: int) -> int:
        """How often the actor has a token."""
        part = ray.get(self.actor().export.remote(namespace), timeout=WAIT_S)
        return count_token(part.message, token_id)

    def kill(self) -> None:
        """Kill the actor's process; Ray starts it again.  Returns when the new one answers."""
        before = self.pid()
        ray.kill(self.actor(), no_restart=False)

        def is_restarted() -> bool:
            try:
                return self.pid() != before
            except ray.exceptions.RayError:
                return False

        eventually(is_restarted)

    def close(self) -> None:
        for mirror in self.mirrors:
            mirror.close()


@contextmanager
def key_of_actors() -> Iterator[DatabaseKey]:
    """Of a model that is no other's; its actors are ended."""
    key = DatabaseKey(f"model-{uuid4().hex[:8]}", "f" * 32)
    yield key
    stop_actors(model=key.model)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """With an actor that is of one test, which may end it and have it forget."""
    with key_of_actors() as key, closing(Cluster(tmp_path, key)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_key(ray_cluster: None) -> Iterator[DatabaseKey]:
    with key_of_actors() as key:
        yield key


@pytest.fixture(scope="module")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def shared(shared_directory: Path, shared_key: DatabaseKey) -> Iterator[Cluster]:
    """With the actor of other tests, too, which keep to a namespace of their own."""
    with closing(Cluster(shared_directory, shared_key)) as cluster:
        yield cluster


@pytest.fixture
def namespace() -> str:
    return uuid4().hex


def test_two_replicas_see_each_others_outputs_and_not_their_own(shared, namespace):
    first, second = Replica(), Replica()
    one, two = shared.mirror(first, namespace), shared.mirror(second, namespace)
    one.publish(namespace, [1, 2, 3])
    one.publish(namespace, np.array([4, 5], np.uint32))
    two.publish(namespace, (6, 7))
    eventually(lambda: second.texts(namespace) == [[1, 2, 3], [4, 5]])
    eventually(lambda: first.texts(namespace) == [[6, 7]])
    assert one.wait_until_current(WAIT_S)
    assert two.wait_until_current(WAIT_S)
    assert (first.texts(namespace), second.texts(namespace)) == ([[6, 7]], [[1, 2, 3], [4, 5]])
    eventually(lambda: one.stats().num_published_outputs == 2)
    stats = one.stats()
    assert stats.num_received_outputs == 1
    assert 0 < stats.last_poll_age_s < WAIT_S


def test_a_mirror_that_never_heard_of_its_actor_grows_old():
    """So that an alert on the age tells of an actor that cannot be started."""
    key = DatabaseKey("nobody", "f" * 32)
    mirror = Mirror(key, ModelDatabaseConfig(), Replica())
    age_s = mirror.stats().last_poll_age_s
    time.sleep(0.01)
    assert mirror.stats().last_poll_age_s > age_s
    mirror.close()


def test_a_new_replica_catches_up_before_its_first_request(shared, namespace):
    one = shared.mirror(Replica())
    for number in range(300):
        one.publish(namespace, [number] * 500)
    eventually(lambda: one.stats().num_published_outputs == 300)
    late = Replica()
    two = shared.mirror(late, namespace)
    assert two.wait_until_current(WAIT_S)
    assert late.texts(namespace) == [[number] * 500 for number in range(300)]


def test_a_replica_with_other_settings_says_so(cluster, tmp_path, caplog, monkeypatch):
    """The actor outlives a deployment; it has the new settings once an operator has ended it."""
    monkeypatch.setattr(settings, "_TIMEOUT_S", WAIT_S)  # in which it may have to start
    before = cluster.config
    one = cluster.mirror(Replica(), "n")
    assert one.wait_until_current(WAIT_S)
    assert not said_of_settings(caplog)
    new = {"max_bytes": 2**20, "snapshot_dir": tmp_path / "new", "publish_interval_s": 0.07}
    cluster.config = before.model_copy(update=new)
    two = cluster.mirror(Replica(), "n")
    assert two.wait_until_current(WAIT_S)
    assert not ray.get(cluster.actor().info.remote(), timeout=WAIT_S)["directory"].startswith(
        str(tmp_path / "new")
    )
    (record,) = said_of_settings(caplog)
    assert record.levelname == "WARNING"
    text = record.getMessage()
    assert f"model_database.max_bytes {before.max_bytes}, not {2**20};" in text
    assert f"model_database.snapshot_dir {tmp_path}, not {tmp_path / 'new'};" in text
    assert f"`hdserve database stop --model {cluster.key.model}`" in text
    assert "publish_interval_s" not in text
    one.close()
    two.close()
    stop_actors(model=cluster.key.model)
    caplog.clear()
    assert cluster.mirror(Replica(), "n").wait_until_current(WAIT_S)
    assert ray.get(cluster.actor().info.remote(), timeout=WAIT_S)["directory"].startswith(
        str(tmp_path / "new")
    )
    assert not said_of_settings(caplog)


def test_an_actor_is_asked_for_its_settings_once(shared, namespace, monkeypatch):
    """Not by all replicas again whenever it was too slow for them."""
    asked = []
    compare = mirrors.warn_of_other_settings
    monkeypatch.setattr(settings, "_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(
        mirrors, "warn_of_other_settings", lambda *args: asked.append(args) or compare(*args)
    )
    mirror = shared.mirror(Replica(), namespace)
    assert mirror.wait_until_current(WAIT_S)
    for _ in range(3):
        num_failures = mirror.stats().num_failures
        monkeypatch.setattr(links, "CALL_TIMEOUT_S", 0.0)
        eventually(lambda before=num_failures: mirror.stats().num_failures > before)
        monkeypatch.setattr(links, "CALL_TIMEOUT_S", WAIT_S)
        assert mirror.wait_until_current(WAIT_S)
    assert len(asked) == 1


def said_of_settings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Not that a call took too long, as on a busy machine."""
    return [record for record in caplog.records if record.name == settings.__name__]


def test_replicas_know_of_an_actor_that_cannot_write(cluster):
    """From its first answer on, until it can; a disk that is mounted read-only opens no lock."""
    lock = database_directory(cluster.config.snapshot_dir, cluster.key) / "lock"
    lock.mkdir(parents=True)
    mirror = cluster.mirror(Replica(), "n")
    assert mirror.wait_until_current(WAIT_S)
    assert mirror.stats().num_unwritten_actors == 1
    mirror.publish("n", [1, 2, 3])
    eventually(lambda: mirror.stats().num_published_outputs == 1)
    lock.rmdir()
    eventually(lambda: mirror.stats().num_unwritten_actors == 0)
    cluster.kill()
    late = Replica()
    assert cluster.mirror(late, "n").wait_until_current(WAIT_S)
    assert late.texts() == [[1, 2, 3]]


def test_namespaces_reach_only_replicas_that_serve_them(shared):
    alpha, beta, gamma = (uuid4().hex for _ in range(3))
    first, second = Replica(), Replica()
    one, two = shared.mirror(first, alpha), shared.mirror(second, beta)
    one.publish(alpha, [1])
    two.publish(beta, [2])
    two.publish(gamma, [3])
    eventually(lambda: two.stats().num_published_outputs == 2)
    eventually(lambda: one.stats().num_published_outputs == 1)
    assert one.wait_until_current(WAIT_S)
    assert two.wait_until_current(WAIT_S)
    assert (first.outputs, second.outputs) == ([], [])
    one.use(beta)
    assert one.wait_until_current(WAIT_S)
    assert first.outputs == [(shared.key.model, beta, [2])]


def test_an_actor_that_is_killed_comes_back_with_all_it_had(cluster):
    first = Replica()
    one = cluster.mirror(first, "n")
    for number in range(50):
        one.publish("n", [number])
    eventually(lambda: one.stats().num_published_outputs == 50)
    one.close()
    cluster.kill()
    late = Replica()
    two = cluster.mirror(late, "n")
    assert two.wait_until_current(WAIT_S)
    assert late.texts() == [[number] for number in range(50)]


def test_outputs_published_while_the_actor_dies_all_arrive_once(cluster):
    first, second = Replica(), Replica()
    one, two = cluster.mirror(first, "n"), cluster.mirror(second, "n")
    assert one.wait_until_current(WAIT_S)
    published = []
    is_over = threading.Event()

    def generate() -> None:
        while not is_over.wait(0.01):
            published.append([len(published)])
            one.publish("n", published[-1])

    generating = threading.Thread(target=generate)
    generating.start()
    cluster.kill()
    cluster.kill()
    is_over.set()
    generating.join()
    eventually(lambda: one.stats().num_published_outputs == len(published))
    assert one.stats().num_failures > 0
    assert two.wait_until_current(WAIT_S)
    assert sorted(second.texts()) == published
    assert first.texts() == []


def test_an_actor_that_lost_its_disk_is_refilled_from_a_mirror(cluster, tmp_path):
    first, second = Replica(), Replica()
    one, two = cluster.mirror(first, "n"), cluster.mirror(second, "n")
    for number in range(30):
        one.publish("n", [1000 + number] * 50)
        two.publish("n", [2000 + number] * 50)
    eventually(lambda: len(first.outputs) == len(second.outputs) == 30)
    before = cluster.pid()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    ray.kill(cluster.actor(), no_restart=True)
    eventually(lambda: cluster.pid() != before)
    eventually(lambda: one.stats().num_refilled_outputs + two.stats().num_refilled_outputs >= 60)
    late = Replica()
    three = cluster.mirror(late, "n")
    assert three.wait_until_current(WAIT_S)
    expected = [[base + number] * 50 for base in (1000, 2000) for number in range(30)]
    assert sorted(late.texts()) == expected
    assert one.wait_until_current(WAIT_S)
    assert two.wait_until_current(WAIT_S)
    assert len(first.outputs) == len(second.outputs) == 30


def test_an_actor_that_lost_everything_delivers_what_comes_after(cluster):
    """Nobody can refill it; its versions begin where the readers' cursors already were."""
    cluster.config = cluster.config.model_copy(update={"refill_bytes": 0, "snapshot_dir": None})
    second = Replica()
    one, two = cluster.mirror(Replica(), "n"), cluster.mirror(second, "n")
    for number in range(20):
        one.publish("n", [number])
    eventually(lambda: len(second.outputs) == 20)
    cluster.kill()
    assert two.wait_until_current(WAIT_S)
    one.publish("n", [20])
    eventually(lambda: second.texts() == [[number] for number in range(21)])


def test_a_flush_reaches_the_replicas_and_survives_a_restart(cluster):
    first, second = Replica(), Replica()
    one, _two = cluster.mirror(first, "n", "kept"), cluster.mirror(second, "n", "kept")
    one.publish("n", [1])
    one.publish("kept", [2])
    eventually(lambda: len(second.outputs) == 2)
    assert one.wait_until_current(WAIT_S)
    ray.get(cluster.actor().flush.remote("n"), timeout=WAIT_S)
    eventually(lambda: second.forgotten == [(cluster.key.model, "n")])
    eventually(lambda: first.forgotten == [(cluster.key.model, "n")])
    cluster.kill()
    late = Replica()
    three = cluster.mirror(late, "n", "kept")
    assert three.wait_until_current(WAIT_S)
    assert late.outputs == [(cluster.key.model, "kept", [2])]


@pytest.mark.parametrize("is_heard_of", [True, False])
def test_what_ended_before_a_flush_is_not_published_after_it(cluster, is_heard_of):
    """Whether the replica has heard of the flush when it publishes, or not."""
    poll_s = 0.05 if is_heard_of else 3600.0
    cluster.config = cluster.config.model_copy(
        update={"publish_interval_s": 3600.0, "poll_interval_s": poll_s}
    )
    replica = Replica()
    one = cluster.mirror(replica, "n", "other")
    assert one.wait_until_current(WAIT_S)
    one.publish("n", [1])
    one.publish("other", [2])
    ray.get(cluster.actor().flush.remote("n"), timeout=WAIT_S)
    if is_heard_of:
        eventually(lambda: replica.forgotten == [(cluster.key.model, "n")])
        one.publish("n", [3])
    one.close(WAIT_S)
    counts = [("n", 1, 0), ("other", 2, 1), ("n", 3, int(is_heard_of))]
    for namespace, token_id, count in counts:
        assert cluster.count(namespace, token_id) == count


def test_what_was_forgotten_in_the_queue_is_not_given_back_later(cluster, tmp_path):
    """An actor that lost its disk, and so the flush, too, gets what came after it."""
    cluster.config = cluster.config.model_copy(update={"publish_interval_s": 3600.0})
    replica = Replica()
    one = cluster.mirror(replica, "n")
    assert one.wait_until_current(WAIT_S)
    one.publish("n", [1])
    ray.get(cluster.actor().flush.remote("n"), timeout=WAIT_S)
    eventually(lambda: replica.forgotten == [(cluster.key.model, "n")])
    for number in range(2, 20):
        one.publish("n", [number] * 1000)
    eventually(lambda: one.stats().num_published_outputs >= 16)
    before = cluster.pid()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    ray.kill(cluster.actor(), no_restart=True)
    eventually(lambda: cluster.pid() != before)
    eventually(lambda: one.stats().num_refilled_outputs >= 16)
    assert cluster.count("n", 1) == 0


def test_a_replica_that_has_not_asked_yet_hears_of_a_flush(shared, namespace):
    """It has generated, so there is something to forget; one that has not is left alone."""
    shared.config = shared.config.model_copy(update={"publish_interval_s": 3600.0})
    replica, idle = Replica(), Replica()
    one = Mirror(shared.key, shared.config, replica)
    shared.mirrors.append(one)
    one.publish(namespace, [1])
    ray.get(shared.actor().flush.remote(namespace), timeout=WAIT_S)
    one.start()
    assert one.wait_until_current(WAIT_S)
    assert replica.forgotten == [(shared.key.model, namespace)]
    assert shared.mirror(idle, namespace).wait_until_current(WAIT_S)
    assert idle.forgotten == []
    one.close(WAIT_S)
    assert shared.count(namespace, 1) == 0


def test_an_output_nobody_has_read_survives_a_log_that_lost_its_end(cluster, tmp_path):
    """Only the replica that generated it knows that it was there."""
    cluster.config = cluster.config.model_copy(update={"poll_interval_s": 3600.0})
    one = cluster.mirror(Replica(), "n")
    assert one.wait_until_current(WAIT_S)
    for number in range(3):
        one.publish("n", [number] * 20)
        eventually(lambda number=number: one.stats().num_published_outputs == number + 1)
    (log,) = tmp_path.rglob("*.log")
    log.write_bytes(log.read_bytes()[:-1])
    cluster.kill()
    assert one.wait_until_current(WAIT_S)
    assert [cluster.count("n", number) for number in range(3)] == [20, 20, 20]


def test_calibration_reaches_the_others(shared, namespace):
    first, second = Replica(), Replica()
    one, two = shared.mirror(first, namespace), shared.mirror(second, namespace)
    one.publish_calibration(namespace, b"state", one.standing(namespace))
    eventually(lambda: second.calibrations == [(shared.key.model, namespace, b"state")])
    assert one.wait_until_current(WAIT_S)
    assert first.calibrations == second.calibrations, "merged with those of others it is news"
    two.publish_calibration(namespace, bytes(10**6), two.standing(namespace))
    assert two.stats().num_dropped_calibrations == 1


def test_as_many_calibrations_as_a_message_holds_are_sent_at_once(shared, namespace):
    shared.config = shared.config.model_copy(update={"publish_interval_s": 3600.0})
    names = [f"{namespace}-{number}" for number in range(2)]
    one, replica = shared.mirror(Replica(), *names), Replica()
    shared.mirror(replica, *names)
    for name in names:
        one.publish_calibration(name, bytes(40_000), one.standing(name))
    eventually(lambda: replica.calibrations)


def test_another_tokenizer_has_another_actor_and_sees_nothing(cluster):
    other = DatabaseKey(cluster.key.model, "0" * 32)
    first, second = Replica(), Replica()
    one, two = cluster.mirror(first, "n"), cluster.mirror(second, "n", key=other)
    one.publish("n", [1])
    eventually(lambda: one.stats().num_published_outputs == 1)
    assert two.wait_until_current(WAIT_S)
    assert second.outputs == []
    two.close()
    stop_actors(model=other.model)


def test_another_models_text_is_read_and_not_written(shared, namespace):
    reader = DatabaseKey(f"{shared.key.model}-reader", shared.key.fingerprint)
    replica = Replica()
    two = shared.mirror(replica, namespace, key=reader, draft_from=(shared.key.model,))
    one = shared.mirror(Replica(), namespace)
    one.publish(namespace, [1])
    eventually(lambda: replica.outputs == [(shared.key.model, namespace, [1])])
    two.publish(namespace, [2])
    eventually(lambda: two.stats().num_published_outputs == 1)
    info = ray.get(shared.actor().info.remote(), timeout=WAIT_S)
    assert info["namespaces"][namespace]["num_outputs"] == 1
    two.close()
    stop_actors(model=reader.model)


def test_a_model_that_has_no_database_yet_is_no_failure(shared, namespace, caplog):
    """It is said once; when there is one, it is read."""
    absent = DatabaseKey(f"{shared.key.model}-absent", shared.key.fingerprint)
    replica = Replica()
    with caplog.at_level(logging.INFO):
        one = shared.mirror(replica, namespace, draft_from=(absent.model,))
        follower = one._subscriptions[1]
        for number in range(3):
            eventually(lambda number=number: follower.current_poll() > number + 1)
            one.use(uuid4().hex)
        eventually(lambda: follower.current_poll() > 4)
        assert one.wait_until_current(WAIT_S)
    assert one.stats().num_failures == 0
    told = f"the model database of {absent.model} does not exist"
    assert sum(told in record.getMessage() for record in caplog.records) == 1
    two = shared.mirror(Replica(), namespace, key=absent)
    two.publish(namespace, [1])
    eventually(lambda: two.stats().num_published_outputs == 1)
    one.use(uuid4().hex)
    eventually(lambda: replica.outputs == [(absent.model, namespace, [1])])
    two.close()
    stop_actors(model=absent.model)


def test_a_model_of_another_tokenizer_is_not_drafted_from(shared, namespace, caplog):
    """It is said once, and why."""
    reader = DatabaseKey(f"{shared.key.model}-reader", "0" * 32)
    replica = Replica()
    one = shared.mirror(Replica(), namespace)
    one.publish(namespace, [1])
    eventually(lambda: one.stats().num_published_outputs == 1)
    two = shared.mirror(replica, namespace, key=reader, draft_from=(shared.key.model,))
    eventually(lambda: two.stats().num_failures > 1)
    told = f"that of {shared.key.model} is of another tokenizer"
    assert sum(told in record.getMessage() for record in caplog.records) == 1
    assert replica.outputs == []
    two.close()
    stop_actors(model=reader.model)


def test_close_publishes_what_is_queued(shared, namespace):
    one = shared.mirror(Replica(), namespace)
    assert one.wait_until_current(WAIT_S)
    for number in range(200):
        one.publish(namespace, [number])
    one.close(WAIT_S)
    assert one.stats().num_published_outputs == 200
    one.publish(namespace, [1])
    assert shared.count(namespace, 199) == 1


def test_what_is_not_published_in_time_is_said(shared, namespace, caplog):
    shared.config = shared.config.model_copy(update={"publish_interval_s": 3600.0})
    one = shared.mirror(Replica(), namespace)
    assert one.wait_until_current(WAIT_S)
    one.publish(namespace, [1])
    one.close(0.0)
    eventually(lambda: "bytes were not published" in caplog.text)


def test_a_mirror_can_be_closed_at_any_moment(shared, namespace):
    """Its tasks are ended wherever they are: calling, waiting, just woken."""
    shared.config = shared.config.model_copy(
        update={"publish_interval_s": 0.001, "poll_interval_s": 0.001}
    )
    for life in range(20):
        one = shared.mirror(Replica(), namespace, draft_from=(shared.key.model,) * 3)
        assert one.wait_until_current(WAIT_S)
        for number in range(20):
            one.publish(namespace, [life, number])
        time.sleep(0.001 * (life % 7))
        one.close(WAIT_S)
        assert one.stats().num_published_outputs == 20


def test_a_receiver_that_raises_is_counted_and_gets_what_comes_later(shared, namespace):
    brittle = Brittle()
    one, two = shared.mirror(Replica(), namespace), shared.mirror(brittle, namespace)
    one.publish(namespace, [1])
    eventually(lambda: two.stats().num_receiver_failures == 1)
    one.publish(namespace, [2])
    eventually(lambda: brittle.texts(namespace) == [[1], [2]])


def test_an_idle_namespace_is_no_longer_followed_until_it_is_used_again(shared, namespace):
    replica = Replica()
    two = Mirror(shared.key, shared.config, replica)
    shared.mirrors.append(two)
    two.use(namespace)
    two._last_used[namespace] -= 2 * NAMESPACE_IDLE_S
    two.start()
    one = shared.mirror(Replica(), namespace)
    one.publish(namespace, [1])
    eventually(lambda: one.stats().num_published_outputs == 1)
    assert two.wait_until_current(WAIT_S)
    assert replica.outputs == []
    two.use(namespace)
    assert two.wait_until_current(WAIT_S)
    assert replica.texts(namespace) == [[1]]


def test_a_mirror_that_was_never_started_closes():
    mirror = Mirror(DatabaseKey("m", "f"), ModelDatabaseConfig(), Replica())
    mirror.publish("n", [1])
    mirror.close()
    assert mirror.stats().num_queued_bytes > 0


def test_stop_ends_the_actor_and_leaves_its_disk(cluster):
    one = cluster.mirror(Replica(), "n")
    one.publish("n", [1])
    eventually(lambda: one.stats().num_published_outputs == 1)
    one.close()
    stop_actors(model=cluster.key.model)
    with pytest.raises(ValueError, match=r"Failed to look up actor|not found"):
        model_database.get(cluster.key)
    stop_actors(model=cluster.key.model)
    assert cluster.count("n", 1) == 1
