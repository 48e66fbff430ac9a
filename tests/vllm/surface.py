"""What a package uses of vLLM, read from its source: names it imports, attributes it touches.

Types are followed from annotations, of ours and of vLLM's: through parameters, fields, local names,
loops and calls. Where nothing is annotated nothing is found; so this finds no attribute too many,
and hardly one too few.
"""

import ast
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
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


Type = Vllm | Ours | Many | None


@dataclass
class _Class:
    """A class of the package: what its attributes are, and which bases it has."""

    attributes: dict[str, Type] = field(default_factory=dict)
    bases: list[Vllm] = field(default_factory=list)


class Surface:
    """``used`` maps each module of vLLM to the dotted names that are used of it."""

    def __init__(self, folder: Path, prefix: str = "vllm") -> None:
        self.used: dict[str, set[str]] = {}
        self.classes: dict[str, _Class] = {}
        self.functions: dict[str, Type] = {}  # of the package's modules: what they return
        self.prefix = prefix
        files = [_File(self, ast.parse(path.read_text())) for path in sorted(folder.rglob("*.py"))]
        for file in files:
            self.classes |= {node.name: _Class() for node in file.class_nodes()}
        for file in files:
            file.read_returns()
        for _ in range(2):  # classes refer to each other
            for file in files:
                file.read_classes()
        for file in files:
            file.read_functions()

    def note(self, thing: Any, attribute: str = "") -> None:
        """*attribute* of *thing* is used, or *thing* itself."""
        if isinstance(thing, types.ModuleType):
            if attribute:
                self.used.setdefault(thing.__name__, set()).add(attribute)
            return
        module, name = thing.__module__, thing.__qualname__
        if module.split(".")[0] == self.prefix:
            self.used.setdefault(module, set()).add(f"{name}.{attribute}" if attribute else name)


class _File:
    def __init__(self, surface: Surface, tree: ast.Module) -> None:
        self.surface = surface
        self.tree = tree
        self.names: dict[str, Type] = {}
        for node in ast.walk(tree):
            self._read_import(node)

    def class_nodes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def read_classes(self) -> None:
        for node in self.class_nodes():
            known = self.surface.classes[node.name]
            bases = [self._type_of(base, {}) for base in node.bases]
            known.bases = [base for base in bases if isinstance(base, Vllm)]
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
                self.surface.used.setdefault(node.module, set()).add(alias.name)
                thing = getattr(module, alias.name)
                if not isinstance(thing, type | types.ModuleType) and not callable(thing):
                    thing = Named(node.module, alias.name)
                self.names[alias.asname or alias.name] = Vllm(thing)

    def _read_method(self, known: _Class, owner: str, method: ast.FunctionDef) -> None:
        for base in known.bases:
            is_hook = hasattr(base.thing, method.name) and not method.name.startswith("__")
            if is_hook and base.thing.__module__.split(".")[0] == self.surface.prefix:
                self.surface.note(base.thing, method.name)
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
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name):
                scope[target.id] = self._type_of(value, scope) or scope.get(target.id)
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for one, other in zip(target.elts, value.elts, strict=False):
                    if isinstance(one, ast.Name):
                        scope[one.id] = self._type_of(other, scope) or scope.get(one.id)
            elif isinstance(target, ast.Tuple):
                self._bind_each(target, self._type_of(value, scope), scope)
        if isinstance(node, ast.NamedExpr):
            scope[node.target.id] = self._type_of(node.value, scope)
        if isinstance(node, ast.For | ast.comprehension):
            found = self._type_of(node.iter, scope)
            self._bind_each(node.target, found, scope)

    @staticmethod
    def _bind_each(target: ast.expr, found: Type, scope: dict[str, Type]) -> None:
        each = found.each if isinstance(found, Many) else None
        if each is None:
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
            known = self.surface.classes[owner.name]
            if name in known.attributes:
                return known.attributes[name]
            for base in known.bases:
                if has_attribute(base.thing, name):
                    self.surface.note(base.thing, name)
            return None
        if isinstance(owner, Many) and name in {"values", "items", "get", "pop"}:
            return Many(owner if name in {"values", "items"} else owner.each)
        if not isinstance(owner, Vllm):
            return None
        if owner.is_instance and not has_attribute(owner.thing, name):
            self._note_narrowed(owner.thing, name)
            return None
        self.surface.note(owner.thing, name)
        if isinstance(owner.thing, types.ModuleType) or not owner.is_instance:
            thing = getattr(owner.thing, name, None)
            return Vllm(thing) if _is_of(thing, self.surface.prefix) else None
        return self._vllm_member(owner.thing, name)

    def _note_narrowed(self, kind: type, name: str) -> None:
        """*name* is of subclasses of *kind*: those that the file asks for."""
        for other in self.names.values():
            thing = other.thing if isinstance(other, Vllm) else None
            is_narrower = isinstance(thing, type) and issubclass(thing, kind)
            if is_narrower and has_attribute(thing, name):
                self.surface.note(thing, name)

    def _vllm_member(self, kind: type, name: str) -> Type:
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, property):
            return self._hinted(_hints(member.fget).get("return"))
        if inspect.isfunction(member):
            return Many(self._hinted(_hints(member).get("return")))
        return self._hinted(_hints(kind).get(name))

    def _called(self, node: ast.Call, scope: dict[str, Type]) -> Type:
        if isinstance(node.func, ast.Name) and node.func.id in _ITERATORS | {"iter", "reversed"}:
            return self._type_of(node.args[0], scope) if node.args else None
        if isinstance(node.func, ast.Name) and node.func.id == "next" and node.args:
            found = self._type_of(node.args[0], scope)
            return found.each if isinstance(found, Many) else None
        if isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant):
                return self._attribute(self._type_of(owner, scope), str(name.value))
            return None
        called = self._type_of(node.func, scope)
        if isinstance(called, Many):
            return called.each
        if isinstance(called, Vllm) and isinstance(called.thing, type):
            return Vllm(called.thing, is_instance=True)
        if isinstance(called, Vllm) and inspect.isfunction(called.thing):
            return self._hinted(_hints(called.thing).get("return"))
        return None

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
        names = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
        for name, hint in getattr(kind, "__annotations__", {}).items():
            try:
                found[name] = (
                    eval(hint, {**names}) if isinstance(hint, str) else hint
                )  # vLLM's own annotations
            except (NameError, TypeError, AttributeError):
                continue
    return found
