"""The groups that ship: what calls come to that nothing was measured for, and what the tuned tables name."""

import functools
from collections.abc import Iterator
from importlib.resources import files

from tilewright.kernels import cuda_tables
from tilewright.kernels.cuda import Group, VariantTable
from tilewright.kernels.cuda.devices import architecture, device_values
from tilewright.kernels.flash_attention.cuda import selection
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.paged_attention.cuda import packed as cuda_packed
from tilewright.ops.config.results import AutotuningResult
from tilewright.ops.types import Device
from tilewright.ops.utils.serialize import resolve
from tools.kernels_wheel.reach import first_groups

CAPABILITIES = (80, 90)
"""The compute capabilities, times ten, that the wheel is for."""

CHAINS: tuple[tuple[VariantTable, ...], ...] = (
    selection.TABLES["forward"],
    selection.TABLES["backward"],
    (cuda_packed.TABLE,),
)
"""Tables that are asked for a variant one after another."""

_ANYWHERE = (-(1 << 31), 1 << 31)

BOUNDS = {
    **dict.fromkeys(("bias", "rows", "mask", "soft_cap", "sinks", "dropout", "deterministic", "exact"), (0, 1)),
    **dict.fromkeys(("lowest", "highest", "left", "right"), _ANYWHERE),
    "dtype": (0, 2),
}
"""The bounds of the tables' fields that are not sizes."""


@functools.cache
def choosable_groups(capability: int) -> list[Group]:
    """The groups that ship for a compute capability, in the order of the tables: first choices, and the tuned tables'.

    That is for calls without a tuned config whatever platforms they allow: with ``platform="cuda"`` a call comes to
    groups that `None` leaves to Pallas.
    """
    device = device_values(Device("gpu", f"sm_{architecture(capability)}", divmod(capability, 10)))
    found = {group for chain in CHAINS for group in first_groups(chain, device or {}, BOUNDS)}
    found |= {group for group in tabled_groups() if group.capability == capability}
    tables: list[VariantTable] = [resolve(where) for where in cuda_tables().values()]
    every = (Group(table, name, capability) for table in tables for name in table.groups_for(capability))
    return [group for group in every if group in found]


@functools.cache
def tabled_groups() -> frozenset[Group]:
    """The groups of all variants that the tuned tables of the package name, each for the table's device."""
    tables = (file.read_text() for file in (files("tilewright") / "tables").iterdir() if file.name.endswith(".json"))
    return frozenset(group for text in tables for group in _named(AutotuningResult.from_json(text)))


def _named(result: AutotuningResult) -> Iterator[Group]:
    major, minor = result.device.rpartition(":")[2].split(".")
    capability = 10 * int(major) + int(minor)
    for call in result:
        for candidate in call.candidates:
            match candidate.config:
                case Choice(backend="cuda", params=params) if call.op == "flash_attention":
                    chain = selection.TABLES["forward" if call.direction == "forward" else "backward"]
                    variants = [(table, variant) for table in chain for variant in table.for_capability(capability)]
                    yield from (Group(table, v.group, capability) for table, v in variants if v.name == params.variant)
