"""The TPU kernel: its values in interpret mode, its lowering for TPUs, and the bytes that it moves."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.packing import paired
from fewbit.kernels.backend import select
from fewbit.kernels.qmatmul import BACKENDS, PallasTPU, Problem, dispatch
from fewbit.kernels.qmatmul.problem import Operand
from fewbit.kernels.qmatmul.tpu.blocks import Block, Config, Cut, bytes_moved, fitting
from fewbit.kernels.qmatmul.tpu.gemm import DecodedProduct, stacked_product
from fewbit.kernels.qmatmul.tpu.kernel import blocks_of
from fewbit.kernels.qmatmul.tpu.problem import Form, refusal
from tests.each_scheme import KINDS

SMALL = Config(m=8, codes=256, columns=128)  # several blocks along each axis of what follows
# Codes that straddle bytes differ from each other in nothing but how a number is made of a code, which is tested by itself.
STRADDLING = {name for name in fb.SCHEMES.names() if 8 % fb.SCHEMES[name].format.bits}
SCHEMES = [name for name in fb.SCHEMES.names() if name not in STRADDLING - {"mxfp6"}]
# Both packings, every kind of decoder, of scale and of zero point.
FAST = [("nf4", -1, True), ("uint4", -2, True), ("nvfp4", -2, False), ("q4_1", -1, False), ("fp8_block128", -2, True)]
# The schemes take turns: interpreting each in all four ways would take half an hour a machine, and show nothing more.
WAYS = [(-1, True), (-2, False), (-1, False), (-2, True)]
ALL = [(name, *WAYS[i % 4]) for i, name in enumerate(SCHEMES)]


def operands(
    name: str, axis: int, contracts: bool, shape: tuple[int, ...], m: int, dtype: Any
) -> tuple[jax.Array, fb.QArray]:
    """A stack of matrices of normal numbers, quantized along an axis, and activations that meet it or the other one."""
    rng = np.random.default_rng(0)
    q = fb.quantize(jnp.asarray(rng.normal(size=shape), dtype), name, axis=axis)
    length = shape[axis] if contracts else shape[-3 - axis]
    return jnp.asarray(rng.normal(size=(shape[0], m, length)), dtype), q


def assert_is_product(y: jax.Array, x: jax.Array, q: fb.QArray, contracts_last: bool, dtype: Any) -> None:
    """The product in float64, within the roundings of float32 sums, and of each number and result in bfloat16."""
    w = np.asarray(fb.dequantize(q, jnp.float32), np.float64)
    w, x64 = (w.swapaxes(1, 2) if contracts_last else w), np.asarray(x, np.float64)
    exact, size = x64 @ w, np.abs(x64) @ np.abs(w)
    ulp = 2.0**-24 * (w.shape[1] + 4) if dtype == jnp.float32 else 2.0**-8
    bound = size * ulp + (0 if dtype == jnp.float32 else np.abs(exact) * 2.0**-8)
    assert y.dtype == dtype and y.shape == exact.shape
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()


def cases() -> list[Any]:
    """Every scheme, but for one of each kind in `make test-long` only."""
    others = [case for case in ALL if case not in FAST]
    return FAST + [pytest.param(*case, marks=[] if case[0] in KINDS else [pytest.mark.long]) for case in others]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis", "contracts"), cases())
def test_product(name: str, axis: int, contracts: bool):
    """Odd lengths: blocks reach beyond the array on every axis, and interpret mode fills with NaN what lies there."""
    x, q = operands(name, axis, contracts, (1, 301, 301), 11, jnp.float32)
    contracts_last = contracts == (axis == -1)
    y = stacked_product(x, q, contracts_last=contracts_last, result=x.dtype, config=SMALL, interpret=True)
    assert_is_product(y, x, q, contracts_last, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "halves"), [("int4", True), ("int4", False), ("mxfp4", True)])
def test_bfloat16_and_a_stack(name: str, halves: bool):
    """Integers of 4 bits both ways: as v5e and its successors read them, and as older chips do."""
    x, q = operands(name, -2, True, (2, 256, 128), 4, jnp.bfloat16)
    config = dataclasses.replace(SMALL, halves=halves)
    y = stacked_product(x, q, contracts_last=False, result=jnp.bfloat16, config=config, interpret=True)
    assert_is_product(y, x, q, False, jnp.bfloat16)


def test_which_schemes_are_refused():
    refused = {}
    for name in fb.SCHEMES.names():
        scheme = fb.SCHEMES[name]
        refused[name] = refusal(scheme, scheme.tiles(2)[-1], jnp.float32, precision=None)
    assert not any(refused.values())


@pytest.mark.parametrize(
    ("scheme", "tile", "dtype", "precision", "message"),
    [
        (fb.SCHEMES["int4"], 7, "float32", None, "tiles of 7 along the packed axis split bytes of 2 codes"),
        (fb.SCHEMES["int4"], None, "float16", None, "it multiplies bfloat16 and float32, not float16"),
        (fb.SCHEMES["int4"], None, "float32", "BF16_BF16_F32_X3", "precision is 'BF16_BF16_F32_X3'; None or a name of"),
        (
            fb.Scheme(fb.FORMATS["int8"], packing=fb.Packing(interleave=(1, 0))),
            *(None, "float32", None, "its 8-bit codes are interleaved; only narrower codes may be"),
        ),
        (
            fb.Scheme(fb.FORMATS["int4"], packing=fb.Packing(interleave=paired(32))),
            *(48, "float32", None, "tiles of 48 along the packed axis split bytes of 32 codes"),
        ),
    ],
)
def test_refusals_say_why(scheme: fb.Scheme, tile: int | None, dtype: str, precision: Any, message: str):
    reason = refusal(scheme, tile, dtype, precision=precision)
    assert reason is not None and reason.startswith(message)


def test_nan_stays_in_its_tile_and_the_spare_nibble_means_nothing():
    w = np.random.default_rng(1).normal(size=(1, 65, 6)).astype(np.float32)
    w[0, 40, 2] = np.nan
    x = jnp.ones((1, 3, 65))
    q = fb.quantize(jnp.asarray(w), "nf4", axis=-2)
    poisoned = q.codes.at[:, -1].set(q.codes[:, -1] | 0xF0)  # K is odd: the last byte holds one code
    same = jax.tree.unflatten(jax.tree.structure(q), [poisoned, *jax.tree.leaves(q)[1:]])
    y, z = (stacked_product(x, a, contracts_last=False, result=jnp.float32, interpret=True) for a in (q, same))
    np.testing.assert_array_equal(np.isnan(y)[0, 0], [False, False, True, False, False, False])
    np.testing.assert_array_equal(y, z)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "order", "contracts"), [("uint4", paired(32), True), ("int6", (2, 0, 3, 1), False)])
def test_codes_in_another_order(fmt: str, order: tuple[int, ...], contracts: bool):
    """GGUF's order, and one of codes that straddle bytes; lengths that are no whole groups."""
    scheme = fb.Scheme(fb.FORMATS[fmt], {...: 1, -1: 32}, packing=fb.Packing(interleave=order))
    x, q = operands(scheme, -1, contracts, (1, 70, 77), 2, jnp.float32)  # type: ignore[arg-type]
    y = stacked_product(x, q, contracts_last=contracts, result=jnp.float32, interpret=True)
    assert_is_product(y, x, q, contracts, jnp.float32)


def test_high_first_packing():
    scheme = fb.Scheme(fb.FORMATS["nf4"], {...: 1, -1: 64}, packing=fb.Packing(high_first=True))
    x, q = operands(scheme, -1, True, (1, 8, 128), 2, jnp.float32)  # type: ignore[arg-type]
    y = stacked_product(x, q, contracts_last=True, result=jnp.float32, interpret=True)
    assert_is_product(y, x, q, True, jnp.float32)


# --- as a backend ---

NUMBERS = (((1,), (1,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class OnCpu(PallasTPU):
    """The backend in interpret mode as if it were made for CPUs, so that all that surrounds it can be run."""

    name: ClassVar[str] = "pallas_on_cpu"
    platform: ClassVar[str] = "cpu"
    config: Config = SMALL
    interpret: bool = True


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    backend = OnCpu()
    monkeypatch.setattr(dispatch, "BACKENDS", (backend, *dispatch.BACKENDS))
    return backend


def test_gradients_vmap_and_many_axes(on_cpu: OnCpu):
    rng = np.random.default_rng(2)
    q = fb.quantize(jnp.asarray(rng.normal(size=(64, 4, 8)), jnp.float32), "int4", axis=0)  # [in, heads, of a head]
    x = jnp.asarray(rng.normal(size=(2, 3, 64)), jnp.float32)

    def loss(backend, x, q):
        rows = jax.vmap(lambda x: fb.dot_general(x, q, (((1,), (0,)), ((), ())), backend=backend))(x)
        return jnp.sum(rows**2)

    value, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, on_cpu)))(x, q.astype(jnp.float32))
    expected, wanted = jax.value_and_grad(functools.partial(loss, "reference"))(x, q)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients, wanted, rtol=1e-4, atol=1e-3)


def test_a_named_backend_is_refused_where_it_does_not_run():
    q = fb.quantize(jnp.ones((4, 32)), "int8")
    with pytest.raises(fb.UnsupportedError) as caught:
        fb.dot_general(jnp.ones((2, 32)), q, NUMBERS, backend="pallas_tpu")
    assert caught.value.reasons == {"pallas_tpu": "it runs on tpu, and the program is compiled for cpu"}


def test_one_trace_serves_cpu_and_tpu():
    q = fb.quantize(jnp.ones((128, 256), jnp.bfloat16), "nf4")
    traced = jax.jit(lambda x, q: fb.dot_general(x, q, NUMBERS, backend="pallas_tpu")).trace(
        jnp.ones((2, 256), jnp.bfloat16), q
    )
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    with pytest.raises(fb.UnsupportedError, match="it runs on tpu, and the program is compiled for cpu"):
        traced.lower(lowering_platforms=("cpu",))


def test_within_shard_map_the_kernel_is_each_devices_own():
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    q = fb.quantize(jnp.ones((128, 256), jnp.bfloat16), "int4")
    specs = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    own = jax.shard_map(
        lambda x, q: fb.dot_general(x, q, NUMBERS, backend="pallas_tpu"), mesh=mesh, in_specs=specs, out_specs=specs[0]
    )
    lowered = jax.jit(own).trace(jnp.ones((8, 256), jnp.bfloat16), q).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


ALONE = """
import jax, jax.numpy as jnp
import fewbit as fb

w, x = fb.quantize(jnp.ones((64, 96)), "nf4"), jnp.ones((3, 96))

def texts(fn):
    traced = jax.jit(fn).trace(x)
    return [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")]

cpu, cuda, tpu = texts(lambda x: x @ w.T)
assert "tpu_custom_call" in tpu and "dot_general" not in tpu
assert "tpu_custom_call" not in cpu + cuda and "dot_general" in cuda
assert texts(jax.grad(lambda x: jnp.sum(x @ w.T)))[2].count("tpu_custom_call") == 1

numbers = (((1,), (1,)), ((), ()))
for name, codes in ("fp8", "f8E4M3FN"), ("int8", "i8"):
    both = fb.quantize(jnp.ones((64, 96)), name)
    product = lambda x: fb.dot_general(x, both, numbers, policy=fb.Policy(name, name))
    cpu, cuda, tpu = texts(product)
    assert tpu.count("tpu_custom_call") > cuda.count("tpu_custom_call") == 0
    assert f"x{codes}>, tensor<" in cuda  # the reference's product of codes
    plain = lambda x: fb.dot_general(x, both, numbers, policy=fb.Policy(name, name), backend="reference")
    ours, reference = (jax.grad(lambda x, fn=fn: jnp.sum(jnp.sin(fn(x))))(x * 1.5) for fn in (product, plain))
    assert jnp.allclose(ours, reference, rtol=1e-5)
"""


@pytest.mark.slow
@pytest.mark.newest
def test_a_process_with_one_device_takes_the_kernel_where_a_program_is_compiled_for_tpus():
    """The tests' own process has eight devices, over which XLA could not split a kernel."""
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", ALONE], check=True, env=settings)


def test_several_devices_leave_it_aside():
    problem = Problem(Operand((2, 32), "float32", None), Operand((4, 32), "float32", fb.SCHEMES["int8"]), NUMBERS)
    assert str(PallasTPU().not_chosen(problem)).startswith("there are several devices")
    assert select(BACKENDS, problem).reasons["pallas_tpu"] == "it runs on tpu, the device is cpu"


# --- what a TPU would run ---


def abstract(
    name: str, axis: int, shape: tuple[int, int], m: int, contracts: bool, dtype: Any
) -> tuple[Any, fb.QArray, bool]:
    """The shapes of a product, and whether the last axis is contracted."""
    q = jax.eval_shape(lambda w: fb.quantize(w, name, axis=axis), jax.ShapeDtypeStruct((1, *shape), dtype))
    contracts_last = contracts == (axis == -1)
    return jax.ShapeDtypeStruct((1, m, shape[1 if contracts_last else 0]), dtype), q, contracts_last


LOWERED = [
    ("nf4", -2, (4096, 4096), 1, True),
    ("int4_g128", -1, (14336, 4096), 16, True),
    ("mxfp4", -2, (4096, 14336), 256, True),
]
LOWERED += [
    ("nvfp4", -1, (4096, 4096), 16, False),
    ("mxfp8", -2, (4096, 1024), 16, False),
    ("q4_1", -2, (1000, 576), 3, True),
    ("mxfp6", -1, (1024, 2048), 16, True),
]


@pytest.mark.newest
@pytest.mark.parametrize(("name", "axis", "shape", "m", "contracts"), LOWERED)
def test_it_is_lowered_for_tpus_from_packed_bytes(name: str, axis: int, shape: tuple[int, int], m: int, contracts: bool):
    x, q, contracts_last = abstract(name, axis, shape, m, contracts, jnp.bfloat16)
    product = functools.partial(stacked_product, contracts_last=contracts_last, result=jnp.bfloat16)
    text = jax.jit(product).trace(x, q).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    rows, columns = q.codes.shape[1:]
    assert f"tensor<{rows}x{columns}xui8>" in text
    assert f"{shape[0]}x{shape[1]}x" not in text or q.scheme.format.bits == 8  # no array of the unpacked size
    assert f"{shape[0]}x{shape[1]}xf" not in text and f"{shape[0]}x{shape[1]}xbf" not in text


@pytest.mark.parametrize(("name", "axis", "shape", "m", "contracts"), [c for c in LOWERED if c[0] != "q4_1"])
def test_bytes_moved_are_the_bytes_held(name: str, axis: int, shape: tuple[int, int], m: int, contracts: bool):
    x, q, contracts_last = abstract(name, axis, shape, min(m, 16), contracts, jnp.bfloat16)
    form = Form.of(x, q, contracts_last=contracts_last, result=jnp.bfloat16)
    cut = Cut.of(form, Config())
    moved = bytes_moved(blocks_of(DecodedProduct(cut), x, q), cut.grid)
    length = x.shape[2]
    y = shape[0] * shape[1] // length
    again = cut.grid[1]  # x is read once for each block of the result's other axis
    assert moved.pop("x") == 2 * x.shape[1] * length * again
    assert moved.pop("y") == 2 * x.shape[1] * y
    assert sum(moved.values()) == q.nbytes


def test_more_rows_than_a_block_read_the_weight_again():
    x, q, contracts_last = abstract("int4", -2, (4096, 512), 512, True, jnp.bfloat16)
    cut = Cut.of(Form.of(x, q, contracts_last=contracts_last, result=jnp.bfloat16), Config(m=256))
    assert bytes_moved(blocks_of(DecodedProduct(cut), x, q), cut.grid)["codes"] == 2 * q.codes.size


def test_bytes_of_a_block_beyond_the_end_are_not_counted():
    block = Block("x", (5, 3), np.dtype(np.float32), (4, 3), lambda i, j: (i, 0))
    assert bytes_moved([block], (2, 3)) == {"x": 60}


@pytest.mark.parametrize("length", [1, 100, 576, 1030, 4096, 14336, 11008])
@pytest.mark.parametrize("unit", [128, 256, 1024])
def test_blocks_are_whole_axes_or_whole_units(length: int, unit: int):
    block = fitting(length, unit, 512)
    assert block == length or block % unit == 0
    assert block <= max(512, unit) or block == length
