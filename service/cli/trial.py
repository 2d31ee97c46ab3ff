"""`megamoe selftest`: the case matrix of a deployment on a process a rank, printed as it goes."""

from __future__ import annotations

from rich.console import Console

from megamoe import check_backend, run_trial
from service.cli.words import counted
from service.config import ServiceConfig


def print_trial(config: ServiceConfig) -> bool:
    """Run and print every case; True if all of them are right. Raises ConfigError, PeerTimeoutError."""
    check_backend(config.bundle)
    out = Console(highlight=False, soft_wrap=True)
    shape, where = config.moe_shape, f" ({config.device})" if config.backend == "gfx950" else ""
    out.print(
        f"{config.backend}{where}, {shape.name}: hidden {shape.hidden}, intermediate {shape.intermediate}, "
        f"{shape.num_experts} experts, top-{shape.num_topk}, {counted(shape.num_ranks, 'rank')}"
    )
    for path, reason in config.bundle.reasons.items():
        out.print(f"{path} is not built: {reason}")
    num_wrong, largest, num_cases = 0, 0.0, 0
    for verdict in run_trial(config.deployment):
        mark = "[red]FAIL[/]" if verdict.why else "[green]ok[/]  "
        said = verdict.why or f"{verdict.error:.1e}"
        out.print(f"{verdict.num_done:4d}/{verdict.num_cases} {mark} {verdict.case.name}: {said}")
        num_wrong += bool(verdict.why)
        largest, num_cases = max(largest, verdict.error), verdict.num_done
    out.print(f"{num_cases - num_wrong} of {num_cases} cases are right; largest relative L2 {largest:.1e}")
    return not num_wrong
