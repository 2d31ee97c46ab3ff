"""Traffic counters: bytes by direction, address class and width; remote bytes; LDS; matrix and dynamic instructions."""

from __future__ import annotations

import numpy as np

from megamoe.backends.gfx950.emulator import WIDTHS, Traffic
from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup

from .assembly import kernel_of

HEAD = "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 4, v0\ns_waitcnt lgkmcnt(0)\n"


def run(body: str, *, items: int = 64, groups: int = 1, lds_bytes: int = 0, remote: bool = False) -> Traffic:
    """Counters of `body`: s[4:5] class 3 of 4 KiB, s[6:7] class 5 of 4 KiB, of the own or of the other rank."""
    with DeviceGroup(DeviceConfig(num_ranks=2)) as group:
        device = group.devices[0]
        source = device.allocate(4096, klass=3)
        target = group.symmetric_heap(4096, klass=5)[1 if remote else 0]
        handle = device.default_stream.launch(
            kernel_of(HEAD + body, lds_bytes=lds_bytes), (groups,), (items,), [source.address, target.address]
        )
        group.synchronize()
        assert handle is not None
        return handle.traffic


def cells(traffic: Traffic) -> dict[tuple[int, int, int], int]:
    """(direction, class, width) of what is not zero; class 15 are the arguments."""
    return {
        (int(d), int(k), WIDTHS[w]): int(traffic.bytes[d, k, w])
        for d, k, w in zip(*np.nonzero(traffic.bytes), strict=True)
        if k != 15
    }


def test_loads_and_stores_of_every_width() -> None:
    widths = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    for name, width in widths.items():
        register = f"v[8:{7 + width // 4}]" if width > 4 else "v8"
        body = f"global_load_{name} {register}, v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
        body += f"global_store_{name.lstrip('u')} v1, {register}, s[6:7]"
        assert cells(run(body)) == {(0, 3, width): 64 * width, (1, 5, width): 64 * width}


def test_only_active_lanes_of_all_workgroups_count() -> None:
    traffic = run("s_mov_b64 exec, 0xfff\nglobal_load_dword v8, v1, s[4:5]", groups=3)
    assert cells(traffic) == {(0, 3, 4): 3 * 12 * 4}


def test_buffer_lanes_out_of_range_move_nothing() -> None:
    body = "s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_movk_i32 s10, 0x100\ns_mov_b32 s11, 0x27000\n"
    body += "buffer_load_dwordx4 v[8:11], v1, s[8:11], 0 offen"
    assert cells(run(body)) == {(0, 3, 16): 256}


def test_remote_bytes_and_atomics() -> None:
    body = "v_mov_b32_e32 v2, 1\nglobal_atomic_add v1, v2, s[6:7]\nglobal_store_dword v1, v2, s[6:7]"
    for remote in (False, True):
        traffic = run(body, remote=remote)
        assert cells(traffic) == {(2, 5, 4): 256, (1, 5, 4): 256}
        assert traffic.remote_bytes == ((0, 256, 256) if remote else (0, 0, 0))


def test_scalar_loads_count_once_a_wave() -> None:
    traffic = run("s_load_dwordx8 s[8:15], s[4:5], 0x0\ns_waitcnt lgkmcnt(0)", items=128)
    assert cells(traffic) == {(0, 3, 32): 64}


def test_lds_and_loads_into_lds() -> None:
    body = "s_mov_b32 m0, 0\nglobal_load_lds_dwordx4 v1, s[4:5]\ns_waitcnt vmcnt(0)\n"
    body += "ds_read_b128 v[8:11], v1\ns_waitcnt lgkmcnt(0)\nds_write_b64 v1, v[8:9]"
    traffic = run(body, lds_bytes=1024)
    assert traffic.lds_bytes == (64 * 16, 64 * 8)
    assert traffic.lds_dma_bytes == 1024
    assert cells(traffic) == {(0, 3, 16): 1024}


def test_dynamic_and_matrix_instructions() -> None:
    body = "s_mov_b32 s8, 5\nloop:\nv_mfma_f32_16x16x4_f32 v[8:11], v2, v3, 0\ns_sub_u32 s8, s8, 1\n"
    body += "s_cmp_lg_u32 s8, 0\ns_cbranch_scc1 loop"
    traffic = run(body, items=128, groups=2)
    assert traffic.num_mfma == 4 * 5
    assert traffic.executed["s_sub_u32"] == 20
    assert traffic.num_instructions == 4 * (3 + 1 + 5 * 4 + 1)


def test_lanes_of_one_instruction_over_several_ranks() -> None:
    """The first 16 lanes write to their own rank, the next 40 to another, the last 8 to their own again."""
    body = "v_mov_b32_e32 v2, s4\nv_mov_b32_e32 v3, s5\ns_mov_b32 exec_lo, 0xffff0000\ns_mov_b32 exec_hi, 0x00ffffff\n"
    body += "v_mov_b32_e32 v2, s6\nv_mov_b32_e32 v3, s7\ns_mov_b64 exec, -1\n"
    body += "global_store_dwordx2 v[2:3], v[0:1], off"
    traffic = run(body, remote=True)
    assert cells(traffic) == {(1, 3, 8): 24 * 8, (1, 5, 8): 40 * 8}
    assert traffic.remote_bytes == (0, 40 * 8, 0)


def test_instructions_of_waits_are_told_apart() -> None:
    """A loop that sleeps waits; one around it, and one that does not sleep, work."""
    wait = (
        "s_movk_i32 s9, 7\nwait:\ns_sleep 1\ns_sub_u32 s9, s9, 1\ns_cmp_lg_u32 s9, 0\ns_cbranch_scc1 wait\n"
    )
    body = f"s_mov_b32 s8, 3\nwork:\n{wait}s_sub_u32 s8, s8, 1\ns_cmp_lg_u32 s8, 0\ns_cbranch_scc1 work"
    traffic = run(body)
    assert traffic.num_waiting == 3 * 7 * 4
    assert traffic.num_instructions - traffic.num_waiting == 3 + 1 + 3 * (1 + 3) + 1
