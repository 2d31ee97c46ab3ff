"""The FP8 expert GEMM: weights and rows as e4m3, `wgmma` at twice the rate of bf16, warp-specialized.

Two warpgroups multiply 64 rows of weights each with the same up to 256 tokens; one warp copies packed weights, tokens
and their scales by TMA into a ring of stages in shared memory, one chunk of 128 of K each. Weights are the register A
operand: decoded from the words that all kernels read (fragments_fp8.py), the block's scale within the code. A chunk is
summed by the tensor cores, in pieces of 64 tokens, and added to fp32 accumulators times its tokens' scales; the next
chunk is decoded meanwhile, and the next piece multiplied. What the numbers mean is explained in fp8.py.
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

from megamoe.backends.hopper import fp8, fragments_fp8
from megamoe.backends.hopper.device.ring_loop import advance, load_unit

CONSUMERS: gl.constexpr = gl.constexpr(2)
"""Warpgroups that multiply: one for each unit of a row group."""
PIECE: gl.constexpr = gl.constexpr(64)
"""Tokens of one product."""
MAX_PIECES: gl.constexpr = gl.constexpr(4)
CHUNK: gl.constexpr = gl.constexpr(fp8.CHUNK)
WEIGHT_BYTES: gl.constexpr = gl.constexpr(2 * 4352)

_DECODE = fragments_fp8.decode_words()
_AS_BYTES = fragments_fp8.as_bytes()
DECODE: gl.constexpr = gl.constexpr(_DECODE[0])
DECODE_ARGS: gl.constexpr = gl.constexpr(_DECODE[1])
AS_BYTES: gl.constexpr = gl.constexpr(_AS_BYTES[0])
AS_BYTES_ARGS: gl.constexpr = gl.constexpr(_AS_BYTES[1])
LOW: gl.constexpr = gl.constexpr(fp8.TABLE[0])
HIGH: gl.constexpr = gl.constexpr(fp8.TABLE[1])
LOW_STEP: gl.constexpr = gl.constexpr(fp8.TABLE_STEP[0])
HIGH_STEP: gl.constexpr = gl.constexpr(fp8.TABLE_STEP[1])


@gluon.constexpr_function
def accumulator_layout():
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])


@gluon.constexpr_function
def operand_layout():
    return gl.DotOperandLayout(0, accumulator_layout(), 4)


@gluon.constexpr_function
def scales_layout():
    """[16 tokens, t, j, lo], see fp8.to_scale_order: a thread's four together, for the accumulator's columns."""
    none = [0, 0, 0, 0]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], none, none, none],
        [none, none],
        [],
        [4, 4, 2, 2],
    )


@gluon.jit
def _decode_words(w0, w1, w2, w3, low_g, high_g, low_8, high_8):
    return gl.inline_asm_elementwise(
        DECODE, DECODE_ARGS, [w0, w1, w2, w3, low_g, high_g, low_8, high_8],
        dtype=(gl.int32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def decode(unit, base_g, base_8):
    """A thread's part of a unit (ring_loop.load_unit) -> its 16 registers of four e4m3. base_*: of rows g and g + 8."""
    g = (unit[8] & 0xFF) - base_g
    h = ((unit[8] >> 8) & 0xFF) - base_8
    low_g, high_g, low_8, high_8 = (
        LOW + g * LOW_STEP,
        HIGH + g * HIGH_STEP,
        LOW + h * LOW_STEP,
        HIGH + h * HIGH_STEP,
    )
    first = _decode_words(unit[0], unit[1], unit[2], unit[3], low_g, high_g, low_8, high_8)
    return first + _decode_words(unit[4], unit[5], unit[6], unit[7], low_g, high_g, low_8, high_8)


@gluon.jit
def _join4(a, b, c, d):
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _bytes_of(x, first: gl.constexpr):
    """8 registers [word][row g, g + 8] from one on -> e4m3 [thread, b, b, h, i, j bit 0]."""
    packs = [
        _join4(x[first], x[first + 1], x[first + 2], x[first + 3]),
        _join4(x[first + 4], x[first + 5], x[first + 6], x[first + 7]),
    ]
    e = gl.inline_asm_elementwise(
        AS_BYTES, AS_BYTES_ARGS, packs, dtype=(gl.float8e4nv,) * 8, is_pure=True, pack=4
    )
    even = gl.join(gl.join(e[0], e[1]), gl.join(e[2], e[3]))
    odd = gl.join(gl.join(e[4], e[5]), gl.join(e[6], e[7]))
    return gl.join(even, odd)


@gluon.jit
def operand_of(registers):
    """16 registers -> A operand e4m3 [64 rows, 128 of K], already where wgmma wants it."""
    x = gl.join(_bytes_of(registers, 0), _bytes_of(registers, 8))
    x = gl.reshape(x, [4, 8, 4, 4, 2, 2, 2, 2])  # warp, g, t, b, h, i, j bit 0, j bit 1
    x = gl.reshape(gl.permute(x, [0, 4, 1, 7, 6, 5, 2, 3]), [64, CHUNK])
    return gl.convert_layout(x, operand_layout(), assert_trivial=True)


@gluon.jit
def open_ring(tokens, scales, words, weight_scales, STAGES: gl.constexpr):
    """Shared memory of the ring: pieces of tokens, scales of a tile, words and scales of weights, barriers."""
    token_ring = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * MAX_PIECES] + tokens.block_shape, tokens.layout
    )
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES] + scales.block_shape, scales.layout)
    word_ring = gl.allocate_shared_memory(gl.int32, [STAGES] + words.block_shape, words.layout)
    weight_scale_ring = gl.allocate_shared_memory(
        gl.int32, [STAGES] + weight_scales.block_shape, weight_scales.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(consumer), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return token_ring, scale_ring, word_ring, weight_scale_ring, full, empty, turns


@gluon.jit
def num_pieces(rows):
    """Of a tile with that many tokens."""
    return gl.maximum((rows + (PIECE - 1)) // PIECE, 2)


@gluon.jit
def feed(
    memory, sources, work, num_tiles, num_programs,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp: every chunk of every tile into the next slot that is empty. memory: from open_ring; sources:
    TMA descriptors of tokens (one piece), their scales (a tile), words and scales of weights."""
    token_ring, scale_ring, word_ring, weight_scale_ring, full, empty, _ = memory
    tokens, scales, words, weight_scales = sources
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    PIECE_BYTES: gl.constexpr = tokens.block_type.nbytes
    OTHER_BYTES: gl.constexpr = (
        scales.block_type.nbytes + words.block_type.nbytes + weight_scales.block_type.nbytes
    )
    for tile in range(gl.program_id(0), num_tiles, num_programs):
        entry = work + tile // GROUPS * 4
        unit = (gl.load(entry) * GROUPS + tile % GROUPS) * (2 * CHUNKS)
        row = gl.load(entry + 1)
        pieces = num_pieces(gl.load(entry + 2))
        for chunk in range(CHUNKS):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            bar = full.index(slot)
            for i in gl.static_range(2, MAX_PIECES + 1):
                # The number of bytes must be a constant.
                mbarrier.expect(bar, OTHER_BYTES + i * PIECE_BYTES, pred=pieces == i)
            at = unit + chunk * 2
            tma.async_copy_global_to_shared(words, [at, 0, 0], bar, word_ring.index(slot))
            tma.async_copy_global_to_shared(weight_scales, [at, 16, 0], bar, weight_scale_ring.index(slot))
            tma.async_copy_global_to_shared(scales, [chunk, row // 16, 0], bar, scale_ring.index(slot))
            for i in gl.static_range(MAX_PIECES):
                into = token_ring.index(slot * MAX_PIECES + i)
                where = [row + i * PIECE, chunk * CHUNK]
                tma.async_copy_global_to_shared(tokens, where, bar, into, pred=i < pieces)
            slot, phase = advance(slot, phase, STAGES)


@gluon.jit
def _no_sums():
    return gl.full([64, PIECE], 0.0, gl.float32, layout=accumulator_layout())


@gluon.jit
def _start(a, token_ring, slot, piece: gl.constexpr):
    """The product of a chunk with one piece of tokens."""
    b = token_ring.index(slot * MAX_PIECES + piece).permute((1, 0))
    return warpgroup_mma(a, b, _no_sums(), use_acc=False, is_async=True)


@gluon.jit
def _scales_of(scales, piece: gl.constexpr):
    """fp32 [1, PIECE] of the tokens of a piece."""
    view: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    s = (
        scales._reinterpret(gl.float32, [MAX_PIECES, PIECE // 16, 4, 2, 2], view)
        .index(piece)
        .load(scales_layout())
    )
    s = gl.reshape(gl.permute(s, [0, 2, 1, 3]), [PIECE])
    return gl.convert_layout(s, gl.SliceLayout(0, accumulator_layout()), assert_trivial=True)[None, :]


@gluon.jit
def multiply(
    memory, slot, phase, turn, consumer: gl.constexpr, base_g, base_8,
    PIECES: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 rows times the tokens of a tile. base_g, base_8: scale bases of a thread's rows; turn: phase of
    its turns. Returns (sums of every piece, fp32 [64, PIECE], slot, phase, turn)."""
    token_ring, scale_ring, word_ring, weight_scale_ring, full, empty, turns = memory
    acc = ()
    for _ in gl.static_range(PIECES):
        acc = acc + (_no_sums(),)
    for _ in range(CHUNKS):
        mbarrier.wait(full.index(slot), phase)
        unit = load_unit(word_ring.index(slot), weight_scale_ring.index(slot), consumer)
        a = operand_of(decode(unit, base_g, base_8))
        # One decodes while the other multiplies: else both would wait for the tensor cores, then leave them idle.
        mbarrier.wait(turns.index(consumer), turn)
        product = _start(a, token_ring, slot, 0)
        sums = ()
        for piece in gl.static_range(PIECES):
            s = _scales_of(scale_ring.index(slot), piece)
            if piece + 1 < PIECES:
                following = _start(a, token_ring, slot, piece + 1)
                if piece + 2 == PIECES:
                    mbarrier.arrive(turns.index(1 - consumer))
                product = warpgroup_mma_wait(num_outstanding=1, deps=[product])
                sums = sums + (acc[piece] + product * s,)
                product = following
            else:
                product = warpgroup_mma_wait(num_outstanding=0, deps=[product])
                sums = sums + (acc[piece] + product * s,)
        acc = sums
        mbarrier.arrive(empty.index(slot))
        slot, phase = advance(slot, phase, STAGES)
        turn = turn ^ 1
    return acc, slot, phase, turn
