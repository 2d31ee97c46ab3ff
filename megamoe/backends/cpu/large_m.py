"""large_m: quantize is its own launch; dispatch, both GEMMs and combine overlap in one persistent launch.

Counts per expert travel inside the launch, ahead of the rows, so a destination can lay out an expert's canonical row
order before the rows are there. A tile runs as soon as the sources of its rows have arrived, in the order in which
tiles became complete; a source's results go back when its last row is done; tokens are summed when their owners have
answered. A source that is late holds up only the tiles that its rows belong to, and no rank waits for the group.
Tiles hold the same rows as on compact, so the bits are the same.
"""

from __future__ import annotations

import numpy as np
import torch

from megamoe.backends.cpu import stages
from megamoe.backends.cpu.call import Call, PathRun
from megamoe.backends.cpu.combine import combine_tokens
from megamoe.backends.cpu.experts import Tile
from megamoe.backends.cpu.heap import WIDE
from megamoe.backends.cpu.routed import Int64Array, Received, routed_rows
from megamoe.backends.cpu.signals import Phase
from megamoe.backends.cpu.tile_board import TileBoard
from megamoe.layout import FlagKind

_MIN_TOKENS = 32
"""Fewer complete tokens than this wait for more before they are summed."""


class LargeMPath(PathRun):
    STAGES = ("quantize", "persistent")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        shape = call.shape
        self._busy = [rank for rank, rows in enumerate(call.launch.sub_step.num_rows_per_rank) if rows]
        self._board = TileBoard(
            call.num_ranks, shape.num_experts_per_rank, call.context.gemms.block_m, self._busy
        )
        # Routed rows lie source after source, in order of arrival; bounded by what all sources can send here.
        most = sum(call.launch.sub_step.num_rows_per_rank) * shape.num_topk
        self._payload_row: Int64Array = np.empty(most, dtype=np.int64)
        self._weights = np.empty(most, dtype=np.float32)
        self._results = stages.result_rows(call, most)
        self._num_routed = 0
        self._block: dict[int, tuple[int, Int64Array]] = {}
        """Per arrived source: where its routed rows begin, and their places at the source."""
        self._returned: set[int] = set()
        self._all_returned = False
        self._everyone = (1 << call.num_ranks) - 1
        self._rows_back = self._owners_done = 0
        self._combined = np.zeros(call.batch.num_rows, dtype=bool)

    def quantize(self) -> None:
        stages.quantize(self.call)
        self.call.lap("quantize")

    def persistent(self) -> None:
        call = self.call
        stages.choose_format(call, 0, 0)
        self._send()
        self._owners_of_token = self._owner_bits()
        while not self._finished():
            self._receive()
            chunk = self._board.take(call.context.gemms.chunk_rows)
            call.lap("dispatch")
            if len(chunk):
                self._compute(chunk)
            self._return_finished()
            call.lap("gemm2")
            self._look_at_returns()
            if not len(chunk) or self._board.finished:
                self._combine_complete()
            call.lap("combine")
            if not len(chunk) and not self._finished():
                call.signals.wait_any(self._news, self._missing)

    # ------------------------------------------------------------------------------------------- dispatch

    def _send(self) -> None:
        """Counts per expert to every destination, then rows, densely packed into this source's own area."""
        call, outgoing = self.call, self.call.outgoing
        assert outgoing is not None
        num_experts = call.shape.num_experts_per_rank
        ids = call.batch.topk_ids.numpy().ravel()
        counts = np.bincount(ids[ids >= 0], minlength=call.shape.num_experts).reshape(call.num_ranks, -1)
        call.count("prepare_passes")
        call.count("count_exchanges")
        call.buffer.counts[:, call.rank, :num_experts] = counts
        call.bytes_sent += 4 * num_experts * (call.num_ranks - 1)
        for dst_rank in call.peers_in_turn:
            call.post(dst_rank, FlagKind.COUNTS, ring=True)
        call.signals.advance(Phase.COUNTED)
        call.at("counts")
        call.at("payload")
        call.signals.check_in_time()
        stages.write_dense(call, np.full(call.num_ranks, call.rank * call.capacity))
        for dst_rank in call.peers_in_turn:
            call.post(dst_rank, FlagKind.PAYLOAD, int(outgoing.rows_per_rank[dst_rank]), ring=True)
        call.signals.advance(Phase.SENT)

    def _receive(self) -> None:
        """Take note of every source whose counts or rows have arrived since the last look."""
        call, board = self.call, self._board
        num_experts = call.shape.num_experts_per_rank
        for src_rank in self._busy:
            if not board.known[src_rank] and call.signals.seen(FlagKind.COUNTS, src_rank):
                board.set_counts(src_rank, call.buffer.counts[call.rank, src_rank, :num_experts])
            if not board.known[src_rank] or board.arrived[src_rank]:
                continue
            if call.signals.seen(FlagKind.PAYLOAD, src_rank):
                self._take_rows(src_rank)
                if board.arrived.all():
                    call.at("received")

    def _take_rows(self, src_rank: int) -> None:
        call = self.call
        block = Received(src_rank, src_rank * call.capacity, stages.rows_sent_by(call, src_rank))
        words = call.buffer.meta[call.rank].numpy()
        routed = routed_rows(call.context.layout, call.rank, words, [block])
        first = self._num_routed
        stop = first + routed.num_rows
        self._payload_row[first:stop] = routed.payload_row
        self._weights[first:stop] = routed.weights
        self._block[src_rank] = (first, routed.result_index)
        self._num_routed = stop
        self._board.set_arrived(src_rank, first)
        call.count("rows_received", routed.num_rows)

    # ------------------------------------------------------------------------------------------- tiles

    def _compute(self, chunk: Int64Array) -> None:
        """Both GEMMs of some complete tiles; results are laid down source by source."""
        call = self.call
        routed, sizes = self._board.rows_of(chunk)
        stops = np.cumsum(sizes)
        experts = self._board.experts_of(chunk)
        tiles = [
            Tile(int(expert), int(stop - size), int(stop))
            for expert, size, stop in zip(experts, sizes, stops, strict=True)
        ]
        payload_rows = self._payload_row[routed]
        h_u8 = stages.intermediate_rows(call, len(routed))
        stages.gemm1_chunk(call, tiles, payload_rows, h_u8)
        call.lap("gemm1")
        encoded = call.context.scratch.get("encoded", len(routed), self._results.shape[1], WIDE)
        stages.gemm2_chunk(call, tiles, payload_rows, self._weights[routed], h_u8, encoded)
        self._results.index_copy_(0, torch.from_numpy(routed), encoded)
        self._board.set_done(chunk)

    # ------------------------------------------------------------------------------------------- results

    def _return_finished(self) -> None:
        """Write back the results of every source whose rows are all done; when all are, tell everyone so.

        Rows go early, but no rank ends its launch before all owners are done: a launch ends alike on all ranks.
        """
        call = self.call
        for src_rank in call.peers_in_turn:
            if src_rank not in self._block or src_rank in self._returned:
                continue
            if self._board.source_finished(src_rank):
                call.signals.check_in_time()
                first, index = self._block[src_rank]
                stages.return_rows(call, src_rank, self._results[first : first + len(index)], index)
                self._returned.add(src_rank)
        if self._board.finished and not self._all_returned:
            stages.begin_return(call)
            for src_rank in call.peers_in_turn:
                call.post(src_rank, FlagKind.RETURN, ring=True)
            self._all_returned = True
            call.at("returned")

    def _owner_bits(self) -> np.ndarray:
        """[n] int64: a bit for every owner that a token needs."""
        outgoing = self.call.outgoing
        assert outgoing is not None
        owners = outgoing.owners.astype(np.int64)
        bits: np.ndarray = np.bitwise_or.reduce(np.where(owners < 0, 0, 1 << np.maximum(owners, 0)), axis=1)
        return bits

    def _seen(self, kind: FlagKind) -> int:
        """A bit for every rank whose flag is there."""
        return sum(self.call.signals.seen(kind, rank) << rank for rank in range(self.call.num_ranks))

    def _look_at_returns(self) -> None:
        """Take note of the owners whose rows are back, and of those that are done with everything."""
        self._rows_back = self._seen(FlagKind.ROWS)
        self._owners_done = self._seen(FlagKind.RETURN)

    def _combine_complete(self) -> None:
        """Sum the tokens whose owners have all answered."""
        call = self.call
        complete = ~self._combined & (self._owners_of_token & ~self._rows_back == 0)
        count = int(complete.sum())
        if not count or (count < _MIN_TOKENS and self._owners_done != self._everyone):
            return
        call.at("combine")
        tokens = None if count == len(complete) else np.flatnonzero(complete)
        combine_tokens(call, stages.formats_of(stages.infos(call, FlagKind.ROWS)), tokens)
        self._combined |= complete

    def _finished(self) -> bool:
        return self._all_returned and self._owners_done == self._everyone and bool(self._combined.all())

    def _news(self) -> bool:
        """Whether anything arrived that _receive or _look_at_returns has not seen yet."""
        signals, board = self.call.signals, self._board
        for src_rank in self._busy:
            if not board.known[src_rank]:
                if signals.seen(FlagKind.COUNTS, src_rank):
                    return True
            elif not board.arrived[src_rank] and signals.seen(FlagKind.PAYLOAD, src_rank):
                return True
        return (
            self._seen(FlagKind.ROWS) != self._rows_back or self._seen(FlagKind.RETURN) != self._owners_done
        )

    def _missing(self) -> list[int]:
        late = [rank for rank in self._busy if not self._board.arrived[rank]]
        return late or [rank for rank in range(self.call.num_ranks) if not self._owners_done >> rank & 1]
