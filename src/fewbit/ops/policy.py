"""How one product is computed: the schemes of its weight and its activation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, TypeAlias

from .._registry import refuse_unknown_fields
from ..array import Scheme
from ..array import scheme as as_scheme
from ..errors import QuantError

SchemeSpec: TypeAlias = Scheme | str | Mapping[str, Any]
"""What `fb.scheme` makes a Scheme of."""


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """The schemes of a product's operands; names are taken as `fb.scheme` takes them.

    Attributes:
        weight: the scheme of the parameter.
        activation: the scheme that the other operand is quantized in when the product is computed, its tiles along the
            contracted axes; None leaves it as it is (weight-only).

    >>> Policy("int8", activation="int8").to_json()
    {'weight': {'format': 'int8', 'tile': {'*': 1, '-1': None}, 'scale': 'float32', 'calibration': 'absmax'}, 'activation': \
{'format': 'int8', 'tile': {'*': 1, '-1': None}, 'scale': 'float32', 'calibration': 'absmax'}}
    """

    weight: Scheme
    activation: Scheme | None = None

    def __init__(self, weight: SchemeSpec, activation: SchemeSpec | None = None):
        object.__setattr__(self, "weight", as_scheme(weight))
        object.__setattr__(self, "activation", None if activation is None else as_scheme(activation))

    def __str__(self) -> str:
        return self.weight.name if self.activation is None else f"{self.weight.name} x {self.activation.name}"

    def to_json(self) -> dict[str, Any]:
        """The JSON form: the schemes' JSON forms by field."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value.to_json() for name, value in fields.items() if value is not None}

    @classmethod
    def from_json(cls, form: Mapping[str, Any] | str) -> Self:
        """The policy of a JSON form, or the weight-only policy of a scheme's name."""
        if isinstance(form, str):
            return cls(as_scheme(form))
        known = tuple(f.name for f in dataclasses.fields(cls))
        refuse_unknown_fields("a policy", form, known)
        if "weight" not in form:
            raise QuantError(f"a policy needs a 'weight'; got {dict(form)}")
        return cls(**{key: as_scheme(value) for key, value in form.items() if value is not None})
