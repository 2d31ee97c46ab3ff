"""What a rank's step loop needs of megamoe.Runtime, so that tests give it another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from megamoe import (
    Bundle,
    MemoryHandle,
    MemoryKind,
    MoeBatch,
    MoeOutput,
    OpenMemory,
    PathPolicy,
    StepPlan,
)


class RuntimeLike(Protocol):
    """What the loop needs of megamoe.Runtime."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def policy(self) -> PathPolicy: ...

    @property
    def next_sequence(self) -> int: ...

    @property
    def memory_kinds(self) -> tuple[MemoryKind, ...]: ...

    def open_memory(self, handle: MemoryHandle) -> OpenMemory: ...

    def pin(self, memory: torch.Tensor) -> Callable[[], None]: ...

    def stage_policy(self, policy: PathPolicy) -> None: ...

    def forward(
        self,
        batch: MoeBatch | None,
        plan: StepPlan,
        layer_idx: int,
        *,
        sequence: int,
        refusal: bool = False,
        timeout_s: float,
        out: torch.Tensor | None = None,
    ) -> MoeOutput: ...
