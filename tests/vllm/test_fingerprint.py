import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm.plans import full, group, model_folder, plan, vllm_config
from vllm.config import LoadConfig, VllmConfig
from vllm.config.multimodal import MultiModalConfig

from kvstrata.integration.vllm.fingerprint import NamespaceFingerprint, namespace_id
from kvstrata.integration.vllm.geometry import geometry_from_config

HUB_ID = "kvstrata-tests/not-on-the-hub"


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, end = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    encoded = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


def weights(**changes: bytes) -> dict[str, bytes]:
    return {"a": bytes(100_000), "b": bytes(100_000), "small": bytes(3)} | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = model_folder(tmp_path / "model")
    write_safetensors(made / "model.safetensors", weights())
    return made


def fingerprint(
    config: VllmConfig, *, tokens: int = 256, override: str | None = None, **spec: Any
) -> NamespaceFingerprint:
    planned = plan(config, group(full(**spec)))
    return namespace_id(config, planned, geometry_from_config(config, planned), tokens, override)


def test_id_is_16_bytes_and_the_same_in_another_process(folder: Path) -> None:
    ours = fingerprint(vllm_config(folder))
    assert len(ours.id) == 16
    assert ours.persistent_ok
    assert ours.persistent_problem is None
    program = (
        "from pathlib import Path; from tests.vllm.test_fingerprint import *; "
        f"print(fingerprint(vllm_config(Path({str(folder)!r}))).id.hex())"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": "/usr/bin:/bin"},
    )
    assert found.stdout.split()[-1] == ours.id.hex()


def test_parts_are_readable(folder: Path) -> None:
    parts = fingerprint(vllm_config(folder)).parts
    assert parts["model"] == "model"
    assert parts["weights"].startswith("files:1:")
    assert json.loads(parts["hf_config"])["hidden_size"] == 256
    assert parts["dtype"] == "bfloat16"
    assert parts["kv_cache_layout"] == "LBHNC"
    assert parts["page_bytes"] == "4096"
    assert parts["hash_algorithm"] == "sha256"
    assert parts["device"].startswith("cpu ")
    assert all(isinstance(v, str) for v in parts.values())


def test_copied_folder_is_the_same_namespace(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / "model"
    shutil.copytree(folder, copied)
    assert fingerprint(vllm_config(copied)) == fingerprint(vllm_config(folder))


@pytest.mark.parametrize(
    "changed",
    [
        {"a": b"\1" + bytes(99_999)},
        {"b": bytes(50_000) + b"\1" + bytes(49_999)},
        {"small": b"\0\0\1"},
        {"c": bytes(3)},
    ],
    ids=["start", "middle", "small", "another tensor"],
)
def test_changed_tensor_is_another_namespace(folder: Path, changed: dict[str, bytes]) -> None:
    before = fingerprint(vllm_config(folder))
    write_safetensors(folder / "model.safetensors", weights(**changed))
    after = fingerprint(vllm_config(folder))
    assert after.id != before.id
    assert {k for k in after.parts if after.parts[k] != before.parts[k]} == {"weights"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "x.safetensors"])
def test_other_weight_files_are_sampled(folder: Path, name: str) -> None:
    data = bytearray(3 << 20)
    (folder / name).write_bytes(data)
    before = fingerprint(vllm_config(folder))
    assert before.parts["weights"].startswith("files:2:")
    data[(3 << 20) // 2] = 1
    (folder / name).write_bytes(data)
    middle = fingerprint(vllm_config(folder))
    (folder / name).write_bytes(data[:-1])
    shorter = fingerprint(vllm_config(folder))
    assert len({before.id, middle.id, shorter.id}) == 3


def test_files_that_are_no_weights_do_not_count(folder: Path) -> None:
    before = fingerprint(vllm_config(folder))
    (folder / "README.md").write_text("hello")
    assert fingerprint(vllm_config(folder)) == before


def test_folder_without_weights_must_not_persist(tmp_path: Path) -> None:
    found = fingerprint(vllm_config(model_folder(tmp_path / "model")))
    assert not found.persistent_ok
    assert found.persistent_problem is not None
    assert "weights_fingerprint" in found.persistent_problem


def test_given_weights_stand_for_unread_ones(tmp_path: Path) -> None:
    config = vllm_config(model_folder(tmp_path / "model"))
    one, two = fingerprint(config, override="v1"), fingerprint(config, override="v2")
    assert one.persistent_ok
    assert one.id != two.id
    assert one.parts["weights"] == "given:v1"


def test_dummy_weights_are_their_seed(folder: Path) -> None:
    found = []
    for seed in (0, 1):
        config = vllm_config(folder, seed=seed)
        config.load_config = LoadConfig(load_format="dummy")
        found.append(fingerprint(config))
    assert found[0].parts["weights"] == "dummy:seed=0"
    assert found[0].persistent_ok
    assert found[0].id != found[1].id


def test_loader_that_reads_elsewhere_must_not_persist(folder: Path) -> None:
    config = vllm_config(folder)
    config.load_config = LoadConfig(load_format="tensorizer")
    assert not fingerprint(config).persistent_ok


def test_hub_model_is_its_cached_snapshot(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    config = vllm_config(folder)
    config.model_config.model = HUB_ID
    config.load_config = LoadConfig(download_dir=str(tmp_path / "hub"))
    found = fingerprint(config)
    assert found.persistent_ok
    assert found.parts["model"] == HUB_ID
    assert found.parts["weights"] == fingerprint(vllm_config(folder)).parts["weights"]


@pytest.mark.parametrize("model", [HUB_ID, "s3://bucket/model", "/no/such/folder"])
def test_weights_out_of_reach_must_not_persist(folder: Path, tmp_path: Path, model: str) -> None:
    config = vllm_config(folder)
    config.model_config.model = model
    config.load_config = LoadConfig(download_dir=str(tmp_path))
    problem = fingerprint(config).persistent_problem
    assert problem is not None
    assert repr(model) in problem


def test_random_hash_seed_must_not_persist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = vllm_config(folder)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    random = fingerprint(config)
    assert random.persistent_problem is not None
    assert "PYTHONHASHSEED" in random.persistent_problem
    assert "--prefix-caching-hash-algo sha256" in random.persistent_problem
    assert fingerprint(config).id != random.id
    monkeypatch.setenv("PYTHONHASHSEED", "a secret")
    seeded = fingerprint(config)
    assert seeded.persistent_ok
    assert fingerprint(config) == seeded
    assert "a secret" not in "".join(seeded.parts.values())


def test_seed_of_cryptographic_hashes_counts_and_needs_no_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = vllm_config(folder)
    default = fingerprint(config)
    assert default.persistent_ok
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert fingerprint(config).id != default.id


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("model_config", "quantization", "awq"),
        ("model_config", "dtype", torch.float16),
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config", "world_size", 2),
        ("parallel_config", "tensor_parallel_size", 2),
    ],
)
def test_each_setting_that_changes_the_bytes_counts(
    folder: Path, owner: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: "vec"
    )  # fp8 needs AVX-512, which this machine may lack
    config = vllm_config(folder)
    before = fingerprint(config)
    monkeypatch.setattr(getattr(config, owner), name, value)
    assert fingerprint(config).id != before.id


def test_instruction_set_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for isa in ("vec", "amx"):
        monkeypatch.setattr(
            "vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_, isa=isa: isa
        )
        found.add(fingerprint(vllm_config(folder)).id)
    assert len(found) == 2


def test_geometry_and_block_size_count(folder: Path) -> None:
    config = vllm_config(folder)
    ids = {
        fingerprint(config).id,
        fingerprint(config, tokens=128).id,
        fingerprint(config, num_kv_heads=2).id,
        fingerprint(config, dtype=torch.float16).id,
    }
    assert len(ids) == 4


def test_length_of_the_cache_and_of_requests_do_not_count(folder: Path) -> None:
    one, two = vllm_config(folder), vllm_config(folder, max_model_len=256)
    planned = plan(two, group(full()), num_blocks=5)
    other = namespace_id(two, planned, geometry_from_config(two, planned), 256, None)
    assert other == fingerprint(one)


def test_request_length_counts_where_it_chooses_the_rope(folder: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "factor": 1.0,
    }
    model_folder(folder, rope_parameters=rope)
    one, two = vllm_config(folder), vllm_config(folder, max_model_len=256)
    assert fingerprint(one).id != fingerprint(two).id


def prepared(folder: Path, **settings: Any) -> NamespaceFingerprint:
    """Of an engine whose model takes images."""
    config = vllm_config(folder)
    config.model_config.multimodal_config = MultiModalConfig(**settings)
    return fingerprint(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"mm_encoder_attn_dtype": "fp8"},
        {"video_pruning_rate": 0.5},
    ],
)
def test_how_an_engine_prepares_images_is_another_namespace(
    folder: Path, settings: dict[str, Any]
) -> None:
    """vLLM's hash of an image has the ``mm_processor_kwargs`` of the request alone."""
    before, after = prepared(folder), prepared(folder, **settings)
    assert {k for k in after.parts if after.parts[k] != before.parts[k]} == {"multimodal"}
    assert after.id != before.id


def test_how_much_is_kept_of_prepared_images_does_not_count(folder: Path) -> None:
    assert prepared(folder, mm_processor_cache_gb=1.0) == prepared(folder)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_files_by_which_images_are_prepared_count(folder: Path, name: str) -> None:
    (folder / name).write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    before, text = prepared(folder), fingerprint(vllm_config(folder))
    (folder / name).write_text('{"image_mean": [0.4, 0.5, 0.5]}')
    assert prepared(folder).id != before.id
    assert fingerprint(vllm_config(folder)) == text


def test_scales_of_an_encoder_count(folder: Path, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    settings = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales)}
    scales.write_text('{"a": 1}')
    before = prepared(folder, **settings)
    scales.write_text('{"a": 2}')
    assert prepared(folder, **settings).id != before.id
