"""Policy: the schemes of a product's operands and of its gradients."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeAlias

from .._json import checked, form_of
from .._registry import near_names
from ..array import scheme as as_scheme
from ..array.scheme import SCHEME, Scheme
from ..errors import QuantError
from .delayed import DELAYED, DelayedScaling

SchemeSpec: TypeAlias = Scheme | str | Mapping[str, Any]
"""What `fb.scheme` accepts."""

Residual: TypeAlias = Literal["forward", "original"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
TiledAxis: TypeAlias = Literal["last", "first"]
Noise: TypeAlias = Literal["element", "row", "tensor"]
Accumulator: TypeAlias = Literal["int32", "float32", "bfloat16"]

_WORDS: dict[str, tuple[Any, ...]] = {
    "rounding": ("nearest", "stochastic"),
    "tiled_axis": ("last", "first"),
    "noise": ("element", "row", "tensor"),
    "accumulator": ("int32", "float32", "bfloat16"),
}
_RESIDUALS = ("forward", "original")


def _optional_scheme(given: SchemeSpec | None) -> Scheme | None:
    return None if given is None else as_scheme(given)


def _check_words(**given: object) -> None:
    """Raises QuantError for a value that its field does not have."""
    for field, word in given.items():
        if word not in _WORDS[field]:
            raise QuantError(f"{field} is {word!r}; {near_names(str(word), _WORDS[field])}")


@dataclasses.dataclass(frozen=True, init=False)
class Arm:
    """How one operand's gradient (dlhs or drhs) is computed from the incoming gradient `g`.

    With codes `c` and scales `s` of the other operand from the forward pass, and `Q` the quantizer of `gradient`:

        gradient=None                         g . (c * s)        the straight-through gradient of fake quantization
        gradient=None, operand="original"     g . x              the gradient of the float product
        gradient=scheme, operand="forward"    Q(g * s) . c       where s varies only along this product's contraction axes;
                                              Q(g) . (c * s)     otherwise
        gradient=scheme, operand="original"   Q(g) . x           the original float operand
        gradient=scheme, operand=scheme       Q(g) . Q'(x)       the original operand, quantized along this contraction

    With zero points `z` the second operand is `(c - z) * s`; the scale is folded, and codes are multiplied, where `gradient` is
    an integer scheme.

    Attributes:
        gradient: the scheme of the incoming gradient, its tiles along this product's contraction axis; None: not quantized.
        operand: the other operand: "forward" uses its codes of the forward pass, "original" the float array, and a scheme
            quantizes the float array along this product's contraction axis, so that nothing is quantized twice.
        rounding: of the gradient: to the "nearest", or "stochastic", which needs a key.
        tiled_axis: which of several contraction axes the tiles of `gradient` and `operand` run along: the "last" (the
            sequence in a weight's gradient, like Qwix) or the "first" (the batch, like AQT).
        hadamard: rotate both operands along the tiled axis by a random Hadamard matrix of this many rows before they are
            quantized, which spreads outliers; a power of two that divides the axis. None: no rotation. Needs a key.
        noise: how many random numbers stochastic rounding draws: one per "element"; one per "row", which is all elements that
            one sum of this product runs over; or one per "tensor". Each is unbiased; fewer numbers cost less time and give
            the sums more variance. Qwix shares them along all axes but the first, AQT along chosen axes.
        accumulator: the dtype that products of codes are summed in: None is "int32" for integers, "float32" for others;
            "bfloat16" is for 8-bit floats: the sum is rounded to bfloat16, at least once. A product that cannot use it raises
            with the reason.

    >>> Arm("fp8_e5m2", rounding="stochastic").to_json()["rounding"]
    'stochastic'
    """

    gradient: Scheme | None
    operand: Scheme | Residual
    rounding: Rounding
    tiled_axis: TiledAxis
    hadamard: int | None
    noise: Noise
    accumulator: Accumulator | None

    def __init__(
        self,
        gradient: SchemeSpec | None = None,
        operand: SchemeSpec | Residual = "forward",
        rounding: Rounding = "nearest",
        tiled_axis: TiledAxis = "last",
        hadamard: int | None = None,
        noise: Noise = "element",
        accumulator: Accumulator | None = None,
    ):
        _check_words(rounding=rounding, tiled_axis=tiled_axis, noise=noise)
        if accumulator is not None:
            _check_words(accumulator=accumulator)
        object.__setattr__(self, "gradient", _optional_scheme(gradient))
        if operand not in _RESIDUALS:
            operand = as_scheme(operand)
        object.__setattr__(self, "operand", operand)
        object.__setattr__(self, "rounding", rounding)
        object.__setattr__(self, "tiled_axis", tiled_axis)
        object.__setattr__(self, "hadamard", hadamard)
        object.__setattr__(self, "noise", noise)
        object.__setattr__(self, "accumulator", accumulator)
        asks = isinstance(self.operand, Scheme) or rounding == "stochastic" or hadamard or accumulator is not None
        if self.gradient is None and asks:
            raise QuantError("an arm without a gradient scheme quantizes nothing; pass gradient=")
        is_power = isinstance(hadamard, int) and hadamard >= 2 and not hadamard & (hadamard - 1)
        if hadamard is not None and not (is_power and isinstance(self.operand, Scheme)):
            raise QuantError(f"hadamard is {hadamard}; it must be a power of two, with a scheme for the operand")
        if noise != "element" and rounding != "stochastic":
            raise QuantError(
                f"noise is {noise!r}, and rounding to the nearest draws no random numbers; pass rounding='stochastic'"
            )

    @property
    def needs_key(self) -> bool:
        """Whether it draws random numbers."""
        return self.rounding == "stochastic" or self.hadamard is not None

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the fields that differ from the defaults."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = {name: value for name, value in values.items() if value != getattr(FLOAT, name)}
        return {name: value.to_json() if isinstance(value, Scheme) else value for name, value in changed.items()}

    @classmethod
    def from_json(cls, form: object) -> Self:
        """The arm of a JSON form. A scheme's name is an arm that quantizes the gradient in it."""
        if isinstance(form, cls):
            return form
        if isinstance(form, str):
            return cls(form)
        return cls(**checked(form, ARM, "an arm"))


FLOAT = Arm()
"""The arm that quantizes nothing."""
ARM = form_of(Arm, gradient=str | SCHEME | None, operand=str | SCHEME)
"""The JSON schema of an arm."""


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """The schemes of a product's operands and of its backward pass; schemes or their names.

    Attributes:
        weight: the scheme of the parameter; of a product without one, of the right operand.
        activation: the scheme of the other operand, its tiles along the contraction axes; None: not quantized (weight-only).
        dlhs: how the gradient of the activation is computed, which contracts the incoming gradient with the weight.
        drhs: how the gradient of the weight is computed, which contracts the incoming gradient with the activation.
        clips_gradient: whether elements outside the range of their tile get no gradient, where the calibration can clip
            ("fixed", "absmax" with a factor below 1, "percentile" and the like).
        delayed: delayed scaling: scales from earlier steps, with a state from `fb.delayed_state` that `fb.train` passes to the
            products. None: every scale comes from the array itself.
        accumulator: the dtype that the product's codes are summed in, as in `Arm`; it needs an activation scheme.

    >>> str(Policy("int8", activation="int8"))
    'int8 x int8'
    >>> Policy("fp8", "fp8", dlhs="fp8_e5m2", drhs="fp8_e5m2").dlhs.gradient.name
    'fp8_e5m2'
    """

    weight: Scheme
    activation: Scheme | None
    dlhs: Arm
    drhs: Arm
    clips_gradient: bool
    delayed: DelayedScaling | None
    accumulator: Accumulator | None

    def __init__(
        self,
        weight: SchemeSpec,
        activation: SchemeSpec | None = None,
        dlhs: Arm | str | Mapping[str, Any] = FLOAT,
        drhs: Arm | str | Mapping[str, Any] = FLOAT,
        clips_gradient: bool = True,
        delayed: DelayedScaling | Mapping[str, Any] | None = None,
        accumulator: Accumulator | None = None,
    ):
        object.__setattr__(self, "weight", as_scheme(weight))
        object.__setattr__(self, "activation", _optional_scheme(activation))
        object.__setattr__(self, "dlhs", Arm.from_json(dlhs))
        object.__setattr__(self, "drhs", Arm.from_json(drhs))
        if not isinstance(clips_gradient, bool):
            raise QuantError(f"clips_gradient is {clips_gradient!r}, must be True or False")
        object.__setattr__(self, "clips_gradient", clips_gradient)
        if delayed is not None:
            delayed = DelayedScaling.from_json(delayed)
        object.__setattr__(self, "delayed", delayed)
        object.__setattr__(self, "accumulator", accumulator)
        if accumulator is not None:
            _check_words(accumulator=accumulator)
            if activation is None:
                raise QuantError("accumulator is for products of codes; without activation= the product is one of floats")
        if self.delayed is not None:
            arms = {"dlhs": self.dlhs.gradient, "drhs": self.drhs.gradient}
            for name, scheme in {"weight": self.weight, "activation": self.activation, **arms}.items():
                self.delayed.check(name, scheme)
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Raises QuantError for arms that cannot share one amax history of the gradient."""
        for arm in (self.dlhs, self.drhs):
            if (
                arm.rounding == "stochastic"
                and arm.gradient is not None
                and arm.gradient.format.bound > arm.gradient.format.max
            ):
                raise QuantError(
                    f"delayed scaling puts the amax of {arm.gradient.name} half a step above its largest code, where "
                    f"stochastic rounding is biased; use a narrow range, such as {arm.gradient.format.name}_narrow"
                )
        if self.dlhs.hadamard or self.drhs.hadamard:
            raise QuantError(
                "delayed scaling stores the amax of the incoming gradient, before a rotation; leave hadamard out"
            )
        if (schemes := {self.dlhs.gradient, self.drhs.gradient} - {None}) and len(schemes) > 1:
            names = " and ".join(sorted(scheme.name for scheme in schemes if scheme is not None))
            raise QuantError(f"delayed scaling keeps one history of the gradient; the arms quantize it as {names}")

    @property
    def gradient(self) -> Scheme | None:
        """The scheme of the incoming gradient, of the first arm that quantizes it."""
        return self.dlhs.gradient or self.drhs.gradient

    def __str__(self) -> str:
        text = self.weight.name
        if self.activation is not None:
            text += f" x {self.activation.name}"
        if gradients := dict.fromkeys(arm.gradient.name for arm in (self.dlhs, self.drhs) if arm.gradient is not None):
            text += f", gradient {' and '.join(gradients)}"
        if self.delayed is not None:
            text += ", delayed scales"
        return text

    @property
    def is_weight_only(self) -> bool:
        """Whether it has nothing but the weight's scheme, so that a QArray needs no policy."""
        return self == type(self)(self.weight)

    @property
    def needs_key(self) -> bool:
        """Whether the backward pass draws random numbers."""
        return self.dlhs.needs_key or self.drhs.needs_key

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the fields that differ from the defaults."""
        form: dict[str, Any] = {"weight": self.weight.to_json()}
        if self.activation is not None:
            form["activation"] = self.activation.to_json()
        form |= {name: arm.to_json() for name in ("dlhs", "drhs") if (arm := getattr(self, name)) != FLOAT}
        if not self.clips_gradient:
            form["clips_gradient"] = False
        if self.accumulator is not None:
            form["accumulator"] = self.accumulator
        if self.delayed is not None:
            form["delayed"] = self.delayed.to_json()
        return form

    @classmethod
    def from_json(cls, form: object) -> Self:
        """The policy of a JSON form, or the weight-only policy of a scheme's name."""
        if isinstance(form, str):
            return cls(as_scheme(form))
        return cls(**checked(form, POLICY, "a policy"))


_ARM = str | ARM
POLICY = form_of(Policy, weight=str | SCHEME, activation=str | SCHEME | None, dlhs=_ARM, drhs=_ARM, delayed=DELAYED | None)
"""The JSON schema of a policy."""
