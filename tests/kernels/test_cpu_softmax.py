"""The softmax of the CPU's attention by itself: how exact weights are that are rounded to bfloat16."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from radixkv.kernels import cpu
from radixkv.kernels.cpu import build

ROWS, CHUNK = 4, 256
HARNESS = """
#include "softmax.h"
int in_16_bits(void) { return EXP2_OF_16_BITS; }
void softmax(float *scores, bf16 *weights, float scale, const long *limits, float *largest, float *sum) {
    struct upcoming none = {0};
    softmax_few(4, 1, scores, weights, scale, limits, CHUNK, largest, sum, &none);
}
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = next(filter(shutil.which, build.COMPILERS), None)
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("softmax")
    source, library = folder / "harness.c", folder / "harness.so"
    source.write_text(HARNESS)
    include = f"-I{Path(cpu.__file__).parent}"
    command = [compiler, *build.FLAGS, "-DEMULATE_TILES", include, "-shared", str(source), "-o", str(library), "-lm"]
    subprocess.run(command, check=True, timeout=120)
    lib = ctypes.CDLL(str(library))
    lib.softmax.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_float] + [ctypes.c_void_p] * 3
    return lib


def softmax(
    harness: ctypes.CDLL, scores: np.ndarray, scale: float, limits: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights ``[4, 256]`` as float64, each row's largest score times ``scale``, and its sum."""
    scores = np.ascontiguousarray(scores, dtype=np.float32).copy()
    weights, largest, total = np.empty((ROWS, CHUNK), np.uint16), np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    ends = None if limits is None else np.array(limits, dtype=np.int64).ctypes.data_as(ctypes.c_void_p)
    harness.softmax(scores.ctypes.data, weights.ctypes.data, scale, ends, largest.ctypes.data, total.ctypes.data)
    return (weights.astype(np.uint32) << 16).view(np.float32).astype(np.float64), largest, total


def test_weights_are_as_exact_as_is_said(harness: ctypes.CDLL) -> None:
    rng, scale, errors = np.random.default_rng(0), 0.37, []
    for _ in range(200):
        scores = rng.uniform(-50, 0, (ROWS, CHUNK)).astype(np.float32)
        weights, largest, total = softmax(harness, scores, scale)
        expected = np.exp2(scores.astype(np.float64) * np.float32(scale) - largest[:, None])
        errors.append(weights / expected - 1)
        assert (weights[np.arange(ROWS), scores.argmax(axis=1)] == 1).all()
        np.testing.assert_allclose(total, weights.sum(axis=1), rtol=1e-6 if harness.in_16_bits() else 1e-3)
    error = np.concatenate(errors)
    root_mean_square, most = (0.00196, 0.0059) if harness.in_16_bits() else (0.00166, 0.0041)
    assert math.sqrt((error**2).mean()) == pytest.approx(root_mean_square, rel=0.02)
    assert abs(error).max() <= most
    assert abs(error.mean()) < 0.0001


@pytest.mark.parametrize("offset", [0.0, 3000.0, -3000.0])
def test_nothing_but_the_distance_from_the_largest_score_matters(harness: ctypes.CDLL, offset: float) -> None:
    scores = np.tile(-np.arange(CHUNK, dtype=np.float32), (ROWS, 1)) + np.float32(offset)
    weights, largest, _ = softmax(harness, scores, 1.0)
    assert (largest == offset).all()
    assert (weights[:, :126] == np.exp2(-np.arange(126.0))).all()
    assert (weights[:, 128:] == 0).all()


def test_scores_beyond_a_rows_limit_get_no_weight_whatever_they_hold(harness: ctypes.CDLL) -> None:
    limits = [1, 100, 255, 256]
    scores = np.random.default_rng(1).normal(size=(ROWS, CHUNK)).astype(np.float32)
    expected = [softmax(harness, np.where(np.arange(CHUNK) < limit, scores, -np.inf), 1.0)[0][r] for r, limit in enumerate(limits)]
    for r, limit in enumerate(limits):
        scores[r, limit:] = [np.nan, np.inf, 1e30][r % 3]
    weights, _, _ = softmax(harness, scores, 1.0, limits)
    for r, limit in enumerate(limits):
        assert (weights[r, limit:] == 0).all()
        assert (weights[r] == expected[r]).all()
