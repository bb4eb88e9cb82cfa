"""A mixture of experts in int8, trained and then served.

python examples/moe.py --steps 300

Tokens are sorted by expert, and one ragged product computes all experts.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import fewbit as fb

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 32, 64, 256
POLICY = fb.Policy("int8", "int8", dlhs="int8", drhs=fb.Arm(operand="original"))
RECIPE = fb.Recipe((fb.Rule("w[io]", POLICY),), name="int8 experts, float router")


def init() -> dict[str, jax.Array]:
    """A router and the experts' stacked matrices."""
    router, wi, wo = jax.random.split(jax.random.key(0), 3)
    return {
        "router": jax.random.normal(router, (WIDTH, EXPERTS)) / 8,
        "wi": jax.random.normal(wi, (EXPERTS, WIDTH, HIDDEN)) / 6,
        "wo": jax.random.normal(wo, (EXPERTS, HIDDEN, WIDTH)) / 8,
    }


def forward(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Each token goes to its best expert, weighed by the router."""
    gate = jax.nn.softmax(x @ params["router"])
    expert = gate.argmax(-1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=EXPERTS)
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], params["wi"], sizes))
    out = jax.lax.ragged_dot(hidden, params["wo"], sizes)
    return out[jnp.argsort(order)] * gate.max(-1, keepdims=True)


def loss(run: Callable[..., jax.Array], params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The error on a target that knows two kinds of tokens."""
    return jnp.mean((run(params, x) - jnp.where(x[:, :1] > 0, jnp.roll(x, 1, -1), -x)) ** 2)


def trained(run: Callable[..., jax.Array], steps: int) -> dict[str, jax.Array]:
    """The parameters after so many steps."""
    optimizer, params = optax.adamw(3e-3), init()

    @jax.jit
    def step(params: dict, state: tuple, key: jax.Array) -> tuple[dict, tuple]:
        x = jax.random.normal(key, (TOKENS, WIDTH))
        gradient = jax.grad(lambda params: loss(run, params, x))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for i in range(steps):
        params, state = step(params, state, jax.random.key(i))
    return params


def main(steps: int) -> dict[str, float]:
    """Prints and returns the last losses: of float training, of int8 training, and of the int8 model as it is served."""
    x = jax.random.normal(jax.random.key(10**6), (TOKENS, WIDTH))
    quantized = fb.train(forward, RECIPE)
    params = trained(quantized, steps)
    losses = {"float": float(loss(forward, trained(forward, steps), x)), "int8": float(loss(quantized, params, x))}
    plan = fb.plan(forward, params, x, recipe=RECIPE)
    print(plan)
    losses["int8, served"] = float(loss(fb.transparent(forward), fb.quantize_params(params, plan), x))
    for name, value in losses.items():
        print(f"{name:12} {value:.5f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    main(parser.parse_args().steps)
