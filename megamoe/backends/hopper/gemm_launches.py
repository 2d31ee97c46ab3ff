"""Launches of the expert GEMMs: the streaming kernel for few rows an expert, the tiled, ring or FP8 kernel for the
rest."""

from __future__ import annotations

from typing import Any

from megamoe.backends.hopper.buffers import BoundLayer
from megamoe.backends.hopper.fp8_launches import Fp8Launches
from megamoe.backends.hopper.plan import GEMM1_STREAM, GEMM2_STREAM, GemmPlan, TiledPlan
from megamoe.backends.hopper.ring_launches import RingLaunches


class GemmLaunches(RingLaunches, Fp8Launches):
    """Of one rank, on the current stream."""

    def gemm1(self, layer: BoundLayer, gemms: GemmPlan) -> None:
        from megamoe.backends.hopper.device import gemm1

        assert layer.w13 is not None
        b = self.buffers
        chunks = {"CHUNKS": b.image.shape[1] // 128, "CHUNKS_OUT": b.middle.shape[1] // 128}
        if gemms.stream_max_rows:
            gemm1.gemm1_stream_kernel[(self.device.share * GEMM1_STREAM.occupancy,)](
                b.middle,
                layer.w13.units,
                layer.w13.out_factor,
                b.image,
                *b.stream_entries,
                self._limit,
                self.device.share,
                **chunks,
                GROUPS=b.sizes.gemm1_groups,
                OCCUPANCY=GEMM1_STREAM.occupancy,
                WARPS=GEMM1_STREAM.warps,
                num_warps=GEMM1_STREAM.warps,
                **self._chain,
                maxnreg=128,
            )
        if gemms.is_fp8:
            self._gemm1_fp8(layer)
            return
        if gemms.ring is not None:
            self._gemm1_ring(layer.w13, gemms.ring, chunks)
            return
        tiles = gemms.tiles(b.shape.hidden)
        grid = self.device.share * tiles[0].occupancy
        gemm1.gemm1_tiled_kernel[(grid,)](
            b.middle,
            layer.w13.units,
            layer.w13.out_factor,
            *self._boxes(b.image, tiles),
            *b.tiled_entries,
            self._limit,
            grid,
            **chunks,
            **_tiled_options(tiles, b.sizes.gemm1_groups),
            **self._chain,
        )

    def gemm2(self, layer: BoundLayer, gemms: GemmPlan, *, plain_rows: bool = False) -> None:
        """plain_rows: bf16 results whatever the deployment's format (for checks of a binding)."""
        if gemms.is_fp8:
            self._gemm2_fp8(layer)
            return
        from megamoe.backends.hopper.device import gemm2

        assert layer.w2 is not None
        b = self.buffers
        common = {
            "HIDDEN": b.shape.hidden,
            "CHUNKS": b.middle.shape[1] // 128,
            "FP8": self.fp8 and not plain_rows,
        }
        if gemms.stream_max_rows:
            gemm2.gemm2_stream_kernel[(self.device.share * GEMM2_STREAM.occupancy,)](
                b.row_address,
                b.row_weight,
                layer.w2.units,
                layer.w2.out_factor,
                b.middle,
                *b.stream_entries,
                self.device.share,
                **common,
                GROUPS=b.sizes.gemm2_groups,
                OCCUPANCY=GEMM2_STREAM.occupancy,
                WARPS=GEMM2_STREAM.warps,
                num_warps=GEMM2_STREAM.warps,
                **self._chain,
                maxnreg=128,
            )
        if gemms.ring is not None:
            self._gemm2_ring(layer.w2, gemms.ring, common)
            return
        tiles = gemms.tiles(b.shape.intermediate)
        grid = self.device.share * tiles[0].occupancy
        gemm2.gemm2_tiled_kernel[(grid,)](
            b.row_address,
            b.row_weight,
            layer.w2.units,
            layer.w2.out_factor,
            *self._boxes(b.middle, tiles),
            *b.tiled_entries,
            grid,
            **common,
            **_tiled_options(tiles, b.sizes.gemm2_groups),
            **self._chain,
        )


def _tiled_options(tiles: tuple[TiledPlan, ...], groups: int) -> dict[str, Any]:
    """Constants and options of a tiled kernel; groups: row groups of an expert's matrix."""
    options = {
        "GROUPS": groups,
        "TILES": tuple((tile.block_n, tile.stages, tile.ahead) for tile in tiles),
        "num_warps": 8,
    }
    return options if tiles[0].num_regs is None else options | {"maxnreg": tiles[0].num_regs}
