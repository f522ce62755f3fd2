"""An actor that lost outputs is given back what its readers have."""

from actors.model_database_actor import ModelDatabaseActor
from actors.refills import LEASE_S, Refills
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.messages import Position, Publish
from tests.actors.readers import KEY, Reader, many_namespaces, message, publish_to_all, restarted


def test_an_actor_that_came_back_with_less_asks_a_reader_that_has_more(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3))
    reader, behind = Reader(actor, "r", "n"), Reader(actor, "s", "n")
    assert behind.read() == [0]
    actor.publish(message(1, 4))
    assert reader.read() == [0, 1]
    (log,) = config.snapshot_dir.rglob("*.log")
    log.write_bytes(log.read_bytes()[:-1])
    actor = behind.actor = reader.actor = restarted(actor, config)
    assert behind.poll().refill == {}
    assert reader.poll().refill == {"n": {"w": [(0, 1)]}}
    assert behind.poll().refill == {}
    assert actor.publish(message(1, 4)) == 1
    actor.publish(Publish("r", refilled=("n",)).encode(KEY))
    assert reader.read() == [1]
    assert behind.read() == [1]


def test_an_actor_that_lost_everything_asks_and_starts_its_readers_afresh(config):
    first = ModelDatabaseActor(KEY, config)
    first.publish(message(0, 3, 4))
    reader, empty = Reader(first, "r", "n"), Reader(first, "s", "n")
    reader.read()
    config = ModelDatabaseConfig(snapshot_dir=None)
    reader.actor = empty.actor = ModelDatabaseActor(KEY, config)
    assert empty.poll().refill == {}
    reply = reader.poll()
    assert (reply.is_reset, reply.refill) == (True, {"n": {}})
    assert not reader.poll().is_reset


def test_a_reader_of_a_lost_run_misses_nothing_of_the_new_one(config):
    first = ModelDatabaseActor(KEY, config)
    first.publish(message(0, 3, 4))
    reader = Reader(first, "r", "n")
    assert reader.read() == [0, 1]
    reader.actor = ModelDatabaseActor(KEY, ModelDatabaseConfig(snapshot_dir=None))
    reader.actor.publish(message(7, 3))
    reply = reader.poll()
    assert reply.is_reset
    assert reply.changes["n"].segment.sequence_numbers.tolist() == [7]


def test_restarts_in_which_nothing_came_make_the_actor_ask_for_nothing(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4))
    reader = Reader(actor, "r", "n")
    assert reader.read() == [0, 1]
    for _ in range(3):
        reader.actor = restarted(reader.actor, config)
        assert reader.poll().refill == {}
    reader.actor.publish(message(2, 5))
    assert reader.read() == [2]


def test_a_refused_file_makes_the_actor_ask(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4))
    reader = Reader(actor, "r", "n")
    reader.read()
    (log,) = config.snapshot_dir.rglob("*.log")
    log.write_bytes(b"junk")
    reader.actor = restarted(actor, config)
    assert reader.poll().refill == {"n": {}}


def test_flush_is_not_undone_by_a_refill(config):
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, 4))
    reader = Reader(actor, "r", "n")
    reader.read()
    actor.flush("n")
    assert list(config.snapshot_dir.rglob("*.log")) == []
    reader.actor = restarted(actor, config)
    reply = reader.poll()
    assert reply.changes["n"].is_flushed
    assert reply.refill == {}


def test_a_flush_reaches_readers_of_a_lost_run_too(config):
    first = ModelDatabaseActor(KEY, config)
    first.publish(message(0, 3, 4))
    old = Reader(first, "r", "n")
    old.read()
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig(snapshot_dir=None))
    actor.flush("n")
    old.actor = actor
    assert old.poll().changes["n"].is_flushed
    assert not Reader(actor, "s", "n").poll().changes["n"].is_flushed


def test_one_replica_at_a_time_is_asked_and_each_once():
    refills = Refills()
    assert not refills.ask("n", "r", 0.0)
    refills.note_lost("n")
    assert refills.ask("n", "r", 1.0)
    assert not refills.ask("n", "s", 1.0 + LEASE_S / 2)
    refills.extend("n", "r", 1.0 + LEASE_S / 2)
    refills.extend("n", "t", 1.0 + LEASE_S)
    assert not refills.ask("n", "s", 1.0 + LEASE_S)
    assert refills.ask("n", "s", 1.0 + 2 * LEASE_S)
    refills.finish("n", "s")
    assert not refills.ask("n", "s", 1e9)
    assert refills.ask("n", "r", 1e9)
    assert refills.ask("n", "r", 1e9), "the question was lost on its way"
    refills.finish("n", "r")
    refills.forget_readers(["s"])
    assert refills.ask("n", "s", 1e9)
    refills.forget("n")
    refills.extend("n", "s", 0.0)
    refills.finish("n", "s")
    assert not refills.ask("n", "t", 1e9)


def test_in_a_busy_namespace_each_replica_is_asked_too():
    """What others publish meanwhile is no answer of the one that was asked."""
    first, actor = (ModelDatabaseActor(KEY, ModelDatabaseConfig()) for _ in range(2))
    readers = [Reader(first, name, "n") for name in "rst"]
    for reader in readers:
        first.publish(message(0, 3, sender=reader.name))
    for reader in readers:
        reader.read()
        reader.actor = actor
    for number, reader in enumerate(readers, 1):
        actor.publish(message(number, 3, sender="s"))
        assert "n" in reader.poll().refill
        actor.publish(Publish(reader.name, refilled=("n",)).encode(KEY))


def test_each_replica_gives_back_what_only_it_has(config):
    """One was told to come back with less than the others, and answered first."""
    actor = ModelDatabaseActor(KEY, config)
    actor.publish(message(0, 3, sender="r"))
    behind = Reader(actor, "s", "n")
    assert behind.read() == [0]
    actor.publish(message(1, 4, sender="r"))
    own = Reader(actor, "r", "n")
    own.poll()
    own.positions["n"] = Position(own.positions["n"].cursor, 0, num_held=2)
    (log,) = config.snapshot_dir.rglob("*.log")
    log.write_bytes(b"junk")
    actor = behind.actor = own.actor = restarted(actor, config)
    assert behind.poll().refill == {"n": {}}
    actor.publish(message(0, 3, sender="r"))
    actor.publish(Publish("s", refilled=("n",)).encode(KEY))
    assert own.poll().refill == {"n": {"r": [(0, 1)]}}


def test_what_is_wanted_back_of_many_namespaces_is_asked_for_little_by_little():
    names = many_namespaces(4000)
    old, actor = (ModelDatabaseActor(KEY, ModelDatabaseConfig()) for _ in range(2))
    publish_to_all(old, names)
    reader = Reader(old, "r", *names)
    reader.read()
    publish_to_all(actor, names, 1)
    reader.actor, asked = actor, []
    for _ in range(10):
        for name, position in reader.positions.items():
            reader.positions[name] = Position(max(position.cursor, 1), 0, num_held=1)
        refill = reader.poll().refill
        actor.publish(Publish("r", refilled=tuple(refill)).encode(KEY))
        asked += refill
    assert set(asked) == set(names)
