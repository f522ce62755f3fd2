"""Which prompts are known, and no more of them than there is room for."""

from __future__ import annotations

from hdserve.databases.answer_places import AnswerPlaces, prompt_hash
from hdserve.databases.history import LOG_OLDEST
from hdserve.databases.model import ModelDatabase
from tests.databases.test_model import _sequence


def test_those_answered_last_longest_ago_go_first() -> None:
    places = AnswerPlaces(1 << 20)
    for prompt in range(10):
        places.note(prompt, 100 + prompt)
    places.note(0, 200)
    num_bytes = places.num_bytes
    places.limit(num_bytes // 2)
    assert places.num_bytes <= num_bytes // 2
    assert [places.place_of(prompt) for prompt in range(10)] == [200, *[0] * 5, 106, 107, 108, 109]
    places.limit(0)
    places.note(1, 1)
    assert places.num_bytes == places.place_of(1) == 0


def test_prompts_are_told_apart() -> None:
    prompts = [[], [1], [1, 2], [2, 1], [1, 2, 3]]
    assert len({*map(prompt_hash, prompts)}) == len(prompts)


def answer_of(database: ModelDatabase, namespace: str, prompt: list[int]) -> list[int]:
    """What begins where the answer is said to begin."""
    partition = database.partition(namespace)
    place = database.answer_place(namespace, prompt)
    if not place or partition is None or place <= partition.log_state[LOG_OLDEST]:
        return []
    return partition.texts_since(place)[0]


def test_the_last_answer_to_a_prompt_is_found() -> None:
    """In its namespace, and where its output is shared; nothing of what others sent."""
    database = ModelDatabase()
    for seq in (
        _sequence([1, 2, 3], [4, 5, 6]),
        _sequence([1, 2], [7, 8, 9]),
        _sequence([1, 2, 3], [4, 5, 10]),
        _sequence([1, 2, 4], [11, 12], is_output_shared=False),
    ):
        database.record(seq)
    database.apply("default", [[13, 14]])
    assert answer_of(database, "default", [1, 2, 3]) == [4, 5, 10]
    assert answer_of(database, "default", [1, 2]) == [7, 8, 9]
    assert database.answer_place("default", [1, 2, 4]) == 0
    assert database.answer_place("other", [1, 2, 3]) == 0
    database.clear("default")
    assert database.answer_place("default", [1, 2, 3]) == 0


def test_it_is_found_in_mid_answer() -> None:
    """Where what was said so far is its beginning, and it goes on."""
    database = ModelDatabase(1 << 16)
    answer = [4, 5, 6, 7]
    for output in (answer, [4, 8]):
        database.record(_sequence([1, len(output)], output))
    partition = database.partition("default")
    assert partition is not None
    begin = database.answer_place("default", [1, 4])
    places = [database.answer_place("default", [1, 4], answer[:size]) for size in range(6)]
    assert places == [begin, begin + 1, begin + 2, begin + 3, 0, 0]
    assert partition.texts_since(begin + 2)[0] == answer[2:]
    for output in ([5], [4, 5, 7], [4, 5, 6, 8]):
        assert database.answer_place("default", [1, 4], output) == 0
    for number in range(100):
        database.record(_sequence([2, number], [9] * 40))
    assert database.num_tokens > len(partition.log)
    assert database.answer_place("default", [1, 4], [4]) == 0


def test_an_answer_of_which_the_log_has_the_end_alone_is_not_found() -> None:
    """Longer than half a log, or pushed out; those that are found are those there are."""
    database = ModelDatabase(1 << 16)
    for number in range(200):
        output = [number % 90] * (20 if number % 7 else 900)
        database.record(_sequence([number], output))
        found = answer_of(database, "default", [number])
        assert found == ([] if len(output) == 900 else output)
    answers = [answer_of(database, "default", [number]) for number in range(200)]
    assert answers[0] == []
    assert all(found in ([], [number % 90] * 20) for number, found in enumerate(answers))
    assert database.num_bytes <= 1 << 16


def test_an_answer_ends_before_a_text_of_which_the_log_has_the_end_alone() -> None:
    """What is left of that is a text of its own."""
    database = ModelDatabase(1 << 16)
    for prompt, output in (([1], [4] * 20), ([2], [5] * 900)):
        database.record(_sequence(prompt, output))
    assert answer_of(database, "default", [1]) == [4] * 20
    assert database.answer_place("default", [1], [4] * 20) == 0
    partition = database.partition("default")
    assert partition is not None
    *_, last = partition.texts_since(0)
    assert last == [5] * len(last)
    assert len(last) > 200
