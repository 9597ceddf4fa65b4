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
import warnings
from pathlib import Path

from checks.maths import Undecided

APART = str(Path(__file__).with_name("apart.py"))
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
    for other in re.finditer(LANGUAGE, answer, re.S | re.M):
        if not other[1].startswith("py"):
            answer = answer.replace(other[0], "")
    fenced = re.findall(FENCE, answer, re.S | re.M | re.I)
    return [source for source in fenced or [answer] if is_program(source)]


def is_program(source):
    """Does it compile, and is it more than words that happen to be names?"""
    if not compiles(source):
        return False
    words = (ast.Name, ast.Constant, ast.Tuple)
    body = ast.parse(source).body
    return not all(isinstance(n, ast.Expr) and isinstance(n.value, words) for n in body)


def run_nothing(tests):
    """Do these tests define things and check none of them?"""
    quiet = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(tests).body:
        test = getattr(node, "name", "").startswith("test") or getattr(node, "bases", [])
        if test or not isinstance(node, quiet):
            return False
    return True


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
