"""The frontend alone, without processes: what one request's trouble may do to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import RequestOutput
from radixkv.server.errors import ServerError
from radixkv.server.frontend import Frontend
from radixkv.server.generation import Generation
from radixkv.server.messages import Generate
from radixkv.server.worker_client import Sink


class Worker:
    """Runs requests as the test says."""

    index = 0

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}

    def generate(self, request: Generate, sink: Sink) -> None:
        self.sinks[request.request_id] = sink

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.sinks.pop(request_id, None)

    def close(self, error: ServerError) -> None:
        pass

    def step(self) -> None:
        """Give every request its last token."""
        for request_id, sink in list(self.sinks.items()):
            sink(
                RequestOutput(
                    request_id=request_id, token_ids=[5], finish_reason="length", num_prompt_tokens=3, num_cached_tokens=0
                )
            )


def test_a_bug_met_at_one_requests_output_fails_that_request_and_no_other(
    tiny_model_tools: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    frontend = Frontend("tiny", PreTrainedTokenizerFast(tokenizer_object=tiny_model_tools["make_tokenizer"]()), 320)
    worker = Worker()
    stats = {"max_model_len": 64, "block_size": 16, "blocks_total": 4, "prefix_caching": True, "dtype": "float32"}
    frontend.attach(worker, stats)  # type: ignore[arg-type]
    began = frontend.metrics.began

    def buggy(namespace: str, *arguments: Any) -> None:
        if namespace == "unlucky":
            raise KeyError("a bug")
        began(namespace, *arguments)

    frontend.metrics.began = buggy  # type: ignore[method-assign]

    async def read(generation: Generation) -> str | None:
        with generation:
            return "".join([str(delta.finish_reason) async for delta in generation])

    async def run() -> list[Any]:
        names = ("one", "unlucky", "two")
        generations = [await frontend.submit([[1, 2, 3]], SamplingParams(max_tokens=1), namespace=name) for name in names]
        worker.step()
        reading = asyncio.gather(*map(read, generations), return_exceptions=True)
        return await asyncio.wait_for(reading, 5)

    one, unlucky, two = asyncio.run(run())
    assert (one, two) == ("length", "length")
    assert isinstance(unlucky, ServerError)
    assert unlucky.kind == "internal"
    assert not frontend._generations
    assert "KeyError: 'a bug'" in caplog.text
