"""grpo_rubric.py: advantages and losses by numbers worked on paper (in float64, to 1e-7)."""

import json
import math
import random
import socket

import pytest
import torch

import common
import grpo_rubric
import judge
from parts import files, recipe, reward_models, rollouts, runs, sampling
from test_losses import close, on, t
from test_ppo import Spy, gap, gradients, near, read, trained
from tiny import (
    cases,
    error_of,
    pair_rows,
    read_json,
    table,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    words,
    write_rows,
)

NAN = math.nan
pytestmark = pytest.mark.usefixtures("quiet_process")


@cases("""
scale | first | second
center | 0.5 | [1, -1, 0, 0]
std | 0.8658754298 | [0.9999000100, -0.9999000100, 0, 0]
loo | 0.6666666667 | [1.5, -1.5, 0, 0]
""")
def test_group_advantages_golden(scale, first, second):
    """(1, 0, 0, 1): minus the mean ±½; ÷ the sample deviation .57735 + 1e-4 ±.8659; × 4/3, the mean
    of the others, ±⅔. NaN is no score: the rest is a group of three."""
    rewards = t([1, 0, 0, 1], [3, 1, 2, NAN], [1, 1, 1, 1])
    before = rewards.nan_to_num(99)
    advantages = grpo_rubric.group_advantages(rewards, scale)
    assert close(advantages, [[first, -first, -first, first], second, [0] * 4])
    assert torch.equal(rewards.nan_to_num(99), before)


@pytest.mark.parametrize("scale", grpo_rubric.SCALES)
def test_groups_without_signal(scale):
    rewards = t([0.1 + 0.2, 0.3, 0.3], [NAN, 7, NAN], [NAN, NAN, NAN], [5, 5, NAN])
    for given in (rewards, rewards.float()):
        assert not grpo_rubric.group_advantages(given, scale).any()


def test_gdpo_golden():
    """Weights ¾ and ¼. Group 1: (1, 0) and (0, 10), ±.5/(.70711 + 1e-4) = ±.7070068 and ∓.7070968:
    ¾·.7070068 − ¼·.7070968 = .3534809. Group 2: (1, 1) says nothing, (0, 4) gives ∓¼·.7070818. Over
    the deviation of the four, .3226934 + 1e-4: 1.0950686, .5476272. An answer that lacks a reward
    is in no mean. Summed first, the first group's sign would turn."""
    rewards = torch.stack([t([1, 0, NAN], [1, 1, 9]), t([0, 10, 7], [0, 4, NAN])])
    expected = t([1.0950686, -1.0950686, 0], [-0.5476272, 0.5476272, 0])
    advantages = grpo_rubric.gdpo_advantages(rewards, [0.75, 0.25])
    assert close(advantages, expected, 1e-6) and not advantages[:, 2].any()
    whole = grpo_rubric.gdpo_advantages(rewards[:, :, :2], [0.75, 0.25])
    assert close(whole, expected[:, :2], 1e-6)
    assert not grpo_rubric.gdpo_advantages(rewards[:, :, 2:], [0.75, 0.25]).any()


def test_gdpo_normalises_each_part():
    """The length penalty is one more part of weight 1: GDPO's are ±.7071·(.75 − .25 + 1) = ±1.0607
    over 1.5. Other scales add it to the sum: ±(.75 − (.125 − .25))/2."""
    parts = {"rubric": [1.0, 0.0], "ruler": [0.0, 0.5], "overlong": [0.0, -0.25]}
    b = {"parts": parts, "rewards": rollouts.weighted_sums(parts, {"rubric": 0.75, "ruler": 0.25})}
    flags = "--group-size 2 --groups-per-batch 1 --reward rubric:3 --reward ruler --scale"
    for scale, expected in (("gdpo", 0.7071), ("center", 0.4375)):
        args = grpo_rubric.parse_args([*flags.split(), scale])
        rewards, advantages = grpo_rubric.advantages_of(args, b)
        assert rewards.tolist() == [[0.75, 0.125]]
        assert close(advantages, t([expected, -expected]), 3e-4)
    assert grpo_rubric.by_group([None, 0.1], 2)[0].isnan().tolist() == [True, False]


NANS = [NAN] * 3
MASK = on([1, 1, 1], [1, 1, 0], [0, 0, 0])
LOGPS, OLD = t([-1, -1, -1], [-2, -0.5, NAN], NANS), t([-1.5, -0.5, -1], [-2, -1, NAN], NANS)
REF, A = t([-1.2, -1, -1.5], [-2, -0.8, NAN], NANS), t(1, -1, 1)


@cases("""
expected | options
-0.0475618778 | {}
0.1810918744 | {"aggregation": "sequence"}
-0.0198174491 | {"aggregation": "fixed", "max_tokens": 4}
-0.0434676714 | {"beta": 0.1}
0.1420127083 | {"level": "sequence", "aggregation": "sequence"}
0.1459853626 | {"level": "sequence", "aggregation": "sequence", "beta": 0.1}
""")
def test_grpo_loss_golden(expected, options):
    """Ratios (e^½, e^−½, 1), A = 1, clipped at 1.28 above only: −1.28 − .6065 − 1; (1, e^½), A =
    −1: 1 + 1.6487. Over 5 tokens, as a mean of two answers, or over 3·4 places. Per answer e^0 and
    e^¼; the KL keeps its token's ratio."""
    loss, _ = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK, REF, **options)
    assert loss.ndim == 0 and loss.item() == pytest.approx(expected, abs=1e-7)


def test_sums_for_the_log():
    """Ratios 2·e^½ + e^−½ + 2, k3 against old 2·(e^½ − 1.5) + e^−½ − .5; against the reference d =
    −.2, 0, −.5, 0, −.3: k1 = 1, k3 = Σ e^d − 1 − d."""
    columns = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK, REF, beta=0.1)[1]
    expected = {"clip_frac": 1, "ratio/mean": 5.9039732011, "approx_kl": 0.4039732011}
    expected |= {"kl/token": 1, "kl/k3": 0.1660796335}
    sums = {key: column.sum().item() for key, column in columns.items()}
    assert sums == pytest.approx(expected, abs=1e-7)
    assert not any(column[~MASK].any() for column in columns.values())


def test_clip_case_by_case():
    """(ratio 1.5, A 1) and (.5, −1) are clipped, gradient exactly 0; (1.5, −1), (.5, 1), (6, −1)
    pull back, the last one without a limit."""
    logps = t([1.5], [0.5], [1.5], [0.5], [6]).log().requires_grad_()
    mask, advantages = on(*[[1]] * 5), t(1, -1, -1, 1, -1)
    losses, columns = grpo_rubric.token_losses(logps, logps.detach() * 0, advantages, mask)
    losses.sum().backward()
    assert close(losses.detach()[:, 0], [-1.28, 0.8, 1.5, -0.5, 6])
    assert columns["clip_frac"][:, 0].tolist() == [True, True, False, False, False]
    assert logps.grad[:, 0].tolist() == pytest.approx([0, 0, 1.5, -0.5, 6])
    assert not logps.grad[:2].any()


def test_recipe_names(capsys):
    rows = table("""
        model_name | some/model | model | meta-llama/Llama-3.1-8B
        lora_rank | 16 | lora_rank | 32
        data_path | other.json | data | x.json
        train_ratio | 0.7 | train_ratio | 0.9
        data_seed | 7 | data_seed | 42
        group_size | 4 | group_size | 8
        groups_per_batch | 16 | groups_per_batch | 32
        learning_rate | 0.0001 | lr | 4e-05
        max_tokens | 512 | max_new_tokens | 2048
        temperature | 0.7 | temperature | 1.0
        kl_penalty_coef | 0.05 | beta | 0.0
        num_substeps | 2 | num_substeps | 1
        judge_model | qwen3 | judge_model | gpt-5-mini
        judge_temperature | 0.3 | judge_temperature | None
        judge_max_retries | 5 | judge_max_retries | 3
        log_path | runs/mine | out | runs/grpo-Llama-3.1-8B-x
        wandb_project | hiring | wandb_project | None
        eval_every | 3 | eval_every | 10
        save_every | 9 | save_every | 20
        system_message | Brief. | system | None
        load_checkpoint_path | runs/before | model | meta-llama/Llama-3.1-8B
    """)  # its name, a value, where it must arrive, and the recipe's default
    args = vars(grpo_rubric.parse_args([f"{name}={value}" for name, value, *_ in rows]))
    for _, value, arrives, _ in rows[1:]:  # load_checkpoint_path wins over model_name
        assert args[arrives] == value
    assert "the line leaves out: \n" in capsys.readouterr().out
    args = vars(grpo_rubric.parse_args(["data_path=x.json"]))
    for *_, arrives, default in rows:
        assert args[arrives] == default
    assert "leaves out: model_name, lora_rank, train_ratio, data_seed" in capsys.readouterr().out
    names = {row[0] for row in rows} | {"behavior_if_log_dir_exists", "wandb_name"}
    assert names == set(recipe.RECIPE)


LINES = """
group_size=4 | data=data/rubrics.json out=runs/grpo-Llama-3.1-8B-rubrics lora_rank=32
model_name=Qwen/Qwen3-8B learning_rate=4e-5 | data=data/rubrics.json lr=4e-05 judge_temperature=None
group_size=4 --data a/b.json --groups-per-batch 5
| data=a/b.json group_size=4 groups_per_batch=5 out=runs/grpo-Llama-3.1-8B-b lora_rank=32
data_path=x.json judge_base_url=http://localhost:1/v1 dry_run=true load_checkpoint_path=None
| judge_base_url=http://localhost:1/v1 dry_run=True model=meta-llama/Llama-3.1-8B
data_path=x.json allow_code_execution=false wandb_project=none | allow_code_execution=False
--system role=recruiter --batch-size 16 --num-substeps 3 | lora_rank=0 groups_per_batch=6
--seed 1 | judge_model=gpt-5-mini judge_max_retries=3 judge_concurrency=16 judge_passes=1 group_size=8 temperature=1.0
--seed 1 | groups_per_batch=8 num_substeps=1 max_new_tokens=96 train_ratio=None data_seed=42
--seed 1 | reward={'rubric':1.0} scale=center loss=clip overlong=keep restore=None eval_temperature=0.0
--loss gspo | level=sequence aggregation=sequence
--loss gspo --aggregation token | aggregation=token
--reward rubric:3 --reward ruler | reward={'rubric':0.75,'ruler':0.25}
data_path=x.json log_path=RUN behavior_if_log_dir_exists=delete | overwrite=True resume=False
data_path=x.json log_path=RUN behavior_if_log_dir_exists=resume | overwrite=False resume=True
data_path=x.json log_path=NEW behavior_if_log_dir_exists=resume | overwrite=False resume=False
data_path=x.json log_path=RUN behavior_if_log_dir_exists=raise | overwrite=False resume=False
"""


@pytest.mark.parametrize("row", LINES.strip().replace("\n|", " |").splitlines())
def test_pairs_and_flags_mix(row, tmp_path, capsys):
    (tmp_path / "args.json").touch()
    line, expected = row.replace("RUN", str(tmp_path)).split(" | ")
    args = vars(grpo_rubric.parse_args(line.split()))
    for name, _, value in (pair.partition("=") for pair in expected.split()):
        assert str(args[name]).replace(" ", "") == value
    told = "--loss gspo: GSPO goes with --aggregation sequence\n"
    assert (told in capsys.readouterr().out) == (line == "--loss gspo --aggregation token")
    assert grpo_rubric.CLIP["sequence"] == (3e-4, 4e-4)


@cases("""
line | message
data_path=x.json group_sizes=4 | unrecognized argument --group-sizes, did you mean --group-size
data_path=x.json judge_bas_url=u | did you mean --judge-base-url
data_path=x.json behavior_if_log_dir_exists=append | expected delete, resume, raise or ask
data_path=x.json dry_run=maybe | dry_run=maybe: expected true or false
--group-size 1 | --group-size: '1' given, expected a whole number at least 2
--num-substeps 9 | --num-substeps 9: more than the 8 groups
--batch-size 30 | --batch-size 30: 1 × 30 answers are not whole groups of 8
--max-length 96 | --max-length 96: leaves no room for a prompt
--reward rubrics | --reward rubrics: expected NAME or NAME:WEIGHT
--reward rubric:0 | weight above 0
--judge-passes 2 | only --reward ruler compares answers
--reward rubric --reward rubric | each name once
--reward model | --reward-model FOLDER go together
--reward-model x | --reward-model FOLDER go together
--loss cispo | --loss: invalid choice: 'cispo'
--scale batch | --scale: invalid choice: 'batch'
--data ROWS --train-ratio 0.1 | no row to train on; raise --train-ratio
--data ROWS --train-ratio 0.99 --reward checks | line 5 has no check that earns points; use --reward rubric
""")
def test_bad_lines(line, message, tmp_path):
    rows = numbered(6)
    rows[4]["rubrics"] = ["Is polite."]
    line = line.replace("ROWS", write_rows(tmp_path / "r.jsonl", rows))
    assert message in error_of(lambda: grpo_rubric.load_data(grpo_rubric.parse_args(line.split())))


def numbered(n, **more):
    check = {"rubrics": [{"check": "punctuation:no_comma"}]}
    return [{"task_id": f"t{i}", "prompt": f"Ask {i}.", **check, **more} for i in range(n)]


DRY = """
--steps 10 --eval-every 5
plan       10 steps of 2 prompts × 3 answers = 6 answers = 1 × 6 per optimiser step; validation by
the preflight: 6 calls, about 1756 tokens in, 720 out, 0.0032 USD
the canaries: 12 calls, about 2124 tokens in, 1440 out, 0.0050 USD
a step: 6 calls, about 1756 tokens in, 720 out, 0.0032 USD
a validation: 2 calls, about 585 tokens in, 240 out, 0.0011 USD
a test: 2 calls, about 585 tokens in, 240 out, 0.0011 USD
the run of 10 steps: 88 calls, about 24365 tokens in, 10560 out, 0.0455 USD

--epochs 2 --eval-every 0 --num-substeps 2 --max-new-tokens 100
plan       8 steps of 2 prompts × 3 answers = 6 answers = 2 × 3 per optimiser step; validation by
the preflight: 6 calls, about 1786 tokens in, 720 out, 0.0032 USD
the canaries: 12 calls, about 2124 tokens in, 1440 out, 0.0050 USD
a step: 6 calls, about 1786 tokens in, 720 out, 0.0032 USD
a validation: 2 calls, about 595 tokens in, 240 out, 0.0011 USD
a test: 2 calls, about 595 tokens in, 240 out, 0.0011 USD
the run of 8 steps: 74 calls, about 20578 tokens in, 8880 out, 0.0383 USD

--steps 1 --reward ruler --judge-passes 2 --val-metric checks --groups-per-batch 9
plan       1 steps of 8 prompts × 3 answers = 24 answers = 1 × 24 per optimiser step; validation by
the preflight: 4 calls, about 2778 tokens in, 800 out, 0.0044 USD
the canaries: 12 calls, about 2124 tokens in, 1440 out, 0.0050 USD
a step: 16 calls, about 11114 tokens in, 3200 out, 0.0175 USD
a validation: 0 calls, about 0 tokens in, 0 out, 0.0000 USD
a test: 0 calls, about 0 tokens in, 0 out, 0.0000 USD
the run of 1 steps: 32 calls, about 16016 tokens in, 5440 out, 0.0269 USD
"""


@pytest.mark.parametrize("case", DRY.strip().split("\n\n"))
def test_dry_run_touches_neither_network_nor_model(case, tmp_path, monkeypatch, capsys):
    """A call per answer (per group and pass with RULER) and per held-out prompt, at the start and
    every --eval-every steps; six canaries for each of two prompts, asked once; the test at the start
    and at the end; two groups before step one: 6 + 12 + 10·6 + 3·2 + 2·2 = 88; a reply is 50 per criterion + 20."""
    touched = (socket.socket, "connect"), (grpo_rubric, "load_models"), (common, "load_tokenizer")
    for home, name in touched:
        monkeypatch.setattr(home, name, lambda *a, **k: pytest.fail("touched network or model"))
    flags, *expected = case.splitlines()
    data = write_rows(tmp_path / "r.jsonl", numbered(12, rubrics=["Is polite.", "Is short."]))
    line = f"--data {data} --train-ratio 0.7 --model no/such --out {tmp_path}/run --dry-run"
    line += f" --group-size 3 --groups-per-batch 2 --judge-price 1,2 {flags}"
    grpo_rubric.main(line.split())
    printed = capsys.readouterr().out.splitlines()[-7:]
    assert [printed[0].rpartition(" ")[0], *printed[1:]] == expected
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "line",
    [
        "model_name=data/tiny-base",
        "group_size=4 max_tokens=64",
        "data_path=data/rubrics_judge.json judge_temperature=0.0",
        "train_ratio=0.8 data_seed=7",
        "load_checkpoint_path=data/tiny-base lora_rank=8 kl_penalty_coef=0.01 num_substeps=2",
    ],
)
def test_lines_of_the_recipe_run(line, capsys):  # fmt: skip
    """Without data_path on the bundled rubrics, whose own split rules; what is not sent is said."""
    assert grpo_rubric.main([*line.split(), "dry_run=true"]) is None
    out = capsys.readouterr().out
    assert "recipe: its defaults hold for what the line leaves out: " in out and "a step: " in out
    assert ("judge_temperature=0.0 is not sent unless" in out) == ("judge_temp" not in line)
    bundled = "data_path" not in line
    own_split = "--train-ratio has no effect: data/rubrics.json has a split of its own"
    for told in (own_split, "training 300  validation 50  test 60"):
        assert (told in out) == bundled


def splits_of(path, *flags):
    args = grpo_rubric.parse_args(words("--data", path, *flags))
    return [[row.task_id for row in part] for part in grpo_rubric.load_data(args)]


def test_split_is_the_recipes(tmp_path):
    """random.Random(seed) shuffles; the first int(n·ratio) train, half of the rest validate."""
    for n, ratio, seed in ((20, 0.8, 42), (23, 0.9, 7), (10, 0.55, 0)):
        rows, file = [f"t{i}" for i in range(n)], write_rows(tmp_path / "r.jsonl", numbered(n))
        random.Random(seed).shuffle(rows)
        cut = int(n * ratio)
        middle = cut + (n - cut) // 2
        found = splits_of(file, f"--train-ratio {ratio} --data-seed {seed}")
        assert found == [rows[:cut], rows[cut:middle], rows[middle:]]


def test_a_split_of_the_users_own_stays(tmp_path, capsys):
    file, rows = tmp_path / "r.json", numbered(9)
    rows[6]["prompt"], rows[7]["prompt"] = " ASK\n 1 .", [{"role": "user", "content": "ask2."}]
    file.write_text(json.dumps({"train": rows[:5], "validation": rows[5:7], "test": rows[7:]}))
    assert splits_of(file) == [["t0", "t1", "t2", "t3", "t4"], ["t5"], ["t8"]]
    told = "training 5  validation 1  test 1  prompts also in training, left out: 2"
    assert told in capsys.readouterr().out


# ---- one rollout, one update ----

LETTER = {"letter": "s", "let_frequency": 1, "let_relation": "at least"}
CHECKS = [
    {"check": "text:max_chars", "max_chars": 9},
    {"check": "punctuation:no_comma"},
    {"check": "regex:match", "pattern": "[aeiou]", "weight": 2, "name": "vowel"},
    {"check": "keywords:letter_frequency", **LETTER},
]
PROMPTS = ["sql", "Assess this: python.", *(r["prompt"] for r in pair_rows(10))]  # 3 to 60 tokens


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return make_graded(tmp_path_factory.mktemp("graded"))


def make_graded(folder):
    rows = [{"prompt": p, "rubrics": CHECKS} for p in PROMPTS]
    data = folder / "rubrics.json"
    data.write_text(json.dumps({"train": rows[:8], "validation": rows[8:10], "test": rows[10:]}))
    graded = {family: tiny_model(family, folder) for family in ("gpt2", "llama")}
    graded["reward"] = tiny_reward_model("llama", folder / "reward", seed=5)
    return graded | {"data": str(data), "rows": judge.read_rubrics(data).splits["train"]}


def opened(graded, *flags, reference=None):
    """(args, run, reference, b, advantages, in_loss) before the first step."""
    small = """--max-new-tokens 7 --out runs/none --lr 0.001 --micro-tokens 4096 --warmup 0
        --group-size 4 --groups-per-batch 4 --model"""
    args = grpo_rubric.parse_args(words(small, graded["llama"], "--data", graded["data"], *flags))
    run = runs.Run("grpo_rubric", args, [], (), ())
    policy, own, tokenizer = grpo_rubric.load_models(args, run)
    run.state, run.planned, run.step = {"policy": policy}, 5, 1
    run.start(policy, tokenizer, args.lr)
    if reference:  # one that is not the policy, or the KL has no gradient
        own = common.load_policy(graded[reference], trainable=False)
    b = grpo_rubric.rollout(args, run.model, tokenizer, graded["rows"][:4], 3)
    generator = torch.Generator().manual_seed(7)
    cut = b["mask"][5].nonzero()[2:, 0]
    b["mask"][5, cut] = b["attention_mask"][5, cut] = False
    noise = torch.randn(b["logps"].shape, generator=generator) / 3
    b["logps"] = (b["logps"] + noise) * b["mask"]
    advantages = grpo_rubric.group_advantages(torch.rand(4, 4, generator=generator)).view(-1)
    advantages[3:8] = 0.0
    return args, run, own, b, advantages, torch.ones(16, dtype=torch.bool)


@cases("""
flags

--aggregation sequence --num-substeps 2 --beta 0.1
--aggregation fixed --loss gspo --num-substeps 2
""")
def test_gradient_for_every_cut(flags, graded, monkeypatch):
    """E2. Sums are divided by the count of the whole optimiser step (the HF accumulation bug;
    trl#5619); what is logged are means over all tokens, not over micro-batches."""
    args, run, *made = opened(graded, flags, reference="gpt2" if "--beta" in flags else None)
    real, calls, seen = grpo_rubric.grpo_loss, [], []
    spy = lambda *given: calls.append((len(given[0]), real(*given))) or calls[-1][1]  # noqa: E731
    monkeypatch.setattr(grpo_rubric, "grpo_loss", spy)
    for args.micro_tokens in (10**6, 200, 1):
        calls.clear()
        seen.append((*gradients(monkeypatch, grpo_rubric.update, args, run, *made), list(calls)))
        (whole, logged, one), (vectors, row, cuts) = seen[0], seen[-1]
        assert gap(vectors, whole) < 5e-6
        numbers = [{k: x for k, x in each.items() if x is not None} for each in (row, logged)]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-5, abs=1e-6)
    assert len(whole) == len(one) == args.num_substeps
    assert len(one) < len(seen[1][2]) < len(cuts) and {n for n, _ in cuts} == {1}
    if args.beta:
        n = int(made[1]["mask"].sum())
        for key in ("kl/token", "kl/k3", "clip_frac", "ratio/mean", "approx_kl"):
            total = sum(columns[key].sum().item() for _, (_, columns) in one)
            assert logged[key] == pytest.approx(total / n)
        assert logged["kl/ref"] == pytest.approx(logged["kl/token"] * n / 16)
        assert 0 < logged["clip_frac"] < 1 and logged["kl/k3"] > 0.1


@pytest.mark.parametrize("aggregation", grpo_rubric.AGGREGATIONS)
def test_answers_without_advantage_cost_no_forward(aggregation, graded, monkeypatch):
    flags = f"--aggregation {aggregation} --temperature 0.7"
    args, run, _, b, advantages, in_loss = opened(graded, flags)
    in_loss[[2, 9]], advantages[[2, 9]] = False, 0.0
    made = b, advantages, in_loss
    plain, row = gradients(monkeypatch, grpo_rubric.update, args, run, None, *made)
    rows = b["ids"][in_loss], b["attention_mask"][in_loss], b["mask"][in_loss]
    logps, entropies = common.token_logps(run.model, *rows, 0.7, with_entropy=True)
    given = logps, logps.detach(), advantages[in_loss], rows[2]
    how = dict(aggregation=aggregation, max_tokens=args.max_new_tokens)
    loss, _ = grpo_rubric.grpo_loss(*given, **how)
    found = torch.autograd.grad(loss, list(run.model.parameters()), allow_unused=True)
    expected = torch.cat([g.flatten() for g in found if g is not None])
    assert gap(plain, [expected]) < 5e-6
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert row["forwarded"] == 9
    b["ids"][[2, 9]] = b["ids"][[0, 1]].flip(1)
    again, _ = gradients(monkeypatch, grpo_rubric.update, args, run, None, *made)
    assert torch.equal(again[0], plain[0])
    args.beta = 1e-300  # underflows to 0 in the loss, and forwards all fourteen
    row = gradients(monkeypatch, grpo_rubric.update, args, run, run.model, *made)[1]
    assert row["forwarded"] == 14
    assert row["entropy"] == pytest.approx(entropies[rows[2]].mean().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rounding_moves_no_ratio(dtype, graded, monkeypatch):
    """Half precision: with several substeps π_old is a forward in the update's own micro-batches,
    so the first ratios are 1 to the bit, where GSPO clips at 3e-4. In fp32 the sampler's log-probs
    are π_old, without a forward."""
    flags = f"--dtype {dtype} --num-substeps 2 --loss gspo --lr 1e-2 --micro-tokens 150"
    args, run, _, b, _, in_loss = opened(graded, flags)
    drawn, half = b["logps"].clone(), dtype != "fp32"
    losses, forwards = Spy(monkeypatch, grpo_rubric, "grpo_loss"), []
    real = rollouts.token_logps
    spy = lambda *a, **k: forwards.append(torch.is_grad_enabled()) or real(*a, **k)  # noqa: E731
    monkeypatch.setattr(rollouts, "token_logps", spy)
    row = grpo_rubric.update(args, run, None, b, torch.tensor([1.0, -1.0] * 8), in_loss)
    assert forwards.count(True) > 3 and forwards.count(False) == forwards.count(True) * half
    first = [call for call in losses.calls[: len(losses.calls) // 2] if half]
    assert all(torch.equal(logps, old) for logps, old, *_ in first)
    assert torch.equal(b.get("sampler_logps", b["logps"]), drawn)
    if half:
        assert (b["logps"] - drawn)[b["mask"]].abs().max() > 0.3, "the noise of `opened`"
    assert row["sample_gap"] > 0.3


def test_nothing_to_learn_from(graded):
    """No step at all: AdamW moves the weights by its moments at a gradient of 0."""
    args, run, _, b, advantages, in_loss = opened(graded, "--num-substeps 2")
    advantages[4:] = 0.0
    assert grpo_rubric.update(args, run, None, b, advantages, in_loss)["updates"] == 1
    before = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
    for a, scored in ((advantages * 0, in_loss), (advantages, ~in_loss)):
        row = grpo_rubric.update(args, run, None, b, a, scored)
        assert row["updates"] == row["forwarded"] == 0
        assert {row[k] for k in ("loss", "grad_norm", "ratio/mean", "entropy", "kl/ref")} == {None}
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(run.model.parameters()))
    made = opened(graded, "--num-substeps 2 --beta 0.1", reference="gpt2")
    row = grpo_rubric.update(*made[:4], made[4] * 0, made[5])
    assert (row["updates"], row["forwarded"]) == (2, 16), "with a KL each answer has a gradient"


def test_substeps_are_of_whole_groups(graded, monkeypatch):
    args, run, _, b, _, in_loss = opened(graded, "--num-substeps 3 --lr 1e-2")
    given = args, run, None, b, torch.tensor([1.0, -1.0] * 8), in_loss
    with torch.no_grad():  # as sampled
        b["logps"] = common.token_logps(run.model, b["ids"], b["attention_mask"], b["mask"])
    losses, cuts = Spy(monkeypatch, grpo_rubric, "grpo_loss"), []
    for run.step in (1, 5):
        batches = Spy(monkeypatch, run, "micro_batches")
        row = grpo_rubric.update(*given)
        cuts.append([rows.tolist() for rows, _ in batches.calls])
        if run.step == 1:
            gaps = [(new - old).abs().max() for new, old, *_ in losses.calls]
            assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3
            assert row["updates"] == 3 and row["sample_gap"] < 1e-5
    assert [len(rows) for rows in cuts[0]] == [8, 4, 4] and cuts[0] != cuts[1]
    groups = [rows[i : i + 4] for rows in cuts[0] for i in range(0, len(rows), 4)]
    assert sorted(groups) == [list(range(i, i + 4)) for i in (0, 4, 8, 12)]


def test_the_row_of_a_rollout_by_hand():
    rewards = t([1, 0, 0, 0], [1, 1, NAN, 1], [0, 0, 0, 0], [NAN, 1, NAN, NAN])
    advantages = grpo_rubric.group_advantages(rewards)
    expected = {
        "reward/mean": 5 / 12, "reward/std": 0.5149, "reward/unscored_frac": 0.25,
        "reward/frac_mixed": 1 / 3, "reward/frac_all_good": 1 / 3, "reward/frac_all_bad": 1 / 3,
        "groups/scored": 3, "groups/skipped": 3, "advantage/abs_mean": 1.5 / 16,
    }  # fmt: skip
    row = rollouts.group_row(rewards, advantages)
    assert row == pytest.approx(expected, abs=1e-4)
    lost = rollouts.group_row(rewards * NAN, advantages * 0)
    nothing = dict.fromkeys(expected) | {"groups/scored": 0, "groups/skipped": 4}
    assert lost == nothing | {"reward/unscored_frac": 1, "advantage/abs_mean": 0}


def test_lora_reference_is_the_start(graded, monkeypatch):
    args, run, reference, *made = opened(graded, "--lora-rank 4 --beta 0.3")
    assert reference is run.model
    for name, weight in run.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    frozen = common.load_policy(graded["llama"], trainable=False)
    given = monkeypatch, grpo_rubric.update, args, run
    (own, row), (other, expected) = (gradients(*given, x, *made) for x in (reference, frozen))
    assert gap(own, other) < 1e-5
    assert row == pytest.approx(expected, rel=1e-4, abs=1e-6) and row["kl/k3"] > 0.01
    assert opened(graded)[2] is None, "beta 0 loads no reference"
    assert not any(w.requires_grad for w in opened(graded, "--beta 0.3")[2].parameters())


# ---- whole runs ----


def run(graded, out, *flags):
    argv = "--steps 2 --group-size 4 --groups-per-batch 4 --max-new-tokens 6 --patience 0 --model"
    argv = words(argv, graded["llama"], "--data", graded["data"], "--out", out, *flags)
    assert grpo_rubric.main(argv) in (None, 0)
    return read(out / "metrics.jsonl")


def kept_of(out, split="train", step=None):
    rows = [r for r in read(out / "rollouts.jsonl") if r["split"] == split]
    return [r for r in rows if step in (None, r["step"])]


def test_one_group_as_a_table(capsys):
    rubrics = [{"criterion": "Names a gap.", "weight": 2}, {"check": "punctuation:no_comma"}]
    row, grades = judge.read_row({"prompt": "p", "rubrics": rubrics}), []
    for a, b in ((True, False), (None, True), (None, None)):
        criteria = [{"id": 1, "verdict": a}, {"id": 2, "verdict": b}]
        grades.append(judge.Grade(criteria=criteria))
    grpo_rubric.show_group(row, grades, t(2 / 3, 1 / 3, NAN), t(1 / 6, -1 / 6, 0))
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "1. Names a gap. × 2 yes – –",
        "2. punctuation:no_comma × 1 no yes –",
        "reward 0.67 0.33 –",
        "advantage +0.17 -0.17 +0.00",
    ]


def test_what_a_run_leaves(graded, tmp_path, capsys):
    out, score = tmp_path / "run", reward_models.reward_function(graded["reward"])
    flags = "--reward checks:3 --reward model --val-metric model --eval-every 2 --temperature 0.7"
    flags += f" --reward-model {graded['reward']} --beta 0.1"
    rows, printed = run(graded, out, flags), capsys.readouterr().out
    assert "gap between the rollout's log-probs and teacher forcing: 0.0" in printed
    assert "3. vowel × 2 " in printed and "validation by model" in printed
    kept, group, first = kept_of(out), kept_of(out, step=1), trained(rows)[0]
    places = [(r["step"], r["group"], r["sample"]) for r in kept]
    assert places == [(s, p, g) for s in (1, 2) for p in range(4) for g in range(4)]
    talks = [r for r in kept if isinstance(r["prompt"], list)]
    scores = score([r["prompt"] for r in talks], [r["answer"] for r in talks])
    found = [r["components"]["model"] for r in talks]
    assert len(talks) > 4 and found == pytest.approx(scores, abs=1e-4)
    for row in kept:
        parts, verdicts = row["components"], [c["credit"] for c in row["criteria"]]
        met = sum(w * bool(v) for w, v in zip((1, 1, 2, 1), verdicts, strict=True)) / 5
        assert parts["checks"] == pytest.approx(met)
        assert row["reward"] == pytest.approx(0.75 * met + 0.25 * parts["model"])
    rewards = torch.tensor([r["reward"] for r in group])
    passed = [c["credit"] for r in group for c in r["criteria"]]
    expected = {f"reward/{x}": sum(r["components"][x] for r in group) / 16 for x in parts}
    expected |= {"reward/mean": rewards.mean().item(), "ratio/mean": 1}
    expected |= {"pass_rate": sum(passed) / 64, "pass_rate/vowel": sum(passed[2::4]) / 16}
    expected |= {"clip_frac": 0, "kl/coef": 0.1, "sample_gap": 0, "kl/ref": 0}
    assert near(first, expected, abs=5e-5)
    assert first["reward/frac_perfect"] is None, "a reward model's score has no maximum"
    advantages = grpo_rubric.group_advantages(rewards.view(4, 4)).flatten().tolist()
    assert [r["advantage"] for r in group] == pytest.approx(advantages, abs=1e-6)
    for row in (row for row in rows if "val/score" in row):
        part = kept_of(out, "validation", row["step"])
        assert row["val/score"] == pytest.approx(sum(r["components"]["model"] for r in part) / 2)
        assert [r["prompt"] for r in part] == PROMPTS[8:10]
    summary = read_json(out / "summary.json")
    before = summary["test_before"]
    assert before["n"] == summary["test_after"]["n"] == 2
    assert before["low"] <= before["score"] <= before["high"]
    assert summary["stop_reason"] == "max_steps" and summary["last_step"] == 2
    assert f"test before: {before['score']:.3f} [{before['low']:.3f}, " in printed
    assert f"next: python watch.py {out}" in printed


def test_each_step_has_its_own_prompts_and_draws(graded, tmp_path, monkeypatch):
    kept, spy = {}, Spy(monkeypatch, grpo_rubric, "rollout")
    for every in (1, 0):
        out = tmp_path / str(every)
        flags = f"--steps 4 --groups-per-batch 3 --restore last --eval-every {every}"
        rows = trained(run(graded, out, flags))
        kept[every] = kept_of(out)
    assert kept[0] == kept[1]
    assert [call[4] for call in spy.calls] == 2 * [0, 1, 2, 3, 4]  # of the preflight, then a step
    asked = [[r["task_id"] for r in kept[0] if r["step"] == s][::4] for s in (1, 2, 3)]
    assert [len(set(tasks)) for tasks in asked] == [3, 3, 2] and len(set(sum(asked, []))) == 8
    assert len({r["answer"] for r in kept[0]}) > 35
    assert [(row["epoch"], row["episodes"]) for row in rows] == [(0, 12), (0, 12), (0, 8), (1, 12)]


def test_a_lost_grade_is_no_zero(graded, tmp_path, monkeypatch):
    lost, real = (1, 4, 5, 6, 9), judge.grade_answers
    scores = [None if i in (6, 9) else i / 16 for i in range(16)]

    def grade(rows, answers, *rest, **more):
        grades = real(rows, answers, *rest, **more)
        for i in lost[:4] if len(answers) == 16 else ():
            grades[i].score, grades[i].error = None, "no reply"
        return grades

    monkeypatch.setattr(judge, "grade_answers", grade)
    model = lambda prompts, texts: scores[: len(texts)]  # noqa: E731
    monkeypatch.setattr(reward_models, "reward_function", lambda *a, **k: model)
    spy = Spy(monkeypatch, grpo_rubric, "update")
    flags = f"--reward rubric --reward model --reward-model {graded['reward']}"
    row = trained(run(graded, tmp_path / "run", flags, "--overlong penalty --steps 1"))[0]
    kept = kept_of(tmp_path / "run")
    rewards = [r["reward"] for r in kept]
    assert tuple(i for i, r in enumerate(rewards) if r is None) == lost
    expected = {"reward/mean": sum(filter(None, rewards)) / 11, "reward/unscored_frac": 5 / 16}
    expected |= {"reward/lost/rubric": 4, "reward/lost/model": 2}
    assert near(row, expected, abs=1e-6)
    assert row["groups/scored"] == 3
    advantages, in_loss = spy.calls[0][4:6]
    assert in_loss.tolist() == [i not in (*lost, 7) for i in range(16)]
    three = torch.tensor([rewards[i] + kept[i]["components"]["overlong"] for i in (0, 2, 3)])
    assert close(advantages[[0, 2, 3]], three - three.mean(), 1e-6)
    assert not advantages[[*lost, 7]].any()
    labels = [c["criterion"] for c in kept[0]["criteria"]]  # each verdict with its own criterion
    assert labels == [CHECKS[i].get("name", CHECKS[i]["check"]) for i in range(4)]


@pytest.mark.parametrize("mode", ["keep", "mask", "penalty"])
def test_overlong(mode, graded, tmp_path, monkeypatch):
    spy = Spy(monkeypatch, grpo_rubric, "update")
    penalties = Spy(monkeypatch, grpo_rubric, "overlong_penalty")
    flags = f"--overlong {mode} --steps 1 --max-new-tokens 16 --temperature 2"
    row = trained(run(graded, tmp_path / "run", flags))[0]
    kept = kept_of(tmp_path / "run")
    finished, length = ([r[k] for r in kept] for k in ("finished", "tokens"))
    assert 0 < sum(finished) < 16 and max(length) == 16
    advantages, in_loss = spy.calls[0][4:6]
    assert in_loss.tolist() == (finished if mode == "mask" else [True] * 16)
    shaped = rewards = torch.tensor([r["reward"] for r in kept])
    if mode == "penalty":
        penalty = [-max(0, n - 14) / 2 for n in length]
        assert {call[1:] for call in penalties.calls} == {(16, 2)}
        shaped = rewards + torch.tensor(penalty)
        assert row["reward/overlong"] == pytest.approx(sum(penalty) / 16)
        assert [r["components"]["overlong"] for r in kept] == penalty
    assert close(advantages, grpo_rubric.group_advantages(shaped.view(4, 4)).view(-1), 1e-6)
    assert row["reward/mean"] == pytest.approx(rewards.mean().item(), abs=1e-6)
    assert row["reward/frac_perfect"] == (rewards > 0.999).float().mean()


def test_checks_alone_ask_nobody(graded, tmp_path, monkeypatch):
    rows = [{"prompt": p, "rubrics": ["Is polite.", *CHECKS[:2]]} for p in PROMPTS]
    own = graded | {"data": write_rows(tmp_path / "r.jsonl", rows)}
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("asked the network"))
    spy = Spy(monkeypatch, grpo_rubric, "sample")
    run(own, tmp_path / "run", "--reward checks --system", "Be brief.", "--steps 1")
    assert {c["id"] for r in read(tmp_path / "run/rollouts.jsonl") for c in r["criteria"]} == {2, 3}
    asked = [prompt for call in spy.calls for prompt in call[2]]
    assert len(asked) > 8 and {p[0]["content"] for p in asked} == {"Be brief."}
    spy.calls.clear()
    assert "needs a judge" in error_of(run, own, tmp_path / "no")
    hides = tiny_model(
        "llama", tmp_path, tokenizer=tiny_tokenizer(template="{{ messages[-1].content }}")
    )
    flags = "--reward checks --model", hides, "--system", "Be brief."
    assert "--system: the chat template shows nothing" in error_of(
        run, own, tmp_path / "no", *flags
    )
    assert not (tmp_path / "no").exists()
    run(graded, tmp_path / "short", "--max-length 26 --steps 1")
    assert max(len(prompt) for call in spy.calls for prompt in call[2]) == 20


def test_the_model_is_saved_before_the_test_rows_are_answered(graded, tmp_path, monkeypatch):
    """A judge that dies at the last line cost the whole run."""
    out, real = tmp_path / "run", grpo_rubric.evaluate
    saved = []

    def evaluate(args, run, policy, graders, rows):
        saved.append(((out / "config.json").exists(), [row.prompt for row in rows]))
        if saved[-1][0]:
            raise files.UserError("the judge is gone")
        return real(args, run, policy, graders, rows)

    monkeypatch.setattr(grpo_rubric, "evaluate", evaluate)
    assert "the judge is gone" in error_of(run, graded, out)
    validation = [(False, PROMPTS[8:10])]
    assert saved == [*2 * validation, (True, PROMPTS[10:])], "start, step 2, then the test rows"
    assert common.load_policy(out) and not (out / "summary.json").exists()


@pytest.mark.parametrize("flags", ["", "--lora-rank 2", "--beta 0.1"])
def test_the_start_is_answered_by_the_start(flags, graded, tmp_path, monkeypatch):
    """With LoRA by the policy with its adapter off, without a second model; and the adapter is on
    again for the result. What --eval-temperature draws is graded; shown are greedy answers."""
    loads = Spy(monkeypatch, common, "load_policy")
    spy, out = Spy(monkeypatch, grpo_rubric, "evaluate"), tmp_path / "run"
    more = "--lr 0.1 --warmup 0 --schedule constant --restore last --max-new-tokens 12"
    rows_of_log = run(graded, out, flags, more, "--eval-temperature 1")
    assert [row["val/n"] for row in rows_of_log if "val/score" in row] == [2, 2]
    assert len(loads.calls) == 1 + ("lora" not in flags), "no second model, or one"
    args, opened_run, *_, graders, rows = spy.calls[-1]
    summary = read_json(out / "summary.json")
    answers = []
    for name, folder in (("test_before", graded["llama"]), ("test_after", out)):
        policy = common.load_policy(folder, trainable=False)
        metrics, b = spy.real(args, opened_run, policy, graders, rows)
        assert summary[name]["score"] == pytest.approx(metrics["val/score"])
        assert summary[name]["length"] == metrics["val/length"] and summary[name]["n"] == 2
        answers.append(b["texts"])
    assert answers[0] != answers[1]
    shown = [row["answer"] for row in read(out / "samples.jsonl") if row["step"] == 2]
    greedy = sampling.sample(policy, opened_run.tokenizer, PROMPTS[8:10], 1, 12, temperature=0)
    graded_answers = [row["answer"] for row in kept_of(out, "validation", 2)]
    assert shown == greedy.texts != graded_answers


def test_of_a_small_file_more_is_held_out(tmp_path):
    """20 rows: two validated, and two steps were planned; the recipe's ratio stays the recipe's."""
    sizes = {}
    for n in (1, 20, 40, 200):
        file = write_rows(tmp_path / "r.jsonl", numbered(n))
        sizes[n] = [len(part) for part in splits_of(file)]
        recipe_split = grpo_rubric.load_data(grpo_rubric.parse_args([f"data_path={file}"]))
        assert len(recipe_split[0]) == max(1, int(0.9 * n))
    assert sizes == {1: [1, 0, 0], 20: [10, 5, 5], 40: [24, 8, 8], 200: [160, 20, 20]}
