"""Calls an XLA FFI handler as XLA would, from Python: the C structs of ``xla/ffi/api/c_api.h``, as far as needed."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_DTYPES = {np.dtype(name): code for name, code in (("i4", 4), ("i8", 5), ("u1", 6), ("f4", 11), ("f8", 12))}
_EXECUTE = 3
_ARRAY, _SCALAR, _STRING = 1, 3, 4
_BUFFER = 1

# Places in XLA_FFI_Api, which only ever grows at its end.
_FUNCTIONS = 20
_ERROR_CREATE, _STREAM_GET, _DEVICE_ORDINAL_GET = 0, 4, 17


def _struct(**fields: Any) -> type[ctypes.Structure]:
    head = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]
    return type("Struct", (ctypes.Structure,), {"_fields_": [*head, *fields.items()]})


_Version = _struct(major=ctypes.c_int, minor=ctypes.c_int)
_Api = _struct(version=_Version, internal=ctypes.c_void_p, functions=ctypes.c_void_p * _FUNCTIONS)
_Buffer = _struct(dtype=ctypes.c_int, data=ctypes.c_void_p, rank=ctypes.c_int64, dims=ctypes.c_void_p)
_Many = _struct(size=ctypes.c_int64, types=ctypes.c_void_p, values=ctypes.c_void_p)
_Attributes = _struct(size=ctypes.c_int64, types=ctypes.c_void_p, names=ctypes.c_void_p, values=ctypes.c_void_p)
_Frame = _struct(
    api=ctypes.c_void_p, context=ctypes.c_void_p, stage=ctypes.c_int, arguments=_Many, results=_Many,
    attributes=_Attributes, future=ctypes.c_void_p,
)  # fmt: skip
_ErrorCreate = _struct(message=ctypes.c_char_p, code=ctypes.c_int)
_StreamGet = _struct(context=ctypes.c_void_p, stream=ctypes.c_void_p)
_OrdinalGet = _struct(context=ctypes.c_void_p, ordinal=ctypes.c_int32)


class _Bytes(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_char_p), ("length", ctypes.c_size_t))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.c_void_p))


class _Array(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("size", ctypes.c_size_t), ("data", ctypes.c_void_p))


class Caller:
    """Calls one handler on a stream and a device."""

    def __init__(self, handler: Any, *, stream: int = 7) -> None:
        handler.restype, handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._handler = handler
        self._stream = stream
        self._ordinal = 0
        self._message = ""
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self._callbacks = [kind(function) for function in (self._create_error, self._get_stream, self._get_ordinal)]
        self._api = self._new(_Api)
        for place, callback in zip((_ERROR_CREATE, _STREAM_GET, _DEVICE_ORDINAL_GET), self._callbacks, strict=True):
            self._api.functions[place] = ctypes.cast(callback, ctypes.c_void_p).value

    def __call__(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        attributes: Mapping[str, Any],
        ordinal: int = 0,
    ) -> str:
        """The error's message; empty if there was none."""
        self._ordinal, self._message = ordinal, ""
        self._kept: list[Any] = [*inputs, *outputs]
        frame = self._new(_Frame, api=ctypes.addressof(self._api), stage=_EXECUTE)
        frame.struct_size = _Frame.future.offset  # what XLA says, and the handler checks
        frame.arguments, frame.results = self._buffers(inputs), self._buffers(outputs)
        frame.attributes = self._attributes(attributes)
        failed = self._handler(ctypes.addressof(frame))
        return self._message if failed else ""

    def _new(self, kind: Any, **fields: Any) -> Any:
        return kind(struct_size=ctypes.sizeof(kind), **fields)

    def _keep(self, value: Any) -> int:
        self._kept.append(value)
        return ctypes.addressof(value)

    def _pointers(self, addresses: Sequence[int]) -> int:
        return self._keep((ctypes.c_void_p * max(1, len(addresses)))(*addresses))

    def _types(self, types: Sequence[int]) -> int:
        return self._keep((ctypes.c_int * max(1, len(types)))(*types))

    def _buffers(self, arrays: Sequence[np.ndarray]) -> Any:
        made = []
        for array in arrays:
            dims = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
            fields = {"dtype": _DTYPES[array.dtype], "data": array.ctypes.data, "rank": array.ndim}
            made.append(self._keep(self._new(_Buffer, dims=self._keep(dims), **fields)))
        return self._new(
            _Many, size=len(arrays), types=self._types([_BUFFER] * len(arrays)), values=self._pointers(made)
        )

    def _attributes(self, attributes: Mapping[str, Any]) -> Any:
        names = sorted(attributes)  # as XLA sorts them
        kinds, values = zip(*(self._attribute(attributes[name]) for name in names), strict=True)
        spans = [self._keep(_Bytes(name.encode(), len(name))) for name in names]
        return self._new(
            _Attributes, size=len(names), types=self._types(kinds), names=self._pointers(spans),
            values=self._pointers(values),
        )  # fmt: skip

    def _attribute(self, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            return _STRING, self._keep(_Bytes(value.encode(), len(value)))
        array = np.ascontiguousarray(value)
        self._kept.append(array)
        if np.ndim(value):
            return _ARRAY, self._keep(_Array(_DTYPES[array.dtype], array.size, array.ctypes.data))
        return _SCALAR, self._keep(_Scalar(_DTYPES[array.dtype], array.ctypes.data))

    def _create_error(self, address: int) -> int:
        self._message = _ErrorCreate.from_address(address).message.decode()
        return 1

    def _get_stream(self, address: int) -> None:
        _StreamGet.from_address(address).stream = self._stream

    def _get_ordinal(self, address: int) -> None:
        _OrdinalGet.from_address(address).ordinal = self._ordinal
