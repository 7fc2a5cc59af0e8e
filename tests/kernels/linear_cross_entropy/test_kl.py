"""``linear_kl_divergence``: results and gradients of both sides, blocks, masks, and what it does not take."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.linear_cross_entropy.conformance import check
from tests.kernels.linear_cross_entropy.oracle import kl_divergence
from tests.kernels.linear_cross_entropy.test_xla import config
from tilewright.kernels.linear_cross_entropy.cases import LinearKlDivergenceCase
from tilewright.modules import linear_kl_divergence

_BASE = LinearKlDivergenceCase("", tokens=37, d=24, teacher_d=30, vocab=301)
CASES: dict[str, LinearKlDivergenceCase] = {
    case.name: case
    for case in (
        dataclasses.replace(_BASE, name="float32"),
        dataclasses.replace(_BASE, name="bfloat16", dtype="bfloat16", token_weights=True),
        dataclasses.replace(_BASE, name="float16", dtype="float16", vocab_first=True),
        dataclasses.replace(_BASE, name="temperature", temperature=3.0, scale=3.0, reduction="sum"),
        dataclasses.replace(_BASE, name="soft_cap", logits_soft_cap=2.0, temperature=0.5, token_weights=True),
        dataclasses.replace(_BASE, name="none", reduction="none", token_weights=True, leading=(2,), vocab_first=True),
        dataclasses.replace(_BASE, name="one_token", tokens=1),
        dataclasses.replace(_BASE, name="no_tokens", tokens=0),
        dataclasses.replace(_BASE, name="one_class", vocab=1),
        dataclasses.replace(_BASE, name="large_logits", scale=30.0),
    )
}
NAMES = ("student_x", "student_weight", "teacher_x", "teacher_weight")
FORMS = {"blocks": config(8, 128), "one block": config(64, 128), "whole": config(None, 128), "chosen": None}


def all_of(args: Any, options: dict[str, Any], d_loss: Any, cfg: Any) -> dict[str, Any]:
    names = [*NAMES, *(["token_weights"] if "token_weights" in options else [])]

    def loss(*given: Any) -> Any:
        return linear_kl_divergence(*given[:4], **options | dict(zip(names[4:], given[4:], strict=True)), cfg=cfg)

    out, pull_back = jax.vjp(loss, *args, *(options[name] for name in names[4:]))
    return {"loss": out} | dict(zip(names, pull_back(jnp.asarray(d_loss, out.dtype)), strict=True))


def near(got: Any, want: Any, where: str = "") -> None:
    check(got, want | {"lse": np.ones(1)}, where, factor=6.0)


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, one_device: None):
    args, options = CASES[name].arguments()
    shape = args[0].shape[:-1] if options["reduction"] == "none" else ()
    d_loss = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    want = kl_divergence(*args, **options, d_loss=d_loss)
    for form, cfg in FORMS.items():
        got = jax.jit(lambda *xs, cfg=cfg: all_of(xs, options, d_loss, cfg))(*args)
        assert [got[each].dtype for each in NAMES] == [x.dtype for x in args]
        if name == "large_logits":  # of which float32 has errors of 1e-5, and probabilities with them
            for each, exact in want.items():
                if each in got:
                    np.testing.assert_allclose(got[each], exact, rtol=1e-3, atol=1e-3 * np.abs(exact).max())
        else:
            near(got, want, form)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_do_not_count_reach_nothing(form: str, one_device: None):
    args, options = CASES["float32"].arguments()
    mask = np.random.default_rng(0).random(37) < 0.6
    options |= {"mask": jnp.asarray(mask)}
    want = kl_divergence(*args, **options)
    poisoned = [jnp.where(mask[:, None], x, jnp.nan) if i % 2 == 0 else x for i, x in enumerate(args)]
    got = jax.jit(lambda *xs: all_of(xs, options, 1.0, FORMS[form]))(*poisoned)
    near(got, want)
    nothing = linear_kl_divergence(*args, mask=jnp.zeros(37, bool))
    assert nothing == 0


def test_equal_heads_have_no_divergence():
    args, _ = CASES["float32"].arguments()
    value, d_x = jax.value_and_grad(lambda x: linear_kl_divergence(x, args[1], args[0], args[1]))(args[0])
    assert abs(value) < 1e-6
    assert np.abs(d_x).max() < 1e-7


def test_a_constant_teacher_costs_no_gradient(one_device: None):
    args, _ = dataclasses.replace(_BASE, tokens=64).arguments()
    cfg = config(64, 1 << 20)
    loss = lambda *xs: linear_kl_divergence(*xs, cfg=cfg)

    def dots(wanted: tuple[int, ...]) -> int:
        return jax.jit(jax.grad(loss, wanted)).lower(*args).compile().as_text().count("dot(")  # type: ignore[no-any-return]

    assert dots((0, 1)) == dots((0, 1, 2, 3)) - 2
    assert dots((0,)) == dots((0, 1)) - 1


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("student and teacher must have the same tokens", {"teacher_x": jnp.ones((36, 30))}),
        ("vocabularies of 301 and 300", {"teacher_weight": jnp.ones((30, 300))}),
        ("temperature must be positive", {"temperature": 0.0}),
        ("mask must be booleans", {"mask": jnp.ones(37)}),
        (r"student_weight must be \[d, vocab\] with that d", {"student_weight": jnp.ones((30, 301))}),
    ],
)
def test_what_it_does_not_take(said: str, change: Any):
    given = dict(zip(NAMES, CASES["float32"].arguments()[0], strict=True))
    with pytest.raises(ValueError, match=f"linear_kl_divergence: .*{said}"):
        linear_kl_divergence(**given | change)
