"""What libtpu compiles from Pallas kernels for a TPU that is not there: memory, spilled registers, estimated cycles.

Wants ``jax[tpu]`` of jax's own version. Every program is compiled in a process of its own: libtpu reads where it writes
its reports once a process, and its simulator ends the process at instructions that it does not know.
"""

import dataclasses
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

TPUS = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")

_MEMORY = 14 << 30  # the simulator of a kernel of many steps takes all that there is
_SECONDS = 180  # blocks of thousands of rows are unrolled for minutes
_OPS = re.compile(r"^HLO: %?(\S+)", re.MULTILINE)
_COUNTS = re.compile(r"^ - (\w+(?: \w+)?): \((\d+)/(\d+)\)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class TpuReport:
    """One program as libtpu compiled it.

    Attributes:
      peak_bytes: of HBM, arguments and results included.
      seconds: that lowering and compiling took.
      bundles, spills, fills: instructions of all kernels of ours, and those of them that spill and reload registers.
      cycles: what the simulator says of every operation, by name; empty where it was not run or ended the process.
      error: what it says where it cannot compile; empty if it can.
    """

    peak_bytes: int = 0
    seconds: float = 0.0
    bundles: int = 0
    spills: int = 0
    fills: int = 0
    cycles: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def kernel_cycles(self) -> int:
        """Cycles of our kernels together."""
        return sum(cycles for name, cycles in self.cycles.items() if name.startswith("tilewright"))


def report(tpu: str, make: str, /, *arguments: Any, simulate: bool = False, **options: Any) -> TpuReport:
    """Compiles a program for a TPU, in another process.

    Args:
      make: ``"module:function"``, which gets the arguments and options, written as JSON, and returns the function to
        compile and its arguments as ``ShapeDtypeStruct``.
      simulate: run the simulator, which wants few steps of the grid (at most 128).
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--xla_jf_dump_to={folder}/dump", "--xla_jf_dump_llo_text=true"]
        flags.append("--xla_jf_dump_llo_pass_label_regex=hlo-static-bundle-profile")
        if simulate:
            flags.append(f"--xla_jf_dump_static_llo_profile_to={folder}/simulated")
        for name in ("dump", "simulated"):
            Path(folder, name).mkdir()
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "LIBTPU_INIT_ARGS": " ".join(flags),
            "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
        }
        job = json.dumps({"tpu": tpu, "make": make, "arguments": arguments, "options": options})
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.aot_tpu.compiler", folder, job],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY)),
            )
        except subprocess.TimeoutExpired:
            return TpuReport(error=f"not compiled in {_SECONDS} s")
        written = Path(folder, "report.json")
        if not written.exists():
            if simulate:
                return report(tpu, make, *arguments, **options)
            return TpuReport(error=f"ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(written.read_text())
        if found.get("error"):
            return TpuReport(error=found["error"])
        return TpuReport(**found, **_bundles(Path(folder, "dump")), cycles=_cycles(Path(folder, "simulated")))


def _bundles(folder: Path) -> dict[str, int]:
    """Bundles, spills and fills of our kernels."""
    found = dict.fromkeys(("bundles", "spills", "fills"), 0)
    for path in folder.glob("*hlo-static-bundle-profile.txt"):
        for part in re.split(r"(?m)^(?=HLO: )", path.read_text()):
            name = _OPS.search(part)
            if name is None or "tilewright" not in name[1]:
                continue
            counts = {key: (int(used), int(slots)) for key, used, slots in _COUNTS.findall(part)}
            # A report has slots, of which a bundle has as many as it can spill registers.
            found["bundles"] += counts["VECTOR_MISC"][1]
            found["spills"] += counts["VMEM_SPILL_COUNT"][0]
            found["fills"] += counts["VMEM_FILL_COUNT"][0]
    return found


def _cycles(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in folder.glob("*static_llo_profile.textproto"):
        text = path.read_text()
        names = re.findall(r'hlo_op_name: "([^"]+)"', text)
        found |= dict(zip(names, map(int, re.findall(r"estimated_cycles: (\d+)", text)), strict=True))
    return found


def _child(folder: str, job: dict[str, Any]) -> None:
    import time

    import tilewright

    module, _, name = job["make"].partition(":")
    function, structs = getattr(importlib.import_module(module), name)(*job["arguments"], **job["options"])
    start = time.monotonic()
    try:
        with tilewright.target_device(job["tpu"]) as target:
            lowered = jax.jit(lambda *args: function(*args)).lower(*structs)
            compiled = lowered.compile(device_assignment=target.devices)
    except Exception as error:  # what cannot be compiled is a result
        found: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:4000]}
    else:
        peak = compiled.memory_analysis().peak_memory_in_bytes
        found = {"peak_bytes": peak, "seconds": round(time.monotonic() - start, 2)}
    Path(folder, "report.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _child(sys.argv[1], json.loads(sys.argv[2]))
    os._exit(0)  # libtpu's threads may not end by themselves
