"""The three products of a policy: values against fake quantization in float64, gradients arm by arm."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.quantize import expanded_scale
from fewbit.array.scales import Fixed
from fewbit.ops.bilinear import AbstractBilinear, ProductConfig, _own_random, quantized_product
from fewbit.ops.conv import Conv
from fewbit.ops.dot import Dot
from fewbit.ops.ragged import PLAIN, RaggedDot, _hashable
from fewbit.training import is_covered

NHWC = jax.lax.conv_dimension_numbers((2, 6, 6, 4), (3, 3, 4, 8), ("NHWC", "HWIO", "NHWC"))
DEPTHWISE = jax.lax.conv_dimension_numbers((2, 6, 6, 4), (2, 2, 1, 4), ("NHWC", "HWIO", "NHWC"))
SAMPLES = jax.lax.conv_dimension_numbers((4, 3, 9), (6, 3, 3), ("NCW", "OIW", "NCW"))
GROUPED = jax.lax.conv_dimension_numbers((2, 4, 9), (6, 2, 3), ("NCW", "OIW", "NCW"))


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A product, the shapes of its operands, and what it takes besides."""

    bilinear: AbstractBilinear
    left: tuple[int, ...]
    right: tuple[int, ...]
    extra: object = None


CASES = {
    "matmul": Case(Dot(2, 2, (((1,), (0,)), ((), ())), None, None, None), (6, 32), (32, 16)),
    "batched": Case(Dot(4, 3, (((3, 1), (0, 2)), ((0,), (1,))), None, None, None), (3, 8, 4, 16), (16, 3, 8)),
    "outer": Case(Dot(1, 2, (((), ()), ((), ())), None, None, None), (4,), (3, 5)),
    "conv": Case(Conv((1, 1), "SAME", None, None, NHWC, 1, 1, None, None), (2, 6, 6, 4), (3, 3, 4, 8)),
    "grouped": Case(Conv((2,), ((1, 1),), None, None, GROUPED, 2, 1, None, None), (2, 4, 9), (6, 2, 3)),
    "depthwise": Case(
        Conv((1, 1), "VALID", None, (2, 1), DEPTHWISE, 4, 1, None, None),
        (2, 6, 6, 4),
        (2, 2, 1, 4),
    ),
    "batch groups": Case(Conv((1,), "VALID", None, None, SAMPLES, 1, 2, None, None), (4, 3, 9), (6, 3, 3)),
    "ragged": Case(
        RaggedDot(_hashable(PLAIN), 10, None, None),
        (10, 16),
        (3, 16, 8),
        (jnp.array([4, 0, 5], jnp.int32), None),
    ),
}

FP8 = fb.Policy("fp8", "fp8", dlhs="fp8_e5m2", drhs="fp8_e5m2")
INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")
QAT = fb.Policy("int8", "int8")
ANEW = fb.Policy("mxfp8", "mxfp8", dlhs=fb.Arm("mxfp8_e5m2", operand="mxfp8"), drhs=fb.Arm("mxfp8_e5m2", operand="mxfp8"))
ORIGINAL = fb.Policy("int4_g16", "int8", dlhs=fb.Arm("int8", operand="original"), drhs=fb.Arm("int8"))
ASYMMETRIC = fb.Policy("uint8", "uint8", dlhs="int8", drhs="int8")
POLICIES = {"qat": QAT, "int8": INT8, "fp8": FP8, "anew": ANEW, "original": ORIGINAL, "asymmetric": ASYMMETRIC}
# Transformer Engine's without its noise and its rotation: square blocks of weights serve both directions, rows only one.
NVFP4 = fb.Policy("nvfp4_16x16", "nvfp4_absmax", dlhs="nvfp4_absmax", drhs=fb.Arm("nvfp4_absmax", operand="nvfp4_absmax"))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def product(case, policy, key=None):
    return lambda a, b: quantized_product(case.bilinear, ProductConfig(policy), a, b, case.extra, key)


def faked(x, scheme, axes):
    return x if scheme is None else fb.fake_quant(x, scheme, axis=axes or (-1,))


def expected_gradient(case, arm, is_left, g, own, other, other_scheme):
    """The formula of `Arm`, with fake quantization in float32 and the product's own transpose."""
    axes, other_axes = case.bilinear.contracted_backward(is_left)
    forward_axes = case.bilinear.contracted[1 if is_left else 0]
    if arm.gradient is None:
        met = other if arm.operand == "original" else faked(other, other_scheme, forward_axes)
    elif isinstance(arm.operand, fb.Scheme):
        met = faked(other, arm.operand, other_axes)
        g = faked(g, arm.gradient, axes)
    elif arm.operand == "original":
        met, g = other, faked(g, arm.gradient, axes)
    else:
        q = fb.quantize(other, other_scheme, axis=forward_axes or (-1,))
        scale = case.bilinear.scale_for_gradient(is_left, expanded_scale(q), case.extra)
        met = fb.dequantize(q)
        # Folding the scale in and taking it out again is the quantizer of the scaled gradient.
        g = faked(g, arm.gradient, axes) if scale is None else faked(g * scale, arm.gradient, axes) / scale

    def of_one(x):
        return case.bilinear.values(x, met, case.extra) if is_left else case.bilinear.values(met, x, case.extra)

    return jax.linear_transpose(of_one, own)(g)[0]


# Every policy with each kind of product; the further forms of a kind with a policy of each sort. The matrices of `matmul` are
# the plain form of `batched`, so that what they share is left to `make test-long`.
PAIRS = [
    pytest.param(name, policy, marks=[pytest.mark.long] if name == "matmul" and policy not in ("int8", "original") else [])
    for name in CASES
    for policy in POLICIES
    if name in ("matmul", "batched", "conv", "ragged") or policy in ("int8", "asymmetric")
]
POLICIES["nvfp4"] = NVFP4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [*PAIRS, ("matmul", "nvfp4")])
def test_values_and_gradients_are_those_of_the_formulas(name, policy):
    case, policy = CASES[name], POLICIES[policy]
    lhs, rhs = normal(*case.left), normal(*case.right, seed=1)

    @jax.jit
    def both(lhs, rhs, g):
        out, pull = jax.vjp(product(case, policy), lhs, rhs)
        return out, pull(g)

    @jax.jit
    def wanted(lhs, rhs, g):
        axes = case.bilinear.contracted
        wide = (faked(lhs, policy.activation, axes[0]), faked(rhs, policy.weight, axes[1]))
        left = expected_gradient(case, policy.dlhs, True, g, lhs, rhs, policy.weight)
        right = expected_gradient(case, policy.drhs, False, g, rhs, lhs, policy.activation)
        return case.bilinear.values(*wide, case.extra), left, right

    g = normal(*jax.eval_shape(product(case, policy), lhs, rhs).shape, seed=2)
    out, (left, right) = both(lhs, rhs, g)
    want, want_left, want_right = wanted(lhs, rhs, g)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    # float32 sums of at most 162 products of elements near 1, in another order: 162 * 2**-24 of their magnitudes, 1e-5 each.
    np.testing.assert_allclose(left, want_left, rtol=2e-5, atol=5e-5)
    np.testing.assert_allclose(right, want_right, rtol=2e-5, atol=5e-5)


@pytest.mark.finding(34)
def test_zero_points_enter_both_gradients():
    """Each gradient is the sum of codes less zero points, times the scales: the formula in float64."""
    case = CASES["matmul"]
    # Of one sign, so that every zero point is at an end of the 256 codes: 0 or the middle in its place is far off.
    lhs, rhs, g = jnp.abs(normal(*case.left)), -jnp.abs(normal(*case.right, seed=1)), normal(6, 16, seed=2)

    @jax.jit
    def both(lhs, rhs, g):
        left, right = fb.quantize(lhs, "uint8", axis=1), fb.quantize(rhs, "uint8", axis=0)
        scaled = fb.quantize(g * right.scale, "int8", axis=1), fb.quantize(g * left.scale, "int8", axis=0)
        return jax.vjp(product(case, ASYMMETRIC), lhs, rhs)[1](g), (left, right), tuple(map(fb.dequantize, scaled))

    found, operands, scaled = both(lhs, rhs, g)
    (left, right), (to_left, to_right) = ([np.asarray(q.codes, np.float64) for q in operands], map(np.float64, scaled))
    left, right = (c - np.asarray(q.zero_point, np.float64) for c, q in zip((left, right), operands, strict=True))
    of_256 = 256 * np.abs(to_left).sum(1).max(), 256 * np.abs(to_right).sum(0).max()
    for got, want, largest in zip(found, (to_left @ right.T, left.T @ to_right), of_256, strict=True):
        # Sums of codes are exact in int32; two of them, of codes and of zero points within 256, are scaled and subtracted.
        np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-23 * largest)


@pytest.mark.finding(34)
def test_each_row_has_the_scales_of_its_own_group():
    """The scales of the groups differ by factors of 100, so a row with those of a neighbouring group is off by as much."""
    case, sizes = CASES["ragged"], (4, 0, 5)
    lhs, g = normal(*case.left), normal(10, 8, seed=2)
    rhs = normal(*case.right, seed=1) * jnp.array([1e-2, 1.0, 1e2])[:, None, None]

    @jax.jit
    def both(lhs, rhs, g):
        out, pull = jax.vjp(product(case, INT8), lhs, rhs)
        return out, pull(g)[0], fb.fake_quant(lhs, "int8", axis=1), fb.fake_quant(rhs, "int8", axis=1)

    out, to_left, rows, experts = (np.asarray(a, np.float64) for a in both(lhs, rhs, g))
    of_row = experts[np.repeat(np.arange(3), sizes)]
    off = lambda got, want: (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max()  # noqa: E731
    # Each decoded element is rounded to float32 once: 2**-24 of it.
    assert off(out[:9], np.einsum("mk,mkn->mn", rows[:9], of_row)) < 2.0**-21
    # The gradient is rounded to int8: at most half a step of 127, of the largest of its 8 elements.
    assert off(to_left[:9], np.einsum("mn,mkn->mk", np.asarray(g, np.float64)[:9], of_row)) < 0.02
    assert not out[9].any() and not to_left[9].any()  # a row beyond all groups


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eight_bits_lie_near_the_float_product_and_its_gradients(name):
    case = CASES[name]
    lhs, rhs = normal(*case.left), normal(*case.right, seed=1)
    g = normal(*jax.eval_shape(product(case, INT8), lhs, rhs).shape, seed=2)

    @jax.jit
    def both(lhs, rhs, g):
        got, pull = jax.vjp(product(case, INT8), lhs, rhs)
        want, float_pull = jax.vjp(lambda a, b: case.bilinear.values(a, b, case.extra), lhs, rhs)
        return (got, *pull(g)), (want, *float_pull(g))

    for a, b in zip(*both(lhs, rhs, g), strict=True):
        # Each operand is off by at most half of 1/127 of its largest element, about 0.8 % of its spread each.
        assert jnp.linalg.norm(a - b) < 0.02 * jnp.linalg.norm(b)


@pytest.mark.slow
def test_eager_equals_jit():
    case = CASES["matmul"]
    lhs, rhs = normal(*case.left), normal(*case.right, seed=1)
    for policy in (FP8, INT8):

        def run(lhs, rhs, policy=policy):
            out, pull = jax.vjp(product(case, policy), lhs, rhs)
            return out, pull(jnp.cos(out))

        for a, b in zip(jax.tree.leaves(run(lhs, rhs)), jax.tree.leaves(jax.jit(run)(lhs, rhs)), strict=True):
            assert np.array_equal(a, b)


def test_codes_are_what_is_multiplied():
    """int8 x int8 into int32 forwards and backwards, fp8 x fp8 into float32, and no product of floats besides."""
    case = CASES["matmul"]
    lhs, rhs = normal(*case.left), normal(*case.right, seed=1)
    for policy, forward, backward in (
        (INT8, "int8", ("int8", "int8")),
        (FP8, "float8_e4m3fn", ("float8_e4m3fn", "float8_e5m2")),
    ):
        text = jax.make_jaxpr(jax.grad(lambda a, b, p=policy: jnp.sum(product(case, p)(a, b)), argnums=(0, 1)))(lhs, rhs)
        types = [tuple(str(v.aval.dtype) for v in eqn.invars) for eqn in dots_of(text.jaxpr)]
        assert types[0] == (forward, forward)
        assert sorted(sorted(t) for t in types[1:]) == [sorted(backward)] * 2


def dots_of(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and eqn.invars[1].aval.ndim == 2:  # not the sums that look for NaN
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from dots_of(getattr(inner, "jaxpr", inner))


def test_elements_beyond_a_fixed_range_get_no_gradient():
    policy = fb.Policy(dataclasses.replace(fb.scheme("int8"), calibration=Fixed(-1.0, 1.0)))
    w = normal(32, 16, seed=1)
    x = normal(6, 32)
    gradient = jax.grad(lambda w: jnp.sum(fb.dot_general(x, w, (((1,), (0,)), ((), ())), policy=policy)))(w)
    beyond = ~is_covered(w, fb.quantize(w, policy.weight, axis=0))
    assert beyond.any()
    assert np.array_equal(gradient == 0, beyond)
    free = fb.Policy(policy.weight, clips_gradient=False)
    assert (jax.grad(lambda w: jnp.sum(fb.dot_general(x, w, (((1,), (0,)), ((), ())), policy=free)))(w) != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["element", "row", "tensor"])
def test_stochastic_rounding_of_gradients_is_unbiased_and_needs_a_key(noise):
    policy = fb.Policy("int8", dlhs=fb.Arm("int4_narrow", rounding="stochastic", noise=noise))
    x, w, g = normal(4, 32), normal(32, 16, seed=1), normal(4, 16, seed=2)
    numbers = (((1,), (0,)), ((), ()))
    with pytest.raises(fb.QuantError, match="pass key="):
        jax.grad(lambda x: jnp.sum(fb.dot_general(x, w, numbers, policy=policy)))(x)

    def pulled(key):
        return jax.vjp(lambda x: fb.dot_general(x, w, numbers, policy=policy, key=key), x)[1](g)[0]

    many = jax.vmap(pulled)(jax.random.split(jax.random.key(0), 4000))
    exact = jax.vjp(lambda x: fb.dot_general(x, w, numbers, policy=fb.Policy("int8")), x)[1](g)[0]
    spread = many.std(axis=0) / np.sqrt(4000)
    assert (jnp.abs(many.mean(axis=0) - exact) < 5 * spread + 1e-4).all()
    assert not np.array_equal(many[0], many[1])
    assert np.array_equal(pulled(jax.random.key(3)), pulled(jax.random.key(3)))


@pytest.mark.parametrize("length", [16, 64, 2048])
def test_a_rotation_has_a_random_bit_for_every_sign(length):
    """With fewer words the last one would be read again (indices are clamped), and signs would repeat."""
    policy = fb.Policy("int8", drhs=fb.Arm("int8", operand="int8", hadamard=length))
    _, random = _own_random(ProductConfig(policy), jax.random.key(0), jnp.ones(2))
    assert random.signs.size == max(length // 32, 1)
    assert np.unique(random.signs).size == random.signs.size


@pytest.mark.slow
def test_a_rotation_leaves_the_gradient_and_spreads_outliers():
    x, w = normal(64, 32).at[3].multiply(50), normal(32, 16, seed=1)
    numbers = (((1,), (0,)), ((), ()))
    g = normal(64, 16, seed=2).at[:, :].multiply(jnp.ones((64, 1)).at[5].set(100))

    def error(hadamard):
        policy = fb.Policy("nvfp4_16x16", drhs=fb.Arm("int4_g16", operand="int4_g16", hadamard=hadamard))
        pull = jax.vjp(lambda w: fb.dot_general(x, w, numbers, policy=policy, key=jax.random.key(0)), w)[1]
        exact = x.T @ g
        return float(jnp.linalg.norm(pull(g)[0] - exact) / jnp.linalg.norm(exact))

    assert error(16) < error(None)
    policy = fb.Policy("int8", drhs=fb.Arm("int4", operand="int4", hadamard=16))
    gradient = jax.grad(lambda w: jnp.sum(fb.dot_general(normal(6, 32), w, numbers, policy=policy, key=jax.random.key(0))))
    with pytest.raises(
        fb.QuantError,
        match=r"hadamard=16 must divide .* 6 elements are summed.*gradient \(6, 16\) and the other operand \(6, 32\)",
    ):
        gradient(w)
    gradient = jax.grad(
        lambda w: jnp.sum(fb.dot_general(normal(32), w, (((0,), (0,)), ((), ())), policy=policy, key=jax.random.key(0)))
    )
    with pytest.raises(
        fb.QuantError, match=r"gradient \(16,\) and the other operand \(32,\) has none; set hadamard to null"
    ):
        gradient(w)


@pytest.mark.slow
def test_the_tiled_axis_can_be_the_first_or_the_last():
    """The batch, as AQT has it, or the sequence, as Qwix has it: one outlier spoils its tile only."""
    x, w = normal(4, 8, 16), normal(16, 12, seed=1)
    numbers = (((2,), (0,)), ((), ()))
    g = normal(4, 8, 12, seed=2)
    found = {}
    for axis in ("first", "last"):
        policy = fb.Policy("int8", drhs=fb.Arm("int4_g2", operand="original", tiled_axis=axis))
        got = jax.vjp(lambda w, p=policy: fb.dot_general(x, w, numbers, policy=p), w)[1](g)[0]
        want_g = fb.fake_quant(g, "int4_g2", axis=(1, 0) if axis == "first" else (0, 1))
        np.testing.assert_allclose(got, jnp.einsum("bsi,bso->io", x, want_g), rtol=1e-5, atol=1e-5)
        found[axis] = got
    assert not np.array_equal(found["first"], found["last"])


@pytest.mark.parametrize("policy", [INT8, pytest.param(ANEW, marks=pytest.mark.slow)], ids=["int8", "anew"])
def test_a_scalar_is_not_quantized(policy):
    """As an operand, and as the gradient of a full contraction: that of an operand is then the other one as it entered."""
    x, w = normal(64), normal(64, seed=1)

    def product(subscripts):
        return lambda x, w: fb.einsum(subscripts, x, w, policy=policy)

    got = jax.grad(product("i,i->"), (0, 1))(x, w)
    is_original = policy.dlhs.operand != "forward"
    for one, other, scheme in ((got[0], w, policy.weight), (got[1], x, policy.activation)):
        np.testing.assert_allclose(one, other if is_original else faked(other, scheme, (0,)), rtol=1e-6)
    scalar = jnp.float32(1.7)
    for subscripts, operands in ((",i->i", (scalar, w)), ("i,->i", (x, scalar))):
        y, pull = jax.vjp(product(subscripts), *operands)
        place, scheme = (1, policy.weight) if operands[1].ndim else (0, policy.activation)
        np.testing.assert_allclose(y, 1.7 * faked(operands[place], scheme, (0,)), rtol=1e-6)
        np.testing.assert_allclose(pull(x)[place], 1.7 * x, rtol=1e-6)


@pytest.mark.slow
def test_weights_on_the_left_have_the_weight_s_arms():
    policy = fb.Policy("int4", "int8", dlhs="int8", drhs="fp8_e5m2")
    w, x = normal(16, 32, seed=1), normal(6, 32)
    q = dataclasses.replace(fb.quantize(w, policy.weight), policy=policy)
    numbers = (((1,), (1,)), ((), ()))
    left = fb.dot_general(q, x, numbers)
    right = fb.dot_general(x, q, numbers)
    np.testing.assert_allclose(left, right.T, rtol=1e-6)  # both scales multiply in another order
    by_left = jax.grad(lambda x: jnp.sum(jnp.sin(fb.dot_general(q, x, numbers))))(x)
    by_right = jax.grad(lambda x: jnp.sum(jnp.sin(fb.dot_general(x, q, numbers))))(x)
    np.testing.assert_allclose(by_left, by_right, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_tiles_of_the_contraction_are_multiplied_as_codes():
    """128 and more: a scan over tiles, no floating array of an operand's size; below, the decoded product."""
    x, w = normal(4, 300), normal(300, 8, seed=1)
    scheme = fb.scheme("int8").with_tile(128)
    a, b = fb.quantize(x, scheme), fb.quantize(w, scheme, axis=0)
    numbers = (((1,), (0,)), ((), ()))
    want = np.asarray(fb.dequantize(a), np.float64) @ np.asarray(fb.dequantize(b), np.float64)
    np.testing.assert_allclose(fb.dot_general(a, b, numbers), want, rtol=1e-5, atol=1e-5)
    types = [str(eqn.invars[0].aval.dtype) for eqn in dots_of(jax.make_jaxpr(lambda: fb.dot_general(a, b, numbers))().jaxpr)]
    assert types == ["int8"]
    block = fb.quantize(w, "fp8_block128", axis=0)
    other = fb.quantize(x, fb.scheme("fp8").with_tile(128))
    want = np.asarray(fb.dequantize(other), np.float64) @ np.asarray(fb.dequantize(block), np.float64)
    np.testing.assert_allclose(fb.dot_general(other, block, numbers), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_json_of_arms(unchecked):
    policy = fb.Policy(
        "fp8",
        "fp8",
        dlhs="fp8_e5m2",
        drhs=fb.Arm("fp8_e5m2", "mxfp8", "stochastic", "first", 16, "row", "bfloat16"),
        clips_gradient=False,
        accumulator="bfloat16",
    )
    assert fb.Policy.from_json(policy.to_json()) == policy
    with pytest.raises(fb.QuantError, match="did you mean 'gradient'"):
        fb.Policy.from_json({"weight": "int8", "dlhs": {"gradeint": "int8"}})
    with pytest.raises(fb.QuantError, match="rounding is 'stochastik'"):
        fb.Arm("int8", rounding="stochastik")
    with pytest.raises(fb.QuantError, match="an arm without a gradient scheme quantizes nothing"):
        fb.Arm(operand="int8")
    with pytest.raises(fb.QuantError, match=r"noise is 'row', and rounding to the nearest draws no random numbers"):
        fb.Arm("int8", noise="row")
    with pytest.raises(fb.QuantError, match="accumulator is 'bfloat'; did you mean 'bfloat16'"):
        fb.Arm("int8", accumulator="bfloat")
    with pytest.raises(fb.QuantError, match="without activation= the product is one of floats"):
        fb.Policy("int8", accumulator="int32")
    with pytest.raises(fb.QuantError, match="hadamard is 12"):
        fb.Arm("int8", "int8", hadamard=12)


def test_gradients_without_nan_pass_jax_debug_nans():
    policy = fb.Policy("mxfp4", "mxfp4", dlhs="mxfp4", drhs="mxfp4")
    x = jax.random.normal(jax.random.key(0), (32, 32))
    with jax.debug_nans(True):
        jax.grad(lambda x: fb.dot_general(x, x, (((1,), (0,)), ((), ())), policy=policy).sum())(x)
