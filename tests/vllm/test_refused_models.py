"""Models that vLLM alone starts with and KVStrata refuses: the engine stops, and its log says why."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engine import Engine, EngineFailed
from tests.vllm.oracle import VOCABULARY
from tests.vllm.tiny_deepseek import write_deepseek
from tests.vllm.tiny_qwen3_next import SETTINGS, write_qwen3_next
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperProcessor

pytestmark = pytest.mark.vllm

WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_target_positions": 448,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
}
BEGIN = "<|startoftranscript|>"  # the word that vLLM has a Whisper begin with


def write_whisper(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(WHISPER))
    words = [BEGIN, *(f"w{i}" for i in range(1, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w1"))
    tokenizer.add_special_tokens([BEGIN])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w1")
    WhisperProcessor(WhisperFeatureExtractor(), fast).save_pretrained(folder)


@pytest.mark.parametrize(
    ("write", "settings", "reason"),
    [
        (
            write_qwen3_next,
            SETTINGS | {"enable_prefix_caching": False},
            "mamba_cache_mode is 'none': only with 'align' does vLLM keep a state",
        ),
        (
            write_whisper,
            {
                "skip_tokenizer_init": False,
                "max_model_len": 448,
                "max_num_batched_tokens": 2048,
                "num_gpu_blocks_override": 256,  # audio takes 1500 tokens
            },
            "is an encoder-decoder model: its decoder's KV depends on the encoder's input",
        ),
        (
            write_deepseek,
            {
                "dtype": "bfloat16",
                "attention_config": {"backend": "CPU_MLA"},  # what there is without AMX
                "num_gpu_blocks_override": 128,  # of 16 tokens
            },
            "vLLM runs with neither chunked prefill nor prefix caching",
        ),
    ],
    ids=["Qwen3-Next", "Whisper", "DeepSeek"],
)
def test_the_engine_stops_with_the_reason_and_the_way_out(
    tmp_path: Path, write: Callable[[Path], None], settings: dict[str, Any], reason: str
) -> None:
    write(tmp_path)
    settings = settings | {"load_format": "dummy"}
    transfer = {
        "kv_role": "kv_both",
        "engine_id": f"refused-{random.randrange(1 << 30)}",
        "kv_connector_extra_config": {"tiers": "host:64MiB"},
    }
    with (
        Engine(tmp_path, tmp_path / "alone.log", settings=settings) as alone,
        Engine(tmp_path, tmp_path / "vllm.log", transfer, settings) as engine,
    ):
        with pytest.raises(EngineFailed):
            engine.wait_ready()
        alone.wait_ready()
    assert reason in engine.log_text()
    assert "run vLLM without the connector" in engine.log_text()
