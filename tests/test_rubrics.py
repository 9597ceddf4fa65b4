"""parts/rubrics.py: files of rubrics and of answers: what is read, and what is refused where.

bad_rubrics.jsonl, bad_answers.jsonl   rows that are refused, each with a word of the message
good_rubrics.jsonl                     a row and its criteria; answers and what is found
rubric_files.jsonl                     texts of files: the splits of their rows, or words of the message
"""

from collections import Counter

import pytest

from case_rows import each
from conftest import REPO
from parts.rubrics import read_responses, read_row, read_rubrics
from tiny import error_of, write_rows


@pytest.fixture
def written(tmp_path):
    return lambda rows: write_rows(tmp_path / "x.jsonl", rows)


@each("rubric_files")
def test_the_forms_of_a_file(tmp_path, name, text, found):
    """A list, JSONL, lists by split, a key; else the line that refuses it names the place."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    if isinstance(found, str):
        line = error_of(read_rubrics, path)
        assert [word for word in ["--data", *found.split()] if word not in line] == []
    else:
        rows = read_rubrics(path)
        assert [row.split for row in rows] == found
        assert rows[0].task_id == "row-1" and rows[1].task_id in ("row-2", "t")


@each("good_rubrics", of="row")
def test_a_row_has_texts_checks_and_ifeval_pairs(row, criteria, arguments, written, capsys):
    (read,) = read_rubrics(written([row]))
    found = [[c.id, c.kind, c.text or c.check, c.weight, c.negate] for c in read.criteria]
    assert found == criteria and read.criteria[4].arguments == arguments
    assert (read.task_id, read.reference, read.raw, read.place) == ("7", "r", row, "line 1")
    told = capsys.readouterr().out
    assert "judge criteria 2, check criteria 3" in told and "'level', not read 1" in told


@each("bad_rubrics")
def test_a_bad_row_is_refused(row, word):
    """Among them weights that would hide all others, and half a character."""
    with pytest.raises(ValueError, match=word):
        read_row(row, allow_code=True)


def test_bundled_files_load():
    bundled, judged = (read_rubrics(REPO / f"data/rubrics{x}.json") for x in ("", "_judge"))
    assert Counter(row.split for row in bundled) == dict(train=300, validation=50, test=60)
    assert {c.kind for row in judged for c in row.criteria} == {"judge"}
    natural = read_rubrics(REPO / "data/ifeval_prompts.jsonl")
    assert [len(natural), sum(len(row.criteria) for row in natural)] == [60, 150]


# ---- answers ----


@pytest.fixture
def rubrics(written):
    rows = [{"task_id": i, "prompt": p, "rubrics": [r]} for i, p, r in ("apx", "bqx", "cqy")]
    return read_rubrics(written(rows))


@each("good_rubrics", of="answers")
def test_answers_find_their_row(answers, found, graded, written, rubrics, capsys):
    """Without rubrics each prompt is a row."""
    read = read_responses(written(answers), *[rubrics] * graded)
    keys = [[row.task_id, answer, model, row.reference] for row, answer, model in read]
    assert keys == found and ("'level', not read 1" in capsys.readouterr().out) == graded


@each("bad_answers", rubrics=True)
def test_an_answer_without_its_row_is_refused(written, rubrics, answers, word):
    line = error_of(read_responses, written(answers), rubrics)
    assert word in line and "--responses" in line and ":1" in line


@each("bad_answers", rubrics=False)
def test_answers_without_rubrics_are_refused(written, answers, word):
    assert word in error_of(read_responses, written(answers))
