"""What every command has in common: how it names things, completes words, and ends."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import typer
from rich.text import Text

from tests.support.command_line import ends, invoke, one_device
from tilewright.cli import main, output
from tilewright.cli.app import app
from tilewright.cli.entries import entry_id, find_entry, full_id
from tilewright.cli.functions import import_named
from tilewright.cli.options import CallOptions
from tilewright.ops import FwdParams, PersistentCache
from tilewright.ops.utils.text import as_text, lines, plain_console, table

COMMAND = [sys.executable, "-m", "tilewright"]
SHAPE = ["--shape", "1,64,2,16"]


def run(*arguments, **environment):
    return subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, "XLA_FLAGS": one_device(), **environment},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def commands(command=None, path=()):
    """Every command with its words."""
    command = typer.main.get_command(app) if command is None else command
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


# Markup


def test_no_help_text_is_read_as_markup():
    for path, command in commands():
        texts = [command.help, *(getattr(each, "help", None) for each in command.params)]
        for text in filter(None, texts):
            assert Text.from_markup(text).plain == text, path


def test_what_is_printed_keeps_brackets_and_colons(capsys):
    hostile = r"tilewright[triton] [batch, heads] \[x] [bold]no[/bold] [/] :smile: [link=x]"
    made = table(hostile, "a", "b [c]", unwrapped=("a", "b [c]"))
    made.add_row(hostile, lines((hostile, "dim"), ("→", "bold")))
    output.stdout().print(made)
    printed = capsys.readouterr().out
    assert printed.count(hostile) == 3
    assert "b [c]" in printed
    assert as_text(made).count(hostile) == 3


def test_an_explanation_keeps_the_brackets_of_its_hints(monkeypatch):
    from tilewright.kernels.triton import requirements

    monkeypatch.setattr(requirements, "_version", lambda: None)
    text = invoke("explain", "flash_attention", *SHAPE, "--no-backward", "--device", "NVIDIA H200")
    assert "pip install 'tilewright[triton]'" in text
    assert "f32[1,64,2,16]" in text


# Numbers and words


@pytest.mark.parametrize(
    ("text", "name"),
    [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("f32", "float32"),
     ("float32", "float32")],
)  # fmt: skip
def test_dtypes_may_be_short(text, name):
    options = CallOptions(dtype=text, extra=(f"kv_dtype={text}",))
    assert options.fields() == {"dtype": name, "kv_dtype": name}


FLASH = ["explain", "flash_attention"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*FLASH, *SHAPE, "--dtype", "flaot32"], ["--dtype", "mean float32?", "bfloat16", "float16"]),
        ([*FLASH, *SHAPE, "--dtype", "int8"], ["--dtype", "float32, bfloat16, float16, float64"]),
        ([*FLASH, *SHAPE, "--dtype", "f64"], ["JAX_ENABLE_X64"]),
        (["explain", "page_attention", *SHAPE, "--set", "kv_dtype=int9"], ["kv_dtype", "mean int8?", "float8_e5m2"]),
        ([*FLASH, *SHAPE, "--set", "slidng_window=3"], ["mean sliding_window?", "logits_soft_cap"]),
        (["explain", "flash_attention", "--case", "causal4k"], ["mean causal_4k?", "decode"]),
        ([*FLASH, *SHAPE, "--set", "causal_alignment=bottom"], ["bottom_right", "top_left"]),
        (["tune", "flash_attention", *SHAPE, "--isolation", "proces"], ["--isolation", "'process'", "auto", "none"]),
        (["tun"], ["mean 'tune'?"]),
        (["explain", "flash_atention"], ["mean flash_attention?"]),
        (["explain", "json"], ["ops are flash_attention", "module:function"]),
    ],
)  # fmt: skip
def test_a_wrong_word_lists_the_right_ones(arguments, words, capsys):
    code, out, line = ends(capsys, *arguments)
    assert (code, out) == (2, "")
    for word in words:
        assert word in line


# Functions of the user's


MODULE = """
import jax.numpy as jnp
from tilewright.ops import Kernel

def double(x):
    return 2 * x

def made():
    return double, (jnp.arange(3.0),)

def nothing_needed():
    return {"x": jnp.ones(2)}

def fails(x):
    return {}["nonesuch key"]

class Twice(Kernel):
    def run(self, x, *, cfg):
        return 2 * x
    def heuristic_cfg(self, inv):
        return None

kernel = Twice("twice")
"""


@pytest.fixture
def mine(folder):
    (folder / "mine_here.py").write_text(MODULE)
    return folder


@pytest.mark.parametrize("target", ["mine_here:double", "./mine_here.py:double", "mine_here:kernel", "mine_here:Twice"])
def test_bench_times_functions_and_kernels(target, mine):
    file = mine / "bench.json"
    text = invoke("bench", target, "--shapes", "f32[8,4]", "--iters", "3", "--json", str(file))
    assert "float32[8,4]" in text
    (measured,) = json.loads(file.read_text())["measurements"]
    assert measured["implementation"] == target
    assert len(measured["samples_ms"]) == 3
    assert measured["median_ms"] == np.median(measured["samples_ms"])


def test_bench_times_what_a_function_returns_and_what_needs_nothing(mine):
    assert "float32[3]" in invoke("bench", "mine_here:made", "--iters", "1")
    assert "no arrays" in invoke("bench", "mine_here:nothing_needed", "--iters", "1")


def test_a_file_is_imported_by_the_name_that_other_processes_know(mine):
    package = mine / "deep" / "mine_package"
    (package / "inner").mkdir(parents=True)
    for folder in (package, package / "inner"):
        (folder / "__init__.py").touch()
    (package / "inner" / "work.py").write_text("from mine_package.inner import other\nvalue = other.value\n")
    (package / "inner" / "other.py").write_text("value = 7\n")
    assert import_named(str(package / "inner" / "work.py") + ":value", "value") == 7
    assert sys.modules["mine_package.inner.work"].value == 7


@pytest.mark.parametrize(
    ("source", "target", "code", "message"),
    [
        ("", "mine_here:fails", 1, "mine_here:fails raised KeyError: 'nonesuch key' (mine_here.py, line 15)"),
        ("def f(:", "mine_package:f", 1, "raised SyntaxError: invalid syntax (mine_package.py, line 1)"),
        ("1 / 0", "mine_package:f", 1, "raised ZeroDivisionError: division by zero (mine_package.py, line 1)"),
        (
            MODULE.replace("2 * x\n    def heur", "{}['no [such] key']\n    def heur"),
            "mine_package:kernel", 1, "KeyError: 'no [such] key'",
        ),
        (
            "def f(x):\n    raise RuntimeError('INTERNAL: ... KeyboardInterrupt: ...')\n",
            "mine_package:f", 130, "tilewright: interrupted",
        ),
        ("value = 7", "./json.py:value", 2, "has the name of another module"),
        ("import sys\nsys.exit(3)", "mine_package:f", 1, "ended the program with exit code 3"),
        ("import nonesuch", "mine_package:f", 2, "cannot import 'mine_package': No module named 'nonesuch'"),
        ("from json import nonesuch", "mine_package:f", 2, "cannot import name 'nonesuch'"),
        ("", "mine_her:double", 2, "there is no module 'mine_her'; did you mean mine_here?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["bench", "explain"])
def test_what_is_wrong_with_a_function_is_one_line(command, source, target, code, message, mine, capsys):
    for file in ("mine_package.py", "json.py"):
        (mine / file).write_text(source)
    ended, out, line = ends(capsys, command, target, "--shapes", "f32[3]")
    assert (ended, out) == (code, "")
    assert message in line


# Ids


def entry_of(cache, name):
    key = json.dumps({"op": name, "direction": "forward", "device": "cpu:x", "args": [], "kwargs": {}})
    assert cache.put(key, FwdParams(q_blocksize=64), metadata={"time_ms": 1.0})
    return next(entry for entry in cache.entries() if entry.key == key)


def test_an_id_is_the_beginning_of_the_digits_in_the_name_of_a_file(cache_directory):
    entry = entry_of(PersistentCache(cache_directory), "one")
    (file,) = cache_directory.glob("*.json")
    assert file.stem.endswith(f"-{full_id(entry)}")
    listed = invoke("cache", "list")
    assert re.search(rf"^ *{entry_id(entry)} ", listed, re.MULTILINE)
    assert "1 entry in" in listed


def test_the_ids_that_are_listed_are_whole_in_a_narrow_terminal(cache_directory, monkeypatch):
    from tilewright.cli.entries import entries_table

    entry = entry_of(PersistentCache(cache_directory), "one_operation_with_a_long_name")
    stream = io.StringIO()
    plain_console(file=stream, width=50).print(entries_table([entry]))
    assert entry_id(entry) in stream.getvalue()


def test_a_beginning_that_is_not_unique_names_both(cache_directory, capsys):
    cache = PersistentCache(cache_directory)
    entries = [entry_of(cache, f"op{i}") for i in range(17)]  # of 16 digits, two have the same
    first = [full_id(entry)[0] for entry in entries]
    digit = next(digit for digit in first if first.count(digit) > 1)
    both = [entry for entry in entries if full_id(entry)[0] == digit]
    code, _, line = ends(capsys, "cache", "show", digit)
    assert code == 2
    for entry in both[:5]:
        assert f"{entry_id(entry)} ({json.loads(entry.key)['op']} forward)" in line
    assert find_entry(entries, full_id(both[0])[:8].upper(), "") == both[0]
    assert find_entry(entries, full_id(both[1]), "") == both[1]
    assert "no entry" in ends(capsys, "cache", "show", "xyz")[2]
    assert "no entry" in ends(capsys, "cache", "show", "")[2]


def test_single_entries_are_removed(cache_directory, capsys):
    cache = PersistentCache(cache_directory)
    one, two = (entry_of(cache, name) for name in ("one", "two"))
    assert ends(capsys, "cache", "remove", entry_id(one), "xyz")[0] == 2  # and nothing is removed
    assert "1 entry removed" in invoke("cache", "remove", entry_id(one), full_id(one)[:10])
    assert [entry.key for entry in cache.entries()] == [two.key]


# What one command writes, another reads


def test_an_export_is_reported(cache_directory, tmp_path):
    from tilewright.ops import Candidate

    cache = PersistentCache(cache_directory)
    for device in ("cpu:x", "gpu:y"):
        key = json.dumps({"op": "mine", "direction": "forward", "device": device, "args": [], "kwargs": {}})
        cache.put(key, 1, measurements=[Candidate(1, (4.0, 6.0), heuristic=True).fields()], metadata={"time_ms": 5.0})
    invoke("cache", "export", str(tmp_path / "export.json"))
    out = tmp_path / "page.html"
    assert "2 calls" in invoke("report", str(tmp_path / "export.json"), "--out", str(out))
    page = out.read_text()
    assert "cpu:x" in page
    assert "gpu:y" in page
    assert "5 ms" in page
    assert "export.json" in page


def test_a_bench_of_an_op_is_reported(tmp_path):
    file, out = tmp_path / "bench.json", tmp_path / "page.html"
    said = ("--set", "sinks=1", "--iters", "2", "--no-backward", "--json", str(file))
    invoke("bench", "flash_attention", *SHAPE, *said)
    invoke("report", str(file), "--out", str(out))
    page = out.read_text()
    assert "tilewright xla" in page
    assert "jax.nn.dot_product_attention has no sinks" in page
    assert "Not measured: 1 candidate" in page


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema": 1, "device": "", "toolchain": {}, "entries": [], "interrupted": False}, "'tilewright tune --json'"),
        ({"op": "x", "environment": {}, "measurements": []}, "'tilewright bench --json'"),
        ({"schema": 1, "decisions": [], "sha256": ""}, "a lock file"),
        ([], "no export"),
        ({}, "no export"),
    ],
)
def test_what_is_no_export_says_what_it_is(document, message, cache_directory, tmp_path, capsys):
    (tmp_path / "file.json").write_text(json.dumps(document))
    code, _, line = ends(capsys, "cache", "import", str(tmp_path / "file.json"))
    assert code == 2
    assert "is no export" in line
    assert message in line


# Ends


@pytest.mark.parametrize("command", [["cache", "list"], ["cache", "show", "ab"], ["report"]])
def test_a_cache_that_cannot_be_read_is_a_failure(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").write_text("a file in place of the folder")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    code, _, line = ends(capsys, *command)
    assert code == 1
    assert str(tmp_path) in line
    assert "TILEWRIGHT_CACHE_DIR" in line


def test_a_tuning_that_cannot_be_kept_is_a_failure(tmp_path, cache_directory, capsys):
    (tmp_path / "configs").write_text("a file in place of the folder")
    with pytest.raises(SystemExit) as ended:
        main(["tune", "flash_attention", "--shape", "1,8,1,8", "--no-backward", "--isolation", "none"])
    captured = capsys.readouterr()
    assert ended.value.code == 1
    assert "1 call of 1 measured could not be written" in captured.err
    assert "kept" not in captured.out


def test_a_question_with_nobody_to_answer_deletes_nothing(cache_directory):
    entry_of(PersistentCache(cache_directory), "one")
    invoke("cache", "clear", input="", code=2)
    assert "nothing was deleted" in invoke("cache", "clear", input="\n", code=1)
    assert len(PersistentCache(cache_directory)) == 1
    assert "1 entry deleted" in invoke("cache", "clear", input="y\n")


@pytest.mark.parametrize(
    "arguments", [["explain", "flash_attention", *SHAPE], ["cache", "list"], ["bench", "json:loads"]]
)
def test_an_interrupt_is_one_line_and_code_130(arguments, monkeypatch, capsys):
    from tilewright.cli import benching, entries, explaining

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    for module, name in ((explaining, "named_calls"), (benching, "named_calls"), (entries, "open_cache")):
        monkeypatch.setattr(module, name, interrupt)
    code, out, line = ends(capsys, *arguments)
    assert (code, out) == (130, "")
    assert "interrupted" in line


def test_an_interrupted_bench_keeps_what_it_has(mine, monkeypatch, capsys):
    from tilewright.cli import benching

    def two(target, options, iters):
        yield "first", lambda: [benching.Measurement("a", "forward", "mine", benching.Timing((1.0,)), None)]
        raise KeyboardInterrupt

    monkeypatch.setattr(benching, "_measurements", two)
    code, out, line = ends(capsys, "bench", "mine_here:double", "--shapes", "f32[3]", "--json", "kept.json")
    assert code == 130
    assert "1 ms" in out
    assert "the 1 measurement so far is shown and written to kept.json" in line
    assert json.loads((mine / "kept.json").read_text())["measurements"][0]["median_ms"] == 1.0


def test_one_backend_that_fails_does_not_end_a_bench(monkeypatch, capsys):
    from tilewright.cli import benching

    def bound(function, positional, keywords, backward):
        if "platform" in getattr(function, "keywords", ()):
            raise RuntimeError("out of [memory]\nand more")
        return lambda: 0

    monkeypatch.setattr(benching, "_bound", bound)
    code, out, line = ends(capsys, "bench", "flash_attention", *SHAPE, "--iters", "1", "--no-backward")
    assert code == 1
    assert "jax.nn.dot_product_attention" in out
    assert "RuntimeError: out of [memory]" in out
    assert "tilewright xla failed on 1,64,2,16" in line


@pytest.mark.parametrize("command", [["explain", "flash_attention", *SHAPE], ["info"]])
def test_a_device_that_is_not_there_is_one_line(command):
    done = run(*command, JAX_PLATFORMS="nonesuch")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("tilewright: JAX finds no device")
    assert "nonesuch" in line
    assert ("flash_attention" in done.stdout) == (command == ["info"])


def test_a_reader_that_leaves_early_is_no_error(cache_directory):
    entry_of(PersistentCache(cache_directory), "one")
    command = f"{sys.executable} -m tilewright cache list | true"
    done = subprocess.run(["bash", "-c", command], env=os.environ, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr


# The module and the shell


def complete(*lines, **environment):
    """What bash would be offered for the last word of each line, by a process that must not load JAX."""
    code = """
import contextlib, io, json, os, sys
sys.argv[0] = "tilewright"
from tilewright.cli import main
for line in json.loads(sys.argv.pop()):
    os.environ |= {"COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(line) - 1)}
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main()
    print(said.getvalue().split())
print(*sorted({"jax", "numpy"} & sys.modules.keys()), file=sys.stderr, end="")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([["tilewright", *line] for line in lines])],
        env={**os.environ, "_TILEWRIGHT_COMPLETE": "complete_bash", **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def test_words_are_completed_without_jax(cache_directory, tmp_path):
    one = entry_of(PersistentCache(cache_directory), "one")
    there = entry_of(PersistentCache(tmp_path / "other"), "another")
    offered = {
        ("ben",): ["bench"],
        ("explain", "flash"): ["flash_attention"],
        ("tune", "ragged_"): ["ragged_decode_attention", "ragged_page_attention"],
        ("tune", "flash_attention", "--dtype", "b"): ["bfloat16"],
        ("tune", "flash_attention", "--isolation", "n"): ["none"],
        ("cache", "show", ""): [entry_id(one)],
        ("cache", "show", "--path", str(tmp_path / "other"), ""): [entry_id(there)],
    }
    assert complete(*offered) == list(offered.values())
    assert complete(("cache", "show", ""), TILEWRIGHT_CACHE_DIR="/nonesuch") == [[]]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_is_installed_and_completes(tmp_path):
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "tilewright"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m tilewright "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def bash(script):
        done = subprocess.run(
            ["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    # Behind another command, for bash would otherwise put the program in its own place and not be seen.
    assert "complete -o default -F _tilewright_completion tilewright" in bash("tilewright --show-completion && true")
    assert "bash completion installed" in bash("tilewright --install-completion && true")
    offered = bash(
        "source ~/.bashrc; COMP_WORDS=(tilewright explain fl); COMP_CWORD=2; _tilewright_completion tilewright; "
        'echo "${COMPREPLY[@]}"'
    )
    assert offered.strip() == "flash_attention"
