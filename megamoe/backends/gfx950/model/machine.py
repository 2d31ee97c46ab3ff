"""The MI355X as the model sees it. Every number has its public source, or says that it is assumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mi355x:
    """One device of a group of eight that are linked pairwise. Times in microseconds, rates in bytes a microsecond.

    AMD's MI355X data sheet: num_cus, num_xcds, clock_mhz (peak engine clock), 8 TB/s of HBM, seven links of 153.6 GB/s
    for both directions together. mfma_cycles: 16 x 16 x 128 with an FP8 operand, by "Matrix Core Programming on AMD
    CDNA3 and CDNA4" of ROCm Blogs; 8192 operations a cycle and compute unit, as AMD says of FP8.
    CDNA 3 taken over (its white paper): 17.2 TB/s of Infinity Cache; four SIMDs a compute unit, 16 lanes wide, and on
    each an instruction of a wave every 4 cycles; 128 bytes of LDS a cycle; 16 L2 channels of 128 bytes a cycle on each
    die, which makes 64 bytes for each of 32 compute units.
    hbm_share, link_share: assumed; copies over a link of MI300X are reported at 50 of its 64 GB/s.
    All others in microseconds, and barrier_cycles: assumed. latency_us: a load from HBM under load. store_us: a store
    to a peer until it counts as done.
    launch_us: from the end of a graph's kernel to the first instruction of the next. flag_us: stores written back, flag
    posted, seen by a peer (2.8 us there and back were measured between two H200). meet_us: all workgroups of a device
    arrive and go on, a write-back to memory in it. stage_us: a few loads that need each other, at the start of a stage.
    barrier_cycles: what a workgroup alone on its compute unit stands still for each K group that it stages in LDS.
    """

    num_cus: int = 256
    num_xcds: int = 8
    clock_mhz: float = 2400.0
    num_simds: int = 4
    issue_cycles: int = 4
    mfma_cycles: int = 32
    lds_bytes_per_cycle: int = 128
    load_bytes_per_cycle: int = 64
    hbm_peak: float = 8.0e6
    hbm_share: float = 0.8
    infinity_cache: float = 17.2e6
    link_peak: float = 76.8e3
    link_share: float = 0.8
    latency_us: float = 0.8
    store_us: float = 1.0
    launch_us: float = 4.0
    flag_us: float = 3.0
    meet_us: float = 3.0
    stage_us: float = 2.0
    barrier_cycles: int = 200

    @property
    def hbm(self) -> float:
        """Bytes a microsecond that kernels get from memory."""
        return self.hbm_peak * self.hbm_share

    @property
    def link(self) -> float:
        """Bytes a microsecond to one peer, all peers at once."""
        return self.link_peak * self.link_share

    @property
    def copy_us(self) -> float:
        """One load and one store to a peer of a wave that waits for both."""
        return self.latency_us + self.store_us
