"""What a package uses of vLLM, read from its source: names it imports, attributes it touches.

Types are followed from annotations, of ours and of vLLM's: through parameters, fields, base classes,
local names, loops, unpacked tuples and calls. ``getattr`` counts where its name is a literal, or goes
through literals in a loop. Where nothing is annotated nothing is found; so this finds no attribute too
many, and hardly one too few.
"""

import ast
import builtins
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvstrata.integration.vllm.compat import has_attribute

_ITERATORS = {"list", "tuple", "set", "frozenset", "Iterable", "Sequence", "Iterator", "sorted"}
_MAPPINGS = {"dict", "Mapping", "OrderedDict"}


@dataclass(frozen=True)
class Vllm:
    """Something of vLLM, or an instance of it."""

    thing: Any
    is_instance: bool = False


class Named:
    """An object of vLLM that has no name itself: *name* in *module* is it."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__ = module
        self.__qualname__ = name


@dataclass(frozen=True)
class Ours:
    """An instance of a class of the package."""

    name: str


@dataclass(frozen=True)
class Many:
    """Something to be iterated over, looked up in, or called, that gives *each*."""

    each: "Type"


@dataclass(frozen=True)
class Words:
    """A name that is one of some literals."""

    words: tuple[str, ...]


Type = Vllm | Ours | Many | Words | None


@dataclass
class _Class:
    """A class of the package: what its attributes are, and which bases it has."""

    attributes: dict[str, Type] = field(default_factory=dict)  # those of a named tuple in order
    bases: list[Vllm | Ours] = field(default_factory=list)


class Surface:
    """What the package in *folder* uses of vLLM."""

    def __init__(self, folder: Path, prefix: str = "vllm") -> None:
        self.classes: dict[str, _Class] = {}
        self.functions: dict[str, Type] = {}  # of the package's modules: what they return
        self.prefix = prefix
        self._files = {
            path: _File(self, ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))
        }
        files = self._files.values()
        for file in files:
            self.classes |= {node.name: _Class() for node in file.class_nodes()}
        for file in files:
            file.read_returns()
        for _ in range(2):  # classes refer to each other
            for file in files:
                file.read_classes()
        for file in files:
            file.read_functions()

    @property
    def paths(self) -> set[Path]:
        return set(self._files)

    def used(self, paths: Collection[Path] | None = None) -> dict[str, set[str]]:
        """Module → dotted names in it, used by the files *paths*, or by all."""
        used: dict[str, set[str]] = {}
        for path, file in self._files.items():
            if paths is None or path in paths:
                for module, names in file.used.items():
                    used.setdefault(module, set()).update(names)
        return used

    def lineage(self, name: str) -> "Iterator[_Class]":
        """The class of the package of that *name*, and those that it is derived from."""
        known = self.classes[name]
        yield known
        for base in known.bases:
            if isinstance(base, Ours):
                yield from self.lineage(base.name)


class _File:
    def __init__(self, surface: Surface, tree: ast.Module) -> None:
        self.surface = surface
        self.tree = tree
        self.used: dict[str, set[str]] = {}
        self.names: dict[str, Type] = {}
        for node in ast.walk(tree):
            self._read_import(node)

    def note(self, thing: Any, attribute: str) -> None:
        """*attribute* of *thing* is used."""
        if isinstance(thing, types.ModuleType):
            self.used.setdefault(thing.__name__, set()).add(attribute)
            return
        module, name = thing.__module__, thing.__qualname__
        is_of_every_class = attribute.startswith("__")
        if module.split(".")[0] == self.surface.prefix and not is_of_every_class:
            self.used.setdefault(module, set()).add(f"{name}.{attribute}")

    def class_nodes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def read_classes(self) -> None:
        for node in self.class_nodes():
            known = self.surface.classes[node.name]
            bases = [self._type_of(base, {}) for base in node.bases]
            bases = [base.each if isinstance(base, Many) else base for base in bases]
            known.bases = [base for base in bases if isinstance(base, Vllm | Ours)]
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    known.attributes[statement.target.id] = self.annotated(statement.annotation)
                if isinstance(statement, ast.FunctionDef):
                    self._read_method(known, node.name, statement)

    def read_returns(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                self.surface.functions[node.name] = Many(self.annotated(node.returns))

    def read_functions(self) -> None:
        owners = {id(f): node.name for node in self.class_nodes() for f in node.body}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                scope = self._scope(node, owners.get(id(node)))
                for part in ast.walk(node):
                    if isinstance(part, ast.Attribute | ast.Call):
                        self._type_of(part, scope)
        for node in self.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                for part in ast.walk(node):
                    if isinstance(part, ast.Attribute):
                        self._type_of(part, {})

    def _read_import(self, node: ast.AST) -> None:
        prefix = self.surface.prefix
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == prefix:
                    module = importlib.import_module(alias.name)
                    self.names[alias.asname or alias.name.split(".")[0]] = Vllm(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == prefix:
            assert node.module is not None
            module = importlib.import_module(node.module)
            for alias in node.names:
                self.used.setdefault(node.module, set()).add(alias.name)
                thing = getattr(module, alias.name)
                if not isinstance(thing, type | types.ModuleType) and not callable(thing):
                    thing = Named(node.module, alias.name)
                self.names[alias.asname or alias.name] = Vllm(thing)

    def _read_method(self, known: _Class, owner: str, method: ast.FunctionDef) -> None:
        for base in known.bases:
            if isinstance(base, Vllm) and hasattr(base.thing, method.name):
                self.note(base.thing, method.name)
        if method.returns is not None:
            returned = self.annotated(method.returns)
            is_property = any(ast.unparse(d) == "property" for d in method.decorator_list)
            known.attributes[method.name] = returned if is_property else Many(returned)
        scope = self._scope(method, owner)
        for node in ast.walk(method):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found = self._type_of(node.value, scope)
                    if found is not None:
                        known.attributes[target.attr] = found
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target).startswith("self."):
                name = ast.unparse(node.target).removeprefix("self.")
                known.attributes[name] = self.annotated(node.annotation)

    def _scope(self, function: ast.FunctionDef | ast.Lambda, owner: str | None) -> dict[str, Type]:
        """Types of the names in *function*, as far as they follow from annotations."""
        scope: dict[str, Type] = {"self": Ours(owner)} if owner else {}
        for node in ast.walk(function):
            if isinstance(node, ast.arg) and node.annotation is not None:
                scope[node.arg] = self.annotated(node.annotation)
        for _ in range(2):  # a name may be used above the loop that gives it
            for node in ast.walk(function):
                self._bind(node, scope)
        return scope

    def _bind(self, node: ast.AST, scope: dict[str, Type]) -> None:
        match node:
            case ast.Assign(targets=[ast.Name() as target]):
                scope[target.id] = self._type_of(node.value, scope) or scope.get(target.id)
            case ast.Assign(targets=[ast.Tuple() as target]):
                self._bind_unpacked(target, node.value, scope)
            case ast.AnnAssign(target=ast.Name() as target):
                scope[target.id] = self.annotated(node.annotation)
            case ast.NamedExpr():
                scope[node.target.id] = self._type_of(node.value, scope)
            case ast.For() | ast.comprehension():
                self._bind_loop(node.target, node.iter, scope)

    def _bind_unpacked(self, target: ast.Tuple, value: ast.expr, scope: dict[str, Type]) -> None:
        if isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                if isinstance(one, ast.Name):
                    scope[one.id] = self._type_of(other, scope) or scope.get(one.id)
            return
        found = self._type_of(value, scope)
        if isinstance(found, Ours):
            self._bind_to(target, found, scope)
        elif isinstance(found, Many):
            for one in target.elts:
                self._bind_to(one, found.each, scope)

    def _bind_loop(self, target: ast.expr, over: ast.expr, scope: dict[str, Type]) -> None:
        match target, over:
            case ast.Tuple(), ast.Call(func=ast.Name(id="zip" | "enumerate" as name)):
                targets = target.elts if name == "zip" else target.elts[1:]
                for one, other in zip(targets, over.args, strict=False):
                    self._bind_loop(one, other, scope)
            case ast.Name(), ast.Tuple() | ast.List() | ast.Set():
                words = [e.value for e in over.elts if isinstance(e, ast.Constant)]
                scope.setdefault(target.id, Words(tuple(w for w in words if isinstance(w, str))))
            case _:
                found = self._type_of(over, scope)
                self._bind_to(target, found.each if isinstance(found, Many) else None, scope)

    def _bind_to(self, target: ast.expr, each: Type, scope: dict[str, Type]) -> None:
        if each is None:
            return
        if isinstance(target, ast.Tuple) and isinstance(each, Ours):  # a named tuple
            fields = self.surface.classes[each.name].attributes.values()
            for one, found in zip(target.elts, fields, strict=False):
                self._bind_to(one, found, scope)
            return
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                scope.setdefault(name.id, each)

    def _type_of(self, node: ast.expr, scope: dict[str, Type]) -> Type:
        match node:
            case ast.Name():
                return scope.get(node.id) or self.names.get(node.id) or self._ours(node.id)
            case ast.Attribute():
                return self._attribute(self._type_of(node.value, scope), node.attr)
            case ast.Call():
                return self._called(node, scope)
            case ast.Subscript():
                found = self._type_of(node.value, scope)
                return found.each if isinstance(found, Many) else None
            case ast.BoolOp():
                found_all = (self._type_of(value, scope) for value in node.values)
                return next((f for f in found_all if f is not None), None)
            case ast.IfExp():
                return self._type_of(node.body, scope) or self._type_of(node.orelse, scope)
        return None

    def _ours(self, name: str) -> Type:
        if name in self.surface.classes:
            return Many(Ours(name))
        return self.surface.functions.get(name)

    def _attribute(self, owner: Type, name: str) -> Type:
        if isinstance(owner, Ours):
            return self._inherited(owner, name)
        if isinstance(owner, Many) and name in {"values", "items", "get", "pop"}:
            return Many(owner if name in {"values", "items"} else owner.each)
        if not isinstance(owner, Vllm):
            return None
        if owner.is_instance and not has_attribute(owner.thing, name):
            self._note_narrowed(owner.thing, name)
            return None
        self.note(owner.thing, name)
        if isinstance(owner.thing, types.ModuleType) or not owner.is_instance:
            thing = getattr(owner.thing, name, None)
            return Vllm(thing) if _is_of(thing, self.surface.prefix) else None
        return self._vllm_member(owner.thing, name)

    def _inherited(self, owner: Ours, name: str) -> Type:
        for known in self.surface.lineage(owner.name):
            if name in known.attributes:
                return known.attributes[name]
            for base in known.bases:
                if isinstance(base, Vllm) and has_attribute(base.thing, name):
                    return self._attribute(Vllm(base.thing, is_instance=True), name)
        return None

    def _note_narrowed(self, kind: type, name: str) -> None:
        """*name* is of subclasses of *kind*: those that the file asks for."""
        for other in self.names.values():
            thing = other.thing if isinstance(other, Vllm) else None
            is_narrower = isinstance(thing, type) and issubclass(thing, kind)
            if is_narrower and has_attribute(thing, name):
                self.note(thing, name)

    def _vllm_member(self, kind: type, name: str) -> Type:
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, property):
            return self._hinted(_hints(member.fget).get("return"))
        if inspect.isfunction(member):
            return Many(self._hinted(_hints(member).get("return")))
        given = _hints(vars(kind).get("__init__"))  # what is kept of it mostly keeps its name
        return self._hinted(_hints(kind).get(name) or given.get(name.lstrip("_")))

    def _called(self, node: ast.Call, scope: dict[str, Type]) -> Type:
        if isinstance(node.func, ast.Name) and node.func.id in _ITERATORS | {"iter", "reversed"}:
            return self._type_of(node.args[0], scope) if node.args else None
        if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            found = self._type_of(node.args[0], scope)
            return found.each if isinstance(found, Many) else None
        if isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            owner, name = node.args[:2]
            return self._looked_up(owner, name, scope)
        called = self._type_of(node.func, scope)
        if isinstance(called, Many):
            return called.each
        if isinstance(called, Vllm) and isinstance(called.thing, type):
            return Vllm(called.thing, is_instance=True)
        if isinstance(called, Vllm) and inspect.isfunction(called.thing):
            return self._hinted(_hints(called.thing).get("return"))
        return None

    def _looked_up(self, owner: ast.expr, name: ast.expr, scope: dict[str, Type]) -> Type:
        """What ``getattr`` returns."""
        if isinstance(name, ast.Constant):
            return self._attribute(self._type_of(owner, scope), str(name.value))
        words = self._type_of(name, scope)
        if not isinstance(words, Words):
            return None
        found = [self._attribute(self._type_of(owner, scope), word) for word in words.words]
        return next((f for f in found if f is not None), None)

    def annotated(self, node: ast.expr) -> Type:
        """The type that an annotation of ours says."""
        match node:
            case ast.Constant(value=str() as text):
                return self.annotated(ast.parse(text, mode="eval").body)
            case ast.Name():
                if node.id in self.surface.classes:
                    return Ours(node.id)
                found = self.names.get(node.id)
                is_class = isinstance(found, Vllm) and isinstance(found.thing, type)
                return Vllm(found.thing, is_instance=True) if is_class else None  # type: ignore[union-attr]  # is_class says so
            case ast.BinOp():
                return self.annotated(node.left) or self.annotated(node.right)
            case ast.Subscript():
                inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                name = ast.unparse(node.value)
                if not inside:  # ``tuple[()]``
                    return None
                each = self.annotated(inside[-1 if name in _MAPPINGS else 0])
                return Many(each) if each and name in _MAPPINGS | _ITERATORS else None
        return None

    def _hinted(self, hint: Any) -> Type:
        """The type that an annotation of vLLM's says."""
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in {typing.Union, types.UnionType}:
            return next((f for f in map(self._hinted, inside) if f is not None), None)
        if origin is type:
            return Vllm(inside[0]) if _is_of(inside[0], self.surface.prefix) else None
        if origin in {list, tuple, set, frozenset, dict} or getattr(
            origin, "__module__", ""
        ).startswith("collections"):
            each = self._hinted(inside[-1 if len(inside) == 2 and origin is not tuple else 0])
            return Many(each) if each else None
        is_class = isinstance(hint, type) and _is_of(hint, self.surface.prefix)
        return Vllm(hint, is_instance=True) if is_class else None


def _is_of(thing: Any, prefix: str) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == prefix


def _hints(thing: Any) -> dict[str, Any]:
    """Annotations of *thing*; those that cannot be resolved are left out."""
    found: dict[str, Any] = {}
    for kind in reversed(thing.__mro__) if isinstance(thing, type) else [thing]:
        for name, hint in getattr(kind, "__annotations__", {}).items():
            try:
                found[name] = (
                    eval(hint, {}, _names_in(kind.__module__)) if isinstance(hint, str) else hint
                )  # vLLM's own annotations
            except (NameError, TypeError, AttributeError, ImportError):
                continue
    return found


class _Names(dict[str, Any]):
    """What annotations of a module can name: also what it imports for their sake alone."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(vars(module))
        self._module = module

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        for node in ast.walk(_tree_of(self._module)):
            if isinstance(node, ast.ImportFrom) and name in {
                a.asname or a.name for a in node.names
            }:
                source = "." * node.level + (node.module or "")
                return getattr(importlib.import_module(source, self._module.__package__), name)
        raise KeyError(name)


@cache
def _names_in(module: str) -> dict[str, Any]:
    return _Names(sys.modules[module]) if module in sys.modules else {}


@cache
def _tree_of(module: types.ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))
