"""The package works from an sdist and the wheel made of it, not only where it is installed in place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "radixkv", "kernels", "server")


def build(kind: str, source: Path, out: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-P", "-c", code, str(out)], cwd=source, capture_output=True, text=True, check=True)
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs, the wheel built from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    sdist = build("sdist", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    wheel = build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return folder / "site"


@pytest.mark.full
def test_the_wheel_holds_every_module_c_source_and_web_file_of_the_repository(installed: Path):
    expected = {
        prefix + str(path.relative_to(ROOT / folder))
        for folder, prefix in (("radixkv", ""), ("kernels", "kernels/"), ("server", "server/"))
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".typed", ".html", ".js", ".css", ".svg")
    }
    found = {str(path.relative_to(installed / "radixkv")) for path in (installed / "radixkv").rglob("*") if path.is_file()}
    assert found == expected


@pytest.mark.full
def test_what_the_wheel_installs_runs(installed: Path):
    code = (
        "import radixkv, torch, radixkv.kernels.cpu as cpu, radixkv.server.launcher\n"
        "print(radixkv.__file__)\n"
        "x = cpu.rms_norm(torch.ones(1, 32), torch.ones(32), 1e-5)\n"
        "assert abs(float(x[0, 0]) - 1) < 1e-3\n"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(installed / "radixkv" / "__init__.py")


def test_transformers_loads_from_the_repositorys_root():
    """Our kernels/ folder there must not pass for the Hugging Face package that transformers looks for."""
    code = "import bench, transformers.utils as u; from transformers import AutoConfig; print(u.is_kernels_available())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
