"""The scales of least error of a product, against a brute force in float64 over every scale that can be stored."""

import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from fewbit import torch as fbt  # noqa: E402 - it imports torch


def brute_force(W: np.ndarray, X: np.ndarray, name: str, unit: float) -> np.ndarray:
    """The least `|X (v - w)^T|^2` of each tile over every scale, `[rows, tiles]`."""
    scheme = fb.scheme(name)
    values = scheme.scale.values()
    grid = values[np.isfinite(values) & (values >= 2.0**-126)] * unit
    numbers = np.unique(scheme.format.values())
    numbers = numbers[numbers >= scheme.format.min]
    length = scheme.tile[-1]
    blocks = [slice(i, i + length) for i in range(0, W.shape[1], length)]
    errors = np.empty((len(W), len(blocks)))
    for row in range(len(W)):
        for place, block in enumerate(blocks):
            w, x = W[row, block].astype(np.float64), X[:, block].astype(np.float64)
            scaled = (w / grid[:, None]).astype(np.float32).astype(np.float64)
            near = numbers[np.abs(scaled[..., None] - numbers).argmin(-1)]
            errors[row, place] = np.square((near * grid[:, None] - w) @ x.T).sum(1).min()
    return errors


def product_errors(W: np.ndarray, X: np.ndarray, q: "fbt.QTensor", length: int) -> np.ndarray:
    """`|X (v - w)^T|^2` of each tile."""
    off = fbt.dequantize(q, torch.float32).double().numpy() - W
    blocks = [slice(i, i + length) for i in range(0, W.shape[1], length)]
    return np.stack([np.square(off[:, b] @ X[:, b].T.astype(np.float64)).sum(1) for b in blocks], 1)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nvint4"])
def test_no_scale_is_better(name: str) -> None:
    rng = np.random.default_rng(0)
    W = rng.normal(size=(5, 72)).astype(np.float32)
    X = (rng.normal(size=(40, 72)) @ rng.normal(size=(72, 72))).astype(np.float32)
    W[0, :32] = 0
    q = fbt.quantize(torch.tensor(W), name, method="hessian", X=torch.tensor(X))
    unit = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    ours, best = product_errors(W, X, q, fb.scheme(name).tile[-1]), brute_force(W, X, name, unit)
    assert (ours <= best * (1 + 1e-3) + 1e-12).all()  # a tie is 2**-16; the rest is the float32 of the brute force's scales
    naive = product_errors(W, X, fbt.quantize(torch.tensor(W), name, method="naive"), fb.scheme(name).tile[-1])
    assert (ours <= naive * (1 + 1e-6)).all() and ours.sum() < 0.95 * naive.sum()


@pytest.mark.parametrize("factor", [1e-3, 1.0, 3e7])
def test_the_scale_of_the_activations_does_not_matter(factor: float) -> None:
    rng = np.random.default_rng(1)
    W, X = torch.tensor(rng.normal(size=(16, 32))), torch.tensor(rng.normal(size=(64, 32)))
    one, other = (fbt.quantize(W, "nvfp4", method="hessian", X=x) for x in (X, X * factor))
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)


def test_the_axis_and_float_scales() -> None:
    rng = np.random.default_rng(2)
    W, X = torch.tensor(rng.normal(size=(6, 40))), torch.tensor(rng.normal(size=(64, 40)))
    for name in ("mxfp4", "int4_g16", "int8"):
        along, across = fbt.quantize(W, name, -1, "hessian", X), fbt.quantize(W.T, name, 0, "hessian", X)
        assert torch.equal(fbt.dequantize(along), fbt.dequantize(across).T)
        naive = fbt.metrics(W, fbt.quantize(W, name, method="naive"), X)
        found = fbt.metrics(W, along, X)
        assert found.output_error is not None and naive.output_error is not None
        assert found.output_error < naive.output_error
        assert fbt.metrics(W.T, across, X).output_error == pytest.approx(found.output_error, rel=1e-6)


def test_what_the_sweep_cannot_do() -> None:
    W, X = torch.ones(32, 32), torch.ones(4, 32)
    with pytest.raises(fb.UnsupportedError, match="tiles on one axis"):
        fbt.quantize(W, "nvfp4_16x16", method="hessian", X=X)
    with pytest.raises(fb.QuantError, match="not finite"):
        fbt.quantize(W, "nvfp4", method="hessian", X=X * float("inf"))
