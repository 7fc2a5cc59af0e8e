"""Proves that a change of the code changed no program: what every op would run, as hashes, before and after.

python -m tools.programs write FILE          # of the commit before the change
python -m tools.programs compare FILE        # of the tree with the change: exits with 1 and says what is not the same
python -m tools.programs compare FILE --show KEY    # prints the text behind what has this in its key
python -m tools.programs compare FILE --dump FOLDER # writes the texts, to be compared with those of another tree
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.program_text import digest, program_text, value_text, without_names

ROOT = Path(__file__).parent.parent

DEVICES = {
    "H100": "NVIDIA H100 80GB HBM3",
    "A100": "NVIDIA A100-SXM4-40GB",
    "TPU": "TPU v5 lite",
    "CPU": None,
}
"""By the name in keys; JAX's names of them, ``None`` for a CPU of `CPU_CORES` cores."""

CPU_CORES = 8

MOST_PARAMS = 12
"""Of one implementation in one call; of more, so many spread over the list, the first and the last among them."""


def framework() -> Any:
    """What is used of Tilewright: the only imports from it, for modules move."""
    from tilewright.cli.options import CallOptions
    from tilewright.cli.targets import OPS, flat_call, op_cases, op_function
    from tilewright.kernels.cuda_build.build import Group, shipped_key
    from tilewright.kernels.cuda_build.kernel import CudaKernel, noting_groups
    from tilewright.kernels.flash_attention import cudnn_jax, fa4_cute
    from tilewright.ops import ConfigSelectorChain, Device, find_invocations, target_device
    from tilewright.ops.core.arrays import StaticLeaf, split
    from tilewright.ops.core.kernel import gradient_form, optional_method
    from tilewright.ops.core.stages import Program, Stage, traced
    from tilewright.ops.utils.known_devices import find_device

    return types.SimpleNamespace(
        CallOptions=CallOptions,
        ConfigSelectorChain=ConfigSelectorChain,
        CudaKernel=CudaKernel,
        Device=Device,
        Group=Group,
        OPS=OPS,
        Program=Program,
        Stage=Stage,
        StaticLeaf=StaticLeaf,
        cudnn_jax=cudnn_jax,
        fa4_cute=fa4_cute,
        find_device=find_device,
        find_invocations=find_invocations,
        flat_call=flat_call,
        gradient_form=gradient_form,
        noting_groups=noting_groups,
        op_cases=op_cases,
        op_function=op_function,
        optional_method=optional_method,
        shipped_key=shipped_key,
        split=split,
        target_device=target_device,
        traced=traced,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One thing that must not change.

    Attributes:
      value: what is compared.
      text: what is behind it.
    """

    key: str
    value: str
    text: str


def hashed(key: str, text: str) -> Entry:
    return Entry(key, digest(text), text)


def said(key: str, text: str) -> Entry:
    """An entry that is compared and kept as it reads."""
    return Entry(key, without_names(text), text)


# What cannot be loaded or compiled here: it is taken to be there, and its calls become equations that say all of them.


def _outside() -> Any:
    """A primitive for calls of kernels that are not here."""
    from jax.extend.core import Primitive

    primitive = Primitive("outside")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: list(results))
    return primitive


@functools.cache
def _outside_p() -> Any:
    return _outside()


def _call_outside(operands: Sequence[Any], outputs: Sequence[Any], **params: Any) -> list[Any]:
    import jax

    results = tuple(jax.core.ShapedArray(each.shape, each.dtype) for each in outputs)
    return _outside_p().bind(*operands, results=results, said=tuple(sorted(params.items())))


def _cuda_call(
    self: Any,
    variant: Any,
    problem: Mapping[str, int],
    device: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
) -> list[Any]:
    """In place of ``CudaKernel.call``, which would have the variant compiled."""
    given = {name: value_text(value) for name, value in (attributes or {}).items()}
    return _call_outside(
        inputs, outputs, table=self.table.name, variant=variant.name, problem=value_text(problem),
        attributes=value_text(given),
    )  # fmt: skip


class _Recorder:
    """Stands for a class of FlashAttention-4's kernels, or a function that makes a part of one."""

    def __init__(self, name: str, record: list[str]) -> None:
        self._name, self._record = name, record

    def __call__(self, *args: Any, **kwargs: Any) -> "_Recorder":
        self._record.append(f"{self._name}({value_text(args)}, {value_text(kwargs)})")
        return _Recorder(f"{self._name}()", self._record)

    def __getattr__(self, name: str) -> "_Recorder":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(f"{self._name}.{name}", self._record)

    def __repr__(self) -> str:
        return self._name


class _AnyKey(dict[Any, Any]):
    """A mapping that has a recorder for every key."""

    def __init__(self, name: str, record: list[str]) -> None:
        super().__init__()
        self._name, self._record = name, record

    def __missing__(self, key: Any) -> Any:
        return _Recorder(f"{self._name}[{value_text(key)}]", self._record)


def _fa4_kernels() -> Any:
    """In place of FlashAttention-4's kernels and of the bridge that launches them."""
    record: list[str] = []

    def call(launch: Any, *, output_shape_dtype: Any, input_output_aliases: Any, compile_key: Any) -> Any:
        def run(*operands: Any) -> Any:
            record.clear()
            aliased = set(input_output_aliases.values())
            inputs = [None if x is None else f"operand {i}" for i, x in enumerate(operands)]
            launch(None, *inputs, *(f"result {i}" for i in range(len(output_shape_dtype)) if i not in aliased))
            given = [x for x in operands if x is not None]
            launched = (value_text(inputs), value_text(input_output_aliases), *record)
            return tuple(_call_outside(given, output_shape_dtype, launch=launched, key=value_text(compile_key)))

        return run

    utils, float32 = _Recorder("utils", record), _Recorder("float32", record)
    classes, dtypes = _AnyKey("classes", record), _AnyKey("dtypes", record)
    return types.SimpleNamespace(
        classes=classes, utils=utils, dtypes=dtypes, float32=float32, call=call, versions=("any",)
    )


@contextlib.contextmanager
def stand_ins(known: Any) -> Iterator[None]:
    """A context in which nvcc, cuDNN and FlashAttention-4 count as installed, and nothing as compiled."""
    fused = known.cudnn_jax.fused
    places = [
        (known.CudaKernel, "_missing", lambda self, values: []),
        (known.CudaKernel, "call", _cuda_call),
        (known.fa4_cute, "package_reasons", list),
        (known.fa4_cute, "kernels", _fa4_kernels),
        (fused, "cuda_versions", object()),
        (fused, "check_cudnn_version", lambda: 91900),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, value in places:
            setattr(place, name, value)
        with known.noting_groups():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


# Calls.


@dataclasses.dataclass(frozen=True, slots=True)
class OpCall:
    """One named case of an op, as a function of abstract arrays."""

    op: str
    case: str
    function: Any
    args: Any


class _Zeros:
    """A generator of random numbers of which those that fill large arrays cost nothing."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def standard_normal(self, size: Any = None, dtype: Any = float) -> Any:
        import numpy as np

        return np.zeros(size, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


@contextlib.contextmanager
def _cheap_arrays() -> Iterator[None]:
    """A context in which what NumPy draws is drawn, if at all, and is no part of what is traced."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    asarray, default_rng = jnp.asarray, np.random.default_rng

    def eager(*args: Any, **kwargs: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return asarray(*args, **kwargs)

    try:
        jnp.asarray, np.random.default_rng = eager, lambda *seed: _Zeros(default_rng(*seed))
        yield
    finally:
        jnp.asarray, np.random.default_rng = asarray, default_rng


def calls_of(known: Any, op: str, kind: str) -> list[OpCall]:
    """The named cases of an op for a kind of device; their large arrays are never made."""
    import jax

    found = []
    for case in known.op_cases(op, known.CallOptions(cases=("all",)), kind):
        made = []

        def abstract(case: Any = case, made: list[Any] = made) -> Any:
            with _cheap_arrays():
                positional, keywords = case.arguments()
            function, args = known.flat_call(known.op_function(op), positional, keywords, known.OPS[op].gradients)
            made.append(function)
            return args

        args = jax.eval_shape(abstract)
        found.append(OpCall(op, case.name, made[0], args))
    return found


def invocations_of(known: Any, call: OpCall, device: str) -> list[tuple[str, Any]]:
    """What kernels are called with, and its name in keys."""
    found = known.find_invocations(call.function, *call.args)
    if DEVICES[device] is None:
        cpu = known.Device("cpu", "cpu", None, CPU_CORES, f"cpu:any:{CPU_CORES}")
        found = [dataclasses.replace(inv, device=cpu) for inv in found]
    counts: collections.Counter[str] = collections.Counter()
    named = []
    for inv in found:
        kernel = "" if inv.kernel.name == call.op else f"{inv.kernel.name} "
        name = f"{call.op}/{call.case}/{device}/{kernel}{inv.direction}"
        counts[name] += 1
        named.append((name if counts[name] == 1 else f"{name} {counts[name]}", inv))
    return named


# Programs.


def config_text(config: Any) -> str:
    """A config, whole; modules of classes are left out."""
    return value_text(config)


def config_name(config: Any) -> str:
    """A config in keys, without what is ``None``."""
    return without_names(str(config))


def program_of(known: Any, inv: Any, config: Any) -> Any:
    """The jaxpr that an invocation runs with a config."""
    arrays, structure = known.split((inv.abstract_args, inv.abstract_kwargs))
    leaf = known.StaticLeaf(config)
    if inv.direction == "forward":
        return known.traced(known.Program(_forward_stage(known, inv, structure), leaf, tuple(arrays), (), inv.target))[
            0
        ]
    rest, extra = _residuals_and_cotangents(known, inv, arrays, structure)
    wanted = tuple(_is_inexact(array) for array in arrays)
    stage = known.Stage(inv.kernel, structure, "backward", extra, wanted)
    return known.traced(known.Program(stage, leaf, (*arrays, *rest), (), inv.target))[0]


def _forward_stage(known: Any, inv: Any, structure: Any) -> Any:
    return known.Stage(inv.kernel, structure, "forward" if known.gradient_form(inv.kernel) == "residuals" else "run")


def _residuals_and_cotangents(known: Any, inv: Any, arrays: Sequence[Any], structure: Any) -> tuple[list[Any], Any]:
    """What a backward stage takes after the arrays of the call, and its structure."""
    import jax

    forward = dataclasses.replace(inv, direction="forward")
    config = known.StaticLeaf(inv.kernel.heuristic_cfg(forward))
    stage = _forward_stage(known, inv, structure)
    results = known.traced(known.Program(stage, config, tuple(arrays), (), inv.target))[1]
    whole = results.tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.avals])
    out, residuals = whole if stage.name == "forward" else (whole, ())
    cotangents = jax.tree.map(lambda x: x if _is_inexact(x) else None, out)
    return known.split((residuals, tuple(cotangents) if isinstance(cotangents, tuple | list) else (cotangents,)))


def _is_inexact(array: Any) -> bool:
    import jax.numpy as jnp

    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def attempted(key: str, make: Any) -> Entry:
    """The hash of a text, or the type of what was raised instead."""
    try:
        return hashed(key, make())
    except Exception as error:  # what cannot be traced here may raise anything; that it cannot is compared
        return Entry(key, f"cannot: {type(error).__name__}", f"cannot: {type(error).__name__}: {error}")


def sampled(configs: Sequence[Any]) -> list[Any]:
    """All configs of each implementation, or of many some that are spread over them."""
    by_implementation: dict[str, list[Any]] = {}
    for config in configs:
        by_implementation.setdefault(str(getattr(config, "implementation", "")), []).append(config)
    found = []
    for each in by_implementation.values():
        last, most = len(each) - 1, min(len(each), MOST_PARAMS)
        found += [each[round(i * last / max(1, most - 1))] for i in range(most)]
    return found


def entries_of(known: Any, name: str, inv: Any) -> Iterator[Entry]:
    """What an invocation chooses and from what, and the programs of its configs."""
    kernel, reasons = inv.kernel, known.optional_method(inv.kernel, "reasons")
    yield said(f"{name}/heuristic", config_name(kernel.heuristic_cfg(inv)))
    preferred = known.optional_method(kernel, "preferred_cfg")
    if preferred is not None:
        yield said(f"{name}/preferred", config_name(preferred(inv)))
    chosen = known.ConfigSelectorChain().lookup(inv)
    yield said(f"{name}/chosen", f"{chosen.step}: {config_name(chosen.config)}")
    against = {} if reasons is None else reasons(inv)
    yield said(f"{name}/supported", " ".join(each for each, why in against.items() if not why))
    yield hashed(f"{name}/reasons", without_names("\n".join(f"{each}: {why}" for each, why in against.items())))
    space = list(dict.fromkeys(kernel.config_space(inv)))
    text = "\n".join(_config_facts(known, inv, config) for config in space)
    yield Entry(f"{name}/space", f"{len(space)} {digest(text)}", text)
    names: collections.Counter[str] = collections.Counter()
    for config in sampled(space):
        key = f"{name}/{config_name(config)}"
        names[key] += 1
        key = key if names[key] == 1 else f"{key} {names[key]}"
        yield attempted(key, lambda config=config: program_text(program_of(known, inv, config)))


def _config_facts(known: Any, inv: Any, config: Any) -> str:
    """A config with what the kernel says of it."""
    facts = {}
    for name in ("config_reasons", "config_bound_ms", "config_builds"):
        method = known.optional_method(inv.kernel, name)
        if method is not None:
            found = method(inv, config)
            facts[name] = [str(build) for build in found] if name == "config_builds" else found
    return f"{config_text(config)}: {value_text(facts)}"


def builds_of(known: Any, name: str, inv: Any) -> Iterator[Entry]:
    """What would be compiled for a device: hashes of sources, headers and flags."""
    all_builds = known.optional_method(inv.kernel, "all_builds")
    for build in [] if all_builds is None else all_builds(inv.target):
        if isinstance(build, known.Group):
            yield attempted(f"{name}/{build}", lambda build=build: value_text(known.shipped_key(build)))


def entries(op: str, devices: Sequence[str] = tuple(DEVICES)) -> Iterator[Entry]:
    """All entries of an op."""
    known = framework()
    calls: dict[str, list[OpCall]] = {}
    built: set[str] = set()
    with stand_ins(known):
        for device in devices:
            name = DEVICES[device]
            kind = "cpu" if name is None else known.find_device(name).kind
            table = known.OPS[op].device_cases.get(kind, known.OPS[op].device_cases["cpu"])
            if table not in calls:
                calls[table] = calls_of(known, op, kind)
            for call in calls[table]:
                with contextlib.nullcontext() if name is None else known.target_device(name):
                    for key, inv in invocations_of(known, call, device):
                        yield from entries_of(known, key, inv)
                        builds = f"{op}/builds/{device}"
                        if builds not in built:
                            built.add(builds)
                            yield from builds_of(known, builds, inv)


# Files.


def environment() -> dict[str, str]:
    """The environment of what computes entries: nothing in it decides how kernels are traced."""
    prefixes = ("TILEWRIGHT_", "JAX_", "XLA_", "MOSAIC_", "TRITON_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | {"JAX_PLATFORMS": "cpu", "TILEWRIGHT_LOWERED": "0"}


def _of_op(op: str, folder: Path, dump: Path | None) -> dict[str, str]:
    """The entries of an op by a process of its own."""
    file = folder / f"{op}.json"
    command = [sys.executable, "-m", "tools.programs", "op", op, str(file), *(["--dump", str(dump)] if dump else [])]
    given = environment() | {"TILEWRIGHT_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, check=True, env=given, cwd=ROOT)
    return json.loads(file.read_text())


def all_entries(ops: Sequence[str], jobs: int, dump: Path | None = None) -> dict[str, str]:
    """The entries of several ops, by so many processes at once."""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda op: _of_op(op, Path(folder), dump), ops)
        return {key: value for part in found for key, value in part.items()}


def write_file(path: Path, found: Mapping[str, str]) -> None:
    path.write_text(json.dumps(found, indent=0, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each entry that is new, missing or different."""
    lines = [f"missing: {key}" for key in sorted(before.keys() - after.keys())]
    lines += [f"new: {key}" for key in sorted(after.keys() - before.keys())]
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            lines.append(f"different: {key}: {before[key]} -> {after[key]}")
    return lines


def _write_op(op: str, file: Path, dump: Path | None) -> None:
    """What a process of one op does."""
    found = {}
    for entry in entries(op):
        found[entry.key] = entry.value
        if dump is not None:
            place = dump / f"{entry.key.replace('(', '_').replace(')', '').replace(' ', '')}.txt"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(entry.text)
    file.write_text(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare", "op"])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--only", action="append", help="an op; repeatable")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dump", type=Path)
    args = parser.parse_args(arguments)
    if args.what == "op":
        _write_op(args.names[0], Path(args.names[1]), args.dump)
        return 0
    file = Path(args.names[0])
    ops = args.only or list(framework().OPS)
    found = all_entries(ops, args.jobs, args.dump)
    if args.what == "write":
        write_file(file, found)
        return 0
    before = {k: v for k, v in json.loads(file.read_text()).items() if k.partition("/")[0] in ops}
    lines = differences(before, found)
    print(*lines, sep="\n")
    print(f"{len(found)} entries, {len(lines)} not the same")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
