"""What every backend of the linear cross-entropy must do, in the cases that it declares to support."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_cross_entropy.oracle import Found, cross_entropy
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.op.backend import Backend
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.types import Direction
from tilewright.ops.utils.device import current_device

_BASE = LinearCrossEntropyCase("", tokens=37, d=24, vocab=301)
_ALL = {"bias": True, "token_weights": True, "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 2.0}


def _case(name: str, **fields: Any) -> LinearCrossEntropyCase:
    return dataclasses.replace(_BASE, name=name, **fields)


CASES: dict[str, LinearCrossEntropyCase] = {
    case.name: case
    for case in (
        _case("float32"),
        _case("bfloat16", dtype="bfloat16", tokens=41),
        _case("float16", dtype="float16", ignored=0.3),
        _case("two_dtypes", dtype="bfloat16", weight_dtype="float32", vocab_first=True),
        _case("vocab_first", vocab_first=True, ignored=0.5),
        _case("bias", bias=True, dtype="bfloat16"),
        _case("smoothing", label_smoothing=0.1, ignored=0.2),
        _case("all_of_it_is_smooth", label_smoothing=1.0),
        _case("z_loss", z_loss=0.1, leading=(2,)),
        _case("soft_cap", logits_soft_cap=3.0, scale=4.0, bias=True),
        _case("token_weights", token_weights=True, ignored=0.3),
        _case("sum", reduction="sum", token_weights=True),
        _case("none", reduction="none", token_weights=True, ignored=0.3, leading=(2, 2), tokens=7),
        _case("lse", return_lse=True, ignored=0.3, z_loss=1e-2),
        _case("lse_of_each", return_lse=True, reduction="none", label_smoothing=0.2, dtype="bfloat16"),
        _case("all_options", ignored=0.3, **_ALL),
        _case("all_options_each", reduction="none", return_lse=True, vocab_first=True, ignored=0.4, **_ALL),
        _case("all_options_bfloat16", dtype="bfloat16", ignored=0.3, **_ALL),
        _case("one_token", tokens=1),
        _case("no_tokens", tokens=0),
        _case("one_class", vocab=1, bias=True),
        _case("two_classes", vocab=2, d=1),
        _case("all_ignored", ignored=1.1, token_weights=True),
        _case("huge_logits", scale=3e4, dtype="float32"),
        _case("tiny_logits", scale=1e-6),
        _case("epsilon", gradient_epsilon=5e-3, scale=3.0),
    )
}
QUICK = ("float32", "all_options", "all_options_each", "bfloat16")
TEST = [name for name in CASES if name not in ("two_classes", "bias", "two_dtypes", "all_of_it_is_smooth")]


def served(case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
    """The case as the Hopper kernels take it: in 16 bits, with rows of whole 16 bytes."""
    whole = lambda size: -(-size // 8) * 8
    return dataclasses.replace(
        case,
        dtype="float16" if case.dtype == "float16" and case.reduction == "none" else "bfloat16",
        weight_dtype=None,
        d=whole(case.d),
        vocab=max(case.vocab, 8) if case.vocab_first else whole(case.vocab),
    )


def call_of(case: LinearCrossEntropyCase, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    return case.arguments(seed)


def cotangents_of(x: Any, options: dict[str, Any], seed: int = 1) -> tuple[Any, Any]:
    """Those of the loss and of lse."""
    random, shape = np.random.default_rng(seed), x.shape[:-1]
    d_loss = random.standard_normal(shape if options["reduction"] == "none" else ()).astype(np.float32)
    return d_loss, random.standard_normal(shape).astype(np.float32) if options["return_lse"] else None


def expected(args: Any, options: dict[str, Any], d_loss: Any, d_lse: Any) -> Found:
    return cross_entropy(*args, **options, d_loss=d_loss, d_lse=d_lse)


def check(got: Found, want: Found, where: str = "", factor: float = 4.0) -> None:
    """Results and gradients; in 16 bits the gradient of the logits is rounded, too, so several roundings count."""
    for name, found in got.items():
        exact = np.asarray(want[name])
        if name == "token_weights":  # differences from a mean: absolute errors are those of the losses
            np.testing.assert_allclose(found, exact, atol=1e-5 * (1 + np.abs(want["lse"]).max(initial=0)), rtol=1e-4)
            continue
        rounded = np.asarray(jnp.asarray(exact, found.dtype), np.float64)
        said = violations(np.asarray(found), exact, rounded, factor=factor)
        assert not said, f"{name} {where}: {said}"


def through(kernel: LinearCrossEntropy, args: Any, options: dict[str, Any], d_loss: Any, d_lse: Any, cfg: Any) -> Found:
    """Results and gradients of a call of the kernel."""
    names = ["x", "weight", *(name for name in ("bias", "token_weights") if name in options)]
    arrays = [args[0], args[1], *(options[name] for name in names[2:])]

    def loss(*given: Any) -> Any:
        named = dict(zip(names, given, strict=True))
        x, weight = named.pop("x"), named.pop("weight")
        return kernel(x, weight, args[2], **options | named, cfg=cfg)

    out, pull_back = jax.vjp(loss, *arrays)
    gradients = pull_back((d_loss, d_lse) if options["return_lse"] else jnp.asarray(d_loss, out.dtype))
    found = {"loss": out[0], "lse": out[1]} if options["return_lse"] else {"loss": out}
    return found | dict(zip(names, gradients, strict=True))


def directly(
    backend: Backend[Any, Any, Any, Any],
    args: Any,
    options: dict[str, Any],
    d_loss: Any,
    d_lse: Any,
    cfg: Any,
) -> Found:
    """The same of a backend that this machine cannot choose, by both its methods."""
    kernel = LinearCrossEntropy()
    inputs = kernel.prepare(*args, **options)
    results = backend.forward(inputs, cfg.forward.params)
    out = kernel.outputs(inputs, results)
    d_out = (jnp.asarray(d_loss, jnp.float32), d_lse) if options["return_lse"] else (jnp.asarray(d_loss, jnp.float32),)
    gradients = backend.backward(inputs, results, kernel.cotangents(inputs, results, d_out), cfg.backward.params)
    found = {"loss": out[0], "lse": out[1]} if options["return_lse"] else {"loss": out}
    return found | {name: gradient for name, gradient in gradients.items() if gradient is not None}


class LossConformance:
    """A backend gives what the definition gives in float64, in every case that it declares to support."""

    backend: ClassVar[Backend[Any, Any, Any, Any]]

    def configs(self, inputs: LossInputs) -> list[Any]:
        """Configs of both directions to run each case with."""
        raise NotImplementedError

    def reasons(self, inputs: LossInputs, direction: Direction) -> list[str]:
        return self.backend.not_supported_reasons(inputs.structs, current_device(), direction)

    def run(self, args: Any, options: dict[str, Any], d_loss: Any, d_lse: Any, cfg: Any) -> Found:
        """Results and gradients of a call."""
        return jax.jit(lambda *arrays: through(LinearCrossEntropy(), arrays, options, d_loss, d_lse, cfg))(*args)

    @pytest.mark.parametrize("name", CASES)
    def test_results_and_gradients(self, name: str, one_device: None):
        args, options = call_of(CASES[name])
        inputs = LinearCrossEntropy().prepare(*args, **options)
        if declined := self.reasons(inputs, "forward") + self.reasons(inputs, "backward"):
            pytest.skip("; ".join(declined))
        cotangents = cotangents_of(args[0], options)
        want = expected(args, options, *cotangents)
        for cfg in self.configs(inputs.structs):
            got = self.run(args, options, *cotangents, cfg)
            assert got["x"].dtype == args[0].dtype
            assert got["weight"].dtype == args[1].dtype
            assert got["loss"].dtype == jnp.float32
            # Near the maximum of huge logits a float32 product has errors of one unit and more.
            check(got, want, str(cfg), factor=4.0) if name != "huge_logits" else huge(got, want)


def huge(got: Found, want: Found) -> None:
    """A maximum decides everything: results are finite, and the loss is that of the maximum."""
    assert all(np.all(np.isfinite(x)) for x in got.values())
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    for name in ("x", "weight"):
        np.testing.assert_allclose(got[name], want[name], rtol=0.05, atol=0.05 * np.abs(want[name]).max())
