"""Whether this machine can run a deployment on this backend, piece by piece: settings, device or emulator, kernels."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from megamoe.backends import Finding
from megamoe.backends.gfx950.build import FLYDSL, find_linker
from megamoe.backends.gfx950.compile_ahead import missing_kernels
from megamoe.backends.gfx950.emulator.build import find_compiler
from megamoe.backends.gfx950.emulator.errors import ToolchainError
from megamoe.bundle import Bundle
from megamoe.errors import ConfigError, must_be
from megamoe.layout import plan_layout


def diagnose(bundle: Bundle) -> list[Finding]:
    """Findings in the order in which a rank would come to them."""
    return [
        _settings(bundle),
        *(_emulator() if bundle.deployment.gfx950_emulated else _device(bundle)),
        *_kernels(bundle),
    ]


def _settings(bundle: Bundle) -> Finding:
    from megamoe.backends.gfx950.backend import check_served

    try:
        check_served(bundle.deployment)
    except ConfigError as error:
        return Finding(False, str(error))
    return Finding(True, "backend gfx950")


def _emulator() -> list[Finding]:
    try:
        return [Finding(True, f"C compiler of the emulator: {' '.join(find_compiler())}")]
    except ToolchainError as error:
        return [Finding(False, str(error))]


def _device(bundle: Bundle) -> list[Finding]:
    from megamoe.backends.gfx950.device import machine

    shape, layout = bundle.shape, plan_layout(bundle)
    weights = shape.weight_bytes_per_rank_and_layer * shape.num_layers
    return machine.look(layout.num_ranks, layout.num_bytes + weights)


def _kernels(bundle: Bundle) -> list[Finding]:
    folder = bundle.deployment.gfx950_kernels
    if folder:
        try:
            lacking = missing_kernels(bundle, Path(folder))
        except ConfigError as error:
            return [Finding(False, str(error))]
        what = f"kernels of {folder}: all that are needed"
        return [Finding(False, text) for text in lacking] or [Finding(True, what)]
    try:
        version = importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        version = "none (install megamoe[gfx950], or --gfx950-kernels with a folder of `megamoe compile`)"
    same = version == FLYDSL
    found = [Finding(same, f"flydsl {version}" if same else must_be("package flydsl", FLYDSL, version))]
    try:
        return [*found, Finding(True, f"linker of kernels: {find_linker()}")]
    except ConfigError as error:
        return [*found, Finding(False, str(error))]
