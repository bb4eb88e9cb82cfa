"""MaxText's mixed precision: every layer gets the bits that its key says."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

X = jnp.ones((2, 64))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    names = [f"layers_{i}/{name}" for i in range(2) for name in ("query", "wi_0")]
    tree = {"params": {"decoder": {}}}
    for name in names:
        layer, module = name.split("/")
        kernel = jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32)
        tree["params"]["decoder"].setdefault(layer, {})[module] = {"kernel": kernel}
    return tree


def net(p, x):
    for layer in ("layers_0", "layers_1"):
        for module in ("query", "wi_0"):
            x = jnp.tanh(x @ p["params"]["decoder"][layer][module]["kernel"])
    return x


def bits(plan):
    return {row.path.removeprefix("params/decoder/").removesuffix("/kernel"): row.policy.weight.format.bits for row in plan}


def test_one_layer_in_4_bits_and_the_other_in_8(params):
    config = {"__default__": {"w_bits": 8}, "decoder/layers_0/.*": {"w_bits": 4}}
    plan = fb.plan(net, params, X, recipe=fb.maxtext_mixed_precision(config))
    assert bits(plan) == {"layers_0/query": 4, "layers_0/wi_0": 4, "layers_1/query": 8, "layers_1/wi_0": 8}
    q = fb.quantize_params(params, plan)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(q, is_leaf=fb.is_qarray)]
    assert sizes == [64 * 32 + 256] * 2 + [64 * 64 + 256] * 2
    all8 = fb.quantize_params(
        params, fb.plan(net, params, X, recipe=fb.maxtext_mixed_precision({"__default__": {"w_bits": 8}}))
    )
    exact, mixed, eight = net(params, X), fb.transparent(net)(q, X), fb.transparent(net)(all8, X)
    assert jnp.linalg.norm(mixed - exact) > 4 * jnp.linalg.norm(eight - exact) > 0


def test_the_last_key_that_matches_decides_as_in_maxtext(params):
    config = {"__default__": {"w_bits": 8}, ".*/query": {"w_bits": 4}, ".*layers_1/.*": {"w_bits": 2}}
    plan = fb.plan(net, params, X, recipe=fb.maxtext_mixed_precision(config))
    assert bits(plan) == {"layers_0/query": 4, "layers_0/wi_0": 8, "layers_1/query": 2, "layers_1/wi_0": 2}
    first = fb.maxtext_mixed_precision(config).rules[0]
    assert first.policy.weight.format.bits == 2


def test_a_router_is_quantized_where_a_key_names_it():
    params = {"layers": {"MoeBlock_0": {name: {"kernel": jnp.ones((64, 64))} for name in ("gate", "wi")}}}

    def net(p, x):
        return x @ p["layers"]["MoeBlock_0"]["gate"]["kernel"] @ p["layers"]["MoeBlock_0"]["wi"]["kernel"]

    for more, quantized in (({}, [False, True]), ({".*/gate": {"w_bits": 4}}, [True, True])):
        recipe = fb.maxtext_mixed_precision({"__default__": {"w_bits": 8}, **more})
        assert [row.policy is not None for row in fb.plan(net, params, X, recipe=recipe)] == quantized


def test_a_key_that_matches_nothing_is_an_error(params):
    with pytest.raises(fb.QuantError, match=r"rule 1 of recipe 'maxtext/intmp' .*/querry.* matches nothing"):
        fb.plan(
            net, params, X, recipe=fb.maxtext_mixed_precision({"__default__": {"w_bits": 8}, ".*/querry": {"w_bits": 4}})
        )


def test_fields(tmp_path):
    config = {
        "__default__": {"w_bits": 8, "a_bits": 8, "w_scale": 1.0, "a_scale": 1.0, "tile_size": -1},
        ".*/query": {"w_bits": 4, "w_scale": 0.8, "tile_size": 128},
        ".*/key": {"a_bits": None},
        ".*/out": {"w_bits": None, "a_bits": None},
    }
    (tmp_path / "mine.json").write_text(json.dumps(config))
    recipe = fb.maxtext_mixed_precision(tmp_path / "mine.json", name="mine")
    out, key, query, default = recipe.rules
    assert out.policy is None
    assert (key.policy.weight.name, key.policy.activation) == ("int8_aqt", None)
    assert query.policy.weight.tile == {...: 1, -1: 128}
    assert query.policy.weight.calibration.factor == pytest.approx(0.8 * 7 / 7.5)
    assert query.policy.activation.name == "int8_aqt_g128"
    assert str(default.policy) == "int8_aqt x int8_aqt"
    assert fb.recipe(recipe.to_json()) == recipe
    assert fb.maxtext_recipe("intmp", quant_cfg_path=config).rules == recipe.rules


def test_maxtexts_four_files():
    bits = {name.rpartition("/")[2]: fb.RECIPES[name].rules for name in fb.RECIPES.names() if "/intmp/" in name}
    assert {name: len(rules) for name, rules in bits.items()} == {
        "int8_weight_only": 1,
        "int4_weight_only": 1,
        "dense_llm_weight_only_scale": 7,
        "dense_llm_subchannel": 7,
    }
    assert all(rule.policy.activation is None for name, rules in bits.items() if "weight_only" in name for rule in rules)
    assert [rule.policy.weight.tile[-1] for rule in bits["dense_llm_subchannel"]] == [None] * 4 + [256, 128, None]
    factors = [rule.policy.weight.calibration.factor for rule in bits["dense_llm_weight_only_scale"]]
    assert factors == pytest.approx([7 / 7.5] * 4 + [0.9 * 7 / 7.5, 0.8 * 7 / 7.5, 127 / 127.5])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"__default__": {"wbits": 8}}, r"entry '__default__' has no field 'wbits'; did you mean 'w_bits'"),
        ({".*/query": {"w_bits": 9}}, r"entry '\.\*/query' has 9 bits; must be 2 to 8"),
        ({".*/query": {"w_bits": 4, "tile_size": 0}}, r"tile_size is 0"),
        ({"(": {"w_bits": 4}}, r"entry '\(' is not a regular expression"),
        ({"(?i).*/QUERY": {"w_bits": 4}}, r"entry '\(\?i\)\.\*/QUERY' begins with flags.*write '\(\?i:\.\*/QUERY\)'"),
        ({".*/query": 4}, r"entry '\.\*/query' is 4; expected object with the fields w_bits"),
    ],
)
def test_refusals(config, message):
    with pytest.raises(fb.QuantError, match=message):
        fb.maxtext_mixed_precision(config)


def test_activations_alone_are_not_supported():
    with pytest.raises(fb.UnsupportedError, match="quantizes the activation alone"):
        fb.maxtext_mixed_precision({".*/query": {"a_bits": 8}})


def test_files_that_are_none(tmp_path):
    (tmp_path / "a.json").write_text("[")
    with pytest.raises(fb.QuantError, match=r"is not valid JSON|does not exist"):
        fb.maxtext_mixed_precision(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(fb.QuantError, match="expected object"):
        fb.maxtext_mixed_precision(tmp_path / "a.json")
