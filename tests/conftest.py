"""What tests of several areas need.

Without a GPU, the Triton backend is tested in Triton's interpreter, which has to be chosen before anything imports Triton.
"""

from __future__ import annotations

import functools
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.model.fetch import Unreachable
from radixkv.model.loader import ModelSource, resolve_model

# Before anything imports torch.  Processes that run tests side by side get their share of the cores each: with more threads than
# cores, OpenMP's spin while they wait for one another, and everything takes many times as long.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(processes))))

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what tests found out and recorded with ``record_property("finding", ...)``: output of tests that pass is not shown."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    findings = [value for report in reports for name, value in getattr(report, "user_properties", []) if name == "finding"]
    if findings:
        terminalreporter.section("findings")
        for finding in findings:
            terminalreporter.line(str(finding))


@pytest.fixture(scope="session")
def tiny_model_tools() -> dict[str, Any]:
    """What tiny_model.py defines; pytest's importlib mode lets tests import no neighbours."""
    return runpy.run_path(str(Path(__file__).parent / "tiny_model.py"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_model_tools: dict[str, Any]) -> Path:
    """A Hugging Face folder of a random Llama with two layers, a byte-level tokenizer and a chat template."""
    return tiny_model_tools["make_folder"](tmp_path_factory.mktemp("tiny-model"), weights=True)


@pytest.fixture(scope="session")
def default_model() -> ModelSource:
    """The default model, fetched if need be.  Tests of it skip where it can't be reached, unless RADIXKV_REQUIRE_MODEL is set."""
    try:
        return resolve_model("smollm2-135m", quiet=True)
    except Unreachable as error:
        if os.environ.get("RADIXKV_REQUIRE_MODEL"):
            raise
        pytest.skip(f"the default model can't be fetched here: {error}")


@pytest.fixture(scope="session")
def weights_are_loaded_once() -> Iterator[None]:
    """Engines made in this process share the weights of a model on a CPU: loading them takes longer than many a test."""
    import torch

    import radixkv.engine

    load_model, load_model_config = radixkv.engine.load_model, radixkv.engine.load_model_config

    @functools.cache
    def load_once(source: ModelSource, dtype: torch.dtype) -> Any:
        device = torch.device("cpu")
        backend = radixkv.engine.backend_for(device)
        return load_model(source, load_model_config(source), dtype=dtype, device=device, backend=backend)

    def load(source: ModelSource, config: Any, *, dtype: torch.dtype, device: torch.device, backend: Any) -> Any:
        if device.type != "cpu":
            return load_model(source, config, dtype=dtype, device=device, backend=backend)
        return load_once(source, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radixkv.engine, "load_model", load)
        yield


@pytest.fixture(scope="session")
def transformers_default_model(default_model: ModelSource) -> Any:
    """The default model in transformers, float32, from the same GGUF file."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        # It reads the file twice, and makes the same map of names again for each module: 12 seconds.
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        # What from_pretrained(gguf_file=...) calls, which would want the accelerate package too.
        model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(default_model.path)["config"])).float().eval()
        weights = load_gguf_checkpoint(default_model.path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model
