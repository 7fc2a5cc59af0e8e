"""The description of a call: one frozen dataclass for each op, made by ``prepare`` and read by all that follows."""

import dataclasses
import functools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, dataclass_transform

import jax

from tilewright.kernels.op.arguments import is_floating
from tilewright.ops.kernel.arrays import struct_like

type Role = Literal["option", "call", "stage"]
"""The purpose of a field with a default.

An option changes what a backend computes, so a backend that does not name it in ``serves`` declines a call that has it.
A field of role "call" concerns the caller's results or is a hint, and any backend serves it. Both are in the call's key
if they differ from their defaults. A field of role "stage" is set for one stage of a call, after its config is chosen.
"""

_OPTION: Role = "option"


def static(*, default: Any = dataclasses.MISSING, role: Role = _OPTION, kw_only: Any = dataclasses.MISSING) -> Any:
    """A field that is a hashable value and not an array; without a default every call has it."""
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"static": True, "role": role})


def array(*, default: None, role: Role = _OPTION, gradient: bool = True) -> Any:
    """A field that is an array, or a pytree of arrays, or ``None``; one of role "option" needs no more than ``= None``.

    Args:
      gradient: False if no backend computes one although the array is floating-point.
    """
    return dataclasses.field(default=default, metadata={"role": role, "gradient": gradient})


_CALL = MappingProxyType({"static": True, "role": "call"})
_STAGE = MappingProxyType({"static": True, "role": "stage"})


@dataclass_transform(frozen_default=True, field_specifiers=(static, array))
@dataclasses.dataclass(frozen=True)
class OpInputs:
    """A call of an op after ``prepare``; shapes and dtypes hold without further checks.

    A subclass is made a frozen dataclass and a pytree of its arrays. Its fields have the names of the op's arguments:
    first the arrays of every call, then what every call has beside them (``static()``), then optional arrays
    (``= None``) and options (``static(default=...)``). Where arrays of every call stand behind optional ones, as
    they do among a program's operands, fields are keyword-only (``_: KW_ONLY``). The arrays may be tracers, or
    ``ShapeDtypeStruct``: everything but their values is the same, so selection and execution read one description.

    Attributes:
      array_fields: the fields that are not static, in order.
      platform: the platforms and backends that the caller allows, in order of preference, as ``Backends.allowed``
        names them; ``None`` for any.
      wanted: the names of the fields whose gradients a backward pass shall compute; ``None`` for all.
    """

    array_fields: ClassVar[tuple[dataclasses.Field[Any], ...]]

    platform: tuple[str, ...] | None = dataclasses.field(default=None, kw_only=True, metadata=_CALL)
    wanted: frozenset[str] | None = dataclasses.field(default=None, kw_only=True, metadata=_STAGE)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Not by a decorator on each op, which could forget to freeze it or to register it as a pytree.
        dataclasses.dataclass(frozen=True)(cls)
        fields = dataclasses.fields(cls)
        statics = [field.name for field in fields if "static" in field.metadata]
        cls.array_fields = tuple(field for field in fields if field.name not in statics)
        arrays = [field.name for field in cls.array_fields]
        jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=statics)

    def wants(self, name: str) -> bool:
        """True if the gradient of a field is used."""
        return self.wanted is None or name in self.wanted

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some fields."""
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def structs(self) -> Self:
        """The same with shapes and dtypes in place of arrays, and nothing else of these."""
        found: Self = jax.tree.map(struct_like, self)
        return found

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """The fields that are arrays, pytrees of arrays or ``None``, by name and in order."""
        return {field.name: getattr(self, field.name) for field in self.array_fields}

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The static fields of a call that a backend reads, by name."""
        statics = (field for field in dataclasses.fields(self) if "static" in field.metadata)
        return {field.name: getattr(self, field.name) for field in statics if field.metadata["role"] == _OPTION}

    @functools.cached_property
    def gradients(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the gradients of a backward pass: of each floating-point array that is wanted."""
        return {
            field.name: struct_like(value)
            for field in self.array_fields
            if field.metadata.get("gradient", True) and self.wants(field.name)
            if (value := getattr(self, field.name)) is not None and is_floating(getattr(value, "dtype", bool))
        }

    def given(self, role: Role = _OPTION) -> Iterator[str]:
        """The names of the fields of a role whose values are not their defaults."""
        fields = (field for field in self.optional_fields() if field.metadata.get("role", _OPTION) == role)
        return (field.name for field in fields if not is_default(self, field))

    @classmethod
    def optional_fields(cls) -> Iterator[dataclasses.Field[Any]]:
        """The fields with a default."""
        return (field for field in dataclasses.fields(cls) if not _is_required(field))

    @functools.cached_property
    def described(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The content of the call's key: the arrays of every call, and by name what differs from its default.

        Arrays that are keyword-only fields are among the latter, too.
        """
        fields = [field for field in dataclasses.fields(self) if field.metadata.get("role") != "stage"]
        of_every_call = [
            field for field in fields if _is_required(field) and not field.kw_only and "static" not in field.metadata
        ]
        args = tuple(getattr(self, field.name) for field in of_every_call)
        others = (field for field in fields if field not in of_every_call and not is_default(self, field))
        return args, {field.name: getattr(self, field.name) for field in others}


def is_default(inputs: OpInputs, field: dataclasses.Field[Any]) -> bool:
    """True if a field has a default and its value is that, of the same type."""
    value = getattr(inputs, field.name)
    if field.default is None or field.default is dataclasses.MISSING:
        return field.default is None and value is None
    return type(value) is type(field.default) and bool(value == field.default)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING
