"""Attention by position in the place of vLLM's: which layers it can stand in for."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.gathered import GatheredAttention
from kvstrata.integration.vllm.blend.taps import AttentionTaps

pytestmark = pytest.mark.vllm


class Implementation:
    """As one of vLLM's: without ALiBi, sinks and a cap, each in a backend's own way."""

    alibi_slopes = None
    sinks = None
    logits_soft_cap = 0.0

    def forward(self, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = kwargs["output"]
        return output.fill_(1.0)


def layer(**changes: Any) -> Any:
    impl = Implementation()
    for name, value in changes.items():
        setattr(impl, name, value)
    return SimpleNamespace(impl=impl, layer_name="model.layers.0", query_quant=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alibi_slopes": torch.zeros(4)}, "(ALiBi)"),
        ({"sinks": torch.zeros(4)}, "has sinks"),
        ({"logits_soft_cap": 50.0}, "caps its products"),
    ],
)
def test_what_is_more_than_a_softmax_of_products_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    layers = [layer(), layer(**changes)]
    with pytest.raises(
        ConfigError, match=rf"layer model.layers.0 .*{re.escape(reason)}, which blending"
    ):
        GatheredAttention(layers, [], AttentionTaps(layers))


def test_queries_of_eight_bits_are_refused() -> None:
    quantised = layer()
    quantised.query_quant = object()
    with pytest.raises(ConfigError, match="quantises its queries"):
        GatheredAttention([quantised], [], AttentionTaps([quantised]))


def test_layers_attend_as_ever_before_and_after_it_even_where_it_fails() -> None:
    own = layer()
    taps = AttentionTaps([own])
    output = torch.zeros(2)

    def attend(number: int, queries: torch.Tensor, output: torch.Tensor) -> None:
        assert number == 0
        output.copy_(queries)

    def run() -> list[float]:
        own.impl.forward(own, torch.tensor([5.0, 6.0]), output=output)
        return [float(each) for each in output]

    def fail_within() -> None:
        with taps.attending(attend):
            assert run() == [5.0, 6.0]
            raise MemoryError

    assert run() == [1.0, 1.0]
    with pytest.raises(MemoryError):
        fail_within()
    assert run() == [1.0, 1.0]
