"""MaxText's own Transformer, tools and engine with our objects in them, where MaxText is installed (Python 3.12, `maxtext==0.2.5`).

Two layers, scanned and rematerialized as MaxText does by default, bfloat16 over float32 weights.
"""

import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.frameworks import maxtext

maxtext_package = pytest.importorskip("maxtext", reason="MaxText needs Python 3.12")
nnx = pytest.importorskip("flax.nnx")
ocp = pytest.importorskip("orbax.checkpoint")
quantizations = pytest.importorskip("maxtext.layers.quantizations")
linears = pytest.importorskip("maxtext.layers.linears")
creation = pytest.importorskip("maxtext.utils.model_creation_utils")
pyconfig = pytest.importorskip("maxtext.configs.pyconfig")
layerwise = pytest.importorskip("maxtext.utils.layerwise_quantization")
maxengine = pytest.importorskip("maxtext.inference.maxengine.maxengine")

pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONFIGS = os.path.join(os.path.dirname(maxtext_package.__file__), "configs")
SMALL = {
    "run_name": "fewbit",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "log_config": False,
    "enable_tensorboard": False,
    "dataset_type": "synthetic",
    "attention": "dot_product",
    "decoder_block": "llama2",
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": 2,
    "vocab_size": 64,
    "max_target_length": 16,
    "max_prefill_predict_length": 8,
    "per_device_batch_size": 2,
    "checkpoint_storage_use_ocdbt": False,
    "checkpoint_storage_use_zarr3": False,
}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 128}
OVERWRITTEN = "_overwrite_with_gradient"
INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")


@pytest.fixture(autouse=True)
def adopted(monkeypatch):
    """The assignments of docs/maxtext.md; MaxText relies on JAX's default promotion of dtypes."""
    for name in ("configure_quantization", "configure_kv_quant", "maybe_quantize_model"):
        monkeypatch.setattr(quantizations, name, getattr(maxtext, name))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def configured(tmp_path, **fields):
    given = {**SMALL, "base_output_directory": str(tmp_path), **fields}
    return pyconfig.initialize(["test", os.path.join(CONFIGS, "base.yml")], **given)


def built(config, mode="train"):
    mesh = jax.sharding.Mesh(creation.maxtext_utils.create_device_mesh(config=config), config.mesh_axes)
    with layerwise.logical_axis_rules(config.logical_axis_rules):
        rngs = creation.maxtext_utils_nnx.create_nnx_rngs(config, rng_key=jax.random.key(0))
        return creation.from_config(config, mesh=mesh, rngs=rngs, quant_mode_str=mode)


def run(model, config):
    shape = config.global_batch_size_to_train_on, config.max_target_length
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, shape), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    with layerwise.logical_axis_rules(config.logical_axis_rules):
        return model(tokens, positions, decoder_segment_ids=jnp.ones(shape, jnp.int32), enable_dropout=False)


def stepped(model, config):
    """Loss, gradients and all other state after a step, split as MaxText's train step splits it."""
    overwritten = nnx.variable_type_from_name(OVERWRITTEN, allow_register=True)
    graph, params, histories, rest = nnx.split(model, nnx.Param, overwritten, ...)

    def loss(params, histories):
        copy = nnx.merge(graph, params, histories, rest, copy=True)
        out = run(copy, config).astype(jnp.float32)
        return jnp.mean(jnp.square(out)), nnx.state(copy, nnx.Not(nnx.Any(nnx.Param, overwritten)))

    (value, after), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, histories)
    return value, gradients, after


def served(trained, config):
    """The logits of the three modes; what layer-wise quantization saves, and what the model that serves asks for."""
    convert, serve = built(config, "convert"), built(config, "serve")
    layerwise.LayerwiseQuantization._copy_kernel_leaves_(convert, trained)
    logits = [run(trained, config), run(convert, config)]
    persistent = nnx.Not(nnx.Any(nnx.RngState, nnx.Cache, nnx.Intermediate))
    saved = layerwise.LayerwiseQuantization._strip_kernels_at_quantized_paths(nnx.state(convert, persistent).to_pure_dict())
    assert jax.tree.structure(saved) == jax.tree.structure(nnx.state(serve, persistent).to_pure_dict())
    nnx.update(serve, saved)
    return [*logits, run(serve, config)], saved


@pytest.mark.finding(25, 26, 27, 30, 31)
@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "int8"},
        {"quantization": "int8", "use_qwix_quantization": True, "quantization_local_shard_count": 2},
        {"quantization": "intmp", "quant_cfg_path": os.path.join(CONFIGS, "quantization/dense_llm_weight_only_scale.json")},
        {"quantization": "fp8_full", "weight_sparsity_n": 2, "weight_sparsity_m": 4, "weight_sparsity_start_step": 0},
    ],
    ids=["int8", "int8-qwix", "intmp", "fp8_full-sparse"],
)
def test_what_is_trained_is_converted_stripped_and_served(tmp_path, fields):
    config = configured(tmp_path, **fields)
    model = built(config)
    value, (gradients, _), _ = stepped(model, config)
    assert jnp.isfinite(value) and all(jnp.isfinite(g).all() and jnp.any(g != 0) for g in jax.tree.leaves(gradients))
    if "weight_sparsity_n" in fields:
        return  # a fresh model converts by magnitude; masks of training are tested by the stand-in
    (trained, converted, quantized), saved = served(model, config)
    np.testing.assert_array_equal(converted, trained)
    np.testing.assert_array_equal(quantized, trained)
    layers = saved["decoder"]["layers"]
    weights = {
        name: x["AqtDotGeneral_0"]["qrhs"]["frozen"].weight
        for name, x in {**layers["mlp"], **layers["self_attention"]}.items()
    }
    bits = {name: q.scheme.format.bits for name, q in weights.items()}
    fours = {"query", "key", "value", "out", "wi_0", "wo"} if fields["quantization"] == "intmp" else set()
    assert bits == {name: 4 if name in fours else 8 for name in ("wi_0", "wi_1", "wo", "query", "key", "value", "out")}
    assert all("kernel" not in x for x in {**layers["mlp"], **layers["self_attention"]}.values())


@pytest.mark.finding(28)
def test_sparse_steps_carry_their_masks(tmp_path):
    fields = {"weight_sparsity_n": 2, "weight_sparsity_m": 4, "weight_sparsity_start_step": 0}
    config = configured(tmp_path, quantization="fp8_full", **fields)
    _, _, after = stepped(built(config), config)
    wo = after["decoder"]["layers"]["mlp"]["wo"]["AqtDotGeneral_0"]
    assert np.asarray(wo["mask"].get_value()).mean() == 0.5 and wo["step"].get_value().tolist() == [1, 1]


def test_delayed_scales_are_the_gradient_of_their_state(tmp_path):
    config = configured(tmp_path, quantization="fp8")
    _, (_, histories), _ = stepped(built(config), config)
    scale = histories["decoder"]["layers"]["mlp"]["wo"]["AqtDotGeneral_0"]["weight_scale"].get_value()
    assert scale.shape == (2,) and (scale != 1).all()


@pytest.mark.finding(29)
@pytest.mark.parametrize("sparse", [False, True], ids=["einsum", "ragged"])
def test_experts_train(tmp_path, sparse):
    config = configured(tmp_path, quantization="int8", sparse_matmul=sparse, megablox=False, **EXPERTS)
    value, (gradients, _), _ = stepped(built(config), config)
    assert jnp.isfinite(value) and all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.finding(29, 31)
def test_experts_are_converted_and_served(tmp_path, monkeypatch):
    for name, ours in (
        ("_copy_kernel_leaves_", maxtext.copy_parameters),
        ("_strip_kernels_at_quantized_paths", maxtext.strip_quantized),
    ):
        monkeypatch.setattr(layerwise.LayerwiseQuantization, name, staticmethod(ours))
    fields = {"quantization": "int8", "sparse_matmul": False, "scan_layers": False, **EXPERTS}
    # Layer-wise quantization runs the model on one sample, which a mesh that shards the batch cannot divide.
    fields |= {"ici_fsdp_parallelism": 1, "ici_autoregressive_parallelism": jax.device_count()}
    fields |= {"base_num_query_heads": 8, "base_num_kv_heads": 8}
    config = configured(tmp_path, **fields)
    model = built(config)
    source, target = (str(tmp_path / name) for name in ("float", "int8"))
    save_float(model, source)
    job = configured(tmp_path, **fields, load_parameters_path=source, save_quantized_params_path=target)
    layerwise.LayerwiseQuantization(job, jax.random.PRNGKey(0)).load_and_quantize()
    quantized = configured(tmp_path, **fields, load_parameters_path=target, checkpoint_is_quantized=True)
    mesh = jax.sharding.Mesh(creation.maxtext_utils.create_device_mesh(config=quantized), quantized.mesh_axes)
    served = creation.from_pretrained(quantized, mesh=mesh, quant_mode_str="serve")
    np.testing.assert_array_equal(run(served, quantized)[0], run(model, config)[0])
    experts = served.decoder.layers_0.MoeBlock_0
    assert experts.wi_0.shape == (4, 1, 1)
    assert experts.quant_einsum_wi_0.AqtDotGeneral_0["qrhs"]["frozen"].get_value().weight.shape == (4, 64, 128)


def save_float(model, path):
    """Writes a float checkpoint as MaxText does."""

    def wrapped(tree):
        return {name: wrapped(x) if isinstance(x, dict) else {"value": x} for name, x in tree.items()}

    ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=False).save(path, wrapped(nnx.state(model, nnx.Param).to_pure_dict()))


@pytest.mark.finding(24, 25)
def test_a_checkpoint_is_quantized_layer_by_layer_and_the_engine_serves_it(tmp_path):
    fields = {"quantization": "int8", "quantize_kvcache": True}
    config = configured(tmp_path, **fields)
    model = built(config)
    logits = run(model, config)
    source, target = (str(tmp_path / name) for name in ("float", "int8"))
    save_float(model, source)
    job = configured(tmp_path, **fields, load_parameters_path=source, save_quantized_params_path=target)
    layerwise.LayerwiseQuantization(job, jax.random.PRNGKey(0)).load_and_quantize()
    tree = ocp.PyTreeCheckpointer().metadata(target).item_metadata.tree
    paths = {"/".join(path) for path in nnx.traversals.flatten_mapping(tree)}
    assert {path for path in paths if "/kernel" in path} == {"decoder/logits_dense/kernel/value"}

    shape = (1, config.max_prefill_predict_length)
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, config.vocab_size, (config.global_batch_size_to_train_on, 16)), jnp.int32
    )
    for path, is_quantized in ((source, False), (target, True)):
        engine = maxengine.MaxEngine(
            configured(tmp_path, **fields, load_parameters_path=path, checkpoint_is_quantized=is_quantized)
        )
        params = engine.load_params()
        found, _ = engine._nnx_run_model(
            params,
            engine._nnx_init_cache_dict(),
            tokens[:1, : shape[1]],
            jnp.arange(shape[1], dtype=jnp.int32)[None],
            decoder_segment_ids=jnp.ones(shape, jnp.int32),
            model_mode="prefill",
        )
        np.testing.assert_allclose(found[0].astype(jnp.float32), logits[0, : shape[1]].astype(jnp.float32), atol=0.05)


def test_layers_alone_and_the_experts_einsum():
    def layer(mode):
        with nnx.use_eager_sharding(False):
            quant = maxtext.Quantization(INT8, quantizations.get_quant_mode(mode))
            return linears.DenseGeneral((4, 4), (2, 16), axis=(-2, -1), quant=quant, rngs=nnx.Rngs(0))

    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4, 4)), jnp.float32)
    trained, numbers = layer("train"), (((1, 2), (0, 1)), ((), ()))
    found, gradient = nnx.value_and_grad(lambda layer: jnp.sum(jnp.sin(layer(x))))(trained)
    kernel = trained.kernel[...]
    want, want_gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(fb.dot_general(x, w, numbers, policy=INT8))))(kernel)
    np.testing.assert_allclose(found, want, rtol=1e-6)
    np.testing.assert_allclose(gradient.kernel[...], want_gradient, rtol=1e-6, atol=1e-6)
    assert set(nnx.to_pure_dict(nnx.state(layer("serve")))) == {"AqtDotGeneral_0"}
    equation, parent = "BTD,EDF->BTEF", types.SimpleNamespace(rngs=nnx.Rngs(0))
    experts = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4, 8)), jnp.float32)
    einsum = maxtext.Quantization(INT8).einsum(mesh_axes=("exp", None, "mlp"))
    found = quantizations.apply_einsum_in_nnx(parent, "wi", einsum, ["aqt"], equation, x, experts)
    np.testing.assert_array_equal(found, fb.einsum(equation, x, experts, policy=INT8))
