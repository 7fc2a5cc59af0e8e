"""Conformance of kernels for GPUs: more tokens, errors by their norms, and what is not finite."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from tests.kernels.conformance import ContainedConformance, Found, Poisoned
from tests.kernels.linear_attention.conformance import LinearAttentionConformance, exact, inputs_of
from tilewright.kernels.linear_attention.cases import LinearAttentionCase
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs

SMALL = LinearAttentionCase("", length=70, heads=1, key_dim=16, value_dim=16)

CASES: dict[str, LinearAttentionCase] = {
    name: dataclasses.replace(SMALL, name=name, **fields)
    for name, fields in {
        "gated delta": {"batch": 2, "heads": 2, "value_heads": 4, "key_dim": 20, "value_dim": 24, "state": True},
        "gated delta bfloat16": {"value_heads": 2, "dtype": "bfloat16", "qk_l2norm": True, "state": True},
        "gated delta packed": {"length": 140, "value_heads": 2, "sequences": "cum_seqlens", "state": True},
        "gated delta lengths": {"batch": 3, "sequences": "seq_lengths", "state": True},
        "delta": {"gate": "none", "key_dim": 36},
        "delta float16": {"gate": "none", "dtype": "float16", "qk_l2norm": True, "length": 64},
        "delta with a decay of heads": {"gate": "head", "value_heads": 3, "qk_l2norm": True},
        "retention": {"gate": "head", "update": "add", "value_heads": 2, "state": True},
        "retention lengths": {"gate": "head", "update": "add", "batch": 2, "sequences": "seq_lengths"},
        "ssd bfloat16": {"update": "add", "value_heads": 3, "value_dim": 40, "dtype": "bfloat16", "scale": 1.0},
        "ssd packed": {"update": "add", "length": 130, "sequences": "cum_seqlens", "state": True},
        "sums": {"gate": "none", "update": "add", "batch": 2, "length": 129},
        "sums float16": {"gate": "none", "update": "add", "dtype": "float16", "length": 15, "state": True},
        "one token": {"length": 1, "state": True},
        "kimi delta": {
            "gate": "channel", "batch": 2, "heads": 2, "value_heads": 4, "key_dim": 20, "value_dim": 24, "state": True,
        },
        "kimi delta bfloat16": {"gate": "channel", "dtype": "bfloat16", "qk_l2norm": True, "state": True},
        "kimi delta float16": {"gate": "channel", "dtype": "float16", "qk_l2norm": True, "length": 40},
        "kimi delta packed": {"gate": "channel", "length": 140, "sequences": "cum_seqlens", "state": True},
        "kimi delta lengths": {"gate": "channel", "batch": 2, "sequences": "seq_lengths", "qk_l2norm": True},
        "gated": {"gate": "channel", "update": "add", "batch": 2, "value_heads": 2, "length": 129, "key_dim": 36},
        "gated bfloat16": {"gate": "channel", "update": "add", "dtype": "bfloat16", "scale": 1.0, "state": True},
        "gated packed": {"gate": "channel", "update": "add", "length": 130, "sequences": "cum_seqlens", "state": True},
        "removal": {"gate": "channel", "update": "removal", "heads": 2, "value_heads": 4, "key_dim": 20, "state": True},
        "removal bfloat16": {"gate": "channel", "update": "removal", "dtype": "bfloat16", "state": True, "scale": 1.0},
        "removal float16": {"gate": "channel", "update": "removal", "dtype": "float16", "length": 40},
        "removal packed": {
            "gate": "channel", "update": "removal", "length": 140, "sequences": "cum_seqlens", "qk_l2norm": True,
            "state": True,
        },
        "removal with a decay of tokens": {"update": "removal"},
        "bonus": {"gate": "channel", "update": "bonus", "heads": 2, "value_heads": 4, "state": True},
        "bonus bfloat16": {"gate": "channel", "update": "bonus", "dtype": "bfloat16", "key_dim": 20, "qk_l2norm": True},
        "bonus packed": {
            "gate": "channel", "update": "bonus", "length": 140, "sequences": "cum_seqlens", "state": True,
        },
        "bonus with a decay of tokens": {"update": "bonus"},
        "segments": {"batch": 2, "sequences": "segment_ids"},
    }.items()
}  # fmt: skip

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 8e-3}
"""Root of the mean square of errors, in that of the exact values. Rounding the exact results to bfloat16 is 1.6e-3."""


def relative_error(got: Any, want: Any) -> float:
    """The norm of the error, divided by that of the exact values."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


class GpuConformance(LinearAttentionConformance, ContainedConformance[LinearAttentionCase, LinearAttentionInputs]):
    """A backend for GPUs; ``params`` gives those of the forward and of the backward pass."""

    cases = tuple(CASES.values())
    repeated = CASES["gated delta bfloat16"]
    poisons = tuple(
        f"{where}, decays of {decays}"
        for decays in ("tokens", "channels", "channels and a removal")
        for where in ("rows outside of sequences", "rows behind their lengths", "another sequence")
    )
    tolerances: ClassVar[dict[str, float]] = TOLERANCES

    def check(
        self,
        got: Found,
        inputs: LinearAttentionInputs,
        cotangents: Any,
        factor: float = 2.0,
        where: object = "",
    ) -> None:
        want = exact(inputs, cotangents)
        assert got.keys() <= want.keys()
        errors = {name: relative_error(x, want[name]) for name, x in got.items()}
        most = self.tolerances[inputs.value.dtype.name] * factor / 2.0
        assert all(error <= most for error in errors.values()), (where, errors)

    def poisoned(self, poison: str) -> Poisoned:
        poison, decays = poison.split(", decays of ")
        small = dataclasses.replace(
            SMALL,
            gate="token" if decays == "tokens" else "channel",
            update="removal" if decays == "channels and a removal" else "delta",
        )
        if poison == "rows behind their lengths":
            case = dataclasses.replace(self.adapted(small), batch=2, sequences="seq_lengths", state=True)
            clean = inputs_of(case).replace(seq_lengths=jnp.asarray([33, 0], jnp.int32))
            rows = np.arange(clean.length) >= np.array([[33], [0]])
        else:
            case = dataclasses.replace(self.adapted(small), length=90, sequences="cum_seqlens", state=True)
            clean = inputs_of(case).replace(cum_seqlens=jnp.asarray([7, 20, 20, 70, 85], jnp.int32))
            position = np.arange(clean.length)[None]
            rows = (position < 7) | (position >= 85)
            if poison == "another sequence":
                rows = (position >= 20) & (position < 70)
        cotangents = self.cotangents(clean)

        def spoiled(x: Any) -> Any:
            return jnp.where(np.expand_dims(rows, tuple(range(2, x.ndim))), jnp.nan, x)

        of_update = ("beta",) if clean.removal is None else ("removal_read", "removal_write")
        by_token = ("query", "key", "value", "log_decay", *of_update)
        dirty = clean.replace(**{name: spoiled(getattr(clean, name)) for name in by_token})
        names = ("out", *(f"d_{name}" for name in by_token))
        if poison == "another sequence":
            reached = dict.fromkeys(names, rows) | {"state": 2, "d_initial_state": 2}
            return _OnlyKept((clean, cotangents), (dirty, cotangents), reached)
        spoiled_too = cotangents._replace(out=spoiled(cotangents.out))
        return Poisoned((clean, cotangents), (dirty, spoiled_too), zero=dict.fromkeys(names, rows))


@dataclasses.dataclass(frozen=True)
class _OnlyKept(Poisoned):
    """Of what is not finite nothing is said: a token does not depend on later ones, so some of it is a number."""

    def check(self, run: Any) -> None:
        want, got = run(*self.clean), run(*self.poisoned)
        for name, x in want.items():
            kept = np.ones(x.shape, bool)
            kept[self.reached[name]] = False
            np.testing.assert_array_equal(np.asarray(got[name])[kept], np.asarray(x)[kept], err_msg=name)
