"""The votes of all slots of one row for their tokens, computed together.

The evidence of a slot is a cell, chosen by the slot's share of the row's count and by its rank.  A
slot is a lane of a vector; the lanes before ``FIRST_SLOT`` hold nothing.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from hdserve.databases.ngram import COUNT_SHIFT, FIRST_SLOT, MAX_TOKEN_ID, ROW_WORDS
from hdserve.drafting.arrays import NUM_RANKS, SHARE_LIMITS, SHARE_STEPS
from hdserve.drafting.vectors import FAST, lane_mask, load_row, repeat, row_pointer

_INT = ir.IntType(32)
_INTS = ir.VectorType(_INT, ROW_WORDS)
_FLOATS = ir.VectorType(ir.FloatType(), ROW_WORDS)
_RANKS = [min(max(0, lane - FIRST_SLOT), NUM_RANKS - 1) for lane in range(ROW_WORDS)]
_SLOTS = [int(lane >= FIRST_SLOT) for lane in range(ROW_WORDS)]


def _constant(value: int) -> Any:
    return ir.Constant(_INTS, [value] * ROW_WORDS)


def _counts(builder: Any, words: Any) -> Any:
    return builder.lshr(words, _constant(int(COUNT_SHIFT)))


def _note_cells(
    typing_context: Any, target: Any, rows: Any, row: Any, scale: Any, first_cell: Any
) -> Any:
    """Set ``target[0]`` to the cells of the slots of ``rows[row]``; ``scale`` is 1 / its total."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        words = load_row(context, builder, kinds[1], args[1], args[2], _INTS)
        counts = builder.sitofp(_counts(builder, words), _FLOATS)
        steps = builder.fmul(args[3], ir.Constant(ir.FloatType(), float(SHARE_STEPS)), flags=FAST)
        shares = builder.fmul(counts, repeat(builder, steps, _FLOATS), flags=FAST)
        shares = builder.fptosi(shares, _INTS)
        buckets = _constant(0)
        for limit in SHARE_LIMITS:
            is_above = builder.icmp_signed(">=", shares, _constant(int(limit)))
            buckets = builder.add(buckets, builder.zext(is_above, _INTS))
        first = repeat(builder, builder.trunc(args[4], _INT), _INTS)
        cells = builder.add(first, ir.Constant(_INTS, _RANKS))
        cells = builder.add(cells, builder.mul(buckets, _constant(NUM_RANKS)))
        zero = context.get_constant(types.intp, 0)
        place = row_pointer(context, builder, kinds[0], args[0], zero, _INTS)
        builder.store(cells, place, align=4)
        return context.get_dummy_value()

    return types.void(target, rows, row, types.float32, types.int64), codegen


def _held_slots(typing_context: Any, rows: Any, row: Any) -> Any:
    """A bit for each slot of ``rows[row]`` that holds a token."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words = load_row(context, builder, signature.args[0], args[0], args[1], _INTS)
        is_held = builder.icmp_signed("!=", _counts(builder, words), _constant(0))
        return lane_mask(builder, builder.and_(is_held, ir.Constant(is_held.type, _SLOTS)))

    return types.int64(rows, row), codegen


def _likely_slots(
    typing_context: Any, rows: Any, row: Any, vocab_size: Any, logits: Any, floor: Any
) -> Any:
    """A bit for each slot of ``rows[row]`` whose token is in the vocabulary and whose logit, in
    ``logits[0]``, is at least ``floor``; the bits of empty slots mean nothing."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        zero = context.get_constant(types.intp, 0)
        words = load_row(context, builder, kinds[0], args[0], args[1], _INTS)
        said = load_row(context, builder, kinds[3], args[3], zero, _FLOATS)
        is_likely = builder.fcmp_ordered(">=", said, repeat(builder, args[4], _FLOATS))
        tokens = builder.and_(words, _constant(MAX_TOKEN_ID))
        num_tokens = repeat(builder, builder.trunc(args[2], _INT), _INTS)
        is_token = builder.icmp_signed("<", tokens, num_tokens)
        return lane_mask(builder, builder.and_(is_likely, is_token))

    return types.int64(rows, row, types.int64, logits, types.float32), codegen


note_cells: Any = intrinsic(_note_cells)
held_slots: Any = intrinsic(_held_slots)
likely_slots: Any = intrinsic(_likely_slots)
