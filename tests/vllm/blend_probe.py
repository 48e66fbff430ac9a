"""What only the engine's own process can see of blending's ground: run there, told in a file."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.blend.plan import Positions
from kvstrata.blend.position import PositionCorrector, mean_difference
from kvstrata.blend.selection import Recompute, ScoreAttention, ScoreDeviation, Step
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.gate import check_model
from kvstrata.integration.vllm.blend.gathered import GatheredAttention
from kvstrata.integration.vllm.blend.model import calling_model
from kvstrata.integration.vllm.blend.nested import NestedForward, Part, slots_of
from kvstrata.integration.vllm.blend.pages import Queries, TokenPages, learn_page_map
from kvstrata.integration.vllm.blend.ropes import correctors
from kvstrata.integration.vllm.blend.scorer import Prompt, StepRunner
from kvstrata.integration.vllm.blend.taps import AttentionTaps
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.geometry import pages_from_tensors
from kvstrata.integration.vllm.metadata import NULL_BLOCK

FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
KV = list[tuple[torch.Tensor, torch.Tensor]]


class Ground:
    """A model, its pages by token and forwards of chosen tokens, in an engine that starts."""

    def __init__(
        self, connector: KVStrataConnector, vllm_config: VllmConfig, planned: KVCacheConfig
    ) -> None:
        half = connector._copies.half
        (group,) = half.geometry.groups
        self.block_size = group.block_size
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.positions = vllm_config.model_config.max_model_len
        context = vllm_config.compilation_config.static_forward_context
        self.attention: dict[str, Any] = {name: context[name] for name in group.layers}
        self._planned, self._geometry = planned, half.geometry
        self._vllm_config = vllm_config

    def find(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called below ``register_kv_caches``: the model is one of its callers'."""
        (self.pages,) = pages_from_tensors(kv_caches, self._geometry, self._planned)
        model = calling_model(self.attention)
        device = self.pages[0].device
        self.layers = {
            name: TokenPages(layer, page, learn_page_map(layer, page, 0, self.block_size))
            for (name, layer), page in zip(self.attention.items(), self.pages, strict=True)
        }
        self.correctors = correctors(model, self.attention)
        attention = list(self.attention.values())
        self.taps = AttentionTaps(attention)
        self.nested = NestedForward(model, self._vllm_config, self._planned, device)
        self.keeps_latents = isinstance(attention[0], MLAAttention)
        self.gathered = NestedForward(
            model,
            self._vllm_config,
            self._planned,
            device,
            GatheredAttention(attention, list(self.layers.values()), self.taps),
        )

    def alike(self, left: KV | torch.Tensor, right: KV | torch.Tensor) -> bool:
        """Equal; with latents, for which vLLM uses AMX, but for what that rounds otherwise."""
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            left, right = [(left, left)], [(right, right)]
        return _difference(left, right) < 0.02 if self.keeps_latents else equal(left, right)

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(self.vocabulary, (count,), generator=torch.Generator().manual_seed(1))

    def read(self, blocks: torch.Tensor, count: int) -> KV:
        read = (layer.read_blocks(blocks) for layer in self.layers.values())
        return [(keys[:count].clone(), values[:count].clone()) for keys, values in read]


def equal(left: KV, right: KV) -> bool:
    return all(
        torch.equal(a, b)
        for one, two in zip(left, right, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def close(left: KV, right: KV) -> bool:
    """Equal but for what vLLM's attention rounds otherwise in another batch."""
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-5)
        for one, two in zip(left, right, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def written_is_read(ground: Ground) -> dict[str, Any]:
    """Random KV of some tokens, to the nearest that is kept, and what is in all before and after."""
    blocks = torch.tensor([3, 7])
    count = 2 * ground.block_size
    ground.nested.run([Part(ground.tokens(count), torch.arange(count), blocks.int())])
    before = ground.read(blocks, count)
    some = torch.randperm(count)[: count // 3].sort().values
    others = torch.tensor([i for i in range(count) if i not in some.tolist()])
    right = True
    for (name, layer), old in zip(ground.layers.items(), before, strict=True):
        keys, values = (torch.randn_like(part[some]) for part in old)
        layer.write(keys, values, slots_of(some, blocks, ground.block_size))
        kept = FLOAT8.get(ground.attention[name].kv_cache_dtype, keys.dtype)
        for was, wrote, now in zip(old, (keys, values), layer.read_blocks(blocks), strict=True):
            right &= torch.equal(now[some], wrote.to(kept).to(wrote))
            right &= torch.equal(now[others], was[others])
    return {"right": right}


@dataclass
class Spoilt:
    """A whole prefill, of which some tokens have other KV since."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    some: torch.Tensor  # positions
    hidden: torch.Tensor  # of the prefill
    before: KV
    since: KV

    @classmethod
    def of(cls, ground: Ground) -> "Spoilt":
        count = 3 * ground.block_size - 5
        blocks = torch.tensor([4, 9, 2], dtype=torch.int32)
        tokens, positions = ground.tokens(count), torch.arange(count)
        hidden = ground.nested.run([Part(tokens, positions, blocks)])
        before = ground.read(blocks, count)
        chosen = torch.rand(count, generator=torch.Generator().manual_seed(2)) < 0.4
        some = positions[chosen]
        for layer, old in zip(ground.layers.values(), before, strict=True):
            keys, values = (torch.randn_like(part[some]) for part in old)
            layer.write(keys, values, slots_of(some, blocks, ground.block_size))
        return cls(tokens, blocks, some, hidden, before, ground.read(blocks, count))

    @property
    def part(self) -> Part:
        """The tokens that are spoilt."""
        return Part(self.tokens[self.some], self.some, self.blocks)

    @property
    def all_elsewhere(self) -> Part:
        """All tokens, in other blocks."""
        blocks = torch.tensor([11, 1, 6], dtype=torch.int32)
        return Part(self.tokens, torch.arange(len(self.tokens)), blocks)


def recomputed_is_equal(ground: Ground) -> dict[str, Any]:
    """Tokens that are spoilt and run again, in runs of every length, beside a whole prefill."""
    spoilt = Spoilt.of(ground)
    again = ground.nested.run([spoilt.part])
    both = ground.nested.run([spoilt.all_elsewhere, spoilt.part])
    hidden, some = spoilt.hidden, spoilt.some
    return {
        "spoilt": not equal(spoilt.before, spoilt.since),
        "kv": ground.alike(spoilt.before, ground.read(spoilt.blocks, len(hidden))),
        "hidden": ground.alike(again, hidden[some]),
        "batched": ground.alike(both, torch.cat([hidden, hidden[some]])),
    }


def gathered_is_close(ground: Ground) -> dict[str, Any]:
    """As ``recomputed_is_equal``, by position: how far it is from what the engine's attention makes."""
    if ground.keeps_latents:
        return {}
    spoilt = Spoilt.of(ground)
    both = ground.gathered.run([spoilt.all_elsewhere, spoilt.part])
    hidden = spoilt.hidden
    return {
        "spoilt": _difference(spoilt.since, spoilt.before),
        "kv": _difference(ground.read(spoilt.blocks, len(hidden)), spoilt.before),
        "hidden": mean_difference(both, torch.cat([hidden, hidden[spoilt.some]])),
    }


def _difference(found: KV, right: KV) -> float:
    return max(
        mean_difference(one, other)
        for ours, theirs in zip(found, right, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def kept_where_it_was_is_equal(ground: Ground) -> dict[str, Any]:
    """KV at its old position behind the same tokens, in other blocks, and what is said behind it."""
    count = 3 * ground.block_size - 5
    blocks, other = (torch.tensor(ids, dtype=torch.int32) for ids in ([4, 9, 2], [11, 1, 6]))
    tokens, positions = ground.tokens(count), torch.arange(count)
    hidden = ground.nested.run([Part(tokens, positions, blocks)])
    before = ground.read(blocks, count)
    slots, places = slots_of(positions, other, ground.block_size), positions.numpy()
    for layer, moves, (keys, values) in zip(
        ground.layers.values(), ground.correctors, before, strict=True
    ):
        layer.write(moves.correct(keys, places, places), values, slots)
    behind = positions[-9:]
    again = ground.nested.run([Part(tokens[behind], behind, other)])
    return {
        "kv": ground.alike(before, ground.read(other, count)),
        "hidden": ground.alike(again, hidden[behind]),
    }


def attention_reaches_its_window(ground: Ground) -> dict[str, Any]:
    """By layer with a window: whether it, and our scores of it, see its first token and none before."""
    count = 3 * ground.block_size - 5
    blocks = torch.tensor([4, 9, 2], dtype=torch.int32)
    tokens, last = ground.tokens(count), torch.tensor([count - 1])
    windows = [layer.sliding_window for layer in ground.attention.values()]
    told = {}
    for number, window in enumerate(windows):
        if window is None:
            continue
        ground.nested.run([Part(tokens, torch.arange(count), blocks)])
        runner = StepRunner(
            ground.nested,
            list(ground.layers.values()),
            list(ground.attention.values()),
            ground.taps,
            SimpleNamespace(world_size=1),
        )
        step = ScoreAttention(last.numpy(), last.numpy(), (number,))
        (scores,) = runner.run([Prompt(tokens, blocks)], [step])
        first = count - window
        told[str(number)] = {
            "scored": [bool(scores[first - 1] > 0), bool(scores[first] > 0)],
            "sum": float(scores.sum()) >= 0.999,
            "seen": [_changes(ground, number, at, last, blocks) for at in (first - 1, first)],
        }
    return told


def _changes(
    ground: Ground, number: int, at: int, last: torch.Tensor, blocks: torch.Tensor
) -> bool:
    """Whether other KV of the token *at* in layer *number* is seen by the token *last*."""
    tokens = ground.tokens(int(last) + 1)
    ground.nested.run([Part(tokens, torch.arange(len(tokens)), blocks)])
    before = ground.nested.run([Part(tokens[last], last, blocks)])
    layer = list(ground.layers.values())[number]
    keys, values = (part[at : at + 1] for part in layer.read_blocks(blocks))
    layer.write(keys, values + 1, slots_of(torch.tensor([at]), blocks, ground.block_size))
    return not torch.equal(before, ground.nested.run([Part(tokens[last], last, blocks)]))


def gate_knows_the_model(ground: Ground) -> dict[str, Any]:
    """What the gate says of the model's ropes, and of some that are not."""
    ropes = {
        "own": ground.correctors,
        "pairs": [_with(c, is_neox=not c.is_neox) for c in ground.correctors],
        "shifted": [_with(c, table=c.table.roll(7, 0)) for c in ground.correctors],
        "slower": [
            _with(c, table=c.table[torch.arange(c.positions) // 2]) for c in ground.correctors
        ],
        "not scaled": [_not_scaled(c) for c in ground.correctors],
        "one layer": [
            *ground.correctors[:-1],
            _with(ground.correctors[-1], is_neox=not ground.correctors[-1].is_neox),
        ],
    }
    verdicts = {name: _verdict(ground, found, ground.taps) for name, found in ropes.items()}
    if not ground.keeps_latents:
        verdicts |= _verdicts_on_gathering(ground)
    turned = AttentionTaps(list(ground.attention.values())[::-1])
    return verdicts | {"layers in another order": _verdict(ground, ground.correctors, turned)}


def _verdicts_on_gathering(ground: Ground) -> dict[str, str]:
    own = _verdict(ground, ground.correctors, ground.taps, ground.gathered)
    verdicts = {"own, gathered": own}
    for what in ("later ones, too", "of another prompt"):
        attends = NestedForward(
            ground.nested._model,
            ground._vllm_config,
            ground._planned,
            ground.pages[0].device,
            Mistaken(what, ground),
        )
        verdicts[what] = _verdict(ground, ground.correctors, ground.taps, attends)
    return verdicts


def _with(
    corrector: PositionCorrector,
    *,
    is_neox: bool | None = None,
    table: torch.Tensor | None = None,
) -> PositionCorrector:
    table = corrector.table if table is None else table
    is_neox = corrector.is_neox if is_neox is None else is_neox
    return PositionCorrector(table, rotary_dim=table.shape[1], is_neox=is_neox)


def _not_scaled(corrector: PositionCorrector) -> PositionCorrector:
    """That of a model whose base is 10,000 and whose positions are not scaled."""
    pairs = corrector.table.shape[1] // 2
    frequencies = 10_000.0 ** (-torch.arange(pairs) / pairs)
    angles = torch.arange(corrector.positions)[:, None] * frequencies
    return _with(corrector, table=torch.cat([angles.cos(), angles.sin()], 1).to(corrector.table))


class Mistaken(GatheredAttention):
    """Attends to what it should not."""

    def __init__(self, what: str, ground: Ground) -> None:
        layers = list(ground.attention.values())
        super().__init__(layers, list(ground.layers.values()), ground.taps)
        self._what = what

    @contextmanager
    def over(self, prompts: Sequence[Queries]) -> Iterator[None]:
        if self._what == "later ones, too":
            wrong = [replace(each, positions=each.positions * 0 + each.last) for each in prompts]
        else:
            wrong = [replace(each, device_blocks=each.device_blocks + 1) for each in prompts]
        with super().over(wrong):
            yield


def _verdict(
    ground: Ground,
    found: list[PositionCorrector],
    taps: AttentionTaps,
    nested: NestedForward | None = None,
) -> str:
    try:
        check_model(
            nested or ground.nested,
            ground.layers,
            found,
            taps,
            vocabulary=ground.vocabulary,
            positions=ground.positions,
        )
    except ConfigError as e:
        return str(e)
    return "let in"


def taps_stop_behind_a_layer(ground: Ground) -> dict[str, Any]:
    """Which layers have new KV after a forward that was stopped, and what was seen of it."""
    count = ground.block_size
    blocks, positions = torch.tensor([5], dtype=torch.int32), torch.arange(count)
    taps = ground.taps
    ground.nested.run([Part(torch.zeros(count), positions, blocks)])
    before = ground.read(blocks, count)
    with taps.until(1, wanted=[0, 1]) as queries:
        ground.nested.run([Part(ground.tokens(count), positions, blocks)])
    stopped = ground.read(blocks, count)
    ground.nested.run([Part(ground.tokens(count), positions, blocks)])
    whole = ground.read(blocks, count)
    return {
        "changed": [not equal([a], [b]) for a, b in zip(before, stopped, strict=True)],
        "final": [equal([a], [b]) for a, b in zip(stopped, whole, strict=True)],
        "queries": {number: list(query.shape) for number, query in queries.items()},
        "head_size": next(iter(ground.attention.values())).head_size,
    }


def steps_of_several_prompts(ground: Ground) -> dict[str, Any]:
    """By kind, whether steps of two prompts in one forward have the scores that each has alone."""
    runner = StepRunner(
        ground.nested,
        list(ground.layers.values()),
        list(ground.attention.values()),
        ground.taps,
        SimpleNamespace(world_size=1),  # no other rank is asked
    )
    size = ground.block_size
    prompts = [
        Prompt(ground.tokens(2 * size - 3), torch.tensor([3, 7, NULL_BLOCK], dtype=torch.int32)),
        Prompt(ground.tokens(3 * size).flip(0), torch.tensor([4, 9, 2], dtype=torch.int32)),
    ]
    some = [np.array([0, 5, 6, 40]), np.arange(1, 3 * size, 7)]
    kinds: dict[str, Callable[[Positions], Step]] = {
        "attention": lambda positions: ScoreAttention(positions, positions[1:], (0, 1)),
        "deviation": lambda positions: ScoreDeviation(positions, 1),
        "recompute": Recompute,
    }
    told = {}
    for name, kind in kinds.items():
        steps = [kind(positions) for positions in some]
        _spoil(ground, prompts)
        alone = [runner.run([p], [s])[0] for p, s in zip(prompts, steps, strict=True)]
        after = [ground.read(p.device_blocks, len(p.tokens)) for p in prompts]
        _spoil(ground, prompts)
        together = runner.run(prompts, steps)
        told[name] = [
            np.allclose(a, b, 1e-5) and close(kv, ground.read(p.device_blocks, len(p.tokens)))
            for a, b, kv, p in zip(alone, together, after, prompts, strict=True)
        ]
    return told


def _spoil(ground: Ground, prompts: list[Prompt]) -> None:
    """Random KV everywhere, the same each time."""
    torch.manual_seed(3)
    for prompt in prompts:
        slots = slots_of(torch.arange(len(prompt.tokens)), prompt.device_blocks, ground.block_size)
        for layer in ground.layers.values():
            parts = layer.read_blocks(prompt.device_blocks)
            keys, values = (torch.randn_like(part[: len(slots)]) for part in parts)
            layer.write(keys, values, slots)


def queries_meet_what_they_are_multiplied_with(ground: Ground) -> dict[str, Any]:
    """How far products of queries with latents are from those with the keys that latents become."""
    if not ground.keeps_latents:
        return {}
    count = ground.block_size
    blocks, positions = torch.tensor([5], dtype=torch.int32), torch.arange(count)
    with ground.taps.until(1, wanted=[1]) as queries:
        ground.nested.run([Part(ground.tokens(count), positions, blocks)])
    (layer,), (name,) = list(ground.layers.values())[1:2], list(ground.attention)[1:2]
    attention = ground.attention[name]
    found = torch.einsum(
        "qhd,kd->hqk",
        ground.taps.multiplied(1, queries[1]).float(),
        layer.read_multiplied(blocks)[:, 0].float(),
    )
    turned, latents = (part[:, 0].float() for part in layer.read_blocks(blocks))
    heads, first = attention.num_heads, get_tensor_model_parallel_rank() * attention.num_heads
    path = Path(ground._vllm_config.model_config.model) / "model.safetensors"
    weight = load_file(path)["model.layers.1.self_attn.kv_b_proj.weight"].float()
    of_heads = weight.unflatten(0, (-1, attention.qk_nope_head_dim + attention.v_head_dim))
    to_keys = of_heads[first : first + heads, : attention.qk_nope_head_dim]
    keys = torch.einsum("hnl,kl->khn", to_keys, latents)
    straight, rotary = (
        queries[1].float().split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], -1)
    )
    expected = torch.einsum("qhn,khn->hqk", straight, keys)
    expected += torch.einsum("qhr,kr->hqk", rotary, turned)
    return {"difference": mean_difference(found, expected)}


PROBES: dict[str, Callable[[Ground], dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (
        written_is_read,
        recomputed_is_equal,
        gathered_is_close,
        kept_where_it_was_is_equal,
        attention_reaches_its_window,
        gate_knows_the_model,
        taps_stop_behind_a_layer,
        steps_of_several_prompts,
        queries_meet_what_they_are_multiplied_with,
    )
}


class ProbeConnector(KVStrataConnector):
    """Runs all probes when the engine starts; ``PROBE_INTO`` names the file for what they say."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._parts = (vllm_config, kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        ground = Ground(self, *self._parts)
        ground.find(kv_caches)
        told = {name: probe(ground) for name, probe in PROBES.items()}
        rank = get_tensor_model_parallel_rank()
        into = Path(self._config.socket or "").with_suffix(f".{rank}.json")
        into.write_text(json.dumps(told))
        super().register_kv_caches(kv_caches)
