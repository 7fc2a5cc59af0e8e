"""Generates README.md's table of ops × backends × options from what the backends declare.

``python docs/capability_table.py`` prints it, ``--write`` puts it between the markers of README.md, ``--check`` fails
if the one there is another.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from tilewright.kernels import OPS, kernel
from tilewright.kernels.cuda import toolchain
from tilewright.kernels.flash_attention.cudnn import jax_calls
from tilewright.kernels.flash_attention.fa4 import cute
from tilewright.kernels.paged_attention.cases import ServingCase
from tilewright.kernels.paged_attention.ops.mla_decode_cases import MlaCase
from tilewright.kernels.paged_attention.ops.ragged_page_attention_cases import RaggedPageCase
from tilewright.kernels.portfolio import InferenceKernel, Portfolio
from tilewright.kernels.triton import requirements
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.types import Device

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- capabilities: begin, written by docs/capability_table.py -->", "<!-- capabilities: end -->"

# One device of each kind that a backend may be written for; the table never depends on the machine that makes it.
DEVICES = (
    Device("cpu", "cpu", cores=8, fingerprint="cpu"),
    Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, "gpu:NVIDIA A100-SXM4-80GB:8.0"),
    Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 132, "gpu:NVIDIA H100 80GB HBM3:9.0"),
    Device("tpu", "TPU v5e", None, 1, "tpu:TPU v5e"),
)

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 256, 4, 64


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Probe:
    """One option of an op, as the arguments of a call that uses it."""

    option: str
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv_heads: int = HEADS
    kv_length: int = LENGTH
    head_dim: int = HEAD_DIM
    value_dim: int = HEAD_DIM
    batch: int = BATCH
    dtype: Any = jnp.bfloat16  # of what models are run in: some backends have nothing else

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (
            _array(self.batch, LENGTH, HEADS, self.head_dim, dtype=self.dtype),
            _array(self.batch, self.kv_length, self.kv_heads, self.head_dim, dtype=self.dtype),
            _array(self.batch, self.kv_length, self.kv_heads, self.value_dim, dtype=self.dtype),
        )


_LENGTHS = _array(BATCH, dtype=jnp.int32)
_IDS = _array(BATCH, LENGTH, dtype=jnp.int32)
_BOUNDARIES = _array(4, dtype=jnp.int32)

FLASH_ATTENTION = (
    Probe("float32", dtype=jnp.float32),
    Probe("bfloat16"),
    Probe("float16", dtype=jnp.float16),
    Probe("GQA, MQA", kv_heads=1),
    Probe("head_dim 80", head_dim=80, value_dim=80),
    Probe("head_dim 256", head_dim=256, value_dim=256),
    Probe("head_dim 512", head_dim=512, value_dim=512),
    Probe("value head_dim of its own", value_dim=128),
    Probe("key length of its own", kv_length=384),
    Probe("`causal`", {"causal": True}),
    Probe('`causal_alignment="bottom_right"`', {"causal": True, "causal_alignment": "bottom_right"}, kv_length=384),
    Probe("`sliding_window`", {"causal": True, "sliding_window": 64}),
    Probe("`mask`, an array", {"mask": _array(BATCH, 1, LENGTH, LENGTH, dtype=jnp.bool_)}),
    Probe("`bias`", {"bias": _array(1, HEADS, LENGTH, LENGTH)}),
    Probe("`bias` of the query's dtype", {"bias": _array(1, HEADS, LENGTH, LENGTH, dtype=jnp.bfloat16)}),
    Probe("`logits_soft_cap`", {"logits_soft_cap": 30.0}),
    Probe("`softmax_aux` (sinks)", {"softmax_aux": _array(HEADS)}),
    Probe("segment ids", {"q_segment_ids": _IDS, "kv_segment_ids": _IDS}),
    Probe("sequence lengths", {"query_seq_lengths": _LENGTHS, "key_value_seq_lengths": _LENGTHS}),
    Probe("packed sequences", {"cum_seqlens_q": _BOUNDARIES, "cum_seqlens_k": _BOUNDARIES}, batch=1),
    Probe("`dropout_prob`", {"dropout_prob": 0.1, "dropout_seed": 0}),
    Probe("`return_lse`", {"return_lse": True}),
)


@dataclasses.dataclass(frozen=True)
class CaseProbe:
    """One option of a serving op, as fields of its case."""

    option: str
    case: type[ServingCase]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        standard = {"sequences": 2, "kv_length": 64, "kv_heads": 8, "dtype": "bfloat16", "return_lse": False}
        return self.case(name="", **standard | self.fields).arguments()

    @property
    def keywords(self) -> dict[str, Any]:
        return self._call[1]

    def arguments(self) -> tuple[Any, ...]:
        return self._call[0]


_CACHE: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "int8, a scale for each token": {"kv_dtype": "int8", "scale": "token"},
    "int8, a scale for each page": {"kv_dtype": "int8", "scale": "page"},
    "float8_e4m3fn": {"kv_dtype": "float8_e4m3fn", "scale": "head"},
    "float8_e5m2": {"kv_dtype": "float8_e5m2"},
    "pages of 1": {"page_size": 1},
    "pages of 256": {"page_size": 256},
    "`sliding_window`": {"sliding_window": 15},
    "`logits_soft_cap`": {"logits_soft_cap": 30.0},
    "`softmax_aux` (sinks)": {"sinks": 1},
    "`alibi_slopes`": {"alibi": True},
    "`return_lse`": {"return_lse": True},
}
_RAGGED: dict[str, dict[str, Any]] = {
    **_CACHE,
    "GQA, MQA": {"kv_heads": 1},
    "head_dim 80": {"head_dim": 80},
    "head_dim 256": {"head_dim": 256},
    "value head_dim of its own": {"value_dim": 128},
    "chunks of several tokens": {"q_lengths": (1, 40)},
    "`causal=False`": {"causal": False},
    "`new_key`, `new_value`": {"write": True},
}
_LATENT: dict[str, dict[str, Any]] = {
    name: {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "page_size": 64, **fields}
    for name, fields in {**_CACHE, "pages of 16": {"page_size": 16}, "several tokens": {"q_lengths": (4,)}}.items()
}

PROBES: dict[str, tuple[Any, ...]] = {
    "flash_attention": FLASH_ATTENTION,
    # The other serving ops are this one's problem with another argument list, on the same backends.
    "ragged_page_attention": tuple(CaseProbe(name, RaggedPageCase, fields) for name, fields in _RAGGED.items()),
    "mla_decode": tuple(CaseProbe(name, MlaCase, fields) for name, fields in _LATENT.items()),
}


def declared(op: Portfolio, probe: Any) -> dict[str, str]:
    """For every backend what of forward and backward it supports, and on which of the devices."""
    inv, _ = prepared(op, probe.arguments(), probe.keywords, concrete=False)
    found: dict[str, list[str]] = {}
    for stage in (inv,) if isinstance(op, InferenceKernel) else (inv, inv.backward()):
        able: dict[str, list[str]] = {}
        for device in DEVICES:
            for backend, reasons in op.reasons(dataclasses.replace(stage, device=device)).items():
                able.setdefault(backend, [])
                if not reasons:
                    able[backend].append(device.name)
        for backend, devices in able.items():
            found.setdefault(backend, []).append(" ".join(devices))
    return {backend: _cell(*stages) for backend, stages in found.items()}


def kinds_served(op: Portfolio, probes: tuple[Any, ...]) -> dict[str, list[str]]:
    """For every backend the kinds of device on which it can serve any of the probes."""
    found: dict[str, list[str]] = {}
    for probe in probes:
        inv, _ = prepared(op, probe.arguments(), probe.keywords, concrete=False)
        for device in DEVICES:
            for backend, reasons in op.reasons(dataclasses.replace(inv, device=device)).items():
                kinds = found.setdefault(backend, [])
                if not reasons and device.kind.upper() not in kinds:
                    kinds.append(device.kind.upper())
    return found


def _cell(forward: str, *backward: str) -> str:
    if forward and all(backward):
        return "✓"
    return "forward only" if forward else "–"


def op_table(name: str, op: Portfolio, probes: tuple[Any, ...]) -> list[str]:
    """The lines of one op's table."""
    rows = [(probe.option, declared(op, probe)) for probe in probes]
    backends = list(dict.fromkeys(backend for _, row in rows for backend in row))
    lines = [f"| `{name}` | {' | '.join(backends)} |", "| --- |" + " :-: |" * len(backends)]
    kinds = kinds_served(op, probes)
    lines.append(f"| runs on | {' | '.join(', '.join(kinds.get(b, ())) or '–' for b in backends)} |")
    return lines + [f"| {option} | {' | '.join(row.get(b, '–') for b in backends)} |" for option, row in rows]


def capability_table() -> str:
    """The tables of all ops, whatever compilers and libraries this machine has."""
    newest = mock.patch.object(jax_calls, "cudnn_version", return_value=99999)
    installed = mock.patch.object(cute, "package_reasons", side_effect=list)
    triton = mock.patch.object(requirements, "_package_reasons", return_value=[])
    with mock.patch.object(toolchain, "missing", return_value=[]), newest, installed, triton:
        return "\n\n".join("\n".join(op_table(name, kernel(name), PROBES[name])) for name in OPS if name in PROBES)


def with_table(readme: str, table: str) -> str:
    """A README with the table between its markers.

    Raises:
      ValueError: it has no markers.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README must hold {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The capability table of README.md.")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    table = capability_table()
    if not arguments.write and not arguments.check:
        print(table)
        return
    readme = README.read_text()
    wanted = with_table(readme, table)
    if arguments.write:
        README.write_text(wanted)
    elif wanted != readme:
        sys.exit("README.md's capability table is out of date: run make table")


if __name__ == "__main__":
    main()
