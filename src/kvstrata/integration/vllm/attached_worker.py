"""A worker half with the host tier of a server mapped into it."""

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.config import Config
from kvstrata.integration.vllm.geometry import ONE_NODE
from kvstrata.integration.vllm.setup import EngineIdentity
from kvstrata.integration.vllm.worker import WorkerHalf, WorkerSettings
from kvstrata.server.attach import Attachment, Patience
from kvstrata.storage.mapping import HostMapping


class AttachedWorker:
    """``half`` copies; its mapping follows the server, which may come later and change."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        # Not the world's rank: with data parallelism that counts the workers of all engines.
        stage, tensor_rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        rank = stage * vllm_config.parallel_config.tensor_parallel_size + tensor_rank
        identity = EngineIdentity.of(config, vllm_config, kv_cache_config, stage=stage)
        self._config = config
        self._path = identity.socket
        self._hello = identity.hello("worker", rank=rank)
        self._runs_by_ray = vllm_config.parallel_config.use_ray
        self._attachment: Attachment | None = None
        self.half = WorkerHalf(
            WorkerSettings(
                region=identity.regions.of(stage, tensor_rank),
                tokens_per_block=identity.tokens_per_block,
                load_timeout_seconds=config.load_timeout_seconds,
                layerwise=config.load_mode == "layerwise",
            ),
            vllm_config,
            kv_cache_config,
        )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.half.register_kv_caches(kv_caches)
        self._attachment = Attachment(
            self._path,
            self._hello,
            self._set_mapping,
            patience=Patience(
                self._config.start_timeout_seconds, self._awaits_engine, self._remedy()
            ),
            prefault=self._config.prefault,
            pin=self.half.pin,
        )

    def shutdown(self) -> None:
        """Stop copying, then let go of the server: the order tells it that the slots are quiet."""
        self.half.shutdown()
        if self._attachment is not None:
            self._attachment.close()
        self.half.let_go()

    def _awaits_engine(self) -> bool:
        """An embedded server starts behind all workers, which on a GPU may warm up for minutes."""
        return self._config.server == "embedded" and not self.half.has_begun

    def _remedy(self) -> str:
        """What to do where no server answers. Of Ray nobody says which node a worker is on."""
        remedy = (
            "the engine has one of its own: its log says why that does not answer"
            if self._config.server == "embedded"
            else f"start one with 'kvstrata server --socket {self._path}' on the engine's node, "
            "or name the socket of another"
        )
        if not self._runs_by_ray:
            return remedy
        return (
            f"{remedy}; where Ray has put this worker on another node than the engine, none can answer: "
            f"{ONE_NODE}"
        )

    def _set_mapping(self, mapping: HostMapping | None) -> None:
        if mapping is None:
            self.half.mapping = None
            self.half.let_go()
            return
        self.half.bring_near(mapping)  # before this process or, mostly, the server touches it
        self.half.mapping = mapping
