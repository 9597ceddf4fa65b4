"""parts/run_code.py: does the code of an answer pass its tests? One subprocess with limits.

It is no sandbox: the answer's code runs as you do, with your files and your network. Train against
code in a container that holds nothing else. An answer passes by what its functions return; it
could also patch what the tests use, or return objects that equal everything.
Reference   Chen et al. 2021, arXiv 2107.03374 (HumanEval)
"""

import json
import os
import re
import secrets
import signal
import sys
import tempfile
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

FENCE = re.compile(r"(?ms)^[ \t]*(```|~~~)([^\n]*)\n(.*?)(?:^[ \t]*\1|\Z)")
RUNNER = """
import json, os, resource, sys, textwrap
blocks, tests, nonce = json.load(sys.stdin)
for limit, most in (("AS", 2**31), ("FSIZE", 2**20), ("CPU", 4), ("NPROC", 0)):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
    except ValueError:  # macOS bounds no memory
        pass
out, write, kill, names = os.dup(1), os.write, os.killpg, {"__name__": "answer"}
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for block in blocks:
    try:
        program = compile(textwrap.dedent(block), "answer", "exec")
    except SyntaxError:
        continue
    exec(program, names)
exec(compile(tests, "tests", "exec"), names)
write(out, nonce.encode())
kill(0, 9)  # with all that the answer started
"""


def run_tests(text, tests=str):
    """Do the tests pass behind the answer's Python blocks, else its blocks without a language, else
    all of it?

    One process with limits on time, memory and files; no sandbox. It ends with a nonce, so that to
    print or to exit is not to pass.
    """
    if os.name != "posix":
        raise OSError("code:tests needs the limits of Linux or macOS")
    compile(tests, "tests", "exec")
    fences, nonce = FENCE.findall(text.replace("\r\n", "\n")), secrets.token_hex()
    bare = [code for _, info, code in fences if not re.search(r"\w", info)]
    python = [code for _, info, code in fences if re.match(r"(?i)\W*py(thon3?)?\b", info)]
    task = json.dumps([python or bare or [text], tests, nonce])
    command = [sys.executable, "-I", "-c", RUNNER]
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": DEVNULL}
        process = Popen(command, cwd=folder, env={}, start_new_session=True, **pipes)
        try:
            return process.communicate(task.encode(), timeout=5)[0] == nonce.encode()
        except TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return False
