"""A broken file is read, or refused in one line that names it (bytes of CSV and JSONL: test_fairness_text.py)."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

import evaluate
import rank
from parts import evaluation_page, frontier
from parts.files import UserError
from parts.reports import read_run
from parts.rows import plain_text
from parts.votes import counted, item_sha256, load_items, read_log
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
VOTE = {
    "schema": 1, "event": "vote", "event_id": "e0", "item_id": "i1", "item_sha256": item_sha256(ITEM),
    "annotator": "ann", "session": "s", "shown": {"left": "a", "right": "b"}, "choice": "a", "strength": 2,
    "reasons": [], "comment": "", "gold_pass": None, "repeat_of": None, "undoes": None, "ms_active": 5,
    "ms_wall": 5, "ts_client": "t", "ts_server": "t", "guidelines_sha256": "0", "app": "1",
}  # fmt: skip
VOTES = [VOTE | {"event_id": f"e{k}", "item_id": f"i{k}"} for k in (1, 2)]
RUN = {
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


def prompts(path):
    args = SimpleNamespace(prompts=path, split="all", n=0, seed=0)
    rows = evaluate.load_prompts(args)
    for row in rows:
        plain_text(row["prompt"])
    answer = {"response": "hold", "response_ids": [1, 2], "gold": 0.5, "length": 2}
    models = {"m": evaluate.np.array([[dict(answer)] for _ in rows], object)}
    evaluate.by_task(models, rows, "gold")
    evaluate.side_by_side(models, rows, "gold", 0)


def pairs(path):
    rows, _ = evaluate.load_pairs(path)
    scores = evaluate.np.array([[1.0, 0.5]] * len(rows))
    report = evaluate.reward_quality(rows, scores, 3 * scores) | {"counts": {"ties": 0, "equal": 0}}  # fmt: skip
    evaluation_page.reward_sections(report | {"setup": {"sha256": {}, "run": ""}})


def candidates(path):
    found = {"candidates": path, "role": None, "text_column": "profile", "blind": "name"}
    rank.load_candidates(SimpleNamespace(**found))


def votes(path):
    items = {item["id"]: item for item in ITEMS}
    _, found = evaluate.unblind(read_log(path, items), items)
    if counted(found):
        evaluate.human_report(found, items, 0)


def items(path):
    found = load_items(path, "--votes")
    evaluate.unblind([vote for vote in VOTES if vote["item_id"] in found], found)


def log(path):
    run = path.parent / "run"
    run.mkdir(exist_ok=True)
    (run / "args.json").write_text(json.dumps(RUN))
    (run / "metrics.jsonl").write_bytes(path.read_bytes())
    for _, points, same in frontier.load_runs([str(run)]).values():
        if points:
            curve = {"model": str(run)} | frontier.frontier(points, same)
            frontier.efficiency([curve])
            frontier.curve_of(points, "gold")


def record(path):
    (path.parent / "args.json").write_bytes(path.read_bytes())
    read_run(path.parent)
    frontier.load_runs([str(path.parent)])


READ = [(prompts, PROMPTS), (pairs, [PAIR] * 3), (candidates, PEOPLE), (votes, VOTES)]
READ += [(items, ITEMS), (log, LOG), (record, [RUN])]


@pytest.mark.parametrize("read, rows", READ, ids=[read.__name__ for read, _ in READ])
def test_two_hundred_mutants(tmp_path, capsys, read, rows):
    rng, refused = random.Random(0), 0
    path = Path(write_rows(tmp_path / "file.jsonl", rows))
    read(path)
    for _ in range(200):
        path.write_bytes(data := mutant(rows, rng))
        try:
            read(path)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), str(error)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} of {data[:2000]}") from error
    assert refused > 20
