"""Quantising: the argument list, its checks and the public function."""

from typing import Any, ClassVar, get_args

from jax.typing import ArrayLike

from tilewright.kernels.op.arguments import PlatformOption, as_array, flag, has_arithmetic, integer
from tilewright.kernels.op.cases import OpCases
from tilewright.kernels.op.portfolio import InferenceKernel
from tilewright.kernels.op.public import public_function
from tilewright.kernels.op.sharding import Partitioning, leading_partitioning
from tilewright.kernels.op.signatures import results
from tilewright.kernels.quantize.cases import CASES, QuantizeCase
from tilewright.kernels.quantize.inputs import QuantizeInputs, QuantizeResults
from tilewright.kernels.quantize.quantized import SCALE_BLOCK, Format, Quantized, Scaling
from tilewright.kernels.quantize.reference import quantize_reference
from tilewright.ops.utils.stable_ids import stable_id

_BLOCKS = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))


@stable_id("tilewright/quantize.Quantize")
class Quantize(InferenceKernel[QuantizeInputs, QuantizeResults]):
    """Codes of eight bits and scales; see ``quantize`` for the arguments."""

    cases: ClassVar[OpCases[QuantizeCase]] = CASES

    def __init__(self) -> None:
        backends = (
            "tilewright.kernels.quantize.triton.backend:TritonQuantize",
            "tilewright.kernels.quantize.xla:XlaQuantize",
        )
        super().__init__("quantize", version="1", backends=backends)

    def prepare(
        self,
        x: ArrayLike,
        *,
        format: Format = "e4m3",
        scaling: Scaling = "tensor",
        axis: int = -1,
        block: tuple[int, int] | None = None,
        power_of_two: bool = False,
        transposed: bool = False,
        platform: PlatformOption = None,
        cfg: object = None,
    ) -> QuantizeInputs:
        """Checks a call; reads only types, shapes and dtypes."""
        if isinstance(x, Quantized):
            raise TypeError(f"x is quantised already, as {x.format}: quantise the array that it was made of")
        array, both = as_array("x", x), flag("transposed", transposed)
        if not array.shape or not has_arithmetic(array.dtype):
            raise ValueError(
                f"x must be a floating-point array of 16 bits or more and rank 1 at least, got {array.shape=}, "
                f"{array.dtype=}"
            )
        for name, value, known in (("format", format, Format), ("scaling", scaling, Scaling)):
            if value not in get_args(known.__value__):
                raise ValueError(f"{name} must be one of {get_args(known.__value__)}, got {value!r}")
        rank, along = len(array.shape), integer("axis", axis)
        if along not in (-1, -2, rank - 1, rank - 2):
            raise ValueError(f"axis must be one of the last two, got {axis=} with {array.shape=}")
        along = along if along < 0 else along - rank
        blocks = _block(block, scaling)
        if rank < 2 and (along == -2 or both or blocks[0] > 1):
            raise ValueError(
                f"axis=-2, transposed=True and blocks of two axes need rank 2 at least, got {array.shape=}"
            )
        if both and along != -1:
            raise ValueError(f"transposed=True quantises along both of the last two axes; leave out {axis=}")
        return QuantizeInputs(
            array,
            format,
            scaling,
            -1 if scaling == "tensor" or blocks[0] > 1 else along,
            blocks,
            flag("power_of_two", power_of_two),
            both,
            platform=self.backends.allowed(platform),
        )

    def results(self, inputs: QuantizeInputs) -> QuantizeResults:
        return inputs.shapes

    def reference(self, inputs: QuantizeInputs) -> QuantizeResults:
        return quantize_reference(inputs)

    def partitioning(self, inputs: QuantizeInputs) -> Partitioning | None:
        """Along the dimensions before those that share scales."""
        return leading_partitioning(inputs, {"x": inputs.core_rank})

    def no_gradient(self) -> str:
        return (
            "codes have no gradient: use scaled_linear, whose gradients pass straight through the rounding, or "
            "jax.lax.stop_gradient(x)"
        )


def _block(block: object, scaling: str) -> tuple[int, int]:
    if block is None:
        return _BLOCKS[0]
    if scaling != "block":
        raise ValueError(f"block is for scaling='block', got {block=} with {scaling=}")
    found = tuple(block) if isinstance(block, tuple | list) else block
    if found not in _BLOCKS:
        raise ValueError(f"block must be one of {_BLOCKS}, got {block!r}")
    return _BLOCKS[_BLOCKS.index(found)]


_QUANTIZE = Quantize()


@public_function(Quantize.prepare)
@results({"": Quantized, "transposed": tuple[Quantized, Quantized]})
def quantize(*args: Any, **kwargs: Any) -> Any:
    """Codes of eight bits and the scales that give an array back: ``x ≈ values · scales``.

    A scale is the greatest finite magnitude of the elements that share it, divided by the greatest code (448 of "e4m3",
    57344 of "e5m2", 127 of "int8"); codes are ``x · (1 / scale)``, in float32, rounded to the nearest, ties to even.

    - Elements that are all zero have the scale 1. A scale is never less than 2⁻¹²⁶, and an element below 2⁻¹²⁶ in
      magnitude is a zero, with its sign.
    - An infinity becomes the greatest code of its sign, and has no part in the scale: codes saturate, and never wrap.
    - A NaN is a NaN code in its place, and nothing else changes. int8 has no such code: there it is the scale of its
      row or block that is NaN, and nothing of other ones.
    - float64 is rounded to float32 first.

    Args:
      x: ``[..., rows, columns]``, floating-point of 16 bits or more.
      format: "e4m3", "e5m2" or "int8".
      scaling: "tensor" has one scale, "row" one for all elements along ``axis``, "block" one for each 128 of them; the
        last block may be shorter.
      axis: −1 or −2, the axis along which elements share a scale: that over which a matmul sums.
      block: with ``scaling="block"``, ``(1, 128)`` or ``(128, 128)``: elements of the other of the last two axes, and
        of ``axis``, that share a scale. The latter is for weights: both orientations have the same codes.
      power_of_two: the scale is the least power of two by which no finite element exceeds the greatest code.
      transposed: return a pair, of x and of its transpose along the last two axes, both quantised along their own last
        axis in one pass over memory: for a matmul that sums over columns, and for one that sums over rows.
      platform: None or "auto" takes the best that can serve the call; a name is strict, several are tried in order.
      cfg: a config to use instead of the selected one.

    Returns:
      A ``Quantized``; with ``transposed`` a pair of them.

    Raises:
      ValueError, TypeError: a wrong argument; the message holds its value. Codes have no gradient.
      UnsupportedError: no allowed platform can serve the call; the message holds each one's reasons.
    """
    return _QUANTIZE(*args, **kwargs)
