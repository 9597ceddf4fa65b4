"""checks/programs.py: does a program that an answer contains compile, and pass its tests?

The tests run in a process of their own and call the answer's functions in another
(checks/apart.py), so an answer can print, exit, patch builtins, look for the tests, or return an
object that equals everything: it passes only by returning what the tests expect.

Bounds       CPU and wall time, memory (not on macOS), file size, no second process, an empty
             folder, no environment; an audit hook refuses other files, signals, sockets and native
             code
No sandbox   it stops what models write to pass a test, not an attack on the interpreter. Train on a
             machine, or in a container, that holds nothing else
Not carried  what a function prints; other modules than Python's own; comparison of the answer's own
             objects with plain values (Money(5) == 5 is False); identity (`is`)
"""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

from checks.maths import Undecided

APART = str(Path(__file__).with_name("apart.py"))
FENCE = re.compile(  # language, code: up to a fence of as many marks, or to the end
    r"^[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?(`{3,}|~{3,})(?![`~])[ \t]*\{?\.?([\w.+#-]*)[^\n`]*\n"
    r"(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)",
    re.S | re.M,
)
WORDS = (ast.Name, ast.Attribute, ast.Tuple, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare)
WORDS += (ast.IfExp, ast.boolop, ast.unaryop, ast.operator, ast.cmpop, ast.expr_context)


def compiles(source):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, "tests", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # a ValueError: a null byte
        return False
    return True


def programs(answer):
    """The pieces of an answer that are Python code: its fenced blocks, else all of it.

    >>> programs("Here:\\n```python\\nx = 1\\n```\\nRun it:\\n```bash\\npython x.py\\n```")
    ['x = 1\\n']
    >>> programs("Yes."), programs("def f(")
    ([], [])
    """
    answer = re.sub(r"\r\n?", "\n", answer)
    fences = FENCE.findall(answer)
    fenced = [c for _, language, c in fences if re.fullmatch(r"(?i)(python[\d.]*|py3?)?", language)]
    sources = map(textwrap.dedent, fenced or [FENCE.sub("", answer)])
    return [source for source in sources if is_program(source)]


def is_program(source):
    """Does it compile, and is it more than words?"""
    return compiles(source) and not all(map(is_prose, ast.parse(source).body))


def is_prose(node):
    """A statement of words that Python can read: "Yes, SQL", "not sure", "Gaps: none"."""
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr):
        return isinstance(node, ast.Pass)
    return isinstance(node.value, (ast.Constant, ast.Tuple)) or all(
        isinstance(n, WORDS) or isinstance(n, ast.Constant) and type(n.value) not in (int, float)
        for n in ast.walk(node.value)
    )


def check_nothing(tests):
    """Do these tests define things and run none of them, or hold nothing that can fail?"""
    tree = ast.parse(tests)
    names = (getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(tree))
    can_fail = any(isinstance(n, (ast.Assert, ast.Raise)) for n in ast.walk(tree))
    can_fail = can_fail or any(re.match(r"(?i)_?(?:assert|fail|exit)", name) for name in names)
    return not (can_fail and any(map(is_run, tree.body)))


def is_run(node):
    """Is a statement of the tests more than a definition that somebody else is to call?"""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name.lower().startswith("test") or bool(getattr(node, "bases", []))
    quiet = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    docstring = isinstance(getattr(node, "value", None), ast.Constant)
    return not (docstring or isinstance(node, quiet))


def run_tests(answer, tests, seconds=5):
    """True if the tests run to their end, with the names that the answer's code defines.

    test_… functions, Test… and unittest classes are run too. Undecided if the tests do not compile,
    import what is not there, exit or use nothing of the answer's; if the answer redefines a builtin
    that they use, or if the system bounds no time or memory.
    """
    if os.name != "posix":
        raise Undecided("this system cannot bound the answer's code")
    if not compiles(tests):
        raise Undecided("its tests do not compile")
    job = {"blocks": programs(answer), "tests": tests, "seconds": seconds}
    if not job["blocks"]:
        return False
    here, there = socket.socketpair()
    with tempfile.TemporaryDirectory() as empty:

        def start(side, line, **streams):
            command = [sys.executable, "-I", "-S", APART, side, str(line.fileno())]
            places = {"cwd": empty, "env": {}, "pass_fds": [line.fileno()]}
            return subprocess.Popen(command, stderr=subprocess.DEVNULL, **places, **streams)

        with here, there:
            code = start("answer", there, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            testing = start("tests", here, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with code, testing:
            try:
                report, _ = testing.communicate(json.dumps(job).encode(), timeout=2 * seconds)
            except subprocess.TimeoutExpired:
                report = b""
            code.kill()
            testing.kill()
    passed, reason = json.loads(report or "[false, null]")
    if passed is None:
        raise Undecided(reason)
    return passed
