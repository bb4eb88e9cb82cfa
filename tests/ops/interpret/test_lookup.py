"""Look-ups: one rule says which axis they index and along which the rows lie, in plans, training and serving."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops.interpret.parameter_uses import parameter_uses
from fewbit.ops.interpret.traced import Traced

RNG = np.random.default_rng(0)
TABLE, STACK = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((24, 64), (3, 24, 64)))
IDS = jnp.array([5, 0, 23])
U = jnp.asarray(RNG.standard_normal((64, 2)), jnp.float32)


def scanned(e, ids):
    return jax.lax.scan(lambda c, t: (c + e[t] @ U, e[t]), jnp.zeros(2), ids)


def iota_embedding(e, ids):
    """As MaxText embeds where `use_iota_embed` is set."""
    return jnp.dot(jnp.array(ids[..., None] == jax.lax.iota(jnp.int32, e.shape[0])[None], jnp.float32), e)


ROWS = {  # the table, the look-up, and the axis along which the elements of a row lie
    "ids": (TABLE, lambda e, ids: e[ids], -1),
    "take": (TABLE, lambda e, ids: jnp.take(e, jnp.stack([ids, ids]), axis=0), -1),
    "take along the last axis": (TABLE, lambda e, ids: jnp.take(e, ids, axis=1), -2),
    "columns": (TABLE, lambda e, ids: e[:, ids], -2),
    "one token": (TABLE, lambda e, ids: e[ids[0]], -1),
    "one column": (TABLE, lambda e, ids: e[:, ids[0]], -2),
    "vmap over tokens": (TABLE, lambda e, ids: jax.vmap(lambda t: e[t])(ids), -1),
    "vmap over batch and tokens": (TABLE, lambda e, ids: jax.vmap(jax.vmap(lambda t: e[t]))(jnp.stack([ids, ids])), -1),
    "vmap of take": (TABLE, lambda e, ids: jax.vmap(lambda t: jnp.take(e, t, axis=0))(ids), -1),
    "scan over tokens": (TABLE, scanned, -1),
    "a table each": (STACK, lambda e, ids: jax.vmap(lambda e, t: e[t])(e, ids), -1),
    "a table each, many tokens": (STACK, lambda e, ids: jax.vmap(lambda e: e[ids])(e), -1),
    "two axes": (STACK, lambda e, ids: e[ids % 3, ids], -1),
    "two axes apart": (STACK, lambda e, ids: e[ids % 3, :, ids], -2),
    "a row of heads": (STACK, lambda e, ids: e[ids % 3], -1),
    "one-hot": (TABLE, lambda e, ids: jax.nn.one_hot(ids, 24) @ e, -1),
    "one-hot from the left": (TABLE, lambda e, ids: e.T @ jax.nn.one_hot(ids, 24).T, -1),
    "iota": (TABLE, iota_embedding, -1),
    "cast and transposed": (TABLE, lambda e, ids: e.T.astype(jnp.bfloat16)[:, ids], -1),
}


def recipe(scheme, **kwargs):
    return fb.Recipe((fb.Rule("e", scheme, **kwargs),))


def planned(fn, table, scheme="int8"):
    return fb.plan(lambda p, ids: fn(p["e"], ids), {"e": table}, IDS, recipe=recipe(scheme))["e"]


@pytest.mark.finding(5)
@pytest.mark.parametrize("name", ROWS)
def test_tiles_are_planned_along_the_rows_that_are_looked_up(name):
    table, fn, axis = ROWS[name]
    row = planned(fn, table)
    assert (row.ops, row.axis) == (("take",), (axis,))


LOOK_UPS = [name for name in ROWS if "hot" not in name and name != "iota"]
QUICK = ("vmap over tokens", "scan over tokens")
SLOW = [
    (name, scheme) for scheme in ("int8", "nvfp4", "q4_1", "nf4_dq") for name in LOOK_UPS[:: 1 if scheme == "int8" else 3]
]


@pytest.mark.finding(5)
@pytest.mark.parametrize(
    ("name", "scheme"), [*((name, "nf4") for name in QUICK), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_rows_are_served_and_trained_as_those_of_the_decoded_table(name, scheme):
    table, fn, _ = ROWS[name]
    params = {"e": table}

    def look_up(p, ids):
        return fn(p["e"], ids)

    q = fb.quantize_params(params, fb.plan(look_up, params, IDS, recipe=recipe(scheme)))
    want = look_up({"e": fb.dequantize(q["e"])}, IDS)
    served, trained = fb.transparent(look_up)(q, IDS), fb.train(look_up, recipe(scheme))(params, IDS)
    for got in (served, trained):
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("mode", ["fill", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("clip", "wrap"))])
def test_indices_out_of_bounds_are_as_in_jax(mode):
    q, ids = fb.quantize(STACK, "int8"), jnp.array([-1, 0, 24])

    def look_up(e, ids):
        one = jnp.take(e, ids, axis=1, mode=mode)
        return one, jax.vmap(lambda e, t: jnp.take(e, t, axis=0, mode=mode))(e, ids)

    got, want = fb.transparent(look_up)(q, ids), look_up(fb.dequantize(q), ids)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.finding(5)
@pytest.mark.parametrize("name", ["vmap over tokens", pytest.param("scan over tokens", marks=pytest.mark.slow)])
def test_rows_of_very_different_norms_share_no_scale(name):
    norms = np.exp(2 * RNG.standard_normal((24, 1))).astype(np.float32)
    table, fn = TABLE * norms, ROWS[name][1]
    q = fb.quantize_params({"e": table}, fb.plan(lambda p, i: fn(p["e"], i), {"e": table}, IDS, recipe=recipe("q8_0")))
    worst = jnp.max(jnp.linalg.norm(fb.dequantize(q["e"]) - table, axis=1) / jnp.linalg.norm(table, axis=1))
    # An error of at most half a step, 1 / 127 of the largest of 32; a row's norm is at least the largest of each tile.
    assert worst < 0.5 / 127 * 32**0.5


@pytest.mark.parametrize("name", ["one token", "scan over tokens", "one-hot"])
def test_indices_that_are_keywords_or_closed_over_are_inputs(name):
    table, fn, _ = ROWS[name]

    def uses(fn, *inputs, **keywords):
        found = parameter_uses(Traced.of(fn, (table, *inputs), keywords), table).parameters[""]
        return {(use.op, use.axes, use.tiled) for use in found}

    assert uses(fn, IDS) == uses(fn, ids=IDS) == uses(lambda e: fn(e, IDS)) == {("take", (-2,), (-1,))}


# --- what is no look-up ---


def test_an_element_of_a_stack_that_a_loop_counts_is_followed_to_its_product():
    params = {"w": STACK[:, :16, :16], "gain": STACK[:, 0, :16], "head": STACK[:, 1, :16]}

    def layers(p, x):
        def step(i, x):
            w, gain, head = jax.tree.map(lambda a: a[i], (p["w"], p["gain"], p["head"]))
            return jnp.tanh(x @ w) * gain[None] + jnp.outer(x @ head, gain)

        return jax.lax.fori_loop(0, 3, step, x)

    plan = fb.plan(layers, params, TABLE[:4, :16], recipe=fb.Recipe((fb.Rule(".*", "int8", optional=True),)))
    assert (plan["w"].ops, plan["w"].axis, plan["w"].stacked) == (("dot_general",), (-2,), (-3,))
    # A layer's vectors are no rows of a table: gains and biases stay as they are.
    assert plan["gain"].policy is None and "take" not in plan["gain"].ops
    assert plan["head"].policy is None and plan["head"].ops == ("dynamic_slice",)


def test_layers_of_an_ensemble_are_followed_through_the_gather_that_vmap_makes():
    params = jnp.stack([STACK[:, :16, :16]] * 2, 1)  # [layers, members, 16, 16]

    def net(w, x):
        return jax.vmap(lambda w: jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w[i]), x), in_axes=1)(w)

    traced = Traced.of(net, (params, TABLE[:4, :16]), {})
    (use,) = parameter_uses(traced, params).parameters[""]
    assert (use.op, use.axes, use.stacked, use.batch) == ("dot_general", (-2,), (-4,), (-3,))


def test_single_elements_that_are_looked_up_leave_no_axis_for_tiles():
    with pytest.raises(fb.QuantError, match=r"changes nothing: it matches only e \(look-ups take single elements of it\)"):
        planned(lambda e, ids: e[ids, ids], TABLE)
    q = fb.quantize(TABLE, "nf4")
    got = fb.transparent(lambda e: (e[IDS, IDS], jnp.take_along_axis(e, IDS[None], axis=1)))(q)
    want = fb.dequantize(q)[IDS, IDS], jnp.take_along_axis(fb.dequantize(q), IDS[None], axis=1)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("scheme", ["int8", "nf4", "ternary", "nvfp4"])
def test_a_table_of_one_row_has_that_row_for_every_index(scheme):
    ids = jnp.zeros((2, 3), jnp.int32)

    def looked_up(e):
        return e[ids], jnp.take(e, ids, axis=0), jax.vmap(lambda i: e[i])(ids[0]), e.at[ids].get(mode="clip")

    q = fb.quantize(TABLE[:1], scheme)
    got, want = fb.transparent(looked_up)(q), looked_up(fb.dequantize(q))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4", "ternary", "mxfp4"])
def test_a_packed_axis_of_one_element_is_kept(scheme):
    q, ids = fb.quantize(STACK[:, :1], scheme, axis=1), jnp.array([1, 2])
    got = fb.transparent(lambda e: e[ids])(q)
    np.testing.assert_array_equal(got, fb.dequantize(q)[ids])


def test_a_comparison_with_numbers_that_are_no_iota_is_no_one_hot():
    mask = planned(lambda e, ids: (ids[:, None] * jnp.ones((1, 24), jnp.int32) == 5).astype(jnp.float32) @ e, TABLE)
    assert (mask.ops, mask.axis) == (("dot_general",), (-2,))


# --- tables that are weights, too ---


@pytest.mark.finding(5)
def test_a_tied_table_has_tiles_along_the_rows_that_its_product_contracts():
    assert planned(lambda e, ids: e[ids] @ e.T, TABLE).axis == (-1,)
    assert planned(lambda e, ids: jax.nn.one_hot(ids, 24) @ e @ e.T, TABLE).axis == (-1,)


@pytest.mark.finding(5)
def test_a_table_whose_product_contracts_the_other_axis_needs_a_rule_with_an_axis():
    def mixed(p, ids):
        return p["e"][ids] + jnp.ones((3, 24)) @ p["e"]

    for ask in (fb.plan, fb.delayed_state):
        with pytest.raises(
            fb.QuantError, match=r"e: its products and look-ups want tiles along different axes \(take over \(-1,\)"
        ):
            ask(mixed, {"e": TABLE}, IDS, recipe=recipe("int8"))
    chosen = recipe("int8", axis=-1)
    q = fb.quantize_params({"e": TABLE}, fb.plan(mixed, {"e": TABLE}, IDS, recipe=chosen))
    np.testing.assert_array_equal(fb.transparent(mixed)(q, IDS), fb.train(mixed, chosen)({"e": TABLE}, IDS))
