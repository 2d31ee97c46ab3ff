"""Named settings of a run: the scenario as published, and one that shows everything on a small machine in a minute."""

from __future__ import annotations

from dataclasses import dataclass, field

from loadgen.scenario.scenario import ScenarioConfig
from loadgen.tier.attention_tier import TierConfig
from megamoe.errors import ConfigError, must_be


@dataclass(frozen=True, kw_only=True)
class RunProfile:
    """Settings that a person may then change one by one."""

    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    tier: TierConfig = field(default_factory=TierConfig)


PROFILES: dict[str, RunProfile] = {
    # V4-Pro drafts with one more layer, experts included. The interval is the middle of what deployments use.
    "full": RunProfile(tier=TierConfig(draft_moe_layers=1, decode_rounds_per_prefill=16)),
    # For the service's demo profile on 2 cores: steps of a few to 512 rows a rank, so that every path serves.
    "demo": RunProfile(
        scenario=ScenarioConfig(
            concurrency=24,
            duration_wall_s=40.0,
            warmup_requests=2,
            time_scale=1 / 60,
            token_scale=1 / 100,
            grace_wall_s=5.0,
        ),
        tier=TierConfig(chunk_rows=512, decode_rounds_per_prefill=2),
    ),
}


def run_profile(name: str, service_profile: str) -> RunProfile:
    """The profile called `name`; "auto" = demo for a service that runs its demo profile, else full.

    Raises ConfigError listing the known names.
    """
    if name == "auto":
        name = "demo" if service_profile == "demo" else "full"
    if name not in PROFILES:
        raise ConfigError(must_be("profile", f"auto or one of {', '.join(PROFILES)}", repr(name)))
    return PROFILES[name]
