"""A MoE service that computes nothing: it takes time on a virtual clock, records calls, and fails when told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from loadgen.clock import VirtualClock
from loadgen.moe.rows import RankRows
from loadgen.moe.tier import LayerOutcome, SubStepSeen, TierInfo
from megamoe import MoeShape, preset
from megamoe.errors import MegaMoeError

CAPACITIES = (("small_m", 16), ("small_m", 32), ("fixed_slot", 64))


def demo_info(num_ranks: int = 8, num_layers: int = 4, shape: MoeShape | None = None) -> TierInfo:
    base = shape or preset("demo")
    fields = {name: getattr(base, name) for name in MoeShape.__dataclass_fields__}
    fields |= {"num_ranks": num_ranks, "num_layers": num_layers}
    return TierInfo(
        shape=MoeShape(**fields),
        model_name="fake",
        profile="demo",
        backend="fake",
        generation=1,
        max_tokens_per_rank=512,
        max_step_rows=2048,
    )


class FakeTier:
    """layer_s(max_rows): seconds of one layer call. fail(step_idx, layer_idx): the error to raise, if any."""

    def __init__(
        self,
        clock: VirtualClock,
        info: TierInfo | None = None,
        layer_s: Callable[[int], float] = lambda max_rows: 0.010,
        fail: Callable[[int, int], MegaMoeError | None] = lambda step_idx, layer_idx: None,
    ) -> None:
        self.info = info or demo_info()
        self.clock = clock
        self.layer_s = layer_s
        self.fail = fail
        self.renew_error: MegaMoeError | None = None
        self.num_renewals = 0
        self.steps: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
        self.calls: list[tuple[int, int]] = []
        self.bad_batches: list[str] = []

    async def renew(self) -> None:
        self.num_renewals += 1
        if self.renew_error is not None:
            raise self.renew_error

    @asynccontextmanager
    async def step(
        self, *, num_rows_per_rank: Sequence[int], phase: Sequence[str], micro_batch_idx: int = 0
    ) -> AsyncIterator[FakeStep]:
        self.steps.append((tuple(num_rows_per_rank), tuple(phase)))
        yield FakeStep(self, len(self.steps) - 1)


class FakeStep:
    def __init__(self, tier: FakeTier, step_idx: int) -> None:
        self.tier = tier
        self.step_idx = step_idx
        self.last_layer = -1

    async def layer(self, layer_idx: int, batches: Sequence[RankRows | None]) -> LayerOutcome:
        tier = self.tier
        rows, phases = tier.steps[self.step_idx]
        error = tier.fail(self.step_idx, layer_idx)
        if error is not None:
            raise error
        if layer_idx <= self.last_layer:
            tier.bad_batches.append(f"layer {layer_idx} after {self.last_layer}")
        self.last_layer = layer_idx
        self._check(rows, batches)
        max_rows = max(rows)
        took = tier.layer_s(max_rows)
        tier.clock.advance(took)
        tier.calls.append((self.step_idx, layer_idx))
        path, capacity = next(
            ((path, capacity) for path, capacity in CAPACITIES if max_rows <= capacity),
            ("large_m", 512) if "prefill" in phases and max_rows >= 128 else ("compact", 512),
        )
        times = {rank: took * 1e6 * 0.9 for rank, count in enumerate(rows) if count}
        piece = SubStepSeen(
            path=path,
            runtime_capacity=capacity,
            max_rows=max_rows,
            total_us_per_rank=times,
            stages_us={"gemm1": took * 4e5},
        )
        return LayerOutcome(num_rows_per_rank=rows, sub_steps=(piece,))

    def _check(self, rows: tuple[int, ...], batches: Sequence[RankRows | None]) -> None:
        for rank, (count, batch) in enumerate(zip(rows, batches, strict=True)):
            got = 0 if batch is None else batch[0].shape[0]
            shape = self.tier.info.shape
            if got != count:
                self.tier.bad_batches.append(f"rank {rank}: {got} rows, planned {count}")
            if batch is not None and (
                batch[0].shape[1] != shape.hidden
                or batch[1].shape != (count, shape.num_topk)
                or batch[2].shape != (count, shape.num_topk)
                or int(batch[1].max()) >= shape.num_experts
                or int(batch[1].min()) < 0
            ):
                self.tier.bad_batches.append(f"rank {rank}: wrong tensors")
