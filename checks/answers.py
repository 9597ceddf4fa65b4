"""checks/answers.py: does a short answer, a formula or a program agree with the expected one?

choice       the option that a text settles on
maths        the last \\boxed{…}, else what follows the last ####, else the last number; exact
code         the tests, run after the answer's code in a limited subprocess. This is no sandbox.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

CHOICE = r"\banswer(?: is)?\b:?[ \t]*(.+?)(?=[.,;](?:\s|$)| because |$)"


def choice(text):
    """What follows the last "answer is", or the whole text, without ( ) . : *

    >>> [choice(t) for t in ("(B)", "I think the answer is **B**.", "Answer: (b), not C", "A trap")]
    ['b', 'b', 'b', 'a trap']
    """
    said = re.findall(CHOICE, text, re.I | re.M)
    return (said[-1] if said else text).strip(" \t\r\n()[]{}.:*\"'").casefold()


def boxed(text):
    r"""Contents of every \boxed{…} by counting braces, and of \boxed 7; None if one does not close.

    >>> boxed(r"\boxed{\frac{1}{2}} or \boxed 7 or \boxed{3")
    ['\\frac{1}{2}', '7', None]
    """
    found = []
    for match in re.finditer(r"\\boxed\s*(\{|[^\s{$]+)", text):
        depth, at = 1, match.end()
        if match.group(1) != "{":
            found.append(match.group(1))
            continue
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        found.append(None if depth else text[match.end() : at - 1])
    return found


def math_answer(text, strict_boxed=False, last_number=False):
    """The final answer or None: last box, else what follows the last ####, else the last number."""
    if boxes := boxed(text):
        agree = all(math_equal(box, boxes[-1]) for box in boxes)
        return boxes[-1] if agree or not strict_boxed else None
    if marked := re.findall(r"####[ \t]*(\S[^\n]*)", text):
        return marked[-1]
    numbers = re.findall(r"(?:(?<![\w)])[-−])?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?", text)
    return numbers[-1] if last_number and numbers else None


def math_text(text):
    r"""Normal form of a formula: no blanks, $, \left, \right, \text{}, no final dot."""
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[,;!: ]|[\s$]", "", text.replace("−", "-"))
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text.replace(r"\%", "%").replace("{,}", ","))
    return re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text).removesuffix(".")


def exact(text):
    """The Fraction that a normal form stands for, or None."""
    part = r"(?:\{(\d+)\}|(\d))"
    text = re.sub(rf"\\frac{part}{part}", lambda m: "/".join(filter(None, m.groups())), text)
    if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    if not re.fullmatch(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})(?:/\d{1,300})?", text):
        return None
    top, _, bottom = text.partition("/")
    bottom = Fraction(bottom or 1)
    return Fraction(top) / bottom if bottom else None


def math_equal(a, b):
    r"""The same text in normal form, the same fraction, or tuples equal element by element.

    >>> pairs = r"\frac12 0.5", "1,000 1000", "50% 0.5", "(1,2/4) (1.0,0.5)", "(1,2) [1,2]"
    >>> [math_equal(*pair.split()) for pair in pairs]
    [True, True, False, True, False]
    """
    if a is None or b is None:
        return False
    a, b = math_text(a), math_text(b)
    if not a or a == b:
        return bool(a)
    x, y = exact(a), exact(b)
    if x is not None and y is not None:
        return x == y
    ends = a[0] + a[-1]
    if ends == b[0] + b[-1] and ends in ("()", "[]", "(]", "[)"):
        a, b = split_tuple(a[1:-1]), split_tuple(b[1:-1])
        return len(a) == len(b) > 1 and all(map(math_equal, a, b))
    return False


def split_tuple(text):
    """Cut at the commas outside all brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        parts = [*parts, ""] if c == "," and not depth else [*parts[:-1], parts[-1] + c]
    return parts


HARNESS = """
import os, resource, sys
limits = {"CPU": %(seconds)d, "AS": 1 << 30, "FSIZE": 1 << 20, "NPROC": 0, "CORE": 0}
for name, limit in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
with open("token") as file:
    token = file.read()
os.unlink("token")
for name in ("answer.py", "tests.py"):
    with open(name) as file:
        source = file.read()
    namespace = {"__name__": "__main__"} if name == "answer.py" else namespace
    exec(compile(source, name, "exec"), namespace)
sys.stdout.flush()
os.write(1, ("\\n" + token).encode())
"""


def compiles(source):
    try:
        compile(source, "tests", "exec")
    except (SyntaxError, ValueError):  # a ValueError: a null byte
        return False
    return True


def run_tests(answer, tests, seconds=5):
    """True if the tests run to their end after the answer's code, which a random token proves.

    None if the tests themselves do not compile: no answer could pass them.
    A fresh isolated interpreter in an empty folder, limits on CPU, memory, files and processes, and
    a kill of the whole process group. This is no sandbox: the code can read what the user can read,
    and reach the network.
    """
    if not compiles(tests):
        return None
    code = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", answer, re.S | re.I)
    token = os.urandom(16).hex()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "out", "w+b") as out:
        inputs = {"answer.py": code[-1] if code else answer, "tests.py": tests, "token": token}
        for name, text in inputs.items():
            (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-S", "-c", HARNESS % {"seconds": seconds}]
        process = subprocess.Popen(
            command, cwd=folder, env={}, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(2 * seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
        out.seek(0)
        return code == 0 and out.read().endswith(token.encode())
