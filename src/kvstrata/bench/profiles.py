"""How much is measured."""

from dataclasses import dataclass
from typing import Final

from kvstrata.bench.contenders import CONTENDERS
from kvstrata.bench.workloads import NAMES

__all__ = ["PROFILES", "Profile"]

# Run where they are named: together with all others they would not fit 24 GiB of memory.
_NAMED: Final = ("kvstrata-blockwise", "kvstrata-layerwise", "lmcache-disk", "lmcache-remote")


@dataclass(frozen=True, slots=True)
class Profile:
    workloads: tuple[str, ...]
    contenders: tuple[str, ...]
    rounds: int  # of a workload; single prompts, which vary most, get *single_rounds*
    single_rounds: int
    prompt_tokens: tuple[int, ...]
    users: int
    rates: tuple[float, ...]
    seconds: float
    requests: int

    def rounds_of(self, workload: str) -> int:
        return self.single_rounds if workload == "single" else self.rounds


PROFILES: Final = {
    "full": Profile(
        workloads=NAMES,
        contenders=tuple(name for name in CONTENDERS if name not in _NAMED),
        rounds=3,
        single_rounds=5,
        prompt_tokens=(1026, 2050, 4098, 8194),
        users=36,
        rates=(0.5, 1.0, 1.5),
        seconds=16.0,
        requests=40,
    ),
    # Three engines: much of five minutes on two cores goes into starting them, and a second for each
    # prompt into waiting until nobody is busy. The chat is just more than the device cache holds.
    "quick": Profile(
        workloads=("single", "chat"),
        contenders=("none", "kvstrata", "native"),
        rounds=1,
        single_rounds=2,
        prompt_tokens=(2050,),
        users=14,
        rates=(1.0,),
        seconds=10.0,
        requests=20,
    ),
}
