"""Kernels that one process has compiled are found in Triton's cache by all others.

Triton's key of a kernel covers the constants of a function that it calls only where that function's own key was asked
for before, so that it depends on what else the process has launched, and in which order (seen in Triton 3.6). Asking
for all keys once, in one order, before the first launch, makes them the same in every process.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from megamoe.backends.hopper import device

_OURS = f"{device.__name__}."


@cache
def settle_keys() -> None:
    """Ask for the keys of all functions of `device`, module by module and name by name. Once a process."""
    from triton.runtime.jit import JITCallable

    modules = [import_module(_OURS + found.name) for found in pkgutil.iter_modules(device.__path__)]
    for module in modules:
        for _, value in sorted(vars(module).items()):
            if isinstance(value, JITCallable) and value.fn.__module__.startswith(_OURS):
                _ = value.cache_key
