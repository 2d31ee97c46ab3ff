"""Every metric name and bucket, and how a step is recorded; the only importer of prometheus_client.

Owns: one registry per rank (label `rank`), observed on its own thread so that the device thread only hands a value
over, and served over HTTP. Group-level series (`megamoe_group_*`) are recorded by rank 0 only. Refuses labels per
layer, session or request: the number of series is fixed when the rank starts, whatever callers do.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, MetricsHandler
from prometheus_client.core import Metric

from megamoe import (
    Bundle,
    Path,
    PathPolicy,
    Phase,
    SharedSegment,
    StageTimes,
    StepPlan,
    SubStep,
    SubStepReport,
    is_fall_off,
    plan_layout,
)
from megamoe.errors import ERROR_BY_CODE, ConfigError
from service.net.http_server import HttpServer

SECONDS_BUCKETS = tuple(
    round(digit * 10.0**power, 9)
    for power in range(-5, 2)
    for digit in (1, 2, 5)
    if 5e-5 <= digit * 10.0**power <= 10
)
"""50 us to 10 s in steps of 2 to 2.5: from one small_m launch to the step timeout."""
ROWS_BUCKETS = tuple(float(1 << power) for power in range(16))
"""1 to 32,768 rows: the largest step of the largest profile."""
_PHASES = (Phase.PREFILL, Phase.DECODE)
_STAGES = StageTimes.stages()
_OBSERVE_PERIOD_S = 0.1

T = TypeVar("T")


class Balance:
    """Rows that each rank received, counted up in shared memory, so that rank 0 can say how even they are.

    Each rank writes its own 64-bit word only; a word is read whole.
    """

    def __init__(self, segment: SharedSegment, num_ranks: int) -> None:
        self._segment = segment
        self._words = segment.buf[: 8 * num_ranks].cast("Q")
        self._seen = [0] * num_ranks

    @classmethod
    def open(cls, group_name: str, rank: int, num_ranks: int, *, timeout_s: float) -> Balance:
        """Rank 0 makes it, the others wait for it."""
        name = f"{group_name}-balance"
        if rank == 0:
            return cls(SharedSegment.create(name, 8 * num_ranks), num_ranks)
        return cls(SharedSegment.attach(name, timeout_s=timeout_s), num_ranks)

    def add(self, rank: int, num_rows: int) -> None:
        self._words[rank] += num_rows

    def balancedness(self) -> float | None:
        """Mean over max, over ranks, of the rows received since the last call; None if there were none."""
        now = list(self._words)
        since = [have - had for have, had in zip(now, self._seen)]
        if max(since) <= 0:
            return None
        self._seen = now
        return sum(since) / len(since) / max(since)

    def close(self) -> None:
        """Drop the mapping, and the name. Safe to call twice."""
        self._words.release()
        self._segment.close()
        self._segment.unlink()


class RankMetrics:
    """The metrics of one rank. `record_*` may be called from any thread and only enqueue."""

    def __init__(self, *, rank: int, model_name: str, bundle: Bundle, balance: Balance | None = None) -> None:
        self.rank = rank
        self.registry = CollectorRegistry()
        self._bundle = bundle
        self._balance = balance
        self._layout = plan_layout(bundle)
        self._most_heap = 0
        self._most_rows: dict[Path, int] = {}
        self._sums: collections.defaultdict[Counter, int] = collections.defaultdict(int)
        self._known_fall_off: tuple[StepPlan | None, PathPolicy | None, int, bool] = (None, None, 0, False)
        self._labels = {"rank": str(rank), "model_name": model_name}
        self._last_path: Path | None = None
        self._balance_at = 0.0
        self._server: HttpServer | None = None
        self._todo: collections.deque[tuple[Any, ...]] = collections.deque()
        self._wanted = threading.Event()
        self._observing = threading.Lock()
        self._is_closed = False
        self.registry.register(self)
        self._define()
        self._thread = threading.Thread(target=self._observe, name="metrics", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------ names

    def _define(self) -> None:
        paths = [{"path": str(path)} for path in Path]
        path_phases = [{"path": str(path), "phase": str(phase)} for path in Path for phase in _PHASES]
        path_stages = [{"path": str(path), "stage": s} for path in Path for s in _STAGES]
        phases = [{"phase": str(phase)} for phase in Phase]
        codes = [{"code": code} for code in ERROR_BY_CODE]

        seconds: dict[str, Any] = {"buckets": SECONDS_BUCKETS}
        rows: dict[str, Any] = {"buckets": ROWS_BUCKETS}
        self._latency = self._metric(
            Histogram, "layer_latency_seconds", "Time of one executed sub-step.", path_phases, **seconds
        )
        self._stage = self._metric(
            Histogram, "stage_latency_seconds", "Time of one stage of a sub-step.", path_stages, **seconds
        )
        self._wait = self._metric(
            Histogram, "barrier_wait_seconds", "Time of a sub-step spent waiting for peers.", **seconds
        )
        self._sub_steps = self._metric(Counter, "sub_steps", "Executed sub-steps.", path_phases)
        self._calls = self._metric(Counter, "layer_calls", "Layer calls executed.")
        self._rows = self._metric(Counter, "rows", "Rows (tokens) of this rank's callers.", paths)
        self._received = self._metric(Counter, "rows_received", "Routed rows computed here.", paths)
        self._padded = self._metric(Counter, "padded_rows", "Rows of GEMM tiles that belong to nobody.")
        self._dropped = self._metric(Counter, "dropped_slots", "Slots with expert id -1.")
        self._bytes_sent = self._metric(Counter, "bytes_sent", "Bytes written to peers.", paths)
        self._errors = self._metric(Counter, "errors", "Requests answered with an error.", codes)

        self.in_flight = self._metric(Gauge, "in_flight_requests", "Requests taken and not answered.")[()]
        self.queue_depth = self._metric(Gauge, "queue_depth", "Requests waiting in the rank's rings.")[()]
        self._progress = self._metric(
            Gauge, "last_progress_timestamp_seconds", "Unix time of the step loop's last progress."
        )[()]
        self.generation = self._metric(Gauge, "generation", "Incarnation of the group.")[()]
        self.weights_version = self._metric(
            Gauge, "weights_version", "Tells weights apart; the same on all ranks."
        )[()]
        self._policy_version = self._metric(Gauge, "policy_version", "Policy of the last plan.")[()]
        self.heap_bytes = self._metric(Gauge, "heap_bytes", "Size of this rank's symmetric heap.")[()]
        self.heap_high_water = self._metric(
            Gauge, "heap_high_water_bytes", "Most bytes of the heap that any step so far has filled."
        )[()]
        self.ready = self._metric(Gauge, "ready", "1 when steps make progress on all ranks.")[()]
        self._path_enabled = self._metric(Gauge, "path_enabled", "1 where a path may serve.", paths)

        self.heap_bytes.set(self._layout.num_bytes)

        if self.rank != 0:
            return
        switches = [{"from_path": str(a), "to_path": str(b)} for a in Path for b in Path if a is not b]
        self._group_calls = self._metric(Counter, "group_layer_calls", "Layer calls of the group.")[()]
        self._group_steps = self._metric(Counter, "group_steps", "Agreed steps.", phases)
        self._group_max = self._metric(
            Histogram, "group_rows_max", "Agreed maximum of rows a rank, per step.", **rows
        )[()]
        self._group_mean = self._metric(
            Histogram, "group_rows_mean", "Mean of rows a rank, per step.", **rows
        )[()]
        self._group_switches = self._metric(
            Counter, "group_path_switches", "Sub-steps on another path than the one before.", switches
        )
        self._group_fall_offs = self._metric(
            Counter, "group_decode_fall_offs", "Decode sub-steps above every enabled decode capacity."
        )[()]
        self._group_balance = self._metric(
            Gauge, "group_expert_balancedness", "Mean over max, over ranks, of routed rows received."
        )[()]
        self._group_balance.set(1.0)

    def _metric(
        self,
        kind: Callable[..., T],
        name: str,
        text: str,
        series: list[dict[str, str]] | None = None,
        **more: Any,
    ) -> dict[tuple[str, ...], T]:
        """Define a metric and all of its series at zero: {label values: series}; () without labels of its own."""
        labels = list(series[0]) if series else []
        family: Any = kind(f"megamoe_{name}", text, (*self._labels, *labels), registry=self.registry, **more)
        return {tuple(own.values()): family.labels(**self._labels, **own) for own in series or [{}]}

    # ------------------------------------------------------------------------------ recording

    def record_plan(self, plan: StepPlan, policy: PathPolicy) -> None:
        """A step was agreed."""
        self._todo.append((self._observe_plan, plan, policy))

    def record_step(self, plan: StepPlan, policy: PathPolicy, reports: tuple[SubStepReport, ...]) -> None:
        """One layer call of a step was executed, in these sub-steps."""
        self._todo.append((self._observe_step, plan, policy, reports))

    def record_error(self, code: str) -> None:
        """A request was answered with an error of this code."""
        series = self._errors.get((code,), self._errors[("internal",)])
        self._todo.append((series.inc,))

    def record_policy(self, policy: PathPolicy) -> None:
        """The newest policy of this rank; path_enabled says what is built AND switched on."""
        for path in Path:
            on = policy.allows(path) and bool(self._bundle.capacities(path))
            self._path_enabled[(str(path),)].set(on)

    def watch(self, values: Mapping[str, Callable[[], float]]) -> None:
        """Read gauges at scrape time: queue_depth, in_flight, last_progress (Unix seconds), ready, heap_high_water."""
        gauges = {
            "queue_depth": self.queue_depth,
            "in_flight": self.in_flight,
            "last_progress": self._progress,
            "ready": self.ready,
            "heap_high_water": self.heap_high_water,
        }
        for name, function in values.items():
            gauges[name].set_function(function)

    def _observe_plan(self, plan: StepPlan, policy: PathPolicy) -> None:
        self._policy_version.set(plan.policy_version)
        self.record_policy(policy)
        if self.rank == 0:
            self._group_steps[(str(plan.phase),)].inc()
            self._group_max.observe(plan.max_rows)
            self._group_mean.observe(plan.total_rows / plan.num_ranks)

    def _observe_step(self, plan: StepPlan, policy: PathPolicy, reports: tuple[SubStepReport, ...]) -> None:
        """Counters are only summed up here, and brought to their series once a batch: that costs a tenth."""
        sums = self._sums
        sums[self._calls[()]] += 1
        if self.rank == 0:
            sums[self._group_calls] += 1
        for idx, report in enumerate(reports):
            path, _, rows, _, counters, times = report
            kind = (path, plan.phase)
            sums[self._sub_steps[kind]] += 1
            self._latency[kind].observe(times.total_us * 1e-6)
            for stage, spent_us in zip(_STAGES, times):
                if spent_us:
                    self._stage[(path, stage)].observe(spent_us * 1e-6)
            self._wait[()].observe(times.wait_us * 1e-6)
            sums[self._rows[(path,)]] += rows[self.rank]
            sums[self._received[(path,)]] += counters.rows_received
            sums[self._bytes_sent[(path,)]] += counters.bytes_sent
            sums[self._padded[()]] += counters.padded_rows
            sums[self._dropped[()]] += counters.dropped_slots
            self._observe_heap(path, max(rows))
            if self._balance:
                self._balance.add(self.rank, counters.rows_received)
            if self.rank == 0:
                self._observe_group(plan, policy, idx, report)

    def _observe_heap(self, path: Path, max_rows: int) -> None:
        """Bytes of the regions that these row counts fill, out of the worst case that the path is sized for."""
        if max_rows <= self._most_rows.get(path, -1):
            return
        self._most_rows[path] = max_rows
        used = self._layout.path_bytes(path) * max_rows // self._bundle.capacities(path)[-1]
        if used > self._most_heap:
            self._most_heap = used
            self.heap_high_water.set(used)

    def _observe_group(self, plan: StepPlan, policy: PathPolicy, idx: int, report: SubStepReport) -> None:
        if self._last_path not in (None, report.path):
            self._group_switches[(str(self._last_path), str(report.path))].inc()
        self._last_path = report.path
        if self._fell_off(plan, policy, idx, report):
            self._group_fall_offs.inc()
        if self._balance and time.monotonic() - self._balance_at > 1.0:
            self._balance_at = time.monotonic()
            value = self._balance.balancedness()
            if value is not None:
                self._group_balance.set(value)

    def _fell_off(self, plan: StepPlan, policy: PathPolicy, idx: int, report: SubStepReport) -> bool:
        """Found out once for the layers of a step, which have the same plan and policy."""
        known_plan, known_policy, known_idx, fell_off = self._known_fall_off
        if plan is known_plan and policy is known_policy and idx == known_idx:
            return fell_off
        rows = report.num_rows_per_rank
        sub_step = SubStep(
            sub_step_idx=idx,
            start_row=0,
            stop_row=max(rows),
            path=report.path,
            runtime_capacity=report.runtime_capacity,
            num_rows_per_rank=rows,
        )
        fell_off = is_fall_off(sub_step, plan.phase, self._bundle, policy)
        self._known_fall_off = plan, policy, idx, fell_off
        return fell_off

    # ------------------------------------------------------------------------------ life

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics; returns the port (a free one for 0). Raises ConfigError when it is taken."""
        try:
            self._server = HttpServer(
                host, port, MetricsHandler.factory(self.registry), f"metrics {self.rank}"
            )
        except OSError as error:
            raise ConfigError(
                f"metrics_port {host}:{port} must be free to listen on, got: {error.strerror or error}"
            ) from error
        return int(self._server.start().server_port)

    def flush(self) -> None:
        """Return when everything recorded before is observed."""
        with self._observing:
            while self._todo:
                observe, *values = self._todo.popleft()
                observe(*values)
            for series, value in self._sums.items():
                series.inc(value)
            self._sums.clear()

    def collect(self) -> Iterable[Metric]:
        """Part of every scrape, before the series: it must not be older than the last call."""
        self.flush()
        return ()

    def describe(self) -> Iterable[Metric]:
        return ()

    def close(self) -> None:
        """Observe what is left and stop serving. Safe to call twice."""
        self._is_closed = True
        self._wanted.set()
        self._thread.join(5.0)
        if self._server is not None:
            self._server.close()
            self._server = None

    def _observe(self) -> None:
        """Now and then: a thread that woke for every call would take the interpreter from the device thread."""
        while not self._is_closed:
            self._wanted.wait(_OBSERVE_PERIOD_S)
            self.flush()
