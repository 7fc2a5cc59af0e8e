"""Values as JSON in two forms: typed, if the reader knows the type, and tagged, if the text names it.

A tagged value is plain JSON data in which a value that JSON lacks is an object with a key that starts with ``$``, such
as ``{"$tuple": [1, 2]}`` or ``{"$dataclass": "module:Config", "fields": {...}}``. Typed JSON uses tags only where a
type is ambiguous: under ``Any``, and for one dataclass of a union of several.
"""

import dataclasses
import enum
import importlib
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np

from tilewright.ops.utils.fingerprint import sharding_fingerprint, sharding_from_fingerprint
from tilewright.ops.utils.stable_ids import current_fields, find_class, id_of, is_id, loaded_class

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None

Resolver = Callable[[str], Any]
Untagger = Callable[[object], Any]
Found = MutableMapping[str, type] | None

_FLOAT0 = np.dtype([("float0", np.void, 0)])
_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def qualified_name(obj: object) -> str:
    """The stable id of a class that has one, or the name ``"module:Qualname"`` of a class or callable.

    Raises:
      TypeError: it has no such name, or the name refers to another object (a lambda, a nested function, a bound method,
        a partial). A class always gets a name, although `resolve` cannot find one that was defined inside a function.
    """
    if isinstance(obj, type) and (stable := id_of(obj)) is not None:
        return stable
    module = getattr(obj, "__module__", None)
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None)
    qualified = f"{module}:{name}"
    if isinstance(obj, type) or (module and name and _goes_by(obj, qualified)):
        return qualified
    raise TypeError(
        f"{obj!r} has no qualified name by which another process could find it again; "
        "define it as a function or class at the top level of a module"
    )


def _goes_by(obj: object, qualified_name: str) -> bool:
    if is_id(qualified_name):
        return True
    module, _, name = qualified_name.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    # Looking up a bound class method creates a new object each time.
    return found is obj or (isinstance(obj, types.MethodType) and isinstance(found, types.MethodType) and found == obj)


def resolve(qualified: str) -> Any:
    """The object that a stable id or ``"module:Qualname"`` names; imports its module if necessary.

    Raises:
      ValueError: no such class, module or name exists.
    """
    if (known := find_class(qualified) if is_id(qualified) else loaded_class(qualified)) is not None:
        return known
    if is_id(qualified):
        raise ValueError(f"cannot find {qualified!r}: no class has that id")
    module, colon, name = qualified.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{qualified!r} is not a qualified name of the form 'module:Qualname'")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        moved = find_class(qualified)
        if moved is None:
            raise ValueError(f"cannot find {qualified!r}: {error}") from error
        return moved
    return found


def current_name(name: object) -> object:
    """The current name of a class that is loaded, given a current or former one; else the argument unchanged."""
    known = loaded_class(name)
    return name if known is None else qualified_name(known)


def canonical_json(data: object) -> str:
    """Plain JSON data as canonical text: sorted keys, no white space, ASCII."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


# The tagged form.


def tagged(value: object, *, found: Found = None) -> Any:
    """JSON data from which `untagged` rebuilds the value.

    An array of any kind, tracers and ``ShapeDtypeStruct`` included, is described by shape, dtype, weak type and
    `sharding_fingerprint`; its values are not read.

    Args:
      value: consists of plain types, containers, enums, dataclasses, named tuples, dtypes, classes, functions, arrays.
      found: collects the classes whose names were written.

    Raises:
      TypeError: a part of the value has no such form; the message names it.
    """
    kind: Any = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind in _TAGGERS:
        return _TAGGERS[kind](value, found)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:  # a combination of flags has no name
        return {"$enum": _class_name(kind, found), "name": value.name}
    if isinstance(value, tuple) and _is_named_tuple(kind):
        return {"$namedtuple": _class_name(kind, found), "fields": _tagged_fields(value, kind._fields, found)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return {"$dataclass": _class_name(kind, found), "fields": _tagged_fields(value, names, found)}
    if _is_dtype(value):
        return {"$dtype": _dtype_name(value)}
    if isinstance(value, np.generic):
        return {"$scalar": {"dtype": _dtype_name(value.dtype), "value": tagged(value.item())}}
    if not isinstance(value, type):
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None:
            return {"$array": _tagged_array(value, shape, dtype)}
    if callable(value):
        return {"$callable": _callable_name(value)}
    from jax.export import is_symbolic_dim

    if is_symbolic_dim(value):  # type: ignore[arg-type]  # it takes anything
        return {"$dimension": str(value)}
    raise TypeError(f"no JSON form for {value!r} of type {kind.__module__}.{kind.__qualname__}")


def _tagged_float(value: float, found: Found) -> Json:
    return value if math.isfinite(value) else {"$float": repr(value)}


def _tagged_items(values: Iterable[object], found: Found) -> list[Json]:
    return [tagged(item, found=found) for item in values]


def _sorted_items(values: Iterable[object], found: Found) -> list[Json]:
    return sorted(_tagged_items(values, found), key=canonical_json)


def _tagged_dict(value: dict[Any, object], found: Found) -> Json:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: tagged(item, found=found) for key, item in value.items()}
    return {"$dict": _sorted_items([[key, item] for key, item in value.items()], found)}


_TAGGERS: dict[type, Callable[[Any, Found], Json]] = {
    float: _tagged_float,
    complex: lambda value, found: {"$complex": _tagged_items((value.real, value.imag), found)},
    bytes: lambda value, found: {"$bytes": value.hex()},
    list: _tagged_items,
    tuple: lambda value, found: {"$tuple": _tagged_items(value, found)},
    set: lambda value, found: {"$set": _sorted_items(value, found)},
    frozenset: lambda value, found: {"$frozenset": _sorted_items(value, found)},
    dict: _tagged_dict,
}


def _tagged_fields(value: object, names: Iterable[str], found: Found) -> dict[str, Json]:
    return {name: tagged(getattr(value, name), found=found) for name in names}


def _class_name(kind: type, found: Found) -> str:
    name = qualified_name(kind)
    if found is not None:
        found[name] = kind
    return name


def _callable_name(value: object) -> str:
    name = qualified_name(value)
    if not _goes_by(value, name):
        raise TypeError(f"{value!r} cannot be found again by its name {name!r}; define it at the top level of a module")
    return name


def _is_named_tuple(kind: object) -> bool:
    return isinstance(getattr(kind, "_fields", None), tuple)


def _is_dtype(value: object) -> bool:
    if isinstance(value, np.dtype):
        return True
    if isinstance(value, type):
        if issubclass(value, np.generic):
            return value in np.sctypeDict.values()  # not the abstract ones, such as np.floating
        # jnp.float32 and the like are instances of a metaclass of jax.numpy's.
        jnp = sys.modules.get("jax.numpy")
        return jnp is not None and type(value) is type(jnp.float32)
    # Dtypes of random keys are objects of their own class; their scalar type identifies them.
    scalar, dtypes = getattr(value, "type", None), sys.modules.get("jax.dtypes")
    return dtypes is not None and isinstance(scalar, type) and dtypes.issubdtype(scalar, dtypes.extended)


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, type):
        dtype = np.dtype(dtype)
    if not isinstance(dtype, np.dtype):
        return str(dtype.name)
    if dtype == _FLOAT0:
        return "float0"
    try:
        unchanged = np.dtype(dtype.name) == dtype
    except TypeError:
        unchanged = False
    if not unchanged:
        raise TypeError(f"no JSON form for {dtype!r}: only plain dtypes in native byte order have one")
    return dtype.name


def _dtype_from(name: str) -> Any:
    if name == "float0":
        return _FLOAT0
    if name.startswith("key<"):
        import jax

        keys = (jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)) for impl in _KEY_IMPLEMENTATIONS)
        return next(key.dtype for key in keys if key.dtype.name == name)
    import ml_dtypes  # noqa: F401 - tells numpy the names of bfloat16 and its like

    return np.dtype(name)


def _tagged_array(value: object, shape: Iterable[object], dtype: object) -> dict[str, Json]:
    described: dict[str, Json] = {
        # A dimension of a shape-polymorphic export is an expression.
        "shape": [int(size) if isinstance(size, int | np.integer) else str(size) for size in shape],
        "dtype": _dtype_name(dtype),
        "weak_type": bool(getattr(value, "weak_type", False)),
    }
    if getattr(value, "sharding", None) is None:
        return described
    sharding = sharding_fingerprint(value)
    return {**described, "sharding": sharding} if sharding else described


def untagged(data: object, *, resolve: Resolver = resolve) -> Any:
    """Rebuilds the value that `tagged` described.

    Arrays come back as ``jax.ShapeDtypeStruct``, those with a sharding fingerprint over an abstract mesh that has the
    same fingerprint. Dataclasses are rebuilt by their constructors.

    Args:
      data: the JSON data that `tagged` returned.
      resolve: finds classes and functions by qualified name; the default imports their modules.

    Raises:
      ValueError: the data is malformed, or names something that cannot be found or does not accept the fields.
    """
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, list):
        return [untagged(item, resolve=resolve) for item in data]
    if not isinstance(data, dict):
        raise ValueError(f"{data!r} is not JSON data")
    tag = next((key for key in data if key.startswith("$")), None)
    if tag is None:
        return {key: untagged(item, resolve=resolve) for key, item in data.items()}
    if tag not in _UNTAGGERS:
        raise ValueError(f"unknown tag {tag!r} in {data!r}")
    untag, others = _UNTAGGERS[tag]
    if data.keys() != {tag, *others}:
        raise ValueError(f"{tag!r} must stand with {others!r} alone, got {sorted(data)}")
    try:
        return untag(lambda part: untagged(part, resolve=resolve), resolve, data[tag], *(data[key] for key in others))
    except (TypeError, ArithmeticError, LookupError, AttributeError, StopIteration) as error:
        raise ValueError(f"cannot rebuild {data!r}: {error}") from error


def _untag_enum(untag: Untagger, resolve: Resolver, qualified: str, name: str) -> Any:
    kind = resolve(qualified)
    if not isinstance(kind, enum.EnumType):
        raise ValueError(f"{qualified!r} is not an enum")
    return kind[name]


def _untag_dataclass(untag: Untagger, resolve: Resolver, qualified: str, fields: Mapping[str, object]) -> Any:
    kind = resolve(qualified)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{qualified!r} is not a dataclass")
    return kind(**current_fields(kind, {name: untag(part) for name, part in fields.items()}))


def _untag_named_tuple(untag: Untagger, resolve: Resolver, qualified: str, fields: Mapping[str, object]) -> Any:
    kind = resolve(qualified)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and _is_named_tuple(kind)):
        raise ValueError(f"{qualified!r} is not a named tuple")
    return kind(**{name: untag(part) for name, part in fields.items()})


def _untag_callable(untag: Untagger, resolve: Resolver, qualified: str) -> Any:
    found = resolve(qualified)
    if not callable(found):
        raise ValueError(f"{qualified!r} is {found!r}, which is not callable")
    return found


def _untag_scalar(untag: Untagger, resolve: Resolver, scalar: Mapping[str, Any]) -> Any:
    return _dtype_from(scalar["dtype"]).type(untag(scalar["value"]))


def _untag_array(untag: Untagger, resolve: Resolver, array: Mapping[str, Any]) -> Any:
    import jax

    if not all(type(size) is int for size in array["shape"]):
        raise ValueError(f"an array whose dimensions are expressions cannot be rebuilt: {array!r}")
    sharding = sharding_from_fingerprint(array.get("sharding", ""))
    dtype = _dtype_from(array["dtype"])
    return jax.ShapeDtypeStruct(tuple(array["shape"]), dtype, weak_type=bool(array["weak_type"]), sharding=sharding)


def _untag_dimension(untag: Untagger, resolve: Resolver, name: str) -> Any:
    raise ValueError(f"a dimension that is an expression cannot be rebuilt: {name!r}")


_UNTAGGERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "$float": (lambda untag, resolve, text: float(text), ()),
    "$complex": (lambda untag, resolve, parts: complex(*untag(parts)), ()),
    "$bytes": (lambda untag, resolve, text: bytes.fromhex(text), ()),
    "$tuple": (lambda untag, resolve, items: tuple(untag(items)), ()),
    "$set": (lambda untag, resolve, items: set(untag(items)), ()),
    "$frozenset": (lambda untag, resolve, items: frozenset(untag(items)), ()),
    "$dict": (lambda untag, resolve, items: dict(untag(items)), ()),
    "$enum": (_untag_enum, ("name",)),
    "$dataclass": (_untag_dataclass, ("fields",)),
    "$namedtuple": (_untag_named_tuple, ("fields",)),
    "$dtype": (lambda untag, resolve, name: _dtype_from(name), ()),
    "$scalar": (_untag_scalar, ()),
    "$dimension": (_untag_dimension, ()),
    "$array": (_untag_array, ()),
    "$callable": (_untag_callable, ()),
}


# The typed form.


def to_json(config: object) -> str:
    """Encodes a config, or any value that has a tagged form, as JSON for `from_json` with the same type.

    Raises:
      TypeError: a part of it has no JSON form; the message names it.
    """
    return json.dumps(_encode(config, type(config)), allow_nan=False)


def stable_json(config: object) -> str:
    """`to_json` in canonical form: sorted keys, no white space, ASCII."""
    return canonical_json(_encode(config, type(config)))


def from_json[T](text: str | bytes, kind: type[T]) -> T:
    """Decodes a config of type ``kind`` from JSON text.

    Raises:
      ValueError: the text is not JSON, lacks a field or has an unknown one at any depth, or a value has the wrong type.
    """
    data = json.loads(text, parse_constant=_refuse_constant)
    config: T = _decode(data, kind, getattr(kind, "__name__", str(kind)))
    return config


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _encode(value: object, kind: object) -> Any:
    if value is None:
        return None
    members, base = _members(kind), type(value)
    objects, arrays = _objects(members), _arrays(members)
    if Any in members:
        return tagged(value)
    if base in map(_base, objects) and base is not dict:
        fields = {name: _encode(getattr(value, name), hint) for name, hint in _hints(base).items()}
        return fields if len(objects) == 1 else {"$dataclass": qualified_name(base), "fields": fields}
    if isinstance(value, tuple | list) and [_base(member) for member in arrays] == [base]:
        kinds = _item_kinds(arrays[0], len(value))
        if len(kinds) == len(value):
            return [_encode(item, item_kind) for item, item_kind in zip(value, kinds, strict=True)]
    if isinstance(value, dict) and base is dict and [_base(member) for member in objects] == [dict]:
        _, item_kind = typing.get_args(objects[0]) or (Any, Any)
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, item_kind) for key, item in value.items()}
    if isinstance(value, enum.Enum) and set(members) <= {base, types.NoneType} and type(value.value) in (int, str):
        return value.value
    return tagged(value)


def _decode(data: object, kind: object, path: str) -> Any:
    members = _members(kind)
    objects, arrays = _objects(members), _arrays(members)
    if Any in members:
        return untagged(data)
    if isinstance(data, dict) and any(key.startswith("$") for key in data):
        return _decode_tagged(data, members, path)
    if isinstance(data, list) and len(arrays) == 1:
        kinds = _item_kinds(arrays[0], len(data))
        if len(kinds) != len(data):
            raise ValueError(f"{path}: expected {len(kinds)} items, got {data!r}")
        items = enumerate(zip(data, kinds, strict=True))
        return _base(arrays[0])(_decode(item, item_kind, f"{path}[{i}]") for i, (item, item_kind) in items)
    if isinstance(data, dict) and len(objects) == 1:
        if _base(objects[0]) is not dict:
            return _decode_fields(data, _base(objects[0]), path)
        key_kind, item_kind = typing.get_args(objects[0]) or (Any, Any)
        return {_decode(key, key_kind, path): _decode(data[key], item_kind, f"{path}[{key!r}]") for key in data}
    return _decode_scalar(data, [member for member in members if member not in (*objects, *arrays)], kind, path)


def _decode_fields(data: Mapping[str, object], kind: type, path: str) -> Any:
    hints, data = _hints(kind), current_fields(kind, data)
    unknown = sorted(data.keys() - hints.keys())
    if unknown:
        raise ValueError(f"{path} has no field {unknown}; its fields are {list(hints)}")
    values = {name: _decode(data[name], hints[name], f"{path}.{name}") for name in data}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _decode_tagged(data: Mapping[str, Any], members: list[Any], path: str) -> Any:
    for kind in map(_base, _objects(members)):
        named = kind is not dict and current_name(data.get("$dataclass")) == qualified_name(kind)
        if named and isinstance(data.get("fields"), dict):
            return _decode_fields(data["fields"], kind, path)
    value = untagged(data)
    if not any(_fits(value, _base(member)) for member in members):
        raise ValueError(f"{path}: expected {members}, got {value!r}")
    return value


def _fits(value: object, kind: object) -> bool:
    # isinstance cannot check a protocol, and DTypeLike contains one.
    return isinstance(kind, type) and (bool(getattr(kind, "_is_protocol", False)) or isinstance(value, kind))


def _decode_scalar(data: object, members: list[Any], kind: object, path: str) -> Any:
    import msgspec

    reasons = []
    # float last: an int stays an int where both are allowed
    for member in sorted(members, key=lambda member: member is float):
        if isinstance(member, enum.EnumType):  # msgspec refuses enums whose values have several types
            for each in list[enum.Enum](member):
                if type(each.value) is type(data) and each.value == data:
                    return each
            continue
        try:
            return msgspec.convert(data, member, strict=True)
        except (msgspec.ValidationError, TypeError) as error:
            reasons.append(str(error))
    raise ValueError(f"{path}={data!r}: expected {kind}" + (f" ({'; '.join(reasons)})" if reasons else ""))


def _members(kind: object) -> list[Any]:
    """The members of the union ``kind``, or just ``kind``; ``Any`` for an annotation without information."""
    if isinstance(kind, typing.TypeAliasType):
        return _members(kind.__value__)
    origin = typing.get_origin(kind)
    if origin is typing.Union or origin is types.UnionType:
        return [member for argument in typing.get_args(kind) for member in _members(argument)]
    if isinstance(kind, typing.TypeVar | str) or kind is object:
        return [Any]
    return [kind]


def _base(member: object) -> Any:
    return typing.get_origin(member) or member


def _objects(members: list[Any]) -> list[Any]:
    return [
        m for m in members if _base(m) is dict or (isinstance(_base(m), type) and dataclasses.is_dataclass(_base(m)))
    ]


def _arrays(members: list[Any]) -> list[Any]:
    return [member for member in members if _base(member) in (tuple, list)]


def _item_kinds(member: object, length: int) -> list[Any]:
    arguments = typing.get_args(member)
    if member in (tuple, list):
        return [Any] * length
    if _base(member) is list or arguments[-1:] == (...,):
        return [arguments[0]] * length
    return list(arguments)


def _hints(kind: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(kind)
    except NameError:  # a name that only exists where the class was defined
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(kind) if field.init}
