"""What faults are judged by must itself see what is there."""

from actors.model_database_actor import ModelDatabaseActor
from hdserve.config import ModelDatabaseConfig
from hdserve.databases.segment import MAX_OUTPUT_TOKENS
from tests.actors.readers import KEY, message
from tests.chaos.system import exported


def test_all_outputs_of_a_namespace_are_found() -> None:
    """Also where they are more than one part of an export."""
    actor = ModelDatabaseActor(KEY, ModelDatabaseConfig())
    for first in range(200):
        actor.publish(message(first, MAX_OUTPUT_TOKENS))
    actor.publish(message(0, 3, namespace="m"))
    assert not actor.export("n").is_last
    outputs = exported(actor.export, "n", KEY.fingerprint)
    assert [len(output) for output in outputs] == [MAX_OUTPUT_TOKENS] * 200
    assert [len(output) for output in exported(actor.export, "m", KEY.fingerprint)] == [3]
    actor.close()
