"""Compiles FlashAttention-4 for a GPU that is not here: ``python -m tests.aot.fa4_compiling "NVIDIA B200"``.

In a process of its own, because the CuTe DSL compiles for one architecture, which it reads when it is imported.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import jax

import tilewright
from tilewright.kernels import kernel
from tilewright.kernels.flash_attention.cases import AttentionCase
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.flash_attention.fa4.backend import Fa4FlashAttention
from tilewright.kernels.op.cases import variants
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils.known_devices import KnownDevice, find_device

_SIZES: dict[str, Any] = {"batch": 2, "q_length": 1000, "heads": 8, "kv_heads": 2, "dtype": "bfloat16"}
CASES = variants(
    AttentionCase("", **_SIZES),
    {
        "d64": {"head_dim": 64, "kv_heads": None},
        "d64_window": {"head_dim": 64, "causal": True, "sliding_window": 127},
        "d128": {"head_dim": 128, "kv_heads": None},
        "d128_causal": {"head_dim": 128, "causal": True},
        "d128_soft_cap": {"head_dim": 128, "causal": True, "logits_soft_cap": 30.0, "dtype": "float16"},
        "d128_lengths": {"head_dim": 128, "lengths": True},
        "d128_one_query": {"head_dim": 128, "q_length": 1, "kv_length": 4096},
        "d192_v128": {"head_dim": 192, "value_dim": 128, "causal": True},
        "d192_v128_full": {"head_dim": 192, "value_dim": 128},
        "d256": {"head_dim": 256, "causal": True},
        "d256_lengths": {"head_dim": 256, "lengths": True},
    },
)


class _Names(type):
    """A class whose attributes are classes like it, and which gives back what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        return _named(cls, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else cls

    def __or__(cls, other: Any) -> Any:  # type: ignore[override]
        return cls


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(self, name)


def _named(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(owner, name, _Names(name, (), {}))
    return getattr(owner, name)


def stand_in(known: KnownDevice) -> None:
    """In place of PyTorch, whose names alone are used, of packages that call it, and of the driver's answers."""
    import cutlass
    import cutlass.utils

    class HardwareInfo:
        """The number of multiprocessors, for which persistent kernels ask the driver."""

        def get_device_multiprocessor_count(self) -> int:
            return known.cores

    cutlass.utils.HardwareInfo = HardwareInfo
    for name in ("torch", "torch._subclasses", "torch._subclasses.fake_tensor", "torch.nn", "torch.nn.functional"):
        sys.modules[name] = _Module(name)
    for name in ("quack", "flash_attn.cute"):  # without their __init__, which imports what is for PyTorch
        package = types.ModuleType(name)
        parts = name.split(".")
        package.__path__ = [str(found) for path in sys.path if (found := Path(path, *parts)).is_dir()]
        sys.modules[name] = package
    import quack.dsl  # noqa: F401  # extends the DSL's tensors

    cute.missing_packages = tuple  # type: ignore[assignment]


def resources(folder: Path) -> list[dict[str, int]]:
    """Registers and bytes of stack (spilled registers, too) of a thread of each kernel whose code is in a folder."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = []
    for file in sorted(folder.glob("*.cubin")):
        command = [str(tool), "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found += [
            {"registers": int(registers), "stack": int(stack)}
            for registers, stack in re.findall(r"REG:(\d+) STACK:(\d+)", text)
        ]
    return found


def compiled(case: AttentionCase, known: KnownDevice, folder: Path) -> dict[str, Any]:
    """The kernels of either direction, whose code goes to a folder, or the reasons against it."""
    op, backend, device = kernel("flash_attention"), Fa4FlashAttention(), known.device
    args, kwargs = case.abstract_arguments()
    inputs: Any = op.inputs_of(prepared(op, args, kwargs, concrete=False)[0])
    results = op.results(inputs)
    with tilewright.target_device(known.name) as target:
        sharding = jax.sharding.SingleDeviceSharding(target.devices[0])
    put = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))
    outputs = tuple(jax.tree.leaves(jax.eval_shape(op.outputs, inputs, results)))
    cotangents = op.cotangents(inputs, op.residuals(results), outputs)
    # Not as ``target_device`` lowers: its mesh has axes, with which JAX does not lower calls that name devices.
    there = jax.sharding.AbstractDevice(device_kind=known.name, platform="gpu", num_cores=known.cores)
    found: dict[str, Any] = {}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=there)):
        for direction, run, operands in (
            ("forward", backend.forward, (inputs,)),
            ("backward", backend.backward, (inputs, op.residuals(results), cotangents)),
        ):
            if why := backend.not_supported_reasons(inputs, device, direction):  # type: ignore[arg-type]
                found[direction] = why
                continue
            params = backend.heuristic(inputs, device, direction)  # type: ignore[arg-type]
            for file in folder.iterdir():
                file.unlink()
            function = jax.jit(lambda *given, run=run, params=params: run(*given, params))
            function.trace(*put(operands)).lower(lowering_platforms=("cuda",)).compile()
            found[direction] = resources(folder)
    return found


def main(name: str, *cases: str) -> None:
    """Prints what is compiled of each case as a line of JSON."""
    known = find_device(name)
    assert known.capability is not None
    with tempfile.TemporaryDirectory() as folder:
        architecture = "sm_{}{}a".format(*known.capability)
        # Read when the DSL is imported.
        os.environ |= {"CUTE_DSL_ARCH": architecture, "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        stand_in(known)
        for each in cases or CASES:
            print(json.dumps({each: compiled(CASES[each], known, Path(folder))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
