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
from tiny import write_rows

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


def mutant(rows, rng):
    rows, how = json.loads(json.dumps(rows)), rng.randrange(5)
    row = rng.choice(rows)
    key = rng.choice(list(row))
    if how < 3:
        value = row.pop(key)
        if how == 0:
            row[key] = rng.choice(VALUES)
        if how == 1:
            row[rng.choice([*row, "new"])] = value
    data = "\n".join(json.dumps(row) for row in rows).encode() + b"\n"
    at = rng.randrange(len(data))
    if how == 3:
        return data[:at]
    return data[:at] + rng.randbytes(3) + data[at + 1 :] if how == 4 else data


PIECES = [b",", b'"', b"\n", b"\x00", b"\xff", b";", b"nan", b"3", b""]


def slips(data, rng):
    """Bytes with one to three slips in them."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.choice(PIECES)
    return bytes(data)


def prompts(path):
    args = SimpleNamespace(prompts=path, split="all", n=0, seed=0, chat=False)
    for row in contest.load_prompts(args):
        plain_text(row["prompt"])


def pairs(path):
    contest.judge_pairs(path, lambda prompts, answers: [float(len(answer)) for answer in answers])


def candidates(path):
    rank.load_candidates(SimpleNamespace(candidates=path, role=None, text_column="profile"))


def votes(path):
    items = {item["id"]: item for item in ITEMS}
    list(evaluate.unblinded(replay(read_log(path, items)), items))


def items(path):
    found = load_items(path, "--votes")
    list(evaluate.unblinded([vote for vote in VOTES if vote["item_id"] in found], found))


def log(path):
    run = path.parent / "run"
    run.mkdir(exist_ok=True)
    write_json(run / "args.json", RUN)
    (run / "metrics.jsonl").write_bytes(path.read_bytes())
    runs = {"m": curves.read_run(run)}
    curves.equal_kl(runs)
    curves.efficiency(runs)


def record(path):
    (path.parent / "args.json").write_bytes(path.read_bytes())
    curves.read_run(path.parent)


def decisions(path):
    flags = ["--y-pred", "p", "--group", "g", "--out", str(path.parent / "out"), "--overwrite"]
    audit.main([str(path), *flags])


def names(path):
    twins.load_people(path, ["sex", "race_ethnicity"], 5)


def slots(path):
    twins.load_people(path, ["age_group"], 5)


def templates(path):
    twins.load_twins(path, 9, twins.load_people(REPO / "data/names.csv", ["sex"], 5))


def votes_by_group(path):
    fairness.study_votes(path, ["sex"], ("advance", "hold", "reject"))


def answers(path):
    fairness.main(["text", str(path), "--out", str(path.parent / "out"), "--overwrite"])


def rows_of(name):
    return list(read_jsonl(REPO / "data" / name))[:200:30]


DECISIONS = b"id,p,g\n" + b"".join(b"%d,%d,%c\n" % (i, i % 2, b"aabb"[i % 4]) for i in range(8))
NAMES, SLOTS = ((REPO / "data" / name).read_bytes() for name in ("names.csv", "ages.csv"))
ANSWERS = [{"response": "How old are you? advance", "group": "a"}, {"response": "hold"}]
READ = [(prompts, PROMPTS), (pairs, [PAIR] * 3), (candidates, PEOPLE), (votes, VOTES)]
READ += [(items, ITEMS), (log, LOG), (record, [RUN]), (answers, ANSWERS * 3)]
READ += [(decisions, DECISIONS), (names, NAMES), (slots, SLOTS)]
READ += [(templates, rows_of("twins.jsonl") * 3), (votes_by_group, rows_of("screen_train.jsonl"))]
READ += [(votes_by_group, rows_of("rank_train.jsonl"))]


@pytest.mark.parametrize("read, good", READ, ids=[read.__name__ for read, _ in READ])
def test_two_hundred_mutants(tmp_path, capsys, read, good):
    """`good`: the rows of a JSONL, or the bytes of a CSV."""
    rng, refused, path = random.Random(0), 0, tmp_path / "file"
    path.write_bytes(good) if isinstance(good, bytes) else write_rows(path, good)
    read(path)
    for _ in range(200):
        data = slips(good, rng) if isinstance(good, bytes) else mutant(good, rng)
        path.write_bytes(data)
        try:
            read(path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), str(error)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} of {data[:2000]}") from error
    assert refused > 20
