"""Interpreter for Triton kernels on the CPU, one program after another, in NumPy: for tests.

Triton's own interpreter needs PyTorch tensors, interprets a kernel only if ``TRITON_INTERPRET`` was set when it was
decorated, and lacks bfloat16. Here its operations run on JAX arrays, for any kernel, beside compiled ones.
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

_LOCK = threading.Lock()  # the interpreter patches triton.language, a global, while it runs


@contextlib.contextmanager
def interpret_triton(device_kind: str = DEVICE) -> Iterator[None]:
    """Runs Triton kernels of programs that are traced in the context by the interpreter, as if on a GPU.

    Outputs are poisoned with NaN or -1 before a launch, so that tests find elements that it leaves unwritten.
    """
    with traced_as(device_kind), run_by(_by_callback):
        yield


def _by_callback(launch: Launch, inputs: tuple[Any, ...]) -> Any:
    return jax.pure_callback(functools.partial(interpret, launch), launch.outputs, *inputs)


def interpret(launch: Launch, *inputs: jax.Array) -> tuple[np.ndarray, ...]:
    """The outputs of a launch, interpreted on arrays that the host can read."""
    # Copies: the kernel may update them in place, and JAX's buffers must not change.
    arrays = [np.array(x) for x in inputs]
    fresh = [_poisoned(output) for output in launch.fresh]
    with _LOCK:
        _run(launch, [*arrays, *(value for _, value in launch.scalars), *fresh])
    return (*fresh, *(arrays[source] for source in launch.in_place))


def _poisoned(output: jax.ShapeDtypeStruct) -> np.ndarray:
    array = np.empty(output.shape, output.dtype)
    array.view(np.uint8).fill(0xFF)  # NaN, or -1 as an integer
    return array


def _run(launch: Launch, operands: list[Any]) -> None:
    from triton.runtime import interpreter

    function = _interpreted(launch.kernel.fn)
    arguments = {parameter.name: parameter.default for parameter in launch.kernel.params if parameter.has_default}
    names = [parameter.name for parameter in launch.kernel.params if not parameter.is_constexpr]
    # Also scalars of 1, which the compiler treats as constants: here they are arguments like the others.
    given = dict(zip(names, operands, strict=True))
    builder = interpreter.interpreter_builder
    with _language(interpreter, launch.kernel.fn.__globals__.get("MEANINGS", {})):
        arguments |= {name: interpreter._implicit_cvt(_Pointer.of(value)) for name, value in given.items()}
        arguments |= dict(launch.constants)
        builder.set_grid_dim(*launch.grid)
        for program in np.ndindex(*launch.grid):
            builder.set_grid_idx(*program)
            function(**arguments)


class _Pointer:
    """An array with the interface that the interpreter expects of a tensor: ``dtype`` and ``data_ptr``."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, type_name(array.dtype)

    @classmethod
    def of(cls, value: object) -> Any:
        return cls(value) if isinstance(value, np.ndarray) else value

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@functools.cache
def _interpreted(function: Callable[..., Any]) -> Any:
    """A copy of a function as the interpreter rewrites it; with its own globals, to which the interpreter adds."""
    from triton.runtime import interpreter

    names, defaults = dict(function.__globals__), function.__defaults__
    copy = types.FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    return interpreter.FunctionRewriter(copy).rewrite_ast()


@contextlib.contextmanager
def _language(interpreter: ModuleType, meanings: Mapping[str, Callable[[np.ndarray], np.ndarray]]) -> Iterator[None]:
    """Patches ``triton.language`` with the interpreter's operations; ``@triton.jit`` functions can call each other.

    ``meanings`` maps the text of inline assembly, of one result, to its NumPy equivalent: ``MEANINGS``
    in the module of a kernel.
    """
    import triton.language as tl
    from triton.runtime import JITFunction

    scope = interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        # Triton 3.6 relies on NumPy converting an array of one element to an integer, which NumPy no longer does.
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(JITFunction, "__call__", lambda self, *args, **kwargs: _interpreted(self.fn)(*args, **kwargs))
        with _builder(interpreter, meanings), np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


@contextlib.contextmanager
def _builder(interpreter: ModuleType, meanings: Mapping[str, Callable[[np.ndarray], np.ndarray]]) -> Iterator[None]:
    """Adds what the interpreter lacks: inline assembly, TMA reductions, and bfloat16, which it treats as integers."""
    import triton.language as tl

    builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle

    def cast_impl(source: Handle, to: TritonType) -> Any:
        data = _promoted(source.data, source.dtype.scalar == tl.bfloat16)
        if to.scalar == tl.bfloat16:
            return handle(data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        return handle(data.astype(interpreter._get_np_dtype(to)), to.scalar)

    narrow = {tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}

    def create_fp_to_fp(source: Handle, to: TritonType, rounding: Handle) -> Any:
        if to.scalar in narrow:
            # Triton 3.6 loses the carry of a significand that is rounded up to the next power of two.
            data, kind = _promoted(source.data, source.dtype.scalar == tl.bfloat16), narrow[to.scalar]
            largest = float(ml_dtypes.finfo(kind).max)  # the instruction is cvt.rn.satfinite
            return handle(np.clip(data, -largest, largest).astype(kind).view(np.uint8), to.scalar)
        if tl.bfloat16 in (source.dtype.scalar, to.scalar):
            return cast_impl(source, to)
        return type(builder).create_fp_to_fp(builder, source, to, rounding)

    def create_dot(a: Handle, b: Handle, d: Handle, precision: Handle, imprecise: Handle) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return type(builder).create_dot(builder, a, b, d, precision, imprecise)
        left, right = (_promoted(x.data, x.dtype.scalar == tl.bfloat16) for x in (a, b))
        return handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def create_descriptor_reduce(kind: object, target: Handle, value: Handle, indices: Sequence[Handle]) -> None:
        if "ADD" not in str(kind).upper():
            raise NotImplementedError(f"only ADD is implemented of a descriptor's reductions, got {kind}")
        pointers, mask = target.materialize_pointers(indices)
        inside = np.asarray(mask.data)  # an array in Triton 3.6, a tensor in 3.9
        before = interpreter._interpreter.load(pointers.data, inside, np.zeros_like(value.data), value.data.dtype)
        interpreter._interpreter.store(pointers.data, before + value.data, inside)

    def create_inline_asm(
        text: str, constraints: str, operands: Sequence[Handle], kinds: Sequence[TritonType], pure: bool, pack: int
    ) -> Any:
        if text not in meanings:
            raise NotImplementedError(f"MEANINGS of the kernel's module has no equivalent of this assembly: {text}")
        (kind,) = kinds
        result = handle(meanings[text](*(operand.data for operand in operands)), kind.scalar)
        return types.SimpleNamespace(get_result=lambda index: result)

    def create_splat(block: TritonType, scalar: Handle) -> Any:
        # By the dtype of the data: a comparison of scalars is labelled with the type of what it compares.
        return handle(np.full(block.shape, scalar.data.reshape(-1)[0], scalar.data.dtype), scalar.dtype.scalar)

    replacements = {
        "cast_impl": cast_impl,
        "create_splat": create_splat,
        "create_fp_to_fp": create_fp_to_fp,
        "create_dot": create_dot,
        "create_descriptor_reduce": create_descriptor_reduce,
        "create_inline_asm": create_inline_asm,
    }
    vars(builder).update(replacements)
    try:
        yield
    finally:
        for name in replacements:
            del vars(builder)[name]


def _promoted(data: np.ndarray, is_bfloat16: bool) -> np.ndarray:
    """Data in float32 if they are bfloat16, which the interpreter keeps as uint16; others unchanged."""
    return (data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else data
