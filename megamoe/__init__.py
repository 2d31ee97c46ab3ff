"""megamoe: the runtime library of the expert layers. This file is the door: import from here.

See CONTRIBUTING.md for the map of the house.
"""

from megamoe.backends import (
    DeviceBench,
    DeviceSelftest,
    Finding,
    KernelWork,
    bench_device,
    check_backend,
    check_switch,
    compile_ahead,
    compile_kernels,
    count_work,
    diagnose,
    missing_kernels,
    selftest_device,
    share_memory,
)
from megamoe.batch import Counters, HostIds, MoeBatch, MoeOutput, StageTimes, SubStepReport
from megamoe.bench import BenchConfig, BenchResult, bench_deployment, format_results, run_bench
from megamoe.bundle import (
    MAX_TOKENS_PER_RANK_LIMIT,
    Bundle,
    Deployment,
    Path,
    RowFormat,
    RuntimeSpec,
    plan_bundle,
    prev_power_of_2,
)
from megamoe.checkpoint import checkpoint_version, load_layer, save_layer
from megamoe.layout import HeapLayout, Region, plan_layout
from megamoe.memory import (
    MEMORY_ALIGN,
    MemoryHandle,
    MemoryKind,
    OpenMemory,
    SharedMemory,
    remove_unowned,
)
from megamoe.path import PathPolicy, StagedPolicies, SubStep, choose_path, is_fall_off
from megamoe.routing import DISTRIBUTIONS, route_rank
from megamoe.runtime import Runtime
from megamoe.shape import MX_BLOCK, PRESETS, MoeShape, preset
from megamoe.shm import (
    SHM_DIR,
    SharedSegment,
    Word,
    fence,
    full_fence,
    shm_free_bytes,
    unlink_all,
)
from megamoe.step import Phase, PlanId, StepIntent, StepPlan, agree
from megamoe.trial import Verdict, run_trial
from megamoe.weights import LayerWeights, random_layer_weights, random_version, shard

__all__ = [
    "SHM_DIR",
    "DISTRIBUTIONS",
    "MX_BLOCK",
    "BenchConfig",
    "BenchResult",
    "PRESETS",
    "Bundle",
    "Counters",
    "Deployment",
    "DeviceBench",
    "DeviceSelftest",
    "Finding",
    "HeapLayout",
    "HostIds",
    "KernelWork",
    "LayerWeights",
    "MAX_TOKENS_PER_RANK_LIMIT",
    "MEMORY_ALIGN",
    "MemoryHandle",
    "MemoryKind",
    "MoeBatch",
    "MoeOutput",
    "MoeShape",
    "OpenMemory",
    "Path",
    "PathPolicy",
    "Phase",
    "PlanId",
    "Region",
    "RowFormat",
    "Runtime",
    "RuntimeSpec",
    "SharedMemory",
    "SharedSegment",
    "StageTimes",
    "StagedPolicies",
    "StepIntent",
    "StepPlan",
    "SubStep",
    "SubStepReport",
    "Verdict",
    "Word",
    "agree",
    "bench_deployment",
    "bench_device",
    "check_backend",
    "check_switch",
    "checkpoint_version",
    "choose_path",
    "compile_ahead",
    "compile_kernels",
    "count_work",
    "diagnose",
    "fence",
    "format_results",
    "full_fence",
    "is_fall_off",
    "load_layer",
    "missing_kernels",
    "plan_bundle",
    "plan_layout",
    "preset",
    "prev_power_of_2",
    "random_layer_weights",
    "random_version",
    "remove_unowned",
    "run_bench",
    "run_trial",
    "route_rank",
    "save_layer",
    "selftest_device",
    "shard",
    "share_memory",
    "shm_free_bytes",
    "unlink_all",
]
