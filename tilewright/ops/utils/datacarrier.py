"""Config dataclasses of tile sizes and launch parameters, sufficient for most kernels."""

import dataclasses

from tilewright.ops.utils.stable_ids import stable_id


@stable_id("tilewright/params.FwdParams", formerly=("tilewright.ops.utils.datacarrier:FwdParams",))
@dataclasses.dataclass(frozen=True, slots=True)
class FwdParams:
    """Tiling and launch parameters of a forward kernel; ``None`` leaves a choice to the backend.

    Attributes:
      blocksize_m, blocksize_n, blocksize_k: rows and columns of a program's output, depth of one reduction step.
      q_blocksize, kv_blocksize, blocksize_heads: query positions, key positions and heads per tile.
      blocksize_keys, num_key_splits: keys per step of paged reading, programs that share one query tile's keys.
      num_warps, num_stages: warps per GPU program, depth of its software pipeline.
    """

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@stable_id("tilewright/params.BwdParams", formerly=("tilewright.ops.utils.datacarrier:BwdParams",))
@dataclasses.dataclass(frozen=True, slots=True)
class BwdParams:
    """Tiling and launch parameters of a backward kernel; the fields mean the same as in `FwdParams`."""

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(params: FwdParams | BwdParams) -> None:
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value is None:
            continue
        # True is an int to isinstance; a numpy integer is refused because it would not survive the JSON round trip.
        if type(value) is not int:
            raise TypeError(f"{type(params).__name__}.{field.name}={value!r}: expected an int or None")
        if value <= 0:
            raise ValueError(f"{type(params).__name__}.{field.name}={value!r}: expected a positive int or None")
