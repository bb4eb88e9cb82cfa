"""QTensor as a tensor of torch: parameters, state dicts, files, copies, transposes, and what it refuses."""

import copy
import io
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.torch.qtensor import form_of, restored  # noqa: E402


@pytest.fixture(scope="module")
def q() -> "fbt.QTensor":
    """A matrix [12, 64] with scales in two levels."""
    return fbt.quantize(torch.tensor(np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32)), "nvfp4")


def abstract(name: str) -> fb.QArray:
    """A QArray of a scheme with random bytes, without quantizing anything."""
    form = jax.eval_shape(lambda: fb.quantize(jnp.zeros((3, 40), jnp.bfloat16), name, backend="reference"))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.integers(0, 3, leaf.shape)).astype(leaf.dtype), form)


def same(a: "fbt.QTensor", b: "fbt.QTensor") -> bool:
    return a.form is b.form and all(map(torch.equal, a.leaves, b.leaves))


def reloaded(value: object) -> object:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.finding(15)
@pytest.mark.parametrize("name", fb.SCHEMES.names())
def test_every_scheme_comes_from_jax_and_goes_back(name: str) -> None:
    known = abstract(name)
    t = fbt.from_qarray(known)
    back = fbt.to_qarray(t)
    assert jax.tree.structure(back) == jax.tree.structure(known)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(known), strict=True))
    assert t.nbytes == known.nbytes and t.shape == known.shape and t.dtype == torch.bfloat16
    assert form_of(t.form.text) is t.form
    assert fbt.to_qarray(t.T).scheme == known.T.scheme and t.T.T.form is t.form
    assert t.T.codes.data_ptr() == t.codes.data_ptr()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_distributed_checkpoints_have_it(tmp_path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    module, other = nn.Linear(64, 16), nn.Linear(64, 16)
    for one in (module, other):
        fbt.quantize_(one, "nf4")
    checkpoint.save(module.state_dict(), checkpoint_id=tmp_path)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    torch.testing.assert_close(other(torch.eye(64)), module(torch.eye(64)), rtol=0, atol=0)


def test_writers_that_need_a_storage_are_told_what_to_call() -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(fb.QuantError, match="no storage of its own dtype, which save_pretrained"):
        safetensors.save({"w": fbt.quantize(torch.ones(4, 64), "nf4")})


@pytest.mark.finding(6)
def test_a_state_dict_has_it() -> None:
    model, other = (nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)) for _ in range(2))
    for module in (model, other):
        fbt.quantize_(module, "int8", rules={"1.weight": None})
    state = model.state_dict()
    assert isinstance(state["0.weight"], fbt.QTensor) and state["0.weight"].nbytes == 8 * 64 + 8 * 4
    assert not same(state["0.weight"], other[0].weight)
    loaded = reloaded(state)
    assert other.load_state_dict(loaded) is not None and same(state["0.weight"], other[0].weight)
    fresh = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)).requires_grad_(False)
    fresh.load_state_dict(loaded, assign=True)
    assert same(state["0.weight"], fresh[0].weight) and isinstance(fresh[0].weight, nn.Parameter)
    with pytest.raises(RuntimeError, match="quantize_ on the module"):
        nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)).load_state_dict(reloaded(state))


@pytest.mark.finding(15)
def test_parameters_buffers_copies_and_pickles(q: "fbt.QTensor") -> None:
    p = nn.Parameter(q, requires_grad=False)
    assert isinstance(p, nn.Parameter) and isinstance(p, fbt.QTensor) and same(p, q)
    module = nn.Module()
    module.register_buffer("table", q)
    module.register_parameter("weight", p)
    assert [*module.state_dict()] == ["weight", "table"]
    twin = copy.deepcopy(module)
    assert same(twin.weight, p) and isinstance(twin.weight, nn.Parameter)
    assert twin.weight.codes.data_ptr() != p.codes.data_ptr()
    back = reloaded(p)
    assert same(back, p) and isinstance(back, nn.Parameter)
    assert same(pickle.loads(pickle.dumps(q)), q)
    module.to(torch.bfloat16)
    assert module.weight.dtype == module.table.dtype == torch.bfloat16 and module.weight.nbytes == q.nbytes


def test_data_ptr_tells_shared_parameters_from_others() -> None:
    """Libraries key weights by it: where it was 0 for all, `accelerate.dispatch_model` mixed them up."""
    one, other = (fbt.quantize(torch.randn(8, 64), "int8") for _ in range(2))
    assert 0 != one.data_ptr() != other.data_ptr() != 0
    assert one.data_ptr() == one.detach().data_ptr() == one.T.data_ptr() == one[:4].data_ptr() != one[4:].data_ptr()
    assert torch.nn.Parameter(one, requires_grad=False).data_ptr() == one.data_ptr() != one.clone().data_ptr()


def test_moves_and_attributes(q: "fbt.QTensor") -> None:
    assert repr(q) == "QTensor(nvfp4, float32[12, 64], 436 bytes, 4.542 bits/weight)"
    assert (q.shape, q.dtype, q.device.type, q.numel(), q.nbytes) == ((12, 64), torch.float32, "cpu", 768, 436)
    assert q.half().dtype == torch.float16 and same(q.half().float(), q) and same(q.cpu(), q) and same(q.detach(), q)
    assert q.clone().codes.data_ptr() != q.codes.data_ptr() and q.detach().codes.data_ptr() == q.codes.data_ptr()
    assert q.to("meta").codes.is_meta and torch.empty_like(q, device="meta").form is q.form
    assert torch.equal(q.T.dequantize(), q.dequantize().T) and torch.equal(q.mT.dequantize(), q.dequantize().mT)
    assert (
        torch.equal(q.t().contiguous().dequantize(), q.dequantize().t()) and q.transpose(0, 1).form is q.permute(1, 0).form
    )
    with torch.inference_mode():
        assert q.T.shape == (64, 12) and same(q.detach(), q)


def test_float8_is_a_dtype_as_any(q: "fbt.QTensor") -> None:
    linear = nn.Linear(64, 8, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.float8_e5m2), requires_grad=False)
    fbt.quantize_(linear, "nvfp4")
    assert linear(torch.ones(2, 64)).dtype == torch.float32
    for t in (linear.weight, q.to(torch.float8_e5m2)):
        back = reloaded(t)
        assert back.dtype == torch.float8_e5m2 and same(back, t) and same(fbt.from_qarray(t.to_qarray()), t)
        assert torch.equal(back.dequantize().float(), t.dequantize(torch.float32).to(back.dtype).float())


def test_copies_never_write_into_memory_of_jax() -> None:
    known = fb.quantize(jnp.ones((2, 32)), "int8")
    t = fbt.from_qarray(known)
    assert t.codes.data_ptr() == known.codes.unsafe_buffer_pointer()
    t.copy_(fbt.quantize(torch.full((2, 32), -3.0), "int8"))
    assert t.dequantize().max() < -2.9 and fb.dequantize(known).min() > 0.9
    with pytest.raises(fb.QuantError, match="does not fit"):
        t.copy_(fbt.quantize(torch.ones(2, 32), "fp8"))
    with pytest.raises(fb.QuantError, match="copy_ into a QTensor from a float tensor"):
        t.copy_(torch.ones(2, 32))


def test_writes_reach_the_parameter_or_are_refused() -> None:
    """`.data` and `.detach()` are aliases; transposes and parts are views, which are never written."""
    old, new = (fbt.quantize(torch.full((4, 64), value), "int8") for value in (1.0, 5.0))
    p = nn.Parameter(old.clone(), requires_grad=False)
    for write in (lambda: p.data.copy_(new), lambda: p.detach().data.copy_(old), lambda: setattr(p, "data", new)):
        before, known = p.dequantize(), p.detach()
        write()
        assert not torch.equal(p.dequantize(), before) and same(p, known) is not (p.codes is new.codes)
    x = torch.ones(4, 64)
    for refused in (
        lambda: p[:2].copy_(old[:2]),
        lambda: p.T.copy_(old.T),
        lambda: p.T.detach().copy_(old.T),
        lambda: p.__setitem__(0, old[0]),
        lambda: x.__setitem__(0, old[0]),
    ):
        with pytest.raises(fb.UnsupportedError, match=r"codes are written as a whole, by q.copy_\(new\)"):
            refused()
    for value in (x, fbt.quantize(torch.ones(8, 32), "nf4")):
        with pytest.raises(fb.QuantError, match=r"q.data = value: .* does not fit .*; quantize it to the same scheme"):
            p.data = value
    assert same(p, new) and x.min() == 1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_write_that_a_graph_would_lose_is_refused(q: "fbt.QTensor", fullgraph: bool, dynamic: bool) -> None:
    compiled = torch.compile(lambda q, new: q.copy_(new), backend="aot_eager", fullgraph=fullgraph, dynamic=dynamic)
    with pytest.raises(Exception, match="copy_ into a QTensor cannot be compiled"):
        compiled(q.clone(), q)


@pytest.mark.parametrize(
    ("operation", "error", "text"),
    [
        (lambda q: q + 1, fb.UnsupportedError, r"add cannot take a QTensor:\n.*aten.add.Tensor; call q.dequantize\(\)"),
        (lambda q: torch.nn.functional.softmax(q, -1), fb.UnsupportedError, "_softmax cannot take"),
        (lambda q: q.reshape(-1), fb.UnsupportedError, "view cannot take"),
        (lambda q: torch.einsum("bk,nk->bn", torch.ones(2, 64), q), fb.UnsupportedError, r"einsum cannot take a QTensor:\n.*x @ q.T"),
        (lambda q: q.zero_(), fb.UnsupportedError, "zero_ cannot take"),
        (lambda q: torch.bmm(torch.ones(3, 2, 64), q), fb.QuantError, "bmm multiplies batches of matrices"),
        (lambda q: q.numpy(), RuntimeError, "not supported for tensor subclasses"),
        (lambda q: np.from_dlpack(q), fb.UnsupportedError, r"DLPack cannot take a QTensor:\n.*export q.dequantize\(\)"),
        (lambda q: q.to(torch.int8), fb.QuantError, "a QTensor has a floating dtype"),
        (lambda q: nn.Parameter(q), fb.QuantError, r"no gradient: use nn.Parameter\(q, requires_grad=False\)"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_by_name(q: "fbt.QTensor", operation, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        operation(q)


def test_parts_that_do_not_fit_are_refused(q: "fbt.QTensor") -> None:
    for parts, text in (
        ((q.codes, q.scale[:1], q.scheme, q.shape, q.dtype), "scale has shape"),
        ((q.codes, q.scale, q.scheme, (12, 60), q.dtype), "decode to shape"),
        ((q.codes, q.scale, q.scheme, q.shape, torch.int32), "a floating dtype"),
        ((q.codes.to("meta"), q.scale, q.scheme, q.shape, q.dtype), "move all to one"),
    ):
        with pytest.raises(fb.QuantError, match=text):
            fbt.QTensor(*parts, tensor_scale=q.tensor_scale)
    with pytest.raises(fb.QuantError, match="tensor_scale is missing"):
        fbt.QTensor(q.codes, q.scale, q.scheme, q.shape, q.dtype)
    with pytest.raises(fb.QuantError, match="scale has shape"):
        restored(q.form.text, [q.codes, q.scale[:1], q.tensor_scale], False)
    with pytest.raises(fb.QuantError, match="has 3 tensors"):
        restored(q.form.text, [q.codes], False)
    with pytest.raises(fb.QuantError, match="is no form of a QTensor"):
        restored("{}", [], False)


def test_a_bfloat16_scale_comes_over() -> None:
    scheme = fb.Scheme(fb.formats.FORMATS["int4"], {...: 1, -1: 32}, scale="bfloat16")
    known = fb.quantize(jnp.ones((4, 64), jnp.bfloat16), scheme)
    t = fbt.from_qarray(known)
    assert t.dtype == torch.bfloat16 and t.scale.dtype == torch.bfloat16
    assert np.array_equal(t.dequantize().float().numpy(), np.asarray(fb.dequantize(known), np.float32))


INDEXED = {
    "integer": lambda t: t[1],
    "integer of a tensor": lambda t: t[torch.tensor(2)],
    "integer of NumPy": lambda t: t[np.int64(1)],
    "rows": lambda t: t[-1, :8],
    "every other row": lambda t: t[:, 4:12:2],
    "columns": lambda t: t[..., :32],
    "new axis": lambda t: t[:, None],
    "transposed": lambda t: t.mT[1, :, :8],
    "narrow": lambda t: t.narrow(1, 8, 8),
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "split": lambda t: t.split([8, 24], dim=1)[1],
    "equal parts": lambda t: t.split(10, dim=1)[3],
    "tensor_split": lambda t: t.tensor_split(4, dim=1)[2],
    "unbind": lambda t: t.unbind(0)[2],
    "iteration": lambda t: list(t)[1],
    "unsqueeze": lambda t: t.unsqueeze(-2),
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("index", INDEXED)
def test_indices_are_views_of_the_same_bytes(index: str) -> None:
    w = torch.tensor(np.random.default_rng(0).normal(size=(3, 32, 64)).astype(np.float32))
    for scheme in ("nf4", "int3_g32", "uint4_g32", "nvfp4", "nf4_dq"):
        q = fbt.quantize(w, scheme)
        part = INDEXED[index](q)
        assert torch.equal(part.dequantize(), INDEXED[index](q.dequantize()))
        assert fbt.to_qarray(part).shape == tuple(part.shape)
        assert part.codes.untyped_storage().data_ptr() == q.codes.untyped_storage().data_ptr()


@pytest.mark.parametrize("index", INDEXED)
def test_indices_under_inference_mode_and_transforms(index: str) -> None:
    q, x = fbt.quantize(torch.randn(3, 32, 64), "int4_g32"), torch.ones(2)
    known = INDEXED[index](q)
    with torch.inference_mode():
        assert same(INDEXED[index](q), known)
    seen = []
    torch.func.grad(lambda x: (seen.append(INDEXED[index](q).to(torch.bfloat16)), x.sum())[1])(x)
    assert same(seen[0].float(), known)


def test_indices_that_are_refused(q: "fbt.QTensor") -> None:
    with pytest.raises(fb.QuantError, match="cuts tiles of 16"):
        q[:, 8:]
    with pytest.raises(fb.QuantError, match=r"would cut bytes; q.dequantize\(\)\[..., 3\] decodes it"):
        q[0, 3]
    with pytest.raises(IndexError, match="index 12 is out of bounds"):
        q[12]
    with pytest.raises(
        fb.UnsupportedError, match=r"an index with arrays cannot take a QTensor:\n.*array of integers along axis 0"
    ):
        q[:, torch.tensor([1, 2])]
    with pytest.raises(fb.QuantError, match=r"along axis 0 of .* would cut tiles or bytes"):
        q.T[torch.tensor([1, 2])]


OUT_OF_RANGE = {
    "select": lambda t: t.select(5, 0),
    "unsqueeze": lambda t: t.unsqueeze(7),
    "unsqueeze before": lambda t: t.unsqueeze(-4),
    "permute": lambda t: t.permute(0, 3),
    "transpose": lambda t: t.transpose(-3, 0),
    "split": lambda t: t.split(2, 2),
    "unbind": lambda t: t.unbind(2),
}


@pytest.mark.parametrize("operation", OUT_OF_RANGE)
def test_axes_out_of_range_are_refused_as_by_torch(q: "fbt.QTensor", operation: str) -> None:
    with pytest.raises(IndexError) as known:
        OUT_OF_RANGE[operation](q.dequantize())
    with pytest.raises(IndexError, match=re.escape(str(known.value))):
        OUT_OF_RANGE[operation](q)


def test_sizes_of_a_split_add_up(q: "fbt.QTensor") -> None:
    for sizes in ([1, 1], [9, 9], [-1, 13]):
        with pytest.raises(fb.QuantError, match="they must be 0 or more and sum to 12"):
            q.split(sizes)
    with pytest.raises(fb.QuantError, match="the size is 0, must be 1 or more"):
        q.split(0)


def test_an_index_array_along_the_first_axis_copies() -> None:
    w = torch.tensor(np.random.default_rng(0).normal(size=(3, 32, 64)).astype(np.float32))
    index = torch.tensor([2, 0, 2, -1])
    for scheme in ("nf4", "int8", "nvfp4", "nf4_dq"):
        for q in (fbt.quantize(w, scheme), fbt.quantize(w, scheme, dim=(0, 2)) if scheme == "int8" else None):
            if q is not None:
                part = q[index]
                assert torch.equal(part.dequantize(), q.dequantize()[index])
                assert torch.equal(part[1:].dequantize(), q.dequantize()[index[1:]])
                for same in (index.tolist(), index.numpy(), range(2)):
                    assert torch.equal(q[same].dequantize(), q.dequantize()[same])
