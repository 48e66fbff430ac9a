"""Interpreted kernels touch nothing but the tensors that they were given."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


class OutOfBounds(AssertionError):
    """A kernel has read or written beside all tensors that it was called with."""


@contextmanager
def kept_to_what_is_given() -> Iterator[list[int]]:
    """Within it each address is looked at; what it yields has one element, how many were.

    Raises:
        OutOfBounds: Out of the call of a kernel, as the cause of triton's InterpreterError.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    begin = executor._init_args_hst
    given: list[range] = []
    seen = [0]

    def look(at: Any, mask: Any) -> None:
        width = max(1, at.get_element_ty().primitive_bitwidth // 8)
        addresses = at.data[np.broadcast_to(mask.data, at.data.shape).astype(bool)].astype(np.int64)
        inside = np.zeros(len(addresses), bool)
        for each in given:
            inside |= (addresses >= each.start) & (addresses <= each.stop - width)
        seen[0] += len(addresses)
        if not inside.all():
            raise OutOfBounds(f"{addresses[~inside][0]:#x}, {width} bytes: given are {given}")

    def looked_begin(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = begin(self, args, kwargs)
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        given[:] = [range(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]
        return args, kwargs

    def looked_load(self: Any, at: Any, mask: Any, *rest: Any) -> Any:
        look(at, mask)
        return load(self, at, mask, *rest)

    def looked_store(self: Any, at: Any, value: Any, mask: Any, *rest: Any) -> Any:
        look(at, mask)
        return store(self, at, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", looked_begin)
        patch.setattr(builder, "create_masked_load", looked_load)
        patch.setattr(builder, "create_masked_store", looked_store)
        yield seen
