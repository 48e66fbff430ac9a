"""Files of prompts, one a line as JSON: a list of token ids, or a text. `warm` reads them."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BlockKey

__all__ = ["FilePrompt", "read_prompts"]


class FilePrompt(NamedTuple):
    name: str  # file and line
    keys: list[BlockKey]


def read_prompts(
    content: bytes, name: str, parts: Mapping[str, str], tokenizer: str | None
) -> list[FilePrompt]:
    """The prompts of the file *name*, which holds *content*; keys as in the namespace of *parts*.

    *tokenizer* reads texts. A ``ConfigError`` names the line that is wrong, or what is missing here.
    """
    rows = [
        (f"{name}:{number}", _parsed(f"{name}:{number}", line))
        for number, line in enumerate(content.split(b"\n"), 1)
        if line.strip()
    ]
    if not rows:
        raise ConfigError(f"{name} holds no prompt")
    encode = _encoder(tokenizer) if any(isinstance(row, str) for _, row in rows) else None
    try:
        from kvstrata.integration.vllm.prompt_keys import PromptKeys
    except ImportError as e:
        raise ConfigError(
            f"keys are made from tokens as vLLM does it, and that is not here: {e}",
            hint="run this where the engine runs, or kvstrata warm with --keys-from or --request",
        ) from e
    made = PromptKeys(parts)
    prompts = []
    for where, row in rows:
        tokens = encode(row) if encode is not None and isinstance(row, str) else row
        prompts.append(FilePrompt(where, made.of(tokens)))
    return prompts


def _parsed(where: str, line: bytes) -> Any:
    """A list of token ids, or a text."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as e:
        raise ConfigError(
            f"{where} is no JSON: {e}", hint='write [1, 2, 3] or "a text", one a line'
        ) from e
    is_ids = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not (is_ids or isinstance(value, str)):
        raise ConfigError(f"{where} is neither a list of token ids nor a text")
    return value


def _encoder(tokenizer: str | None) -> Callable[[str], list[int]]:
    if tokenizer is None:
        raise ConfigError("there are texts among the prompts", hint="name their --tokenizer")
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except ImportError as e:
        raise ConfigError(f"texts need transformers: {e}") from e
    except (OSError, ValueError) as e:
        raise ConfigError(f"--tokenizer {tokenizer!r} cannot be loaded: {e}") from e

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.encode(text)
        return ids

    return encode
