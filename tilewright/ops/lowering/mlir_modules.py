"""MLIR modules of one function, ``main``: made of a jaxpr apart from the program that asks, and called by any."""

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

from tilewright.ops.lowering.surroundings import without_places

type Value = ir.Value[Any]


def lower(ctx: mlir.LoweringRuleContext, jaxpr: ClosedJaxpr, operands: Sequence[Value]) -> ir.Module | None:
    """A module whose ``main`` computes a closed jaxpr; ``None`` if it could not be called by another program.

    It could not if it belongs to the program that asks: by callbacks and what is to be kept alive for it, by channels,
    or by a mesh. It tells nothing of that program: it has no locations in files.

    Args:
      ctx: of the lowering rule that asks.
      operands: values of the types that ``main`` takes.
    """
    around = ctx.module_context
    channels, nowhere = itertools.count(1), ir.Location.unknown(around.context)
    without_files = jax_config.include_full_tracebacks_in_locations(True), jax_config.traceback_in_locations_limit(0)
    with without_files[0], without_files[1], without_places(), nowhere:
        module = ir.Module.create()
        own = around.replace(
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
        main = func.FuncOp("main", ir.FunctionType.get(types, []), ip=own.ip)
        block = main.add_entry_block()
        with ir.InsertionPoint(block):
            rule = mlir.lower_fun(jaxpr_as_fun(jaxpr))
            apart = ctx.replace(
                module_context=own,
                name_stack=new_name_stack(),
                traceback=None,
                tokens_in=jax_mlir.TokenSet(),
                tokens_out=None,
                const_lowering={},
            )
            results = list(rule(apart, *block.arguments))
            if not all(isinstance(result, ir.Value) for result in results):
                return None
            func.ReturnOp(results)
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, [x.type for x in results]))
    uses_program = own.keepalives or own.host_callbacks or next(channels) != 1
    if uses_program or not all(isinstance(op, func.FuncOp) for op in module.body.operations):
        return None
    module.operation.verify()
    return module


def bytecode_of(module: ir.Module) -> bytes:
    return jax_mlir.module_to_bytecode(module)


def custom_calls(module: ir.Module) -> tuple[str, ...]:
    """The names of the custom calls in a module."""
    found: set[str] = set()

    def look(operation: ir.Operation) -> ir.WalkResult:
        if (target := _target(operation)) is not None:
            found.add(target)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return tuple(sorted(found))


def calls_apart(module: ir.Module, targets: Collection[str]) -> list[bytes]:
    """Each custom call of one of these names as a module of its own, the same call once: bytecode, in their order."""
    found: dict[bytes, None] = {}

    def look(operation: ir.Operation) -> ir.WalkResult:
        if _target(operation) in targets:
            found[_apart(operation)] = None
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return list(found)


def _target(operation: ir.Operation) -> str | None:
    """The name of a custom call."""
    is_call = operation.name == "stablehlo.custom_call"
    return ir.StringAttr(operation.attributes["call_target_name"]).value if is_call else None


def _apart(operation: ir.Operation) -> bytes:
    """A module whose ``main`` does one operation."""
    with operation.context, ir.Location.unknown():
        module = ir.Module.create()
        module.operation.attributes["sym_name"] = ir.StringAttr.get("kernel")
        operands, results = ([value.type for value in values] for values in (operation.operands, operation.results))
        block = func.FuncOp("main", (operands, results), ip=ir.InsertionPoint(module.body)).add_entry_block()
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        with ir.InsertionPoint(block):  # no clone, whose location would be that of the program
            copy = ir.Operation.create(operation.name, results, list(block.arguments), attributes)
            func.ReturnOp(list(copy.results))
        module.operation.verify()
        return bytecode_of(module)


def parsed(ctx: mlir.LoweringRuleContext, bytecode: bytes) -> ir.Module:
    """A module from its bytes.

    Raises:
      ValueError: they are none.
    """
    with ctx.module_context.context, ir.Location.unknown():
        try:
            return ir.Module.parse(bytecode)
        except ir.MLIRError as error:
            raise ValueError(f"it is no MLIR module: {error}") from error


def takes(module: ir.Module, operands: Sequence[Value]) -> bool:
    """Tells if a module has a ``main`` for operands of these types."""
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp) and op.sym_name.value == "main"]
    return len(functions) == 1 and list(functions[0].type.inputs) == [operand.type for operand in operands]


def call(
    ctx: mlir.LoweringRuleContext, key: Hashable, bytecode: bytes, operands: Sequence[Value], name: str
) -> list[Value]:
    """The results of a module's ``main``, which becomes a function of the program that is being lowered.

    Args:
      key: of the module; a program has one function for all calls of one key.
      name: of the function, if the program has no other of that name.
    """
    around = ctx.module_context
    known = around.cached_primitive_lowerings
    key = ("tilewright", key)
    if key not in known:
        module = parsed(ctx, bytecode)
        unique = jax_mlir.merge_mlir_modules(around.module, name, module, dst_symtab=around.symbol_table)
        known[key] = around.symbol_table[unique]
    function = known[key]
    symbol = ir.FlatSymbolRefAttr.get(function.sym_name.value)
    return list(func.CallOp(list(function.type.results), symbol, list(operands)).results)
