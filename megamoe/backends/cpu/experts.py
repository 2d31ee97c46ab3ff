"""The expert GEMMs of one rank: tiles of routed rows in canonical order through weights dequantized at bind.

The routed rows of an expert are ordered (src_rank, token, slot) and cut into tiles of BLOCK_M rows from 0. A tile is
one matmul, of the same rows and the same size on every path and in every run; that is what makes the bits equal. The
last tile of an expert keeps its odd size unless batch_invariant pads all tiles to one size, so that a row's bits do
not depend on how many mates it has. Everything else is elementwise and may be cut anywhere: chunks of tiles that fit
the cache are processed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megamoe import mx
from megamoe.backends.cpu.matrix import Matrix
from megamoe.shape import MX_BLOCK, MoeShape
from megamoe.weights import LayerWeights

BLOCK_M = 64
"""Rows of a tile. Larger gains nothing: fp32 matmul is within 5 % of its peak here (AMD EPYC 9004, MKL)."""
BLOCK_M_INVARIANT = 16
"""Rows of every tile with batch_invariant: padding costs less, and the matmul kernel still sees one size."""
_CHUNK_BYTES = 1 << 19
"""fp32 activations of one chunk: half of the L2 cache of one core (1 MiB, AMD EPYC 9004)."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """Routed rows [start, stop) of local expert `expert`, as positions in the order that the caller processes."""

    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class BoundLayer:
    """Weights of one slot, ready for matmuls, a matrix an expert: w1 [hidden, 2 * intermediate] (gate columns first),
    w2 [intermediate, hidden]. None: identity experts (transport tests bypass both GEMMs)."""

    w1: tuple[Matrix, ...] | None
    w2: tuple[Matrix, ...] | None


def dequantized(weights: LayerWeights) -> BoundLayer:
    """The canonical packing of one rank's experts as fp32 matrices that a row is multiplied with from the left."""
    w1, w2 = [], []
    for expert in range(weights.w13_codes.shape[0]):
        dense13, dense2 = weights.experts(expert, expert + 1).dequantized()
        w1.append(Matrix(dense13[0].T.contiguous()))
        w2.append(Matrix(dense2[0].T.contiguous()))
    return BoundLayer(tuple(w1), tuple(w2))


class Scratch:
    """Work space that grows to the largest step and is reused; contents are undefined between uses."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns] of dtype; invalidates what `name` named before."""
        needed = rows * columns
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < needed or buffer.dtype != dtype:
            buffer = torch.empty(1 << max(needed - 1, 1).bit_length(), dtype=dtype)
            self._buffers[name] = buffer
        return buffer[:needed].view(rows, columns)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.itemsize for buffer in self._buffers.values())


def tiles_of(rows_per_expert: Sequence[int], block_m: int) -> list[Tile]:
    """All tiles of routed rows that lie expert after expert."""
    tiles = []
    base = 0
    for expert, num_rows in enumerate(rows_per_expert):
        tiles += [
            Tile(expert, base + start, base + min(start + block_m, num_rows))
            for start in range(0, num_rows, block_m)
        ]
        base += num_rows
    return tiles


class ExpertGemms:
    """GEMM1 + SwiGLU + quantization, and GEMM2, over chunks of tiles. Owns no rows and no weights."""

    def __init__(self, shape: MoeShape, *, batch_invariant: bool) -> None:
        self.shape = shape
        self.block_m = BLOCK_M_INVARIANT if batch_invariant else BLOCK_M
        self.padded_rows = 0
        """Rows of padding since the last reset by the owner."""
        self._pad = batch_invariant
        self._work = Scratch()
        wide = max(shape.hidden, 2 * shape.intermediate)
        self.chunk_rows = max(_CHUNK_BYTES // (4 * wide) // self.block_m, 1) * self.block_m

    def chunks(self, tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
        """Runs of consecutive tiles of at most chunk_rows rows together."""
        chunk: list[Tile] = []
        rows = 0
        for tile in tiles:
            size = tile.stop - tile.start
            if chunk and rows + size > self.chunk_rows:
                yield chunk
                chunk, rows = [], 0
            chunk.append(tile)
            rows += size
        if chunk:
            yield chunk

    def max_chunk_rows(self, tiles: Sequence[Tile]) -> int:
        """Bound on the rows of any chunk of these tiles."""
        return min(max(self.chunk_rows, self.block_m), tiles[-1].stop if tiles else 0)

    def decode(self, rows_u8: torch.Tensor, width: int) -> torch.Tensor:
        """Rows [m, >= width + width / 32] of codes and scales -> float32 [m, width] in work space."""
        x = self._work.get("x", rows_u8.shape[0], width, torch.float32)
        sf = rows_u8[:, width : width + width // MX_BLOCK]
        mx.dequantize_mxfp8_into(x, rows_u8[:, :width], sf, nan_codes=False)
        return x

    def gemm1(
        self, layer: BoundLayer, tiles: Sequence[Tile], base: int, x: torch.Tensor, out_u8: torch.Tensor
    ) -> None:
        """x [m, hidden] float32, the rows from `base` on -> out_u8 [m, intermediate + intermediate / 32]:
        SwiGLU of the tiles' rows in fp32, straight to MXFP8."""
        assert layer.w1 is not None
        inter = self.shape.intermediate
        hidden = self._work.get("h", x.shape[0], 2 * inter, torch.float32)
        self._matmuls(layer.w1, tiles, base, x, hidden)
        if self._pad:
            self.padded_rows += sum(-(tile.stop - tile.start) % self.block_m for tile in tiles)
        gate, up = hidden[:, :inter], hidden[:, inter:]
        limit = self.shape.swiglu_limit
        if limit > 0:
            gate.clamp_(max=limit)
            up.clamp_(-limit, limit)
        if self.shape.activation == "silu":
            torch.nn.functional.silu(gate, inplace=True)
        else:
            gate.copy_(torch.nn.functional.gelu(gate))
        gate.mul_(up)
        mx.quantize_mxfp8_into(out_u8[:, :inter], out_u8[:, inter : inter + inter // MX_BLOCK], gate)

    def gemm2(self, layer: BoundLayer, tiles: Sequence[Tile], base: int, h_u8: torch.Tensor) -> torch.Tensor:
        """Intermediate rows as gemm1 wrote them -> result rows float32 [m, hidden] in work space."""
        assert layer.w2 is not None
        h = self.decode(h_u8, self.shape.intermediate)
        y = self._work.get("y", h.shape[0], self.shape.hidden, torch.float32)
        self._matmuls(layer.w2, tiles, base, h, y)
        return y

    def expert_rows(self, layer: BoundLayer, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """One expert alone: rows [m, hidden] bf16 -> its answer [m, hidden] float32, in work space."""
        m, hidden, inter = rows.shape[0], self.shape.hidden, self.shape.intermediate
        codes = torch.empty((m, hidden + hidden // MX_BLOCK), dtype=torch.uint8)
        mx.quantize_mxfp8_into(codes[:, :hidden], codes[:, hidden:], rows)
        inner = torch.empty((m, inter + inter // MX_BLOCK), dtype=torch.uint8)
        tiles = [Tile(expert, start, min(start + self.block_m, m)) for start in range(0, m, self.block_m)]
        self.gemm1(layer, tiles, 0, self.decode(codes, hidden), inner)
        return self.gemm2(layer, tiles, 0, inner)

    def _matmuls(
        self, weights: Sequence[Matrix], tiles: Sequence[Tile], base: int, x: torch.Tensor, out: torch.Tensor
    ) -> None:
        for tile in tiles:
            start, stop = tile.start - base, tile.stop - base
            if not self._pad or stop - start == self.block_m:
                weights[tile.expert].multiply(x[start:stop], out[start:stop])
                continue
            padded_x = self._work.get("pad_x", self.block_m, x.shape[1], torch.float32)
            padded_out = self._work.get("pad_out", self.block_m, out.shape[1], torch.float32)
            padded_x[: stop - start] = x[start:stop]
            padded_x[stop - start :] = 0.0
            weights[tile.expert].multiply(padded_x, padded_out)
            out[start:stop] = padded_out[: stop - start]


def encode_results(y: torch.Tensor, out_wide: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Result rows float32 [m, hidden] -> out_wide [m, result_bytes / 16]: bf16, or, given the routing weights [m],
    the weighted row as e4m3 codes and scales at the row's front. y is overwritten in the second case."""
    if weights is None:
        out_wide.view(torch.bfloat16).copy_(y)
        return
    hidden = y.shape[1]
    y.mul_(weights.unsqueeze(1))
    u8 = out_wide.view(torch.uint8)
    mx.quantize_mxfp8_into(u8[:, :hidden], u8[:, hidden : hidden + hidden // MX_BLOCK], y)
