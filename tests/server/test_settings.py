"""The options of ``radixkv serve``: each explained and in a group, and taken from the command line, the environment or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import app, main

GROUPS = {"Model", "Cache", "Scheduling", "Server", "Security", "Operations"}
OPTIONS = [option for option in app["serve"].assemble_argument_collection(parse_docstring=True) if option.name != "*"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last server was started with, the engine's options among the others."""
    got: dict[str, Any] = {}

    def launch(config: Any, **options: Any) -> None:
        got.clear()
        got.update(vars(config) | options)

    monkeypatch.setattr("radixkv.server.launcher.serve", launch)
    return got


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "radixkv.toml"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_is_explained_is_in_a_group_and_tells_its_default(option: Any) -> None:
    parameter = option.parameter
    text = " ".join((parameter.help or "").split())
    assert len(text) > 10
    assert text.endswith(".")
    assert {group.name for group in parameter.group} <= GROUPS
    assert option.field_info.default is not None or "not given" in text or "neither is given" in text


def test_help_shows_the_groups_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"─ {group} ─") for group in ("Model", "Cache", "Scheduling", "Server", "Security", "Operations")]
    assert places == sorted(places)
    assert "[default: 65536]" in text


def test_argv_comes_before_the_environment_that_before_the_file_and_that_before_the_default(
    launched: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('port = 1\nhang-timeout = 1000\nblock_size = 4\npolicy = "fcfs"\nenable-prefix-caching = false\n')
    monkeypatch.setenv("RADIXKV_SERVE_PORT", "2")
    monkeypatch.setenv("RADIXKV_SERVE_HANG_TIMEOUT", "2000")
    assert main(["serve", "--config", str(file), "--port", "3"]) == 0
    assert launched["port"] == 3
    assert launched["hang_timeout"] == 2000
    assert (launched["block_size"], launched["policy"], launched["enable_prefix_caching"]) == (4, "fcfs", False)
    assert launched["max_num_seqs"] == 64


def test_the_environment_alone_can_name_the_file_and_set_everything(
    launched: dict[str, Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('log-format = "json"\n')
    monkeypatch.setenv("RADIXKV_SERVE_CONFIG", str(file))
    monkeypatch.setenv("RADIXKV_SERVE_ENABLE_PREFIX_CACHING", "false")
    monkeypatch.setenv("RADIXKV_SERVE_API_KEYS", "/a/file")
    assert main(["serve"]) == 0
    assert (launched["log_format"], launched["enable_prefix_caching"]) == ("json", False)
    assert launched["api_keys"] == Path("/a/file")


def test_nothing_has_to_be_set(launched: dict[str, Any]) -> None:
    assert main(["serve"]) == 0
    assert (launched["model"], launched["port"], launched["api_keys"]) == ("smollm2-135m", 8000, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prt = 1", ["'prt'", "no option"]),
        ("[server]\nport = 1", ["'server'", "no option"]),
        ("config = 'other.toml'", ["'config'", "no option"]),
        ("help = true", ["'help'", "no option"]),
        ("port = 'many'", ["port", "many"]),
        ("port = 70000", ["port", "65535"]),
        ("port = [1, 2]", ["port", "single value"]),
        ("policy = 'best'", ["policy", "best", "lpm"]),
        ("block-size = 3", ["block_size", "power of two"]),
        ("block-size = 4\nblock_size = 8", ["block-size", "twice"]),
        ("port 1", ["no TOML file", "line 1"]),
        ("\udcff", ["no TOML file"]),
    ],
)
def test_what_is_wrong_in_a_file_is_told_naming_the_key(
    launched: dict[str, Any], file: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["serve", "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert not launched


def test_a_file_that_is_not_there_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RADIXKV_SERVE_PRT", "1", ["RADIXKV_SERVE_PRT", "no option"]),
        ("RADIXKV_SERVE_PORT_NUMBER", "1", ["RADIXKV_SERVE_PORT_NUMBER", "no option"]),
        ("RADIXKV_SERVE_HELP", "1", ["RADIXKV_SERVE_HELP", "no option"]),
        ("RADIXKV_SERVE_PORT", "many", ["RADIXKV_SERVE_PORT", "many"]),
        ("RADIXKV_SERVE_BLOCK_SIZE", "3", ["block_size", "power of two"]),
    ],
)
def test_what_is_wrong_in_the_environment_is_told_naming_the_variable(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str,
    words: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    assert main(["serve"]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert not launched


def test_no_option_takes_an_api_key_itself(launched: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    keys = [option for option in OPTIONS if "key" in option.name]
    assert {option.name for option in keys} == {"--api-keys", "--zmq-server-key", "--zmq-client-keys", "--request-log-key"}
    assert all(option.hint == Path | None for option in keys)
    assert main(["serve", "--api-key", "a-key-of-some-length"]) == 2
    assert not launched
