"""The source of methods, read from their files: nothing is run."""

import ast
import functools
import inspect
from collections.abc import Callable, Iterator


@functools.cache
def _functions(path: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """The functions of a file, by name and first line."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {(node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])): node for node in found}


def tree(function: Callable) -> ast.FunctionDef | None:
    """A function's source. None where there is none, or where something is wrapped around the function."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return None
    try:
        node = _functions(code.co_filename).get((code.co_name, code.co_firstlineno))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
    return None if node is None or node.decorator_list else node


def methods(cls: type) -> Iterator[Callable]:
    """The methods that an object of a class may run, without torch's: of those of one name the last one, and those in front of it where
    it asks `super()`."""
    asks_on: dict[str, bool] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith(("torch.", "builtins")):
            for name, value in vars(base).items():
                value = value.fget if isinstance(value, property) else value
                if inspect.isfunction(value) and asks_on.get(name, True):
                    asks_on[name] = "super" in value.__code__.co_names
                    yield value


@functools.cache
def attributes(method: Callable) -> tuple[set[str], set[str]]:
    """The names of attributes that a method sets, and of those that it reads from another object than `self`."""
    found = [node for node in ast.walk(tree(method) or ast.Pass()) if isinstance(node, ast.Attribute)]
    taken = {node.attr for node in found if not _is_own(node, node.attr)}
    return {node.attr for node in found if isinstance(node.ctx, ast.Store)}, taken


def uses(method: Callable, name: str) -> bool:
    """Whether a method has `self.<name>` other than to read an attribute of it."""
    found = tree(method)
    if found is None:
        return name in getattr(getattr(inspect.unwrap(method), "__code__", None), "co_names", ())
    inner = {id(node.value) for node in ast.walk(found) if isinstance(node, ast.Attribute)}
    return any(_is_own(node, name) and id(node) not in inner for node in ast.walk(found))


def _is_own(node: ast.AST, name: str) -> bool:
    """Whether it is `self.<name>`."""
    is_attribute = isinstance(node, ast.Attribute) and node.attr == name
    return is_attribute and isinstance(node.value, ast.Name) and node.value.id == "self"
