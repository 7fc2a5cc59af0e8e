"""The implementations that ``benchmarks.attention`` measures, each as a forward and a backward call on the same arrays.

The backward call is only the backward pass: it takes what the forward pass left for it as arguments.
"""

import abc
import dataclasses
import functools
import importlib
import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from tilewright.errors import UnsupportedError
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.cudnn.backend import CudnnBackwardParams, CudnnForwardParams
from tilewright.kernels.flash_attention.fa4.params import Fa4BackwardParams, Fa4ForwardParams
from tilewright.kernels.op.choice import Choice, PerDirection
from tilewright.modules import flash_attention
from tilewright.ops import find_labels_in_lowered

type Direction = Literal["forward", "backward"]
type Arrays = Mapping[str, jax.Array]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

DOCUMENTS = (0.11, 0.5, 0.76, 1.0)
"""Where the documents of a packed case end, as parts of its length: the row is full, and no length is even."""

DROPOUT_SEED = 20261121

OWN_PLATFORMS = ("pallas", "cuda", "xla")
"""Ours that can be measured beside each other."""

OWN_LIBRARIES = {
    "cudnn": PerDirection(Choice("cudnn", CudnnForwardParams()), Choice("cudnn", CudnnBackwardParams())),
    "fa4": PerDirection(Choice("fa4", Fa4ForwardParams()), Choice("fa4", Fa4BackwardParams())),
}
"""Libraries that we call and that share their platform with other backends: their own choices of tiles."""

_PLAIN = frozenset({"name", "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "dtype", "causal"})


class CannotServeError(Exception):
    """The implementation has no such option: not a failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The arrays of one case, or their shapes: ``floats`` have gradients; ``extras`` are boundaries of documents."""

    case: AttentionCase
    floats: Arrays
    extras: Arrays
    dropout_seed: int | None
    cotangent: jax.Array

    @classmethod
    def shapes(cls, case: AttentionCase) -> "Operands":
        """``jax.ShapeDtypeStruct`` for each array."""
        batch, heads, q_length, kv_length = case.score_shape
        kv_heads, value_dim = case.kv_heads or heads, case.value_dim or case.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "query": (batch, q_length, heads, case.head_dim),
            "key": (batch, kv_length, kv_heads, case.head_dim),
            "value": (batch, kv_length, kv_heads, value_dim),
        }
        if case.bias is not None:
            full = zip("bhqk", case.score_shape, strict=True)
            sizes["bias"] = tuple(size if name in case.bias else 1 for name, size in full)
        if case.sinks:
            sizes["softmax_aux"] = (heads, case.sinks)
        dtype = jnp.dtype(case.dtype)
        floats: Any = {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}
        extras: Any = {"boundaries": jax.ShapeDtypeStruct((len(DOCUMENTS) + 1,), jnp.int32)} if case.packed else {}
        cotangent: Any = jax.ShapeDtypeStruct((batch, q_length, heads, value_dim), dtype)
        return cls(case, floats, extras, DROPOUT_SEED if case.dropout_prob else None, cotangent)

    def compile(self) -> Callable[[], "Operands"]:
        """The function that draws arrays of these shapes, on the device: half a gigabyte takes a host seconds."""
        wanted: dict[str, Any] = {**self.floats, "cotangent": self.cotangent}

        def normal(seed: jax.Array) -> dict[str, jax.Array]:
            # The default generator takes XLA ten times as long to compile.
            keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(wanted))
            drawn = zip(keys, wanted.items(), strict=True)
            return {name: jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype) for key, (name, x) in drawn}

        compiled = jax.jit(normal).lower(jax.ShapeDtypeStruct((), jnp.int32)).compile()

        def draw() -> Operands:
            floats, extras = compiled(jnp.asarray(0, jnp.int32)), {}
            if "boundaries" in self.extras:
                boundaries = [0, *(round(part * self.case.q_length) for part in DOCUMENTS)]
                extras["boundaries"] = jnp.asarray(boundaries, jnp.int32)
            cotangent = floats.pop("cotangent")
            return dataclasses.replace(self, floats=floats, extras=extras, cotangent=cotangent)

        return draw

    def options(self, extras: Arrays) -> dict[str, Any]:
        """The keyword arguments of ``flash_attention`` beside its floats; extras may be traced."""
        case, boundaries = self.case, extras.get("boundaries")
        return {
            "causal": case.causal,
            "sliding_window": case.sliding_window,
            "logits_soft_cap": case.logits_soft_cap,
            "cum_seqlens_q": boundaries,
            "cum_seqlens_k": boundaries,
            "dropout_prob": case.dropout_prob,
            "dropout_seed": self.dropout_seed,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A function that queues work, with its arguments: jax's, or PyTorch's, which another clock measures."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    framework: Literal["jax", "torch"] = "jax"

    def __call__(self) -> Any:
        return self.function(*self.args)


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A compiled call, what it returned ("out", or gradients by name), and what it says of itself."""

    call: Call
    results: Arrays
    details: dict[str, Any]


type Program = Callable[[Operands], Prepared]
"""What has been compiled: on a case's arrays it runs for the first time."""


class Peer(abc.ABC):
    """One implementation of attention.

    Attributes:
      name: as it stands in the record.
      distribution: what must be installed, None where nothing need be.
      features: the fields of a case that it has a place for, beside sizes, dtype and causal.
      without_gradient: the arrays that it gives no gradient for.
    """

    name: str
    distribution: str | None
    features: frozenset[str]
    without_gradient: frozenset[str]

    @abc.abstractmethod
    def compile(self, shapes: Operands, direction: Direction) -> Program:
        """Compiles the call without running anything: safe in threads, where first runs are not.

        cuDNN captures a graph when a plan is first run, and fails if another thread uses the device meanwhile.
        """

    def check(self, shapes: Operands, direction: Direction) -> None:
        """Raises CannotServeError where an option, or a gradient, is missing."""
        case = shapes.case
        changed = {f.name for f in dataclasses.fields(case) if getattr(case, f.name) != f.default}
        missing = sorted(changed - _PLAIN - self.features)
        if missing:
            raise CannotServeError(f"has no {', '.join(missing)}")
        ungraded = sorted(set(shapes.floats) & self.without_gradient)
        if direction == "backward" and ungraded:
            raise CannotServeError(f"has no gradient of {', '.join(ungraded)}")


@dataclasses.dataclass(frozen=True, slots=True)
class JaxPeer(Peer):
    """A function of JAX: ``attention(operands, floats, extras)`` gives the output.

    Attributes:
      dense_mask: whether a packed row is passed as a boolean matrix, for want of anything better.
    """

    name: str
    attention: Callable[[Operands, Arrays, Arrays], jax.Array]
    features: frozenset[str] = frozenset()
    distribution: str | None = None
    without_gradient: frozenset[str] = frozenset()
    dense_mask: bool = False

    def compile(self, shapes: Operands, direction: Direction) -> Program:
        self.check(shapes, direction)
        try:
            return self._compile(shapes, direction)
        except UnsupportedError as error:  # of ours, with a backend named
            raise CannotServeError(str(error)) from error

    def _compile(self, shapes: Operands, direction: Direction) -> Program:
        attention = functools.partial(self.attention, shapes)
        extras = jax.eval_shape(self._extras, shapes.extras, shapes.cotangent)
        details: dict[str, Any] = {"packed": "as a dense mask"} if "mask" in extras else {}
        lowered: Any
        if direction == "forward":
            lowered = jax.jit(attention).lower(shapes.floats, extras)
        else:
            # What jax.vjp returns is a pytree of residuals, so that it can leave one program and enter another.
            forward = jax.jit(lambda floats, extras: jax.vjp(lambda x: attention(x, extras), floats)[1])
            lowered_forward = forward.lower(shapes.floats, extras)
            linearise = lowered_forward.compile()
            # A second trace may give a tree that is not equal to the compiled program's.
            pull = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered_forward.out_info)
            lowered = jax.jit(lambda pull, cotangent: pull(cotangent)[0]).lower(pull, shapes.cotangent)
        compiled = lowered.compile()
        labels = find_labels_in_lowered(lowered)
        if labels:
            details["labels"] = labels

        def first_run(operands: Operands) -> Prepared:
            args: tuple[Any, ...] = (operands.floats, self._extras(operands.extras, operands.cotangent))
            if direction == "backward":
                args = (linearise(*args), operands.cotangent)
            results = jax.block_until_ready(compiled(*args))
            return Prepared(Call(compiled, args), {"out": results} if direction == "forward" else results, details)

        return first_run

    def _extras(self, extras: Arrays, cotangent: jax.Array) -> Arrays:
        if self.dense_mask and "boundaries" in extras:
            return {"mask": documents_mask(extras["boundaries"], cotangent.shape[1])}
        return extras


def documents_mask(boundaries: jax.Array, length: int) -> jax.Array:
    """The mask of a packed row, ``[1, 1, length, length]``: True within a document."""
    document = jnp.searchsorted(boundaries, jnp.arange(length), side="right")
    return (document[:, None] == document[None, :])[None, None]


def _ours(platform: str | None, operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
    arguments: dict[str, Any] = {**floats, **operands.options(extras)}
    return flash_attention(**arguments, platform=platform)


def ours_with(cfg: object, operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
    """Our attention with a config in place of the one that would be chosen."""
    arguments: dict[str, Any] = {**floats, **operands.options(extras)}
    return flash_attention(**arguments, cfg=cfg)


def _jax_nn(implementation: Literal["cudnn", "xla"], operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
    case = operands.case
    return jax.nn.dot_product_attention(  # type: ignore[call-overload]
        **floats,
        mask=extras.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        implementation=implementation,
    )


def _tokamax(operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
    case = operands.case
    return _tokamax_module().dot_product_attention(
        **floats,
        mask=extras.get("mask"),
        is_causal=case.causal,
        local_window_size=case.sliding_window,
        logits_soft_cap=case.logits_soft_cap,
        implementation="mosaic",
    )


_TOKAMAX = threading.Lock()
"""Its stand-ins must all be there before any thread imports it."""


def _tokamax_module() -> Any:
    with _TOKAMAX:
        # It imports xprof's kernel statistics for benchmarks of its own, and asks for hundreds of megabytes with it.
        if "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None:
            for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
                sys.modules[name] = types.ModuleType(name)
            sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None  # type: ignore[attr-defined]
        # It warns of each call that its tables do not hold; its heuristics serve those.
        logging.getLogger("absl").setLevel(logging.ERROR)
        return importlib.import_module("tokamax")


def _ejkernel(operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
    ejkernel = importlib.import_module("ejkernel")
    case = operands.case
    attention = ejkernel.kernel_registry.get(
        "flash_attention", platform=ejkernel.Platform.TRITON, backend=ejkernel.Backend.GPU
    )
    return attention(
        **floats,
        causal=case.causal,
        sliding_window=case.sliding_window,
        logits_soft_cap=case.logits_soft_cap,
        cum_seqlens_q=extras.get("boundaries"),
        cum_seqlens_k=extras.get("boundaries"),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class TorchPeer(Peer):
    """``torch.nn.functional.scaled_dot_product_attention`` with one backend named."""

    name: str
    backend: str
    features: frozenset[str] = frozenset({"value_dim"})  # a bias beside is_causal is refused
    distribution: str | None = "torch"
    without_gradient: frozenset[str] = frozenset()

    NAMES: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def compile(self, shapes: Operands, direction: Direction) -> Program:
        self.check(shapes, direction)
        return functools.partial(self._first_run, direction)

    def _first_run(self, direction: Direction, operands: Operands) -> Prepared:
        # PyTorch wants heads before lengths; a transposed view costs nothing. It shares the memory of the jax arrays.
        cotangent = _to_torch(operands.cotangent).transpose(1, 2)
        leaves = {name: _to_torch(operands.floats[name]) for name in self.NAMES}
        for leaf in leaves.values():
            leaf.requires_grad_(direction == "backward")
        function, args = torch_call(self.backend, leaves, cotangent, operands.case.causal, direction)
        found = function(*args)
        if direction == "forward":
            results = {"out": _to_jax(found.transpose(1, 2))}
        else:
            results = {name: _to_jax(gradient) for name, gradient in zip(leaves, found, strict=True)}
        return Prepared(Call(function, args, "torch"), results, {"packages": "PyTorch's own cuDNN and CUDA"})


def torch_call(
    backend: str, leaves: Mapping[str, Any], cotangent: Any, causal: bool, direction: Direction
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call of ``scaled_dot_product_attention``, or of its gradients: one per leaf, with the leaf's shape."""
    torch = importlib.import_module("torch")
    kernels = importlib.import_module("torch.nn.attention")

    def attention() -> Any:
        query, key, value = (leaves[name].transpose(1, 2) for name in ("query", "key", "value"))
        with kernels.sdpa_kernel(getattr(kernels.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                is_causal=causal,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return attention()

        return forward, ()
    out, wanted = attention(), tuple(leaves.values())
    return lambda: torch.autograd.grad(out, wanted, cotangent, retain_graph=True), ()


def _to_torch(array: jax.Array) -> Any:
    return importlib.import_module("torch").from_dlpack(jax.block_until_ready(array)).detach()


def _to_jax(tensor: Any) -> jax.Array:
    torch = importlib.import_module("torch")
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


OURS = "tilewright"

EVERYTHING = frozenset({"sliding_window", "logits_soft_cap", "bias", "sinks", "packed", "dropout_prob", "value_dim"})
"""The features of ours."""


def peers(platform: str | None) -> dict[str, Peer]:
    """All that can be measured, ours first, on the platform named."""
    listed: list[Peer] = [
        JaxPeer(OURS, functools.partial(_ours, platform), EVERYTHING),
        JaxPeer(
            "cudnn",
            functools.partial(_jax_nn, "cudnn"),
            frozenset({"sliding_window", "bias", "packed"}),
            dense_mask=True,
        ),
        JaxPeer(
            "tokamax",
            _tokamax,
            frozenset({"sliding_window", "logits_soft_cap", "bias", "packed", "value_dim"}),
            distribution="tokamax",
            dense_mask=True,
        ),
        # Its sinks are shared by all heads, and its dropout draws from another generator.
        JaxPeer(
            "ejkernel",
            _ejkernel,
            frozenset({"sliding_window", "logits_soft_cap", "bias", "packed"}),
            distribution="ejkernel",
            without_gradient=frozenset({"bias"}),
        ),
        TorchPeer("pytorch cudnn", "CUDNN_ATTENTION"),
        TorchPeer("pytorch flash", "FLASH_ATTENTION", frozenset()),
        JaxPeer(
            "xla",
            functools.partial(_jax_nn, "xla"),
            frozenset({"sliding_window", "bias", "packed"}),
            dense_mask=True,
        ),
        *(JaxPeer(f"{OURS} {own}", functools.partial(_ours, own), EVERYTHING) for own in OWN_PLATFORMS),
        *(
            JaxPeer(f"{OURS} {own}", functools.partial(ours_with, cfg), EVERYTHING)
            for own, cfg in OWN_LIBRARIES.items()
        ),
    ]
    return {peer.name: peer for peer in listed}
