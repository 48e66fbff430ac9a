"""A trained model as a folder that vLLM and transformers load: ``LlamaForCausalLM``."""

import json
from pathlib import Path
from typing import Any, Final

import torch.nn.functional as F
from bench.blend.model import Llama, Shape
from bench.blend.task import ANSWERS, BOS
from safetensors.torch import load_file, save_file

__all__ = ["SHIPPED", "load_model", "save_model"]

SHIPPED: Final = Path(__file__).parent / "data"
"""The folder of the model that is in the repository."""


def save_model(model: Llama, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``; the output gets a row of 0 for each token
    that is no answer, as vLLM has a logit for every token of the vocabulary."""
    shape = model.shape
    state = {name: weight.detach().contiguous() for name, weight in model.state_dict().items()}
    head = state["lm_head.weight"]
    state["lm_head.weight"] = F.pad(head, (0, 0, 0, shape.vocabulary - len(head)))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config(shape), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def load_model(folder: Path = SHIPPED) -> Llama:
    """Read what ``save_model`` has written, ready to run and not to be trained."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        vocabulary=config["vocab_size"],
        answers=ANSWERS,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_epsilon=config["rms_norm_eps"],
    )
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"][:ANSWERS]
    model = Llama(shape)
    model.load_state_dict(state)
    model.requires_grad_(requires_grad=False)
    return model


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
