"""Mosaic GPU kernels on the CPU: JAX's interpreter, with what Hopper kernels need and it lacks (JAX 0.11.2 to 0.12).

Added: accumulators with an initial value (`pl.run_state`), wgmma with its first operand in registers, wgmma that is
asynchronous to the race detector, TMA reductions and predicated TMA stores, reads of reshaped references, and named
barriers of any thread count.
What the interpreter does not model: blocks run one after another (or one cluster at a time), so writing
another block's global memory is never a race here; the order of TMA reductions is that of the grid.

Every warpgroup waits in a thread of XLA's pool, which has few on a machine of few cores. With too few a kernel is
called deadlocked that is not: scripts set XLA_FLAGS=--xla_force_host_platform_device_count=8, as tests/conftest.py
does.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, race_detection_state, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, force_gpu_interpret_mode
from jax._src.state import discharge, indexing
from jax._src.state import types as state_types

from tests.support import interpreted_panels
from tests.support.unoptimised import unoptimised
from tilewright.kernels.op.portfolio import Portfolio
from tilewright.ops.utils.target import traced_as

__all__ = ["KernelError", "interpret_mosaic"]

_TOKEN = gpu_callbacks.TOKEN_SHAPE_DTYPE
_REGISTERS = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
_WARP_THREADS = 32
# Every asynchronous operation takes the next of these places in the vector clocks. With few of them an operation can
# look ordered after an older one in the same place, and its race goes unseen.
_ASYNC_PLACES = 64
# Far above the compilation that another thread may still be at.
_DEADLOCK_SECONDS = 60.0


@contextlib.contextmanager
def interpret_mosaic(detect_races: bool = False) -> Iterator[None]:
    """Runs Mosaic GPU kernels on the CPU, as on an H100.

    `detect_races` makes an access that no barrier, commit or wait orders after an earlier one an error, at a cost
    that grows with the square of the number of tiles. A kernel that fails makes the context raise `KernelError`, and
    leaves nothing behind in the interpreter.
    """
    params = InterpretGPUParams(
        detect_races=detect_races,
        num_tma_threads_per_device=_ASYNC_PLACES,
        inline_mgpu="_hack_model_inline_mgpu_tokamax",  # the only value with which named barriers are run
    )
    gpu_callbacks.reset_gpu_interpret_mode_state()
    _failures.clear()
    with contextlib.ExitStack() as stack:
        for target, name, value in _patches():
            stack.enter_context(mock.patch.object(target, name, value))
        stack.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
        stack.enter_context(_watchdog.on_duty())
        stack.enter_context(unoptimised())
        stack.enter_context(traced_as("NVIDIA H100 80GB HBM3"))
        stack.enter_context(force_gpu_interpret_mode(params))
        try:
            yield
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError:
            if not _failures:
                raise
            # The runtime strips the cause and repeats the frames of every thread: say what failed first.
            raise KernelError(f"{type(_failures[0]).__name__}: {_failures[0]}") from _failures[0]


class KernelError(RuntimeError):
    """What first failed in an interpreted kernel; its cause has the traceback."""


_failures: list[Exception] = []


def _patches() -> Iterator[tuple[Any, str, Any]]:
    yield from interpreted_panels.patches()
    # The interpreter's callbacks are effects, which the declared results of a call do not have: a call is traced with
    # its kernel here.
    yield Portfolio, "types_cfg", lambda kernel, **_: None
    # Each thread that a failure reaches would log the whole of it.
    yield callback.logger, "disabled", True
    yield callback, "api", _API
    yield shared_memory, "_to_int", _to_int
    interpreter = jaxpr_interpret.JaxprInterpreter
    yield interpreter, "interpret", _interpret
    yield interpreter, "_interpret_wgmma_ref_p", _interpret_wgmma
    yield interpreter, "_interpret_copy_gmem_to_smem_p", _interpret_load
    yield interpreter, "_interpret_copy_smem_to_gmem_p", _interpret_tma_store
    yield gpu_callbacks, "_get", _get
    yield gpu_callbacks, "wgmma_accumulator_deref", _read_accumulator
    yield gpu_callbacks, "copy_smem_to_gmem", _copy_smem_to_gmem
    yield gpu_callbacks, "_named_barrier", _named_barrier
    yield shared_memory, "GPUSharedMemory", _Memory
    yield shared_memory.Barrier, "wait", _wait_barrier
    if "on_race" not in {field.name for field in dataclasses.fields(InterpretGPUParams)}:  # JAX 0.11
        yield gpu_callbacks, "GPURaceDetectionState", _RaisingRaces
        yield shared_memory.Barrier, "deallocate", _deallocate_barrier


_API = types.SimpleNamespace(device_put=lambda args, device: [np.array(arg) for arg in args])
"""What callbacks use of ``jax._src.api``: they get NumPy's arrays, and no time goes into making JAX's of them. Copies,
for what a callback is given is only there while it runs, and the interpreter keeps it."""


_jax_to_int = shared_memory._to_int


def _to_int(number: Any) -> Any:
    return number.item() if isinstance(number, np.ndarray) else _jax_to_int(number)


# --- Shared state


@dataclasses.dataclass
class _NamedBarrier:
    """`bar.arrive` and `bar.sync`, counted in threads as the hardware counts them."""

    num_threads: int
    arrived: int = 0
    generation: int = 0
    clock: Any = None
    condition: threading.Condition = dataclasses.field(default_factory=threading.Condition)


_Clock = shared_memory.GpuClockBundle


class _Memory(shared_memory.GPUSharedMemory):
    """The interpreter's memory, with the wgmmas in flight and the named barriers of the running cluster."""

    wgmmas_in_flight: dict[Any, collections.deque[tuple[Any, _Clock | None]]]
    hardware_barriers: dict[tuple[int, int, int], _NamedBarrier]
    reduction_lock: threading.Lock

    def reset_per_cluster_state(self) -> None:
        super().reset_per_cluster_state()
        self.wgmmas_in_flight = collections.defaultdict(collections.deque)
        self.hardware_barriers = {}
        self.reduction_lock = threading.Lock()
        # Clocks and register numbers begin anew with each cluster: accesses of the last one would look like races.
        races = gpu_callbacks._races
        if races is not None:
            with races.lock:
                races.reads.clear()
                races.writes.clear()
                races.union_accesses.clear()

    def set_failed(self, exception: Exception, *args: Any, **kwargs: Any) -> None:
        _failures.append(exception)
        super().set_failed(exception, *args, **kwargs)

    def wait_wgmma(self, thread: Any, in_flight: int) -> None:
        with self.lock:
            pending = self.wgmmas_in_flight[thread]
            while len(pending) > in_flight:
                _, clock = pending.popleft()
                if clock is not None:
                    self.clocks[thread].update(clock)

    def check_settled(self, thread: Any, accumulator: Any, action: str) -> None:
        with self.lock:
            if any(key == accumulator for key, _ in self.wgmmas_in_flight[thread]):
                raise RuntimeError(f"an accumulator is {action} while a wgmma that adds to it is in flight")


class _RaisingRaces(race_detection_state.GPURaceDetectionState):
    """JAX 0.11 prints a race and goes on; here the access fails, as it does from 0.12 on."""

    def check_read(self, *args: Any, **kwargs: Any) -> None:
        super().check_read(*args, **kwargs)
        self._raise_if_found()

    def check_write(self, *args: Any, **kwargs: Any) -> None:
        super().check_write(*args, **kwargs)
        self._raise_if_found()

    def _raise_if_found(self) -> None:
        if self.races_found:
            raise RuntimeError("RACE DETECTED (its two sides are printed above)")


def _deallocate_barrier(self: Any) -> None:
    """Lets a thread end without having seen the last completions, as JAX 0.12 and the hardware do."""
    with self.cv:
        self.ref_count -= 1
        if self.ref_count == 0 and self.arrivals_count:
            raise ValueError(f"Barrier deallocated with {self.arrivals_count} arrivals pending.")


_jax_wait_barrier = shared_memory.Barrier.wait


def _wait_barrier(self: Any, thread: Any, *args: Any, **kwargs: Any) -> None:
    """Fails the kernel where JAX would hang."""
    error = TimeoutError(f"{thread} has waited {_DEADLOCK_SECONDS} s for one barrier: the kernel is deadlocked")
    fail = functools.partial(self.shared_memory.set_failed, error, thread, False)
    with _watchdog.watching(fail):
        _jax_wait_barrier(self, thread, *args, **kwargs)


class _Watchdog:
    """Calls what is watched for longer than a kernel may wait; one thread for all that wait, who come by thousands."""

    def __init__(self) -> None:
        self._waiting: dict[object, tuple[float, Callable[[], None]]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def watching(self, fail: Callable[[], None]) -> Iterator[None]:
        mine = object()
        with self._lock:
            self._waiting[mine] = time.monotonic() + _DEADLOCK_SECONDS, fail
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(mine, None)

    @contextlib.contextmanager
    def on_duty(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(min(1.0, _DEADLOCK_SECONDS / 4)):
            with self._lock:
                late = [mine for mine, (deadline, _) in self._waiting.items() if time.monotonic() > deadline]
                fails = [self._waiting.pop(mine)[1] for mine in late]
            for fail in fails:
                fail()


_watchdog = _Watchdog()


def _memory() -> Any:
    return gpu_callbacks._get_shared_memory()


# --- Equations


def _interpret(self: Any, jaxpr: Any, token: Any, *args: Any) -> tuple[Any, list[Any]]:
    """Runs the equations that we handle here, and the stretches between them in JAX's interpreter."""
    if not any(equation.primitive in _HANDLERS for equation in jaxpr.eqns):
        return _jax_interpret(self, jaxpr, token, *args)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_core.Literal) else env[atom]

    for equations, needed in _stretches(jaxpr):
        handler = _HANDLERS.get(equations[0].primitive)
        if handler is not None:
            (equation,) = equations
            token, out = handler(self, equation, token, [read(atom) for atom in equation.invars])
            outvars = equation.outvars
        else:
            invars, outvars = _boundary(equations, needed)
            stretch = jax_core.Jaxpr((), invars, outvars, equations, debug_info=jaxpr.debug_info.with_unknown_names())
            token, out = _jax_interpret(self, stretch, token, *(env[var] for var in invars))
        env.update(zip(outvars, out, strict=True))
    return token, [read(atom) for atom in jaxpr.outvars]


def _stretches(jaxpr: Any) -> list[tuple[list[Any], set[Any]]]:
    """The equations in groups, one of ours or many of JAX's, each with the variables that later ones read."""
    groups: list[list[Any]] = []
    for equation in jaxpr.eqns:
        if equation.primitive in _HANDLERS or not groups or groups[-1][0].primitive in _HANDLERS:
            groups.append([])
        groups[-1].append(equation)
    later = {atom for atom in jaxpr.outvars if isinstance(atom, jax_core.Var)}
    stretches = []
    for group in reversed(groups):
        stretches.append((group, set(later)))
        later |= {atom for equation in group for atom in equation.invars if isinstance(atom, jax_core.Var)}
    return stretches[::-1]


def _boundary(equations: Sequence[Any], needed: set[Any]) -> tuple[list[Any], list[Any]]:
    """The variables that a group of equations reads from before it, and those it defines for after it."""
    read = dict.fromkeys(
        atom for equation in equations for atom in equation.invars if isinstance(atom, jax_core.Var)
    )  # an ordered set
    defined = dict.fromkeys(var for equation in equations for var in equation.outvars)
    return [var for var in read if var not in defined], [var for var in defined if var in needed]


def _call(self: Any, function: Callable[..., Any], result: Any, token: Any, **arguments: Any) -> Any:
    return callback.io_callback(
        function, result, token=token, mesh_location=self.mesh_location, thread=self.thread, **arguments
    )


def _allocate_registers(self: Any, equation: Any, token: Any, value: Any) -> tuple[Any, Any]:
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token, compute_unit=self.thread, memory_space_id=_REGISTERS
    )
    return gpu_callbacks.call_allocate_buffer(
        token, self.mesh_location, self.thread, request, value, source_info=equation.source_info
    )


def _free_registers(self: Any, equation: Any, token: Any, key: Any) -> Any:
    return gpu_callbacks.call_deallocate_buffer(token, self.mesh_location, self.thread, key, equation.source_info)


def _interpret_run_state(self: Any, equation: Any, token: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """`pl.run_state`: accumulators with an initial value; awaits the wgmmas in flight before it returns theirs."""
    jaxpr = equation.params["jaxpr"]
    outer = [isinstance(atom.aval, state_types.AbstractRef) for atom in equation.invars]
    arguments = list(values)
    for i, value in enumerate(values):
        if not outer[i]:
            token, arguments[i] = _allocate_registers(self, equation, token, value)
    token, _ = self.interpret(jaxpr, token, *arguments)
    out = list(values)
    for i, key in enumerate(arguments):
        if not outer[i]:
            aval = equation.outvars[i].aval
            result = (_TOKEN, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
            read = functools.partial(gpu_callbacks.wgmma_accumulator_deref, source_info=equation.source_info)
            token, out[i] = _call(self, read, result, token, acc_allocation_key_as_array=key, wait_n=0)
            token = _free_registers(self, equation, token, key)
    return token, out


def _interpret_store(self: Any, equation: Any, token: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """`accumulator[...] = value`."""
    key, value = values
    token = _call(self, _write_accumulator, _TOKEN, token, key=key, value=value)
    # The equation's own result is only used once references are discharged, which the interpreter never does.
    return token, [value]


def _interpret_wait(self: Any, equation: Any, token: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    del values
    return _call(self, functools.partial(_wait_wgmma, n=equation.params["n"]), _TOKEN, token), []


def _interpret_prefetch(self: Any, equation: Any, token: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """Nothing: a cache has no contents of its own, and TMA leaves out what lies outside of an array."""
    del self, equation, values
    return token, []


def _interpret_wgmma(self: Any, equation: Any, token: Any, get_values: Callable[[], Sequence[Any]]) -> Any:
    values = list(get_values())
    accumulator, a, b, *leaves = values
    empty = jax.tree.structure([])
    trees = [equation.params[f"{name}_transforms_tree"] or empty for name in ("acc", "a", "b")]
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    operands: list[tuple[Any, Any]] = []
    for invar, operand, operand_transforms in zip(equation.invars[:3], (accumulator, a, b), transforms, strict=True):
        if isinstance(invar.aval, state_types.AbstractRef):
            operands.append(jaxpr_interpret.resolve_ref(invar.aval, operand, operand_transforms))
        else:
            operands.append((operand, None))
    function = functools.partial(_wgmma, a_in_registers=operands[1][1] is None, source_info=equation.source_info)
    token = _call(self, function, _TOKEN, token, accumulator=operands[0], a=operands[1], b=operands[2])
    return token, []


def _interpret_load(self: Any, equation: Any, token: Any, get_values: Callable[[], Sequence[Any]]) -> Any:
    _, _, _, *leaves = get_values()
    _check_tiling(equation, leaves, global_is_source=True)
    return _jax_interpret_load(self, equation, token, get_values)


def _interpret_tma_store(self: Any, equation: Any, token: Any, source: Any, target: Any, *flat: Any, **kw: Any) -> Any:
    _check_tiling(equation, flat, global_is_source=False)
    return _jax_interpret_tma_store(self, equation, token, source, target, *flat, **kw)


def _check_tiling(equation: Any, leaves: Sequence[Any], global_is_source: bool) -> None:
    """Refuses what Mosaic GPU's lowering refuses: global dimensions that do not end with a tile of shared memory."""
    trees = [equation.params[f"{side}_transforms_treedef"] for side in ("src", "dst")]
    sizes = [tree.num_leaves for tree in trees]
    source = jax.tree.unflatten(trees[0], leaves[: sizes[0]])
    target = jax.tree.unflatten(trees[1], leaves[sizes[0] : sum(sizes)])
    in_global, in_shared = (source, target) if global_is_source else (target, source)
    dimensions = list(equation.invars[0 if global_is_source else 1].aval.shape)
    for transform in in_global:
        if isinstance(transform, indexing.NDIndexer):
            pairs = zip(dimensions, transform.indices, strict=True)
            dimensions = [size for size, index in pairs if isinstance(index, indexing.Slice)]
        elif isinstance(transform, state_types.TransposeTransform):
            dimensions = [dimensions[axis] for axis in transform.permutation]
    for transform in in_shared:
        if isinstance(transform, gpu_core.UntilingTransform):
            tiling = transform.tiling
            for size, tile in zip(dimensions[-len(tiling) :], tiling, strict=True):
                if size > tile and size % tile:
                    raise ValueError(
                        f"TMA between global memory and shared memory tiled by {tiling}: a dimension of global memory "
                        f"must be a multiple of its tile or smaller, got {size} of {tuple(dimensions)}; pad the array"
                    )


_jax_interpret_load = jaxpr_interpret.JaxprInterpreter._interpret_copy_gmem_to_smem_p
_jax_interpret_tma_store = jaxpr_interpret.JaxprInterpreter._interpret_copy_smem_to_gmem_p
_jax_interpret = jaxpr_interpret.JaxprInterpreter.interpret
_HANDLERS: dict[Any, Callable[[Any, Any, Any, list[Any]], tuple[Any, list[Any]]]] = {
    discharge.run_state_p: _interpret_run_state,
    primitives.wgmma_accumulator_store_p: _interpret_store,
    primitives.wgmma_wait_p: _interpret_wait,
    primitives.async_prefetch_p: _interpret_prefetch,
}


# --- Callbacks: what the threads of the interpreted kernel call while it runs

_jax_get = gpu_callbacks._get


def _get(token: Any, location: Any, thread: Any, key: Any, transforms: Any, *rest: Any, **kwargs: Any) -> Any:
    """Reads what is there, and then reshapes it: JAX's interpreter has no reads of a reshaped reference."""
    *others, last = transforms or (None,)
    if not isinstance(last, state_types.ReshapeTransform):
        return _jax_get(token, location, thread, key, transforms, *rest, **kwargs)
    token, value = _jax_get(token, location, thread, key, tuple(others), *rest, **kwargs)
    return token, np.reshape(value, last.shape)


def _key_and_access(operand: tuple[Any, Any]) -> tuple[Any, Any]:
    key_array, transforms = operand
    key = gpu_callbacks.HostAllocationKey.from_array(key_array)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, _memory().access(key, transforms)


@gpu_callbacks.fail_on_exception
def _wgmma(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    accumulator: Any,
    a: Any,
    b: Any,
    a_in_registers: bool,
    source_info: Any,
) -> Any:
    """Computes at once, but reads shared memory, for the race detector, until a wait has settled it."""
    memory = _memory()
    info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    in_shared_memory = [_key_and_access(operand) for operand in ((b,) if a_in_registers else (a, b))]
    clock = None
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        for key, access in in_shared_memory:
            gpu_callbacks.get_races().check_read(
                thread, clock.async_smem_clock.copy(), key, access, source_info=source_info
            )
    tiles = [memory.get_buffer_content(key, access, thread, logging_info=info)[0] for key, access in in_shared_memory]
    left, right = [np.asarray(a[0]), *tiles] if a_in_registers else tiles
    key, access = _key_and_access(accumulator)
    old, _, _ = memory.get_buffer_content(key, access, thread, logging_info=info)
    new = old + np.matmul(left, right, dtype=old.dtype)
    memory.store_buffer_content(key, access, new, thread, logging_info=info)
    with memory.lock:
        memory.wgmmas_in_flight[thread].append((key, clock))
    return token


@gpu_callbacks.fail_on_exception
def _wait_wgmma(*, token: Any, mesh_location: Any, thread: Any, n: int) -> Any:
    del mesh_location
    _memory().wait_wgmma(thread, n)
    return token


@gpu_callbacks.fail_on_exception
def _write_accumulator(*, token: Any, mesh_location: Any, thread: Any, key: Any, value: Any) -> Any:
    del mesh_location
    memory, (key, access) = _memory(), _key_and_access((key, ()))
    memory.check_settled(thread, key, "overwritten")
    memory.store_buffer_content(key, access, np.asarray(value), thread)
    return token


_jax_read_accumulator = gpu_callbacks.wgmma_accumulator_deref


@gpu_callbacks.fail_on_exception
def _read_accumulator(
    *, token: Any, thread: Any, acc_allocation_key_as_array: Any, wait_n: int | None, **arguments: Any
) -> Any:
    memory = _memory()
    if wait_n is not None:
        memory.wait_wgmma(thread, wait_n)
    memory.check_settled(thread, gpu_callbacks.HostAllocationKey.from_array(acc_allocation_key_as_array), "read")
    return _jax_read_accumulator(
        token=token,
        thread=thread,
        acc_allocation_key_as_array=acc_allocation_key_as_array,
        wait_n=wait_n,
        **arguments,
    )


class _Reduction(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A TMA reduction: atomic per copy, clipped as a TMA store is.

    To the race detector the destination is read: reductions commute, but none may meet a plain store.
    """

    clock: Any

    def __init__(self, operation: Any, reshape: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.operation, self.reshape = operation, reshape

    def __call__(self, tma_thread_id: int) -> None:
        memory = _memory()
        self.pre_read(tma_thread_id, memory)
        source, destination, info = self.src_access, self.dst_access, self.logging_info
        value, _, _ = memory.get_buffer_content(self.src_allocation_key, source, self.thread, logging_info=info)
        if value is None or value.shape != source.shape:
            raise IndexError(f"Out-of-bounds read of {self.src_allocation_key} by a TMA reduction: {source}")
        if self.reshape:
            value = value.reshape(destination.shape)
        if memory.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
            gpu_callbacks.get_races().check_read(
                self.thread,
                self.clock.generic_clock.copy(),
                self.dst_allocation_key,
                destination,
                source_info=self.source_info,
            )
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        clipped = gpu_callbacks._clip_store_to_shape(destination, value, shape)
        if clipped is not None:
            access, value = clipped
            key = self.dst_allocation_key
            with memory.reduction_lock:
                old, _, _ = memory.get_buffer_content(key, access, self.thread, logging_info=info)
                new = self.operation(old, value)
                memory.store_buffer_content(key, access, new, self.thread, logging_info=info)
        self.post_write(tma_thread_id, memory)


_jax_copy_smem_to_gmem = gpu_callbacks.copy_smem_to_gmem


@gpu_callbacks.fail_on_exception
def _copy_smem_to_gmem(*, predicate: Any, reduction_op: str | None, commit_group: bool, **arguments: Any) -> Any:
    memory, thread = _memory(), arguments["thread"]
    if predicate is not None and not bool(predicate):
        if memory.detect_races:  # an empty group is committed, and counted by the waits
            memory.add_copy_smem_to_gmem_clocks(thread, memory.get_clock(thread), memory.get_clock(thread))
        return arguments["token"]
    if reduction_op is None:
        return _jax_copy_smem_to_gmem(predicate=None, reduction_op=None, commit_group=commit_group, **arguments)
    if reduction_op not in _REDUCTIONS:
        raise NotImplementedError(f"TMA reduction {reduction_op!r}; supported: {', '.join(_REDUCTIONS)}")
    # The interpreter's accesses do not support reshapes; for a whole copy a reshape changes only the shape.
    source = arguments["src_transforms"]
    kept = tuple(one for one in source if not isinstance(one, state_types.ReshapeTransform))
    keys_and_accesses: dict[str, Any] = {}
    for side in ("src", "dst"):
        transforms = kept if side == "src" else arguments["dst_transforms"]
        key, access = _key_and_access((arguments[f"{side}_allocation_key_as_array"], transforms))
        keys_and_accesses |= {f"{side}_allocation_key": key, f"{side}_access": access}
    task = _Reduction(
        _REDUCTIONS[reduction_op],
        len(kept) < len(source),
        mesh_location=arguments["mesh_location"],
        thread=thread,
        source_info=arguments["source_info"],
        clock=memory.incr_clock(thread) if memory.detect_races else None,
        **keys_and_accesses,
    )
    memory.execute_async_task(task)
    return arguments["token"]


@gpu_callbacks.fail_on_exception
def _named_barrier(
    token: Any,
    mesh_location: Any,
    thread: Any,
    barrier_id: Any,
    *,
    num_threads: int,
    sync: bool,
    source_info: Any = None,
) -> Any:
    del mesh_location, source_info
    memory = _memory()
    with memory.lock:
        key = (thread.device_id, thread.block_id, int(barrier_id))
        barrier = memory.hardware_barriers.setdefault(key, _NamedBarrier(num_threads))
    if barrier.num_threads != num_threads:
        raise ValueError(f"named barrier {key[2]} of {barrier.num_threads} threads is used with {num_threads=}")
    clock = memory.incr_clock(thread) if memory.detect_races else None
    with barrier.condition:
        generation = barrier.generation
        barrier.arrived += _WARP_THREADS if isinstance(thread, shared_memory.Warp) else primitives.WARPGROUP_SIZE
        if barrier.arrived > num_threads:
            raise ValueError(f"named barrier {key[2]}: {barrier.arrived} threads arrived, of {num_threads}")
        if clock is not None:
            clock.update(barrier.clock or clock)
            barrier.clock = clock
        if barrier.arrived == num_threads:
            barrier.arrived = 0
            barrier.generation += 1
            barrier.condition.notify_all()
        deadline = time.monotonic() + _DEADLOCK_SECONDS
        while sync and barrier.generation == generation:
            # A failure elsewhere notifies only the barriers that the interpreter knows.
            if not barrier.condition.wait(timeout=0.5):
                memory.check_failed()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{thread} has waited {_DEADLOCK_SECONDS} s for named barrier {key[2]}")
        seen = barrier.clock
    if sync and seen is not None:
        with memory.lock:
            memory.clocks[thread].update(seen)
    return token
