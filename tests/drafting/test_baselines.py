"""The baselines draft what their papers say."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np

from hdserve.core import Source
from hdserve.databases.model import ModelDatabase
from hdserve.drafting.base import DraftResources
from hdserve.drafting.hierarchy_paper import (
    MAX_NAMESPACES,
    HierarchyPaper,
    HierarchyPaperOptions,
    _Ngrams,
)
from hdserve.drafting.prompt_lookup import PromptLookup, PromptLookupOptions
from tests.drafting.helpers import (
    VOCAB_SIZE,
    generate,
    make_resources,
    make_sequence,
    make_statistics,
    paths,
    propose,
)


def test_prompt_lookup_copies_after_the_longest_match() -> None:
    seq = make_sequence([1, 2, 3, 9, 2, 3, 8, 7, 1, 2, 3])
    tree = propose(PromptLookup(make_resources()), seq)
    assert paths(tree) == [[9, 2, 3, 8, 7, 1, 2, 3]]


def test_prompt_lookup_finds_what_was_decided_meanwhile() -> None:
    """However long the text becomes; it keeps nothing of a sequence that has ended."""
    drafter, seq = PromptLookup(make_resources()), make_sequence([1, 2, 3])
    for number in range(4000):
        seq.token_ids += [10 + number, 20]
        if number % 7 == 1:
            assert paths(propose(drafter, seq, 2)) == [[11, 20]]
    seq.token_ids += [1, 2]
    assert paths(propose(drafter, seq, 2)) == [[3, 10]]
    drafter.finish(seq)
    assert not seq.drafter_state


def test_prompt_lookup_without_a_match_drafts_nothing() -> None:
    drafter = PromptLookup(make_resources(), PromptLookupOptions(max_draft_tokens=2))
    assert propose(drafter, make_sequence([1, 2, 3])).num_draft_tokens == 0
    assert paths(propose(drafter, make_sequence([1, 2, 3, 1]))) == [[2, 3]]


def test_paper_asks_the_databases_in_order() -> None:
    """Context chains newest first, then the model's most frequent, then statistics."""
    resources = make_resources([9, 1, 1, 1, 1], [9, 1, 1, 1, 1], [9, 2, 2, 2, 2])
    drafter = HierarchyPaper(resources)
    seq = make_sequence([9, 3, 3, 3, 3, 9, 4, 4, 4, 4, 9])
    drafter.start(seq)
    tree = propose(drafter, seq, 28)
    assert paths(tree) == [[4] * 4, [3] * 4, [1] * 4, [2] * 4]
    assert [tree.sources[tree.child(0, t) or 0] for t in (4, 3, 1, 2)] == [
        Source.CONTEXT,
        Source.CONTEXT,
        Source.MODEL,
        Source.MODEL,
    ]


def test_paper_asks_in_another_order_and_only_what_it_is_told() -> None:
    resources = make_resources([5, 6, 7, 8, 9, 1], statistics=[[5, 11, 12, 13, 14]])
    drafted = {}
    for order in ("ms", "sm", "s"):
        drafter = HierarchyPaper(resources, HierarchyPaperOptions(order=order))
        seq = make_sequence([5, 1, 2, 3, 4, 5])
        drafter.start(seq)
        drafted[order] = list(dict.fromkeys(propose(drafter, seq).sources[1:]))
    assert drafted == {
        "ms": [Source.MODEL, Source.STATISTICS],
        "sm": [Source.STATISTICS, Source.MODEL],
        "s": [Source.STATISTICS],
    }


def test_paper_does_not_ask_what_it_does_not_need() -> None:
    """With seven chains from the context no other database is asked."""
    prompt = [token for n in range(7) for token in (9, *[20 + n] * 4)]
    drafter = HierarchyPaper(make_resources([9, 1, 1, 1, 1]))
    seq = make_sequence([*prompt, 9])
    drafter.start(seq)
    tree = propose(drafter, seq, 40)
    assert set(tree.sources[1:]) == {Source.CONTEXT}


def test_paper_follows_statistics_greedily() -> None:
    statistics = make_statistics([[5, 6, 7, 8, 9, 10]])
    drafter = HierarchyPaper(DraftResources(VOCAB_SIZE, None, statistics))
    seq = make_sequence([4, 5])
    drafter.start(seq)
    assert paths(propose(drafter, seq)) == [[6, 7, 8, 9]]


def test_paper_ends_a_chain_before_what_the_model_does_not_have() -> None:
    """A tokenizer may have more tokens than the model."""
    foreign = VOCAB_SIZE - 1
    texts = [[5, 1, 1, foreign, 1], [6, 2, foreign, 2, 2]]
    resources = replace(make_resources(*texts, statistics=texts), vocab_size=foreign)
    for order in ("c", "m", "s"):
        drafter = HierarchyPaper(resources, HierarchyPaperOptions(order=order))
        found = []
        for last in (5, 6):
            seq = make_sequence([last], prediction=(*texts[0], *texts[1]))
            drafter.start(seq)
            found += paths(propose(drafter, seq))
        assert found == [[1, 1], [2]]


def test_paper_inserts_every_completed_ngram() -> None:
    """What was generated is drafted when its first token comes again."""
    output = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    trees = generate(HierarchyPaper(make_resources()), make_sequence([0]), output)
    assert any([2, 3, 4, 5] in paths(tree) for tree in trees)


def test_paper_keeps_the_newest_ngrams_in_their_order() -> None:
    """Of those that were seen equally often; the newest are guessed first."""
    ngrams = _Ngrams(chain_tokens=1, max_ngrams=4)
    for token in (1, 1, 2, 3, 4, 5):
        ngrams.add([9, token], 0)
    assert ngrams.newest(9, 5) == [(5,), (1,)]
    assert ngrams.most_frequent(9, 5) == [(1,), (5,)]


def test_paper_follows_a_model_database_that_was_cleared() -> None:
    database = ModelDatabase(1 << 20)
    database.insert("default", [9, 1, 1, 1, 1])
    drafter = HierarchyPaper(DraftResources(VOCAB_SIZE, database))
    generate(drafter, make_sequence([9]), [5])
    database.clear()
    seq = make_sequence([9])
    drafter.start(seq)
    assert propose(drafter, seq).num_draft_tokens == 0


def test_paper_reads_no_more_of_a_model_database_than_it_may_keep() -> None:
    """The end of it: a request does not wait for all that was ever said."""
    texts = [[1, *range(10, 14)], *[[2, *range(20, 24)]] * 30]
    drafter = HierarchyPaper(make_resources(*texts), HierarchyPaperOptions(max_ngrams=100))
    for token, is_known in ((1, False), (2, True)):
        seq = make_sequence([token])
        drafter.start(seq)
        assert bool(propose(drafter, seq).num_draft_tokens) == is_known


def test_paper_forgets_a_namespace_at_once() -> None:
    """Sequences that run draft nothing more from it, and its text is held nowhere."""
    database = ModelDatabase(1 << 20)
    database.insert("default", [9, 1, 1, 1, 1])
    drafter = HierarchyPaper(DraftResources(VOCAB_SIZE, database))
    seq = make_sequence([9])
    drafter.start(seq)
    assert paths(propose(drafter, seq)) == [[1] * 4]
    database.clear("default")
    drafter.forget("default")
    assert propose(drafter, seq).num_draft_tokens == 0


def test_paper_keeps_ngrams_of_the_namespaces_used_last() -> None:
    database = ModelDatabase(1 << 24)
    drafter = HierarchyPaper(DraftResources(VOCAB_SIZE, database))
    names = [f"n{number}" for number in range(MAX_NAMESPACES + 2)]
    for name in [*names, names[2]]:
        database.insert(name, [9, 1, 1, 1, 1])
        drafter.start(make_sequence([9], namespace=name))
    assert list(drafter._model) == [*names[3:], names[2]]
    seq = make_sequence([9], namespace=names[0])
    drafter.start(seq)
    assert paths(propose(drafter, seq)) == [[1] * 4]


def test_paper_bounds_the_ngrams_of_all_namespaces_together() -> None:
    """Those used last are kept; one is never dropped while it is used."""
    database = ModelDatabase(1 << 24)
    drafter = HierarchyPaper(DraftResources(VOCAB_SIZE, database), HierarchyPaperOptions())
    few = HierarchyPaper(
        DraftResources(VOCAB_SIZE, database), HierarchyPaperOptions(max_ngrams=250)
    )
    for number in range(6):
        database.insert(f"n{number}", range(100))
        for each in (drafter, few):
            each.start(make_sequence([9], namespace=f"n{number}"))
    assert drafter.learned().num_entries == 6 * 96
    assert few.learned().num_entries == 2 * 96
    assert list(few._model) == ["n4", "n5"]


def test_paper_tells_about_how_much_memory_it_takes() -> None:
    """What is kept of all requests, and for the running ones until they end."""
    database = ModelDatabase(1 << 24)
    texts = np.random.default_rng(0).integers(1000, size=(10, 2000)).tolist()
    for text in texts[1:]:
        database.insert("default", text)
    drafter, seq = HierarchyPaper(DraftResources(1000, database)), make_sequence(texts[0])
    assert (drafter.held(), drafter.learned()) == ((0, 0), (0, 0))
    tracemalloc.start()
    try:
        drafter.start(seq)
        num_traced, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held, learned = drafter.held(), drafter.learned()
    assert (held.num_entries, learned.num_entries) == (1996, 9 * 1996)
    assert num_traced / 2 < held.num_bytes + learned.num_bytes < num_traced * 2
    drafter.finish(seq)
    assert (drafter.held(), drafter.learned()) == ((0, 0), learned)
