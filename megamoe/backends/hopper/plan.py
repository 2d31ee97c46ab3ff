"""Which kernels with which tiles serve a step, and how large their tables are: pure functions of agreed numbers.

Tiles never depend on a rank's own counts: they follow from the agreed maximum of rows a rank, so that all ranks, and
`compact` and `large_m`, multiply the same rows in the same way. Inside a launch each expert goes to one of two
kernels by its own row count: up to `stream_max_rows` to the streaming kernel in one or two entries, above it to the
tiled kernel in entries of `block_n` rows. Both find their entries in tables that the index stage writes on the
device; nothing here is known on the host when it is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megamoe.backends.hopper.packing import CHUNK, padded_columns
from megamoe.errors import InternalError, must_be
from megamoe.shape import MoeShape

BLOCK_ROWS = 16
"""Rows of routed tables and token images start at multiples of this for every expert."""
STREAM_COSTS = (12, 14, 17)
"""Time of a streaming tile for entries of up to 8, 16 and 24 rows, relative. One more MMA a step each: 265 and 315 us
for 48 experts' GEMM1 at 8 and 16 rows (V4-Pro, H200)."""
WIDEST_ROWS = 8 * len(STREAM_COSTS)
HALVED_UP_TO = 4
"""Streaming tiles a program up to which they may be halved, where that leaves the slowest program less to do."""
ENTRY_WORDS = 4
"""A work entry: expert, first block (streaming kernel) or first row (tiled kernel), rows, complete tiles of GEMM1."""
ENTRY_DONE = 3
"""Word of an entry, zeroed when it is written; counted on small_m only."""
COUNTER_WORDS = 16
INDEX_PART = 256
"""Rows that are counted together in large steps."""
SMALL_M_BLOCK_N = 64
"""Widest tile of the one-launch path: two thread blocks a multiprocessor, 128 registers a thread."""
MIN_BLOCK_N, MAX_BLOCK_N = 32, 256
MAX_WIDTHS = COUNTER_WORDS - 8
STREAM_LIMIT = 32
"""Rows of an expert up to which the streaming kernel can serve it, reading its weights at most twice."""


class Counter:
    """Words at the head of the work table, written by the index stage."""

    NUM_STREAM_ENTRIES = 0
    """Three words: entries of up to 8, 16 and 24 rows, which follow each other in the table."""
    NUM_BLOCKS = 4
    NUM_ROUTED_ROWS = 5
    NUM_TILED_ENTRIES = 8
    """A word for each width of tiles (up to MAX_WIDTHS), widest first, as their entries follow each other."""


def stream_entries(count: int) -> tuple[int, ...]:
    """Rows of the streaming entries of an expert with `count` rows (at most STREAM_LIMIT): one if that is wide
    enough, else two that begin at its 16-row blocks."""
    if count == 0:
        return ()
    return (count,) if count <= WIDEST_ROWS else (BLOCK_ROWS, count - BLOCK_ROWS)


def _place_at(cost: int, numbers: tuple[int, int, int]) -> int:
    """Which one is reached at a cost from the start, of `numbers` that cost STREAM_COSTS each."""
    place = 0
    for number, each in zip(numbers, STREAM_COSTS, strict=True):
        here = min(cost, number * each)
        place += here // each
        cost -= here
    return place


def stream_range(slot: int, num_slots: int, num_tiles: tuple[int, int, int]) -> tuple[int, int]:
    """Tiles [first, stop) of one multiprocessor by equal cost; num_tiles: of entries of up to 8, 16 and 24 rows, which
    are numbered in that order (device code: turns.tile_range). Contiguous, so that tiles of an expert find its
    tokens in L1."""

    total = sum(number * each for number, each in zip(num_tiles, STREAM_COSTS, strict=True))
    return _place_at(total * slot // num_slots, num_tiles), _place_at(
        total * (slot + 1) // num_slots, num_tiles
    )


def halves_tiles(num_tiles: tuple[int, int, int], num_programs: int) -> bool:
    """Whether the streaming kernel takes tiles in halves, so that its slowest program has less to do: where there are
    few tiles, all of entries of up to 8 rows. num_tiles: as for stream_range (device code: turns.halved)."""
    narrow, *wider = num_tiles
    rounds, half_rounds = -(-narrow // num_programs), -(-2 * narrow // num_programs)
    return not any(wider) and rounds <= HALVED_UP_TO and half_rounds < 2 * rounds


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Streaming kernel: warps of a thread block and blocks a multiprocessor (prototype's optimum on an H200)."""

    warps: int
    occupancy: int


GEMM1_STREAM = StreamPlan(warps=8, occupancy=2)
GEMM2_STREAM = StreamPlan(warps=4, occupancy=4)
SMALL_M = StreamPlan(warps=8, occupancy=2)
"""Both GEMMs, and all else, in one launch: also what the tiled kernel with up to 64 tokens needs."""


SHARED_BYTES = 228 * 1024
"""Shared memory of a multiprocessor of an H100 or H200."""
RESERVED_BYTES = 1024
"""Of it, what the driver takes for every thread block."""


def check_resident(shared_bytes: int, occupancy: int) -> None:
    """Thread blocks that wait for each other must be on the device at once. Raises InternalError when `occupancy` of
    them, with that much shared memory each, do not fit a multiprocessor."""
    most = SHARED_BYTES // occupancy - RESERVED_BYTES
    if shared_bytes > most:
        raise InternalError(
            must_be("shared memory of a small_m thread block", f"at most {most} bytes", shared_bytes)
        )


@dataclass(frozen=True, kw_only=True)
class TiledPlan:
    """Tiled kernel: 128 rows of weights (8 warps) times block_n tokens.

    stages of chunks_per_stage x 128 of K are in flight for tokens, `ahead` chunks for weights. num_regs: register cap
    a thread, None = as the compiler likes. occupancy: blocks a multiprocessor.
    """

    block_n: int
    stages: int
    chunks_per_stage: int
    ahead: int
    num_regs: int | None
    occupancy: int


_SMALL_M_TILED = TiledPlan(block_n=32, stages=3, chunks_per_stage=1, ahead=4, num_regs=128, occupancy=2)
"""Few tokens in shared memory: what is left of it is L1, where the streaming kernel keeps its own."""
_TILED = {
    32: TiledPlan(block_n=32, stages=4, chunks_per_stage=2, ahead=4, num_regs=128, occupancy=2),
    64: TiledPlan(block_n=64, stages=3, chunks_per_stage=2, ahead=4, num_regs=128, occupancy=2),
    96: TiledPlan(block_n=96, stages=4, chunks_per_stage=1, ahead=2, num_regs=128, occupancy=2),
    128: TiledPlan(block_n=128, stages=4, chunks_per_stage=1, ahead=4, num_regs=None, occupancy=1),
    160: TiledPlan(block_n=160, stages=4, chunks_per_stage=1, ahead=2, num_regs=None, occupancy=1),
    192: TiledPlan(block_n=192, stages=4, chunks_per_stage=1, ahead=2, num_regs=None, occupancy=1),
    256: TiledPlan(block_n=256, stages=3, chunks_per_stage=1, ahead=2, num_regs=None, occupancy=1),
}
BOX_ROWS = (256, 128, 64, 32)
"""Rows of the boxes in which tokens are copied; a tile is one or two of them."""
_WIDTHS = {96: (96, 64, 32), 256: (256, 192, 160, 128)}
"""Widths of the tiles of one launch, whose thread blocks are alike."""


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Ring kernel: warpgroups with 128 rows of weights each times the tokens of an entry, in tiles of several widths,
    widest first; one thread block a multiprocessor. stages of one chunk of K are in flight."""

    widths: tuple[int, ...]
    stages: int


RING_CONSUMERS = 3
"""Warpgroups that multiply; a fourth one loads."""
RING_REGISTERS = 160
"""Of a thread that multiplies."""
RING_BOX_ROWS = (64, 32, 16)
"""Rows of the boxes in which tokens are copied; a tile is one or two of them."""
RING_WHOLE_CHUNKS = 32
"""Where a tile's first box has up to so many rows a warpgroup decodes a chunk before it multiplies it, else half of
one: registers. Twice the halves cost 12 % at 32 rows."""
RING = RingPlan(widths=(96, 64, 48, 32), stages=4)
RING_FEW_ROWS = RingPlan(widths=(96, 64, 48, 32, 16), stages=4)


FP8_WIDTHS = (256, 192, 128)
"""Of the FP8 kernel's tiles: two warpgroups with 64 rows of weights each times pieces of 64 tokens."""
FP8_STAGES = 4
"""Chunks of K in flight."""
FP8_REGISTERS = 240
"""Of a thread that multiplies."""
FP8_MIN_MEAN_ROWS = 100.0
"""Above so many rows an expert on average the FP8 kernel serves."""


def ring_tile(wave: int, program: int, num_programs: int) -> int:
    """The tile of a program of the ring kernel in a wave (device code: ring_gemm.tile_at). Tiles come widest first: who
    has the widest of one wave gets the narrowest of the next one."""
    return wave * num_programs + (program if wave % 2 == 0 else num_programs - 1 - program)


@dataclass(frozen=True, kw_only=True)
class GemmPlan:
    """Both kernels of a step. stream_max_rows: 0 = every expert goes to the tiled kernel. block_n: its widest tile.
    one_launch: both share thread blocks, and so the memory of a multiprocessor. ring: all rows go to the ring
    kernel instead. is_fp8: all rows go to the FP8 kernel, for layers that fit it (BoundLayer.gemms)."""

    stream_max_rows: int
    block_n: int
    one_launch: bool = False
    ring: RingPlan | None = None
    is_fp8: bool = False

    @property
    def bf16(self) -> GemmPlan:
        """For layers that do not fit the FP8 kernel."""
        return replace(self, is_fp8=False) if self.is_fp8 else self

    @property
    def widths(self) -> tuple[int, ...]:
        """Of all tiles, widest first."""
        if self.is_fp8:
            return FP8_WIDTHS
        if self.ring is not None:
            return self.ring.widths
        return (self.block_n,) if self.one_launch else _WIDTHS.get(self.block_n, (self.block_n,))

    def tiled(self, num_columns: int) -> TiledPlan:
        """Settings of the widest tiles for a matrix with that many columns (before padding)."""
        return self.tiles(num_columns)[0]

    def tiles(self, num_columns: int) -> tuple[TiledPlan, ...]:
        """Settings of all tiles, widest first."""
        if self.one_launch and self.block_n == 32:
            return (_fitting(_SMALL_M_TILED, num_columns),)
        plans = tuple(_fitting(_TILED[width], num_columns) for width in self.widths)
        if len(plans) == 1:
            return plans
        # Tiles of all widths are copied in boxes of the same columns.
        return tuple(replace(plan, chunks_per_stage=1) for plan in plans)


def _fitting(plan: TiledPlan, num_columns: int) -> TiledPlan:
    """No ring runs more than a tile ahead."""
    num_chunks = padded_columns(num_columns) // CHUNK
    fits = num_chunks // plan.chunks_per_stage >= plan.stages - 1
    return plan if fits else replace(plan, chunks_per_stage=1)


def _mean_rows(shape: MoeShape, max_rows: int) -> float:
    """Rows that an expert has on average if all ranks bring max_rows."""
    return max_rows * shape.num_topk * shape.num_ranks / shape.num_experts


def _streaming_and_tiled(mean: float, batch_invariant: bool, fp8_rows: bool) -> GemmPlan:
    stream_max_rows, block_n = next(kernels for limit, kernels in _BY_MEAN_ROWS if mean <= limit)
    if batch_invariant:
        stream_max_rows = 0
    if fp8_rows:
        block_n = {96: 64, 256: 128}.get(block_n, block_n)
    return GemmPlan(stream_max_rows=stream_max_rows, block_n=block_n)


def plan_gemms(
    shape: MoeShape, max_rows: int, *, batch_invariant: bool = False, fp8_rows: bool = False
) -> GemmPlan:
    """Choose by the rows that an expert has on average if all ranks bring max_rows.

    Thresholds: V4-Pro, one H200, layer times at 1 to 8192 tokens a rank, see docs/hopper.md. fp8_rows: the widest tile
    and the ring have no shared memory left to weight and quantize rows in. batch_invariant: every row is summed in the
    same order, whatever its mates: that of the ring and of the tiled kernel.
    """
    mean = _mean_rows(shape, max_rows)
    for above, most, ring in _RING_BY_MEAN_ROWS:
        if above < mean <= most and not fp8_rows:
            return GemmPlan(stream_max_rows=0, block_n=ring.widths[0], ring=ring)
    gemms = _streaming_and_tiled(mean, batch_invariant, fp8_rows)
    # It sums in another order than the ring and the tiled kernel do.
    return replace(gemms, is_fp8=mean > FP8_MIN_MEAN_ROWS and not fp8_rows and not batch_invariant)


def plan_small_m(
    shape: MoeShape, max_rows: int, *, batch_invariant: bool = False, fp8_rows: bool = False
) -> GemmPlan:
    """For the one launch of small_m, which is another kernel where the ring serves."""
    mean = _mean_rows(shape, max_rows)
    for above, most, ring in _RING_BY_MEAN_ROWS:
        if above < mean <= most and not fp8_rows:
            return GemmPlan(stream_max_rows=0, block_n=MIN_BLOCK_N, one_launch=True, ring=ring)
    gemms = _streaming_and_tiled(mean, batch_invariant, fp8_rows)
    # Where streaming is the rule, its tokens need L1; FP8 rows are quantized in shared memory.
    narrow = fp8_rows or gemms.stream_max_rows == STREAM_LIMIT
    block_n = MIN_BLOCK_N if narrow else min(gemms.block_n, SMALL_M_BLOCK_N)
    return replace(gemms, block_n=block_n, one_launch=True)


_BY_MEAN_ROWS: tuple[tuple[float, tuple[int, int]], ...] = (
    # Beside the streaming kernel only hot experts are left, which have many rows.
    (12, (32, 64)),
    (24, (32, 32)),
    (40, (16, 64)),
    (80, (0, 96)),
    (float("inf"), (0, 256)),
)
"""Up to a mean number of rows an expert: (stream_max_rows, block_n)."""
_RING_BY_MEAN_ROWS = ((7, 20, RING_FEW_ROWS), (20, 100, RING))
"""Above and up to which mean number of rows the ring kernel serves instead."""


def next_power_of_2(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def index_block_tokens(shape: MoeShape, capacity: int) -> int:
    """Tokens that the index stage looks at together: few for small steps (latency), many for large (throughput)."""
    slots = next_power_of_2(shape.num_topk)
    return max(min(next_power_of_2(capacity), 4096 // slots), 16)


def grid_share(num_sms: int, num_virtual_ranks: int) -> int:
    """Multiprocessors that each of the ranks on one device may count on."""
    return max(num_sms // num_virtual_ranks, 1)


def devices_of_ranks(num_ranks: int, num_devices: int) -> tuple[int, ...]:
    """Device of each rank: neighbouring ranks share one where there are more ranks than devices."""
    used = min(num_ranks, num_devices)
    return tuple(rank * used // num_ranks for rank in range(num_ranks))
