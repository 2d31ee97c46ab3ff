"""Canonical MXFP4 -> the order in which the tensor-core kernels read it. Pure torch, done once when weights are bound.

Both expert GEMMs take weights as the A operand, decoded in registers; one packing serves the streaming kernel
(`mma.sync`, few rows an expert) and the `wgmma` kernel. A *tile* is 16 rows x 128 columns of K; lane 4g + t of a warp
owns rows g and g + 8 and the whole 32-group t, so that a lane needs one scale per row and tile. Its word j (0-7) holds
the A fragment of MMA step j, whose k are 32t + 4j .. 32t + 4j + 3:

    register a0 = (row g,     k +0, +1)     a1 = (row g + 8, k +0, +1)
    register a2 = (row g,     k +2, +3)     a3 = (row g + 8, k +2, +3)

A register is two bf16. An e2m1 nibble becomes bf16 by placing its sign at bit 15 and its three other bits at 8..6,
which is its value times 2^-126, and one multiplication by 2^(E8M0 - 127 + 126), which fixes the exponent bias and
applies the scale, exactly, subnormals included. The four registers of a word share its 32 bits, see `_words`; the
kernel takes them apart with and/shift/rotate, see `decode_words`, its twin in torch. Magnitudes of a row come to lie
beside each other in pairs of nibbles, which the FP8 kernel looks up (fp8.py).

A *unit* is 4 tiles (64 rows) x 128 columns, UNIT_BYTES contiguous: [tile][half of j][lane][16 B of words], then
[lane][tile][row g or g + 8] scale bytes u = E8M0 + 126, the exponent field of the multiplier. Order in memory:
[expert][128 rows][128 columns][64-row half][unit].

The multiplier's exponent ends at 254, so E8M0 above 128 does not fit: an expert that has such scales is packed with
all of them lowered by the excess, and 2^excess moves to the output (`PackedMatrix.out_factor`). There bf16 ends below
at 2^-133: weights that are 2^-133 of what the largest scale holds become zero. Scale 0xFF (NaN) becomes u = 255 with
zero codes: zero times infinity is the NaN that is wanted.

Rows of w13 are interleaved so that SwiGLU stays inside a thread: row g of a tile is a gate row, row g + 8 the up row
of the same feature; a unit holds 32 features, one MX block of the intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.backends.hopper import fp8
from megamoe.shape import MX_BLOCK

TILE_ROWS = 16
CHUNK = 128
"""Columns of a tile: four MX blocks, one per lane of a quad."""
TILES_PER_UNIT = 4
UNIT_ROWS = TILE_ROWS * TILES_PER_UNIT
ROW_GROUP = 128
"""Rows that lie together for one chunk: what one thread block of either kernel multiplies at a time."""
UNIT_WORD_BYTES = TILES_PER_UNIT * 2 * 32 * 16
UNIT_BYTES = UNIT_WORD_BYTES + 32 * TILES_PER_UNIT * 2
K_ALIGN = 512
"""Columns are padded to this with zeros: the streaming kernel's warps split K in up to four groups of chunks."""

SCALE_BIAS = 126
MAX_SCALE = 254 - SCALE_BIAS
NAN_BYTE = 255
FRAGMENT_MASK = 0x81C081C0
HIGH_BITS, LOW_BIT = 0x81808180, 0x00400040
"""Register a3 does not fit the word's gaps in one piece: sign and exponent go one way, the mantissa bit another."""


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class PackedMatrix:
    """One rank's experts of one matrix, ready for the kernels.

    units: uint8 [num_experts, row groups, chunks, 2, UNIT_BYTES]. out_factor: float32 [num_experts], what the
    product of an expert's rows must be multiplied with. num_rows, num_columns: without padding. fp8: what the FP8
    kernel needs besides; None where a row's scales do not fit it.
    """

    units: torch.Tensor
    out_factor: torch.Tensor
    num_rows: int
    num_columns: int
    fp8: fp8.RowScales | None = None

    @property
    def num_experts(self) -> int:
        return int(self.units.shape[0])

    @property
    def padded_rows(self) -> int:
        return int(self.units.shape[1]) * ROW_GROUP

    @property
    def padded_columns(self) -> int:
        return int(self.units.shape[2]) * CHUNK


def padded_columns(num_columns: int) -> int:
    """K of the packed matrix."""
    return _align(num_columns, K_ALIGN)


def padded_rows(num_rows: int) -> int:
    """Rows of a packed matrix that is not w13."""
    return _align(num_rows, ROW_GROUP)


def swiglu_row_order(intermediate: int) -> torch.Tensor:
    """int64 [2 * padded features]: canonical row of each packed row of w13, -1 for padding.

    Packed row 128 G + 64 u + 16 q + 8 h + g is feature 64 G + 32 u + 8 q + g; h = 0: its gate row, 1: its up row.
    Features are padded to the K of GEMM2, so that GEMM1 writes that padding as zeros.
    """
    features = padded_columns(intermediate)
    row = torch.arange(2 * features)
    feature = (row // TILE_ROWS) * 8 + row % 8
    is_up = (row // 8) % 2
    return torch.where(feature < intermediate, feature + is_up * intermediate, -1)


def plain_row_order(num_rows: int) -> torch.Tensor:
    """int64 [padded rows]: rows in their own order, -1 for padding."""
    row = torch.arange(padded_rows(num_rows))
    return torch.where(row < num_rows, row, -1)


def pack_w13(codes: torch.Tensor, scales: torch.Tensor) -> PackedMatrix:
    """codes [E, 2 * intermediate, hidden / 2], scales [E, 2 * intermediate, hidden / 32], uint8."""
    return pack_matrix(codes, scales, swiglu_row_order(codes.shape[1] // 2))


def pack_w2(codes: torch.Tensor, scales: torch.Tensor) -> PackedMatrix:
    """codes [E, hidden, intermediate / 2], scales [E, hidden, intermediate / 32], uint8."""
    return pack_matrix(codes, scales, plain_row_order(codes.shape[1]))


def pack_matrix(codes: torch.Tensor, scales: torch.Tensor, row_order: torch.Tensor) -> PackedMatrix:
    """Pack MXFP4 codes [E, N, K / 2] and E8M0 scales [E, N, K / 32] (uint8, any device) with rows in `row_order`.

    Works expert by expert: temporary memory is about 40 bytes a weight of one expert.
    """
    num_experts, num_rows = codes.shape[:2]
    num_columns = 2 * codes.shape[2]
    num_chunks = padded_columns(num_columns) // CHUNK
    order = row_order.to(codes.device)
    units = torch.empty(
        (num_experts, len(order) // ROW_GROUP, num_chunks, 2, UNIT_BYTES),
        dtype=torch.uint8,
        device=codes.device,
    )
    finite = torch.where(scales == NAN_BYTE, 0, scales.int())
    excess = (finite.amax((1, 2)) - MAX_SCALE).clamp_(min=0)
    out_factor = torch.exp2(excess.float())
    bases: list[torch.Tensor] = []
    for expert in range(num_experts):
        nibbles, factors = _padded(codes[expert], scales[expert], int(excess[expert]), order, num_chunks)
        if len(bases) == expert and (base := fp8.row_base(nibbles, factors)) is not None:
            bases.append(base)
        units[expert, ..., :UNIT_WORD_BYTES] = _word_bytes(nibbles)
        units[expert, ..., UNIT_WORD_BYTES:] = _scale_bytes(factors)
    row_scales = fp8.row_scales(torch.stack(bases), out_factor) if len(bases) == num_experts else None
    return PackedMatrix(units, out_factor, num_rows, num_columns, row_scales)


def _padded(
    codes: torch.Tensor, scales: torch.Tensor, excess: int, order: torch.Tensor, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Nibbles int32 [rows, K] and multiplier exponent bytes [rows, K / 32], reordered and padded."""
    bad = scales == NAN_BYTE
    factors = torch.where(bad, NAN_BYTE, scales.int() - excess + SCALE_BIAS)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(*scales.shape, MX_BLOCK)
    nibbles = nibbles.masked_fill(bad.unsqueeze(-1), 0).flatten(1)
    rows, columns = len(order), num_chunks * CHUNK
    padded_nibbles = torch.zeros((rows, columns), dtype=torch.int32, device=codes.device)
    padded_factors = torch.full(
        (rows, columns // MX_BLOCK), SCALE_BIAS, dtype=torch.uint8, device=codes.device
    )
    kept = order >= 0
    source = order[kept]
    padded_nibbles[kept, : nibbles.shape[1]] = nibbles[source].int()
    padded_factors[kept, : factors.shape[1]] = factors[source].to(torch.uint8)
    return padded_nibbles, padded_factors


def _word_bytes(nibbles: torch.Tensor) -> torch.Tensor:
    """[rows, K] -> uint8 [row groups, chunks, 2, UNIT_WORD_BYTES]."""
    groups, chunks = nibbles.shape[0] // ROW_GROUP, nibbles.shape[1] // CHUNK
    # rows: group G, unit u, tile q, h, g;  columns: chunk c, block t, step j, i (pair +0 or +2), lo
    split = nibbles.view(groups, 2, TILES_PER_UNIT, 2, 8, chunks, 4, 8, 2, 2)
    # -> G c u q g t j, then registers in order (i, h), then lo
    words = _words(split.permute(0, 5, 1, 2, 4, 6, 7, 8, 3, 9).flatten(-3, -2))
    by_half = words.view(groups, chunks, 2, TILES_PER_UNIT, 32, 2, 4).transpose(-2, -3)
    return by_half.contiguous().view(torch.uint8).view(groups, chunks, 2, UNIT_WORD_BYTES)


def _scale_bytes(factors: torch.Tensor) -> torch.Tensor:
    """[rows, K / 32] -> uint8 [row groups, chunks, 2, 32 lanes * tiles * 2]."""
    groups, chunks = factors.shape[0] // ROW_GROUP, factors.shape[1] // 4
    split = factors.view(groups, 2, TILES_PER_UNIT, 2, 8, chunks, 4)
    return split.permute(0, 5, 1, 4, 6, 2, 3).reshape(groups, chunks, 2, 32 * TILES_PER_UNIT * 2)


def _rotate_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x >> bits) & ((1 << (32 - bits)) - 1)) | (x << (32 - bits))


def _words(registers: torch.Tensor) -> torch.Tensor:
    """int32 nibbles [..., 4 registers, 2 halves] -> int32 words [...]."""
    halves = ((registers & 8) << 12) | ((registers & 7) << 6)
    v = halves[..., 0] | (halves[..., 1] << 16)
    v0, v1, v2, v3 = v.unbind(-1)
    high, low = _signed(HIGH_BITS), LOW_BIT
    return (
        v0
        | _rotate_right(v1, 6)
        | _rotate_right(v2, 28)
        | _rotate_right(v3 & high, 26)
        | _rotate_right(v3 & low, 2)
    )


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits


def decode_words(words: torch.Tensor) -> torch.Tensor:
    """int32 [...] -> int32 [..., 4]: registers a0..a3 before the multiplication, as the kernels compute them."""
    mask, high = _signed(FRAGMENT_MASK), _signed(HIGH_BITS)
    return torch.stack(
        [
            words & mask,
            (words << 6) & mask,
            _rotate_right(words, 4) & mask,
            (_rotate_right(words, 6) & high) | ((words << 2) & LOW_BIT),
        ],
        dim=-1,
    )


def unpack_matrix(packed: PackedMatrix) -> torch.Tensor:
    """float32 [E, padded rows, padded columns]: what the kernels multiply with, out_factor applied.

    Walks the bytes as a kernel does (fragments, multiplier, bf16 product), so that it proves both directions.
    """
    experts, groups, chunks = packed.units.shape[:3]
    word_bytes = packed.units[..., :UNIT_WORD_BYTES].contiguous().view(torch.int32)
    words = word_bytes.view(
        experts, groups, chunks, 2, TILES_PER_UNIT, 2, 8, 4, 4
    )  # half, g, t, step in half
    registers = decode_words(words).contiguous().view(torch.bfloat16)  # last: (i, h), lo
    registers = registers.view(*words.shape, 2, 2, 2)
    factors = packed.units[..., UNIT_WORD_BYTES:].view(experts, groups, chunks, 2, 8, 4, TILES_PER_UNIT, 2)
    multiplier = (factors.to(torch.int16) << 7).view(torch.bfloat16)
    # registers: e G c u q half g t j i h lo; multiplier: e G c u g t q h
    factor = multiplier.permute(0, 1, 2, 3, 6, 4, 5, 7)[:, :, :, :, :, None, :, :, None, None, :, None]
    values = (registers.float() * factor.float()).bfloat16().float()
    # rows (G u q h g), columns (c t half j i lo)
    dense = values.permute(0, 1, 3, 4, 10, 6, 2, 7, 5, 8, 9, 11)
    dense = dense.reshape(experts, packed.padded_rows, packed.padded_columns)
    return dense * packed.out_factor.view(-1, 1, 1)


# Tokens, the other operand: in which order the kernels read bf16 rows whose columns are padded to K_ALIGN.


def to_stream_order(rows: torch.Tensor) -> torch.Tensor:
    """bf16 [16, K] -> the same elements as the streaming kernel reads them."""
    return rows.view(2, 8, -1, 4, 4, 8).permute(2, 0, 4, 1, 3, 5).reshape(rows.shape)


def from_stream_order(block: torch.Tensor) -> torch.Tensor:
    return block.view(-1, 2, 4, 8, 4, 8).permute(1, 3, 0, 4, 2, 5).reshape(block.shape)


def to_tiled_order(rows: torch.Tensor) -> torch.Tensor:
    """bf16 [n, K] -> K permuted inside each 128 as the tiled kernel reads it."""
    return rows.view(len(rows), -1, 4, 8, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(rows.shape)


def from_tiled_order(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(len(rows), -1, 8, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(rows.shape)
