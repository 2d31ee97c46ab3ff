"""Predicted time of a sub-step: per stage the slowest of matrix and issue cycles, memory, caches and links, and what
stands still for launches, flags and barriers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megamoe.backends.gfx950.model.counts import UnitCount, unit_counts
from megamoe.backends.gfx950.model.machine import Mi355x
from megamoe.backends.gfx950.model.work import Work
from megamoe.backends.gfx950.plan import COLUMNS_1, COLUMNS_2, LaunchPlan, plan_launch
from megamoe.backends.gfx950.record import COPY_BYTES
from megamoe.bundle import Path

RING = {32: (4, 2), 64: (2, 2), 128: (2, 2)}
"""K blocks of weights on their way to a wave, in GEMM1 and GEMM2, by rows of a tile."""


@dataclass(frozen=True)
class Steps:
    """What of a path follows one after the other: kernel launches, flags to peers, barriers of all workgroups of a
    rank, and stages that begin with loads that need each other."""

    launches: int
    flags: int
    meets: int
    stages: int


CHAIN = {
    # quantize; rows sent; payload flag; rows listed, workgroups meet; GEMM1; GEMM2; return flag; combine
    Path.FIXED_SLOT: Steps(launches=4, flags=2, meets=3, stages=6),
    # prepare with the counts flag besides
    Path.COMPACT: Steps(launches=5, flags=3, meets=4, stages=7),
    # counts, payload, rows and return flags; lists, board and tiles in memory
    Path.LARGE_M: Steps(launches=2, flags=4, meets=4, stages=6),
    # one launch; payload and return flags; lists and tiles of GEMM1 waited for
    Path.SMALL_M: Steps(launches=1, flags=2, meets=4, stages=6),
}
"""Counted in the kernels' sources."""


@dataclass(frozen=True)
class Stage:
    """Microseconds that each resource is busy in one stage; they overlap: the stage takes the longest."""

    name: str
    compute: float = 0.0
    hbm: float = 0.0
    cache: float = 0.0
    link: float = 0.0

    @property
    def us(self) -> float:
        return max(self.compute, self.hbm, self.cache, self.link)

    @property
    def bound(self) -> str:
        """The resource that the stage waits for."""
        return max(("compute", "hbm", "cache", "link"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Prediction:
    """A sub-step: its stages, and the latency of its chain of launches, flags and barriers."""

    latency: float
    stages: tuple[Stage, ...]

    @property
    def us(self) -> float:
        return self.latency + sum(stage.us for stage in self.stages)

    @property
    def bound(self) -> str:
        """The longest part: `latency`, or stage and resource."""
        longest = max(self.stages, key=lambda stage: stage.us)
        return "latency" if self.latency > longest.us else f"{longest.name}: {longest.bound}"


def unit_us(machine: Mi355x, unit: UnitCount, ring: int, resident: int) -> float:
    """Time of `resident` units side by side on one compute unit, all data near."""
    simds = machine.num_simds
    shared = max(
        unit.matrix / simds * machine.mfma_cycles,
        unit.vector / simds * machine.issue_cycles,
        unit.lds_bytes / machine.lds_bytes_per_cycle,
        (unit.weight_bytes + unit.row_bytes) / machine.load_bytes_per_cycle,
    )
    own = unit.instructions / unit.waves * machine.issue_cycles
    per_simd = max(shared, own) + machine.barrier_cycles * -(-unit.k // 512)
    in_flight = -(-unit.k // 128) / ring * machine.latency_us
    return max(max(resident * shared, per_simd) / machine.clock_mhz, in_flight)


def scaled(unit: UnitCount, k: int) -> UnitCount:
    """The count of a unit with another K: loops have most of the instructions."""
    names = ("matrix", "vector", "scalar", "memory", "lds", "lds_bytes", "weight_bytes", "row_bytes")
    return replace(unit, k=k, **{name: -(-getattr(unit, name) * k // unit.k) for name in names})


def gemm(
    machine: Mi355x, name: str, work: Work, rank: int, block_m: int, groups: int, *, by_die: bool
) -> Stage:
    """One GEMM of one rank, without what it sends. by_die: neighbouring units go to one die, as in small_m."""
    first = name == "gemm1"
    shape = work.shape
    k, result = (shape.hidden, shape.intermediate) if first else (shape.intermediate, shape.hidden)
    unit = scaled(unit_counts()[name, block_m], k)
    columns = (COLUMNS_1 if first else COLUMNS_2) * (8 if block_m == 64 else 4)
    num_n = -(-result // columns)
    tiles = np.array([-(-count // block_m) for count in work.rows[rank]])
    num_units = int(tiles.sum()) * num_n
    if not num_units:
        return Stage(name)
    groups = min(groups, num_units)
    ring = RING[block_m][0 if first else 1]

    def round_us(units: int) -> float:
        return unit_us(machine, unit, ring, -(-units // machine.num_cus)) if units else 0.0

    rounds, rest = divmod(num_units, groups)
    compute = rounds * round_us(groups) + round_us(rest)
    loaded = _distinct_loads(tiles, num_n, groups, machine.num_xcds, by_die)
    row_bytes = k + k // 32
    cache = loaded[0] * block_m * row_bytes + loaded[1] * (2 if first else 1) * columns * k * 17 // 32
    weights = work.weight_bytes(rank) * (2 if first else 1) / 3
    rows = work.routed(rank) * work.inner_row_bytes()
    if first:
        rows += sum(counts[rank] for counts in work.sent) * work.row_bytes
    return Stage(name, compute, (weights + rows) / machine.hbm, cache / machine.infinity_cache)


def _distinct_loads(
    tiles: np.ndarray[tuple[int], np.dtype[np.int64]], num_n: int, groups: int, num_dies: int, by_die: bool
) -> tuple[int, int]:
    """(row tiles, weight tiles) that come from behind the L2 caches, one a die: what units of one round share is
    loaded once. tiles: m-tiles of each expert."""
    num_units = int(tiles.sum()) * num_n
    place = np.arange(num_units)
    m_tile, n_tile = place // num_n, place % num_n
    expert = np.repeat(np.arange(len(tiles)), tiles * num_n)
    if by_die:
        die = place * num_dies // num_units
        turn = (place - (die * num_units + num_dies - 1) // num_dies) * num_dies // groups
        # An expert's units lie together, those of the same columns side by side.
        before = np.repeat(np.cumsum(tiles * num_n) - tiles * num_n, tiles * num_n)
        of_expert = np.repeat(tiles, tiles * num_n)
        n_tile, m_tile = (place - before) // of_expert, before // num_n + (place - before) % of_expert
    else:
        die, turn = place % groups % num_dies, place // groups
    where = turn * num_dies + die
    rows = np.unique(where * (int(tiles.sum()) + 1) + m_tile).size
    weights = np.unique((where * len(tiles) + expert) * num_n + n_tile).size
    return rows, weights


def predict(
    path: Path, work: Work, *, machine: Mi355x | None = None, plan: LaunchPlan | None = None, fp8: bool = False
) -> Prediction:  # fmt: skip
    """A sub-step of `path`, all ranks with the same number of tokens; the slowest rank counts.

    plan: tiles and grids, by default the product's. fp8: form of result rows. Only small_m stores rows from registers;
    elsewhere a wave copies them, COPY_BYTES at a time.
    """
    machine = machine or Mi355x()
    plan = plan or plan_launch(work.shape, work.num_tokens, machine.num_cus)
    steps = CHAIN[path]
    copies = 1 if path is Path.SMALL_M else -(-work.row_bytes // COPY_BYTES)
    latency = (
        steps.launches * machine.launch_us + steps.flags * machine.flag_us + steps.meets * machine.meet_us
        + steps.stages * machine.stage_us + copies * machine.copy_us
    )  # fmt: skip
    ranks = [_stages_of_rank(machine, path, work, rank, plan, fp8) for rank in range(work.shape.num_ranks)]
    return Prediction(latency, max(ranks, key=lambda stages: sum(stage.us for stage in stages)))


def _stages_of_rank(
    machine: Mi355x,
    path: Path,
    work: Work,
    rank: int,
    plan: LaunchPlan,
    fp8: bool,
) -> tuple[Stage, ...]:
    shape = work.shape
    row, result, tokens = work.row_bytes, work.result_bytes(fp8), work.num_tokens
    quantize = Stage("quantize", hbm=tokens * (2 * shape.hidden + row) / machine.hbm)
    arrived = sum(counts[rank] for counts in work.sent)
    over_links = work.payload_bytes()[rank]
    payload = max(over_links, default=0) / machine.link
    copies = (arrived + sum(work.sent[rank])) * row / machine.hbm
    combine = Stage("combine", hbm=tokens * (shape.num_topk * result + 2 * shape.hidden) / machine.hbm)
    returned = work.return_bytes(rank, fp8) / machine.link
    groups = {Path.LARGE_M: (plan.large_m_groups,) * 2, Path.SMALL_M: (plan.small_m_groups,) * 2}
    groups_1, groups_2 = groups.get(path, (plan.gemm1_groups, plan.gemm2_groups))
    by_die = path is Path.SMALL_M
    gemm1 = gemm(machine, "gemm1", work, rank, plan.block_m, groups_1, by_die=by_die)
    gemm2 = gemm(machine, "gemm2", work, rank, plan.block_m, groups_2, by_die=by_die)
    gemm2 = replace(gemm2, link=returned, hbm=gemm2.hbm + work.routed(rank) * result / machine.hbm)

    def copying(num_groups: int) -> float:
        """Time of the rows that waves copy after their first, which is part of the latency."""
        rows_of_wave = sum(work.sent[rank]) / (num_groups * plan.gemm_threads // 64)
        return max(rows_of_wave - 1, 0) * -(-row // COPY_BYTES) * machine.copy_us

    if path is not Path.LARGE_M:
        # Each expert's workgroup looks at what stands beside all rows.
        beside = arrived if path is Path.COMPACT else tokens * shape.num_ranks
        words = 4 * -(-(1 + 2 * shape.num_topk) // 4) * 4
        listing = beside * words / machine.load_bytes_per_cycle / machine.clock_mhz
        link = payload if by_die else max(payload, copying(groups_1))
        dispatch = Stage("dispatch", hbm=copies, link=link)
        return quantize, dispatch, Stage("list", compute=listing), gemm1, gemm2, combine
    sending = max(payload, copying(plan.large_m_senders))
    share = plan.large_m_senders / plan.large_m_groups
    return quantize, overlapped(gemm1, gemm2, share, sending, payload, copies, shape.num_ranks), combine


def overlapped(
    gemm1: Stage, gemm2: Stage, share: float, sending: float, payload: float, copies: float, num_ranks: int
) -> Stage:
    """The persistent kernel of large_m: sending, both GEMMs and returning side by side. share: of the workgroups that
    send before they multiply. sending: time of all rows; payload: of those for one peer, whose link results take too.
    Peers' rows come all at about the same time: all but one part in num_ranks is multiplied when they are there."""
    compute = gemm1.compute + gemm2.compute + share * sending
    last = (gemm1.us + gemm2.us) * (num_ranks - 1) / num_ranks
    link = max(sending + last, payload + gemm2.link)
    return Stage("persistent", compute, gemm1.hbm + gemm2.hbm + copies, gemm1.cache + gemm2.cache, link)
