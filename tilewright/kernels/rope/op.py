"""The rotary embedding: its argument list, its checks and its public function."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import (
    PlatformOption,
    apply,
    as_array,
    flag,
    has_arithmetic,
    is_integer,
    number,
    to_32_bit,
)
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.portfolio import PortfolioKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.rope.cases import CASES, RopeCase
from tilewright.kernels.rope.inputs import RopeInputs, rope_reference
from tilewright.kernels.rope.scaling import RopeScaling, of_config, rotation_of
from tilewright.ops.kernel.arrays import struct_like
from tilewright.ops.utils.stable_ids import stable_id

FRACTION = 1.0


@stable_id("tilewright/rope.Rope")
class Rope(PortfolioKernel[RopeInputs, jax.Array]):
    """Rotary embedding; see ``rope`` for the arguments."""

    cases: ClassVar[OpCases[RopeCase]] = CASES
    core_dims: ClassVar[Mapping[str, int]] = MappingProxyType({"x": 1, "positions": 0})
    linear: ClassVar[frozenset[str]] = frozenset({"x"})

    def __init__(self) -> None:
        super().__init__("rope", version="1", backends=["tilewright.kernels.rope.xla:XlaRope"])

    def prepare(
        self,
        x: ArrayLike,
        positions: ArrayLike,
        *,
        base: float = RopeInputs.base,
        scaling: RopeScaling | Mapping[str, Any] | None = None,
        interleaved: bool = False,
        fraction: float = FRACTION,
        inverse: bool = False,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> RopeInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        x = as_array("x", x)
        if len(x.shape) < 2 or not has_arithmetic(x.dtype):
            raise ValueError(
                "x must be a floating-point array of 16 bits or more, [..., tokens, heads, dim], got "
                f"{x.shape=}, {x.dtype=}"
            )
        return RopeInputs(
            x,
            positions_array(positions, x),
            **rotation_options(x.shape[-1], base, scaling, interleaved, fraction),
            inverse=flag("inverse", inverse),
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: RopeInputs) -> Any:
        return struct_like(inputs.x)

    def residuals(self, results: jax.Array) -> None:
        """Nothing: the backward pass needs only the positions."""

    def cotangents(self, inputs: RopeInputs, residuals: None, cotangents: tuple[Any, ...]) -> jax.Array:
        return cast(jax.Array, cotangents[0])

    def reference(self, inputs: RopeInputs) -> jax.Array:
        return rope_reference(inputs).astype(inputs.x.dtype)


def rotation_options(
    dim: Any, base: float, scaling: RopeScaling | Mapping[str, Any] | None, interleaved: bool, fraction: float
) -> dict[str, Any]:
    """The checked options of a rotation of heads of ``dim`` elements, by the names of ``RopeInputs``."""
    base, fraction = number("base", base), number("fraction", fraction)
    if isinstance(scaling, Mapping):
        scaling, said = of_config(scaling)
        base = _agreed("base", base, RopeInputs.base, said)
        fraction = _agreed("fraction", fraction, FRACTION, said)
    if not isinstance(scaling, RopeScaling | None):
        raise TypeError(f"scaling must be a RopeScaling, such as YarnScaling, a mapping or None, got {scaling!r}")
    if base <= 1.0:
        raise ValueError(f"base must be greater than 1, got {base=}")
    rotary_dim = _rotary_dim(dim, fraction)
    rotation_of(scaling, base, rotary_dim or dim)  # a scaling says here if it does not fit the size
    return {
        "base": base,
        "scaling": scaling,
        "interleaved": flag("interleaved", interleaved),
        "rotary_dim": rotary_dim,
    }


def positions_array(positions: ArrayLike, x: jax.Array) -> jax.Array:
    """Positions with a dimension for each of x but the last."""
    positions = as_array("positions", positions)
    if not is_integer(positions.dtype):
        raise TypeError(f"positions must hold integers, got {positions.dtype=}")
    tokens = x.shape[:-2]
    added = len(tokens) - len(positions.shape)
    sizes = zip(positions.shape, tokens[added:], strict=False)
    if added < 0 or any(size != 1 and size != of_x for size, of_x in sizes):
        raise ValueError(
            f"positions must broadcast to x.shape[:-2]={tokens}, the dimensions before heads and dim, got "
            f"{positions.shape=}; x without heads is x[..., None, :]"
        )
    axes = (*range(added), len(tokens))
    return cast(jax.Array, apply(lambda each: jnp.expand_dims(each, axes), to_32_bit(positions, x.dtype)))


def _rotary_dim(dim: Any, fraction: float) -> int | None:
    """The number of elements that are rotated; ``None`` for all of them."""
    if not isinstance(dim, int):
        raise ValueError(f"the last dimension of x must be a number, got {dim}")
    rotated = int(dim * fraction)
    if not 0.0 < fraction <= 1.0 or rotated < 2 or rotated % 2:
        raise ValueError(
            f"a head must have an even number of elements to rotate, 2 at least, and {fraction=} of {dim} are {rotated}"
        )
    return None if rotated == dim else rotated


def _agreed(name: str, given: float, default: float, said: Mapping[str, Any]) -> float:
    """The value that a config gives for an argument, unless the caller gave another."""
    if name not in said:
        return given
    value = number(name, said[name])
    if given not in (default, value):
        raise ValueError(f"{name}={given}, but scaling says {value}; leave one of them out")
    return value


_ROPE = Rope()


@public_function(Rope.prepare)
def rope(*args: Any, **kwargs: Any) -> jax.Array:
    """Rotary embedding (arXiv 2104.09864): the pairs of elements of each head are turned by ``position · frequency``.

    Angles and products are float32, or float64 for float64 x, and the result is rounded once. The gradient of x is the
    same form with the angles negated, which JAX does not find from the formula.

    Args:
      x: ``[..., tokens, heads, dim]``, floating-point.
      positions: integers of any kind that broadcast to ``x.shape[:-2]``, as ``[tokens]`` or ``[batch, tokens]`` do.
        They may start anew within a row, repeat and be negative.
      base: the frequency of pair i is ``base ** (-2i / dim)`` radians a position.
      scaling: a ``RopeScaling`` (``LinearScaling``, ``NtkScaling``, ``YarnScaling``, ``Llama3Scaling``,
        ``LongRopeScaling``) for contexts longer than a model was first trained with; or ``rope_scaling`` of a model's
        ``config.json``, whose ``rope_theta`` and ``partial_rotary_factor``, if it has them, are base and fraction.
      interleaved: pairs are neighbours (GPT-J, GLM, DeepSeek); else element i and element ``i + dim / 2`` (Llama).
      fraction: the first ``int(fraction · dim)`` elements are rotated, as a head of that size is, and the others stay.
      inverse: undoes the rotation, and the factor that some scalings multiply it by.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      The rotated array in x's shape and dtype.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _ROPE(*args, **kwargs)
