"""JSON read strictly: a key that stands twice, NaN, or text that is not JSON is one clear error that names the file."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import QuantError


def parsed(text: bytes, where: str) -> Any:
    """The value of JSON text.

    Args:
        text: UTF-8 JSON.
        where: what the text is, for the error message: a file, or a part of one.

    Raises:
        QuantError: when the text is not UTF-8 or not JSON, names a key twice, or holds NaN or infinity.

    >>> parsed(b'{"a": [1, 2.5]}', "config.json")
    {'a': [1, 2.5]}
    """
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from error
    except UnicodeDecodeError as error:
        raise QuantError(f"{where} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise QuantError(f"{where} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise QuantError(f"{where} is not valid JSON: it is nested too deeply") from error


def parsed_object(text: bytes, where: str) -> dict[str, Any]:
    """The value of JSON text that must be an object."""
    value = parsed(text, where)
    if not isinstance(value, dict):
        raise QuantError(f"{where} holds a JSON {type(value).__name__}, but an object is expected")
    return value


def dumped(value: Any, where: str) -> bytes:
    """The JSON text of a value, indented, with a newline at its end; keys keep their order.

    Raises:
        QuantError: for what JSON has no form for, NaN and infinity included.
    """
    try:
        return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise QuantError(f"{where} cannot be written as JSON: {error}") from error


def canonical(value: Any) -> bytes:
    """The one text of a JSON value that does not depend on the order of its keys: what hashes are taken of."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def field(form: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """`form[key]`, which must be of the given type (`True` is no int).

    Raises:
        QuantError: when the key is missing or its value is of another type.
    """
    if key not in form:
        raise QuantError(f"{where} has no {key!r}")
    value = form[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise QuantError(f"{where}: {key!r} is {value!r:.80}, must be of type {kind.__name__}")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise QuantError(f"the key {key!r} stands twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise QuantError(f"{text} is no JSON number")
