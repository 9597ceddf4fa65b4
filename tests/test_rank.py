"""evaluate.py rank: a reward model's order of candidates, the same whatever the order of the file."""

import csv
import json
import math
import random

import numpy as np
import pytest

import common
import evaluate
import tiny
from evaluate import ndcg
from parts import files
from parts.files import UserError
from parts.stats import kendall_tau


def scorer_of(value, tokens=7, cut=False):
    """In the place of a reward model: value(text) for each profile; everything around it is the real thing."""

    def score(prompts, texts):
        assert len(prompts) == len(texts) <= 256
        return [value(text) for text in texts], [tokens] * len(texts), [cut] * len(texts)

    return lambda folder, args: score


def rank(monkeypatch, out, path, *more, value=len):
    monkeypatch.setattr(evaluate, "profile_scorer", scorer_of(value))
    evaluate.main(["rank", "--reward-model", "rm", "--candidates", str(path), "--out", str(out), *more])  # fmt: skip
    with open(out / "ranked.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def report_of(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def write_csv(path, header, rows, encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows([header, *rows])
    return path


PEOPLE = [
    {"id": "b", "profile": "xxxx", "role": "chef", "note": "n1"},
    {"id": "a", "profile": "yyyy", "role": "chef", "note": None},
    {"id": "c", "profile": "x", "role": "chef", "note": ["u", 1]},
    {"id": "d", "profile": "xxxxxxxx", "role": "chef", "note": "n4"},
    {"id": "e", "profile": "zz", "role": "baker", "note": "n5"},
]


def test_ranks_ties_and_percentiles_by_hand(monkeypatch, tmp_path):
    """Chef: 8, 4, 4, 1. The two fours share rank 2 and the group 1, the last is 4th, not 3rd; percentile = share below + half of
    the equals, itself among them: (3 + ½)/4, (1 + 1)/4, ½/4. Baker has a ranking of its own. The input's columns follow."""
    path = tiny.write_rows(tmp_path / "people.jsonl", PEOPLE)
    rows = rank(monkeypatch, tmp_path / "out", path)
    assert list(rows[0]) == [*evaluate.RANKED, "profile", "role", "note"]
    assert [(r["id"], r["rank"], r["tie_group"]) for r in rows] == [
        ("e", "1", ""), ("d", "1", ""), ("a", "2", "1"), ("b", "2", "1"), ("c", "4", "")
    ]  # fmt: skip
    assert [float(r["percentile"]) for r in rows] == [50, 87.5, 50, 50, 12.5]
    assert [r["note"] for r in rows] == ["n5", "n4", "", "n1", '["u", 1]']
    assert (
        rows[1]["score"] == "8.000000" and rows[1]["tokens"] == "7" and rows[1]["truncated"] == "0"
    )


def test_any_row_order_gives_the_same_file(world, tmp_path):
    """E8. With a real (tiny) reward model: batches differ with the order of a file, and with them the last bits of a score. Three
    orders, two formats: ranked.csv is the same, byte for byte, and the reward of one profile alone is the same number."""
    rows = [
        {"id": f"c{i}", "profile": f"Used {'sql, ' * (i % 7)}{i % 5}.", "role": "x"}
        for i in range(60)
    ]
    written = []
    for seed in (0, 1, 2):
        random.Random(seed).shuffle(rows)
        if seed < 2:
            path = tiny.write_rows(tmp_path / f"{seed}.jsonl", rows)
        else:
            table = [[row[key] for key in row] for row in rows]
            path = write_csv(tmp_path / "2.csv", list(rows[0]), table)
        out = tmp_path / f"out{seed}"
        evaluate.main(["rank", "--reward-model", world["rm"], "--candidates", str(path), "--out", str(out)])  # fmt: skip
        written.append((out / "ranked.csv").read_bytes())
    assert written[0] == written[1] == written[2]
    first = next(csv.DictReader(written[0].decode().splitlines()))
    prompt = [{"role": "user", "content": "Which candidate fits this role?\nRole: x"}]
    alone = common.reward_function(world["rm"])([prompt], [first["profile"]])[0]
    assert float(first["score"]) == pytest.approx(alone, abs=1e-4)
    scores = {}
    for row in csv.DictReader(written[0].decode().splitlines()):
        scores.setdefault(row["profile"], set()).add(row["score"])
    assert len(scores) < 60 and all(
        len(found) == 1 for found in scores.values()
    )  # equal profiles tie


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rank")
    return {"rm": tiny.tiny_reward_model("llama", folder)}


def test_csv_cells_come_through(monkeypatch, tmp_path):
    """E8. Commas, quotes, line breaks, umlauts, a byte-order mark, U+2028, a formula and an emoji: read, scored and written as
    they were, and columns keep their order."""
    cells = ['a,b "c"', "zwei\nZeilen", "Übergrößenträger\u2028x", "=1+1", "👩🏽\u200d🚒"]
    rows = [[i, cell, f"p{'x' * i}"] for i, cell in enumerate(cells)]
    path = write_csv(tmp_path / "in.csv", ["id", "notiz", "profile"], rows, "utf-8-sig")
    found = rank(monkeypatch, tmp_path / "out", path, "--role", "Bäcker")
    assert [row["notiz"] for row in found] == cells[::-1]
    assert list(found[0])[-2:] == ["notiz", "profile"]


def test_quality_is_compared_per_role(monkeypatch, tmp_path, capsys):
    """Kendall's tau-b and NDCG of each role, and their mean over roles with an interval that resamples roles: role a is in perfect
    order (1), b upside down (−1), c has one quality only and counts nowhere. Pooling all candidates would give another number."""
    rows = []
    for role, qualities in (("a", (1, 2, 3)), ("b", (13, 12, 11)), ("c", (5, 5, 5))):
        for i, quality in enumerate(qualities):
            row = {"id": f"{role}{i}", "profile": "x" * (i + 1), "role": role, "quality": quality}
            rows.append(row)
    path = tiny.write_rows(tmp_path / "people.jsonl", rows)
    rank(monkeypatch, tmp_path / "out", path, "--k", "2")
    report = report_of(tmp_path / "out")
    assert [role["tau"] for role in report["roles"]] == [1.0, -1.0, None]
    assert report["tau"]["value"] == 0.0 and report["tau"]["n"] == 2
    assert (report["tau"]["low"], report["tau"]["high"]) == (-1.0, 1.0)
    assert report["roles"][1]["ndcg"] == pytest.approx(ndcg([11, 12, 13], 2)) and report["k"] == 2
    assert "over roles" in report["tau"]["method"]
    assert "Kendall's tau-b with quality: 0.000 [-1.000, 1.000]" in capsys.readouterr().out
    rank(monkeypatch, tmp_path / "none", path, "--quality", "none")
    assert report_of(tmp_path / "none")["tau"] is None


def test_one_role_has_an_interval_over_candidates(monkeypatch, tmp_path):
    """With one role nothing can be said about the next role, but something about other candidates: the interval resamples them."""
    rng = np.random.default_rng(0)
    rows = [
        {"id": i, "profile": "x" * (i + 1), "role": "r", "q": i + rng.normal(0, 8)}
        for i in range(40)
    ]
    path = tiny.write_rows(tmp_path / "people.jsonl", rows)
    rank(monkeypatch, tmp_path / "out", path, "--quality", "q")
    tau = report_of(tmp_path / "out")["tau"]
    expected = kendall_tau(list(range(40)), [row["q"] for row in rows])
    assert tau["value"] == pytest.approx(expected, abs=1e-6)
    assert tau["low"] < expected < tau["high"] < 1 and "candidates" in tau["method"]


def test_kendall_equals_all_pairs():
    """The row-at-a-time form against the definition, ties in both."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 5, 40), rng.integers(0, 5, 40)
    pairs = [(i, j) for i in range(40) for j in range(i)]
    signs = [(np.sign(a[i] - a[j]), np.sign(b[i] - b[j])) for i, j in pairs]
    untied = math.sqrt(sum(x != 0 for x, _ in signs) * sum(y != 0 for _, y in signs))
    assert kendall_tau(a, b) == pytest.approx(sum(x * y for x, y in signs) / untied)


def test_blind_takes_the_names_out(monkeypatch, tmp_path, capsys):
    """A name in a profile raises one warning; with --blind the reward model reads "the candidate", and the file keeps the name.
    An e-mail address is contact data. Without either there is no warning."""
    seen = []

    def value(text):
        seen.append(text)
        return len(text)

    rows = [{"id": i, "name": f"Ann {i}", "profile": f"Ann {i}, 3 years. Ann {i} led.", "role": "r"} for i in range(3)]  # fmt: skip
    path = tiny.write_rows(tmp_path / "people.jsonl", rows)
    rank(monkeypatch, tmp_path / "a", path, value=value)
    assert capsys.readouterr().out.count("warning:") == 1 and any("Ann" in text for text in seen)
    seen.clear()
    found = rank(monkeypatch, tmp_path / "b", path, "--blind", "name", value=value)
    assert seen == ["the candidate, 3 years. the candidate led."]  # one text, scored once
    assert "warning" not in capsys.readouterr().out
    assert {row["profile"] for row in found} == {row["profile"] for row in rows}
    assert {row["tie_group"] for row in found} == {"1"}
    for text, warned in (("Mail ann@example.org", True), ("Call +49 170 1234567", True), ("Moved 51 boxes, 2019 to 2024.", False)):  # fmt: skip
        path = tiny.write_rows(tmp_path / "one.jsonl", [{"id": 1, "profile": text, "role": "r"}])
        rank(monkeypatch, tmp_path / "c", path, "--overwrite")
        assert ("warning" in capsys.readouterr().out) == warned, text


def test_what_is_printed(monkeypatch, tmp_path, capsys):
    """The first line says that a score is no decision; with --columns-for-audit the last one is the audit's command, and the
    columns are in the file."""
    rows = [{"id": i, "profile": "x" * (i + 1), "role": "r", "sex": "F", "race_ethnicity": "A"} for i in range(3)]  # fmt: skip
    path = tiny.write_rows(tmp_path / "people.jsonl", rows)
    found = rank(monkeypatch, tmp_path / "out", path, "--columns-for-audit", "sex,race_ethnicity")
    printed = capsys.readouterr().out.strip().splitlines()
    assert "no decision" in printed[0]
    assert printed[-1] == f"next: python fairness.py audit {tmp_path / 'out' / 'ranked.csv'} --score percentile --select 0.3"  # fmt: skip
    assert found[0]["sex"] == "F"


def test_role_from_text_file_and_row(tmp_path):
    """A title, the lines of a role, a file of them, the whole prompt: one template, the one of data/README.md."""
    text = "Role: chef\nMust have: soups"
    (tmp_path / "role.txt").write_text("\ufeff" + text + "\n", encoding="utf-8")
    wanted = [{"role": "user", "content": f"Which candidate fits this role?\n{text}"}]
    assert evaluate.role_prompt(text) == wanted == evaluate.role_prompt(str(tmp_path / "role.txt"))
    assert evaluate.role_prompt(wanted[0]["content"]) == wanted
    assert evaluate.role_prompt("chef")[0]["content"].endswith("\nRole: chef")
    assert evaluate.own_prompt({"prompt": "mine", "role": "x"}, "f:1") == "mine"
    bundled = next(
        files.read_jsonl(evaluate.Path(evaluate.__file__).parent / "data/candidates.jsonl")
    )
    role = bundled["prompt"][0]["content"].partition("\n")[2]
    assert evaluate.role_prompt(role) == bundled["prompt"]


def refused(*argv):
    with pytest.raises(UserError) as error:
        evaluate.main(["rank", "--reward-model", "nowhere", *map(str, argv)])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "text, flags, message",
    [
        ("", (), "is empty"),
        ('{"id": 1}\n', (), "no column 'profile'; there is id"),
        ('{"id": 1, "profile": "x", "role": "r"}\n{"id": 1, "profile": "y", "role": "r"}\n', (), ":2: the id '1' stands there twice"),
        ('{"id": 1, "profile": " ", "role": "r"}\n', (), ":1: the 'profile' of '1' is empty"),
        ('{"id": 1, "profile": ["x"], "role": "r"}\n', (), "expected a text"),
        ('{"id": null, "profile": "x", "role": "r"}\n', (), "the id is empty"),
        ('{"id": 1, "profile": "x"}\n', (), "say which role with --role"),
        ('{"id": 1, "profile": "x", "prompt": [{"role": "nobody"}]}\n', (), "c.jsonl:1"),
        ('{"id": 1, "profile": "x", "role": "r"', (), "not valid JSON"),
        ('{"id": 1, "profile": "x", "role": "r"}\n', ("--blind", "name"), "no column 'name'"),
        ('{"id": 1, "profile": "x", "role": "r"}\n', ("--quality", "q"), "no column 'q'"),
        ('{"id": 1, "profile": "x", "role": "r"}\n', ("--columns-for-audit", "sex"), "no column 'sex'"),
        ('{"id": 1, "profile": "x", "role": "r", "score": 1}\n', (), "rename 'score'"),
        ('{"id": 1, "profile": "x", "role": "r"}\n', ("--role", "role.txt"), "--role role.txt: no such file"),
        ('{"id": 1, "profile": "x", "role": "r"}\n', ("--role", " "), "--role: it is empty"),
        ('{"id": 1, "profile": "x", "role": "r"}\n', ("--k", "0"), "--k 0"),
    ],
)  # fmt: skip
def test_bad_candidates_are_named(tmp_path, text, flags, message):
    """E12. File, line, column and the fix, before a model is loaded; nothing is written."""
    path = tmp_path / "c.jsonl"
    path.write_text(text)
    assert message in refused("--candidates", path, "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "data, message",
    [
        (b"id,profile\n1,x,y\n", ":2: more cells than the 2 columns"),
        (b"id,profile\n1,x\n2\n", ":3: fewer cells"),
        (b'id,profile\n1,"x\n', "unexpected end of data"),
        (b"id,profile\n1,\xff\n", "utf-8"),
        (b"", "is empty"),
        (b"id,profile\n", "is empty"),
    ],
)
def test_bad_csv_is_named(tmp_path, data, message):
    """A row with a cell too many would shift its columns in silence, an open quote would swallow the rest of the file."""
    path = tmp_path / "c.csv"
    path.write_bytes(data)
    line = refused("--candidates", path, "--role", "chef", "--out", tmp_path / "out")
    assert message in line and "c.csv" in line


def test_bad_quality_and_models_are_named(monkeypatch, world, tmp_path):
    """A quality that is no number names its candidate; a folder that is no reward model its flag; a report is not replaced."""
    people = [{"id": "ann", "profile": "x", "role": "r", "quality": "good"}]
    path = tiny.write_rows(tmp_path / "p.jsonl", people)
    with pytest.raises(UserError, match="of candidate 'ann' it is 'good'"):
        rank(monkeypatch, tmp_path / "out", path)
    monkeypatch.undo()
    assert "--reward-model" in refused("--candidates", path, "--out", tmp_path / "out")
    (tmp_path / "out2").mkdir()
    (tmp_path / "out2" / "report.json").write_text("{}")
    assert "--overwrite" in refused("--candidates", path, "--out", tmp_path / "out2")


def test_a_cut_profile_is_named(tmp_path, capsys):
    """A reward model trained on 100 tokens reads the first of a long profile only: said with its id, and a column says which."""
    rm = evaluate.Path(tiny.tiny_reward_model("llama", tmp_path))
    (rm / "args.json").write_text(json.dumps({"args": {"max_length": 100}, "sha256": {}}))
    people = [{"id": "long", "profile": "python " * 90, "role": "r"}, {"id": "short", "profile": "x", "role": "r"}]  # fmt: skip
    path = tiny.write_rows(tmp_path / "p.jsonl", people)
    evaluate.main(["rank", "--reward-model", str(rm), "--candidates", path, "--out", str(tmp_path / "o"), "--role", "r"])  # fmt: skip
    assert "1 of 2 were cut" in capsys.readouterr().out
    rows = {row["id"]: row for row in csv.DictReader(open(tmp_path / "o" / "ranked.csv"))}
    assert rows["long"]["truncated"] == "1" and int(rows["long"]["tokens"]) < 100
    assert rows["short"]["truncated"] == "0"


def test_blind_takes_the_name_in_either_order_and_refuses_a_row_without_it(tmp_path):
    """ "Lee, Amy" stayed when the column said "Amy Lee", and nothing was said."""
    rows = [{"id": "1", "role": "Clerk", "name": "Amy Lee", "profile": "LEE, Amy led Leeds."}]
    path = tmp_path / "c.jsonl"
    files.write_jsonl(path, rows)
    found = evaluate.Candidates(path, blind="name")
    assert found.rows[0][0] == "the candidate led Leeds." and found.replaced == 1
    files.write_jsonl(path, [rows[0] | {"profile": "A. Lee led Leeds."}])
    with pytest.raises(UserError, match="'Amy Lee' is not in the text"):
        evaluate.Candidates(path, blind="name")
