"""The calling convention of qwantize: blocks on an axis of their own, floats out."""

import dataclasses

import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from fewbit import torch as fbt  # noqa: E402 - it imports torch


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_blocks_are_those_of_the_packed_form(name: str, dim: int) -> None:
    W = torch.tensor(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32))
    length = fb.scheme(name).tile[-1]
    blocked = W.reshape(4, -1, length)
    q = fbt.quantize(W, name)
    scales, quants = fbt.quantize_blocks(blocked if dim == -1 else blocked.mT, name, dim)
    back = fbt.dequantize_blocks(scales, quants, dim)
    assert scales.shape == (4, 64 // length)
    assert torch.equal((back if dim == -1 else back.mT).reshape(4, 64), fbt.dequantize(q))


def test_another_packed_axis_changes_no_number() -> None:
    W, scheme = torch.randn(4, 2, 32), fb.scheme("mxfp4")
    known = fbt.quantize_blocks(W, scheme)
    for ours, theirs in zip(fbt.quantize_blocks(W, dataclasses.replace(scheme, pack_axis=-2)), known, strict=True):
        assert torch.equal(ours, theirs)


def test_zero_points_are_subtracted_and_offsets_refused() -> None:
    W = torch.tensor(np.random.default_rng(0).normal(size=(4, 2, 32)).astype(np.float32))
    back = fbt.dequantize_blocks(*fbt.quantize_blocks(W, "uint4"))
    assert torch.equal(back.reshape(4, 64), fbt.quantize(W.reshape(4, 64), "uint4_g32").dequantize())
    with pytest.raises(fb.QuantError, match="scheme q4_1 has float offsets"):
        fbt.quantize_blocks(W, "q4_1")


@pytest.mark.slow
def test_activations_meet_the_blocks_in_a_row() -> None:
    rng = np.random.default_rng(1)
    W, X = torch.tensor(rng.normal(size=(4, 48))), torch.tensor(rng.normal(size=(64, 48)))
    scales, quants = fbt.quantize_blocks(W.reshape(4, 3, 16), "nvfp4", method="hessian", X=X)
    q = fbt.quantize(W, "nvfp4", method="hessian", X=X)
    assert torch.equal(fbt.dequantize_blocks(scales, quants).reshape(4, 48), fbt.dequantize(q, torch.float32))


def test_bfloat16_is_halved_and_the_rest_is_kept() -> None:
    W = torch.tensor(np.random.default_rng(0).normal(size=(64, 64))).bfloat16()
    q = fbt.quantize(W, "mxfp4")
    assert repr(q) == "QTensor(mxfp4, bfloat16[64, 64], 2,176 bytes, 4.250 bits/weight)"
    assert q.to("cpu").codes.device.type == "cpu"
    assert fbt.metrics(W, q) == fbt.metrics(W, fbt.dequantize(q, torch.float32))
    assert fbt.metrics(torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(3, 2)) == fbt.Metrics(0.0, 0.0)
    assert fbt.metrics(torch.zeros(1, 2), torch.ones(1, 2)) == fbt.Metrics(float("inf"))
