"""A namespace that says how its engine hashes tokens."""

from collections.abc import Sequence

from kvstrata.core.types import BlockKey
from kvstrata.integration.vllm.fingerprint import hash_seed
from kvstrata.integration.vllm.prompt_keys import PromptKeys
from kvstrata.server.client import ManagerClient

MODEL = b"m" * 16
PARTS = {
    "hash_algorithm": "sha256",
    "hash_seed": hash_seed("sha256")[0],
    "tokens_per_block": "64",
    "device_block_tokens": "32",
}


def save_tokens(client: ManagerClient, tokens: Sequence[int]) -> list[BlockKey]:
    """The keys of *tokens*, which the engine *client* has then saved."""
    keys = PromptKeys(PARTS).of(tokens)
    client.register_namespace(MODEL, PARTS)
    task = client.put_match(MODEL, keys)
    client.launch([task.task_id])
    client.complete([task.task_id])
    client.ping()
    return keys
