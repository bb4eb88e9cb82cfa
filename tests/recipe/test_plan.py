"""Recipes resolved against models: what is planned is what is done, and nothing goes unsaid."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / 8))


@pytest.fixture(scope="module")
def params():
    return {
        "embed": normal(50, 64),
        "layers": {"w": normal(3, 64, 64, seed=1), "gain": jnp.ones((3, 64))},
        "heads": normal(64, 4, 16, seed=2),
        "out": normal(4, 16, 64, seed=3),
        "steps": jnp.arange(4),
    }


def net(p, ids, entering=lambda x, axis: x):
    """A network of several kinds of product; `entering` is done to each activation that meets a weight, contracted along
    `axis`. The embedding is no such weight: recipes for activations leave it alone."""
    x = p["embed"][ids]
    x, _ = jax.lax.scan(lambda c, p: (jnp.tanh(entering(c, -1) @ p["w"].T) * p["gain"][None], None), x, p["layers"])
    x = jnp.einsum("bd,dhk->bhk", entering(x, -1), p["heads"])
    x = jnp.einsum("bhk,hkd->bd", entering(x, (-2, -1)), p["out"])
    return x @ p["embed"].T


IDS = jnp.array([1, 2])


SEARCHED = [pytest.param(name, marks=pytest.mark.slow) for name in ("nvfp4", "mxfp4")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "int8", *SEARCHED, "w8a8"])
def test_a_plan_says_what_quantize_params_does(params, name):
    plan = fb.plan(net, params, IDS, recipe=name)
    q = fb.quantize_params(params, plan)
    leaves = jax.tree.leaves(q, is_leaf=fb.is_qarray)
    assert [row.policy is not None for row in plan] == [fb.is_qarray(leaf) for leaf in leaves]
    assert [row.bytes_after for row in plan] == [leaf.nbytes for leaf in leaves]
    assert plan.bytes_after == sum(leaf.nbytes for leaf in leaves)
    decoded = jax.tree.map(lambda x: fb.dequantize(x) if fb.is_qarray(x) else x, q, is_leaf=fb.is_qarray)
    activation = plan["layers/w"].policy.activation
    expected = net(decoded, IDS, lambda x, axis: x if activation is None else fb.fake_quant(x, activation, axis=axis))
    # Sums in another order may take an activation over a tie: a step, 1 / 127.5 of the largest, so at most of the norm.
    tolerance = 1e-5 if activation is None else 1 / 127.5
    assert jnp.linalg.norm(fb.transparent(net)(q, IDS) - expected) <= tolerance * jnp.linalg.norm(expected)


def test_axes_come_from_the_products(params):
    plan = fb.plan(net, params, IDS, recipe="int4_g16")
    assert {row.path: row.axis for row in plan} == {
        "embed": (-1,),
        "heads": (-3,),
        "layers/gain": (),
        "layers/w": (-1,),
        "out": (-3, -2),
        "steps": (),
    }
    assert plan["layers/w"].stacked == (-3,)
    assert plan["layers/gain"].reason == "no product contracts it; used by mul"
    assert plan["steps"].reason == "nothing uses it"
    assert plan["embed"].policy.weight.name == "q8_0"


@pytest.mark.slow
def test_stacked_layers_are_quantized_one_by_one(params):
    q = fb.quantize_params(params, fb.plan(net, params, IDS, recipe="nvfp4"))["layers"]["w"]
    assert q.tensor_scale.shape == (3, 1, 1)
    for i in range(3):
        alone = fb.quantize(params["layers"]["w"][i], "nvfp4")
        assert jnp.array_equal(fb.dequantize(q[i]), fb.dequantize(alone))


def test_first_matching_rule_wins_and_none_leaves(params):
    recipe = fb.Recipe((fb.Rule("embed", None), fb.Rule("layers/.*", "nf4"), fb.Rule(".*", "int8")))
    plan = fb.plan(net, params, IDS, recipe=recipe)
    assert plan["embed"].policy is None
    assert plan["embed"].reason == "rule 'embed' keeps it unquantized"
    assert plan["layers/w"].policy.weight.name == "nf4"
    assert plan["layers/gain"].reason == "no product contracts it; used by mul"
    assert plan["steps"].reason == "nothing uses it"
    assert plan["heads"].policy.weight.name == "int8"


def test_a_rule_that_matches_nothing_raises(params):
    recipe = fb.Recipe((fb.Rule("layer/.*", "nf4"), fb.Rule(".*", "int8")), "mine")
    with pytest.raises(
        fb.QuantError, match=r"rule 1 of recipe 'mine' \(layer/\.\* -> nf4\) matches nothing; the parameters are embed"
    ):
        fb.plan(net, params, IDS, recipe=recipe)
    optional = fb.Recipe((fb.Rule("layer/.*", "nf4", optional=True), fb.Rule(".*", "int8")))
    assert fb.plan(net, params, IDS, recipe=optional)["heads"].policy.weight.name == "int8"


def test_a_rule_after_one_that_takes_everything_is_named_unless_the_first_is_optional():
    """Presets treat tables first, optionally: a model that has nothing but a tied table is none they could not take."""
    tied = {"table": normal(32, 16)}

    def lookup(p, ids):
        return p["table"][ids] @ p["table"].T

    assert fb.plan(lookup, tied, IDS, recipe="int8")["table"].policy.weight.name == "q8_0"
    assert fb.plan(lookup, tied, IDS, recipe="w8a8")["table"].reason == "rule '.*' keeps it unquantized"
    assert jax.eval_shape(fb.train(lookup, "mxfp8"), tied, IDS).shape == (2, 32)
    with pytest.raises(
        fb.QuantError, match=r"rule 2 .* has no effect: earlier rules match all of its parameters: table, by rule 1 \(\.\*"
    ):
        fb.plan(lookup, tied, IDS, recipe=fb.Recipe((fb.Rule(".*", "int8"), fb.Rule("table", None))))


def test_products_that_disagree_need_a_rule_with_an_axis():
    square = {"w": normal(32, 32)}

    def both(p, x):
        return x @ p["w"] @ p["w"].T

    with pytest.raises(fb.QuantError, match=r"w: its products contract different axes .*give its rule an axis"):
        fb.plan(both, square, normal(2, 32), recipe="int8")
    recipe = fb.Recipe((fb.Rule("w", "int8", axis=(-2,)),))
    assert fb.plan(both, square, normal(2, 32), recipe=recipe)["w"].axis == (-2,)


@pytest.mark.finding(1)
def test_without_code_a_parameter_of_unknown_role_is_quantized_by_a_rule_with_its_axis_only(params):
    with pytest.raises(
        fb.QuantError,
        match=r"rule 2 of recipe 'nf4' .* quantizes nothing: its path matches embed, .*, steps \(of unknown role\)\. "
        r"Where a role is unknown, write a rule .*, or, for code in jax, pass the model's function to fb\.plan",
    ):
        fb.plan(None, params, recipe="nf4")
    with pytest.raises(fb.QuantError, match=r"Give the rule the contracted axis, as in axis=-1"):
        fb.quantize_params({"w": params["heads"]}, fb.Recipe((fb.Rule("w", "nf4"),)))
    plan = fb.plan(None, params, recipe=fb.Recipe((fb.Rule("out", "nf4", axis=-1),)))
    assert (str(plan["out"].policy), plan["out"].axis) == ("nf4", (-1,))
    assert plan["heads"].reason == "role unknown, so it stays float; a rule with its path and an axis quantizes it"
    assert plan.unknown == ("embed", "heads", "layers/gain", "layers/w")


@pytest.mark.finding(1)
def test_roles_that_are_known_without_code():
    params = {"table": normal(50, 64), "w": normal(64, 8), "gate": normal(64, 4)}
    roles = {"table": fb.TensorRole("embedding", -1), "w": fb.TensorRole("matmul", -2), "gate": fb.TensorRole("router")}
    plan = fb.plan(None, params, recipe="nf4", roles=roles)
    assert [(str(row.policy), row.axis) for row in plan] == [("None", ()), ("q8_0", (-1,)), ("nf4", (-2,))]
    assert plan["gate"].reason == "a router or gate of experts; no rule names the role router"
    by_role = fb.Rule("gate", "int8", roles="router")
    with pytest.raises(
        fb.QuantError, match=r"changes nothing: it matches only gate \(nothing says which axis is contracted; give"
    ):
        fb.plan(None, params, recipe=fb.Recipe((by_role,)), roles=roles)
    with_axis = fb.Recipe((dataclasses.replace(by_role, axis=-2),))
    assert fb.plan(None, params, recipe=with_axis, roles=roles)["gate"].axis == (-2,)
    with pytest.raises(fb.QuantError, match="roles has 'tabel', which is no parameter; did you mean 'table'"):
        fb.plan(None, params, recipe="nf4", roles={"tabel": roles["table"]})
    with pytest.raises(fb.QuantError, match=r"an expert stack of axis \(-3,\) has 2 axes only"):
        fb.plan(None, params, recipe="nf4", roles={"w": fb.TensorRole("experts", -3)})


def test_a_plan_says_where_quantizing_saves_nothing():
    wide = jax.ShapeDtypeStruct((1, 64), jnp.float32)  # one input: each number is a tile
    plan = fb.plan(lambda p, x: x @ p["w"], {"w": wide}, normal(2, 1), recipe="int4_g16")
    assert (plan["w"].bytes_before, plan["w"].bytes_after) == (256, 64 + 256)
    assert plan.bits_per_weight == 8 * 320 / 64
    assert plan["w"].reason == "takes more bytes than before: few elements share a scale"


def test_quantized_leaves_are_left_as_they_are(params):
    once = fb.quantize_params(params, fb.plan(net, params, IDS, recipe="nf4"))
    plan = fb.plan(net, once, IDS, recipe="int8")
    assert plan["heads"].reason.startswith("quantized already, as nf4")
    assert plan.bytes_before == plan.bytes_after


def test_plans_are_json_both_ways_and_can_be_edited(params, tmp_path):
    plan = fb.plan(net, params, IDS, recipe="w8a8")
    plan.save(tmp_path / "plan.json")
    assert fb.Plan.load(tmp_path / "plan.json") == plan
    form = json.loads((tmp_path / "plan.json").read_text())
    for row in form["rows"]:
        if row["path"] == "heads":
            row["policy"] = {"weight": "nf4"}
    (tmp_path / "plan.json").write_text(json.dumps(form))
    q = fb.quantize_params(params, fb.Plan.load(tmp_path / "plan.json"))
    assert q["heads"].scheme.format.name == "nf4"
    assert str(plan).splitlines()[-1].startswith("3 of 6 parameters quantized")


def test_parameters_that_are_not_finite_are_named_and_counted(params):
    bad = {**params, "heads": params["heads"].at[0, 0, :2].set(jnp.nan).at[1, 1, 1].set(jnp.inf)}
    plan = fb.plan(net, params, IDS, recipe="nf4")
    with pytest.raises(fb.QuantError, match=r"NaN or infinite values in heads \(3 of 4,096\)"):
        fb.quantize_params(bad, plan)


def test_a_plan_for_another_tree_is_refused(params):
    plan = fb.plan(net, params, IDS, recipe="nf4")
    with pytest.raises(fb.QuantError, match=r"it has no row for \[\], and the tree does not have \['steps'\]"):
        fb.quantize_params({k: v for k, v in params.items() if k != "steps"}, plan)
    with pytest.raises(fb.QuantError, match=r"heads has shape \(64, 4, 8\), but the plan was made for \(64, 4, 16\)"):
        fb.quantize_params({**params, "heads": params["heads"][..., :8]}, plan)


def test_plan_messages(params, tmp_path):
    plan = fb.plan(net, params, IDS, recipe="nf4")
    with pytest.raises(fb.QuantError, match="did you mean 'heads'"):
        plan["head"]
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(fb.QuantError, match=r"is not valid JSON|does not exist|expected object"):
        fb.Plan.load(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(fb.QuantError, match="expected object"):
        fb.Plan.load(tmp_path / "p.json")
    form = plan.to_json()
    form["rows"][0]["axes"] = [1]
    with pytest.raises(fb.QuantError, match="no field 'axes'; did you mean 'axis'"):
        fb.Plan.from_json(form)


def attention(p, x):
    q, k, v = (x @ p[name] for name in ("q", "k", "v"))
    with jax.named_scope("attn"):
        return jax.nn.softmax(q @ k.T) @ v


ATTENTION = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "qkv"}
TOKENS = jax.ShapeDtypeStruct((3, 64), jnp.float32)


def test_products_without_a_parameter_stand_in_the_plan():
    plan = fb.plan(attention, ATTENTION, TOKENS, recipe="int8")
    assert [(row.name, row.op, row.shapes, row.policy, row.rule) for row in plan.products] == [
        ("attn", "dot_general", ((3, 64), (64, 3)), None, ""),
        ("attn#2", "dot_general", ((3, 3), (3, 64)), None, ""),
    ]
    assert "test_plan.py" in plan.products[0].site
    assert str(plan).splitlines()[-2:] == ["product attn  3x64 . 64x3  float", "product attn#2  3x3 . 3x64  float"]
    assert fb.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert fb.plan(None, ATTENTION, recipe=fb.Recipe((fb.Rule(".*", "int8", axis=-1),))).products == ()


def test_rules_for_products(tmp_path):
    rules = (fb.Rule(".*", "int8"),)
    recipe = fb.Recipe(rules, products=(fb.Rule("attn", None), fb.Rule("attn.*", fb.Policy("fp8", "fp8"))))
    plan = fb.plan(attention, ATTENTION, TOKENS, recipe=recipe)
    assert [(str(row.policy), row.rule) for row in plan.products] == [("None", "attn"), ("fp8 x fp8", "attn.*")]
    plan.save(tmp_path / "plan.json")
    assert fb.Plan.load(tmp_path / "plan.json") == plan
    params = {name: normal(64, 64) for name in "qkv"}
    with pytest.raises(fb.UnsupportedError, match=r"quantizes products without a parameter \(attn#2\)"):
        fb.quantize_params(params, plan)
    misspelt = fb.Recipe(rules, "mine", products=(fb.Rule("atn", "fp8"),))
    with pytest.raises(
        fb.QuantError, match=r"product rule 1 of recipe 'mine' .* the products without a parameter are attn, attn#2\."
    ):
        fb.plan(attention, ATTENTION, TOKENS, recipe=misspelt)
    with pytest.raises(fb.QuantError, match="has rules for products, which only traced code has"):
        fb.plan(None, ATTENTION, recipe=recipe)


def test_rows_say_where_a_parameter_is_used(params):
    plan = fb.plan(net, params, IDS, recipe="int8")
    assert [site.partition(" at ")[0] for site in plan["embed"].sites] == ["take", "dot_general"]
    assert all("test_plan.py" in site for site in plan["embed"].sites)
    assert plan["steps"].sites == ()


def test_the_hash_does_not_depend_on_where_the_code_is():
    plan = fb.plan(attention, ATTENTION, TOKENS, recipe="int8")
    moved = dataclasses.replace(
        plan,
        rows=tuple(dataclasses.replace(row, sites=("dot_general at /elsewhere/net.py:1:2 (net)",)) for row in plan),
        products=tuple(dataclasses.replace(row, site="/elsewhere/net.py:3:4 (net)") for row in plan.products),
    )
    assert moved != plan and moved.sha256 == plan.sha256
    assert fb.plan(attention, ATTENTION, TOKENS, recipe="int4_g32").sha256 != plan.sha256


def test_a_plan_refuses_unknown_and_missing_keys():
    form = fb.plan(attention, ATTENTION, TOKENS, recipe="int8").to_json()
    with pytest.raises(fb.QuantError, match="a plan has no field 'row'; did you mean 'rows'"):
        fb.Plan.from_json(form | {"row": []})
    with pytest.raises(fb.QuantError, match="a plan lacks the field 'rows'"):
        fb.Plan.from_json({"recipe": "int8"})
    form["products"][0]["scheme"] = "int8"
    with pytest.raises(fb.QuantError, match=r"products\[0\] has no field 'scheme'"):
        fb.Plan.from_json(form)
    del form["products"][0]["scheme"], form["products"][0]["rule"]
    with pytest.raises(fb.QuantError, match=r"products\[0\] lacks the field 'rule'"):
        fb.Plan.from_json(form)


def test_a_plan_with_two_rows_of_one_path_is_refused(params, tmp_path):
    form = fb.plan(attention, ATTENTION, TOKENS, recipe="int8").to_json()
    for key, message in (
        ("rows", r"several rows of parameter 'k'; leave one"),
        ("products", "several rows of product 'attn'"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(form | {key: [*form[key], form[key][0]]}))
        with pytest.raises(fb.QuantError, match=r"plan\.json: the plan has " + message):
            fb.Plan.load(tmp_path / "plan.json")


def test_a_random_key_among_the_parameters_is_left_as_it_is():
    tree, x = (
        {"w": normal(64, 32), "key": jax.random.key(0), "keys": jax.random.split(jax.random.key(1), (3, 4))},
        normal(2, 64),
    )

    def noisy(p, x):
        return x @ p["w"] + jax.random.normal(p["key"], (2, 32))

    plan = fb.plan(noisy, tree, x, recipe="w8a8")
    assert plan["key"].reason == "no product contracts it; used by random_bits"
    assert (plan["keys"].dtype, plan["keys"].bytes_after) == ("key<fry>", 12 * 8)
    assert fb.Plan.from_json(plan.to_json()) == plan
    q = fb.quantize_params(tree, plan)
    assert q["key"] is tree["key"] and fb.is_qarray(q["w"])
    assert jnp.array_equal(fb.train(noisy, "w8a8")(tree, x), fb.transparent(noisy)(q, x))
    assert fb.observe(noisy, tree, [x], "w8a8")["w"].range is not None
    assert fb.lora.init(jax.random.key(2), noisy, tree, x, match="w", rank=2).keys() == {"w"}
    rules = fb.Recipe((fb.Rule(".*", "int8", axis=-2),))
    assert fb.plan(None, tree, recipe=rules)["keys"].reason == "key<fry> is not floating"
    form = plan.to_json()
    form["rows"][0] |= {"policy": "int8", "axis": [-1]}
    with pytest.raises(fb.QuantError, match="the plan quantizes or prunes key, which is key<fry>"):
        fb.Plan.from_json(form)


def test_edited_axes_count_from_the_front_too():
    params = {"w": jax.ShapeDtypeStruct((3, 32, 64), jnp.float32)}
    form = fb.plan(None, params, recipe=fb.Recipe((fb.Rule(".*", "int8_g32", axis=-2),))).to_json()
    expected = fb.Plan.from_json(form)
    form["rows"][0]["axis"] = [1]
    assert fb.Plan.from_json(form) == expected
    for axis, message in ((3, "has 3 in axis"), (-4, "has -4 in axis")):
        form["rows"][0]["axis"] = [axis]
        with pytest.raises(fb.QuantError, match=message):
            fb.Plan.from_json(form)
    form["rows"][0]["axis"] = [1, -2]
    with pytest.raises(fb.QuantError, match="an axis twice in axis"):
        fb.Plan.from_json(form)


def test_an_axis_that_is_not_there_is_named_as_it_was_given():
    rules = fb.Recipe((fb.Rule("w", fb.Policy("int8"), axis=(5,)),))
    w, net = {"w": jnp.ones((4, 8))}, lambda p, x: x @ p["w"]
    for use in (
        lambda: fb.plan(net, w, jnp.ones((2, 4)), recipe=rules),
        lambda: fb.quantize_params(w, rules),
        lambda: fb.train(net, rules)(w, jnp.ones((2, 4))),
    ):
        with pytest.raises(fb.QuantError, match=r"w \(4, 8\): axis is 5, must be from -2 to 1"):
            use()
