"""The checks in checks/: what passes, what only looks as if it did, what is refused."""

import json
import random
import sys

import pytest

import judge
from checks import answers, instructions, risky
from checks.answers import math_answer, math_equal
from checks.instructions import passes
from conftest import REPO
from judge import read_criterion

sys.path.insert(0, str(REPO / "data"))


def holds(check, answer, mode="strict", /, **arguments):
    criterion = read_criterion({"check": check, **arguments}, allow_code=True)
    return passes(criterion, answer, mode)


# id and arguments; + answers that pass, - answers that do not
TABLE = r"""
keywords:existence {"keywords": ["art", "C++"]}
+ ["Art and c++.", "(art), C++!"] - ["start, C++", "art and C", "artful c++"]
keywords:forbidden_words {"forbidden_words": ["art", "a b"]}
+ ["start", "a  c b"] - ["Start: ART.", "x, A B."]
keywords:frequency {"keyword": "to do", "frequency": 2, "relation": "at least"}
+ ["To do, to do", "to do. To do. to do"] - ["to do todo", "to do"]
keywords:letter_frequency {"letter": "E", "let_frequency": 2, "let_relation": "exactly"}
+ ["eE", "see"] - ["e", "eee", "a"]
length_constraints:number_words {"num_words": 3, "relation": "less than"}
+ ["one two", "don't"] - ["one two three", "I don't"]
length_constraints:number_words {"num_words": 3, "relation": "more than"}
+ ["a b c d"] - ["a b c"]
length_constraints:number_words {"num_words": 3, "relation": "at most"}
+ ["a b c"] - ["a b c d"]
length_constraints:number_sentences {"num_sentences": 2, "relation": "exactly"}
+ ["A b. C?", "v1.2 works. Fine"] - ["A b.", "A. B. C."]
length_constraints:number_paragraphs {"num_paragraphs": 2}
+ ["a\n***\nb", "***\na *** b\n***"] - ["a", "a *** *** b", "a***", "***", "a***b***c"]
length_constraints:number_paragraphs {"num_paragraphs": 3}
- ["a *** *** b"]
length_constraints:nth_paragraph_first_word {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "don't"}
+ ["a\n\nDon't go", "a b\n \n\n'don't'"]
- ["a\n\ndon go", "don't\n\na", "a\nDon't", "a\n\nb\n\ndon't", "a\n\ndon'ts"]
detectable_format:number_bullet_lists {"num_bullets": 2}
+ ["* a\n- b", "x\n  - a\n- **b** c"]
- ["- a", "---\n- a\n**b**", "- a\n- b\n- c", "a - b\nc * d", "- - -\n- a"]
detectable_format:json_format {}
+ ["{\"a\": 1}", "```json\n[1]\n```", " [] "] - ["1", "\"a\"", "so: {}", "{\"a\": NaN}x", "{"]
json:keys {"keys": ["a", "b"]}
+ ["{\"a\": 1, \"b\": null, \"c\": 2}"]
- ["{\"a\": 1}", "[\"a\", \"b\"]", "{\"x\": {\"a\": 1, \"b\": 2}}"]
detectable_format:title {}
+ ["<<A title>>\ntext"] - ["<< >>", "<<>>", "<a>", "<<a\nb>>"]
detectable_format:constrained_response {}
+ ["Well. My answer is no."] - ["My answer is no", "My answer is sure.", "my answer is no."]
detectable_format:number_highlighted_sections {"num_highlights": 2}
+ ["*a* and **b c**", "*a*\n*b*"]
- ["*a*", "**a**", "**** and ** **", "* a\n* b", "*a\nb*", "*a* and * *"]
detectable_format:multiple_sections {"section_spliter": "Part", "num_sections": 2}
+ ["Part 1 a\nPart 2 b"]
- ["Part 1 a", "Part 1\nPart 2", "Apart 1 x, apart 2 y", "Part one, Part two"]
detectable_content:number_placeholders {"num_placeholders": 2}
+ ["[name], [date]"] - ["[name]", "[] []", "[a\nb] [c]"]
detectable_content:postscript {"postscript_marker": "P.S."}
+ ["a\nP.S. b", "a\n  p. s. b"] - ["a P.S. b", "a\nPS b", "a\nP.P.S. b"]
detectable_content:postscript {"postscript_marker": "P.P.S"}
+ ["a\nP.P.S b", "a\nP. P. S. b"] - ["a\nP.S. b", "a\nP.P.Sample"]
startend:end_checker {"end_phrase": "Over to you."}
+ ["So: over to you.", "I say \"Over to you.\"\n"]
- ["Over to you.", "\"Over to you.\"", "Over to you. So", "... over to you."]
startend:quotation {}
+ ["\"a b\"", " \"a \"b\" c\"\n"] - ["\"a\" b", "\"", "\"\"", "\" \"", "'a'"]
change_case:english_lowercase {}
+ ["a b 1."] - ["A b", "1 2.", "İ"]
change_case:english_capital {}
+ ["A B 1."] - ["A b", "1 2."]
change_case:capital_word_frequency {"capital_frequency": 2, "capital_relation": "at least"}
+ ["SQL and HR", "I am A."] - ["Sql and HR", "12 HR"]
punctuation:no_comma {}
+ ["a b", "<think>a, b</think>c, d</think>e"] - ["a, b"]
keywords:existence {"keywords": ["sql"]}
- ["<think>sql</think>no", "sql</think>no"]
keywords:existence {"keywords": ["sorry"], "negate": true}
+ ["hello"] - ["sorry"]
text:max_chars {"max_chars": 3.0}
+ ["abc"] - ["abcd"]
combination:repeat_prompt {"prompt_to_repeat": "Say hi."}
+ ["say hi. Hi!"] - ["Say hi.", "Hi! Say hi.", "Say hi. \n"]
combination:two_responses {}
+ ["a\n******\nb"] - ["a ****** a", "a ******", "a", "a ****** b ****** c"]
regex:match {"pattern": "\\bhire\\b"}
+ ["we hire"] - ["we hired", "Hire"]
regex:absent {"pattern": "\\bhire\\b"}
+ ["we hired"] - ["we hire"]
text:contains {"answer": "New York"}
+ ["In new york."] - ["New Yorker", "York"]
text:contains {"answer": 12}
+ ["It is 12."] - ["It is 112."]
choice:equal {"answer": "B"}
+ ["B", "(B)", "B.", "**b**", "The answer is B", "First A. The answer is (B)."]
+ ["Answer: B, not C", "The answer is A. No, the answer is B.", "The answer is B because of C"]
- ["A", "B and C", "AB", "The answer is A. Or B?", "The answer is not B"]
choice:equal {"answer": "(A)"}
+ ["A", "the answer is A."] - ["The answer is a trap.", "A trap"]
math:equal {"answer": "1/2"}
+ ["so \\boxed{0.5}", "\\boxed{1} no, \\boxed{\\frac12}", "…\n#### 0.50"]
+ ["$\\boxed{\\dfrac{1}{2}}$."]
- ["1/2", "\\boxed{50%}", "\\boxed{0.5} or \\boxed{2}", "#### 2", "\\boxed{0.5"]
math:equal {"answer": "#### 1,000", "last_number": true}
+ ["It is 1000", "5 then 1,000.0"] - ["1000 and 5", "none", "It is -1000"]
math:equal {"answer": "7", "strict_boxed": true}
+ ["\\boxed 7", "\\boxed{7}, \\boxed{7.0}"] - ["\\boxed{6} \\boxed{7}"]
interview:question_count {"num_questions": 2, "relation": "exactly"}
+ ["How? Why?", "Tell me about it, and what came of it."] - ["How?", "How? And why? Who?", "Well."]
interview:no_risky_question {}
+ ["How did you sell it?", "I can't ask about your age."]
- ["How old are you?", "Fine. Are you married?"]
""".strip()
ROWS = []  # (id, arguments, answers that pass, answers that do not)
for line in TABLE.replace("] - [", "]\n- [").split("\n"):
    word, _, value = line.partition(" ")
    if word in ("+", "-"):
        ROWS[-1]["+-".index(word) + 2].extend(json.loads(value))
    else:
        ROWS.append((word, json.loads(value), [], []))
ROWS.append(("detectable_format:json_format", {}, [], ["[" * 100_000]))


@pytest.mark.parametrize("check, arguments, good, bad", ROWS)
def test_what_passes_and_what_only_looks_so(check, arguments, good, bad):
    assert [a for a in good if not holds(check, a, **arguments)] == []
    assert [a for a in bad if holds(check, a, **arguments)] == []


@pytest.mark.parametrize("check", sorted(instructions.CHECKS))
def test_an_empty_answer_never_passes(check):
    examples = {row[0]: row[1] for row in ROWS} | {"code:tests": {"tests": "assert True"}}
    empty = ["", " \n", "<think>in 3 parts", "<think>x</think>\n", "\u200b\u2060", "x</think> "]
    for negate in (False, True):
        for answer in empty:
            for mode in ("strict", "loose"):
                assert not holds(check, answer, mode, **examples[check] | {"negate": negate})


def test_loose_forgives_a_first_line_a_last_line_and_stars():
    small = "change_case:english_lowercase"
    cases = "Here it is:\nhello", "hello\nBye", "Hi\nhello\nBye"
    assert not any(holds(small, text) for text in cases)
    assert all(holds(small, text, "loose") for text in cases)
    assert holds("regex:match", "*a* b", "loose", pattern="a b")
    assert not holds(small, "Hi\nHello\nBye", "loose")
    assert not holds("punctuation:no_comma", "a, b", "loose")  # the variants less a line are empty


BAD = r"""
{"check": "language:response_language", "language": "de"} | unknown check.*nearest known one
{"check": "keyword:existence", "keywords": ["a"]} | nearest known one is "keywords:existence"
{"check": "keywords:existence"} | has no "keywords"
{"check": "keywords:existence", "keywords": "sql"} | expected a list of texts
{"check": "keywords:existence", "keywords": []} | expected a list of texts
{"check": "keywords:existence", "keywords": ["a", " "]} | expected text
{"check": "keywords:existence", "keywords": ["a"], "keyword": "b"} | unknown argument "keyword"
{"check": "punctuation:no_comma", "n": 1} | takes no argument
{"check": "length_constraints:number_words", "num_words": 5, "relation": "around"} | expected one of less than
{"check": "length_constraints:number_words", "num_words": 5} | has no "relation"
{"check": "length_constraints:number_words", "num_words": true, "relation": "at most"} | expected a whole number
{"check": "length_constraints:number_words", "num_words": "5", "relation": "at most"} | expected a whole number
{"check": "length_constraints:number_words", "num_words": 2.5, "relation": "at most"} | expected a whole number
{"check": "detectable_format:number_highlighted_sections", "num_highlights": 0} | at least 1
{"check": "length_constraints:nth_paragraph_first_word", "num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"} | larger
{"check": "keywords:letter_frequency", "letter": "#", "let_frequency": 1, "let_relation": "exactly"} | one letter
{"check": "regex:match", "pattern": "(a"} | regular expression
{"check": "math:equal", "answer": ""} | expected text
{"check": "math:equal", "answer": "\\boxed{1"} | can be read
{"check": "math:equal", "answer": "$ $"} | can be read
{"check": "math:equal", "answer": "1", "strict_boxed": 1} | true or false
{"check": "code:tests", "tests": "assert 1"} | --allow-code-execution
{"check": 7} | unknown check
""".strip().split("\n")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_check_is_refused_at_load(case):
    criterion, message = case.split(" | ")
    with pytest.raises(ValueError, match=message):
        read_criterion(json.loads(criterion))


MATH = r"""
0.5 = 1/2 ; \frac{1}{2} = .5 ; \frac12 = \dfrac{1}{2} ; -\frac34 = -0.75 ; 1,000 = 1000
1,00 ≠ 100 ; 50% ≠ 0.5 ; 0.5 ≠ 0.501 ; 50\% = 50% ; 3 = 3. ; \left(1, 2\right) = (1,2)
(1/2,3) = (0.5, 3.0) ; (1,2) ≠ (2,1) ; (1,2) ≠ [1,2] ; ((1,2),3) = ((1.0,2),3) ; (1,2) ≠ (1,2,3)
x+1 ≠ 1+x ; \text{even} = even ; 1/0 = 1/0 ; 1/0 ≠ 2/0 ; −2 = -2 ; 1e3 ≠ 1000 ; x ≠ X
""".strip().replace("\n", " ; ")


@pytest.mark.parametrize("case", MATH.split(" ; "))
def test_math_equality(case):
    a, sign, b = case.rpartition(" = ") if " = " in case else case.rpartition(" ≠ ")
    assert math_equal(a, b) is math_equal(b, a) is (sign == " = ")
    assert math_equal("9" * 5000, "9" * 5000) and not math_equal("9" * 5000, "1")
    assert not math_equal("", "")


PREDICTED = r"""
\boxed{\frac{1}{2}} then \boxed{a{b}c} | a{b}c
\boxed{3 | None
no box 7 #### 8 | 8
say 7 | None
2 of 7 | None
+2 of 7 | 7
+from -1,200.5 on | -1,200.5
""".strip().split("\n")


@pytest.mark.parametrize("case", PREDICTED)
def test_math_prediction(case):
    """The last number (+) is taken only when allowed: "2 of 7" would pass as 7 by accident."""
    text, answer = case.split(" | ")
    assert str(math_answer(text.lstrip("+"), last_number=text[0] == "+")) == answer


TESTS = "assert double(2) == 4\nassert double(-1) == -2"
CODE = [
    ("def double(x):\n    return 2 * x", True),
    ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", True),
    ("def double(x):\n    return x * x", False),
    ("import sys; sys.exit(0)", False),
    ("import os; os._exit(0)", False),
    ("import atexit\natexit.register(print, 'done')\ndef double(x): return 2 * x", False),
    ("def double(x", False),
    ("import time\ntime.sleep(60)", False),
    ("while True: pass", False),
    ("x = ' ' * (1 << 40)", False),
    ("import os\nassert not os.environ.get('SECRET')\ndef double(x): return 2 * x", True),
    ("print(open('token').read(), end='', flush=True)\nimport os; os._exit(0)", False),
    ("```py\nx = 1\n```\nso\n```py\ndef double(x): return 2 * x\n```", True),
]


@pytest.mark.skipif(sys.platform == "win32", reason="limits need POSIX")
@pytest.mark.parametrize("answer, passed", CODE)
def test_code_passes_only_behind_the_last_test(answer, passed, monkeypatch):
    """sys.exit(0) proves nothing: the token is printed behind the last test only."""
    monkeypatch.setenv("SECRET", "1")
    assert answers.run_tests(answer, TESTS, seconds=1) is passed


def test_one_definition_of_a_question():
    import evaluate

    for text, count, is_open in (
        ("However, do you know SQL?", 1, 0.0), ("Thanks. Could you tell me about SQL?", 1, 1.0),
        ("How did you use SQL? Do you like it?", 2, 0.0), ("Tell me about SQL.", 1, 1.0),
        ("Good.", 0, 0.0),
    ):  # fmt: skip
        found = evaluate.task_metrics({"task": "interview"}, text)
        assert found == {"one question": float(count == 1), "open": is_open}, text
        asked = holds("interview:question_count", text, num_questions=count, relation="exactly")
        assert asked or not count


def test_requests_agree_with_the_interview_bank():
    import interview

    rng = random.Random(0)
    for kind, templates in interview.BANK["templates"].items():
        for template in templates:
            c, d, e = rng.sample(sorted(interview.BANK["competencies"]), 3)
            text = template.format(c=c, d=d, e=e)
            wanted = {"greeting": 0, "double": 2}.get(kind, 1)
            assert risky.number_of_requests(text) == wanted, (kind, text)
            assert risky.number_of_requests(f"Thanks. {text}") == wanted, text


def test_risky_question_offsets_are_those_of_the_text():
    text = "Gut ﬁt ½… “Well”\u200b. ＡＲＥ yo\u200bu  married？ 50% sure(s)."
    (hit,) = risky.risky_questions(text)
    assert (hit["code"], hit["severity"]) == ("sex_family", "discouraged")
    assert text[hit["start"] : hit["end"]] == hit["sentence"] == "ＡＲＥ yo\u200bu  married？"


def test_bundled_rubrics_load():
    bundled = judge.read_rubrics(REPO / "data" / "rubrics.json")
    assert [len(part) for part in bundled.splits.values()] == [300, 50, 60]
    judged = judge.read_rubrics(REPO / "data" / "rubrics_judge.json")
    for rubrics, kind in ((bundled, "check"), (judged, "judge")):
        assert {c.kind for row in rubrics.rows for c in row.criteria} == {kind}
    sizes = {row.task_id: len(row.criteria) for row in bundled.rows}
    assert all(sizes[row.task_id] == len(row.criteria) for row in judged.rows)
    assert len(judged.rows) == 40
