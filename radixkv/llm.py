"""LLM: the offline API, an engine and a tokenizer in this process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from radixkv.config import EngineConfig
from radixkv.detokenizer import Detokenizer, StopMatcher, TokenBytes
from radixkv.engine import Engine
from radixkv.model.loader import resolve_model
from radixkv.model.tokenizer import load_tokenizer
from radixkv.report.report import Report
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import FinishReason, RequestOutput, TokenLogprobs

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``"""

Prompts = Sequence[str | list[int]]


@dataclass(slots=True)
class GenerationOutput:
    """One finished prompt, or one delta of it where it is streamed."""

    prompt_index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V were found in the cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of all prompt tokens but the first, if asked for; in the first delta."""


class LLM:
    """Run a model in this process.

    Parameters are a model name and the fields of :class:`EngineConfig`::

        llm = LLM("smollm2-135m", kv_cache_tokens=65536, block_size=16)
        outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=16, temperature=0))

    Raises ``ValueError`` for a model or setting that can't be used, ``OSError`` for a model that can't be read.
    """

    def __init__(self, model: str = "smollm2-135m", **config: Any) -> None:
        self.config = EngineConfig(model=model, **config)
        self.tokenizer = load_tokenizer(resolve_model(model))
        self.engine = Engine(self.config)
        self._token_bytes = TokenBytes(self.tokenizer.backend_tokenizer)
        self._ids = itertools.count()
        self._open: dict[str, deque[RequestOutput]] = {}
        """Requests of every stream that is open: what steps gave them and their stream has not fetched yet."""

    def generate(
        self,
        prompts: str | Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Complete prompts, given as text or token ids; outputs are in the prompts' order.

        ``params`` is one for all, or one for each prompt.  ``use_tqdm`` shows a progress bar on a terminal.  Raises
        ``ValueError`` naming the prompt, field and limit before anything runs; ``RuntimeError`` if the engine fails.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        outputs = [GenerationOutput(i) for i in range(len(prompts))]
        console = Console(stderr=True)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True, disable=not (use_tqdm and console.is_terminal)) as progress:
            bar = progress.add_task("", total=len(prompts))
            for delta in self.stream(prompts, params, namespace=namespace):
                output = outputs[delta.prompt_index]
                output.text += delta.text
                output.token_ids += delta.token_ids
                if delta.logprobs is not None:
                    output.logprobs = (output.logprobs or []) + delta.logprobs
                if delta.prompt_logprobs is not None:
                    output.prompt_logprobs = delta.prompt_logprobs
                output.num_prompt_tokens, output.num_cached_tokens = delta.num_prompt_tokens, delta.num_cached_tokens
                if delta.finish_reason is not None:
                    output.finish_reason = delta.finish_reason
                    progress.advance(bar)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, params, namespace=namespace, use_tqdm=use_tqdm)

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"model {self.config.model!r} has no chat template: use generate()")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def stream(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
    ) -> Iterator[GenerationOutput]:
        """As :meth:`generate`, but yields what each step adds to each prompt.  Closing the iterator aborts what still runs.

        Streams may be open side by side: whichever is asked for more steps the engine for all of them.
        """
        each = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one for all or one for each of {len(prompts)} prompts, got {len(each)}")
        running: dict[str, tuple[int, Detokenizer, StopMatcher]] = {}
        try:
            for i, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                request_id = f"llm-{next(self._ids)}"
                try:
                    self.engine.add(request_id, self._encode(prompt), own, namespace=namespace)
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}") from None
                running[request_id] = (i, Detokenizer(self._token_bytes), StopMatcher(own.stop))
                self._open[request_id] = deque()
            while running:
                for output in self._next_outputs(running):
                    delta = self._delta(output, *running[output.request_id])
                    if delta.finish_reason is not None:
                        del running[output.request_id], self._open[output.request_id]
                        self.engine.abort(output.request_id)  # a stop string: the engine doesn't know yet
                    yield delta
        finally:
            for request_id in running:
                self._open.pop(request_id, None)
                self.engine.abort(request_id)

    def _next_outputs(self, running: Collection[str]) -> list[RequestOutput]:
        """What these requests were given and their stream has not seen, stepping the engine until there is something.

        At most one output of each, so that one stream's end is known before more of it is looked at.
        """
        while not any(self._open[request_id] for request_id in running):
            if not self.engine.has_unfinished:
                raise RuntimeError("the requests are gone: the engine was interrupted in a step of another stream")
            for output in self.engine.step():
                self._open[output.request_id].append(output)
        return [self._open[request_id].popleft() for request_id in running if self._open[request_id]]

    def _delta(self, output: RequestOutput, index: int, detokenizer: Detokenizer, stop: StopMatcher) -> GenerationOutput:
        if output.finish_reason == "error":
            raise RuntimeError(f"prompt {index}: the engine failed: {output.error}")
        final = output.finish_reason is not None
        text = stop.feed(detokenizer.feed(output.token_ids, final=final), final=final)
        return GenerationOutput(
            index,
            text,
            output.token_ids,
            output.logprobs,
            "stop" if stop.matched is not None else output.finish_reason,
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.prompt_logprobs,
        )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt must be valid Unicode text: {error}") from None
        return list(self.tokenizer.encode(prompt))

    def report(self) -> Report:
        """Hit rate so far, and what it saved; ``print`` it, or see its fields."""
        return Report.from_stats(self.engine.stats())
