"""parts/texts.py: what a program finds in a text: its last line, what it asks (English only), whether
its code passes tests. No torch.

What must not be asked stands in data/risky_questions.json (each pattern with its source), the words
that open a request in data/interview.json. A question in another language is not found, and counts
as none.
Reference   tests of code: Chen et al. 2021, arXiv 2107.03374 (HumanEval)
"""

import functools
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import unicodedata
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

# ---- spelling ----

STRAIGHT = str.maketrans("‘’‚‛ʼ′“”„‟″‐‑−", "''''''" + '"""""' + "---")
INVISIBLE = re.compile(  # soft hyphens, joiners, marks of direction, tags; variation selectors
    "[\xad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0001-\U000e01ef]"
)


def one_spelling(text):
    """NFKC, nothing invisible, straight quotes and hyphens: what is written in two ways is one.

    >>> one_spelling("Ｄｏｎ’t sa\\N{SOFT HYPHEN}id")
    "Don't said"
    """
    return INVISIBLE.sub("", unicodedata.normalize("NFKC", text).translate(STRAIGHT))


def plain_text(prompt):
    """The words of a prompt: itself, or its messages one below the other."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def plain(text):
    """One spelling, lower case, single blanks."""
    return " ".join(one_spelling(text).lower().split())


def normal_form(text):
    """How the patterns of data/ are written: one spelling, case folded, (s) → s, % → percent,
    single blanks within a line.

    >>> normal_form("Ａｒｅ  you 50% “sure(s)”?")
    'are you 50 percent "sures"?'
    """
    text = one_spelling(text).casefold().replace("(s)", "s").replace("%", " percent")
    return re.sub(r"[^\S\n]+", " ", text).strip()


# ---- the last line ----


def last_line(label, text):
    """What stands behind "Label:" in the last line of a text, Markdown's marks aside, or "".

    >>> last_line("answer", "It is B.\\n**Answer:** B."), last_line("answer", "Answer: B\\nOr C.")
    ('B', '')
    """
    marks = " \t*_`#>."
    found, _, rest = text.rstrip().rpartition("\n")[2].partition(":")
    return rest.strip(marks) if found.strip(marks).lower() == label else ""


def recommendation(text, words):
    """The decision of an answer, one of the words: the last line is "Recommendation: word", and
    nothing else. Else there is none (None), whatever the answer says.

    >>> words = ("advance", "hold", "reject")
    >>> [recommendation(text, words) for text in ("Recommendation: Hold.", "Unlikely to advance.")]
    ['hold', None]
    """
    decided = last_line("recommendation", text).lower()
    return next((word for word in words if word.lower() == decided), None)


# ---- what is asked ----


def read_data(name):
    """A file of data/, which lies beside parts/."""
    path = Path(__file__).resolve().parent.parent / "data" / name
    return json.loads(path.read_text(encoding="utf-8"))


def any_of(texts):
    """A pattern of alternatives."""
    return f"(?:{'|'.join(texts)})"


@functools.cache  # not at import: who copies a stage may leave data/ behind
def patterns():
    """(what opens a request, what joins a second one to it, what refuses to ask or may be asked,
    [(code, severity, pattern)] of what must not be asked)."""
    cues, risky = read_data("interview.json")["cues"], read_data("risky_questions.json")
    lead_in = rf"(?:{any_of(cues['lead_in'] + cues['polite'])}\b[ ,:.!]*)*"
    order = re.compile(rf"[ *•-]*{lead_in}{any_of(cues['imperative'])}\b")
    joint = re.compile(rf"\b{any_of(cues['joint'])}\b")
    silent = re.compile(any_of(risky["refusal"] + risky["allowed"]))
    categories = [
        (code, category["severity"], re.compile(any_of(category["patterns"])))
        for code, category in risky["categories"].items()
    ]
    return order, joint, silent, categories


def asked_sentences(text):
    """[(sentence as it stands there, normal form)] of what asks: it ends in "?", or opens with an
    imperative behind lead-ins.

    >>> asked_sentences("Hi.  Are you sure？ Tell me.")
    [('Are you sure？', 'are you sure?'), ('Tell me.', 'tell me.')]
    """
    order, *_ = patterns()
    found = re.findall(r"[^.!?;\n？！。；\s][^.!?;\n？！。；]*[.!?;？！。；]?", text)
    pairs = [(sentence, normal_form(sentence)) for sentence in found]
    return [pair for pair in pairs if pair[1].endswith("?") or order.match(pair[1])]


def number_of_requests(text):
    """Requests in a turn; each joint inside one ("and what", "or how") counts one more."""
    _, joint, *_ = patterns()
    return sum(1 + len(joint.findall(asked)) for _, asked in asked_sentences(text))


def risky_questions(text):
    """What must not be asked: [{"code", "severity", "sentence"}].

    Only a request counts; a refusal to ask and what may be asked do not.
    >>> hits = risky_questions("Thanks. How old are you? I can't ask your age.")
    >>> [(hit["code"], hit["sentence"]) for hit in hits]
    [('age', 'How old are you?')]
    """
    *_, silent, categories = patterns()
    return [
        {"code": code, "severity": severity, "sentence": sentence}
        for sentence, asked in asked_sentences(text)
        if not silent.search(asked)
        for code, severity, pattern in categories
        if pattern.search(asked)
    ]


# ---- code ----

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

    One process with limits on time, memory and files, which ends with a nonce, so that to print or
    to exit is not to pass. It is no sandbox: the code runs as you do, with your files and your
    network. Train against code in a container that holds nothing else. An answer passes by what its
    functions return; it could also patch what the tests use, or return objects that equal anything.
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
