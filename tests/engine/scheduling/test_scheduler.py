"""Sequences are served in the order of arrival, none starves, and memory never runs out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdserve.core import FinishReason, SamplingParams, Sequence
from hdserve.engine.batch.shapes import Shapes
from hdserve.engine.forward.static_batches import CAPTURE_SHAPES
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.prefix_cache import PrefixCache
from hdserve.engine.scheduling.prefill_pace import PrefillPace
from hdserve.engine.scheduling.scheduler import MAX_CHUNK_SCORES, Scheduled, Scheduler
from tests.engine.caches import make_cache
from tests.engine.counted_queue import CountedQueue
from tests.engine.counted_tokens import CountedTokens

MAX_DRAFT_TOKENS = 8
MAX_SCORED_TOKENS = 6
ANY_SHAPES = Shapes()


def make_scheduler(
    num_rows: int = 320,
    max_num_sequences: int = 3,
    prefill_chunk_tokens: int = 10,
    growth_tokens: int = 256,
    shapes: Shapes = ANY_SHAPES,
    slowdown: float | None = 2.0,
    max_chunk_scores: int | None = MAX_CHUNK_SCORES,
) -> tuple[Scheduler, KVCache]:
    cache = make_cache(num_rows)
    scheduler = Scheduler(
        PrefixCache(cache, is_enabled=False),
        max_num_sequences=max_num_sequences,
        pace=PrefillPace(prefill_chunk_tokens, slowdown),
        max_draft_tokens=MAX_DRAFT_TOKENS,
        max_scored_tokens=MAX_SCORED_TOKENS,
        shapes=shapes,
        growth_tokens=growth_tokens,
        max_chunk_scores=max_chunk_scores,
    )
    return scheduler, cache


def make_sequence(
    name: str, num_prompt_tokens: int, num_output_tokens: int = 4, **params: Any
) -> Sequence:
    seq = Sequence(name, [0] * num_prompt_tokens, SamplingParams(**params))
    seq.max_total_tokens = num_prompt_tokens + num_output_tokens
    return seq


def process(scheduled: list[Scheduled], num_accepted: int = 0) -> None:
    """What the engine does with the work of a step."""
    for work in scheduled:
        seq = work.slot.seq
        if work.is_choosing:
            num_new = min(1 + num_accepted, seq.num_remaining_tokens)
            seq.token_ids += [1] * num_new
            seq.num_cached_tokens = len(seq.token_ids) - 1
        else:
            seq.num_cached_tokens += work.num_tokens
        if not seq.num_remaining_tokens:
            seq.finish_reason = FinishReason.LENGTH


def step(scheduler: Scheduler) -> list[str]:
    """One whole step; the names of the sequences that took part."""
    scheduler.make_room()
    scheduler.admit()
    scheduled = scheduler.schedule()
    process(scheduled)
    scheduler.took(scheduled, seconds=0.01)
    for work in scheduled:
        if work.slot.seq.finish_reason is not None:
            scheduler.release(work.slot)
    return [work.slot.seq.request_id for work in scheduled]


def test_prompts_are_cut_into_chunks() -> None:
    """A prompt goes through in chunks, and chooses with the chunk that reaches its end."""
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence("a", 25))
    scheduler.admit()
    found = []
    for _ in range(4):
        scheduled = scheduler.schedule()
        found += [(work.num_tokens, work.is_choosing) for work in scheduled]
        process(scheduled)
    assert found == [(10, False), (10, False), (5, True), (1, True)]


@pytest.mark.parametrize("most", [256, 100_000])
def test_chunks_get_shorter_deep_inside_a_prompt(most: int) -> None:
    """A chunk times what it attends to stays bounded, and the prompt still comes to its end."""
    scheduler, _ = make_scheduler(num_rows=1 << 18, prefill_chunk_tokens=most)
    scheduler.add(make_sequence("a", 200_000))
    scheduler.admit()
    num_tokens = first = 0
    is_choosing = False
    while not is_choosing:
        (work,) = scheduler.schedule()
        assert 1 <= work.num_tokens <= most
        assert work.num_tokens * (first + work.num_tokens) <= 1 << 22
        first += work.num_tokens
        num_tokens, is_choosing = num_tokens + work.num_tokens, work.is_choosing
        process([work])
    assert num_tokens == 200_000


def test_chunks_stay_whole_where_no_mask_is_made() -> None:
    scheduler, _ = make_scheduler(num_rows=1 << 18, prefill_chunk_tokens=256, max_chunk_scores=None)
    seq = make_sequence("a", 200_000)
    scheduler.add(seq)
    scheduler.admit()
    seq.num_cached_tokens = 199_500
    found = []
    while seq.num_pending_tokens > 1:
        (work,) = scheduler.schedule()
        found.append(work.num_tokens)
        process([work])
    assert found == [256, 244]


@pytest.mark.parametrize(
    ("num_drafts", "num_tokens"), [(0, 255), (31, 224), (127, 128), (128, 256), (300, 211)]
)
def test_chunks_fill_the_forwards_of_a_gpu(num_drafts: int, num_tokens: int) -> None:
    """Beside a sequence that decodes, with as many drafts as in the step before, no row is padded
    if so at least half of the chunk goes through.  The end of a prompt waits for no other step."""
    scheduler, _ = make_scheduler(
        num_rows=1 << 12, prefill_chunk_tokens=256, shapes=CAPTURE_SHAPES, slowdown=None
    )
    scheduler.add(make_sequence("decoding", 1, num_output_tokens=100))
    scheduler.add(make_sequence("prompt", 256 + num_tokens + 5))
    scheduler.admit()
    found = []
    for before in (num_drafts, 0, 0):
        scheduler.took([], seconds=0.0, num_drafts=before)
        scheduled = scheduler.schedule()
        process(scheduled)
        found.append([work.num_tokens for work in scheduled])
    assert found == [[1, num_tokens], [1, 255], [1, 6]]


def test_chunks_are_whole_where_nothing_is_padded() -> None:
    scheduler, _ = make_scheduler(num_rows=1 << 12, prefill_chunk_tokens=256, slowdown=None)
    scheduler.add(make_sequence("decoding", 1, num_output_tokens=100))
    scheduler.add(make_sequence("prompt", 300))
    scheduler.admit()
    assert [work.num_tokens for work in scheduler.schedule()] == [1, 256]


@pytest.mark.parametrize("num_waiting", [0, 30])
def test_those_that_wait_for_a_slot_lengthen_no_step(num_waiting: int) -> None:
    """A prompt in a slot takes the time of one, however many are behind it."""
    scheduler, _ = make_scheduler(
        num_rows=1 << 14, max_num_sequences=2, prefill_chunk_tokens=1000, growth_tokens=1
    )
    scheduler.add(make_sequence("decoding", 1, num_output_tokens=1000))
    for number in range(1 + num_waiting):
        scheduler.add(make_sequence(f"prompt {number}", 8000))
    scheduler.admit()
    found = []
    for _ in range(50):
        scheduled = scheduler.schedule()
        process(scheduled)
        num_tokens = sum(work.num_tokens for work in scheduled if not work.is_decoding)
        scheduler.took(scheduled, seconds=0.010 + 0.0001 * num_tokens)
        found.append(num_tokens)
    assert found[:3] == [0, 0, 0]
    assert found[-1] == pytest.approx(100, abs=1)


def test_other_forwards_are_timed_anew() -> None:
    """The next steps leave prompts out."""
    scheduler, _ = make_scheduler(num_rows=1 << 14, max_num_sequences=2)
    scheduler.add(make_sequence("decoding", 1, num_output_tokens=100))
    scheduler.add(make_sequence("prompt", 8000))
    taking_part = [len(step(scheduler)) for _ in range(10)]
    assert taking_part == [1, 1, 1, *[2] * 7]
    scheduler.forget_step_times()
    assert [len(step(scheduler)) for _ in range(5)] == [1, 1, 1, 2, 2]


def test_a_long_prompt_does_not_stall_the_others() -> None:
    """While a long prompt goes through, decoding sequences take part in every step."""
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence("short", 3, 20))
    step(scheduler)
    scheduler.add(make_sequence("long", 95, 4))
    scheduler.add(make_sequence("late", 3, 4))
    steps = [step(scheduler) for _ in range(13)]
    assert all("short" in names for names in steps)
    assert ["long" in names for names in steps] == [False] * 3 + [True] * 10, "three to measure"
    assert "late" in steps[12]
    assert not any("late" in names for names in steps[:12]), "prompts go oldest first"


def test_prompts_share_a_step() -> None:
    """What an older prompt leaves of a step's tokens goes to the next ones."""
    scheduler, _ = make_scheduler()
    for name, length in (("a", 4), ("b", 4), ("c", 9)):
        scheduler.add(make_sequence(name, length))
    scheduler.admit()
    scheduled = scheduler.schedule()
    assert [(work.num_tokens, work.is_choosing) for work in scheduled] == [
        (4, True),
        (4, True),
        (2, False),
    ]


def test_tokens_that_are_scored_are_few() -> None:
    """Prompts that are scored share the rows that may have logits; others take the rest.  Of each
    all tokens but the last are scored, which nothing follows."""
    scheduler, _ = make_scheduler()
    for name, length, num_top in (("a", 9, 0), ("b", 2, 1), ("c", 9, None)):
        scheduler.add(make_sequence(name, length, prompt_logprobs=num_top))
    scheduler.admit()
    steps = [[("a", 6, 6), ("c", 4, 0)], [("a", 3, 2), ("b", 2, 1), ("c", 5, 0)]]
    for wanted in steps:
        scheduled = scheduler.schedule()
        found = [(w.slot.seq.request_id, w.num_tokens, w.num_scored_tokens) for w in scheduled]
        assert found == wanted
        process(scheduled)


def test_the_last_token_of_a_prompt_alone_is_a_choice() -> None:
    """A prompt that leaves one token after its chunks goes on like a decoding sequence."""
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence("a", 11))
    scheduler.admit()
    process(scheduler.schedule())
    ((work),) = scheduler.schedule()
    assert (work.num_tokens, work.is_choosing) == (1, True)


def test_admission_is_first_come_first_served() -> None:
    """A large sequence that has no room yet is not overtaken by small ones behind it."""
    scheduler, _ = make_scheduler(num_rows=128)
    scheduler.add(make_sequence("a", 60, 4))
    scheduler.add(make_sequence("large", 100, 4))
    scheduler.add(make_sequence("small", 2, 2))
    assert [seq.request_id for seq in scheduler.admit()] == ["a"]
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name in step(scheduler) if name not in order]
    assert order == ["a", "large", "small"]


def test_those_behind_one_that_does_not_fit_are_not_looked_at() -> None:
    """However many wait, in each step in which there is a slot, or none."""
    scheduler, _ = make_scheduler(num_rows=128)
    for name in ("a", "large", *map(str, range(50))):
        scheduler.add(make_sequence(name, 100 if name == "large" else 60, 4))
    waiting = scheduler.waiting = CountedQueue(scheduler.waiting)
    assert [seq.request_id for seq in scheduler.admit()] == ["a"]
    assert waiting.num_read == 2
    assert scheduler.admit() == []
    assert waiting.num_read == 3


def test_free_rows_need_not_lie_together() -> None:
    """A sequence does not wait for a neighbour to end when rows enough are free."""
    scheduler, _ = make_scheduler(num_rows=224)
    for name, num_output_tokens in [("first", 1), ("long", 30), ("last", 1)]:
        scheduler.add(make_sequence(name, 50, num_output_tokens))
    while len(scheduler.running) != 1:
        step(scheduler)
    scheduler.add(make_sequence("large", 80, 4))
    step(scheduler)
    assert [slot.seq.request_id for slot in scheduler.running] == ["long", "large"]


def test_a_chunk_of_one_token_is_no_measure_of_decoding() -> None:
    """The first steps in which a sequence decodes leave the prompts out, however short the chunks
    before them were."""
    scheduler, _ = make_scheduler(prefill_chunk_tokens=1)
    scheduler.add(make_sequence("a", 2))
    scheduler.add(make_sequence("b", 20))
    assert [step(scheduler) for _ in range(5)] == [["a"]] * 4 + [["a", "b"]]


def test_no_more_than_the_slots() -> None:
    """At most ``max_num_sequences`` run at a time, however much room there is."""
    scheduler, cache = make_scheduler(num_rows=3200)
    for number in range(7):
        scheduler.add(make_sequence(str(number), 2))
    assert len(scheduler.admit()) == 3
    assert scheduler.admit() == []
    while scheduler.has_work:
        step(scheduler)
        assert len(scheduler.running) <= 3
    assert cache.rows.num_free == cache.num_rows


def test_what_fits_exactly_is_taken() -> None:
    """The longest sequence leaves room for its drafts and nothing else; a longer one is our own
    fault."""
    scheduler, cache = make_scheduler(num_rows=64)
    assert scheduler.max_total_tokens == cache.num_rows - MAX_DRAFT_TOKENS
    largest = make_sequence("a", 40, scheduler.max_total_tokens - 40)
    with pytest.raises(AssertionError):
        scheduler.add(make_sequence("b", 41, scheduler.max_total_tokens - 40))
    scheduler.add(largest)
    scheduler.admit()
    assert scheduler.running[0].segment.num_rows >= largest.max_total_tokens + MAX_DRAFT_TOKENS


def test_what_may_be_generated_takes_no_room_yet() -> None:
    """Sequences that may become as long as the cache run together while they are short."""
    scheduler, _ = make_scheduler(num_rows=320, growth_tokens=16)
    for name in "abc":
        scheduler.add(make_sequence(name, 30, 250))
    assert [seq.request_id for seq in scheduler.admit()] == ["a", "b", "c"]


def test_the_youngest_makes_room() -> None:
    """It waits in front of those that came after it, and goes on with the tokens it has."""
    scheduler, _ = make_scheduler(192, prefill_chunk_tokens=64, growth_tokens=16)
    for name in "abc":
        scheduler.add(make_sequence(name, 20, 100))
    scheduler.add(make_sequence("late", 3))
    while not (preempted := scheduler.make_room()):
        scheduler.admit()
        process(scheduler.schedule())
    (third,) = preempted
    assert third.num_output_tokens > 30
    assert third.num_cached_tokens == 0
    assert [slot.seq.request_id for slot in scheduler.running] == ["a", "b"]
    assert [seq.request_id for seq in scheduler.waiting] == ["c", "late"]
    while scheduler.has_work:
        step(scheduler)
    assert third.num_output_tokens == 100


def test_one_move_makes_room_for_all() -> None:
    """As long as rows are free; else each of many sequences would move all others when it grows."""
    scheduler, cache = make_scheduler(384, growth_tokens=32, prefill_chunk_tokens=120)
    moves: list[int] = []
    compact = cache.compact
    cache.compact = lambda owned: moves.append(len(owned)) or compact(owned)  # type: ignore[method-assign,func-returns-value]
    for name in "abc":
        scheduler.add(make_sequence(name, 40, 60))
    step(scheduler)
    assert [slot.segment.num_rows for slot in scheduler.running] == [96] * 3
    while len(scheduler.running[0].seq.token_ids) <= 96 - MAX_DRAFT_TOKENS:
        step(scheduler)
    assert not moves
    step(scheduler)
    assert [slot.segment.num_rows for slot in scheduler.running] == [128] * 3
    assert moves == [3]


def test_one_move_takes_no_room_from_who_needs_it_next() -> None:
    """It asks for more than is left; what has room for longer does not get it either."""
    scheduler, cache = make_scheduler(672, growth_tokens=32, prefill_chunk_tokens=700)
    for name, num_prompt_tokens in (("first", 40), ("long", 360), ("short", 40)):
        scheduler.add(make_sequence(name, num_prompt_tokens, 300))
    step(scheduler)
    for slot, num_new in zip(scheduler.running, (45, 46, 20), strict=True):
        slot.seq.token_ids += [1] * num_new
    first, long, _ = scheduler.running
    assert cache.rows.num_free == 64
    assert scheduler._room_after_move(first) == {first: 32}
    assert scheduler._room_after_move(long) == {long: 64}


def test_a_prompt_that_is_scored_is_never_preempted() -> None:
    """Its log probabilities cannot begin anew, so it has room for all it may need."""
    scheduler, _ = make_scheduler(num_rows=256, growth_tokens=16)
    scheduler.add(make_sequence("a", 20, 200))
    scored = make_sequence("scored", 90, 20, prompt_logprobs=0)
    scheduler.add(scored)
    scheduler.admit()
    assert scheduler.running[1].segment.num_rows >= 90 + 20 + MAX_DRAFT_TOKENS
    while not (preempted := scheduler.make_room()):
        scheduled = [work for work in scheduler.schedule() if work.slot.seq is not scored]
        process(scheduled)
    assert [seq.request_id for seq in preempted] == ["a"]
    assert [slot.seq for slot in scheduler.running] == [scored]


@settings(max_examples=40)
@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 80), st.integers(1, 70), st.integers(0, 12)), max_size=12
    ),
    chunk=st.integers(1, 40),
    num_slots=st.integers(1, 5),
    growth_tokens=st.sampled_from([1, 20, 256]),
)
def test_everything_finishes(
    sequences: list[tuple[int, int, int]], chunk: int, num_slots: int, growth_tokens: int
) -> None:
    """Whatever arrives and when: all finish, start in the order of arrival, take part in steps
    with no more prompt tokens than the chunk and room for their drafts, and leave the cache
    empty."""
    scheduler, cache = make_scheduler(160, num_slots, chunk, growth_tokens)
    arriving = [
        (at, make_sequence(str(number), prompt, output))
        for number, (prompt, output, at) in enumerate(sequences)
    ]
    arriving.sort(key=lambda item: item[0])
    pending, started = [*arriving], []
    for now in range(2000):
        while pending and pending[0][0] <= now:
            scheduler.add(pending.pop(0)[1])
        scheduler.make_room()
        admitted = [seq.request_id for seq in scheduler.admit()]
        started += [name for name in admitted if name not in started]
        for slot in scheduler.running:
            assert slot.segment.num_rows >= len(slot.seq.token_ids) + MAX_DRAFT_TOKENS
        scheduled = scheduler.schedule()
        assert not scheduler.has_work or scheduled, "there is work, but nothing is done"
        prefill = [work.num_tokens for work in scheduled if work.slot.seq.num_pending_tokens > 1]
        assert sum(prefill) <= chunk
        decoding = [slot for slot in scheduler.running if slot.seq.num_pending_tokens == 1]
        assert {id(slot) for slot in decoding} <= {id(work.slot) for work in scheduled}
        process(scheduled, num_accepted=now % 3)
        for work in scheduled:
            if work.slot.seq.finish_reason is not None:
                scheduler.release(work.slot)
        if not scheduler.has_work and not pending:
            break
    assert not scheduler.has_work
    assert started == [seq.request_id for _, seq in arriving]
    assert all(seq.finish_reason is not None for _, seq in arriving)
    assert cache.rows.num_free == cache.num_rows


def test_nothing_is_read_for_a_cache_of_prompts_that_is_off() -> None:
    scheduler, _ = make_scheduler()
    prompt = CountedTokens([0] * 100)
    scheduler.add(Sequence("a", prompt, SamplingParams(), max_total_tokens=104))
    scheduler.admit()
    (slot,) = scheduler.running
    slot.seq.num_cached_tokens = 99
    scheduler.offer(slot)
    assert prompt.num_read == 0
