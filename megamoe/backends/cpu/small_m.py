"""small_m: quantize, dispatch, both GEMMs and combine in one launch, over reserved slots and per-peer flags.

A chunk of tiles goes through both GEMMs while it is in the cache. A rank that receives many rows, or many of one
expert, sends its results as FP8 when the agreed format is auto, and says so in its return flags.
"""

from __future__ import annotations

from megamoe.backends.cpu import stages
from megamoe.backends.cpu.call import PathRun
from megamoe.backends.cpu.fixed_slot import receive_slots, send_slots


class SmallMPath(PathRun):
    STAGES = ("small_m",)

    def small_m(self) -> None:
        call = self.call
        stages.quantize(call)
        call.lap("quantize")
        send_slots(call)
        tiles = receive_slots(call, auto_format=True)
        routed = call.routed
        assert routed is not None
        gemms = call.context.gemms
        h_u8 = stages.intermediate_rows(call, gemms.max_chunk_rows(tiles))
        results = stages.result_rows(call, routed.num_rows)
        call.lap("dispatch")
        for chunk in gemms.chunks(tiles):
            part = slice(chunk[0].start, chunk[-1].stop)
            payload_rows, weights = routed.payload_row[part], routed.weights[part]
            inner = h_u8[: len(payload_rows)]
            stages.gemm1_chunk(call, chunk, payload_rows, inner)
            call.lap("gemm1")
            stages.gemm2_chunk(call, chunk, payload_rows, weights, inner, results[part])
            call.lap("gemm2")
        stages.return_all(call, results)
        call.lap("gemm2")
        stages.combine_all(call)
        call.lap("combine")
