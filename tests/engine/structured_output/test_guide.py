"""What a grammar leaves open, as drafts are told."""

from __future__ import annotations

import pytest
import torch

from hdserve import grammar
from hdserve.core import Source
from hdserve.engine.structured_output.grammar import Grammars
from hdserve.engine.structured_output.guide import GrammarGuide
from hdserve.tree import DraftTree
from tests.engine.structured_output.test_grammar import GRAMMARS, make_wide_tokenizer


def make_guide(text: str) -> GrammarGuide:
    guide: GrammarGuide | None = GRAMMARS.state(text).guide
    assert guide is not None
    return guide


def test_what_is_forced_is_as_the_masks_say() -> None:
    """The masks that the model chooses by let nothing else come, token for token, whatever was
    asked of the guide meanwhile."""
    text = grammar.choice(["a first answer", "a second answer"])
    state, guide = GRAMMARS.state(text), make_guide(text)
    output = [*b"a second answer"]
    forced: list[int] = []
    for place in range(len(output)):
        guide.follow(output[:place])
        found = guide.forced()
        assert found == output[place : place + len(found)]
        mask = state.apply(torch.zeros(1, 260))[0].isfinite()
        assert bool(found) == (mask.sum().item() == 1)
        forced += found[:1]
        state.push(output[place])
    assert bytes(forced) == b"a econd answer"


def test_nothing_is_forced_where_the_text_of_a_special_token_is_spelt() -> None:
    assert make_guide(grammar.choice(["a <end> x"])).forced() == []


def test_nothing_is_forced_behind_a_token_that_the_model_lacks() -> None:
    """Though the tokenizer makes one of the text; no draft could go through the model with it."""
    state = Grammars(make_wide_tokenizer(), 260, {256}).state(grammar.regex(r"a \[TOO[L]\] x"))
    assert state.guide is not None
    state.guide.follow([])
    assert state.guide.forced() == [*b"a "]


def test_paths_are_allowed_to_their_first_wrong_token() -> None:
    guide = make_guide(grammar.regex("[ab]c[de]f"))
    guide.follow([])
    tree = DraftTree(0, 20)
    for path in (b"acdf", b"acxf", b"bce", b"xcd", b"af"):
        tree.add_path(path, Source.OTHER)
    allowed = guide.allowed(tree, 0)
    nodes = range(1, len(tree))
    paths = {
        bytes(tree.token_ids[each] for each in tree.path_to(node)[1:])
        for node in nodes
        if allowed[node]
    }
    assert paths == {b"a", b"ac", b"acd", b"acdf", b"b", b"bc", b"bce"}


def test_nothing_beside_what_is_forced_is_allowed() -> None:
    guide = make_guide(grammar.regex("id-[0-9]{3}"))
    guide.follow([])
    tree = DraftTree(0, 40)
    forced = guide.forced()
    assert forced == [*b"id-"]
    end = tree.add_path(forced, Source.GRAMMAR)
    right = tree.add_node(end, ord("7"), Source.OTHER)
    for place, token_id in ((end, ord("x")), (1, ord("7")), (0, ord("7"))):
        tree.add_node(place, token_id, Source.OTHER)
    allowed = guide.allowed(tree, len(forced))
    assert [node for node in range(len(tree)) if allowed[node]] == [*range(end + 1), right]


def test_the_end_is_allowed_where_the_grammar_may_end() -> None:
    guide = make_guide(grammar.regex("a+"))
    tree = DraftTree(0, 4)
    tree.add_path([97, 256], Source.OTHER)
    tree.add_path([256], Source.OTHER)
    guide.follow([])
    assert guide.allowed(tree, 0) == [True, True, True, False]
    guide.follow([97])
    assert guide.allowed(tree, 0) == [True, True, True, True]


def test_a_text_that_is_none_of_the_grammar_cannot_be_followed() -> None:
    guide = make_guide(grammar.choice(["yes", "no"]))
    with pytest.raises(RuntimeError):
        guide.follow([*b"perhaps"])


def test_a_guide_whose_lexer_is_full_is_for_no_later_text() -> None:
    """All guides of a grammar share it; what was begun before goes on."""
    text = grammar.regex("(a|b)*a(a|b){14}")
    state, beside = GRAMMARS.state(text), GRAMMARS.state(text)
    tokens = torch.tensor([*b"ab"])
    generator = torch.Generator().manual_seed(0)

    def fill(guide: GrammarGuide) -> None:
        for _ in range(2000):
            tree = DraftTree(0, 64, 24)
            for _ in range(4):
                drawn = torch.randint(2, (16,), generator=generator)
                tree.add_path(tokens[drawn].tolist(), Source.MODEL, 0.5)
            guide.follow([])
            guide.allowed(tree, 0)

    assert state.guide is not None
    with pytest.raises(RuntimeError):
        fill(state.guide)
    state.give_up_guide()
    assert state.guide is None
    make_guide(text).follow([*b"abba"])
    mask = beside.apply(torch.zeros(1, 260))[0]
    assert mask.isfinite().sum().item() == 2
