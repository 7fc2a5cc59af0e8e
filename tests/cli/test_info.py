"""``tilewright info``: what can really be loaded, and whom it could serve."""

import dataclasses
import importlib

import pytest

from tilewright.cli.info import probing
from tilewright.kernels.op.backend import Backend, loaded
from tilewright.kernels.op.choice import Platform
from tilewright.kernels.op.inputs import OpInputs, static
from tilewright.ops import Device
from tilewright.ops.utils.device import current_device

GPU = Device("gpu", "NVIDIA H200", (9, 0), 132, "gpu:NVIDIA H200:9.0")


class Numbered(OpInputs):
    number: int = static()


class Picky(Backend):
    """Serves no GPU, and of calls the second."""

    name = "picky"
    platform = Platform.PALLAS

    def reasons(self, inputs, device, direction):
        reasons = [] if device.kind == "cpu" else [f"needs a CPU, got {device.described}"]
        return [*reasons, "is for 2"] if inputs.number == 1 else reasons

    candidates = forward = backward = None


def served(where, calls=(Numbered(1), Numbered(2)), present=None):
    devices = [current_device()] if present is None else present
    return probing._served("op", loaded(where), calls, devices)


def test_every_backend_of_every_op_is_asked(monkeypatch):
    found = probing.served_backends()
    by_name = {(each.op, each.name): each for each in found}
    for op in probing.OPS:
        assert by_name[op, "xla"].devices == ("cpu",)
    for each in found:
        assert bool(each.devices) != bool(each.why)
        assert "\n" not in each.why
    assert by_name["flash_attention", "hopper"].why == "needs a GPU of compute capability 9.0"
    assert "cuDNN" in by_name["flash_attention", "cudnn"].why
    fa4 = by_name["flash_attention", "fa4"].why
    assert fa4.endswith("needs flash-attn-4, quack-kernels, nvidia-cutlass-dsl, torch: pip install 'tilewright[fa4]'")


def test_a_device_that_no_call_is_served_on_is_not_listed():
    one = served(f"{__name__}:Picky", present=[current_device(), GPU])
    assert (one.devices, one.why) == (("cpu",), "")
    other = served(f"{__name__}:Picky", present=[GPU])
    assert (other.devices, other.why) == ((), "needs a CPU")
    why = served(f"{__name__}:Picky", calls=[Numbered(1)]).why
    assert why == "is for 2; needs a CPU, got NVIDIA H100 80GB HBM3 (9.0)"
    assert "no device" in served(f"{__name__}:Picky", calls=[], present=[]).why


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import nonesuch_package", "cannot be loaded: No module named 'nonesuch_package'"),
        ("raise OSError('libcuda.so.1: cannot open')\n", "cannot be loaded: libcuda.so.1: cannot open"),
        ("raise RuntimeError('two\\nlines')\n", "cannot be loaded: RuntimeError: two lines"),
        (
            "raise ModuleNotFoundError('No module named quack', name='quack.cute')",
            "cannot be loaded: No module named quack; pip install 'tilewright[fa4]'",
        ),
    ],
)
def test_a_backend_that_cannot_be_imported_says_why(source, why, tmp_path, monkeypatch):
    module = tmp_path.name  # a backend is loaded once a process
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert dataclasses.astuple(served(f"{module}:Backend")) == ("op", module, (), why)


def test_what_is_imported_with_the_first_call_is_tried_too(monkeypatch):
    every = [each for op in probing.OPS for each in probing.kernel(op).backends.usable]
    assert {each.late_import for each in every} >= {"", "triton"}
    for each in every:
        module, _, function = each.late_import.partition(":")
        assert not function or callable(getattr(importlib.import_module(module), function))
    monkeypatch.setattr(Picky, "late_import", "json:JSONDecoder")
    assert served(f"{__name__}:Picky").devices == ("cpu",)
    monkeypatch.setattr(Picky, "late_import", "nonesuch_package")
    one = served(f"{__name__}:Picky")
    assert (one.devices, one.why) == ((), "cannot be loaded: No module named 'nonesuch_package'")
