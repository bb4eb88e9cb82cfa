"""A check of JSON against a schema, for the words that our schemas use; any other word of JSON Schema is refused."""

import re

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": int | float,
}
_SILENT = {"$schema", "$defs", "title", "description", "discriminator"}  # the last only names what `const` asserts


def errors(value, schema, root=None, where="$"):
    """What is wrong with a value, one line each."""
    root = root or schema
    found = []
    for word, argument in schema.items():
        if word not in _SILENT:
            found += [
                f"{where}: {text}" if not text.startswith("$") else text
                for text in _CHECKS[word](value, argument, schema, root, where)
            ]
    return found


def _type(value, name, schema, root, where):
    is_one = isinstance(value, _TYPES[name]) and not (name in ("integer", "number") and isinstance(value, bool))
    return [] if is_one else [f"{value!r} is no {name}"]


def _ref(value, target, schema, root, where):
    return errors(value, root["$defs"][target.removeprefix("#/$defs/")], root, where)


def _properties(value, properties, schema, root, where):
    if not isinstance(value, dict):
        return []
    return [
        e for key in properties.keys() & value.keys() for e in errors(value[key], properties[key], root, f"{where}.{key}")
    ]


def _additional(value, allowed, schema, root, where):
    others = {k: v for k, v in value.items() if k not in schema.get("properties", {})} if isinstance(value, dict) else {}
    if allowed is False:
        return [f"has no {k!r}" for k in others]
    return [e for k, v in others.items() for e in errors(v, allowed, root, f"{where}.{k}")]


def _property_names(value, inner, schema, root, where):
    return [e for key in (value if isinstance(value, dict) else ()) for e in errors(key, inner, root, where)]


def _items(value, inner, schema, root, where):
    return (
        [e for i, x in enumerate(value) for e in errors(x, inner, root, f"{where}[{i}]")] if isinstance(value, list) else []
    )


def _any_of(value, forms, schema, root, where):
    tried = [errors(value, form, root, where) for form in forms]
    return [] if [] in tried else [e for found in tried for e in found]


def _limit(is_within):
    def check(value, limit, schema, root, where):
        return [] if not isinstance(value, int) or is_within(value, limit) else [f"{value} is beyond {limit}"]

    return check


_CHECKS = {
    "type": _type,
    "$ref": _ref,
    "properties": _properties,
    "propertyNames": _property_names,
    "pattern": lambda value, p, *_: [] if not isinstance(value, str) or re.search(p, value) else [f"{value!r} is not {p}"],
    "additionalProperties": _additional,
    "items": _items,
    "anyOf": _any_of,
    "enum": lambda value, words, *_: [] if value in words else [f"{value!r} is none of {words}"],
    "const": lambda value, word, *_: [] if value == word else [f"{value!r} is not {word!r}"],
    "required": lambda value, keys, *_: [f"lacks {k!r}" for k in keys if isinstance(value, dict) and k not in value],
    "minItems": lambda value, n, *_: [] if not isinstance(value, list) or len(value) >= n else ["has too few items"],
    "minimum": _limit(lambda value, limit: value >= limit),
    "maximum": _limit(lambda value, limit: value <= limit),
    "exclusiveMaximum": _limit(lambda value, limit: value < limit),
}
