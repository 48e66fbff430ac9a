"""An Idefics3: a tiny Llama that sees images through a vision tower of two layers."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from tests.vllm.made_over import Config, Weights, made_over
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Idefics3Processor, PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from kvstrata.integration.vllm.tiny_model import TinyLlama

_TEXT: Final = TinyLlama(dtype="float32")
_SPECIAL: Final = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<image>")
WORDS: Final = _TEXT.vocab_size - len(_SPECIAL)  # the tokens below are text
IMAGE: Final = _TEXT.vocab_size - 1  # the token that stands for an image in a prompt

_PIXELS: Final = 96  # of a side; images are scaled to a square
_PATCH: Final = 4
_JOINED: Final = 2  # patches of a side that become one token
_SEEN: Final = (_PIXELS // _PATCH // _JOINED) ** 2
IMAGE_TOKENS: Final = _SEEN + 3  # that vLLM puts in its place: there are two before and one behind

_HIDDEN: Final = 64
_INNER: Final = 128
_LAYERS: Final = 2


def write_tiny_idefics3(folder: Path) -> Path:
    """Configuration, weights, tokenizer and processor, for images of any size."""
    made_over(folder, _TEXT, _config, _weights)
    size = {"longest_edge": _PIXELS}
    Idefics3Processor(
        Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False),
        _tokenizer(),
        image_seq_len=_SEEN,
    ).save_pretrained(folder)
    return folder


def _config(text: Config) -> Config:
    vision = {
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "image_size": _PIXELS,
        "patch_size": _PATCH,
    }
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": text["dtype"],
        "text_config": text,
        "vision_config": vision,
        "scale_factor": _JOINED,
        "image_token_id": IMAGE,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    words = [*(f"w{i}" for i in range(WORDS)), *_SPECIAL]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def _weights(llama: Weights) -> Weights:
    text = {name.replace("model.", "model.text_model.", 1): llama[name] for name in llama}
    return text | dict(_vision(torch.Generator().manual_seed(_TEXT.seed)))


def _vision(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Every product has inputs and outputs of variance 1."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.prod(shape[1:]) ** 0.5

    def linear(name: str, *shape: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", normal(*shape)
        yield f"{name}.bias", torch.zeros(shape[0])

    def norm(name: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", torch.ones(_HIDDEN)
        yield f"{name}.bias", torch.zeros(_HIDDEN)

    tower = "model.vision_model"
    positions = torch.randn((_PIXELS // _PATCH) ** 2, _HIDDEN, generator=generator)
    yield f"{tower}.embeddings.position_embedding.weight", positions
    yield from linear(f"{tower}.embeddings.patch_embedding", _HIDDEN, 3, _PATCH, _PATCH)
    for layer in range(_LAYERS):
        prefix = f"{tower}.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear(f"{prefix}.self_attn.{name}", _HIDDEN, _HIDDEN)
        yield from linear(f"{prefix}.mlp.fc1", _INNER, _HIDDEN)
        yield from linear(f"{prefix}.mlp.fc2", _HIDDEN, _INNER)
        yield from norm(f"{prefix}.layer_norm1")
        yield from norm(f"{prefix}.layer_norm2")
    yield from norm(f"{tower}.post_layernorm")
    projection = normal(_TEXT.hidden_size, _HIDDEN * _JOINED**2)
    yield "model.connector.modality_projection.proj.weight", projection
