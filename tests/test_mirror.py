"""Tests mirror the sources: each module has its own test file, or a suite that is named here."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES, TESTS = ROOT / "src" / "fewbit", ROOT / "tests"


@dataclasses.dataclass(frozen=True)
class Suite:
    """A test file of several modules, which have no test files of their own.

    Attributes:
        path: of the test file, below tests/.
        reason: what the file tests of them.
        modules: the names of the modules, separated by spaces, by their folder below src/fewbit/.
    """

    path: str
    reason: str
    modules: Mapping[str, str]

    def covered(self) -> list[str]:
        """The paths of the modules below src/fewbit/, without the suffix."""
        return [(Path(folder) / name).as_posix() for folder, names in self.modules.items() for name in names.split()]


SUITES = (
    # The package itself.
    Suite("test_public_names.py", "every public name can be imported and is documented", {"": "_api"}),
    Suite("test_registry.py", "what an error says, and every reason in it", {"": "errors"}),
    Suite("models/tokenizers/test_gguf.py", "splits of every tokenizer by transformers'", {"": "_pretokenizers"}),
    Suite("models/families/test_family.py", "configurations of Granite 4, LFM2 and Nemotron-H", {"": "_hybrids"}),
    # Arrays.
    Suite(
        "conformance/test_schemes.py",
        "the laws of every registered scheme",
        {"array/schemes": "block gguf integer mx serving"},
    ),
    Suite(
        "array/scales/test_calibration.py",
        "every calibration by its formula",
        {"array/scales": "absmax centred fixed minmax moments nvfp4 percentile signed_max store"},
    ),
    Suite(
        "array/scales/search/test_stored.py",
        "the candidates of a search against brute force, up to the largest scales",
        {"array/scales": "limits", "array/scales/search": "candidates"},
    ),
    Suite("array/test_layout.py", "slices of arrays against those of the dense array", {"array": "indexing"}),
    Suite("training/test_fake_quant.py", "gradients inside and outside the range", {"array": "covered straight_through"}),
    Suite("ops/interpret/test_transparent.py", "slices and look-ups of arrays, leaf by leaf", {"array": "leaves"}),
    # Kernels.
    Suite("kernels/test_extension.py", "extensions of other sources are stale", {"kernels": "fingerprint"}),
    Suite(
        "kvcache/test_attention.py",
        "attention over codes against the formula on decoded numbers",
        {"kernels/attention": "dispatch"},
    ),
    Suite(
        "conformance/test_products.py",
        "products of every scheme against those of decoded arrays",
        {"kernels/qmatmul": "dispatch kernel matrix_view problem reference"},
    ),
    Suite(
        "kernels/qmatmul/test_code_product.py", "products of codes, by kernels and without", {"kernels/qmatmul": "paired"}
    ),
    Suite(
        "kernels/qmatmul/cpu/test_backend.py",
        "the compiled product, its primitive and its gradients",
        {"kernels": "buffers", "kernels/qmatmul": "call", "kernels/qmatmul/cpu": "ffi"},
    ),
    Suite(
        "kernels/qmatmul/gpu/test_gemm.py",
        "the Triton products in the interpreter, every family of kernels",
        {"kernels/qmatmul/gpu": "backend config gemv gemv_bf16 groups int8_gemm launch weight"},
    ),
    Suite(
        "kernels/qmatmul/tpu/test_gemm.py",
        "the Pallas product in the interpreter, its blocks and its traffic",
        {"kernels/qmatmul/tpu": "backend blocks kernel problem"},
    ),
    Suite("kernels/qmatmul/tpu/test_int8_gemm.py", "the Pallas product of codes", {"kernels/qmatmul/tpu": "int8_blocks"}),
    Suite(
        "kernels/quantize/cpu/test_backend.py",
        "the compiled quantizers against the reference, and which are chosen",
        {"kernels/quantize": "problem reference", "kernels/quantize/cpu": "attributes view"},
    ),
    Suite(
        "kernels/quantize/gpu/test_quantize.py",
        "the Triton quantizers in the interpreter",
        {"kernels/quantize/gpu": "backend dequantize hessian memory problem search", "kernels/triton": "decode formats"},
    ),
    Suite(
        "kernels/quantize/tpu/test_quantize.py",
        "the Pallas quantizers in the interpreter",
        {"kernels/quantize/tpu": "backend dequantize dequantize_backend scales tiles"},
    ),
    # Products, and unchanged code.
    Suite("ops/test_bilinear.py", "every product under every policy", {"ops": "conv conv_vjp policy resolve_policy"}),
    Suite(
        "ops/interpret/test_transparent.py",
        "unchanged code on quantized parameters",
        {"ops/interpret": "evaluator indices", "ops/interpret/rules": "custom_derivatives"},
    ),
    Suite(
        "training/test_train.py",
        "a parameter in training is what serving quantizes",
        {"ops/qat": "latent rules"},
    ),
    Suite("training/test_delayed_state.py", "delayed scales in every kind of body", {"ops/qat": "delayed_scales"}),
    Suite(
        "calibration/test_observe.py",
        "what calibration batches show, by parameter",
        {"calibration": "measure stats", "ops/interpret": "offsets"},
    ),
    Suite("calibration/test_ranges.py", "every estimator of ranges", {"calibration": "range_rules"}),
    # Recipes and training.
    Suite("recipe/test_recipe.py", "rules in recipes, their JSON and what they refuse", {"recipe": "rule"}),
    Suite("recipe/test_resolution.py", "which rule a parameter follows", {"recipe": "matching"}),
    Suite("recipe/test_roles.py", "the role of each parameter", {"recipe": "role"}),
    Suite("recipe/test_plan.py", "the rows of a plan, and its text", {"recipe": "rows table"}),
    Suite("recipe/presets/test_presets.py", "every preset plans a model", {"recipe/presets": "plain transformer_engine"}),
    Suite(
        "training/lora/test_apply.py",
        "adapters in unchanged code against the update added up",
        {"training/lora": "adapted adapter products rules"},
    ),
    # Frameworks.
    Suite("frameworks/test_linen.py", "modules of Linen; Flax is imported when they are used", {"frameworks": "_flax"}),
    Suite("frameworks/test_maxtext.py", "the objects that MaxText's layers call", {"frameworks": "maxtext_quant"}),
    Suite("torch/test_module.py", "quantized modules of torch, and their files", {"torch": "checkpoint convolution"}),
    Suite("torch/test_qtensor.py", "indices of QTensors", {"torch": "indexing"}),
    Suite("torch/test_quantize.py", "tensors of torch through JAX and Triton", {"torch": "dlpack metrics triton"}),
    Suite("torch/test_matmul.py", "products of QTensors, and of groups of rows", {"torch": "ragged"}),
    # Files.
    Suite(
        "io/containers/compressed_tensors/test_container.py",
        "every format of the container, by the package itself",
        {"io/containers/compressed_tensors": "activations blocks config global_scale integers layout plain tiling"},
    ),
    Suite(
        "io/containers/torchao/test_container.py",
        "every tensor subclass, by torchao itself",
        {"io/containers/torchao": "entries reader"},
    ),
    Suite("io/containers/test_bitsandbytes.py", "its blocks", {"io/containers/encodings": "bitsandbytes_blocks"}),
    Suite("io/containers/test_writer.py", "written directories, read back", {"io/containers": "reader"}),
    Suite("workflows/convert/test_targets.py", "directories of plain floats", {"io/containers": "huggingface"}),
    Suite("io/native/test_writer.py", "files of bounded size", {"io": "shards"}),
    Suite("io/gguf/test_metadata.py", "the fields of every architecture", {"io/gguf": "architectures"}),
    Suite("io/gguf/test_writer.py", "tensors as rows of bytes", {"io/gguf": "stored"}),
    # Models.
    Suite("models/test_decoder.py", "the network by transformers'", {"models": "cache experts layer"}),
    Suite(
        "models/test_config.py",
        "rotary frequencies by transformers', and what configurations refuse",
        {"models": "part_configs", "models/attention": "rope_scaling"},
    ),
    Suite(
        "models/families/test_family.py",
        "config.json of every family by transformers'",
        {
            "models/families": "experts rope",
            "models/families/dense": "apertus bitnet ernie exaone gemma hyperclovax llama olmo phi seed smollm",
            "models/families/layer_norm": "cohere gpt jais nemotron stablelm starcoder",
            "models/families/mixtures": "afmoe deepseek glm gpt_oss hunyuan llama4",
            "models/families/hybrids": "bamba granite lfm2 nemotron_h qwen",
        },
    ),
    Suite("models/families/gguf/test_config.py", "metadata of every architecture", {"models/families/gguf": "metadata"}),
    Suite("models/roles/test_checkpoint.py", "roles of tensors", {"models/roles": "families modules"}),
    # Workflows and the command line.
    Suite(
        "workflows/test_quantize.py",
        "a checkpoint quantized tensor by tensor, and what is written of it",
        {"workflows": "model tensors", "workflows/convert": "provenance"},
    ),
    Suite(
        "workflows/test_engine.py",
        "evaluation by transformers",
        {"evaluate": "engine transformers_engine transformers_tokenizer"},
    ),
    Suite(
        "evaluate/report/test_page.py", "the page of a report", {"evaluate/report": "charts facts inputs markup template"}
    ),
    Suite(
        "cli/test_commands.py",
        "every command, its text and its JSON",
        {
            "cli": "app demo_report options render run_report",
            "cli/commands": "catalogue checkpoint evaluate",
            "workflows": "demo",
        },
    ),
    Suite("workflows/test_outputs.py", "compared outputs, as the command prints them", {"cli": "render_outputs"}),
    Suite("cli/test_startup.py", "what is printed before JAX is imported", {"cli": "listing version"}),
    Suite("cli/commands/test_bench.py", "`fewbit bench`", {"cli": "bench_report"}),
)
"""The suites of the modules without a test file of their own, in the order of the layers; a new module is in none."""


def own_test(module: str) -> str:
    """The path below tests/ of the test file that mirrors a module."""
    path = Path(module)
    return (path.parent / f"test_{path.name.lstrip('_')}.py").as_posix()


def untested(modules: Iterable[str], tests: Iterable[str]) -> list[str]:
    """The modules that have no test file of their own and stand in no suite."""
    known = set(tests)
    named = {module for suite in SUITES for module in suite.covered()}
    return [module for module in modules if own_test(module) not in known and module not in named]


MODULES = [
    path.relative_to(SOURCES).with_suffix("").as_posix()
    for path in sorted(SOURCES.rglob("*.py"))
    if path.name != "__init__.py"
]
FILES = [path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("test_*.py"))]


def test_each_module_has_a_test_file_or_a_suite() -> None:
    missing = untested(MODULES, FILES)
    assert not missing, f"no test file mirrors {missing}; write one, or name their suite in SUITES"


def test_a_new_module_has_no_suite_by_its_folder() -> None:
    new = [f"{folder}/new" for folder in ("ops", "recipe", "cli", "workflows", "torch", "kernels/qmatmul/gpu")]
    assert untested(new, FILES) == new
    assert untested(new, map(own_test, new)) == []


def test_suites_name_modules_without_a_test_file_once() -> None:
    named = [module for suite in SUITES for module in suite.covered()]
    assert not sorted(set(named) - set(MODULES)), "these modules do not exist"
    assert not [module for module in named if own_test(module) in FILES], "these have their own test files by now"
    assert not [module for module in set(named) if named.count(module) > 1], "these stand in two suites"


def test_every_file_of_oracles_is_left_to_make_test_all() -> None:
    """`make test` does not collect the folder, so a test without the marker would run nowhere."""
    unmarked = [
        path.name
        for path in TESTS.glob("oracles/test_*.py")
        if "\npytestmark = " not in (text := path.read_text()) or "pytest.mark.oracle" not in text
    ]
    assert not unmarked


def test_each_suite_exists() -> None:
    assert not sorted({suite.path for suite in SUITES} - set(FILES))
