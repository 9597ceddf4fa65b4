"""rank.py: a reward model's order of candidates, whatever the order of the file."""

import csv
import random
import shlex

import pytest
import torch

import audit
import rank
import tiny
from case_rows import each
from parts import reward_models
from tiny import error_of


class Longest:
    """A reward model to whom the longer profile is the better one; it reads 180 characters."""

    def __call__(self, prompts, answers, rows=None):
        self.seen = list(zip(prompts, answers))
        return [float(len(x)) if len(x) <= 180 else None for x in answers]


@pytest.fixture
def ranked(monkeypatch, tmp_path):
    model = Longest()
    monkeypatch.setattr(reward_models, "RewardFunction", lambda *given, **settings: model)

    def run(people, *flags):
        path = tmp_path / ("people.csv" if isinstance(people, str) else "people.jsonl")
        if isinstance(people, str):
            path.write_text(people, encoding="utf-8")
        else:
            tiny.write_rows(path, people)
        given = "--candidates", str(path), "--out", str(tmp_path / "out"), "--overwrite"
        rank.main([*given, *flags])
        return table_of(tmp_path / "out"), model.seen

    return run


def table_of(out):
    return [*csv.DictReader((out / "ranked.csv").read_text("utf-8").splitlines(keepends=True))]


def people(**profiles):
    return [{"id": name, "role": "chef", "profile": text} for name, text in profiles.items()]


def test_ranks_are_within_the_role_and_equal_scores_share_one(ranked):
    rows = people(b="w " * 20, a="w " * 20, c="w " * 19 + "www", d="w " * 40)
    rows += [{"id": "e", "role": "waiter", "profile": "w " * 25, "note": ["u", 1]}]
    table, seen = ranked(rows)
    assert [(row["id"], row["rank"], row["of"]) for row in table] == [
        ("d", "1", "4"), ("c", "2", "4"), ("a", "3", "4"), ("b", "3", "4"), ("e", "1", "1"),
    ]  # fmt: skip
    assert table[4]["note"] == '["u", 1]'
    assert seen[0][0] == rank.role_prompt("chef")


def test_what_is_no_profile_gets_no_rank_and_is_listed(ranked, capsys):
    """File names, links and "See attachment" took ranks 1 to 4, and the one profile was last."""
    link = "https://ats.example.org/files/3.pdf"
    profile = "Led audits of data and built pipelines for six years. " * 3
    rows = people(a=profile, b="cv.pdf", c=link, d="See attachment", e=None, f=" ".join("abc"))

    def ranks(*flags):
        table, seen = ranked(rows, *flags)
        return [(row["id"], row["rank"], row["score"] == "") for row in table], len(seen)

    unranked = [(name, "", True) for name in "bcdefg"]
    assert ranks() == ([("a", "1", False), *unranked[:-1]], 1)
    assert "5 without a rank" in capsys.readouterr().out
    # a profile that the model does not read to its end has no score, and ended the command
    rows += people(g="w " * 100)
    assert ranks() == ([("a", "1", False), *unranked], 2)
    found, _ = ranks("--min-words", "2")
    assert [id for id, rank, _ in found if not rank] == ["b", "c", "e", "g"]
    assert "--min-words" in error_of(ranked, people(a="cv.pdf", b=link))


def test_the_command_that_it_prints_runs(ranked, capsys, tmp_path):
    """It lacked --better. Percentiles across roles found a difference that is none: within roles."""
    rows = people(**{f"{i}": "w " * (20 + i % 7) for i in range(40)})
    ranked([row | {"sex": "FM"[i % 2]} for i, row in enumerate(rows)])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: python audit.py ").replace("COLUMN", "sex"))
    words += ["--out", str(tmp_path / "audit")]
    args = audit.parse_args(words)
    assert (args.within, args.better, args.score) == ("role", "higher", "score")
    assert audit.main(words) == 0


def test_cells_come_through_and_are_no_formulas(ranked, tmp_path):
    profile = f'Zoë said "no, thanks"; then she ran {"w " * 20}'
    quoted = profile.replace('"', '""')
    table, _ = ranked(f'id;role;cv;note\n1;chef;"{quoted}";=1+1\n', "--text-column", "cv")
    assert table[0]["cv"] == profile.strip() and table[0]["note"] == "'=1+1"
    assert (tmp_path / "out/ranked.csv").stat().st_mode & 0o777 == 0o600


def test_a_role_is_text(ranked):
    text = "Role: chef\nMust have: soups"
    rows = people(a="w " * 20) + [{"id": "b", "prompt": "Own prompt?", "profile": "w " * 20}]
    table, seen = ranked(rows, "--role", text)
    role = f"Which candidate fits this role?\n{text}"
    assert [prompt[0]["content"] for prompt, _ in seen] == [role, role]
    assert {row["role"] for row in table} == {text}
    table, seen = ranked([rows[0], rows[1] | {"role": "chef"}])  # two prompts are two roles
    assert {str(prompt) for prompt, _ in seen} == {str(rank.role_prompt("chef")), "Own prompt?"}
    assert len({row["role"] for row in table}) == 2


@each("bad_candidates")
def test_bad_candidates_are_named(ranked, rows, flags, fact):
    assert fact in error_of(ranked, rows, *flags.split())


def test_nothing_is_replaced_unasked(tmp_path):
    (tmp_path / "ranked.csv").write_text("mine")
    assert "--overwrite" in error_of(rank.main, ["--out", str(tmp_path)])


def test_any_row_order_gives_the_same_file(reward_folder, tmp_path):
    """Last bits of a score depend on its batch. The scores are the model's own, not standardised."""
    words = "python sql kafka audits costs teamwork led cut built asked".split()
    texts = [" ".join(random.Random(i).choices(words, k=20 + i % 9)) for i in range(24)]
    rows = [row | {"role": "chef cook".split()[i % 2]}
            for i, row in enumerate(people(**{f"c{i}": text for i, text in enumerate(texts)}))]  # fmt: skip
    files = set()
    for seed in range(2):
        random.Random(seed).shuffle(rows)
        path, out = tiny.write_rows(tmp_path / "p.jsonl", rows), tmp_path / str(seed)
        rank.main(["--reward-model", reward_folder, "--candidates", path, "--out", str(out)])
        files.add((out / "ranked.csv").read_bytes())
    assert len(files) == 1
    table = table_of(out)
    score = reward_models.RewardFunction(reward_folder, "cpu", torch.float32, raw=True)
    prompts, texts = zip(*((rank.role_prompt(row["role"]), row["profile"]) for row in table))
    assert [float(row["score"]) for row in table] == pytest.approx(score(prompts, texts), abs=1e-4)
