"""lists: which rows a source brings, told to their owners ahead of the rows, so that tiles are known before those come.

A source writes each owner's list into its own part of the words there: pairs (token * TOPK + slot, weight), expert
after expert, in order of token and slot; and how many rows each expert gets. Its rows then go to its slots by token.
An owner finds a routed row by where the rows of each source begin among those of the expert: a segment.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu
from flydsl.expr.typing import Vector as Vec

from megamoe.backends.gfx950.kernels import flags, index
from megamoe.backends.gfx950.kernels.lang import control_int, control_word, of_lane, pointer, words
from megamoe.backends.gfx950.record import MAX_RANKS, RESULT_INDEX_BITS, SEGMENT_BYTES, Word

SEGMENT_WORDS = SEGMENT_BYTES // 4


@flyc.jit
def send(
    tables, control, bases, meta, rank, num_groups, COUNTS_WORDS, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS, THREADS
):  # fmt: skip
    """This workgroup's experts, one in num_groups of all ranks': counts and pairs to their owners."""
    ends = [control_int(control, Word.NUM_ROWS)]
    counts_offset = control_word(control, Word.COUNTS_OFFSET)
    meta_offset = control_word(control, Word.META_OFFSET)
    first_pair = rank * control_int(control, Word.CAPACITY) * (META_WORDS // 2)
    for unit in range(fx.block_idx.x, fx.Int32(NUM_RANKS * NUM_EXPERTS), num_groups):
        unit = fx.Int32(unit)
        # Ranks begin with different owners.
        dst_rank, expert = (unit + rank) % NUM_RANKS, unit // NUM_RANKS
        first_id = dst_rank * NUM_EXPERTS
        count, before, _ = index.count_rows(
            tables, meta, expert, first_id, ends, None, 0, NUM_EXPERTS, TOPK, META_WORDS, THREADS
        )
        heap = flags.peer_heap(bases, dst_rank)
        if fx.thread_idx.x == 0:
            fx.generic_store(words(heap + counts_offset) + (rank * COUNTS_WORDS + expert), count)

        def store(at, payload_row, src, result, weight):
            pair = pointer(heap + meta_offset, fx.Int32, 8) + at * 2
            fx.generic_store(pair, Vec.from_elements([result, weight], fx.Int32))

        if count > 0:
            index.write_rows(
                tables, meta, expert + first_id, first_pair + before, ends, None, TOPK, META_WORDS, THREADS, store
            )  # fmt: skip
        gpu.barrier()


def read_segment(segments, expert):
    """An expert's segment, a word a lane: one register of a wave, where scalar ones would not suffice."""
    return fx.generic_load(words(segments) + (expert * SEGMENT_WORDS + fx.thread_idx.x % SEGMENT_WORDS))


def record_of(control, heap, segment, row, topk, num_ranks):
    """The record (see index.py) of an expert's row, without its last word."""
    src, shift = fx.Int32(0), of_lane(segment, MAX_RANKS)
    for rank in range(1, num_ranks):
        # Of sources that begin at the same row only the last has any.
        beyond = row >= of_lane(segment, rank)
        src = beyond.select(fx.Int32(rank), src)
        shift = beyond.select(of_lane(segment, MAX_RANKS + rank), shift)
    pairs = pointer(heap + control_word(control, Word.META_OFFSET), fx.Int32, 8)
    pair = fx.generic_load(pairs + (row + shift) * 2, count=2)
    slot = src * control_int(control, Word.CAPACITY) + pair[0] // topk
    return slot, (src << RESULT_INDEX_BITS) | pair[0], pair[1]
