"""Each architecture, from a folder that the test saves, against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.cache import BlockCopy
from radixkv.kernels import cpu, load_backend
from radixkv.model.config import config_from_folder
from radixkv.model.loader import load_model, load_model_config, resolve_model
from radixkv.scheduling.batch import Batch

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-yarn-tuned": ("Qwen2", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0, "attention_factor": 1.3}}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied-bias": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_chunked_prefill_and_decode_agree_with_transformers(case: str, tmp_path: Path, kit: SimpleNamespace) -> None:
    name, options = CASES[case]
    model = kit.make_model(name, **options)
    model.save_pretrained(tmp_path)
    kit.assert_agrees(kit.Driver(str(tmp_path)), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3"])
def test_the_native_cpu_backend_agrees_with_transformers_too(
    name: str, dtype: torch.dtype, tmp_path: Path, kit: SimpleNamespace
) -> None:
    model = kit.make_model(name, **({"head_dim": 32} if name == "Qwen3" else {})).to(dtype)
    model.save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path), backend="cpu", dtype=dtype)
    kit.assert_agrees(driver, model.float(), tolerance=1e-4 if dtype is torch.float32 else 0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama-head-dim", "llama-biases", "qwen3-tied-bias"])
def test_all_layers_in_one_call_give_the_bits_of_one_operation_after_the_other(
    case: str, dtype: torch.dtype, tmp_path: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu.is_native(dtype):
        pytest.skip("no C compiler")
    name, options = CASES[case]
    kit.make_model(name, **options).save_pretrained(tmp_path)
    sequences = [np.random.default_rng(length).integers(0, 160, length).tolist() for length in (23, 9, 30)]
    fused = kit.Driver(str(tmp_path), backend="cpu", dtype=dtype).logits(sequences, 4, 7)
    asked: list[object] = []
    monkeypatch.setattr(cpu, "fuse_layers", lambda *args: asked.append(args))
    plain = kit.Driver(str(tmp_path), backend="cpu", dtype=dtype).logits(sequences, 4, 7)
    assert asked, "the model did not ask for fused layers"
    for a, b in zip(fused, plain, strict=True):
        assert torch.equal(a, b)


def test_sharded_safetensors_load_as_one_model(tmp_path: Path, kit: SimpleNamespace) -> None:
    model = kit.make_model("Llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    kit.assert_agrees(kit.Driver(str(tmp_path)), model)


def test_long_positions_agree_with_transformers_under_yarn_and_llama3(tmp_path: Path, kit: SimpleNamespace) -> None:
    for i, rope in enumerate((LLAMA3, YARN)):
        model = kit.make_model("Llama", rope_parameters=rope)
        model.save_pretrained(tmp_path / str(i))
        kit.assert_agrees(kit.Driver(str(tmp_path / str(i))), model, lengths=(250,), tolerance=3e-4)


def test_rows_before_write_start_are_read_and_not_written(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path))
    tokens = np.random.default_rng(0).integers(0, 160, 14).tolist()
    owner = driver.request(tokens, 2)
    expected = driver.runner.forward(kit.batch_of((owner, 0, 14)))

    reader = driver.request(tokens, 2)
    assert reader.lease is not None
    assert owner.lease is not None
    reader.lease.block_table = np.concatenate([owner.lease.block_table[:2], reader.lease.block_table[2:]])
    reader.lease.write_start = 8  # two blocks of the owner's
    before = [k.clone() for k, _ in driver.kv.layers]
    # Recomputing from token 6 on covers rows 6 and 7, which are the owner's.
    got = driver.runner.forward(kit.batch_of((reader, 6, 8)))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for (k, _), old in zip(driver.kv.layers, before, strict=True):
        changed = {int(b) for b in (k != old).flatten(1).any(1).nonzero().flatten()}
        assert changed <= set(reader.lease.block_table[2:].tolist())


def test_block_copies_are_made_before_anything_is_written(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path))
    tokens = np.random.default_rng(1).integers(0, 160, 10).tolist()
    owner = driver.request(tokens, 2)
    expected = driver.runner.forward(kit.batch_of((owner, 0, 10)))
    other = driver.request(tokens, 2)
    assert owner.lease is not None
    assert other.lease is not None
    # All but the last token come from copies: two whole blocks and one row of a third.
    copies = [
        BlockCopy(int(a), int(b), n) for a, b, n in zip(owner.lease.block_table, other.lease.block_table, (4, 4, 1), strict=True)
    ]
    got = driver.runner.forward(kit.batch_of((other, 9, 1), copies=copies))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_step_without_a_last_chunk_gives_no_logits(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path))
    request = driver.request([1, 2, 3, 4, 5], 2)
    assert driver.runner.forward(kit.batch_of((request, 0, 3))).shape == (0, 160)
    assert driver.runner.forward(Batch()).shape == (0, 160)


def test_bfloat16_stays_near_float32(tmp_path: Path, kit: SimpleNamespace) -> None:
    model = kit.make_model("Qwen3", head_dim=16).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path), dtype=torch.bfloat16)
    assert driver.config.dtype == "bfloat16"
    kit.assert_agrees(driver, model.float(), tolerance=0.15)


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.update(changes)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "DELETE"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM is not supported"),
        ({"architectures": "DELETE"}, r"architecture \(none named\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope scaling 'longrope'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({"num_hidden_layers": "DELETE"}, "lacks the field 'num_hidden_layers'"),
        ({"num_key_value_heads": 3}, "4 query heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope parameters that differ between layers"),
        ({"hidden_size": "wide"}, "hidden_size must be a positive integer, got .wide."),
        ({"rope_scaling": "linear"}, "field of the wrong type or value"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, kit: SimpleNamespace
) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    _edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_model_config(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "lacks tensors for LlamaForCausalLM: model.layers.3"),
        ({"num_hidden_layers": 2}, "has unknown tensors for LlamaForCausalLM: model.layers.2"),
        ({"intermediate_size": 80}, r"has misshapen tensors .*gate_proj.weight is \[96, 64\], not \[80, 64\]"),
        ({"attention_bias": True}, "lacks tensors .*q_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path, kit: SimpleNamespace
) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    _edit_config(tmp_path, **changes)
    source = resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        load_model(
            source, load_model_config(source), dtype=torch.float32, device=torch.device("cpu"), backend=load_backend("reference")
        )


def test_a_folder_without_safetensors_is_refused(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    source = resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"lacks model\.safetensors; weights are read from safetensors files only"):
        load_model(
            source, load_model_config(source), dtype=torch.float32, device=torch.device("cpu"), backend=load_backend("reference")
        )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"\x10", "weights in .* are damaged"),
        ("model.safetensors.index.json", b"{}", "index.json is damaged"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', r"lacks gone\.safetensors"),
        ("config.json", b"{", "is not valid JSON"),
        ("config.json", b"[]", "must hold a JSON object"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, message: str, tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        kit.Driver(str(tmp_path))


def test_older_configs_name_rope_and_dtype_otherwise(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama", rope_parameters=LLAMA3).save_pretrained(tmp_path)
    new = config_from_folder(tmp_path)
    scaling = {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    _edit_config(
        tmp_path, rope_parameters="DELETE", rope_theta=10000.0, rope_scaling=scaling, dtype="DELETE", torch_dtype="float16"
    )
    old = config_from_folder(tmp_path)
    assert (old.rope.kind, old.rope.theta) == (new.rope.kind, new.rope.theta) == ("llama3", 10000.0)
    assert {k: old.rope.scaling[k] for k in LLAMA3 if k not in ("rope_theta", "rope_type")} == {
        k: new.rope.scaling[k] for k in LLAMA3 if k not in ("rope_theta", "rope_type")
    }
    assert (old.dtype, new.dtype) == ("float16", "float32")


def test_eos_ids_come_from_the_generation_config_first(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama", eos_token_id=5).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert config_from_folder(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").unlink()
    assert config_from_folder(tmp_path).eos_token_ids == (5,)


def test_a_sliding_window_caps_the_length(tmp_path: Path, kit: SimpleNamespace) -> None:
    for i, (name, options, limit) in enumerate(
        [
            ("Mistral", {"sliding_window": 48}, 48),
            ("Mistral", {"sliding_window": None}, 256),
            ("Qwen2", {"sliding_window": 48, "use_sliding_window": False}, 256),
            ("Qwen2", {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 1}, 48),
            ("Qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": 256}}, 1024),
        ]
    ):
        kit.make_model(name, **options).save_pretrained(tmp_path / str(i))
        assert config_from_folder(tmp_path / str(i)).max_position_embeddings == limit


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path), num_blocks=10)
    assert driver.kv.num_bytes == 10 * kit.BLOCK_SIZE * driver.config.kv_bytes_per_token("float32")
    assert driver.config.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 16 * 2
