"""Each stage in plain torch, under the name of its kernel: what the kernels are tested against, on any device.

They read and write the same buffers as the kernels, for all ranks of a group held in one process; ranks take turns,
so flags are written but never waited for. Written for clarity: loops over ranks, tokens and experts.

group: the ranks. transport: quantize, prepare, dispatch, post_return, combine. index: index, expand. gemms: gemm1,
gemm2, identity. fp8: expand_fp8, gemm1_fp8, regroup, gemm2_fp8.
"""

from megamoe.backends.hopper.references.fp8 import expand_fp8, gemm1_fp8, gemm2_fp8, regroup
from megamoe.backends.hopper.references.gemms import gemm1, gemm2, identity
from megamoe.backends.hopper.references.group import Batch, Group
from megamoe.backends.hopper.references.index import STREAM_FLAG, entries_of, expand, index
from megamoe.backends.hopper.references.transport import (
    combine,
    destinations,
    dispatch,
    post_return,
    prepare,
    quantize,
)

__all__ = [
    "STREAM_FLAG",
    "Batch",
    "Group",
    "combine",
    "destinations",
    "dispatch",
    "entries_of",
    "expand",
    "expand_fp8",
    "gemm1",
    "gemm1_fp8",
    "gemm2",
    "gemm2_fp8",
    "identity",
    "index",
    "post_return",
    "prepare",
    "quantize",
    "regroup",
]
