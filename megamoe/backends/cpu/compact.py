"""compact: count, agree on row bases, pack densely, then send. The default, and what everything falls back to."""

from __future__ import annotations

import numpy as np

from megamoe.backends.cpu import stages
from megamoe.backends.cpu.call import Call, PathRun
from megamoe.backends.cpu.experts import Tile
from megamoe.backends.cpu.routed import Received
from megamoe.backends.cpu.signals import Phase
from megamoe.layout import FlagKind


class CompactPath(PathRun):
    STAGES = ("quantize", "prepare", "dispatch", "gemm1", "gemm2", "combine")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._counts: np.ndarray = np.zeros(0, dtype=np.int32)
        """[source, destination] rows, the same on all ranks once agreed."""
        self._tiles: list[Tile] = []

    def quantize(self) -> None:
        stages.quantize(self.call)
        self.call.lap("quantize")

    def prepare(self) -> None:
        """Count rows per destination, tell everyone, and wait for everyone's counts: the group's one barrier."""
        call = self.call
        assert call.outgoing is not None
        counts = call.outgoing.rows_per_rank
        call.count("prepare_passes")
        call.count("count_exchanges")
        call.buffer.counts[:, call.rank, : call.num_ranks] = counts
        call.bytes_sent += 4 * len(counts) * (call.num_ranks - 1)
        for dst_rank in call.peers_in_turn:
            call.post(dst_rank, FlagKind.COUNTS)
        call.signals.advance(Phase.COUNTED)
        call.at("counts")
        call.count("group_barriers")
        call.signals.wait(FlagKind.COUNTS, range(call.num_ranks))
        self._counts = call.buffer.counts[call.rank, :, : call.num_ranks].copy()
        call.lap("dispatch")

    def dispatch(self) -> None:
        """Write packed rows at the agreed bases; then, as an owner, wait for all sources and find the rows."""
        call = self.call
        bases = np.cumsum(self._counts, axis=0) - self._counts  # rows of earlier sources
        call.at("payload")
        call.signals.check_in_time()
        stages.write_dense(call, bases[call.rank])
        for dst_rank in call.peers_in_turn:
            call.post(dst_rank, FlagKind.PAYLOAD, int(self._counts[call.rank, dst_rank]))
        call.signals.advance(Phase.SENT)
        call.signals.wait(FlagKind.PAYLOAD, range(call.num_ranks))
        call.at("received")
        received = [
            Received(rank, int(bases[rank, call.rank]), int(self._counts[rank, call.rank]))
            for rank in range(call.num_ranks)
        ]
        stages.find_rows(call, received)
        self._tiles = stages.all_tiles(call)
        call.lap("dispatch")

    def gemm1(self) -> None:
        stages.gemm1_all(self.call, self._tiles)
        self.call.lap("gemm1")

    def gemm2(self) -> None:
        stages.return_all(self.call, stages.gemm2_all(self.call, self._tiles))
        self.call.lap("gemm2")

    def combine(self) -> None:
        stages.combine_all(self.call)
        self.call.lap("combine")
