"""The ring GEMM: 7 to 100 rows of an expert against its weights, warp-specialized, `wgmma`.

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
def open_ring(boxes, words, scales, FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of the ring: stages of tokens (FIRST rows, and SECOND rows for tiles of two boxes), of words and of
    scales; barriers: full and empty."""
    first = gl.allocate_shared_memory(gl.bfloat16, [STAGES, FIRST, CHUNK], boxes[0].layout)
    second = first
    if SECOND > 0:
        second = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SECOND, CHUNK], boxes[0].layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS] + words.block_shape, words.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS] + scales.block_shape, scales.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        # Tokens and weights are expected each by themselves.
        mbarrier.init(full.index(slot), count=2)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    return first, second, word_ring, scale_ring, full, empty


@gluon.jit
def token_stage(memory, boxes, slot, part: gl.constexpr):
    """A stage's tokens of one of the boxes that make up a tile."""
    ring = memory[part]
    box = boxes[part]
    per_stage: gl.constexpr = ring.shape[1] // box.block_shape[0]
    seen = ring._reinterpret(gl.bfloat16, [ring.shape[0] * per_stage] + box.block_shape, box.layout)
    return seen.index(slot * per_stage)


@gluon.jit
def advance(slot, phase, STAGES: gl.constexpr):
    slot = slot + 1
    phase = gl.where(slot == STAGES, phase ^ 1, phase)
    return gl.where(slot == STAGES, 0, slot), phase


@gluon.jit
def _fill_weights(
    memory, words, scales, slot, unit, chunk, group, pred, CHUNKS: gl.constexpr, GROUPS: gl.constexpr
):
    """One chunk of a tile's row groups, of which `group` is the first. Past the expert's last one that one again: the
    number of bytes must be a constant."""
    word_ring, scale_ring, full = memory[2], memory[3], memory[4]
    bar = full.index(slot)
    mbarrier.expect(bar, CONSUMERS * GROUP_BYTES, pred=pred)
    for i in gl.static_range(CONSUMERS):
        at = unit + (gl.minimum(group + i, GROUPS - 1) * CHUNKS + chunk) * 2
        place = slot * CONSUMERS + i
        tma.async_copy_global_to_shared(words, [at, 0, 0], bar, word_ring.index(place), pred=pred)
        tma.async_copy_global_to_shared(scales, [at, 16, 0], bar, scale_ring.index(place), pred=pred)


@gluon.jit
def fill_ahead(
    memory, words, scales, unit, group, AHEAD: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr
):
    """The first AHEAD chunks of weights into an idle ring."""
    for chunk in gl.static_range(AHEAD):
        _fill_weights(memory, words, scales, chunk, unit, chunk, group, True, CHUNKS, GROUPS)


@gluon.jit
def fill_behind(
    memory, words, scales, slot, phase, unit, group, AHEAD: gl.constexpr, CHUNKS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The first AHEAD chunks of weights into a ring that is in use, from `slot` on."""
    for chunk in gl.static_range(AHEAD):
        mbarrier.wait(memory[5].index(slot), phase ^ 1)
        _fill_weights(memory, words, scales, slot, unit, chunk, group, True, CHUNKS, GROUPS)
        slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def feed(
    memory, boxes, words, scales, slot, phase, unit, group, row, ahead, first: gl.constexpr, stop: gl.constexpr,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The chunks of a tile from `first` to `stop`, each into the next slot that is empty. boxes: TMA descriptors of its
    tokens, which begin at an image row; unit: its expert's first unit of weights, which are there for the first `ahead`
    chunks already."""
    full, empty = memory[4], memory[5]
    second: gl.constexpr = 0 if len(boxes) == 1 else boxes[len(boxes) - 1].block_type.nbytes
    NUM_BYTES: gl.constexpr = boxes[0].block_type.nbytes + second
    for chunk in range(first, stop):
        mbarrier.wait(empty.index(slot), phase ^ 1)
        _fill_weights(memory, words, scales, slot, unit, chunk, group, chunk >= ahead, CHUNKS, GROUPS)
        bar = full.index(slot)
        mbarrier.expect(bar, NUM_BYTES)
        for part in gl.static_range(len(boxes)):
            begin = row if part == 0 else row + boxes[0].block_shape[0]
            into = token_stage(memory, boxes, slot, part)
            tma.async_copy_global_to_shared(boxes[part], [begin, chunk * CHUNK], bar, into)
        slot, phase = advance(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _zeros(BLOCK_N: gl.constexpr):
    return gl.full([64, BLOCK_N], 0.0, gl.float32, layout=accumulator_layout(BLOCK_N))


@gluon.jit
def _no_sums(boxes):
    """Of one unit, for every box."""
    out = ()
    for part in gl.static_range(len(boxes)):
        out = out + (_zeros(boxes[part].block_shape[0]),)
    return out


@gluon.jit
def _stages(memory, boxes, slot):
    out = ()
    for part in gl.static_range(len(boxes)):
        out = out + (token_stage(memory, boxes, slot, part),)
    return out


@gluon.jit
def _start(weights, tokens, half: gl.constexpr, sums):
    """Start the products of half a chunk of a unit's weights with the tokens of every box."""
    out = ()
    for part in gl.static_range(len(sums)):
        out = out + (_start_part(weights, tokens[part], half, sums[part]),)
    return out


@gluon.jit
def _start_part(weights, stage, half: gl.constexpr, acc):
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(stage.shape[0]), 2)
    same = gl.convert_layout(weights, operand, assert_trivial=True)
    return warpgroup_mma(same, stage.slice(half * 64, 64, 1).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _wait(sums0, sums1):
    done = warpgroup_mma_wait(num_outstanding=0, deps=sums0 + sums1)
    if len(sums0) == 1:
        out = (done[0],), (done[1],)
    else:
        out = (done[0], done[1]), (done[2], done[3])
    return out


@gluon.jit
def multiply(
    memory, boxes, slot, phase, consumer: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 128 rows times the tokens of all boxes, from the ring. HALVES (1 or 2): half chunks that are
    decoded before they are multiplied. Returns (sums of the first unit, [64, tokens] fp32 for each box, those of the
    second unit, slot, phase)."""
    word_ring, scale_ring, full, empty = memory[2], memory[3], memory[4], memory[5]
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(boxes[0].block_shape[0]), 2)
    sums0 = _no_sums(boxes)
    sums1 = _no_sums(boxes)
    for _ in range(CHUNKS):
        mbarrier.wait(full.index(slot), phase)
        words = word_ring.index(slot * CONSUMERS + consumer)
        scales = scale_ring.index(slot * CONSUMERS + consumer)
        unit0 = load_unit(words, scales, 0)
        unit1 = load_unit(words, scales, 1)
        tokens = _stages(memory, boxes, slot)
        for first in gl.static_range(0, 2, HALVES):
            # All operands first: ptxas serializes products while registers of another one are being written.
            a = ()
            for i in gl.static_range(HALVES):
                a = a + (decode_half(unit0, first + i, operand, 4), decode_half(unit1, first + i, operand, 4))
            for i in gl.static_range(HALVES):
                sums0 = _start(a[2 * i], tokens, first + i, sums0)
                sums1 = _start(a[2 * i + 1], tokens, first + i, sums1)
            sums0, sums1 = _wait(sums0, sums1)
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance(slot, phase, STAGES)
    return sums0, sums1, slot, phase


@gluon.jit
def halves(acc):
    """A unit's sums for the first and for the second half of the tokens."""
    half: gl.constexpr = acc.shape[1] // 2
    layout: gl.constexpr = accumulator_layout(half)
    first, second = gl.split(gl.permute(gl.reshape(acc, [64, 2, half]), [0, 2, 1]))
    first = gl.convert_layout(first, layout, assert_trivial=True)
    return first, gl.convert_layout(second, layout, assert_trivial=True)
