"""quantize_ of a module: roles by class, rules, the plan, and files."""

import subprocess
import sys

import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from fewbit import torch as fbt  # noqa: E402 - it imports torch


class Block(nn.Module):
    """One of each: a norm, a product, a router, experts, a convolution, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(64), nn.Linear(64, 8), nn.Linear(64, 4, bias=False)
        self.experts, self.conv = nn.Parameter(torch.randn(2, 64, 8)), nn.Conv1d(32, 8, 3)
        self.attention = nn.MultiheadAttention(64, 2, bias=False)


class Net(nn.Module):
    """A block between a table and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(16, 64), Block(), nn.Linear(64, 16, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.finding(15)
def test_the_plan_lists_every_parameter_and_why() -> None:
    net = Net()
    plan = fbt.plan(net, "int8", rules={"block.up.weight": "fp8"})
    assert {row.path: (row.kind, row.axis, row.reason) for row in plan} == {
        "embed.weight": ("q8_0", (-1,), ""),
        "block.experts": ("float32", (), "role unknown, so it stays float; a rule with its path and an axis quantizes it"),
        "block.norm.weight": ("float32", (), "a vector: no product contracts it"),
        "block.norm.bias": ("float32", (), "a vector: no product contracts it"),
        "block.up.weight": ("fp8", (-1,), ""),
        "block.up.bias": ("float32", (), "a vector: no product contracts it"),
        "block.gate.weight": ("float32", (), "a router or gate of experts; no rule names the role router"),
        "block.conv.weight": ("int8", (-1, -2), ""),
        "block.conv.bias": ("float32", (), "a vector: no product contracts it"),
        "block.attention.in_proj_weight": (
            "float32",
            (),
            "a parameter of nn.MultiheadAttention, which does not support QTensors",
        ),
        "block.attention.out_proj.weight": (
            "float32",
            (),
            "a parameter of nn.MultiheadAttention, which does not support QTensors",
        ),
    }
    assert plan["embed.weight"].ops == ("take",) and "3 of 11 parameters quantized" in str(plan)
    assert not any(isinstance(p, fbt.QTensor) for p in net.parameters())


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.ConvTranspose2d(32, 8, 3), torch.randn(1, 32, 4, 4)),
        (nn.EmbeddingBag(16, 64), torch.tensor([[1, 2]])),
        (nn.Embedding(16, 64, max_norm=1.0), torch.tensor([1, 2])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_module_computes_by_other_functions_stays_float(module, x) -> None:
    net = nn.ModuleList([module, nn.Linear(64, 8)])
    plan = fbt.quantize_(net, "int8")
    assert "which does not support QTensors" in plan["0.weight"].reason
    assert isinstance(net[1].weight, fbt.QTensor)
    net[0](x)


def test_a_shared_parameter_stays_float_where_one_of_its_modules_needs_that() -> None:
    net = nn.ModuleDict({"enc": nn.Conv1d(32, 8, 3), "dec": nn.ConvTranspose1d(8, 32, 3), "head": nn.Linear(32, 8)})
    net["dec"].weight = net["enc"].weight
    row = fbt.quantize_(net, "int8")["enc.weight"]
    assert (row.kind, row.reason) == ("float32", "a parameter of nn.ConvTranspose1d, which does not support QTensors")
    assert net["dec"](net["enc"](torch.ones(1, 32, 9))).shape == (1, 32, 9)


@pytest.mark.finding(15)
def test_the_module_is_quantized_in_place_and_goes_through_files(tmp_path) -> None:
    net = Net()
    before = dict(net.named_parameters())
    plan = fbt.quantize_(net, "int8", rules=[fb.Rule("block.gate.weight", "int8", axis=-1, roles="router")])
    after = dict(net.named_parameters())
    assert [name for name in after if isinstance(after[name], fbt.QTensor)] == [
        "embed.weight", "block.up.weight", "block.gate.weight", "block.conv.weight",
    ]  # fmt: skip
    assert net.head.weight is net.embed.weight and not after["block.up.weight"].requires_grad
    assert sum(p.nbytes for p in after.values()) == plan.bytes_after
    x, known = torch.randn(2, 64), before["block.up.weight"].detach()
    q = fb.quantize(known.numpy(), "int8")
    assert np.array_equal(after["block.up.weight"].codes.numpy(), q.codes)
    assert net.head(net.block.norm(x)).shape == (2, 16)
    fb.io.write(tmp_path / "model", net.state_dict())
    state = fbt.load(tmp_path / "model")
    other = Net()
    fbt.quantize_(other, plan)
    other.load_state_dict(state)
    assert torch.equal(other.block.conv.weight.dequantize(), net.block.conv.weight.dequantize())
    assert fb.io.read(tmp_path / "model").tensors["block.up.weight"].scheme == q.scheme


def test_nothing_changes_where_something_is_wrong() -> None:
    net = Net()
    with torch.no_grad():
        net.block.conv.weight[0, 0, 0] = torch.nan
    with pytest.raises(fb.QuantError, match=r"NaN or infinite values in block\.conv\.weight \(1 of "):
        fbt.quantize_(net, "int8")
    assert not any(isinstance(p, fbt.QTensor) for p in net.parameters())
    with pytest.raises(fb.QuantError, match="matches nothing"):
        fbt.quantize_(net, "int8", rules={"decoder.*": "nf4"})
    with pytest.raises(fb.QuantError, match="for another module"):
        fbt.quantize_(net, fbt.plan(nn.Linear(64, 8), "int8"))
    with pytest.raises(fb.QuantError, match="a Plan has none"):
        fbt.quantize_(net, fbt.plan(net, "int8"), rules={".*": None})
    with pytest.raises(fb.QuantError, match=r"0\.weight is on the meta device, which has no numbers to quantize"):
        fbt.quantize_(nn.Sequential(nn.Linear(64, 8, device="meta")), "int8")
    with pytest.raises(fb.QuantError, match=r"0\.weight, 0\.bias: lazy parameters have no shape yet"):
        fbt.plan(nn.Sequential(nn.LazyLinear(8)), "int8")


def test_a_module_on_the_meta_device_has_shapes() -> None:
    net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))
    fbt.quantize_(net, "int8")
    y = net.to("meta")(torch.ones(3, 64, device="meta"))
    assert (y.shape, y.device.type) == ((3, 4), "meta")


@pytest.mark.parametrize("spatial", [1, 2])
def test_convolutions_and_their_gradient(spatial: int) -> None:
    conv = (nn.Conv1d, nn.Conv2d)[spatial - 1](8, 4, 3, stride=2, padding=1, groups=2)
    x = torch.randn(2, 8, *[9, 7][:spatial], requires_grad=True)
    q = fbt.quantize(conv.weight, "int8", dim=(*range(2, 2 + spatial), 1))
    settings = {"stride": 2, "padding": 1, "groups": 2}
    convolved = (nn.functional.conv1d, nn.functional.conv2d)[spatial - 1]
    y, known = convolved(x, q, conv.bias, **settings), convolved(x, q.dequantize(), conv.bias, **settings)
    assert torch.allclose(y, known, atol=1e-5)
    g = torch.randn_like(y)
    assert torch.allclose(*(torch.autograd.grad(z, x, g)[0] for z in (y, known)), atol=1e-5)


def test_paddings_of_a_convolution() -> None:
    x, q = torch.randn(1, 4, 9), fbt.quantize(torch.randn(2, 4, 3), "int8", dim=(2, 1))
    for padding in ("same", "valid", 2):
        y = nn.functional.conv1d(x[0], weight=q, padding=padding, dilation=2)
        assert torch.allclose(y, nn.functional.conv1d(x[0], q.dequantize(), padding=padding, dilation=2), atol=1e-5)
    with pytest.raises(fb.QuantError, match="needs strides of 1"):
        nn.functional.conv1d(x, q, padding="same", stride=2)
    with pytest.raises(fb.QuantError, match=r"takes \[batch, in, \.\.\.\]"):
        nn.functional.conv1d(x[:, :3], q)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dilation": 4}, r"the dilated kernel \[9\] is larger than the padded input \[8\]"),
        ({"padding": -1}, "padding is -1, must be 0 or more"),
        ({"stride": 0}, "stride is 0, must be 1 or more"),
        ({"stride": (1, 2)}, r"stride is \(1, 2\), must be 1 or more, one number or one for each of 1 axes"),
        ({"groups": 2}, r"takes \[batch, in, ...\]"),
        ({"bias": torch.ones(1)}, r"the bias has shape \(1,\), must be \[5\]"),
    ],
)
def test_convolutions_refuse_what_torch_refuses(arguments, text: str) -> None:
    x, q = torch.ones(2, 4, 8), fbt.quantize(torch.ones(5, 4, 3), "int8", dim=1)
    with pytest.raises(fb.QuantError, match=text):
        torch.nn.functional.conv1d(x, q, **arguments)
    with pytest.raises(RuntimeError):
        torch.nn.functional.conv1d(x, q.dequantize(), **arguments)
    with pytest.raises(fb.QuantError, match="2 groups do not divide the 5 outputs"):
        torch.nn.functional.conv1d(torch.ones(2, 8, 8), q, groups=2)


def test_files_take_tensors_of_every_dtype(tmp_path) -> None:
    state = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.arange(3), "c": torch.ones(2, dtype=torch.float64)}
    state |= {"d": torch.ones(3).to(torch.float8_e4m3fn), "e": torch.tensor(2.5)}
    fb.io.write(tmp_path / "model", state)
    loaded = fbt.load(tmp_path / "model")
    assert all(
        loaded[name].dtype == state[name].dtype and torch.equal(loaded[name].float(), state[name].float()) for name in state
    )


@pytest.mark.parametrize(
    "make",
    [lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)],
    ids=["meta", "sparse", "quantized"],
)
@pytest.mark.filterwarnings("ignore")  # torch's own quantized tensors are deprecated
def test_files_refuse_tensors_without_plain_numbers_by_name(make, tmp_path) -> None:
    with pytest.raises(fb.QuantError, match=r"tensor 'up' is torch\..*expected a dense tensor of plain numbers"):
        fb.io.write(tmp_path / "model", {"up": make(torch.eye(3))})
    assert not (tmp_path / "model").exists()


def test_files_take_conjugate_views(tmp_path) -> None:
    x = torch.randn(3, dtype=torch.complex64)
    fb.io.write(tmp_path / "model", {"x": x.conj()})
    assert torch.equal(fbt.load(tmp_path / "model")["x"], x.conj().resolve_conj())


def test_convolutions_follow_autocast() -> None:
    q = fbt.quantize(torch.randn(2, 4, 3), "int8", dim=(2, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nn.functional.conv1d(torch.randn(1, 4, 9), q).dtype == torch.bfloat16


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
def test_a_mixture_of_transformers_runs_with_quantized_experts(experts: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 128, "num_local_experts": 4}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    ).eval()
    plan = fbt.quantize_(model, "nf4")
    assert plan["model.layers.0.mlp.experts.down_proj"].kind == "nf4"
    model.set_experts_implementation(experts)
    tokens = torch.randint(0, 128, (2, 7))
    with torch.no_grad():
        found = model(tokens).logits
        for owner in model.modules():
            for name, parameter in owner._parameters.items():
                if isinstance(parameter, fbt.QTensor):
                    setattr(owner, name, nn.Parameter(parameter.dequantize(), requires_grad=False))
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-4, atol=1e-5)


IN_DATA_PARALLEL = """
import os, sys, torch
from torch import distributed, nn
from fewbit import torch as fbt

model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
fbt.quantize_(model, "nf4", rules={"1.weight": None})
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel = nn.parallel.DistributedDataParallel(model, init_sync=False)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
x, losses = torch.randn(8, 64), []
for _ in range(2):
    optimizer.zero_grad()
    loss = parallel(x).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(*losses, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_adapters_train_in_distributed_data_parallel(tmp_path) -> None:
    """One process; DDP broadcasts parameters when it is made, which QTensors do not take, so that is left out.

    It is a process of its own that ends without freeing anything: the last owner of the group waits for gloo's thread with Python's
    lock held, and forever where that thread wants the lock (torch 2.13, seen once).
    """
    command = [sys.executable, "-c", IN_DATA_PARALLEL, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert second < first
