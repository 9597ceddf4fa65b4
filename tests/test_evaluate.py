"""evaluate.py: is a difference real, may the judge decide, and does the report say what was found?"""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import common
import evaluate
import tiny
from conftest import REPO
from evaluate import comparisons, judged, preference
from parts import contest, sampling
from parts.answers import generate
from parts.contest import check_judge, check_scorer, sentences, spoil
from parts.files import read_jsonl
from parts.reward_models import reward_function
from parts.stats import mean_share
from parts.votes import item_sha256
from tiny import error_of

# ---- one comparison ----


def answers_of(**scores):
    """A frame of answers, one per prompt and column: answers_of(a=[1, 0], b=[0, 0])."""
    rows = [
        {"model": name, "p": p, "gold": float(score), "length": 10 + (p + len(name)) % 7}
        for name, column in scores.items()
        for p, score in enumerate(column)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "won, lost, verdict",
    [
        pytest.param(65, 35, "better", id="65 of 100"),
        pytest.param(35, 65, "better", id="35 of 100: the other one"),
        pytest.param(55, 45, "no difference shown", id="55 of 100"),
        pytest.param(2050, 1950, "about equal", id="51.2 % of 4,000, [49.7, 52.8]"),
        pytest.param(19, 0, "not measured", id="19 prompts"),
        pytest.param(20, 0, "better", id="20 prompts"),
    ],
)
def test_the_verdict_goes_by_the_interval_of_the_rate(won, lost, verdict):
    """Rate, interval and p are one question; the winner stands first whoever was named first."""
    scores = {"x": [1] * won + [0] * lost, "y": [0] * won + [1] * lost}
    (row,) = comparisons(answers_of(**scores), "gold")
    (turned,) = comparisons(answers_of(**dict(reversed(scores.items()))), "gold")
    assert (row["a"], row["b"]) == (("x", "y") if won > lost else ("y", "x"))
    assert row["wins"] == turned["wins"] and row["verdict"] == turned["verdict"] == verdict
    wins = row["wins"]
    assert wins["value"] == pytest.approx(max(won, lost) / (won + lost))
    assert (wins["p"] < 0.05) == (wins["low"] > 0.5)


def test_prompts_are_compared_and_not_answers():
    """Won 10 of 16 comparisons on 110 prompts and 1 of 16 on 90: 37 % [33, 41] was "inconclusive",
    since a sign test counted prompts, 110 to 90 (p .18). 12 votes on each of 10 prompts are ten."""
    rates = np.array([10 / 16] * 110 + [1 / 16] * 90)
    wins = pd.Series(
        np.concatenate([[1.0] * round(16 * r) + [0.0] * (16 - round(16 * r)) for r in rates])
    )
    prompts = pd.Series(np.arange(200).repeat(16))
    (row,) = judged([preference("a", "b", wins, 0 * wins, prompts)])
    assert (row["a"], row["verdict"]) == ("b", "better")
    assert row["wins"]["value"] == pytest.approx(1 - rates.mean()) and row["p"] < 1e-6
    votes = pd.Series([1.0] * 84 + [0.0] * 36)
    few = preference("a", "b", votes, 0 * votes, pd.Series(np.arange(10).repeat(12)))
    assert few["wins"]["clusters"] == 10 and few["wins"]["low"] < 0.4


def test_several_comparisons_are_adjusted():
    """20 wins of 27: p is .02 for one comparison, and .06 among three."""
    won, lost = [1] * 20 + [-1] * 7, [0] * 27
    rows = comparisons(answers_of(base=lost, a=won, b=won), "gold")
    p = mean_share(np.array([1.0] * 20 + [0.0] * 7))["p"]
    assert p < 0.05 and [row["p_holm"] for row in rows] == pytest.approx([3 * p, 3 * p, 1.0])
    assert {row["verdict"] for row in rows} == {"no difference shown"}


def test_scores_that_are_all_the_same_say_nothing():
    """A recruiter's 0 for every answer of a model that does not know the form was "no difference"."""
    (row,) = comparisons(answers_of(a=[0] * 400, b=[0] * 400), "gold")
    assert row["verdict"] == "not measured" and row["wins"]["value"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "scores, first",
    [(dict(a=[0] * 40, b=[1] * 40), "b is better than a: preferred in 100.0 %"), (dict(a=[0] * 9, b=[1] * 9), "b and a: not measured"),
     (dict(a=[0, 1] * 20, b=[1, 0] * 20), "a and b: no difference shown"),
     (dict(a=[0] * 40, b=[1] * 40, c=[2] * 40), "c is the best of the 3: preferred in 100.0 % of comparisons; b is better than a")],
    ids=["better", "nine prompts", "half and half", "three"],
)  # fmt: skip
def test_the_first_sentence(scores, first):
    """Nine prompts say nothing, and were "no difference shown"."""
    assert evaluate.headline(comparisons(answers_of(**scores), "gold")).startswith(first)


def test_equal_length_is_measured_where_lengths_cross():
    """A is preferred for its length alone: at equal length neither is better. Longer everywhere: a
    ridge made 63 % of 75 %, and nothing is known."""
    rng, prompts = np.random.default_rng(0), pd.Series(range(4000))
    lengths = pd.Series(rng.normal(60, 60, 4000).round())
    chance = 1 / (1 + np.exp(-1.5 * np.tanh(lengths / lengths.std())))
    wins = (rng.random(4000) < chance).astype(float)
    row = preference("a", "b", wins, lengths, prompts)
    equal = row["equal_length"]
    assert row["wins"]["low"] > 0.6 and equal["low"] < 0.5 < equal["high"] < equal["low"] + 0.07
    for gaps in (lengths.abs() + 1, -lengths.abs() - 1, 0 * lengths):
        assert preference("a", "b", wins, gaps, prompts)["equal_length"] is None


# ---- the judge ----

LOOP, GOOD = [5, 6, 7, 8] * 8, list(range(32))


def judge(scores, finished=True, loops=False):
    """`check_judge` of a good answer to each of 30 prompts, scored around 0, and of a second one."""
    rng, n = np.random.default_rng(0), 30
    answers = [GOOD] * n + [LOOP if loops else GOOD[:9]] * n
    values = np.concatenate([rng.normal(0, 0.1, n), scores + rng.normal(0, 0.1, n)])
    return check_judge(values, [*range(n)] * 2, answers, [True] * n + [finished] * n)


@pytest.mark.parametrize(
    "kind, better, wrong",
    [("repetitive", 0.5, True), ("repetitive", -0.5, False), ("cut off", 0.5, True),
     ("cut off", -0.5, False), ("longest third", 0.5, False)],
)  # fmt: skip
def test_a_judge_that_prefers_what_nobody_wants_is_not_trusted(kind, better, wrong):
    """The reward model, right on 85 % of pairs, gave a loop .92 and the best answer .10."""
    rows = judge(better, finished=kind != "cut off", loops=kind == "repetitive")
    row = next(row for row in rows if row["kind"] == kind)
    assert row["wrong"] is wrong
    if kind != "longest third":
        assert row["gap"] == pytest.approx(better, abs=0.1) and row["prompts"] == 30
    assert any("cannot be trusted" in said for said in sentences(rows)) is wrong
    few = check_judge([0, 9] * 9, np.arange(9).repeat(2), [GOOD, LOOP] * 9, [True] * 18)
    assert [row["wrong"] for row in few] == [None] * 3 and sentences(few) == []


class StubScorer:
    """A score of the ids alone; what is read is (ids, attention_mask, answer_mask)."""

    model = SimpleNamespace(device="cpu")

    def __init__(self, function):
        self.function = function

    def __call__(self, ids, attention_mask, answer_mask):
        return torch.tensor(
            [float(self.function(row[m].tolist())) for row, m in zip(ids, answer_mask)]
        )


def test_a_reward_model_is_shown_spoiled_copies():
    """What reward_train.py and `reward` ask, where no model has answered yet."""
    answers = [[i, *range(10, 40), 2] for i in range(12)] + [[1, 2]]  # the last one is too short
    prompts = [[1, 2, 3]] * 13
    cut, loop = spoil(answers[0])
    assert len(loop) == len(answers[0]) and cut[-1] == loop[-1] == 2 and len(cut) == 16
    for function, wrong in (
        (lambda ids: len(set(ids)), [False, False]),
        (lambda ids: -len(set(ids)) if len(ids) > 20 else -99, [False, True]),
        (lambda ids: -len(ids), [True, False]),
    ):
        rows = check_scorer(StubScorer(function), prompts, answers, pad=0)
        assert [row["wrong"] for row in rows] == wrong and rows[0]["prompts"] == 12


def test_training_imports_no_statistics():
    code = "import sys, dpo, ppo, reward_train; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert not {"statsmodels", "scipy", "pandas", "matplotlib"} & set(run.stdout.split()), (
        run.stderr
    )


# ---- compare, end to end ----

GOLD = """
def score(prompts, answers, rows=None):
    return [len(set(a)) / (1 + len(a)) for a in answers]
def none_of_some(prompts, answers, rows=None):
    return [None if len(a) % 3 == 0 else float(len(a)) for a in answers]
def loops(prompts, answers, rows=None):
    return [float(a.startswith("loop")) + len(a) / 100 for a in answers]
def broken(prompts, answers, rows=None):
    return {"a": 1}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    rows = tiny.pair_rows(24)
    prompts = [
        {"id": f"p{i} <img src=x>", "prompt": row["prompt"], "task": ["assess", "summary"][i % 2],
         "split": ["test", "test", "val"][i % 3]}
        for i, row in enumerate(rows)
    ]  # fmt: skip
    (folder / "gold.py").write_text(GOLD)
    base, other = (tiny.tiny_model("llama", folder, seed=seed) for seed in (0, 1))
    chatml = tiny.tiny_tokenizer(template=tiny.CHATML)
    return SimpleNamespace(
        base=base, other=other, folder=folder, rm=tiny.tiny_reward_model("llama", folder / "rm"),
        foreign=tiny.tiny_model("llama", folder, tokenizer=chatml),
        gold=f"{folder / 'gold.py'}:score", pairs=tiny.write_pairs(folder / "pairs.jsonl", 24),
        prompts=tiny.write_rows(folder / "prompts.jsonl", [*prompts, prompts[0] | {"id": "again"}]),
    )  # fmt: skip


def run(world, out, *flags, models=None):
    argv = ["--model", *(models or (world.base, world.other)), "--prompts", world.prompts]
    argv += ["--max-new-tokens", "12", "--samples", "2", "--device", "cpu", "--out", str(out)]
    evaluate.main(["compare", *argv, *map(str, flags)])
    return tiny.read_json(out / "report.json"), list(read_jsonl(out / "samples.jsonl"))


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "out"
    flags = f"--gold {world.gold} --reward-model {world.rm} --pairs {world.pairs} --bon 3"
    flags += " --temperature 0.5 --name Base Tuned"
    report, samples = run(world, out, *flags.split())
    return SimpleNamespace(out=out, report=report, samples=samples)


def test_numbers_are_those_of_the_samples(world, written):
    """Averaged here a second way; answers drawn and scored again; the best of three is one answer
    per prompt, the one with the highest reward, and its KL is not known."""
    report, frame = written.report, pd.DataFrame(written.samples)
    sizes = frame.groupby("model").size().to_dict()
    assert sizes == {"Base": 32, "Tuned": 32, "best of 3 of Base": 16}
    gold = [len(set(text)) / (1 + len(text)) for text in frame.response]
    assert frame.gold.tolist() == pytest.approx(gold, abs=1e-6)
    for row in report["models"]:
        own = frame[frame.model == row["model"]]
        assert row["gold"]["value"] == pytest.approx(own.gold.mean(), abs=1e-6)
        assert row["length"]["value"] == pytest.approx(own.response_ids.map(len).mean())
        assert ("kl" in row) == (row["model"] in ("Base", "Tuned")) and row["missing"] == 0
    assert [row["gold"]["value"] for row in report["models"]] == sorted(
        (row["gold"]["value"] for row in report["models"]), reverse=True
    )
    of = {name: own.groupby("id").gold.apply(list) for name, own in frame.groupby("model")}
    for row in report["comparisons"]:
        pairs = [
            (x, y) for id in of[row["a"]].index for x in of[row["a"]][id] for y in of[row["b"]][id]
        ]
        rate = np.mean([(x > y) + 0.5 * (x == y) for x, y in pairs])
        assert row["wins"]["value"] == pytest.approx(rate, abs=1e-6) and rate >= 0.5
    tuned = frame[frame.model == "Tuned"]
    policy = common.Policy(common.load_model(world.other, "cpu", torch.float32), torch.float32)
    tokenizer = common.load_tokenizer(world.other)
    prompts = [common.encode_prompt(tokenizer, prompt) for prompt in tuned.prompt[::2]]
    again = sampling.sample(policy, tokenizer, prompts, 2, 12, 0.5, seed=0)
    assert tuned.response_ids.tolist() == again.answer_ids
    score = reward_function(world.rm, "cpu", torch.float32)
    rewards = score(list(tuned.prompt), list(tuned.response))
    assert tuned.reward.tolist() == pytest.approx(rewards, abs=1e-4)
    assert report["accuracy"]["n"] == 24 and "held-out pairs" in " ".join(report["answer"])


def test_kl_is_that_of_the_sampled_answers(world, written):
    """Nats per answer, end token included, from plain logits over the temperature."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(m).eval() for m in (world.other, world.base)]
    tokenizer, found = common.load_tokenizer(world.base), []
    rows = [row for row in written.samples if row["model"] == "Tuned"]
    for row in rows[:8]:
        prompt, n = common.encode_prompt(tokenizer, row["prompt"]), len(row["response_ids"])
        ids = torch.tensor([prompt + row["response_ids"]])
        with torch.no_grad():
            logps = [(m(ids).logits[0, -n - 1 : -1] / 0.5).log_softmax(-1) for m in models]
        found.append((logps[0] - logps[1]).gather(-1, ids[0, -n:, None]).sum().item())
    assert [row["kl"] for row in rows[:8]] == pytest.approx(found, rel=1e-4)
    assert next(r for r in written.report["models"] if r["model"] == "Base")["kl"]["value"] == 0


def test_the_page_says_what_the_json_says(written):
    page = (written.out / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 and "<img" not in page
    assert "NaN" not in (written.out / "report.json").read_text(encoding="utf-8")
    for table in written.report["tables"]:
        assert table.replace("’", "'") in page.replace("&#39;", "'")


def test_greedy_answers_are_those_that_a_trainer_shows(world, tmp_path):
    """--temperature 0 was refused. One answer per prompt, and no KL: greedy answers are no draws."""
    report, samples = run(world, tmp_path / "out", "--gold", world.gold, "--temperature", "0")
    policy = common.Policy(common.load_model(world.other, "cpu", torch.float32), torch.float32)
    tokenizer = common.load_tokenizer(world.other)
    rows = [row for row in samples if row["model"] != samples[0]["model"]]
    ids = [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]
    assert len(rows) == 16
    assert [row["response_ids"] for row in rows] == [
        a for a in generate(policy, tokenizer, ids, 12, 0)
    ]
    assert not any("kl" in row for row in report["models"])


def test_only_common_prompts_are_compared_and_what_is_missing_is_counted(world, tmp_path):
    """A score that cannot read a model's worst answers made that model look better."""
    gold = world.gold.replace(":score", ":none_of_some")
    report, samples = run(world, tmp_path / "out", "--gold", gold, "--samples", "1")
    known = {name: {} for name in {row["model"] for row in samples}}
    for row in samples:
        if row["gold"] is not None:
            known[row["model"]][row["id"]] = row["gold"]
    both = set.intersection(*(set(scores) for scores in known.values()))
    assert 0 < len(both) < 16
    for row in report["models"]:
        assert row["missing"] == 16 - len(known[row["model"]])
        mean = np.mean([known[row["model"]][id] for id in both])
        assert row["gold"]["value"] == pytest.approx(mean)
    assert report["comparisons"][0]["wins"]["n"] == len(both)


def test_no_verdict_by_a_judge_that_prefers_loops(world, tmp_path, monkeypatch):
    """Each model answers each prompt once well and once in a loop; the second model loops better."""

    def answer_all(args, names, rows, ids):
        texts = {"good": GOOD, "loop": LOOP}
        return pd.DataFrame(
            {"model": name, "p": p, "id": p, "task": "t", "prompt": rows[p]["prompt"],
             "response": f"{text} {name}"[: 4 + 3 * n], "response_ids": ids, "length": 32, "finished": True}
            for n, name in enumerate(names.values())
            for p in range(len(rows))
            for text, ids in texts.items()
        )  # fmt: skip

    monkeypatch.setattr(contest, "answer_all", answer_all)
    gold = world.gold.replace(":score", ":loops")
    report, _ = run(world, tmp_path / "out", "--gold", gold)
    assert {row["kind"]: row["wrong"] for row in report["judge"]}["repetitive"] is True
    assert "cannot be trusted" in report["answer"][0]
    assert {row["verdict"] for row in report["comparisons"]} == {evaluate.NEVER}
    assert "python annotate.py draw" in report["answer"][-1]


@pytest.mark.parametrize(
    "flags, fact",
    [
        ("--split train", "--split train"),
        ("--prompts none.jsonl", "--prompts none.jsonl"),
        ("--gold gold.py:typo", "--gold gold.py:typo"),
        ("--gold gold.py:broken", "--gold gold.py:broken: returned {'a': 1}"),
        ("--gold none", "nothing to score with"),
        ("--reward-model BASE", "--reward-model"),
        ("--gold RM --reward-model RM", "expected FILE:FUNCTION"),
        ("--model BASE RM --name a b", "a reward model"),
        ("--model BASE", "two or more"),
        ("--model BASE BASE", "--name"),
        ("--name one", "--name: expected 2"),
        ("--model BASE nowhere", "--model nowhere"),
        ("--model BASE FOREIGN", "annotate.py draw --model"),
        ("--bon 2", "--bon"),
        ("--max-new-tokens 300", "--max-new-tokens 300"),
        ("--temperature -1", "--temperature"),
        ("--out WRITTEN", "--overwrite"),
        ("--out BASE", "--out"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_drawn(
    world, written, tmp_path, monkeypatch, capsys, flags, fact
):
    monkeypatch.chdir(world.folder)
    names = {
        "BASE": world.base,
        "RM": world.rm,
        "FOREIGN": world.foreign,
        "WRITTEN": str(written.out),
    }
    words = [names.get(word, word) for word in flags.split()]
    gold = (
        [] if "--gold" in words else ["--gold", "none" if "--reward-model" in words else world.gold]
    )
    line = error_of(run, world, tmp_path / "out", *gold, *words)
    assert fact in line, line
    assert "answers\n" not in capsys.readouterr().out and not (tmp_path / "out").exists()


# ---- reward ----


def test_a_reward_model_beside_the_longer_answer(world, tmp_path):
    """Ties and equal answers are left out; the pairs file holds the scores that give the accuracy."""
    rows = [
        row | {"task": "assess", "strength": 1 + i % 2} for i, row in enumerate(tiny.pair_rows(24))
    ]
    rows += [rows[0] | {"tie": True}, rows[1] | {"rejected": rows[1]["chosen"]}]
    pairs, out = tiny.write_rows(tmp_path / "p.jsonl", rows), tmp_path / "out"
    evaluate.main(f"reward --reward-model {world.rm} --pairs {pairs} --out {out}".split())
    report, kept = tiny.read_json(out / "report.json"), list(read_jsonl(out / "pairs.jsonl"))
    right = [row["reward_chosen"] > row["reward_rejected"] for row in kept]
    longer = [len(row["chosen"][0]["content"]) > len(row["rejected"][0]["content"]) for row in kept]
    assert len(kept) == 24 and report["accuracy"]["value"] == pytest.approx(np.mean(right))
    assert report["length_baseline"]["value"] == pytest.approx(np.mean(longer))
    gain = report["against_length"]["value"]
    assert gain == pytest.approx(np.mean(right) - np.mean(longer))
    table = report["tables"]["Right on held-out pairs"]
    assert {row["pairs"]: row["n"] for row in table} == {"all": 24, "task assess": 24, "strength 1": 12, "strength 2": 12}  # fmt: skip
    assert [row["kind"] for row in report["judge"]] == ["cut off", "repetitive"]
    assert (out / "report.html").stat().st_mode & 0o777 == 0o600


def test_pairs_of_the_training_are_no_test(world, tmp_path):
    rm = shutil.copytree(world.rm, tmp_path / "rm")
    (rm / "args.json").write_text(json.dumps({"stage": "x", "args": {"pairs": [world.pairs]}}))
    out = tmp_path / "out"
    evaluate.main(f"reward --reward-model {rm} --pairs {world.pairs} --out {out}".split())
    assert "trained on this very file" in " ".join(tiny.read_json(out / "report.json")["limits"])


# ---- human ----


def item(n, a_model="new", b_model="old", a="A" * 70, b="B", **more):
    ends = {"a": f"{n} {a}", "b": f"{n} {b}", "a_model": a_model, "b_model": b_model}
    return {"id": str(n), "prompt": f"Summarise {n}.", "gold": None} | ends | more


def vote(item, choice, annotator="ann", **more):
    texts = "event_id session comment ts_client ts_server guidelines_sha256 key_sha256 app".split()
    strength = {"a": 2, "b": 2}.get(choice, 0)
    nothing = dict.fromkeys(("undoes", "gold_pass", "ms_active", "ms_wall", "repeat_of", "judge"))
    return nothing | dict.fromkeys(texts, "x") | {
        "event": "vote", "event_id": f"{item['id']}-{annotator}", "item_id": item["id"],
        "item_sha256": item_sha256(item), "annotator": annotator, "choice": choice,
        "strength": strength, "reasons": [], "shown": {"left": "a", "right": "b"}, "schema": 1,
    } | more  # fmt: skip


def people_say(tmp_path, items, votes):
    folder = tmp_path / "ab"
    folder.mkdir(exist_ok=True)
    tiny.write_rows(folder / "items.jsonl", items)
    tiny.write_rows(folder / "annotations.jsonl", votes)
    argv = f"human --votes {folder}/annotations.jsonl --out {tmp_path}/out --overwrite"
    evaluate.main(argv.split())
    return tiny.read_json(tmp_path / "out/report.json")


def test_a_model_that_is_longer_everywhere_has_no_rate_at_equal_length(tmp_path, capsys):
    """45 of 60 for the longer one was "63.4 % at equal length", and would be if it were shorter."""
    items = [item(n, a="A" * (60 + n % 20)) for n in range(60)]
    votes = [vote(x, "a" if n < 45 else "b", f"p{n % 6}") for n, x in enumerate(items)]
    report = people_say(tmp_path, items, votes)
    row = report["comparison"]
    assert (row["a"], row["verdict"]) == ("new", "better")
    assert row["wins"]["value"] == pytest.approx(0.75)
    assert row["equal_length"] is None and "At equal length: not measured" in report["answer"][1]
    others = report["other_people"]
    assert others["value"] == pytest.approx(0.75) and others["low"] < row["wins"]["low"]
    assert len(report["annotators"]) == 6 and report["answer"][0] in capsys.readouterr().out
    assert (tmp_path / "out/report.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("swapped", [False, True], ids=["a is new", "a is old"])
def test_votes_go_to_the_model_behind_the_answer(tmp_path, swapped):
    """Old wins 20 of 30 whichever side it stands on; ties and both bad are halves: (20 + 5)/30."""
    models = ("old", "new") if swapped else ("new", "old")
    items = [item(n, *models) for n in range(30)]
    old = "a" if swapped else "b"
    choices = [old] * 20 + ["tie"] * 5 + ["both_bad"] * 5
    row = people_say(tmp_path, items, [vote(*pair) for pair in zip(items, choices)])["comparison"]
    assert (row["a"], row["b"]) == ("old", "new")
    assert row["wins"]["value"] == pytest.approx(25 / 30) and row["wins"]["n"] == 30


def test_a_prompt_counts_once_and_tests_of_annotators_not_at_all(tmp_path):
    """Gold items measure something else than the two models; of three items on one prompt and twelve votes on another each prompt is one."""
    items = [item(n) for n in range(24)] + [item(n, prompt="Summarise 0.") for n in (30, 31)]
    items += [item(40, gold="b"), item(41, "new", "new"), item(42, None, None)]
    votes = [vote(x, "a" if n < 12 else "b") for n, x in enumerate(items[:24])]
    votes += [vote(items[1], "a", f"p{n}") for n in range(11)]
    plain = people_say(tmp_path, items, [*votes, *(vote(x, "a") for x in items[24:26])])
    more = [vote(x, "b") for x in items[26:]]
    report = people_say(tmp_path, items, [*votes, *(vote(x, "a") for x in items[24:26]), *more])
    assert report["comparison"]["wins"] == plain["comparison"]["wins"]
    wins = plain["comparison"]["wins"]
    assert wins["n"] == 24 and wins["value"] == pytest.approx(0.5)
    assert len(report["annotators"]) == 12
    assert any("answer" in said and "more prompts" in said for said in report["answer"])


@pytest.mark.parametrize(
    "items, choice, more, fact",
    [
        ([item(0)], "a", {"item_sha256": "0"}, "same texts"),
        ([item(0, "new", "new")], "a", {}, "found none"),
        ([item(0, gold="a")], "a", {"gold_pass": True}, "found none"),
        ([item(0), item(1, "new", "third")], "a", {}, "found new, old, third"),
    ],
    ids=["foreign text", "one model", "gold alone", "three models"],
)
def test_votes_on_no_two_models_are_refused(tmp_path, items, choice, more, fact):
    votes = [vote(x, choice, **more) for x in items]
    assert fact in error_of(people_say, tmp_path, items, votes)
    assert not (tmp_path / "out").exists()
