"""Choosing a backend: order, reasons, and a name that is never replaced."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import pytest

import fewbit as fb
from fewbit.kernels.attention.dispatch import BACKENDS as ATTENTION
from fewbit.kernels.backend import AbstractBackend, select
from fewbit.kernels.extension import ARM64_ISAS, Extension
from fewbit.kernels.qmatmul import BACKENDS, Cpu, Problem, TritonGPU, dispatch
from fewbit.kernels.quantize import DEQUANTIZERS, QUANTIZERS

ROOT = Path(__file__).parent.parent.parent


@dataclasses.dataclass(frozen=True)
class OnlyInt8(AbstractBackend[Problem]):
    """A backend that computes zeros, for int8 weights only: enough to see that it was asked."""

    name: ClassVar[str] = "only_int8"

    def unsupported(self, problem):
        return None if problem.rhs.scheme.name == "int8" else f"the weight is {problem.rhs.scheme.name}, must be int8"

    def run(self, problem, *operands):
        return jnp.zeros((problem.lhs.shape[0], problem.rhs.shape[0]), problem.result_dtype)


NUMBERS = (((1,), (1,)), ((), ()))


def test_a_backend_is_one_class_and_one_line(monkeypatch):
    x, int8, nf4 = jnp.ones((2, 32)), fb.quantize(jnp.ones((4, 32)), "int8"), fb.quantize(jnp.ones((4, 32)), "nf4")
    monkeypatch.setattr(dispatch, "BACKENDS", (OnlyInt8(), *BACKENDS))
    assert not fb.dot_general(x, int8, NUMBERS).any()
    assert fb.dot_general(x, nf4, NUMBERS).all()
    assert fb.dot_general(x, int8, NUMBERS, backend="reference").all()
    assert not fb.dot_general(x, int8, NUMBERS, backend="only_int8").any()
    with pytest.raises(fb.QuantError, match=r"no backend is named 'only_int9'; did you mean 'only_int8'\?"):
        fb.dot_general(x, int8, NUMBERS, backend="only_int9")


def test_a_backend_may_be_passed_as_an_object():
    x, int8, nf4 = jnp.ones((2, 32)), fb.quantize(jnp.ones((4, 32)), "int8"), fb.quantize(jnp.ones((4, 32)), "nf4")
    assert not fb.dot_general(x, int8, NUMBERS, backend=OnlyInt8()).any()
    with pytest.raises(fb.UnsupportedError) as caught:
        fb.dot_general(x, nf4, NUMBERS, backend=OnlyInt8())
    assert str(caught.value) == (
        "qmatmul cannot run lhs=float32[2,32] rhs=nf4[4,32] over axes (1,) and (1,):\n"
        "  only_int8: the weight is nf4, must be int8"
    )
    assert caught.value.reasons == {"only_int8": "the weight is nf4, must be int8"}


def test_each_backend_is_asked_once(monkeypatch):
    asked = []

    class Counted(OnlyInt8):
        def unsupported(self, problem):
            asked.append(problem)
            return super().unsupported(problem)

    monkeypatch.setattr(dispatch, "BACKENDS", (Counted(), *BACKENDS))
    fb.dot_general(jnp.ones((2, 32)), fb.quantize(jnp.ones((4, 32)), "nf4"), NUMBERS)
    assert len(asked) == 1
    choice = select(dispatch.BACKENDS, asked[0])
    assert choice.reasons["only_int8"] == "the weight is nf4, must be int8"


@pytest.mark.finding(36)
def test_backends_that_never_ran_on_their_hardware_are_experimental():
    for backends in (BACKENDS, QUANTIZERS, DEQUANTIZERS, ATTENTION):
        for backend in backends:
            assert backend.experimental == (backend.platform in ("tpu", "cuda")), backend
    x, q = jnp.ones((2, 64)), fb.quantize(jnp.ones((64, 8)), "int8", axis=-2)
    names = [line.split(":")[0] for line in fb.explain(x, q).splitlines()]
    assert "  pallas_tpu (experimental)" in names and "  triton (experimental)" in names
    tested = "experimental: tested in an interpreter and cross-compiled, not yet run on a"
    named = fb.explain(x, q, backend="pallas_tpu")
    assert f"{tested} TPU" in named and named.endswith("  pallas_tpu (experimental): it runs on tpu, the device is cpu")
    assert f"{tested} GPU" in TritonGPU().about()


@pytest.mark.parametrize("built", ["avx512", "portable", *ARM64_ISAS])
def test_kernels_that_ran_in_an_emulator_only_are_experimental(monkeypatch: pytest.MonkeyPatch, built: str):
    monkeypatch.setattr("fewbit.kernels.qmatmul.cpu.backend.extension", lambda _: Extension(isa=built))
    tested = "; experimental: tested in an emulator only" if built in ARM64_ISAS else ""
    rest = f"{tested}; programs for other platforms use their own kernels, or the reference"
    assert Cpu().about() == f"compiled for {built}{rest}"
    assert Cpu(isa="portable").about() == f"compiled for portable{rest}"
    q = fb.quantize(jnp.ones((64, 8)), "int8", axis=-2)
    assert f": cpu (compiled for {built}{rest})" in fb.explain(jnp.ones((2, 64)), q, backend="cpu")


def test_integers_may_have_an_instruction_of_their_own(monkeypatch: pytest.MonkeyPatch):
    isas = {"_dequant_gemm": "avx2", "_int8_gemm": "avxvnni"}
    monkeypatch.setattr(
        "fewbit.kernels.qmatmul.cpu.backend.extension", lambda module: Extension(isa=isas[module.rpartition(".")[2]])
    )
    assert Cpu().about().startswith("compiled for avx2 and avxvnni;")
    isas["_int8_gemm"] = ""  # it did not load
    assert Cpu().about().startswith("compiled for avx2;")
    isas.update(_dequant_gemm="neon", _int8_gemm="i8mm")
    assert "compiled for i8mm and neon; experimental" in Cpu().about()


@pytest.mark.parametrize("page", ["kernels", "installation"])
def test_pages_say_that_the_kernels_of_arm64_ran_in_an_emulator_only(page: str):
    (line,) = [line for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines() if "emulator" in line]
    assert "arm64" in line and "experimental: tested in an emulator only" in line


@pytest.mark.finding(36)
@pytest.mark.parametrize("page", ["README.md", "docs/kernels.md", "docs/torch.md"])
def test_pages_say_which_kernels_never_ran_on_their_hardware(page: str):
    words = " ".join((ROOT / page).read_text().split()).lower()
    for device in ("GPU",) if page == "docs/torch.md" else ("GPU", "TPU"):
        assert f"experimental: tested in an interpreter and cross-compiled, not yet run on a {device.lower()}" in words
