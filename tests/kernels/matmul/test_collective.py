"""Matmuls with a gather before or a sum after, on up to 8 devices, against one device and float64."""

import itertools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tilewright.kernels.matmul.distributed.remote import if_in_order
from tilewright.kernels.matmul.distributed.rings import strategy_of
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.op.distributed import PlanParams
from tilewright.modules import all_gather_matmul, matmul, matmul_reduce_scatter
from tilewright.ops import Autotuner, ConfigCache, ConfigSelectorChain, Tuner, find_invocations, overlay_cache
from tilewright.ops.tuning.numerics import violations
from tilewright.ops.utils.device import current_device
from tilewright.ops.utils.known_devices import find_device

OPS = {"gather": all_gather_matmul, "scatter": matmul_reduce_scatter}
SPECS = {
    "gather": (P(None, "x", None), P(None, "x"), P(None, None, "x")),
    "scatter": (P(None, None, "x"), P("x", None), P(None, "x", None)),
}
"""How lhs, rhs and the result of each op are split."""


def mesh_of(count: int, kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((count,), ("x",), axis_types=(kind,), devices=jax.devices()[:count])


def operands(count: int, dtype: str = "float32", transposed: bool = False, leading: tuple[int, ...] = (2,)) -> Any:
    """lhs, rhs and the cotangents of the result, as a whole."""
    random = np.random.default_rng(count)
    rows, k, n = 3 * count, 2 * count, 4 * count
    shapes = ((*leading, rows, k), (n, k) if transposed else (k, n), (*leading, rows, n))
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def expected(lhs: Any, rhs: Any, d_out: Any, transposed: bool = False) -> list[np.ndarray]:
    lhs, rhs, d_out = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, d_out))
    matrix = rhs.T if transposed else rhs
    d_matrix = lhs.reshape(-1, lhs.shape[-1]).T @ d_out.reshape(-1, d_out.shape[-1])
    return [lhs @ matrix, d_out @ matrix.T, d_matrix.T if transposed else d_matrix]


def check(got: Any, want: Any) -> None:
    for name, each, exact in zip(("out", "d_lhs", "d_rhs"), got, want, strict=True):
        rounded = np.asarray(jnp.asarray(exact, each.dtype), np.float64)
        assert not violations(np.asarray(each), exact, rounded), name


def split(op: str, mesh: Any, check_vma: bool = True, **options: Any) -> Any:
    of_lhs, of_rhs, of_out = SPECS[op]
    if options.get("transpose_rhs"):
        of_rhs = P(*reversed(of_rhs))
    function = lambda lhs, rhs: OPS[op](lhs, rhs, axis_name="x", **options)
    return jax.shard_map(function, mesh=mesh, in_specs=(of_lhs, of_rhs), out_specs=of_out, check_vma=check_vma)


def all_of(function: Any) -> Any:
    def both(lhs: Any, rhs: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(function, lhs, rhs)
        return (out, *pull_back(d_out.astype(out.dtype)))

    return jax.jit(both)


FACTORS = {
    "op": tuple(OPS), "strategy": ("auto", "collective", "ring", "bidirectional"),
    "count": (8, 3, 2, 1), "kind": (AxisType.Auto, AxisType.Explicit),
    "check_vma": (True, False), "dtype": ("float32", "bfloat16"), "transposed": (False, True),
}  # fmt: skip


@pytest.mark.parametrize(tuple(FACTORS), list(itertools.product(*FACTORS.values())))
def test_results_and_gradients(
    op: str, strategy: Any, count: int, kind: AxisType, check_vma: bool, dtype: str, transposed: bool
):
    arrays = operands(count, dtype, transposed)
    mesh = mesh_of(count, kind)
    function = split(op, mesh, check_vma, strategy=strategy, transpose_rhs=transposed)
    of_lhs, of_rhs, of_out = SPECS[op]
    specs = (of_lhs, P(*reversed(of_rhs)) if transposed else of_rhs, of_out)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        got = all_of(function)(*placed)
    assert [x.dtype for x in got] == [jnp.dtype(dtype)] * 3
    check(got, expected(*arrays, transposed))
    alone = all_of(lambda lhs, rhs: matmul(lhs, rhs, transpose_rhs=transposed))(*arrays)
    for mine, one in zip(got, alone, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (mine, one)), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", ["collective", "ring", "bidirectional"])
def test_two_dimensions_and_a_wider_result(op: str, strategy: Any):
    lhs, rhs, d_out = operands(4, "bfloat16", leading=())
    specs = [P(*tuple(spec)[-2:]) for spec in SPECS[op]]
    function = lambda *xs: OPS[op](*xs, axis_name="x", strategy=strategy, preferred_element_type=jnp.float32)
    mapped = jax.shard_map(function, mesh=mesh_of(4), in_specs=tuple(specs[:2]), out_specs=specs[2])
    got = all_of(mapped)(lhs, rhs, d_out)
    assert [x.dtype for x in got] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    check(got, expected(lhs, rhs, d_out))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["collective", "bidirectional"])
def test_a_matrix_that_all_devices_share(strategy: Any, check_vma: bool):
    """Rows are split over both axes, and are gathered over one of them; the gradient of the matrix is a sum."""
    lhs, rhs, d_out = operands(4)
    mesh = jax.make_mesh((2, 2), ("data", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def loss(lhs: Any, rhs: Any, d_out: Any) -> Any:
        out = all_gather_matmul(lhs, rhs, axis_name="x", strategy=strategy)
        return lax.psum(jnp.sum(out * d_out) / lax.axis_size("x"), ("data", "x"))

    # What is gathered is the same along x, and so is its share of the loss: a half for each.
    specs = (P("data", "x", None), P(), P("data", None, None))
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    d_lhs, d_rhs = jax.jit(jax.grad(mapped, (0, 1)))(lhs, rhs, d_out)
    _, want_lhs, want_rhs = expected(lhs, rhs, d_out)
    np.testing.assert_allclose(d_lhs, want_lhs, atol=1e-4)
    np.testing.assert_allclose(d_rhs, want_rhs, atol=1e-4)


def test_an_axis_of_two_names():
    lhs, rhs, d_out = operands(4)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    both = ("a", "b")
    for strategy in ("collective", "ring", "bidirectional"):
        gather = jax.shard_map(
            lambda *xs, strategy=strategy: all_gather_matmul(*xs, axis_name=both, strategy=strategy),
            mesh=mesh, in_specs=(P(None, both, None), P(None, both)), out_specs=P(None, None, both),
        )  # fmt: skip
        check(all_of(gather)(lhs, rhs, d_out), expected(lhs, rhs, d_out))


@pytest.mark.parametrize("strategy", ["collective", "ring", "bidirectional"])
def test_parts_of_k_are_summed_before_they_are_rounded(strategy: Any):
    random = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((1, 64, 256), (256, 32)))
    got = jax.jit(split("scatter", mesh_of(8), strategy=strategy))(lhs, rhs)
    want = jnp.asarray(expected(lhs, rhs, np.zeros((1, 64, 32)))[0], jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert np.mean(np.asarray(got) == np.asarray(want)) > 0.99


@pytest.mark.parametrize("strategy", ["collective", "ring", "bidirectional"])
def test_the_gradient_of_a_matrix_is_summed_before_it_is_rounded(strategy: Any):
    random = np.random.default_rng(0)
    lhs, rhs, d_out = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in ((1, 256, 16), (16, 64), (1, 256, 64))
    )
    want = jnp.asarray(expected(lhs, rhs, d_out)[2], jnp.bfloat16)
    for op in OPS:
        d_rhs = all_of(split(op, mesh_of(8), strategy=strategy))(lhs, rhs, d_out)[2]
        assert np.mean(np.asarray(d_rhs) == np.asarray(want)) > 0.99, op


def collectives(program: str) -> dict[str, int]:
    kinds = r"(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    return dict(Counter(re.findall(r"= .*? " + kinds, program)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", ["collective", "ring", "bidirectional"])
def test_what_is_communicated(op: str, strategy: Any):
    lhs, rhs, d_out = operands(8)
    function = split(op, mesh_of(8), strategy=strategy)
    forward = collectives(jax.jit(function).lower(lhs, rhs).compile().as_text())
    of_op = {"gather": "all-gather", "scatter": "reduce-scatter"}[op]
    assert forward == ({of_op: 1} if strategy == "collective" else {"collective-permute": 7})
    # The backward pass has one of each, and does not keep the rows that were gathered forward for it.
    program = all_of(function).lower(lhs, rhs, d_out).compile().as_text()
    both = {"all-gather": 1, "reduce-scatter": 1}
    times = 3 if op == "gather" else 2
    both[of_op] += times - 2
    assert collectives(program) == (both if strategy == "collective" else {"collective-permute": 7 * times})
    ways = Counter(re.findall(r"source_target_pairs=\{\{(0,\d)\}", program))
    wanted = {"ring": {"0,1": 7 * times}, "bidirectional": {"0,1": 4 * times, "0,7": 3 * times}}
    assert ways == wanted.get(strategy, {})


def test_a_ring_computes_what_a_gather_computes():
    lhs, rhs, _ = operands(8)
    found = [jax.jit(split("gather", mesh_of(8), strategy=s))(lhs, rhs) for s in ("collective", "ring")]
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)


def test_under_vmap_and_in_a_scan():
    lhs, rhs, d_out = operands(4)

    def layers(lhs: Any, rhs: Any) -> Any:
        return jax.vmap(lambda each: all_gather_matmul(each, rhs, axis_name="x", strategy="ring"))(lhs)

    specs = SPECS["gather"]
    mapped = jax.shard_map(layers, mesh=mesh_of(4), in_specs=specs[:2], out_specs=specs[2])
    check(all_of(mapped)(lhs, rhs, d_out), expected(lhs, rhs, d_out))

    def twice(lhs: Any, rhs: Any) -> Any:
        step = lambda x, _: (
            matmul_reduce_scatter(all_gather_matmul(x, rhs, axis_name="x"), rhs.T, axis_name="x"),
            None,
        )
        return lax.scan(step, lhs, None, length=2)[0]

    mapped = jax.shard_map(twice, mesh=mesh_of(4), in_specs=specs[:2], out_specs=specs[0])
    exact = np.asarray(lhs, np.float64)
    for _ in range(2):
        exact = exact @ np.asarray(rhs, np.float64) @ np.asarray(rhs, np.float64).T
    np.testing.assert_allclose(jax.jit(mapped)(lhs, rhs), exact, rtol=1e-4, atol=1e-2)


def test_float64():
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        lhs, rhs, d_out = (jnp.asarray(random.standard_normal(s)) for s in ((1, 8, 16), (16, 12), (1, 8, 12)))
        got = all_of(split("scatter", mesh_of(4), strategy="ring"))(lhs, rhs, d_out)
    for mine, exact in zip(got, expected(lhs, rhs, d_out), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-12, atol=1e-12)


def test_the_predicted_strategy(monkeypatch: pytest.MonkeyPatch):
    with tilewright.target_device("NVIDIA H100 80GB HBM3"):
        h100 = current_device()
    # A part of 2048 rows, 8192 wide, in bfloat16, by a matrix of 8192 x 3584: 75 us of transfer, 122 us of matmul.
    large = (2048 * 8192 * 2.0, 2.0 * 2048 * 8192 * 3584)
    assert strategy_of(h100, 8, *large) == "ring"
    assert strategy_of(h100, 8, *(x / 64 for x in large)) == "collective"
    assert strategy_of(h100, 8, large[0], 0.0) == "collective"  # nothing to overlap with
    assert strategy_of(current_device(), 8, *large) == "collective"
    assert strategy_of(find_device("TPU v5e").device, 8, *large) == "collective"  # nobody has measured its steps
    # Between two devices a ring was measured to be worth it where its transfers take no SMs.
    monkeypatch.setenv("XLA_FLAGS", "")
    assert strategy_of(h100, 2, *large) == "collective"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_collective_permute_mode=peer")
    assert strategy_of(h100, 2, *large) == "ring"


def test_a_program_for_eight_gpus_is_a_ring_without_one():
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count=8) as target:
        mesh = target.make_mesh((8,), ("x",))
        sharding = [NamedSharding(mesh, spec) for spec in SPECS["gather"]]
        shapes = ((1, 16384, 8192), (8192, 28672))
        structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=p) for s, p in zip(shapes, sharding, strict=False)]
        with jax.sharding.use_abstract_mesh(mesh):
            text = jax.jit(split("gather", mesh)).lower(*structs).as_text()
    assert text.count("stablehlo.collective_permute") == 7
    assert "all_gather" not in text.replace("all_gather_matmul", "")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("order", "factor"), [((0, 1), 2), ((1, 0), 3)])
def test_what_the_order_of_a_program_decides(order: tuple[int, ...], factor: int, check_vma: bool):
    """Called, compiled, and in a loop whose steps are computed again; with a collective in both functions."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices())[list(order)], ("x",))
    each = lambda by: lambda x: by * lax.psum(x, "x")
    function = lambda x: if_in_order(each(2), each(3), x)
    mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=check_vma)
    x = jnp.arange(4.0)
    want = factor * (x[:2] + x[2:])
    assert jnp.array_equal(mapped(function)(x), want)
    assert jnp.array_equal(jax.jit(mapped(function))(x), want)
    step = lambda carry, _: (carry + jax.checkpoint(function)(x[:2] + lax.axis_index("x")), None)
    looped = jax.jit(mapped(lambda x: lax.scan(step, jnp.zeros(2), None, length=2)[0]))(x)
    assert jnp.array_equal(looped, 2 * factor * (2 * x[:2] + 1))


@pytest.mark.parametrize(
    ("op", "shapes", "dtype", "order", "remote"),
    [
        ("gather", ((4096, 4096), (4096, 14336)), "bfloat16", (0, 1), True),
        ("scatter", ((4096, 14336), (14336, 4096)), "bfloat16", (0, 1), True),
        ("gather", ((4096, 4096), (4096, 14336)), "bfloat16", (1, 0), False),
        ("scatter", ((4096, 14336), (14336, 4096)), "bfloat16", (1, 0), False),
        ("gather", ((2048, 4096), (4096, 4096)), "bfloat16", (0, 1), False),
        ("gather", ((4096, 4096), (4096, 14336)), "float32", (0, 1), False),
        ("gather", ((4096, 4096), (4096, 14336)), "bfloat16", (0, 1, 2, 3), False),
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_auto_takes_the_remote_kernel_between_two_gpus(
    op: str, shapes: Any, dtype: str, order: tuple[int, ...], remote: bool, check_vma: bool, monkeypatch: Any
):
    in_order = order == tuple(sorted(order))
    monkeypatch.setattr("tilewright.kernels.matmul.distributed.remote.devices_in_order", lambda _: in_order)
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count=len(order)) as target:
        mesh = target.make_mesh((len(order),), ("x",))
        specs = [P(*tuple(spec)[-2:]) for spec in SPECS[op]]
        function = lambda *xs: OPS[op](*xs, axis_name="x")
        mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs[:2]), out_specs=specs[2], check_vma=check_vma)
        structs = [
            jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=False)
        ]
        with jax.sharding.use_abstract_mesh(mesh):
            text = jax.jit(mapped).lower(*structs).as_text()
    assert ("mosaic_gpu" in text) == remote
    assert bool(re.search(r"stablehlo\.(all_gather|reduce_scatter|collective_permute)", text)) == (not remote)


@pytest.mark.parametrize(
    ("message", "lhs", "rhs", "options"),
    [
        (r"rows of lhs must be a multiple of the 4 devices of axis_name='x'", (1, 6, 8), (8, 4), {}),
        (r"lhs must be a floating-point array \[..., m, k\], got", (8,), (8, 4), {}),
        (r"rhs must be a floating-point array \[n, k\], got", (1, 8, 8), (1, 8, 4), {"transpose_rhs": True}),
        (r"must have the same k, .*transpose_rhs=True", (1, 8, 8), (8, 4), {"transpose_rhs": True}),
        (r"strategy='tree' must be one of 'auto', 'collective', 'ring', 'bidirectional', 'remote'", (1, 8, 8), (8, 4),
         {"strategy": "tree"}),
        (r"matmul_reduce_scatter: strategy='remote' cannot serve this call: needs a GPU", (1, 8, 8), (8, 4),
         {"strategy": "remote"}),
        (r"axis_name='y' is no axis of a surrounding jax.shard_map", (1, 8, 8), (8, 4), {"axis_name": "y"}),
        (r"platform='cudnn' must be None", (1, 8, 8), (8, 4), {"platform": "cudnn"}),
        (r"precision='best' must be None", (1, 8, 8), (8, 4), {"precision": "best"}),
    ],
)  # fmt: skip
def test_a_wrong_call_is_an_error(message: str, lhs: Any, rhs: Any, options: dict[str, Any]):
    function = lambda *xs: matmul_reduce_scatter(*xs, **{"axis_name": "x"} | options)
    mapped = jax.shard_map(function, mesh=mesh_of(4), in_specs=(P(), P()), out_specs=P("x"))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, jnp.ones(lhs), jnp.ones(rhs))


def test_a_call_outside_of_shard_map_says_what_to_do():
    with pytest.raises(ValueError, match=r"all_gather_matmul: axis_name='x' .* go to matmul as they are"):
        all_gather_matmul(jnp.ones((4, 4)), jnp.ones((4, 4)), axis_name="x")


REMOTE = ((1, 512, 256), (256, 512))


@pytest.mark.parametrize(
    ("message", "shapes", "dtype", "options"),
    [
        (r"lhs must be one of .*, got float32", REMOTE, "float32", {}),
        (r"TMA needs rows at multiples of 16 bytes, got k=12", ((1, 512, 12), (12, 512)), "bfloat16", {}),
        (r"there is nothing to compute", ((0, 512, 256), (256, 512)), "bfloat16", {}),
        (r"its kernel is one of 'pallas', got platform='xla'", REMOTE, "bfloat16", {"platform": "xla"}),
        (r"the axis must be a single one, got axis_name=\('x', 'y'\)", REMOTE, "bfloat16", {"axis_name": ("x", "y")}),
        (r"over all axes of the mesh, and leaves out y", REMOTE, "bfloat16", {"axis_names": {"x"}}),
    ],
)
def test_what_the_remote_kernel_does_not_take(message: str, shapes: Any, dtype: str, options: dict[str, Any]):
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count=4) as target:
        mesh = target.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2)
        over = {name: options.pop(name) for name in ("axis_names",) if name in options}
        function = lambda *xs: all_gather_matmul(*xs, **{"axis_name": "x", "strategy": "remote"} | options)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(), P()), out_specs=P("x"), check_vma=False, **over)
        structs = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
        with (
            jax.sharding.use_abstract_mesh(mesh),
            pytest.raises(ValueError, match=rf"strategy='remote' cannot serve this call: .*{message}"),
        ):
            jax.eval_shape(mapped, *structs)


def test_the_remote_kernel_wants_a_hopper_gpu():
    mapped = split("gather", mesh_of(2), strategy="remote")
    with pytest.raises(
        ValueError, match=r"strategy='remote' cannot serve this call: needs a GPU of compute capability"
    ):
        mapped(*operands(2)[:2])


def test_a_single_device_needs_no_remote_kernel():
    arrays = operands(1)
    check(all_of(split("gather", mesh_of(1), strategy="remote"))(*arrays), expected(*arrays))


def plans_of(op: str, function: Any, *operands: Any) -> dict[str, Any]:
    """What is explained of the calls of an op, by direction."""
    name = OPS[op].__name__
    return {call.direction: call for call in tilewright.explain(function, *operands) if call.op == name}


@pytest.mark.parametrize("op", OPS)
def test_the_plans_are_explained(op: str):
    found = plans_of(op, all_of(split(op, mesh_of(4))), *operands(4))
    assert sorted(found) == ["backward", "forward"]
    for call in found.values():
        assert call.config.backend == "collective"
        assert "probably slower" in call.choice.rejected["ring"][0]
    assert "needs a GPU" in found["forward"].choice.rejected["remote"][0]
    assert found["backward"].choice.rejected["remote"] == ("it has no kernel for gradients",)


@pytest.mark.parametrize("op", OPS)
def test_the_plans_are_measured_and_then_taken(op: str):
    """On a mesh of this process's devices, both directions, each checked against the oracle."""
    function = all_of(split(op, mesh_of(4)))
    invocations = [i for i in find_invocations(function, *operands(4)) if i.kernel.name == OPS[op].__name__]
    entries = Autotuner(Tuner(1, 2, isolation="none"), chooser=ConfigSelectorChain(ConfigCache())).tune(*invocations)
    assert len(entries.entries) == len(invocations) == 2
    for entry in entries.entries:
        assert [each.config.backend for each in entry.candidates] == ["collective", "ring", "bidirectional"]
        assert all(each.eligible and each.check == "passed" for each in entry.candidates), entry
    ring = ConfigCache()
    for inv in invocations:
        ring.put(inv.key, Choice("ring", PlanParams()))
    with overlay_cache(ring):
        found = plans_of(op, function, *operands(4))
        assert {call.config.backend for call in found.values()} == {"ring"}
        assert collectives(function.lower(*operands(4)).compile().as_text()).keys() >= {"collective-permute"}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", ["collective", "ring"])
def test_operands_that_all_devices_share(op: str, strategy: Any):
    """Their type varies over no axis, that of the result and what follows does."""
    lhs, rhs, _ = operands(4, leading=())

    def loss(lhs: Any, rhs: Any) -> Any:
        out = OPS[op](lhs, rhs, axis_name="x", strategy=strategy)
        assert jax.typeof(out).manual_axis_type.varying == {"x"}
        return lax.psum(jnp.sum(out), "x")

    mapped = jax.shard_map(loss, mesh=mesh_of(4), in_specs=(P(), P()), out_specs=P())
    found, gradients = jax.jit(jax.value_and_grad(mapped, (0, 1)))(lhs, rhs)
    times = 16 if op == "gather" else 4
    exact = np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)
    np.testing.assert_allclose(found, times * exact.sum(), rtol=1e-4)
    np.testing.assert_allclose(gradients[1], times * np.outer(np.asarray(lhs).sum(0), np.ones(rhs.shape[1])), rtol=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_a_remote_call_has_gradients_by_another_plan(op: str):
    with tilewright.target_device("NVIDIA H100 80GB HBM3", count=2) as target:
        mesh = target.make_mesh((2,), ("x",))
        with jax.sharding.use_abstract_mesh(mesh):
            specs = [P(*tuple(spec)[-2:]) for spec in SPECS[op]]
            structs = [
                jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for spec in specs
            ]
            mapped = jax.shard_map(
                lambda *xs: OPS[op](*xs, axis_name="x", strategy="remote"),
                mesh=mesh, in_specs=tuple(specs[:2]), out_specs=specs[2],
            )  # fmt: skip
            found = plans_of(op, all_of(mapped), *structs)
    assert found["forward"].config.backend == "remote"
    assert found["backward"].config.backend == "collective"
