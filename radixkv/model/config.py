"""ModelConfig: what the Llama family's members differ in, read from ``config.json`` or from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from radixkv.model.gguf_file import GGUFFile

HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding.  ``scaling`` holds the parameters of ``kind`` under transformers' names.

    ``frequency_factors`` (GGUF's form of ``llama3`` scaling) divide the inverse frequencies, one for each pair.
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model of the Llama family.  ``dtype`` is the type it was saved in, the nearest one where quantised."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"the model's {name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"the model's {self.num_heads} query heads can't be shared among {self.num_kv_heads} KV heads")
        if self.rope.kind not in ROPE_TYPES:
            raise ValueError(f"rope scaling {self.rope.kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes that K and V of one token take over all layers; ``dtype`` is ``float32``, ``float16`` or ``bfloat16``."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * _ITEM_SIZE[dtype]


def config_from_folder(folder: Path) -> ModelConfig:
    """Read ``config.json`` and ``generation_config.json``; ``ValueError`` names what is not supported or missing."""
    raw = _read_json(folder / "config.json")
    architectures = raw.get("architectures") or ["(none named)"]
    architecture = str(architectures[0])
    if architecture not in HF_ARCHITECTURES:
        raise ValueError(f"{folder}: architecture {architecture} is not supported; supported: {', '.join(HF_ARCHITECTURES)}")
    try:
        return _config_from_json(architecture, raw, _generation_config(folder))
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks the field {error}") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{folder / 'config.json'} has a field of the wrong type or value: {error}") from None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _config_from_json(architecture: str, raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"weights quantised by {method!r} are not supported; use the unquantised model or a GGUF file")
    rope_raw = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if rope_raw.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if any(isinstance(value, dict) for value in rope_raw.values()):
        raise ValueError("rope parameters that differ between layers are not supported")
    rope = RopeConfig(
        theta=float(rope_raw.get("rope_theta", raw.get("rope_theta") or 10000.0)),
        kind=rope_raw.get("rope_type", rope_raw.get("type", "default")),
        scaling={"original_max_position_embeddings": raw["max_position_embeddings"], **rope_raw},
    )
    num_heads = raw["num_attention_heads"]
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    attention_bias = bool(raw.get("attention_bias", False)) and not architecture.startswith("Mistral")
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or (128 if qwen3 else raw["hidden_size"] // num_heads),
        max_position_embeddings=_usable_positions(architecture, raw, rope),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias", False)),
        qk_norm=qwen3,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        dtype=_saved_dtype(raw.get("dtype") or raw.get("torch_dtype")),
    )


def _usable_positions(architecture: str, raw: dict[str, Any], rope: RopeConfig) -> int:
    positions = _scaled_positions(raw["max_position_embeddings"], rope)
    window = raw.get("sliding_window")
    if not architecture.startswith("Mistral") and not raw.get("use_sliding_window", False):
        window = None
    # Within its window a sliding-window layer attends to everything, so that full attention is exact up to there.
    return positions if window is None else min(positions, int(window))


def _scaled_positions(positions: int, rope: RopeConfig) -> int:
    if rope.kind != "yarn":
        return positions
    # Qwen's configs give the length before scaling, others the length after it.
    return max(positions, int(rope.scaling["original_max_position_embeddings"] * rope.scaling["factor"]))


def _saved_dtype(name: str | None) -> str:
    return name if name in _ITEM_SIZE else "float32"


def _generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return _read_json(path) if path.exists() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return raw


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Read a GGUF file's metadata; ``ValueError`` names what is not supported or missing."""
    meta = file.metadata
    architecture = str(meta.get("general.architecture", "(none named)"))
    if architecture not in GGUF_ARCHITECTURES:
        raise ValueError(f"{file.path}: architecture {architecture} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}")
    try:
        return _config_from_metadata(architecture, meta, file)
    except KeyError as error:
        raise ValueError(f"{file.path} lacks the metadata field or tensor {error}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{file.path} has a metadata field of the wrong type or value: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from None


def _config_from_metadata(arch: str, meta: dict[str, Any], file: GGUFFile) -> ModelConfig:
    if meta.get(f"{arch}.expert_count", 0):
        raise ValueError("mixture-of-experts models (Mixtral) are not supported")
    num_heads, hidden_size = meta[f"{arch}.attention.head_count"], meta[f"{arch}.embedding_length"]
    num_kv_heads = meta.get(f"{arch}.attention.head_count_kv", num_heads)
    head_dim = meta.get(f"{arch}.attention.key_length", hidden_size // num_heads)
    if meta.get(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise ValueError("value heads of another size than key heads are not supported")
    if meta.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise ValueError("partial rotary embedding is not supported")
    rope = _rope_from_metadata(arch, meta, file)
    tensors = file.tensors
    eos = (meta.get("tokenizer.ggml.eos_token_id"), meta.get("tokenizer.ggml.eot_token_id"))
    return ModelConfig(
        architecture=arch,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta[f"{arch}.feed_forward_length"],
        num_layers=meta[f"{arch}.block_count"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_scaled_positions(meta[f"{arch}.context_length"], rope),
        rms_norm_eps=meta[f"{arch}.attention.layer_norm_rms_epsilon"],
        rope=rope,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        # Quantised weights carry about as many digits as bfloat16, which holds float32's whole range.
        dtype="float32" if tensors["blk.0.attn_q.weight"].kind.name == "F32" else "bfloat16",
    )


def _rope_from_metadata(arch: str, meta: dict[str, Any], file: GGUFFile) -> RopeConfig:
    theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
    if "rope_freqs.weight" in file.tensors:
        return RopeConfig(theta=theta, frequency_factors=tuple(np.ravel(file.dequantize("rope_freqs.weight")).tolist()))
    prefix = f"{arch}.rope.scaling."
    kind = meta.get(f"{prefix}type", "none")
    factor = meta.get(f"{prefix}factor", meta.get(f"{arch}.rope.scale_linear", 1.0))
    if kind == "none" and factor == 1.0:
        return RopeConfig(theta=theta)
    scaling = {
        "factor": factor,
        "original_max_position_embeddings": meta.get(f"{prefix}original_context_length", meta[f"{arch}.context_length"]),
        "beta_fast": meta.get(f"{prefix}yarn_beta_fast"),
        "beta_slow": meta.get(f"{prefix}yarn_beta_slow"),
    }
    return RopeConfig(theta=theta, kind="linear" if kind == "none" else kind, scaling=scaling)
