"""The command line: help, exit codes, and where messages go."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv
from radixkv.cli import main
from radixkv.config import EngineConfig

LINE = '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]}\n'
MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("serve", "generate", "report", "replay"))


def test_help_loads_no_torch_and_no_numpy() -> None:
    code = "import sys; from radixkv.cli import main; main(['--help']); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == radixkv.__version__


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_has_a_flag_and_a_text_for_every_engine_choice(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Tokens in a KV block" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nope"], ["nope"]),
        (["serve", "--block-size", "3"], ["block_size", "power of two", "3"]),
        (["serve", "--policy", "best"], ["policy", "best", "lpm"]),
        (["serve", "--port", "70000"], ["port", "65535"]),
        (["serve", "--kv-cache-tokens", "many"], ["kv-cache-tokens", "many"]),
        (["generate"], ["PROMPT"]),
        (["generate", "--maxtokens"], ["--maxtokens"]),
        (["generate", "hello", "--stop", "-"], ["--stop"]),
        (["generate", "hello", "--top-p", "7"], ["top_p", "at most 1", "7"]),
        (["generate", ""], ["prompt", "empty"]),
        (["replay", "/no/such/trace.jsonl"], ["/no/such/trace.jsonl"]),
        (["replay", __file__, "--capacity-blocks", "0"], ["capacity-blocks", "1"]),
        (["replay", __file__, "--policy", "best"], ["policy", "best", "lru"]),
        (["replay", __file__, "--curve", "--capacity-blocks", "9"], ["--curve", "--capacity-blocks 9"]),
        (["replay", __file__, "--curve", "--policy", "lfu"], ["--curve", "--policy lru", "lfu"]),
        (["replay", __file__, "--model", "smollm2-135m"], ["--model", "--curve"]),
        (["replay", __file__, "--plot", "curve.gif"], ["--plot", ".html or .svg", "curve.gif"]),
        (["replay", __file__, "--plot", "/no/such/folder/curve.svg"], ["--plot", "/no/such/folder/curve.svg"]),
        (["replay", __file__, "--curve", "--model", "no-such-model"], ["no-such-model"]),
        (["report", "localhost:8000"], ["http://"]),
    ],
)
def test_bad_input_exits_2_and_says_why_on_stderr(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(word in captured.err for word in words), captured.err


@pytest.mark.parametrize("options", [["-"], ["-", "--max-tokens", "3"], ["--max-tokens", "3", "-"], ["--", "-"]], ids=" ".join)
def test_a_dash_reads_the_prompt_from_standard_input(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", *options]) == 2
    assert "prompt must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("argument", [b"caf\xe9", b"-"])
def test_a_prompt_that_is_no_utf8_exits_2_and_says_so(argument: bytes) -> None:
    command = [sys.executable, "-P", "-m", "radixkv", "generate", argument]
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"prompt must be text in UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.full
def test_generating_stops_without_a_word_where_nobody_reads_on(tiny_model: Path) -> None:
    command = [sys.executable, "-P", "-m", "radixkv", "generate", "hello", "--ignore-eos", "--max-tokens", "2000"]
    with subprocess.Popen([*command, "--model", tiny_model], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert b"pipe" not in process.stderr.read()
        assert process.wait(60) == 141


def test_help_that_nobody_reads_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "radixkv", "--help"]
    try:
        assert subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60).stderr == b""
    finally:
        os.close(write)


def test_a_server_that_is_not_there_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_replay_prints_json_with_rates_and_evictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text(LINE * 4)
    assert main(["replay", str(tmp_path / "t.jsonl"), "--capacity-blocks", "8", "--policy", "lru", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["hit_rate_blocks"], result["hit_rate_tokens"], result["evicted_blocks"]) == (
        4,
        0.75,
        0.75,
        0,
    )
    assert result["seconds"] > 0


def test_replay_prints_text_with_the_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text(LINE * 4)
    assert main(["replay", str(tmp_path / "t.jsonl")]) == 0
    assert "75.00%" in capsys.readouterr().out


def test_replay_takes_blocks_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text(LINE * 4)
    assert main(["replay", str(tmp_path / "t.jsonl"), "--block-size", "64", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["block_size"], result["prompt_blocks"], result["hit_blocks"]) == (64, 36, 27)
    assert main(["replay", str(tmp_path / "t.jsonl"), "--block-size", "100"]) == 2
    assert "block_size must divide the trace's blocks of 512 tokens" in capsys.readouterr().err


def test_replay_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("--capacity-blocks", "--policy", "--block-size", "--curve", "--plot", "--model", "--json", "hash_ids", "knee"):
        assert words in text


def test_the_curve_prints_a_table_and_the_knee_in_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text(LINE * 4)
    assert main(["replay", str(tmp_path / "t.jsonl"), "--curve"]) == 0
    text = capsys.readouterr().out
    assert "80 % of the reachable hits need 2 blocks of 512 tokens = 1,024 tokens." in text
    assert "75.00 %" in text


def test_the_curve_of_a_model_is_in_bytes_and_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(LINE * 4)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    code = (
        "import sys; from radixkv.cli import main\n"
        f"assert main(['replay', {str(tmp_path / 't.jsonl')!r}, '--json', '--curve', '--model', {str(tmp_path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # K and V of 3 layers with 2 heads of 8 numbers, each of 2 bytes.
    assert json.loads(done.stdout)["kv"] == {"model": str(tmp_path), "dtype": "bfloat16", "bytes_per_token": 2 * 3 * 2 * 8 * 2}


def test_the_curve_without_a_model_needs_nothing_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(LINE * 4)
    code = (
        "import sys; from radixkv.cli import main\n"
        f"assert main(['replay', {str(tmp_path / 't.jsonl')!r}, '--plot', {str(tmp_path / 'curve.html')!r}]) == 0\n"
        "assert not {'torch', 'gguf', 'radixkv.model'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curve.html").read_text().startswith("<!DOCTYPE html>")


def test_a_bad_trace_line_exits_2_and_names_line_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.jsonl").write_text(LINE + LINE.replace("600", '"x"'))
    assert main(["replay", str(tmp_path / "t.jsonl")]) == 2
    assert "line 2: input_length" in capsys.readouterr().err


def test_ctrl_c_exits_130_without_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("radixkv.report.source.fetch_report", interrupt)
    assert main(["report"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["cyclopts", "radixkv.config"])
def test_ctrl_c_is_as_quiet_while_the_command_line_loads(module: str) -> None:
    interrupted = (
        "import sys, runpy\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_module('radixkv', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", interrupted], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


def test_a_missing_package_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "radixkv.llm", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now raises
    for name in [name for name in sys.modules if name.startswith(("radixkv.engine", "radixkv.model", "radixkv.kernels"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["generate", "hello"]) == 1
    assert "pip install 'radixkv[server]'" in capsys.readouterr().err
