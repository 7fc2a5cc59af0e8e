"""Describes configs and calls in short text for people."""

import dataclasses
import enum
import itertools
import json
import re


def describe_config(config: object) -> str:
    """Formats a config for reading: nested dataclasses are flattened, fields that are None are left out.

    The backend, or the platform and an algorithm, come first and without their field names. A config whose type is not
    loaded may be given as its tagged JSON (`ops.utils.serialize`).
    """
    if not _has_fields(config):
        return _value(config)
    fields = dict(_fields(config))
    names = ("platform", "algorithm") if "platform" in fields else ("backend",)
    first = [str(fields.pop(name)) for name in names if name in fields]
    return " ".join([":".join(first)] * bool(first) + [f"{name}={value}" for name, value in fields.items()])


def _has_fields(value: object) -> bool:
    if isinstance(value, dict):
        return "$dataclass" in value and isinstance(value.get("fields"), dict)
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(config: object) -> list[tuple[str, str]]:
    fields: list[tuple[str, object]] = []
    if isinstance(config, dict):
        fields = list(config["fields"].items())
    elif dataclasses.is_dataclass(config):
        fields = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    found: list[tuple[str, str]] = []
    for name, value in fields:
        if _has_fields(value):
            found += _fields(value)
        elif value is not None:
            found.append((name, _value(value)))
    return found


def _value(value: object) -> str:
    match value:
        case enum.Enum():
            return str(value.value)
        case {"$enum": _, "name": name}:
            return str(name).lower()
        case {"$tuple": list(items)}:
            return f"({', '.join(map(_value, items))}{',' * (len(items) == 1)})"
        case {"$dtype": str(text)} | {"$float": str(text)} | {"$callable": str(text)}:
            return text
    return str(value)


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}


def describe_key(key: object) -> str:
    """Formats the arguments in a call's key: ``f32[1,512,8,64] f32[1,512,2,64]×2 mask=causal softmax_scale=0.125``.

    Arguments that are ``None``, false or zero are left out. A key of any other form is returned as its ``str``.
    """
    try:
        parsed = json.loads(key) if isinstance(key, str) else {}
        arguments = _tagged(parsed["args"])
        options = [
            f"{name}={' '.join(words)}"
            for name, value in parsed["kwargs"].items()
            if (words := _tagged(value, name.rpartition("_")[2].capitalize()))
        ]
        mapped = [f"× {size} mapped" for size, _ in parsed.get("mapped", ())]
    except (TypeError, ValueError, KeyError):
        return str(key)
    runs = [(word, len(list(run))) for word, run in itertools.groupby(arguments)]
    return " ".join([word if count == 1 else f"{word}×{count}" for word, count in runs] + options + mapped)


def _is_list(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and "$tuple" in value)


def _tagged(value: object, kind: str = "") -> list[str]:
    """Returns the words for one value in the tagged JSON of ``ops.utils.serialize``.

    Args:
      kind: a word that the names of its classes end with, and that need not be repeated: "Mask" for ``mask``.
    """
    match value:
        case None | False | 0:
            return []
        case float():
            return [f"{value:.4g}"]
        case {"$array": {"dtype": dtype, "shape": shape}}:
            letters = str(dtype).rstrip("0123456789")
            return [
                f"{_SHORT.get(letters, letters)}{str(dtype)[len(letters) :]}[{','.join(str(size) for size in shape)}]"
            ]
        case {"$dataclass": str(name), "fields": dict(fields)}:
            short = re.split(r"[:./]", name)[-1].removesuffix(kind)
            short = short.lower() if kind else short
            parts = {field: _tagged(part, kind) for field, part in fields.items()}
            if any(parts.values()):  # a zero beside another number has a meaning: the one side of a window
                parts |= {field: ["0"] for field, part in fields.items() if part == 0 and part is not False}
            whole = [", ".join(words) for field, words in parts.items() if _is_list(fields[field])]
            inside = whole if len(parts) == 1 and whole else [f"{k}={' '.join(v)}" for k, v in parts.items() if v]
            return [f"{short}({', '.join(inside)})" if inside else short]
        case {"$enum": _, "name": str(name)}:
            return [name.lower()]
        case dict():
            return [word for part in value.values() for word in _tagged(part, kind)]
        case list():
            return [word for part in value for word in _tagged(part, kind)]
    return [str(value)]
