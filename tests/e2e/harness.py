"""A real service as a process, and hands to reach into its streams rank by rank."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

from megamoe import LayerWeights, MoeBatch, MoeShape, PlanId, SubStepReport, random_layer_weights, reference
from megamoe.reference import quantized_moe, relative_l2, tolerance
from service.client import AsyncMoeGroup
from service.client.stream import Reply
from service.client.values import Rows, add_rows, num_rows_of, phases_of
from service.config import load_config
from service.net import codec, wire
from service.pb import moe_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
"""Of processes that tests start: this tree before whatever this process was given."""
CONFIG = load_config(env=False)
SHAPE = CONFIG.moe_shape
STEP_TIMEOUT_S = 4.0
LEASE_TIMEOUT_S = 3.0
settings = [
    f"--step-timeout-s={STEP_TIMEOUT_S}",
    f"--lease-timeout-s={LEASE_TIMEOUT_S}",
    "--port=0",
    "--http-port=0",
]
"""Of every service here; conftest adds the backend."""
START_TIMEOUT_S = 180.0


def listening(process: psutil.Process) -> list[Any]:
    """Sockets on which a process listens; none if it has ended."""
    with contextlib.suppress(psutil.Error):
        return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return []


def gone(processes: list[psutil.Process], timeout_s: float = 20.0) -> bool:
    """Whether processes have ended within the time."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


class ServiceProcess:
    """`megamoe serve` as a user starts it. Addresses are what it printed."""

    def __init__(self, *options: str, launcher: str = "local") -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_")}
        env["PYTHONPATH"] = PYTHONPATH
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", f"--launcher={launcher}", *settings, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            cwd=ROOT,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                self._queue.put(line)

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """The next printed line that matches."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._queue.get(timeout=0.2)
            except queue.Empty:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    text = "\n".join(self.lines[-30:])
                    raise AssertionError(f"no line like {pattern!r} from the service:\n{text}") from None
                continue
            if re.search(pattern, line):
                return line

    def wait_up(self) -> ServiceProcess:
        """Until it says that it is ready."""
        self.wait_for("megamoe is ready")
        self.front = self.wait_for(r"^  front ").split()[1]
        self.http = self.wait_for(r"^  http ").split()[1].removesuffix("/sd")
        self.prefix = self.wait_for(r"^  memory ").split()[1].removeprefix("/dev/shm/").removesuffix("-*")
        return self

    @property
    def rank_pids(self) -> list[int]:
        """Rank processes in rank order: whoever listens where rank r is to be scraped, whatever started it."""
        pid_of_port = {
            connection.laddr.port: process.pid
            for process in self.family()
            for connection in listening(process)
        }
        status, text = self.get("/sd")
        assert status == 200, text
        [group] = json.loads(text)
        return [pid_of_port[int(address.rpartition(":")[2])] for address in group["targets"]]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def segments(self) -> list[str]:
        """Shared memory of this service, of any generation."""
        service = self.prefix.rsplit("-", 1)[0]
        return sorted(path.name for path in Path("/dev/shm").glob(service + "*"))

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Ask it to stop; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for child in self.family():
                child.kill()
            self.process.kill()
            raise AssertionError("the service did not stop:\n" + "\n".join(self.lines[-30:])) from None

    def get(self, path: str) -> tuple[int, str]:
        """(status, text) of an HTTP GET on the front."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def running(*options: str, launcher: str = "local") -> Iterator[ServiceProcess]:
    service = ServiceProcess(*options, launcher=launcher)
    try:
        yield service.wait_up()
    finally:
        service.stop()


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(addresses: Sequence[str]) -> Samples:
    """All samples of all ranks."""
    samples: Samples = {}
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    samples[(sample.name, frozenset(sample.labels.items()))] = sample.value
    return samples


# ---------------------------------------------------------------------------------------------- rows and numbers


@cache
def weights_of(layer_idx: int) -> LayerWeights:
    """All experts of a layer as the service bound them (weights_seed 0)."""
    return random_layer_weights(SHAPE, seed=0, layer_idx=layer_idx)


def rows(num_rows: int, seed: int = 0, *, shape: MoeShape = SHAPE) -> tuple[torch.Tensor, ...]:
    """Random rows with some -1 slots."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, shape.num_experts, (num_rows, shape.num_topk), generator=generator)
    return (
        torch.randn(num_rows, shape.hidden, generator=generator).to(torch.bfloat16),
        ids.to(torch.int32),
        torch.rand(num_rows, shape.num_topk, generator=generator),
    )


def group_rows(counts: Sequence[int], seed: int = 0) -> list[Rows]:
    """Rows for every rank; None where there are none."""
    return [rows(n, seed * 100 + rank) if n else None for rank, n in enumerate(counts)]


def check_numbers(
    got: torch.Tensor, batch: Sequence[torch.Tensor], layer_idx: int, reports: Sequence[SubStepReport]
) -> None:
    """Relative L2 of at most 1e-2 (twice that below 64 rows) against the quantization-aware oracle."""
    formats = reports[0].row_format_per_rank
    want = quantized_moe(MoeBatch.of(SHAPE, *batch), weights_of(layer_idx), SHAPE, formats)
    error = relative_l2(got, want)
    assert error <= tolerance(1e-2, got.shape[0]), f"relative L2 {error:.3g} on {reports[0].path}"


assert reference.__name__ == "megamoe.reference"

# ---------------------------------------------------------------------------------------------- raw exchanges

Result = Reply | BaseException


async def on_all(group: AsyncMoeGroup, requests: dict[int, Any], timeout_s: float = 15.0) -> dict[int, Any]:
    """Send one request to each of some ranks; {rank: reply or exception}."""
    calls = []
    for rank, item in requests.items():
        message, parts = item if isinstance(item, tuple) else (item, ())
        calls.append(group.streams[rank].request(message, parts, timeout_s=timeout_s))
    return dict(zip(requests, await asyncio.gather(*calls, return_exceptions=True)))


def intent(
    group: AsyncMoeGroup,
    plan_id: PlanId,
    counts: Sequence[int],
    rank: int,
    *,
    phase: str = "decode",
    announce: bool = True,
    **change: Any,
) -> pb.ForwardRequest:
    """A StepIntent of one rank, with any field changed."""
    message = pb.StepIntent(
        lease_serial=group.lease_serial,
        plan_id=codec.plan_id_to_pb(plan_id),
        num_rows=counts[rank],
        phase=codec.enum_to_pb(phases_of(phase, counts)[rank]),
        num_rows_per_rank=list(counts) if announce else [],
    )
    for name, value in change.items():
        if name == "num_rows_per_rank":
            message.num_rows_per_rank[:] = value
        elif name == "wire_phase":
            message.phase = value
        else:
            setattr(message, name, value)
    return pb.ForwardRequest(step_intent=message)


def call(
    group: AsyncMoeGroup, plan_id: PlanId, layer_idx: int, sequence: int, batch: Rows, **change: Any
) -> tuple[pb.ForwardRequest, tuple[wire.Buffer, ...]]:
    """A LayerCall of one rank, with any field changed."""
    writer = wire.PayloadWriter()
    message = pb.LayerCall(
        lease_serial=group.lease_serial,
        plan_id=codec.plan_id_to_pb(plan_id),
        layer_idx=layer_idx,
        sequence=sequence,
        tensors=add_rows(writer, batch),
    )
    for name, value in change.items():
        setattr(message, name, value)
    return pb.ForwardRequest(layer_call=message), tuple(writer.parts)


def next_plan_id(group: AsyncMoeGroup, micro_batch_idx: int = 0) -> PlanId:
    plan_id = PlanId(group.generation, group._next_step_id, micro_batch_idx)
    group._next_step_id += 1
    return plan_id


def take_sequence(group: AsyncMoeGroup) -> int:
    sequence = group.next_sequence
    group.next_sequence += 1
    return sequence


async def works(group: AsyncMoeGroup) -> None:
    """The group is not poisoned: a small step goes through and its numbers are right."""
    counts = [3, 0, 1, 0, 0, 2, 0, 4]
    batches = group_rows(counts, seed=5)
    async with group.step(counts) as step:
        outs = await step.layer(0, batches)
    for rank, batch in enumerate(batches):
        if batch is not None and num_rows_of(batch):
            check_numbers(outs.hidden_states[rank], batch, 0, outs.reports_per_rank[rank])  # type: ignore[arg-type]
