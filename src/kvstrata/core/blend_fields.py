"""The settings of blending, which only ``BlendConnector`` does."""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from kvstrata.core.errors import ConfigError
from kvstrata.core.tier_fields import refuse_bool

__all__ = ["RECOMPUTE_RATIOS", "SINK_TOKENS", "BlendFields"]

RECOMPUTE_RATIOS: Final = {"fast": 0.05, "balanced": 0.15, "safe": 0.30}
SINK_TOKENS: Final = 4


def _on(value: bool) -> bool:
    if value:
        return value
    raise ConfigError(
        "keys that are not moved to their new positions are wrong",
        hint="take position_correction away; KVStrataConnector reuses exact prefixes alone",
    )


def _ratio(value: object) -> object:
    return RECOMPUTE_RATIOS.get(value, value) if isinstance(value, str) else refuse_bool(value)


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) == sorted({layer for layer in layers if layer >= 0}):
        return layers
    raise ConfigError(
        f"blend_scored_layers is {list(layers)}",
        hint="name each layer once, in ascending order from 0",
    )


_Number = Annotated[int, BeforeValidator(refuse_bool)]
_Share = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1)]


class BlendFields(BaseModel):
    """Which prompts are blended, what is reused and what is computed anew."""

    @property
    def blend_settings(self) -> list[str]:
        """Those that were set: a connector that does not blend refuses them."""
        return sorted(BlendFields.model_fields.keys() & self.model_fields_set)

    blend: Literal["requested", "all"] = Field(
        default="requested",
        description=(
            "Which requests `BlendConnector` blends. `requested`: those whose `kv_transfer_params` "
            'say so, `{"blend": true}` or `{"blend": {"ratio": 0.15}}`. `all`: every one that '
            'does not say `{"blend": false}`.'
        ),
        examples=["all"],
    )
    blend_salts: tuple[str, ...] = Field(
        default=(),
        description=(
            "Values of `cache_salt` whose requests are all blended, as with `blend: all`: tenants who "
            "have agreed to it."
        ),
        examples=['["tenant-a"]'],
    )
    blend_chunk_size: _Number = Field(
        default=64,
        ge=16,
        le=4096,
        description="Tokens that must stand together, as they did before, to be reused elsewhere.",
        examples=["64"],
    )
    blend_rule: Literal["two_round_query", "query", "hkvd", "boundary", "random", "full"] = Field(
        default="two_round_query",
        description="How the reused tokens that are computed anew are chosen (docs/blending.md).",
        examples=["two_round_query"],
    )
    blend_scored_layers: Annotated[tuple[_Number, ...], AfterValidator(_ascending)] = Field(
        default=(),
        description=(
            "Attention layers, from 0, whose attention says which tokens are computed anew; `hkvd` "
            "compares keys and values in the last of them. By default two behind the first eighth. What is "
            "run to choose is run up to the last one, and in a second round mostly up to the first above 0 "
            "(docs/blending.md)."
        ),
        examples=["[3, 6]"],
    )
    blend_attention: Literal["auto", "runs", "gathered"] = Field(
        default="auto",
        description=(
            "How tokens that are computed anew attend to those before them. `runs`: by vLLM's kernels, "
            "to which each run of neighbours is a sequence of its own. `gathered`: all of a prompt's in "
            "one attention, each up to its own position. `auto`: `runs` on a CPU, `gathered` on a GPU, "
            "whose kernels would read all KV once for each run."
        ),
        examples=["gathered"],
    )
    recompute_ratio: Annotated[float, BeforeValidator(_ratio)] = Field(
        default=RECOMPUTE_RATIOS["balanced"],
        ge=0,
        le=1,
        description=(
            "Share of the reused tokens that is computed anew, beyond `recompute_first_tokens`: a "
            "number, or `fast` (0.05), `balanced` (0.15) or `safe` (0.30). `blend_rule` `boundary` and "
            "`full` choose no share."
        ),
        examples=["0.15"],
    )
    recompute_first_tokens: _Number = Field(
        default=SINK_TOKENS,
        ge=0,
        le=256,
        description=(
            "Tokens at the start of each run that are computed anew whatever is chosen beyond them; "
            "with 0 no more than `recompute_ratio` is. `blend_rule` `boundary` and `full` do not go by "
            "it."
        ),
        examples=["4"],
    )
    recompute_boundary: _Number = Field(
        default=2,
        ge=0,
        le=256,
        description="Tokens at both ends of each run that `blend_rule: boundary` computes anew.",
        examples=["2"],
    )
    blend_min_saved_tokens: _Number = Field(
        default=1024,
        ge=0,
        description="A prompt is blended if that spares computing so many of its tokens at least.",
        examples=["1024"],
    )
    blend_min_saved_share: _Share = Field(
        default=0.3,
        description="And if these are so large a share of the tokens that it would compute.",
        examples=["0.3"],
    )
    blend_if_slower: bool = Field(
        default=False,
        description=(
            "Whether prompts are blended, too, of a size at which that has been measured here to take "
            "longer than to compute them whole."
        ),
        examples=["true"],
    )
    blend_again: bool = Field(
        default=False,
        description=(
            "Whether KV that was computed behind reused KV, of new documents, the question and the answer "
            "of a blended request, is reused in its turn by later ones that ask to be blended."
        ),
        examples=["true"],
    )
    blend_audit_share: _Share = Field(
        default=0.01,
        description=(
            "Share of the blended requests of which the first token is also computed exactly, which "
            "costs each of them a whole prefill."
        ),
        examples=["0.01"],
    )
    blend_audit_limit: Annotated[float, BeforeValidator(refuse_bool)] = Field(
        default=0.5,
        gt=0,
        description=(
            "Mean divergence of the first token's distribution from the exact one, in nats, over the "
            "last 32 audits of a cache salt, above which the engine blends its requests no more until "
            "the cache is reset."
        ),
        examples=["0.5"],
    )
    position_correction: Annotated[bool, AfterValidator(_on)] = Field(
        default=True,
        description="UCM's key: whether keys are moved to their new positions. They always are.",
        examples=["true"],
    )
    min_match_ratio: _Share | None = Field(
        default=None,
        description=(
            "UCM's key, without effect: tokens are reused where they are equal and computed where "
            "they are not, whatever share of a chunk that is."
        ),
        examples=["0.8"],
    )
    rope_theta: Annotated[float, BeforeValidator(refuse_bool)] | None = Field(
        default=None,
        gt=0,
        description=(
            "UCM's key: the base of the model's rotary embedding. It is read from the model; a "
            "value that is not the model's is an error at the start."
        ),
        examples=["10000"],
    )
    head_dim: _Number | None = Field(
        default=None,
        gt=0,
        description="UCM's key: elements of an attention head. As `rope_theta`.",
        examples=["128"],
    )
    blend_index_tokens: _Number = Field(
        default=8 << 20,
        ge=4096,
        le=1 << 31,
        description=(
            "Tokens of earlier prompts that the engine can find again anywhere. A million takes "
            "about 10 MB; the ones unused for longest are forgotten."
        ),
        examples=["8388608"],
    )
