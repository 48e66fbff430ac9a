"""How this machine's GPU copies, as `kvstrata doctor` asks: measured by what copies for its kind.

    python -m kvstrata.transfer.measure [PIECE_BYTES ...]

prints it as JSON.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from kvstrata.transfer.driver import DeviceFault

__all__ = ["main"]


def _measured(pieces: Sequence[int]) -> dict[str, Any]:
    if not torch.accelerator.is_available():
        raise DeviceFault("torch finds no GPU")
    kind = torch.accelerator.current_accelerator().type
    name = f"{__package__}.{kind}_measure"
    if find_spec(name) is None:
        return {"gpu": kind, "report": "copied to and from by torch, which is right, and slow"}
    found: dict[str, Any] = importlib.import_module(name).measure_here(pieces)
    return found


def main(arguments: Sequence[str]) -> int:
    try:
        found = _measured([int(each) for each in arguments])
    except DeviceFault as e:
        found = {"problem": str(e)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
