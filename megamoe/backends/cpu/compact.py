"""compact: count, agree on row bases, pack densely, then send. The default, and what everything falls back to."""

from __future__ import annotations

import numpy as np

from megamoe.backends.cpu import stages
from megamoe.backends.cpu.call import Call, PathRun
from megamoe.backends.cpu.experts import Tile
from megamoe.backends.cpu.routed import Int64Array, Received
from megamoe.backends.cpu.signals import Phase
from megamoe.layout import FlagKind


class CompactPath(PathRun):
    STAGES = ("quantize", "prepare", "dispatch", "gemm1", "gemm2", "combine")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.tokens: list[Int64Array] = []
        self.counts: np.ndarray = np.zeros(0, dtype=np.int32)
        self.tiles: list[Tile] = []

    def quantize(self) -> None:
        with self.call.timed("quantize"):
            stages.quantize(self.call)

    def prepare(self) -> None:
        """Count rows per destination, tell everyone, and wait for everyone's counts: the group's one barrier."""
        call = self.call
        with call.timed("dispatch"):
            assert call.outgoing is not None
            self.tokens = call.outgoing.tokens_per_rank(call.num_ranks)
            counts = np.array([len(tokens) for tokens in self.tokens], dtype=np.int32)
            call.count("prepare_passes")
            call.count("count_exchanges")
            for dst_rank in call.peers_in_turn():
                call.buffer_of(dst_rank).counts[call.rank, : call.num_ranks] = counts
                call.count_sent(dst_rank, counts.nbytes)
                call.post(dst_rank, FlagKind.COUNTS)
            call.signals.advance(Phase.COUNTED)
            call.at("counts")
            call.count("group_barriers")
            call.signals.wait(FlagKind.COUNTS, range(call.num_ranks))
            self.counts = call.own_buffer.counts[:, : call.num_ranks].copy()

    def dispatch(self) -> None:
        """Write packed rows at the agreed bases; then, as an owner, wait for all sources and find the rows."""
        call = self.call
        with call.timed("dispatch"):
            bases = (
                np.cumsum(self.counts, axis=0) - self.counts
            )  # [source, destination]: rows of earlier sources
            call.at("payload")
            for dst_rank in call.peers_in_turn():
                stages.write_rows(call, dst_rank, self.tokens[dst_rank], int(bases[call.rank, dst_rank]))
                call.post(dst_rank, FlagKind.PAYLOAD, len(self.tokens[dst_rank]))
            call.signals.advance(Phase.SENT)
            call.signals.wait(FlagKind.PAYLOAD, range(call.num_ranks))
            call.at("received")
            received = [
                Received(rank, int(bases[rank, call.rank]), int(self.counts[rank, call.rank]))
                for rank in range(call.num_ranks)
            ]
            stages.find_rows(call, received)
            self.tiles = stages.all_tiles(call)

    def gemm1(self) -> None:
        with self.call.timed("gemm1"):
            stages.gemm1_all(self.call, self.tiles)

    def gemm2(self) -> None:
        with self.call.timed("gemm2"):
            stages.return_all(self.call, stages.gemm2_all(self.call, self.tiles))

    def combine(self) -> None:
        with self.call.timed("combine"):
            stages.combine_all(self.call)
