"""Tokenizers: from a Hugging Face folder, or built from what a GGUF file says about its own.

transformers' own conversion from GGUF ignores ``tokenizer.ggml.pre``, the rule that cuts text into words before byte-level BPE,
so that it encodes some text otherwise than the model was trained on; and it takes about ten seconds.  This takes a fraction of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from radixkv.model.gguf_file import GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from radixkv.model.loader import ModelSource

_CONTROL, _USER_DEFINED = 3, 4

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULES = {
    "gpt-2": "gpt2", "gpt2": "gpt2", "smollm": "digits", "starcoder": "digits", "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "tekken": _TEKKEN,
}  # fmt: skip
"""llama.cpp's name of a rule -> its pattern, or ``gpt2`` for GPT-2's own, or ``digits`` for that after cutting off each digit."""


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template where it has one; reads no weights and needs no torch.

    Raises ``ValueError`` naming a GGUF tokenizer that isn't supported, ``OSError`` where a folder has none.
    """
    if source.kind == "gguf":
        return _from_gguf(GGUFFile(source.path))
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.path, local_files_only=True)
    return tokenizer


def _from_gguf(file: GGUFFile) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    meta = {key.removeprefix("tokenizer."): value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    kind = meta.get("ggml.model")
    if kind not in builders:
        raise ValueError(f"{file.path}: tokenizer {kind!r} is not supported; supported: {', '.join(builders)}")
    try:
        tokenizer = builders[kind](meta)
        tokens: list[str] = meta["ggml.tokens"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{file.path}: {error if isinstance(error, ValueError) else f'no tokenizer field {error}'}") from None
    added = [
        AddedToken(token, special=token_type == _CONTROL, normalized=False)
        for token, token_type in zip(tokens, meta.get("ggml.token_type", ()), strict=False)
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    special = {
        f"{role}_token": tokens[token_id]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := meta.get(f"ggml.{key}_token_id")) is not None
    }
    if meta.get("ggml.add_bos_token", kind == "llama" or _rule(meta) in (_LLAMA3, _TEKKEN)) and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.Sequence(
            [
                *([tokenizer.post_processor] if tokenizer.post_processor else []),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=meta.get("chat_template"), clean_up_tokenization_spaces=False, **special
    )


def _rule(meta: dict[str, Any]) -> str | None:
    return _RULES.get(meta.get("ggml.pre", ""))


def _byte_level_bpe(meta: dict[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = _rule(meta)
    if rule is None:
        raise ValueError(f"pre-tokenizer {meta.get('ggml.pre')!r} is not supported; supported: {', '.join(_RULES)}")
    vocab = {token: i for i, token in enumerate(meta["ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule in (_LLAMA3, _TEKKEN)))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in ("gpt2", "digits"))
    if rule == "gpt2":
        tokenizer.pre_tokenizer = byte_level
    else:
        first = pre_tokenizers.Digits(individual_digits=True) if rule == "digits" else pre_tokenizers.Split(Regex(rule), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    if rule == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(meta: dict[str, Any]) -> Tokenizer:
    """Llama 2's and early Mistral's: BPE whose merges are the pairs of pieces that join to a piece, in order of its score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = meta["ggml.tokens"], meta["ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(pairs)]
    unknown = tokens[meta.get("ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if meta.get("ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer, tokenizer.decoder = spaces, decoders.Sequence(back)
    return tokenizer
