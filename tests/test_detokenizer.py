"""Tokens to text: whole characters only, and nothing past a stop string, however the tokens come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from radixkv.detokenizer import Detokenizer, StopMatcher, TokenBytes

ALPHABET = "abé語🙂�\n "


@pytest.fixture(scope="session")
def byte_level(tiny_model_tools: dict[str, Any]) -> Tokenizer:
    return tiny_model_tools["make_tokenizer"]()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece's way, as Llama 2's: words with a space sign, and a token for each byte."""
    pieces = ["<unk>", "▁", "▁a", "a", "b", "▁ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    token_bytes = TokenBytes(tokenizer)
    found = {token_bytes.raw(id): id for id in range(tokenizer.get_vocab_size())}
    return [found[bytes([byte])] for byte in data]


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    return [detokenizer.feed([id], final=i == len(ids) - 1) for i, id in enumerate(ids)]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_deltas_of_any_text_add_up_to_it_and_never_split_a_character(byte_level: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(st.sampled_from(ALPHABET) | st.characters(exclude_categories=["Cs"]), max_size=20))
    # Cut as the tokenizer does in places, into single bytes in others.
    parts = data.draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    ids: list[int] = []
    for character, whole in zip(text, parts, strict=True):
        ids += byte_level.encode(character).ids if whole else byte_tokens(byte_level, character.encode())
    pieces = deltas(byte_level, ids)
    assert "".join(pieces) == text == byte_level.decode(ids)
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


@given(data=st.binary(max_size=24))
@settings(max_examples=100, deadline=None)
def test_deltas_of_any_bytes_add_up_to_what_the_tokenizer_decodes(byte_level: Tokenizer, data: bytes) -> None:
    ids = byte_tokens(byte_level, data)
    assert "".join(deltas(byte_level, ids)) == byte_level.decode(ids) == data.decode(errors="replace")


@given(text=st.text(st.sampled_from(" abé語🙂"), max_size=12))
@settings(max_examples=100, deadline=None)
def test_byte_pieces_join_to_characters(byte_fallback: Tokenizer, text: str) -> None:
    ids = [2, *byte_tokens(byte_fallback, text.encode())]
    assert "".join(deltas(byte_fallback, ids)) == " " + byte_fallback.decode(ids) == " a" + text


def test_a_space_at_the_beginning_of_the_output_is_kept(byte_fallback: Tokenizer) -> None:
    # decode() strips it, as at the beginning of a text; but an output continues one.
    assert byte_fallback.decode([2]) == "a"
    assert deltas(byte_fallback, [2]) == [" a"]


def test_special_and_unknown_tokens_add_nothing(byte_level: Tokenizer) -> None:
    a = byte_level.encode("a").ids
    assert deltas(byte_level, [1, *a, 2, 100_000, *a]) == ["", "a", "", "", "a"]
    assert TokenBytes(byte_level).raw(1) == b"<|im_start|>"


def test_a_cut_off_character_shows_only_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_tokens(byte_level, "x🙂".encode()[:-1])
    assert deltas(byte_level, ids) == ["x", "", "", "\ufffd"]


def reference(text: str, stops: list[str]) -> str:
    """Grow the text by one character at a time; cut it where first a stop string ends it."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


letters = st.text(st.sampled_from("ab"), max_size=24)


@given(
    letters, st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), max_size=3), st.lists(st.integers(1, 6), min_size=24)
)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_is_found_across_any_borders(text: str, stops: list[str], lengths: list[int]) -> None:
    matcher, shown, rest = StopMatcher(stops), "", text
    for length in lengths:
        piece, rest = rest[:length], rest[length:]
        shown += matcher.feed(piece)
        # All that was shown is right, whatever comes, and all that can't become a stop string has been shown.
        assert text.startswith(shown)
        assert reference(text, stops).startswith(shown)
    held = matcher._held
    assert matcher.matched or shown + held == text
    assert matcher.matched or not held or any(stop.startswith(held) for stop in stops)
    shown += matcher.feed("", final=True)
    assert shown == reference(text, stops)
    assert (matcher.matched is not None) == (shown != text)


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed("one ST"), matcher.feed("OP two"), matcher.feed(" three"), matcher.feed("", final=True)] == [
        "one ",
        "",
        "",
        "",
    ]
    assert matcher.matched == "STOP"


def test_text_that_only_begins_like_a_stop_string_is_given_back() -> None:
    matcher = StopMatcher(["\n\nHuman:"])
    assert [matcher.feed("a\n"), matcher.feed("\nHum"), matcher.feed("ble"), matcher.feed("\n", final=True)] == [
        "a",
        "",
        "\n\nHumble",
        "\n",
    ]


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("abc") == "abc"
