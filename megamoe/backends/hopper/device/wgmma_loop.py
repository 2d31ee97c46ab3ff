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


@gluon.constexpr_function
def operand_layout(block_n):
    return gl.DotOperandLayout(0, accumulator_layout(block_n), 2)


@gluon.constexpr_function
def most_rows(tiles):
    """Token rows of the largest ring of tiles (width, stages, chunks ahead)."""
    return max(tile[0] * tile[1] for tile in tiles)


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
def decode_half(chunk, half: gl.constexpr, layout: gl.constexpr, WARPS: gl.constexpr):
    """Half a chunk -> A operand [16 rows a warp, 64 of K], already in the registers where wgmma wants it."""
    r01 = _decode_pair(chunk[4 * half], chunk[4 * half + 1], chunk[8])
    r23 = _decode_pair(chunk[4 * half + 2], chunk[4 * half + 3], chunk[8])
    low = gl.join(_step_fragment(r01, 0), _step_fragment(r01, 4))
    high = gl.join(_step_fragment(r23, 0), _step_fragment(r23, 4))
    x = gl.reshape(gl.join(low, high), [WARPS, 8, 4, 2, 2, 2, 2, 2])  # warp, g, t, lo, h, i, j bit 0, j bit 1
    x = gl.reshape(gl.permute(x, [0, 4, 1, 7, 6, 5, 2, 3]), [16 * WARPS, 64])
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
def boxes_of(box256, box128, box64, box32):
    """Descriptors of a token image, those that a launch has (others are None)."""
    out = ()
    if box256 is not None:
        out = out + (box256,)
    if box128 is not None:
        out = out + (box128,)
    if box64 is not None:
        out = out + (box64,)
    if box32 is not None:
        out = out + (box32,)
    return out


@gluon.jit
def parts(boxes, WIDTH: gl.constexpr):
    """Of descriptors of boxes with a power of two of rows each, those that make up a tile of WIDTH tokens."""
    out = ()
    for i in gl.static_range(len(boxes)):
        if (WIDTH & boxes[i].block_shape[0]) != 0:
            out = out + (boxes[i],)
    return out


@gluon.jit
def _rows_before(tokens, part: gl.constexpr):
    """Rows of a tile that belong to the parts before one."""
    rows: gl.constexpr = 0 if part == 0 else tokens[0].block_shape[0]
    return rows


@gluon.jit
def _stage(tokens, memory, slot, part: gl.constexpr, STAGES: gl.constexpr):
    """A part's tokens in a slot of the ring: behind the slots of the parts before it."""
    return memory[part].index(STAGES * _rows_before(tokens, part) // tokens[part].block_shape[0] + slot)


@gluon.jit
def fill(tokens, memory, bars, slot, row, column, pred, STAGES: gl.constexpr):
    """Start the copy of one stage of tokens, all parts, into a slot of the ring."""
    bar = bars.index(slot)
    first: gl.constexpr = tokens[0].block_type.nbytes
    second: gl.constexpr = 0 if len(tokens) == 1 else tokens[len(tokens) - 1].block_type.nbytes
    mbarrier.expect(bar, first + second, pred=pred)
    for part in gl.static_range(len(tokens)):
        into = _stage(tokens, memory, slot, part, STAGES)
        at = [row + _rows_before(tokens, part), column]
        tma.async_copy_global_to_shared(tokens[part], at, bar, into, pred=pred)


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(bars.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return bars


@gluon.jit
def empty_ring(tokens, STAGES: gl.constexpr):
    """Ring of token stages in shared memory: (memory, barriers)."""
    memory = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + tokens.block_shape, tokens.layout)
    return memory, _barriers(STAGES)


@gluon.jit
def _seen_by(memory, box):
    slots: gl.constexpr = memory.shape[0] * memory.shape[1] // box.block_shape[0]
    return memory._reinterpret(gl.bfloat16, [slots] + box.block_shape, box.layout)


@gluon.jit
def ring_within(memory, tokens, STAGES: gl.constexpr):
    """Another ring in the same memory, for tiles of the given parts: to be used only while all others are idle.
    Returns (memory as each part sees it, barriers)."""
    as_parts = ()
    for part in gl.static_range(len(tokens)):
        as_parts = as_parts + (_seen_by(memory, tokens[part]),)
    return as_parts, _barriers(STAGES)


@gluon.jit
def close_ring(bars, STAGES: gl.constexpr):
    """Where a ring is used no more while the kernel goes on: an initialized barrier is invalidated before its memory
    serves anything else, for its state may be written back later, over what stands there by then."""
    gl.thread_barrier()
    for slot in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(slot))
    gl.thread_barrier()


@gluon.jit
def fill_ahead(tokens, memory, bars, slot, row, STAGES: gl.constexpr):
    """Start the first STAGES - 1 copies of a tile into an idle ring, from `slot` on."""
    for stage in gl.static_range(STAGES - 1):
        into = gl.where(slot + stage >= STAGES, slot + stage - STAGES, slot + stage)
        fill(tokens, memory, bars, into, row, stage * tokens[0].block_shape[1], True, STAGES)


@gluon.jit
def _multiply_half(operand, tokens, memory, slot, column: gl.constexpr, acc, STAGES: gl.constexpr):
    """Start the multiplications of 64 of K by all parts, and wait for those of the half before. Returns acc."""
    out = ()
    for part in gl.static_range(len(acc)):
        half = _stage(tokens, memory, slot, part, STAGES).slice(column, 64, 1).permute((1, 0))
        same = gl.convert_layout(operand, operand_layout(acc[part].type.shape[1]), assert_trivial=True)
        out = out + (warpgroup_mma(same, half, acc[part], is_async=True),)
    return _wait(out, len(acc))


@gluon.jit
def _wait(acc, num_outstanding: gl.constexpr):
    out = warpgroup_mma_wait(num_outstanding=num_outstanding, deps=acc)
    if len(acc) == 1:
        done = (out,)
    else:
        done = (out[0], out[1])
    return done


@gluon.jit
def _no_sums(BLOCK_N: gl.constexpr):
    return gl.full([BLOCK_ROWS, BLOCK_N], 0.0, gl.float32, layout=accumulator_layout(BLOCK_N))


@gluon.jit
def multiply(
    chunks, tokens, memory, bars, slot, phase, row, next_row, more,
    words_at, scales_at, next_words_at, next_scales_at,
    CHUNKS: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One tile. chunks: its first AHEAD chunks of weights, loaded. slot, phase: ring position of its first stage.

    tokens, memory: descriptors and memory of the tile's parts. row: first token row; next_row, next_*: where the
    following tile's tokens and weights begin; more: there is one. Returns (accumulator [128, rows] fp32 of every part,
    chunks, slot, phase); the following tile's first loads are under way.
    """
    operand: gl.constexpr = operand_layout(tokens[0].block_shape[0])
    per_stage: gl.constexpr = tokens[0].block_shape[1] // CHUNK
    num_stages: gl.constexpr = CHUNKS // per_stage
    acc = ()
    for part in gl.static_range(len(tokens)):
        acc = acc + (_no_sums(tokens[part].block_shape[0]),)
    even = decode_half(chunks[0], 0, operand, 8)
    for base in range(0, CHUNKS, AHEAD):
        reloaded = ()
        for i in gl.static_range(AHEAD):
            if i % per_stage == 0:
                mbarrier.wait(bars.index(slot), phase)
            acc = _multiply_half(even, tokens, memory, slot, i % per_stage * CHUNK, acc, STAGES)
            if i % per_stage == 0:
                # Whoever read the slot before this one is done: fill it with the stage that is STAGES - 1 ahead.
                ahead = (base + i) // per_stage + (STAGES - 1)
                beyond = ahead >= num_stages
                column = gl.where(beyond, ahead - num_stages, ahead) * (per_stage * CHUNK)
                behind = gl.where(slot == 0, STAGES - 1, slot - 1)
                begin = gl.where(beyond, next_row, row)
                fill(tokens, memory, bars, behind, begin, column, (beyond == 0) | more, STAGES)
            odd = decode_half(chunks[i], 1, operand, 8)
            acc = _multiply_half(odd, tokens, memory, slot, i % per_stage * CHUNK + 64, acc, STAGES)
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
                even = decode_half(chunks[i + 1], 0, operand, 8)
            else:
                even = decode_half(reloaded[0], 0, operand, 8)
            if (i + 1) % per_stage == 0:
                slot = slot + 1
                phase = gl.where(slot == STAGES, phase ^ 1, phase)
                slot = gl.where(slot == STAGES, 0, slot)
        chunks = reloaded
    return _wait(acc, 0), chunks, slot, phase


@gluon.jit
def _tiles_of_width(
    begin, stop, place, tokens, memory, units, out_factor, work, num_programs, finish, rest,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    OPTIONS: gl.constexpr, CLOSES: gl.constexpr,
):  # fmt: skip
    """This thread block's share of the tiles [begin, stop), all of one width. tokens: descriptors of its parts. CLOSES:
    something else may take the memory of this ring."""
    # Thread blocks take turns from tile 0 on, whatever its width.
    first = begin + (place + num_programs - begin % num_programs) % num_programs
    if first < stop:
        words_off, scales_off = thread_offsets()
        row, at = tile_origin(units, work, first, GROUPS, CHUNKS)
        ring, bars = ring_within(memory, tokens, STAGES)
        fill_ahead(tokens, ring, bars, 0, row, STAGES)
        chunks = load_ahead(at + words_off, at + scales_off, AHEAD)
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        for tile in range(first, stop, num_programs):
            row, at = tile_origin(units, work, tile, GROUPS, CHUNKS)
            more = tile + num_programs < stop
            next_row, next_at = tile_origin(
                units, work, gl.where(more, tile + num_programs, tile), GROUPS, CHUNKS
            )
            acc, chunks, slot, phase = multiply(
                chunks, tokens, ring, bars, slot, phase, row, next_row, more,
                at + words_off, at + scales_off, next_at + words_off, next_at + scales_off,
                CHUNKS, AHEAD, STAGES,
            )  # fmt: skip
            entry = work + tile // GROUPS * 4
            factor = gl.load(out_factor + gl.load(entry))
            rows = gl.load(entry + 2)
            for part in gl.static_range(len(acc)):
                before = _rows_before(tokens, part)
                finish(acc[part], factor, row + before, tile % GROUPS, rows - before, rest, OPTIONS)
        if CLOSES:
            close_ring(bars, STAGES)


@gluon.jit
def persistent(
    boxes, units, out_factor, work, num_entries, place, num_programs, finish, rest,
    CHUNKS: gl.constexpr, GROUPS: gl.constexpr, TILES: gl.constexpr, OPTIONS: gl.constexpr, CLOSES: gl.constexpr,
):  # fmt: skip
    """All tiles, (entry, 128 rows of weights), the widest first. boxes: descriptors of the token image. work: int32
    [entries, 4]: expert, first image row, rows, unused; num_entries: of each width. place: of this thread block among
    those that take turns. TILES: width, stages and chunks ahead of each. CLOSES: the kernel goes on. finish(sums,
    factor, row, group, rows, rest, OPTIONS): what is done with a part of a tile."""
    ring_rows: gl.constexpr = most_rows(TILES)
    shape: gl.constexpr = [ring_rows // boxes[0].block_shape[0]] + boxes[0].block_shape
    memory = gl.allocate_shared_memory(gl.bfloat16, shape, boxes[0].layout)
    begin = gl.to_tensor(0)
    for i in gl.static_range(len(TILES)):
        stop = begin + gl.load(num_entries + i) * GROUPS
        _tiles_of_width(
            begin, stop, place, parts(boxes, TILES[i][0]), memory, units, out_factor, work, num_programs, finish, rest,
            CHUNKS, GROUPS, TILES[i][1], TILES[i][2], OPTIONS, CLOSES or len(TILES) > 1,
        )  # fmt: skip
        begin = stop
