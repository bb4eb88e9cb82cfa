"""docs/scaling.md has the tables of its script, and the script counts what a compiled step exchanges and holds."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType

import fewbit as fb
from fewbit.models import (
    DecoderConfig,
    Experts,
    TokenGenerator,
    empty_cache,
    forward,
    params_from_paths,
    shapes,
    stack_experts,
)
from fewbit.models.generate import GenerationState
from tests.collectives import bytes_of_text

DOCS = Path(__file__).parent.parent.parent / "docs"
DEVICES = 4
SMALL = DecoderConfig(vocab=64, layers=2, width=128, heads=4, kv_heads=4, head_dim=32, hidden=256)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_table", DOCS / "scaling_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_is_up_to_date(script):
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run python docs/scaling_table.py"
    assert all(f"| {name} |" in text for name in script.MODELS)


@pytest.mark.slow
def test_a_compiled_step_exchanges_and_holds_what_the_script_counts(script):
    """A step of Adam on a decoder whose every parameter is sharded along its first axis, gathered, and reduce-scattered."""
    mesh = mesh_of("fsdp")

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        whole = {path: jax.lax.all_gather(x, "fsdp", tiled=True) for path, x in params.items()}
        logits = forward(params_from_paths(whole, SMALL), tokens, SMALL)
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))[None]

    each = jax.shard_map(loss, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"), check_vma=False)
    trained = fb.train(lambda params, tokens: jnp.sum(each(params, tokens)), script.TRAINING, reduction=script.REDUCTION)

    @jax.jit
    def step(params, mean, square, tokens):
        gradients = jax.grad(trained)(params, tokens)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradients)
        params = jax.tree.map(lambda w, m, v: w - 0.001 * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
        return params, gradients, mean, square

    rows = jax.NamedSharding(mesh, P("fsdp"))
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows) for path, shape in shapes(SMALL).items()}
    tokens = jax.ShapeDtypeStruct((DEVICES, 32), jnp.int32, sharding=rows)
    compiled = step.lower(params, params, params, tokens).compile()
    parameters = script.parameters(SMALL, script.TRAINING)
    counted, kinds = script.collectives(parameters, DEVICES, 4), {"codes": "u8", "float": "f32"}
    expected = {(operation, kinds[kind]): size for (operation, kind), size in counted.items()}
    assert bytes_of_text(compiled.as_text()) == expected
    assert counted["all-gather", "codes"] > counted["all-gather", "float"], "the weights of the layers are the most"
    memory, state = compiled.memory_analysis(), script.state_bytes(parameters, DEVICES)
    assert memory.argument_size_in_bytes == state * 3 // 4 + tokens.size * 4 // DEVICES, "all but the gradients"
    assert memory.output_size_in_bytes - state < 1024, "and a table of pointers"
    assert memory.output_size_in_bytes >= state


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), [("dense", "int4"), ("dense", None), ("mixture", "int4")])
def test_a_compiled_decode_step_exchanges_and_holds_what_the_script_counts(script, kind, recipe):
    """A step that multiplies weights of int4 or bfloat16, cut over devices by `script.SERVING`, and chooses the next tokens."""
    config, batch, mesh = SMALL, 2, mesh_of("tensor")
    if kind == "mixture":
        config = dataclasses.replace(SMALL, experts=Experts(count=4, active=2, hidden=128))
    params = {path: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for path, shape in shapes(config).items()}
    parameters = [script.Parameter(path, leaf.shape) for path, leaf in params.items()]
    if recipe is not None:
        parameters, plan = script.parameters(config, recipe), script.plan_of(config, recipe)
        params = jax.eval_shape(lambda params: fb.quantize_params(params, plan), params)
    shardings = fb.shardings_of(params, mesh, {path: script.SERVING.get(path.rsplit("/", 1)[-1]) for path in params})
    generator = TokenGenerator(config, max_new_tokens=4, dtype=jnp.bfloat16)

    def tree(params):
        return stack_experts(params_from_paths(params, config))

    def step(params, leaves):
        return fb.transparent(lambda params: generator.step(tree(params), jax.tree.unflatten(form, leaves)))(params)

    def with_its_heads(leaf):
        return jax.device_put(leaf, jax.NamedSharding(mesh, P(None, None, "tensor") if leaf.ndim == 5 else P()))

    cache, tokens = empty_cache(config, batch=batch, max_length=8, dtype=jnp.bfloat16), jnp.zeros((batch, 8), jnp.int32)
    state = GenerationState(jnp.int32(1), cache, tokens, tokens[:, 0], tokens[:, 0] > 0)
    leaves, form = jax.tree.flatten(jax.tree.map(with_its_heads, state))
    compiled = jax.jit(step, keep_unused=True).lower(placed(params, shardings), leaves).compile()
    counted = script.decoding_collectives(config, parameters, batch)
    kinds = {"f32": "float", "u8": "codes", "f16": "codes", "s32": "token"}
    found = dict.fromkeys(counted, 0)
    for (operation, dtype), size in bytes_of_text(compiled.as_text()).items():
        found[operation, kinds[dtype]] += size
    assert found == counted
    assert (counted["all-reduce", "codes"] > 0) == (recipe is not None)
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - cache.nbytes
    held = compiled.memory_analysis().argument_size_in_bytes
    assert held == script.weight_bytes(parameters, DEVICES) + cache.nbytes // DEVICES + rest


def placed(tree, shardings):
    """Shapes with their shardings."""
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings)


def mesh_of(name: str) -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), (name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


@pytest.mark.once
def test_a_mesh_that_cuts_tiles_is_refused(script):
    with pytest.raises(fb.QuantError, match="cut tiles of 32"):
        script.held_bytes((64, 96), fb.scheme("int4_g32"), "down", 4)
