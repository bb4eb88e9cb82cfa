"""The quantizers of qwix, AQT and eFormer, where they are installed."""

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def quantizers(x: jax.Array) -> dict[str, dict[str, Callable[[], Any]]]:
    """For each scheme of ours, the peers' jitted functions that do the same to `x`, along its last axis."""
    found: dict[str, dict[str, Callable[[], Any]]] = {}

    def add(scheme: str, name: str, fn: Callable[[jax.Array], Any]) -> None:
        jitted = jax.jit(fn)
        found.setdefault(scheme, {})[name] = lambda: jitted(x)

    if _has("qwix"):
        _add_qwix(add)
    if _has("eformer"):
        _add_eformer(add)
    if _has("aqt"):
        _add_aqt(add)
    return found


def _add_qwix(add: Callable[..., None]) -> None:
    import qwix

    rows = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}
    for scheme, qtype in rows.items():
        add(scheme, "qwix", lambda x, qtype=qtype: _leaves(qwix.quantize(x, qtype, channelwise_axes=[0])))
    tiled = {"nf4": ("nf4", 64), "mxfp4 even": ("mxfp4", 32), "nvfp4_absmax": ("nvfp4", 16), "mxfp8 even": ("mxfp8", 32)}
    for scheme, (qtype, tile) in tiled.items():
        fn = lambda x, qtype=qtype, tile=tile: _leaves(  # noqa: E731
            qwix.quantize(x, qtype, channelwise_axes=[0], tiled_axes={1: tile})
        )
        add(scheme, "qwix", fn)


def _add_eformer(add: Callable[..., None]) -> None:
    from eformer.ops.quantization.quantization_functions import quantize_and_pack_nf4, quantize_int8

    add("nf4", "eformer", lambda x: quantize_and_pack_nf4(x, block_size=64))
    add("int8_narrow", "eformer", lambda x: quantize_int8(x, axis=-1))


def _add_aqt(add: Callable[..., None]) -> None:
    from aqt.jax.v2 import aqt_quantizer, calibration
    from aqt.jax.v2.numerics import int_numerics

    numerics = int_numerics.IntSymmetric(
        bits=8,
        preserve_zero=True,
        preserve_max_val=True,
        clip=True,
        round=True,
        noise_fn=None,
        clip_gradient=False,
        dtype=jnp.int8,
    )
    quantizer = aqt_quantizer.Quantizer(
        numerics=numerics,
        calib_shared_axes=None,
        scale_stop_grad=True,
        calibration=calibration.AbsMaxCalibration,
        context=None,
    )
    quantizer.init_calibration()

    def quantize(x: jax.Array) -> list[jax.Array]:
        return _leaves(quantizer.calculate_qvalue(x, quantizer.calibrate(x, calibration_axes=[-1]))[0])

    add("int8_narrow", "AQT", quantize)


def _leaves(tree: Any) -> list[jax.Array]:
    """The arrays of a peer's result: what has to be computed."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def torch_products(x: jax.Array, w: jax.Array, rotated_bytes: int) -> dict[str, Callable[[], Any]]:
    """torch's products of `x [M, K]` with `w [N, K]` on the CPU: bfloat16, and its kernels for 4 and 8 bits; none without torch.

    The weights rotate through copies that take `rotated_bytes` together, where x has few rows.
    """
    if not _has("torch"):
        return {}
    import torch

    rows, length = x.shape
    dense = torch.from_numpy(np.array(w)).bfloat16()
    activation = torch.from_numpy(np.array(x)).bfloat16()
    codes = torch.randint(0, 16, w.shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.ones(length // 64, w.shape[0], 2, dtype=torch.bfloat16)
    bytes_, row_scale = codes.to(torch.int8), torch.ones(w.shape[0], dtype=torch.bfloat16)

    def rotating(weight: Any, run: Callable[[Any], Any]) -> Callable[[], Any]:
        count = rotated_bytes // (weight.numel() * weight.element_size()) if rows <= 16 else 2
        copies = itertools.cycle([weight.clone() for _ in range(max(2, count))])
        return lambda: run(next(copies))

    return {
        "torch bfloat16": rotating(dense, lambda w: activation @ w.T),
        "torch int4, groups of 64": rotating(
            packed, lambda w: torch.ops.aten._weight_int4pack_mm_for_cpu(activation, w, 64, scales)
        ),
        "torch int8": rotating(bytes_, lambda w: torch.ops.aten._weight_int8pack_mm(activation, w, row_scale)),
    }
