"""What both halves derive alike from vLLM's configuration: who this engine is to the server."""

from dataclasses import dataclass
from pathlib import Path

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.types import EXACT, BlockFormat
from kvstrata.integration.vllm.blocks import DEFAULT_TOKENS_PER_BLOCK
from kvstrata.integration.vllm.geometry import DeviceGeometry, geometry_from_config
from kvstrata.server import protocol as p
from kvstrata.server.sockets import embedded_socket
from kvstrata.storage.quantize import element_type_of


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The engine's session, its block size and the socket of its server."""

    session: str
    socket: Path
    geometry: DeviceGeometry
    tokens_per_block: int
    world_size: int
    block_format: BlockFormat

    @classmethod
    def of(
        cls, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> "EngineIdentity":
        """Raises ``ConfigError`` for a model, or a block size, that is not supported."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise ConfigError("vLLM was started without --kv-transfer-config")
        geometry = geometry_from_config(vllm_config, kv_cache_config)
        tokens = config.tokens_per_block or _default_tokens(geometry.block_size)
        hash_tokens = kv_cache_config.hash_block_size or geometry.block_size
        if tokens % geometry.block_size or tokens % hash_tokens:
            raise ConfigError(
                f"tokens_per_block = {tokens} is no multiple of vLLM's block size of "
                f"{geometry.block_size} tokens and hash size of {hash_tokens}",
                hint=f"set tokens_per_block to a multiple of {geometry.block_size}",
            )
        return cls(
            session=transfer.engine_id,
            socket=config.socket or embedded_socket(transfer.engine_id),
            geometry=geometry,
            tokens_per_block=tokens,
            world_size=vllm_config.parallel_config.world_size,
            block_format=_block_format(config, kv_cache_config),
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all ranks."""
        return self.geometry.rank_bytes(self.tokens_per_block) * self.world_size

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
    dtype = kv_cache_config.kv_cache_groups[0].kv_cache_spec.dtype
    block_format = f"{config.block_format} {str(dtype).removeprefix('torch.')}"
    element_type_of(block_format)
    return block_format


def _default_tokens(block_size: int) -> int:
    """The smallest multiple of *block_size* that is worth a slot of its own."""
    return -(-DEFAULT_TOKENS_PER_BLOCK // block_size) * block_size
