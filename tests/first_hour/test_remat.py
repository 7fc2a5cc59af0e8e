"""Rematerialisation: JAX's policies keep of a call what they keep of the matmul it stands for, and each byte once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # what jax.ad_checkpoint.print_saved_residuals prints
from jax.extend.core import jaxpr_as_fun

import tilewright
from tests.support.draws import draw
from tilewright.modules import (
    flash_attention,
    gated_grouped_matmul,
    glu,
    grouped_matmul,
    layer_norm,
    linear_attention,
    linear_cross_entropy,
    matmul,
    moe_mlp,
    permute,
    rms_norm,
    rope,
    top_k_router,
    unpermute,
)
from tilewright.ops.lowering import call as lowering_call

POLICIES = jax.checkpoint_policies
X = draw(2, 32, 4, 16)
W = draw(16, 16, seed=1) / 4
NAMES = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_residuals")


def block(x, w):
    y = x @ w
    return jnp.sin(flash_attention(y, y, y, causal=True, platform="xla") @ w)


def loss(block, x, w):
    return block(block(x, w), w).sum()


def forward_calls(block):
    """How often the program of a training step runs the forward pass, and its floating-point operations."""
    step = jax.value_and_grad(lambda x, w: loss(block, x, w), argnums=(0, 1))
    flops = jax.jit(step).lower(X, W).compile().cost_analysis()["flops"]
    return runs(jax.make_jaxpr(step)(X, W), "flash_attention"), flops


def runs(jaxpr, op):
    """How often a program runs the forward pass of an op, in words of its jaxpr."""
    text = str(jaxpr)
    return text.count(f"call={op}.forward") + text.count(f"call={op}.run")


def test_a_policy_by_name_saves_one_forward_pass_a_layer():
    (without, least), (remat, most), (named, between) = (
        forward_calls(each) for each in (block, jax.checkpoint(block), jax.checkpoint(block, policy=NAMES))
    )
    attention = 2 * 2 * 2 * 32 * 32 * 4 * 16  # two matrix products, of two layers
    assert named == without < remat
    assert most - between > 0.8 * 2 * attention / 2
    assert between < most
    assert least <= between


@pytest.mark.parametrize("checkpoint", [jax.checkpoint, lambda f: jax.checkpoint(f, policy=NAMES)])
def test_the_gradients_are_those_without(checkpoint):
    wanted = jax.grad(lambda w: loss(block, X, w))(W)
    # Sums near 100 that cancel: how XLA fuses what is computed again depends on the machine's vectors.
    exact = {"rtol": 1e-5, "atol": 1e-4}
    np.testing.assert_allclose(jax.grad(lambda w: loss(checkpoint(block), X, w))(W), wanted, **exact)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda w: loss(checkpoint(block), X, w)))(W), wanted, **exact)


def named_bytes(function, *arguments):
    """The bytes that a checkpoint under the policy keeps, arguments not counted."""
    kept = saved_residuals(jax.checkpoint(function, policy=NAMES), *arguments)
    return sum(aval.size * aval.dtype.itemsize for aval, source in kept if "argument" not in source)


ONCE = X.nbytes + 4 * 2 * 4 * 32  # the output and the log-sum-exp
CALLS = {
    "batched": (lambda x: jnp.sin(flash_attention(x, x, x)), X, ONCE),
    "unbatched": (lambda x: jnp.sin(flash_attention(x, x, x)), X[0], ONCE // 2),
    "vmap": (jax.vmap(lambda x: jnp.sin(flash_attention(x, x, x))), X, ONCE),
    "with lse": (lambda x: jnp.sin(flash_attention(x, x, x, return_lse=True)[0]), X, ONCE),
    "jit": (jax.jit(lambda x: jnp.sin(flash_attention(x, x, x))), X, ONCE),
}


@pytest.mark.parametrize("name", CALLS)
def test_output_and_log_sum_exp_are_kept_once(name):
    function, x, wanted = CALLS[name]
    assert named_bytes(function, x) == wanted


def test_without_a_checkpoint_too():
    _, pull = jax.vjp(lambda x: jnp.sin(flash_attention(x, x, x)), X)
    kept = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(pull)}
    # The array itself as query, key and value, the output, its log-sum-exp, and what sine keeps.
    assert sum(kept.values()) <= 3 * X.nbytes + ONCE + X.nbytes


def test_each_name_alone_saves_what_it_names():
    def kept(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        saved = saved_residuals(jax.checkpoint(lambda x: jnp.sin(flash_attention(x, x, x)), policy=policy), X)
        return sum(aval.size * aval.dtype.itemsize for aval, source in saved if "argument" not in source)

    assert kept("flash_attention_out") == X.nbytes
    assert kept("flash_attention_residuals") == ONCE - X.nbytes
    assert kept("something_else") == 0


def test_a_scan_over_layers_keeps_them_for_every_layer():
    layers = jnp.stack([W] * 3)

    def run(checkpoint):
        return lambda layers: jax.lax.scan(lambda x, w: (checkpoint(block)(x, w), None), X, layers)[0].sum()

    wanted = jax.grad(run(lambda f: f))(layers)
    got = jax.jit(jax.grad(run(lambda f: jax.checkpoint(f, policy=NAMES))))
    np.testing.assert_allclose(got(layers), wanted, rtol=1e-4, atol=1e-5)
    assert runs(got.trace(layers).jaxpr, "flash_attention") == 1
    assert jaxpr_as_fun(got.trace(layers).jaxpr)(layers)[0].shape == layers.shape


TOKENS, WIDTH, HIDDEN = draw(64, 32), draw(32, 32, seed=2) / 6, draw(32, 96, seed=3) / 6
SIZES, EXPERTS = jnp.asarray([40, 24], jnp.int32), draw(2, 32, 96, seed=4) / 6
CHOICES = jnp.arange(64)[:, None]
LABELS = jnp.arange(64) % 96
OF_TOKENS, OF_HIDDEN, OF_ROUTING = TOKENS.nbytes, 64 * 96 * 4, (64 + 64 + 2) * 4
# For each op a call, and the bytes of the results of its matmuls: without batch dimensions, and of all.
OPS = {
    "matmul": (lambda x: matmul(x, HIDDEN), OF_HIDDEN, OF_HIDDEN),
    "glu": (lambda x: glu(x, HIDDEN, 2 * HIDDEN), 2 * OF_HIDDEN, 2 * OF_HIDDEN),
    "grouped_matmul": (lambda x: grouped_matmul(x, EXPERTS, SIZES), OF_HIDDEN, OF_HIDDEN),
    "gated_grouped_matmul": (
        lambda x: gated_grouped_matmul(x, EXPERTS, 2 * EXPERTS, SIZES), 2 * OF_HIDDEN, 2 * OF_HIDDEN,
    ),
    "moe_mlp": (
        lambda x: moe_mlp(x, TOKENS[:, :1], CHOICES % 2, EXPERTS, 2 * EXPERTS, EXPERTS.swapaxes(1, 2)),
        2 * OF_HIDDEN + OF_TOKENS + OF_ROUTING, 2 * OF_HIDDEN + OF_TOKENS + OF_ROUTING,
    ),
    "flash_attention": (lambda x: attention(x), 0, OF_TOKENS + 2 * 64 * 4),
    "linear_attention": (lambda x: linear(x), 0, 0),
    "rms_norm": (lambda x: rms_norm(x, WIDTH[0]), 0, 0),
    "layer_norm": (lambda x: layer_norm(x, WIDTH[0], WIDTH[1]), 0, 0),
    "rope": (lambda x: rope(x.reshape(64, 2, 16), np.arange(64)), 0, 0),
    "top_k_router": (lambda x: top_k_router(x, 4)[0], 0, 0),
    "permute": (lambda x: permute(x, CHOICES, 4)[0], 0, 0),
    "unpermute": (lambda x: unpermute(x, CHOICES[:, 0], TOKENS[:32, :2]), 0, 0),
}  # fmt: skip


def attention(x):
    heads = x.reshape(1, 64, 2, 16)
    return flash_attention(heads, heads, heads, causal=True)


def linear(x):
    heads = x.reshape(1, 64, 2, 16)
    return linear_attention(heads, heads, heads, scale=0.1).reshape(64, 32)


def kept_bytes(function, *arguments):
    """The bytes that a checkpointed function keeps, beside its arguments and constants."""
    kept = saved_residuals(function, *arguments)
    return sum(aval.size * aval.dtype.itemsize for aval, source in kept if "output of" in source)


@pytest.mark.parametrize("op", OPS)
def test_jaxs_policies_keep_of_every_op_what_its_matmuls_return(op):
    function, of_dots, of_all_dots = OPS[op]

    def layer(x):
        return jnp.sin(function(x))

    wanted = jax.grad(lambda x: layer(x).sum())(TOKENS)
    plain = runs(jax.make_jaxpr(jax.grad(lambda x: layer(x).sum()))(TOKENS), op)
    for policy, kept in (
        (None, 0),
        (POLICIES.nothing_saveable, 0),
        (POLICIES.dots_with_no_batch_dims_saveable, of_dots),
        (POLICIES.dots_saveable, of_all_dots),
    ):
        checkpointed = jax.checkpoint(layer, policy=policy)
        assert kept_bytes(checkpointed, TOKENS) == kept
        gradient = jax.grad(lambda x, f=checkpointed: f(x).sum())
        np.testing.assert_allclose(gradient(TOKENS), wanted, rtol=1e-5, atol=1e-6)
        again = runs(jax.make_jaxpr(gradient)(TOKENS), op) - plain
        assert again == (0 if kept else 1), policy


def mlp(x, gate, up, down):
    return jnp.tanh(matmul(glu(x, gate, up), down))


def plain_mlp(x, gate, up, down):
    return jnp.tanh((jax.nn.silu(x @ gate) * (x @ up)) @ down)


@pytest.mark.parametrize("policy", [POLICIES.dots_with_no_batch_dims_saveable, POLICIES.nothing_saveable, None])
def test_a_scanned_mlp_has_the_matmuls_of_the_plain_one_and_no_more_memory(policy):
    layers = tuple(jnp.stack([each] * 4) for each in (HIDDEN, 2 * HIDDEN, HIDDEN.T))

    def step(layer):
        body = layer if policy is None else jax.checkpoint(layer, policy=policy)
        net = lambda x, layers: jax.lax.scan(lambda x, each: (body(x, *each), None), x, layers)[0].sum()
        return jax.jit(jax.grad(net, (0, 1))).lower(TOKENS, layers).compile()

    ours, plain = step(mlp), step(plain_mlp)
    assert ours.as_text().count(" dot(") == plain.as_text().count(" dot(")
    assert ours.memory_analysis().temp_size_in_bytes <= plain.memory_analysis().temp_size_in_bytes
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours(TOKENS, layers), plain(TOKENS, layers)
    )


def test_under_vmap_a_matmul_has_batch_dimensions_where_jaxs_has():
    def kept(axes, policy):
        layer = jax.checkpoint(jax.vmap(lambda x, w: jnp.sin(matmul(x, w)), in_axes=axes), policy=policy)
        x, w = (jnp.stack([each] * 3) if axis == 0 else each for each, axis in zip((TOKENS, HIDDEN), axes, strict=True))
        return kept_bytes(layer, x, w)

    assert kept((0, None), POLICIES.dots_with_no_batch_dims_saveable) == 3 * OF_HIDDEN
    assert kept((0, 0), POLICIES.dots_with_no_batch_dims_saveable) == 0
    assert kept((0, 0), POLICIES.dots_saveable) == 3 * OF_HIDDEN


def test_outputs_are_derived_from_pre_activations_under_vmap():
    gradient = lambda f: jax.grad(lambda x, g: f(x, g, 2 * g, g.T).sum(), (0, 1))
    checkpointed = jax.checkpoint(mlp, policy=POLICIES.dots_saveable)
    inside = jax.vmap(checkpointed, in_axes=(0, None, None, None))
    outside = jax.vmap(gradient(checkpointed), in_axes=(0, None))
    x = jnp.stack([TOKENS, 2 * TOKENS])
    wanted = jax.vmap(gradient(plain_mlp), in_axes=(0, None))(x, HIDDEN)
    for got in (outside(x, HIDDEN), (gradient(inside)(x, HIDDEN)[0], outside(x, HIDDEN)[1])):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def test_policies_that_offload_move_pre_activations_to_the_host():
    offload = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    named = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=["matmul_out"], names_which_can_be_offloaded=["glu_residuals"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    arguments = (TOKENS, HIDDEN, 2 * HIDDEN, HIDDEN.T)
    wanted = jax.grad(lambda *xs: plain_mlp(*xs).sum(), (0, 1, 2, 3))(*arguments)
    for policy, moved in ((offload, 3), (named, 2)):
        checkpointed = jax.checkpoint(mlp, policy=policy)
        spaces = [aval.memory_space for aval, source in saved_residuals(checkpointed, *arguments) if "output" in source]
        assert (len(spaces), sum(space == jax.memory.Space.Host for space in spaces)) == (3, moved)
        gradient = jax.grad(lambda *xs, f=checkpointed: f(*xs).sum(), (0, 1, 2, 3))
        assert runs(jax.make_jaxpr(gradient)(*arguments), "glu") == 1
        got = jax.jit(gradient)(*arguments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, wanted)


def test_a_loss_inside_a_checkpoint_runs_once_where_its_logits_would_be_kept():
    loss = lambda x: linear_cross_entropy(x, HIDDEN, LABELS)
    wanted = jax.grad(loss)(TOKENS)
    for policy, count in ((POLICIES.dots_with_no_batch_dims_saveable, 1), (POLICIES.nothing_saveable, 2)):
        gradient = jax.grad(jax.checkpoint(loss, policy=policy))
        assert runs(jax.make_jaxpr(gradient)(TOKENS), "linear_cross_entropy") == count
        np.testing.assert_allclose(gradient(TOKENS), wanted, rtol=1e-5, atol=1e-6)


def test_what_is_kept_is_said_with_the_line_of_the_caller(capsys):
    def block(x, gate, up, down):  # JAX knows the trace of a function from before, with its lines
        return jnp.tanh(matmul(glu(x, gate, up), down))

    checkpointed = jax.checkpoint(block, policy=POLICIES.dots_saveable)
    jax.ad_checkpoint.print_saved_residuals(checkpointed, TOKENS, HIDDEN, HIDDEN, HIDDEN.T)
    said = [line for line in capsys.readouterr().out.splitlines() if "output of" in line]
    assert [line.partition("output of ")[2].split()[0] for line in said] == ["glu_results"] * 2 + ["matmul_results"]
    assert all("test_remat.py" in line and line.endswith("block)") for line in said)


def test_second_derivatives_pass_through_what_is_kept():
    checkpointed = jax.checkpoint(mlp, policy=POLICIES.dots_saveable)

    def along(f):
        gradient = jax.grad(lambda x: f(x, HIDDEN, 2 * HIDDEN, HIDDEN.T).sum())
        return jax.jvp(gradient, (TOKENS,), (jnp.ones_like(TOKENS),))[1]

    np.testing.assert_allclose(along(checkpointed), along(plain_mlp), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("runs_twice", [True, False])
def test_an_output_that_a_loop_keeps_is_set_apart_from_its_kernel_where_xla_would_run_it_again(monkeypatch, runs_twice):
    monkeypatch.setattr(lowering_call, "_RUNS_KERNELS_TWICE", runs_twice)
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    step = jax.grad(lambda x: jnp.sin(flash_attention(x, x, x, causal=True).astype(jnp.float32)).sum())
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        text = jax.jit(step).lower(x).as_text()
    body = text[text.index("func.func private @tilewright.flash_attention.forward") :]
    body = body[: body.index("}\n")]
    barriers = re.findall(r"= stablehlo.optimization_barrier .* : (\S+)", body)
    # The output alone: log-sum-exps go into the array of all steps without a copy.
    assert barriers == (["tensor<1x256x4x64xbf16>"] if runs_twice else [])
