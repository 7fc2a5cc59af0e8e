"""``tilewright build`` of what an op, a program or a lock file needs, with a stand-in for nvcc."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.conftest import H100
from tests.support import fake_nvcc
from tests.support.command_line import ends, streams
from tilewright.cli.cuda import building
from tilewright.kernels import kernel
from tilewright.kernels.cuda import Group, groups_of, locate, toolchain
from tilewright.kernels.flash_attention.cuda import backend as cuda
from tilewright.kernels.op.choice import Choice
from tilewright.kernels.paged_attention.cuda import packed as cuda_packed
from tilewright.ops import Lock
from tilewright.ops.config.lockfile import Decision
from tilewright.ops.kernel.kernel import Invocation
from tilewright.ops.kernel.prepared import prepared
from tilewright.ops.utils import device as devices

PROGRAM = """
import functools
import jax
from tilewright.modules import flash_attention

def attend(query, key, value):
    return flash_attention(query, key, value, causal=True)

def by_cuda(query, key, value):
    return flash_attention(query, key, value, platform="cuda").sum()

gradient = jax.grad(by_cuda)

def twice(query, key, value):
    return attend(query, key, value) + by_cuda(query, key, value)
"""

FORWARD = "flash_attention_ampere_forward-f32_k64_plain-sm_90a"
BACKWARD = "flash_attention_ampere_backward-f32_k64_plain-sm_90a"


@pytest.fixture
def stand_in(folder, cache_directory, monkeypatch):
    """The stand-in for nvcc, caches of the test's own, and a module ``mine`` with programs."""
    monkeypatch.setattr(toolchain, "missing", lambda *_: [])  # whatever headers are installed
    (folder / "mine.py").write_text(PROGRAM)
    return fake_nvcc.given(folder, monkeypatch)


@pytest.fixture
def nvcc(stand_in, monkeypatch):
    """The same, with an H100 for selection."""
    for name in ("_device", "_device_of_mesh"):
        monkeypatch.setattr(devices, name, lambda *_: H100)
    return stand_in


invoke = functools.partial(streams, "build")


def built(tmp_path):
    folders = (tmp_path / "cache" / "cuda").glob("*/record.json")
    return sorted("-".join(path.parent.name.split("-")[:3]) for path in folders)


def test_all_of_an_op(nvcc, tmp_path):
    assert "4 of 4 built now" in invoke("ragged_page_attention", "--arch", "90a").output
    assert len(built(tmp_path)) == 4
    assert "0 of 4 built now, 4 were there" in invoke("ragged_page_attention").output  # this GPU's


def test_a_group_of_an_op(nvcc, tmp_path):
    command = Group(cuda_packed.TABLE, "bf16_k64", 90).command("ragged_page_attention")
    assert command == "tilewright build ragged_page_attention --group bf16_k64 --arch 90a"
    invoke(*command.split()[2:])
    assert built(tmp_path) == ["packed_attention_hopper-bf16_k64-sm_90a"]


def test_every_group_of_attention_is_listed(nvcc):
    every = sum(len(groups_of(table, 80)) for chain in cuda.TABLES.values() for table in chain)
    assert f"0 of {every} built" in invoke("flash_attention", "--arch", "80", "--list").output
    assert nvcc.compilations() == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("update_pages", "--arch", "90a"),
        ("ragged_page_attention", "--arch", "80"),
        ("update_pages", "--shape", "2,128,2,64"),
    ],
)
def test_what_is_without_cuda_needs_nothing(arguments, nvcc):
    for more in ((), ("--list",)):
        assert "nothing of it needs a kernel that nvcc compiles" in invoke(*arguments, *more).output


def test_a_shape_of_an_op_needs_what_would_run_if_it_were_built(nvcc, tmp_path):
    shape = ("flash_attention", "--shape", "1,128,2,64", "--dtype", "float32", "--causal")
    assert "0 of 2 built" in invoke(*shape, "--list").output
    assert built(tmp_path) == []
    assert "2 of 2 built now" in invoke(*shape).output
    assert built(tmp_path) == [BACKWARD, FORWARD]
    assert "0 of 2 built now, 2 were there" in invoke(*shape).output
    assert "1 of 1 built" in invoke(*shape, "--no-backward", "--list").output


@pytest.mark.parametrize(
    ("device", "head_dim", "needed"),
    [
        ("NVIDIA A100-SXM4-80GB", 128, ["flash_attention_ampere_forward-bf16_k128_plain-sm_80"]),
        ("NVIDIA H200", 128, []),  # Pallas serves it
        ("NVIDIA H200", 320, ["flash_attention_hopper_wide_forward-bf16_k512-sm_90a"]),
    ],
)
def test_for_a_device_that_is_not_here(device, head_dim, needed, stand_in, tmp_path):
    shape = ("--shape", f"1,256,2,{head_dim}", "--dtype", "bfloat16", "--no-backward")
    invoke("flash_attention", *shape, "--device", device)
    assert built(tmp_path) == needed


def test_a_program_that_asks_for_cuda_for_a_device_that_is_not_here(stand_in, tmp_path):
    arrays = ("--shapes", "float32[1,128,2,64] float32[1,128,2,64] float32[1,128,2,64]")
    invoke("mine:by_cuda", *arrays, "--device", "NVIDIA H200")
    assert built(tmp_path) == [FORWARD]


def test_a_program_needs_what_its_calls_need(nvcc, tmp_path):
    arrays = ("--shapes", "float32[1,128,2,64] float32[1,128,2,64] float32[1,128,2,64]")
    invoke("mine:attend", *arrays)
    assert built(tmp_path) == [FORWARD]
    assert "1 of 2 built" in invoke("mine:gradient", *arrays, "--list").output
    invoke("mine:gradient", *arrays)
    assert built(tmp_path) == [BACKWARD, FORWARD]


def test_calls_that_ask_for_cuda_are_found_in_one_go(nvcc, tmp_path):
    """They would compile while they are lowered, one after another and without a word."""
    arrays = ("--shapes", "bfloat16[1,128,2,320] bfloat16[1,128,2,320] bfloat16[1,128,2,320]")
    result = invoke("mine:gradient", *arrays, "--jobs", "2")
    assert built(tmp_path) == [
        "flash_attention_ampere_backward-bf16_k512_plain-sm_90a",
        "flash_attention_hopper_wide_forward-bf16_k512-sm_90a",
    ]
    said = result.stderr.splitlines()
    assert sum(line.startswith("building flash_attention") for line in said) == 2
    assert sum(line.startswith("built flash_attention") for line in said) == 2


def test_what_was_lowered_to_be_read_is_not_what_runs(nvcc):
    """In place of kernels that are not there it has zeros."""
    invoke("mine:by_cuda", "--shapes", "float32[1,128,2,64] float32[1,128,2,64] float32[1,128,2,64]")
    query = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
    text = jax.jit(sys.modules["mine"].by_cuda).lower(query, query, query).as_text()
    assert "stablehlo.custom_call @tilewright_flash_attention_ampere_forward_f32_k64_plain_sm_90a_" in text


def lock_of(*decided, device="gpu:NVIDIA H200:9.0"):
    """A lock of calls of attention, each a shape and its config."""
    decisions = []
    for shape, direction, config in decided:
        query = jnp.zeros(shape, jnp.bfloat16)
        inv, _ = prepared(kernel("flash_attention"), (query, query, query), {}, concrete=False)
        there = devices.device_of_fingerprint(device)
        inv = Invocation(inv.kernel, inv.args, inv.kwargs, direction=direction, device=there)
        decisions.append(Decision.of(inv.key, config, "source"))
    return Lock(device, {}, tuple(decisions))


def test_a_lock_file_needs_what_its_decisions_name(nvcc, tmp_path):
    lock = lock_of(
        (
            (1, 256, 2, 320),
            "forward",
            Choice("cuda", cuda.CudaForwardParams("fmha_hopperF_bf16_64x64_k512_halves")),
        ),
        ((1, 256, 2, 128), "backward", Choice("cuda", cuda.CudaBackwardParams(None, True))),
        ((1, 256, 2, 64), "forward", Choice("xla")),
    )
    lock.save("lock.json")
    assert "2 of 2 built now" in invoke("--lock", "lock.json").output
    assert built(tmp_path) == [
        "flash_attention_ampere_backward-bf16_k128_plain-sm_90a",
        "flash_attention_hopper_wide_forward-bf16_k512-sm_90a",
    ]


def test_decisions_on_what_is_not_here_are_passed_over(nvcc, tmp_path):
    params = cuda.CudaForwardParams("fmha_hopperF_bf16_64x64_k512_halves")
    known = lock_of(((1, 256, 2, 320), "forward", Choice("cuda", params))).decisions[0]
    others = [
        Decision("another_op", "forward", "", known.key.replace('"op":"flash_attention"', '"op":"another_op"'), {}, ""),
        Decision("flash_attention", "forward", "", known.key.replace('"version":"1"', '"version":"0"'), {}, ""),
    ]
    Lock("gpu:NVIDIA H200:9.0", {}, (known, *others)).save("lock.json")
    result = invoke("--lock", "lock.json")
    assert "1 of 1 built now" in result.output
    assert "1 decision of lock.json passed over, on another_op: there is no such op here" in result.stderr
    assert "on flash_attention: its version here is 1, not 0" in result.stderr


def test_one_that_fails_does_not_keep_the_others(nvcc, tmp_path):
    nvcc.behave("f16_k64", "fail")
    nvcc.behave("bf16_k64", "die")
    result = invoke("ragged_page_attention", "--arch", "90a", "--jobs", "1", code=1)
    assert "2 of 4 built now" in result.stdout
    assert "error: told to fail" in result.stderr
    last = result.stderr.splitlines()[-2:]
    assert sorted(last) == [
        "tilewright: nvcc could not compile packed_attention_hopper bf16_k64 sm_90a (ended by SIGSEGV):",
        "tilewright: nvcc could not compile packed_attention_hopper f16_k64 sm_90a (exit code 2):",
    ]
    assert len(built(tmp_path)) == 2


def test_what_the_built_kernels_ask_for_is_built_too(nvcc, tmp_path, capsys):
    """A variant may turn out not to fit once it is compiled; then the next one is needed."""
    first, second = groups_of(cuda_packed.TABLE, 90)[:2]
    assert building.build_and_report(lambda: [first, second] if locate(first) else [first], 1) == 0
    assert locate(second)
    said = capsys.readouterr()
    assert "2 of 2 built now" in said.out
    assert "(2 of 2)" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flash_attention", "--lock", "lock.json"], "give one of a target, --lock and --table"),
        (["flash_attention", "--table", "packed_attention_hopper"], "give one of a target, --lock and --table"),
        (["--shape", "1,128,2,64"], "a shape or a case is that of an op"),
        (["nonesuch"], "no op is called 'nonesuch'"),
        (["mine:nonesuch"], "nonesuch"),
        (["flash_attention", "--shape", "1,128,2,64", "--arch", "80"], "--arch is for tables and whole ops"),
        (["--lock", "lock.json", "--arch", "80"], "--arch is for tables and whole ops"),
        (["--lock", "lock.json"], "there is no lock file"),
        (["ragged_page_attention", "--group", "nonesuch"], "bf16_k128"),
    ],
)
def test_what_does_not_go_together_is_one_line(arguments, message, nvcc, capsys):
    code, out, line = ends(capsys, "build", *arguments)
    assert (code, out) == (2, "")
    assert message in line
