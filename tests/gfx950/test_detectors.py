"""Each detector catches its fault: correct kernels give no report, and the same kernel with one line removed gives one."""

# ruff: noqa: E501  (tables of cases read best with one case a line)

from __future__ import annotations

import numpy as np
import pytest

from megamoe.backends.gfx950.emulator.device import DeviceConfig, DeviceGroup
from megamoe.backends.gfx950.emulator.errors import (
    DeadlockError,
    MemoryFaultError,
    UnimplementedInstructionError,
)

from .assembly import kernel_of, without

# Four waves reverse 256 words through LDS, twice.
REVERSE = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_sub_u32_e32 v2, 0x3fc, v1
s_waitcnt lgkmcnt(0)                # scalar wait
global_load_dword v3, v1, s[4:5]
s_waitcnt vmcnt(0)                  # load wait
ds_write_b32 v1, v3
s_waitcnt lgkmcnt(0)                # write wait
s_barrier                           # write barrier
ds_read_b32 v4, v2
s_waitcnt lgkmcnt(0)                # read wait
s_barrier                           # read barrier
v_add_u32_e32 v4, 1, v4
ds_write_b32 v1, v4
s_waitcnt lgkmcnt(0)
s_barrier
ds_read_b32 v5, v2
s_waitcnt lgkmcnt(0)
global_store_dword v1, v5, s[6:7]""".splitlines()


def _reverse(dropped: str, seed: int = 5) -> tuple[list[str], bool]:
    kernel = kernel_of(without(REVERSE, dropped), lds_bytes=1024, name="reverse")
    with DeviceGroup(DeviceConfig.checked(seed=seed)) as group:
        device = group.devices[0]
        x = np.arange(256, dtype=np.uint32)
        source, target = device.upload(x), device.allocate(1024)
        device.default_stream.launch(kernel, (1,), (256,), [source.address, target.address])
        try:
            group.synchronize()
        except MemoryFaultError as error:
            return [str(error)], False
        return [r.text for r in group.reports()], bool((target.view(np.uint32) == x + 1).all())


@pytest.mark.parametrize("seed", range(8))
def test_correct_exchange_through_lds_has_no_report(seed: int) -> None:
    assert _reverse("", seed) == ([], True)


@pytest.mark.parametrize(
    ("dropped", "kind"),
    [
        ("scalar wait", "register used before its s_waitcnt"), ("load wait", "register used before its s_waitcnt"),
        ("read wait", "register used before its s_waitcnt"), ("write wait", "LDS race"), ("write barrier", "LDS race"),
        ("read barrier", "LDS race"),
    ],
)  # fmt: skip
def test_missing_wait_or_barrier_is_reported(dropped: str, kind: str) -> None:
    reports, _ = _reverse(dropped)
    assert any(kind in text for text in reports), reports
    assert all("reverse" in text and "workgroup 0, wave" in text and "`" in text for text in reports)


OVERLAID = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)
global_load_dword v2, v1, s[4:5]
{second}
s_waitcnt vmcnt({vm}) lgkmcnt(0)
global_store_dword v1, v2, s[6:7]"""


@pytest.mark.parametrize(
    ("second", "vm", "reports"),
    [
        ("global_load_dword v2, v1, s[4:5] offset:4", 0, 0), ("global_load_dword v2, v1, s[4:5] offset:4", 1, 1),
        ("ds_read_b32 v2, v1", 0, 1),
    ],
)  # fmt: skip
def test_two_loads_of_one_register_come_in_order_only_from_one_memory(
    second: str, vm: int, reports: int
) -> None:
    kernel = kernel_of(OVERLAID.format(second=second, vm=vm), lds_bytes=256)
    with DeviceGroup(DeviceConfig.checked()) as group:
        device = group.devices[0]
        source, target = device.upload(np.arange(65, dtype=np.uint32)), device.allocate(256)
        device.default_stream.launch(kernel, (1,), (64,), [source.address, target.address])
        group.synchronize()
        found = [r.text for r in group.reports() if "register used before" in r.text]
        assert len(found) == reports, found


LDS_DMA = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
s_mov_b32 m0, 0
s_waitcnt lgkmcnt(0)
global_load_lds_dword v1, s[4:5]
s_waitcnt vmcnt(0)                  # dma wait
ds_read_b32 v5, v1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v5, s[6:7]""".splitlines()


@pytest.mark.parametrize(("dropped", "reports"), [("", 0), ("dma wait", 1)])
def test_lds_read_before_its_load_has_come(dropped: str, reports: int) -> None:
    kernel = kernel_of(without(LDS_DMA, dropped), lds_bytes=256)
    with DeviceGroup(DeviceConfig.checked()) as group:
        device = group.devices[0]
        source, target = device.upload(np.arange(64, dtype=np.uint32)), device.allocate(256)
        device.default_stream.launch(kernel, (1,), (64,), [source.address, target.address])
        group.synchronize()
        texts = [r.text for r in group.reports()]
        assert len(texts) == reports
        assert all("LDS used before its s_waitcnt" in text for text in texts)


# Rank 0 writes 128 words of two waves and raises a flag; rank 1 waits for it and copies them. args: data, flag, output.
PRODUCER = """s_load_dwordx4 s[4:7], s[0:1], 0x0
v_lshlrev_b32_e32 v1, 2, v0
v_add_u32_e32 v2, 1000, v0
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v4, 1
s_waitcnt lgkmcnt(0)
global_store_dword v1, v2, s[4:5]
s_waitcnt vmcnt(0)                  # store wait
s_barrier                           # producer barrier
v_cmp_eq_u32_e32 vcc, 0, v0
s_and_saveexec_b64 s[8:9], vcc
s_cbranch_execz end
buffer_wbl2 sc0 sc1                 # release
s_waitcnt vmcnt(0)                  # release wait
global_store_dword v3, v4, s[6:7] sc0 sc1
end:""".splitlines()
CONSUMER = """s_load_dwordx4 s[4:7], s[0:1], 0x0
s_load_dwordx2 s[10:11], s[0:1], 0x10
v_lshlrev_b32_e32 v1, 2, v0
v_mov_b32_e32 v3, 0
s_waitcnt lgkmcnt(0)
poll:
s_sleep 1
global_load_dword v5, v3, s[6:7] sc0 sc1
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s12, v5
s_cmp_eq_u32 s12, 1
s_cbranch_scc0 poll                 # flag wait
buffer_inv sc0 sc1                  # acquire
s_waitcnt vmcnt(0)
global_load_dword v6, v1, s[4:5]
s_waitcnt vmcnt(0)
global_store_dword v1, v6, s[10:11]""".splitlines()


def _message(dropped: str, *, scope: str = "sc0 sc1", seed: int = 1) -> tuple[list[str], bool]:
    pick = [
        dropped if any(f"# {dropped}" in line for line in lines) else "" for lines in (PRODUCER, CONSUMER)
    ]
    producer = kernel_of(
        without(PRODUCER, pick[0]).replace("wbl2 sc0 sc1", f"wbl2 {scope}"), num_args=3, name="producer"
    )
    consumer = kernel_of(without(CONSUMER, pick[1]), num_args=3, name="consumer")
    with DeviceGroup(DeviceConfig.checked(num_ranks=2, seed=seed)) as group:
        heap, out = group.symmetric_heap(1024), group.devices[1].allocate(512)
        for rank, kernel in ((1, consumer), (0, producer)):
            args = [heap[1].address, heap[1].address + 512, out.address]
            group.devices[rank].default_stream.launch(kernel, (1,), (128,), args)
        group.synchronize()
        return [r.text for r in group.reports()], bool((out.view(np.uint32) == np.arange(128) + 1000).all())


@pytest.mark.parametrize("seed", range(8))
def test_released_message_between_ranks_has_no_report(seed: int) -> None:
    assert _message("", seed=seed) == ([], True)


@pytest.mark.parametrize(
    "dropped", ["store wait", "producer barrier", "release", "release wait", "acquire", "flag wait"]
)
def test_unordered_message_between_ranks_is_reported(dropped: str) -> None:
    texts = [text for seed in range(1, 5) for text in _message(dropped, seed=seed)[0]]
    assert any(
        "global-memory race: consumer" in text and "producer" in text and "heap[1]" in text for text in texts
    ), texts


def test_device_scope_is_too_narrow_between_ranks() -> None:
    reports, _ = _message("", scope="sc1")
    assert any("global-memory race" in text for text in reports)


# Each line changes the cache bits of one instruction: text before and after, and whether agent scope is enough then.
CACHE_BITS = {
    "flag store without": ("global_store_dword v3, v4, s[6:7] sc0 sc1", "global_store_dword v3, v4, s[6:7]", False),
    "flag store of the workgroup": ("global_store_dword v3, v4, s[6:7] sc0 sc1", "global_store_dword v3, v4, s[6:7] sc0", False),
    "flag store of the agent": ("global_store_dword v3, v4, s[6:7] sc0 sc1", "global_store_dword v3, v4, s[6:7] sc1", True),
    "flag load without": ("global_load_dword v5, v3, s[6:7] sc0 sc1", "global_load_dword v5, v3, s[6:7]", False),
    "flag load of the workgroup": ("global_load_dword v5, v3, s[6:7] sc0 sc1", "global_load_dword v5, v3, s[6:7] sc0", False),
    "flag load of the agent": ("global_load_dword v5, v3, s[6:7] sc0 sc1", "global_load_dword v5, v3, s[6:7] sc1", True),
    "write-back without": ("buffer_wbl2 sc0 sc1", "buffer_wbl2", False),
    "write-back of the agent": ("buffer_wbl2 sc0 sc1", "buffer_wbl2 sc1", True),
    "invalidation without": ("buffer_inv sc0 sc1", "buffer_inv", False),
    "invalidation of the agent": ("buffer_inv sc0 sc1", "buffer_inv sc1", True),
    "write-back for invalidation": ("buffer_inv sc0 sc1", "buffer_wbl2 sc0 sc1", False),
    "invalidation for write-back": ("buffer_wbl2 sc0 sc1", "buffer_inv sc0 sc1", False),
}  # fmt: skip


def _with_bits(name: str, *, same_rank: bool, seed: int) -> list[str]:
    before, after, _ = CACHE_BITS[name]
    texts = [without(lines, "") for lines in (PRODUCER, CONSUMER)]
    assert sum(before in text for text in texts) == 1
    producer, consumer = (
        kernel_of(text.replace(before, after), num_args=3, name=kernel)
        for text, kernel in zip(texts, ("producer", "consumer"), strict=True)
    )
    with DeviceGroup(DeviceConfig.checked(num_ranks=2, seed=seed)) as group:
        heap, out = group.symmetric_heap(1024), group.devices[1].allocate(512)
        for rank, kernel in ((1, consumer), (1 if same_rank else 0, producer)):
            args = [heap[1].address, heap[1].address + 512, out.address]
            group.devices[rank].stream().launch(kernel, (1,), (128,), args)
        group.synchronize()
        return [r.text for r in group.reports()]


@pytest.mark.parametrize("name", CACHE_BITS)
@pytest.mark.parametrize("same_rank", [False, True])
def test_missing_or_too_narrow_cache_bits_are_reported(name: str, same_rank: bool) -> None:
    enough = same_rank and CACHE_BITS[name][2]
    for seed in (1, 2, 3):
        reports = _with_bits(name, same_rank=same_rank, seed=seed)
        assert bool(reports) != enough, reports
        assert all("global-memory race: " in text for text in reports)


def test_a_missing_peer_is_a_deadlock_that_names_the_poll() -> None:
    consumer = kernel_of(without(CONSUMER, ""), num_args=3, name="consumer")
    with DeviceGroup(DeviceConfig(num_ranks=2)) as group:
        heap, out = group.symmetric_heap(1024), group.devices[1].allocate(512)
        group.devices[1].default_stream.launch(
            consumer, (1,), (128,), [heap[1].address, heap[1].address + 512, out.address]
        )
        with pytest.raises(
            DeadlockError, match=r"2 waves cannot go on: consumer .* polls .*\(heap\[1\]\+512\) and sees 0x0"
        ):
            group.synchronize()


def test_a_barrier_that_one_wave_skips_is_a_deadlock() -> None:
    body = "v_readfirstlane_b32 s8, v0\ns_cmp_eq_u32 s8, 0\ns_cbranch_scc1 spin\ns_barrier\ns_endpgm\nspin:\ns_sleep 1\n"
    body += "global_load_dword v5, v3, s[6:7] sc0 sc1\ns_branch spin"
    kernel = kernel_of(
        "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_mov_b32_e32 v3, 0\ns_waitcnt lgkmcnt(0)\n" + body
    )
    with DeviceGroup(DeviceConfig()) as group:
        flag = group.devices[0].allocate(64, "flag")
        group.devices[0].default_stream.launch(kernel, (1,), (128,), [0, flag.address])
        with pytest.raises(DeadlockError, match="waits at .*s_barrier"):
            group.synchronize()


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (
            "global_load_dword v5, v1, s[6:7] offset:4",
            "lane 63, at .*load of 4 bytes .* outside .*the buffer before it is target, 256 bytes",
        ),
        ("global_store_dwordx4 v1, v[4:7], s[6:7]", "store of 16 bytes"),
        ("global_load_dword v5, v[2:3], off", "outside of every allocation"),
        ("ds_read_b32 v5, v1 offset:8", "LDS read of 4 bytes at 256"),
        ("global_atomic_add v1, v4, s[6:7] offset:2", "not aligned to 4 bytes"),
        ("scratch_load_dword v5, off, off offset:64", "scratch offset 64"),
    ],
)
def test_addresses_out_of_range_are_errors(body: str, match: str) -> None:
    head = "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\nv_mov_b32_e32 v2, 0\nv_mov_b32_e32 v3, 0\nv_mov_b32_e32 v4, 0\ns_waitcnt lgkmcnt(0)\n"
    kernel = kernel_of(head + body, lds_bytes=256, scratch_bytes=16)
    with DeviceGroup(DeviceConfig()) as group:
        target = group.devices[0].allocate(256, "target")
        stream = group.devices[0].default_stream
        stream.launch(kernel, (1,), (64,), [0, target.address])
        with pytest.raises(MemoryFaultError, match=match):
            group.synchronize()
        good = kernel_of(head + "global_store_dword v1, v1, s[6:7]")
        group.devices[0].stream().launch(good, (1,), (64,), [0, target.address])
        group.synchronize()
        np.testing.assert_array_equal(target.view(np.uint32), 4 * np.arange(64))


def test_memory_of_another_rank_is_private_unless_symmetric() -> None:
    kernel = kernel_of(
        "s_load_dwordx4 s[4:7], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v1, s[6:7]"
    )
    with DeviceGroup(DeviceConfig(num_ranks=2)) as group:
        mine, shared = group.devices[1].allocate(256), group.symmetric_heap(256)
        group.devices[0].default_stream.launch(kernel, (1,), (64,), [0, shared[1].address])
        group.synchronize()
        group.devices[0].default_stream.launch(kernel, (1,), (64,), [0, mine.address])
        with pytest.raises(MemoryFaultError, match="private memory of rank 1"):
            group.synchronize()


def test_an_instruction_that_is_not_executed_is_named() -> None:
    kernel = kernel_of("v_cubeid_f32 v1, v2, v3, v4")
    with DeviceGroup(DeviceConfig()) as group:
        group.devices[0].default_stream.launch(kernel, (1,), (64,), [0, 0])
        with pytest.raises(
            UnimplementedInstructionError,
            match=r"kernel, workgroup 0, wave 0, at \+0x0 .*v_cubeid_f32 is not implemented",
        ):
            group.synchronize()


# Two waves: the first writes bytes [a, a + 4) of a line, the second bytes [b, b + width) with stores of `width`.
def _neighbours(space: str, store: str, b: int) -> list[str]:
    data = "v[4:5]" if store in ("b64", "dwordx2") else "v4"
    if space == "lds":
        first, second = "ds_write_b32 v3, v4", f"ds_write_{store} v3, {data} offset:{b}"
    else:
        first, second = (
            "global_store_dword v3, v4, s[6:7]",
            f"global_store_{store} v3, {data}, s[6:7] offset:{b}",
        )
    body = f"""s_load_dwordx4 s[4:7], s[0:1], 0x0
v_mov_b32_e32 v3, 0
v_readfirstlane_b32 s8, v0
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, 1
s_cmp_eq_u32 s8, 0
s_cbranch_scc0 second
{first}
s_endpgm
second:
{second}"""
    with DeviceGroup(DeviceConfig.checked()) as group:
        target = group.devices[0].allocate(256, "target")
        group.devices[0].default_stream.launch(
            kernel_of(body, lds_bytes=256), (1,), (128,), [0, target.address]
        )
        group.synchronize()
        return [r.text for r in group.reports()]


@pytest.mark.parametrize(("store", "width"), [("b8", 1), ("b16", 2), ("b32", 4), ("b64", 8)], ids=str)
@pytest.mark.parametrize("space", ["lds", "global"])
def test_races_are_exact_to_the_byte(space: str, store: str, width: int) -> None:
    name = store if space == "lds" else {1: "byte", 2: "short", 4: "dword", 8: "dwordx2"}[width]
    for b in range(0, 16, width):
        reports = _neighbours(space, name, b)
        assert len(reports) == (1 if b < 4 else 0), (b, reports)
        assert all("race" in text for text in reports)
