"""A broken file is read, or refused in one line that names it."""

import json
import random
from types import SimpleNamespace

import pytest

import audit
import evaluate
import fairness
import rank
from conftest import REPO
from parts import contest, curves, twins
from parts.files import UserError, read_jsonl, write_json
from parts.messages import plain_text
from parts.votes import item_sha256, load_items, read_log, replay

VALUES = [None, True, 0, -1, 1e400, "", " ", "x", "\ud800", [], [None], {}, {"role": "user"}, "é" * 5000]  # fmt: skip
PROMPT = {"prompt": "Assess.", "split": "test", "task": "assess", "expected_decision": "hold"}
PROMPTS = [
    PROMPT,
    PROMPT | {"task": "interview", "must_have": ["sql"], "shown": ["sql"]},
    PROMPT | {"task": "summary", "shown": ["sql"], "claimed": [], "id": "p"},
    {"prompt": [{"role": "user", "content": "Hi."}], "split": "test", "task": "assess"},
]
PAIR = {"prompt": "p", "chosen": "a b", "rejected": "c", "task": "t", "strength": 2, "tie": False}
ANN = {"name": "Ann Li", "profile": "Ann Li, 2 years.", "role": "chef", "note": None}
PEOPLE = [{"id": i} | ANN for i in range(4)]
ITEM = {"id": "i", "task": "t", "prompt": "p", "a": "x y", "b": "z", "a_model": "m", "b_model": "n"}
ITEMS = [ITEM | {"id": f"i{k}", "gold": None if k else "a"} for k in range(3)]
VOTE = json.loads("""{"schema": 1, "event": "vote", "annotator": "ann", "session": "s",
"shown": {"left": "a", "right": "b"}, "choice": "a", "strength": 2, "reasons": [], "comment": "",
"gold_pass": null, "repeat_of": null, "undoes": null, "ms_active": 5, "ms_wall": 5,
"ts_client": "t", "ts_server": "t", "guidelines_sha256": "0", "app": "1"}""")
VOTE["item_sha256"] = item_sha256(ITEM)
VOTES = [VOTE | {"event_id": f"e{k}", "item_id": f"i{k}"} for k in (1, 2)]
RUN = {
    "stage": "ppo",
    "args": {"model": "m", "prompts": "p", "batch_size": 4, "pairs": ["x"]},
    "sha256": {"p": "0"},
}
LOG = [{"step": i, "val/gold": 0.5, "val/score": 0.1, "val/kl": 0.2 * i} for i in range(6)]
LOG += [{"step": 1, "loss": 0.1, "episodes": 8, "length/mean": 3.5, "time_s": 1.0}]


PIECES = [b",", b'"', b"\n", b"\x00", b"\xff", b";", b"nan", b"3", b""]


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


def votes(path):
    items = {item["id"]: item for item in ITEMS}
    list(evaluate.unblinded(replay(read_log(path, items)), items))


def items(path):
    found = load_items(path, "--votes")
    list(evaluate.unblinded([vote for vote in VOTES if vote["item_id"] in found], found))


def log(path):
    write_json(path.parent / "args.json", RUN)
    path.rename(path.parent / "metrics.jsonl")
    runs = {"m": curves.read_run(path.parent)}
    curves.equal_kl(runs)
    curves.efficiency(runs)


def record(path):
    path.rename(path.parent / "args.json")
    curves.read_run(path.parent)


def rows_of(name):
    return list(read_jsonl(REPO / "data" / name))[:200:30]


def people(path, *columns):
    return twins.load_people(path, [*columns], 5)


def command(main, *flags):
    flags = [*flags, "--out", "FILE-out", "--overwrite"]
    return lambda path: main([flag.replace("FILE", str(path)) for flag in flags])


def judged(path):
    contest.judge_pairs(path, lambda prompts, answers: [float(len(answer)) for answer in answers])


def votes_by_group(path):
    fairness.study_votes(path, ["sex"], ("advance", "hold", "reject"))


DECISIONS = b"id,p,g\n" + b"".join(b"%d,%d,%c\n" % (i, i % 2, b"aabb"[i % 4]) for i in range(8))
ANSWERS = [{"response": "How old are you? advance", "group": "a"}, {"response": "hold"}]
RANKED = {"role": None, "text_column": "profile"}
READ = {  # a reader, and the rows of its JSONL or the bytes of its CSV
    "prompts": (prompts, PROMPTS),
    "pairs": (judged, [PAIR] * 3),
    "candidates": (lambda path: rank.load_candidates(SimpleNamespace(candidates=path, **RANKED)), PEOPLE),
    "votes": (votes, VOTES),
    "items": (items, ITEMS),
    "log": (log, LOG),
    "record": (record, [RUN]),
    "answers": (command(fairness.main, "report", "--answers", "FILE"), ANSWERS * 3),
    "decisions": (command(audit.main, "FILE", "--y-pred", "p", "--group", "g"), DECISIONS),
    "names": (lambda path: people(path, "sex", "race_ethnicity"), (REPO / "data/names.csv").read_bytes()),
    "ages": (lambda path: people(path, "age_group"), (REPO / "data/ages.csv").read_bytes()),
    "templates": (lambda path: twins.load_twins(path, 9, people(REPO / "data/names.csv", "sex")), rows_of("twins.jsonl") * 3),
    "screened": (votes_by_group, rows_of("screen_train.jsonl")),
    "ranked": (votes_by_group, rows_of("rank_train.jsonl")),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_two_hundred_mutants(name, tmp_path, capsys):
    (read, good), rng, refused = READ[name], random.Random(0), 0
    for i in range(200):
        path, data = tmp_path / f"{i}", mutant(good, rng)
        path.mkdir()
        (path / "file").write_bytes(data)
        try:
            read(path / "file")
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), str(error)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} of {data[:2000]}") from error
    assert refused > 20
