"""Handles of the engine's own KV cache: its tensors by reference, checked against their layout.

Nothing is allocated or copied, and torch is not imported: a tensor is asked what it is.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvstrata.core.errors import ConfigError
from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType, KVGroup
from kvstrata.storage.handles import DeviceType, StorageHandle

__all__ = ["Tensor", "device_handle"]

_RAW: Final = ("uint8", "int8")  # bytes that somebody else interprets


class Tensor(Protocol):
    """What is needed of a ``torch.Tensor``."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    @property
    def device(self) -> Any: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...


def device_handle(
    tensors: Sequence[Tensor], layout: KVCacheLayout, device_id: int, dtype: ElementType
) -> StorageHandle[tuple[Tensor, ...]]:
    """A handle on *tensors*: one of all layers in the shape of *layout*, or one for each layer.

    Axes of size 1 may be left out. Quantised elements may be in tensors of uint8 or int8. Raises
    ``ConfigError`` if a tensor has another shape, stride, element type or device.
    """
    kept = tuple(tensors)
    by_layer = len(kept) == layout.num_layer and layout.type is not KVCacheLayoutType.BLOCKWISE
    if len(kept) != 1 and not by_layer:
        raise ConfigError(
            f"{len(kept)} tensors for a {layout.type.name} cache of {layout.num_layer} layers",
            hint="register one tensor, or unless BLOCKWISE one for each layer",
        )
    skipped = 1 if len(kept) > 1 else 0  # the layer axis, outermost
    expected = _axes_bytes(layout, dtype)[skipped:]
    for number, tensor in enumerate(kept):
        _check(f"tensor {number} of device {device_id}", tensor, expected, dtype)
        if getattr(tensor.device, "index", None) not in {None, device_id}:
            raise ConfigError(f"tensor {number} is on {tensor.device}, not on device {device_id}")
    return StorageHandle(
        DeviceType.DEVICE,
        device_id,
        (KVGroup(layout, dtype),),
        layout.bytes_per_block(dtype),
        layout.num_block,
        kept,
    )


def _axes_bytes(layout: KVCacheLayout, dtype: ElementType) -> list[tuple[int, int]]:
    """Size and stride in bytes of each axis but the last, and last the bytes of a row, stride 1."""
    strides = {
        "layer": layout.layer_stride_bytes(dtype),
        "kv": layout.kv_stride_bytes(dtype),
        "block": layout.block_stride_bytes(dtype),
        "token": layout.token_stride_bytes(dtype),
        "head": layout.head_stride_bytes(dtype),
    }
    outer = zip(layout.shape, layout.type.value[:-1], strict=False)
    return [(size, strides[axis]) for size, axis in outer] + [(dtype.bytes_of(layout.head_size), 1)]


def _check(what: str, tensor: Tensor, expected: list[tuple[int, int]], dtype: ElementType) -> None:
    found_type = str(tensor.dtype).removeprefix("torch.").removesuffix("_x2")
    if found_type != dtype.label and not (dtype.bits <= 8 and found_type in _RAW):
        raise ConfigError(f"{what} holds {found_type}, not {dtype.label}")
    *outer, row = zip(tensor.shape, tensor.stride(), strict=True)
    width = tensor.element_size()
    found = [(size, stride * width) for size, stride in outer]
    found += [(row[0] * width, row[1])]
    if _long(found) != _long(expected):
        raise ConfigError(
            f"{what} has the shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())} of "
            f"{found_type}: axes of {_long(found)} (size, stride in bytes), not {_long(expected)}",
            hint="give the layout of the tensors, or the view of them that has this layout",
        )


def _long(axes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [axis for axis in axes if axis[0] != 1]
