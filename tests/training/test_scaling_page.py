"""docs/scaling.md has the tables of its script, and the script counts what a compiled step exchanges."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType

import fewbit as fb
from fewbit.models import DecoderConfig, forward, params_from_paths, shapes
from tests.collectives import collective_bytes

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
def test_a_compiled_step_exchanges_what_the_script_counts(script):
    """A decoder of two layers whose every parameter is sharded along its first axis, gathered, and reduce-scattered."""
    mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        whole = {path: jax.lax.all_gather(x, "fsdp", tiled=True) for path, x in params.items()}
        logits = forward(params_from_paths(whole, SMALL), tokens, SMALL)
        return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))[None]

    each = jax.shard_map(loss, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"), check_vma=False)
    trained = fb.train(lambda params, tokens: jnp.sum(each(params, tokens)), script.TRAINING, reduction=script.REDUCTION)
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes(SMALL).items()}
    shardings = jax.tree.map(lambda _: jax.NamedSharding(mesh, P("fsdp")), params)
    step = jax.jit(jax.grad(trained), in_shardings=(shardings, jax.NamedSharding(mesh, P("fsdp"))), out_shardings=shardings)
    found = collective_bytes(step, params, jax.ShapeDtypeStruct((DEVICES, 32), jnp.int32))
    counted = script.collectives(script.parameters(SMALL, script.TRAINING), DEVICES, 4)
    kinds = {"codes": "u8", "float": "f32"}
    assert found == {(operation, kinds[kind]): size for (operation, kind), size in counted.items()}
    assert counted["all-gather", "codes"] > counted["all-gather", "float"], "the weights of the layers are the most"
