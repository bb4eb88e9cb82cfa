"""BitNet: transformers unpacks what we write to our numbers, we read what it packs, and both run one model to the same logits."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError, workflows
from fewbit.io.containers.bitnet import BitNet
from fewbit.models import forward
from fewbit.workflows.convert import targets
from tests.nets.families import their_logits, theirs

from .stored_weights import ROUNDS, fuzz, numbers, read_back, same, tensors_of
from .stored_weights import stored as stored_weights
from .stored_weights import weight as weight_of
from .torch_arrays import to_numpy, to_torch

BITNET = BitNet()
NAME = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{NAME}_scale"
ACTIVATIONS = "int8_narrow"


def example(shape: tuple[int, ...], dtype: str = "float32", scale: float = 0.0123) -> fb.QArray:
    """Random ternary numbers."""
    x = jnp.asarray(np.random.default_rng(0).integers(-1, 2, shape), dtype)
    q = fb.quantize(x, "ternary")
    return fb.QArray.tree_unflatten(
        (q.scheme, q.dtype, q.slack, None), (np.asarray(q.codes), np.full((1, 1), scale, np.float32), None, None)
    )


def stored(q: fb.QArray, *others, **more):
    """What a directory has of a weight."""
    return stored_weights(BITNET, {NAME: q}, *others, activations=ACTIVATIONS, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8, 64), (4, 7), (200, 301)], ids=str)
def test_what_we_write_is_read_back(shape, dtype):
    q = example(shape, dtype)
    found = stored(q, {"model.norm.weight": np.ones(3, np.float32)}, {"torch_dtype": dtype})
    assert list(found.arrays) == ["model.norm.weight", NAME, SCALE]
    assert (found.arrays[NAME].shape, found.arrays[SCALE].dtype) == ((shape[0] // 4, shape[1]), "float32")
    again = read_back(BITNET, found)
    same(q, again[NAME])
    assert str(again[NAME].policy) == str(again.info[NAME].policy) == "ternary x int8_narrow"


def test_a_scale_of_the_models_dtype_is_stored_in_it():
    q = BITNET.representable(fb.quantize(jnp.ones((4, 8), jnp.bfloat16) / 3, "ternary"))
    found = stored(q, {}, {"torch_dtype": "bfloat16"})
    assert found.arrays[SCALE].dtype == "bfloat16"
    same(q, read_back(BITNET, found)[NAME])


def test_the_first_rows_are_in_the_lowest_bits():
    numbers = jnp.asarray([[-1, 0], [1, 1], [0, -1], [1, 0]], jnp.float32)
    arrays = stored(fb.quantize(numbers, "ternary")).arrays
    assert arrays[NAME].tolist() == [[0 + 2 * 4 + 1 * 16 + 2 * 64, 1 + 2 * 4 + 0 * 16 + 1 * 64]]


def test_the_older_layout_divides_by_its_scale():
    found = stored(example((8, 64), scale=0.25))
    config = {"quantization_config": {"quant_method": "bitnet"}, "dtype": "float32"}
    again = BITNET.decoded(config, tensors_of(found.arrays), "here")[NAME]
    assert np.asarray(again.scale).tolist() == [[4.0]]
    with pytest.raises(QuantError, match="which divides it, is 0"):
        BITNET.decoded(config, tensors_of({**found.arrays, SCALE: np.zeros(1, np.float32)}), "here")[NAME]


def test_weights_of_training_stay_float():
    config = {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}}
    tensors = tensors_of({NAME: np.ones((4, 8), np.float32)})
    assert BITNET.recognises(config, tensors)
    assert BITNET.decoded(config, tensors, "here")[NAME].dtype == np.float32


@pytest.fixture(scope="module")
def packing():
    """Their functions; compiling them takes seconds."""
    torch = pytest.importorskip("torch")
    before, torch._dynamo.config.disable = torch._dynamo.config.disable, True
    yield pytest.importorskip("transformers.integrations.bitnet")
    torch._dynamo.config.disable = before


@pytest.mark.oracle
def test_transformers_unpacks_what_we_write_and_packs_what_we_read(packing):
    import torch

    q = example((200, 301))
    arrays = stored(q).arrays
    whole = packing.unpack_weights(to_torch(arrays[NAME]), torch.float32)
    np.testing.assert_array_equal(to_numpy(whole) * arrays[SCALE], numbers(q))
    np.testing.assert_array_equal(to_numpy(packing.pack_weights(whole.clone())), arrays[NAME])


def rewrite_for_bitlinear(directory) -> None:
    """Makes a directory one of the older layout: its scales divide."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["linear_class"] = "bitlinear"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "manifest.json").unlink()  # with the hashes of the files
    (path,) = directory.glob("*.safetensors")
    arrays = load_file(path)
    save_file({name: 1 / a if name.endswith("weight_scale") else a for name, a in arrays.items()}, path, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("linear_class", ["autobitlinear", "bitlinear"])
def test_transformers_runs_what_is_written(linear_class, tmp_path, packing):
    """Its products quantize activations to int8 for each token, and so do ours, by the policy of what is read."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    theirs("bitnet").save_pretrained(tmp_path / "hf")
    model = workflows.load(tmp_path / "hf")
    plan = targets.fitted("bitnet", model, workflows.plan_model(model, recipe="ternary"))
    out = workflows.quantize(model, plan, tmp_path / "q", to="bitnet")
    again = workflows.load(out.path)
    assert again.notes == ("bitnet: 22 weights in ternary",) and "head" in again.quantized["BitNet"]
    config = again.runnable_config()
    tokens = np.random.default_rng(1).integers(3, config.vocab, size=(2, 9))
    if linear_class == "bitlinear":
        rewrite_for_bitlinear(out.path)
        again = workflows.load(out.path)
    served = transformers.AutoModelForCausalLM.from_pretrained(out.path, attn_implementation="eager").eval()
    expected = their_logits(served, tokens)
    params = jax.tree.map(jnp.asarray, again.params())
    logits = jax.jit(fb.transparent(functools.partial(forward, config=config)))(params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_the_section_names_what_is_not_quantized():
    kept = {"model.layers.0.mlp.gate.weight": np.ones((2, 2), np.float32), "model.norm.weight": np.ones(2, np.float32)}
    assert stored(example((4, 64)), kept).config["quantization_config"] == {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"],
    }


@pytest.mark.parametrize(
    ("q", "activations", "reason"),
    [
        (fb.quantize(jnp.ones((4, 8)), "int2"), None, "one float32 scale for the tensor, not int2"),
        (example((6, 8)), ACTIVATIONS, "it packs rows in fours, and the weight has 6"),
        (example((4, 8)), None, "its products quantize activations to int8 for each token"),
        (example((4, 8)), "int8_g32", "its products quantize activations to int8 for each token"),
        (fb.quantize(jnp.ones((2, 4, 8)), "ternary"), ACTIVATIONS, "the weight has 3 axes"),
    ],
    ids=["scheme", "rows", "float activations", "blocks", "stack"],
)
def test_what_does_not_fit_is_refused(q, activations, reason):
    with pytest.raises(UnsupportedError, match=reason):
        BITNET.check([weight_of(q, NAME, activations)])


def test_the_advice_names_the_activations():
    with pytest.raises(UnsupportedError, match=r"Schemes that fit, with int8_narrow activations: ternary$"):
        BITNET.check([weight_of(fb.quantize(jnp.ones((4, 8)), "int2"), NAME)])


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({NAME: None}, QuantError, "is missing"),
        ({NAME: np.ones((2, 64), np.float32)}, QuantError, "is float32, expected uint8"),
        ({NAME: np.full((2, 64), 3, np.uint8)}, QuantError, "has the code 3"),
        ({SCALE: np.ones((2, 1), np.float32)}, QuantError, r"has shape \(2, 1\), expected one number"),
    ],
    ids=["no codes", "floats", "codes", "shape"],
)
def test_arrays_that_do_not_fit_are_named(change, error, reason):
    found = stored(example((8, 64)))
    arrays = {name: array for name, array in (found.arrays | change).items() if array is not None}
    with pytest.raises(error, match=reason):
        _ = BITNET.decoded(found.config, tensors_of(arrays), "here")[NAME]


def test_a_section_is_checked():
    config = {"quantization_config": {"quant_method": "bitnet", "linear_class": "linear"}}
    with pytest.raises(QuantError, match="quantization_config"):
        BITNET.decoded(config, tensors_of({}), "here")
    assert not BITNET.recognises({"quantization_config": {"quant_method": "fp8"}}, tensors_of({}))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
def test_mutated_directories_end_in_our_own_error(rounds, tmp_path):
    fuzz(BITNET, stored(example((200, 140)), {"model.norm.weight": np.ones(3, np.float32)}), tmp_path, rounds)
