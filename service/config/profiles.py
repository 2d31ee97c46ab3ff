"""Presets of settings; whatever is set elsewhere overrides them."""

from __future__ import annotations

from typing import Any

PROFILES: dict[str, dict[str, Any]] = {
    # 8 ranks on 2 cores, small enough that all four paths serve steps within a minute.
    "demo": {
        "shape": "demo",
        "max_tokens_per_rank": 512,
        "fixed_slot_max": 64,
        "small_m_capacities": (16, 32),
        "small_m_enabled": True,
        "large_m_capacity": 512,
        "large_m_enabled": True,
        "large_m_min_tokens": 128,
    },
    # The headline layout (8 x MI355X): the decode runtime holds 256 rows, small_m stays opt-in as in its sources.
    "deepseek-v4-pro-ep8": {
        "shape": "deepseek-v4-pro",
        "max_tokens_per_rank": 8192,
        "fixed_slot_max": 511,
        "large_m_enabled": True,
    },
    # gfx950 code on its emulator: capacities that an emulator gets through.
    "emulated": {
        "shape": "demo",
        "backend": "gfx950",
        "device": "emulated",
        "max_tokens_per_rank": 64,
        "fixed_slot_max": 32,
        "small_m_capacities": (8, 16),
        "small_m_enabled": True,
        "large_m_capacity": 64,
        "large_m_enabled": True,
        "large_m_min_tokens": 48,
    },
}
