"""Vocabulary losses on 8 devices: a vocabulary that is split, tokens that are split, by types and by XLA."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.linear_cross_entropy.conformance import check
from tests.kernels.linear_cross_entropy.oracle import cross_entropy, kl_divergence
from tilewright.kernels.linear_cross_entropy.cases import LinearCrossEntropyCase, LinearKlDivergenceCase
from tilewright.kernels.linear_cross_entropy.op import LinearCrossEntropy
from tilewright.modules import linear_cross_entropy, linear_kl_divergence, linear_log_probs

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "all": {
        "bias": True, "token_weights": True, "label_smoothing": 0.1, "z_loss": 1e-2, "logits_soft_cap": 2.0,
        "ignored": 0.3,
    },
    "none": {"reduction": "none", "ignored": 0.3},
    "vocab_first": {"vocab_first": True, "reduction": "sum"},
    "bfloat16": {"dtype": "bfloat16"},
}  # fmt: skip


def mesh_of(kind: AxisType, **sizes: int) -> Any:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def case_of(name: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    return LinearCrossEntropyCase("", **{"tokens": 16, "d": 12, "vocab": 96} | OPTIONS[name] | fields).arguments()


def gradients_of(function: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients, by JAX from outside of ``shard_map``."""
    names = ["x", "weight", *(name for name in ("bias", "token_weights") if name in options)]
    arrays = [*args[:2], *(options[name] for name in names[2:])]
    out, pull_back = jax.vjp(function, *arrays)
    return {"loss": out} | dict(zip(names, pull_back(jnp.ones_like(out)), strict=True))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_split_vocabulary(name: str, check_vma: bool):
    args, options = case_of(name)
    mesh = mesh_of(AxisType.Auto, vocab=8)
    of_weight = P("vocab", None) if options["vocab_first"] else P(None, "vocab")
    specs = {"x": P(), "weight": of_weight, "bias": P("vocab"), "token_weights": P()}
    static = {key: value for key, value in options.items() if key not in specs}

    def loss(x: Any, weight: Any, *rest: Any) -> Any:
        named = dict(zip((key for key in ("bias", "token_weights") if key in options), rest, strict=True))
        return linear_cross_entropy(x, weight, args[2], axis_name="vocab", **static, **named)

    given = [specs[key] for key in ("x", "weight", *(key for key in ("bias", "token_weights") if key in options))]
    split = jax.shard_map(loss, mesh=mesh, in_specs=tuple(given), out_specs=P(), check_vma=check_vma)
    got = jax.jit(lambda *xs: gradients_of(split, xs, options))(*args)
    ones = np.ones(16) if options["reduction"] == "none" else 1.0
    check(got, cross_entropy(*args, **options, d_loss=ones), factor=6.0)


def test_what_a_split_vocabulary_communicates():
    args, _ = case_of("mean", tokens=64)
    mesh = mesh_of(AxisType.Auto, vocab=8)
    loss = lambda x, w: linear_cross_entropy(x, w, args[2], axis_name="vocab")
    split = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P(None, "vocab")), out_specs=P())
    program = jax.jit(jax.value_and_grad(split, (0, 1))).lower(*args[:2]).compile().as_text()
    assert collectives(program) == {"all-gather": [(8, 2, 64)], "all-reduce": [(64, 12)]}


def collectives(program: str) -> dict[str, list[tuple[int, ...]]]:
    """The shapes that each kind of collective makes in a compiled program, without scalars."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for line in program.splitlines():
        match = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", line)
        for shape in re.findall(r"\w+\[([\d,]+)\]", match[1]) if match else ():
            found.setdefault(match[2], []).append(tuple(map(int, shape.split(","))))  # type: ignore[index]
    return found


@pytest.mark.parametrize("check_vma", [True, False])
def test_labels_and_lse_of_a_split_vocabulary(check_vma: bool):
    args, _ = case_of("mean")
    wrong = np.array(args[2])
    wrong[:3] = 96, -1, -100
    mesh = mesh_of(AxisType.Auto, vocab=8)
    both = lambda x, w, labels: linear_log_probs(x, w, labels, axis_name="vocab", return_lse=True)
    split = jax.shard_map(both, mesh=mesh, in_specs=(P(), P(None, "vocab"), P()), out_specs=P(), check_vma=check_vma)
    got, lse = jax.jit(split)(*args[:2], wrong)
    known = lambda x, w: both(x, w, wrong)
    with pytest.raises(ValueError, match="labels must be from 0 to 95 or ignore_index=-100, got 96"):
        jax.shard_map(known, mesh=mesh, in_specs=(P(), P(None, "vocab")), out_specs=P())(*args[:2])
    want = cross_entropy(*args[:2], np.where(np.arange(16) < 3, -100, wrong), reduction="none", d_loss=np.ones(16))
    assert np.all(np.isnan(got[:2]))
    np.testing.assert_allclose(got[2:], -want["loss"][2:], rtol=1e-5)
    np.testing.assert_allclose(lse[3:], want["lse"][3:], rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_divergence_over_a_split_vocabulary(check_vma: bool):
    args, options = LinearKlDivergenceCase("", tokens=16, d=12, teacher_d=8, vocab=96, temperature=2.0).arguments()
    mesh = mesh_of(AxisType.Auto, vocab=8)
    loss = lambda *xs: linear_kl_divergence(*xs, **options, axis_name="vocab")
    specs = (P(), P(None, "vocab")) * 2
    split = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    value, gradients = jax.jit(jax.value_and_grad(split, (0, 1, 2, 3)))(*args)
    want = kl_divergence(*args, **options)
    names = ("student_x", "student_weight", "teacher_x", "teacher_weight")
    check({"loss": value} | dict(zip(names, gradients, strict=True)), want, factor=6.0)


@pytest.mark.parametrize("check_vma", [True, False])
def test_tokens_split_in_shard_map(check_vma: bool):
    """Each device has the sum of its tokens; the gradient of the matrix is added up."""
    args, options = case_of("all", reduction="sum")
    mesh = mesh_of(AxisType.Auto, data=8)
    static = {key: value for key, value in options.items() if key not in ("bias", "token_weights")}

    def loss(x: Any, weight: Any, bias: Any, token_weights: Any, labels: Any) -> Any:
        part = linear_cross_entropy(x, weight, labels, bias=bias, token_weights=token_weights, **static)
        return jax.lax.psum(part, "data")

    specs = (P("data"), P(), P(), P("data"), P("data"))
    split = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    got = jax.jit(lambda *xs: gradients_of(lambda *ys: split(*ys, xs[2]), xs, options))(*args)
    check(got, cross_entropy(*args, **options), factor=6.0)


SPLITS = {
    "batch": P("data", None),
    "sequence": P(None, "data"),
    "both": P("data", "model"),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", SPLITS)
def test_split_tokens(name: str, kind: AxisType):
    """Nothing large is gathered: of the logits nothing at all, of x nothing, and the matrix is whole anyway."""
    args, options = LinearCrossEntropyCase(
        "", leading=(8,), tokens=32, d=16, vocab=2048, ignored=0.2, label_smoothing=0.1, token_weights=True
    ).arguments()
    mesh = mesh_of(kind, data=4, model=2)
    of_tokens = SPLITS[name]
    weights = options.pop("token_weights")
    loss = lambda x, weight, labels, token_weights: linear_cross_entropy(
        x, weight, labels, token_weights=token_weights, **options
    )
    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with jax.set_mesh(mesh):
        specs = (P(*of_tokens, None), P(), of_tokens, of_tokens)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((*args, weights), specs, strict=True)]
        value, (d_x, d_weight) = function(*placed)
        program = function.lower(*placed).compile().as_text()
    check({"loss": value, "x": d_x, "weight": d_weight}, cross_entropy(*args, **options, token_weights=weights))
    assert d_x.sharding.is_equivalent_to(placed[0].sharding, 3)
    found = collectives(program)
    assert all(np.prod(shape) <= args[1].size for shape in found.get("all-reduce", []))
    gathered = [shape for kind, shapes in found.items() if kind != "all-reduce" for shape in shapes]
    assert all(np.prod(shape) <= 8 * 32 for shape in gathered), gathered


def test_split_tokens_without_a_mesh_in_context():
    """Shardings of arrays alone: what is traced does not show them."""
    args, _ = LinearCrossEntropyCase("", leading=(8,), tokens=32, d=16, vocab=2048).arguments()
    mesh = mesh_of(AxisType.Auto, data=8)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, (P("data"), P(), P("data")), strict=True)
    ]
    function = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))
    value, (d_x, d_weight) = function(*placed)
    check({"loss": value, "x": d_x, "weight": d_weight}, cross_entropy(*args))
    found = collectives(function.lower(*placed).compile().as_text())
    assert "all-gather" not in found
    assert d_x.sharding.is_equivalent_to(placed[0].sharding, 3)


TYPED = {
    "vocabulary": (P(), ("model",), None),
    "vocabulary and tokens": (P("data"), ("model",), None),
    "vocabulary, tokens and d": (P("data"), ("model",), "data"),
    "vocabulary over both axes": (P(), ("data", "model"), None),
}


@pytest.mark.parametrize(
    ("name", "split"),
    [(name, split) for name in OPTIONS for split in TYPED],
)
def test_a_vocabulary_split_by_types(name: str, split: str):
    """As with ``axis_name``: statistics are gathered, the matrix is not."""
    args, options = case_of(name)
    tokens, vocab, d = TYPED[split]
    of_weight = P(vocab, d) if options["vocab_first"] else P(d, vocab)
    specs = {"x": tokens, "weight": of_weight, "labels": tokens, "bias": P(vocab), "token_weights": tokens}
    given = dict(zip(("x", "weight", "labels"), args, strict=True))
    given |= {key: options[key] for key in ("bias", "token_weights") if key in options}
    static = {key: value for key, value in options.items() if key not in given}

    def both(arrays: dict[str, Any]) -> Any:
        rest = dict(arrays)
        labels = rest.pop("labels")
        loss, pull = jax.vjp(lambda rest: linear_cross_entropy(labels=labels, **rest, **static), rest)
        return {"loss": loss} | pull(jnp.ones_like(loss))[0]

    mesh = mesh_of(AxisType.Explicit, data=2, model=4)
    with jax.set_mesh(mesh):
        placed = {key: jax.device_put(x, NamedSharding(mesh, specs[key])) for key, x in given.items()}
        lowered = jax.jit(both).lower(placed)
        got = lowered.compile()(placed)
    ones = np.ones(16) if options["reduction"] == "none" else 1.0
    check(got, cross_entropy(*args, **options, d_loss=ones), factor=6.0)
    for key in got.keys() - {"loss"}:
        assert got[key].sharding.is_equivalent_to(placed[key].sharding, got[key].ndim), key
    of_loss = NamedSharding(mesh, tokens if options["reduction"] == "none" else P())
    assert got["loss"].sharding.is_equivalent_to(of_loss, got["loss"].ndim)
    gathered = collectives(lowered.compile().as_text())["all-gather"]
    whole = 0 if d is None else np.prod(args[1].shape) // 4
    assert all(np.prod(shape) <= max(8 * 3 * 16, whole) for shape in gathered), gathered


def test_sums_over_a_split_vocabulary_are_float32():
    args, _ = case_of("bfloat16")
    for kind, axis_name in ((AxisType.Auto, "vocab"), (AxisType.Explicit, None)):
        mesh = mesh_of(kind, vocab=8)
        specs = P(), P(None, "vocab")
        loss = lambda x, w, axis_name=axis_name: linear_cross_entropy(x, w, args[2], axis_name=axis_name)
        split = loss if axis_name is None else jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args[:2], specs, strict=True)]
            program = jax.jit(jax.grad(split, (0, 1))).lower(*placed).as_text("hlo")
        assert re.findall(r"= (\w+)\[[\d,]+\]\S* all-reduce\(", program) == ["f32"]


def test_the_kernel_splits_a_vocabulary_as_the_function_does():
    """Whichever arguments are given by name."""
    args, _ = case_of("bfloat16")
    kernel = LinearCrossEntropy()
    mesh = mesh_of(AxisType.Explicit, vocab=8)
    with jax.set_mesh(mesh):
        specs = (P(), P(None, "vocab"))
        x, weight = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args[:2], specs, strict=True))
        calls = (
            lambda x, w: linear_cross_entropy(x, w, args[2]),
            lambda x, w: kernel(x, w, args[2]),
            lambda x, w: kernel(x, weight=w, labels=args[2]),
        )
        texts = [jax.jit(call).lower(x, weight).as_text() for call in calls]
    assert [text.count("stablehlo.all_gather") for text in texts] == [1, 1, 1]


def test_memory_of_a_device_does_not_grow_with_vocabulary_and_devices():
    sizes = []
    for devices in (2, 4, 8):
        mesh = jax.make_mesh((devices,), ("vocab",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:devices])
        x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
        weight = jax.ShapeDtypeStruct((64, 512 * devices), jnp.float32, sharding=NamedSharding(mesh, P(None, "vocab")))
        loss = lambda x, weight: linear_cross_entropy(x, weight, jnp.zeros(32, int))
        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).compile()
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert max(sizes) <= 1.1 * min(sizes), sizes


def test_a_divergence_over_a_vocabulary_split_by_types():
    args, options = LinearKlDivergenceCase("", tokens=16, d=12, teacher_d=8, vocab=96, temperature=2.0).arguments()
    mask = jnp.arange(16) % 3 > 0
    loss = lambda *xs: linear_kl_divergence(*xs, **options, mask=mask)
    mesh = mesh_of(AxisType.Explicit, data=2, model=4)
    specs = (P("data"), P(None, "model"), P(), P())  # the teacher's are split for the call
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(*placed)
        value, gradients = lowered.compile()(*placed)
    want = kl_divergence(*args, **options, mask=mask)
    names = ("student_x", "student_weight", "teacher_x", "teacher_weight")
    check({"loss": value} | dict(zip(names, gradients, strict=True)), want, factor=6.0)
    for gradient, array in zip(gradients, placed, strict=True):
        assert gradient.sharding.is_equivalent_to(array.sharding, gradient.ndim)


def test_what_needs_the_whole_vocabulary_gathers_it():
    args, options = case_of("mean", gradient_epsilon=1e-3, d=16)
    mesh = mesh_of(AxisType.Explicit, vocab=8)
    function = jax.jit(lambda *xs: linear_cross_entropy(*xs, args[2], **options))
    with jax.set_mesh(mesh):
        weight = jax.device_put(args[1], NamedSharding(mesh, P(None, "vocab")))
        got = function(args[0], weight)
        with pytest.raises(ValueError, match="linear_cross_entropy: labels must be from 0 to 95"):
            linear_cross_entropy(args[0], weight, jnp.full(16, 96))
        with pytest.raises(ValueError, match="linear_cross_entropy: x must be whole along d"):
            linear_cross_entropy(jax.device_put(args[0], NamedSharding(mesh, P(None, "vocab"))), weight, args[2])
    check({"loss": got}, cross_entropy(*args))


def test_a_matrix_split_by_types_is_gathered_and_its_gradient_split():
    args, options = case_of("mean")
    mesh = mesh_of(AxisType.Explicit, data=8)
    with jax.set_mesh(mesh):
        specs = (P("data", None), P(None, "data"), P("data"))
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        value, (d_x, d_weight) = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))(*placed)
        x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(None, "data")))
        with pytest.raises(ValueError, match="linear_cross_entropy: x must be whole along d"):
            jax.jit(linear_cross_entropy)(x, jnp.ones((8, 4)), jnp.zeros(4, jnp.int32))
    check({"loss": value, "x": d_x, "weight": d_weight}, cross_entropy(*args, **options))
    assert jax.typeof(d_weight).sharding.spec == P(None, "data")
