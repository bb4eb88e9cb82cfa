"""JSON forms of number formats."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Union

from .._json import checked, form_of
from .codebook import Codebook
from .e8m0 import E8M0
from .format import FORMATS, AbstractFormat
from .integer import Integer
from .minifloat import Minifloat
from .ternary import Binary, Ternary

KINDS: dict[str, type[AbstractFormat]] = {c.kind: c for c in (Integer, Minifloat, E8M0, Binary, Ternary, Codebook)}
"""Every kind of format, by the `kind` field of its JSON form."""

CUSTOM_FORMAT: Any = Union[tuple(form_of(cls, tag=kind) for kind, cls in KINDS.items())]  # noqa: UP007 - built of a table
"""The JSON schema of an unregistered format."""


def format_to_json(fmt: AbstractFormat) -> str | dict[str, Any]:
    """The JSON form of a format. It is the format's registered name, or an object with its kind and fields.

    Args:
        fmt: any format of fewbit's own kinds, or a registered one.

    Returns:
        A name, or an object that `format_from_json` reads.

    >>> format_to_json(FORMATS["nf4"])
    'nf4'
    """
    if fmt.name in FORMATS and FORMATS[fmt.name] == fmt:
        return fmt.name
    form: dict[str, Any] = {"kind": fmt.kind} | {f.name: getattr(fmt, f.name) for f in dataclasses.fields(fmt)}
    if isinstance(fmt, Codebook):
        form["table"] = list(fmt.table)
    return form


def format_from_json(form: str | Mapping[str, Any]) -> AbstractFormat:
    """The format of a JSON form.

    Args:
        form: a registered name, or the object that `format_to_json` gives for others.

    Returns:
        The format.

    Raises:
        QuantError: for an unregistered name, an unknown kind, or invalid fields.
    """
    if isinstance(form, str):
        return FORMATS[form]
    fields = checked(form, CUSTOM_FORMAT, "a format")
    kind = KINDS[fields.pop("kind")]
    if "table" in fields:
        fields["table"] = tuple(fields["table"])
    return kind(**fields)
