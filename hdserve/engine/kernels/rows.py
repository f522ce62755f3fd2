"""What each row of a forward is and sees, computed from flat arrays of chunks and their trees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdserve.engine.kernels.compiled import entry_point

Ints = npt.NDArray[np.int64]

FIRST_ROW, NUM_DECIDED, NUM_ROWS, FIRST_COLUMN, SEGMENT_START, IS_CHOOSING, FIRST_DRAFT = range(7)
"""The fields of a chunk: its first row, its number of decided tokens, its number of decided tokens
and drafts, the number of tokens cached before it, the cache row of its sequence's first token,
whether its last decided token has logits and drafts, and the index of its first draft among the
drafts of all trees."""

NUM_CHUNK_FIELDS = 7

POSITION, START, STOP, FIRST_NODE, NUM_NODES, FIRST_NODE_ROW, ANCESTORS = range(7)
"""The fields of a row, see :class:`~hdserve.engine.attention.flex_metadata.FlexAttentionMetadata`.
Those from ``ANCESTORS`` on are the words of one bit mask."""

WORD_BITS = 31
"""Drafts per int32 word of the visibility mask; the sign bit is not used."""

MOST_VISIBLE, NUM_VISIBLE, NUM_SHARED = range(3)


@entry_point
def lay_out_rows(
    chunks: Ints,
    depths: Ints,
    scratch_row: int,
    position_ids: Ints,
    kv_rows: Ints,
    logit_rows: Ints,
) -> None:
    """Fill the arrays that describe the rows of ``chunks``: one entry for each row, in
    ``logit_rows`` one for each node.

    Args:
        chunks: ``[num_chunks, NUM_CHUNK_FIELDS]``.
        depths: of the drafts of all trees.
        scratch_row: the cache row where padding rows are written; their position is 0.
    """
    num_nodes = num_filled = 0
    for chunk in range(len(chunks)):
        row, column = chunks[chunk, FIRST_ROW], chunks[chunk, FIRST_COLUMN]
        num_decided, num_rows = chunks[chunk, NUM_DECIDED], chunks[chunk, NUM_ROWS]
        first_kv_row = chunks[chunk, SEGMENT_START] + column
        for index in range(num_rows):
            kv_rows[row + index] = first_kv_row + index
            position_ids[row + index] = column + index
        first_draft = chunks[chunk, FIRST_DRAFT]
        for index in range(num_rows - num_decided):
            position = column + num_decided - 1 + depths[first_draft + index]
            position_ids[row + num_decided + index] = position
        if chunks[chunk, IS_CHOOSING]:
            for index in range(num_decided - 1, num_rows):
                logit_rows[num_nodes] = row + index
                num_nodes += 1
        num_filled = row + num_rows
    for row in range(num_filled, len(kv_rows)):
        kv_rows[row], position_ids[row] = scratch_row, 0


@entry_point
def list_visible(
    chunks: Ints,
    parents: Ints,
    spans: Ints,
    rows: Ints,
    tails: Ints,
    addresses: Ints,
    totals: Ints,
) -> None:
    """Fill the arrays of :class:`~hdserve.engine.batch.visible_columns.VisibleColumns`.

    Args:
        chunks: ``[num_chunks, NUM_CHUNK_FIELDS]``.
        parents: of the drafts of all trees; 0 is the root.
        totals: zeros, for ``MOST_VISIBLE``, ``NUM_VISIBLE`` and ``NUM_SHARED``.
    """
    addresses[0], addresses[1] = spans.ctypes.data, len(spans)
    addresses[2], addresses[3] = rows.ctypes.data, len(rows)
    addresses[4], addresses[5] = tails.ctypes.data, len(tails)
    num_tails = 0
    for chunk in range(len(chunks)):
        first_row, num_decided = chunks[chunk, FIRST_ROW], chunks[chunk, NUM_DECIDED]
        spans[chunk, 0], spans[chunk, 1] = first_row, chunks[chunk, NUM_ROWS]
        spans[chunk, 2] = chunks[chunk, SEGMENT_START]
        first = chunks[chunk, FIRST_COLUMN] + 1
        totals[NUM_SHARED] += first
        for index in range(num_decided):
            rows[first_row + index, 0] = rows[first_row + index, 2] = first + index
            totals[NUM_VISIBLE] += first + index
        prefix, root_row = first + num_decided - 1, first_row + num_decided - 1
        most = prefix
        for node in range(1, chunks[chunk, NUM_ROWS] - num_decided + 1):
            row, first_tail = root_row + node, num_tails
            parent = parents[chunks[chunk, FIRST_DRAFT] + node - 1]
            if parent > 0:
                tail = rows[root_row + parent, 1]
                for index in range(rows[root_row + parent, 2] - prefix):
                    tails[num_tails] = tails[tail + index]
                    num_tails += 1
            tails[num_tails] = prefix - 1 + node
            num_tails += 1
            visible = prefix + num_tails - first_tail
            rows[row, 0], rows[row, 1], rows[row, 2] = prefix, first_tail, visible
            totals[NUM_VISIBLE] += visible
            most = max(most, visible)
        totals[MOST_VISIBLE] = max(totals[MOST_VISIBLE], most)


@entry_point
def describe_rows(chunks: Ints, parents: Ints, seen: npt.NDArray[np.int32]) -> None:
    """Fill in what rows see, for all that are not padding.

    Args:
        chunks, parents: as of :func:`list_visible`.
        seen: ``[fields, num_rows]``; all zeros except ``POSITION``, which is not changed.
    """
    for chunk in range(len(chunks)):
        start, row = chunks[chunk, SEGMENT_START], chunks[chunk, FIRST_ROW]
        num_decided = chunks[chunk, NUM_DECIDED]
        num_drafts = chunks[chunk, NUM_ROWS] - num_decided
        first_kv_row = start + chunks[chunk, FIRST_COLUMN]
        for index in range(num_decided):
            seen[START, row + index] = start
            seen[STOP, row + index] = first_kv_row + index + 1
        first_draft = row + num_decided
        for node in range(num_drafts):
            own = first_draft + node
            seen[START, own] = start
            seen[STOP, own] = seen[FIRST_NODE, own] = first_kv_row + num_decided
            seen[NUM_NODES, own], seen[FIRST_NODE_ROW, own] = num_drafts, first_draft
            parent = parents[chunks[chunk, FIRST_DRAFT] + node]
            if parent > 0:
                for word in range(ANCESTORS, len(seen)):
                    seen[word, own] = seen[word, first_draft + parent - 1]
            seen[ANCESTORS + node // WORD_BITS, own] |= 1 << node % WORD_BITS


@entry_point
def list_blocks(
    chunks: Ints,
    rows_per_part: int,
    keys_per_block: int,
    num_blocks: npt.NDArray[np.int32],
    blocks: npt.NDArray[np.int32],
    marks: npt.NDArray[np.bool_],
) -> None:
    """List, for each group of rows, the blocks of the cache that hold what its chunks see.

    Args:
        chunks: as of :func:`list_visible`.
        num_blocks, blocks: ``[num_parts]`` and ``[num_parts, all blocks]``, to be filled.
        marks: ``[all blocks]``, scratch.
    """
    for part in range(len(num_blocks)):
        marks[:] = False
        first, stop = part * rows_per_part, (part + 1) * rows_per_part
        for chunk in range(len(chunks)):
            row, start = chunks[chunk, FIRST_ROW], chunks[chunk, SEGMENT_START]
            num_rows = chunks[chunk, NUM_ROWS]
            if row < stop and first < row + num_rows:
                last = start + chunks[chunk, FIRST_COLUMN] + num_rows - 1
                for block in range(start // keys_per_block, last // keys_per_block + 1):
                    marks[block] = True
        number = 0
        for block in range(len(marks)):
            if marks[block]:
                blocks[part, number] = block
                number += 1
        num_blocks[part] = number
