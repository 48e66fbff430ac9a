"""Recurrent state (Mamba, linear attention): which engines can save and load it, and which block it is in.

With ``mamba_cache_mode`` ``align`` vLLM keeps the state at the end of a device block where a step
has ended there, in a device block of each recurrent group, and tells connectors which that is.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import vllm
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec, iter_layer_specs

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.compat import RECURRENT, SUPPORTED, lacking

__all__ = ["State", "check_recurrent", "is_recurrent", "state_bytes", "states_of_step"]

_RUN_WITHOUT: Final = "run vLLM without the connector (drop --kv-transfer-config)"


class State(NamedTuple):
    """The state of a request after its first *tokens*: a device block of each recurrent group."""

    request_id: str
    tokens: int
    device_blocks: dict[int, int]  # by KV cache group


def is_recurrent(spec: KVCacheSpec) -> bool:
    """Whether the layers of *spec*, one of a group or that of all, keep a state."""
    return any(isinstance(each, MambaSpec) for each in iter_layer_specs(spec))


def state_bytes(spec: MambaSpec) -> int:
    """What a layer's state takes, without padding."""
    size: int = spec.state_content_size_bytes
    return size


def states_of_step(state: KVConnectorBlockState) -> Iterator[State]:
    """What is in a device block of its own when this step has run."""
    for request_id, offers in state.boundary_state_offloads.items():
        by_tokens: dict[int, dict[int, int]] = {}
        for group, device_block, tokens in offers:
            by_tokens.setdefault(tokens, {})[group] = device_block
        for tokens, device_blocks in by_tokens.items():
            yield State(request_id, tokens, device_blocks)


def check_recurrent(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ``ConfigError`` for a model with recurrent state whose state cannot be saved."""
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    recurrent = [group for group in groups if is_recurrent(group)]
    if not recurrent:
        return
    if missing := lacking(RECURRENT):
        raise _refused(
            f"for which vLLM {vllm.__version__} lacks {', '.join(missing)}",
            f"install the newest vLLM {SUPPORTED}, or {_RUN_WITHOUT}",
        )
    specs = [spec for group in recurrent for spec in iter_layer_specs(group)]
    _check_mode([spec for spec in specs if isinstance(spec, MambaSpec)])
    if len(recurrent) == len(groups):
        raise _refused(
            "and no attention: a state is kept behind a block of KV, and there is none",
            _RUN_WITHOUT,
        )
    if (workers := vllm_config.parallel_config.world_size) > 1:
        raise _refused(
            f"and {workers} workers: with several of them it has not been run",
            f"set --tensor-parallel-size and --pipeline-parallel-size to 1, or {_RUN_WITHOUT}",
        )
    if vllm_config.speculative_config is not None:
        raise _refused(
            "and speculative decoding is on: a state has no way back from a rejected draft",
            f"take --speculative-config away, or {_RUN_WITHOUT}",
        )


def _check_mode(specs: list[MambaSpec]) -> None:
    modes = {spec.mamba_cache_mode for spec in specs} - {"align"}
    if modes:
        raise _refused(
            f"and mamba_cache_mode is {modes.pop()!r}: only with 'align' does vLLM keep a state at "
            "the end of a block and tell of it",
            "start vLLM with --enable-prefix-caching, --enable-chunked-prefill and "
            f"--mamba-cache-mode align, or {_RUN_WITHOUT}",
        )


def _refused(why: str, hint: str) -> ConfigError:
    return ConfigError(f"the model has recurrent state (Mamba, linear attention), {why}", hint=hint)
