"""The shape of a mixture-of-experts layer: facts that never change while a service runs.

Glossary of dimensions (names in other code bases in brackets):
hidden [H, model_dim]; intermediate [I, inter_dim]; num_experts [E, global experts]; num_experts_per_rank
[epr, local experts]; num_topk [topk, k]; num_ranks [npes, ep_size, world size]; max_tokens_per_rank [mtpr].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megamoe.errors import ConfigError, must_be

MX_BLOCK = 32
"""Elements that share one E8M0 scale (OCP Microscaling Formats v1.0)."""

NUM_RANKS_ALLOWED = (1, 2, 4, 8)
MAX_TOPK = 32
"""Slots are kept in 32-bit masks."""
MAX_NAME = 100
"""Characters of a shape's name, which is a metric label."""


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Dimensions of the expert layers. Raises ConfigError naming the field on impossible values.

    swiglu_limit: clamp L of SwiGLU, 0 = none (DeepSeek-V4-Pro: 10).
    fused_shared_expert: num_experts counts one shared expert more per rank.
    num_layers: MoE layers of the model; each gets a protocol slot.
    """

    hidden: int
    intermediate: int
    num_experts: int
    num_topk: int
    num_ranks: int = 8
    num_layers: int = 1
    swiglu_limit: float = 0.0
    activation: str = "silu"
    quant: str = "a8w4"
    fused_shared_expert: bool = False
    name: str = "custom"

    def __post_init__(self) -> None:
        self._check_types()
        for field in ("hidden", "intermediate"):
            value = getattr(self, field)
            if value < MX_BLOCK or value % MX_BLOCK:
                raise ConfigError(must_be(field, f"a positive multiple of {MX_BLOCK}", value))
        if self.num_ranks not in NUM_RANKS_ALLOWED:
            raise ConfigError(must_be("num_ranks", "1, 2, 4 or 8 (ranks of one host)", self.num_ranks))
        if self.num_experts < 1 or self.num_experts % self.num_ranks:
            raise ConfigError(
                must_be(
                    "num_experts",
                    f"a positive multiple of num_ranks = {self.num_ranks}",
                    self.num_experts,
                )
            )
        if not 1 <= self.num_topk <= min(self.num_experts, MAX_TOPK):
            raise ConfigError(
                must_be(
                    "num_topk",
                    f"from 1 to min(num_experts, {MAX_TOPK}) = {min(self.num_experts, MAX_TOPK)}",
                    self.num_topk,
                )
            )
        if self.num_layers < 1:
            raise ConfigError(must_be("num_layers", "at least 1", self.num_layers))
        if not 0.0 <= self.swiglu_limit < float("inf"):
            raise ConfigError(
                must_be(
                    "swiglu_limit",
                    "a finite number >= 0 (0 = no clamp)",
                    self.swiglu_limit,
                )
            )
        if self.activation not in ("silu", "gelu"):
            raise ConfigError(must_be("activation", "'silu' or 'gelu'", repr(self.activation)))
        if self.quant not in ("a8w4",):
            raise ConfigError(must_be("quant", "'a8w4'", repr(self.quant)))

    def _check_types(self) -> None:
        """Shapes come from files and environments too, where numbers turn into words."""
        for field in ("hidden", "intermediate", "num_experts", "num_topk", "num_ranks", "num_layers"):
            value = getattr(self, field)
            if type(value) is not int:
                raise ConfigError(must_be(field, "a whole number", repr(value)))
        if not isinstance(self.swiglu_limit, int | float) or isinstance(self.swiglu_limit, bool):
            raise ConfigError(must_be("swiglu_limit", "a number", repr(self.swiglu_limit)))
        if not isinstance(self.fused_shared_expert, bool):
            raise ConfigError(must_be("fused_shared_expert", "true or false", repr(self.fused_shared_expert)))
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= MAX_NAME:
            raise ConfigError(must_be("name", f"a name of 1 to {MAX_NAME} characters", repr(self.name)[:80]))

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def weight_bytes_per_rank_and_layer(self) -> int:
        """MXFP4 codes and E8M0 scales of one rank's experts of one layer (0.53125 byte a weight)."""
        num_weights = self.num_experts_per_rank * 3 * self.hidden * self.intermediate
        return num_weights // 2 + num_weights // MX_BLOCK

    def owner_rank(self, expert_id: int) -> int:
        """Rank that owns a logical expert: contiguous blocks of num_experts_per_rank."""
        return expert_id // self.num_experts_per_rank

    def with_ranks(self, num_ranks: int) -> MoeShape:
        return replace(self, num_ranks=num_ranks)


PRESETS: dict[str, MoeShape] = {
    shape.name: shape
    for shape in (
        # Small enough for 8 ranks on 2 cores; 8 experts a rank, top-6 as in V4-Pro.
        MoeShape(
            name="demo",
            hidden=256,
            intermediate=128,
            num_experts=64,
            num_topk=6,
            num_layers=4,
            swiglu_limit=10.0,
        ),
        MoeShape(
            name="deepseek-v4-pro",
            hidden=7168,
            intermediate=3072,
            num_experts=384,
            num_topk=6,
            num_layers=61,
            swiglu_limit=10.0,
        ),
        # Public model cards: config.json of the named models.
        MoeShape(
            name="deepseek-v3",
            hidden=7168,
            intermediate=2048,
            num_experts=256,
            num_topk=8,
            num_layers=58,
        ),
        MoeShape(
            name="qwen3-235b-a22b",
            hidden=4096,
            intermediate=1536,
            num_experts=128,
            num_topk=8,
            num_layers=94,
        ),
        MoeShape(
            name="kimi-k2",
            hidden=7168,
            intermediate=2048,
            num_experts=384,
            num_topk=8,
            num_layers=60,
        ),
    )
}


def preset(name: str) -> MoeShape:
    """The preset called `name`. Raises ConfigError listing the known names."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            must_be("shape preset", f"one of {', '.join(sorted(PRESETS))}", repr(name))
        ) from None
