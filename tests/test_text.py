"""Checks text lengths and imports. python -m pytest -s tests/test_text.py prints a line per file."""
import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READING_ORDER = ["encoder", "ann", "memory", "tome", "data", "train", "eval"]
MAY_IMPORT = {
    "encoder": set(), "ann": set(), "data": set(),
    "memory": {"encoder", "ann", "data"},
    "tome": {"encoder", "ann", "data", "memory"},
    "train": {"encoder", "ann", "data", "memory", "tome"},
    "eval": {"encoder", "ann", "data", "memory", "tome", "train"},
}


def prose_lines(text):
    """Numbers of the lines that contain only a comment or belong to a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            lines.add(token.start[0])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


@pytest.mark.parametrize("name, most", [("README.md", 238), ("tests/README.md", 250)])
def test_the_readmes_are_short_and_their_prose_is_at_most_100_columns_wide(name, most):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most
    is_code = False
    for number, line in enumerate(lines, 1):
        is_code ^= line.startswith("```")
        if not is_code and not line.startswith("|"):            # a table row must be one line
            assert len(line) <= 100, f"{name}:{number} has {len(line)} columns"

def test_no_line_of_the_code_is_wider_than_100_columns():
    total = prose = method = 0
    for name in READING_ORDER:
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        lines, share = len(text.splitlines()), len(prose_lines(text))
        widest = max(map(len, text.splitlines()))
        first = len(text.partition("\n# ==== Set apart")[0].splitlines())
        print(f"{name + '.py':<12}{lines:>6} lines   above Set apart {first:>5}   "
              f"widest {widest:>3}   prose {share / lines:.0%}")
        assert widest <= 100, f"{name}.py has a line of {widest} columns"
        total, prose, method = total + lines, prose + share, method + first
    print(f"{'in all':<12}{total:>6} lines   above Set apart {method:>5}   "
          f"prose {prose / total:.0%}")


@pytest.mark.parametrize("name", READING_ORDER)
def test_imports_run_one_way(name):
    imported = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported & set(READING_ORDER) <= MAY_IMPORT[name]
