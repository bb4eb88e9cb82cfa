"""bitsandbytes weights: element for element those of the package, both ways."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import io
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.containers.bitsandbytes import BitsAndBytes
from fewbit.io.containers.container import Weight, notes_on_floats
from fewbit.io.containers.writer import ContainerWriter
from tests.io.containers.stored import NAME, quantized, read_back, tensors, values

SHAPE = (6, 128)
CONFIG = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}, "torch_dtype": "float32"}


STATE = np.frombuffer(b'{"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [6, 128]}', np.uint8)


@pytest.fixture(scope="module")
def packages():
    """torch and bitsandbytes."""
    torch = pytest.importorskip("torch")
    return torch, pytest.importorskip("bitsandbytes")


def weights(torch, shape=SHAPE, dtype="float32"):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x.flat[:64], x.flat[70] = 0, 40
    return torch.tensor(x).to(getattr(torch, dtype))


def four_bit_arrays(packages, kind, dtype="float32", *, nested=False, shape=SHAPE, block=64):
    """What the package stores of a weight, and what it dequantizes."""
    torch, bnb = packages
    packed, state = bnb.functional.quantize_4bit(
        weights(torch, shape, dtype), blocksize=block, compress_statistics=nested, quant_type=kind
    )
    arrays = {f"{NAME}.{part}": value.numpy() for part, value in state.as_dict(packed=True).items()}
    return {NAME: packed.numpy(), **arrays}, bnb.functional.dequantize_4bit(packed, state).float().numpy()


def state_of(torch, bnb, arrays):
    """The package's own quantization state of stored arrays."""
    parts = {k.removeprefix(NAME + "."): torch.tensor(v) for k, v in arrays.items() if k != NAME}
    return bnb.functional.QuantState.from_dict(parts, torch.device("cpu"))


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_the_package_stores_reads_as_what_it_dequantizes(packages, kind, dtype):
    arrays, expected = four_bit_arrays(packages, kind, dtype)
    q = BitsAndBytes().decoded(CONFIG, tensors(arrays), "here")[NAME]
    assert (q.scheme.name, q.dtype.name) == ({"nf4": "nf4", "fp4": "bnb_fp4"}[kind], dtype)
    np.testing.assert_array_equal(values(q, q.dtype), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [SHAPE, (600, 64)])
def test_nested_scales_are_decoded_as_the_package_does(packages, shape):
    """Up to 256 blocks share one range, which nf4_dq has; more have several, which become float32 scales."""
    arrays, expected = four_bit_arrays(packages, "nf4", nested=True, shape=shape)
    q = BitsAndBytes().decoded(CONFIG, tensors(arrays), "here")[NAME]
    assert q.scheme.name == ("nf4_dq" if shape is SHAPE else "nf4")
    np.testing.assert_array_equal(values(q), expected)


@pytest.mark.oracle
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_cross_rows_are_decoded_to_float(packages, nested):
    arrays, expected = four_bit_arrays(packages, "fp4", "bfloat16", nested=nested, shape=(6, 72))
    stored = tensors(arrays)
    found = BitsAndBytes().decoded(CONFIG, stored, "here")
    assert found[NAME].dtype == jnp.bfloat16
    np.testing.assert_array_equal(values(found[NAME]), expected)
    assert notes_on_floats(stored, found) == (
        f"1 weights are decoded to float, bitsandbytes fp4 whose blocks of 64 cross rows: {NAME}",
    )


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", ["nf4", "bnb_fp4", "nf4_dq", "nf4_g128", "nf4_g32"])
def test_the_package_dequantizes_what_is_written(packages, scheme):
    torch, bnb = packages
    weight, q = quantized(scheme, SHAPE)
    arrays, back = read_back(BitsAndBytes(), weight, q)
    state = state_of(torch, bnb, arrays)
    found = bnb.functional.dequantize_4bit(torch.tensor(arrays[NAME]), state)
    np.testing.assert_array_equal(found.numpy(), values(q))
    assert back.scheme == q.scheme and state.nested == (scheme == "nf4_dq")
    np.testing.assert_array_equal(values(back), values(q))


@pytest.mark.oracle
def test_a_real_weight_in_nf4_dq_goes_out_nested(packages):
    """More than 256 blocks, scales of a real calibration."""
    torch, bnb = packages
    q = fb.quantize(jnp.asarray(weights(torch, (40, 512)).numpy()), "nf4_dq")
    weight = Weight(NAME, q.shape, "float32", q.scheme)
    arrays, back = read_back(BitsAndBytes(), weight, q)
    assert arrays[f"{NAME}.nested_absmax"].shape == (2,) and back.scheme.name == "nf4_dq"
    found = bnb.functional.dequantize_4bit(torch.tensor(arrays[NAME]), state_of(torch, bnb, arrays))
    np.testing.assert_array_equal(found.numpy(), values(q))


@pytest.mark.oracle
def test_int8_rows(packages):
    """The package multiplies by SCB and by 1 / 127 one after the other, so float32 values differ in their last bits."""
    torch, bnb = packages
    codes, maxima, _ = bnb.functional.int8_vectorwise_quant(weights(torch, dtype="float16"))
    module = NAME.removesuffix(".weight")
    arrays = {NAME: codes.numpy(), f"{module}.SCB": maxima.numpy(), f"{module}.weight_format": np.zeros((), np.uint8)}
    found = BitsAndBytes().decoded({}, tensors(arrays), "here")
    q = found[NAME]
    assert q.scheme.name == "int8_narrow" and found.info[NAME].dtype == "float16"
    np.testing.assert_array_equal(np.asarray(q.scale)[:, 0], maxima.numpy() / np.float32(127))
    expected = bnb.functional.int8_vectorwise_dequant(codes, maxima).numpy()
    np.testing.assert_allclose(values(q), expected, rtol=3 * 2.0**-24)
    again = BitsAndBytes().encoded(Weight(NAME, q.shape, "float16", q.scheme), q)
    np.testing.assert_array_equal(again[NAME], arrays[NAME])
    np.testing.assert_array_equal(again[f"{module}.SCB"] / np.float32(127), maxima.numpy() / np.float32(127))


def test_int8_of_our_own_keeps_every_scale():
    """absmax / 127 of 4096 rows comes back exactly; a scale that is no such quotient is refused."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 32)), jnp.float32)
    q = fb.quantize(x, "int8_narrow")
    weight = Weight(NAME, q.shape, "float32", q.scheme)
    _, back = read_back(BitsAndBytes(), weight, q)
    np.testing.assert_array_equal(back.scale, q.scale)
    np.testing.assert_array_equal(back.codes, q.codes)
    other = fb.quantize(x, "int8_narrow", scale=jnp.abs(x).max(1, keepdims=True) / 127.5)
    with pytest.raises(
        UnsupportedError, match=r"of its 4096 scales, the first in row \d+, are no float32 number divided by 127"
    ):
        BitsAndBytes().encoded(weight, other)


def test_the_first_code_of_a_byte_is_in_its_high_bits():
    weight, q = quantized("nf4", SHAPE)
    codes = np.zeros((6, 64), np.uint8)
    codes[0, 0] = 0x21  # element 0 is 1, element 1 is 2
    arrays = BitsAndBytes().encoded(weight, fb.QArray(jnp.asarray(codes), q.scale, None, None, q.scheme, q.dtype))
    assert arrays[NAME].shape == (384, 1) and arrays[NAME][0] == 0x12
    high = fb.scheme(q.scheme.to_json() | {"packing": {"high_first": True}})
    swapped = fb.QArray(jnp.asarray(codes >> 4 | codes << 4), q.scale, None, None, high, q.dtype)
    again = BitsAndBytes().encoded(Weight(NAME, SHAPE, "float32", high), swapped)
    np.testing.assert_array_equal(again[NAME], arrays[NAME])


def test_fp4_has_its_own_order():
    """Codes 0 to 7 are 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4; not those of E2M1."""
    weight, q = quantized("bnb_fp4", (1, 64))
    codes = np.arange(64, dtype=np.uint8)[None, ::2] % 16
    codes = codes | (codes + 1) << 4
    q = fb.QArray(jnp.asarray(codes), jnp.ones((1, 1)), None, None, q.scheme, q.dtype)
    arrays, back = read_back(BitsAndBytes(), weight, q)
    expected = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
    np.testing.assert_array_equal(values(back)[0, :8], expected)
    np.testing.assert_array_equal(arrays[f"{NAME}.quant_map"][:8], expected)
    assert json.loads(arrays[f"{NAME}.quant_state.bitsandbytes__fp4"].tobytes())["quant_type"] == "fp4"


def test_one_kind_of_weights_and_the_modules_that_stay_in_float():
    weight, _ = quantized("nf4_dq", SHAPE, "bfloat16")
    settings = (
        BitsAndBytes().files([weight], ["model.layers.0.gate.weight", "norm.weight"], {}).config["quantization_config"]
    )
    assert settings["llm_int8_skip_modules"] == ["model.layers.0.gate", "lm_head"]
    assert (settings["bnb_4bit_quant_type"], settings["bnb_4bit_use_double_quant"]) == ("nf4", True)
    assert settings["load_in_4bit"] and not settings["load_in_8bit"] and settings["bnb_4bit_compute_dtype"] == "bfloat16"
    with pytest.raises(UnsupportedError, match=r"one kind of weights .*, not nf4, nf4_dq"):
        BitsAndBytes().files([weight, quantized("nf4", SHAPE)[0]], [], {})


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        ("int8", SHAPE, "its codes are int8; there are nf4, bnb_fp4 and int8_narrow"),
        ("nf4", (6, 96), "blocks of 64 elements do not divide its rows of 96"),
        ("nf4_g16", SHAPE, "a power of two from 32 to 4096 must"),
        ("int8_aqt", SHAPE, r"chosen by absmax,.*, and bitsandbytes stores absmax / 127"),
        ("int8_narrow_g32", SHAPE, "do not have per-channel float32 scales"),
        ("fp4", SHAPE, "its codes are e2m1"),
    ],
)
def test_what_does_not_fit_is_refused(scheme, shape, reason):
    with pytest.raises(UnsupportedError, match=reason):
        BitsAndBytes().check([Weight(NAME, shape, "float32", fb.scheme(scheme))])


def test_activations_of_int8_layers_are_quantized_by_the_program():
    int8 = fb.scheme("int8_narrow")
    assert BitsAndBytes().why_not(Weight(NAME, SHAPE, "float32", int8, fb.scheme("int8"))) is None
    assert "activations" in BitsAndBytes().why_not(Weight(NAME, SHAPE, "float32", fb.scheme("nf4"), int8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"absmax": np.ones(11, np.float32)}, QuantError, r"absmax' is float32\(11,\), expected float32\(12,\)"),
        ({"absmax": None}, QuantError, "absmax' of the weight .* is missing"),
        (
            {"quant_map": np.linspace(-1, 1, 16, dtype=np.float32)},
            UnsupportedError,
            "other numbers than bitsandbytes' table nf4",
        ),
        ({"quant_state.bitsandbytes__nf4": np.zeros(3, np.uint8)}, QuantError, "is not valid JSON"),
        ({"quant_state.bitsandbytes__nf4": np.zeros(3, np.float32)}, QuantError, "expected the bytes of a JSON object"),
        ({"quant_state.bitsandbytes__fp4": np.zeros(0, np.uint8)}, QuantError, "is not valid JSON"),
        ({"quant_state.bitsandbytes__x": STATE}, QuantError, "says nf4"),
    ],
)
def test_damaged_weights_are_refused(change, error, message):
    weight, q = quantized("nf4", SHAPE)
    arrays = BitsAndBytes().encoded(weight, q) | {f"{NAME}.{part}": array for part, array in change.items()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(error, match=message):
        BitsAndBytes().decoded(CONFIG, tensors(arrays), "here")


def test_int8_in_another_order_is_refused():
    weight, _ = quantized("int8_narrow", SHAPE)
    arrays = BitsAndBytes().encoded(weight, fb.quantize(jnp.ones(SHAPE), "int8_narrow"))
    module = NAME.removesuffix(".weight")
    with pytest.raises(UnsupportedError, match="not in rows"):
        BitsAndBytes().decoded(CONFIG, tensors(arrays | {f"{module}.weight_format": np.ones((), np.uint8)}), "here")
    with pytest.raises(QuantError, match=r"SCB' is float32\(5,\), expected float32\(6,\)"):
        BitsAndBytes().decoded(CONFIG, tensors(arrays | {f"{module}.SCB": np.ones(5, np.float32)}), "here")


def llama(transformers):
    """A small untrained Llama with a tied head and its configuration."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("scheme", ["nf4", "nf4_dq", "bnb_fp4_g32", "int8_narrow"])
def test_transformers_loads_what_is_written(packages, scheme, tmp_path):
    """Its logits are those of the float model with our decoded weights; in int8 it also rounds the activations."""
    torch, bnb = packages
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = llama(transformers)
    arrays = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    qs = {name: fb.quantize(jnp.asarray(a), scheme) for name, a in arrays.items() if "proj" in name}
    weights = [Weight(name, q.shape, q.dtype.name, q.scheme) for name, q in qs.items()]
    kept = [name for name in arrays if name not in qs]
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"]}
    with ContainerWriter(tmp_path / "m", BitsAndBytes(), weights=weights, kept=kept, config=config) as writer:
        for name, array in arrays.items():
            writer.add(name, qs.get(name, array))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, device_map="cpu")
    theirs.train(scheme != "int8_narrow")  # for inference bitsandbytes computes in bfloat16 where the CPU has AVX512-BF16
    kind = bnb.nn.Linear8bitLt if scheme == "int8_narrow" else bnb.nn.Linear4bit
    found = io.read(tmp_path / "m")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in qs:
                assert isinstance(theirs.get_submodule(name.removesuffix(".weight")), kind)
                parameter.copy_(torch.tensor(values(found.tensors[name])))
        tokens = torch.arange(12)[None]
        mine, wanted = model(tokens).logits.numpy(), theirs(tokens).logits.numpy()
    assert type(theirs.lm_head) is torch.nn.Linear
    if scheme == "int8_narrow":
        assert (mine * wanted).sum() > 0.999 * np.linalg.norm(mine) * np.linalg.norm(wanted)
    else:
        np.testing.assert_allclose(wanted, mine, rtol=1e-5, atol=1e-5)
