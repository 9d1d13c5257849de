"""From the name a user types to a model on the device, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from radixkv.model.config import ModelConfig, config_from_folder, config_from_gguf
from radixkv.model.fetch import ALIASES, fetch_alias, fetch_from_hub
from radixkv.model.gguf_file import GGUFFile

if TYPE_CHECKING:  # torch takes seconds to import, and the server's frontend needs only names, configs and tokenizers
    import torch
    from torch import Tensor

    from radixkv.kernels import Backend
    from radixkv.kernels.quantized import QuantizedWeight
    from radixkv.model.llama import Llama


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: a Hugging Face folder or a GGUF file.  ``name`` is what the user called it."""

    name: str
    path: Path
    kind: Literal["folder", "gguf"]


def resolve_model(name: str, *, quiet: bool = False) -> ModelSource:
    """Find the model, fetching it if it is an alias or a hub id.

    Raises ``ValueError`` for a name that is none of these, ``OSError`` saying what to do where it can't be fetched.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model folder {name} has no config.json")
        return ModelSource(name, path, "folder")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model file {name} is not a .gguf file; name a Hugging Face model by its folder")
        return ModelSource(name, path, "gguf")
    if name in ALIASES:
        return ModelSource(name, fetch_alias(name, quiet=quiet), "gguf")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith(".gguf"):
        return ModelSource(name, fetch_from_hub(name), "folder")
    known = ", ".join(ALIASES)
    raise ValueError(f"no model {name!r}: not a folder or .gguf file here, not a hub id (owner/name), and not one of {known}")


def load_model_config(source: ModelSource) -> ModelConfig:
    """What the model is; ``ValueError`` names an architecture or feature that isn't supported."""
    return config_from_gguf(GGUFFile(source.path)) if source.kind == "gguf" else config_from_folder(source.path)


def load_model(source: ModelSource, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, backend: Backend) -> Llama:
    """Check every tensor's name and shape, then read, cast and pack them one by one.

    Raises ``ValueError`` naming tensors that are missing, unknown, or of another shape than the config's.
    """
    from radixkv.model.llama import Llama

    weights = _gguf_tensors(source.path, config) if source.kind == "gguf" else _safetensors(source.path)
    _check_tensors(source, config, weights.shapes)
    return Llama(config, lambda name: weights.get(name).to(device=device, dtype=dtype), backend, weights.quantized)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the model under its Hugging Face name."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", q, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q, config.o_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = (dim,)
    return shapes


def _check_tensors(source: ModelSource, config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> None:
    expected = expected_shapes(config)
    # Old checkpoints carry RoPE's frequencies, tied ones sometimes a second copy of the embedding.
    extra = [name for name in shapes if name not in expected and not name.endswith(("rotary_emb.inv_freq", "lm_head.weight"))]
    missing = [name for name in expected if name not in shapes]
    misshapen = [
        f"{name} is {list(shapes[name])}, not {list(shape)}" for name, shape in expected.items() if shapes.get(name, shape) != shape
    ]
    for problem, names in (
        ("lacks", missing),
        ("has unknown", extra),
        ("has misshapen", misshapen),
    ):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise ValueError(f"{source.path} {problem} tensors for {config.architecture}: {', '.join(names[:4])}{more}")


class _Weights(NamedTuple):
    """The tensors of a file, all by their Hugging Face names."""

    shapes: dict[str, tuple[int, ...]]
    get: Callable[[str], Tensor]
    quantized: Callable[[str], QuantizedWeight | None]
    """The same as it is stored, or None where it isn't of few bits."""


def _safetensors(folder: Path) -> _Weights:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: {error!r}") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}; weights are read from safetensors files only")
    try:
        files: list[Any] = [safe_open(folder / name, framework="pt") for name in names]
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} are damaged: {error}") from None
    owner = {key: file for file in files for key in file.keys()}  # noqa: SIM118
    shapes = {key: tuple(file.get_slice(key).get_shape()) for key, file in owner.items()}
    return _Weights(shapes, lambda key: owner[key].get_tensor(key), lambda key: None)


_GGUF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hf_name(name: str) -> str:
    block, *parts = name.split(".")
    if block != "blk" or len(parts) != 3:
        return _GGUF_TOP.get(name, name)
    layer, middle, end = parts
    return f"model.layers.{layer}.{_GGUF_NAMES.get(middle, middle)}.{end}"


def _gguf_tensors(path: Path, config: ModelConfig) -> _Weights:
    import torch

    from radixkv.kernels.quantized import QuantizedWeight

    file = GGUFFile(path)
    names = {_hf_name(name): name for name in file.tensors if name != "rope_freqs.weight"}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def in_order(name: str, tensor: Tensor) -> Tensor:
        part = name.split(".")[-2]
        if config.architecture == "llama" and part in heads:
            # llama.cpp's converter interleaves the halves of each head, for its own RoPE; Qwen's are left alone.
            pairs = tensor.view(heads[part], config.head_dim // 2, 2, *tensor.shape[1:])
            return pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def get(name: str) -> Tensor:
        array = file.dequantize(names[name])
        return in_order(name, torch.from_numpy(array if array.flags.writeable else array.copy()))  # float32 is a view of the file

    def quantized(name: str) -> QuantizedWeight | None:
        arrays = file.quantized(names[name])
        if arrays is None:
            return None
        scales, offsets, codes = (None if part is None else in_order(name, torch.from_numpy(part)) for part in arrays)
        assert scales is not None
        assert codes is not None
        return QuantizedWeight(scales, offsets, codes)

    return _Weights({name: file.tensors[theirs].shape for name, theirs in names.items()}, get, quantized)
