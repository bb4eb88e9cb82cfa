"""Methods on the kernels of convolutions: statistics of patches, less output error than rounding, corrected biases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.methods import AWQ, GPTQ, IMatrix, LearnedRounding, correct_biases

NHWC = ("NHWC", "HWIO", "NHWC")
NCHW = ("NCHW", "OIHW", "NCHW")
CONVOLUTIONS = {
    "strided": (NHWC, (3, 3, 8, 12), {"window_strides": (2, 1), "padding": "SAME"}),
    "outputs first": (NCHW, (12, 8, 3, 2), {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 1)}),
    "grouped": (NHWC, (3, 2, 4, 12), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2}),
    "depthwise": (NHWC, (3, 3, 1, 16), {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 8}),
}
EACH = pytest.mark.parametrize(("layout", "shape", "options"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)


def layer_of(layout, options):
    """A convolution with a bias."""

    def layer(params, x):
        y = jax.lax.conv_general_dilated(x, params["kernel"], dimension_numbers=layout, **options)
        return y + params["bias"].reshape([-1 if axis == "C" else 1 for axis in layout[2]])

    return layer


def operands(layout, shape, options):
    """A kernel, its bias, and images whose channels differ in size."""
    rng, channels = np.random.default_rng(0), 8
    outputs = shape[layout[1].index("O")]
    assert shape[layout[1].index("I")] * options.get("feature_group_count", 1) == channels
    params = {"kernel": rng.standard_normal(shape), "bias": rng.standard_normal(outputs)}
    images = rng.standard_normal((6, 9, 7, channels)) * np.exp(rng.standard_normal(channels)) + 0.5
    images = images + np.roll(images, 1, axis=1)
    x = images if layout[0] == "NHWC" else images.transpose(0, 3, 1, 2)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))


def axis_of(layout):
    """The axes of the kernel that the convolution contracts."""
    return tuple(i - 4 for i, axis in enumerate(layout[1]) if axis != "O")


@EACH
def test_a_convolution_is_the_product_of_its_observed_patches(layout, shape, options):
    """`|x w|^2` of every output is `w^T H w`, and the sum of an output is that of its patches times the kernel."""
    params, x = operands(layout, shape, options)
    stats = fb.observe(layer_of(layout, options), params, [x], "int4", collect=("hessian", "sum", "squares"))["kernel"]
    out, groups = layout[1].index("O"), options.get("feature_group_count", 1)
    outputs = layer_of(layout, options)(params | {"bias": jnp.zeros_like(params["bias"])}, x)
    outputs = np.moveaxis(np.asarray(outputs), layout[2].index("C"), -1).reshape(-1, groups, shape[out] // groups)
    hessian, total = stats.hessian.reshape(groups, *stats.hessian.shape[-2:]), stats.sum.reshape(groups, -1)
    kernel = jnp.moveaxis(params["kernel"], out, -1).reshape(-1, groups, shape[out] // groups)
    energy = jnp.einsum("kgn,gkj,jgn->gn", kernel, hessian, kernel)
    np.testing.assert_allclose(energy, np.square(outputs).sum(0), rtol=1e-4)
    np.testing.assert_allclose(jnp.einsum("kgn,gk->gn", kernel, total), outputs.sum(0), rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(stats.squares.reshape(groups, -1), jnp.diagonal(hessian, axis1=1, axis2=2), rtol=1e-5)


@pytest.mark.slow_after(1)
@EACH
@pytest.mark.parametrize(
    "method",
    [GPTQ(), pytest.param(AWQ(), marks=pytest.mark.slow), pytest.param(LearnedRounding(), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_method_leaves_less_error_of_outputs_than_rounding(layout, shape, options, method):
    params, x = operands(layout, shape, options)
    layer = layer_of(layout, options)
    recipe = "int3_g64" if "feature_group_count" not in options else "int3"
    plan = fb.plan(layer, params, x, recipe=recipe)
    stats = fb.observe(layer, params, [x], recipe, collect=method.collect)

    def error(**options):
        quantized = fb.quantize_params(params, plan, **options)
        return float(jnp.square(fb.transparent(layer)(quantized, x) - layer(params, x)).sum())

    assert error(method=method, stats=stats) < 0.98 * error()


@EACH
def test_corrected_biases_give_the_mean_outputs_of_the_float_layer(layout, shape, options):
    params, x = operands(layout, shape, options)
    layer = layer_of(layout, options)
    plan = fb.plan(layer, params, x, recipe="int4")
    stats = fb.observe(layer, params, [x], "int4", collect=("sum",))
    quantized = fb.quantize_params(params, plan)
    after = correct_biases(params, quantized, plan, stats)
    others = tuple(i for i, axis in enumerate(layout[2]) if axis != "C")
    before, left = (jnp.abs((layer(params, x) - fb.transparent(layer)(q, x)).mean(others)).max() for q in (quantized, after))
    assert left < 1e-4 * before or left < 1e-5


def test_a_kernel_of_one_place_is_a_matrix():
    """GPTQ gives a 1 x 1 convolution the codes of the product with that matrix."""
    params, x = operands(NHWC, (1, 1, 8, 12), options := {"window_strides": (1, 1), "padding": "SAME"})
    matrix = {"kernel": params["kernel"][0, 0], "bias": params["bias"]}

    def dense(params, x):
        return x.reshape(-1, 8) @ params["kernel"] + params["bias"][None]

    found = []
    for layer, those in ((layer_of(NHWC, options), params), (dense, matrix)):
        plan = fb.plan(layer, those, x, recipe="int4")
        stats = fb.observe(layer, those, [x], "int4", collect=("hessian",))
        found.append(fb.quantize_params(those, plan, method=GPTQ(), stats=stats)["kernel"])
    np.testing.assert_array_equal(fb.dequantize(found[0])[0, 0], fb.dequantize(found[1]))


def test_importance_weights_of_groups_are_those_of_each_output():
    layout, shape, options = CONVOLUTIONS["grouped"]
    params, x = operands(layout, shape, options)
    plan = fb.plan(layer_of(layout, options), params, x, recipe="int4")
    stats = fb.observe(layer_of(layout, options), params, [x], "int4", collect=IMatrix().collect)
    quantized = fb.quantize_params(params, plan, method=IMatrix(), stats=stats)["kernel"]
    halves = []
    for g in range(2):
        part = {"kernel": params["kernel"][..., 6 * g : 6 * g + 6], "bias": params["bias"][:6]}
        layer = layer_of(layout, options | {"feature_group_count": 1})
        images = x[..., 4 * g : 4 * g + 4]
        plan = fb.plan(layer, part, images, recipe="int4")
        stats = fb.observe(layer, part, [images], "int4", collect=IMatrix().collect)
        halves.append(fb.quantize_params(part, plan, method=IMatrix(), stats=stats)["kernel"])
    np.testing.assert_array_equal(fb.dequantize(quantized), jnp.concatenate([fb.dequantize(q) for q in halves], -1))


def test_what_is_refused():
    layout, _, options = CONVOLUTIONS["strided"]
    params = {"images": jnp.ones((2, 5, 5, 8)), "bias": jnp.zeros(12)}

    def layer(params, x):
        return layer_of(layout, options)({"kernel": x, "bias": params["bias"]}, params["images"])

    recipe = fb.Recipe((fb.Rule("images", "int4", axis=-1),))
    with pytest.raises(fb.UnsupportedError, match="hessian is not collected for the images of a convolution"):
        fb.observe(layer, params, [jnp.ones((3, 3, 8, 12))], recipe, collect=("hessian",))
