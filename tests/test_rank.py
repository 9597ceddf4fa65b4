"""evaluate.py rank: a reward model's order of candidates, the same whatever the order of the
file."""

import csv
import json
import random

import numpy as np
import pytest

import common
import evaluate
import tiny
from parts import files
from parts.files import UserError


def rank(monkeypatch, out, path, *more, value=len):
    """The rows of ranked.csv, with value(text) in the place of a reward model; everything around it
    is the real thing."""

    def scorer(folder, args):
        def score(items, cuts):
            return np.array([[value(answer[0]["content"])] for _, answer in items], float), None

        return score

    monkeypatch.setattr(evaluate, "raw_scorer", scorer)
    evaluate.main(["rank", "--reward-model", "rm", "--candidates", str(path), "--out", str(out), *more])  # fmt: skip
    with open(out / "ranked.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path, header, rows, encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows([header, *rows])
    return path


PEOPLE = [
    {"id": "b", "profile": "xxxx", "role": "chef", "note": "n1"},
    {"id": "a", "profile": "yyyy", "role": "chef", "note": None},
    {"id": "c", "profile": "x", "role": "chef", "note": ["u", 1]},
    {"id": "d", "profile": "xxxxxxxx", "role": "chef", "note": "n4"},
    {"id": 0, "profile": "zz", "role": "baker", "note": "n5"},
    {"id": "e", "profile": "z", "role": "baker", "note": "n6"},
]


def test_ranks_ties_and_percentiles_by_hand(monkeypatch, tmp_path):
    """Chef: 8, 4, 4, 1. The fours share rank 2, the last is 4th; percentile = share below + half of
    the equals: (3 + ½)/4, (1 + 1)/4, ½/4. Baker has a ranking of its own. The input's columns
    follow as they came."""
    path = tiny.write_rows(tmp_path / "people.jsonl", PEOPLE)
    rows = rank(monkeypatch, tmp_path / "out", path)
    assert list(rows[0]) == [*evaluate.RANKED, "profile", "role", "note"]
    assert [(r["id"], r["rank"], float(r["percentile"])) for r in rows] == [
        ("0", "1", 75), ("e", "2", 25), ("d", "1", 87.5), ("a", "2", 50), ("b", "2", 50), ("c", "4", 12.5)
    ]  # fmt: skip
    assert [r["note"] for r in rows] == ["n5", "n6", "n4", "", "n1", '["u", 1]']
    assert (rows[2]["score"], rows[2]["truncated"]) == ("8.0", "False")


@pytest.fixture(scope="module")
def rm(tmp_path_factory):
    return tiny.tiny_reward_model("llama", tmp_path_factory.mktemp("rank"))


def test_any_row_order_gives_the_same_file(rm, tmp_path):
    """With a real (tiny) reward model: batches differ with the order of a file, and with them the
    last bits of a score. Three orders, two formats: the same bytes; a profile alone has the same
    reward, and equal profiles tie."""
    rows = [{"id": f"c{i}", "profile": f"Used {'sql, ' * (i % 7)}{i % 5}.", "role": "x"} for i in range(60)]  # fmt: skip
    written = []
    for seed in (0, 1, 2):
        random.Random(seed).shuffle(rows)
        path = tmp_path / ("2.csv" if seed == 2 else f"{seed}.jsonl")
        if seed < 2:
            tiny.write_rows(path, rows)
        else:
            write_csv(path, list(rows[0]), [list(row.values()) for row in rows])
        out = tmp_path / f"out{seed}"
        evaluate.main(["rank", "--reward-model", rm, "--candidates", str(path), "--out", str(out)])
        written.append((out / "ranked.csv").read_bytes())
    assert written[0] == written[1] == written[2]
    found = list(csv.DictReader(written[0].decode().splitlines()))
    prompt = [{"role": "user", "content": "Which candidate fits this role?\nRole: x"}]
    alone = common.reward_function(rm)([prompt], [found[0]["profile"]])[0]
    assert float(found[0]["score"]) == pytest.approx(alone, abs=1e-4)
    pairs = {(row["profile"], row["score"]) for row in found}
    assert len(pairs) == len({profile for profile, _ in pairs}) == 35


def test_csv_cells_come_through(monkeypatch, tmp_path):
    """Commas, quotes, line breaks, umlauts, a byte-order mark, U+2028, a formula and an emoji come
    out as they went in."""
    cells = ['a,b "c"', "zwei\nZeilen", "Übergrößenträger\u2028x", "=1+1", "👩🏽\u200d🚒"]
    rows = [[i, cell, f"p{'x' * i}"] for i, cell in enumerate(cells)]
    path = write_csv(tmp_path / "in.csv", ["id", "notiz", "profile"], rows, "utf-8-sig")
    found = rank(monkeypatch, tmp_path / "out", path, "--role", "Bäcker")
    assert [row["notiz"] for row in found] == cells[::-1]
    assert list(found[0])[-2:] == ["notiz", "profile"]


def test_blind_takes_the_names_out(monkeypatch, tmp_path, capsys):
    """The reward model reads "the candidate", in either order of the name, and the file keeps the
    name; the number of replacements is said; a row without its name is refused."""
    seen = []

    def value(text):
        seen.append(text)
        return len(text)

    names = ("Ann Li", "Ann Li, 3 years. Ann Li led."), ("Amy Lee", "LEE, Amy, 3 years. amy lee led.")  # fmt: skip
    people = [{"id": n, "name": n, "profile": text, "role": "r"} for n, text in names]
    path = tiny.write_rows(tmp_path / "people.jsonl", people)
    found = rank(monkeypatch, tmp_path / "b", path, "--blind", "name", value=value)
    assert seen == 2 * ["the candidate, 3 years. the candidate led."]
    printed = capsys.readouterr().out
    assert "--blind name: replaced in 2 profiles" in printed
    assert {row["profile"] for row in found} == {row["profile"] for row in people}
    assert [row["rank"] for row in found] == ["1", "1"]
    path = tiny.write_rows(tmp_path / "c.jsonl", [people[1] | {"profile": "A. Lee led Leeds."}])
    assert "'Amy Lee' is not in the text" in refused("--candidates", path, "--blind", "name")


def test_what_is_printed(monkeypatch, tmp_path, capsys):
    """The first line says that a score is no decision; a reason per candidate is in file and table;
    with columns to audit by the last line is the audit's command."""
    people = [{"id": i, "profile": f"Baked {'bread ' * i}", "role": "Role: r\nMust have: bread, soup", "sex": "F", "race_ethnicity": "A"} for i in range(3)]  # fmt: skip
    path = tiny.write_rows(tmp_path / "people.jsonl", people)
    found = rank(monkeypatch, tmp_path / "out", path)
    printed = capsys.readouterr().out.strip().splitlines()
    ranked = tmp_path / "out" / "ranked.csv"
    assert printed[-1] == f"next: python fairness.py audit {ranked} --score percentile --select 0.3"
    assert found[0]["sex"] == "F"
    assert [r["must_haves_found"] for r in found] == ["bread", "bread", ""]
    assert found[2]["must_haves_missing"] == "bread, soup"
    assert any(line.split()[-2:] == ["bread", "soup"] for line in printed)


def test_role_from_text_file_and_row(tmp_path):
    """A title, the lines of a role, a file of them, the whole prompt: one template, the one of
    data/README.md."""
    text = "Role: chef\nMust have: soups"
    (tmp_path / "role.txt").write_text("\ufeff" + text + "\n", encoding="utf-8")
    wanted = [{"role": "user", "content": f"Which candidate fits this role?\n{text}"}]
    for role in (text, str(tmp_path / "role.txt"), wanted[0]["content"]):
        assert evaluate.role_prompt(role) == wanted
    assert evaluate.role_prompt("chef")[0]["content"].endswith("\nRole: chef")
    data = evaluate.Path(evaluate.__file__).parent / "data/candidates.jsonl"
    bundled = next(files.read_jsonl(data))
    assert evaluate.role_prompt(bundled["prompt"][0]["content"].partition("\n")[2]) == bundled["prompt"]  # fmt: skip


# ---- bad input ----


def refused(*argv):
    with pytest.raises(UserError) as error:
        evaluate.main(["rank", "--reward-model", "nowhere", *map(str, argv)])
    assert "\n" not in str(error.value)
    return str(error.value)


WHOLE = '{"id": 1, "profile": "x", "role": "r"}\n'


@pytest.mark.parametrize("text, flags, message", [
    ("", (), "is empty"),
    ('{"id": 1}\n', (), "no text in the column 'profile'; there is id"),
    (WHOLE * 2, (), ":2: the id '1' is there twice"),
    ('{"id": 1, "profile": " ", "role": "r"}\n', (), ":1: no text in the column 'profile'"),
    ('{"id": 1, "profile": ["x"], "role": "r"}\n', (), ":1: no text in the column 'profile'"),
    ('{"id": null, "profile": "x", "role": "r"}\n', (), "no text in the column 'id'"),
    ('{"id": 1, "profile": "x"}\n', (), ":1: no role: say with --role"),
    ('{"id": 1, "profile": "x", "prompt": [{"role": "nobody"}]}\n', (), "c.jsonl:1"),
    ('{"id": 1, "profile": "\\ud800", "role": "r"}\n', (), "c.jsonl:1"),
    (WHOLE[:-2], (), "not valid JSON"),
    (WHOLE, ("--blind", "name"), "no text in the column 'name'"),
    (WHOLE.replace("}", ', "score": 1}'), (), "rename 'score'"),
    (WHOLE, ("--role", "role.txt"), "--role role.txt: no such file"),
    (WHOLE, ("--role", " "), "no role: say with --role"),
    (WHOLE, (), "--reward-model nowhere"),
])  # fmt: skip
def test_bad_candidates_are_named(tmp_path, text, flags, message):
    """File, line, column and the fix, before a model is loaded; nothing is written."""
    path = tmp_path / "c.jsonl"
    path.write_text(text)
    assert message in refused("--candidates", path, "--out", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data, message", [
    (b"id,profile\n1,x,y\n", ":2: more cells than the 2 columns"),
    (b"id,profile\n1,x\n2\n", ":3: fewer cells"),
    (b'id,profile\n1,"x\n', "unexpected end of data"),
    (b"id,profile\n1,\xff\n", "not UTF-8; save it as CSV UTF-8"),
    (b"id;profile\n1;x\n", "cells are separated by semicolons; save it as CSV with commas"),
    ("id,profile\n1,x\n".encode("utf-16"), "this is UTF-16; save it as CSV UTF-8"),
    (b"PK\x03\x04\x14\x00\x08", "this is an Excel workbook; save it as CSV UTF-8"),
    (b"", "is empty"),
    (b"id,profile\n", "is empty"),
])  # fmt: skip
def test_bad_csv_is_named(tmp_path, data, message):
    """A row with a cell too many would shift its columns in silence, an open quote would swallow
    the rest of the file."""
    path = tmp_path / "c.csv"
    path.write_bytes(data)
    line = refused("--candidates", path, "--role", "chef", "--out", tmp_path / "out")
    assert message in line and "c.csv" in line


def test_a_cut_profile_is_named(tmp_path, capsys):
    """A reward model trained on 100 tokens reads the first of a long profile only: said with its
    id, and in a column."""
    rm = evaluate.Path(tiny.tiny_reward_model("llama", tmp_path))
    (rm / "args.json").write_text(json.dumps({"args": {"max_length": 100}, "sha256": {}}))
    people = [{"id": "long", "profile": "python " * 90}, {"id": "short", "profile": "x"}]
    path = tiny.write_rows(tmp_path / "p.jsonl", people)
    argv = ["rank", "--reward-model", rm, "--candidates", path, "--out", tmp_path / "o", "--role", "r"]  # fmt: skip
    evaluate.main([*map(str, argv)])
    assert "1 were cut to the reward model's --max-length, such as long" in capsys.readouterr().out
    with open(tmp_path / "o" / "ranked.csv") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert [rows[name]["truncated"] for name in ("long", "short")] == ["True", "False"]
