"""small_m where experts have 7 to 100 rows: a whole sub-step in one launch around the ring GEMM.

One thread block a multiprocessor, with the warpgroups and the ring of ring_gemm.py. Its three warpgroups first move
rows, as small_m.py's thread blocks do, then multiply: all of GEMM1's tiles, then all of GEMM2's, then add up results.
The loading warp (small_m_loading.py) has brought the first weights by the time rows are expanded. It draws tiles by
tickets and tells the warpgroups which they are beside a tile's first chunk; before the tokens of GEMM2 it waits for
GEMM1 of their entry only, which counts its tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device import combine, flags, gemm1_ring, gemm2_ring, ring_gemm, sync
from megamoe.backends.hopper.device import ring_loop as ring
from megamoe.backends.hopper.device import small_m_moves as moves
from megamoe.backends.hopper.device.chain import after_previous_gluon
from megamoe.backends.hopper.device.ring_gemm import tiles_of
from megamoe.backends.hopper.device.small_m_loading import CONSUMERS, DONE, ENTRY_WORDS, NUM_TILED, load
from megamoe.backends.hopper.device.wgmma_loop import boxes_of, parts

WARPS: gl.constexpr = gl.constexpr(4)
"""Of a warpgroup."""
REGISTERS: gl.constexpr = gl.constexpr(plan.RING_REGISTERS)
LOADING_REGISTERS: gl.constexpr = gl.constexpr(32)
PAIRS: gl.constexpr = gl.constexpr(16)
"""(token, slot) pairs a thread that the index stage looks at together."""


@gluon.jit
def _told(memory, notes, slot, phase):
    """(tile, expert, first row, rows) of what begins in a slot, once its first chunk is there."""
    mbarrier.wait(memory[4].index(slot), phase)
    i = gl.arange(0, 4, layout=moves.lanes(4, WARPS))
    note = notes.index(slot).load(moves.lanes(4, WARPS))
    tile = gl.sum(gl.where(i == 0, note, 0), axis=0)
    expert = gl.sum(gl.where(i == 1, note, 0), axis=0)
    row = gl.sum(gl.where(i == 2, note, 0), axis=0)
    return tile, expert, row, gl.sum(gl.where(i == 3, note, 0), axis=0)


@gluon.jit
def _multiply_tiles(
    memory, notes, boxes, work, note, begin, stop, slot, phase, out_factor, rest,
    finish: gl.constexpr, consumer: gl.constexpr, STATIC: gl.constexpr, COUNTS: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's row group of a GEMM's tiles, from the one told of on. COUNTS: entries count what is complete of
    them."""
    tile, expert, row, rows = note
    while tile < stop:
        factor = gl.load(out_factor + expert)
        place = tile - begin
        group = place % tiles_of(GROUPS) * CONSUMERS + consumer
        for i in gl.static_range(len(WIDTHS)):
            if ring_gemm.holds(rows, i, WIDTHS):
                slot, phase = ring_gemm.multiply_tile(
                    memory, parts(boxes, WIDTHS[i]), slot, phase, row, rows, group, factor, rest,
                    finish, consumer, STATIC, CHUNKS, GROUPS, STAGES,
                )  # fmt: skip
        if COUNTS:
            sync.fence_global_proxies()
            sync.count_in(work + place // tiles_of(GROUPS) * ENTRY_WORDS + DONE)
        tile, expert, row, rows = _told(memory, notes, slot, phase)
    return (tile, expert, row, rows), slot, phase


@gluon.jit
def _move_and_multiply(
    memory, notes, control, bases, image, middle, boxes1, boxes2, row_slot, row_address, row_weight, block_info,
    work, tiled_work, tiled_offset, w13_factor, w2_factor, limit, num_programs, own_rank,
    consumer: gl.constexpr, RANKS: gl.constexpr, ROW: gl.constexpr, GEMM: gl.constexpr,
    SLOTS: gl.constexpr, BINS: gl.constexpr, WIDTHS: gl.constexpr, CUTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup. RANKS: notes of ranks, slots of a token and experts a rank; ROW: see small_m_ring_kernel; GEMM:
    chunks of K and row groups of both."""
    NUM_RANKS: gl.constexpr = RANKS[0]
    NUM_TOPK: gl.constexpr = RANKS[1]
    EXPERTS_PER_RANK: gl.constexpr = RANKS[2]
    HIDDEN: gl.constexpr = ROW[0]
    after_previous_gluon()
    rank = gl.arange(0, NUM_RANKS, layout=moves.line(WARPS))
    movers = CONSUMERS * num_programs
    me = consumer * num_programs + gl.program_id(0)
    moves.send_rows(
        control, bases, rank, own_rank, me, movers, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW[1], ROW[2],
        ROW[3], WARPS,
    )  # fmt: skip
    moves.list_rows(
        control, bases, row_slot, row_address, row_weight, block_info, work, 0, tiled_offset, 0, rank, own_rank, me,
        movers, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, ROW[2], ROW[4], ROW[5], WIDTHS, CUTS, SLOTS, BINS, PAIRS, WARPS,
    )  # fmt: skip
    if gl.load(control + flags.FAILED, volatile=True) == 0:
        moves.expand_rows(
            control, bases, image, row_slot, block_info, work, own_rank, me, movers, HIDDEN, ROW[1], GEMM[0] * 128,
            WARPS,
        )  # fmt: skip
        sync.fence_global_proxies()
        sync.arrive(control + sync.EXPANDED)
        stop1 = ring_gemm.num_tiles(work + NUM_TILED, GEMM[2], WIDTHS)
        stop2 = stop1 + ring_gemm.num_tiles(work + NUM_TILED, GEMM[3], WIDTHS)
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        note = _told(memory, notes, slot, phase)
        note, slot, phase = _multiply_tiles(
            memory, notes, boxes1, tiled_work, note, 0, stop1, slot, phase, w13_factor, (middle, limit),
            gemm1_ring.finish, consumer, GEMM[1], True, GEMM[0], GEMM[2], WIDTHS, STAGES,
        )  # fmt: skip
        note, slot, phase = _multiply_tiles(
            memory, notes, boxes2, tiled_work, note, stop1, stop2, slot, phase, w2_factor, (row_address, row_weight),
            gemm2_ring.finish, consumer, (HIDDEN, False), False, GEMM[1], GEMM[3], WIDTHS, STAGES,
        )  # fmt: skip
    last = sync.arrive(control + sync.RETURNED) == movers - 1
    if last & (gl.load(control + flags.FAILED, volatile=True) == 0):
        flags.post(control, bases, flags.RETURN_FLAG, combine.return_info(control, False), own_rank, rank)
    moves.sum_rows(
        control, bases, rank, own_rank, me, movers, NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK, HIDDEN, ROW[4], False, WARPS
    )  # fmt: skip


@gluon.jit(do_not_specialize=["own_rank", "num_programs"])
def small_m_ring_kernel(
    control, bases, image, middle, image64, image32, image16, middle64, middle32, middle16,
    row_slot, row_address, row_weight, block_info, work, tiled_offset,
    words1, scales1, w13_factor, words2, scales2, w2_factor, limit, num_programs, own_rank,
    NUM_RANKS: gl.constexpr, NUM_TOPK: gl.constexpr, EXPERTS_PER_RANK: gl.constexpr,
    HIDDEN: gl.constexpr, ROW_BYTES: gl.constexpr, META_WORDS: gl.constexpr, META_BLOCK: gl.constexpr,
    RESULT_STRIDE: gl.constexpr, RESULT_BYTES: gl.constexpr, SLOTS: gl.constexpr, BINS: gl.constexpr,
    CHUNKS1: gl.constexpr, CHUNKS2: gl.constexpr, GROUPS1: gl.constexpr, GROUPS2: gl.constexpr,
    WIDTHS: gl.constexpr, CUTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Arguments are those of small_m.py and ring_gemm.py. BF16 rows only."""
    boxes1 = boxes_of(image64, image32, image16, None)
    boxes2 = boxes_of(middle64, middle32, middle16, None)
    memory = ring.open_ring(
        boxes1, words1, scales1, ring_gemm.most_rows(WIDTHS, 0), ring_gemm.most_rows(WIDTHS, 1), STAGES
    )
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.int32, [STAGES, 4], flat)
    tiled_work = work + tiled_offset
    RANKS: gl.constexpr = (NUM_RANKS, NUM_TOPK, EXPERTS_PER_RANK)
    ROW: gl.constexpr = (HIDDEN, ROW_BYTES, META_WORDS, META_BLOCK, RESULT_STRIDE, RESULT_BYTES)
    GEMM: gl.constexpr = (CHUNKS1, CHUNKS2, GROUPS1, GROUPS2)
    gl.warp_specialize(
        [
            (_move_and_multiply, (
                memory, notes, control, bases, image, middle, boxes1, boxes2, row_slot, row_address, row_weight,
                block_info, work, tiled_work, tiled_offset, w13_factor, w2_factor, limit, num_programs, own_rank,
                gl.constexpr(0), RANKS, ROW, GEMM, SLOTS, BINS, WIDTHS, CUTS, STAGES,
            )),
            (_move_and_multiply, (
                memory, notes, control, bases, image, middle, boxes1, boxes2, row_slot, row_address, row_weight,
                block_info, work, tiled_work, tiled_offset, w13_factor, w2_factor, limit, num_programs, own_rank,
                gl.constexpr(1), RANKS, ROW, GEMM, SLOTS, BINS, WIDTHS, CUTS, STAGES,
            )),
            (_move_and_multiply, (
                memory, notes, control, bases, image, middle, boxes1, boxes2, row_slot, row_address, row_weight,
                block_info, work, tiled_work, tiled_offset, w13_factor, w2_factor, limit, num_programs, own_rank,
                gl.constexpr(2), RANKS, ROW, GEMM, SLOTS, BINS, WIDTHS, CUTS, STAGES,
            )),
            (load, (
                memory, notes, control, work, tiled_work, boxes1, boxes2, words1, scales1, words2, scales2,
                num_programs, CHUNKS1, CHUNKS2, GROUPS1, GROUPS2, EXPERTS_PER_RANK, WIDTHS, STAGES,
            )),
        ],
        [4, 4, 1], [REGISTERS, REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip
