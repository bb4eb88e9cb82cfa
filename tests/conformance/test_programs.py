"""Random programs on quantized parameters compute what the same programs compute on decoded ones.

A program is a few steps, each a piece of model code in wrappers (jit, checkpoint, vmap, an inner gradient ...), on one tree of
parameters that it may cast or transpose first. A seed names it. A failure prints it.
"""

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fewbit as fb
from fewbit.recipe import Role

SCHEMES = ("int8", "nf4", "nvfp4", "q4_1", "int3_g32", "nf4_dq", "mxfp8", "uint8", "int4_g32", "fp8_tensor")
QUICK, SLOW, LONG = range(2), range(2, 6), range(6, 300)
B, D = 4, 32


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])))


PARAMS = {
    "a": normal(0, D, D),
    "b": normal(1, D, D),
    "uneven": normal(2, 36, D),  # four shards of 9 rows
    "stack": normal(3, 3, D, D),
    "table": 4 * normal(4, 24, D),
    "grouped": normal(5, 8, 2, 4),
    "depthwise": normal(6, 8, 1, 4),
}
X = normal(7, B, D) * 4


def mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])


# --- pieces: functions of the parameters and an activation [B, D], which give another one ---


@jax.custom_vjp
def recomputing(x, w):
    return jnp.sin(x @ w.T)


def _recomputed(saved, g):
    x, w = saved
    slope = g * jnp.cos(x @ w.T)
    return slope @ w, slope.T @ x


recomputing.defvjp(lambda x, w: (recomputing(x, w), (x, w)), _recomputed)


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w.T


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0] @ primals[1].T + primals[0] @ tangents[1].T))


def heads(p, x):
    return jnp.einsum("bd,hkd->bhk", x, p["a"].reshape(4, 8, D)).reshape(B, D)


def halves(p, x):
    return jnp.concatenate([x @ p["a"][:16].T, x @ p["a"][16:].T], 1)


def scanned_rows(p, x):
    return lax.scan(lambda c, i: (c + jnp.take(p["table"], i[None], axis=0), None), x, jnp.array([3, 0, 23]))[0]


def scanned_product_of_rows(p, x):
    return lax.scan(lambda c, i: (jnp.tanh(c + (p["table"][i] @ p["a"].T)[None]), None), x, jnp.array([3, 0]))[0]


def layers(p, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w.T), None), x, p["stack"])[0]


def checkpointed_layers(p, x):
    return lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w.T), None)), x, p["stack"])[0]


def while_loop(p, x):
    return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["a"].T)), (0, x))[1]


def chosen(p, x):
    return lax.cond(x.sum() > 0, lambda w: x @ w.T, lambda w: x @ w, p["a"])


def chosen_weight(p, x):
    return x @ lax.cond(x.sum() > 0, lambda: p["a"], lambda: p["b"]).T


def switched(p, x):
    return lax.switch(jnp.argmax(x[0]) % 3, [lambda w: x, lambda w: x @ w.T, lambda w: -x], p["b"])


def convolved(name, groups):
    def piece(p, x):
        images = x.reshape(B, 8, 4)
        return lax.conv_general_dilated(images, p[name], (1,), "SAME", feature_group_count=groups).reshape(B, D)

    return piece


def mapped_rows(p, x):
    fn = jax.shard_map(lambda x, w: x @ w.T, mesh=mesh(AxisType.Auto), in_specs=(P(), P("d")), out_specs=P(None, "d"))
    return fn(x, p["uneven"])[:, :D]


def mapped_batch(p, x):
    return jax.shard_map(lambda x, w: x @ w.T, mesh=mesh(AxisType.Auto), in_specs=(P("d"), P()), out_specs=P("d"))(x, p["b"])


PIECES = {
    "product": lambda p, x: x @ p["a"].T,
    "left operand": lambda p, x: (p["b"] @ x.T).T,
    "other axis": lambda p, x: x @ p["a"],
    "heads": heads,
    "slices": halves,
    "concatenated": lambda p, x: (x @ jnp.concatenate([p["a"], p["b"]]).T)[:, 16:48],
    "flipped": lambda p, x: x @ jnp.flip(p["b"], 1).T,
    "barrier": lambda p, x: x @ lax.optimization_barrier(p["a"]).T,
    "stop_gradient": lambda p, x: x @ lax.stop_gradient(p["b"]).T,
    "look-up": lambda p, x: x + p["table"][jnp.array([3, 0, 23, 3])],
    "look-up by data": lambda p, x: x + jnp.take(p["table"], jnp.argmax(x, 1) % 24, axis=0),
    "vmapped look-up": lambda p, x: x + jax.vmap(lambda i: p["table"][i])(jnp.array([1, 22, 5, 7])),
    "scanned look-up": scanned_rows,
    "scanned look-up, product": scanned_product_of_rows,
    "layers": layers,
    "checkpointed layers": checkpointed_layers,
    "fori": lambda p, x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ p["stack"][i].T), x),
    "vmapped layers": lambda p, x: jax.vmap(lambda w: x @ w.T)(p["stack"]).sum(0),
    "while": while_loop,
    "cond": chosen,
    "cond of weights": chosen_weight,
    "switch": switched,
    "nested jit": lambda p, x: jax.jit(lambda p, x: jax.jit(lambda w, x: x @ w.T)(p["a"], x) + x)(p, x),
    "custom_vjp": lambda p, x: recomputing(x, p["a"]),
    "custom_jvp": lambda p, x: with_jvp(x, p["b"]),
    "checkpointed einsum": lambda p, x: (
        x * jax.checkpoint(lambda w, x: jnp.einsum("xb,ab,xa->x", x, w, x))(p["a"], x)[:, None]
    ),
    "grouped convolution": convolved("grouped", 4),
    "depthwise convolution": convolved("depthwise", 8),
    "shard_map of rows": mapped_rows,
    "shard_map of the batch": mapped_batch,
}
ONLY_FORWARD = ("while",)
# JAX has no forward mode for a custom_vjp. The branches of "cond" keep a weight and its transpose for the backward pass; JAX puts
# both in one output, of one form.
REFUSED = {"cond": ("grad",), "custom_vjp": ("jvp",)}

# On an explicit mesh the activation is sharded by rows, and JAX asks where what is looked up goes.
ON_MESH = {
    "product": PIECES["product"],
    "heads": heads,
    "layers": layers,
    "checkpointed layers": checkpointed_layers,
    "nested jit": PIECES["nested jit"],
    "look-up": lambda p, x: x + p["table"].at[jnp.array([3, 0, 23, 3])].get(out_sharding=P("d")),
    "resharded": lambda p, x: x @ jax.reshard(p["b"], P()).T,
}


# --- wrappers ---


def named(piece):
    def run(p, x):
        with jax.named_scope("layer"):
            return piece(p, x)

    return run


WRAPPERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "named": named,
    "vmap": lambda piece: lambda p, x: jax.vmap(lambda s: piece(p, s * x))(jnp.array([1.0, 0.5])).sum(0),
    "scan": lambda piece: lambda p, x: lax.scan(lambda c, _: (jnp.tanh(piece(p, c)), None), x, None, length=2)[0],
    "grad": lambda piece: lambda p, x: jax.grad(lambda x: (piece(p, x) ** 2).sum())(x),
    "jvp": lambda piece: lambda p, x: jax.jvp(lambda x: piece(p, x), (x,), (x,))[1],
}
BEFORE = {
    "as they are": lambda p: p,
    "cast": lambda p: jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), p),
    "transposed": lambda p: jax.tree.map(lambda w: w.swapaxes(-1, -2), jax.tree.map(lambda w: w.swapaxes(-1, -2), p)),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        scheme: of every parameter.
        before: what happens to the tree of parameters first.
        steps: for each the names of its wrappers, the outermost first, and of its piece.
        is_on_mesh: whether it runs on an explicit mesh.
    """

    scheme: str
    before: str
    steps: tuple[tuple[str, ...], ...]
    is_on_mesh: bool

    @classmethod
    def of(cls, seed: int) -> "Program":
        """The program of a seed."""
        draw = random.Random(seed)
        is_on_mesh = draw.random() < 0.15
        pieces = ON_MESH if is_on_mesh else PIECES

        def step() -> tuple[str, ...]:
            piece = draw.choice(list(pieces))
            refused = ("grad", "vmap") if is_on_mesh or piece in ONLY_FORWARD else REFUSED.get(piece, ())
            wrappers = [w for w in WRAPPERS if w not in refused]
            return (*draw.choices(wrappers, k=draw.choice((0, 1, 1, 2))), piece)

        steps = tuple(step() for _ in range(draw.choice((1, 2, 3))))
        return cls(draw.choice(SCHEMES), draw.choice(list(BEFORE)), steps, is_on_mesh)

    def __str__(self) -> str:
        where = "explicit mesh, " if self.is_on_mesh else ""
        return f"{where}{self.scheme}, {self.before}: " + "; ".join(" of ".join(step) for step in self.steps)

    def __call__(self, p: Any, x: jax.Array) -> jax.Array:
        p = BEFORE[self.before](p)
        for *wrappers, piece in self.steps:
            run = (ON_MESH if self.is_on_mesh else PIECES)[piece]
            for wrapper in reversed(wrappers):
                run = WRAPPERS[wrapper](run)
            x = jnp.tanh(run(p, x))
        return x

    @property
    def has_gradient(self) -> bool:
        return not any(piece in ONLY_FORWARD for *_, piece in self.steps)

    @property
    def is_trained_as_served(self) -> bool:
        """Whether training may be compared: it reads as floats what it says it does, and quantizes what a cast leaves."""
        return self.before != "cast"

    @property
    def tolerance(self) -> float:
        """Sums of 32 float32 products below 4 in another order, a few times over; a cast rounds to 8 bits."""
        return 2.0**-4 if self.before == "cast" else 2e-4


def value_and_gradient(program, run):
    def both(p, x):
        value = run(p, x)
        return (value, jax.grad(lambda x: (run(p, x) ** 2).sum())(x)) if program.has_gradient else (value,)

    return both


def check(program: Program, *, is_eager: bool = False) -> None:
    """Fails where the program, transformed, computes something else; pytest shows what is printed."""
    print(program)  # noqa: T201
    every = tuple(
        map(str, Role)
    )  # parameters that reach a product through a choice or a concatenation have no role of a weight
    recipe = fb.Recipe((fb.Rule(".*", fb.Policy(program.scheme), axis=(-1,), roles=every),))
    x, params = X, PARAMS
    if program.is_on_mesh:
        place = functools.partial(NamedSharding, mesh(AxisType.Explicit))
        x, params = jax.device_put((X, PARAMS), (place(P("d")), place(P())))
    with jax.set_mesh(mesh(AxisType.Explicit)) if program.is_on_mesh else jax.named_scope("program"):
        served = fb.quantize_params(params, fb.plan(program, params, x, recipe=recipe))
        decoded = jax.tree.map(lambda w: fb.dequantize(w) if fb.is_qarray(w) else w, served, is_leaf=fb.is_qarray)
        run = fb.transparent(program)
        expected = jax.jit(value_and_gradient(program, program))(decoded, x)
        found = jax.jit(value_and_gradient(program, run))(served, x)
        read_as_floats: list[Any] = []
        training = jax.jit(fb.train(program, recipe, report=read_as_floats.append))
        trained = training(params, x)
        eager = run(served, x) if is_eager else found[0]
    pairs = {
        "transparent": (found, expected),
        "eager and jitted": (eager, found[0]),
    }
    if program.is_trained_as_served and not read_as_floats:
        pairs["trained and served"] = (trained, found[0])
    for what, pair in pairs.items():
        for got, want in zip(*map(jax.tree.leaves, jax.device_get(pair)), strict=True):
            atol = program.tolerance * max(1.0, np.abs(want).max())
            np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=f"{what}: {program}")


def cases(seeds):
    return pytest.mark.parametrize("seed", seeds, ids=lambda seed: f"{seed}-{Program.of(seed).scheme}")


@pytest.mark.slow_after(1)
@cases(QUICK)
def test_a_program_computes_what_it_does_on_decoded_parameters(seed):
    check(Program.of(seed), is_eager=seed == 0)


@pytest.mark.slow
@cases(SLOW)
def test_more_programs(seed):
    check(Program.of(seed), is_eager=seed % 5 == 0)


@pytest.mark.long
@cases(LONG)
def test_many_programs(seed):
    check(Program.of(seed), is_eager=seed % 5 == 0)


FOUND = {
    "an explicit mesh, planned without shardings": Program("int8", "as they are", (("scan", "look-up"),), True),
    "a weight that shard_map keeps for the backward pass": Program(
        "int4_g32", "as they are", (("grad", "shard_map of rows"),), False
    ),
    "the gradient of a cond fills the residuals of the other branches": Program(
        "int3_g32", "as they are", (("grad", "switch"),), False
    ),
    "a transposed array of quantized scales, cut by shard_map": pytest.param(
        Program("nf4_dq", "transposed", (("shard_map of rows",),), False), marks=pytest.mark.slow
    ),
    "training read the parameter as a float": Program("nf4", "as they are", (("checkpoint", "stop_gradient"),), False),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_once_failed(program):
    check(program)


def test_every_piece_and_wrapper_is_drawn():
    programs = [Program.of(seed) for seed in range(LONG.stop)]
    drawn = {name for program in programs for step in program.steps for name in step}
    assert drawn == {*PIECES, *ON_MESH, *WRAPPERS}
    assert {program.before for program in programs} == set(BEFORE)
    assert {program.scheme for program in programs} == set(SCHEMES)
