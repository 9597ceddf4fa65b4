"""evaluate.py: is a difference real, may the judge decide, and does the report say what was found?

evaluate_cases.jsonl   tables of cases
"""

import shlex
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import common
import evaluate
import tiny
from case_rows import each, rows_of
from evaluate import compare_answers, judged, preference
from parts import contest, sampling
from parts.answers import generate
from parts.contest import check_judge, check_scorer, sentences, spoil
from parts.files import read_jsonl
from parts.reward_models import RewardFunction
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


@each("evaluate_cases", of="verdicts")
def test_the_verdict_goes_by_the_interval_of_the_rate(won, lost, verdict):
    """Rate, interval and p are one question; the winner stands first whoever was named first."""
    scores = {"x": [1] * won + [0] * lost, "y": [0] * won + [1] * lost}
    (row,) = compare_answers(answers_of(**scores), "gold")
    (turned,) = compare_answers(answers_of(**dict(reversed(scores.items()))), "gold")
    assert (row["a"], row["b"]) == (("x", "y") if won > lost else ("y", "x"))
    wins = row["wins"]
    assert wins == turned["wins"] and row["verdict"] == turned["verdict"] == verdict
    assert wins["value"] == pytest.approx(max(won, lost) / (won + lost))
    assert (wins["p"] < 0.05) == (wins["low"] > 0.5)


def test_prompts_are_compared_and_not_answers():
    """Won 10 of 16 comparisons on 110 prompts and 1 of 16 on 90: 37 % [33, 41] was "inconclusive",
    since a sign test counted prompts, 110 to 90 (p .18)."""
    rates = np.array([10 / 16] * 110 + [1 / 16] * 90)
    wins = pd.Series((np.arange(16) < 16 * rates[:, None]).ravel() * 1.0)
    (row,) = judged([preference("a", "b", wins, 0 * wins, pd.Series(np.arange(200).repeat(16)))])
    assert (row["a"], row["verdict"]) == ("b", "better")
    assert row["wins"]["value"] == pytest.approx(1 - rates.mean()) and row["p"] < 1e-6


def test_several_comparisons_are_adjusted():
    """20 wins of 27: p is .02 for one comparison, and .06 among three; 27 ties are about equal."""
    won, lost = [1] * 20 + [-1] * 7, [0] * 27
    rows = compare_answers(answers_of(base=lost, a=won, b=won), "gold")
    p = mean_share(np.array([1.0] * 20 + [0.0] * 7))["p"]
    assert p < 0.05 and [row["p_holm"] for row in rows] == pytest.approx([3 * p, 3 * p, 1.0])
    assert [row["verdict"] for row in rows] == ["no difference shown"] * 2 + ["about equal"]


@each("evaluate_cases", of="first")
def test_the_first_sentence(first, scores):
    """Nine prompts say nothing, nor does a recruiter's 0 for every answer of models that do not know
    the form; both were "no difference shown"."""
    assert evaluate.headline(compare_answers(answers_of(**scores), "gold")).startswith(first)


@each("evaluate_cases", of="advice")
def test_what_to_do_where_no_difference_is_shown(line, scores, said):
    """Holm's correction for three comparisons takes a third more prompts than 766; people were to
    compare the last two models whatever was open."""
    args = evaluate.parse_args(shlex.split(line))
    rows = compare_answers(answers_of(**scores), "gold")
    advice = evaluate.advice(args, dict(zip(args.model, scores)), rows, len(rows))
    for fact, sentence in zip(said, advice, strict=True):
        assert fact in sentence


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
    noise, n = np.random.default_rng(0).normal(0, 0.1, 60), 30
    answers = [GOOD] * n + [LOOP if loops else GOOD[:9]] * n
    values = noise + np.repeat([0, scores], n)
    return check_judge(values, [[*range(n)] * 2], answers, [True] * n + [finished] * n)


@each("evaluate_cases", of="judge")
def test_a_judge_that_prefers_what_nobody_wants_is_not_trusted(kind, better, wrong):
    """The reward model, right on 85 % of pairs, gave a loop .92 and the best answer .10."""
    rows = judge(better, finished=kind != "cut off", loops=kind == "repetitive")
    (row,) = (row for row in rows if row["kind"] == kind)
    assert row["wrong"] is wrong
    assert any("cannot be trusted" in said for said in sentences(rows)) is wrong
    if kind != "longest third":
        gap = row["mean"] - row["mean_other"]
        assert gap == pytest.approx(better, abs=0.1) and row["prompts"] == 30
    assert rows[2]["prompts"] == (0 if kind == "repetitive" else 30)  # all are as long there
    few = check_judge([0, 9] * 9, [np.arange(9).repeat(2)], [GOOD, LOOP] * 9, [True] * 18)
    assert [row["wrong"] for row in few] == [None] * 3
    for unchecked, said in zip(("cut off", "repetitive"), sentences(few), strict=True):
        assert unchecked in said and "not checked" in said  # which read like passed


class StubScorer:
    """A score of the answer's ids alone."""

    model = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, function):
        self.function = function

    def __call__(self, ids, attention_mask, answer_mask):
        scores = [self.function(row[m].tolist()) for row, m in zip(ids, answer_mask)]
        return torch.tensor(scores, dtype=torch.float32)


@pytest.mark.parametrize("score, wrong", [
    (lambda ids: len(set(ids)), [False, False]),
    (lambda ids: -len(set(ids)) if len(ids) > 20 else -99, [False, True]),
    (lambda ids: -len(ids), [True, False]),
])  # fmt: skip
def test_a_reward_model_is_shown_spoiled_copies(score, wrong):
    """What reward_train.py asks, where no model has answered yet."""
    answers = [[i, *range(10, 40), 2] for i in range(12)] + [[1, 2]]  # the last one is too short
    cut, loop = spoil(answers[0])
    assert len(loop) == len(answers[0]) and cut[-1] == loop[-1] == 2 and len(cut) == 16
    rows = check_scorer(StubScorer(score), [[1, 2, 3]] * 13, answers)
    assert [row["wrong"] for row in rows[:2]] == wrong and rows[0]["prompts"] == 12


# ---- compare, end to end ----

GOLD = """
def score(prompts, answers, rows=None):
    return [len(set(a)) / (1 + len(a)) for a in answers]
def none_of_some(prompts, answers, rows=None):
    return [None if len(a) % 3 == 0 else float(len(a)) for a in answers]
def loops(prompts, answers, rows=None):
    return [float(a.startswith("loop")) + len(a) / 100 for a in answers]
def mute(prompts, answers, rows=None):
    return [None] * len(answers)
def broken(prompts, answers, rows=None):
    return {"a": 1}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    prompts = [
        {"id": f"p{i} <img src=x>", "prompt": row["prompt"], "task": ["assess", "summary"][i % 2],
         "split": ["test", "test", "val"][i % 3]}
        for i, row in enumerate(tiny.pair_rows(24))
    ]  # fmt: skip
    (folder / "gold.py").write_text(GOLD)
    base, other = (tiny.tiny_model("llama", folder, seed=seed) for seed in (0, 1))
    log = {"model": f"{base}/.", "gold": f"{folder}/./gold.py:score"}
    tiny.write_rows(f"{other}/args.json", [{"stage": "x", "args": log}])
    tiny.write_rows(f"{other}/metrics.jsonl", rows_of("evaluate_cases", of="log"))
    rm = tiny.tiny_reward_model("llama", folder / "rm")
    known = {"pairs": [f"{folder}/./pairs.jsonl", f"{folder}/./p.jsonl"]}
    tiny.write_rows(f"{rm}/args.json", [{"stage": "x", "args": known}])
    chatml = tiny.tiny_tokenizer(template=tiny.CHATML)
    return SimpleNamespace(
        base=base, other=other, folder=folder, rm=rm,
        foreign=tiny.tiny_model("llama", folder, tokenizer=chatml),
        gold=f"{folder / 'gold.py'}:", pairs=tiny.write_pairs(folder / "pairs.jsonl", 24),
        prompts=tiny.write_rows(folder / "prompts.jsonl", [*prompts, prompts[0] | {"id": "again"}]),
    )  # fmt: skip


def run(world, out, *flags):
    argv = f"--model {world.base} {world.other} --prompts {world.prompts} --device cpu --out {out}"
    evaluate.main(["compare", *argv.split(), *"--max-new-tokens 12 --samples 2".split(), *flags])
    return tiny.read_json(out / "report.json"), [*read_jsonl(out / "samples.jsonl")]


def loaded(world):
    """The second model and its tokenizer."""
    model = common.load_model(world.other, "cpu", torch.float32)
    return common.Policy(model, torch.float32), common.load_tokenizer(world.other)


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "out"
    flags = f"--gold {world.gold}score --reward-model {world.rm} --pairs {world.pairs} --bon 3"
    report, samples = run(
        world, out, *flags.split(), *"--temperature 0.5 --name Base Tuned".split()
    )
    return SimpleNamespace(out=out, report=report, samples=samples)


def test_numbers_are_those_of_the_samples(world, written):
    """Averaged here a second way, and drawn again; the best of three is one answer per prompt, the
    one with the highest reward, and its KL is not known."""
    report, frame = written.report, pd.DataFrame(written.samples)
    sizes = frame.groupby("model").size().to_dict()
    assert sizes == {"Base": 32, "Tuned": 32, "best of 3 of Base": 16}
    gold = [len(set(text)) / (1 + len(text)) for text in frame.response]
    assert frame.gold.tolist() == pytest.approx(gold, abs=1e-6)
    score = RewardFunction(world.rm, "cpu", torch.float32)
    rewards = score([*frame.prompt], [*frame.response])
    assert frame.reward.tolist() == pytest.approx(rewards, abs=1e-4)
    golds = [row["gold"]["value"] for row in report["models"]]
    assert golds == sorted(golds, reverse=True)
    of = dict([*frame.groupby("model")])
    for row in report["models"]:
        own = of[row["model"]]
        means = own.gold.mean(), own.response_ids.map(len).mean()
        assert (row["gold"]["value"], row["length"]["value"]) == pytest.approx(means, abs=1e-6)
        assert ("kl" in row) == (row["model"] in ("Base", "Tuned")) and row["missing"] == 0
    for row in report["comparisons"]:
        both = of[row["a"]].merge(of[row["b"]], on="id")  # every answer of a with every one of b
        wins = (both.gold_x > both.gold_y) + 0.5 * (both.gold_x == both.gold_y)
        assert row["wins"]["value"] == pytest.approx(wins.mean(), abs=1e-6) and wins.mean() >= 0.5
    policy, tokenizer = loaded(world)
    prompts = [common.encode_prompt(tokenizer, prompt) for prompt in of["Tuned"].prompt[::2]]
    again = sampling.sample(policy, tokenizer, prompts, 2, 12, 0.5, seed=0)
    assert of["Tuned"].response_ids.tolist() == again.answer_ids
    assert "of 24 pairs of " in " ".join(report["answer"])


def test_kl_is_that_of_the_sampled_answers(world, written):
    """Nats per answer, end token included, from plain logits over the temperature."""
    models = [AutoModelForCausalLM.from_pretrained(m).eval() for m in (world.other, world.base)]
    tokenizer, found = common.load_tokenizer(world.base), []
    rows = [row for row in written.samples if row["model"] == "Tuned"][:8]
    for row in rows:
        prompt, answer = common.encode_prompt(tokenizer, row["prompt"]), row["response_ids"]
        ids, at = torch.tensor([prompt + answer]), slice(len(prompt) - 1, -1)
        with torch.no_grad():
            new, old = ((m(ids).logits[0, at] / 0.5).log_softmax(-1) for m in models)
        found.append((new - old).gather(-1, torch.tensor(answer)[:, None]).sum().item())
    assert [row["kl"] for row in rows] == pytest.approx(found, rel=1e-4)


def test_the_page_says_what_the_json_says(written):
    page, data = ((written.out / f"report.{kind}").read_text("utf-8") for kind in ("html", "json"))
    assert page.count("<svg") == 1 and "<img" not in page and "NaN" not in data
    for table in written.report["tables"]:
        assert table.replace("’", "'") in page.replace("&#39;", "'")


def test_greedy_answers_are_those_that_a_trainer_shows(world, tmp_path):
    """--temperature 0 was refused. One answer per prompt, and no KL: greedy answers are no draws."""
    flags = f"--gold {world.gold}score --temperature 0 --name base other".split()
    report, samples = run(world, tmp_path / "out", *flags)
    policy, tokenizer = loaded(world)
    rows = [row for row in samples if row["model"] == "other"]
    ids = [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]
    assert len(rows) == 16 and not any("kl" in row for row in report["models"])
    assert [row["response_ids"] for row in rows] == list(generate(policy, tokenizer, ids, 12, 0))


def test_only_common_prompts_are_compared_and_what_is_missing_is_counted(world, tmp_path):
    """A score that cannot read a model's worst answers made that model look better."""
    flags = f"--gold {world.gold}none_of_some --samples 1".split()
    said = error_of(run, world, tmp_path / "none", "--gold", world.gold + "mute")
    assert "'llama-1': 32" in said
    report, samples = run(world, tmp_path / "out", *flags)
    scores = pd.DataFrame(samples).pivot(index="id", columns="model", values="gold")
    both = scores.dropna()
    assert 0 < len(both) < 16 == len(scores)
    for row in report["models"]:
        assert row["missing"] == scores[row["model"]].isna().sum()
        assert row["gold"]["value"] == pytest.approx(both[row["model"]].mean())
    assert report["comparisons"][0]["wins"]["n"] == len(both)


def test_no_verdict_by_a_judge_that_prefers_loops(world, tmp_path, monkeypatch):
    """Each model answers each prompt once well and once in a loop; the second model loops better."""

    def answer_all(args, names, rows, ids):
        return pd.DataFrame(
            {"model": name, "p": p, "id": p, "task": "t", "prompt": row["prompt"],
             "response": f"{text} {name}"[: 4 + 3 * n], "response_ids": ids, "length": 32, "finished": True}
            for n, name in enumerate(names.values())
            for p, row in enumerate(rows)
            for text, ids in {"good": GOOD, "loop": LOOP}.items()
        )  # fmt: skip

    monkeypatch.setattr(contest, "answer_all", answer_all)
    flags = f"--gold {world.gold}loops --max-new-tokens 250".split()
    report, _ = run(world, tmp_path / "out", *flags)
    assert "Cut to their last 6 tokens, or as long: 16 of 16" in report["limits"][0]
    assert {row["kind"]: row["wrong"] for row in report["judge"]}["repetitive"] is True
    assert "cannot be trusted" in report["answer"][0]
    assert {row["verdict"] for row in report["comparisons"]} == {evaluate.NEVER}
    assert "python annotate.py draw" in report["answer"][-1]


@each("refused", of="evaluate")
def test_bad_input_is_one_line_before_anything_is_drawn(
    world, written, tmp_path, monkeypatch, capsys, line, fact
):
    monkeypatch.chdir(world.folder)
    names = {"BASE": world.base, "RM": world.rm, "FOREIGN": world.foreign, "WRITTEN": written.out}
    words = [str(names.get(word, word)) for word in line.split()]
    assert fact in error_of(run, world, tmp_path / "out", *words)
    assert "answers\n" not in capsys.readouterr().out and not (tmp_path / "out").exists()


# ---- reward ----

SIDES = "chosen", "rejected"


def test_a_reward_model_beside_the_longer_answer(world, tmp_path):
    """Ties and equal answers are left out. Pairs of its training were called held out; now no pairs are, only their file is named."""
    rows = tiny.pair_rows(24)
    rows += [rows[0] | {"tie": True}, rows[1] | {"rejected": rows[1]["chosen"]}]
    pairs, out = tiny.write_rows(world.folder / "p.jsonl", rows), tmp_path / "out"
    evaluate.main(f"reward --reward-model {world.rm} --pairs {pairs} --out {out}".split())
    report = tiny.read_json(out / "report.json")
    assert f"of 24 pairs of {pairs}." in report["answer"][0]
    kept, score = pd.DataFrame(rows[:24]), RewardFunction(world.rm, "cpu", torch.float32)
    right = np.greater(*(score([*kept.prompt], [*kept[side]]) for side in SIDES)).mean()
    longer = np.greater(*(kept[side].str[0].str["content"].str.len() for side in SIDES)).mean()
    found = [report[key]["value"] for key in ("accuracy", "length_baseline", "against_length")]
    assert report["accuracy"]["n"] == 24 and found == pytest.approx([right, longer, right - longer])
    assert (out / "report.html").stat().st_mode & 0o777 == 0o600


# ---- human ----


VOTE = rows_of("good_rows", reader="votes")[0]["row"]


def item(n, a_model="new", b_model="old", a="A" * 70, **more):
    ends = {"a": f"{n} {a}", "b": f"{n} B", "a_model": a_model, "b_model": b_model}
    return {"id": str(n), "prompt": f"Summarise {n}.", "gold": None} | ends | more


def vote(item, choice, annotator="ann", **more):
    names = {"event_id": f"{item['id']}-{annotator}", "item_id": item["id"], "annotator": annotator}
    said = {"choice": choice, "strength": 2 if choice in ("a", "b") else 0}
    return VOTE | names | said | {"item_sha256": item_sha256(item)} | more


def people_say(folder, items, votes):
    tiny.write_rows(folder / "items.jsonl", items)
    tiny.write_rows(folder / "annotations.jsonl", votes)
    argv = f"human --votes {folder}/annotations.jsonl --out {folder}/out --overwrite"
    evaluate.main(argv.split())
    return tiny.read_json(folder / "out/report.json")


def test_a_model_that_is_longer_everywhere_has_no_rate_at_equal_length(tmp_path, capsys):
    """45 of 60 for the longer one was "63.4 % at equal length", and would be if it were shorter."""
    items = [item(n, a="A" * (60 + n % 20)) for n in range(60)]
    votes = [vote(x, "a" if n < 45 else "b", f"p{n % 6}") for n, x in enumerate(items)]
    report = people_say(tmp_path, items, votes)
    row = report["comparison"]
    assert (row["a"], row["verdict"], row["equal_length"]) == ("new", "better", None)
    assert "At equal length: not measured" in report["answer"][1]
    assert row["wins"]["value"] == pytest.approx(0.75) and len(report["annotators"]) == 6
    assert report["answer"][0] in capsys.readouterr().out
    assert (tmp_path / "out/report.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("models, old", [(("new", "old"), "b"), (("old", "new"), "a")])
def test_votes_go_to_the_model_behind_the_answer(tmp_path, models, old):
    """Old wins 20 of 30 whichever side it stands on; ties and both bad are halves: (20 + 5)/30."""
    choices = [old] * 20 + ["tie"] * 5 + ["both_bad"] * 5
    items = [item(n, *models) for n in range(30)]
    row = people_say(tmp_path, items, [*map(vote, items, choices)])["comparison"]
    assert (row["a"], row["b"]) == ("old", "new")
    assert row["wins"]["value"] == pytest.approx(25 / 30) and row["wins"]["n"] == 30


def test_a_prompt_counts_once_and_tests_of_annotators_not_at_all(tmp_path):
    """Gold items measure something else than the two models; of three items on one prompt and twelve
    votes on another each prompt is one."""
    items = [item(n) for n in range(24)] + [item(n, prompt="Summarise 0.") for n in (30, 31)]
    items += [item(40, gold="b"), item(41, "new", "new"), item(42, None, None)]
    votes = [vote(x, "a" if n < 12 else "b") for n, x in enumerate(items[:24])]
    votes += [vote(items[1], "a", f"p{n}") for n in range(11)]
    votes += [vote(x, "a") for x in items[24:26]]
    people_say(tmp_path, items[:1], votes[:1])  # one prompt, so no standard error: it crashed
    plain = people_say(tmp_path, items, votes)
    report = people_say(tmp_path, items, votes + [vote(x, "b") for x in items[26:]])
    wins = report["comparison"]["wins"]
    assert wins == plain["comparison"]["wins"]
    assert wins["n"] == 24 and wins["value"] == pytest.approx(0.5)
    assert len(report["annotators"]) == 12
    assert "var(--f1)" not in (tmp_path / "out/report.html").read_text()  # one model's rates
    assert "more prompts" in report["answer"][-1]


@each("evaluate_cases", of="votes")
def test_votes_on_no_two_models_are_refused(tmp_path, items, more, fact):
    items = [item(**given) for given in items]
    votes = [vote(x, "a", **more) for x in items]
    assert fact in error_of(people_say, tmp_path, items, votes)
    assert not (tmp_path / "out").exists()
