"""prepare (compact): count this rank's rows per destination, tell everyone, and find where they begin at each.

Workgroup d numbers the tokens that destination d gets. The last one to finish sends all counts to all ranks, waits for
theirs, and adds up the rows of the ranks before this one: the one exchange of counts of a launch.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr, rocdl

from megamoe.backends.gfx950.kernels import flags
from megamoe.backends.gfx950.kernels.lang import (
    WAVE,
    ballot,
    control_int,
    control_word,
    lanes_below,
    popcount,
    uniform,
    words,
)
from megamoe.backends.gfx950.record import Word
from megamoe.layout import FlagKind

THREADS = 256
NUM_WAVES = THREADS // WAVE


@fx.struct
class Lds:
    last: fx.Array[fx.Int32, 1, 4]
    came: fx.Array[fx.Int32, 1, 4]
    infos: fx.Array[fx.Int32, 8, 4]
    matches: fx.Array[fx.Int32, NUM_WAVES, 4]


@flyc.jit
def number_tokens(lds, meta, token_slots, dst_rank, num_rows, TOPK, META_WORDS, NUM_EXPERTS, NUM_RANKS):
    """Place of each token among those that dst_rank gets, -1 for others; returns how many it gets."""
    thread = fx.thread_idx.x
    wave = uniform(thread // WAVE)
    counted = fx.Int32(0)
    for start in range(fx.Int32(0), num_rows, fx.Int32(THREADS)):
        token = fx.Int32(start) + thread
        inside = token < num_rows
        beside = words(meta) + inside.select(token, fx.Int32(0)) * META_WORDS
        wanted = fx.Int32(0)
        for k in range_constexpr(TOPK):
            expert = fx.generic_load(beside + (1 + k))
            owned = (expert >= dst_rank * NUM_EXPERTS) & (expert < (dst_rank + 1) * NUM_EXPERTS)
            wanted = owned.select(fx.Int32(1), wanted)
        match = inside & (wanted == 1)
        mask = ballot(match)
        before = lanes_below(mask)
        if thread % WAVE == 0:
            fx.generic_store(lds.matches.ptr + wave, popcount(mask))
        gpu.barrier()
        after = counted
        for w in range_constexpr(NUM_WAVES):
            matches = fx.generic_load(lds.matches.ptr + w)
            before = before + (wave > w).select(matches, fx.Int32(0))
            after = after + matches
        if inside:
            slot = match.select(counted + before, fx.Int32(-1))
            fx.generic_store(words(token_slots) + (token * NUM_RANKS + dst_rank), slot)
        counted = uniform(after)
        gpu.barrier()
    return counted


@flyc.kernel(known_block_size=[THREADS, 1, 1])
def prepare_kernel(
    control: fx.Int64,
    bases: fx.Int64,
    heap: fx.Int64,
    meta: fx.Int64,
    token_slots: fx.Int64,
    sent_counts: fx.Int64,
    rank: fx.Int32,
    COUNTS_WORDS: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    thread = fx.thread_idx.x
    dst_rank = fx.block_idx.x
    lds = fx.SharedAllocator().allocate(Lds).peek()
    num_rows = control_int(control, Word.NUM_ROWS)
    count = number_tokens(
        lds, meta, token_slots, dst_rank, num_rows, TOPK, META_WORDS, NUM_EXPERTS, NUM_RANKS
    )
    if thread == 0:
        fx.generic_store(words(sent_counts) + dst_rank, count)
    last = flags.arrive(lds, control, fx.Int32(NUM_RANKS))
    if last == 1:
        counts_offset = control_word(control, Word.COUNTS_OFFSET)
        if thread < NUM_RANKS * NUM_RANKS:
            peer, about = thread // NUM_RANKS, thread % NUM_RANKS
            there = words(flags.peer_heap(bases, peer) + counts_offset)
            fx.generic_store(
                there + (rank * COUNTS_WORDS + about), fx.generic_load(words(sent_counts) + about)
            )
        rocdl.s_waitcnt(0)
        gpu.barrier()
        flags.post(control, bases, rank, FlagKind.COUNTS, num_rows, NUM_RANKS)
        came = flags.wait(
            lds, control, bases, heap, rank, FlagKind.COUNTS, fx.Int32((1 << NUM_RANKS) - 1), NUM_RANKS
        )
        if (came == 1) & (thread < NUM_RANKS):
            base = fx.Int32(0)
            here = words(heap + counts_offset)
            for src in range_constexpr(NUM_RANKS):
                rows = fx.generic_load(here + (src * COUNTS_WORDS + thread))
                base = base + (rank > src).select(rows, fx.Int32(0))
            fx.generic_store(words(sent_counts) + (NUM_RANKS + thread), base)


@flyc.jit
def compile_kernel(
    COUNTS_WORDS: fx.Constexpr[int],
    META_WORDS: fx.Constexpr[int],
    TOPK: fx.Constexpr[int],
    NUM_EXPERTS: fx.Constexpr[int],
    NUM_RANKS: fx.Constexpr[int],
):
    z, one = fx.Int64(0), fx.Int32(1)
    prepare_kernel(z, z, z, z, z, z, one, COUNTS_WORDS, META_WORDS, TOPK, NUM_EXPERTS, NUM_RANKS).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1)
    )
