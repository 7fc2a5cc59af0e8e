"""Triton kernels on the CPU, one program after another, in NumPy: for tests.

Triton's own interpreter works on PyTorch's tensors, knows a kernel only if ``TRITON_INTERPRET`` was set when it was
decorated, and lacks bfloat16. Here its operations run on JAX's arrays, for any kernel, beside compiled ones.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tilewright.kernels.triton.description import Launch
from tilewright.kernels.triton.dtypes import type_name
from tilewright.kernels.triton.launch import run_by
from tilewright.ops.utils.target import traced_as

DEVICE = "NVIDIA H100 80GB HBM3"

type Handle = Any
"""A tensor of Triton's interpreter, whose package need not be installed."""

type TritonType = Any
"""A dtype of Triton's language."""

_LOCK = threading.Lock()  # the interpreter changes Triton's language for everyone while it runs


@contextlib.contextmanager
def interpret_triton(device_kind: str = DEVICE) -> Iterator[None]:
    """Runs Triton kernels by the interpreter, in programs that are traced in the context, as if on a GPU.

    Outputs are filled with what shows when it is read, so that elements left unwritten are found.
    """
    with traced_as(device_kind), run_by(_by_callback):
        yield


def _by_callback(launch: Launch, inputs: tuple[Any, ...]) -> Any:
    return jax.pure_callback(functools.partial(interpret, launch), launch.outputs, *inputs)


def interpret(launch: Launch, *inputs: jax.Array) -> tuple[np.ndarray, ...]:
    """The outputs of a launch for arrays that the host can read."""
    arrays = [np.array(x) for x in inputs]
    fresh = [_poisoned(output) for output in launch.fresh]
    with _LOCK:
        _run(launch, [*arrays, *(value for _, value in launch.scalars), *fresh])
    return (*fresh, *(arrays[source] for source in launch.in_place))


def _poisoned(output: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.empty(output.shape, output.dtype)
    array.view(np.uint8).fill(0xFF)  # a NaN, or -1
    return array


def _run(launch: Launch, operands: list[Any]) -> None:
    from triton.runtime import interpreter

    function = _interpreted(launch.kernel.fn)
    arguments = {parameter.name: parameter.default for parameter in launch.kernel.params if parameter.has_default}
    names = [parameter.name for parameter in launch.kernel.params if not parameter.is_constexpr]
    given = dict(zip(names, operands, strict=True))
    builder = interpreter.interpreter_builder
    with _language(interpreter, launch.kernel.fn.__globals__.get("MEANINGS", {})):
        arguments |= {name: interpreter._implicit_cvt(_Pointer.of(value)) for name, value in given.items()}
        arguments |= dict(launch.constants)
        builder.set_grid_dim(*launch.grid)
        for place in np.ndindex(*launch.grid):
            builder.set_grid_idx(*place)
            function(**arguments)


class _Pointer:
    """What the interpreter asks of an array."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, type_name(array.dtype)

    @classmethod
    def of(cls, value: object) -> Any:
        return cls(value) if isinstance(value, np.ndarray) else value

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Any:
    """A function as the interpreter rewrites it, with globals of its own, to which it adds."""
    from triton.runtime import interpreter

    names, defaults = dict(function.__globals__), function.__defaults__
    copy = types.FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    return interpreter.FunctionRewriter(copy).rewrite_ast()


@contextlib.contextmanager
def _language(interpreter: ModuleType, meanings: Mapping[str, Callable[[np.ndarray], np.ndarray]]) -> Iterator[None]:
    """Triton's language computes, and its kernels may be called by each other.

    Assembly of one operand and one result is what ``MEANINGS`` in the module of a kernel says of its text.
    """
    import triton.language as tl
    from triton.runtime import JITFunction

    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        # NumPy no more takes an array of one element for a number, which Triton 3.6 relies on.
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(JITFunction, "__call__", lambda self, *args, **kwargs: _interpreted(self.fn)(*args, **kwargs))
        with _builder(interpreter, meanings), np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


@contextlib.contextmanager
def _builder(interpreter: ModuleType, meanings: Mapping[str, Callable[[np.ndarray], np.ndarray]]) -> Iterator[None]:
    """What the interpreter lacks: assembly, and conversions and products of bfloat16, which it takes for integers."""
    import triton.language as tl

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle

    def cast_impl(source: Handle, to: TritonType) -> Any:
        data = _widened(source.data, source.dtype.scalar == tl.bfloat16)
        if to.scalar == tl.bfloat16:
            return handle(data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return handle(data.astype(interpreter._get_np_dtype(to)), to.scalar)

    def create_fp_to_fp(source: Handle, to: TritonType, rounding: Handle) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, to.scalar):
            return cast_impl(source, to)
        return type(builder).create_fp_to_fp(builder, source, to, rounding)

    def create_dot(a: Handle, b: Handle, d: Handle, precision: Handle, imprecise: Handle) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return type(builder).create_dot(builder, a, b, d, precision, imprecise)
        left, right = (_widened(x.data, x.dtype.scalar == tl.bfloat16) for x in (a, b))
        return handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def create_descriptor_reduce(kind: object, target: Handle, value: Handle, indices: Sequence[Handle]) -> None:
        if "ADD" not in str(kind).upper():
            raise NotImplementedError(f"a descriptor's reductions are sums, got {kind}")
        places, mask = target.materialize_pointers(indices)
        inside = np.asarray(mask.data)  # of an array or a tensor: Triton 3.6 has the one, 3.9 the other
        before = interpreter._interpreter.load(places.data, inside, np.zeros_like(value.data), value.data.dtype)
        interpreter._interpreter.store(places.data, before + value.data, inside)

    def create_inline_asm(
        text: str, constraints: str, operands: Sequence[Handle], kinds: Sequence[TritonType], pure: bool, pack: int
    ) -> Any:
        if text not in meanings:
            raise NotImplementedError(f"the kernel's module does not say by MEANINGS what this computes: {text}")
        (operand,), (kind,) = operands, kinds
        result = handle(meanings[text](operand.data), kind.scalar)
        return types.SimpleNamespace(get_result=lambda index: result)

    ours = {
        "cast_impl": cast_impl,
        "create_fp_to_fp": create_fp_to_fp,
        "create_dot": create_dot,
        "create_descriptor_reduce": create_descriptor_reduce,
        "create_inline_asm": create_inline_asm,
    }
    vars(builder).update(ours)
    try:
        yield
    finally:
        for name in ours:
            del vars(builder)[name]


def _widened(data: np.ndarray, is_bfloat16: bool) -> np.ndarray:
    return (data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else data
