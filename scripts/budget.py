"""Check the size budget of the code: small files, short functions, shallow nesting.

    python scripts/budget.py src [more folders or files]

Exits with 1 if a limit is broken. A file between the soft and the hard limit is only reported.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FILE_LINES_SOFT = 400
FILE_LINES_HARD = 600
FUNCTION_CODE_LINES = 60
NESTING = 4

Function = ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code: not blank, not a comment, not a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest number of blocks inside one another; an ``elif`` is as deep as its ``if``."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue  # measured on its own
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        opens = isinstance(child, _BLOCKS) and not is_elif
        deepest = max(deepest, nesting(child, depth + opens))
    return deepest


def overruns(path: Path) -> Iterator[str]:
    """One sentence for each hard limit that *path* breaks."""
    source = path.read_text(encoding="utf-8")
    total = source.count("\n")
    if total > FILE_LINES_HARD:
        yield f"{path}: {total} lines, at most {FILE_LINES_HARD}"
    elif total > FILE_LINES_SOFT:
        print(f"warning: {path}: {total} lines, better at most {FILE_LINES_SOFT}")
    tree = ast.parse(source)
    code = code_lines(source, tree)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            where = f"{path}:{node.lineno}: {node.name}"
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            lines = len(code.intersection(span))
            if lines > FUNCTION_CODE_LINES:
                yield f"{where} has {lines} code lines, at most {FUNCTION_CODE_LINES}"
            depth = nesting(node)
            if depth > NESTING:
                yield f"{where} nests {depth} blocks deep, at most {NESTING}"


def python_files(arguments: list[str]) -> list[Path]:
    roots = [Path(argument) for argument in arguments]
    missing = [root for root in roots if not root.exists()]
    if missing or not roots:
        sys.exit(f"usage: budget.py FOLDER...   (no such path: {[str(p) for p in missing]})")
    found = {path for root in roots for path in ([root] if root.is_file() else root.rglob("*.py"))}
    return sorted(found)


def main(arguments: list[str]) -> int:
    files = python_files(arguments)
    broken = [sentence for path in files for sentence in overruns(path)]
    for sentence in broken:
        print(sentence)
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    print(f"{len(files)} files, {lines} lines, {len(broken)} over budget")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
