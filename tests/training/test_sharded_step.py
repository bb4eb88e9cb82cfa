"""A training step and a served model on meshes: the numbers of one device, and codes on the wire.

The operands are small integers, and the scales of MX formats powers of two: every sum is exact in float32 in any order, so
that results agree bit for bit however devices divide the sums. What is not so is compared within the bound of a float32 sum.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

import fewbit as fb
from fewbit.models import DecoderConfig, decode_step, empty_cache, params_from_paths, prefill, shapes
from tests import cluster
from tests.collectives import collective_bytes

WIDTH, DEVICES = 128, 4
WEIGHT = WIDTH * WIDTH
RECIPE = fb.Recipe((fb.Rule("up|down", fb.Policy("mxfp8", "mxfp8", dlhs="mxfp8_e5m2", drhs="mxfp8_e5m2")),))

Params = dict[str, jax.Array]


def data() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights of -1, 0 and 1, such inputs, and targets."""
    random = np.random.default_rng(0)
    weights = {name: random.integers(-1, 2, (WIDTH, WIDTH)).astype(np.float32) for name in ("up", "down")}
    x, y = (random.integers(-1, 2, (WIDTH, WIDTH)).astype(np.float32) for _ in range(2))
    return weights, x, y


def model(params: Params, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((model(params, x) - y) ** 2) / WEIGHT


def fully_sharded(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Within `shard_map`: each weight is gathered before its product."""
    return jax.lax.psum(loss({name: jax.lax.all_gather(w, "d", tiled=True) for name, w in params.items()}, x, y), "d")


def tensor_parallel(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Within `shard_map`: columns of one weight, rows of the next."""
    return jnp.sum((jax.lax.psum(model(params, x), "d") - y) ** 2) / WEIGHT


def gathered_by_constraint(mesh: Mesh) -> Callable[..., jax.Array]:
    """On a mesh with auto axes a sharding constraint says that a weight is gathered."""

    def fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        whole = NamedSharding(mesh, P())
        return loss({name: jax.lax.with_sharding_constraint(w, whole) for name, w in params.items()}, x, y)

    return fn


def step(fn: Callable[..., jax.Array], reduction: str | None = None) -> Callable[..., tuple[jax.Array, Params]]:
    return jax.value_and_grad(fb.train(fn, RECIPE, reduction=reduction))


def mesh_of(kind: AxisType) -> Mesh:
    """A mesh of four devices, of all processes."""
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,), devices=jax.devices()[:DEVICES])


def placed(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """An array of which each process makes its own shards."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def layouts(reduction: str | None = None) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The step by layout, and its arguments."""
    weights, x, y = data()

    def arguments(mesh: Mesh, specs: dict[str, P], batch: P) -> tuple[Any, ...]:
        return {n: placed(w, mesh, specs[n]) for n, w in weights.items()}, placed(x, mesh, batch), placed(y, mesh, batch)

    explicit, auto = mesh_of(AxisType.Explicit), mesh_of(AxisType.Auto)
    rows, columns = {"up": P("d"), "down": P("d")}, {"up": P(None, "d"), "down": P("d")}
    map_rows = jax.shard_map(fully_sharded, mesh=explicit, in_specs=(rows, P("d"), P("d")), out_specs=P())
    map_columns = jax.shard_map(tensor_parallel, mesh=explicit, in_specs=(columns, P(), P()), out_specs=P())
    return {
        "fsdp, shard_map": (step(map_rows, reduction), arguments(explicit, rows, P("d"))),
        "fsdp, explicit": (step(loss), arguments(explicit, rows, P("d"))),
        "fsdp, auto": (step(gathered_by_constraint(auto)), arguments(auto, rows, P("d"))),
        "tensor, shard_map": (step(map_columns), arguments(explicit, columns, P())),
        "tensor, auto": (step(loss), arguments(auto, columns, P())),
    }


REDUCTIONS = ("mxfp8_e5m2", "mxint8")
LAYOUTS = ("fsdp, shard_map", "fsdp, explicit", "fsdp, auto", "tensor, shard_map", "tensor, auto")


@functools.cache
def on_one_device() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    weights, x, y = data()
    return jax.device_get(jax.jit(step(loss))(weights, x, y))


def assert_same_step(value: np.ndarray, gradients: dict[str, np.ndarray]) -> None:
    """The gradients bit for bit; the loss is a sum of WEIGHT positive terms, each rounding at most 2**-24 of it."""
    expected, expected_gradients = on_one_device()
    assert abs(value - expected) <= WEIGHT * 2.0**-24 * expected
    for name, gradient in expected_gradients.items():
        assert np.abs(gradient).max() > 0
        np.testing.assert_array_equal(gradients[name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_on_a_mesh_is_that_of_one_device(layout):
    run, arguments = layouts()[layout]
    assert_same_step(*jax.device_get(jax.jit(run)(*arguments)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("weight", [P(), P("data")], ids=["replicated", "gathered"])
def test_a_mesh_axis_that_nothing_uses_changes_no_random_number_and_no_history(kind, weight):
    """The gradients are those of a mesh without the axis, bit for bit."""
    x, w = (np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in range(2))
    rounding = fb.Arm("int8", operand="int8", rounding="stochastic", hadamard=16)
    recipe = fb.Recipe((fb.Rule("w", fb.Policy("int8", "int8", drhs=rounding)),))
    histories = fb.Recipe((fb.Rule("w", fb.Policy("fp8_tensor", "fp8_tensor", delayed=fb.DelayedScaling(4))),))

    def gradients(axes: dict[str, int]) -> tuple[jax.Array, Any]:
        devices = jax.devices()[: math.prod(axes.values())]
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)

        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            if weight != P():
                w = jax.lax.all_gather(w, "data", tiled=True)
            return jax.lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "data")

        def fn(params: Params, x: jax.Array) -> jax.Array:
            return jax.shard_map(body, mesh=mesh, in_specs=(weight, P("data")), out_specs=P())(params["w"], x)

        params, rows = {"w": placed(w, mesh, weight)}, placed(x, mesh, P("data"))
        trained, state = fb.train(fn, recipe), fb.delayed_state(fn, params, rows, recipe=histories)
        seen = jax.jit(jax.grad(lambda s: fb.train(fn, histories)(params, rows, delayed=s)))(state)
        return jax.jit(jax.grad(trained))(params, rows, key=jax.random.key(0))["w"], seen.products["w"]

    (gradient, seen), (alone, _) = gradients({"data": 2, "spare": 2}), gradients({"data": 2})
    np.testing.assert_array_equal(gradient, alone)
    for found, expected in ((seen.weight, w), (seen.activation, x)):
        assert found.scale == np.abs(expected).max()


@pytest.mark.slow
def test_a_constraint_that_cuts_tiles_moves_floats():
    """Eight devices with 16 rows each of tiles of 32: the codes cannot be moved, and the product is still that of the policy."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def constrained(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        rows = NamedSharding(mesh, P("d"))
        return loss({name: jax.lax.with_sharding_constraint(w, rows) for name, w in params.items()}, x, y)

    weights, x, y = data()
    assert_same_step(*jax.device_get(jax.jit(step(constrained))(weights, x, y)))


def codes_and_scales(weights: int) -> int:
    """The bytes of mxfp8: a byte for each element, and one for each 32."""
    return weights * (WEIGHT + WEIGHT // 32)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("fsdp")])
def test_weights_are_gathered_as_codes(layout):
    """Both weights once: their codes serve the forward and the backward pass."""
    run, arguments = layouts()[layout]
    found = collective_bytes(run, *arguments)
    gathers = {dtype: size for (operation, dtype), size in found.items() if operation == "all-gather"}
    if layout != "fsdp, auto":  # where the partitioner chooses, it gathers activations' gradients too
        assert gathers == {"u8": codes_and_scales(2)}
    assert gathers["u8"] == codes_and_scales(2)
    mesh, rows = mesh_of(AxisType.Explicit), {"up": P("d"), "down": P("d")}
    in_float = jax.shard_map(fully_sharded, mesh=mesh, in_specs=(rows, P("d"), P("d")), out_specs=P())
    float_step = collective_bytes(jax.value_and_grad(in_float), *layouts()["fsdp, shard_map"][1])
    assert float_step["all-gather", "f32"] == 2 * 4 * WEIGHT, "3.9 times the bytes"


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_are_exchanged_as_codes(reduction):
    run, arguments = layouts(reduction)["fsdp, shard_map"]
    found = collective_bytes(run, *arguments)
    assert found["all-to-all", "u8"] == codes_and_scales(2)
    assert not [key for key in found if key[0] == "reduce-scatter"]
    full, arguments = layouts()["fsdp, shard_map"]
    assert collective_bytes(full, *arguments)["reduce-scatter", "f32"] == 2 * 4 * WEIGHT // DEVICES
    _, gradients = jax.device_get(jax.jit(run)(*arguments))
    assert_exchanged(gradients, reduction)


def assert_exchanged(gradients: dict[str, np.ndarray], reduction: str) -> None:
    """The gradients, up to the rounding of what the devices exchange."""
    _, expected = on_one_device()
    for name, gradient in gradients.items():
        # Each device's contribution is rounded once; with 2 mantissa bits by 1/8 of it at most, with 6 after
        # the point by 2**-6 of its block's maximum: up to there numbers above the largest code saturate.
        contributions = parts_of_gradient(name)
        error = np.abs(contributions) / 8 if reduction == "mxfp8_e5m2" else block_maximum(contributions) * 2.0**-6
        assert (np.abs(gradient - expected[name]) <= error.sum(0)).all()
        assert (gradient != expected[name]).any()


def parts_of_gradient(name: str) -> np.ndarray:
    """The gradient of each device's part of the batch, [DEVICES, WIDTH, WIDTH]."""
    weights, x, y = data()
    parts = [np.split(array, DEVICES) for array in (x, y)]
    return np.stack([jax.jit(step(loss))(weights, *part)[1][name] for part in zip(*parts, strict=True)])


def block_maximum(x: np.ndarray) -> np.ndarray:
    """The largest magnitude of each block of 32."""
    blocks = np.abs(x).reshape(*x.shape[:-1], -1, 32)
    return np.broadcast_to(blocks.max(-1, keepdims=True), blocks.shape).reshape(x.shape)


# --- several processes ---


def served(mesh: Mesh) -> dict[str, jax.Array]:
    """An int4 product by layout of its weight: output axis and contraction over the devices, and fully sharded."""
    x, w = data()[1], served_weight()
    q = fb.quantize(jnp.asarray(w), "int4_g32", axis=-2)
    results = {}
    for name, spec, batch in (("columns", P(None, "d"), P()), ("rows", P("d"), P(None, "d")), ("fsdp", P("d"), P("d"))):
        shardings = fb.shardings_of(q, mesh, spec)
        parts = jax.tree.map(lambda leaf, s: placed(np.asarray(leaf), mesh, s.spec), q, shardings)
        out = NamedSharding(mesh, P(None, "d") if name == "columns" else P("d") if name == "fsdp" else P())
        product = functools.partial(fb.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), out_sharding=out)
        results[name] = jax.jit(product)(placed(x, mesh, batch), parts)
    return results


def served_weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32)


DECODER = DecoderConfig(vocab=64, layers=2, width=64, heads=4, kv_heads=4, head_dim=16, hidden=128)
CUT = dict.fromkeys(("q", "k", "v", "gate", "up", "embed", "head"), P("d")) | dict.fromkeys(("o", "down"), P(None, "d"))


def quantized_decoder() -> dict[str, Any]:
    """The parameters of a small decoder by path, its matrices in int4."""
    random, params = np.random.default_rng(2), {}
    for path, shape in shapes(DECODER).items():
        array = jnp.asarray(random.standard_normal(shape) / 8, jnp.float32)
        params[path] = fb.quantize(array, "int4_g16", axis=-1) if len(shape) == 2 else 1 + array
    return params


@jax.jit
def two_steps(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The logits after a prompt, and after one more token."""

    def steps(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        tree, tokens = params_from_paths(params, DECODER), jnp.arange(12).reshape(2, 6)
        first, cache = prefill(tree, tokens, empty_cache(DECODER, batch=2, max_length=8), DECODER)
        return first, decode_step(tree, tokens[:, 0], cache, DECODER)[0]

    return fb.transparent(steps)(params)


def decoded(mesh: Mesh) -> dict[str, jax.Array]:
    """The logits of the decoder whose matrices are cut over the devices, along their outputs or the contraction."""
    parts = {}
    for path, whole in quantized_decoder().items():
        shardings = fb.shardings_of(whole, mesh, CUT.get(path.rsplit("/", 1)[-1]))
        parts[path] = jax.tree.map(lambda leaf, s: placed(np.asarray(leaf), mesh, s.spec), whole, shardings)
    return dict(zip(("prefill", "decode"), two_steps(parts), strict=True))


def train_and_serve(path: str) -> list[int]:
    """In every process: a step in each layout, the products and the decoder; process 0 writes what all devices have."""
    results = {}
    for layout, (run, arguments) in layouts().items():
        value, gradients = jax.jit(run)(*arguments)
        results |= {f"{layout}/{name}": array for name, array in {"loss": value, **gradients}.items()}
    for reduction in REDUCTIONS:
        run, arguments = layouts(reduction)["fsdp, shard_map"]
        _, gradients = jax.jit(run)(*arguments)
        results |= {f"{reduction}/{name}": array for name, array in gradients.items()}
    results |= {f"served/{name}": array for name, array in served(mesh_of(AxisType.Explicit)).items()}
    results |= {f"decoded/{name}": array for name, array in decoded(mesh_of(AxisType.Auto)).items()}
    whole = {name: multihost_utils.process_allgather(array, tiled=True) for name, array in results.items()}
    if jax.process_index() == 0:
        np.savez(path, **whole)
    return [jax.process_count(), jax.device_count()]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [pytest.param(2, 2, marks=pytest.mark.long), (4, 1)])
def test_processes_compute_what_one_device_does(tmp_path: Path, processes, devices):
    path = tmp_path / "results.npz"
    found = cluster.run(train_and_serve, processes, str(path), devices=devices, seconds=500)
    assert found == [[processes, DEVICES]] * processes
    with np.load(path) as results:
        for layout in LAYOUTS:
            assert_same_step(results[f"{layout}/loss"], {name: results[f"{layout}/{name}"] for name in ("up", "down")})
        for reduction in REDUCTIONS:
            assert_exchanged({name: results[f"{reduction}/{name}"] for name in ("up", "down")}, reduction)
        x, q = data()[1], fb.quantize(jnp.asarray(served_weight()), "int4_g32", axis=-2)
        w = np.asarray(fb.dequantize(q), np.float64)
        for name in ("columns", "rows", "fsdp"):
            # A sum of WIDTH float32 products: each rounding is at most 2**-24 of the sum of magnitudes.
            bound = WIDTH * 2.0**-24 * (np.abs(x) @ np.abs(w))
            assert (np.abs(results[f"served/{name}"] - x.astype(np.float64) @ w) <= bound).all()
        for name, expected in zip(("prefill", "decode"), two_steps(quantized_decoder()), strict=True):
            # Float32 sums in another order, through two layers.
            np.testing.assert_allclose(results[f"decoded/{name}"], expected, rtol=1e-4, atol=1e-4)
