"""Callers on the service's host: rings in shared memory, rows in memory that they lend, and what becomes of both.

One service of two ranks for all of it; callers are threads, or processes where one is to be killed.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from loadgen.moe.live import LiveTier
from megamoe import MoeBatch, MoeShape, SharedMemory, random_layer_weights
from megamoe.errors import (
    InvalidArgumentError,
    LeaseHeldError,
    MegaMoeError,
    OverloadedError,
    PeerTimeoutError,
    StaleCallError,
    UnavailableError,
)
from megamoe.mx import quantize_mxfp8
from megamoe.reference import quantized_moe, relative_l2, tolerance
from service.cli.bench_calls import Settings, print_bench_calls
from service.client import Front, MoeGroup, MoeRank
from service.client.rank_step import StartedLayer
from service.pb import moe_pb2 as pb
from service.ring import layout
from tests.e2e.harness import ROOT, ServiceProcess, gone, rows, running

SHAPE = MoeShape(
    name="two",
    hidden=64,
    intermediate=32,
    num_experts=8,
    num_topk=2,
    num_ranks=2,
    num_layers=2,
    swiglu_limit=10.0,
)
STEP_TIMEOUT_S = 4.0
MAX_RINGS = 2


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    config = {
        "shape": {name: getattr(SHAPE, name) for name in MoeShape.__dataclass_fields__},
        "max_colocated_rings": MAX_RINGS,
    }
    path = tmp_path_factory.mktemp("two") / "config.json"
    path.write_text(json.dumps(config))
    path = path.rename(path.with_suffix(".yaml"))
    with running(f"--config={path}") as started:
        yield started
        assert started.stop() == 0
    assert not started.segments()


@pytest.fixture
def front(service: ServiceProcess) -> Iterator[str]:
    """The service's address; afterwards it still serves, and rings and lent memory of the test are gone."""
    yield service.front
    both(service.front, "grpc", lambda moe: layer(moe, 3))
    deadline = time.monotonic() + 10
    while (left := rings(service) + lent_segments()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def rings(service: ServiceProcess) -> list[str]:
    """Rings of co-located callers: those of the service's own have the numbers 0 and 1."""
    return [name for name in service.segments() if "-ring-" in name and int(name.rpartition("-")[2]) > 1]


def lent_segments() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"megamoe-memory-{os.getpid()}-*")]


T = TypeVar("T")


def both(
    front: str, transport: str | tuple[str, str], work: Callable[[MoeRank], T]
) -> list[T | MegaMoeError]:
    """One caller thread a rank; both are connected before either works. Their results or errors, in rank order."""
    ways = (transport, transport) if isinstance(transport, str) else transport
    barrier, holder = threading.Barrier(2), f"tests-{time.monotonic_ns()}"

    def one(rank: int) -> T | MegaMoeError:
        with MoeRank.connect(front, rank=rank, holder=holder, transport=ways[rank], max_rows=1024) as moe:
            barrier.wait(20)
            try:
                return work(moe)
            except MegaMoeError as error:
                return error
            finally:
                barrier.wait(20)

    with ThreadPoolExecutor(2) as pool:
        return [future.result(60) for future in [pool.submit(one, rank) for rank in range(2)]]


def in_memory(memory: SharedMemory, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    return memory.tensor(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)


def layer(moe: MoeRank, num_rows: int, layer_idx: int = 1) -> torch.Tensor:
    """One step with one layer; the rows depend on the rank and their number alone."""
    x, ids, weights = rows(num_rows, seed=10 * num_rows + moe.rank, shape=SHAPE)
    out = None
    if moe.memory_kinds:
        memory = moe.share(4 * x.numel() + 64)
        x, out = in_memory(memory, x, 0), memory.tensor(-(-x.numel() * 2 // 16) * 16, tuple(x.shape), x.dtype)
    with moe.step(num_rows) as step:
        assert step.plan.num_rows_per_rank[moe.rank] == num_rows
        output = step.layer(layer_idx, x, ids, weights, out=out)
    assert out is None or output.hidden_states is out
    assert output.total_us > 0 or not any(step.plan.num_rows_per_rank)
    assert [report.num_rows_per_rank for report in output.sub_steps] == [
        sub_step.num_rows_per_rank for sub_step in step.sub_steps
    ]
    return output.hidden_states.clone()


def oracle(num_rows: int, rank: int, layer_idx: int = 1) -> torch.Tensor:
    batch = MoeBatch.of(SHAPE, *rows(num_rows, seed=10 * num_rows + rank, shape=SHAPE))
    return quantized_moe(batch, random_layer_weights(SHAPE, seed=0, layer_idx=layer_idx), SHAPE)


def test_every_transport_gives_the_same_bits(front: str) -> None:
    """One row, decode and prefill sizes, a step that is cut, and ranks without rows."""
    for num_rows in (1, 16, 130, 600):
        got = {
            way: both(front, way, lambda moe, n=num_rows: layer(moe, n)) for way in ("grpc", "ring", "memory")
        }
        mixed = both(front, ("ring", "grpc"), lambda moe, n=num_rows: layer(moe, n))
        for rank in range(2):
            want = oracle(num_rows, rank)
            assert relative_l2(got["grpc"][rank], want) <= tolerance(1e-2, num_rows)
            for outs in (got["ring"], got["memory"], mixed):
                assert torch.equal(outs[rank], got["grpc"][rank])
    for way in ("grpc", "ring", "memory"):
        uneven = both(front, way, lambda moe: layer(moe, 4 * moe.rank))
        assert uneven[0].shape == (0, SHAPE.hidden)
        assert relative_l2(uneven[1], oracle(4, 1)) <= tolerance(1e-2, 4)
        nothing = both(front, way, lambda moe: layer(moe, 0))
        assert not isinstance(nothing[0], MegaMoeError), nothing
        assert [out.shape for out in nothing] == [(0, SHAPE.hidden)] * 2


def test_quantized_rows(front: str) -> None:
    def quantized(moe: MoeRank) -> torch.Tensor:
        x, ids, weights = rows(9, seed=moe.rank, shape=SHAPE)
        codes, scales = quantize_mxfp8(x)
        out = None
        if moe.memory_kinds:
            memory = moe.share(8192)
            codes, scales = in_memory(memory, codes, 0), in_memory(memory, scales, 1024)
            out = memory.tensor(4096, (9, SHAPE.hidden), torch.bfloat16)
        with moe.step((9, 9), dtype="mxfp8") as step:
            return step.layer(0, codes, ids, weights, scales, out=out).hidden_states.clone()

    got = [both(front, way, quantized) for way in ("grpc", "ring", "memory")]
    for outs in got[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(outs, got[0]))


def test_several_micro_batches_in_flight(front: str) -> None:
    """Layers of two steps alternate in one order on all ranks; results come back in any."""

    def work(moe: MoeRank) -> list[torch.Tensor]:
        batches = [rows(n, seed=n + moe.rank, shape=SHAPE) for n in (3, 20)]
        results = []
        for _ in range(10):
            with moe.step(3) as first, moe.step(20, "prefill", micro_batch_idx=1) as second:
                started = [
                    step.start_layer(layer_idx, *batch)
                    for layer_idx in range(2)
                    for step, batch in zip((first, second), batches)
                ]
                results.append([call.result().hidden_states for call in reversed(started)])
        assert all(torch.equal(a, b) for again in results for a, b in zip(again, results[0]))
        return results[0]

    ring, grpc = both(front, "ring", work), both(front, "grpc", work)
    for ours, theirs in zip(ring, grpc):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_a_refused_call_is_the_same_error_everywhere_and_the_step_goes_on(front: str) -> None:
    def work(moe: MoeRank) -> list[str]:
        x, ids, weights = rows(3, seed=moe.rank, shape=SHAPE)
        said = []
        bad = ids.clone()
        bad[2, 1] = 99 if moe.rank else ids[2, 1]
        with moe.step(3) as step:
            for call in (lambda: step.layer(0, x, bad, weights), lambda: step.layer(7, x, ids, weights)):
                with pytest.raises(InvalidArgumentError) as refused:
                    call()
                said.append(str(refused.value))
            good = step.layer(1, x, ids, weights)
            with pytest.raises(StaleCallError) as stale:
                step.layer(0, x, ids, weights)
            said.append(str(stale.value))
        assert good.hidden_states.shape == (3, SHAPE.hidden)
        return said

    for way in ("ring", "grpc", ("grpc", "ring")):
        first, second = both(front, way, work)
        assert first == second
        assert "topk_ids[2][1] (token 2, slot 1) must be -1 or an expert id below 8, got 99" in first[0]
        assert "layer_idx must be from 0 to 1, got 7" in first[1]


def test_tensors_that_are_no_rows_are_refused_on_all_ranks(front: str) -> None:
    """Only rank 1 gives them, and gives the call up: its mate hears why, and both go on with the next call."""

    def work(moe: MoeRank) -> list[str]:
        x, ids, weights = rows(3, seed=0, shape=SHAPE)
        said = []
        with moe.step(3) as step:
            for wrong in WRONG_ROWS:
                given = wrong(x, ids, weights) if moe.rank else (x, ids, weights)
                with pytest.raises(InvalidArgumentError) as refused:
                    step.layer(0, *given)
                said.append(str(refused.value))
            with pytest.raises(InvalidArgumentError) as refused:
                step.layer("0" if moe.rank else 0, x, ids, weights)  # type: ignore[arg-type]
            said.append(str(refused.value))
            step.layer(1, x, ids, weights)
        return said

    for way in ("ring", "grpc"):
        first, second = both(front, way, work)
        assert first == second, way
        assert "layer_idx must be an integer, got '0'" in first.pop()
        assert all(text.startswith("rank 1 refused: ") for text in first)
        for text, wanted in zip(first, SAID_OF_WRONG_ROWS if way == "ring" else ()):
            assert wanted in text


WRONG_ROWS: list[Callable[..., tuple[object, ...]]] = [
    lambda x, ids, weights: (x.float(), ids, weights),
    lambda x, ids, weights: (x[:, :32], ids, weights),
    lambda x, ids, weights: (x, ids.long(), weights),
    lambda x, ids, weights: (x, ids, None),
    lambda x, ids, weights: (x.repeat(400, 1), ids.repeat(400, 1), weights.repeat(400, 1)),
    lambda x, ids, weights: ([[1.0]], ids, weights),
]
SAID_OF_WRONG_ROWS = (
    "hidden_states.dtype must be bfloat16, got float32",
    "hidden_states.shape must be [3, 64], got [3, 32]",
    "topk_ids.dtype must be int32, got int64",
    "topk_weights must be [3, 2], got None",
    "rows of a layer call must be at most 1024",
    "hidden_states must be a tensor [rows, 64], got list",
)


def _refusing(pipe: Connection, front: str, transport: str) -> None:
    """A caller process of rank 0 whose first call has no rows of the right kind; it goes on with the next one."""
    torch.set_num_threads(1)
    with MoeRank.connect(front, rank=0, holder="refusing", transport=transport) as moe:
        pipe.send("connected")
        pipe.recv()
        x, ids, weights = rows(2, seed=0, shape=SHAPE)
        memory = moe.share(4096) if transport == "memory" else None
        out = None if memory is None else memory.tensor(2048, (2, SHAPE.hidden), torch.bfloat16)
        with moe.step(2) as step:
            try:
                step.layer(0, x.float(), ids, weights, out=out)
            except InvalidArgumentError as error:
                pipe.send(str(error))
            there = x if memory is None else in_memory(memory, x, 0)
            # A list: a tensor in a pipe would need this process to live until it is received.
            pipe.send(step.layer(0, there, ids, weights, out=out).hidden_states.float().tolist())


@pytest.mark.parametrize("transport", ["ring", "memory"])
def test_a_process_that_gives_a_call_up_stays_in_step_with_its_mates(front: str, transport: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_refusing, args=(theirs, front, transport), daemon=True)
    process.start()
    with MoeRank.connect(front, rank=1, holder="refusing", transport="ring") as mate:
        assert ours.poll(60)
        ours.recv()
        ours.send("go")
        x, ids, weights = rows(2, seed=1, shape=SHAPE)
        with mate.step(2) as step:
            with pytest.raises(InvalidArgumentError) as refused:
                step.layer(0, x, ids, weights)
            good = step.layer(0, x, ids, weights).hidden_states
    said = "rank 0 refused: hidden_states.dtype must be bfloat16, got float32"
    assert str(refused.value) == said
    assert ours.poll(10)
    assert ours.recv() == said
    assert ours.poll(10)
    for rank, out in enumerate((ours.recv(), good)):
        batch = MoeBatch.of(SHAPE, *rows(2, seed=rank, shape=SHAPE))
        want = quantized_moe(batch, random_layer_weights(SHAPE, seed=0, layer_idx=0), SHAPE)
        assert relative_l2(torch.as_tensor(out), want) <= tolerance(1e-2, 2)
    process.join(20)
    assert process.exitcode == 0


def test_a_call_without_a_place_is_not_counted(front: str) -> None:
    def work(moe: MoeRank) -> None:
        x, ids, weights = rows(1, seed=0, shape=SHAPE)
        started: list[StartedLayer] = []
        while True:  # a step a call, of micro-batches in turn: none of them waits for a result
            with moe.step(1, micro_batch_idx=len(started) % 2) as step:
                try:
                    started.append(step.start_layer(0, x, ids, weights))
                except OverloadedError:
                    break
        outs = [call.result().hidden_states for call in started]
        assert all(torch.equal(out, outs[0]) for out in outs)
        with moe.step(1) as step:
            assert torch.equal(step.layer(0, x, ids, weights).hidden_states, outs[0])

    assert both(front, "ring", work) == [None, None]


def test_what_no_call_can_be_is_refused_and_nothing_is_counted(front: str) -> None:
    for wrong, said in (
        ({"rank": "0"}, "rank must be an integer, got '0'"),
        ({"num_calls": -1}, "num_calls must be from 0 to 2147483647, got -1"),
        ({"num_calls": 65}, r"num_calls must be at most 64 \(max_calls_per_ring of the service\), got 65"),
        ({"max_rows": 2**20}, r"max_rows must be at most 2048 \(max_step_rows of the service\)"),
        ({"max_rows": 2**33}, "max_rows must be from 0 to"),
        ({"spin_us": math.inf}, "spin_us must be a finite number of at least 0, got inf"),
    ):
        # Each with a holder of its own: nothing of it may hold the lease.
        options = {"rank": 0, "holder": f"wrong-{said}", **wrong}
        with pytest.raises(InvalidArgumentError, match=said), MoeRank.connect(front, **options):
            pass

    for address in ("", " ", None):
        with (
            pytest.raises(InvalidArgumentError, match="address of the front must be host:port, got "),
            MoeRank.connect(address, rank=0, holder="nowhere"),  # type: ignore[arg-type]
        ):
            pass

    def work(moe: MoeRank) -> StartedLayer:
        x, ids, weights = rows(3, seed=0, shape=SHAPE)
        if moe.rank == 0:  # alone: the others then hear that it brings the next step
            with (
                pytest.raises(InvalidArgumentError, match="num_rows must be one number"),
                moe.step([1, 2, 3]),
            ):
                pass
        else:
            with pytest.raises(MegaMoeError), moe.step(3):
                pass
        with pytest.raises(InvalidArgumentError, match="num_bytes must be an integer of at least 1, got 0"):
            moe.share(0)
        memory = moe.share(8192)
        moe.unshare(memory)
        with pytest.raises(
            InvalidArgumentError, match="memory must be of MoeRank.share, and taken back once"
        ):
            moe.unshare(memory)
        memory = moe.share(8192)
        a, b, out = (memory.tensor(at, (3, SHAPE.hidden), x.dtype) for at in (0, 1024, 2048))
        a.copy_(x)
        with moe.step(3) as step:
            for layer_idx in ("0", 0.5, 2**70):
                with pytest.raises(InvalidArgumentError, match="layer_idx must be a"):
                    step.layer(layer_idx, a, ids, weights, out=out)  # type: ignore[arg-type]
            for tensor in ([[1.0]], torch.tensor(1.0)):
                with pytest.raises(InvalidArgumentError, match="hidden_states must be a tensor"):
                    step.layer(0, tensor, ids, weights, out=out)  # type: ignore[arg-type]
            started = step.start_layer(0, a, ids, weights, out=b)
            started.result()
            with pytest.raises(StaleCallError, match="taken once, got a second time"):
                started.result()  # its place is not given back twice: two calls would share it
            two = [step.start_layer(1, a, ids, weights, out=out)]
            assert torch.isfinite(two[0].result().hidden_states).all()
            if pid := os.fork():
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
            else:
                try:
                    step.layer(1, a, ids, weights, out=out)
                except UnavailableError:
                    os._exit(7)
                finally:
                    os._exit(1)
        with moe.step(3) as step:
            return step.start_layer(0, a, ids, weights, out=out)

    for started in both(front, "memory", work):
        assert isinstance(started, StartedLayer)
        with pytest.raises(StaleCallError, match="inside the `with` of its connect"):
            started.result()


def test_what_lies_in_no_lent_memory_is_refused(front: str) -> None:
    def work(moe: MoeRank) -> None:
        x, ids, weights = rows(3, seed=0, shape=SHAPE)
        memory = moe.share(4096)
        there, out = in_memory(memory, x, 0), memory.tensor(2048, (3, SHAPE.hidden), torch.bfloat16)
        with moe.step(3) as step:
            for tensor, result, said in (
                (x, out, "hidden_states must be in memory of MoeRank.share"),
                (there, x, "out must be in memory of MoeRank.share"),
                (there, None, "out must be given with transport 'memory'"),
            ):
                with pytest.raises(InvalidArgumentError, match=said):
                    step.layer(0, tensor, ids, weights, out=result)
            # Of what the rank refuses, every rank hears: here both callers' results overlap their rows.
            with pytest.raises(
                InvalidArgumentError, match="rank [01] refused: out in the same memory must be apart"
            ):
                step.layer(0, there, ids, weights, out=memory.tensor(128, (3, SHAPE.hidden), torch.bfloat16))
            step.layer(1, there, ids, weights, out=out)
        with pytest.raises(InvalidArgumentError, match="memory.kind must be one of posix_shm"):
            moe._link.ask(
                pb.ForwardRequest(
                    register_memory=pb.RegisterMemory(
                        lease_serial=moe.lease_serial,
                        memory_id=9,
                        kind="cuda_ipc",
                        handle=bytes(64),
                        num_bytes=64,
                    )
                )
            )
        moe.unshare(memory)

    assert both(front, "memory", work) == [None, None]


def test_rings_are_limited(front: str) -> None:
    with ExitStack() as opened:
        mates = [
            opened.enter_context(MoeRank.connect(front, rank=0, holder="many")) for _ in range(MAX_RINGS)
        ]
        with pytest.raises(OverloadedError, match="at most max_colocated_rings = 2, got 3"):
            opened.enter_context(MoeRank.connect(front, rank=0, holder="many"))
        with pytest.raises(LeaseHeldError, match="'many'"):
            opened.enter_context(MoeRank.connect(front, rank=0, holder="other"))
        link = mates[0]._link
        for message, said in (
            (pb.OpenRing(lease_serial=mates[0].lease_serial), "rings of this stream must be at most 1"),
            (pb.OpenRing(lease_serial=1 << 40), "lease_serial must be"),
        ):
            with pytest.raises(MegaMoeError, match=said):
                link.ask(pb.ForwardRequest(open_ring=message))


def test_a_corrupt_ring_is_read_no_more_and_hurts_nobody_else(front: str, service: ServiceProcess) -> None:
    """Rank 0's caller writes nonsense over a record that it has sent: it is told, its mate times out, all serve on."""

    def work(moe: MoeRank) -> None:
        x, ids, weights = rows(2, seed=0, shape=SHAPE)
        with moe.step(2, timeout_s=1.0) as step:
            if moe.rank:
                with pytest.raises(PeerTimeoutError):
                    step.layer(0, x, ids, weights)
                return
            ring = moe._transport._ring
            bell, ring._bell = ring._bell, lambda control: None
            call = step.start_layer(0, x, ids, weights)
            layout.RECORD_HEAD.pack_into(ring._buf, call._call._at, 1, 77, 0, 0, 0, 0, 0, 0, 0)
            bell(False)
            with pytest.raises(InvalidArgumentError, match="kind of a record must be one of"):
                call.result()
            with pytest.raises(InvalidArgumentError, match="kind of a record"), moe.step(2):
                pass

    assert both(front, "ring", work) == [None, None]


def _caller(pipe: Connection, front: str, rank: int, transport: str) -> None:
    """A caller process that stops inside a layer call of its rank and waits to be killed."""
    torch.set_num_threads(1)
    with MoeRank.connect(front, rank=rank, holder="killed", transport=transport) as moe:
        pipe.send("connected")
        pipe.recv()
        x, ids, weights = rows(2, seed=rank, shape=SHAPE)
        out = None
        if transport == "memory":
            memory = moe.share(4096)
            x, out = in_memory(memory, x, 0), memory.tensor(2048, (2, SHAPE.hidden), torch.bfloat16)
        with moe.step(2) as step:
            step.layer(0, x, ids, weights, out=out)
            step.start_layer(1, x, ids, weights, out=out)
            pipe.send("in a call")
            time.sleep(60)


@pytest.mark.parametrize("transport", ["ring", "memory"])
def test_a_killed_caller_leaves_nothing_and_what_it_announced_is_finished(
    front: str, service: ServiceProcess, transport: str
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_caller, args=(theirs, front, 0, transport), daemon=True)
    process.start()
    with MoeRank.connect(front, rank=1, holder="killed") as mate:
        assert ours.poll(60)
        ours.recv()
        ours.send("go")
        x, ids, weights = rows(2, seed=1, shape=SHAPE)
        with mate.step(2) as step:
            step.layer(0, x, ids, weights)
            assert ours.poll(20)
            # Its call waits for this rank's when it dies.
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            time.sleep(0.1)
            assert len(rings(service)) == 2, "a ring stays until what it announced is finished"
            finished = step.layer(1, x, ids, weights)
        assert finished.hidden_states.shape == (2, SHAPE.hidden)
    deadline = time.monotonic() + 10
    while (
        left := list(Path("/dev/shm").glob(f"megamoe-memory-{process.pid}-*"))
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def test_other_callers_are_served_beside_it(front: str) -> None:
    """A holder of all ranks through gRPC, after one through rings, and the front's own door."""
    both(front, "ring", lambda moe: layer(moe, 2))
    batches = [rows(3, seed=rank, shape=SHAPE) for rank in range(2)]
    outs = []
    for transport in ("grpc", "ring"):
        with MoeGroup.connect(front, holder="group", transport=transport) as moe:
            with moe.step([3, 3]) as step:
                outs.append(step.layer(1, batches).hidden_states)
                with pytest.raises(InvalidArgumentError, match="layer_idx must be from 0 to 1"):
                    step.layer(9, batches)
            with moe.step([0, 3]) as step:
                assert step.layer(0, [None, batches[1]]).hidden_states[0].shape == (0, SHAPE.hidden)
    with Front(front) as door:
        outs.append(door.forward_step(1, batches).hidden_states)
    assert all(torch.equal(a, b) for got in outs for a, b in zip(got, outs[0]))


def test_bench_calls_measures_every_transport(front: str) -> None:
    def run(*options: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "service.cli",
            "bench-calls",
            f"--front={front}",
            "--calls=4",
            *options,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment, check=False
        )
        return done.returncode, done.stdout + done.stderr

    status, text = run("--rows=1,9")
    assert status == 0, text
    lines = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [line[:3] for line in cells] == [
        [transport, size, "small_m"] for transport in ("grpc", "ring", "memory") for size in ("1", "9")
    ]
    for line in cells:
        call_us, runtime_us, layer_us, overhead_us = map(int, line[3:7])
        assert call_us > runtime_us >= layer_us > 0
        assert 0 < overhead_us < call_us
    settings = Settings(front=front, calls=4, phase="decode", spin_us=None, device="")
    for change, said in (
        ({"transports": "grpc,udp"}, "transport must be of ring, memory, grpc, got 'grpc,udp'"),
        ({"rows": "0"}, "rows must be numbers from 1 to the service's max_tokens_per_rank"),
        ({"rows": "513"}, r"rows must be numbers from 1 to .*\(at most 512\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            print_bench_calls(settings, **{"transports": "ring", "rows": "1", **change})


async def test_the_load_generator_may_use_rings(front: str, service: ServiceProcess) -> None:
    batches = [rows(3, seed=rank, shape=SHAPE) for rank in range(2)]
    async with LiveTier.connect(front, holder="load", wait_ready_s=10.0, transport="ring") as tier:
        assert len(rings(service)) == 2
        async with tier.step(num_rows_per_rank=[3, 3], phase=["decode", "decode"]) as step:
            outcome = await step.layer(0, batches)
    assert outcome.num_rows_per_rank == (3, 3)


def test_a_restarted_caller_group_takes_the_place_of_its_earlier_run(front: str) -> None:
    with ExitStack() as earlier:
        old = [earlier.enter_context(MoeRank.connect(front, rank=rank, holder="again")) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda moe: layer(moe, 2), old))
        with ExitStack() as later:
            new = [
                later.enter_context(MoeRank.connect(front, rank=rank, holder="again")) for rank in range(2)
            ]
            assert new[0].lease_serial == new[1].lease_serial > old[0].lease_serial
            with ThreadPoolExecutor(2) as pool:
                outs = list(pool.map(lambda moe: layer(moe, 2), new))
            assert all(
                relative_l2(out, oracle(2, rank)) <= tolerance(1e-2, 2) for rank, out in enumerate(outs)
            )
            with pytest.raises(StaleCallError, match="lease_serial must be"), old[0].step(2):
                pass


@pytest.mark.parametrize("victim", ["rank", "supervisor"])
def test_a_killed_service_ends_its_callers_waits_and_leaves_nothing(tmp_path: Path, victim: str) -> None:
    config = tmp_path / "config.yaml"
    table = {name: getattr(SHAPE, name) for name in MoeShape.__dataclass_fields__}
    config.write_text(json.dumps({"shape": table, "restart": False}))
    with running(f"--config={config}") as service, ExitStack() as opened:
        family = service.family()
        moes = [opened.enter_context(MoeRank.connect(service.front, rank=r, holder="k")) for r in range(2)]
        lender = opened.enter_context(MoeRank.connect(service.front, rank=1, holder="k", transport="memory"))
        lender.share(4096)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: moes[0].step(2).__enter__())
            time.sleep(0.2)
            pid = service.rank_pids[1] if victim == "rank" else service.process.pid
            os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises((UnavailableError, PeerTimeoutError)):
                waiting.result(20)
        assert time.monotonic() - started < STEP_TIMEOUT_S + 1
        assert gone(family)
        with pytest.raises(UnavailableError), moes[1].step(2):
            pass
        service.process.wait(30)
    deadline = time.monotonic() + 10
    while (left := service.segments() + lent_segments()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
