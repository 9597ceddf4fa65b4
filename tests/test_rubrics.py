"""parts/rubrics.py: files of rubrics and of answers: what is read, and what is refused where.

bad_rubrics.jsonl, bad_answers.jsonl   rows that are refused, each with a word of the message
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


def test_a_row_has_texts_checks_and_ifeval_pairs(written, capsys):
    row = {"prompt": "p", "task_id": 7, "reference": "r", "level": 3}
    row["rubrics"] = ["Is short.", {"criterion": " Lies.\n", "weight": -2}]
    row["rubrics"] += [{"check": "text:max_chars", "max_chars": 9, "negate": True}]
    row["instruction_id_list"] = ["punctuation:no_comma", "length_constraints:number_words"]
    row["kwargs"] = [None, {"num_words": 3, "relation": "at least", "keyword": None}]
    (read,) = read_rubrics(written([row]))
    assert [(c.id, c.kind, c.text or c.check, c.weight, c.negate) for c in read.criteria] == [
        (1, "judge", "Is short.", 1, False),
        (2, "judge", "Lies.", -2, True),
        (3, "check", "text:max_chars", 1, True),
        (4, "check", "punctuation:no_comma", 1, False),
        (5, "check", "length_constraints:number_words", 1, False),
    ]
    assert read.criteria[4].arguments == {"num_words": 3, "relation": "at least"}
    assert (read.task_id, read.reference, read.raw, read.place) == ("7", "r", row, "line 1")
    assert "1 rows; 2 criteria judged, 3 checked; not read: level 1" in capsys.readouterr().out


@each("bad_rubrics")
def test_a_bad_row_is_refused(row, word):
    """Among them weights that would hide all others, and half a character."""
    with pytest.raises(ValueError, match=word):
        read_row(row, allow_code=True)


def test_bundled_files_load():
    bundled, judged = (
        read_rubrics(REPO / f"data/{name}.json") for name in ("rubrics", "rubrics_judge")
    )
    assert Counter(row.split for row in bundled) == {"train": 300, "validation": 50, "test": 60}
    assert {c.kind for row in judged for c in row.criteria} == {"judge"}
    natural = read_rubrics(REPO / "data/ifeval_prompts.jsonl")
    assert [len(natural), sum(len(row.criteria) for row in natural)] == [60, 150]


# ---- answers ----


@pytest.fixture
def rubrics(written):
    rows = [{"task_id": i, "prompt": p, "rubrics": [r]} for i, p, r in ("apx", "bqx", "cqy")]
    return read_rubrics(written(rows))


def test_answers_find_their_row(written, rubrics, capsys):
    chat = [{"role": "user", "content": "p"}]
    answers = [
        {"prompt": "p", "response": "1", "model": "m", "level": 3},
        {"prompt": chat, "response": [*chat, {"role": "assistant", "content": "2"}]},
        {"task_id": "c", "response": ""},
        {"task_id": "b", "prompt": "q", "answer": "4"},
    ]
    found = read_responses(written(answers), rubrics)
    read = [(row.task_id, answer, model) for row, answer, model in found]
    assert read == [("a", "1", "m"), ("a", "2", None), ("c", "", None), ("b", "4", None)]
    assert "level 1" in capsys.readouterr().out


def test_without_rubrics_each_prompt_is_a_row(written):
    answers = [{"prompt": p, "response": r, "reference": "z"} for p, r in ("p1", "q2", "p3")]
    found = read_responses(written(answers))
    assert [row.task_id for row, *_ in found] == ["1", "2", "1"]
    assert {row.reference for row, *_ in found} == {"z"}


@each("bad_answers", rubrics=True)
def test_an_answer_without_its_row_is_refused(written, rubrics, answers, word):
    line = error_of(read_responses, written(answers), rubrics)
    assert word in line and "--responses" in line and ":1" in line


@each("bad_answers", rubrics=False)
def test_answers_without_rubrics_are_refused(written, answers, word):
    assert word in error_of(read_responses, written(answers))
