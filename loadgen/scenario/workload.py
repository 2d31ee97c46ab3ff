"""What a run plays: agent sessions (`agentx`), single requests (`uniform`), or the same rows in every step (`fixed`).

`uniform` keeps `concurrency` independent requests in flight. `fixed` keeps so many endless requests that every rank
decodes the same number of rows in every step, without attention time: load for the expert layers alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadgen.corpus.single_turns import SingleTurns
from loadgen.corpus.synth import SyntheticTraces
from loadgen.moe.tier import TierInfo
from loadgen.scenario.profiles import RunProfile
from loadgen.scenario.scenario import AGENTX, FIXED, UNIFORM, ScenarioConfig
from loadgen.tier.attention_time import AttentionTime
from loadgen.tier.speculation import Speculation
from loadgen.trace.trace import BLOCK_SIZE, TraceSource
from megamoe.errors import ConfigError, must_be

ENDLESS_TOKENS = 400_000
"""Output of a request that is not to end: about half a million steps' worth, within the context limit."""
MAX_TOKENS = 1 << 20
"""The context limit: nothing longer could be sent."""
NO_ATTENTION = AttentionTime.nothing()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a person chose. recorded: sessions to play instead of synthetic ones. input_tokens, output_tokens: of a
    request of `uniform`. rows: of each rank in each step of `fixed`. Raises ConfigError naming the option."""

    scenario: str = AGENTX
    recorded: TraceSource | None = None
    input_tokens: int = 1024
    output_tokens: int = 256
    rows: int = 128

    def __post_init__(self) -> None:
        if self.recorded is not None and self.scenario != AGENTX:
            raise ConfigError(must_be("scenario", f"{AGENTX!r} with a trace file", repr(self.scenario)))
        if self.input_tokens < BLOCK_SIZE or self.input_tokens % BLOCK_SIZE:
            raise ConfigError(must_be("input_tokens", f"a multiple of {BLOCK_SIZE}", self.input_tokens))
        for name in ("input_tokens", "output_tokens", "rows"):
            if not 1 <= getattr(self, name) <= MAX_TOKENS:
                raise ConfigError(must_be(name, f"from 1 to {MAX_TOKENS:,}", getattr(self, name)))

    def settings(self, base: RunProfile) -> RunProfile:
        """The profile that this workload starts from, before a person's changes: simple loads know no scales."""
        if self.scenario == AGENTX:
            return base
        scenario = replace(
            base.scenario,
            scenario=self.scenario,
            time_scale=1.0,
            token_scale=1.0,
            warmup_requests=1,
        )
        tier = replace(base.tier, speculation=Speculation(0), draft_moe_layers=0)
        return RunProfile(scenario=scenario, tier=tier)

    def fitted(self, profile: RunProfile, info: TierInfo) -> RunProfile:
        """The settings with what follows from the service. Raises ConfigError when it cannot take so many rows."""
        if self.scenario != FIXED:
            return profile
        rows_per_request = profile.tier.speculation.rows_per_request
        if self.rows > info.max_step_rows or self.rows % rows_per_request:
            wanted = f"at most {info.max_step_rows} and a multiple of num_drafts + 1 = {rows_per_request}"
            raise ConfigError(must_be("rows", wanted, self.rows))
        per_rank = self.rows // rows_per_request
        return RunProfile(
            # Endless requests can be waited for neither before nor after the profile.
            scenario=replace(
                profile.scenario, concurrency=per_rank * info.num_ranks, warmup_requests=0, grace_wall_s=0.0
            ),
            # All prompts first, so that from then on every step is the same.
            tier=replace(
                profile.tier,
                max_running=per_rank,
                chunk_rows=info.max_step_rows,
                decode_rounds_per_prefill=0,
            ),
        )

    def traces(self, config: ScenarioConfig) -> TraceSource:
        """The corpus."""
        if self.recorded is not None:
            return self.recorded
        if self.scenario == UNIFORM:
            return SingleTurns(
                count=config.num_traces,
                num_input=self.input_tokens,
                num_output=self.output_tokens,
                seed=config.seed,
            )
        if self.scenario == FIXED:
            return SingleTurns(
                count=config.concurrency, num_input=BLOCK_SIZE, num_output=ENDLESS_TOKENS, seed=config.seed
            )
        return SyntheticTraces(config.num_traces, config.seed)

    @property
    def attention(self) -> AttentionTime | None:
        """None = the attention tier's own model."""
        return NO_ATTENTION if self.scenario == FIXED else None
