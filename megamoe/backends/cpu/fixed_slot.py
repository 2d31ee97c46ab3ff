"""fixed_slot: a row's slot at every destination is reserved (source rank, token), so nothing is counted or agreed on
before payload travels. How many rows a source brought rides in its payload flag."""

from __future__ import annotations

from megamoe.backends.cpu import stages
from megamoe.backends.cpu.call import Call, PathRun
from megamoe.backends.cpu.experts import Tile
from megamoe.backends.cpu.routed import Received
from megamoe.backends.cpu.signals import Phase
from megamoe.layout import FlagKind


def send_slots(call: Call) -> None:
    """Write this rank's rows into its own slots at their owners, and post the payload flags."""
    outgoing = call.outgoing
    assert outgoing is not None
    call.at("payload")
    call.signals.check_in_time()
    stages.write_slots(call, call.rank * call.capacity)
    for dst_rank in call.peers_in_turn:
        call.post(dst_rank, FlagKind.PAYLOAD, len(outgoing.owners))
    call.signals.advance(Phase.SENT)


def receive_slots(call: Call, *, auto_format: bool = False) -> list[Tile]:
    """Wait for the sources that have rows by the agreed counts, peer by peer, and find this rank's rows.

    Sources without rows are not waited for: an idle rank cannot hold up the GEMMs.
    """
    busy = [rank for rank, rows in enumerate(call.launch.sub_step.num_rows_per_rank) if rows]
    call.signals.wait(FlagKind.PAYLOAD, busy)
    call.at("received")
    blocks = [Received(rank, rank * call.capacity, stages.rows_sent_by(call, rank)) for rank in busy]
    stages.find_rows(call, blocks, auto_format=auto_format)
    return stages.all_tiles(call)


class FixedSlotPath(PathRun):
    STAGES = ("quantize", "dispatch", "gemm1", "gemm2", "combine")

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._tiles: list[Tile] = []

    def quantize(self) -> None:
        stages.quantize(self.call)
        self.call.lap("quantize")

    def dispatch(self) -> None:
        send_slots(self.call)
        self._tiles = receive_slots(self.call)
        self.call.lap("dispatch")

    def gemm1(self) -> None:
        stages.gemm1_all(self.call, self._tiles)
        self.call.lap("gemm1")

    def gemm2(self) -> None:
        stages.return_all(self.call, stages.gemm2_all(self.call, self._tiles))
        self.call.lap("gemm2")

    def combine(self) -> None:
        stages.combine_all(self.call)
        self.call.lap("combine")
