"""Scheme: format, tiles, scale, zero point and calibration of a tensor."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, Union

import jax.numpy as jnp
import msgspec
import numpy as np
from jax.typing import DTypeLike

from .._json import Positive, checked, form_of
from .._registry import Registry
from .._tiles import FrozenTileMap, Tile, TileMap, axis_tiles, from_front, tile_map
from ..errors import QuantError
from ..formats.format import FORMATS, AbstractFormat
from ..formats.serial import CUSTOM_FORMAT, KINDS, format_from_json, format_to_json
from .packing import PACKING, Packing
from .scales.absmax import AbsMax
from .scales.calibration import AbstractCalibration, parse_calibration
from .scales.limits import largest_scale

ScaleHolder: TypeAlias = Union[AbstractFormat, DTypeLike, "Scheme"]

_SCALE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How one tensor is quantized.

    A code `c` decodes to `decode(c) * scale`, with one scale per tile (block); with an integer zero point `z` to
    `(decode(c) - z) * scale`; with a float offset `m` to `decode(c) * scale + m`. A tensor scale multiplies each scale.

    Attributes:
        format: the format of the codes.
        tile: the block (group) size of each axis, counted from the end: how many elements share a scale (1: none do); None:
            the whole axis. The key `...` is for all other axes; without it they are whole. `{...: 1, -1: 32}` is blocks of
            32 along the last axis, `{...: 1, -1: None}` per-channel (one scale per row), `{}` per-tensor.
        scale: the storage of scales: a dtype (float32, bfloat16, float16), a Format (E8M0, E4M3), or a Scheme for double
            quantization.
        tensor_scale: whether a float32 scale of the tensor multiplies the tiles' scales (NVFP4's second level).
        zero_point: None; a Format for integer zero points, in units of codes; or a dtype for float offsets.
        calibration: how scales are chosen.
        packing: the order of packed codes.
        pack_axis: the axis whose codes share bytes. An `axis` argument moves it as it moves the tiles.

    >>> SCHEMES["mxfp4"].scale
    E8M0(name='e8m0')
    """

    format: AbstractFormat
    tile: TileMap = dataclasses.field(default_factory=dict)
    scale: ScaleHolder = "float32"
    tensor_scale: bool = False
    zero_point: AbstractFormat | DTypeLike | None = None
    calibration: AbstractCalibration = AbsMax()
    packing: Packing = Packing()
    pack_axis: int = -1

    def __post_init__(self) -> None:
        if not isinstance(self.format, AbstractFormat):
            raise QuantError(f"format is {self.format!r}; pass a Format such as fb.formats.nf4 (names belong to fb.scheme)")
        object.__setattr__(self, "tile", FrozenTileMap(self.tile))
        if not isinstance(self.scale, AbstractFormat | Scheme):
            object.__setattr__(self, "scale", _float_dtype(self.scale, "scale"))
        if isinstance(self.scale, AbstractFormat) and self.scale.bits > 8:
            raise QuantError(f"scale format {self.scale.name} has more than 8 bits")
        if self.zero_point is not None and not isinstance(self.zero_point, AbstractFormat):
            object.__setattr__(self, "zero_point", _float_dtype(self.zero_point, "zero_point"))
        if isinstance(self.scale, Scheme) and (self.tensor_scale or isinstance(self.scale.scale, Scheme)):
            raise QuantError("scales that are quantized themselves take no tensor scale and no third level")
        if self.tensor_scale and not isinstance(self.scale, AbstractFormat):
            raise QuantError("a tensor scale needs scales stored in a Format such as e4m3fn")
        if not isinstance(self.calibration, AbstractCalibration):
            raise QuantError(
                f"calibration is {self.calibration!r}; pass an object: fewbit.array.scales.parse_calibration parses a text"
            )
        if self.pack_axis >= 0:
            raise QuantError(f"pack_axis is {self.pack_axis}, must be negative (-1 is the last axis)")

    @property
    def name(self) -> str:
        """The name for `fb.scheme`, or a description if the scheme has none."""
        plain = dataclasses.replace(self, tile=self._tile_at_last, pack_axis=-1)
        for name in SCHEMES.names():
            preset = SCHEMES[name]
            if preset == plain:
                return name
            length = plain.tile.get(-1)
            is_retiled = preset._takes_group_size and preset == dataclasses.replace(plain, tile=preset.tile)
            if is_retiled and length is not None and plain.tile == {...: 1, -1: length}:
                return f"{name}_g{length}"
        return f"{self.format.name}{self.tile!r}"

    @property
    def _takes_group_size(self) -> bool:
        """Whether the tiles are along the last axis alone, so that a name with `_g<length>` sets their length."""
        return -1 in self.tile and set(self.tile) <= {..., -1}

    @property
    def _tile_at_last(self) -> FrozenTileMap:
        """The tiles with the packed axis moved to the end, where presets have it."""
        if self.pack_axis == -1:
            return FrozenTileMap(self.tile)
        ndim = -min([self.pack_axis, *(a for a in self.tile if a is not ...)])
        tiles = list(axis_tiles(self.tile, ndim))
        tiles.append(tiles.pop(self.pack_axis))
        return tile_map(tiles, self.tile.get(...))

    @property
    def zero_holder(self) -> AbstractFormat | np.dtype | None:
        """The storage of zero points: a Format, the dtype of float offsets, or None."""
        if isinstance(self.zero_point, AbstractFormat | None):
            return self.zero_point
        return jnp.dtype(self.zero_point)

    @property
    def scale_limit(self) -> float:
        """The largest scale under which every code decodes to a finite float32.

        Infinite with a tensor scale, which is limited instead.
        """
        if self.tensor_scale:
            return np.inf
        limit = largest_scale(self.format, isinstance(self.zero_point, AbstractFormat))
        if isinstance(self.scale, Scheme):  # a quantized scale decodes to a sum of rounded numbers
            return limit * (1 - 2.0**-20)
        return limit

    def tiles(self, ndim: int) -> tuple[Tile, ...]:
        """The tile of each axis of an array of `ndim` axes. It is a length, or None for the whole axis."""
        return axis_tiles(self.tile, ndim)

    def with_tiles(self, tiles: tuple[Tile, ...], pack_axis: int) -> "Scheme":
        """The same scheme for an array whose axes have these tiles."""
        return dataclasses.replace(self, tile=tile_map(tiles, self.tile.get(...)), pack_axis=pack_axis)

    def along(self, axis: int | tuple[int, ...], ndim: int) -> "Scheme":
        """The scheme with tiles along `axis` instead of the last axis. It is for an array of `ndim` axes.

        The packed axis moves as its tile does: it is `axis`, unless the scheme packs another axis than the last.

        Args:
            axis: the axis (negative or not) that takes the place of the last one; the others keep their order. Of several
                axes (a product with several contraction axes) the last takes that place; the ones before it become whole if
                its tile is the whole axis, else keep their tiles.
            ndim: the number of axes.

        >>> SCHEMES["mxfp4"].along(-2, 2).tile
        {...: 1, -2: 32}
        """
        if not isinstance(axis, tuple | list):
            axis = (axis,)
        axes = tuple(from_front(a, ndim) - ndim for a in axis)
        if not axes:
            raise QuantError("axis is (), must name at least one axis")
        if len(set(axes)) < len(axes):
            raise QuantError(f"axis {axis} names one axis twice")
        main, order, old = axes[-1], list(range(ndim)), self.tiles(ndim)
        order.insert(ndim + main, order.pop())
        tiles = [old[axis] for axis in order]
        if tiles[main] is None:
            for other in axes[:-1]:
                tiles[other] = None
        if self.pack_axis < -ndim:
            raise QuantError(f"the scheme packs axis {self.pack_axis}, but the array has {ndim} axes")
        return self.with_tiles(tuple(tiles), pack_axis=order.index(ndim + self.pack_axis) - ndim)

    def with_tile(self, length: Tile) -> "Scheme":
        """The same scheme with tiles of this length along the last axis. None: one scale per row."""
        return dataclasses.replace(self, tile={...: 1, -1: length})

    def __hash__(self) -> int:
        return hash((self.format, self.tile, str(self.scale), self.tensor_scale, self.calibration, self.pack_axis))

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the fields that differ from their defaults."""
        form: dict[str, Any] = {"format": format_to_json(self.format)}
        if self.tile:
            form["tile"] = {"*" if axis is ... else str(axis): length for axis, length in self.tile.items()}
        form["scale"] = _holder_to_json(self.scale)
        if self.tensor_scale:
            form["tensor_scale"] = True
        if self.zero_point is not None:
            form["zero_point"] = _holder_to_json(self.zero_point)
        form["calibration"] = str(self.calibration)
        if packing := self.packing.to_json():
            form["packing"] = packing
        if self.pack_axis != -1:
            form["pack_axis"] = self.pack_axis
        return form

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> "Scheme":
        """The scheme of a JSON form; QuantError for an unknown key."""
        fields = checked(form, SCHEME, "a scheme")
        fields["format"] = format_from_json(form["format"])
        if "tile" in form:
            fields["tile"] = {_axis_from_json(axis): length for axis, length in form["tile"].items()}
        for key in ("scale", "zero_point"):
            if key in form:
                fields[key] = _holder_from_json(form[key])
        if "calibration" in form:
            fields["calibration"] = parse_calibration(form["calibration"])
        if "packing" in form:
            fields["packing"] = Packing.from_json(form["packing"])
        return cls(**fields)


_NAMED_OR_FORMAT = [{"type": "string"}, *({"$ref": f"#/$defs/{cls.__name__}"} for cls in KINDS.values())]
_SCALE: Any = Annotated[
    Any, msgspec.Meta(extra_json_schema={"anyOf": [*_NAMED_OR_FORMAT, {"$ref": f"#/$defs/{Scheme.__name__}"}]})
]
_ZERO_POINT: Any = Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": _NAMED_OR_FORMAT})]

SCHEME = form_of(
    Scheme,
    format=str | CUSTOM_FORMAT,
    tile=dict[Annotated[str, msgspec.Meta(pattern=r"^(\*|-[1-9][0-9]{0,8})$")], Positive | None],
    scale=_SCALE,
    zero_point=_ZERO_POINT | None,
    calibration=str,
    packing=PACKING,
)
"""The JSON schema of an unnamed scheme."""

SCHEMES: Registry[Scheme] = Registry("scheme")
"""Every named scheme, with tiles on the last axis; `fb.SCHEMES.names()` lists them."""


def scheme(spec: str | Scheme | Mapping[str, Any]) -> Scheme:
    """The Scheme of a name, a JSON form or a Scheme.

    Args:
        spec: a registered name (`fb.SCHEMES.names()`); a name and `_g<length>`, which sets the group size along the last
            axis (`"int4_g128"`); the object of `Scheme.to_json`; or a Scheme.

    Returns:
        The scheme, with its tiles on the last axis.

    Raises:
        QuantError: for an unknown name, or anything else.

    >>> scheme("int4_g64").tile
    {...: 1, -1: 64}
    """
    if isinstance(spec, Scheme):
        return spec
    if isinstance(spec, Mapping):
        return Scheme.from_json(spec)
    if not isinstance(spec, str):
        raise QuantError(f"a scheme is a name, a JSON form or a Scheme, not {spec!r}")
    name, mark, length = spec.rpartition("_g")
    if spec not in SCHEMES and mark and length.isdecimal() and name in SCHEMES:
        preset = SCHEMES[name]
        if not preset._takes_group_size:
            raise QuantError(f"scheme {name!r} has no single tile along the last axis, so {spec!r} has no meaning")
        return preset.with_tile(int(length))
    return SCHEMES[spec]


def laid_along(scheme: Scheme, axis: int | tuple[int, ...], shape: tuple[int, ...]) -> Scheme:
    """`Scheme.along` for a shape. Tiles run along the last of the axes with more than one element.

    So a depthwise convolution's kernel, with one input channel, is tiled along its window.

    >>> laid_along(scheme("mxfp8"), (0, 1, 2), (3, 3, 1, 8)).tile
    {...: 1, -3: 32}
    """
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    ones = tuple(a for a in axes if shape[from_front(a, len(shape))] == 1)
    return scheme.along((*ones, *(a for a in axes if a not in ones)), len(shape))


def _float_dtype(spec: DTypeLike | None, what: str) -> np.dtype:
    """The checked dtype of a scale or offset."""
    if spec is None or isinstance(spec, Scheme) or (isinstance(spec, str) and spec not in _SCALE_DTYPES):
        raise QuantError(f"{what} is {spec!r}; pass one of {', '.join(_SCALE_DTYPES)}, or a Format object")
    dtype = jnp.dtype(spec)
    if dtype.name not in _SCALE_DTYPES:
        raise QuantError(f"{what} is {dtype.name}; its dtype must be one of {', '.join(_SCALE_DTYPES)}")
    return dtype


def _holder_to_json(holder: Any) -> Any:
    if isinstance(holder, Scheme):
        return holder.to_json()
    if isinstance(holder, AbstractFormat):
        return format_to_json(holder)
    return jnp.dtype(holder).name


def _axis_from_json(axis: str) -> Any:
    """The axis of a tile's key; `"*"` is all others."""
    return ... if axis == "*" else int(axis)


def _holder_from_json(form: Any) -> Any:
    if isinstance(form, Mapping) and "format" in form:
        return Scheme.from_json(form)
    if isinstance(form, str) and form in FORMATS:
        return FORMATS[form]
    if form is None or isinstance(form, str):
        return form
    return format_from_json(form)
