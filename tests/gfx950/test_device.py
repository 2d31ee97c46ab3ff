"""Streams, events, graphs, residency, host threads, determinism, hardware registers, code objects."""

# ruff: noqa: E501  (assembly and tables read best with one case a line)

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.build import FLAGS, build, find_compiler
from megamoe.backends.gfx950.emulator.code_object import CodeObject
from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import (
    CodeObjectError,
    DeadlockError,
    EmulatorError,
    ToolchainError,
)
from megamoe.backends.gfx950.emulator.msgpack import unpack
from megamoe.backends.gfx950.emulator.native import implemented

from .assembly import kernel_of
from .test_flydsl import exchange_kernel

HEAD = "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\nv_mov_b32_e32 v9, 0\ns_waitcnt lgkmcnt(0)\n"
DOUBLE = (
    HEAD
    + "global_load_dword v2, v1, s[4:5]\ns_waitcnt vmcnt(0)\nv_add_u32_e32 v2, v2, v2\nglobal_store_dword v1, v2, s[6:7]"
)
# Waits for the word at arg0 to become arg1's word.
WAIT = (
    HEAD
    + "global_load_dword v3, v9, s[6:7]\nloop:\ns_sleep 1\nglobal_load_dword v2, v9, s[4:5] sc0 sc1\ns_waitcnt vmcnt(0)\nv_cmp_ne_u32_e32 vcc, v2, v3\ns_cbranch_vccnz loop"
)
RAISE = HEAD + "v_mov_b32_e32 v2, 1\ns_waitcnt vmcnt(0)\nglobal_atomic_add v9, v2, s[4:5] sc1"


def test_a_stream_is_ordered_and_a_graph_replays() -> None:
    kernel = kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig.checked(seed=1)) as group:
        device = group.devices[0]
        buffer = device.upload(np.arange(64, dtype=np.uint32))
        stream = device.stream()
        stream.begin_capture()
        for _ in range(3):
            assert stream.launch(kernel, (1,), (64,), [buffer.address, buffer.address]) is None
        graph = stream.end_capture()
        group.synchronize()
        np.testing.assert_array_equal(buffer.view(np.uint32), np.arange(64))
        for _ in range(2):
            graph.replay(stream)
        stream.synchronize()
        np.testing.assert_array_equal(buffer.view(np.uint32), np.arange(64) * 64)
        assert group.reports() == []


def test_streams_overlap_and_events_order_them() -> None:
    wait, raise_, double = kernel_of(WAIT, name="wait"), kernel_of(RAISE, name="raise"), kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig.checked()) as group:
        device = group.devices[0]
        flag, one = device.allocate(4), device.upload(np.ones(1, np.uint32))
        buffer, copy = device.upload(np.arange(64, dtype=np.uint32)), device.allocate(256)
        first, second = device.stream(), device.stream()
        first.launch(
            wait, (1,), (64,), [flag.address, one.address]
        )  # ends only because `raise` runs beside it
        first.launch(double, (1,), (64,), [buffer.address, copy.address])
        event = first.record_event()
        second.launch(raise_, (1,), (1,), [flag.address, 0])
        second.wait_event(event)
        second.launch(double, (1,), (64,), [copy.address, buffer.address])
        second.synchronize()
        np.testing.assert_array_equal(buffer.view(np.uint32), 4 * np.arange(64))
        assert group.reports() == []


def test_unordered_streams_race() -> None:
    double = kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig.checked()) as group:
        device = group.devices[0]
        buffer, copy = device.allocate(256), device.allocate(256)
        device.stream().launch(double, (1,), (64,), [buffer.address, copy.address])
        device.stream().launch(double, (1,), (64,), [copy.address, buffer.address])
        group.synchronize()
        assert any("global-memory race" in r.text for r in group.reports())


def test_a_grid_that_does_not_fit_deadlocks_where_its_parts_wait_for_each_other() -> None:
    # Every workgroup adds one and waits until all have: a grid barrier. Two compute units hold two workgroups of 100 KiB.
    body = (
        HEAD
        + """v_mov_b32_e32 v2, 1
    global_atomic_add v9, v2, s[4:5] sc1
    s_load_dword s8, s[6:7], 0x0
    s_waitcnt lgkmcnt(0)
    loop:
    s_sleep 1
    global_load_dword v3, v9, s[4:5] sc0 sc1
    s_waitcnt vmcnt(0)
    v_readfirstlane_b32 s9, v3
    s_cmp_eq_u32 s9, s8
    s_cbranch_scc0 loop"""
    )
    kernel = kernel_of(body, lds_bytes=100 * 1024)
    for groups, fits in ((2, True), (3, False)):
        with DeviceGroup(DeviceConfig(num_cus=2, num_xcds=2)) as group:
            device = group.devices[0]
            counter, want = device.allocate(4), device.upload(np.array([groups], np.uint32))
            device.default_stream.launch(kernel, (groups,), (1,), [counter.address, want.address])
            if fits:
                group.synchronize()
            else:
                with pytest.raises(DeadlockError, match="2 waves cannot go on"):
                    group.synchronize()


def test_workgroups_go_round_the_dies() -> None:
    body = (
        HEAD
        + "s_getreg_b32 s8, hwreg(HW_REG_XCC_ID)\nv_mov_b32_e32 v2, s8\ns_lshl_b32 s9, s2, 2\nv_mov_b32_e32 v3, s9\nglobal_store_dword v3, v2, s[4:5]"
    )
    with DeviceGroup(DeviceConfig()) as group:
        device = group.devices[0]
        out = device.allocate(4 * 600)
        device.default_stream.launch(kernel_of(body), (600,), (1,), [out.address, 0])
        group.synchronize()
        np.testing.assert_array_equal(out.view(np.uint32), np.arange(600) % 8)


def test_a_kernel_sees_256_compute_units_in_eight_dies() -> None:
    """One workgroup to a compute unit: die, shader engine and unit together are 256 different places."""
    body = (
        HEAD
        + "s_getreg_b32 s8, hwreg(HW_REG_XCC_ID)\ns_getreg_b32 s9, hwreg(HW_REG_HW_ID, 8, 8)\ns_lshl_b32 s8, s8, 16\ns_or_b32 s8, s8, s9\nv_mov_b32_e32 v2, s8\ns_lshl_b32 s9, s2, 2\nv_mov_b32_e32 v3, s9\nglobal_store_dword v3, v2, s[4:5]"
    )
    with DeviceGroup(DeviceConfig(num_ranks=2)) as group:
        device = group.devices[1]
        out = device.allocate(4 * 256)
        device.default_stream.launch(kernel_of(body, lds_bytes=160 * 1024), (256,), (64,), [out.address, 0])
        group.synchronize()
        places = out.view(np.uint32)
        assert len(set(places.tolist())) == 256
        np.testing.assert_array_equal(places >> 16, np.arange(256) % 8)
        assert set((places & 15).tolist()) == set(range(8))  # unit of its engine
        assert set((places >> 5 & 7).tolist()) == set(range(4))  # engine of its die


@pytest.mark.parametrize(
    ("items", "lds_bytes", "resident"),
    # 160 KiB of LDS in steps of 1280 bytes; 192 registers leave two waves to each of four SIMDs.
    [(64, 81 * 1024, 1), (64, 80 * 1024, 2), (64, 53 * 1024, 2), (128, 0, 4), (64, 0, 8)],
)
def test_how_many_workgroups_a_unit_holds(items: int, lds_bytes: int, resident: int) -> None:
    """A grid barrier ends when all workgroups fit on the one unit, and is a deadlock with one more."""
    body = (
        HEAD
        + """v_cmp_eq_u32_e32 vcc, 0, v0
s_and_saveexec_b64 s[10:11], vcc
s_cbranch_execz end
v_mov_b32_e32 v2, 1
global_atomic_add v9, v2, s[4:5] sc1
s_load_dword s8, s[6:7], 0x0
s_waitcnt lgkmcnt(0)
loop:
s_sleep 1
global_load_dword v3, v9, s[4:5] sc0 sc1
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s9, v3
s_cmp_eq_u32 s9, s8
s_cbranch_scc0 loop
end:"""
    )
    kernel = kernel_of(body, lds_bytes=lds_bytes)
    for groups in (resident, resident + 1):
        with DeviceGroup(DeviceConfig(num_cus=1, num_xcds=1)) as group:
            device = group.devices[0]
            counter, want = device.allocate(4), device.upload(np.array([groups], np.uint32))
            device.default_stream.launch(kernel, (groups,), (items,), [counter.address, want.address])
            if groups == resident:
                group.synchronize()
            else:
                with pytest.raises(DeadlockError):
                    group.synchronize()


def test_a_graph_of_two_streams_keeps_their_order() -> None:
    """fork: main doubles a into b; side doubles a into c; join; main doubles b into a."""
    kernel = kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig.checked(seed=3)) as group:
        device = group.devices[0]
        a, b, c = (device.upload(np.arange(64, dtype=np.uint32)) for _ in range(3))
        main, side = device.stream(), device.stream()
        main.begin_capture()
        main.launch(kernel, (1,), (64,), [a.address, a.address])
        side.wait_event(main.record_event())
        main.launch(kernel, (1,), (64,), [a.address, b.address])
        side.launch(kernel, (1,), (64,), [a.address, c.address])
        main.wait_event(side.record_event())
        main.launch(kernel, (1,), (64,), [b.address, a.address])
        graph = main.end_capture()
        assert graph.after == [(), (0,), (0,), (1, 2)]
        for _ in range(2):
            handles = graph.replay(side)  # any stream of the rank
            side.synchronize()
        assert [h.done for h in handles] == [True] * 4
        np.testing.assert_array_equal(a.view(np.uint32), np.arange(64) * 64)
        np.testing.assert_array_equal(c.view(np.uint32), np.arange(64) * 32)
        assert group.reports() == []
        assert main.launch(kernel, (1,), (64,), [a.address, b.address]) is not None  # no longer captured


def test_captures_that_do_not_hang_together_are_refused() -> None:
    kernel = kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig()) as group:
        device = group.devices[0]
        a = device.allocate(256)
        main, side = device.stream(), device.stream()
        with pytest.raises(EmulatorError, match="must have begun the capture"):
            main.end_capture()
        outside = side.record_event()
        main.begin_capture()
        with pytest.raises(EmulatorError, match="second begin"):
            main.begin_capture()
        with pytest.raises(EmulatorError, match="must not be capturing when it is synchronized"):
            main.synchronize()
        with pytest.raises(EmulatorError, match="an event must be of the capture"):
            main.wait_event(outside)
        side.wait_event(main.record_event())
        side.launch(kernel, (1,), (64,), [a.address, a.address])
        with pytest.raises(EmulatorError, match="after all 1 last launches, got 1 on streams not joined"):
            main.end_capture()
        side.launch(kernel, (1,), (64,), [a.address, a.address])
        group.synchronize()


def test_counters_go_with_their_handle() -> None:
    kernel = kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig()) as group:
        device = group.devices[0]
        a = device.allocate(256)
        kept = device.default_stream.launch(kernel, (1,), (64,), [a.address, a.address])
        for _ in range(50):
            device.default_stream.launch(kernel, (1,), (64,), [a.address, a.address])
        group.synchronize()
        assert len(group.unwanted) <= 51
        last = device.default_stream.launch(kernel, (1,), (64,), [a.address, a.address])
        assert not group.unwanted
        group.synchronize()
        assert kept is not None
        assert last is not None
        assert kept.traffic.num_instructions == last.traffic.num_instructions == len(kernel.instructions)


def test_the_same_seed_is_the_same_run() -> None:
    kernel, counts = exchange_kernel(), []
    for seed in (5, 5, 6):
        with DeviceGroup(DeviceConfig(num_ranks=2, seed=seed)) as group:
            heap = group.symmetric_heap(4096 * 8 + 32)
            for device in group.devices:
                table = device.upload(np.array([h.address for h in heap] * 4, np.uint64))
                source, out = device.allocate(4096), device.allocate(4096 * 8)
                device.default_stream.launch(
                    kernel, (2,), (256,), [table.address, source.address, out.address, device.rank, 1]
                )
            group.synchronize()
            counts.append(group.num_executed)
    assert counts[0] == counts[1] != counts[2]


def test_each_rank_may_have_its_own_host_thread() -> None:
    wait, raise_ = kernel_of(WAIT), kernel_of(RAISE)
    with DeviceGroup(DeviceConfig(num_ranks=2)) as group:
        group.hosts = 2
        flag, one = group.symmetric_heap(4), group.devices[0].upload(np.ones(1, np.uint32))
        errors: list[Exception] = []

        def waiting() -> None:
            try:
                group.devices[0].default_stream.launch(wait, (1,), (64,), [flag[0].address, one.address])
                group.devices[0].default_stream.synchronize(20)
            except EmulatorError as error:
                errors.append(error)

        thread = threading.Thread(target=waiting)
        thread.start()
        time.sleep(0.2)
        assert thread.is_alive()
        group.devices[1].default_stream.launch(raise_, (1,), (1,), [flag[0].address, 0])
        group.devices[1].default_stream.synchronize(20)
        thread.join(20)
        assert not thread.is_alive()
        assert not errors


def test_arguments_and_sizes_are_checked() -> None:
    kernel = kernel_of(DOUBLE)
    with DeviceGroup(DeviceConfig()) as group:
        stream = group.devices[0].default_stream
        with pytest.raises(CodeObjectError, match="arguments of kernel must be 2, got 1"):
            stream.launch(kernel, (1,), (64,), [0])
        with pytest.raises(CodeObjectError, match="argument arg1 must fit 8 bytes"):
            stream.launch(kernel, (1,), (64,), [0, 2**64])
        with pytest.raises(EmulatorError, match="block of kernel must have at most 1024 items, got 2048"):
            stream.launch(kernel, (1,), (2048,), [0, 0])
        with pytest.raises(EmulatorError, match="with 192 registers must have at most 8 waves, got 16"):
            stream.launch(kernel, (1,), (1024,), [0, 0])
        with pytest.raises(EmulatorError, match="LDS .* must be at most 163840 bytes, got 163841"):
            stream.launch(kernel, (1,), (64,), [0, 0], lds_bytes=163841)
        with pytest.raises(EmulatorError, match="grid must be up to three sizes"):
            stream.launch(kernel, (0,), (64,), [0, 0])


@pytest.mark.parametrize(
    ("data", "match"),
    [(b"MZ" + bytes(100), "must be an ELF file"), (b"\x7fELF\x01\x01" + bytes(100), "64-bit little-endian"), (b"\x7fELF\x02\x01\x01\x40" + bytes(100), "machine must be AMDGPU")],
)  # fmt: skip
def test_other_files_are_refused(data: bytes, match: str) -> None:
    with pytest.raises(CodeObjectError, match=match):
        CodeObject(data)


def test_metadata_must_be_whole() -> None:
    assert unpack(b"\x82\xa1a\x01\xa1b\x92\xc3\xcd\x01\x00") == {"a": 1, "b": [True, 256]}
    with pytest.raises(CodeObjectError, match="2 more bytes"):
        unpack(b"\x81\xa2a")
    with pytest.raises(CodeObjectError, match="1 bytes more"):
        unpack(b"\x01\x02")


def test_the_core_is_compiled_once() -> None:
    assert build() == build()


def test_the_core_compiles_without_a_system_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ziglang's clang compiles and links it; without optimization, because that takes a fraction of the time."""
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert find_compiler() == [sys.executable, "-m", "ziglang", "cc"]
    monkeypatch.setattr(f"{build.__module__}.FLAGS", [flag.replace("-O3", "-O0") for flag in FLAGS])
    library = ctypes.CDLL(str(build(folder=tmp_path)))
    assert library.emu_num_ops() == len(implemented())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ToolchainError, match="needs a C compiler"):
        find_compiler()
