"""A broken file is read, or refused in one line that names it: two hundred broken copies of each.

good_rows.jsonl   rows that each reader takes
"""

import json
import random
from types import SimpleNamespace

import pytest

import audit
import fairness
import rank
from case_rows import rows_of
from conftest import REPO
from parts import contest, curves, twins
from parts.agreement import unblinded
from parts.files import UserError, read_jsonl
from parts.pairs import Pairs
from parts.texts import plain_text
from parts.votes import load_items, read_log, replay
from tiny import tiny_tokenizer

VALUES = [row["value"] for row in rows_of("cases", of="value")] + ["é" * 5000]
PIECES = [b",", b'"', b"\n", b"\x00", b"\xff", b";", b"nan", b"3", b""]
TOKENIZER = tiny_tokenizer()
DECISIONS = b"id,p,g\n0,0,a\n1,1,a\n2,0,b\n3,1,b\n4,0,a\n5,1,a\n6,0,b\n7,1,b\n"


def good(name):
    """Rows of good_rows.jsonl or of a bundled JSONL, or the bytes of a CSV."""
    if name == "decisions":
        return DECISIONS
    if "." not in name:
        return [case["row"] for case in rows_of("good_rows", reader=name)]
    path = REPO / "data" / name
    return path.read_bytes() if path.suffix == ".csv" else [*read_jsonl(path)][:200:30]


def mutant(good, rng):
    """Bytes of a file with slips: of rows a key without its value, with another one, under another
    name; of the bytes some lost or replaced."""
    if isinstance(good, list):
        rows, how = json.loads(json.dumps(good)), rng.randrange(5)
        row = rng.choice(rows)
        key = rng.choice(list(row))
        if how == 0:
            row[key] = rng.choice(VALUES)
        elif how < 3:
            row[rng.choice([*row, "new"])] = row.pop(key)
        good = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        if how < 3:
            return good
    data = bytearray(good)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.choice(PIECES)
    return bytes(data) if rng.randrange(4) else bytes(data[:at])


def prompts(path):
    args = SimpleNamespace(prompts=path, split="all", n=0, seed=0, chat=False)
    for row in contest.load_prompts(args):
        plain_text(row["prompt"])


ITEMS = {row["id"]: row for row in good("items")}


def votes(path):
    list(unblinded(replay(read_log(path, ITEMS)), ITEMS))


def items(path):
    found = load_items(path, "--votes")
    list(unblinded([vote for vote in good("votes") if vote["item_id"] in found], found))


def log(path):
    (run,) = good("record")
    path.with_name("args.json").write_text(json.dumps(run))
    runs = {"m": curves.read_run(path.rename(path.with_name("metrics.jsonl")).parent)}
    curves.equal_kl(runs)
    curves.efficiency(runs)


def people(path, *columns):
    return twins.load_people(path, [*columns], 5)


def command(main, path, *flags):
    main([*flags, "--out", f"{path}-out", "--overwrite"])


def training_pairs(path):
    for chat in (False, True):
        args = dict(pairs=[path], eval_pairs=[], eval_fraction=0.5, chat=chat, max_length=64)
        boundless = SimpleNamespace(get_text_config=dict)  # a config that names no limit
        Pairs(SimpleNamespace(**args, batch_size=2), TOKENIZER, boundless)


def votes_by_group(path):
    fairness.study_votes(path, ["sex"], ("advance", "hold", "reject"))


READ = {
    "prompts": prompts,
    "pairs": lambda path: contest.judge_pairs(path, lambda prompts, answers, rows: [*map(float, map(len, answers))]),
    "preferences": training_pairs,
    "candidates": lambda path: rank.load_candidates(SimpleNamespace(candidates=path, role=None, text_column="profile")),
    "votes": votes,
    "items": items,
    "log": log,
    "record": lambda path: curves.read_run(path.rename(path.with_name("args.json")).parent),
    "answers": lambda path: command(fairness.main, path, "report", "--answers", str(path)),
    "decisions": lambda path: command(audit.main, path, str(path), *"--y-pred p --group g".split()),
    "names.csv": lambda path: people(path, "sex", "race_ethnicity"),
    "ages.csv": lambda path: people(path, "age_group"),
    "twins.jsonl": lambda path: twins.load_twins(path, 9, people(REPO / "data/names.csv", "sex")),
    "screen_train.jsonl": votes_by_group,
    "rank_train.jsonl": votes_by_group,
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_two_hundred_mutants(name, tmp_path):
    rows, rng, refused = good(name), random.Random(0), 0
    for i in range(200):
        path, data = tmp_path / f"{i}/file", mutant(rows, rng)
        path.parent.mkdir()
        path.write_bytes(data)
        try:
            READ[name](path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), str(error)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} of {data[:2000]}") from error
    assert refused > 20
