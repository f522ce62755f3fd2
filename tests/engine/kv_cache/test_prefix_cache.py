"""What earlier sequences left is found, never wrong, and never in the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hdserve.core import PromptScores, Sequence, SpeculationParams
from hdserve.engine.engine import Engine
from hdserve.engine.kv_cache import prefix_cache
from hdserve.engine.kv_cache.cache import KVCache
from hdserve.engine.kv_cache.prefix_cache import BLOCK_TOKENS, KeyedTokens, PrefixCache
from hdserve.engine.kv_cache.row_runs import RowRun, find_runs
from hdserve.engine.kv_cache.segments import Owned, Segment, align
from tests.drafters import OracleDrafter
from tests.engine.caches import equal_layers
from tests.engine.counted_tokens import CountedTokens
from tests.engines import make_engine, make_prompt, make_sequence, plain_tokens, run
from tests.models import make_model

SHAPE = equal_layers(num_layers=2, num_heads=1, key_size=1, value_size=1)
LONG = 3 * BLOCK_TOKENS


def make_cache(num_rows: int = 320) -> KVCache:
    return KVCache(SHAPE, num_rows, torch.float64, torch.device("cpu"))


def contents(tokens: list[int]) -> list[float]:
    """What a column holds: a number that depends on its token and all before it."""
    state, found = 1.0, []
    for token in tokens:
        state = (state * 31.0 + token) % 1e9
        found.append(state)
    return found


class Model:
    """Fills columns as a model would, and compares them."""

    def __init__(self, num_rows: int = 320) -> None:
        self.cache = make_cache(num_rows)
        self.prefixes = PrefixCache(self.cache)

    def write(self, segment: Segment, tokens: list[int], first: int = 0) -> None:
        values = torch.tensor(contents(tokens)[first:], dtype=torch.float64)[None, None, :, None]
        rows = torch.arange(segment.start + first, segment.start + len(tokens))
        for layer in range(SHAPE.num_layers):
            self.cache.write(layer, rows, values, values + layer)

    def read(self, segment: Segment, num_tokens: int) -> list[float]:
        keys, values = self.cache.read(1, segment.start, num_tokens)
        assert torch.equal(keys + 1, values)
        return keys.flatten().tolist()

    def serve(self, tokens: list[int], namespace: str = "a", num_rows: int = 0) -> int:
        """A sequence from its beginning to its end; how many tokens it reused."""
        placed = self.prefixes.place(KeyedTokens.of(tokens, namespace), num_rows or len(tokens) + 8)
        assert placed is not None
        segment, num_reused = placed
        assert self.read(segment, num_reused) == contents(tokens)[:num_reused]
        self.write(segment, tokens, num_reused)
        self.prefixes.release(segment, tokens, namespace)
        return num_reused


def test_the_last_token_is_never_reused() -> None:
    """It goes through the model, because what follows it is to be chosen."""
    model = Model()
    tokens = make_prompt(LONG)
    assert model.serve(tokens) == 0
    assert model.serve(tokens) == LONG - 1
    assert model.serve([*tokens, 5, 6]) == LONG


def test_what_was_offered_is_not_read_again() -> None:
    """Of a sequence that ends, only what it added to its prompt; and all of it is found."""
    model, prompt = Model(), make_prompt(LONG)
    placed = model.prefixes.place(KeyedTokens.of(prompt, "a"), 2 * LONG)
    assert placed is not None
    model.prefixes.offer(placed[0], KeyedTokens.of(prompt, "a"))
    text = CountedTokens([*prompt, *make_prompt(50, 1)])
    model.write(placed[0], text)
    text.num_read = 0
    model.prefixes.release(placed[0], text, "a")
    assert text.num_read == 50
    assert model.serve([*text, 5, 6]) == LONG + 50


@given(num_tokens=st.integers(0, 3 * BLOCK_TOKENS), num_known=st.integers(0, 3 * BLOCK_TOKENS))
def test_tokens_are_found_by_the_same_however_many_were_known(
    num_tokens: int, num_known: int
) -> None:
    text = make_prompt(3 * BLOCK_TOKENS)
    known = KeyedTokens.of(text[:num_known], "a")
    found = KeyedTokens.of(text[:num_tokens], "a", known)
    wanted = KeyedTokens.of(text[:num_tokens], "a")
    assert found.token_ids.tolist() == wanted.token_ids.tolist() == text[:num_tokens]
    assert [*found.keys] == [*wanted.keys]
    assert len(wanted.keys) == num_tokens // BLOCK_TOKENS
    assert found.namespace == "a"


def test_the_longest_beginning_is_found() -> None:
    """To the token, but not less than a block."""
    model = Model()
    tokens = make_prompt(LONG)
    model.serve(tokens)
    for num_common in (BLOCK_TOKENS, BLOCK_TOKENS + 1, LONG - 1):
        other = [*tokens[:num_common], 60, 60]
        assert other[num_common] != tokens[num_common]
        assert model.serve(other) == num_common
    assert model.serve([*tokens[: BLOCK_TOKENS - 1], 60, 60, 60]) == 0


def test_many_pieces_are_looked_at_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they were used in another order than they lie in, so that what is dropped leaves gaps
    everywhere."""
    looks = []

    def find_runs_noted(*arguments: Any) -> list[RowRun]:
        looks.append(arguments)
        return find_runs(*arguments)

    num_pieces, num_wanted = 2048, 32 * BLOCK_TOKENS
    prefixes = PrefixCache(make_cache(num_pieces * BLOCK_TOKENS))
    texts = [make_prompt(BLOCK_TOKENS, seed) for seed in range(num_pieces)]
    for text in (*texts, *random.Random(0).sample(texts, num_pieces)):
        placed = prefixes.place(KeyedTokens.of([*text, 1], "a"), BLOCK_TOKENS)
        assert placed is not None
        prefixes.release(placed[0], text, "a")
    monkeypatch.setattr(prefix_cache, "find_runs", find_runs_noted)
    placed = prefixes.place(KeyedTokens.of(make_prompt(num_wanted, -1), "b"), num_wanted)
    assert placed is not None
    assert placed[0].num_rows == num_wanted
    assert 1 < len(looks) < 64


def test_one_piece_is_dropped_beside_many_running_sequences() -> None:
    """Free rows lie elsewhere, in two places."""
    num_running = 2 * prefix_cache._NUM_LOOKS
    prefixes = PrefixCache(make_cache((num_running + 6) * BLOCK_TOKENS))

    def placed(seed: int, num_rows: int = BLOCK_TOKENS) -> Segment:
        prompt = KeyedTokens.of(make_prompt(num_rows, seed), "a")
        found = prefixes.place(prompt, num_rows)
        assert found is not None
        prefixes.offer(found[0], prompt)
        return found[0]

    gaps, ended = [placed(1), placed(2), placed(3)], placed(4, 2 * BLOCK_TOKENS)
    running = [placed(5 + number) for number in range(num_running)]
    last = placed(0)
    for gap in (gaps[0], last):
        prefixes.release(gap, [], None)
    prefixes.release(ended, make_prompt(2 * BLOCK_TOKENS, 4), "a")
    assert placed(-1, 2 * BLOCK_TOKENS) == ended
    assert prefixes.usage == (len(running) + 4) / (num_running + 6)


def test_no_more_is_dropped_than_leaves_room() -> None:
    """Of many long pieces the one used first is cut, and the others stay."""
    num_pieces = 2 * prefix_cache._NUM_LOOKS
    prefixes = PrefixCache(make_cache((4 * num_pieces + 3) * BLOCK_TOKENS))
    gaps = []
    for seed in range(num_pieces):
        text = make_prompt(4 * BLOCK_TOKENS, seed)
        placed = prefixes.place(KeyedTokens.of(text, "a"), len(text))
        assert placed is not None
        if seed % (num_pieces // 2) == 0:
            gaps.append(prefixes.place(KeyedTokens.of([], "b"), BLOCK_TOKENS))
        prefixes.release(placed[0], text, "a")
    last = prefixes.place(KeyedTokens.of([], "b"), BLOCK_TOKENS)
    for gap in (gaps[0], last):
        assert gap is not None
        prefixes.release(gap[0], [], None)
    num_before = prefixes.cache.rows.num_free
    wanted = 2 * BLOCK_TOKENS
    assert num_before == wanted
    assert prefixes.place(KeyedTokens.of([], "b"), wanted) is not None
    assert prefixes.cache.rows.num_free <= wanted


def test_no_more_pieces_are_kept_than_are_quickly_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those used last; what runs is not among those that go."""
    monkeypatch.setattr(prefix_cache, "_MAX_ENTRIES", 3)
    model = Model(1024)
    running = model.prefixes.place(KeyedTokens.of([], "a"), 32)
    assert running is not None
    model.prefixes.offer(running[0], KeyedTokens.of(make_prompt(BLOCK_TOKENS, -1), "a"))
    texts = [make_prompt(LONG, seed) for seed in range(4)]
    assert [model.serve(text) for text in texts] == [0] * 4
    assert [model.serve(text) for text in reversed(texts)] == [LONG - 1] * 2 + [0] * 2
    assert model.prefixes.usage == 32 / 1024


def test_namespaces_do_not_find_each_other() -> None:
    """Nor does anybody find what was not to be kept."""
    model = Model()
    tokens = make_prompt(LONG)
    model.serve(tokens, "a")
    assert model.serve(tokens, "b") == 0
    secret = make_prompt(LONG, seed=1)
    placed = model.prefixes.place(KeyedTokens.of(secret, "a"), LONG)
    assert placed is not None
    model.prefixes.release(placed[0], secret, None)
    assert model.serve(secret, "a") == 0


def test_a_conversation_grows_in_place() -> None:
    """Where there is room behind it, no row is copied."""
    model = Model()
    tokens = make_prompt(LONG)
    model.serve(tokens)
    placed = model.prefixes.place(KeyedTokens.of([*tokens, *make_prompt(40, 1)], "a"), 200)
    assert placed == (Segment(0, 224), LONG)


def test_what_is_taken_over_survives_a_move() -> None:
    """A conversation that cannot grow where it is moves, even onto its own rows."""
    model = Model(num_rows=256)
    tokens = make_prompt(LONG)
    filler = model.prefixes.place(KeyedTokens.of(make_prompt(20, 1), "b"), 32)
    assert filler is not None
    model.serve(tokens)
    blocker = model.cache.rows.allocate_at(128, 32)
    assert blocker is not None
    model.cache.rows.free(filler[0])
    longer = [*tokens, *make_prompt(8, 2)]
    assert model.serve(longer, num_rows=120) == LONG


def test_running_sequences_share_their_prompts() -> None:
    """A prompt can be copied while its sequence still runs, and its rows are not evicted."""
    model = Model(num_rows=256)
    tokens = make_prompt(LONG)
    placed = model.prefixes.place(KeyedTokens.of(tokens, "a"), LONG)
    assert placed is not None
    segment, _ = placed
    model.write(segment, tokens)
    model.prefixes.offer(segment, KeyedTokens.of(tokens, "a"))
    assert model.serve([*tokens, 1]) == LONG
    assert model.prefixes.place(KeyedTokens.of(make_prompt(9, 3), "a"), 256) is None
    assert model.read(segment, LONG) == contents(tokens)


def test_running_sequences_are_found_where_they_moved() -> None:
    """Free rows are put together: what ended goes if it has to, what runs can still be copied
    from."""
    model = Model()
    ended, prompt = make_prompt(LONG), make_prompt(LONG, seed=1)
    model.serve(ended, num_rows=128)
    placed = model.prefixes.place(KeyedTokens.of(prompt, "a"), 160)
    assert placed is not None
    segment, _ = placed
    model.write(segment, prompt)
    model.prefixes.offer(segment, KeyedTokens.of(prompt, "a"))
    assert segment.start > 0
    assert model.prefixes.place(KeyedTokens.of([1], "a"), 160) is None
    assert model.prefixes.has_room_in_parts(160)
    assert not model.prefixes.has_room_in_parts(161)
    assert model.prefixes.compact([Owned(segment, len(prompt), 160)], 160) == [Segment(0, 160)]
    assert model.serve([*prompt, 3], num_rows=160) == len(prompt)
    assert model.serve(ended, num_rows=160) == 0


def test_what_ended_moves_along() -> None:
    """To put free rows together, no more of what ended goes than has to, the end of the oldest
    first."""
    model = Model(num_rows=384)
    texts = [make_prompt(LONG, seed) for seed in range(4)]
    segments = []
    for tokens in texts:
        placed = model.prefixes.place(KeyedTokens.of(tokens, "a"), LONG)
        assert placed is not None
        model.write(placed[0], tokens)
        segments.append(placed[0])
    running, *ended = segments
    model.prefixes.release(ended[1], texts[2], "a")
    model.prefixes.release(ended[0], texts[1], None)
    model.prefixes.release(ended[2], texts[3], "a")
    model.prefixes.compact([Owned(running, LONG, running.num_rows)], 128)
    assert max(gap.num_rows for gap in model.cache.rows.gaps) >= 128
    assert model.serve([*texts[3], 1], num_rows=128) == LONG
    assert model.serve([*texts[2], 1], num_rows=128) == LONG - BLOCK_TOKENS


@pytest.mark.parametrize("is_blocked", [False, True])
def test_what_grows_can_still_be_copied_from(is_blocked: bool) -> None:
    """Behind its own rows, or elsewhere if another sequence is there."""
    model = Model(num_rows=640)
    prompt = make_prompt(LONG)
    placed = model.prefixes.place(KeyedTokens.of(prompt, "a"), 128)
    assert placed is not None
    segment, _ = placed
    model.write(segment, prompt)
    model.prefixes.offer(segment, KeyedTokens.of(prompt, "a"))
    if is_blocked:
        assert model.prefixes.place(KeyedTokens.of([1], "a"), 32) is not None
    grown = model.prefixes.grow(segment, LONG, 256)
    assert grown is not None
    assert (grown.num_rows, grown.start > segment.start) == (256, is_blocked)
    assert model.serve([*prompt, 3], num_rows=160) == LONG
    assert model.read(grown, LONG) == contents(prompt)
    model.prefixes.release(grown, prompt, None)


def test_the_oldest_goes_first() -> None:
    """What was used lately stays."""
    model = Model(num_rows=384)
    first, second, third = (make_prompt(LONG, seed) for seed in range(3))
    for tokens in (first, second, third):
        model.serve(tokens, num_rows=LONG)
    model.serve(first, num_rows=LONG)
    model.serve(make_prompt(150, 7), num_rows=160)
    assert model.serve(second, num_rows=LONG) == 0
    assert model.serve(first, num_rows=LONG) == LONG - 1


def test_ends_that_nobody_continued_go_first() -> None:
    """As of conversations whose thoughts are left out of the next prompt: each turn comes back only
    in part, and those of others are not dropped for the rest of it."""
    model = Model(num_rows=4 * 128)
    histories = [make_prompt(LONG, seed) for seed in range(3)]
    found = []
    for turn in range(4):
        for number, history in enumerate(histories):
            own = make_prompt(BLOCK_TOKENS, 10 + 3 * turn + number)
            found.append(model.serve([*history, *own], num_rows=128))
    assert found == [0] * 3 + [LONG] * 9


def test_gaps_between_what_ended_become_one() -> None:
    """Where rows enough are free but not in one place, what ended moves and nothing goes."""
    model = Model(num_rows=320)
    kept = make_prompt(LONG)
    first = model.prefixes.place(KeyedTokens.of(make_prompt(9, 1), "a"), 96)
    assert first is not None
    model.serve(kept, num_rows=LONG)
    model.prefixes.release(first[0], [], None)
    assert [(gap.start, gap.num_rows) for gap in model.cache.rows.gaps] == [(0, 96), (192, 128)]
    placed = model.prefixes.place(KeyedTokens.of(make_prompt(9, 2), "a"), 192)
    assert placed == (Segment(96, 192), 0)
    model.prefixes.release(placed[0], [], None)
    assert model.serve([*kept, 1], num_rows=128) == LONG


def test_the_oldest_loses_its_end() -> None:
    """Its beginning is reused as long as it is there."""
    model = Model(num_rows=320)
    old, young = make_prompt(192), make_prompt(128, 1)
    model.serve(old, num_rows=192)
    model.serve(young, num_rows=128)
    model.serve(make_prompt(20, 2), num_rows=64)
    assert model.serve([*old[:128], *make_prompt(9, 3)], num_rows=160) == 128
    assert model.serve([*young, 5], num_rows=160) == 128


@pytest.mark.parametrize("num_used", [LONG, LONG - 1])
def test_what_ended_moves_for_one_that_grows(num_used: int) -> None:
    """No more rows than it would have to move itself; else it goes elsewhere."""
    model = Model(num_rows=512)
    prompt, behind = make_prompt(num_used), make_prompt(LONG, 1)
    placed = model.prefixes.place(KeyedTokens.of(prompt, "a"), 96)
    assert placed is not None
    model.write(placed[0], prompt)
    model.serve(behind, num_rows=LONG)
    grown = model.prefixes.grow(placed[0], num_used, 128)
    assert grown == Segment(0 if num_used == LONG else 192, 128)
    assert model.read(grown, num_used) == contents(prompt)
    assert model.serve([*behind, 1], num_rows=128) == LONG


@pytest.mark.parametrize("num_common", [192, 180])
@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_conversation_alone_goes_on_in_a_small_cache(
    num_common: int, is_at_the_end: bool
) -> None:
    """Whole, or with another end, where there is no room for both: neighbours go, wherever they
    are."""
    model = Model(num_rows=320)
    filler, other = make_prompt(64, 1), make_prompt(40, 2)
    history = make_prompt(192)
    if is_at_the_end:
        model.serve(filler, num_rows=64)
    model.serve(history, num_rows=192)
    model.serve(other, num_rows=64)
    longer = [*history[:num_common], *make_prompt(100, 3)]
    assert longer[num_common] != [*history, 0][num_common]
    assert model.serve(longer, num_rows=320) == num_common
    assert model.serve([*longer, 1], num_rows=320) == len(longer)


def test_the_same_is_kept_once() -> None:
    """A prompt that comes again and again does not fill the cache with copies of it."""
    model = Model(num_rows=640)
    other, same = make_prompt(LONG, 1), make_prompt(LONG)
    model.serve(other)
    for _ in range(20):
        model.serve(same)
    assert model.serve(other) == LONG - 1


def test_equal_keys_of_other_tokens_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance, or somebody who looked for it, cannot pass one prompt off for another."""
    monkeypatch.setattr("hdserve.engine.kv_cache.prefix_cache._keys", lambda *_: iter([1]))
    model = Model()
    model.serve(make_prompt(LONG))
    assert model.serve(make_prompt(LONG, seed=1)) == 0


class PrefixMachine(RuleBasedStateMachine):
    """Sequences of few different beginnings, run and ended in any order in a small cache."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(num_rows=512)
        self.running: list[tuple[Segment, list[int], str]] = []

    @rule(
        lengths=st.lists(st.sampled_from([7, 32, 40, 90]), min_size=1, max_size=3),
        seeds=st.lists(st.integers(0, 2), min_size=3, max_size=3),
        namespace=st.sampled_from("ab"),
        num_more=st.integers(0, 100),
    )
    def place(self, lengths: list[int], seeds: list[int], namespace: str, num_more: int) -> None:
        tokens = [
            token
            for length, seed in zip(lengths, seeds, strict=False)
            for token in make_prompt(length, seed)
        ]
        prompt, num_rows = KeyedTokens.of(tokens, namespace), len(tokens) + num_more
        placed = self.model.prefixes.place(prompt, num_rows)
        if placed is None and self.model.prefixes.has_room_in_parts(num_rows):
            self.compact(num_rows)
            placed = self.model.prefixes.place(prompt, num_rows)
            assert placed is not None
        if placed is None:
            return
        segment, num_reused = placed
        assert num_reused < len(tokens)
        assert self.model.read(segment, num_reused) == contents(tokens)[:num_reused]
        self.model.write(segment, tokens, num_reused)
        self.running.append((segment, tokens, namespace))

    @rule(num_rows=st.integers(0, 512), num_more=st.integers(0, 100))
    def compact(self, num_rows: int, num_more: int = 0) -> None:
        """The oldest grows, if it may."""
        owned = [Owned(s, len(tokens), s.num_rows) for s, tokens, _ in self.running]
        if owned and self.model.prefixes.has_room_in_parts(num_more):
            first = owned[0]
            owned[0] = first._replace(num_rows=first.num_rows + align(num_more))
        moved = self.model.prefixes.compact(owned, num_rows)
        assert [s.num_rows for s in moved] == [one.num_rows for one in owned]
        self.running = [
            (segment, tokens, namespace)
            for segment, (_, tokens, namespace) in zip(moved, self.running, strict=True)
        ]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_more=st.integers(1, 200))
    def grow(self, data: st.DataObject, num_more: int) -> None:
        """Where there is no gap, nothing changes; what others may reuse of it, they still do."""
        index = data.draw(st.integers(0, len(self.running) - 1))
        segment, tokens, namespace = self.running[index]
        num_rows = segment.num_rows + num_more
        grown = self.model.prefixes.grow(segment, len(tokens), num_rows)
        if grown is not None:
            assert grown.num_rows == align(num_rows)
            self.running[index] = grown, tokens, namespace

    @precondition(lambda self: self.running)
    @rule(data=st.data(), offers=st.booleans(), is_kept=st.booleans())
    def end(self, data: st.DataObject, offers: bool, is_kept: bool) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        segment, tokens, namespace = self.running[index]
        if offers:
            self.model.prefixes.offer(segment, KeyedTokens.of(tokens, namespace))
            return
        del self.running[index]
        num_cached = data.draw(st.integers(0, len(tokens)))
        kept = namespace if is_kept else None
        self.model.prefixes.release(segment, tokens[:num_cached], kept)

    @invariant()
    def running_rows_are_untouched(self) -> None:
        for segment, tokens, _ in self.running:
            assert self.model.read(segment, len(tokens)) == contents(tokens)

    @invariant()
    def rows_are_counted(self) -> None:
        num_rows = sum(segment.num_rows for segment, _, _ in self.running)
        assert self.model.prefixes.usage == num_rows / self.model.cache.num_rows

    def teardown(self) -> None:
        for segment, _, _ in self.running:
            self.model.prefixes.release(segment, [], None)
        prompt, num_rows = KeyedTokens.of([0], "a"), self.model.cache.num_rows
        assert self.model.prefixes.place(prompt, num_rows) is not None


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def converse(engine: Engine, num_turns: int = 4) -> list[Sequence]:
    """The turns of a conversation, each with its answer."""
    turns, history = [], make_prompt(50)
    for turn in range(num_turns):
        seq = make_sequence(str(turn), history, max_tokens=12)
        run(engine, [seq])
        turns.append(seq)
        history = [*seq.token_ids, *make_prompt(9, turn + 1)]
    return turns


@pytest.mark.parametrize("is_drafting", [False, True])
def test_a_conversation_is_not_read_again(is_drafting: bool) -> None:
    """Each turn reuses all that went through the model before, drafted or not, and gives the very
    answer it gives without that."""
    model = make_model()
    cold = converse(make_engine(model=model, prefix_caching=False))
    futures = {seq.request_id: seq.token_ids for seq in cold}
    engine = make_engine([OracleDrafter(futures, length=2)] if is_drafting else [], model=model)
    warm = converse(engine)
    assert [seq.token_ids for seq in warm] == [seq.token_ids for seq in cold]
    assert [seq.num_reused_tokens for seq in cold] == [0, 0, 0, 0]
    assert [seq.num_reused_tokens for seq in warm] == [0, 61, 82, 103]
    assert all(bool(seq.counts.num_accepted_tokens) is is_drafting for seq in warm)
    assert engine.stats.num_drafter_failures == {}


def test_choices_of_one_prompt_share_it() -> None:
    """Those that begin while another one runs copy its prompt."""
    model = make_model()
    prompt = make_prompt(LONG)
    sequences = [make_sequence(str(number), prompt, max_tokens=30) for number in range(3)]
    wanted = plain_tokens(model, sequences)
    engine = make_engine(model=model, max_num_sequences=3, prefill_chunk_tokens=64)
    engine.add(sequences[0])
    for _ in range(3):
        engine.step()
    run(engine, sequences[1:])
    assert [seq.num_reused_tokens for seq in sequences] == [0, LONG - 1, LONG - 1]
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted
    assert engine.stats.num_reused_tokens == 2 * (LONG - 1)
    assert engine.stats.num_queried_tokens == engine.stats.num_prompt_tokens == 3 * LONG
    assert engine.stats.kv_cache_usage == 0.0


def test_nothing_is_looked_up_in_a_cache_that_is_off() -> None:
    engine = make_engine(prefix_caching=False)
    run(engine, [make_sequence("a", make_prompt(LONG))])
    assert engine.stats.num_prompt_tokens == LONG
    assert engine.stats.num_queried_tokens == 0


@pytest.mark.parametrize(
    ("length", "is_kept", "is_shared"),
    [(LONG, True, True), (BLOCK_TOKENS, True, True), (LONG, False, True), (LONG, True, False)],
)
def test_choices_that_come_together_compute_their_prompt_once(
    length: int, is_kept: bool, is_shared: bool
) -> None:
    """The others wait until it is there; where nothing can be reused they wait for nobody."""
    model, prompt, shared = make_model(), make_prompt(length), PromptScores()
    speculation = SpeculationParams(is_output_shared=is_shared)
    sequences = [
        make_sequence(str(number), prompt, speculation, seed=number, max_tokens=8)
        for number in range(3)
    ]
    wanted = plain_tokens(model, sequences)
    engine = make_engine(model=model, prefill_chunk_tokens=64, prefix_caching=is_kept)
    for seq in sequences:
        seq.prompt_scores = shared
        engine.add(seq)
    engine.step()
    is_waiting = length > BLOCK_TOKENS and is_kept and is_shared
    assert engine.stats.num_running == (1 if is_waiting else 3)
    run(engine, [])
    num_reused = length - 1 if is_waiting else 0
    assert [seq.num_reused_tokens for seq in sequences] == [0, num_reused, num_reused]
    assert {seq.request_id: seq.token_ids for seq in sequences} == wanted


@pytest.mark.parametrize("is_drafting", [False, True])
def test_who_moves_gets_the_same_tokens(is_drafting: bool) -> None:
    """A sequence that makes room for another one while it decodes goes on as if alone."""
    model = make_model()
    lengths = {"short": (40, 2), "moves": (40, 40), "large": (150, 10)}
    sequences = {
        name: make_sequence(name, make_prompt(num_tokens, seed), max_tokens=max_tokens)
        for seed, (name, (num_tokens, max_tokens)) in enumerate(lengths.items())
    }
    wanted = plain_tokens(model, sequences.values())
    engine = make_engine(
        [OracleDrafter(wanted, length=2)] if is_drafting else [],
        model=model,
        kv_cache_tokens=288,
        max_num_sequences=2,
        prefill_chunk_tokens=64,
    )
    run_together = [sequences["short"], sequences["moves"], sequences["large"]]
    for seq in run_together:
        engine.add(seq)
    while sequences["large"].num_output_tokens == 0:
        engine.step()
    assert sequences["moves"].finish_reason is None
    run(engine, [])
    assert {seq.request_id: seq.token_ids for seq in run_together} == wanted


def test_an_aborted_prompt_leaves_what_it_had() -> None:
    """What had gone through the model is right, and is reused."""
    model = make_model()
    prompt = make_prompt(LONG)
    engine = make_engine(model=model, prefill_chunk_tokens=40)
    engine.add(make_sequence("gone", prompt))
    engine.step()
    engine.abort("gone")
    seq = make_sequence("a", prompt)
    wanted = plain_tokens(model, [seq])
    run(engine, [seq])
    assert seq.num_reused_tokens == 40
    assert seq.token_ids == wanted["a"]


def test_what_is_not_shared_is_not_kept() -> None:
    """``share_output: false`` keeps a request's prompt to itself, too."""
    engine = make_engine()
    prompt = make_prompt(LONG)
    run(engine, [make_sequence("a", prompt, SpeculationParams(is_output_shared=False))])
    seq = make_sequence("b", prompt)
    run(engine, [seq])
    assert seq.num_reused_tokens == 0


def test_what_is_forgotten_is_not_reused() -> None:
    """Neither what ended nor what runs; what comes after it is, as ever."""
    engine = make_engine()
    prompt = make_prompt(LONG)
    run(engine, [make_sequence("ended", prompt)])
    engine.add(make_sequence("runs", prompt, max_tokens=4))
    engine.step()
    engine.forget_prefixes()
    found = []
    for name in ("first", "second"):
        seq = make_sequence(name, prompt)
        run(engine, [seq])
        found.append(seq.num_reused_tokens)
    assert found == [0, LONG - 1]


def test_what_is_not_shared_leaves_to_others_what_it_reused() -> None:
    engine = make_engine()
    first = make_sequence("a", make_prompt(LONG), max_tokens=2)
    run(engine, [first])
    longer = [*first.token_ids[:-1], *make_prompt(8, 5)]
    private = make_sequence("b", longer, SpeculationParams(is_output_shared=False), max_tokens=2)
    run(engine, [private])
    assert private.num_reused_tokens == len(first.token_ids) - 1
    last = make_sequence("c", [*make_prompt(LONG), *make_prompt(8, 6)])
    run(engine, [last])
    assert last.num_reused_tokens >= LONG
