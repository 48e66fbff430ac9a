"""The kinds of values that tiers are made of."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from kvstrata.core.errors import ConfigError
from kvstrata.core.write_rule import parse_write_rule

__all__ = ["Compressing", "Count", "Evicting", "Eviction", "Writing", "absolute", "refuse_bool"]


def refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ConfigError("a number is expected, not true or false")
    return value


def absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ConfigError(f"the path {str(path)!r} is not absolute")
    if "\0" in str(path):
        raise ConfigError("the path holds a zero character")
    return path


Count = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1)]


Eviction = Literal["lru", "s3fifo", "cost"]
Evicting = Annotated[
    Eviction,
    Field(
        description=(
            "Which block leaves first when the tier is full. `lru`: the one that was used longest "
            "ago. `s3fifo`: one that was asked for once before one that was asked for again, so "
            "that a flood of new prompts drives out little. `cost`: the one that saves least, by "
            "what computing it costs and how likely it is asked for again."
        ),
        examples=["s3fifo"],
    ),
]


def _write_rule(text: str) -> str:
    parse_write_rule(text)
    return text


Compressing = Annotated[
    bool,
    Field(
        description=(
            "Keep blocks compressed, without loss: about two thirds of the room for bf16, at 0.6 "
            "GB/s a core. Needs `kvstrata[zstd]`. Nodes share blocks only if theirs is alike."
        ),
        examples=["true"],
    ),
]


Writing = Annotated[
    str,
    AfterValidator(_write_rule),
    Field(
        description=(
            "When a block of host memory is written to this tier. `saved`: at once, so that most "
            "survives a crash. `reused`: when it is found in host memory, so that what is asked "
            "for once is never written; `reused:2` when it is found there twice. `evicted`: before "
            "it leaves host memory."
        ),
        examples=["reused:2"],
    ),
]
