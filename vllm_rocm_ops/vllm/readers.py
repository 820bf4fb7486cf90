"""Who reads the result of a layer, as the source of the forwards says that call the layer.

vLLM's models are written alike, and change from release to release. So no class is known here by its name: the statements of a
forward are followed with what its module has, a test of what is fixed when a model has been built takes one branch, any other
test both. What is not understood counts as a reader. Nothing is run, and nothing of a model is imported.
"""

import ast
import dataclasses
import inspect
import types
from collections.abc import Callable

from torch import nn

from vllm_rocm_ops.vllm import source

HANDED = ("maybe_fused_act_quant", "maybe_fused_norm_quant")
"""Functions of vLLM that run the layer that is their first argument. The second one is of a patch, see patches/."""

VIEWS = ("contiguous", "flatten", "reshape", "unsqueeze", "view")
FACTS = ("device", "dim", "dtype", "ndim", "numel", "size")
"""What a tensor answers beside its shape. A quantized activation has a shape only."""

RESULT, BOTH = "the result", "the result and the residual"
COMPUTED = "computed here"


@dataclasses.dataclass
class Readers:
    """What reads a layer's result."""

    parts: dict[tuple[int, str], tuple[nn.Module, str]] = dataclasses.field(default_factory=dict)
    """Leaves, as linear layers, attention, experts: each as its parent and its name there."""
    others: dict[str, None] = dataclasses.field(default_factory=dict)
    """All else, as source."""
    as_tensor: bool = False
    """Whether a reader asks for more than the shape, or hands a view on."""
    leaves_graph: bool = False
    """Whether a model returns it that is compiled as a whole."""
    feeds_norm: bool = False
    """Whether another norm or activation of ours, or what follows its module, reads it."""
    is_behind: bool = False
    """Whether the layer's input is computed in front of it, by more than modules."""
    pairs: int = 0
    """How often the layer is called with a residual."""
    overwritten: int = 0
    """How often the sum takes the residual's name at once, so that nothing reads the residual as it was."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A value that is the same in every run, and the attribute that it is, if it is one."""

    value: object
    owner: nn.Module | None = None
    name: str = ""


State = dict[str, "str | Known"]
"""Local names that have the result, a known value, or one that was computed here. Others have none of them."""


class Model:
    """A model that has been built, and what its classes' source says of all of it."""

    def __init__(self, model: nn.Module, leaf: tuple[type, ...]):
        self.leaf = leaf
        self.owners: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    self.owners.setdefault(child, []).append((module, name))
        self.changing: set[str] = set()
        self.taken: set[str] = set()
        for method in {method for module in model.modules() for method in source.methods(type(module))}:
            if method.__name__ != "__init__":
                changing, taken = source.attributes(method)
                self.changing |= changing
                self.taken |= taken

    def readers(self, layer: nn.Module) -> Readers | str:
        """Who reads what a layer of the model returns; or why that is not known."""
        found, calls = Readers(), 0
        for owner, name in self.owners.get(layer, ()):
            if name in self.taken:
                return f"{name} is used by other modules than its own"
            if isinstance(owner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                return f"it is one of several in a {type(owner).__name__}"
            forward, methods = type(owner).forward, source.methods(type(owner))
            users = [method for method in methods if method.__name__ != "__init__" and source.uses(method, name)]
            if not users:
                continue
            if users != [forward]:
                return f"{next(method for method in users if method is not forward).__qualname__} uses it"
            if "forward" in vars(owner) or source.tree(forward) is None:
                return f"the source of {type(owner).__name__}.forward is not known"
            calls += 1
            Run(self, found, owner, forward, layer).follow({})
        return found if calls else "nothing calls it"


class Run:
    """One function of one module, followed statement by statement."""

    def __init__(self, model: Model, found: Readers, module: nn.Module, function: Callable, layer: nn.Module | None):
        self.model, self.found, self.module, self.function, self.layer = model, found, module, function, layer
        self.tree = source.tree(function)
        self.is_graph = hasattr(module, "do_not_compile") and function is type(module).forward

    def follow(self, state: State) -> None:
        self.block(self.tree.body, state)

    def other(self, node: ast.AST) -> None:
        self.found.others[ast.unparse(node).split("\n")[0]] = None

    # Statements

    def block(self, statements: list[ast.stmt], state: State | None) -> State | None:
        """The names behind the statements; None where none is reached."""
        for statement in statements:
            if state is None:
                return None
            state = self.statement(statement, state)
        return state

    def statement(self, node: ast.stmt, state: State) -> State | None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, node.value, state)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign(node.target, node.value, state)
        elif isinstance(node, ast.AugAssign):
            for part in (node.target, node.value):
                self.unread(part, state, node)
            self.bind(node.target, COMPUTED, state, node)
        elif isinstance(node, ast.Expr):
            self.value(node.value, state)
        elif isinstance(node, ast.Assert):
            self.unread(node.test, state, node)
        elif isinstance(node, ast.If):
            test = self.value(node.test, state)
            if test in (RESULT, BOTH):
                self.other(node.test)
            if isinstance(test, Known):
                return self.block(node.body if _truth(test.value) else node.orelse, state)
            return _joined(self.block(node.body, dict(state)), self.block(node.orelse, dict(state)))
        elif isinstance(node, ast.Return):
            self.returned(node, state)
            return None
        elif isinstance(node, ast.Raise):
            return None
        elif not isinstance(node, ast.Pass | ast.Import | ast.ImportFrom):
            self.unknown(node, state)
        return state

    def returned(self, node: ast.Return, state: State) -> None:
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] if node.value else []
        for part in parts:
            if self.value(part, state) not in (RESULT, BOTH):
                continue
            if self.is_graph:
                self.found.leaves_graph = True
            else:
                self.found.feeds_norm = True
                self.other(node)

    def unknown(self, node: ast.AST, state: State) -> None:
        """A statement that is not followed: all that it touches is read, or no longer known."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                if state.get(part.id) in (RESULT, BOTH) or self.is_layer(state.get(part.id)):
                    self.other(node)
                if isinstance(part.ctx, ast.Store):
                    state.pop(part.id, None)
            elif isinstance(part, ast.Attribute) and self.is_layer(self.value(part, {})):
                self.other(node)

    def assign(self, target: ast.expr, value: ast.expr, state: State) -> None:
        is_pairwise = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if is_pairwise and len(target.elts) == len(value.elts):
            found = [self.value(part, state) for part in value.elts]
            for part, one in zip(target.elts, found):
                self.bind(part, one, state, value)
            return
        found = self.value(value, state)
        if found == BOTH and isinstance(target, ast.Tuple) and isinstance(value, ast.Call):
            self.found.overwritten += ast.unparse(target.elts[-1]) in map(ast.unparse, value.args[1:])
        self.bind(target, found, state, value)

    def bind(self, target: ast.expr, value: "str | Known | None", state: State, node: ast.AST) -> None:
        if isinstance(target, ast.Name):
            if value is None:
                state.pop(target.id, None)
            else:
                state[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            is_pair = value == BOTH and len(target.elts) == 2
            if value in (RESULT, BOTH) and not is_pair:
                self.other(node)
            for part, one in zip(target.elts, (RESULT, None) if is_pair else (None,) * len(target.elts)):
                self.bind(part, one, state, node)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value, state, node)
        else:
            if value in (RESULT, BOTH) or self.is_layer(value):
                self.other(node)
            for part in ast.iter_child_nodes(target):
                self.unread(part, state, target)

    # Expressions

    def unread(self, node: ast.AST, state: State, reader: ast.AST) -> None:
        """Note that `reader` reads the result if the expression is the result."""
        value = self.value(node, state)
        if value in (RESULT, BOTH) or self.is_layer(value):
            self.other(reader)

    def is_layer(self, value) -> bool:
        return self.layer is not None and isinstance(value, Known) and value.value is self.layer

    def value(self, node: ast.AST, state: State) -> "str | Known | None":
        """What an expression gives. Its parts' readers are noted."""
        if isinstance(node, ast.Constant):
            return Known(node.value)
        if isinstance(node, ast.Name):
            return self.named(node.id, state)
        if isinstance(node, ast.Attribute):
            return self.attribute(node, state)
        if isinstance(node, ast.Call):
            return self.call(node, state)
        if isinstance(node, ast.BoolOp):
            return self.logic(node, state)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.value(node.operand, state)
            if isinstance(value, Known):
                return Known(not _truth(value.value))
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.comparison(node, state)
        if isinstance(node, ast.NamedExpr | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self.unknown(node, state)
            return None
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, ast.expr_context | ast.operator | ast.unaryop | ast.cmpop):
                self.unread(part, state, node)
        return COMPUTED if isinstance(node, ast.BinOp) else None

    def named(self, name: str, state: State) -> "str | Known | None":
        if name in state:
            return state[name]
        if self.tree.args.args and name == self.tree.args.args[0].arg:
            return Known(self.module)
        is_local = name in self.function.__code__.co_varnames + self.function.__code__.co_cellvars
        value = None if is_local else self.function.__globals__.get(name)
        return Known(value) if isinstance(value, type) else None

    def attribute(self, node: ast.Attribute, state: State) -> "str | Known | None":
        base = self.value(node.value, state)
        if base == RESULT and node.attr == "shape":
            return None
        if base == RESULT and node.attr in FACTS:
            self.found.as_tensor = True
            return None
        if base in (RESULT, BOTH):
            self.other(node)
            return None
        if not isinstance(base, Known) or not isinstance(base.value, nn.Module) or node.attr in self.model.changing:
            return None
        module, name = base.value, node.attr
        value = {**vars(type(module)), **vars(module), **module._modules}.get(name, _MISSING)
        if value is _MISSING:
            value = inspect.getattr_static(type(module), name, _MISSING)
        if inspect.isfunction(value):
            value = types.MethodType(value, module)
        is_fixed = value is None or isinstance(value, bool | int | float | str | nn.Module | types.MethodType)
        return Known(value, module, name) if is_fixed else None

    def logic(self, node: ast.BoolOp, state: State) -> Known | None:
        ends, known = isinstance(node.op, ast.Or), True
        for part in node.values:
            value = self.value(part, state)
            if value in (RESULT, BOTH):
                self.other(node)
            if not isinstance(value, Known):
                known = False
            elif _truth(value.value) == ends:
                return Known(ends)
        return Known(not ends) if known else None

    def comparison(self, node: ast.Compare, state: State) -> Known | None:
        left, right = self.value(node.left, state), self.value(node.comparators[0], state)
        same = isinstance(node.ops[0], ast.Is | ast.Eq)
        if not same and not isinstance(node.ops[0], ast.IsNot | ast.NotEq):
            if {left, right} & {RESULT, BOTH}:
                self.other(node)
            return None
        if left == RESULT and isinstance(right, Known) and right.value is None:
            return Known(not same)
        if {left, right} & {RESULT, BOTH}:
            self.other(node)
        if not isinstance(left, Known) or not isinstance(right, Known):
            return None
        if isinstance(left.value, nn.Module) or isinstance(right.value, nn.Module):
            return Known((left.value is right.value) == same)
        return Known((left.value == right.value) == same)

    def call(self, node: ast.Call, state: State) -> "str | Known | None":
        function = node.func
        if isinstance(function, ast.Attribute) and self.value(function.value, state) == RESULT:
            return self.asked(node, function.attr, state)
        called = self.value(function, state)
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        given = [self.value(argument, state) for argument in node.args]
        named = {keyword.arg: self.value(keyword.value, state) for keyword in node.keywords}
        if name in HANDED and given and self.is_layer(given[0]):
            return self.made(node, given[1:2] + (given[2:3] if name == "maybe_fused_norm_quant" else []), {})
        if self.is_layer(called):
            return self.made(node, given, named)
        if name == "isinstance" and all(isinstance(value, Known) for value in given):
            return Known(isinstance(given[0].value, given[1].value)) if isinstance(given[1].value, type) else None
        if self.layer is not None and any(self.is_layer(value) for value in (*given, *named.values())):
            self.other(node)
        if BOTH in (*given, *named.values()):
            self.other(node)
        for place, value in (*enumerate(given), *named.items()):
            if value == RESULT:
                self.give(called, place, node)
        return None

    def made(self, node: ast.Call, given: list, named: dict) -> str:
        """What the layer returns: with a residual, the result and the residual."""
        self.found.is_behind |= COMPUTED in (given[0] if given else named.get("x"),)
        if {RESULT, BOTH} & {value for value in (*given, *named.values()) if isinstance(value, str)}:
            self.other(node)
        residual = [*given[1:], *(value for name, value in named.items() if name != "x")]
        if not residual or residual[0] == Known(None):
            return RESULT
        self.found.pairs += 1
        return BOTH

    def asked(self, node: ast.Call, method: str, state: State) -> str | None:
        """A method of the result."""
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.unread(part, state, node)
        self.found.as_tensor = True
        if method in VIEWS:
            return RESULT
        if method not in FACTS:
            self.other(node)
        return None

    def give(self, called: "str | Known | None", place: int | str | None, node: ast.Call) -> None:
        """Follow the result into what is called with it."""
        value = called.value if isinstance(called, Known) else None
        is_method = isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module)
        if isinstance(value, self.model.leaf):
            self.found.parts[id(called.owner), called.name] = called.owner, called.name
            return
        if hasattr(type(value), "consumer"):
            self.found.feeds_norm = True
        module, function = (
            (value.__self__, value.__func__) if is_method else (value, getattr(type(value), "forward", None))
        )
        tree = source.tree(function) if isinstance(module, nn.Module) and "forward" not in vars(module) else None
        if tree is None or any(isinstance(argument, ast.Starred) for argument in node.args):
            self.other(node.func)
            return
        names = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)][1:]
        name = place if isinstance(place, str) else names[place] if place is not None and place < len(names) else None
        if name is None or name not in (*names, *(argument.arg for argument in tree.args.kwonlyargs)):
            self.other(node)
            return
        Run(self.model, self.found, module, function, None).follow({name: RESULT})


_MISSING = object()


def _truth(value: object) -> bool:
    return isinstance(value, nn.Module) or bool(value)


def _joined(one: State | None, other: State | None) -> State | None:
    """The names behind two branches."""
    if one is None or other is None:
        return other if one is None else one
    both = {name: value for name, value in one.items() if name in other and other[name] == value}
    return both | {name: value for name, value in (one | other).items() if value in (RESULT, BOTH)}
