"""Roles: what the trace and the names say, and which rules take which roles."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit._patterns import Pattern
from fewbit.recipe.role import Role
from fewbit.recipe.roles import TensorRole, refined


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "embed": {"token": struct(32, 16), "position_embeddings": struct(8, 16)},
    "moe": {
        "gate": {"kernel": struct(16, 4)},
        "router_bias": struct(1, 4),
        "wi": struct(4, 16, 24),
        "wo": struct(4, 24, 16),
        "shared": {"gate": struct(16, 24), "up": struct(16, 24), "down": struct(24, 16)},
    },
    "ssm": {"A_log": struct(16, 4), "dt_proj": struct(16, 16), "conv1d": struct(4, 1, 16), "in_proj": struct(16, 16)},
    "cls_token": struct(1, 16),
    "conv": struct(3, 16, 16),
}


def net(p, ids):
    """A network of one look-up, experts with a router, a gated MLP, a state space and a convolution."""
    x = p["embed"]["token"][ids] + p["embed"]["position_embeddings"][jnp.arange(8)] + p["cls_token"]
    moe, ssm = p["moe"], p["ssm"]
    weights = jax.nn.softmax(x @ moe["gate"]["kernel"] + moe["router_bias"])
    hidden = jnp.einsum("td,edf->etf", x, moe["wi"])
    x = x + jnp.einsum("te,etf,efd->td", weights, hidden, moe["wo"])
    shared = moe["shared"]
    x = x + (jax.nn.silu(x @ shared["gate"]) * (x @ shared["up"])) @ shared["down"]
    numbers = ("NWC", "WIO", "NWC")
    x = (x @ ssm["in_proj"])[None]
    x = jax.lax.conv_general_dilated(x, ssm["conv1d"], (1,), "SAME", dimension_numbers=numbers, feature_group_count=16)
    x = jax.lax.conv_general_dilated(x, p["conv"], (1,), "SAME", dimension_numbers=numbers)[0]
    return (x @ ssm["dt_proj"]) * jnp.exp(ssm["A_log"]).sum(1)[None]


IDS = jax.ShapeDtypeStruct((8,), jnp.int32)


@pytest.mark.finding(1)
def test_a_traced_network_has_its_roles():
    plan = fb.plan(net, PARAMS, IDS, recipe="nf4")
    roles = {row.path: str(row.role) for row in plan}
    assert roles == {
        "cls_token": "class_token",
        "conv": "convolution",
        "embed/position_embeddings": "position",
        "embed/token": "embedding",
        "moe/gate/kernel": "router",
        "moe/router_bias": "bias",
        "moe/shared/down": "matmul",
        "moe/shared/gate": "matmul",
        "moe/shared/up": "matmul",
        "moe/wi": "matmul",
        "moe/wo": "matmul",
        "ssm/A_log": "state_space",
        "ssm/conv1d": "state_space",
        "ssm/dt_proj": "state_space",
        "ssm/in_proj": "matmul",
    }
    quantized = {row.path: str(row.policy) for row in plan if row.policy is not None}
    assert quantized == {
        path: "q8_0" if role == "embedding" else "nf4"
        for path, role in roles.items()
        if role in ("matmul", "embedding", "convolution", "experts")
    }
    assert plan["moe/gate/kernel"].reason == "a router or gate of experts; no rule names the role router"
    assert plan["ssm/A_log"].reason == "no product contracts it; used by exp"
    assert {row.role_source for row in plan} == {"trace"}
    assert fb.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("gates", "mark"),
    [
        ([f"l.0.linear_attn.in_proj_{name}.weight" for name in ("a", "b", "ba")], "l.0.linear_attn.A_log"),
        ([f"blk.0.ssm_{name}.weight" for name in ("alpha", "beta", "ba")], "blk.0.ssm_a"),
        ([f"layers/0/attn/{name}" for name in ("alpha", "beta", "ba")], "layers/0/attn/dt_bias"),
    ],
    ids=["Hugging Face", "GGUF", "decoder"],
)
def test_what_gates_the_state_of_linear_attention_is_not_quantized(gates: list[str], mark: str):
    found = refined(dict.fromkeys([*gates, mark], Role.MATMUL))
    assert {found[name] for name in gates} == {Role.STATE_SPACE}


def test_the_names_of_such_gates_say_nothing_in_another_module():
    names = ["layers/0/attn/alpha", "norm/beta", "mlp.in_proj_a.weight", "adapters/A"]
    assert set(refined(dict.fromkeys(names, Role.MATMUL)).values()) == {Role.MATMUL}


@pytest.mark.finding(1)
def test_what_a_user_names_is_quantized_or_refused_with_the_reason():
    path = ".*gate/kernel"
    with pytest.raises(
        fb.QuantError,
        match=r"rule 1 .* quantizes nothing: its path matches moe/gate/kernel \(a router or gate of experts\). Name roles=\['router'\]",
    ):
        fb.plan(net, PARAMS, IDS, recipe=fb.Recipe((fb.Rule(path, "int8"),)))
    plan = fb.plan(net, PARAMS, IDS, recipe=fb.Recipe((fb.Rule(path, "int8", roles="router"),)))
    assert (str(plan["moe/gate/kernel"].policy), plan["moe/gate/kernel"].axis) == ("int8", (-2,))
    everything = fb.plan(net, PARAMS, IDS, recipe=fb.Recipe((fb.Rule("moe/.*", "int8"),)))
    assert {row.path for row in everything if row.policy is not None} == {
        *("moe/wi", "moe/wo"),
        *(f"moe/shared/{name}" for name in ("gate", "up", "down")),
    }


def test_a_stack_with_a_batch_axis_is_one_of_experts():
    params = {"stack": struct(4, 16, 8), "ragged": struct(4, 8, 8), "gate": struct(8, 4)}

    def grouped(p, x, rows):
        x = jnp.einsum("etd,edf->etf", x, p["stack"]).reshape(-1, 8)
        return jax.lax.ragged_dot(x, p["ragged"], rows) @ p["gate"]

    plan = fb.plan(grouped, params, struct(4, 2, 16), jax.ShapeDtypeStruct((4,), jnp.int32), recipe="nf4")
    assert {row.path: str(row.role) for row in plan} == {"gate": "router", "ragged": "experts", "stack": "experts"}


def test_a_rule_that_names_only_a_bias_is_refused():
    params = {"w": struct(16, 8), "bias": struct(8), "rows": struct(3, 8)}

    def affine(p, x):
        return (x @ p["w"] + p["bias"][None]) * p["rows"].sum()

    with pytest.raises(fb.QuantError, match=r"rule 1 .*quantizes nothing: its path matches bias \(a bias\)"):
        fb.plan(affine, params, struct(2, 16), recipe=fb.Recipe((fb.Rule("bias", "int8"), fb.Rule(".*", "nf4"))))
    with pytest.raises(
        fb.QuantError, match=r"rule 1 .* changes nothing: it matches only bias \(a vector: no product contracts it\)"
    ):
        fb.plan(affine, params, struct(2, 16), recipe=fb.Recipe((fb.Rule("bias", "int8", roles="bias"),)))
    with pytest.raises(fb.QuantError, match=r"rule 1 .* changes nothing: it matches only rows \(no product contracts it\)"):
        fb.plan(affine, params, struct(2, 16), recipe=fb.Recipe((fb.Rule("rows", "int8", roles="other"),)))
    named = fb.Recipe((fb.Rule("rows", "int8", roles="other", axis=-1),))
    assert fb.plan(affine, params, struct(2, 16), recipe=named)["rows"].axis == (-1,)


@pytest.mark.parametrize(
    ("path", "role", "expected"),
    [
        ("layers/0/mlp/gate", "matmul", "matmul"),
        ("layers/0/mlp/gate_proj/kernel", "matmul", "matmul"),
        ("decoder/layers/MoeBlock_0/gate/kernel", "matmul", "router"),
        ("decoder/layers/MoeBlock_0/wi_0", "matmul", "matmul"),
        ("layers/0/router/kernel/value", "matmul", "router"),
        ("compose/kernel", "embedding", "embedding"),
        ("encoder.positions.embedding", "embedding", "position"),
        ("PositionalEmbedding_0/table", "other", "other"),
        ("PositionalEmbedding_0/embedding", "embedding", "position"),
        ("pos_proj/kernel", "matmul", "matmul"),
        ("wpe", "embedding", "position"),
        ("decoder.relative_attention_bias.weight", "embedding", "relative_bias"),
        ("attn.relative_position_bias_table", "other", "relative_bias"),
        ("attn.sinks", "other", "sinks"),
        ("encoder/conv1d/kernel", "convolution", "convolution"),
        ("norm/scale", "other", "norm"),
        ("mlp.experts.down_proj_bias", "unknown", "bias"),
        ("vit.embeddings.mask_token", "unknown", "class_token"),
        ("wte.weight", "unknown", "unknown"),
    ],
)
def test_names_refine_roles_and_never_make_one_quantized(path, role, expected):
    assert refined({path: fb.Role(role)}) == {path: expected}


def test_a_rule_of_roles_is_json_both_ways():
    rule = fb.Rule(".*", "q8_0", roles=("embedding", fb.Role.ROUTER))
    assert rule.to_json()["roles"] == ["embedding", "router"]
    assert fb.Rule.from_json(json.loads(json.dumps(rule.to_json()))) == rule
    assert str(rule) == ".* of role embedding or router -> q8_0"


def test_an_edited_plan_counts_its_bytes_anew():
    params = {"w": np.ones((16, 64), np.float32)}
    form = fb.plan(lambda p, x: x @ p["w"].T, params, struct(2, 64), recipe="int8").to_json()
    form["rows"][0]["policy"] = "int4_g32"
    edited = fb.Plan.from_json(form)
    assert edited.bytes_after == fb.quantize_params(params, edited)["w"].nbytes == 16 * 64 // 2 + 16 * 2 * 4
    form["rows"][0]["policy"] = None
    assert fb.Plan.from_json(form).bytes_after == edited.bytes_before
    form["rows"][0] |= {"policy": "int8", "axis": []}
    with pytest.raises(fb.QuantError, match="row of w has a policy but no axis"):
        fb.Plan.from_json(form)


@pytest.mark.parametrize("path", ["layers/{}/w", "layers/{}/.*", ".*/{}/w"], ids=["path", "prefix", "part"])
def test_most_of_many_rules_are_neither_compiled_nor_compared(path, monkeypatch):
    """100,000 rules took 20 s: rules are found by how their path starts, and compiled for a name with its literal parts."""
    params = {f"layers/{i}/w": struct(8, 8) for i in range(8)}
    paths = [path.format(i) for i in range(3_000)]
    compiled, compared = [], []
    compile_, fullmatch = re.compile, Pattern.fullmatch
    monkeypatch.setattr(re, "compile", lambda text, *flags: compiled.append(text) or compile_(text, *flags))
    monkeypatch.setattr(Pattern, "fullmatch", lambda self, name: compared.append(self.text) or fullmatch(self, name))
    recipe = fb.Recipe((*(fb.Rule(path, None, optional=True) for path in paths), fb.Rule(".*", None, optional=True)))

    def chain(p, x):
        for w in p.values():
            x = x @ w
        return x

    plan = fb.plan(chain, params, struct(1, 8), recipe=recipe)
    assert [row.reason for row in plan] == [f"rule {path.format(i)!r} keeps it unquantized" for i in range(8)]
    assert set(compiled) & set(paths) <= set(paths[:8])
    if path.startswith("layers"):
        assert len(compared) == 2 * len(params)


def test_a_role_is_used_as_a_trace_would_find_it():
    (use,) = TensorRole(Role.EMBEDDING, -1).uses(2)
    assert (use.op, use.axes, use.tiled) == ("take", (-2,), (-1,))
    (use,) = TensorRole(Role.EXPERTS, -1).uses(3)
    assert (use.op, use.axes, use.batch, use.tiled) == ("ragged_dot", (-1,), (-3,), (-1,))
    assert TensorRole(Role.NORM).uses(1) == ()


def test_a_gathered_bias_is_not_a_table():
    """Biases of experts are gathered by the expert of a token, as rows of a table are by its number."""
    params = {"w": struct(4, 32, 64), "b": struct(4, 64), "embed": struct(4, 64)}

    def experts(p, x):
        expert = jnp.array([0, 1, 1, 3])
        y = jnp.einsum("tk,tkn->tn", x, jnp.take(p["w"], expert, axis=0))
        return y + jnp.take(p["b"], expert, axis=0) + jnp.take(p["embed"], expert, axis=0)

    roles = {row.path: str(row.role) for row in fb.plan(experts, params, struct(4, 32), recipe="int4")}
    assert (roles["b"], roles["embed"]) == ("bias", "embedding")
    assert {row.path for row in fb.plan(experts, params, struct(4, 32), recipe="int4") if row.policy} == {"w", "embed"}
