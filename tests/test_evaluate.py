"""evaluate.py: is a difference real, and is every number the number it says it is?"""

import math
import os
import random
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import evaluate
import tiny
from conftest import REPO
from evaluate import bon_curve, compare_outcomes, outcomes, verdict
from parts import (
    evaluation_page,
    files,
    frontier,
    pages,
    reports,
    reward_models,
    sampling,
)
from parts.means import wilson
from parts.messages import visible
from parts.old_stats import mean_number, number
from tiny import cases, error_of, printed

NAN = math.nan


def test_numbers_carry_their_n():
    assert mean_number([NAN]) == {"value": None, "n": 0, "reason": "nothing to measure"}
    one = mean_number([[0.2, NAN, 0.4]])
    assert [one[key] for key in ("value", "n", "low")] == [pytest.approx(0.3), 2, None]
    assert "fewer than two" in one["reason"]
    same = mean_number([[0.2], [0.2], [0.2]])  # was [0.2, 0.2]
    assert (same["low"], same["reason"]) == (None, "no interval: every prompt has the same")


def test_goldens():
    """Twelve comparisons: raw .54167 hides a loss; a weight of 2 is the row twice. Best of n: the mean
    over all subsets, ties by lot."""
    fit, lengths = evaluate.length_controlled, [20, -20, 50, -10, 100, -40, 10, 30, -5, 70, -30, 40]
    assert fit([1, 0, 1, 0.5, 1, 0, 1, 1, 0, 1, 0, 0], lengths) == pytest.approx(0.38058, abs=5e-6)
    assert fit([1, 0, 1, 1], [0] * 4) == 0.75
    twice = fit([1, 0, 0.5, 1], [1, 5, -2, 1])
    assert fit([1, 0, 0.5], [1, 5, -2], weights=[2, 1, 1]) == pytest.approx(twice)
    curve = bon_curve([2, 0, 3, 3, 1, 0], [0.3, -1, 0.8, -0.2, 1.4, 0.1])
    assert curve == pytest.approx([7 / 30, 119 / 300, 0.355, 0.3, 0.3, 0.3])


def compared(a, b):
    """A against B, both (P, G), as `comparisons` hands them on."""
    y = outcomes(a, b)
    prompts, same_length = np.arange(len(y)).repeat(y[0].size), np.zeros(y.size)
    return compare_outcomes(y.ravel(), prompts, same_length, 0)


# 60 of 100 excludes ½ by its interval, and fails the exact test; 3 of 3 was [1, 1]; 280 of 400
# answers to ten prompts have Wilson's 7 of 10, as independent ones [.65, .74]; two prompts that
# agree do not prove the rest
@cases("""
wins | answers | prompts | expected
[[1], [0]] | 1 | [60, 40] | {"low": 0.502003, "p": 0.056888, "method": "score interval over prompts", "verdict": "inconclusive"}
[[1], [0]] | 1 | [65, 35] | {"high": 0.736358, "verdict": "better"}
[[1], [0]] | 1 | [35, 65] | {"verdict": "worse"}
[[1], [0]] | 2 | [3, 0] | {"low": 0.438503, "p": 0.25, "verdict": "inconclusive"}
[[1], [0]] | 40 | [7, 3] | {"value": 0.7, "low": 0.396778, "high": 0.892209, "p": 0.34375, "verdict": "inconclusive"}
[[1, 1, 1, 0]] | 1 | [2] | {"value": 0.75, "low": 0.01362, "p": 0.5, "verdict": "inconclusive"}
""")
def test_comparisons_by_hand(wins, answers, prompts, expected):
    """Answers to one prompt are one vote, and a verdict asks for both interval and test."""
    scores = np.repeat(np.tile(np.array(wins, float), answers), prompts, axis=0)  # (P, G)
    row = compared(scores, np.full_like(scores, 0.5))
    values = row["win_rate"] | {"p": row["p"], "verdict": verdict(row["win_rate"], row["p"])}
    for key, value in expected.items():
        assert values[key] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-6))


def test_what_was_not_scored_is_not_compared():
    """(1 + ¼)/2: an answer without a score is no loss. The interval rules, whatever p says."""
    rate = compared([[1, NAN], [3, 0]], [[0, NAN], [2, 4]])["win_rate"]
    assert (rate["value"], rate["n"]) == (0.625, 2)
    row = compared([NAN], [1.0])
    assert row["win_rate"]["value"] is None
    assert verdict(row["win_rate"], row["p"]) == "no verdict"
    assert verdict(number(0.6, 9, (0.4, 0.7)), 0.01) == "inconclusive"


def answers_of(**columns):
    """The answers of a model, (P, G) rows of samples.jsonl, from a (P, G) table per key."""
    cells = zip(*(np.asarray(table).ravel().tolist() for table in columns.values()))
    rows = np.array([dict(zip(columns, cell)) for cell in cells], object)
    return rows.reshape(np.shape(next(iter(columns.values()))))


def test_several_comparisons_are_adjusted():
    """20 to 7 prompts, p = .0192; Holm's of three is .0576. The length is A's less B's."""
    wins = np.array([[1.0]] * 20 + [[-1.0]] * 7)
    scores = {"base": 0 * wins, "a": wins, "b": wins}
    models = {name: answers_of(gold=x, length=5 + x * wins) for name, x in scores.items()}
    models["a"][0, 0]["length"] += 9
    table = evaluate.comparisons(models, "gold", seed=0)
    assert [(row["a"], row["b"]) for row in table] == [("a", "base"), ("b", "base"), ("b", "a")]
    assert table[0]["p"] == pytest.approx(0.0192, abs=5e-5)
    assert verdict(table[0]["win_rate"], table[0]["p"]) == "better"
    assert table[0]["p_holm"] == pytest.approx(3 * table[0]["p"]) and table[2]["p_holm"] == 1.0
    assert [row["verdict"] for row in table] == ["inconclusive"] * 3
    fit = evaluate.length_controlled([1] * 20 + [0] * 7, [10] + [1] * 26)
    assert table[0]["length_controlled"]["value"] == pytest.approx(fit, abs=1e-6)


def test_a_score_that_is_the_same_for_all_answers_gives_no_verdict():
    """A recruiter's score of 0 for each answer of a model that does not know the form was "no
    difference was found, 50.0 % [50.0, 50.0]"."""
    models = {name: answers_of(gold=np.zeros((9, 2)), length=np.ones((9, 2))) for name in "ab"}
    table = evaluate.comparisons(models, "gold", seed=0)
    assert [row["verdict"] for row in table] == ["no verdict"]
    models["b"][0, 0]["gold"] = NAN  # was "inconclusive"
    assert evaluate.comparisons(models, "gold", seed=0)[0]["verdict"] == "no verdict"
    models["b"][0, 0]["gold"] = 0.1
    assert evaluate.comparisons(models, "gold", seed=0)[0]["verdict"] == "inconclusive"


def test_a_prompt_counts_once(tmp_path, capsys):
    """Four prompts in thirty rows each were "120 prompts find a true win rate of 63 % or more"."""
    messages = [{"role": "user", "content": "p"}]
    rows = [{"prompt": f"p{i % 4}", "id": i} for i in range(12)] + [{"prompt": messages}]
    rows += [{"prompt": [{"content": "p", "role": "user"}]}]
    args = evaluate.parse_args(["--prompts", tiny.write_rows(tmp_path / "p.jsonl", rows)])
    found = evaluate.load_prompts(args)
    assert [row.get("id") for row in found] == [0, 1, 2, 3, None]
    assert "9 rows left out: a row before has the same prompt" in capsys.readouterr().out


def test_prompts_that_a_run_was_trained_on_are_counted(world, written, tmp_path):
    """ppo.py's next command, on a file without a split, showed training prompts as a test."""
    rows = [
        {"prompt": f"p{i}", "split": split}
        for i, split in enumerate(["train", "train", "train", "test"])
    ]
    file = tiny.write_rows(tmp_path / "p.jsonl", rows)
    run = {"stage": "ppo", "args": {"prompts": file}}
    assert reports.trained_prompts(run, rows) == 3 and reports.trained_prompts(None, rows) == 0
    chat = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    tiny.write_rows(file, chat)  # no split
    example = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    asked = [{"prompt": [*example, *row["prompt"]]} for row in chat[:2]]
    assert reports.trained_prompts(run, asked + rows[2:3]) == 3  # text and --chat are one prompt
    assert reports.trained_prompts(run | {"stage": "dpo"}, chat) == 0  # only its evaluations
    setup = written.report["setup"] | {"n_prompts": 30}
    run = {"name": world["ppo"], "trained_prompts": 2, "reward_fn": setup["gold"]}
    notes = evaluation_page.in_words(written.report | {"setup": setup, "runs": [run]})[1]
    assert "PPO was trained on the gold score, which it may exploit." in notes
    assert any("PPO was trained on a file with 2 of these 30 prompts" in note for note in notes)


def test_a_score_that_training_used_or_that_is_lacking_is_said(world, tmp_path):
    """Gold that PPO was trained on passed for independent, and no sentence said that no answer had
    a score, or that a folder without args.json of ours has no curve: one with ms-swift's ended the
    comparison."""
    shutil.copytree(world["dpo"], tmp_path / "copy")
    (tmp_path / "copy/args.json").write_text('{"output_dir": "copy"}')
    models = ("--model", world["base"], world["ppo"], str(tmp_path / "copy"))
    (tmp_path / "none.py").write_text("def f(p, a, r):\n    return [None] * len(a)")
    few = ("--samples", "1", "--temperature", "0.5", "--overwrite", *models)
    evaluate.main(command(world, tmp_path, "--gold", world["rm"], "--reward-model", "none", *few))
    notes = report_of(tmp_path)["notes"]
    assert "PPO was trained on the gold score, which it may exploit." in notes
    assert "No args.json, so no curve and no cost: copy." in notes
    assert "Fewer than 20 prompts: no wins at equal length and no score at equal KL." in notes
    evaluate.main(command(world, tmp_path, "--gold", f"{tmp_path / 'none.py'}:f", *few))
    report = report_of(tmp_path)
    assert report["answer"][0] == "No answer has a gold score, so it says nothing about any model."
    assert "PPO: 12 of 12 answers have no gold score." in report["notes"]
    verdicts = {row["verdict"] for row in report["comparisons"] if row["scorer"] == "gold"}
    assert verdicts == {"no verdict"}


def test_equal_answers_tie_exactly():
    """A text is scored once per prompt, whoever gave it; .1 + .2 and .3 tie; None is no 0."""
    texts = [["x", "x"], ["y", "z"]], [["y", "x"], ["x", "y"]]
    seen, models = [], [answers_of(response=table) for table in texts]

    def scorer(prompts, texts, rows):
        seen.extend(zip(prompts, texts))
        known = {"x": 0.1 + 0.2, "y": 0.3}
        return [known[t] + (p == "q") if t in known else None for p, t in zip(prompts, texts)]

    prompts = [{"prompt": "p"}, {"prompt": "q"}]
    evaluate.add_scores(models, prompts, "gold", "--gold f", scorer)
    assert seen == [("p", "x"), ("q", "y"), ("q", "z"), ("p", "y"), ("q", "x")]
    a, b = (evaluate.column(answers, "gold") for answers in models)
    assert (outcomes(a, b)[0] == 0.5).all() and b[1] == pytest.approx([1.3, 1.3])  # of its prompt
    assert mean_number(a)["n"] == 3 and np.isnan(a[1, 1])


@cases("""
function | message
lambda p, t, r: [1.0] | [1.0]
lambda p, t, r: [0.0, math.inf, 0.0] | inf
lambda p, t, r: None | None
lambda p, t, r: 1.0 | 1.0
lambda p, t, r: ["good"] * 3 | 'good'
lambda p, t, r: dict(enumerate([0.5, 0.1, 0.9])) | {0: 0.5
lambda p, t, r: "011" | '011'
lambda p, t, r: {0.5, 0.1, 0.9} | {
lambda p, t, r: [0.5, "nan", "1_0"] | 'nan'
lambda p, t, r: [0.5, math.nan, 0.1] | nan
""")
def test_a_bad_gold_function_is_one_line(function, message):
    """A dict was scored by its keys: "base2 beats Base: 77.9 %"; texts were read as numbers."""
    models = [answers_of(response=[["a", "b", "c"]])]
    given = models, [{"prompt": "p"}], "gold", "--gold f", eval(function)
    line = error_of(evaluate.add_scores, *given)
    assert line.startswith("--gold f: ") and str(message) in line


PAYLOAD = "<img src=x onerror=window.__xss=1>\u202e"
GOLD = """def score(prompts, answers, rows=None):
    return [len(set(a)) / (1 + len(a)) for a in answers]
"""


def write_run(folder, args, rows, stage=None):
    """What a trainer leaves beside the weights: args.json and the log."""
    folder.mkdir(exist_ok=True)
    record = {"stage": stage, "args": args}
    files.write_json(folder / "args.json", record)
    tiny.write_rows(folder / "metrics.jsonl", rows)
    return str(folder)


def run_rows(golds):
    rows, step = [], {"loss": 0.1, "episodes": 8, "answer_tokens": 80, "time_s": 1.0}
    for i, gold in enumerate(golds):
        values = {"val/gold": gold, "val/score": float(i), "val/kl": 0.25 * i * i, "time_s": 9.0}
        rows += [{"step": i} | step, {"step": i} | values]
    return rows


def run_folder(folder, base, seed, golds, **args):
    """The baseline with a little noise, the record of a trainer and the log of a run."""
    shutil.copytree(base, folder)
    torch.manual_seed(seed + 1)
    file = folder / "model.safetensors"
    weights = {k: v + 0.01 * torch.randn_like(v) for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    args = {"model": base, "seed": seed, "prompts": "val.jsonl"} | args
    return write_run(folder, args, run_rows(golds))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    base, rm = tiny.tiny_model("llama", folder), tiny.tiny_reward_model("llama", folder / "rm")
    good, bad = [0.4, 0.5, 0.6, 0.62, 0.65, 0.66], [0.4, 0.55, 0.7, 0.6, 0.5, 0.3]
    rows = []
    for i, row in enumerate(tiny.pair_rows(18)):
        text = row["prompt"][0]["content"] + PAYLOAD
        row = {"id": f"p{i} {PAYLOAD}", "prompt": [{"role": "user", "content": text}]}
        row |= {"task": ["assess", "summary"][i % 2], "split": ["test", "val", "test"][i % 3]}
        rows.append(row | {"shown": ["sql"], "must_have": ["sql"], "expected_decision": "hold"})
    (folder / "gold.py").write_text(GOLD)
    more = {"gold": f"{folder / 'gold.py'}:score", "temperature": 0.5}
    own = {"pairs": ["x"], "batch_size": 4, "eval_temperature": 0.5}
    return {
        "base": base,
        "ppo": run_folder(folder / "ppo", base, 0, good, reward_model=rm, **more),
        "over": run_folder(folder / "over", base, 1, bad, reward_model=rm, **more),
        "dpo": run_folder(folder / "dpo", base, 2, good[:3], **own, **more),
        "rm": rm,
        "prompts": tiny.write_rows(folder / "prompts.jsonl", rows),
        "gold": more["gold"],
    }


def command(world, out, *more, models=("base", "dpo")):
    argv = f"--reward-model {world['rm']} --gold {world['gold']} --prompts {world['prompts']} --out {out}"
    argv += " --device cpu --bon 4 --samples 2 --max-new-tokens 10 --model"
    if "--model" in more:  # in place of these: a list flag given twice is joined
        return [*argv.split()[:-1], *more]
    return [*argv.split(), *(world[name] for name in models), *more]


def scorer(folder):
    return reward_models.reward_function(folder, torch.device("cpu"), torch.float32)


def report_of(out):
    return tiny.read_json(out / "report.json")


@pytest.fixture(scope="module")
def written(world, tmp_path_factory):
    """Everything compared at temperature .5, where a KL at 1 is another number."""
    out = tmp_path_factory.mktemp("report") / "out"
    models = ("base", "ppo", "over", "dpo")
    evaluate.main(command(world, out, "--temperature", "0.5", models=models))
    samples = list(files.read_jsonl(out / "samples.jsonl"))
    names = [world[name] for name in models]
    return SimpleNamespace(out=out, report=report_of(out), samples=samples, names=names)


def leaves(value):
    """Every number record of a report."""
    if isinstance(value, dict) and "value" in value:
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)


def test_every_number_says_how_it_was_made(written, world):
    """Best of 4 stands at its bound, log 4 − ¾ = .6363; a run is marked at step 2; equal KL is where
    DPO ends, √(.25 · 2²) = 1 at most."""
    report, numbers = written.report, list(leaves(written.report))
    for each in numbers:
        assert each["n"] >= 0 and (each["value"] is None or each["method"])
        assert each.get("low") is not None or each["reason"]
    base, *_, dpo, best = report["models"]
    assert len(numbers) > 50 and base["kl"]["value"] == 0 and dpo["kl"]["n"] == 24
    bound = math.log(4) - 3 / 4
    assert best["kl"]["value"] == pytest.approx(bound, abs=1e-6)
    assert [point["n"] for point in report["best_of_n"]] == [1, 2, 4]
    assert best["proxy"]["value"] == report["best_of_n"][-1]["proxy"]["value"]
    assert report["setup"]["n_prompts"] == 12 and len(report["setup"]["sha256"]) == 7
    assert len(report["comparisons"]) == 2 * 10
    assert {row["metric"] for row in report["tasks"]} == {"gold"}
    marks = {run["model"]: run["overoptimised"] for run in report["frontier"]}
    assert marks[world["over"]]["step"] == 2 and not marks[world["ppo"]]
    assert [row["calls"] for row in report["efficiency"]["table"]] == [None, 24, None]
    same = frontier.equal_kl(report, "gold")["sqrt_kl"]
    assert same == pytest.approx(min(1.0, math.sqrt(bound)), abs=1e-5)
    assert report["equal_kl"] is None  # twelve prompts are too few to interpolate
    rows = [row for row in files.read_jsonl(world["prompts"]) if row["split"] == "test"]
    assert [row["id"] for row in report["samples"]] == [row["id"] for row in rows]  # all twelve
    models = {"a": answers_of(response=[["x"]] * 40, gold=[[1.0]] * 40)}
    prompts = [{"prompt": f"p{i}"} for i in range(40)]
    drawn = [int(row["id"]) for row in evaluate.side_by_side(models, prompts, "gold", seed=3)]
    assert drawn == sorted(random.Random(3).sample(range(40), 12))


def test_numbers_are_those_of_the_samples(written, world):
    """Averaged here a second way; answers drawn again; best of 4 draws its own, or it would tie."""
    rows, report, model = written.samples, written.report, written.report["models"][1]
    names = [name for name in written.names for _ in range(24)] + [world["base"]] * 48
    assert [row["model"] for row in rows] == names
    texts = [visible(row["response"]) for row in rows]
    gold = np.array([len(set(text)) / (1 + len(text)) for text in texts])
    assert [row["gold"] for row in rows] == pytest.approx(gold, abs=1e-6)
    base, ppo = gold[:24].round(9).reshape(12, 2), gold[24:48].round(9).reshape(12, 2)
    rate = np.mean([(x > y) + 0.5 * (x == y) for p in zip(ppo, base) for x, y in product(*p)])
    row = report["comparisons"][0]
    assert (row["a"], row["b"], row["scorer"]) == (world["ppo"], world["base"], "gold")
    assert row["win_rate"]["value"] == pytest.approx(rate, abs=1e-6)
    assert model["gold"]["value"] == pytest.approx(ppo.mean(), abs=1e-5)
    drawn = rows[24:48]
    assert model["length"]["value"] == np.mean([len(row["response_ids"]) for row in drawn])
    assert rows[0]["response_ids"] != rows[96]["response_ids"]
    scores = scorer(world["rm"])(*zip(*((r["prompt"], visible(r["response"])) for r in drawn)))
    assert [row["proxy"] for row in drawn] == pytest.approx(scores, abs=1e-4)
    policy, tokenizer = reports.load_policy(world["ppo"], SimpleNamespace(device="cpu"))
    prompts = [common.encode_prompt(tokenizer, row["prompt"]) for row in drawn[::2]]
    again = sampling.sample(policy, tokenizer, prompts, 2, 10, 0.5, seed=0)  # at --temperature
    assert [row["response_ids"] for row in drawn] == again.answer_ids


def test_kl_is_that_of_the_sampled_answers(written, world):
    """Nats per answer, end token included, from plain logits over the temperature."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(world[name]).eval() for name in ("over", "base")]
    tokenizer, found = common.load_tokenizer(world["base"]), []
    for row in (row for row in written.samples if row["model"] == world["over"]):
        prompt, n = common.encode_prompt(tokenizer, row["prompt"]), len(row["response_ids"])
        ids = torch.tensor([prompt + row["response_ids"]])
        with torch.no_grad():
            logps = [(m(ids).logits[0, -n - 1 : -1] / 0.5).log_softmax(-1) for m in models]
        ratio = (logps[0] - logps[1]).gather(-1, ids[0, -n:, None])
        found.append(ratio.sum().item())
    row = written.report["models"][2]
    assert row["kl"]["value"] == pytest.approx(np.mean(found), rel=1e-4) and len(found) == 24


def test_the_page_is_a_function_of_the_json(written, tmp_path, capsys):
    """Byte for byte. Markup in a prompt is text (tests/test_pages.py tries every slot)."""
    title, sections = evaluation_page.PAGES["compare"]
    pages.write_page(tmp_path / "again.html", title, sections(written.report))
    page = (written.out / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    pages.print_report(title, sections(written.report))
    assert len(capsys.readouterr().out.splitlines()) <= 40
    assert "&lt;img src=x onerror" in page and "[U+202E]" in page and "<img" not in page
    assert "NaN" not in (written.out / "report.json").read_text(encoding="utf-8")


def test_twice_the_same_bytes(world, tmp_path, monkeypatch):
    """A second process, folder and order of its sets. A gold model scores by itself."""
    gold = tiny.tiny_reward_model("llama", tmp_path / "gold", seed=5)
    argv = ["compare", *command(world, "out", "--n", "4", "--bon", "0", "--gold", gold)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    evaluate.main(argv)
    again = {"cwd": tmp_path / "b", "env": os.environ | {"PYTHONHASHSEED": "7"}, "text": True}
    script = [sys.executable, str(REPO / "evaluate.py"), *argv]
    run = subprocess.run(script, capture_output=True, **again)
    assert run.returncode == 0, run.stderr
    for name in ("report.json", "samples.jsonl", "report.html"):
        one, two = ((tmp_path / folder / "out" / name).read_bytes() for folder in "ab")
        assert one == two, name
    drawn = f"--model {world['dpo']} --model-b {world['base']} --prompts {world['prompts']}"
    assert f"annotate.py draw {drawn} --split test --out runs/ab\n" in run.stdout
    row = next(files.read_jsonl(tmp_path / "a/out/samples.jsonl"))
    (expected,) = scorer(gold)([row["prompt"]], [row["response"]])
    assert row["gold"] == pytest.approx(expected, abs=1e-4)
    assert row["proxy"] != pytest.approx(expected, abs=1e-4)


@cases(r"""
flags | words
--split train | --split train; found test, val
--prompts empty.jsonl | empty.jsonl: no prompt
--prompts none.jsonl | --prompts none.jsonl: no such file
--prompts letters.jsonl --split all | letters.jsonl:2: "prompt"
--gold none.py:f | --gold none.py
--gold gold.py:typo | --gold gold.py:typo
--reward-model none_there | --reward-model none_there
--reward-model BASE | --reward-model .*not a reward model
--model BASE RM | --model .*a reward model
--model BASE BASE | --model: nothing to compare
--model BASE nowhere | --model nowhere
--model BASE OTHER | --model .*tokenizer or template than .*people can.* annotate.py draw --model .* --model-b
--model BASE CUT | metrics.jsonl:12: expected an object with a whole number "step"
--gold none --reward-model none | --gold, --reward-model: neither
--gold RM | --gold .*: this is the --reward-model, no independent score
--samples 0 | --samples: .*at least 1
--bon -1 | --bon: .*at least 0
--temperature 0 | --temperature: .*above 0
--out BASE --overwrite | --out .*folder of its own
--out WRITTEN | --overwrite
""")
def test_bad_input_is_one_line(world, written, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    Path("gold.py").write_text(GOLD.replace("len(set(a))", "1").replace("(1 + len(a))", "0"))
    Path("empty.jsonl").write_text("")
    tiny.write_rows("letters.jsonl", [{"prompt": "p"}, {"prompt": 3}])
    names = {"BASE": world["base"], "RM": world["rm"], "WRITTEN": str(written.out)}
    if "OTHER" in flags:
        chatml = tiny.tiny_tokenizer(template=tiny.CHATML)
        names["OTHER"] = tiny.tiny_model("llama", tmp_path, tokenizer=chatml)
    if "CUT" in flags:
        shutil.copytree(world["ppo"], "CUT")
        log = Path("CUT/metrics.jsonl")
        log.write_bytes(log.read_bytes()[:-30] + b"\n")
    argv = command(world, "out", *(names.get(flag, flag) for flag in flags.split()))
    line = error_of(evaluate.main, argv)
    assert re.search(words, line), line
    assert not Path("out").exists()


def test_every_model_is_known_before_one_is_sampled(world, tmp_path, capsys):
    """A reward model named second was refused after the baseline had answered every prompt."""
    line = error_of(evaluate.main, command(world, tmp_path / "o", models=("base", "rm")))
    assert line.startswith(f"--model {world['rm']}: ") and "reward model" in line
    assert "prompts ×" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def logs(world, tmp_path_factory):
    """Run folders without weights, beside those of the world."""
    folder = tmp_path_factory.mktemp("logs")
    ppo = {"model": world["base"], "prompts": "val.jsonl", "temperature": 0.5}
    grpo = {"model": world["base"], "data": "a.json", "batch_size": None, "temperature": 0.5}
    step = {"step": 1, "episodes": 8, "time_s": 1}
    bare = [{"step": 0, "val/score": 0.5}, step]
    gold = [{"step": 0, "val/score": 0.5, "val/gold": 0.5}, step]  # a gold score without a KL
    runs = {
        "other_file": (ppo | {"prompts": "other.jsonl"}, run_rows([0.4, 0.5]), "ppo"),
        "other_base": (ppo | {"model": "x"}, run_rows([0.4, 0.5]), "ppo"),
        "no_gold": (grpo, bare, "grpo_rubric"),
        "grpo": (grpo | {"gold": "g.py:f"}, gold, "grpo_rubric"),
        "grpo_other": (grpo | {"gold": "g.py:f", "data": "b.json"}, gold, "grpo_rubric"),
    }
    (folder / "nothing").mkdir()
    folders = {name: write_run(folder / name, *run) for name, run in runs.items()}
    return world | folders | {"nothing": str(folder / "nothing")}


@cases("""
models | temperature | curves | left_out
base dpo other_file other_base | None | dpo | other_file other_base
base dpo | 0.7 | | dpo
base no_gold ppo | None | ppo |
base nothing ppo | None | ppo |
base grpo ppo | None | ppo | grpo
base grpo | 0.7 | grpo |
base grpo grpo_other | None | grpo | grpo_other
""")
def test_which_runs_have_a_curve(logs, capsys, models, temperature, curves, left_out):
    """Those on the prompts of the first run with a KL, from the baseline, at the temperature of the
    KL (the runs' is 0.5). GRPO logs neither gold nor KL unless asked: named before PPO, it made
    "other prompts" of PPO's. With --gold its prompts are those of --data: two runs on two files
    were one set; and a KL that it has not is at no temperature."""
    names = [logs[name] for name in models.split()]
    runs, found = frontier.load_runs(names, temperature=temperature)
    assert len(runs) == len(names) - 1 - models.count("nothing")  # which has no args.json
    assert [curve["model"] for curve in found] == [logs[name] for name in curves.split()]
    reason = "its KL is at temperature 0.5" if temperature else "other prompts, or not trained from"
    messages = [line.split(reason)[0] for line in capsys.readouterr().out.splitlines()]
    assert messages == [f"{logs[name]}: its curve is left out (" for name in left_out.split()]


@pytest.mark.parametrize("rows, seconds", [(["cut"], 2.0), ([], math.nan)])
def test_the_log_of_a_killed_run(rows, seconds, tmp_path, capsys):
    """A last line cut by a kill ended every comparison, as "not valid JSON"; a log that is empty
    made the run one that cost nothing. watch.py and --resume leave such a line out."""
    files.write_json(tmp_path / "args.json", {"stage": "dpo", "args": {"batch_size": 8}})
    whole = '{"step": 1, "time_s": 2.0}\n{"step": 2, "time' if rows else ""
    (tmp_path / "metrics.jsonl").write_text(whole)
    ((costs,), _) = frontier.load_runs([str(tmp_path)])
    assert costs["seconds"] == pytest.approx(seconds, nan_ok=True)
    run = {"args": {}, "rows": [{"step": 1, "time_s": 2.0}] * bool(rows)}  # its reward model took 3
    spent = frontier.spending(run, {"seconds": 3.0})[1]
    assert spent["seconds"] == pytest.approx(seconds + 3, nan_ok=True)
    assert ("line 2 is cut off and left out" in capsys.readouterr().out) == bool(rows)


def test_missing_defaults_are_named_and_skipped(world, tmp_path, monkeypatch, capsys):
    """Said and skipped; the same names on the line are errors. runs/dpo is used if there is one."""
    monkeypatch.chdir(tmp_path)
    prompts = tiny.write_rows("mine.jsonl", [{"prompt": r["prompt"]} for r in tiny.pair_rows(6)])
    Path("data").mkdir()
    Path("data/recruiter.py").write_text("def reward(*given):\n    return [0.0]\n")
    flags = f"--prompts {prompts} --reward-model {world['rm']} --max-new-tokens 4".split()
    flags += "--samples 2 --bon 2 --overwrite --device cpu".split()
    assert "nothing to compare" in error_of(evaluate.main, flags)
    assert "skipped: the default data/tiny-base does not exist" in capsys.readouterr().out
    flags += ["--model", world["base"], world["dpo"]]
    evaluate.main(flags)
    printed = capsys.readouterr().out
    assert "the default gold is left out" in printed and "all of them are taken" in printed
    report = report_of(Path("runs/evaluate"))
    assert (report["setup"]["n_prompts"], len(report["models"]), report["tasks"]) == (6, 3, [])
    assert report["scorers"] == ["proxy"] and report["setup"]["gold"] == "none"
    assert any("No gold" in note for note in report["notes"])
    for more, words in (("--reward-model none", "neither is there"), ("runs/dpo", "runs/dpo"), ("--split test", "--split test")):  # fmt: skip
        assert words in error_of(evaluate.main, [*flags, *more.split()])
    assert evaluate.parse_args([]).model[1] == "runs/demo/dpo"
    Path("runs/dpo").mkdir()
    assert evaluate.parse_args([]).model[1] == "runs/dpo"


def quality_of(*groups, **columns):
    """reward_quality of groups (n, scores of chosen and rejected, tokens of both)."""
    table = np.array([pair for n, *pair in groups for _ in range(n)], float)
    rows = [{"tie": False, "task": "assess", "strength": 1} for _ in table]
    for i, row in enumerate(rows):
        row |= {"prompt": f"case {i}"} | {key: values[i] for key, values in columns.items()}
    return evaluate.reward_quality(rows, table[:, :2], table[:, 2:])


# constant: right in half, exactly; returns the length; right where the longer one is worse
@cases("""
groups | right | rule | word
[(30, 3, 3, 9, 1), (10, 3, 3, 1, 9)] | 0.5 | 0.75 | worse
[(30, 9, 1, 9, 1), (10, 1, 9, 1, 9)] | 0.75 | 0.75 | inconclusive
[(39, 1, 0, 1, 9), (1, 0, 1, 9, 1)] | 0.975 | 0.025 | better
""")
def test_reward_model_against_length(groups, right, rule, word):
    report = quality_of(*groups, strength=[1, 3] * 20)
    assert (report["accuracy"]["value"], report["length_baseline"]["value"]) == (right, rule)
    ends = (report["accuracy"]["low"], report["accuracy"]["high"])
    if right != 0.5:
        assert ends == pytest.approx(wilson(40 * right, 40), abs=1e-6)
    assert ends[0] < right < ends[1] and report["verdict"] == word
    gain = report["against_length"]
    assert gain["value"] == pytest.approx(right - rule) and gain["n"] == gain["clusters"] == 40
    assert [part["n"] for part in report["by_strength"].values()] == [20, 20]
    assert report["by_task"]["assess"] == report["accuracy"]
    assert quality_of(*groups, tie=[True] + [False] * 39)["accuracy"]["n"] == 39


def test_pairs_of_one_prompt_are_one_vote():
    """Wilson over 40 "independent" pairs said [.60, .86]; four prompts exclude next to nothing."""
    prompts = [f"case {i // 10}" for i in range(40)]
    report = quality_of((30, 1, 0, 1, 9), (10, 0, 1, 1, 9), prompt=prompts)
    assert report["accuracy"]["value"] == 0.75 and report["accuracy"]["low"] < 0.2
    assert report["by_task"]["assess"] == report["accuracy"]
    assert report["against_length"]["clusters"] == 4 and report["verdict"] == "inconclusive"


def test_two_of_anything_are_no_finding():
    """Two right pairs of two had p = 0 and were "better", and so were 2 to 5 of a prompt each."""
    for n in range(1, 6):
        report = quality_of((n, 1, 0, 1, 9))
        gain, accuracy = report["against_length"], report["accuracy"]
        assert report["verdict"] == "inconclusive" and gain["p"] >= 0.0625
        assert accuracy["low"] is None or accuracy["low"] < 0.6
    assert quality_of((6, 1, 0, 1, 9))["verdict"] == "better"  # exact: 2/2⁶ = .031


def measured(rm, pairs, out, *flags):
    """The report of `evaluate.py reward` and the rows of its pairs.jsonl."""
    argv = f"reward --reward-model {rm} --pairs {pairs} --out {out}".split()
    evaluate.main([*argv, *flags])
    return report_of(out), list(files.read_jsonl(out / "pairs.jsonl"))


def share_right(rows):
    return np.mean([row["scores"][0] > row["scores"][1] for row in rows if not row.get("tie")])


def test_reward_command(world, tmp_path, capsys):
    """pairs.jsonl holds the scores that give the accuracy; equal pairs and ties are counted."""
    rows, case = tiny.pair_rows(24), "\n\nHuman: Case?\n\nAssistant:"
    rows += [{"chosen": f"{case} yes, hold", "rejected": f"{case} no"}, rows[0] | {"tie": True}]
    pairs = tiny.write_rows(tmp_path / "p", [*rows, rows[1] | {"rejected": rows[1]["chosen"]}])
    report, rows = measured(world["rm"], pairs, tmp_path / "a")
    assert report["accuracy"]["value"] == pytest.approx(right := share_right(rows), abs=1e-6)
    assert report["counts"] == {"rows": 27, "equal": 1, "ties": 1} and len(rows) == 26
    pair = (rows[0][key] for key in ("prompt", "chosen", "rejected"))
    _, *answers = common.encode_pair(common.load_tokenizer(world["rm"]), *pair)
    assert rows[0]["tokens"] == [*map(len, answers)]
    said = printed(capsys)
    assert "“the longer answer wins”" in said and f"{100 * right:.1f} %" in said
    assert "trained on this file" not in said and "annotate.py draw" in said


def test_pairs_of_the_training_are_no_test(world, tmp_path, capsys):
    """The report says so; pairs that models wrote have a rate of their own."""
    rows = [*tiny.pair_rows(24), {"prompt": "Case?", "chosen": "Hold.", "rejected": "No."}]
    for row in rows[:6]:
        row["chosen_model"] = "dpo"
    for row in rows[:3]:  # of the other three a person wrote the other answer
        row["rejected_model"] = "dpo"
    pairs, rm = tiny.write_rows(tmp_path / "p", rows), shutil.copytree(world["rm"], tmp_path / "rm")
    elsewhere = str(shutil.copy(pairs, tmp_path / "elsewhere"))
    record = {"stage": "reward_train", "args": {"pairs": [elsewhere]}}
    files.write_json(rm / "args.json", record)
    hashed = reports.fingerprint(rm)
    report, scored = measured(rm, pairs, tmp_path / "b")
    said = capsys.readouterr().out
    assert "25 of these 25 rows stand in a file that it was trained on" in " ".join(said.split())
    assert "pairs that models wrote" in said and reports.fingerprint(rm) == hashed
    assert report["drawn"]["value"] == pytest.approx(share_right(scored[:3]), abs=1e-6)
    assert report["drawn"]["n"] == 3
    part = tiny.write_rows(tmp_path / "part", [*rows[3:8], *tiny.pair_rows(30)[26:]])
    measured(rm, part, tmp_path / "b", "--overwrite")
    assert "5 of these 9 rows stand in a file that it was trained on" in printed(capsys)
