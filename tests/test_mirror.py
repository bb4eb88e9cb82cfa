"""Tests mirror the sources: each module has its own test file, or a suite that is named here."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES, TESTS = ROOT / "src" / "fewbit", ROOT / "tests"

SUITES = {
    "_api": "test_public_names.py",
    "_merges": "models/tokenizers/test_merges.py",
    "_pretokenizers": "models/tokenizers/test_gguf.py",
    "errors": "test_public_names.py",
    "array/covered": "training/test_fake_quant.py",
    "array/leaves": "ops/test_take.py",
    "array/scales": "array/scales/test_calibration.py",
    "array/scales/search/candidates": "array/scales/search/test_stored.py",
    "array/schemes": "conformance/test_schemes.py",
    "array/straight_through": "training/test_fake_quant.py",
    "calibration": "calibration/test_observe.py",
    "cli": "cli/test_commands.py",
    "cli/commands": "cli/test_commands.py",
    "evaluate/engine": "workflows/test_engine.py",
    "evaluate/report": "evaluate/test_report_page.py",
    "evaluate/transformers_engine": "workflows/test_engine.py",
    "evaluate/transformers_tokenizer": "workflows/test_engine.py",
    "frameworks/_flax": "frameworks/test_linen.py",
    "frameworks/maxtext_quant": "frameworks/test_maxtext.py",
    "io/containers/compressed_tensors": "io/containers/test_compressed_tensors.py",
    "io/containers/encodings/names": "io/containers/encodings/test_stored.py",
    "io/containers/encodings/bitsandbytes_blocks": "io/containers/test_bitsandbytes.py",
    "io/containers/huggingface": "workflows/convert/test_targets.py",
    "io/containers/reader": "io/containers/test_writer.py",
    "io/containers/torchao": "io/containers/test_torchao.py",
    "io/shards": "io/native/test_writer.py",
    "io/gguf/architectures": "io/gguf/test_metadata.py",
    "io/gguf/stored": "io/gguf/test_writer.py",
    "kernels/attention": "kernels/attention/cpu/test_backend.py",
    "kernels/fingerprint": "kernels/test_extension.py",
    "kernels/lowering": "kernels/test_backend.py",
    "kernels/qmatmul": "conformance/test_products.py",
    "kernels/qmatmul/cpu": "kernels/qmatmul/cpu/test_backend.py",
    "kernels/qmatmul/gpu": "kernels/qmatmul/gpu/test_gemm.py",
    "kernels/qmatmul/tpu": "kernels/qmatmul/tpu/test_gemm.py",
    "kernels/quantize": "conformance/test_schemes.py",
    "kernels/quantize/cpu": "kernels/quantize/cpu/test_backend.py",
    "kernels/quantize/gpu": "kernels/quantize/gpu/test_quantize.py",
    "kernels/quantize/tpu": "kernels/quantize/tpu/test_quantize.py",
    "kernels/triton": "kernels/triton/test_code.py",
    "models": "models/test_decoder.py",
    "models/families": "models/families/test_table.py",
    "models/roles": "models/roles/test_checkpoint.py",
    "ops": "conformance/test_products.py",
    "ops/interpret": "ops/interpret/test_transparent.py",
    "ops/interpret/rules": "conformance/test_primitives.py",
    "ops/qat": "training/test_train.py",
    "recipe": "recipe/test_plan.py",
    "recipe/presets": "recipe/presets/test_presets.py",
    "torch": "torch/test_torch_qtensor.py",
    "training/lora": "training/test_lora.py",
    "workflows": "workflows/test_quantize.py",
    "workflows/convert/provenance": "workflows/test_quantize.py",
    "workflows/bench": "workflows/bench/test_products.py",
}
"""The suite of a module, or of the modules of a folder that have no test file of their own."""


def test_each_module_has_a_test_file_or_a_suite() -> None:
    used, missing = set(), []
    for path in sorted(SOURCES.rglob("*.py")):
        module = path.relative_to(SOURCES).with_suffix("")
        name = f"test_{module.name.lstrip('_')}.py"
        if module.name == "__init__" or (TESTS / module.parent / name).exists():
            continue
        found = next((key for key in (module.as_posix(), module.parent.as_posix()) if key in SUITES), None)
        if found is None:
            missing.append(module.as_posix())
        used.add(found)
    assert not missing, f"no test file mirrors {missing}; write one, or name their suite in SUITES"
    assert not set(SUITES) - used, "these have their own test files by now"


def test_each_suite_exists() -> None:
    assert not [suite for suite in SUITES.values() if not (TESTS / suite).is_file()]
