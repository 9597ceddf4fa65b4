"""checks.py: what passes, and what only looks as if it did.

ifeval.jsonl   answers with the verdicts of lm-evaluation-harness 0.4.13
answers_checked.jsonl   code, and whether it passes; unmarked: answers without a final one; decisions
checks.jsonl   answers that pass each check, and that do not;  math.jsonl  the same of formulas
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from case_rows import each, rows_of
from checks import CHECKS, check_arguments
from parts.grading import grade_answers
from parts.rubrics import Criterion, Row, read_criterion
from parts.texts import recommendation, run_tests


def graded(check, answer, negate=False, /, **arguments):
    row = Row("t", "p", [Criterion("check", "", check, arguments, negate=negate)], {})
    return grade_answers([row], [answer])[0]


def holds(check, answer, negate=False, /, **arguments):
    grade = graded(check, answer, negate, **check_arguments(check, arguments, allow_code=True))
    assert grade.error is None
    return grade.score == 1


# ---- IFEval ----


@pytest.mark.parametrize("row", rows_of("ifeval"), ids=lambda row: row["id"])
def test_ifeval(row):
    """Verdicts of lm-evaluation-harness 0.4.13 (NLTK's English Punkt); "ours" where we differ."""
    ours = holds(row["id"], row["answer"], **row["kwargs"])
    assert ours == row.get("ours", [row["strict"]])[0]


# ---- what passes, and what only looks as if it did ----


@each("checks")
def test_what_passes_and_what_only_looks_so(check, arguments, right, wrong):
    for answer in right + wrong:
        assert holds(check, answer, **arguments) == (answer in right), answer
        assert holds(check, answer, True, **arguments) == (answer in wrong), answer


@each("math")
def test_math(answer, right, wrong):
    """The last row: a formula of a page is no answer."""
    pytest.importorskip("math_verify")
    for box in right + wrong:
        for text in (rf"So \boxed{{{box}}}.", f"So\n#### {box}\n"):
            assert holds("math:equal", text, answer=answer) == (box in right), text


@each("answers_checked", of="unmarked")
def test_what_is_no_final_answer(text):
    """The last that is marked is; a formula without end is left within seconds."""
    pytest.importorskip("math_verify")
    start = time.time()
    assert holds("math:equal", text, answer="12") is False
    assert time.time() - start < 30


# ---- decisions ----


@each("answers_checked", of="decisions")
def test_the_last_line_decides_or_nothing_does(text, decision):
    assert recommendation(text, ("advance", "hold", "reject", "no_hire")) == decision


# ---- code ----

TESTS = "assert double(2) == 4\nassert double(-1) == -2"
posix = pytest.mark.skipif(os.name != "posix", reason="limits need POSIX")


@posix
@each("answers_checked", of="code")
def test_code_that_passes_and_what_only_looks_so(answer, passes, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert run_tests(answer, TESTS) == passes


@posix
def test_code_that_never_ends_is_killed_with_what_it_started():
    start = time.time()
    assert not run_tests("import os, time\nos.fork()\ntime.sleep(600)", TESTS)
    assert time.time() - start < 30


# ---- what is needed ----


def test_code_needs_the_flag_and_maths_its_package(monkeypatch):
    with pytest.raises(ValueError, match="--allow-code-execution"):
        check_arguments("code:tests", {"tests": "assert double(2) == 4"})
    with pytest.raises(ValueError, match="--allow-code-execution"):
        read_criterion({"check": "code:tests", "tests": "assert double(2) == 4"})
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        check_arguments("math:equal", {"answer": "12"})


# ---- any answer is decided ----

ARGUMENTS = {row["check"]: row["arguments"] for row in rows_of("checks")}
ARGUMENTS["math:equal"] = {"answer": "12"}
PIECES = (
    '. |\n|*|**a** |[|[a|<<|<<a|"|{|\\boxed{|```|```\n|- |1. |a.a.|Part 1|P.S.| |\u200b|审|\ud800|'
    "so please tell me |...|</think>|#### 1\n|Answer: B|x=|\r\n|~~~\n|1 |> |é|a"
).split("|")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join))
def test_any_text_is_decided_without_an_error(text):
    for check, arguments in ARGUMENTS.items():
        assert holds(check, text, **arguments) in (True, False)


@pytest.mark.parametrize("piece", PIECES, ids=repr)
def test_an_answer_that_repeats_itself_takes_no_time(piece):
    """Patterns that go back take minutes here, and a model in training writes such answers."""
    for check, arguments in ARGUMENTS.items():
        start = time.process_time()
        for end in ("", "x"):
            CHECKS[check](piece * (10_000 // len(piece)) + end, **arguments)
        assert time.process_time() - start < 2, check


def test_a_fault_of_a_check_costs_one_answer_its_score(monkeypatch):
    """So do formulas in a thread, aloud: math-verify's two seconds are a signal, which only the main
    thread gets; it was None there, without a word."""
    monkeypatch.setitem(CHECKS, "startend:quotation", lambda text: 1 / 0)
    grade = graded("startend:quotation", "a")
    assert (grade.score, grade.error) == (None, "startend:quotation: division by zero")
    with ThreadPoolExecutor(1) as pool:
        grade = pool.submit(graded, "math:equal", r"\boxed{12}", answer="12").result()
    assert grade.score is None and "math:equal: " in grade.error and "thread" in grade.error
