"""The tiled expert GEMM: 128 rows of an expert's weights times BLOCK_N tokens, `wgmma`, persistent.

Weights are the register A operand: loaded as MXFP4 fragments (packing.py), decoded to bf16 while the tensor cores
work on the half chunk before. Tokens come by TMA from the row-major image, whose K is permuted inside each 128 so
that decoded registers need no moves: position 16j + 8i + 2t + lo holds k = 32t + 4j + 2i + lo. Loads of weights and
tokens run ahead across tile borders.
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

from megamoe.backends.hopper import fragments, packing

BLOCK_ROWS: gl.constexpr = gl.constexpr(packing.ROW_GROUP)
CHUNK: gl.constexpr = gl.constexpr(packing.CHUNK)
UNIT_BYTES: gl.constexpr = gl.constexpr(packing.UNIT_BYTES)
WORD_BYTES: gl.constexpr = gl.constexpr(packing.UNIT_WORD_BYTES)
GROUP_BYTES: gl.constexpr = gl.constexpr(2 * packing.UNIT_BYTES)
"""128 rows of one chunk."""

_LOAD4 = fragments.load(4, 0, fragments.STREAM)
# The four warps of a unit read the same lines of scales: L1 keeps them.
_LOAD_SCALES = fragments.load_half_word(0, ".nc")
_DECODE = fragments.decode_pair(0)
LOAD4: gl.constexpr = gl.constexpr(_LOAD4[0])
LOAD4_ARGS: gl.constexpr = gl.constexpr(_LOAD4[1])
LOAD_SCALES: gl.constexpr = gl.constexpr(_LOAD_SCALES[0])
LOAD_SCALES_ARGS: gl.constexpr = gl.constexpr(_LOAD_SCALES[1])
DECODE: gl.constexpr = gl.constexpr(_DECODE[0])
DECODE_ARGS: gl.constexpr = gl.constexpr(_DECODE[1])


@gluon.constexpr_function
def accumulator_layout(block_n):
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, block_n, 16])


@gluon.jit
def _load_chunk(words_at, scales_at):
    """A warp's 16 rows of one chunk: 8 words (steps 0-7) and its two scale bytes."""
    low = gl.inline_asm_elementwise(
        LOAD4, LOAD4_ARGS, [words_at], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
    )
    high = gl.inline_asm_elementwise(
        LOAD4,
        LOAD4_ARGS,
        [words_at + 512],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )
    scale = gl.inline_asm_elementwise(
        LOAD_SCALES, LOAD_SCALES_ARGS, [scales_at], dtype=gl.int32, is_pure=False, pack=1
    )
    return low + high + (scale,)


@gluon.jit
def _step_fragment(registers, first: gl.constexpr):
    """[threads, lo, h, i]: the four registers of one MMA step."""
    even = gl.join(registers[first], registers[first + 1])
    odd = gl.join(registers[first + 2], registers[first + 3])
    return gl.join(even, odd)


@gluon.jit
def _decode_pair(word0, word1, scale):
    return gl.inline_asm_elementwise(
        DECODE,
        DECODE_ARGS,
        [gl.join(word0, word1), gl.join(scale, scale)],
        dtype=(gl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _decode_half(chunk, half: gl.constexpr, layout: gl.constexpr):
    """Half a chunk -> A operand [rows, 64 of K], already in the registers where wgmma wants it."""
    r01 = _decode_pair(chunk[4 * half], chunk[4 * half + 1], chunk[8])
    r23 = _decode_pair(chunk[4 * half + 2], chunk[4 * half + 3], chunk[8])
    low = gl.join(_step_fragment(r01, 0), _step_fragment(r01, 4))
    high = gl.join(_step_fragment(r23, 0), _step_fragment(r23, 4))
    x = gl.reshape(gl.join(low, high), [8, 8, 4, 2, 2, 2, 2, 2])  # warp, g, t, lo, h, i, j bit 0, j bit 1
    x = gl.reshape(gl.permute(x, [0, 4, 1, 7, 6, 5, 2, 3]), [BLOCK_ROWS, 64])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def thread_offsets():
    """Byte offsets of a thread's words and scales inside a chunk of 128 rows: warp w is tile w % 4 of unit w // 4."""
    tid = gl.arange(0, 256, layout=gl.BlockedLayout([1], [32], [8], [0]))
    warp = tid >> 5
    lane = tid & 31
    unit = warp // 4 * UNIT_BYTES
    words = unit + (warp % 4) * 1024 + lane * 16
    scales = unit + WORD_BYTES + lane * 8 + (warp % 4) * 2
    return words.to(gl.int64), scales.to(gl.int64)


@gluon.jit
def tile_origin(units, work, tile, GROUPS: gl.constexpr, CHUNKS: gl.constexpr):
    """First token row of a tile, and the address of its weights."""
    entry = work + tile // GROUPS * 4
    index = (gl.load(entry) * GROUPS + tile % GROUPS).to(gl.int64)
    return gl.load(entry + 1), units.to(gl.int64) + index * (CHUNKS * GROUP_BYTES)


@gluon.jit
def load_ahead(words_at, scales_at, AHEAD: gl.constexpr):
    """The first AHEAD chunks of a tile, whose weights begin at the given addresses: a tuple of chunks."""
    chunks = ()
    for i in gl.static_range(AHEAD):
        chunks = chunks + (_load_chunk(words_at + i * GROUP_BYTES, scales_at + i * GROUP_BYTES),)
    return chunks


@gluon.jit
def fill(tokens, memory, bars, slot, row, column, pred):
    """Start the copy of one stage of tokens into a slot of the ring."""
    bar = bars.index(slot)
    mbarrier.expect(bar, tokens.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(tokens, [row, column], bar, memory.index(slot), pred=pred)


@gluon.jit
def empty_ring(tokens, STAGES: gl.constexpr):
    """Ring of token stages in shared memory: (memory, barriers)."""
    memory = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + tokens.block_shape, tokens.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return memory, bars


@gluon.jit
def ring_within(memory, tokens, STAGES: gl.constexpr):
    """Another ring in the same memory, with stages half as wide: to be used only while the other one is idle."""
    shape: gl.constexpr = [2 * memory.shape[0]] + tokens.block_shape
    half = memory._reinterpret(gl.bfloat16, shape, tokens.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return half, bars


@gluon.jit
def fill_ahead(tokens, memory, bars, slot, row, STAGES: gl.constexpr):
    """Start the first STAGES - 1 copies of a tile into an idle ring, from `slot` on."""
    for stage in gl.static_range(STAGES - 1):
        into = gl.where(slot + stage >= STAGES, slot + stage - STAGES, slot + stage)
        fill(tokens, memory, bars, into, row, stage * tokens.block_shape[1], True)


@gluon.jit
def open_ring(tokens, row, STAGES: gl.constexpr):
    """Ring with all but one slot being filled. Returns (memory, barriers)."""
    memory, bars = empty_ring(tokens, STAGES)
    for slot in gl.static_range(STAGES - 1):
        fill(tokens, memory, bars, slot, row, slot * tokens.block_shape[1], True)
    return memory, bars


@gluon.jit
def multiply(
    chunks, tokens, memory, bars, slot, phase, row, next_row, more,
    words_at, scales_at, next_words_at, next_scales_at,
    CHUNKS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """One tile. chunks: its first AHEAD chunks of weights, loaded. slot, phase: ring position of its first stage.

    row: first token row; next_row, next_*: where the following tile's tokens and weights begin; more: there is one.
    Returns (accumulator [128, BLOCK_N] fp32, chunks, slot, phase); the following tile's first loads are under way.
    """
    layout: gl.constexpr = accumulator_layout(BLOCK_N)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    per_stage: gl.constexpr = tokens.block_shape[1] // CHUNK
    num_stages: gl.constexpr = CHUNKS // per_stage
    acc = gl.full([BLOCK_ROWS, BLOCK_N], 0.0, gl.float32, layout=layout)
    even = _decode_half(chunks[0], 0, operand)
    for base in range(0, CHUNKS, AHEAD):
        reloaded = ()
        for i in gl.static_range(AHEAD):
            if i % per_stage == 0:
                mbarrier.wait(bars.index(slot), phase)
            stage = memory.index(slot)
            acc = warpgroup_mma(
                even, stage.slice(i % per_stage * CHUNK, 64, 1).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            if i % per_stage == 0:
                # Whoever read the slot before this one is done: fill it with the stage that is STAGES - 1 ahead.
                ahead = (base + i) // per_stage + (STAGES - 1)
                beyond = ahead >= num_stages
                column = gl.where(beyond, ahead - num_stages, ahead) * tokens.block_shape[1]
                behind = gl.where(slot == 0, STAGES - 1, slot - 1)
                fill(
                    tokens,
                    memory,
                    bars,
                    behind,
                    gl.where(beyond, next_row, row),
                    column,
                    (beyond == 0) | more,
                )
            odd = _decode_half(chunks[i], 1, operand)
            acc = warpgroup_mma(
                odd, stage.slice(i % per_stage * CHUNK + 64, 64, 1).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
            target = base + (i + AHEAD)
            past = target >= CHUNKS
            offset = gl.where(past, target - CHUNKS, target) * GROUP_BYTES
            reloaded = reloaded + (
                _load_chunk(
                    gl.where(past, next_words_at, words_at) + offset,
                    gl.where(past, next_scales_at, scales_at) + offset,
                ),
            )
            if i + 1 < AHEAD:
                even = _decode_half(chunks[i + 1], 0, operand)
            else:
                even = _decode_half(reloaded[0], 0, operand)
            if (i + 1) % per_stage == 0:
                slot = slot + 1
                phase = gl.where(slot == STAGES, phase ^ 1, phase)
                slot = gl.where(slot == STAGES, 0, slot)
        chunks = reloaded
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    return acc, chunks, slot, phase
