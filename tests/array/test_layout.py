"""Transposing, reshaping and slicing QArrays against the same on the dense array, for any tiles, and what is refused.

The arrays of the property tests have NumPy leaves, so that nothing is compiled.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbit as fb
from fewbit.array import Packing, paired
from fewbit.array.layout import Axis, merged, regrouped, split
from fewbit.errors import QuantError
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws


@contextlib.contextmanager
def numpy_leaves() -> Iterator[None]:
    """Lets the leaves be NumPy arrays, which the annotations do not say."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@st.composite
def recipes(draw: st.DrawFn) -> dict:
    """What `built` makes a QArray of: any shape, tiles, width, packing and packed axis, and a seed."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 11, 12]), min_size=1, max_size=4)))
    tile = {a - len(shape): draw(st.sampled_from([None, 1, 2, 3, 4, 8])) for a in range(len(shape))}
    pack_axis = draw(st.integers(-len(shape), -1))
    return {
        "shape": shape,
        "tile": {...: draw(st.sampled_from([1, None])), **tile},
        "pack_axis": pack_axis,
        "format": draw(st.sampled_from(["int3", "int4", "int8", "uint5", "e2m1", "binary"])),
        "interleave": draw(st.sampled_from([(), (), (1, 0), (0, 2, 1, 3)])),
        "seed": draw(st.integers(0, 9)),
    }


def built(recipe: dict) -> fb.QArray:
    """The QArray of random codes and scales of a recipe."""
    fmt = FORMATS[recipe["format"]]
    scheme = fb.Scheme(
        fmt,
        recipe["tile"],
        packing=Packing(recipe["interleave"]),
        pack_axis=recipe["pack_axis"],
        zero_point=fmt if fmt.name == "uint5" else None,
        scale=FORMATS["e4m3fn"] if fmt.name == "e2m1" else "float32",
        tensor_scale=fmt.name == "e2m1",
    )
    return laws.random_qarray(scheme, recipe["shape"], recipe["seed"])


def assert_agrees(got: fb.QArray, expected: np.ndarray) -> None:
    """The QArray stands for the expected dense array, and its leaves fit its scheme."""
    assert got.shape == expected.shape
    np.testing.assert_array_equal(laws.numpy_dequantize(got), expected)
    assert got.nbytes == sum(
        np.asarray(leaf).nbytes for leaf in (got.codes, got.scale, got.zero_point, got.tensor_scale) if leaf is not None
    )


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """Every divisor of `n`, ascending."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


@given(recipes(), st.data())
def test_transpose(recipe, data: st.DataObject):
    q = built(recipe)
    order = tuple(data.draw(st.permutations(range(q.ndim))))
    with numpy_leaves():
        dense = laws.numpy_dequantize(q)
        assert_agrees(q.transpose(order), dense.transpose(order))
        assert_agrees(q.transpose(*(a - q.ndim for a in order)), dense.transpose(order))
        assert_agrees(q.T, dense.T)
        back = q.transpose(order).transpose(tuple(np.argsort(order)))
        assert back.scheme == q.scheme and np.array_equal(back.codes, q.codes)
        if q.ndim > 1:
            assert_agrees(q.mT, dense.mT)
            assert_agrees(q.swapaxes(0, -1), dense.swapaxes(0, -1))


@given(recipes(), st.data())
def test_indexing(recipe, data: st.DataObject):
    q = built(recipe)

    def step(n: int) -> st.SearchStrategy:
        aligned = st.tuples(st.integers(0, n), st.integers(0, n), st.sampled_from([None, 1, 1, 2, -1, -2]))
        tile_aligned = st.sampled_from([slice(0, 8), slice(8, None), slice(None, 4), slice(4, 8), slice(-4, None)])
        return st.one_of(st.just(slice(None)), st.integers(-n, n - 1), aligned.map(lambda s: slice(*s)), tile_aligned)

    index = [data.draw(step(n)) for n in q.shape[: data.draw(st.integers(0, q.ndim))]]
    for extra in data.draw(st.lists(st.sampled_from([None, ...]), max_size=2, unique=True)):
        index.insert(data.draw(st.integers(0, len(index))) if extra is None else len(index), extra)
    index = tuple(index) if data.draw(st.booleans()) or len(index) != 1 else index[0]
    with numpy_leaves():
        dense = laws.numpy_dequantize(q)
        try:
            got = q[index]
        except QuantError:
            return
        assert_agrees(got, dense[index])


@pytest.mark.slow
@given(recipes(), st.data())
def test_reshape(recipe, data: st.DataObject):
    q = built(recipe)
    remaining, shape = q.size, []
    while remaining > 1:
        shape.append(data.draw(st.sampled_from(divisors(remaining))))
        remaining //= shape[-1]
    shape = shape or [1]
    if data.draw(st.booleans()):
        shape[data.draw(st.integers(0, len(shape) - 1))] = -1
    with numpy_leaves():
        dense = laws.numpy_dequantize(q)
        try:
            got = q.reshape(*shape)
        except QuantError:
            return
        assert_agrees(got, dense.reshape(shape))
        assert_agrees(got.T, dense.reshape(shape).T)


@given(recipes())
def test_what_must_never_be_refused(recipe):
    q = built(recipe)
    with numpy_leaves():
        dense = laws.numpy_dequantize(q)
        assert_agrees(q[...], dense)
        assert_agrees(q[None], dense[None])
        assert_agrees(q.reshape(q.shape), dense)
        assert_agrees(q.reshape(1, *q.shape), dense[None])
        if q.shape[q.scheme.pack_axis] > 1:
            assert_agrees(q.reshape(1, *q.shape)[0], dense)
        for axis, tile in enumerate(q.tiles):
            if q.scheme.pack_axis != axis - q.ndim and q.ndim > 1:
                index = (slice(None),) * axis + (q.shape[axis] // 2,)
                assert_agrees(q[index], dense[index])
                if tile == 1:
                    index = (slice(None),) * axis + (slice(None, None, -1),)
                    assert_agrees(q[index], dense[index])


def q_of(shape: tuple[int, ...], spec: str, axis: int = -1) -> fb.QArray:
    """A random QArray of a named scheme."""
    return laws.random_qarray(fb.scheme(spec).along(axis, len(shape)), shape)


@pytest.mark.parametrize(
    ("spec", "shape", "new_shape"),
    [
        ("int8", (6, 8), (2, 3, 8)),
        ("int8", (2, 3, 8), (6, 8)),
        ("int4_g32", (6, 128), (6, 4, 32)),
        ("int4_g32", (6, 128), (6, 2, 64)),
        ("int4_g32", (6, 4, 32), (6, 128)),
        ("int4_g32", (6, 128), (2, 3, 128)),
        ("int4_g32", (6, 128), (768,)),
        ("int3_g32", (4, 64), (4, 8, 8)),
        ("nf4", (12, 100), (3, 4, 100)),
        ("int8", (4, 6, 8), (4, 2, 3, 8)),
        ("fp8_tensor", (4, 6), (24,)),
        ("fp8_tensor", (24,), (2, 3, 4)),
    ],
    ids=str,
)
def test_reshapes_of_models_are_possible(spec: str, shape: tuple[int, ...], new_shape: tuple[int, ...]):
    q = q_of(shape, spec)
    with numpy_leaves():
        assert_agrees(q.reshape(new_shape), laws.numpy_dequantize(q).reshape(new_shape))
        assert q.reshape(new_shape).nbytes == q.nbytes


@pytest.mark.parametrize(
    ("spec", "shape", "new_shape", "message"),
    [
        ("int8", (6, 8), (7, 7), r"cannot reshape \(6, 8\) into \(7, 7\): the sizes differ"),
        ("int8", (6, 8), (-1, 5), "the sizes differ"),
        ("int8", (6, 8), (-1, -1), "the sizes differ"),
        ("nf4", (12, 100), (1200,), r"axes of lengths \[12, 100\] with tiles \[1, 64\] cannot merge"),
        ("int4_g32", (6, 128), (6, 16, 8, 1, 3), "the sizes differ"),
        ("int4_g32", (6, 96), (6, 2, 48), r"tiles of 32 on an axis of 96 do not fit new axes \(2, 48\)"),
        ("nf4", (12, 100), (12, 10, 10), "a short last tile .* cannot be split"),
        ("int3_g32", (4, 96), (4, 24, 4), "codes share bytes in runs of 8; a new axis of 4 would cut one"),
        ("int4", (4, 7), (28,), "the packed axis can merge only as the last of its group, and only whole bytes of it"),
    ],
    ids=str,
)
def test_reshapes_that_would_tear_are_refused(spec: str, shape: tuple[int, ...], new_shape: tuple[int, ...], message: str):
    with numpy_leaves(), pytest.raises(QuantError, match=message):
        q_of(shape, spec).reshape(new_shape)


@pytest.mark.parametrize("spec", ["int8", "int4", "int8_g32"])
def test_an_index_keeps_the_quantized_axis(spec: str):
    x = jnp.ones((2, 64, 6))
    q = fb.quantize(x, spec, axis=1)
    assert q[0].scheme == fb.quantize(x[0], spec, axis=0).scheme
    assert q[:1].scheme == q.scheme
    assert q[:, None].scheme == fb.quantize(x[:, None], spec, axis=2).scheme
    assert q[..., 0].scheme == fb.quantize(x[..., 0], spec, axis=1).scheme


def test_an_index_may_remove_the_quantized_axis_of_whole_bytes():
    q = fb.quantize(jnp.ones((2, 64, 6)), "int8", axis=1)
    assert q[:, 0].scheme.pack_axis == -1


@pytest.mark.parametrize(
    ("spec", "index", "error", "message"),
    [
        ("nf4", (slice(None), slice(0, 32)), QuantError, "the slice 0:32:1 cuts tiles of 64; slice at their multiples"),
        ("nf4", (slice(None), slice(64, 70)), QuantError, "the slice 64:70:1 cuts tiles of 64"),
        ("nf4", (slice(None), slice(None, None, 2)), QuantError, "the slice 0:130:2 cuts tiles of 64"),
        (
            "int4",
            (slice(None), slice(1, 4)),
            QuantError,
            "cuts bytes that 2 codes share; slice at their multiples, by steps of 1",
        ),
        ("int3", (slice(None), slice(0, 12)), QuantError, "cuts bytes that 8 codes share"),
        ("int4", (0, 3), QuantError, r"the integer 3 on the packed axis would cut bytes; fb.take\(q, 3, axis\) decodes it"),
        ("int8", (0, 3), QuantError, "an integer for every axis gives a scalar; a quantized array has at least one axis"),
        ("int8", (slice(3, 3),), QuantError, "the slice 3:3:1 of an axis of 6 is empty"),
        ("int8", (slice(2, 4, -1),), QuantError, "is empty"),
        ("int8", 6, IndexError, "index 6 is out of bounds for an axis of 6"),
        ("int8", -7, IndexError, "index -7 is out of bounds for an axis of 6"),
        ("int8", (0, 0, 0), QuantError, "too many indices: 3 for an array of 2 axes"),
        ("int8", (..., ...), QuantError, "an index has at most one ..."),
        ("int8", [0, 1], QuantError, r"not list; fb.take\(q, indices, axis\) gathers rows"),
        ("int8", np.array([0, 1]), QuantError, "not ndarray; fb.take"),
        ("int8", True, QuantError, "not bool; fb.take"),
        ("int8", 1.0, QuantError, "not float; fb.take"),
    ],
    ids=str,
)
def test_indices_that_are_refused(spec: str, index: object, error: type, message: str):
    with numpy_leaves(), pytest.raises(error, match=message):
        q_of((6, 130), spec)[index]


def test_the_short_last_group_of_an_interleaving_is_sliced_whole():
    # 40 codes in groups of 32 take two whole groups of bytes: element 32 + j stands at place 2 j of the second.
    scheme = dataclasses.replace(fb.scheme("int4_g32"), packing=Packing(paired(32)))
    q = laws.random_qarray(scheme, (3, 40))
    with numpy_leaves():
        assert_agrees(q[:, 32:], laws.numpy_dequantize(q)[:, 32:])
        assert_agrees(q[:, :32], laws.numpy_dequantize(q)[:, :32])


def test_transposes_that_are_refused():
    q = q_of((6, 130), "int8")
    with numpy_leaves():
        for order in ((0,), (0, 0), (0, 1, 0)):
            with pytest.raises(QuantError, match="must name each of the 2 axes once"):
                q.transpose(*order)
        for refused in (lambda: q.transpose(3, 0), lambda: q.transpose((2, 3)), lambda: q.swapaxes(0, 3)):
            with pytest.raises(QuantError, match=r"axis is [23], but the array has 2 axes"):
                refused()


@pytest.mark.usefixtures("unchecked")
def test_axes_and_lengths_may_be_numpys():
    one, size = np.int64(1), np.int64(6 * 128)
    with numpy_leaves():
        q = q_of((6, 128), "int4_g32")
        assert q.transpose(one, 0).shape == q.swapaxes(0, one).shape == (128, 6)
        assert q.reshape(size).shape == q.reshape([size]).shape == (768,)


def test_iteration_gives_rows():
    q = q_of((3, 8), "int8")
    with numpy_leaves():
        rows = list(q)
        assert len(q) == len(rows) == 3
        np.testing.assert_array_equal(np.stack([laws.numpy_dequantize(r) for r in rows]), laws.numpy_dequantize(q))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_regrouped_pairs_axes_of_equal_size(shape: list[int], data: st.DataObject):
    remaining, new = int(np.prod(shape)), []
    while remaining > 1:
        new.append(data.draw(st.sampled_from(divisors(remaining))))
        remaining //= new[-1]
    groups = regrouped(shape, new)
    assert [i for old, _ in groups for i in old] == list(range(len(shape)))
    assert [j for _, fresh in groups for j in fresh] == list(range(len(new)))
    for old, fresh in groups:
        assert np.prod([shape[i] for i in old]) == np.prod([new[j] for j in fresh])


def test_regrouped_scalars_have_axes_of_one_element():
    assert regrouped((), (1, 1)) == [([], [0, 1])]
    assert regrouped((1, 1), ()) == [([0, 1], [])]
    assert regrouped((), ()) == []


def test_merging_and_splitting_are_inverse():
    axis = Axis(96, 16, 2, True)
    parts = split(axis, (6, 16))
    assert parts == [Axis(6, 1), Axis(16, None, 2, True)]
    assert merged(parts) == axis
    assert split(Axis(64, None), (4, 16)) == [Axis(4, None), Axis(16, None)]
    assert merged(split(Axis(64, None), (4, 16))) == Axis(64, None)
    assert merged([Axis(1, 1), Axis(8, 4)]) == Axis(8, 4)
