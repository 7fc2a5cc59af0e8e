"""Kernels under JAX's transformations, with and without tuning, against the same functions without kernels."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ops.kernel.samples import FORMS, A, B, Config, Pair, Product, Recomputing, operands, watching
from tilewright.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Selection,
    Tuner,
    find_labels_in_lowered,
    overlay_cache,
)
from tilewright.ops.types import MappedAxis

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def close(got, want):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5), got, want)


class Watched:
    """An executor and what it chose."""

    def __init__(self, *, autotune=False, **kwargs):
        self.selections, self.tuned = [], []
        chain = ConfigSelectorChain(autotune=autotune, tuner=Tuner(0, 1), on_event=self.note, **kwargs)
        self.run = Executor(chain)

    def note(self, event):
        if isinstance(event, Selection):
            self.selections.append(event)
        elif type(event).__name__ == "CallStarted":
            self.tuned.append(event.inv)

    @property
    def steps(self):
        return {selection.step for selection in self.selections}


AS, BS = operands((3, 6, 5), (3, 5, 4), seed=1)
CARRY, SQUARE = operands((4, 4), (4, 4), seed=2)


def loss_of(f):
    return lambda a, b: jnp.sin(f(a, b)).sum()


def scanned(f):
    return lambda c, s: jax.lax.scan(lambda c, _: (jnp.tanh(f(c, s)), c.sum()), c, None, length=3)


def looped(f):
    return lambda c, s: jax.lax.while_loop(lambda n: n[0] < 3, lambda n: (n[0] + 1, jnp.tanh(f(n[1], s))), (0, c))[1]


def branched(f):
    return lambda c, s: jax.lax.cond(c.sum() > 0, lambda: f(c, s), lambda: f(s, c))


def sharded_map(f, jit=True):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    return jax.jit(spread) if jit else spread


# Name, what is done with a function of two matrices, arguments.
TRANSFORMS = {
    "eager": (lambda f: f, (A, B)),
    "jit": (jax.jit, (A, B)),
    "grad": (lambda f: jax.grad(loss_of(f), (0, 1)), (A, B)),
    "jit of grad": (lambda f: jax.jit(jax.grad(loss_of(f), (0, 1))), (A, B)),
    "grad of jit": (lambda f: jax.grad(loss_of(jax.jit(f)), (0, 1)), (A, B)),
    "vmap": (jax.vmap, (AS, BS)),
    "vmap of one": (lambda f: jax.vmap(f, in_axes=(0, None)), (AS, B)),
    "vmap over other axes": (lambda f: jax.vmap(f, (2, 1), 1), (AS.transpose(1, 2, 0), BS.transpose(1, 0, 2))),
    "vmap of jit": (lambda f: jax.vmap(jax.jit(f)), (AS, BS)),
    "jit of vmap": (lambda f: jax.jit(jax.vmap(f)), (AS, BS)),
    "nested vmap": (lambda f: jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0)), (AS, BS)),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(loss_of(f), (0, 1))), (AS, BS)),
    "vmap of grad of one": (lambda f: jax.vmap(jax.grad(loss_of(f), (0, 1)), in_axes=(None, 0)), (A, BS)),
    "grad of vmap": (lambda f: jax.grad(loss_of(jax.vmap(f)), (0, 1)), (AS, BS)),
    "grad of vmap of one": (lambda f: jax.grad(loss_of(jax.vmap(f, in_axes=(0, None))), (0, 1)), (AS, B)),
    "jacrev": (jax.jacrev, (A, B)),
    "remat": (lambda f: jax.grad(loss_of(jax.checkpoint(f)), (0, 1)), (A, B)),
    "jit of remat": (lambda f: jax.jit(jax.grad(loss_of(jax.checkpoint(f)), (0, 1))), (A, B)),
    "scan": (scanned, (CARRY, SQUARE)),
    "grad of scan": (lambda f: jax.jit(jax.grad(lambda c, s: scanned(f)(c, s)[0].sum(), (0, 1))), (CARRY, SQUARE)),
    "vmap of scan": (lambda f: jax.vmap(scanned(f), in_axes=(0, None)), (jnp.stack([CARRY, SQUARE]), SQUARE)),
    "scan over stacked": (lambda f: lambda a, b: jax.lax.scan(lambda c, ab: (c, f(*ab)), 0, (a, b))[1], (AS, BS)),
    "map": (lambda f: lambda a, b: jax.lax.map(lambda ab: f(*ab), (a, b)), (AS, BS)),
    "while": (looped, (CARRY, SQUARE)),
    "cond": (branched, (CARRY, SQUARE)),
    "grad of cond": (lambda f: jax.jit(jax.grad(loss_of(branched(f)), (0, 1))), (CARRY, SQUARE)),
    "shard_map": (sharded_map, (A, B)),
    "eager shard_map": (lambda f: sharded_map(f, jit=False), (A, B)),
    "vmap of eager shard_map": (lambda f: jax.vmap(sharded_map(f, jit=False), in_axes=(0, None)), (AS, B)),
    "vmap of grad of shard_map": (
        lambda f: jax.vmap(jax.grad(loss_of(sharded_map(f)), (0, 1)), in_axes=(0, None)),
        (AS, B),
    ),
    "shard_map of vmap": (lambda f: sharded_map(jax.vmap(f, in_axes=(0, None))), (jnp.stack([A] * 4), B)),
    "grad of shard_map": (lambda f: jax.jit(jax.grad(loss_of(sharded_map(f)), (0, 1))), (A, B)),
    "shard_map of grad": (lambda f: sharded_map(jax.grad(loss_of(f))), (A, B)),
    "linearize": (lambda f: lambda a, b: jax.linearize(jax.grad(loss_of(f)), a, b)[1](a, b), (A, B)),
}  # fmt: skip


@functools.cache
def without_kernels(name):
    transform, arguments = TRANSFORMS[name]
    return jax.tree.map(np.asarray, transform(lambda a, b: 2.0 * (a @ b))(*arguments))


@pytest.mark.parametrize(
    ("name", "form", "autotune"),
    [
        (name, form, autotune)
        for name, form, autotune in itertools.product(TRANSFORMS, FORMS, [False, True])
        if (name, form) != ("linearize", Recomputing)  # gradients of one's own have no forward mode
    ],
)
def test_results(name, form, autotune):
    transform, arguments = TRANSFORMS[name]
    kernel, watched = form(), Watched(autotune=autotune)
    got = transform(lambda a, b: watched.run(kernel, a, b, scale=2.0))(*arguments)
    close(got, without_kernels(name))
    assert watched.steps <= ({"autotune", "memory"} if autotune else {"heuristic"})
    assert bool(watched.tuned) == autotune


@pytest.mark.parametrize(
    ("name", "form"), list(itertools.product(["jit", "jit of grad", "jit of vmap", "grad of scan", "shard_map"], FORMS))
)
def test_no_tracer_leaks(name, form):
    transform, arguments = TRANSFORMS[name]
    for autotune in (False, True):
        watched = Watched(autotune=autotune)
        with jax.checking_leaks():
            jax.block_until_ready(transform(lambda a, b: watched.run(form(), a, b))(*arguments))  # noqa: B023


class TestTheTracedProgram:
    def text(self, jaxpr):
        return re.sub(r"0x[0-9a-f]+|selector=Selector\(.*?overrides=Overrides\([^)]*\)\)", "", str(jaxpr))

    @pytest.mark.parametrize(
        ("name", "form"),
        list(itertools.product(["eager", "vmap", "jit of grad", "scan", "remat"], [Recomputing, Pair])),
    )
    def test_does_not_depend_on_tuning(self, name, form):
        transform, arguments = TRANSFORMS[name]
        kernel = form()
        traced = [
            jax.make_jaxpr(transform(lambda a, b, w=watched: w.run(kernel, a, b)))(*arguments)
            for watched in (Watched(autotune=False), Watched(autotune=True))
        ]
        assert self.text(traced[0]) == self.text(traced[1])

    def test_tracing_alone_chooses_nothing(self):
        watched = Watched(autotune=True)
        jax.make_jaxpr(jax.vmap(jax.grad(lambda a: watched.run(Pair(), a, B).sum())))(AS)
        jax.eval_shape(lambda a: watched.run(Product(), a, B), A)
        assert watched.selections == watched.tuned == []


class TestSelectionSeesTheMappedProblem:
    @pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.vmap(jax.jit(f)), lambda f: jax.jit(jax.vmap(f))])
    def test_of_one_axis(self, transform):
        watched, kernel = Watched(autotune=True), Product()
        transform(lambda a: watched.run(kernel, a, B))(AS)
        (inv,) = watched.tuned
        assert inv.mapped == (MappedAxis(3, (True, False)),)
        assert [x.shape for x in inv.args] == [(6, 5), (5, 4)]
        assert {s.key for s in watched.selections} == {inv.key}
        assert '"mapped":[[3,[1,0]]]' in inv.key

    def test_of_two_axes_outermost_first(self):
        watched, kernel = Watched(autotune=True), Product()
        inner = jax.vmap(lambda a, b: watched.run(kernel, a, b), in_axes=(None, 0))
        jax.jit(jax.vmap(inner, in_axes=(0, None)))(jnp.stack([A, A]), BS)
        (inv,) = watched.tuned
        assert inv.mapped == (MappedAxis(2, (True, False)), MappedAxis(3, (False, True)))

    def test_and_nothing_else_is_tuned(self):
        watched, kernel = Watched(autotune=True), Pair()
        jax.jit(jax.vmap(jax.grad(lambda a: watched.run(kernel, a, B).sum())))(AS)
        assert [(inv.direction, [axis.size for axis in inv.mapped]) for inv in watched.tuned] == [
            ("forward", [3]),
            ("backward", [3]),
        ]

    def test_a_config_of_the_mapped_problem_is_used(self):
        executor, kernel = Executor(ConfigSelectorChain()), Product()
        cache = ConfigCache()
        cache.put(Invocation(kernel, (A, B), mapped=(MappedAxis(3, (True, False)),)).key, Config(11))
        with overlay_cache(cache):
            with watching() as seen:
                jax.vmap(lambda a: executor(kernel, a, B))(AS)
            assert seen[-1].cfg == Config(11)
            with watching() as seen:
                executor(kernel, A, B)
            assert Config(11) not in [each.cfg for each in seen]


class Peeking(Kernel):
    """Looks at the values of what it is sampled with."""

    def __init__(self):
        super().__init__("tests.peeking")
        self.seen = []

    def run(self, x, index, *, cfg):
        return x[index]

    def heuristic_cfg(self, inv):
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in inv.args)
        return Config()

    def config_space(self, inv):
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in inv.args)
        return [Config(1), Config(2)]

    def sample_inputs(self, inv, key):
        x, index = inv.abstract_args
        drawn = jax.random.normal(key, x.shape, x.dtype), jax.random.randint(key, index.shape, 0, x.shape[0])
        self.seen.append(tuple(np.asarray(leaf) for leaf in drawn))
        return drawn, {}

    def reference(self, x, index):
        return jnp.take(x, index, axis=0)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.jit(jax.grad(lambda x, i: f(x, i).sum()))])
def test_tuning_runs_on_samples(transform):
    kernel, watched = Peeking(), Watched(autotune=True)
    x, index = jnp.full((2, 4, 3), 7.0), jnp.ones((2, 5), jnp.int32)
    if transform is not jax.vmap:
        x, index = x[0], index[0]
    transform(lambda x, i: watched.run(kernel, x, i))(x, index)
    assert kernel.seen
    assert all(isinstance(drawn, np.ndarray) and not (drawn == 7.0).all() for drawn, _ in kernel.seen)


class TestSharding:
    mesh = staticmethod(lambda kind: jax.make_mesh((8,), ("data",), axis_types=(kind,)))

    def compiled(self, function, *arguments):
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled(*arguments), [name for name in COLLECTIVES if name in compiled.as_text()]

    @pytest.mark.parametrize(
        ("kind", "form", "autotune"),
        list(itertools.product([AxisType.Auto, AxisType.Explicit], FORMS, [False, True])),
    )
    def test_adds_no_collective(self, kind, form, autotune):
        watched, kernel, mesh = Watched(autotune=autotune), form(), self.mesh(kind)
        (a,) = operands((16, 5))
        with jax.set_mesh(mesh):
            spread = jax.device_put(a, NamedSharding(mesh, P("data", None)))
            whole = jax.device_put(B, NamedSharding(mesh, P()))
            function = lambda a, b: watched.run(kernel, a, b)
            out, collectives = self.compiled(function, spread, whole)
            assert collectives == []
            assert out.sharding.spec[0] == "data"
            close(out, a @ B)
            gradient = jax.grad(lambda a, b: jnp.sin(function(a, b)).sum())
            (out, collectives) = self.compiled(gradient, spread, whole)
            assert collectives == []
            assert out.sharding.spec[0] == "data"
            close(out, jnp.cos(a @ B) @ B.T)
            eager = watched.run(kernel, spread, whole)
            assert eager.sharding.spec[0] == "data"
            close(eager, a @ B)
            close(jax.grad(lambda a: jnp.sin(function(a, whole)).sum())(spread), jnp.cos(a @ B) @ B.T)

    def test_inside_shard_map_each_device_has_its_own_problem(self):
        watched, kernel, mesh = Watched(autotune=True), Pair(), self.mesh(AxisType.Auto)
        (a,) = operands((16, 5))
        spread = jax.shard_map(
            lambda a, b: watched.run(kernel, a, b), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
        )
        gradient = jax.grad(lambda a, b: jnp.sin(spread(a, b)).sum())
        (out, collectives) = self.compiled(gradient, a, B)
        assert collectives == []
        close(out, jnp.cos(a @ B) @ B.T)
        assert {inv.direction: inv.args[0].shape for inv in watched.tuned} == {"forward": (2, 5), "backward": (2, 5)}

    @pytest.mark.parametrize("form", FORMS)
    def test_a_mapped_axis_may_be_sharded(self, form):
        executor, mesh = Executor(ConfigSelectorChain()), self.mesh(AxisType.Explicit)
        (a,) = operands((8, 6, 5))
        with jax.set_mesh(mesh):
            spread = jax.device_put(a, P("data", None, None))
            mapped = jax.vmap(lambda a: executor(form(), a, B))
            gradient = jax.vmap(jax.grad(lambda a: jnp.sin(executor(form(), a, B)).sum()))
            for function, want in ((mapped, a @ B), (gradient, jnp.cos(a @ B) @ B.T)):
                out, collectives = self.compiled(function, spread)
                assert collectives == []
                assert out.sharding.spec[0] == "data"
                close(out, want)

    def test_collectives_of_the_kernel_itself_work(self):
        class Summed(Product):
            def run(self, a, b, *, cfg):
                return jax.lax.psum(a @ b, "data")

        executor, mesh = Executor(ConfigSelectorChain()), self.mesh(AxisType.Auto)
        (a,) = operands((8, 5))
        summed = jax.shard_map(lambda a: executor(Summed(), a, B), mesh=mesh, in_specs=P("data"), out_specs=P())
        close(jax.jit(summed)(a), (a @ B).sum(0, keepdims=True))

    def test_on_every_device(self):
        executor, kernel = Executor(ConfigSelectorChain()), Pair()
        for device in jax.devices()[::3]:
            with jax.default_device(device):
                close(executor(kernel, np.asarray(A), np.asarray(B)), A @ B)
            placed = jax.device_put(A, device)
            out = executor(kernel, placed, jax.device_put(B, device))
            assert out.devices() == {device}


class TestExport:
    @pytest.mark.parametrize(
        ("form", "platforms", "autotune"),
        list(itertools.product(FORMS, [None, ["cpu", "cuda"], ["cuda", "tpu", "cpu"]], [False, True])),
    )
    def test_round_trip(self, form, platforms, autotune):
        kernel, watched = form(), Watched(autotune=autotune)
        function = jax.jit(lambda a, b: watched.run(kernel, a, b))
        exported = jax.export.export(function, platforms=platforms)(A, B)
        close(jax.export.deserialize(exported.serialize()).call(A, B), A @ B)
        gradient = jax.jit(jax.grad(loss_of(lambda a, b: watched.run(kernel, a, b))))
        exported = jax.export.export(gradient, platforms=platforms)(A, B)
        close(jax.export.deserialize(exported.serialize()).call(A, B), jnp.cos(A @ B) @ B.T)
        assert all(inv.target.kind == "cpu" for inv in watched.tuned)

    @pytest.mark.parametrize("form", FORMS)
    def test_with_derivatives(self, form):
        kernel = form()
        exported = jax.export.export(jax.jit(lambda a, b: kernel(a, b)))(A, B)
        again = jax.export.deserialize(exported.serialize(vjp_order=1))
        close(jax.grad(loss_of(again.call))(A, B), jnp.cos(A @ B) @ B.T)

    def test_each_platform_runs_its_hook(self):
        class Platforms(Product):
            def run_xla(self, a, b, *, cfg):
                return a @ b

            def run_triton(self, a, b, *, cfg):
                return jnp.cos(a) @ b

        kernel = Platforms()
        exported = jax.export.export(jax.jit(lambda a, b: kernel(a, b)), platforms=["cpu", "cuda"])(A, B)
        assert "cosine" in exported.mlir_module()
        close(exported.call(A, B), A @ B)
        alone = jax.export.export(jax.jit(lambda a, b: kernel(a, b)), platforms=["cuda"])(A, B)
        assert "cosine" in alone.mlir_module()

    def test_symbolic_dimensions(self):
        (rows,) = jax.export.symbolic_shape("rows")
        struct = jax.ShapeDtypeStruct((rows, 5), jnp.float32)
        kernel, watched = Pair(), Watched()
        exported = jax.export.export(jax.jit(lambda a, b: watched.run(kernel, a, b)))(struct, B)
        close(exported.call(A, B), A @ B)


class TestLabels:
    @pytest.mark.parametrize(
        ("name", "form"),
        list(
            itertools.product([name for name in TRANSFORMS if name not in ("linearize", "eager")], [Recomputing, Pair])
        ),
    )
    def test_are_in_the_program(self, name, form):
        transform, arguments = TRANSFORMS[name]
        watched, kernel = Watched(), form()
        lowered = jax.jit(transform(lambda a, b: watched.run(kernel, a, b))).lower(*arguments)
        labels = find_labels_in_lowered(lowered)
        assert len(labels) == len({s.key for s in watched.selections}) > 0
        assert {"backward" in label for label in labels} >= ({True} if "grad" in name or name == "jacrev" else {False})


@pytest.mark.parametrize("form", FORMS)
def test_precision_and_x64_reach_the_kernel(form):
    executor = Executor(ConfigSelectorChain(autotune=True))
    with jax.enable_x64(True):
        a, b = operands((4, 3), (3, 2), dtype=jnp.float64)
        for transform in (lambda f: f, jax.jit, lambda f: jax.grad(loss_of(f))):
            out = transform(lambda a, b: executor(form(), a, b))(a, b)
            assert out.dtype == jnp.float64
    kernel = form()
    with jax.default_matmul_precision("highest"):
        text = jax.jit(lambda a, b: executor(kernel, a, b)).lower(A, B).as_text()
    assert "HIGHEST" in text
    assert "HIGHEST" not in jax.jit(lambda a, b: executor(kernel, a, b)).lower(A, B).as_text()


class Selective(Product):
    """Computes only the gradients that are wanted, and notes which."""

    seen: list[frozenset[str]]

    def __init__(self):
        super().__init__("tests.selective")
        self.seen = []

    def forward_with_residuals(self, a, b, *, cfg):
        return a @ b, ()

    def backward(self, residuals, cotangents, a, b, *, cfg, wanted):
        self.seen.append(wanted)
        (d_out,) = cotangents
        return {"a": d_out @ b.T if "a" in wanted else None, "b": a.T @ d_out if "b" in wanted else None}


@pytest.mark.parametrize(("argnums", "wanted"), [(0, {"a"}), (1, {"b"}), ((0, 1), {"a", "b"})])
def test_a_backward_pass_knows_which_gradients_are_used(argnums, wanted):
    kernel, run = Selective(), Watched().run
    got = jax.grad(loss_of(lambda a, b: run(kernel, a, b)), argnums)(A, B)
    close(got, jax.grad(loss_of(jnp.matmul), argnums)(A, B))
    assert set(kernel.seen) == {frozenset(wanted)}


def test_gradients_from_residuals_that_the_caller_has():
    """Those of other operands here, which no call of the kernel would use."""
    others, cotangent = operands((6, 5), (5, 4), seed=4), operands((6, 4), seed=5)[0]
    residuals = {"b": others[1].T, "a": (others[0].T,)}
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        got = run(lambda: Pair().gradients(("a", "b"), residuals, (cotangent,), A, B, scale=2.0))
        close(got, [2.0 * cotangent @ others[1].T, 2.0 * others[0].T @ cotangent])
    kernel = Selective()
    close(kernel.gradients(("b",), (), (cotangent,), A, B), [A.T @ cotangent])
    assert set(kernel.seen) == {frozenset({"b"})}
