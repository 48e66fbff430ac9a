"""The engine's own model, run over chosen tokens of chosen requests inside a step.

Each run of neighbouring tokens is to the attention backend a sequence of its own: its queries
are the run, its context the request's block table up to the run's end. Or, with
``GatheredAttention``, all tokens of a request are one sequence, whose attention is not the backend's.
A layer writes the K and V of all tokens before any attention reads them, so that every token sees
what the others become: selective recompute, with the tensor parallelism, quantisation and kernels
of the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.integration.vllm.blend.adapters import without_adapters
from kvstrata.integration.vllm.blend.gathered import GatheredAttention
from kvstrata.integration.vllm.blend.pages import Queries

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.interfaces_base import VllmModelForTextGeneration
    from vllm.v1.attention.backend import AttentionMetadataBuilder

__all__ = ["NestedForward", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of one request to be computed."""

    tokens: torch.Tensor  # (n,), ids
    positions: torch.Tensor  # (n,) int64, ascending
    device_blocks: torch.Tensor  # int32, the request's block table at least up to the last of them
    shift: int = 0  # what the model is told of each position beyond where its KV is

    def queries(self, device: torch.device) -> Queries:
        return Queries(
            self.positions.to(device),
            self.device_blocks.to(device),
            first=int(self.positions[0]),
            last=int(self.positions[-1]),
        )


class NestedForward:
    def __init__(
        self,
        model: torch.nn.Module,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        gathered: GatheredAttention | None = None,
    ) -> None:
        """*kv_cache_config* has one group of attention layers.

        *gathered*: in the place of their attention; None: the backend's own, over runs of tokens.
        """
        (group,) = kv_cache_config.kv_cache_groups
        context = vllm_config.compilation_config.static_forward_context
        layer: Attention | MLAAttention = context[group.layer_names[0]]
        self.most_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._model: VllmModelForTextGeneration = model
        self._vllm_config = vllm_config
        self._device = device
        self._gathered = gathered
        self._layers = group.layer_names
        self._block_size = group.kv_cache_spec.block_size
        self._builder: AttentionMetadataBuilder = layer.get_attn_backend().get_builder_cls()(
            group.kv_cache_spec, group.layer_names, vllm_config, device
        )
        if isinstance(layer, MLAAttention):  # decodes in another way, in which no tap sees a query
            self._builder.reorder_batch_threshold = 0

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> torch.Tensor:
        """Write fresh K and V of *parts*; returns the last hidden states, part after part."""
        if self._gathered is None:
            return self._forward(parts, [_runs(part.positions) for part in parts])
        with self._gathered.over([part.queries(self._device) for part in parts]):
            return self._forward(parts, [[(0, len(part.positions))] for part in parts])

    @torch.inference_mode()
    def run_as_the_engine(self, part: Part) -> torch.Tensor:
        """``run`` of neighbouring tokens, with the backend's own attention."""
        return self._forward([part], [_runs(part.positions)])

    def _forward(
        self, parts: Sequence[Part], sequences: Sequence[Sequence[tuple[int, int]]]
    ) -> torch.Tensor:
        """*sequences*: of each part, first and end index of what attention is told is one."""
        lengths, ends = [], []
        for part, its_own in zip(parts, sequences, strict=True):
            for first, last in its_own:
                lengths.append(last - first)
                ends.append(int(part.positions[last - 1]) + 1)
        of_part = torch.nn.utils.rnn.pad_sequence(
            [p.device_blocks for p in parts], batch_first=True
        )
        tables = of_part.repeat_interleave(torch.tensor([len(each) for each in sequences]), 0)
        # Ids of 64 bits would run a graph that was compiled for 32: vLLM drops torch's guards.
        tokens = torch.cat([part.tokens for part in parts]).to(self._device, torch.int32)
        positions = torch.cat([part.positions + part.shift for part in parts]).to(self._device)
        slots = torch.cat([slots_of(p.positions, p.device_blocks, self._block_size) for p in parts])
        slots = slots.to(self._device)
        metadata = self._builder.build(0, self._common(lengths, ends, tables, slots))
        with (
            without_adapters(self._model, len(tokens)),
            set_forward_context(
                dict.fromkeys(self._layers, metadata),
                self._vllm_config,
                num_tokens=len(tokens),
                slot_mapping=dict.fromkeys(self._layers, slots),
            ),
        ):
            hidden: torch.Tensor = self._model(
                input_ids=tokens,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of what follows the token whose last *hidden* state is (1, hidden size); None on some ranks."""
        with without_adapters(self._model, 1):
            found: torch.Tensor | None = self._model.compute_logits(hidden)
        return found

    def _common(
        self, lengths: list[int], ends: list[int], tables: torch.Tensor, slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lengths).cumsum(0)
        seq_lens = torch.tensor(ends, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(self._device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(lengths),
            num_actual_tokens=len(slots),
            max_query_len=max(lengths),
            max_seq_len=max(ends),
            block_table_tensor=tables.to(self._device),
            slot_mapping=slots,
            causal=True,
        )


def slots_of(positions: torch.Tensor, device_blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where the KV of *positions* is: int64, device block * *block_size* + token in it."""
    return device_blocks[positions // block_size].long() * block_size + positions % block_size


def _runs(positions: torch.Tensor) -> list[tuple[int, int]]:
    """First and end index of each stretch of neighbours in *positions*."""
    cuts = (positions.diff() != 1).nonzero().flatten() + 1
    edges = [0, *cuts.tolist(), len(positions)]
    return list(pairwise(edges))
