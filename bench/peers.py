"""What a JAX user would call instead: the quantizers of qwix, AQT and eFormer, where they are installed."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


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
