"""Kernels written in assembly for the tests: no linker, no metadata file, one pointer table as arguments."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megamoe.backends.gfx950.emulator.code_object import Descriptor, Kernel, KernelArg
from megamoe.backends.gfx950.emulator.device import DeviceGroup

from .toolchain import assemble


def kernel_of(
    text: str, *, num_args: int = 2, lds_bytes: int = 0, scratch_bytes: int = 0, name: str = "kernel"
) -> Kernel:
    """A kernel of 128 vector and 64 accumulation registers; s[0:1] is the kernarg pointer, s2 the workgroup, v0 the item.

    Its arguments are `num_args` 64-bit values.
    """
    args = tuple(KernelArg(f"arg{k}", 8 * k, 8, "by_value") for k in range(num_args))
    rsrc1 = (192 // 8 - 1) | 0xF0 << 12  # denormals kept
    descriptor = Descriptor(
        lds_bytes, scratch_bytes, 8 * num_args, 0, rsrc1, 2 << 1 | 1 << 7, 128 // 4 - 1, 8, 0
    )
    metadata = {
        ".max_flat_workgroup_size": 1024, ".group_segment_fixed_size": lds_bytes, ".private_segment_fixed_size": scratch_bytes,
    }  # fmt: skip
    return Kernel(name, descriptor, assemble(text + "\ns_endpgm"), args, metadata)


def run_op(
    group: DeviceGroup,
    body: str,
    inputs: Sequence[np.ndarray],
    num_out: int,
    *,
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
    out_row: int = 40,
) -> np.ndarray:
    """Run `body` on one wave. inputs: uint32 [64] rows loaded into v10, v11, ...; returns rows v40, v41, ... [num_out, 64].

    out_row: number of the first result register, for bodies with more than 30 inputs.
    """
    lines = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "v_lshlrev_b32_e32 v1, 2, v0", "s_waitcnt lgkmcnt(0)"]
    for k in range(len(inputs)):
        if k % 16 == 0:  # offsets have thirteen bits
            lines.append(f"v_add_u32_e32 v9, {4096 * (k // 16):#x}, v1")
        lines.append(f"global_load_dword v{10 + k}, v9, s[4:5] offset:{256 * (k % 16)}")
    lines += [f"v_mov_b32_e32 v{out_row + k}, 0" for k in range(num_out)]
    lines += ["s_waitcnt vmcnt(0)", body, "s_waitcnt vmcnt(0) lgkmcnt(0)", "s_mov_b64 exec, -1"]
    for k in range(num_out):
        if k % 16 == 0:
            lines.append(f"v_add_u32_e32 v9, {4096 * (k // 16):#x}, v1")
        lines.append(f"global_store_dword v9, v{out_row + k}, s[6:7] offset:{256 * (k % 16)}")
    kernel = kernel_of("\n".join(lines), lds_bytes=lds_bytes, scratch_bytes=scratch_bytes)
    device = group.devices[0]
    source = device.upload(
        np.concatenate([row.view(np.uint32) for row in inputs]) if inputs else np.zeros(1, np.uint32)
    )
    target = device.allocate(256 * num_out)
    device.default_stream.launch(kernel, (1,), (64,), [source.address, target.address])
    group.synchronize()
    return target.view(np.uint32, (num_out, 64)).view(np.uint32)


def without(lines: Iterable[str], dropped: str) -> str:
    """The text of `lines` with the one line marked `# <dropped>` replaced by nothing; asserts that there is one."""
    kept, hits = [], 0
    for line in lines:
        text, _, mark = line.partition("#")
        if dropped and mark.strip() == dropped:
            hits += 1
        else:
            kept.append(text)
    assert hits or not dropped, dropped
    return "\n".join(kept)
