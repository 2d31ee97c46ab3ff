"""`megamoe plan`: what a deployment builds and needs, printed before anything is allocated."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megamoe import Path, PathPolicy, check_backend, plan_layout
from megamoe.errors import ConfigError
from service.cli.words import counted
from service.config import MIB, ServiceConfig
from service.launch.memory import shm_bytes, shm_left_bytes


def print_plan(config: ServiceConfig, console: Console | None = None) -> bool:
    """Print it; True if /dev/shm of this machine holds it now."""
    out = console or Console()
    shape, deployment, bundle = config.moe_shape, config.deployment, config.bundle
    layout = plan_layout(bundle)
    policy = PathPolicy.of(deployment)
    out.print(
        f"profile {config.profile}, backend {config.backend}, shape {shape.name}: hidden {shape.hidden}, "
        f"intermediate {shape.intermediate}, {shape.num_experts} experts ({shape.num_experts_per_rank} a rank), "
        f"top-{shape.num_topk}, {counted(shape.num_layers, 'layer')}, {counted(shape.num_ranks, 'rank')}",
        highlight=False,
    )
    out.print(
        f"rows a rank: {deployment.max_tokens_per_rank} in one piece, {deployment.step_rows_limit} in one step; "
        f"largest Forward message {_size(config.message_bytes)}",
        highlight=False,
    )

    paths = Table("path", "runtimes (tokens a rank)", "at start", "heap a rank", "why not", title="Paths")
    for path in Path:
        capacities = bundle.capacities(path)
        state = "" if not capacities else "on" if policy.allows(path) else "off"
        size = _size(layout.path_bytes(path)) if capacities else ""
        paths.add_row(
            str(path), ", ".join(map(str, capacities)) or "-", state, size, bundle.reasons.get(path, "")
        )
    out.print(paths)

    regions = Table("region", "offset", "bytes", "used by", title="Symmetric heap of one rank")
    users: dict[str, list[str]] = {}
    for region in layout.path_regions:
        users.setdefault(region.shared_with, []).append(f"{region.path} {_size(region.num_bytes)}")
    for region in layout.regions:
        used_by = ", ".join(users.get(region.name, ["every path"]))
        regions.add_row(region.name, str(region.offset), str(region.num_bytes), used_by)
    regions.add_row("total", "", str(layout.num_bytes), _size(layout.num_bytes))
    out.print(regions)

    needs = shm_bytes(config)
    weights = shape.weight_bytes_per_rank_and_layer * shape.num_layers
    out.print(
        f"a rank: weights {_size(weights)}, scratch at the worst legal routing up to "
        f"{_size(layout.max_scratch_bytes())}",
        highlight=False,
    )
    free, total = shm_left_bytes(), sum(needs.values())
    parts = ", ".join(f"{name} {_size(num_bytes)}" for name, num_bytes in needs.items())
    fits = total <= free
    verdict = "it fits" if fits else "it does NOT fit (Docker: --shm-size; or lower max_tokens_per_rank)"
    out.print(
        f"/dev/shm: {_size(total)} needed ({parts}), {_size(free)} free: {verdict}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        check_backend(bundle)
    except ConfigError as error:
        out.print(f"on this machine it cannot start: {error}", highlight=False, markup=False, soft_wrap=True)
    return fits


def _size(num_bytes: int) -> str:
    if num_bytes >= 1024 * MIB:
        return f"{num_bytes / (1024 * MIB):.2f} GiB"
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB"
