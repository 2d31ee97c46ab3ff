"""The streaming expert GEMM: up to 24 rows of an expert against 128 rows of its weights, `mma.sync`, DRAM-bound.

Weights never touch shared memory: every thread loads 16-byte pieces that are already MMA fragments (packing.py) and
reloads each register for the next step right after its use, across tile borders too, so that loads are always in
flight. A thread block is HALVES x k_groups warps; warps of one row half split K by chunks and are summed through
shared memory in a fixed order. HALVES is 2, or 1 where there are so few tiles that halves of them, of 64 rows, keep
more thread blocks busy (turns.halved); then K is split among twice as many warps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megamoe.backends.hopper import fragments, packing

UNIT_BYTES: gl.constexpr = gl.constexpr(packing.UNIT_BYTES)
WORD_BYTES: gl.constexpr = gl.constexpr(packing.UNIT_WORD_BYTES)
TILES: gl.constexpr = gl.constexpr(packing.TILES_PER_UNIT)
UNITS_PER_CHUNK: gl.constexpr = gl.constexpr(packing.ROW_GROUP // packing.UNIT_ROWS)
"""Halves of the packed rows of a tile, next to each other."""
TOKEN_BLOCK_BYTES: gl.constexpr = gl.constexpr(8 * packing.CHUNK * 2)
"""One chunk of 8 tokens, bf16: [4 pieces][lane][16 B]."""
TOKEN_CHUNK_BYTES: gl.constexpr = gl.constexpr(2 * 8 * packing.CHUNK * 2)

_LOAD4_STREAM = fragments.load(4, 0, fragments.STREAM)
_LOAD2_STREAM = fragments.load(2, 0, fragments.STREAM)
_LOAD4_KEEP = fragments.load(4, 0, fragments.KEEP)
LOAD4_STREAM: gl.constexpr = gl.constexpr(_LOAD4_STREAM[0])
LOAD2_STREAM: gl.constexpr = gl.constexpr(_LOAD2_STREAM[0])
LOAD4_KEEP: gl.constexpr = gl.constexpr(_LOAD4_KEEP[0])
LOAD4_ARGS: gl.constexpr = gl.constexpr(_LOAD4_STREAM[1])
LOAD2_ARGS: gl.constexpr = gl.constexpr(_LOAD2_STREAM[1])
MMA1_EVEN: gl.constexpr = gl.constexpr(fragments.mma_steps(4, 1, False)[0])
MMA1_ODD: gl.constexpr = gl.constexpr(fragments.mma_steps(4, 1, True)[0])
MMA1_ARGS: gl.constexpr = gl.constexpr(fragments.mma_steps(4, 1, True)[1])
MMA2_EVEN: gl.constexpr = gl.constexpr(fragments.mma_steps(4, 2, False)[0])
MMA2_ODD: gl.constexpr = gl.constexpr(fragments.mma_steps(4, 2, True)[0])
MMA2_ARGS: gl.constexpr = gl.constexpr(fragments.mma_steps(4, 2, True)[1])
MMA3_EVEN: gl.constexpr = gl.constexpr(fragments.mma_steps(2, 3, False)[0])
MMA3_ODD: gl.constexpr = gl.constexpr(fragments.mma_steps(2, 3, True)[0])
MMA3_ARGS: gl.constexpr = gl.constexpr(fragments.mma_steps(2, 3, True)[1])
# ptxas sinks the reloads to the end of the loop; a warp barrier that it cannot move keeps some where they belong.
FENCE: gl.constexpr = gl.constexpr("bar.warp.sync 0xffffffff;\nmov.u32 $0, 0;")


@gluon.jit
def load_words(address):
    """4 words of one half of a tile."""
    return gl.inline_asm_elementwise(
        LOAD4_STREAM,
        LOAD4_ARGS,
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_tokens(address):
    """4 token registers: 8 of K of one token."""
    return gl.inline_asm_elementwise(
        LOAD4_KEEP,
        LOAD4_ARGS,
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_scales(unit_address, lane):
    """The 8 scale bytes of a lane: words of tiles (0, 1) and (2, 3)."""
    address = unit_address + WORD_BYTES - lane * 8  # unit_address already counts 16 bytes a lane
    return gl.inline_asm_elementwise(
        LOAD2_STREAM, LOAD2_ARGS, [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def load_unit(address, lane):
    """All words and scales of a thread's unit: (32 words: [half][tile][4], 2 scale words)."""
    words = ()
    for half in gl.static_range(2):
        for tile in gl.static_range(TILES):
            words = words + load_words(address + (tile * 1024 + half * 512))
    return words, load_scales(address, lane)


@gluon.jit
def _pick(values, first: gl.constexpr, count: gl.constexpr):
    out = ()
    for i in gl.static_range(count):
        out = out + (values[first + i],)
    return out


@gluon.jit
def _mma(words, scale, tokens, acc, ODD: gl.constexpr, BLOCKS: gl.constexpr):
    """4 (BLOCKS <= 2) or 2 MMA steps of one tile; returns its accumulators."""
    operands = words + (scale,) + tokens + acc
    if BLOCKS == 1:
        out = gl.inline_asm_elementwise(
            MMA1_ODD if ODD else MMA1_EVEN, MMA1_ARGS, operands, dtype=(gl.float32,) * 4, is_pure=True, pack=1
        )
    elif BLOCKS == 2:
        out = gl.inline_asm_elementwise(
            MMA2_ODD if ODD else MMA2_EVEN, MMA2_ARGS, operands, dtype=(gl.float32,) * 8, is_pure=True, pack=1
        )
    else:
        out = gl.inline_asm_elementwise(
            MMA3_ODD if ODD else MMA3_EVEN,
            MMA3_ARGS,
            operands,
            dtype=(gl.float32,) * 12,
            is_pure=True,
            pack=1,
        )
    return out


@gluon.jit
def tile_address(weights, work, tile, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, HALVES: gl.constexpr):
    """Address of a thread's first unit of a tile; weights: of its first unit of expert 0's first row group."""
    tiles: gl.constexpr = GROUPS * UNITS_PER_CHUNK // HALVES
    expert = gl.load(work + tile // tiles * 4)
    half = tile % tiles * HALVES
    group = (expert * GROUPS + half // UNITS_PER_CHUNK).to(gl.int64)
    return weights + group * (CHUNKS * UNITS_PER_CHUNK * UNIT_BYTES) + half % UNITS_PER_CHUNK * UNIT_BYTES


@gluon.jit
def _load_pieces(
    chunk, first: gl.constexpr, PIECES: gl.constexpr, CHUNKS: gl.constexpr, BLOCKS: gl.constexpr
):
    """Token registers of PIECES pieces (8 of K each) of every block of 8 tokens: [block][piece][4]."""
    out = ()
    for block in gl.static_range(BLOCKS):
        for piece in gl.static_range(PIECES):
            out = out + load_tokens(
                chunk
                + (
                    block // 2 * (CHUNKS * TOKEN_CHUNK_BYTES)
                    + block % 2 * TOKEN_BLOCK_BYTES
                    + (first + piece) * 512
                )
            )
    return out


@gluon.jit
def multiply(
    words, scales, lane, tokens, at,
    CHUNKS: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """One tile: 64 rows a warp times BLOCKS x 8 tokens over the warp's share of K.

    words, scales: the tile's first unit, loaded. tokens: this thread's address of its first token chunk. at: addresses
    of this tile's weights and of those that follow, 0 if nothing does, and the thread's offset in them. Returns words
    and scales of what follows, and the accumulators: for each tile of 16 rows and block of 8 tokens (row g, tokens 2t
    and 2t + 1; row g + 8, the same).
    """
    k_groups: gl.constexpr = WARPS // HALVES
    steps: gl.constexpr = CHUNKS // k_groups
    # Wide entries load tokens in smaller portions: their accumulators leave fewer registers.
    portions: gl.constexpr = 1 if BLOCKS <= 2 else 2
    acc = ()
    for _ in gl.static_range(TILES * BLOCKS * 4):
        acc = acc + (gl.full([32 * WARPS], 0.0, gl.float32, layout=lane.type.layout),)
    here, beyond, offset = at
    size: gl.constexpr = k_groups * UNITS_PER_CHUNK * UNIT_BYTES
    # Where nothing follows, registers take the tile's last unit again, out of L2.
    next_tile = gl.where(beyond == 0, here + (steps - 1) * size, beyond) + offset
    for step in range(steps):
        chunk = tokens + step * (k_groups * TOKEN_CHUNK_BYTES)
        following = gl.where(step == steps - 1, next_tile, here + offset + (step + 1) * size)
        new_words = ()
        for half in gl.static_range(2):
            for portion in gl.static_range(portions):
                token_words = _load_pieces(chunk, 2 * half + portion, 2 // portions, CHUNKS, BLOCKS)
                new_acc = ()
                for tile in gl.static_range(TILES):
                    new_acc = new_acc + _mma(
                        _pick(words, (half * TILES + tile) * 4 + portion * 2, 4 // portions),
                        scales[tile // 2],
                        token_words,
                        _pick(acc, tile * 4 * BLOCKS, 4 * BLOCKS),
                        tile % 2 == 1,
                        BLOCKS,
                    )
                    if portion == portions - 1:
                        new_words = new_words + load_words(following + (tile * 1024 + half * 512))
                    if BLOCKS == 2 and tile % 2 == 1 and not (half == 1 and tile == TILES - 1):
                        gl.inline_asm_elementwise(
                            FENCE, "=r,r", [lane + step], dtype=gl.int32, is_pure=False, pack=1
                        )
                acc = new_acc
        words = new_words
        scales = load_scales(following, lane)
    return words, scales, acc


@gluon.jit
def _token_pair(acc, tile: gl.constexpr, block: gl.constexpr, part: gl.constexpr, BLOCKS: gl.constexpr):
    """[threads, token 2t or 2t + 1] of rows g (part 0) or g + 8 (part 1) of a tile."""
    first: gl.constexpr = (tile * BLOCKS + block) * 4 + part * 2
    return gl.join(acc[first], acc[first + 1])


@gluon.jit
def _half_rows(acc, block: gl.constexpr, part: gl.constexpr, BLOCKS: gl.constexpr):
    """[threads, token, tile bit 0, tile bit 1]."""
    low = gl.join(_token_pair(acc, 0, block, part, BLOCKS), _token_pair(acc, 1, block, part, BLOCKS))
    high = gl.join(_token_pair(acc, 2, block, part, BLOCKS), _token_pair(acc, 3, block, part, BLOCKS))
    return gl.join(low, high)


@gluon.jit
def half_rows(
    acc,
    part: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    HALVES: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Partial sums [K groups, 8 * COUNT tokens, 32 * HALVES] of blocks FIRST and on: rows g (part 0: gates) or g + 8
    (part 1: ups) of all tiles."""
    x = _half_rows(acc, FIRST, part, BLOCKS)
    if COUNT == 2:
        x = gl.join(x, _half_rows(acc, FIRST + 1, part, BLOCKS))
    groups: gl.constexpr = WARPS // HALVES
    x = gl.reshape(x, [groups, HALVES, 8, 4, 2, 2, 2, COUNT])  # K group, half, g, t, token, tile, tile, block
    x = gl.permute(x, [0, 7, 3, 4, 1, 6, 5, 2])
    return gl.reshape(x, [groups, 8 * COUNT, HALVES * 32])


@gluon.jit
def all_rows(
    acc,
    WARPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    HALVES: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Partial sums [K groups, 8 * COUNT tokens, 64 * HALVES] of blocks FIRST and on: the rows in their packed order."""
    x = gl.join(_half_rows(acc, FIRST, 0, BLOCKS), _half_rows(acc, FIRST, 1, BLOCKS))
    if COUNT == 2:
        x = gl.join(x, gl.join(_half_rows(acc, FIRST + 1, 0, BLOCKS), _half_rows(acc, FIRST + 1, 1, BLOCKS)))
    groups: gl.constexpr = WARPS // HALVES
    # K group, half, g, t, token, tile, tile, part, block
    x = gl.reshape(x, [groups, HALVES, 8, 4, 2, 2, 2, 2, COUNT])
    x = gl.permute(x, [0, 8, 3, 4, 1, 6, 5, 7, 2])
    return gl.reshape(x, [groups, 8 * COUNT, HALVES * 64])


@gluon.jit
def sum_groups(partial, layout: gl.constexpr):
    """Sum over K groups in ascending order through shared memory; layout holds all groups in one thread."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    memory = gl.allocate_shared_memory(gl.float32, partial.shape, shared, partial)
    return gl.sum(memory.load(layout), axis=0)


@gluon.constexpr_function
def sum_layout(k_groups, blocks, width, warps):
    """Layout of sum_groups for [k_groups, 8 * blocks, width]: all K groups and a run of columns a thread."""
    run = max(1, min(8, 8 * blocks * width // (32 * warps)))
    across = min(32, width // run)
    return gl.BlockedLayout([k_groups, 1, run], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])
