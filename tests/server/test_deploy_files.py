"""The systemd unit, the Dockerfile and the example configuration say what this server understands, and leave it time to drain."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import main
from radixkv.server.launcher import READ_SECONDS, STOP_SECONDS

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
ROOT = DEPLOY.parents[1]
UNIT = (DEPLOY / "radixkv.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def setting(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    got: dict[str, Any] = {}
    monkeypatch.setattr("radixkv.server.launcher.serve", lambda config, **options: got.update(vars(config) | options))
    return got


def start(command: str) -> None:
    """Run what a file starts, but for the place of the program and of its configuration."""
    program, *argv = shlex.split(command)
    assert Path(program).name == "radixkv"
    assert main([str(DEPLOY / "radixkv.toml") if word.endswith("radixkv.toml") else word for word in argv]) == 0


def test_the_unit_starts_a_server_and_gives_it_the_time_that_it_takes_to_drain(launched: dict[str, Any]) -> None:
    start(setting("ExecStart")[0])
    assert launched["log_format"] == "json"
    assert setting("KillSignal") == ["SIGTERM"]
    assert float(setting("TimeoutStopSec")[0]) >= launched["drain_timeout"] + READ_SECONDS + STOP_SECONDS


def test_the_unit_names_its_api_keys_by_a_variable_that_the_server_reads(
    launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = dict(word.split("=", 1) for line in setting("Environment") for word in line.split())
    for name in variables:
        if name.startswith("RADIXKV_"):
            monkeypatch.setenv(name, variables[name].replace("%d", "/run/credentials"))
    start(setting("ExecStart")[0])
    assert launched["api_keys"] == Path("/run/credentials", setting("LoadCredential")[0].split(":")[0])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "radixkv.service"
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT))  # it looks whether the program is there
    result = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_every_option_of_the_example_is_one_and_has_its_own_or_the_default_value(launched: dict[str, Any]) -> None:
    assert main(["serve", "--config", str(DEPLOY / "radixkv.toml")]) == 0
    assert (launched["model"], launched["host"], launched["request_timeout"]) == ("smollm2-135m", "127.0.0.1", 600)


def test_the_image_starts_a_server_as_nobody_in_particular_and_asks_for_its_health(launched: dict[str, Any]) -> None:
    instructions = re.sub(r"\\\n", " ", DOCKERFILE)
    (entry,) = re.findall(r"^ENTRYPOINT \[(.*)\]$", instructions, re.MULTILINE)
    start(" ".join(re.findall(r'"([^"]*)"', entry)))
    port = launched["port"]
    assert re.search(rf"^EXPOSE {port}$", instructions, re.MULTILINE)
    users = re.findall(r"^USER (\S+)$", instructions, re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0")
    (check,) = re.findall(r"^HEALTHCHECK .*CMD \[(.*)\]$", instructions, re.MULTILINE)
    assert f"127.0.0.1:{port}/health" in check
    for source in re.findall(r"^COPY (.*) \S+$", instructions, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())


def test_the_images_health_check_tells_a_server_from_none(server: Any) -> None:
    (code,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    for url, healthy in ((server.url, True), ("http://127.0.0.1:9", False)):
        result = subprocess.run(
            [sys.executable, "-c", code.replace("http://127.0.0.1:8000", url)], stderr=subprocess.DEVNULL, timeout=60
        )
        assert (result.returncode == 0) == healthy
