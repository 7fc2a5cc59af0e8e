"""MLIR modules with one function, ``main``, lowered from a jaxpr on their own and callable by any program."""

import itertools
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from jax._src import config as jax_config
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func
from jax._src.source_info_util import new_name_stack
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir

from tilewright.ops.lowering.surroundings import without_source_locations

type Value = ir.Value[Any]


def lower(ctx: mlir.LoweringRuleContext, jaxpr: ClosedJaxpr, operands: Sequence[Value]) -> ir.Module | None:
    """A module whose ``main`` computes a closed jaxpr; ``None`` if another program could not call it.

    Such a jaxpr depends on the requesting program: by callbacks and objects to keep alive for it, by channels, or by a
    mesh. The module holds no trace of that program, not even source locations.

    ctx: the context of the requesting lowering rule.
    Args:
      operands: values of the types that ``main`` takes.
    """
    caller_ctx = ctx.module_context
    channels, nowhere = itertools.count(1), ir.Location.unknown(caller_ctx.context)
    without_files = jax_config.include_full_tracebacks_in_locations(True), jax_config.traceback_in_locations_limit(0)
    with without_files[0], without_files[1], without_source_locations(), nowhere:
        module = ir.Module.create()
        module_ctx = caller_ctx.replace(
            module=module,
            ip=ir.InsertionPoint(module.body),
            symbol_table=ir.SymbolTable(module.operation),
            keepalives=[],
            host_callbacks=[],
            channel_iterator=channels,
            lowering_cache={},
            cached_primitive_lowerings={},
            pallas_lowering_cache={},
            traceback_caches=None,
        )
        types = [operand.type for operand in operands]
        main = func.FuncOp("main", ir.FunctionType.get(types, []), ip=module_ctx.ip)
        block = main.add_entry_block()
        with ir.InsertionPoint(block):
            rule = mlir.lower_fun(jaxpr_as_fun(jaxpr))
            rule_ctx = ctx.replace(
                module_context=module_ctx,
                name_stack=new_name_stack(),
                traceback=None,
                tokens_in=jax_mlir.TokenSet(),
                tokens_out=None,
                const_lowering={},
            )
            results = list(rule(rule_ctx, *block.arguments))
            if not all(isinstance(result, ir.Value) for result in results):
                return None
            func.ReturnOp(results)
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, [x.type for x in results]))
    uses_program = module_ctx.keepalives or module_ctx.host_callbacks or next(channels) != 1
    if uses_program or not all(isinstance(op, func.FuncOp) for op in module.body.operations):
        return None
    module.operation.verify()
    return module


def bytecode_of(module: ir.Module) -> bytes:
    return jax_mlir.module_to_bytecode(module)


def custom_calls(module: ir.Module) -> tuple[str, ...]:
    """The sorted names of the custom calls in a module."""
    found: set[str] = set()

    def look(operation: ir.Operation) -> ir.WalkResult:
        if (target := _target(operation)) is not None:
            found.add(target)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return tuple(sorted(found))


def extract_calls(module: ir.Module, targets: Collection[str]) -> list[bytes]:
    """Each distinct custom call of one of these names as a module of its own: bytecode, in order of appearance."""
    found: dict[bytes, None] = {}

    def look(operation: ir.Operation) -> ir.WalkResult:
        if _target(operation) in targets:
            found[_extract(operation)] = None
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return list(found)


def _target(operation: ir.Operation) -> str | None:
    """The target name of a custom call; None for other operations."""
    is_call = operation.name == "stablehlo.custom_call"
    return ir.StringAttr(operation.attributes["call_target_name"]).value if is_call else None


def _extract(operation: ir.Operation) -> bytes:
    """A module whose ``main`` consists of one operation, as bytecode."""
    with operation.context, ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get("kernel")
        operands, results = ([value.type for value in values] for values in (operation.operands, operation.results))
        block = func.FuncOp("main", (operands, results), ip=ir.InsertionPoint(module.body)).add_entry_block()
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        with ir.InsertionPoint(block):  # not a clone, which would keep the program's location
            copy = ir.Operation.create(operation.name, results, list(block.arguments), attributes)
            func.ReturnOp(list(copy.results))
        module.operation.verify()
        return bytecode_of(module)


def parsed(ctx: mlir.LoweringRuleContext, bytecode: bytes) -> ir.Module:
    """Parses a module from bytecode.

    Raises:
      ValueError: the bytes are not a module.
    """
    with ctx.module_context.context, ir.Location.unknown():
        try:
            return ir.Module.parse(bytecode)
        except ir.MLIRError as error:
            raise ValueError(f"it is no MLIR module: {error}") from error


def takes(module: ir.Module, operands: Sequence[Value]) -> bool:
    """True if a module has a ``main`` for operands of these types."""
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp) and op.sym_name.value == "main"]
    return len(functions) == 1 and list(functions[0].type.inputs) == [operand.type for operand in operands]


def call(
    ctx: mlir.LoweringRuleContext, key: Hashable, bytecode: bytes, operands: Sequence[Value], name: str
) -> list[Value]:
    """Merges a module's ``main`` into the program being lowered, calls it, and returns the results.

    Args:
      key: identifies the module; a program has one function for all calls with the same key.
      name: name of the function, made unique within the program.
    """
    module_ctx = ctx.module_context
    known = module_ctx.cached_primitive_lowerings
    key = ("tilewright", key)
    if key not in known:
        module = parsed(ctx, bytecode)
        unique = jax_mlir.merge_mlir_modules(module_ctx.module, name, module, dst_symtab=module_ctx.symbol_table)
        known[key] = module_ctx.symbol_table[unique]
    function = known[key]
    symbol = ir.FlatSymbolRefAttr.get(function.sym_name.value)
    return list(func.CallOp(list(function.type.results), symbol, list(operands)).results)
