"""checks.py: what passes, what only looks as if it did, what is refused at load."""

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import CHECKS, check_arguments
from conftest import REPO
from parts.grading import grade_answers
from parts.rubrics import Criterion, Row
from parts.run_code import run_tests
from parts.texts import recommendation


def holds(check, answer, negate=False, /, **arguments):
    arguments = check_arguments(check, arguments, allow_code=True)
    row = Row("t", "p", [Criterion("check", "", check, arguments, negate=negate)], {})
    (grade,) = grade_answers([row], [answer])
    assert grade.error is None
    return grade.score == 1.0


# ---- IFEval ----

IFEVAL = [
    json.loads(line) for line in (REPO / "tests/ifeval.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("row", IFEVAL, ids=lambda row: row["id"])
def test_ifeval(row):
    """Verdicts of lm-evaluation-harness 0.4.13 (NLTK's English Punkt); "ours" where we differ."""
    ours = holds(row["id"], row["answer"], **row["kwargs"])
    assert ours == row.get("ours", [row["strict"]])[0]


def test_the_golden_rows_show_each_id_both_ways():
    verdicts = {(row["id"], row["strict"]) for row in IFEVAL}
    assert len({row["id"] for row in IFEVAL}) == 24 and len(verdicts) >= 44


# ---- what passes, and what only looks as if it did ----

EXACTLY_2 = {"num_sentences": 2, "relation": "exactly"}
SCHEMA = {"type": "object", "required": ["name", "skills"], "properties": {
    "name": {"type": "string"}, "level": {"enum": ["junior", "senior"]}, "years": {"type": "integer"},
    "skills": {"type": "array", "items": {"type": "string"}},
}}  # fmt: skip
TABLE = [  # check, arguments, answers that pass, answers that do not
    ("keywords:existence", {"keywords": ["art", "C++"]},
     ["Art and c++.", "(art), C++!"], ["start, C++", "art and C", "artful c++"]),
    ("keywords:existence", {"keywords": ["审计", "SQL"]}, ["她领导过审计，会SQL。"], ["她领导过审核，会SQL。", "审计MySQL"]),
    ("keywords:forbidden_words", {"forbidden_words": ["don't", "café", "New York", "follow-up"]},
     ["Do not know.", "cafe", "NewYork"],
     ["you don’t know", "cafe\u0301", "New\u00a0York", "New\nYork", "a follow\u2011up", "ＣＡＦＥ\u0301"]),
    ("keywords:frequency", {"keyword": "12", "frequency": 2, "relation": "exactly"},
     ["12, 12", "10-12 and 12-15", "No.12 of 12.", "$12 12"], ["12, 12.5", "12,000 12", "0.12 12"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "exactly"}, ["eE", "see"], ["e", "eee"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["don't"], ["a b c", "I don't"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "more than"}, ["a b c d"], ["a b c"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at most"}, ["a b c"], ["a b c d"]),
    ("length_constraints:number_sentences", EXACTLY_2,
     ["A b. C?", "v1.2 works. Fine", 'She said "I led it." Then she left.', "**She led.** She knows SQL.",
      "1. She led.\n2. She knows SQL.", "Dr. Ode led it. She left.", "She led... and left. Bye", "Go! 🎉 Now!",
      "J. R. Ode led, e.g. audits, in the U.S. then. No"],
     ["A b.", "A b. C d. E f.", "She led v1.2.3 at example.com.", "...", "One. Two. Three."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["a\n***\nb", "***\na *** b\n***"], ["a", "a *** *** b", "a***", "***", "a***b***c"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "don't"},
     ["a\n\nDon't go", "a b\n \n\n'don't'", "a\n\nDon’t go", "a\n\n\n\nDON'T, go"],
     ["a\n\n**don't**", "a\n\ndon go", "don't\n\na", "a\nDon't", "a\n\ndon'ts", "a\n\nb\n\ndon't"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n- b", "x\n  - a\n- **b** c"], ["- a", "---\n- a\n**b**", "- a\n- b\n- c", "a - b\nc * d"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', "```json\n[1]\n```", " [] ", '{"a": null}', '{"a": 1, "a": 2}'],
     ["1", '"a"', "so: {}", "{", '{"a": NaN}', '{"a": Infinity}', "[-Infinity]", "{'a': 1}", '["a\nb"]', "[01]", "[1,]",
      "[" * 100_000]),
    ("json:keys", {"keys": ["a", "b"]}, ['{"a": 1, "b": null, "c": 2}'],
     ['{"a": 1}', '["a", "b"]', '{"x": {"a": 1, "b": 2}}', '{"a": NaN, "b": 1}', '"ab"', "ab"]),
    ("detectable_format:title", {}, ["<<A title>>\ntext", "x << a >>"], ["<< >>", "<<>>", "<a>", "<<a\nb>>"]),
    ("detectable_format:constrained_response", {}, ["Well. My answer is no."], ["My answer is no", "my answer is no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ["*a* and **b c**", "*a*\n*b*", "**a** b *c*"], ["*a*", "**a**", "**** and ** **", "* a\n* b", "*a* and * *"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2},
     ["Part 1 a\nPart 2 b"], ["Part 1 a", "Part one, Part two"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name], [date]"], ["[name]", "[] []", "[a\nb] [c]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."},
     ["**P.S.** Bring it.", "a\n> _P.S. b_", "a\n  p. s. b"], ["a P.S. b", "a\nPS b", "a\nP.P.S. b"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP.P.S b", "a\nP. P. S. b"], ["a\nP.S. b", "a\nP.P.Sample"]),
    ("startend:end_checker", {"end_phrase": "Don't wait."},
     ["So don’t wait.", "So: “Don't\u00a0wait.”"], ["Don't wait.", "So wait.", "Don't wait. So", "... don't wait."]),
    ("startend:quotation", {}, ['"a b"', ' "a "b" c"\n', "“Hire her.”", "„Ja.“"], ['"a" b', '"', '""', '" "', "'a'"]),
    ("change_case:english_lowercase", {}, ["a b 1."], ["A b", "1 2."]),
    ("change_case:english_capital", {}, ["A B 1."], ["A b", "1 2."]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["SQL and HR", "I am A."], ["Sql and HR", "12 HR", "SQL-HR", "U.S. law"]),
    ("punctuation:no_comma", {}, ["a b", "<think>a, b</think>c", "好。"], ["a, b", "她会SQL，很好。", "苹果、梨", "نعم، لا"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Say hi.", "Hi! Say hi.", "Say hi. \n"]),
    ("combination:two_responses", {}, ["a\n******\nb", "******\na ****** b"], ["a ****** a", "a ******", "a", "a ****** b ****** c"]),
    ("text:max_chars", {"max_chars": 3}, ["abc"], ["abcd"]),
    ("text:contains", {"answer": "New York"}, ["In new york."], ["New Yorker", "York"]),
    ("text:contains", {"answer": "12"}, ["It is 12.", "$12", "(12)"], ["112", "12.00", "12.5", "12,000", "0.12"]),
    ("regex:match", {"pattern": r"\bhire\b"}, ["we hire"], ["we hired", "Hire"]),
    ("interview:question_count", {"num_questions": 2, "relation": "exactly"},
     ["How? Why?", "Tell me about it, and what came of it."], ["How?", "How? And why? Who?", "Well."]),
    ("interview:no_risky_question", {}, ["How did you sell it?", "I can't ask about your age."],
     ["How old are you?", "Fine. Are you married?"]),
    # final answers, in the form that the prompt asks for
    ("choice:equal", {"answer": "B"},
     [r"\boxed{B}", r"so \boxed{\textbf{B}}", "A is wrong.\nAnswer: B", "**Answer:** (b)", "answer: B.", "#### B"],
     ["B", "The answer is B.", "Answer: A", "Answer: B\nOr is it C?", "Answer: A or B", "Answer:", r"\boxed{A} Answer: B", r"\boxed{A, B}"]),
    ("choice:equal", {"answer": "(B)"}, ["Answer: B"], ["Answer: C"]),
    ("choice:equal", {"answer": "yes"}, ["Answer: Yes"], ["Answer: no", "yes"]),
    ("json:schema", {"schema": SCHEMA},
     ['{"name": "Ann", "skills": []}', '```json\n{"name": "Ann", "skills": ["SQL"], "years": 3, "x": 1}\n```'],
     ['{"name": "Ann"}', '{"name": 7, "skills": []}', '{"name": "Ann", "skills": ["SQL", 7]}', '{"name": "Ann", "skills": "SQL"}',
      '{"name": "Ann", "skills": [], "years": true}', '{"name": "Ann", "skills": [], "level": "head"}', "[]", "null", "Ann knows SQL"]),
]  # fmt: skip


@pytest.mark.parametrize("check, arguments, right, wrong", TABLE)
def test_what_passes_and_what_only_looks_so(check, arguments, right, wrong):
    verdicts = {answer: holds(check, answer, **arguments) for answer in right + wrong}
    assert verdicts == dict.fromkeys(right, True) | dict.fromkeys(wrong, False)
    negated = {answer: holds(check, answer, True, **arguments) for answer in right + wrong}
    assert negated == dict.fromkeys(right, False) | dict.fromkeys(wrong, True)


MATH = [  # right answer, what stands in the box, verdict
    ("12", "12", True), ("12", "$12$", True), ("12", "x = 12", True), ("12", r"12\text{ apples}", True),
    ("12", r"\frac{24}{2}", True), ("1,000", "1000", True), ("1/2", "0.5", True), (r"2\sqrt{3}", r"\sqrt{12}", True),
    ("x+1", "1+x", True), ("y = 2x + 3", "y = 2x+3", True), ("y = 2x+3", "2x+3", True), ("3x + 4y = 14", "6x + 8y = 28", True),
    ("1, 2", "2, 1", True), ("1, 2", "x = 1, x = 2", True), ("(2,3)", r"\left(2, 3\right)", True), (r"\{1,2\}", r"\{2,1\}", True),
    ("[0,1)", "[0,1)", True), ("x > 3", "x>3", True), (r"#### 12", "12", True), (r"so \boxed{12}", "12", True),
    ("12", "13", False), ("12", "-12", False), ("12", "12^2", False), ("12", "12x", False), ("12", "", False),
    ("12", "12 or 13", False), ("12", "5 million", False), ("12", r"12\pm1", False), ("2", r"\pm 2", False),
    # relations
    ("3x + 4y + 14 = 0", "3x - y + 13 = 0", False), ("3x + 4y + 14 = 0", "0", False), ("25", "x^2 + y^2 = 25", False),
    ("3", "2x = 3", False), ("3", "x^2 = 3", False), ("3", "|x| = 3", False), ("P(A) = 0.3", "P(B) = 0.3", False),
    ("a + b = 7, a - b = 1", "a - b = 7, a + b = 1", False), ("x = 2, y = 3", "3, 2", False), ("3", "n = 3k", False),
    # a sign or a function before the number
    ("12", "> 12", False), ("12", "x > 12", False), ("12", "≠ 12", False), ("12", r"\neq 12", False), ("12", r"\le 12", False),
    ("12", "√12", False), ("12", "e^12", False), ("12", r"\ln 12", False), ("12", "cos(12)", False), ("12", "hardly 12", False),
    # sets, intervals and pairs; numbers side by side
    (r"\{1,2\}", "(1,2)", False), ("(1,2)", r"\{1,2\}", False), ("[0,1]", "(0,1)", False), ("(2,3)", "(3,2)", False),
    ("25", "12 13", False), ("0", "1 000", False),
]  # fmt: skip


@pytest.mark.parametrize("answer, given, verdict", MATH)
def test_math(answer, given, verdict):
    pytest.importorskip("math_verify")
    assert holds("math:equal", rf"So \boxed{{{given}}}.", answer=answer) is verdict
    assert holds("math:equal", f"So\n#### {given}\n", answer=answer) is verdict


@pytest.mark.parametrize(
    "text",
    ["12", "The answer is 12.", r"\boxed{12", r"\boxed{12} no, \boxed{13}", "#### 12\n#### 13"],
)
def test_a_final_answer_is_the_last_that_is_marked(text):
    pytest.importorskip("math_verify")
    assert holds("math:equal", text, answer="12") is False


@pytest.mark.parametrize("text", ["9^{9^{9}}", "(" * 400, r"\prod_{n=1}^{10^{9}} n", "9" * 490])
def test_a_formula_without_end_is_left_within_seconds(text):
    pytest.importorskip("math_verify")
    logging.disable(logging.WARNING)
    start = time.time()
    assert holds("math:equal", rf"\boxed{{{text}}}", answer="12") is False
    logging.disable(logging.NOTSET)
    assert time.time() - start < 30


# ---- decisions ----


@pytest.mark.parametrize(
    "text, decision",
    [
        ("Strengths: SQL.\nRecommendation: advance.", "advance"),
        ("**Recommendation:** **Hold**\n", "hold"),
        ("> recommendation : Reject", "reject"),
        ("Unlikely to advance.", None),
        ("Advance: false", None),
        ("Advance declined.", None),
        ("She falls short of the bar to advance.", None),
        ("Less ready to advance than others.", None),
        ("Recommendation: not advance", None),
        ("Recommendation: advance? No.", None),
        ("Recommendation: advance or hold", None),
        ("Recommendation: advance|hold|reject", None),
        ("Recommendation: advance.\nI would not, though.", None),
        ("Recommendation:\nadvance", None),
        ("My recommendation: advance", None),
        ("advance", None),
        ("", None),
    ],
)
def test_the_last_line_decides_or_nothing_does(text, decision):
    assert recommendation(text, ("advance", "hold", "reject")) == decision


def test_a_decision_may_have_two_words():
    assert recommendation("Recommendation: **No_Hire**.", ("hire", "no_hire")) == "no_hire"


# ---- code ----

DOUBLE = "def double(x): return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(-1) == -2"
posix = pytest.mark.skipif(os.name != "posix", reason="limits need POSIX")


@posix
@pytest.mark.parametrize(
    "answer",
    [
        DOUBLE,
        f"Here:\n```python\n{DOUBLE}```\nRun:\n```bash\nls\n```\nGives\n```text\n4\n```",
        f"```py\ny = 1\n```\nso\n```py\n{DOUBLE}```\n```\nnot code\n```",
        f"```Python3\n{DOUBLE}",
        f"~~~\n{DOUBLE}~~~",
        f"1. So:\n\n   ```python\n   {DOUBLE}   ```\n   Done.",
        f"So:\r\n```python\r\n{DOUBLE[:-1]}\r\n```\r\nDone.",
        f'```python title="a.py"\n{DOUBLE}```',
        f"```{{.python}}\n{DOUBLE}```",
        f"````python\n{DOUBLE}````",
        f"import os\nassert not os.environ.get('SECRET')\n{DOUBLE}",
        f"if __name__ == '__main__':\n    raise SystemExit(input())\n{DOUBLE}",
        f"import subprocess\nsubprocess.Popen(['sleep', '60']) if 0 else None\n{DOUBLE}print(1)",
    ],
)
def test_code_that_passes(answer, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert run_tests(answer, TESTS)


@posix
@pytest.mark.parametrize(
    "answer",
    [
        "", "double", "I would write a function.", "def double(x", "\ud800", "x = \0",
        *(DOUBLE.replace("return 2 * x", body) for body in (
            "return x * x", "import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit(0)",
            "return ' ' * (1 << 40)", "import os; os.killpg(0, 9)", "raise AssertionError",
        )),
        "import os; os._exit(0)", "import sys; sys.exit(0)", "x = ' ' * (1 << 40)", "print('passed')",
        "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\ndef double(x): return 3",
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'passed')\n    except OSError: pass",
        "open('x', 'w').write('a' * (1 << 24))\n" + DOUBLE,
        "import sys\nsys.stdout.write('a' * (1 << 24))\ndef double(x): return 3",
    ],
)  # fmt: skip
def test_code_that_only_looks_as_if_it_passed(answer):
    assert not run_tests(answer, TESTS)


@posix
def test_code_that_never_ends_is_killed_with_what_it_started():
    start = time.time()
    assert not run_tests("import os, time\nos.fork()\ntime.sleep(600)", TESTS)
    assert time.time() - start < 30


# ---- what is refused at load ----

BAD = [  # check, arguments, a word of the message
    ("language:response_language", {"language": "de"}, "is no check"),
    ("keyword:existence", {"keywords": ["a"]}, "is no check"),
    ("keywords:existence", {}, "keywords"),
    ("keywords:existence", {"keywords": "sql"}, "list"),
    ("keywords:existence", {"keywords": []}, "blank"),
    ("keywords:existence", {"keywords": ["a", " "]}, "blank"),
    ("keywords:existence", {"keywords": ["a", 7]}, "keywords"),
    ("keywords:existence", {"keywords": ["a"], "keyword": "b"}, "keyword"),
    ("punctuation:no_comma", {"n": 1}, "n"),
    ("length_constraints:number_words", {"num_words": 5, "relation": "around"}, "around"),
    ("length_constraints:number_words", {"num_words": 5}, "relation"),
    ("length_constraints:number_words", {"num_words": True, "relation": "at most"}, "int"),
    ("length_constraints:number_words", {"num_words": "5", "relation": "at most"}, "int"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"}, "nth"),
    ("regex:match", {"pattern": "(a"}, "error"),
    ("json:schema", {"schema": {"type": "text"}}, "text"),
    ("json:schema", {"schema": {"properties": {"a": {"minLength": 3}}}}, "minLength"),
    ("json:schema", {"schema": {"items": {"items": {"pattern": "a"}}}}, "pattern"),
    ("json:schema", {"schema": {"required": "name"}}, "TypeError"),
    (["text:contains"], {"answer": "a"}, "is no check"),
    ("math:equal", {"answer": ""}, "blank"),
    ("math:equal", {"answer": r"\frac{"}, "read"),
    ("code:tests", {"tests": "double(2) =="}, "SyntaxError"),
    ("code:tests", {"tests": "def test_a():\n    assert double(2) == 4"}, "without code"),
]  # fmt: skip


@pytest.mark.parametrize("check, arguments, word", BAD)
def test_a_bad_check_is_refused_at_load(check, arguments, word):
    with pytest.raises(ValueError, match=word):
        check_arguments(check, arguments, allow_code=True)


def test_code_needs_the_flag_and_maths_its_package(monkeypatch):
    with pytest.raises(ValueError, match="--allow-code-execution"):
        check_arguments("code:tests", {"tests": "assert double(2) == 4"})
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        check_arguments("math:equal", {"answer": "12"})


def test_no_torch_and_no_sympy_until_they_are_needed():
    code = "import sys, checks; print({'torch', 'sympy', 'math_verify'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr


# ---- any answer is decided ----

ARGUMENTS = {check: arguments for check, arguments, *_ in TABLE}
ARGUMENTS["math:equal"] = {"answer": "12"}
PIECES = [
    "a",
    ".",
    ". ",
    "\n",
    "*",
    "**a** ",
    "[",
    "[a",
    "<<",
    "<<a",
    '"',
    "{",
    "\\boxed{",
    "```",
    "```\n",
]
PIECES += [
    "- ",
    "1. ",
    "a.a.",
    "Part 1",
    "P.S.",
    " ",
    "\u200b",
    "审",
    "\ud800",
    "so please tell me ",
    "...",
]
PIECES += ["</think>", "#### 1\n", "Answer: B", "x=", "\r\n", "~~~\n", "1 ", "> ", "é"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join))
def test_any_text_is_decided_without_an_error(text):
    for check, arguments in ARGUMENTS.items():
        if text.strip():
            CHECKS[check](text, **arguments)  # raises nothing that `decide` would hide
        assert holds(check, text, **arguments) in (True, False)


@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_an_answer_that_repeats_itself_takes_no_time(piece):
    """Patterns that go back take minutes here, and a model in training writes such answers."""
    text = piece * (10_000 // len(piece))
    for check, arguments in ARGUMENTS.items():
        start = time.process_time()
        CHECKS[check](text, **arguments)
        CHECKS[check](f"{text}x", **arguments)
        assert time.process_time() - start < 2, check


@pytest.mark.parametrize("check", [*ARGUMENTS, "code:tests"])
def test_an_empty_answer_meets_nothing(check):
    arguments = ARGUMENTS.get(check, {"tests": TESTS})
    for text in ("", " \n", "<think>in 3 parts", "<think>x</think>\n", "\u200b\u2060"):
        for negate in (False, True):
            assert holds(check, text, negate, **arguments) is False


def test_a_fault_of_a_check_costs_one_answer_its_score(monkeypatch):
    monkeypatch.setitem(CHECKS, "startend:quotation", lambda text: 1 / 0)
    row = Row("t", "p", [Criterion("check", check="startend:quotation")], {})
    (grade,) = grade_answers([row], ["a"])
    assert (grade.score, grade.error) == (None, "startend:quotation: division by zero")


def test_formulas_in_a_thread_are_no_score_and_say_so():
    """math-verify's two seconds are a signal, which only the main thread gets: it was None there,
    without a word."""
    row = Row("t", "p", [Criterion("check", "", "math:equal", {"answer": "12"})], {})
    with ThreadPoolExecutor(1) as pool:
        (grade,) = pool.submit(grade_answers, [row], [r"\boxed{12}"]).result()
    assert grade.score is None and "math:equal: " in grade.error and "thread" in grade.error
