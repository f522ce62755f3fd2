"""The arrays drafting works on, and the meaning of their entries.

An example of one context on its way through :class:`Scratch`.  The prompt was ``the cat sat .``,
the answer so far is ``the cat``, and earlier answers were ``the cat ran .`` and ``the cat ran on``.
What may come next?

The place (``known_contexts.arrive``)::

    suffix   WHOLE    cat the . sat cat the           hashes   of "", "cat", "the cat", ...
             SHARED   cat the START                            of "", "cat", "the cat", ...

Looking up (``known_contexts.find_all``): the longest contexts that each level knows, and what
speaks against a token that is not in their rows::

    hits   INPUT   LEVEL     TOTAL       rows
           0       CONTEXT   1           the cat:   sat 1
           1       CONTEXT   1           cat:       sat 1
           2       CONTEXT   6           any text:  cat 2, the 2, . 1, sat 1
           3       MODEL     2           the cat:   ran 2
           4       MODEL     2           cat:       ran 2
           5       MODEL     8           any text:  ran 2, cat 2, the 2, on 1, . 1

    template   -4.91  -4.92  -4.59  -4.33  -4.46  -4.82  0 ... 0  1

Voting (``candidates.collect``): a candidate begins as a copy of the template, in which the rows
that know its token put what speaks for it::

    candidates   TOKEN   LEVEL         inputs                                        evidence
    0            sat     CONTEXT        0.13   0.37  -2.65  -4.33  -4.46  -4.82 ...   0.37
    1            cat     MODEL         -4.91  -4.92  -1.99  -4.33  -4.46  -1.08 ...  -1.08
    2            the     CONTEXT       -4.91  -4.92  -1.99  -4.33  -4.46  -2.89 ...  -1.99
    3            .       CONTEXT       -4.91  -4.92  -2.65  -4.33  -4.46  -3.79 ...  -2.65
    4            ran     MODEL         -4.91  -4.92  -4.59  -0.34   0.55  -2.89 ...   0.55
    5            on      MODEL         -4.91  -4.92  -4.59  -4.33  -4.46  -3.79 ...  -3.79

Mixing (``mixing.mix``): inputs are weighed, and give a probability of each candidate::

    probabilities   0.34  0.01  0.01  0.05  0.23  0.01

The tree (``growth.grow_tree``): these are queued, the best becomes node 1, what may follow it is
found in the same way and queued as well, and so on::

    nodes   TOKEN   PARENT   DEPTH   LEVEL         node_scores
    0       cat     -1       0                     1
    1       sat     0        1       CONTEXT       0.34
    2       ran     0        1       MODEL         0.23
    3       .       1        2       CONTEXT       0.21
    4       the     3        3       CONTEXT       0.16
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hdserve.databases.cache_lines import new_lines
from hdserve.databases.ngram import NUM_SLOTS, Ints, Rows, Tokens
from hdserve.databases.recycled import NUM_TOP

Floats = npt.NDArray[np.float32]
Hashes = npt.NDArray[np.uint64]

NUM_LEVELS = 5
CONTEXT, MODEL, OTHERS, STATISTICS, RECYCLED = range(NUM_LEVELS)
ROWS_PER_LEVEL = 3
"""How many of the longest known contexts count, for every level but the last: of ``RECYCLED`` only
the longest one does."""

MAX_ROWS = (NUM_LEVELS - 1) * ROWS_PER_LEVEL + 1
POINTER_INPUT = MAX_ROWS
BIAS_INPUT = POINTER_INPUT + 2
NUM_INPUTS = 16

NUM_ORDERS = 8
NUM_SHARES = 8
NUM_TOTALS = 6
NUM_RANKS = 4
MAX_CANDIDATES = 192
SHARE_STEPS = 256
SHARE_LIMITS = tuple(
    math.ceil(share * SHARE_STEPS) for share in (0.03, 0.08, 0.15, 0.3, 0.5, 0.8, 0.97)
)
"""The shares of a row's count, in units of 1 / 256, at which buckets 1 to 7 begin."""

SHARE_BUCKETS = np.searchsorted(SHARE_LIMITS, np.arange(SHARE_STEPS + 1), "right")
"""The bucket, 0 to 7, of each share in the same units."""

MAX_SUFFIX = 36
MAX_ORDER = 8
"""Longest context length in tokens."""

MAX_PROBABILITY = 0.997

CELLS_PER_ROW = NUM_SHARES * NUM_RANKS
"""Cells of one kind of row are contiguous: two cache lines of one array."""

_ROW_KINDS = NUM_LEVELS * NUM_ORDERS * NUM_TOTALS * ROWS_PER_LEVEL
PRESENT_CELLS = _ROW_KINDS * CELLS_PER_ROW
ABSENT_CELLS = _ROW_KINDS * NUM_SHARES
NUM_LENGTHS = 16
NUM_MISSES = 8
"""The kinds of copies, by their length and by how often they were wrong."""

POINTER_CELLS = 2 * 2 * NUM_LENGTHS * NUM_MISSES
NUM_CELLS = PRESENT_CELLS + ABSENT_CELLS + POINTER_CELLS

NUM_PATTERNS = 4**NUM_LEVELS
POINTER_STATES = 7
NUM_CONFIDENCES = 5
NUM_DEPTHS = 5
POINTER_SETS = NUM_PATTERNS
REGION_SETS = POINTER_SETS + POINTER_STATES**2
NUM_REGIONS = NUM_DEPTHS * NUM_CONFIDENCES**2
REACH_SETS = REGION_SETS + NUM_REGIONS
NUM_REACHES = 6
DISTANCE_SETS = REACH_SETS + NUM_REACHES**3
DISTANCE_LIMITS = (2, 6, 16, 64, 256, 1024)
"""The distances to a candidate's last occurrence, in tokens, that divide its kinds."""

NUM_DISTANCES = len(DISTANCE_LIMITS) + 2
"""The kinds of distances; one of them is for candidates that do not occur in the text."""

CHANCE_SET = DISTANCE_SETS + NUM_DISTANCES
"""The weights that turn a probability into a chance if choices have noise (``chances``)."""

NUM_WEIGHT_SETS = CHANCE_SET + 1

NUM_TOKEN_SETS = 1 << 10
"""Weight sets of each kind that are chosen by a token; a power of two.  Tokens with the same last
bits share one."""

CANDIDATE_SETS = 0
STRONGEST_SETS = NUM_TOKEN_SETS
LAST_SETS = 2 * NUM_TOKEN_SETS
NUM_TOKEN_WEIGHTS = 3 * NUM_TOKEN_SETS

NUM_PAIRS = 1 << 15
"""Biases of each of the two kinds of token pairs; a power of two.  Pairs whose hashes have the same
last bits share one."""

CELL_P, CELL_COUNT, CELL_LOGIT = 0, 1, 2
MAP_SIZE = 512
MAX_EVENTS = MAX_ROWS * NUM_SLOTS + 2


class Databases(NamedTuple):
    """The arrays that the candidates of one sequence come from.

    ``state`` holds single numbers, see ``STATE_*``; ``orders`` is ``int64[NUM_LEVELS,
    NUM_ORDERS]``, context lengths ascending, then -1; ``ending`` are the token ids that end an
    answer.
    """

    tokens: Tokens
    places: Ints
    context: Rows
    context_size: Ints
    model: Rows
    model_size: Ints
    model_log: Tokens
    model_places: Ints
    model_state: Ints
    others: Rows
    others_size: Ints
    statistics: Rows
    statistics_size: Ints
    recycled: Rows
    recycled_size: Ints
    orders: Ints
    ending: Ints
    state: Ints
    last_positions: Tokens


STATE_NUM_TOKENS, STATE_OUTPUT_START, STATE_CONTEXT_STAMP, STATE_VOCAB_SIZE = 0, 1, 2, 3
STATE_CONFIDENCE, STATE_IS_SAMPLED, STATE_NOISE_KEY, STATE_NUM_EXPECTED = 4, 5, 6, 7
STATE_POINTERS = 8
"""The first of six numbers: position, length and misses of the context pointer, then of the model
pointer."""

STATE_MAY_END = 14
"""Whether the tokens in ``ending`` end the answer, whenever they come."""

STATE_SIZE = 16

POINTER_POSITION, POINTER_LENGTH, POINTER_MISSES = range(3)
POINTER_SIZE = 3
"""The numbers of a pointer, see :mod:`~hdserve.drafting.pointers`."""


class Learned(NamedTuple):
    """The calibration: see :class:`hdserve.drafting.calibration.Calibration`."""

    cells: Floats
    weights: Floats
    token_weights: Floats
    token_bias: Floats
    pair_bias: Floats


class Scratch(NamedTuple):
    """Working memory of one drafter; its content does not outlive a call.

    Names of rows and columns are below.  An *input* is the number of a column of ``inputs``.
    """

    # The place: what comes before the candidates.
    suffix: Tokens
    """``[2, MAX_SUFFIX]``: the last tokens, newest first, in a row of ``WHOLE, SHARED`` each."""
    hashes: Hashes
    """``[2, MAX_ORDER + 1]``: of the last 0, 1, ... tokens of the same two rows."""

    # Looking up: the known contexts of every level.
    found: Ints
    """``[NUM_INPUTS]``: the rows of one level in its table, shortest context first.  When cells are
    learned from, how many candidates each input spoke for."""
    rows: Rows
    """``[MAX_ROWS, ROW_WORDS]``: copies of the rows that count, one for each hit."""
    hits: Ints
    """``[MAX_ROWS, HIT_*]``: what these rows are."""
    absent_cells: Tokens
    """``[NUM_INPUTS]``: the cell of each input for candidates that it lacks; -1 if nothing was
    found for the input."""
    template: Floats
    """``[1, NUM_INPUTS]``: the logits of those cells, with which a new candidate begins."""
    reach: Ints
    """``[NUM_LEVELS + 1]``: how many context lengths each level knows; ``CHOSEN_REACH``."""

    # Voting: the tokens in the rows become candidates.
    slots: Ints
    """``[MAP_SIZE + 1, SLOT_*]``: the candidates by their tokens; ``PRESENT_SLOT``."""
    candidates: Ints
    """``[MAX_CANDIDATES, CANDIDATE_*]``."""
    inputs: Floats
    """``[MAX_CANDIDATES, NUM_INPUTS]``: the logits that speak for or against a candidate."""
    evidence: Floats
    """``[MAX_CANDIDATES]``: the highest logit of those that speak for a candidate."""
    slot_cells: Tokens
    """``[1, ROW_WORDS]``: the cell of every token of one row."""
    slot_logits: Floats
    """``[1, ROW_WORDS]``: the logits of these cells."""
    events: Tokens
    """``[MAX_EVENTS, EVENT_*]``: which cells spoke for which candidates; only to learn from."""

    # Mixing: inputs become probabilities.
    base_weights: Floats
    """``[1, NUM_INPUTS]``: the sum of the weight sets that all candidates share."""
    probabilities: Floats
    """``[MAX_CANDIDATES]``: 0 for those that are too unlikely."""
    chance_inputs: Floats
    """``[MAX_CANDIDATES, NUM_INPUTS]``: see :mod:`~hdserve.drafting.chances`."""
    chances: Floats
    """``[MAX_CANDIDATES]``: the probabilities, if the noise of the choice is known."""
    gradient: Floats
    """``[1, NUM_INPUTS]``: the step of ``base_weights``; only to learn from."""

    # The tree: likely candidates become nodes.
    nodes: Ints
    """``[nodes, NODE_*]``."""
    node_scores: Floats
    """``[nodes]``: the chance that all of the path is right."""
    queue: Ints
    """``[nodes]``: children that are not nodes yet, best first, packed into one number each."""
    queue_scores: Floats
    """``[nodes]``: their scores."""
    drafted: Ints
    """``[DRAFTED_*, nodes]``: the nodes but the root, as a draft tree takes them."""

    # Keeping the likeliest tokens of a forward, for the level ``RECYCLED``.
    top_tokens: Tokens
    """``[NUM_TOP]``: of one node."""
    top_shares: Floats
    """``[NUM_TOP]``: their probabilities."""


WHOLE, SHARED = range(2)
"""The rows of ``suffix`` and ``hashes``: of the whole sequence, and of the part that is comparable
with other sequences, which is the output, preceded by ``START``."""

HIT_INPUT, HIT_LEVEL, HIT_TOTAL, HIT_CELL = range(4)
"""Of a row: its input, its level, the count of all its tokens, the first cell of its kind."""

CHOSEN_REACH = NUM_LEVELS
"""The entry of ``reach`` behind those of the levels: the weight set that follows from them."""

SLOT_GENERATION, SLOT_CANDIDATE = range(2)
"""Of a slot: the generation in which it was filled, and the index of its candidate.  Slots of older
generations are free, so none has to be cleared."""

PRESENT_SLOT, PRESENT_STATE = MAP_SIZE, 1
"""The row of ``slots`` behind those of candidates has the present generation, and in its other
column the ``CANDIDATE_STATE`` of a candidate that no pointer agrees with."""

CANDIDATE_TOKEN, CANDIDATE_PATTERN, CANDIDATE_STATE, CANDIDATE_LEVEL = range(4)
"""Of a candidate: its token; for each level, in two bits, which of its rows is the first that knows
the token; how long the pointers are and whether they agree; the level that is most certain."""

EVENT_CANDIDATE, EVENT_INPUT, EVENT_CELL = range(3)
"""Of an event: the index of the candidate, the input, and the cell that it came from."""

NODE_TOKEN, NODE_PARENT, NODE_DEPTH, NODE_LEVEL, NODE_CONFIDENCE, NODE_PREDICTED = range(6)
NODE_POINTERS = NODE_PREDICTED + 2
NODE_SIZE = NODE_POINTERS + 2 * POINTER_SIZE
"""Of a node: besides what is drafted, how predictable the text before it was, the two tokens that
the pointers predict after it, and both pointers."""

DRAFTED_TOKEN, DRAFTED_PARENT, DRAFTED_DEPTH, DRAFTED_LEVEL = range(4)
"""Of a drafted node; the level is the one whose evidence was the strongest."""

STEP_DATABASES, STEP_LEARNED, STEP_LEVELS = range(3)
STEP_NUM_NEW, STEP_NUM_LEARNED, STEP_NUM_NODES, STEP_STAMP, STEP_NUM_ADDED = range(3, 8)
NUM_STEP_FIELDS = 8
"""The fields of a step's result for one request: the addresses of its two handle tables, the levels
it is drafted from, its number of new tokens, how many of them (the last ones) are learned from, for
how many nodes of its tree the likeliest tokens are kept, and with which age mark; finally, as a
result, the number of contexts in its own table."""


def new_vectors(num_vectors: int) -> Floats:
    """Zeroed float32 ``[num_vectors, NUM_INPUTS]``, each row one cache line."""
    return new_lines(num_vectors).view(np.float32)


def new_scratch(max_nodes: int) -> Scratch:
    """Working memory for trees of up to ``max_nodes`` drafted tokens."""
    return Scratch(
        suffix=np.zeros((2, MAX_SUFFIX), np.int32),
        hashes=np.zeros((2, MAX_ORDER + 1), np.uint64),
        found=np.zeros(NUM_INPUTS, np.int64),
        rows=new_vectors(MAX_ROWS).view(np.uint32),
        hits=np.zeros((MAX_ROWS, 4), np.int64),
        absent_cells=np.zeros(NUM_INPUTS, np.int32),
        template=new_vectors(1),
        reach=np.zeros(NUM_LEVELS + 1, np.int64),
        slots=np.zeros((MAP_SIZE + 1, 2), np.int64),
        candidates=np.zeros((MAX_CANDIDATES, 4), np.int64),
        inputs=new_vectors(MAX_CANDIDATES),
        evidence=np.zeros(MAX_CANDIDATES, np.float32),
        slot_cells=new_vectors(1).view(np.int32),
        slot_logits=new_vectors(1),
        events=np.zeros((MAX_EVENTS, 3), np.int32),
        base_weights=new_vectors(1),
        probabilities=np.zeros(MAX_CANDIDATES, np.float32),
        chance_inputs=new_vectors(MAX_CANDIDATES),
        chances=np.zeros(MAX_CANDIDATES, np.float32),
        gradient=new_vectors(1),
        nodes=np.zeros((max_nodes + 2, NODE_SIZE), np.int64),
        node_scores=np.zeros(max_nodes + 2, np.float32),
        queue=np.zeros(max_nodes + 2, np.int64),
        queue_scores=np.zeros(max_nodes + 2, np.float32),
        drafted=np.zeros((4, max_nodes), np.int64),
        top_tokens=np.zeros(NUM_TOP, np.int32),
        top_shares=np.zeros(NUM_TOP, np.float32),
    )
