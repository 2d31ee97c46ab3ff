"""Which runtimes a deployment builds, with capacities, and why a path is not among them.

A `Deployment` is chosen by a person; `plan_bundle` turns it into a `Bundle`, a fact that every rank derives alike.
Eligibility is a predicate per backend: gfx950 has the gate of its tuned kernels; cpu, hopper and the emulated
profile accept any validated shape. A path that is not eligible falls back to compact, visibly: `Bundle.reasons`.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from megamoe.errors import ConfigError, must_be
from megamoe.shape import MoeShape


class Path(StrEnum):
    """The four ways through a layer, in the order in which they are tried."""

    SMALL_M = "small_m"
    FIXED_SLOT = "fixed_slot"
    LARGE_M = "large_m"
    COMPACT = "compact"


class RowFormat(StrEnum):
    """Format of a result row on its way back: BF16, or FP8 with a scale per 32 and the weight already applied."""

    BF16 = "bf16"
    FP8 = "fp8"
    AUTO = "auto"


MAX_TOKENS_PER_RANK_LIMIT = 8192
"""Largest runtime capacity (the sources' large-M and compact runtimes)."""


MAX_ROWS = 2**31 - 1
"""Rows of a step are counted in 32 bits: on the wire, on the board and on devices."""
_COUNTS_OF_ROWS = (
    "fixed_slot_max",
    "large_m_min_tokens",
    "max_step_rows",
    "auto_fp8_min_rows",
    "auto_fp8_min_rows_of_expert",
)


def prev_power_of_2(value: int) -> int:
    """The largest power of two <= value; 0 for value < 1."""
    return 1 << (value.bit_length() - 1) if value >= 1 else 0


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a person chooses about paths. Raises ConfigError naming the field and the rule.

    max_tokens_per_rank: capacity C of compact, tokens per source rank; a power of two, at most 8192.
    fixed_slot_max: largest decode step (rows a rank) meant for fixed slots; capacity prev_power_of_2 of it, 0 = none.
        With K drafts a decode request carries K+1 rows: raise it when steps keep falling off the decode path.
    small_m_capacities: runtimes of small_m, each bounded by C; used when small_m_enabled.
    large_m_capacity: capacity of large_m's runtime; it is built when C is at least this.
    large_m_min_tokens: smallest agreed maximum of a prefill step that large_m takes (1024: the sources' crossover
        on 8 x MI355X, V4-Pro).
    *_enabled: starting policy; paths that are built can be switched on and off while running.
    max_step_rows: the most rows of one rank in one step; larger than C is cut into sub-steps (default 4 C).
    combine_row_format: bf16, fp8 or auto (small_m chooses per owner rank past the auto_fp8_* numbers).
    batch_invariant: a row's bits do not depend on its batch mates; forbids auto.
    num_compute_units: compute units of the device (gfx950's gate asks for 256 in 8 XCDs).
    gfx950_emulated: the emulated profile of gfx950, which accepts any validated shape.
    gfx950_kernels: folder of kernels compiled ahead of time; empty: they are compiled at first use.
    """

    shape: MoeShape
    backend: str = "cpu"
    max_tokens_per_rank: int = 8192
    fixed_slot_max: int = 255
    small_m_capacities: tuple[int, ...] = (256, 512)
    small_m_enabled: bool = False
    large_m_capacity: int = 8192
    large_m_enabled: bool = False
    large_m_min_tokens: int = 1024
    max_step_rows: int = 0
    combine_row_format: RowFormat = RowFormat.BF16
    auto_fp8_min_rows: int = 2048
    auto_fp8_min_rows_of_expert: int = 512
    batch_invariant: bool = False
    num_compute_units: int = 256
    gfx950_emulated: bool = False
    gfx950_kernels: str = ""

    def __post_init__(self) -> None:
        capacity = self.max_tokens_per_rank
        if not 1 <= capacity <= MAX_TOKENS_PER_RANK_LIMIT or capacity & (capacity - 1):
            raise ConfigError(
                must_be(
                    "max_tokens_per_rank",
                    f"a power of two from 1 to {MAX_TOKENS_PER_RANK_LIMIT}",
                    capacity,
                )
            )
        if self.backend not in BACKENDS:
            raise ConfigError(must_be("backend", f"one of {', '.join(BACKENDS)}", repr(self.backend)))
        for name in _COUNTS_OF_ROWS:
            if getattr(self, name) > MAX_ROWS:
                raise ConfigError(must_be(name, f"at most {MAX_ROWS}", getattr(self, name)))
        if self.fixed_slot_max < 0:
            raise ConfigError(must_be("fixed_slot_max", "at least 0", self.fixed_slot_max))
        for value in self.small_m_capacities:
            if value < 1 or value & (value - 1):
                raise ConfigError(must_be("small_m_capacities", "powers of two", value))
        if self.large_m_capacity < 1 or self.large_m_capacity & (self.large_m_capacity - 1):
            raise ConfigError(must_be("large_m_capacity", "a power of two", self.large_m_capacity))
        if list(self.small_m_capacities) != sorted(set(self.small_m_capacities)):
            raise ConfigError(
                must_be(
                    "small_m_capacities",
                    "ascending without repeats",
                    self.small_m_capacities,
                )
            )
        if self.large_m_min_tokens < 1:
            raise ConfigError(must_be("large_m_min_tokens", "at least 1", self.large_m_min_tokens))
        if self.max_step_rows and self.max_step_rows < capacity:
            raise ConfigError(
                must_be(
                    "max_step_rows",
                    f"at least max_tokens_per_rank = {capacity} (or 0)",
                    self.max_step_rows,
                )
            )
        if self.batch_invariant and self.combine_row_format is RowFormat.AUTO:
            raise ConfigError(must_be("combine_row_format", "bf16 or fp8 with batch_invariant", "auto"))

    @property
    def step_rows_limit(self) -> int:
        """max_step_rows with its default of 4 x max_tokens_per_rank applied."""
        return self.max_step_rows or 4 * self.max_tokens_per_rank

    @property
    def max_sub_steps(self) -> int:
        """Sub-steps that the largest step is cut into; fixes how sequences map to epochs."""
        return -(-self.step_rows_limit // self.max_tokens_per_rank)

    def fingerprint(self) -> str:
        """Short digest of everything above: ranks that differ in it are refused at start."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


@dataclass(frozen=True, order=True)
class RuntimeSpec:
    """One runtime that is built: its path and the most tokens per source rank that it serves."""

    path: Path
    capacity: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The runtimes of a deployment, and for each path that is missing the reason."""

    deployment: Deployment
    runtimes: tuple[RuntimeSpec, ...]
    reasons: dict[Path, str] = field(default_factory=dict)

    @property
    def shape(self) -> MoeShape:
        return self.deployment.shape

    def capacities(self, path: Path) -> tuple[int, ...]:
        """Capacities of the runtimes of `path`, ascending; empty if it is not built."""
        return tuple(sorted(spec.capacity for spec in self.runtimes if spec.path is path))


def plan_bundle(deployment: Deployment) -> Bundle:
    """The runtimes that `deployment` builds. compact is always among them. Allocates nothing."""
    capacity = deployment.max_tokens_per_rank
    runtimes = [RuntimeSpec(Path.COMPACT, capacity)]
    reasons: dict[Path, str] = {}
    gate = BACKENDS[deployment.backend](deployment)

    if gate:
        reasons = dict.fromkeys((Path.SMALL_M, Path.FIXED_SLOT, Path.LARGE_M), gate)
        return Bundle(deployment=deployment, runtimes=tuple(runtimes), reasons=reasons)
    small = sorted({min(value, capacity) for value in deployment.small_m_capacities})
    runtimes += [RuntimeSpec(Path.SMALL_M, value) for value in small]
    if not small:
        reasons[Path.SMALL_M] = "small_m_capacities is empty"
    slots = min(prev_power_of_2(deployment.fixed_slot_max), capacity)
    if slots:
        runtimes.append(RuntimeSpec(Path.FIXED_SLOT, slots))
    else:
        reasons[Path.FIXED_SLOT] = "fixed_slot_max is 0"
    least = deployment.large_m_min_tokens
    if least > deployment.large_m_capacity:
        reasons[Path.LARGE_M] = (
            f"no step would take it: large_m_min_tokens {least} is above large_m_capacity {deployment.large_m_capacity}"
        )
    elif capacity >= deployment.large_m_capacity:
        runtimes.append(RuntimeSpec(Path.LARGE_M, deployment.large_m_capacity))
    else:
        reasons[Path.LARGE_M] = (
            f"large_m needs max_tokens_per_rank of at least {deployment.large_m_capacity}, got {capacity}"
        )
    return Bundle(deployment=deployment, runtimes=tuple(runtimes), reasons=reasons)


def _any_shape(deployment: Deployment) -> str | None:
    return None


def _gfx950_gate(deployment: Deployment) -> str | None:
    """The sources' gate of the tuned kernels (fixed_slot, small_m, large_m); None if it opens."""
    if deployment.gfx950_emulated:
        return None
    shape = deployment.shape
    wanted: tuple[tuple[str, object, object], ...] = (
        ("num_ranks", 8, shape.num_ranks),
        ("fused_shared_expert", False, shape.fused_shared_expert),
        ("hidden", 7168, shape.hidden),
        ("intermediate", 3072, shape.intermediate),
        ("num_experts", 384, shape.num_experts),
        ("num_topk", 6, shape.num_topk),
        ("quant", "a8w4", shape.quant),
        ("activation", "silu", shape.activation),
        ("num_compute_units", 256, deployment.num_compute_units),
    )
    for name, need, got in wanted:
        if need != got:
            return f"on gfx950 {must_be(name, need, got)}"
    return None


BACKENDS = {"cpu": _any_shape, "hopper": _any_shape, "gfx950": _gfx950_gate}
"""Backends by name, each with its gate: a reason why only compact is built, or None."""
