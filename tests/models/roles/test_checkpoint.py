"""Roles of checkpoints' tensors: 22 families, by transformers' module classes and by the table of names, as listed in `family_roles.json`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fewbit as fb
from fewbit import io, models
from fewbit.models.roles.families import families, family_roles
from fewbit.recipe import TensorRole
from fewbit.recipe.role import QUANTIZED_ROLES

FAMILIES = json.loads((Path(__file__).parent.parent / "family_roles.json").read_text())
"""For each family the class and the configuration of a tiny model, and of each tensor its shape, its role and the contracted axes."""


def shapes_of(family):
    return {name: tuple(shape) for name, (shape, _, _) in FAMILIES[family]["tensors"].items()}


def expected_roles(family):
    return {name: (role, tuple(axis)) for name, (_, role, axis) in FAMILIES[family]["tensors"].items()}


def found_roles(found):
    return {name: (str(one.role), one.axis) for name, one in found.roles.items()}


@pytest.mark.finding(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_names_has_the_roles_of_each_family(family):
    config = {"model_type": FAMILIES[family]["model_type"]}
    assert found_roles(models.checkpoint_roles(shapes_of(family), config, use_modules=False)) == expected_roles(family)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.oracle
@pytest.mark.finding(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_module_classes_have_the_roles_of_each_family(family, transformers, tmp_path):
    """The tensors are those that transformers writes; the table of names is emptied, so that the module classes alone decide."""
    listed = FAMILIES[family]
    cls = getattr(transformers, listed["class"])
    cls(cls.config_class(**listed["config"])).save_pretrained(tmp_path)
    checkpoint = io.read(tmp_path)
    shapes = {name: info.shape for name, info in checkpoint.tensors.info.items()}
    assert shapes == shapes_of(family)
    found = models.checkpoint_roles(shapes, {**checkpoint.metadata, "model_type": listed["model_type"]})
    assert found_roles(found) == expected_roles(family)
    assert not [name for name, one in found.roles.items() if one.source.startswith("names")]


@pytest.mark.slow_after(5)
@pytest.mark.finding(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_does_what_its_text_says_in_each_family(family):
    """nf4: matmul weights, convolution kernels and expert stacks along their contracted axis, embedding tables as q8_0, no other tensor."""
    shapes = shapes_of(family)
    found = models.checkpoint_roles(shapes, {"model_type": FAMILIES[family]["model_type"]}, use_modules=False)
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    for row in fb.plan(None, structs, recipe="nf4", roles=found.roles):
        role, axis = expected_roles(family)[row.path]
        assert row.role == role
        as_planned = {"embedding": "q8_0"}.get(role, "nf4") if role in QUANTIZED_ROLES else "None"
        assert (str(row.policy), row.axis) == (as_planned, axis if role in QUANTIZED_ROLES else ()), row.path


def test_a_bare_file_has_the_roles_that_every_fitting_family_gives():
    """Without a config.json GPT-2's matrices and gpt-oss' stacks could be of either layout, since GPTBigCode and Qwen name theirs alike."""
    bare = models.checkpoint_roles(shapes_of("bert"))
    assert found_roles(bare) == expected_roles("bert")
    assert bare.note.endswith("the architecture is unknown (no config.json with a model_type)")
    for family, axis in (("gpt2", (-2,)), ("gpt_oss", (-2,))):
        in_out = {name for name, (_, own) in expected_roles(family).items() if own == axis}
        assert set(models.checkpoint_roles(shapes_of(family)).unknown) == in_out
    assert models.checkpoint_roles({"w": (4, 4)}).unknown == ("w",)


def test_a_model_type_that_nobody_knows_has_no_roles():
    found = models.checkpoint_roles(shapes_of("gpt2"), {"model_type": "gpt9"}, use_modules=False)
    assert set(found.unknown) == {
        name for name, (role, _) in expected_roles("gpt2").items() if role in ("matmul", "embedding")
    }
    assert f"{len(found.unknown)} unknown" in found.note


def test_gguf_names_are_those_of_every_architecture():
    shapes = {
        "token_embd.weight": (9, 8),
        "blk.0.ffn_gate_inp.weight": (4, 8),
        "blk.0.ffn_up_exps.weight": (4, 16, 8),
        "blk.0.ssm_a": (8, 4),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_norm.weight": (8,),
    }
    found = models.checkpoint_roles(shapes, {"general.architecture": "qwen3moe"}, kind="gguf")
    assert [str(one.role) for one in found.roles.values()] == [
        "embedding",
        "router",
        "experts",
        "state_space",
        "matmul",
        "norm",
    ]
    assert found.roles["blk.0.ffn_up_exps.weight"].axis == (-1,)


def test_no_model_type_is_in_two_families():
    types = [model_type for family in families() for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_a_pattern_of_another_rank_says_nothing():
    assert family_roles({"model.layers.0.self_attn.q_proj.weight": (2, 8, 8)}, "llama") == {}


@pytest.mark.oracle
@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gpt9"}, "transformers cannot build the architecture: KeyError"),
        (
            {"model_type": "llama", "num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000, and the checkpoint has 12 tensors",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers cannot build the architecture: StrictDataclass"),
    ],
)
def test_why_module_classes_do_not_decide(config, why):
    assert why in models.checkpoint_roles(shapes_of("llama"), config).note


@pytest.mark.oracle
@pytest.mark.usefixtures("transformers")
def test_a_checkpoint_of_the_body_alone_has_the_roles_of_its_modules():
    body = {name.removeprefix("transformer."): shape for name, shape in shapes_of("gpt2").items()}
    config = {**FAMILIES["gpt2"]["config"], "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    found = models.checkpoint_roles(body, config)
    assert {f"transformer.{name}": role for name, role in found_roles(found).items()} == expected_roles("gpt2")


@pytest.mark.oracle
@pytest.mark.usefixtures("transformers")
def test_a_tensor_of_another_shape_than_the_architecture_has_no_role_by_its_module():
    config = {**FAMILIES["llama"]["config"], "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    shapes = {**shapes_of("llama"), "model.layers.0.mlp.up_proj.weight": (16, 24)}
    assert models.checkpoint_roles(shapes, config).roles["model.layers.0.mlp.up_proj.weight"].source == "names: decoder"


def test_a_role_without_its_axis_is_refused():
    with pytest.raises(fb.QuantError, match="an expert stack needs the axis that its product contracts"):
        TensorRole("experts")
    with pytest.raises(fb.QuantError, match="unknown role 'router_gate'; did you mean 'router'"):
        TensorRole("router_gate")
    with pytest.raises(fb.QuantError, match="count from the end"):
        TensorRole("matmul", 1)


def test_the_table_of_names_has_the_products_of_lfm2():
    layer = "model.layers.0."
    products = {"conv.in_proj": (48, 16), "conv.out_proj": (16, 16), "self_attn.out_proj": (16, 16)}
    products |= {"feed_forward.w1": (24, 16), "feed_forward.w2": (16, 24), "feed_forward.w3": (24, 16)}
    others = {"conv.conv": (16, 1, 3), "operator_norm": (16,), "ffn_norm": (16,), "self_attn.q_layernorm": (8,)}
    shapes = {f"{layer}{name}.weight": shape for name, shape in {**products, **others}.items()}
    found = models.checkpoint_roles(shapes, {"model_type": "lfm2"}, use_modules=False)
    assert {name for name, one in found.roles.items() if one.role in QUANTIZED_ROLES} == {
        f"{layer}{name}.weight" for name in products
    }
