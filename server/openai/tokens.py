"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them."""

from __future__ import annotations

from typing import Any

import msgspec

from radixkv.server.errors import InvalidRequest
from radixkv.server.frontend import Frontend
from radixkv.server.messages import ChatMessage
from radixkv.server.openai.schema import FunctionTool
from radixkv.server.tools import tool_use


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, or a chat as the model would get it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool] = []
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    """Of a ``prompt``; a chat template writes them itself."""
    return_token_strs: bool = False

    async def answer(self, frontend: Frontend) -> dict[str, Any]:
        frontend.check_model(self.model)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt or messages must be given, and not both", param="prompt")
        if self.prompt is not None:
            tokens = await frontend.tokenise(self.prompt, add_special_tokens=self.add_special_tokens)
        else:
            tools = tool_use([tool.function for tool in self.tools], "auto", None, parallel=True)
            tokens = await frontend.render_chat(self.messages or (), tools, add_generation_prompt=self.add_generation_prompt)
        strings = [frontend.token_text(token_id) for token_id in tokens] if self.return_token_strs else None
        return {"count": len(tokens), "max_model_len": frontend.max_model_len, "tokens": tokens, "token_strs": strings}


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text of tokens; special ones are spelled out."""

    model: str | None = None
    tokens: list[int]

    def answer(self, frontend: Frontend) -> dict[str, Any]:
        frontend.check_model(self.model)
        raw = b"".join(map(frontend.token_bytes.raw, frontend.check_tokens(self.tokens, "tokens")))
        return {"prompt": raw.decode(errors="replace")}


def tokenizer_info(frontend: Frontend) -> dict[str, Any]:
    """What a client needs to know to count as the model does, as in a ``tokenizer_config.json``."""
    tokenizer = frontend.tokenizer
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "chat_template": tokenizer.chat_template,
    }
