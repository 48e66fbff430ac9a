"""Whether a request may be blended: what its owner and the operator say, and what it is."""

import logging
import math
from difflib import get_close_matches
from typing import Final, NamedTuple

from vllm.v1.request import Request

from kvstrata.core.blend_fields import RECOMPUTE_RATIOS
from kvstrata.core.config import Config
from kvstrata.integration.vllm.blend.rules import why_not_followed
from kvstrata.integration.vllm.request_params import BLEND
from kvstrata.observe.seldom import SeldomWarning

__all__ = ["Wish", "can_be_reused", "salt_of", "wish_of"]

_log = logging.getLogger(__name__)
_NEAR: Final = 0.8  # of 1: a mistyped "blend"; other connectors have keys of their own
_warn_of_ratio: Final = SeldomWarning(_log)
_warn_of_key: Final = SeldomWarning(_log)


class Wish(NamedTuple):
    """How to blend a request; *refused* says in a word why not."""

    ratio: float
    refused: str | None = None

    @property
    def blend(self) -> bool:
        return self.refused is None


def can_be_reused(request: Request) -> bool:
    """Whether KV of *request* depends on nothing but tokens, their places and its salt."""
    return _kind(request) is None


def salt_of(request: Request) -> str:
    """Requests with the same one may reuse each other's KV; empty for all that have none."""
    return request.cache_salt or ""


def wish_of(request: Request, config: Config) -> Wish:
    """What *request* says in ``kv_transfer_params["blend"]``, or else the configuration.

    ``true``, ``{"ratio": 0.3}`` or ``{"ratio": "safe"}`` ask for it and ``false`` forbids it. What
    is not understood is logged, and the request is computed. A ratio that the rule does not follow is
    logged, too, and the request is blended.
    """
    params = request.kv_transfer_params or {}
    said = params.get(BLEND)
    if BLEND not in params and (near := get_close_matches(BLEND, map(str, params), 1, _NEAR)):
        _warn_of_key(
            "a request is not blended: kv_transfer_params has %.40r and no %r", near[0], BLEND
        )
        return Wish(config.recompute_ratio, "not_understood")
    if said is None and (config.blend == "all" or request.cache_salt in config.blend_salts):
        said = True
    if said is None or said is False:
        return Wish(config.recompute_ratio, "not_asked")
    if (kind := _kind(request)) is not None:
        return Wish(config.recompute_ratio, kind)
    if said is True:
        return Wish(config.recompute_ratio)
    ratio = said.get("ratio", config.recompute_ratio) if isinstance(said, dict) else None
    if isinstance(ratio, str):
        ratio = RECOMPUTE_RATIOS.get(ratio)
    if (
        not isinstance(said, dict)
        or said.keys() - {"ratio"}
        or isinstance(ratio, bool)
        or not isinstance(ratio, int | float)
        or not (math.isfinite(ratio) and 0 <= ratio <= 1)
    ):
        _log.warning(
            "request %s is not blended: kv_transfer_params.blend is %.200r; give true, false or "
            '{"ratio": a number from 0 to 1, or one of %s}',
            request.request_id,
            said,
            ", ".join(RECOMPUTE_RATIOS),
        )
        return Wish(config.recompute_ratio, "not_understood")
    if "ratio" in said and (why := why_not_followed(config, ratio)) is not None:
        _warn_of_ratio("a request asks for a ratio of %g, which changes nothing: %s", ratio, why)
    return Wish(float(ratio))


def _kind(request: Request) -> str | None:
    """Of which kind *request* is, among those that are not blended."""
    if request.lora_request is not None:
        return "adapter"
    if request.mm_features:
        return "images"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "embeddings"
    if request.skip_reading_prefix_cache:
        return "prompt_logprobs"
    return None
