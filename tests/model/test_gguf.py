"""GGUF files that the tests write: headers, dequantised weights, llama.cpp's permutation, refusals, tokenizers."""

from __future__ import annotations

import itertools
import json
import random
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.kernels import cpu
from radixkv.kernels.quantized import QuantizedWeight
from radixkv.model.gguf_file import GGUFFile
from radixkv.model.loader import load_model_config, resolve_model
from radixkv.model.tokenizer import load_tokenizer

Kind = gguf.GGMLQuantizationType
TEXTS = [
    "Hello, world! It's 2024, isn't it?", "def f(x):\n\treturn x ** 2  # ok\n\n\n    y", "a   12  34x5   ", "naïve café Ångström",
    "Привет, мир! こんにちは 世界 안녕",
    "🙂👩‍👩‍👧 tab\there\r\n\r\n  end", "HTTPServer2Go I'LL they're ٣٤ ½ x²", "", " ", "\n\n \n",
]  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "name", "options"),
    [
        ("llama", "Llama", {}),
        ("llama", "Llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", "Mistral", {"sliding_window": None, "head_dim": 32}),
        ("qwen2", "Qwen2", {}),
        ("qwen3", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    ],
)
def test_a_gguf_file_gives_transformers_logits(
    arch: str, name: str, options: dict[str, object], tmp_path: Path, kit: SimpleNamespace
) -> None:
    model = kit.make_model(name, **options)
    kinds = {"down_proj.weight": Kind.Q8_0, "q_proj.weight": Kind.Q4_1, "k_proj.weight": Kind.F16, "embed_tokens.weight": Kind.BF16}
    kit.write_gguf(tmp_path / "m.gguf", arch, model, kinds=kinds)
    driver = kit.Driver(str(tmp_path / "m.gguf"))
    assert driver.config.eos_token_ids == (2,)
    kit.assert_agrees(driver, model)


def test_llama3_rope_factors_are_read_from_their_tensor(tmp_path: Path, kit: SimpleNamespace) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    model = kit.make_model("Llama", rope_parameters=rope)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2
    kit.write_gguf(tmp_path / "m.gguf", "llama", model, extra=lambda w: w.add_tensor("rope_freqs.weight", factors))
    kit.assert_agrees(kit.Driver(str(tmp_path / "m.gguf")), model, lengths=(200,))


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [(gguf.RopeScalingType.YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
     (gguf.RopeScalingType.LINEAR, {"rope_type": "linear", "factor": 2.0})],
)  # fmt: skip
def test_rope_scaling_is_read_from_metadata(
    kind: gguf.RopeScalingType, scaling: dict[str, object], tmp_path: Path, kit: SimpleNamespace
) -> None:
    model = kit.make_model("Qwen2", rope_parameters={**scaling, "rope_theta": 10000.0})

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(64)

    kit.write_gguf(tmp_path / "m.gguf", "qwen2", model, extra=add)
    kit.assert_agrees(kit.Driver(str(tmp_path / "m.gguf")), model, lengths=(120,))


def test_an_unsupported_gguf_architecture_is_refused_by_name(tmp_path: Path, kit: SimpleNamespace) -> None:
    kit.write_gguf(tmp_path / "m.gguf", "gemma", kit.make_model("Llama"))
    with pytest.raises(ValueError, match="architecture gemma is not supported; supported: llama, qwen2, qwen3"):
        load_model_config(resolve_model(str(tmp_path / "m.gguf")))


def test_experts_and_partial_rotary_are_refused(tmp_path: Path, kit: SimpleNamespace) -> None:
    model = kit.make_model("Llama")
    kit.write_gguf(tmp_path / "a.gguf", "llama", model, extra=lambda w: w.add_expert_count(8))
    with pytest.raises(ValueError, match="mixture-of-experts"):
        load_model_config(resolve_model(str(tmp_path / "a.gguf")))
    kit.write_gguf(tmp_path / "b.gguf", "llama", model, extra=lambda w: w.add_rope_dimension_count(8))
    with pytest.raises(ValueError, match="partial rotary"):
        load_model_config(resolve_model(str(tmp_path / "b.gguf")))


def _small_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_array("a.list", ["one", "zwei", "três"])
    writer.add_array("a.floats", [1.5, 2.5])
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grüß")
    writer.add_tensor("t", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("u", np.arange(64, dtype=np.float16).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_metadata_and_tensors_read_back_as_written(tmp_path: Path) -> None:
    _small_file(tmp_path / "s.gguf")
    file = GGUFFile(tmp_path / "s.gguf")
    assert file.metadata == {
        "general.architecture": "llama", "a.number": 7, "a.list": ["one", "zwei", "três"], "a.floats": [1.5, 2.5], "a.flag": True,
        "a.text": "grüß",
    }  # fmt: skip
    np.testing.assert_array_equal(file.dequantize("t"), np.arange(12, dtype=np.float32).reshape(3, 4))
    np.testing.assert_array_equal(file.dequantize("u"), np.arange(64, dtype=np.float32).reshape(2, 32))


def _one_tensor(path: Path, data: np.ndarray, kind: Kind) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_a_quantized_tensor_as_stored_stands_for_what_gguf_dequantises(kind: Kind, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    values[0] *= 1e-6  # scales that float16 has no more than a few bits for
    file = _one_tensor(tmp_path / "q.gguf", gguf.quants.quantize(values, kind), kind)
    arrays = file.quantized("t")
    assert arrays is not None
    weight = QuantizedWeight(*(None if part is None else torch.from_numpy(part) for part in arrays))
    assert weight.codes.shape == (6, 96)
    np.testing.assert_array_equal(weight.dequantize().numpy(), file.dequantize("t"))


def test_other_types_and_scales_that_are_not_finite_have_no_quantized_form(tmp_path: Path) -> None:
    values = np.ones((2, 256), np.float32)
    assert _one_tensor(tmp_path / "a.gguf", gguf.quants.quantize(values, Kind.Q5_0), Kind.Q5_0).quantized("t") is None
    assert _one_tensor(tmp_path / "b.gguf", values, Kind.F32).quantized("t") is None
    data = gguf.quants.quantize(values, Kind.Q4_0)
    data.reshape(-1, 18)[3, :2] = np.frombuffer(np.float16(40000).tobytes(), np.uint8)  # 8 times that is infinite
    assert _one_tensor(tmp_path / "c.gguf", data, Kind.Q4_0).quantized("t") is None


@pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.I16])
def test_a_type_that_gguf_cannot_dequantise_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    data = np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8) if kind is Kind.Q8_K else np.zeros((2, 32), np.int16)
    file = _one_tensor(tmp_path / "s.gguf", data, kind)
    assert file.quantized("t") is None
    with pytest.raises(ValueError, match=f"tensor t is of type {kind.name}, which gguf can't dequantise"):
        file.dequantize("t")


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_model_multiplied_as_stored_has_the_logits_of_the_same_widened(
    name: str, tmp_path: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu.is_native(torch.bfloat16):
        pytest.skip("torch computes here, and widens every weight")
    model = kit.make_model(name, tie_word_embeddings=True)
    kinds = {"_proj.weight": Kind.Q4_1, "embed_tokens.weight": Kind.Q8_0}
    kit.write_gguf(tmp_path / "m.gguf", name.lower(), model, kinds=kinds)
    generator = np.random.default_rng(3)
    sequences = [generator.integers(0, 160, length).tolist() for length in (23, 9, 60)]

    def logits() -> list[torch.Tensor]:
        result: list[torch.Tensor] = kit.Driver(str(tmp_path / "m.gguf"), backend="cpu", dtype=torch.bfloat16).logits(
            sequences, 4, chunk=20
        )
        return result

    packed: list[Any] = []
    pack = cpu.pack_quantized
    monkeypatch.setattr(cpu, "pack_quantized", lambda *args: packed.append(pack(*args)) or packed[-1])
    as_stored = logits()
    monkeypatch.setattr(cpu, "pack_quantized", lambda *args: None)
    widened = logits()
    assert len(packed) == 4 * model.config.num_hidden_layers + 1
    assert None not in packed
    assert all(torch.equal(a, b) for a, b in zip(as_stored, widened, strict=True))


def test_every_truncation_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    whole = _small_file(tmp_path / "s.gguf")
    cut = tmp_path / "cut.gguf"
    data_end = len(whole) - 31 if whole.endswith(b"\0" * 31) else len(whole)  # alignment padding at the end holds nothing
    for length in range(0, data_end - 32, 3):
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"not a GGUF file|is damaged|is cut short"):
            GGUFFile(cut)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 400), value=st.integers(0, 255), width=st.sampled_from([1, 8]))
def test_a_damaged_header_never_raises_anything_but_value_error(tmp_path: Path, position: int, value: int, width: int) -> None:
    data = bytearray(_small_file(tmp_path / "s.gguf"))
    data[position : position + width] = bytes([value]) * width
    (tmp_path / "bad.gguf").write_bytes(data)
    try:
        file = GGUFFile(tmp_path / "bad.gguf")
        for name in file.tensors:
            file.dequantize(name)
    except ValueError:
        pass


def test_other_versions_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ValueError, match="version 1; versions 2 and 3"):
        GGUFFile(path)
    path.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        GGUFFile(path)


# --- tokenizers ---


def _train_byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE learnt from this file and TEXTS."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eot>", "<bos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(), *TEXTS * 20], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


@pytest.fixture(scope="module")
def byte_level() -> tuple[list[str], list[str]]:
    return _train_byte_level()


def _write_tokenizer(
    path: Path, kind: str, tokens: list[str], *, merges: list[str] | None = None, scores: list[float] | None = None, pre: str = "",
    types: list[int] | None = None, **fields: object,
) -> None:  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [3 if re.fullmatch(r"<\w+>|</s>", t) else 1 for t in tokens])
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _load(path: Path) -> object:
    return load_tokenizer(resolve_model(str(path)))


def test_qwen2_text_is_cut_as_transformers_cuts_it(tmp_path: Path, byte_level: tuple[list[str], list[str]]) -> None:
    from transformers import Qwen2Tokenizer

    tokens, merges = byte_level
    _write_tokenizer(tmp_path / "t.gguf", "gpt2", tokens, merges=merges, pre="qwen2", eos_token_id=0)
    ours = load_tokenizer(resolve_model(str(tmp_path / "t.gguf")))
    vocab = {t: i for i, t in enumerate(tokens)}
    theirs = Qwen2Tokenizer(
        vocab=vocab, merges=[tuple(m.split(" ", 1)) for m in merges], unk_token=None, eos_token=tokens[0], pad_token=None
    )
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_text_survives_encoding_under_every_rule(pre: str, tmp_path: Path, byte_level: tuple[list[str], list[str]]) -> None:
    tokens, merges = byte_level
    _write_tokenizer(tmp_path / "t.gguf", "gpt2", tokens, merges=merges, pre=pre, bos_token_id=1, add_bos_token=False)
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "t.gguf")))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_rules_differ_where_their_models_do(tmp_path: Path) -> None:
    def cut(pre: str, text: str) -> list[str]:
        from tokenizers import pre_tokenizers

        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
        _write_tokenizer(tmp_path / "t.gguf", "gpt2", tokens, merges=["a b"], pre=pre)
        words = load_tokenizer(resolve_model(str(tmp_path / "t.gguf"))).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [word.replace("Ġ", " ") for word, _ in words]

    assert cut("gpt-2", "x  1234") == ["x", " ", " 1234"]
    assert cut("smollm", "x  1234") == ["x", "  ", "1", "2", "3", "4"]
    assert cut("llama-bpe", "x  1234") == ["x", " ", " ", "123", "4"]
    assert cut("tekken", "HTTPServer") == ["HTTPServer"]
    assert cut("tekken", "myServer") == ["my", "Server"]


def test_special_tokens_bos_and_chat_template_come_from_the_file(tmp_path: Path, byte_level: tuple[list[str], list[str]]) -> None:
    tokens, merges = byte_level
    common = {
        "merges": merges,
        "pre": "gpt-2",
        "bos_token_id": 1,
        "eos_token_id": 0,
        "chat_template": "{{ messages[0].content }}<eot>",
    }
    _write_tokenizer(tmp_path / "a.gguf", "gpt2", tokens, add_bos_token=True, **common)
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "a.gguf")))
    assert tokenizer("x<eot>y").input_ids == [1, tokens.index("x"), 0, tokens.index("y")]
    assert tokenizer("x", add_special_tokens=False).input_ids == [tokens.index("x")]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<eot>", "<bos>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<eot>"
    assert tokenizer.decode([1, tokens.index("x")], skip_special_tokens=True) == "x"
    _write_tokenizer(tmp_path / "b.gguf", "gpt2", tokens, add_bos_token=False, **common)
    assert load_tokenizer(resolve_model(str(tmp_path / "b.gguf")))("x").input_ids == [tokens.index("x")]


def test_unknown_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path / "a.gguf", "gpt2", ["a", "b", "ab"], merges=["a b"], pre="martian")
    with pytest.raises(ValueError, match="pre-tokenizer 'martian' is not supported"):
        load_tokenizer(resolve_model(str(tmp_path / "a.gguf")))
    _write_tokenizer(tmp_path / "b.gguf", "bert", ["a"])
    with pytest.raises(ValueError, match="tokenizer 'bert' is not supported; supported: gpt2, llama"):
        load_tokenizer(resolve_model(str(tmp_path / "b.gguf")))


def _sentencepiece_oracle(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by definition: join the best-scoring adjacent pair, leftmost of equals, until none is a piece."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not joins:
            break
        _, i = min(joins)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [p for piece in pieces for p in ([piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()])]


def test_sentencepiece_bpe_agrees_with_its_definition(tmp_path: Path) -> None:
    rng = random.Random(4)
    words = ["the", "there", "then", "other", "hello", "help", "low", "lower", "mother", "her"]
    corpus = " ".join(rng.choices(words, k=400))
    pieces: dict[str, float] = {}
    for word in {"▁" + w for w in words}:  # every substring that starts a word, by frequency
        for end in range(2, len(word) + 1):
            for start in range(end - 1):
                pieces.setdefault(word[start:end], 0)
    for rank, piece in enumerate(sorted(pieces, key=lambda p: (-corpus.count(p.strip("▁")), len(p), p))):
        pieces[piece] = -float(rank)
    alphabet = sorted(set("▁" + corpus.replace(" ", "")))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *alphabet]
    scores = [0.0] * 259 + list(pieces.values()) + [-1e4 - i for i in range(len(alphabet))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(alphabet))]
    _write_tokenizer(
        tmp_path / "s.gguf", "llama", tokens, scores=scores, types=types, bos_token_id=1, eos_token_id=2, unk_token_id=0
    )
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "s.gguf")))
    by_piece = dict(zip(tokens[259:], scores[259:], strict=True))
    for text in ["hello there", "the other mother", "lower  then", "héllo wörld", "motherthere helpher", *(
        " ".join("".join(rng.choices("thelorwmpn", k=6)) for _ in range(4)) for _ in range(20)
    )]:  # fmt: skip
        ids = tokenizer(text).input_ids
        assert ids[0] == 1, "llama files ask for the start token unless they say otherwise"
        assert [tokens[i] for i in ids[1:]] == _sentencepiece_oracle(text, by_piece)
        assert tokenizer.decode(ids[1:]) == text
