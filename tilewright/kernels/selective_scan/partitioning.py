"""The split of a selective scan over explicit mesh axes: by rows of the batch and by channels."""

from typing import Any

from jax.sharding import PartitionSpec as P

from tilewright.kernels.op.sharding import (
    GradientParts,
    Partitioning,
    axis_names,
    explicit_mesh,
    typed_axes,
    typed_spec,
)
from tilewright.kernels.selective_scan.inputs import ScanResults, SelectiveScanInputs, SelectiveScanStepInputs


class Split:
    """The mesh axes of rows and of channels, from the types of a call's arrays.

    Args:
      arrays: by name.
      dimensions: by name, what each dimension is: "rows", "channels", "groups" or "" for what must be whole.

    Raises:
      ValueError: another dimension is split, or one in two ways.
    """

    def __init__(self, arrays: dict[str, Any], dimensions: dict[str, tuple[str, ...]], groups: int) -> None:
        self.arrays = {name: array for name, array in arrays.items() if array is not None}
        self.dimensions, self.groups = dimensions, groups
        self.mesh = explicit_mesh(*self.arrays.values())
        self.axes: dict[str, Any] = {}
        if self.mesh is None:
            return
        described = ", ".join(f"{name}: {typed_spec(array)}" for name, array in self.arrays.items())
        for name, array in self.arrays.items():
            for what, axes in zip(dimensions[name], typed_axes(array), strict=True):
                kind = "channels" if what == "groups" and groups > 1 else what
                if axes is None:
                    continue
                if kind not in ("rows", "channels") or self.axes.setdefault(kind, axes) != axes:
                    raise ValueError(
                        "a selective scan can be split by rows of the batch and by channels alone, and all arrays alike"
                        f" ({described}); reshard {name} first"
                    )
        devices = 1
        for axis in axis_names(self.axes.get("channels")):
            devices *= self.mesh.shape[axis]
        if groups > 1 and groups % devices:
            raise ValueError(f"{groups} groups of B and C cannot be split over {devices} devices ({described})")

    def spec(self, name: str) -> P:
        """The split of an array as the devices get it."""
        return self.of(*self.dimensions[name])

    def of(self, *dimensions: str) -> P:
        """The split of an array of these dimensions."""
        by_kind = self.axes | {"groups": self.axes.get("channels") if self.groups > 1 else None}
        return P(*(by_kind.get(what) for what in dimensions))

    def gradient(self, name: str) -> GradientParts:
        """The gradient of an array, summed over the devices that have the same part of it."""
        spec = self.spec(name)
        own = {axis for axes in spec for axis in axis_names(axes)}
        used = [axis for axes in self.axes.values() for axis in axis_names(axes)]
        return GradientParts(spec, tuple(a for a in used if a not in own), typed_spec(self.arrays[name]))


SCAN = {
    **dict.fromkeys(("u", "delta", "z"), ("rows", "", "channels")),
    "A": ("channels", ""),
    **dict.fromkeys(("B", "C"), ("rows", "", "groups", "")),
    **dict.fromkeys(("D", "delta_bias"), ("channels",)),
    "initial_state": ("rows", "channels", ""),
    "cum_seqlens": ("",),
    "segment_ids": ("rows", ""),
    "seq_lengths": ("rows",),
}

STEP = {
    "state_pool": ("", "channels", ""),
    **dict.fromkeys(("u", "delta", "z"), ("rows", "channels")),
    "A": ("channels", ""),
    **dict.fromkeys(("B", "C"), ("rows", "groups", "")),
    **dict.fromkeys(("D", "delta_bias"), ("channels",)),
    **dict.fromkeys(("state_indices", "write_indices"), ("",)),
}


def scan_partitioning(inputs: SelectiveScanInputs) -> Partitioning | None:
    """The split of a scan; of a packed row by channels."""
    dimensions = SCAN
    if inputs.cum_seqlens is not None:
        # The one row is no dimension that could be split, and the states are of sequences in it.
        dimensions = {name: tuple("" if each == "rows" else each for each in dims) for name, dims in SCAN.items()}
    split = Split(inputs.arrays, dimensions, inputs.groups)
    if split.mesh is None:
        return None
    rows = "" if inputs.cum_seqlens is not None else "rows"
    states: Any = split.of(rows, "channels", "")
    out: Any = split.of(rows, "", "channels")
    chunk_states: Any = split.of(rows, "", "channels", "")
    return Partitioning(
        mesh=split.mesh,
        inputs=inputs.replace(**{name: split.spec(name) for name in split.arrays}),
        results=ScanResults(out, states if inputs.return_state else None, chunk_states if inputs.keeps else None),
        gradients={name: split.gradient(name) for name in split.arrays},
    )


def step_partitioning(inputs: SelectiveScanStepInputs) -> Partitioning | None:
    """The split of a step, by channels: any row may have any slot of the pool."""
    dimensions = {name: tuple("" if each == "rows" else each for each in dims) for name, dims in STEP.items()}
    split = Split(inputs.arrays, dimensions, inputs.groups)
    if split.mesh is None:
        return None
    return Partitioning(
        mesh=split.mesh,
        inputs=inputs.replace(**{name: split.spec(name) for name in split.arrays}),
        results=(split.of("", "channels"), split.of("", "channels", "")),
        gradients={},
    )
