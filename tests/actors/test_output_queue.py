"""The queue before the publisher: bounded, in order, never raising."""

import numpy as np

from actors.output_queue import OutputQueue
from hdserve.databases.messages import Standing
from hdserve.databases.segment import MAX_OUTPUT_TOKENS


def taken(queue: OutputQueue, max_bytes: int = 10**6) -> dict[str, list[list[int]]]:
    batch = queue.take(max_bytes)
    return {name: [ids.tolist() for ids in outputs] for name, outputs in batch.outputs.items()}


def test_outputs_come_out_in_order_by_namespace():
    queue = OutputQueue(10**6)
    queue.put("a", [1, 2])
    queue.put("b", (3,))
    queue.put("a", np.array([4], np.uint32))
    queue.put("a", [])
    assert taken(queue) == {"a": [[1, 2], [4]], "b": [[3]]}
    assert (queue.num_bytes, queue.num_dropped) == (0, 0)
    assert not queue.take(10**6)


def test_the_oldest_are_dropped_and_counted_when_it_is_full():
    queue = OutputQueue(1000)
    for number in range(100):
        queue.put("a", [number] * 9)
    assert queue.num_bytes == 1000
    assert queue.num_dropped == 80
    assert taken(queue)["a"] == [[number] * 9 for number in range(80, 100)]


def test_a_batch_is_bounded_but_never_empty():
    queue = OutputQueue(10**6)
    for number in range(10):
        queue.put("a", [number] * 9)
    assert [len(taken(queue, size)["a"]) for size in (1, 149, 150, 350)] == [1, 2, 3, 4]


def test_a_long_output_comes_in_pieces_that_fit_a_message():
    queue = OutputQueue(10**6)
    queue.put("a", list(range(MAX_OUTPUT_TOKENS + 5)))
    assert len(taken(queue, 10)["a"][0]) == MAX_OUTPUT_TOKENS
    assert taken(queue, 10)["a"] == [list(range(MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS + 5))]


def test_what_is_no_token_ids_is_dropped_and_counted():
    queue = OutputQueue(10**6)
    for wrong in ([-1], [2**32], ["x"], [[1, 2]], [None]):
        queue.put("a", wrong)
    queue.put("a", [5])
    assert taken(queue) == {"a": [[5]]}
    assert queue.num_dropped == 5


def test_the_newest_calibration_replaces_what_was_queued():
    queue = OutputQueue(10**6)
    queue.put_calibration("a", b"one", Standing("e", 1))
    queue.put_calibration("a", b"two", Standing("e", 2))
    assert not queue.has_calibration("b")
    queue.put_calibration("b", b"three", Standing())
    assert queue.has_calibration("b")
    batch = queue.take(10**6)
    assert batch.calibrations == {"a": b"two", "b": b"three"}
    assert batch.standings == {"a": ("e", 2), "b": ("", 0)}
    assert not queue.has_calibration("b")
    assert not queue.take(10**6)


def test_a_flushed_namespace_is_dropped_and_the_others_stay_in_order():
    queue = OutputQueue(10**6)
    for number in range(3):
        queue.put("a", [number])
        queue.put("b", [number])
    queue.put_calibration("a", b"state", Standing())
    size = queue.num_bytes - len(b"state")
    assert queue.forget("a")
    assert (queue.num_bytes, queue.num_dropped, queue.num_forgotten) == (size // 2, 0, 3)
    assert not queue.forget("a")
    assert not queue.forget("never used")
    batch = queue.take(10**6)
    assert (list(batch.outputs), batch.calibrations) == (["b"], {})
    assert [ids.tolist() for ids in batch.outputs["b"]] == [[0], [1], [2]]
    queue.put_calibration("a", b"state", Standing())
    assert queue.forget("a")


def test_calibrations_share_the_room_of_a_message():
    queue = OutputQueue(10**6)
    for name, size in zip("abcd", (60, 60, 30, 200), strict=True):
        queue.put_calibration(name, bytes(size), Standing())
    queue.put("a", [1] * 100)
    batches = [queue.take(100) for _ in range(4)]
    assert ["".join(batch.calibrations) for batch in batches] == ["a", "bc", "d", ""]
    assert [len(batch.outputs) for batch in batches] == [1, 0, 0, 0]
    assert queue.num_bytes == 0


def test_calibrations_leave_half_of_a_message_to_outputs():
    queue = OutputQueue(10**6)
    for number in range(20):
        queue.put_calibration(f"n{number}", bytes(10), Standing())
        queue.put("a", [number])
    batches = [queue.take(100) for _ in range(6)]
    assert [len(batch.calibrations) for batch in batches] == [5, 5, 5, 5, 0, 0]
    num_outputs = [sum(len(ids) for ids in batch.outputs.values()) for batch in batches]
    assert num_outputs == [2, 2, 2, 2, 5, 5]
    queue.put_calibration("a", bytes(90), Standing())
    for number in range(5):
        queue.put("a", [number])
    batch = queue.take(100)
    assert (len(batch.calibrations), len(batch.outputs["a"])) == (1, 2)


def test_calibrations_take_at_most_half_of_the_queue():
    """Those put longest ago are dropped and counted, and outputs beyond the other half."""
    queue = OutputQueue(1000)
    for number in range(100):
        queue.put("a", [number] * 9)
        queue.put_calibration(f"n{number % 60}", bytes(50), Standing())
    assert queue.num_bytes == 1000
    assert (queue.num_dropped, queue.num_dropped_calibrations) == (90, 90)
    batch = queue.take(10**6)
    assert list(batch.calibrations) == [f"n{number}" for number in range(30, 40)]
    assert [ids[0] for ids in batch.outputs["a"]] == list(range(90, 100))
    assert queue.num_bytes == 0


def test_a_calibration_that_replaces_another_takes_its_room():
    queue = OutputQueue(1000)
    for _ in range(100):
        queue.put_calibration("a", bytes(400), Standing())
    assert (queue.num_bytes, queue.num_dropped_calibrations) == (400, 0)
