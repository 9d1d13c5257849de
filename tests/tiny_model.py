"""Makes a Hugging Face folder of a tiny random Llama with a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, user or assistant') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["the quick brown fox jumps over the lazy dog. grüße aus köln, 日本語のテキスト, 🙂🙃 emoji!\n"] * 20


def make_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges, and the special tokens: ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def make_folder(folder: Path, *, weights: bool) -> Path:
    """``weights=False`` is enough for a frontend."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token=SPECIAL[2], chat_template=CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        import torch
        from safetensors.torch import save_file

        from radixkv.model.config import config_from_folder
        from radixkv.model.loader import expected_shapes

        generator = torch.Generator().manual_seed(1)
        shapes = expected_shapes(config_from_folder(folder))
        tensors = {
            name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.3
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors")
    return folder
