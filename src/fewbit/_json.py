"""JSON parsing with size limits and schema checks.

Errors name the file and the field. Our own files have closed schemas (an unknown field is an error), others' open ones (it
is ignored). Schemas are msgspec types: a `msgspec.Struct`, or `dict[str, X]`, `list[X]` and unions of them.
"""

import inspect
import json
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import numpy as np

from ._registry import near_names
from .errors import QuantError

T = TypeVar("T")

MAX_BYTES = 100_000_000
"""The longest JSON text in bytes; safetensors allows headers of this length."""
MAX_DEPTH = 64
"""The deepest nesting of objects and lists."""
MAX_VALUES = 4_000_000
"""The largest number of values in one text."""
MAX_DIGITS = 64
"""The longest integer; Hugging Face writes 1e30 in full, with 31 digits."""

Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
"""A size or a count of at least 1, below 2**40."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
"""A number of bytes or elements, below 2**60."""

_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MESSAGE = re.compile(r"(?P<fault>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_INDEX = re.compile(r"\[(\d+|\.\.\.)\]")
_QUOTED = re.compile(r"[^\w.-]")  # path keys with such characters are quoted


def write_json(path: str | os.PathLike[str], form: Any) -> None:
    """Writes JSON to a file, which keeps its content until the new one is complete.

    Args:
        path: the file.
        form: what `dumped` takes.

    Raises:
        QuantError: as `dumped`.
        OSError: when it cannot be written; it names the file.
    """
    text, file = dumped(form, os.fspath(path)), pathlib.Path(path).resolve()
    if file.exists() and not file.is_file():  # a pipe or a terminal
        file.write_bytes(text)
        return
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        unfinished.write_bytes(text)
        unfinished.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def parsed(text: bytes, where: str, *, constant: Callable[[str], Any] | None = None) -> Any:
    """Parses JSON text.

    Args:
        text: UTF-8 JSON.
        where: what the text is, for the error message: a file, or a part of one.
        constant: what NaN, Infinity and -Infinity become, which Python writes and JSON lacks; None refuses them.

    Raises:
        QuantError: when the text is not UTF-8 or not JSON, repeats a key, contains NaN or infinity (without `constant`), a number
            beyond float64 or a lone surrogate, or exceeds a limit of length, depth, count or digits.

    >>> parsed(b'{"a": [1, 2.5]}', "config.json")
    {'a': [1, 2.5]}
    """
    _check_limits(text, where)
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=constant or _refuse_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except QuantError as error:
        raise QuantError(f"{where}: {error}") from error
    except UnicodeDecodeError as error:
        raise QuantError(f"{where} is not UTF-8 text: {error}") from error
    except ValueError as error:
        raise QuantError(f"{where} is not valid JSON: {error}") from error
    if _SURROGATE.search(text):  # half of a surrogate pair cannot be written or printed
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise QuantError(f"{where} is not valid JSON: a string has half of a surrogate pair") from error
    return value


def parsed_object(text: bytes, where: str, *, constant: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Parses JSON text that must be an object, as `parsed`."""
    value = parsed(text, where, constant=constant)
    if not isinstance(value, dict):
        raise QuantError(f"{where} is a JSON {type(value).__name__}, but an object is expected")
    return value


def file_text(path: pathlib.Path, what: str) -> bytes:
    """The bytes of a JSON file. QuantError when it is missing, unreadable or longer than MAX_BYTES."""
    try:
        if not path.exists():
            raise QuantError(f"{what} {path} does not exist")
        if not path.is_file():
            raise QuantError(f"{what} {path} cannot be read: it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise QuantError(f"{what} {path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read")
        return path.read_bytes()
    except QuantError:
        raise
    except OSError as error:
        raise QuantError(f"{what} {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a path with a zero byte
        raise QuantError(f"{what} {os.fspath(path)!r} cannot be read: {error}") from error


def converted(value: object, schema: type[T] | Any, where: str) -> T:
    """Converts a JSON value to the type of a schema.

    Args:
        value: what `parsed` gave, or the same built in Python.
        schema: a msgspec type; numbers, strings and booleans are not converted into one another.
        where: what the value is, for the error message.

    Raises:
        QuantError: naming the first field that does not fit, its value and what is expected.

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


def checked(value: Any, schema: object, where: str) -> dict[str, Any]:
    """A copy of a JSON object that fits a schema; QuantError otherwise."""
    converted(value, schema, where)
    return dict(value)


def form_of(cls: type, /, *, tag: str | None = None, **types: object) -> type[msgspec.Struct]:
    """The closed schema, a `msgspec.Struct`, of a dataclass's JSON objects.

    The fields are the arguments of its `__init__`; those with a default may be left out. Descriptions come from the
    `Attributes:` of its docstring.

    Args:
        cls: the dataclass.
        tag: the value of the field `kind`, which distinguishes the schemas of a union; None: no such field.
        types: the JSON types of fields; the others have that of the dataclass's annotation.
    """
    hints = typing.get_type_hints(cls)
    texts = _attribute_texts(cls)
    fields: list[Any] = []
    for name, argument in inspect.signature(cls).parameters.items():
        kind: Any = types.get(name, hints.get(name))
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
    """The JSON schema (draft 2020-12) of a `msgspec.Struct`. It is for editors and programs that write such files."""
    form = msgspec.json.schema(schema)
    definitions = form.pop("$defs")
    root = definitions.pop(schema.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "title": title, "$defs": definitions}


def dumped(value: object, where: str) -> bytes:
    """Indented JSON text, keys in order. QuantError for what JSON cannot express, NaN and infinity included."""
    try:
        return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise QuantError(f"{where} cannot be written as JSON: {error}") from error


def canonical(value: object) -> bytes:
    """Canonical JSON text, keys sorted, for hashing."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def _check_limits(text: bytes, where: str) -> None:
    """Raises QuantError for JSON text beyond a limit, before it is parsed.

    The limits are on its bytes, its depth and its number of values.
    """
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
        raise QuantError(f"{where} has {count:,} values; at most {MAX_VALUES:,} are read")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise QuantError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise QuantError(f"{text} is not a JSON number")


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
    if found is None:
        return {}
    entries = re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", found[1], re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _fault(message: str, value: Any, schema: object, where: str) -> str:
    """The error message for a msgspec error: the field, its value, what is expected."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None
    fault = match["fault"]
    path, rest = "", match["path"] or ""
    while rest:
        step, rest = _step(rest, value, schema)
        if isinstance(step, str) and not _QUOTED.search(step):
            path += f".{step}"
        else:
            path += f"[{step!r}]"
        schema = _item_schema(schema, value, step)
        value = value[step]
    place = where
    if path := path.removeprefix("."):
        place = f"{where}: {path}"
    known = _field_names(schema, value)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", fault, re.DOTALL):
        return f"{place} has no field {unknown[1]!r}; {near_names(unknown[1], known)}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", fault):
        message = f"{place} lacks the field {missing[1]!r}"
        if known and _object_schema(schema, value).__struct_config__.forbid_unknown_fields:
            message += f"; its fields are {', '.join(known)}"
        return message
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


def _alternatives(schema: object) -> list[Any]:
    """The members of a union without `Annotated`; `[schema]` for another type."""
    origin = typing.get_origin(schema)
    if origin is Annotated:
        return _alternatives(typing.get_args(schema)[0])
    if origin in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(schema) for each in _alternatives(part)]
    return [schema]


def _object_schema(schema: object, value: object) -> Any:
    """The alternative of a schema that fits a JSON object.

    That is the Struct with the object's tag, or the dict. None if neither.
    """
    found = [each for each in _alternatives(schema) if _is_struct(each) or typing.get_origin(each) is dict]
    tagged = [each for each in found if _is_struct(each) and each.__struct_config__.tag is not None]
    if isinstance(value, Mapping) and tagged:
        config = tagged[0].__struct_config__
        words = tuple(each.__struct_config__.tag for each in tagged)
        kinds = dict[str, Literal[words]]  # a wrong tag is compared with these
        return next((each for each in tagged if each.__struct_config__.tag == value.get(config.tag_field)), kinds)
    return next(iter(found), None)


def _is_struct(schema: object) -> bool:
    return isinstance(schema, type) and issubclass(schema, msgspec.Struct)


def _item_schema(schema: object, value: object, step: Any) -> Any:
    """The schema of the item at `step`, an index or a key."""
    if isinstance(value, Mapping):
        found = _object_schema(schema, value)
        if found is None:
            return Any
        if _is_struct(found):
            names = dict(zip(found.__struct_encode_fields__, found.__struct_fields__, strict=True))
            return typing.get_type_hints(found, include_extras=True).get(names.get(step, step), Any)
        if arguments := typing.get_args(found):
            return arguments[1]
        return Any
    for each in _alternatives(schema):
        if typing.get_origin(each) in (list, tuple):
            return typing.get_args(each)[0]
    return Any


def _step(path: str, value: Any, schema: object) -> tuple[Any, str]:
    """The first step of msgspec's path, and the rest of the path. A step is an index or a key."""
    found = _INDEX.match(path)
    if found is None:
        names = [name for name in _field_names(schema, value) if path[1:].startswith(name)]
        step = max(names, key=len, default=path[1:])  # a name may have dots; a tag is not a field
        return step, path[1 + len(step) :]
    if found[1] != "...":
        return int(found[1]), path[found.end() :]
    # msgspec does not name the key of an object's value: it is the first that does not fit.
    step = next(key for key, item in value.items() if not _fits(item, _item_schema(schema, value, key)))
    return step, path[found.end() :]


def _fits(value: object, schema: Any) -> bool:
    try:
        msgspec.convert(value, schema)
    except msgspec.ValidationError:
        return False
    return True


def _field_names(schema: object, value: object) -> tuple[str, ...]:
    return getattr(_object_schema(schema, value), "__struct_encode_fields__", ())


def _words(schema: object) -> list[Any]:
    """The values of a schema's literals."""
    return [word for each in _alternatives(schema) if typing.get_origin(each) is Literal for word in typing.get_args(each)]
