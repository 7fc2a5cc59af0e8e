"""Kernels compiled ahead of their program: once in a process, once on a machine; what fails is left to the program."""

import threading
import time

import jax
import pytest
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib.mlir import ir

from tilewright.ops.lowering import ahead, mlir_modules
from tilewright.ops.lowering.ahead import CompiledKernels
from tilewright.ops.lowering.lowered_files import LoweredFiles

PROGRAM = """
module @program {
  func.func @inner(%x: tensor<8xf32>) -> tensor<8xf32> {
    %y = stablehlo.custom_call @mosaic_gpu_v2(%x) {mhlo.backend_config = {module = "second"}}
      : (tensor<8xf32>) -> tensor<8xf32>
    return %y : tensor<8xf32>
  }
  func.func @main(%x: tensor<8xf32>, %n: tensor<4xi32>) -> (tensor<8xf32>, tensor<2xf32>) {
    %a:2 = stablehlo.custom_call @mosaic_gpu_v2(%x, %n) {mhlo.backend_config = {module = "first"}}
      : (tensor<8xf32>, tensor<4xi32>) -> (tensor<8xf32>, tensor<2xf32>)
    %b = call @inner(%a#0) : (tensor<8xf32>) -> tensor<8xf32>
    %c = stablehlo.custom_call @mosaic_gpu_v2(%b) {mhlo.backend_config = {module = "second"}}
      : (tensor<8xf32>) -> tensor<8xf32>
    %d = stablehlo.custom_call @another(%c) : (tensor<8xf32>) -> tensor<8xf32>
    return %d, %a#1 : tensor<8xf32>, tensor<2xf32>
  }
}
"""


@pytest.fixture
def program():
    with jax_mlir.make_ir_context(), ir.Location.unknown():
        yield ir.Module.parse(PROGRAM)


class Client:
    """XLA's, as far as it is used: executables are bytes, and every compilation takes its time."""

    platform = "gpu"
    platform_version = "cuda 13000"

    def __init__(self, seconds: float = 0.0, fails: bool = False, version: str = "cuda 13000"):
        self.platform_version = version
        self.seconds, self.fails = seconds, fails
        self.programs: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def local_devices(self):
        return jax.local_devices(backend="cpu")

    def compile_and_load(self, module, devices, options):
        with self._lock:
            self.programs.append(str(module))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.seconds)
        with self._lock:
            self.at_once -= 1
        if self.fails:
            raise RuntimeError("ptxas has died")
        return b"executable of " + str(module).encode()

    def serialize_executable(self, executable):
        return executable

    def deserialize_executable(self, content, devices, options):
        if self.fails or not content.startswith(b"executable of "):
            raise RuntimeError("it is of another compiler")
        return content


@pytest.fixture
def files(tmp_path):
    return LoweredFiles(tmp_path / "lowered")


def compiled(client, files, program, **options):
    kernels = CompiledKernels(files, **options)
    kernels.begin(client, program)
    kernels.wait()
    return kernels


def test_each_kernel_becomes_a_program_that_does_what_its_call_does(program):
    codes = mlir_modules.extract_calls(program, ahead.TARGETS)
    assert codes == mlir_modules.extract_calls(program, ahead.TARGETS)  # their hashes name files
    first, second = (str(ir.Module.parse(code)) for code in codes)
    if '"second"' in first:
        first, second = second, first
    assert '"first"' in first
    assert "(tensor<8xf32>, tensor<2xf32>)" in first
    assert "%arg1: tensor<4xi32>" in first
    assert '"second"' in second
    assert second.count("custom_call") == 1
    assert str(program).count("custom_call") == 4  # the program is as it was


def test_a_kernel_is_compiled_once_in_a_process(program, files):
    client = Client()
    kernels = compiled(client, files, program)
    kernels.begin(client, program)
    kernels.wait()
    assert (kernels.compiled, kernels.loaded, len(client.programs)) == (2, 0, 2)


def test_a_second_process_compiles_nothing(program, files):
    compiled(Client(), files, program)
    client = Client()
    kernels = compiled(client, files, program)
    assert (kernels.compiled, kernels.loaded, client.programs) == (0, 2, [])


def test_another_compiler_compiles_again(program, files):
    compiled(Client(), files, program)
    assert compiled(Client(version="cuda 13010"), files, program).compiled == 2


def test_another_kind_of_device_compiles_again(program, files, monkeypatch):
    compiled(Client(), files, program)
    monkeypatch.setattr(ahead, "device_fingerprint", lambda device: "gpu:NVIDIA H200:9.0")
    assert compiled(Client(), files, program).compiled == 2


def test_kernels_are_compiled_at_the_same_time_while_the_caller_goes_on(program, files):
    client = Client(seconds=0.5)
    kernels = CompiledKernels(files, at_once=2)
    before = time.monotonic()
    kernels.begin(client, program)
    assert time.monotonic() - before < 0.4
    kernels.wait()
    assert client.most_at_once == 2


def test_no_more_are_compiled_at_once_than_may_be(program, files):
    client = Client(seconds=0.1)
    assert compiled(client, files, program, at_once=1).compiled == 2
    assert client.most_at_once == 1


def test_who_asks_for_what_another_compiles_waits_for_it(program, files):
    client = Client(seconds=0.3)
    kernels = CompiledKernels(files)
    kernels.begin(client, program)
    asked = []

    def ask():
        with jax_mlir.make_ir_context(), ir.Location.unknown():
            kernels.begin(client, ir.Module.parse(PROGRAM))
        kernels.wait()
        asked.append(kernels.compiled)

    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert asked == [2]
    assert len(client.programs) == 2


def test_a_compiler_that_fails_is_left_to_the_program(program, files):
    kernels = compiled(Client(fails=True), files, program)
    assert kernels.compiled == 0
    assert files.usage() == (0, 0)


def test_an_executable_that_cannot_be_loaded_is_compiled_again(program, files, caplog):
    compiled(Client(), files, program)
    for path in files.path.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    client = Client()
    assert compiled(client, files, program).compiled == 2
    assert "is not used" in caplog.text
    assert compiled(Client(), files, program).loaded == 2  # it was written anew


def test_nothing_is_kept_where_the_user_says_so(program, files, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_LOWERED", "0")
    assert compiled(Client(), files, program).compiled == 2
    assert files.usage() == (0, 0)


def test_a_failure_to_begin_is_not_the_users_and_leaves_nobody_waiting(program, files, monkeypatch):
    kernels = CompiledKernels(files)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no more threads")))
        kernels.begin(Client(), program)
    assert kernels.compiled == 0
    waiting = threading.Thread(target=kernels.wait, daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()


def test_programs_for_the_cpu_begin_nothing(monkeypatch):
    monkeypatch.setattr(ahead.KERNELS, "begin", lambda *_: pytest.fail("there is no kernel"))
    from tilewright.modules import flash_attention

    query = jax.ShapeDtypeStruct((1, 64, 2, 64), "float32")
    jax.jit(flash_attention).lower(query, query, query)
