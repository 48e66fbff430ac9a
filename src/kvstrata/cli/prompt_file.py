"""Files of prompts, one a line as JSON: a list of token ids, or a text. `warm` and `page` read them."""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from kvstrata.core.errors import ConfigError, KVStrataError
from kvstrata.core.types import BlockKey

__all__ = ["FilePrompt", "read_keys_apart", "read_prompts"]

_READING_SECONDS: Final = 240.0

_Answer = list[list[BlockKey]] | KVStrataError


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


def read_keys_apart(
    content: bytes, name: str, parts: Mapping[str, str], *, tokenizer: str | None
) -> list[list[BlockKey]]:
    """The keys of ``read_prompts``, made in another process: vLLM stays out of this one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, content, name, dict(parts), tokenizer)
    process = context.Process(target=_answer, args=arguments, daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(_READING_SECONDS):
            raise KVStrataError(f"{name} is not read after {_READING_SECONDS:.0f} s")
        answer: _Answer = receiver.recv()
    except EOFError as e:
        raise KVStrataError(f"the process that read {name} died: see the log") from e
    finally:
        receiver.close()
        process.kill()
        process.join()
    if isinstance(answer, KVStrataError):
        raise answer
    return answer


def _answer(
    sender: "Connection[_Answer, Any]",
    content: bytes,
    name: str,
    parts: Mapping[str, str],
    tokenizer: str | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who waits for the answer
    threading.Thread(target=_end_with_parent, name="kvstrata-parent", daemon=True).start()
    try:
        prompts = read_prompts(content, name, parts, tokenizer)
    except KVStrataError as e:
        sender.send(e)
    else:
        sender.send([prompt.keys for prompt in prompts])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


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
