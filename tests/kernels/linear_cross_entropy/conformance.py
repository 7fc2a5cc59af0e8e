"""Conformance of the backends of the linear cross-entropy: cases, and the definition in float64."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.conformance import check as checked
from tests.kernels.linear_cross_entropy.oracle import Found, cross_entropy
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase
from tilewright.kernels.linear_cross_entropy.inputs import LossInputs
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import PerDirection
from tilewright.ops.types import Device, Direction
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


def served(case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
    """The case as the Hopper kernels take it: in 16 bits, rows of x of whole 16 bytes, and a padded matrix or not."""
    whole = lambda size: -(-size // 8) * 8
    return dataclasses.replace(
        case,
        dtype="float16" if case.dtype == "float16" and case.reduction == "none" else "bfloat16",
        weight_dtype=None,
        d=whole(case.d),
        vocab=whole(case.vocab) if case.reduction == "none" else case.vocab,
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
    given = dict(got)
    if (of_weights := given.pop("token_weights", None)) is not None:
        # Differences from a mean: absolute errors are those of the losses.
        error = 1e-5 * (1 + np.abs(want["lse"]).max(initial=0))
        np.testing.assert_allclose(of_weights, want["token_weights"], atol=error, rtol=1e-4)
    checked(given, {name: np.asarray(want[name]) for name in given}, factor=factor, where=where)


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


@pytest.mark.usefixtures("one_device")
class LossConformance:
    """A backend gives what the definition gives in float64, in every case that it declares to support.

    Not a `Conformance`: of a case every form of the gradients is run, by whole calls where the machine can choose it.
    """

    backend: ClassVar[Backend[Any, Any, Any, Any]]
    machine: ClassVar[Callable[[], AbstractContextManager[Any]]] = contextlib.nullcontext
    device: ClassVar[Device | None] = None
    """The device that the backend is asked about, and run by its methods as if it were there."""
    forms: ClassVar[dict[str, PerDirection]]
    """The configs by name, of those that have names."""
    names: ClassVar[Sequence[str]] = tuple(CASES)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", self.names)

    def configs(self, inputs: LossInputs) -> list[Any]:
        """Configs of both directions to run each case with."""
        return list(self.forms.values())

    def adapted(self, case: LinearCrossEntropyCase) -> LinearCrossEntropyCase:
        return case

    def call(self, name: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
        """Arguments of a case with other fields, as the backend serves it."""
        return call_of(self.adapted(dataclasses.replace(CASES[name], **fields)))

    def reasons(self, inputs: LossInputs, direction: Direction) -> list[str]:
        return self.backend.not_supported_reasons(inputs.structs, self.device or current_device(), direction)

    def run(self, args: Any, options: dict[str, Any], d_loss: Any, d_lse: Any, cfg: Any) -> Found:
        """Results and gradients of a call."""
        if self.device is None:
            call = lambda *arrays: through(LinearCrossEntropy(), arrays, options, d_loss, d_lse, cfg)
        else:
            call = lambda *arrays: directly(self.backend, arrays, options, d_loss, d_lse, cfg)
        with type(self).machine():
            return jax.block_until_ready(jax.jit(call)(*args))

    def test_results_and_gradients(self, name: str):
        args, options = self.call(name)
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
            check(got, want, str(cfg)) if name != "huge_logits" else huge(got, want)


class KernelLossConformance(LossConformance):
    """What kernels in tiles of tokens and classes could get wrong, by forms that are named."""

    ruled_out: ClassVar[tuple[str, ...]]
    """Two forms for classes without a logit."""
    edges: ClassVar[tuple[str, ...]]
    """Forms for labels of each class."""
    edge_case: ClassVar[str] = "vocab_first"

    def test_classes_that_a_bias_rules_out(self):
        """Whole tiles of classes have no logit but -inf, the first and the last among them."""
        args, options = self.call("bias", tokens=20, dtype="float32")
        classes = len(options["bias"])
        ruled_out = np.r_[:130, 200:202, 256:classes]
        labels = jnp.asarray(np.random.default_rng(0).integers(130, 200, 20), jnp.int32)
        bias = jnp.asarray(options["bias"]).at[ruled_out].set(-jnp.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            # As with the least logits that float64 has nothing of.
            want = expected((*args[:2], labels), options | {"bias": bias.at[ruled_out].set(-1e30)}, 1.0, None)
        for form in self.ruled_out:
            got = self.run((*args[:2], labels), options | {"bias": bias}, np.float32(1), None, self.forms[form])
            check(got, want, form)
            assert not np.any(got["bias"][ruled_out])

    def test_labels_at_the_edges_of_tiles(self):
        """Every class once, of a vocabulary whose last tile is not full; and labels of no class."""
        args, options = self.call(self.edge_case, tokens=301, ignored=0.0)
        labels, each = jnp.arange(301, dtype=jnp.int32), options | {"reduction": "none"}
        given, options = (*args[:2], labels), options | {"reduction": "sum"}
        for form in self.edges:
            got = self.run(given, options, np.float32(1), None, self.forms[form])
            check(got, expected(given, options, 1.0, None), form)
        wrong, d_loss = labels.at[:4].set(jnp.asarray([301, 302, 383, 2**31 - 1])), np.zeros(301, np.float32)
        got = self.run((*args[:2], wrong), each, d_loss, None, self.forms["recomputed"])
        assert np.all(np.isnan(got["loss"][:4]))
        np.testing.assert_allclose(got["loss"][4:], expected(given, each, d_loss, None)["loss"][4:], rtol=1e-4)

    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("vocab_first", [False, True])
    def test_statistics_of_a_part_of_the_vocabulary(self, vocab_first: bool, smoothing: float):
        """Of labels of other parts, too: their logit is 0, which no program writes; -1 is that of an ignored token."""
        args, _ = self.call("smoothing", vocab_first=vocab_first, ignored=0.0)
        labels = jnp.asarray(args[2]).at[:4].set(jnp.asarray([400, -100, args[1].shape[not vocab_first], -1]))
        inputs = LinearCrossEntropy().prepare(
            *args[:2], labels, axis_name="vocab", vocab_first=vocab_first, label_smoothing=smoothing
        )
        params = self.forms["recomputed"].forward.params
        with type(self).machine():
            got = jax.block_until_ready(jax.jit(lambda inputs: self.backend.forward(inputs, params))(inputs))
        matrix = np.asarray(args[1], np.float64)
        logits = np.asarray(args[0], np.float64) @ (matrix.T if vocab_first else matrix)
        lse, label_logit, logit_sum = got.statistics
        valid = ~np.isin(np.arange(len(labels)), [1, 3])
        np.testing.assert_array_equal(label_logit[:4], 0)
        own = logits[np.arange(4, len(labels)), np.asarray(labels)[4:]]
        np.testing.assert_allclose(label_logit[4:], own, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse[valid], np.log(np.exp(logits).sum(-1))[valid], rtol=1e-5)
        assert lse[3] == 0
        if smoothing:
            np.testing.assert_allclose(logit_sum[valid], logits.sum(-1)[valid], rtol=1e-4, atol=1e-3)


def huge(got: Found, want: Found) -> None:
    """A maximum decides everything: results are finite, and the loss is that of the maximum."""
    assert all(np.all(np.isfinite(x)) for x in got.values())
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    for name in ("x", "weight"):
        np.testing.assert_allclose(got[name], want[name], rtol=0.05, atol=0.05 * np.abs(want[name]).max())
