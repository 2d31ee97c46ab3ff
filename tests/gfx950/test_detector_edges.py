"""Detectors at their edges: who came first, how many came, how much is on its way, where a line ends."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import MemoryFaultError

from .assembly import kernel_of

HEAD = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_mov_b32_e32 v3, 0
v_readfirstlane_b32 s8, v0
s_lshr_b32 s8, s8, 6
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, 1
"""
# A wave that other waves of the same launch overtake by far.
DAWDLE = """s_movk_i32 s9, 2000
again:
s_sub_u32 s9, s9, 1
s_cmp_lg_u32 s9, 0
s_cbranch_scc1 again
"""


def reports(body: str, num_waves: int = 1) -> list[str]:
    with DeviceGroup(DeviceConfig.checked(seed=1)) as group:
        target = group.devices[0].allocate(4096, "target")
        kernel = kernel_of(HEAD + body, lds_bytes=256)
        group.devices[0].default_stream.launch(kernel, (1,), (64 * num_waves,), [0, target.address])
        group.synchronize()
        return [report.text for report in group.reports()]


@pytest.mark.parametrize("space", ["LDS", "global-memory"])
@pytest.mark.parametrize(("reader", "writer"), list(permutations(range(4), 2)))
def test_a_write_races_with_an_earlier_read_of_any_wave(space: str, reader: int, writer: int) -> None:
    read, write = ("ds_read_b32 v4, v3", "ds_write_b32 v3, v3")
    if space != "LDS":
        read, write = ("global_load_dword v4, v3, s[6:7]", "global_store_dword v3, v3, s[6:7]")
    body = f"""s_cmp_eq_u32 s8, {reader}
s_cbranch_scc0 other
{read}
s_waitcnt vmcnt(0) lgkmcnt(0)
s_endpgm
other:
s_cmp_eq_u32 s8, {writer}
s_cbranch_scc0 end
{DAWDLE}{write}
end:"""
    (text,) = reports(body, 4)
    assert f"{space} race" in text
    assert f"wave {writer}" in text.split("and")[0] or f"wave {writer}," in text
    assert f"wave {reader}" in text


@pytest.mark.parametrize(("second", "found"), [(56, 0), (60, 1), (64, 1), (68, 0)])
@pytest.mark.parametrize("space", ["LDS", "global-memory"])
def test_an_access_over_the_end_of_a_line(space: str, second: int, found: int) -> None:
    """The first wave writes bytes 60 to 67, the second four bytes."""
    first, other = "ds_write_b64 v3, v[4:5] offset:60", f"ds_write_b32 v3, v4 offset:{second}"
    if space != "LDS":
        first = "global_store_dwordx2 v3, v[4:5], s[6:7] offset:60"
        other = f"global_store_dword v3, v4, s[6:7] offset:{second}"
    texts = reports(f"s_cmp_eq_u32 s8, 0\ns_cbranch_scc0 other\n{first}\ns_endpgm\nother:\n{other}", 2)
    assert len(texts) == found
    assert all(f"{space} race" in text for text in texts)


def test_an_earlier_reader_is_not_forgotten_for_a_later_one() -> None:
    """A reader on one stream; a reader and then a writer on another: only the first reader races with the writer."""
    read = kernel_of(HEAD + "global_load_dword v4, v3, s[6:7]\ns_waitcnt vmcnt(0)", name="reader")
    write = kernel_of(HEAD + "global_store_dword v3, v3, s[6:7]", name="writer")
    with DeviceGroup(DeviceConfig.checked()) as group:
        target = group.devices[0].allocate(64, "target")
        early, late = group.devices[0].stream(), group.devices[0].stream()
        early.launch(read, (1,), (64,), [0, target.address])
        late.launch(read, (1,), (64,), [0, target.address])
        late.launch(write, (1,), (64,), [0, target.address])
        group.synchronize()
        (report,) = group.reports()
    assert "global-memory race: writer" in report.text
    assert "reader (launch 0)" in report.text


LOADS = "\n".join(f"global_load_dword v{10 + k}, v3, s[6:7] offset:{4 * k}" for k in range(30))


@pytest.mark.parametrize("left", [0, 1, 15, 16, 17, 29])
def test_a_count_of_loads_left_is_exact(left: int) -> None:
    """Of thirty loads all but `left` have come after the wait: the last of those may be used, the next may not."""
    wait = f"{LOADS}\ns_waitcnt vmcnt({left})\nv_mov_b32_e32 v5, v"
    assert reports(f"{wait}{10 + 29 - left}") == []
    if left:
        (text,) = reports(f"{wait}{10 + 30 - left}")
        assert "register used before its s_waitcnt" in text


def test_scalar_loads_come_in_any_order() -> None:
    """Only waiting for all of them waits for one."""
    loads = "s_load_dword s20, s[6:7], 0x0\ns_load_dword s21, s[6:7], 0x4\ns_waitcnt lgkmcnt({})\ns_mov_b32 s22, s20"
    assert reports(loads.format(0)) == []
    (text,) = reports(loads.format(1))
    assert "register used before its s_waitcnt" in text


TWO_LANES = """s_mov_b64 exec, 3
v_mov_b32_e32 v6, s6
v_mov_b32_e32 v7, s7
s_mov_b64 exec, 1
v_mov_b32_e32 v6, s4
v_mov_b32_e32 v7, s5
s_mov_b64 exec, 3
"""


@pytest.mark.parametrize(
    ("access", "last"),
    [
        ("global_load_ubyte v5, v3, s[6:7] offset:{}", 511), ("global_load_dword v5, v3, s[6:7] offset:{}", 508),
        ("global_store_byte v3, v4, s[6:7] offset:{}", 511),
        ("global_store_dwordx4 v3, v[4:7], s[6:7] offset:{}", 496),
        ("global_load_ubyte v5, v[6:7], off offset:{}", 511),
        ("global_load_dwordx2 v[8:9], v[6:7], off offset:{}", 504),
        ("ds_read_u8 v5, v3 offset:{}", 255), ("ds_read_b32 v5, v3 offset:{}", 252),
        ("ds_write_b8 v3, v4 offset:{}", 255), ("ds_write_b64 v3, v[4:5] offset:{}", 248),
        ("scratch_load_ubyte v5, off, off offset:{}", 15), ("scratch_load_dword v5, off, off offset:{}", 12),
        ("scratch_store_dwordx2 off, v[4:5], off offset:{}", 8),
    ],
)  # fmt: skip
def test_memory_ends_where_it_ends(access: str, last: int) -> None:
    """At the last place an access is fine, a byte further it is a fault. v[6:7]: two lanes, one in a larger buffer."""
    for beyond in (0, 1):
        with DeviceGroup(DeviceConfig()) as group:
            device = group.devices[0]
            target, other = device.allocate(512, "target"), device.allocate(1024, "other")
            body = HEAD + TWO_LANES * ("v[6:7], off" in access) + access.format(last + beyond)
            kernel = kernel_of(body, lds_bytes=256, scratch_bytes=16)
            device.default_stream.launch(kernel, (1,), (64,), [other.address, target.address])
            if beyond:
                with pytest.raises(MemoryFaultError, match="outside of"):
                    group.synchronize()
            else:
                group.synchronize()


def test_registers_and_lds_start_poisoned() -> None:
    """What was never written is neither zero nor a small number: a NaN in vector registers and LDS."""
    body = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 4, v0
s_waitcnt lgkmcnt(0)
ds_read_b32 v5, v1
v_mov_b32_e32 v6, s40
s_waitcnt lgkmcnt(0)
v_mov_b32_e32 v4, v90
v_mov_b32_e32 v7, 0
global_store_dwordx4 v1, v[4:7], s[6:7]"""
    with DeviceGroup(DeviceConfig()) as group:
        target = group.devices[0].allocate(1024)
        kernel = kernel_of(body, lds_bytes=1024)
        group.devices[0].default_stream.launch(kernel, (1,), (64,), [0, target.address])
        group.synchronize()
        assert (
            target.view(np.uint32).reshape(64, 4).tolist() == [[0x7FC0DEAD, 0x7FC0DEAD, 0xDEADBEEF, 0]] * 64
        )


def words_of(body: str, num_words: int = 64) -> list[int]:
    """What one wave leaves in v5: s[4:5] is a buffer of the numbers from 1 on, v1 the lane times four."""
    head = "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\n"
    head += "v_mov_b32_e32 v5, -1\ns_waitcnt lgkmcnt(0)\n"
    tail = "\ns_waitcnt vmcnt(0)\ns_mov_b64 exec, -1\nglobal_store_dword v1, v5, s[6:7]"
    with DeviceGroup(DeviceConfig()) as group:
        device = group.devices[0]
        source, target = device.upload(np.arange(1, 257, dtype=np.uint32)), device.allocate(256)
        device.default_stream.launch(
            kernel_of(head + body + tail), (1,), (64,), [source.address, target.address]
        )
        group.synchronize()
        found: list[int] = target.view(np.uint32).tolist()
        return found[:num_words]


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5, 7, 8, 40, 41, 255, 256])
def test_a_descriptor_ends_where_it_ends(limit: int) -> None:
    """A lane whose four bytes do not all lie below num_records gets zero."""
    body = f"s_mov_b32 s8, s4\ns_mov_b32 s9, s5\ns_movk_i32 s10, {limit}\ns_mov_b32 s11, 0x00027000\n"
    got = words_of(body + "buffer_load_dword v5, v1, s[8:11], 0 offen")
    assert got == [lane + 1 if 4 * lane + 4 <= limit else 0 for lane in range(64)]


@pytest.mark.parametrize("lanes", [0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_branches_look_at_all_lanes(lanes: int) -> None:
    """On EXEC and VCC that have lanes in one half only."""
    for name, register in (("exec", "exec"), ("vcc", "vcc")):
        body = (
            f"s_mov_b32 {register}_lo, {lanes & 0xFFFFFFFF:#x}\ns_mov_b32 {register}_hi, {lanes >> 32:#x}\n"
        )
        body += f"s_movk_i32 s8, 0\ns_cbranch_{name}z none\ns_add_u32 s8, s8, 1\nnone:\n"
        body += (
            f"s_cbranch_{name}nz some\ns_add_u32 s8, s8, 2\nsome:\ns_mov_b64 exec, -1\nv_mov_b32_e32 v5, s8"
        )
        assert words_of(body, 1) == [1 if lanes else 2]


@pytest.mark.parametrize(("distance", "inside"), [(50, True), (54, True), (55, False), (1 << 20, False)])
def test_indexed_scalar_registers_end_before_vcc(distance: int, inside: bool) -> None:
    """s[50 + M0] by pairs: s[104:105] is the last one."""
    body = f"s_mov_b32 m0, {distance & 0xFFFFFFFF:#x}\ns_movreld_b64 s[50:51], s[4:5]"
    if inside:
        words_of(body)
    else:
        with pytest.raises(MemoryFaultError, match="indexed scalar register .* is out of range"):
            words_of(body)
