"""Tokens to text as they come: characters only when they are whole, and nothing that may yet turn into a stop string.

Every token is a fixed string of bytes, so a text grows by concatenating them and decoding UTF-8 incrementally: O(1) per token, and
no token has to be decoded twice.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019): itself where printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token adds to a text that it continues.

    Special tokens, and ids that the tokenizer does not know (padding of the vocabulary), add nothing.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._decode = tokenizer.decoder.decode if tokenizer.decoder else " ".join
        kinds = _decoder_kinds(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else set()
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_pieces = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """O(1); the first time a token is seen, O(its length)."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = b"" if token_id in self._special else self.raw(token_id)
        return found

    def raw(self, token_id: int) -> bytes:
        """The same, but a special token is spelled out."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            values = [self._alphabet.get(character) for character in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if self._has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        # Decoders treat the first piece of a text differently (they strip its space), so decode it as a second one.
        return self._decode(["a", piece])[len(self._decode(["a"])) :].encode()


def _decoder_kinds(decoder: dict[str, object]) -> set[object]:
    parts = decoder.get("decoders", [])
    assert isinstance(parts, list)
    return {decoder["type"]}.union(*(_decoder_kinds(part) for part in parts))


class Detokenizer:
    """One growing text.

    What is returned so far never ends inside a character.  Bytes that are no UTF-8 become U+FFFD, one for each maximal broken part,
    as soon as they can no longer be the beginning of a character.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int], *, final: bool = False) -> str:
        """The text that these tokens complete; ``final`` also gives what is left of a character that was cut off."""
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)), final)


class StopMatcher:
    """Cuts a growing text before the first stop string that it completes.

    First is the one that ends first, then the one that starts first, so the outcome does not depend on how the text was cut into
    pieces.  Costs O(sum of the stop strings' lengths) for each piece beside the search itself.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str, *, final: bool = False) -> str:
        """The text that is safe to show now; nothing more once a stop string has :attr:`matched`."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = 0 if final else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    start = max(0, len(text) - len(stop) + 1)
    while not stop.startswith(text[start:]):
        # Skip to where the stop string's first character comes next.
        start = text.find(stop[0], start + 1)
        if start < 0:
            return 0
    return len(text) - start
