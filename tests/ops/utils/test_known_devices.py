"""The table of devices, against what JAX, XLA and recorded runs on real cards say of them."""

import json
import re
import types
from importlib.resources import files

import jax
import pytest
from jax._src import tpu_info
from jax._src.pallas.triton import gpu_info

import tilewright
from tilewright.kernels.op.footprint import block_limits
from tilewright.ops.utils import device as devices
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.fingerprint import device_fingerprint
from tilewright.ops.utils.known_devices import (
    KNOWN_DEVICES,
    capability_by_name,
    chip_by_name,
    find_device,
    measured_rates,
)
from tilewright.ops.utils.topology import target_config

GPUS = [each for each in KNOWN_DEVICES.values() if each.kind == "gpu"]
TPUS = [each for each in KNOWN_DEVICES.values() if each.kind == "tpu"]

# By XLA's device descriptions (xla/backends/gpu/target_config/specs), which were read from cards: multiprocessors,
# bytes of memory and of L2, bytes per second, GHz.
XLA_SAYS = {
    "Tesla V100-SXM2-16GB": (80, 16935682048, 6291456, 898048000000, 1.53),
    "NVIDIA A100-SXM4-40GB": (108, 42331013120, 41943040, 1555200000000, 1.41),
    "NVIDIA A100-SXM4-80GB": (108, 85100068864, 41943040, 2039040000000, 1.41),
    "NVIDIA H100 PCIe": (114, 84942979072, 52428800, 2039040000000, 1.755),
    "NVIDIA H100 80GB HBM3": (132, 84942979072, 52428800, 3352320000000, 1.98),
    "NVIDIA H200": (132, 151397597184, 52428800, 4800000000000, 1.98),
    "NVIDIA B200": (148, 191514411008, 132644864, 7672320000000, 1.965),
    "NVIDIA GB200": (152, 197897748480, 135528448, 7928064000000, 2.062),
    "NVIDIA GB300": (152, 297021079552, 135528448, 7928064000000, 2.07),
}


@pytest.mark.parametrize("name", XLA_SAYS)
def test_what_xla_read_from_cards(name: str):
    known, (cores, memory, l2, bandwidth, clock) = KNOWN_DEVICES[name], XLA_SAYS[name]
    assert (known.cores, known.clock_ghz) == (cores, clock)
    assert known.memory_gb * 1e9 == pytest.approx(memory, rel=0.08)  # vendors round, and part of it is the driver's
    assert known.chip.cache_mb * (1 << 20) == pytest.approx(l2, rel=1e-3)
    assert known.bandwidth_gbs * 1e9 == pytest.approx(bandwidth, rel=0.01)


@pytest.mark.parametrize("known", GPUS, ids=lambda each: each.name)
def test_what_pallas_takes_a_gpu_for(known):
    if gpu_info.gpu_version_from_device_kind(known.name) is None:
        # Those of the last row are known to jax 0.12.
        assert known.chip.name in (
            "V100", "A10G", "A40", "A6000", "3090", "L40S", "Ada", "H800", "H20", "5090",
            "B300", "GB300", "Thor", "RTX PRO 6000", "GB10",
        )  # fmt: skip
        return
    with tilewright.target_device(known.name):
        info = gpu_info.get_gpu_info()
    assert info.arch_name == "{}.{}".format(*known.capability)


@pytest.mark.parametrize("known", TPUS, ids=lambda each: each.name)
def test_what_pallas_takes_a_tpu_for(known):
    with tilewright.target_device(known.name):
        info = tpu_info.get_tpu_info()
        assert current_device().cores == info.num_cores == known.cores
    assert known.memory_gb * 1e9 == pytest.approx(info.hbm_capacity_bytes * known.cores, rel=0.05)
    chip = known.chip
    assert (chip.vmem_mb << 20) == info.vmem_capacity_bytes
    if chip.flops:
        assert chip.flops == pytest.approx(info.bf16_ops_per_second * known.cores, rel=0.01)
        on_chip = (info.vmem_capacity_bytes + info.cmem_capacity_bytes) * known.cores
        assert chip.cache_mb * (1 << 20) == pytest.approx(on_chip, rel=0.01)
        # A bound must not be below what JAX knows; Google's page of v5p gives 12 % more.
        assert 0.99 < known.bandwidth_gbs * 1e9 / (info.mem_bw_bytes_per_second * known.cores) < 1.13


@pytest.mark.parametrize("known", KNOWN_DEVICES.values(), ids=lambda each: each.name)
def test_the_peak_is_that_of_the_fastest_device_with_the_chip(known):
    """Within the rounding of data sheets."""
    fastest = max(each.bandwidth_gbs for each in KNOWN_DEVICES.values() if each.chip is known.chip)
    if known.chip.peak_gbs:
        assert known.chip.peak_gbs == pytest.approx(fastest, rel=0.01)


@pytest.mark.parametrize("known", KNOWN_DEVICES.values(), ids=lambda each: each.name)
def test_it_is_selected_as_a_real_one(known):
    said = {} if known.capability is None else {"compute_capability": "{}.{}".format(*known.capability)}
    cores = {"num_cores" if known.kind == "tpu" else "core_count": known.cores}

    class Real(types.SimpleNamespace):
        __hash__ = object.__hash__

    real = Real(platform=known.kind, device_kind=known.name, **said, **cores)
    wanted = devices._device(real)
    found = known.device
    assert (found.kind, found.name, found.capability, found.cores) == (
        wanted.kind, wanted.name, wanted.capability, wanted.cores,
    )  # fmt: skip
    assert found.fingerprint == wanted.fingerprint == device_fingerprint(real)
    assert not found.present


def test_fingerprints_are_those_of_the_cards_that_the_tables_were_measured_on():
    tables = [json.loads(file.read_text())["device"] for file in files("tilewright").joinpath("tables").iterdir()]
    assert tables
    assert set(tables) <= {each.device.fingerprint for each in GPUS}


@pytest.mark.parametrize("known", GPUS, ids=lambda each: each.name)
def test_the_description_for_xla_has_the_limits_that_kernels_are_held_to(known):
    text = target_config(known)
    limits = block_limits(known.capability)
    assert f"shared_memory_per_block_optin: {limits.shared_bytes}\n" in text
    assert f"registers_per_block_limit: {limits.registers}\n" in text
    assert f"core_count: {known.cores}\n" in text
    assert text.count("{") == text.count("}")
    assert ("ACCELERATED_FEATURES" in text) == (known.capability >= (9, 0))


@pytest.mark.parametrize(
    ("google", "jaxs"), [("TPU v5e", "TPU v5 lite"), ("TPU v5p", "TPU v5"), ("TPU v6e", "TPU v6 lite")]
)
def test_googles_names(google: str, jaxs: str):
    assert find_device(google).name == jaxs
    assert tpu_info.chip_version_from_device_kind(google) == tpu_info.chip_version_from_device_kind(jaxs)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H100", "did you mean 'NVIDIA H100 80GB HBM3' or 'NVIDIA H100 PCIe' or 'NVIDIA H100 NVL'?"),
        ("nvidia h200", "did you mean 'NVIDIA H200' or 'NVIDIA H200 NVL'?"),
        ("NVIDIA A100-SXM4-80BG", "did you mean 'NVIDIA A100-SXM4-80GB'"),
        ("v5e", "did you mean 'TPU v5e'?"),
        ("", "known, by their jax.Device.device_kind, are 'Tesla V100-SXM2-16GB', "),
        ("Commodore 64", "'NVIDIA GB200'"),
    ],
)
def test_an_unknown_name_says_which_are_known(name: str, hint: str):
    with pytest.raises(ValueError, match=re.escape(hint)):
        find_device(name)


def test_a_name_that_is_none():
    with pytest.raises(TypeError, match="must be the name of a device"):
        find_device(jax.devices()[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", (9, 0)),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", (8, 0)),
        ("NVIDIA GeForce RTX 4090 D", (8, 9)),
        ("NVIDIA Z9", None),
        ("TPU v5 lite", None),
    ],
)
def test_the_capability_of_a_part_of_a_device(name: str, capability):
    assert capability_by_name(name) == capability


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("GRID A100D-80C", "A100"), ("NVIDIA A100X", "A100"), ("NVIDIA A10M", "A10"), ("NVIDIA L40S-48Q", "L40S"),
        ("NVIDIA GH200 96GB", "GH200"), ("NVIDIA GB200 NVL", "GB200"), ("NVIDIA H20-3e", "H20"), ("NVIDIA T400", None),
        ("NVIDIA B300 SXM6 AC MIG 1g.34gb", "B300"), ("NVIDIA RTX PRO 6000 Blackwell DC-4-48Q", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 4500 Blackwell", None),
        ("TPU v5e", "v5e"), ("TPU v4 lite", None), ("cpu", None),
    ],
)  # fmt: skip
def test_the_chip_of_a_device_that_is_not_listed(name: str, chip: str | None):
    found = chip_by_name(name)
    assert (found and found.name) == chip


def test_rates_are_of_what_was_measured():
    assert measured_rates("H100") == find_device("NVIDIA H100 NVL").chip.measured
    with pytest.raises(ValueError, match="no rates were measured on chip='A100'"):
        measured_rates("A100")
