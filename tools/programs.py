"""Proves that a change of the code changed no program: hashes of what every op would run, before it and after.

python -m tools.programs write FILE          # of the commit before the change; 4 minutes on one core
python -m tools.programs compare FILE        # of the tree with the change: exits with 1 and says what is not the same
python -m tools.programs compare FILE --only flash_attention        # of one op
python -m tools.programs compare FILE --show flash_attention/full_4k_d128/H100/forward/chosen # and the text behind it
python -m tools.programs compare FILE --dump FOLDER                 # and all texts, for diff -r with another tree's
python -m tools.programs compare FILE --new-field item_order=snake  # after a config got this field, with this default

FILE is not kept in the repository: it is written from the commit before a change, by the same JAX and on the same
machine, for the programs follow JAX's version and what is installed beside it.

For each case of every op, named or of ``program_calls.FEATURES``, on each of ``program_calls.DEVICES`` and in each
direction it holds

- what is chosen: the heuristic config, the preferred one, what the chain with the shipped tables gives, which
  implementations support the call, and a hash of the reasons of the others;
- a hash of the config space, with what the kernel says of each config: reasons, bound and builds;
- for up to `MAX_PARAMS` configs of each implementation (`MAX_FEATURE_PARAMS` of a call with options), spread over its
  part of the space, a hash of the program that would run (``program_text``), or the type of what was raised instead;
- for a call with options also the programs under ``vmap``, and the oracle's.

Names of functions, comments, places and modules change nothing; the names of classes of configs and of parameters do,
and in Triton kernels those of their own variables. For a Triton kernel the source is compared; for a variant in CUDA
C++ the bytes that its group would be compiled from, comments included; for cuDNN and FlashAttention-4 their arguments.

What is not compared: what public functions do before and after the op, errors, caches and tuning; derivatives in
forward mode; programs of more than one mapped axis, or split in other ways than ``program_calls.SHARDED``; rules for
``vmap`` of what is not mapped in any of the calls; what JAX itself makes of a program.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.program_calls import (
    DEVICES,
    FEATURE_DEVICES,
    OpCall,
    Traced,
    feature_calls,
    framework,
    invocations_of,
    named_calls,
    on_device,
    stubs,
)
from tools.program_text import digest, program_text, value_text, without_names

ROOT = Path(__file__).parent.parent

MAX_PARAMS = 8
MAX_FEATURE_PARAMS = 1


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


def hashed(key: str, make: Callable[[], str]) -> Entry:
    """The hash of a text, or the type of what was raised instead."""
    return _attempted(key, make, digest)


def verbatim(key: str, make: Callable[[], str]) -> Entry:
    """A short text, or the type of what was raised instead."""
    return _attempted(key, lambda: without_names(make()), str)


def _attempted(key: str, make: Callable[[], str], value: Callable[[str], str]) -> Entry:
    try:
        text = make()
    except Exception as error:  # what cannot be traced here may raise anything; that it cannot is compared
        return _failed(key, error)
    return Entry(key, value(text), text)


def _failed(key: str, error: Exception) -> Entry:
    text = f"cannot: {type(error).__name__}"
    return Entry(key, text, f"{text}: {error}")


def sampled(configs: Sequence[Any], most: int) -> list[Any]:
    """The configs of each implementation; at most ``most`` of them, evenly spread, with the first and the last."""
    by_implementation: dict[str, list[Any]] = {}
    for config in configs:
        by_implementation.setdefault(str(getattr(config, "backend", "")), []).append(config)
    found = []
    for each in by_implementation.values():
        count = min(len(each), most)
        found += [each[round(i * (len(each) - 1) / max(1, count - 1))] for i in range(count)]
    return found


def choice_entries(name: str, traced: Traced, space: Sequence[Any]) -> Iterator[Entry]:
    """What an invocation chooses, and from what."""
    known, inv = traced.known, traced.inv
    yield verbatim(f"{name}/heuristic", lambda: str(inv.kernel.heuristic_cfg(inv)))
    preferred = getattr(inv.kernel, "preferred_cfg", None)
    if preferred is not None:
        yield verbatim(f"{name}/preferred", lambda: str(preferred(inv)))
    derived = known.gradient_form(inv.kernel) is not None
    forward_mode = getattr(inv.kernel, "forward_mode_cfg", None) if derived else None
    if forward_mode is not None and inv.direction == "forward":
        yield verbatim(f"{name}/forward mode", lambda: str(forward_mode(inv)))
    yield verbatim(f"{name}/chosen", lambda: _chosen(known, inv))
    reasons = getattr(inv.kernel, "reasons", None)
    if reasons is not None:
        against = reasons(inv)
        yield verbatim(f"{name}/supported", lambda: " ".join(each for each, why in against.items() if not why))
        lines = [f"{each}: {'; '.join(why)}" for each, why in against.items()]
        yield hashed(f"{name}/reasons", lambda: without_names("\n".join(lines)))
    yield _attempted(
        f"{name}/space",
        lambda: "\n".join(_config_facts(known, inv, config) for config in space),
        lambda text: f"{len(space)} configs {digest(text)}",
    )


def _chosen(known: Any, inv: Any) -> str:
    selection = known.ConfigSelectorChain().lookup(inv)
    return f"{selection.step}: {selection.config}"


def _config_facts(known: Any, inv: Any, config: Any) -> str:
    """A config with what the kernel says of it."""
    facts = {}
    for name in ("config_reasons", "config_bound_ms", "config_builds"):
        method = getattr(inv.kernel, name, None)
        if method is not None:
            found = method(inv, config)
            facts[name] = list(map(str, found)) if name == "config_builds" else found
    return f"{value_text(config)}: {value_text(facts)}"


def program_entries(name: str, traced: Traced, space: Sequence[Any], seen: set[Any]) -> Iterator[Entry]:
    """The programs of an invocation's configs; where some arrays are mapped, once for calls with the same arrays."""
    is_feature = traced.call.is_feature
    names: collections.Counter[str] = collections.Counter()
    for config in sampled(space, MAX_FEATURE_PARAMS if is_feature else MAX_PARAMS):
        key = f"{name}/{without_names(str(config))}"
        names[key] += 1
        key = key if names[key] == 1 else f"{key} {names[key]}"
        yield hashed(key, lambda config=config: program_text(traced.program(config)))  # type: ignore[misc]
    if not is_feature or traced.mesh is not None:
        return
    count = len(traced.arrays)
    axes = {"all mapped": (True,) * count}
    if traced.arrangement not in seen:
        seen.add(traced.arrangement)
        axes["first mapped"] = (True,) + (False,) * (count - 1)
    for config in sampled(space, 1):
        for how, flags in axes.items():
            mapped = dataclasses.replace(traced, mapped=flags)
            key = f"{name}/{without_names(str(config))}, {how}"
            yield hashed(key, lambda config=config, mapped=mapped: program_text(mapped.program(config)))  # type: ignore[misc]
    if traced.inv.direction == "forward" and getattr(traced.inv.kernel, "reference", None):
        yield hashed(f"{name}/reference", lambda: program_text(traced.reference()))


def build_entries(name: str, known: Any, inv: Any) -> Iterator[Entry]:
    """What would be compiled for a device: hashes of sources, headers and flags."""
    all_builds = getattr(inv.kernel, "all_builds", None)
    for build in [] if all_builds is None else all_builds(inv.target):
        if isinstance(build, known.Group):
            yield hashed(f"{name}/{build}", lambda build=build: value_text(known.shipped_key(build)))  # type: ignore[misc]


def call_entries(known: Any, call: OpCall, device: str, seen: set[Any]) -> Iterator[Entry]:
    """The entries of one call on a device, and once of what would be compiled for it.

    Args:
      seen: what is not to be done again for further calls on the device.
    """
    with on_device(known, device, call) as mesh:
        try:
            named = invocations_of(known, call, device, mesh)
        except Exception as error:  # an op may refuse a call in any way
            yield _failed(f"{call.op}/{call.name}/{device}", error)
            return
        for name, inv in named:
            traced = Traced(known, inv, call, mesh)
            try:
                space = list(dict.fromkeys(inv.kernel.config_space(inv)))
            except Exception as error:  # likewise
                yield _failed(f"{name}/space", error)
                continue
            yield from choice_entries(name, traced, space)
            yield from program_entries(name, traced, space, seen)
            builds = f"{call.op}/builds/{device}"
            if builds not in seen:
                seen.add(builds)
                yield from build_entries(builds, known, inv)


def entries(op: str, devices: Sequence[str] = tuple(DEVICES), *, features: bool = True) -> Iterator[Entry]:
    """All entries of an op.

    Args:
      features: whether those of calls with options are among them.
    """
    known = framework()
    by_kind: dict[str, list[OpCall]] = {}
    with stubs(known):
        for device in devices:
            name = DEVICES[device]
            kind = "cpu" if name is None else known.find_device(name).kind
            table = kind if kind in known.kernel(op).cases.by_device else "cpu"
            if table not in by_kind:
                by_kind[table] = named_calls(known, op, kind)
            with_options = feature_calls(known, op, device) if features and device in FEATURE_DEVICES else []
            seen: set[Any] = set()
            for call in [*by_kind[table], *with_options]:
                yield from call_entries(known, call, device, seen)


# Files.


def environment() -> dict[str, str]:
    """The environment of what computes entries: nothing in it decides how kernels are chosen and traced."""
    prefixes = ("TILEWRIGHT_", "JAX_", "XLA_", "MOSAIC_", "TRITON_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | {"JAX_PLATFORMS": "cpu", "TILEWRIGHT_LOWERED": "0"}


def text_path(key: str) -> Path:
    """The file of a key's text in the folder of a dump."""
    name = re.sub(r"[^\w/.,=-]+", "_", key).rstrip("_")
    *folders, last = name.split("/")
    return Path(*folders, (last if len(last) < 200 else f"{last[:180]}-{digest(last)}") + ".txt")


def write_op(op: str, file: Path, dump: Path | None) -> None:
    """Writes the entries of an op, and the texts behind them."""
    found = {}
    for entry in entries(op):
        found[entry.key] = entry.value
        if dump is not None:
            place = dump / text_path(entry.key)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(entry.text + "\n", encoding="utf-8")
    file.write_text(json.dumps(found), encoding="utf-8")


def all_entries(ops: Sequence[str], jobs: int, dump: Path | None = None) -> dict[str, str]:
    """The entries of several ops, by this many processes at once.

    Raises:
      CalledProcessError: one of them ended with an error, which it has printed.
    """

    def of_op(op: str, folder: Path) -> dict[str, str]:
        file = folder / f"{op}.json"
        command = [sys.executable, "-m", "tools.programs", "op", op, "--into", str(file)]
        command += [] if dump is None else ["--dump", str(dump.absolute())]
        given = environment() | {"TILEWRIGHT_CACHE_DIR": str(folder / "cache")}
        subprocess.run(command, check=True, env=given, cwd=ROOT)
        return json.loads(file.read_text(encoding="utf-8"))

    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(lambda op: of_op(op, Path(folder)), ops)
        return {key: value for part in parts for key, value in part.items()}


def without_field(text: str, field: str) -> str:
    """A config as text without one of its fields, ``name=value``."""
    return re.sub(rf"(?<=\(){re.escape(field)}(?:, |(?=\)))|, {re.escape(field)}(?=[,)])", "", text)


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each entry that is missing, new or different."""
    lines = [f"missing: {key}" for key in sorted(before.keys() - after.keys())]
    lines += [f"new: {key}" for key in sorted(after.keys() - before.keys())]
    both = sorted(before.keys() & after.keys())
    return lines + [f"different: {key}: {before[key]} -> {after[key]}" for key in both if before[key] != after[key]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare", "op"], help="op is what the processes of the others do")
    parser.add_argument("file")
    parser.add_argument("--only", action="append", metavar="OP", help="an op; repeatable")
    parser.add_argument("--show", metavar="KEY", help="print the texts of the entries whose keys have this in them")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the texts behind all entries")
    parser.add_argument("--new-field", metavar="NAME=VALUE", help="a field that configs have now, to be left out")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, each for an op")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.what == "op":
        write_op(args.file, args.into, args.dump)
        return 0
    ops = args.only or list(framework().OPS)
    if args.show and (of_one := args.show.partition("/")[0]) in ops:
        ops = [of_one]
    with tempfile.TemporaryDirectory() as folder:
        texts: Path = args.dump or Path(folder)
        try:
            found = all_entries(ops, args.jobs, texts if args.dump or args.show else None)
        except subprocess.CalledProcessError as error:
            print(f"the process of {error.cmd[4]} ended with an error", file=sys.stderr)
            return 2
        for key in sorted(found) if args.show else ():
            if args.show in key:
                print(f"{key}:", (texts / text_path(key)).read_text(encoding="utf-8"), sep="\n")
    file = Path(args.file)
    if args.what == "write":
        text = json.dumps(found, indent=0, sort_keys=True, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
        print(f"{len(found)} entries")
        return 0
    before = json.loads(file.read_text(encoding="utf-8"))
    if field := args.new_field:
        found = {without_field(key, field): without_field(value, field) for key, value in found.items()}
    lines = differences({key: value for key, value in before.items() if key.partition("/")[0] in ops}, found)
    print(*lines, f"{len(found)} entries, {len(lines)} not the same", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
