"""Derivatives of products with QTensors, by `torch.autograd`, forward mode and `torch.func`, are those of the decoded tensors."""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.nn import functional  # noqa: E402

from fewbit import UnsupportedError  # noqa: E402
from fewbit import torch as fbt  # noqa: E402

func = torch.func

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own forward mode


def matmul(decode):
    q = decode(fbt.quantize(torch.randn(6, 32), "int4_g32"))
    return lambda x: torch.tanh(functional.linear(x.reshape(2, 32), q)), torch.randn(64)


def convolution(decode):
    q = decode(fbt.quantize(torch.randn(4, 3, 3), "int8", dim=1))
    return lambda x: torch.tanh(functional.conv1d(x.reshape(2, 3, 5), q, padding=1, stride=2)), torch.randn(30)


def ragged(decode):
    q, sizes = fbt.quantize(torch.randn(2, 5, 32), "mxfp4"), torch.tensor([1, 2])
    matrices = decode(q)

    def fn(x):
        rows = x.reshape(3, 32)
        if isinstance(matrices, fbt.QTensor):
            return torch.tanh(fbt.ragged_dot(rows, matrices.mT, sizes))
        return torch.tanh(torch.stack([rows[i] @ matrices[g].T for i, g in enumerate((0, 1, 1))]))

    return fn, torch.randn(96)


PRODUCTS = {fn.__name__: fn for fn in (matmul, convolution, ragged)}

TRANSFORMS = {
    "grad": lambda fn, x: func.grad(lambda x: fn(x).square().sum())(x),
    "vmap": lambda fn, x: func.vmap(fn, in_dims=1)(torch.stack([x, 2 * x, -x], dim=1)),
    "vmap of vmap": lambda fn, x: func.vmap(func.vmap(fn))(torch.stack([x, 2 * x]).unsqueeze(1)),
    "jvp": lambda fn, x: func.jvp(fn, (x,), (x.flip(0),))[1],
    "vjp": lambda fn, x: func.vjp(fn, x)[1](torch.ones_like(fn(x)))[0],
    "jacrev": lambda fn, x: func.jacrev(fn)(x),
    "jacfwd": lambda fn, x: func.jacfwd(fn)(x),
    "hessian": lambda fn, x: func.hessian(lambda x: fn(x).square().sum())(x),
    "grad of grad": lambda fn, x: func.grad(lambda x: func.grad(lambda x: fn(x).sum())(x).square().sum())(x),
    "vmap of grad": lambda fn, x: func.vmap(func.grad(lambda x: fn(x).sum()))(torch.stack([x, 2 * x])),
    "grad of vmap": lambda fn, x: func.grad(lambda x: func.vmap(fn)(torch.stack([x, 2 * x])).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_transforms(product, transform):
    results = []
    for decode in (lambda q: q, lambda q: q.dequantize()):
        torch.manual_seed(0)
        results.append(TRANSFORMS[transform](*PRODUCTS[product](decode)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("product", PRODUCTS)
def test_transforms_within_a_compiled_function(product):
    fn, x = PRODUCTS[product](lambda q: q)
    xs = torch.stack([x, 2 * x])
    transformed = func.vmap(func.grad(lambda x: fn(x).square().sum()))
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(xs), transformed(xs))


def test_look_ups_are_batched_by_vmap():
    q, ids = fbt.quantize(torch.randn(12, 64), "nf4_dq"), torch.tensor([[1, 5, 3], [0, 11, 3]])
    known = functional.embedding(ids, q)
    assert torch.equal(func.vmap(lambda ids: functional.embedding(ids, q))(ids), known)
    assert torch.equal(func.vmap(lambda ids: functional.embedding(ids, q), in_dims=1, out_dims=1)(ids), known)
    twice = func.vmap(func.vmap(lambda i: functional.embedding(i, q)))(ids)
    assert torch.equal(twice, known)

    def loss(bias, ids):
        return (functional.linear(functional.embedding(ids, q), q) + bias).square().sum()

    bias = torch.randn(12)
    per_sample = func.vmap(func.grad(loss), in_dims=(None, 0))(bias, ids)
    torch.testing.assert_close(per_sample, torch.stack([func.grad(loss)(bias, row) for row in ids]))


def test_the_gradient_of_a_gradient_and_forward_mode_by_autograd():
    results = []
    for decode in (lambda q: q, lambda q: q.dequantize()):
        torch.manual_seed(0)
        fn, x = convolution(decode)
        x.requires_grad_()
        (first,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        with torch.no_grad(), forward_ad.dual_level():
            forward = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        results.append((first, second, forward))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_under_a_policy_there_are_first_derivatives_in_reverse_mode():
    layer = torch.nn.Linear(32, 8)
    fbt.quantize_(layer, "w8a8")
    x = torch.randn(5, 4, 32)
    torch.testing.assert_close(func.vmap(layer)(x), torch.stack([layer(rows) for rows in x]))

    def loss(x):
        return layer(x).square().sum()

    by_autograd = x.clone().requires_grad_()
    loss(by_autograd).backward()
    torch.testing.assert_close(func.grad(loss)(x), by_autograd.grad)
    torch.testing.assert_close(func.vmap(func.grad(loss))(x), by_autograd.grad)
    with pytest.raises(UnsupportedError, match="derivatives in reverse mode only"):
        func.jvp(layer, (x,), (x,))
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        func.grad(lambda x: func.grad(loss)(x).square().sum())(x)


def test_gradients_at_random_are_refused_by_name():
    layer, x = torch.nn.Linear(64, 16), torch.randn(5, 64)
    fbt.quantize_(layer, "te_nvfp4")
    y = layer(x.requires_grad_())
    with pytest.raises(
        UnsupportedError, match=r"gradients at random \(as nvfp4_absmax\), by a key that products of torch lack"
    ):
        y.sum().backward()
