"""What the model thought likely is drafted when the same tokens come again."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hdserve.bench.replay import verify_recorded
from hdserve.core import Sequence, Source
from hdserve.databases.model import ModelDatabase
from hdserve.databases.ngram import BUCKET_ROWS
from hdserve.drafting.base import DraftResources
from hdserve.drafting.hierarchy import Hierarchy
from hdserve.tree import DraftTree
from tests.drafters import only
from tests.drafting.helpers import VOCAB_SIZE, check_tree, make_sequence, propose


class BigramModel:
    """A language model: after each token a fixed distribution over all tokens."""

    def __init__(self) -> None:
        generator = np.random.default_rng(7)
        self.logits = generator.normal(0, 3, (VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)

    def likeliest(self, token: int, k: int) -> list[int]:
        return np.argsort(-self.logits[token])[:k].tolist()

    def answer(self, token: int, num_tokens: int) -> list[int]:
        """What it says after ``token``, greedily."""
        said = [token]
        while len(said) <= num_tokens:
            said += self.likeliest(said[-1], 1)
        return said[1:]

    def verify(self, tree: DraftTree) -> BigramForward:
        return BigramForward(self.logits[tree.token_ids])


class BigramForward:
    def __init__(self, logits: npt.NDArray[np.float32]) -> None:
        self.logits = logits

    def top_tokens(self, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        tokens = np.argsort(-self.logits, axis=1)[:, :k]
        return tokens, np.take_along_axis(self.logits, tokens, axis=1)

    def hidden(self, node: int) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module")
def model() -> BigramModel:
    return BigramModel()


def make_drafter(database: ModelDatabase | None = None) -> Hierarchy:
    database = database or ModelDatabase(1 << 22)
    return Hierarchy(DraftResources(VOCAB_SIZE, database), only("recycled"))


def generate(
    drafter: Hierarchy, model: BigramModel, seq: Sequence, num_tokens: int
) -> list[DraftTree]:
    """Let ``model`` answer; returns the tree of every step."""
    output = model.answer(seq.token_ids[-1], num_tokens)
    drafter.start(seq)
    trees = []
    while seq.num_output_tokens < num_tokens:
        tree = propose(drafter, seq)
        trees.append(tree)
        forward = model.verify(tree)
        acceptance = verify_recorded(tree, output[seq.num_output_tokens :])
        seq.token_ids += acceptance.token_ids
        drafter.observe(seq, tree, acceptance, forward)
    drafter.finish(seq)
    return trees


def test_an_answer_said_before_is_drafted_without_any_text(model: BigramModel) -> None:
    """The model database is empty: nothing was recorded as text."""
    database = ModelDatabase(1 << 22)
    drafter = make_drafter(database)
    first = generate(drafter, model, make_sequence([3]), 12)
    again = generate(drafter, model, make_sequence([3]), 12)
    assert database.partition("default") is None
    assert first[0].num_draft_tokens == 0
    assert len(again) < len(first)
    assert {source for tree in again for source in tree.sources[1:]} == {Source.RECYCLED}


def test_the_likeliest_tokens_of_rejected_nodes_are_kept_too(model: BigramModel) -> None:
    """After a token that was only ever drafted and rejected, its own likeliest are drafted."""
    drafter = make_drafter()
    seq = make_sequence([3])
    drafter.start(seq)
    tree = DraftTree(3, 16)
    rejected, chosen = 17, 18
    tree.add_node(0, rejected, Source.OTHER)
    seq.token_ids.append(chosen)
    acceptance = verify_recorded(tree, [chosen])
    drafter.observe(seq, tree, acceptance, model.verify(tree))
    drafter.finish(seq)
    other = make_sequence([5])
    drafter.start(other)
    other.token_ids.append(rejected)
    root = DraftTree(5, 0)
    drafter.observe(other, root, verify_recorded(root, [rejected]), model.verify(root))
    drafted = propose(drafter, other, capacity=4)
    children = [
        token
        for token, parent in zip(drafted.token_ids, drafted.parents, strict=True)
        if parent == 0
    ]
    assert children
    assert children[0] == model.likeliest(rejected, 1)[0]


def test_namespaces_share_nothing(model: BigramModel) -> None:
    drafter = make_drafter()
    generate(drafter, model, make_sequence([3], namespace="one"), 12)
    other = generate(drafter, model, make_sequence([3], namespace="two"), 12)
    assert other[0].num_draft_tokens == 0
    assert generate(drafter, model, make_sequence([3], namespace="one"), 12)[0].num_draft_tokens


def test_a_request_that_shares_nothing_leaves_nothing(model: BigramModel) -> None:
    database = ModelDatabase(1 << 22)
    generate(make_drafter(database), model, make_sequence([3], is_output_shared=False), 12)
    assert database.recycled("default") is None


def test_a_request_may_leave_the_source_out(model: BigramModel) -> None:
    drafter = make_drafter()
    generate(drafter, model, make_sequence([3]), 12)
    without = make_sequence([3], databases=frozenset({"context", "model"}))
    assert not any(tree.num_draft_tokens for tree in generate(drafter, model, without, 12))


def test_clearing_forgets(model: BigramModel) -> None:
    database = ModelDatabase(1 << 22)
    drafter = make_drafter(database)
    generate(drafter, model, make_sequence([3]), 12)
    assert database.num_bytes > 0
    database.clear("default")
    assert database.num_bytes == 0
    assert generate(drafter, model, make_sequence([3]), 12)[0].num_draft_tokens == 0


def test_many_namespaces_stay_within_the_bound(model: BigramModel) -> None:
    max_bytes = 1 << 20
    database = ModelDatabase(max_bytes)
    drafter = make_drafter(database)
    for number in range(60):
        generate(drafter, model, make_sequence([number], namespace=str(number)), 40)
    assert database.num_bytes <= max_bytes
    assert database.recycled("59") is not None
    assert database.recycled("0") is None


def test_nothing_follows_an_ending_token(model: BigramModel) -> None:
    """A path ends at a token that ends the answer, whatever followed it in earlier text."""
    database = ModelDatabase(1 << 22)
    likely = model.answer(3, 12)
    ending = likely[2]
    resources = DraftResources(VOCAB_SIZE, database, ending_token_ids=frozenset({ending}))
    drafter = Hierarchy(resources, only("recycled"))
    generate(drafter, model, make_sequence([3]), 12)
    trees = generate(drafter, model, make_sequence([3]), 12)
    drafted = [(tree.token_ids[parent], parent) for tree in trees for parent in tree.parents[1:]]
    assert drafted
    assert not any(token == ending and parent > 0 for token, parent in drafted)


def test_namespaces_give_way_while_they_are_drafted_for(model: BigramModel) -> None:
    """Tables grow and are limited in turns under running sequences, and stay within their rows."""
    database = ModelDatabase(1 << 19)
    drafter = Hierarchy(DraftResources(VOCAB_SIZE, database))
    rng = np.random.default_rng(0)
    names = ("a", "b", "c")
    sequences = {name: make_sequence([3], namespace=name) for name in names}
    for seq in sequences.values():
        drafter.start(seq)
    busy = "a"
    for number in range(3000):
        if number % 500 == 0:
            busy = names[number // 500 % 3]
        seq = sequences[busy if rng.random() < 0.9 else names[rng.integers(3)]]
        tree = propose(drafter, seq)
        check_tree(tree)
        chosen = rng.integers(0, VOCAB_SIZE, 4).tolist()
        acceptance = verify_recorded(tree, chosen)
        seq.token_ids += acceptance.token_ids
        drafter.observe(seq, tree, acceptance, model.verify(tree))
        if number % 10 == 0:
            database.insert(seq.namespace, seq.output_token_ids[-60:])
        for name in names:
            for part in (database.recycled(name), database.partition(name)):
                if part is not None:
                    assert part.table.num_buckets * BUCKET_ROWS <= len(part.table.rows)
    assert database.num_given_up > 0
    assert set(database.namespaces) == set(names)
    assert database.num_bytes <= 1 << 19
