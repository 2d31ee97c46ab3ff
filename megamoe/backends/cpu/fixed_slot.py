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
    first = call.rank * call.capacity
    tokens = outgoing.tokens_per_rank(call.num_ranks)
    for dst_rank in call.peers_in_turn():
        stages.write_slots(call, dst_rank, tokens[dst_rank], first)
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
        self.tiles: list[Tile] = []

    def quantize(self) -> None:
        with self.call.timed("quantize"):
            stages.quantize(self.call)

    def dispatch(self) -> None:
        with self.call.timed("dispatch"):
            send_slots(self.call)
            self.tiles = receive_slots(self.call)

    def gemm1(self) -> None:
        with self.call.timed("gemm1"):
            stages.gemm1_all(self.call, self.tiles)

    def gemm2(self) -> None:
        with self.call.timed("gemm2"):
            stages.return_all(self.call, stages.gemm2_all(self.call, self.tiles))

    def combine(self) -> None:
        with self.call.timed("combine"):
            stages.combine_all(self.call)
