"""The implementations that ``benchmarks.attention`` measures, each as a forward and a backward call on the same arrays.

The backward call is the backward pass alone: it takes what the forward pass left for it as arguments.
"""

import abc
import dataclasses
import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.modules import flash_attention
from tilewright.ops import find_labels_in_lowered

type Direction = Literal["forward", "backward"]
type Arrays = Mapping[str, jax.Array]

DOCUMENTS = (0.11, 0.5, 0.76, 1.0)
"""Where the documents of a packed case end, as parts of its length: the row is full, and no length is even."""

_PLAIN = frozenset({"name", "batch", "q_length", "kv_length", "heads", "kv_heads", "head_dim", "dtype", "causal"})


class CannotServeError(Exception):
    """The implementation has no such option: not a failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The arrays of one case: ``floats`` have gradients; ``extras`` are boundaries of documents, if there are any."""

    case: AttentionCase
    floats: Arrays
    extras: Arrays
    dropout_seed: int | None
    cotangent: jax.Array

    @classmethod
    def of(cls, case: AttentionCase, seed: int = 0) -> "Operands":
        (query, key, value), kwargs = case.arguments(seed)
        floats = {"query": query, "key": key, "value": value}
        floats |= {name: kwargs[name] for name in ("bias", "softmax_aux") if name in kwargs}
        extras = {}
        if case.packed:
            boundaries = [0, *(round(part * case.q_length) for part in DOCUMENTS)]
            extras["boundaries"] = jnp.asarray(boundaries, jnp.int32)
        shape = (*query.shape[:-1], value.shape[-1])
        draw = np.random.default_rng(seed + 1).standard_normal(shape, np.float32)
        return cls(case, floats, extras, kwargs.get("dropout_seed"), jnp.asarray(draw, query.dtype))


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


class Peer(abc.ABC):
    """One implementation of attention.

    Attributes:
      name: as it stands in the record.
      distribution: what must be installed, None where nothing need be.
      features: the fields of a case that it has a place for, beside sizes, dtype and causal.
      without_gradient: the arrays of which it gives no gradient.
    """

    name: str
    distribution: str | None
    features: frozenset[str]
    without_gradient: frozenset[str]

    @abc.abstractmethod
    def prepare(self, operands: Operands, direction: Direction) -> Prepared:
        """Compiles the call and runs it once."""

    def check(self, operands: Operands, direction: Direction) -> None:
        """Raises CannotServeError where an option, or a gradient, is missing."""
        case = operands.case
        changed = {f.name for f in dataclasses.fields(case) if getattr(case, f.name) != f.default}
        missing = sorted(changed - _PLAIN - self.features)
        if missing:
            raise CannotServeError(f"has no {', '.join(missing)}")
        ungraded = sorted(set(operands.floats) & self.without_gradient)
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

    def prepare(self, operands: Operands, direction: Direction) -> Prepared:
        self.check(operands, direction)
        attention = functools.partial(self.attention, operands)
        extras = dict(operands.extras)
        details: dict[str, Any] = {}
        if self.dense_mask and "boundaries" in extras:
            extras = {"mask": documents_mask(extras["boundaries"], operands.case.q_length)}
            details["packed"] = "as a dense mask"
        jitted: Any
        if direction == "forward":
            jitted = jax.jit(attention)
            args: tuple[Any, ...] = (operands.floats, extras)
        else:
            # What jax.vjp returns is a pytree of residuals, so that it can leave one program and enter another.
            linearise = jax.jit(lambda floats, extras: jax.vjp(lambda x: attention(x, extras), floats)[1])
            jitted = jax.jit(lambda pull, cotangent: pull(cotangent)[0])
            args = (linearise(operands.floats, extras), operands.cotangent)
        lowered = jitted.lower(*args)
        compiled = lowered.compile()
        results = jax.block_until_ready(compiled(*args))
        labels = find_labels_in_lowered(lowered)
        if labels:
            details["labels"] = labels
        if direction == "forward":
            results = {"out": results}
        return Prepared(Call(compiled, args), results, details)


def documents_mask(boundaries: jax.Array, length: int) -> jax.Array:
    """Of a packed row, ``[1, 1, length, length]``: True within a document."""
    document = jnp.searchsorted(boundaries, jnp.arange(length), side="right")
    return (document[:, None] == document[None, :])[None, None]


def _ours(platform: str | None, operands: Operands, floats: Arrays, extras: Arrays) -> jax.Array:
    case, boundaries = operands.case, extras.get("boundaries")
    return flash_attention(  # type: ignore[return-value]
        **floats,
        causal=case.causal,
        sliding_window=case.sliding_window,
        logits_soft_cap=case.logits_soft_cap,
        cum_seqlens_q=boundaries,
        cum_seqlens_k=boundaries,
        dropout_prob=case.dropout_prob,
        dropout_seed=operands.dropout_seed,
        platform=platform,
    )


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


def _tokamax_module() -> Any:
    # tokamax imports xprof's kernel statistics for benchmarks of its own, and asks for hundreds of megabytes with it.
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

    def prepare(self, operands: Operands, direction: Direction) -> Prepared:
        self.check(operands, direction)
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


def peers(platform: str | None) -> dict[str, Peer]:
    """All that can be measured, ours first, on the platform named."""
    everything = frozenset(
        {"sliding_window", "logits_soft_cap", "bias", "sinks", "packed", "dropout_prob", "value_dim"}
    )
    listed: list[Peer] = [
        JaxPeer(OURS, functools.partial(_ours, platform), everything),
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
    ]
    return {peer.name: peer for peer in listed}
