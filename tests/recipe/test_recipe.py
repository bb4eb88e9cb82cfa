"""Recipes: names, files, JSON, and messages that say what to write instead."""

import json

import jax.numpy as jnp
import pytest

import fewbit as fb


@pytest.mark.parametrize("name", fb.RECIPES.names())
def test_presets_are_json_both_ways(name):
    recipe = fb.recipe(name)
    assert recipe.name == name
    assert fb.recipe(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert str(recipe).startswith(name)


def test_a_scheme_with_a_tile_is_a_recipe():
    recipe = fb.recipe("int5_g96")
    assert recipe.rules[-1].policy.weight.name == "int5_g96"
    assert fb.weight_only("nf4", embedding=None).rules[0].policy is None


def test_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"rules": [{"path": ".*", "policy": {"weight": "nf4", "activation": None}}]}))
    assert fb.recipe(str(path)).name == "mine"
    assert fb.recipe(path).rules[0].policy == fb.Policy("nf4")
    with pytest.raises(fb.QuantError, match="does not exist"):
        fb.recipe(tmp_path / "other.json")
    path.write_text(json.dumps({"__default__": {"w_bits": 8}, ".*/query": {"w_bits": 4}}))
    with pytest.raises(fb.QuantError, match=r"is a mixed-precision file of MaxText .* fb.maxtext_mixed_precision\("):
        fb.recipe(path)
    path.write_text("{")
    with pytest.raises(fb.QuantError, match="is not valid JSON"):
        fb.recipe(path)
    path.write_text("[]")
    with pytest.raises(fb.QuantError, match="expected object"):
        fb.recipe(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fb.recipe("int44"), r"unknown recipe 'int44'; did you mean 'int4'"),
        (lambda: fb.recipe("fp8_e4m3"), r"unknown recipe 'fp8_e4m3'; did you mean 'maxtext/fp8_e4m3'\?"),
        (
            lambda: fb.recipe("zzz"),
            r"^unknown recipe 'zzz'; the nearest names are '\S+', '\S+', '\S+'; `fewbit recipes` and fb.RECIPES.names\(\) list them all$",
        ),
        (lambda: fb.Rule(".*", "nf4", roles=("gate",)), r"unknown role of rule '\.\*': 'gate'; known: matmul, embedding"),
        (
            lambda: fb.Recipe((fb.Rule(".*", "nf4"),), products=(fb.Rule("attn", "fp8", roles="matmul"),)),
            "a product's rule .* takes no roles",
        ),
        (lambda: fb.recipe("intmp"), r"did you mean 'maxtext/intmp/int8_weight_only' or .*"),
        (lambda: fb.recipe(None), "a recipe is a name, a JSON file or form, or a Recipe, not None"),
        (lambda: fb.recipe({"rule": []}), r"no field 'rule'; did you mean 'rules'"),
        (lambda: fb.recipe({"rules": {}}), r"rules is {}; expected array"),
        (lambda: fb.recipe({"rules": []}), "recipe .recipe. has no rules"),
        (lambda: fb.recipe({"rules": [{"path": ".*"}]}), r"rules\[0\] lacks the field 'policy'"),
        (lambda: fb.recipe({"rules": [{"path": ".*", "policy": None, "op": []}]}), r"did you mean 'ops'"),
        (
            lambda: fb.recipe({"rules": [{"path": ".*", "policy": {"weight": "nf5"}}]}),
            r"unknown scheme 'nf5'; did you mean 'nf4'",
        ),
        (lambda: fb.Rule(3, "int8"), "a rule's path is 3; must be a regular expression"),
        (lambda: fb.Rule("(", "nf4"), r"'\(' is not a regular expression"),
        (lambda: fb.Rule(".*", "nf4", ops=("dot",)), r"unknown op 'dot'"),
        (lambda: fb.Rule("w", "nf4", optional="false"), "rule 'w': optional is 'false', must be True or False"),
        (lambda: fb.Rule("w", "nf4", axis="-1"), "axis is '-1', must be an integer or integers"),
        (lambda: fb.Rule("w", "nf4", axis=(0, 1.5)), r"axis is \(0, 1\.5\), must be an integer or integers"),
        (lambda: fb.Policy("int8", clips_gradient="no"), "clips_gradient is 'no', must be True or False"),
        (lambda: fb.Arm("int8", operand="int8", hadamard=16.0), "hadamard is 16.0; it must be a power of two"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_messages(make, message):
    with pytest.raises(fb.QuantError, match=message):
        make()


def test_rules_match_whole_paths():
    rule = fb.Rule("attn/.*", "nf4")
    assert rule.matches("attn/q", ())
    assert not rule.matches("layers/attn/q", ())
    only = fb.Rule(".*", "nf4", ops=("take",))
    assert only.matches("embed", ("take", "dot_general"), fb.Role.EMBEDDING)
    assert not only.matches("w", ("dot_general",))


def test_a_recipe_of_rules_for_products_alone_leaves_parameters_as_they_are():
    recipe = fb.Recipe((), products=(fb.Rule(".*", fb.Policy("int8", "int8")),))
    assert fb.Recipe.from_json(recipe.to_json()) == recipe
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    trained = fb.train(lambda p, x: (x @ x.T) @ p, recipe)(jnp.eye(4), x)
    assert 0 < jnp.max(jnp.abs(trained - x @ x.T)) < 0.02
