"""Finds the config fields that jaxtrain reads, in its syntax trees.

A read is an attribute of an expression with a known class: a parameter or variable with an
annotation, ``self``, the result of a function of the package, and chains of these
(``run.optim.peak_lr``, ``self._run.loop.log_every``). ``Run.model`` and ``Run.data`` have the
annotation ``Any`` and stand for every model and data config; so does a parameter ``model: Any``.

Reads in ``problems``, in ``_check`` functions, in ``__post_init__`` and in ``raise`` do not count,
because they alone do not use a field.
"""

import ast
import functools
from collections.abc import Iterator, Mapping

RUN = "jaxtrain.config.run.Run"
MODEL, DATA = "any model config", "any data config"
Env = dict[str, str]


class _Class:
    def __init__(self, bases: list[str], is_dataclass: bool) -> None:
        self.bases, self.is_dataclass = bases, is_dataclass
        self.fields: dict[str, str | None] = {}  # name -> class, if known
        self.attributes: dict[str, str] = {}


class Program:
    """The package: classes with their fields, functions with their return types.

    Args:
        sources: dotted module name -> text.
        models: qualified names of the model configs.
        data: qualified names of the data configs.
    """

    def __init__(self, sources: Mapping[str, str], models: set[str], data: set[str]) -> None:
        self.trees = {name: _parse(text) for name, text in sources.items()}
        self.any = {MODEL: models, DATA: data}
        self.names = {module: dict(_imported(tree)) for module, tree in self.trees.items()}
        self.classes: dict[str, _Class] = {}
        self.returns: dict[str, str] = {}
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    self.names[module][node.name] = f"{module}.{node.name}"
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    decorated = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
                    bases = [name for base in node.bases if (name := self.resolve(base, module))]
                    self.classes[f"{module}.{node.name}"] = _Class(bases, decorated)
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._collect_fields(node, module)
                elif isinstance(node, ast.FunctionDef):
                    returned = self.annotated(node.returns, module)
                    if returned in self.classes:
                        self.returns[f"{module}.{node.name}"] = returned
        self.read: set[tuple[str, str]] = set()
        for _ in range(2):  # on the second pass, every self.attribute is known
            for module, tree in self.trees.items():
                _Reader(self, module).visit(tree)

    def _collect_fields(self, node: ast.ClassDef, module: str) -> None:
        own = self.classes[f"{module}.{node.name}"]
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                of = self.annotated(line.annotation, module)
                own.fields[line.target.id] = of if of in self.classes else None
        if f"{module}.{node.name}" == RUN:
            own.fields |= {"model": MODEL, "data": DATA}

    def resolve(self, node: ast.expr | None, module: str) -> str | None:
        """Returns the qualified name of an expression; that of X for ``X | None``."""
        match node:
            case ast.Name(id=name):
                return self._defined(self.names[module].get(name))
            case ast.Attribute(value=value, attr=attr):
                base = self.resolve(value, module)
                return self._defined(f"{base}.{attr}") if base else None
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return self.resolve(left, module) or self.resolve(right, module)
        return None

    def _defined(self, full: str | None) -> str | None:
        """Returns where a name is defined: a package may re-export it from a module."""
        while full is not None and full not in self.names:
            base, _, attr = full.rpartition(".")
            there = self.names.get(base, {}).get(attr, full)
            if there == full:
                break
            full = there
        return full

    def annotated(self, node: ast.expr | None, module: str) -> str | None:
        """Returns the qualified name of an annotation, quoted or not."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return self.resolve(node, module)

    def lineage(self, name: str) -> Iterator[str]:
        """Yields a class of the package and its base classes."""
        if name in self.classes:
            yield name
            for base in self.classes[name].bases:
                yield from self.lineage(base)

    def note(self, owner: str, attribute: str) -> None:
        """Records a read."""
        for name in self.any.get(owner, {owner}):
            for ancestor in self.lineage(name):
                if attribute in self.classes[ancestor].fields:
                    self.read.add((ancestor, attribute))

    def attribute(self, owner: str, attribute: str) -> str | None:
        """Returns the class of an attribute, if known."""
        for name in self.any.get(owner, {owner}):
            for ancestor in self.lineage(name):
                own = self.classes[ancestor]
                known = own.fields.get(attribute) or own.attributes.get(attribute)
                if known:
                    return known
        return None

    def unread(self) -> list[str]:
        """Returns the fields of config classes that are never read, as ``module.Class.field``."""
        wanted = {name for names in self.any.values() for name in names} | {RUN}
        frontier = set(wanted)
        while frontier:  # sections and base classes
            for name in frontier:
                assert name in self.classes, f"{name} is not a class at the top of its module"
            found = {of for name in frontier for of in self.classes[name].fields.values() if of}
            found |= {ancestor for name in frontier for ancestor in self.lineage(name)}
            frontier = {name for name in found if name in self.classes} - wanted
            wanted |= frontier
        return sorted(
            f"{name}.{field}"
            for name in wanted
            for field in self.classes[name].fields
            # A field that a class declares again, with another default, is read in its base class.
            if not any((of, field) in self.read for of in (name, *self.lineage(name)))
        )


class _Reader(ast.NodeVisitor):
    """Visits one module, and tracks the classes of names."""

    def __init__(self, program: Program, module: str) -> None:
        self.program, self.module = program, module
        self.owner: str | None = None
        self.env: Env = {}

    def type_of(self, node: ast.expr) -> str | None:
        program = self.program
        match node:
            case ast.Name(id=name):
                return self.env.get(name)
            case ast.Attribute(value=value, attr=attr):
                base = self.type_of(value)
                return program.attribute(base, attr) if base else None
            case ast.Call(func=function, args=arguments):
                called = program.resolve(function, self.module)
                if called == "dataclasses.replace":
                    return self.type_of(arguments[0])
                if called in program.classes:
                    return called
                return program.returns.get(called) if called else None
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base = self.type_of(node.value)
        if base and isinstance(node.ctx, ast.Load):
            self.program.note(base, node.attr)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            values = [node.value]
            targets = [target]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = target.elts, node.value.elts
            for one, value in zip(targets, values, strict=False):
                self._bind(one, self.type_of(value))

    def _bind(self, target: ast.expr, of: str | None) -> None:
        match target:
            case ast.Name(id=name):
                self.env.pop(name, None)
                if of:
                    self.env[name] = of
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if self.owner and of:
                self.program.classes[self.owner].attributes[attr] = of

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, name = self.owner, f"{self.module}.{node.name}"
        self.owner = name if name in self.program.classes else None
        self.generic_visit(node)
        self.owner = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("problems", "__post_init__") or node.name.startswith("_check"):
            return
        outer, self.env = self.env, dict(self.env)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in arguments:
            of = self.program.annotated(argument.annotation, self.module)
            if argument.arg == "self" and self.owner:
                of = self.owner
            elif argument.arg in ("model", "data") and of == "typing.Any":
                of = MODEL if argument.arg == "model" else DATA
            self.env.pop(argument.arg, None)
            if of in self.program.classes or of in (MODEL, DATA):
                self.env[argument.arg] = str(of)
        self.generic_visit(node)
        self.env = outer


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@functools.lru_cache(maxsize=256)
def _imported(tree: ast.Module) -> tuple[tuple[str, str], ...]:
    return tuple(_imports(tree).items())


def _imports(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names
