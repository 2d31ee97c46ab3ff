"""The ring GEMM: some 20 to 100 rows of an expert against its weights, warp-specialized, `wgmma`.

Above 16 rows weights in flight do not fit registers beside accumulators, and where 128 rows of weights are multiplied
at a time tokens are read so often that the way from L2 is the limit. Here one warp copies weights (as packed, see
packing.py) and tokens by TMA into a ring of stages in shared memory, one chunk of 128 of K each, and CONSUMERS
warpgroups take 128 rows of weights each against the same tokens: they decode in registers and multiply in the order of
the tiled kernel, so that both have the same bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megamoe.backends.hopper import plan
from megamoe.backends.hopper.device.wgmma_loop import CHUNK, GROUP_BYTES, decode_half

CONSUMERS: gl.constexpr = gl.constexpr(plan.RING_CONSUMERS)


@gluon.constexpr_function
def words_layout():
    """[tile, half, lane, word] of a unit: a thread holds the 8 words of its lane and of its warp's tile."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 1, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 8, 0], [0, 0, 16, 0]],
        [[1, 0, 0, 0], [2, 0, 0, 0]],
        [],
        [4, 2, 32, 4],
    )


@gluon.constexpr_function
def scales_layout():
    """[lane, tile] of a unit."""
    return gl.DistributedLinearLayout(
        [], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 1], [0, 2]], [], [32, 4]
    )


@gluon.constexpr_function
def accumulator_layout(block_n):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])


@gluon.jit
def _thread_value(x):
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.convert_layout(x, threads, assert_trivial=True)


@gluon.jit
def load_unit(words, scales, unit: gl.constexpr):
    """A thread's part of one of the two units of a row group: 8 words and its two scale bytes, as decode_half takes
    them. words int32 [2, 16, 64], scales [2, 1, 64], in shared memory: a unit is 17 rows of 64, the last one scales."""
    view: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    x = words._reinterpret(gl.int32, [2, 4, 2, 32, 4], view).index(unit).load(words_layout())
    x = gl.reshape(gl.permute(x, [0, 2, 1, 3]), [128, 2, 2, 2])
    even, odd = gl.split(x)
    e0, e1 = gl.split(even)
    o0, o1 = gl.split(odd)
    w0, w4 = gl.split(e0)
    w2, w6 = gl.split(e1)
    w1, w5 = gl.split(o0)
    w3, w7 = gl.split(o1)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    s = scales._reinterpret(gl.int16, [2, 32, 4], flat).index(unit).load(scales_layout())
    s = gl.reshape(gl.permute(s, [1, 0]), [128]).to(gl.int32)
    return (
        _thread_value(w0), _thread_value(w1), _thread_value(w2), _thread_value(w3), _thread_value(w4),
        _thread_value(w5), _thread_value(w6), _thread_value(w7), _thread_value(s),
    )  # fmt: skip


@gluon.jit
def open_ring(tokens, more_tokens, words, scales, STAGES: gl.constexpr):
    """Shared memory of the ring: stages of both token boxes, of words and of scales, full and empty barriers."""
    token_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + tokens.block_shape, tokens.layout)
    more_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + more_tokens.block_shape, more_tokens.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS] + words.block_shape, words.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS] + scales.block_shape, scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    return token_ring, more_ring, word_ring, scale_ring, full, empty


@gluon.jit
def groups_at(group, stop, GROUPS: gl.constexpr):
    """How many row groups are multiplied together from one on: of one expert, one a consumer."""
    return gl.minimum(gl.minimum(stop - group, GROUPS - group % GROUPS), CONSUMERS)


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    slot = slot + 1
    phase = gl.where(slot == STAGES, phase ^ 1, phase)
    return gl.where(slot == STAGES, 0, slot), phase


@gluon.jit
def feed(
    memory, sources, work, first, stop,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: every chunk of every tile into the next slot that is empty. memory: from open_ring; sources:
    TMA descriptors of both token boxes, words and scales."""
    token_ring, more_ring, word_ring, scale_ring, full, empty = memory
    tokens, more_tokens, words, scales = sources
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    narrow: gl.constexpr = tokens.block_shape[0]
    NARROW_BYTES: gl.constexpr = tokens.block_type.nbytes
    WIDE_BYTES: gl.constexpr = tokens.block_type.nbytes + more_tokens.block_type.nbytes
    group = first
    while group < stop:
        count = groups_at(group, stop, GROUPS)
        entry = work + group // GROUPS * 4
        unit = (gl.load(entry) * GROUPS + group % GROUPS) * (2 * CHUNKS)
        row = gl.load(entry + 1)
        wide = gl.load(entry + 2) > narrow
        for chunk in range(CHUNKS):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            bar = full.index(slot)
            for i in gl.static_range(1, CONSUMERS + 1):
                # The number of bytes must be a constant.
                mbarrier.expect(bar, NARROW_BYTES + i * GROUP_BYTES, pred=(count == i) & (wide == 0))
                mbarrier.expect(bar, WIDE_BYTES + i * GROUP_BYTES, pred=(count == i) & wide)
            for i in gl.static_range(CONSUMERS):
                at = unit + (i * CHUNKS + chunk) * 2
                place = slot * CONSUMERS + i
                tma.async_copy_global_to_shared(
                    words, [at, 0, 0], bar, word_ring.index(place), pred=i < count
                )
                tma.async_copy_global_to_shared(
                    scales, [at, 16, 0], bar, scale_ring.index(place), pred=i < count
                )
            column = chunk * CHUNK
            tma.async_copy_global_to_shared(tokens, [row, column], bar, token_ring.index(slot))
            tma.async_copy_global_to_shared(
                more_tokens, [row + narrow, column], bar, more_ring.index(slot), pred=wide
            )
            slot, phase = advance(slot, phase, STAGES)
        group += count


@gluon.jit
def _half(stage, half: gl.constexpr):
    """64 of K of a stage of tokens, as operand."""
    return stage.slice(half * 64, 64, 1).permute((1, 0))


@gluon.jit
def _zeros(BLOCK_N: gl.constexpr):
    return gl.full([64, BLOCK_N], 0.0, gl.float32, layout=accumulator_layout(BLOCK_N))


@gluon.jit
def multiply(
    memory, slot, phase, consumer: gl.constexpr, WIDE: gl.constexpr, CHUNKS: gl.constexpr,
    STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 128 rows times the tokens of the first box or (WIDE) of both, from the ring. HALVES (1 or 2): half
    chunks that are decoded before they are multiplied; other warpgroups multiply meanwhile. Returns (sums of both units
    for the first box, each [64, tokens] fp32, the same for the second box, slot, phase)."""
    token_ring, more_ring, word_ring, scale_ring, full, empty = memory
    narrow: gl.constexpr = token_ring.shape[1]
    more: gl.constexpr = more_ring.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(narrow), 2)
    more_operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(more), 2)
    acc0, acc1 = _zeros(narrow), _zeros(narrow)
    more0, more1 = _zeros(more), _zeros(more)
    for _ in range(CHUNKS):
        mbarrier.wait(full.index(slot), phase)
        words = word_ring.index(slot * CONSUMERS + consumer)
        scales = scale_ring.index(slot * CONSUMERS + consumer)
        unit0 = load_unit(words, scales, 0)
        unit1 = load_unit(words, scales, 1)
        stage = token_ring.index(slot)
        beside = more_ring.index(slot)
        for first in gl.static_range(0, 2, HALVES):
            # All operands first: ptxas serializes products while registers of another one are being written.
            a = ()
            for i in gl.static_range(HALVES):
                a = a + (decode_half(unit0, first + i, operand, 4), decode_half(unit1, first + i, operand, 4))
            for i in gl.static_range(HALVES):
                acc0 = warpgroup_mma(a[2 * i], _half(stage, first + i), acc0, is_async=True)
                acc1 = warpgroup_mma(a[2 * i + 1], _half(stage, first + i), acc1, is_async=True)
            if WIDE:
                for i in gl.static_range(HALVES):
                    b0 = gl.convert_layout(a[2 * i], more_operand, assert_trivial=True)
                    b1 = gl.convert_layout(a[2 * i + 1], more_operand, assert_trivial=True)
                    more0 = warpgroup_mma(b0, _half(beside, first + i), more0, is_async=True)
                    more1 = warpgroup_mma(b1, _half(beside, first + i), more1, is_async=True)
                acc0, acc1, more0, more1 = warpgroup_mma_wait(
                    num_outstanding=0, deps=[acc0, acc1, more0, more1]
                )
            else:
                acc0, acc1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc0, acc1])
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance(slot, phase, STAGES)
    return acc0, acc1, more0, more1, slot, phase


@gluon.jit
def skip(memory, slot, phase, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """A tile in which this consumer has no rows: hand its stages back."""
    full, empty = memory[4], memory[5]
    for _ in range(CHUNKS):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase
