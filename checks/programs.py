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
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from checks.maths import Undecided

FENCE = r"^[ \t]*(?:```|~~~)[ \t]*(?:python[\d.]*|py|py3)?[ \t]*\n(.*?)(?:^[ \t]*(?:```|~~~)|\Z)"
LANGUAGE = r"^[ \t]*(?:```|~~~)[ \t]*(\w[\w+#-]*).*?\n.*?^[ \t]*(?:```|~~~)"


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
    other = [m[0] for m in re.finditer(LANGUAGE, answer, re.S | re.M) if not m[1].startswith("py")]
    for block in other:
        answer = answer.replace(block, "")
    fenced = re.findall(FENCE, answer, re.S | re.M | re.I)
    return [source for source in fenced or [answer] if is_program(source)]


def is_program(source):
    """Does it compile, and is it more than words that happen to be names?"""
    if not compiles(source):
        return False
    simple = (ast.Name, ast.Constant, ast.Tuple)
    body = ast.parse(source).body
    return any(
        not isinstance(getattr(node, "value", node), simple) or not isinstance(node, ast.Expr)
        for node in body
    )


def run_nothing(tests):
    """Do these tests define things and check none of them?"""
    body = ast.parse(tests).body
    quiet = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    own = (ast.FunctionDef, ast.ClassDef)
    named = [
        n
        for n in body
        if isinstance(n, own) and (n.name.startswith("test") or getattr(n, "bases", []))
    ]
    return all(isinstance(node, quiet) for node in body) and not named


def run_tests(answer, tests, seconds=5):
    """True if the tests run to their end, with the names that the answer's code defines.

    test_… functions and unittest classes are run too. Undecided if the tests do not compile, if the
    answer redefines a builtin that they use, or if the system bounds no time or memory.
    """
    if os.name != "posix":
        raise Undecided("this system cannot bound the answer's code")
    if not compiles(tests):
        raise Undecided("its tests do not compile")
    job = {"blocks": programs(answer), "tests": tests, "seconds": seconds}
    if not job["blocks"]:
        return False
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("apart.py")), "tests"]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "report", "w+b") as report:
        os.mkdir(empty := Path(folder) / "empty")
        process = subprocess.Popen(
            command,
            cwd=empty,
            env={},
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=2 * seconds)
        except subprocess.TimeoutExpired:
            pass
        report.seek(0)
        number, _, verdict = report.read().decode().partition("\n")
        if not verdict:
            stop(process, number)
            return False
    passed, reason = json.loads(verdict)
    if passed is None:
        raise Undecided(reason)
    return passed


def stop(process, number):
    """End the tests' process and the answer's, whose number it has written."""
    for pid in (number, process.pid):
        try:
            os.kill(int(pid), 9)
        except (ValueError, ProcessLookupError):  # not started yet, or ended
            continue
    process.wait()
