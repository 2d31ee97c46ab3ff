"""What the backend is compared with: the layer from torch's own parts, NCCL all-to-all round `torch._grouped_mm`.

`python -m megamoe.backends.hopper.baseline --ranks 2` prints a line a size, one process and GPU a rank; --ranks 1 has
no exchange. Weights are dequantized to bf16 once and activations are not quantized, so it reads 3.8 times the bytes and
rounds less. To its advantage, everything that follows from routing alone (orders, counts, splits) is ready before
the clock starts, and the counts are known on the host. Captured graphs, median of the slowest rank.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from megamoe.backends.hopper.floors import CALLS, REPEATS, busiest, floor_us, ranks_of
from megamoe.routing import route
from megamoe.shape import MoeShape, preset

Exchange = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""(rows in the order of destinations, rows to each rank, rows from each rank) -> rows in the order of sources."""


@dataclass(frozen=True)
class Routes:
    """One rank's part of a step's routing, for one bf16 row a routed row.

    sent [rows]: token of each row, by owner and expert. splits: rows to each rank. received_splits: rows from each.
    by_expert [rows received]: order that sorts them by local expert; ends int32 [experts]: where each one's end.
    home [n, num_topk]: place in `sent` of each (token, slot); weights fp32 [n, num_topk], 0 where there is no expert.
    """

    sent: torch.Tensor
    splits: list[int]
    received_splits: list[int]
    by_expert: torch.Tensor
    ends: torch.Tensor
    home: torch.Tensor
    weights: torch.Tensor


def routes_of(
    shape: MoeShape, routes: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int, device: torch.device
) -> Routes:
    """routes: (ids, weights) of every rank. A slot without expert is none of the rows."""
    per_rank = shape.num_experts_per_rank
    orders = [torch.sort(ids.flatten(), stable=True) for ids, _ in routes]
    experts = [values[values >= 0] for values, _ in orders]
    splits = [torch.bincount(values // per_rank, minlength=shape.num_ranks).tolist() for values in experts]
    ids, weights = routes[rank]
    order = orders[rank].indices[len(ids.flatten()) - len(experts[rank]) :]
    home = torch.zeros(ids.numel(), dtype=torch.int64)
    home[order] = torch.arange(len(order))
    received = torch.cat([values[values // per_rank == rank] for values in experts]) - rank * per_rank
    return Routes(
        sent=(order // shape.num_topk).to(device),
        splits=splits[rank],
        received_splits=[split[rank] for split in splits],
        by_expert=torch.sort(received, stable=True).indices.to(device),
        ends=torch.bincount(received, minlength=per_rank).cumsum(0).to(torch.int32).to(device),
        home=home.view(ids.shape).to(device),
        weights=torch.where(ids >= 0, weights, 0.0).to(device),
    )


@dataclass(frozen=True)
class Baseline:
    """One rank's experts in bf16. w13 [experts, 2 * intermediate, hidden], w2 [experts, hidden, intermediate]."""

    shape: MoeShape
    w13: torch.Tensor
    w2: torch.Tensor

    def outgoing(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        return x[routes.sent]

    def experts(self, received: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Result rows in the order in which rows came."""
        both = torch._grouped_mm(received[routes.by_expert], self.w13.transpose(-2, -1), offs=routes.ends)
        gate, up = both.chunk(2, dim=-1)
        if limit := self.shape.swiglu_limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        rows = torch._grouped_mm(silu(gate) * up, self.w2.transpose(-2, -1), offs=routes.ends)
        out = torch.empty_like(rows)
        out[routes.by_expert] = rows
        return out

    def combine(self, back: torch.Tensor, routes: Routes) -> torch.Tensor:
        """bf16 [n, hidden]."""
        rows = back[routes.home.flatten()].view(*routes.home.shape, back.shape[1])
        return (routes.weights.to(rows.dtype).unsqueeze(1) @ rows).squeeze(1)

    def layer(self, x: torch.Tensor, routes: Routes, exchange: Exchange) -> torch.Tensor:
        received = exchange(self.outgoing(x, routes), routes.splits, routes.received_splits)
        rows = self.experts(received, routes)
        return self.combine(exchange(rows, routes.received_splits, routes.splits), routes)


def all_to_all(rows: torch.Tensor, splits: Sequence[int], received_splits: Sequence[int]) -> torch.Tensor:
    """The exchange over NCCL; of one rank alone there is none."""
    if len(splits) == 1:
        return rows
    received = rows.new_empty((sum(received_splits), rows.shape[1]))
    dist.all_to_all_single(received, rows, list(received_splits), list(splits))
    return received


def _time_us(call: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Median over replays of one call's time on this rank's slowest peer."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPEATS + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([start.elapsed_time(stop) * 1e3 / CALLS], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times[1:])


def _rank(rank: int, shape: MoeShape, tokens: Sequence[int], distributions: Sequence[str], port: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", world_size=shape.num_ranks, rank=rank, device_id=device
    )
    generator = torch.Generator(device).manual_seed(rank)

    def weights(rows: int, columns: int) -> torch.Tensor:
        out = torch.empty((shape.num_experts_per_rank, rows, columns), dtype=torch.bfloat16, device=device)
        return out.normal_(0, columns**-0.5, generator=generator)

    layer = Baseline(
        shape, weights(2 * shape.intermediate, shape.hidden), weights(shape.hidden, shape.intermediate)
    )
    stream = torch.cuda.Stream(device)
    for number in tokens:
        for distribution in distributions:
            everyone = route(shape, distribution, [number] * shape.num_ranks, seed=11)
            routes = routes_of(shape, everyone, rank, device)
            x = torch.randn((number, shape.hidden), device=device, generator=generator).bfloat16()
            us = _time_us(lambda x=x, routes=routes: layer.layer(x, routes, all_to_all), stream)  # type: ignore[misc]
            if rank == 0:
                rows, hit = busiest(shape, [ids for ids, _ in everyone])
                print(
                    f"grouped_mm EP{shape.num_ranks} {distribution:18s} T={number:5d} rows={rows:6d} hit={hit:3d} "
                    f"{us:9.1f} us  {floor_us(shape, rows, hit) / us:.3f} of the MXFP4 floor",
                    flush=True,
                )
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="time NCCL all-to-all round torch._grouped_mm")
    parser.add_argument("--shape", default="deepseek-v4-pro")
    parser.add_argument("--ranks", type=int, default=1, help="one GPU each")
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
    )
    parser.add_argument("--distributions", nargs="*", default=["uniform"])
    chosen = parser.parse_args(arguments)
    # Ranks of one process group: nothing may share their connections' port.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shape = ranks_of(preset(chosen.shape), chosen.ranks)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, shape, chosen.tokens, chosen.distributions, port))
        for rank in range(chosen.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"a rank failed: exit codes {[process.exitcode for process in processes]}")


if __name__ == "__main__":
    main()
