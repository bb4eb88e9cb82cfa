"""JSON read within limits and checked against schemas; every refusal names the file and the field.

Others' files are read by open schemas (unknown fields are ignored), ours by closed ones (an unknown field is an error).
Schemas are types of msgspec: a `msgspec.Struct`, or `dict[str, X]`, `list[X]` and unions of them.
"""

import inspect
import json
import os
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import numpy as np

from ._registry import near_names
from .errors import QuantError

T = TypeVar("T")

MAX_BYTES = 100_000_000
"""The longest JSON text that is read; safetensors allows headers of this length."""
MAX_DEPTH = 64
"""How deep objects and lists may be nested."""
MAX_VALUES = 4_000_000
"""How many values one text may hold."""
MAX_DIGITS = 64
"""The longest integer; Hugging Face writes 1e30 in full, with 31 digits."""

Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
"""A size or a count: 1 or more, and below 2**40."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
"""A number of bytes or elements: 0 or more, and below 2**60."""

_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MESSAGE = re.compile(r"(?P<fault>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_INDEX = re.compile(r"\[(\d+|\.\.\.)\]")
_QUOTED = re.compile(r"[^\w.-]")  # what makes a key of a path be quoted


def parsed(text: bytes, where: str) -> Any:
    """The value of JSON text.

    Args:
        text: UTF-8 JSON.
        where: what the text is, for the error message: a file, or a part of one.

    Raises:
        QuantError: when the text is not UTF-8 or not JSON, names a key twice, holds NaN, infinity, a number beyond float64 or
            half of a surrogate pair, or exceeds a limit of length, depth, count or digits.

    >>> parsed(b'{"a": [1, 2.5]}', "config.json")
    {'a': [1, 2.5]}
    """
    _check_limits(text, where)
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from error
    except UnicodeDecodeError as error:
        raise QuantError(f"{where} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise QuantError(f"{where} is not valid JSON: {error}") from error
    if _SURROGATE.search(text):
        _check_surrogates(value, where)
    return value


def parsed_object(text: bytes, where: str) -> dict[str, Any]:
    """The value of JSON text that must be an object."""
    value = parsed(text, where)
    if not isinstance(value, dict):
        raise QuantError(f"{where} holds a JSON {type(value).__name__}, but an object is expected")
    return value


def file_text(path: pathlib.Path, what: str) -> bytes:
    """The bytes of a JSON file, whose length is checked before they are read.

    Args:
        path: the file.
        what: what it is, for the error message: "recipe file".

    Raises:
        QuantError: when it does not exist, cannot be read, or is too long.
    """
    try:
        if not path.exists():
            raise QuantError(f"{what} {path} does not exist")
        if not path.is_file():
            raise QuantError(f"{what} {path} cannot be read: it is no file")
        if path.stat().st_size > MAX_BYTES:
            raise QuantError(f"{what} {path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
        return path.read_bytes()
    except QuantError:
        raise
    except OSError as error:
        raise QuantError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a path that holds a zero byte
        raise QuantError(f"{what} {os.fspath(path)!r} cannot be read: {error}") from error


def converted(value: Any, schema: type[T] | Any, where: str) -> T:
    """A JSON value as a schema describes it.

    Args:
        value: what `parsed` gave, or the same built in Python.
        schema: a type of msgspec; numbers, texts and booleans are not converted into one another.
        where: what the value is, for the error message.

    Raises:
        QuantError: naming the first field that does not fit, what it holds and what is expected.

    >>> converted({"a": [1, 2]}, dict[str, list[int]], "sizes")
    {'a': [1, 2]}
    >>> converted({"a": [1, "b"]}, dict[str, list[int]], "sizes")
    Traceback (most recent call last):
    ...
    fewbit.errors.QuantError: sizes: a[1] is 'b'; expected int
    """
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise QuantError(_fault(str(error), value, schema, where)) from error
    except RecursionError as error:
        raise QuantError(f"{where} is nested too deeply") from error


def checked(value: Any, schema: Any, where: str) -> dict[str, Any]:
    """A JSON object, as it is, after a check against a schema."""
    converted(value, schema, where)
    return dict(value)


def form_of(cls: type, /, *, tag: str | None = None, **types: Any) -> type[msgspec.Struct]:
    """The closed schema of the JSON objects from which a dataclass is made.

    The fields are the arguments of its `__init__`; those with a default may be left out. Descriptions come from the
    `Attributes:` of its docstring.

    Args:
        cls: the dataclass.
        tag: what the field `kind` holds, by which the schemas of a union are told apart; None: there is no such field.
        types: the JSON types of fields; for the others the annotation of the dataclass is the JSON type.

    Returns:
        A `msgspec.Struct` that refuses unknown fields.
    """
    hints = typing.get_type_hints(cls)
    texts = _attribute_texts(cls)
    fields: list[Any] = []
    for name, argument in inspect.signature(cls).parameters.items():
        kind = types.get(name, hints.get(name))
        if name in texts:
            kind = Annotated[kind, msgspec.Meta(description=texts[name])]
        if argument.default is inspect.Parameter.empty:
            fields.append((name, kind))
        else:
            fields.append((name, typing.Union[kind, msgspec.UnsetType], msgspec.UNSET))  # noqa: UP007 - kind is a value
    tag_field = None if tag is None else "kind"
    return msgspec.defstruct(
        cls.__name__, fields, forbid_unknown_fields=True, kw_only=True, frozen=True, tag=tag, tag_field=tag_field
    )


def schema_document(schema: Any, title: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a schema, for editors and for programs that write such files.

    Args:
        schema: a `msgspec.Struct`.
        title: what it describes.

    Returns:
        The document, a new object each time.
    """
    form = msgspec.json.schema(schema)
    definitions = form.pop("$defs")
    root = definitions.pop(schema.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "title": title, "$defs": definitions}


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


def _check_limits(text: bytes, where: str) -> None:
    """Refuses text that is too long, too deep or holds too much, before anything is built of it."""
    if len(text) > MAX_BYTES:
        raise QuantError(f"{where} has {len(text):,} bytes of JSON; at most {MAX_BYTES:,} are read")
    opening = text.count(b"[") + text.count(b"{")
    if opening <= MAX_DEPTH and text.count(b",") < MAX_VALUES:
        return
    bare = _STRINGS.sub(b"", text)
    brackets = np.frombuffer(bare.translate(None, _BRACKETS), np.uint8)
    is_opening = (brackets == ord("[")) | (brackets == ord("{"))
    depth = int(np.cumsum(np.where(is_opening, 1, -1), dtype=np.int64).max(initial=0))
    if depth > MAX_DEPTH:
        raise QuantError(
            f"{where} is not valid JSON: it is nested too deeply ({depth} levels, at most {MAX_DEPTH} are read)"
        )
    count = bare.count(b",") + int(is_opening.sum()) + 1
    if count > MAX_VALUES:
        raise QuantError(f"{where} holds {count:,} values; at most {MAX_VALUES:,} are read")


def _check_surrogates(value: Any, where: str) -> None:
    """Refuses text with half of a surrogate pair, which cannot be written or printed."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise QuantError(f"{where} is not valid JSON: half of a surrogate pair stands alone in a text") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise QuantError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise QuantError(f"{text} is no JSON number")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise QuantError(f"an integer of {len(text)} digits ({text[:12]}...); at most {MAX_DIGITS} are read")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise QuantError(f"{text[:40]} is beyond the range of float64")
    return value


def _attribute_texts(cls: type) -> dict[str, str]:
    """The descriptions under `Attributes:` (or `Args:`) of a class's docstring, by field."""
    found = re.search(r"^(?:Attributes|Args):\n((?:[ ]+.*\n?)+)", inspect.getdoc(cls) or "", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", found.group(1) if found else "", re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _fault(message: str, value: Any, schema: Any, where: str) -> str:
    """The sentence for an error of msgspec: where it is, what is there, what is expected."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    fault = match["fault"]
    path, rest = "", match["path"] or ""
    while rest:
        step, rest = _step(rest, value, schema)
        if isinstance(step, str) and not _QUOTED.search(step):
            path += f".{step}" if path else step
        else:
            path += f"[{step!r}]"
        schema = _item_schema(schema, value, step)
        value = value[step]
    place = f"{where}: {path}" if path else where
    known = _field_names(schema, value)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", fault, re.DOTALL):
        return f"{place} has no field {unknown[1]!r}; {near_names(unknown[1], known)}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", fault):
        is_closed = known and _object_schema(schema, value).__struct_config__.forbid_unknown_fields
        return f"{place} lacks the field {missing[1]!r}" + (f"; its fields are {', '.join(known)}" if is_closed else "")
    if match["key"]:
        key_schema = typing.get_args(_object_schema(schema, value))[0]
        value = next(key for key in value if not _fits(key, key_schema))
        place = f"{place} has a key that"
    shown = f"{value!r:.80}"
    if fault.startswith(("Invalid enum value", "Invalid value")):
        return f"{place} is {shown}; {near_names(str(value), tuple(map(str, _words(schema))))}"
    expected = re.sub(r", got .*$", "", fault.removeprefix("Expected "), flags=re.DOTALL).replace("`", "")
    if known and "object" in expected:
        expected += f" with the fields {', '.join(known)}"
    return f"{place} is {shown}; expected {expected}"


def _alternatives(schema: Any) -> list[Any]:
    """The types of a union, without what `Annotated` adds; of any other type itself."""
    origin = typing.get_origin(schema)
    if origin is Annotated:
        return _alternatives(typing.get_args(schema)[0])
    if origin in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(schema) for each in _alternatives(part)]
    return [schema]


def _object_schema(schema: Any, value: Any) -> Any:
    """The alternative of a schema for a JSON object: the Struct (of several the one with the object's tag) or the dict."""
    found = [each for each in _alternatives(schema) if _is_struct(each) or typing.get_origin(each) is dict]
    tagged = [each for each in found if _is_struct(each) and each.__struct_config__.tag is not None]
    if isinstance(value, Mapping) and tagged:
        config = tagged[0].__struct_config__
        words = tuple(each.__struct_config__.tag for each in tagged)
        kinds = dict[str, Literal[words]]  # what a wrong tag is compared with
        return next((each for each in tagged if each.__struct_config__.tag == value.get(config.tag_field)), kinds)
    return found[0] if found else None


def _is_struct(schema: Any) -> bool:
    return isinstance(schema, type) and issubclass(schema, msgspec.Struct)


def _item_schema(schema: Any, value: Any, step: Any) -> Any:
    """The schema of what a step leads to."""
    if isinstance(value, Mapping):
        found = _object_schema(schema, value)
        if found is None:
            return Any
        if _is_struct(found):
            names = dict(zip(found.__struct_encode_fields__, found.__struct_fields__, strict=True))
            return typing.get_type_hints(found, include_extras=True).get(names.get(step, step), Any)
        return typing.get_args(found)[1] if typing.get_args(found) else Any
    for each in _alternatives(schema):
        if typing.get_origin(each) in (list, tuple):
            return typing.get_args(each)[0]
    return Any


def _step(path: str, value: Any, schema: Any) -> tuple[Any, str]:
    """The first step of msgspec's path, an index or a key, and the rest of the path."""
    if found := _INDEX.match(path):
        step = _misfit_key(value, schema) if found[1] == "..." else int(found[1])
        return step, path[found.end() :]
    names = [name for name in _field_names(schema, value) if path[1:].startswith(name)]
    step = max(names, key=len) if names else path[1:]  # a name may hold dots; a tag is no field
    return step, path[1 + len(step) :]


def _misfit_key(value: Mapping[Any, Any], schema: Any) -> Any:
    """The first key of an object whose value does not fit; msgspec does not name it."""
    return next(key for key, item in value.items() if not _fits(item, _item_schema(schema, value, key)))


def _fits(value: Any, schema: Any) -> bool:
    try:
        msgspec.convert(value, schema)
    except msgspec.ValidationError:
        return False
    return True


def _field_names(schema: Any, value: Any) -> tuple[str, ...]:
    found = _object_schema(schema, value)
    return found.__struct_encode_fields__ if _is_struct(found) else ()


def _words(schema: Any) -> list[Any]:
    """The words of a schema's literals."""
    return [word for each in _alternatives(schema) if typing.get_origin(each) is Literal for word in typing.get_args(each)]
