"""`megamoe doctor`: whether this machine can run a configuration; each finding with what to do about it."""

from __future__ import annotations

import platform
import socket
import sys
from importlib import metadata

import psutil
from rich.console import Console
from rich.text import Text

from megamoe import Finding, diagnose
from service.cli.plan import _size
from service.config import ServiceConfig
from service.launch.memory import shm_bytes, shm_left_bytes

_PACKAGES = ("torch", "grpcio", "protobuf", "prometheus-client", "safetensors")


def findings(config: ServiceConfig) -> list[Finding]:
    found = [_python(), *[_package(name) for name in _PACKAGES], _machine()]
    if config.launcher == "ray":
        found.append(_package("ray", "or use --launcher local"))
    found += [*diagnose(config.bundle), _shared_memory(config), _memory(config), *_ports(config)]
    return found


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(sys.version_info >= (3, 11), f"Python {version} (3.11 or newer)")


def _package(name: str, instead: str = "pip install megamoe") -> Finding:
    try:
        return Finding(True, f"{name} {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        return Finding(False, f"{name} is not installed: {instead}")


def _machine() -> Finding:
    known = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    return Finding(known, f"{platform.system()} on {platform.machine()} (Linux on x86_64 or aarch64)")


def _shared_memory(config: ServiceConfig) -> Finding:
    need, free = sum(shm_bytes(config).values()), shm_left_bytes()
    return Finding(need <= free, f"/dev/shm: {_size(need)} needed, {_size(free)} free (Docker: --shm-size)")


def memory_bytes(config: ServiceConfig) -> int:
    """What all ranks together take of this host's memory, roughly."""
    shape = config.moe_shape
    # Weights of GPUs pass through the host a layer at a time.
    num_layers = 1 if config.on_gpu else shape.num_layers
    # A rank's interpreter with torch takes about 200 MiB beside its weights (measured, CPU build).
    ranks = shape.num_ranks * (shape.weight_bytes_per_rank_and_layer * num_layers + (200 << 20))
    return ranks + sum(shm_bytes(config).values())


def _memory(config: ServiceConfig) -> Finding:
    need, free = memory_bytes(config), psutil.virtual_memory().available
    return Finding(need <= free, f"memory: about {_size(need)} needed, {_size(free)} available")


def _ports(config: ServiceConfig) -> list[Finding]:
    wanted = {"port": [config.port], "http_port": [config.http_port]}
    for name in ("rank_port", "metrics_port"):
        first = getattr(config, name)
        wanted[name] = [first + rank for rank in range(config.moe_shape.num_ranks)] if first else []
    found = []
    for name, ports in wanted.items():
        ports = [port for port in ports if port]
        taken = [port for port in ports if not _is_free(config.host, port)]
        shown = ", ".join(map(str, ports))
        state = "any free one" if not ports else f"{shown}: taken: {taken}" if taken else f"{shown}: free"
        found.append(Finding(not taken, f"{name} of {config.host} {state}"))
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def print_diagnosis(config: ServiceConfig) -> bool:
    """Print all findings; True if nothing stands in the way."""
    out = Console()
    found = findings(config)
    for finding in found:
        mark = Text("ok  ", "green") if finding.ok else Text("no  ", "red")
        out.print(mark.append(finding.what, "default"), soft_wrap=True)
    bad = sum(not finding.ok for finding in found)
    out.print("everything is there" if not bad else f"{bad} of {len(found)} stand in the way")
    return not bad
