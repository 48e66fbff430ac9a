"""What both halves derive alike from vLLM's configuration: who this engine is to the server."""

from dataclasses import dataclass
from math import lcm
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, iter_layer_specs

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.integration.vllm.blocks import DEFAULT_TOKENS_PER_BLOCK, BlockMath, GroupMath
from kvstrata.integration.vllm.compat import tokens_per_hash
from kvstrata.integration.vllm.geometry import DeviceGeometry, geometry_from_config
from kvstrata.integration.vllm.layerwise import check_layerwise
from kvstrata.integration.vllm.ranks import SlotRegions, slot_regions
from kvstrata.integration.vllm.recurrent import is_recurrent
from kvstrata.server import protocol as p
from kvstrata.server.sockets import embedded_socket
from kvstrata.storage.quantize import element_type_of


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The engine's session, its block size and the socket of its server."""

    session: str
    socket: Path
    geometry: DeviceGeometry
    math: BlockMath
    tokens_per_block: int
    world_size: int
    regions: SlotRegions
    block_format: BlockFormat

    @classmethod
    def of(
        cls,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        stage: int = 0,
    ) -> "EngineIdentity":
        """*kv_cache_config* is that of pipeline stage *stage*; the scheduler's is the first's.

        Raises ``ConfigError`` for a model, or a block size, that is not supported.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise ConfigError(
                "vLLM was started without --kv-transfer-config",
                hint="start it with kvstrata serve, or give it a --kv-transfer-config",
            )
        geometry = geometry_from_config(vllm_config, kv_cache_config)
        check_layerwise(config, vllm_config, geometry)
        hash_tokens = tokens_per_hash(vllm_config, kv_cache_config)
        tokens = config.tokens_per_block or _default_tokens(geometry, hash_tokens)
        geometry.check_block(tokens)
        step = lcm(geometry.block_size, hash_tokens)
        if geometry.states and tokens != step:
            raise ConfigError(
                f"tokens_per_block = {tokens} for a model whose recurrent state vLLM keeps at the end "
                f"of blocks of {step} tokens: at the end of longer ones there mostly is none",
                hint=f"take tokens_per_block away, or set it to {step}",
            )
        if tokens % hash_tokens:
            raise ConfigError(
                f"tokens_per_block = {tokens} is no multiple of the {hash_tokens} tokens of one of "
                "vLLM's block hashes",
                hint=f"set tokens_per_block to a multiple of {step}",
            )
        return cls(
            session=transfer.engine_id,
            socket=config.socket or embedded_socket(transfer.engine_id),
            geometry=geometry,
            math=BlockMath(
                tuple(
                    GroupMath(each.block_size, each.reach, each.is_recurrent)
                    for each in geometry.groups
                ),
                hash_tokens,
                tokens,
            ),
            tokens_per_block=tokens,
            world_size=vllm_config.parallel_config.world_size,
            regions=slot_regions(vllm_config, kv_cache_config, geometry, tokens, stage=stage),
            block_format=_block_format(config, kv_cache_config),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all ranks."""
        return self.regions.block_bytes

    def hello(self, role: str, *, rank: int = 0, persistent: bool = True) -> p.Hello:
        return p.Hello(
            0,
            p.PROTOCOL_VERSION,
            role,
            self.session,
            self.block_bytes,
            persistent,
            rank,
            self.world_size,
            self.block_format,
        )


def _block_format(config: Config, kv_cache_config: KVCacheConfig) -> BlockFormat:
    """Raises ``ConfigError`` for a KV cache that has no lossy form."""
    if config.block_format == EXACT:
        return EXACT
    if any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        raise ConfigError(
            f"block_format = {config.block_format} for a model with recurrent state, which is no KV",
            hint="leave block_format at exact",
        )
    dtypes = {
        str(spec.dtype).removeprefix("torch.")
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
    }
    if len(dtypes) > 1:
        raise ConfigError(
            f"block_format = {config.block_format} for a KV cache of several types: "
            f"{', '.join(sorted(dtypes))}",
            hint="leave block_format at exact",
        )
    block_format = f"{config.block_format} {dtypes.pop()}"
    element_type_of(block_format)
    return block_format


def _default_tokens(geometry: DeviceGeometry, hash_tokens: int) -> int:
    """The smallest number that is worth a slot of its own; less where the model's reach is short, or
    keeps states.
    """
    step = lcm(geometry.block_size, hash_tokens)
    if geometry.states:
        return step
    tokens = -(-DEFAULT_TOKENS_PER_BLOCK // step) * step
    fits = all(group.reach.holds(tokens, group.block_size) for group in geometry.groups)
    return tokens if fits else step
