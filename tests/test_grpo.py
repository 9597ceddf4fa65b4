"""grpo_rubric.py from the inside out: advantages and losses by numbers worked on paper, the recipe's command line, the
split, one update, whole runs with programmatic checks.

The goldens stand in float64 and hold to 1e-7. Resume stands in test_resume.py; where each form of the loss lands in
test_toy_world.py; TRL's numbers in test_trl_parity.py; a judge behind HTTP in test_grpo_judge.py.
"""

import json
import math
import random
import socket

import pytest
import torch

import common
import grpo_rubric
import judge
from parts import files, rollouts, runs
from test_losses import F64, close, on, t
from test_ppo import Spy, gap, gradients, read, trained
from tiny import pair_rows, tiny_model, tiny_reward_model, write_rows

NAN = math.nan
pytestmark = pytest.mark.usefixtures("quiet_process")


# ---- advantages ----


@pytest.mark.parametrize(
    "scale, first, second",
    [
        ("center", 0.5, [1, -1, 0, 0]),
        ("std", 0.8658754298, [0.9999000100, -0.9999000100, 0, 0]),
        ("loo", 0.6666666667, [1.5, -1.5, 0, 0]),
        ("batch", 0.6014607693, [1.2029215385, -1.2029215385, 0, 0]),
        ("maxrl", 1.0, [0.5, -0.5, 0, 0]),
    ],
)
def test_group_advantages_golden(scale, first, second):
    """(1, 0, 0, 1): minus the mean ±½; ÷ the sample deviation .57735 (+ 1e-4) ±.8659, where the population's would give
    ±.9998; times 4/3, the mean of the other three, ±⅔; ÷ .8312, the deviation of all eleven scores, the equal group's too,
    ±.6015; ÷ the group's own mean, ½ and 2, ±1 and ±½. NaN is no score, as is what `valid` rules out: the rest is a group of three, and the lost one gets exactly 0. The
    rewards, which are logged afterwards, are left as they were."""
    rewards = t([1, 0, 0, 1], [3, 1, 2, NAN], [1, 1, 1, 1])
    filled = rewards.nan_to_num(99)
    for given, valid in ((rewards, None), (filled, ~rewards.isnan())):
        found = grpo_rubric.group_advantages(given, scale, valid)
        assert close(found, [[first, -first, -first, first], second, [0] * 4])
        assert torch.equal(given.nan_to_num(99), filled)


@pytest.mark.parametrize("scale", grpo_rubric.SCALES)
def test_groups_without_signal(scale):
    """Equal scores, also where floats differ in the last digit (.1 + .2 against .3), one score, none: exactly 0, never 0/0."""
    rewards = t([0.1 + 0.2, 0.3, 0.3], [NAN, 7, NAN], [NAN, NAN, NAN], [5, 5, NAN])
    for given in (rewards, rewards.float()):
        assert not grpo_rubric.group_advantages(given, scale).any()


# ---- the loss ----

MASK = on([1, 1, 1], [1, 1, 0])
LOGPS, OLD = t([-1, -1, -1], [-2, -0.5, NAN]), t([-1.5, -0.5, -1], [-2, -1, NAN])
REF, A = t([-1.2, -1, -1.5], [-2, -0.8, NAN]), t(1, -1)
KL = dict(ref_logps=REF, beta=0.1)


@pytest.mark.parametrize(
    "expected, options",
    [
        (-0.0475618778, {}),
        (0.1810918744, dict(aggregation="sequence")),
        (-0.0297261736, dict(aggregation="fixed", max_tokens=4)),
        (-0.0434676714, KL),
        (0.1420127083, dict(level="sequence", aggregation="sequence")),
        (0.1459853626, dict(level="sequence", aggregation="sequence") | KL),
        (0.0861782590, dict(loss="cispo")),
        (-0.3608289011, dict(loss="sapo")),
        (-0.0475618778, dict(loss="dual")),
    ],
)
def test_grpo_loss_golden(expected, options):
    """Ratios (e^½, e^−½, 1) with A = 1 are clipped at 1.28 above only: −1.28 − .6065 − 1; ratios (1, e^½) with A = −1 are
    not clipped from above: 1 + 1.6487. Over 5 tokens, as a mean of means, or over 2·4 places. At the level of the answer
    e^0 and e^¼: a sum in place of the mean, or the padding in it, gives others; the KL keeps the ratio of its token. CISPO:
    e^½ + e^−½ + 1 = 3.2552 and −2 − e^½/2 = −2.8244, over 5. SAPO: −4·(σ(.6487) + σ(−.3935) + ½) = −6.2384 and
    4/1.05·(½ + σ(1.05·.6487)) = 4.4342, over 5."""
    loss, _ = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK, **options)
    assert loss.ndim == 0 and loss.item() == pytest.approx(expected, abs=1e-7)


def test_sums_for_the_log():
    """Of the golden: one token of five clipped (e^½ with A = 1), ratios e^½ + e^−½ + 1 + 1 + e^½, the largest e^½, k3 of new
    against old; against the reference d = ref − logp is −.2, 0, −.5, 0, −.3: k1 = 1, k3 = Σ e^d − 1 − d."""
    up, down = math.exp(0.5), math.exp(-0.5)
    expected = {"clipped": 1, "ratio": 2 * up + down + 2, "ratio_max": up, "k1": 1}
    expected["approx_kl"] = 2 * (up - 1.5) + (down - 0.5)
    expected["k3"] = sum(math.exp(d) - 1 - d for d in (-0.2, -0.5, -0.3))
    found = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK, **KL)[1]
    assert found == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    "loss, expected, slopes, clipped",
    [
        ("clip", [-1.28, 0.8, 1.5, -0.5, 6], [0, 0, 1.5, -0.5, 6], 2),
        ("dual", [-1.28, 0.8, 1.5, -0.5, 3], [0, 0, 1.5, -0.5, 0], 3),
        ("cispo", [-0.6081976622, -0.3465735903, 0.6081976622, 0.3465735903, 8.9587973461], [-1.5, 0.5, 1.5, -0.5, 5], 1),
        ("sapo", [-2.4898373248, 1.4159383303, 2.3935854792, -1.5101626752, 3.7896376164], [-1.4100, 0.4671, 1.4012, -0.4700, 0.1246], 0),
    ],
)  # fmt: skip
def test_clip_case_by_case(loss, expected, slopes, clipped):
    """(ratio 1.5, A 1) and (.5, −1) are clipped to −1.28 and .8, with a gradient of exactly 0; (1.5, −1), (.5, 1) and (6, −1)
    are not: they pull back, the last one by at most 3 with a dual clip. CISPO, with log π = log ρ here: −min(ρ, 5)·A·log ρ,
    −1.5·log 1.5 = −.6082 and 5·log 6 = 8.9588, gradient −min(ρ, 5)·A. SAPO: −4·σ(.5) = −2.4898 and for A < 0
    4/1.05·σ(1.05·½) = 2.3936; its gradient, −4·σ′·ρ·A, fades: −4·.235·1.5 = −1.41, and .1246 at ρ = 6."""
    logps = t([1.5], [0.5], [1.5], [0.5], [6]).log().requires_grad_()
    mask, advantages = on(*[[1]] * 5), t(1, -1, -1, 1, -1)
    losses, sums = grpo_rubric.token_losses(logps, logps.detach() * 0, advantages, mask, loss=loss)
    losses.sum().backward()
    assert close(losses.detach()[:, 0], expected) and sums["clipped"] == clipped
    assert close(logps.grad[:, 0], slopes, 5e-5)
    assert [x == 0 for x in logps.grad[:, 0]] == [x == 0 for x in slopes]


INPUTS = "logps", "old_logps", "ref_logps", "advantages"


def scattered(n=4, width=6):
    """Generic arguments of grpo_loss: ratios off 1, advantages a token, ragged masks, a row without a token."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(n, width, generator=generator, **F64) / 2 for name in INPUTS}
    return made | {"mask": torch.arange(width) < torch.tensor([6, 3, 0, 1])[:, None], "beta": 0.1}


def value_and_gradient(arguments, **options):
    logps = arguments["logps"].clone().requires_grad_()
    loss, _ = grpo_rubric.grpo_loss(**(arguments | {"logps": logps} | options))
    loss.backward()
    return loss.item(), logps.grad


FORMS = [
    {"aggregation": a, "level": v, "max_tokens": 8}
    for a in grpo_rubric.AGGREGATIONS
    for v in grpo_rubric.CLIP
]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f['aggregation']}-{f['level']}")
def test_parts_with_the_normalizer_of_the_whole(form):
    """The classic slip divides by the count of the micro-batch, so that a short answer weighs more. Rows apart, each divided
    by the whole step's count, add up to the whole: value and gradient. The row without a token is an answer for "fixed" alone."""
    whole = scattered()
    normalizer = {"token": 10, "sequence": 3, "fixed": 4 * 8}[form["aggregation"]]
    value, gradient = value_and_gradient(whole, **form)
    rows = [{k: x[[i]] if torch.is_tensor(x) else x for k, x in whole.items()} for i in range(4)]
    values, slopes = zip(*(value_and_gradient(row, **form, normalizer=normalizer) for row in rows))
    assert sum(values) == pytest.approx(value, abs=1e-12)
    assert torch.allclose(torch.cat(slopes), gradient, atol=1e-12)


# ---- the command line, and the recipe's ----

# the table of the page: recipe's name, a value, where it must arrive, and the recipe's default
RECIPE = """
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
"""


def test_recipe_names(capsys):
    """Every name=value line of the recipe works as it stands, and one such pair brings the recipe's defaults for all that the
    line leaves out: 32 groups, LoRA 32, 2048 tokens, a share of .9. A printed line says which."""
    rows = [row.split(" | ") for row in RECIPE.strip().splitlines()]
    args = vars(grpo_rubric.parse_args([f"{name}={value}" for name, value, *_ in rows]))
    for _, value, arrives, _ in rows[1:]:  # load_checkpoint_path wins over model_name
        assert str(args[arrives]) == value
    assert "the line leaves out: \n" in capsys.readouterr().out
    args = vars(grpo_rubric.parse_args(["data_path=x.json"]))
    for *_, arrives, default in rows:
        assert str(args[arrives]) == default
    assert "leaves out: model_name, lora_rank, train_ratio, data_seed" in capsys.readouterr().out
    names = {row[0] for row in rows} | {"behavior_if_log_dir_exists", "wandb_name"}
    assert names == set(grpo_rubric.RECIPE)


def test_gspo_brings_its_own_bounds(capsys):
    """The mean log-ratio of an answer moves by thousandths: with the bounds of a token, .2 and .28, GSPO never clips, and a
    mean over tokens is another loss. Its own bounds and mean hold unless the user says otherwise, and then a line says so."""
    args = grpo_rubric.parse_args(["--loss", "gspo"])
    assert grpo_rubric.CLIP[args.level] == (3e-4, 4e-4) and args.aggregation == "sequence"
    grpo_rubric.parse_args(["--loss", "gspo", "--aggregation", "token"])
    told = capsys.readouterr().out
    assert told == "--loss gspo: GSPO goes with --aggregation sequence\n"


def test_pairs_and_flags_mix():
    """Flags win over the recipe's defaults; our own flags may be pairs too (`judge_base_url=…`, `dry_run=true`), or a local
    judge could not be named in the recipe's style; the value behind a flag is no pair; a data set given as --data names the
    folder; `none` is no value. --batch-size counts answers per optimiser step, as in every stage."""
    args = grpo_rubric.parse_args(["group_size=4", "--data", "a/b.json", "--groups-per-batch", "5"])
    assert (args.data, args.group_size, args.groups_per_batch) == ("a/b.json", 4, 5)
    assert args.out == "runs/grpo-Llama-3.1-8B-b" and args.lora_rank == 32
    line = "data_path=x.json judge_base_url=http://localhost:1/v1 dry_run=true load_checkpoint_path=None"
    args = grpo_rubric.parse_args([*line.split(), "allow_code_execution=false"])
    assert args.judge_base_url == "http://localhost:1/v1" and args.dry_run
    assert args.model == "meta-llama/Llama-3.1-8B" and not args.allow_code_execution
    line = ["--system", "role=recruiter", "--batch-size", "16", "--num-substeps", "3"]
    args = grpo_rubric.parse_args(line)
    assert args.lora_rank == 0, "a value with = in it is no recipe line"
    assert args.groups_per_batch == 6, "3 steps of 16 are 6 groups of 8"


@pytest.mark.parametrize(
    "value, flags", [("delete", (1, 0)), ("resume", (0, 1)), ("raise", (0, 0))]
)
def test_a_folder_that_exists(value, flags, tmp_path):
    """delete → --overwrite, resume → --resume where there is a run, raise → neither: then the run refuses."""
    line = ["data_path=x.json", f"log_path={tmp_path}", f"behavior_if_log_dir_exists={value}"]
    assert not grpo_rubric.parse_args(line).resume, "there is no run yet"
    (tmp_path / "args.json").touch()
    args = grpo_rubric.parse_args(line)
    assert (args.overwrite, args.resume) == flags


BAD = """
data_path=x.json group_sizes=4 | unrecognized argument --group-sizes, did you mean --group-size
data_path=x.json judge_bas_url=u | did you mean --judge-base-url
group_size=4 | data_path=FILE is missing: JSON or JSONL
data_path=x.json behavior_if_log_dir_exists=append | expected delete, resume, raise or ask
data_path=x.json dry_run=maybe | dry_run=maybe: expected true or false
--group-size 1 | --group-size: '1' given, expected a whole number at least 2
--num-substeps 9 | --num-substeps 9: more than the 8 groups
--batch-size 30 | --batch-size 30: 1 × 30 answers are not whole groups of 8
--max-length 96 | --max-length 96: no room for a prompt
--reward rubrics | --reward rubrics: expected NAME or NAME:WEIGHT
--reward rubric:0 | weight above 0
--reward rubric --reward rubric | each name once
--reward model | --reward-model FOLDER go together
--reward-model x | --reward-model FOLDER go together
--scale maxrl --overlong penalty | --scale maxrl: expected rewards of at least 0
"""


@pytest.mark.parametrize("row", BAD.strip().splitlines())
def test_bad_lines(row):
    """A mistyped flag is an error with the fix, before anything is loaded: one line, never a traceback."""
    line, message = row.split(" | ")
    with pytest.raises(files.UserError) as error:
        grpo_rubric.parse_args(line.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def numbered(n, **more):
    check = {"rubrics": [{"check": "punctuation:no_comma"}]}
    return [{"task_id": f"t{i}", "prompt": f"Ask {i}.", **check, **more} for i in range(n)]


def test_dry_run_touches_neither_network_nor_model(tmp_path, monkeypatch, capsys):
    """--dry-run is what one calls before paying: with a model that does not exist, a judge nobody runs and no socket allowed
    it prints calls, tokens and USD. 2 prompts × 3 answers = 6 calls a step, one for each of the 2 validation prompts, 10·6 +
    3·2 in all. A file of one row is a step of one prompt, which is trained on, and no validation."""
    touched = (socket.socket, "connect"), (grpo_rubric, "load_models"), (common, "load_tokenizer")
    for home, name in touched:
        monkeypatch.setattr(home, name, lambda *a, **k: pytest.fail("touched network or model"))
    data = write_rows(tmp_path / "r.jsonl", numbered(12, rubrics=["Is polite.", "Is short."]))
    one = write_rows(tmp_path / "one.jsonl", numbered(1, rubrics=["Is kind."]))
    line = f"--model no/such --out {tmp_path}/run --group-size 3 --groups-per-batch 2 --steps 10"
    line += " --eval-every 5 --judge-price 1,2 --dry-run --train-ratio 0.7 --data"
    for more, expected in (
        (data, ["a step: 6 calls", "a validation: 2 calls", "of 10 steps: 66 calls"]),
        (f"{data} --reward ruler --judge-passes 2", ["a step: 4 calls", "USD"]),
        (one, ["a step: 3 calls", "a validation: 0 calls"]),
    ):
        grpo_rubric.main(f"{line} {more}".split())
        printed = capsys.readouterr().out
        assert all(words in printed for words in expected), printed
    assert not (tmp_path / "run").exists()


# ---- the split ----


def splits_of(path, *flags):
    args = grpo_rubric.parse_args(["--data", str(path), *map(str, flags)])
    return [[row.task_id for row in part] for part in grpo_rubric.load_data(args)]


@pytest.mark.parametrize("n, ratio, seed", [(20, 0.8, 42), (23, 0.9, 7), (10, 0.55, 0)])
def test_split_is_the_recipes(n, ratio, seed, tmp_path):
    """With the recipe's seed and ratio the recipe's own training rows: shuffle a copy by random.Random(seed), the first
    int(n·ratio) train. Of the rest the first half, rounded down, validates."""
    rows = [f"t{i}" for i in range(n)]
    file = write_rows(tmp_path / "r.jsonl", numbered(n))
    random.Random(seed).shuffle(rows)
    cut = int(n * ratio)
    middle = cut + (n - cut) // 2
    found = splits_of(file, "--train-ratio", ratio, "--data-seed", seed)
    assert found == [rows[:cut], rows[cut:middle], rows[middle:]]


def test_a_split_of_the_users_own_stays(tmp_path, capsys):
    """{"train", "validation", "test"} is taken as it is, in file order; without validation the first half of test. A held-out
    prompt that is also trained on, up to case and blanks, measures memory: it is left out, counted."""
    file, rows = tmp_path / "r.json", numbered(10)
    rows[6]["prompt"], rows[7]["prompt"] = " ASK\n 1 .", [{"role": "user", "content": "ask2."}]
    cut = {"train": rows[:5], "validation": rows[5:7], "test": rows[7:9]}
    file.write_text(json.dumps(cut))
    assert splits_of(file) == [["t0", "t1", "t2", "t3", "t4"], ["t5"], ["t8"]]
    told = "training 5  validation 1  test 1  prompts also in training, left out: 2"
    assert told in capsys.readouterr().out
    del cut["validation"]
    file.write_text(json.dumps(cut | {"test": [*rows[5:6], *rows[8:]]}))
    assert splits_of(file)[1:] == [["t5"], ["t8", "t9"]]


def test_rows_that_cannot_be_trained_on(tmp_path):
    """A share that leaves no training row; --reward checks with a row that has none: the row's place and the fix."""
    file = write_rows(tmp_path / "r.jsonl", numbered(3))
    with pytest.raises(files.UserError, match="no row to train on; raise --train-ratio"):
        splits_of(file, "--train-ratio", 0.2)
    rows = numbered(6)
    rows[4]["rubrics"] = ["Is polite."]
    file = write_rows(tmp_path / "m.jsonl", rows)
    with pytest.raises(files.UserError, match="line 5 has no check; use --reward rubric"):
        splits_of(file, "--reward", "checks", "--train-ratio", 0.99)


# ---- one rollout, one update ----

CHECKS = [
    {"check": "text:max_chars", "max_chars": 9},
    {"check": "punctuation:no_comma"},
    {"check": "regex:match", "pattern": "[aeiou]", "weight": 2, "name": "vowel"},
    {"check": "keywords:letter_frequency", "letter": "s", "let_frequency": 1, "let_relation": "at least"},
]  # fmt: skip
PROMPTS = ["sql", "Assess this: python.", *(r["prompt"] for r in pair_rows(10))]  # 3 to 60 tokens


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """As `make_graded` says."""
    return make_graded(tmp_path_factory.mktemp("graded"))


def make_graded(folder):
    """A GPT-2 and a Llama of random weights, a reward model, twelve rows with four checks each: eight train, two validate."""
    rows = [{"prompt": p, "rubrics": CHECKS} for p in PROMPTS]
    data = folder / "rubrics.json"
    data.write_text(json.dumps({"train": rows[:8], "validation": rows[8:10], "test": rows[10:]}))
    graded = {family: tiny_model(family, folder) for family in ("gpt2", "llama")}
    graded["reward"] = tiny_reward_model("llama", folder / "reward", seed=5)
    return graded | {"data": str(data), "rows": judge.read_rubrics(data).splits["train"]}


def opened(graded, *flags, reference=None):
    """(args, run, reference, b, advantages, in_loss) before the first step: a rollout of 4 groups of 4, of different lengths,
    whose log-probs are somewhat off the policy's, as after a substep; one group and one more answer have advantage 0."""
    argv = ["--model", graded["llama"], "--data", graded["data"], "--max-new-tokens", "7"]
    argv += ["--out", "runs/none", "--lr", "0.001", "--micro-tokens", "4096", "--warmup", "0"]
    argv += ["--group-size", "4", "--groups-per-batch", "4", *map(str, flags)]
    args = grpo_rubric.parse_args(argv)
    run = runs.Run("grpo_rubric", args, [], (), ())
    policy, own, tokenizer = grpo_rubric.load_models(args, run)
    run.state, run.planned, run.step = {"policy": policy}, 5, 1
    run.start(tokenizer, args.lr)
    if reference:  # one that is not the policy, or the KL has no gradient
        own = common.load_policy(graded[reference], trainable=False)
    b = grpo_rubric.rollout(args, run.model, tokenizer, graded["rows"][:4], 3)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(b["logps"].shape, generator=generator) / 5
    b["logps"] = torch.where(b["mask"], b["logps"] + noise, 0.0)
    advantages = grpo_rubric.group_advantages(torch.rand(4, 4, generator=generator)).view(-1)
    advantages[3:8] = 0.0
    cut = b["mask"][5].nonzero()[2:, 0]
    b["mask"][5, cut] = b["attention_mask"][5, cut] = False
    b["logps"][5, cut] = 0.0
    assert len(set(b["mask"].sum(1).tolist())) > 1
    return args, run, own, b, advantages, torch.ones(16, dtype=torch.bool)


LOSSES = [
    (),
    ("--aggregation", "sequence", "--num-substeps", 2, "--beta", 0.1),
    ("--aggregation", "fixed", "--loss", "gspo", "--num-substeps", 2),
    ("--loss", "cispo"),
]
LOGGED = {"kl/token": "k1", "kl/k3": "k3", "clip_frac": "clipped", "ratio/mean": "ratio", "approx_kl": "approx_kl"}  # fmt: skip


@pytest.mark.parametrize("flags", LOSSES, ids=lambda f: " ".join(map(str, f)) or "plain")
def test_gradient_for_every_cut(flags, graded, monkeypatch):
    """E2. Sixteen answers of unequal length as one forward, as some, and one by one are the same update: sums are divided by
    the count of the whole optimiser step (the HF accumulation bug; trl#5619). What is logged are means over all tokens, not
    over micro-batches."""
    args, run, *made = opened(graded, *flags, reference="gpt2" if "--beta" in flags else None)
    real, calls, seen = grpo_rubric.grpo_loss, [], []
    spy = lambda *given: calls.append((len(given[0]), real(*given))) or calls[-1][1]  # noqa: E731
    monkeypatch.setattr(grpo_rubric, "grpo_loss", spy)
    for args.micro_tokens in (10**6, 200, 1):
        calls.clear()
        seen.append((*gradients(monkeypatch, grpo_rubric.update, args, run, *made), list(calls)))
        vectors, row, _ = seen[-1]
        assert gap(vectors, seen[0][0]) < 5e-6
        for key, value in row.items():
            assert value == seen[0][1][key] or value == pytest.approx(
                seen[0][1][key], rel=2e-5, abs=1e-6
            )
    (whole, logged, one), (_, _, some), (_, _, many) = seen
    assert len(whole) == len(one) == args.num_substeps
    assert len(one) < len(some) < len(many) and {n for n, _ in many} == {1}
    if args.beta:
        n = int(made[1]["mask"].sum())
        for key, name in LOGGED.items():
            assert logged[key] == pytest.approx(sum(sums[name] for _, (_, sums) in one) / n)
        assert logged["kl/ref"] == pytest.approx(logged["kl/token"] * n / 16)
        assert 0 < logged["clip_frac"] < 1 and logged["kl/k3"] > 0.1


@pytest.mark.parametrize("aggregation", grpo_rubric.AGGREGATIONS)
def test_answers_without_advantage_cost_no_forward(aggregation, graded, monkeypatch):
    """Rows 2 and 9 have no score: neither their tokens nor their count are in the loss, and it stays so bit for bit whatever
    stands in them. Five others have advantage 0 (four in a group of equals): without a KL they need no forward, and stay in
    the normaliser. The gradient is that of one forward over the fourteen; divided by what was forwarded it would be longer."""
    flags = ("--aggregation", aggregation, "--temperature", 0.7)
    args, run, _, b, advantages, in_loss = opened(graded, *flags)
    in_loss[[2, 9]], advantages[[2, 9]] = False, 0.0
    made = b, advantages, in_loss
    plain, row = gradients(monkeypatch, grpo_rubric.update, args, run, None, *made)
    rows = b["ids"][in_loss], b["attention_mask"][in_loss], b["mask"][in_loss]
    logps, entropies = common.token_logps(run.model, *rows, 0.7, with_entropy=True)
    how = dict(aggregation=aggregation, max_tokens=args.max_new_tokens)
    weights = (logps.detach() - b["logps"][in_loss]).exp().clamp(max=2)  # policy / sampler
    given = logps, logps.detach(), advantages[in_loss][:, None] * weights, rows[2]
    loss, _ = grpo_rubric.grpo_loss(*given, **how)
    found = torch.autograd.grad(loss, list(run.model.parameters()), allow_unused=True)
    expected = torch.cat([g.flatten() for g in found if g is not None])
    assert gap(plain, [expected]) < 5e-6
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert row["forwarded"] == 9
    b["ids"][[2, 9]] = b["ids"][[0, 1]].flip(1)
    assert torch.equal(
        gradients(monkeypatch, grpo_rubric.update, args, run, None, *made)[0][0], plain[0]
    )
    args.beta = 1e-300  # underflows to 0 in the loss, and forwards all fourteen
    row = gradients(monkeypatch, grpo_rubric.update, args, run, run.model, *made)[1]
    assert row["forwarded"] == 14
    assert row["entropy"] == pytest.approx(entropies[rows[2]].mean().item(), rel=1e-5)


def test_nothing_to_learn_from(graded):
    """All advantages 0, or no answer with a score: no optimiser step at all (AdamW with a gradient of 0 would still move the
    weights by its moments), and numbers that do not exist are None. Of two substeps one group with a signal makes one."""
    args, run, _, b, advantages, in_loss = opened(graded, "--num-substeps", 2)
    advantages[4:] = 0.0
    assert grpo_rubric.update(args, run, None, b, advantages, in_loss)["updates"] == 1
    before = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
    for a, scored in ((advantages * 0, in_loss), (advantages, ~in_loss)):
        row = grpo_rubric.update(args, run, None, b, a, scored)
        assert row["updates"] == row["forwarded"] == 0
        assert {row[k] for k in ("loss", "grad_norm", "ratio/mean", "entropy", "kl/ref")} == {None}
    assert torch.equal(before, torch.nn.utils.parameters_to_vector(run.model.parameters()))


def test_substeps_are_of_whole_groups(graded, monkeypatch):
    """Four groups in three substeps: 2, 1, 1 whole groups, each answer once, another order in the next step. The sampled
    log-probs are the old ones in all of them, so that from the second on the ratio leaves 1."""
    args, run, _, b, _, in_loss = opened(graded, "--num-substeps", 3, "--lr", 1e-2)
    given = args, run, None, b, torch.tensor([1.0, -1.0] * 8), in_loss
    with torch.no_grad():  # as sampled
        b["logps"] = common.token_logps(run.model, b["ids"], b["attention_mask"], b["mask"])
    batches, losses = Spy(monkeypatch, run, "micro_batches"), Spy(monkeypatch, grpo_rubric, "grpo_loss")  # fmt: skip
    row = grpo_rubric.update(*given)
    batches = [rows.tolist() for rows, _ in batches.calls]
    assert [len(rows) for rows in batches] == [8, 4, 4]
    groups = [rows[i : i + 4] for rows in batches for i in range(0, len(rows), 4)]
    assert sorted(groups) == [list(range(i, i + 4)) for i in (0, 4, 8, 12)]
    gaps = [(new - old).abs().max() for new, old, *_ in losses.calls]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3
    assert row["updates"] == 3 and row["sample_gap"] < 1e-5
    run.step, again = 5, Spy(monkeypatch, run, "micro_batches")
    grpo_rubric.update(*given)
    assert [rows.tolist() for rows, _ in again.calls] != batches


def test_the_row_of_a_rollout_by_hand():
    """Four groups: mixed and longer answers pay (1 of 4, r = 1); all good; all bad; one score, which is no group. A NaN is in
    no mean and no share, and the group with one score is skipped, not bad."""
    rewards = t([1, 0, 0, 0], [1, 1, NAN, 1], [0, 0, 0, 0], [NAN, 1, NAN, NAN])
    advantages = grpo_rubric.group_advantages(rewards)
    expected = {
        "reward/mean": 5 / 12, "reward/unscored_frac": 0.25, "reward/frac_mixed": 1 / 3, "reward/frac_all_good": 1 / 3,
        "reward/frac_all_bad": 1 / 3, "reward/length_corr": 1.0, "groups/scored": 3, "groups/skipped": 3,
        "advantage/abs_mean": 1.5 / 16, "reward/std": 0.5149,
    }  # fmt: skip
    row = rollouts.group_row(rewards, advantages, [9, 2, 2, 2] + [5] * 12)
    assert row == pytest.approx(expected, abs=1e-4)
    lost = rollouts.group_row(rewards * NAN, advantages * 0, [5] * 16)
    nothing = dict.fromkeys(expected) | {"groups/scored": 0, "groups/skipped": 4}
    assert lost == nothing | {"reward/unscored_frac": 1, "advantage/abs_mean": 0}


def test_lora_reference_is_the_start(graded, monkeypatch):
    """With LoRA no second model is loaded: the reference is the policy with its adapter off. Its gradient and its KL are those
    against a frozen copy of the start, also when the adapter has moved."""
    args, run, reference, *made = opened(graded, "--lora-rank", 4, "--beta", 0.3)
    assert reference is run.model
    for name, weight in run.model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    frozen = common.load_policy(graded["llama"], trainable=False)
    (own, row), (other, expected) = (
        gradients(monkeypatch, grpo_rubric.update, args, run, each, *made)
        for each in (reference, frozen)
    )
    assert gap(own, other) < 1e-5
    assert row == pytest.approx(expected, rel=1e-4, abs=1e-6) and row["kl/k3"] > 0.01
    assert opened(graded)[2] is None, "beta 0 loads no reference"


# ---- whole runs ----


def run(graded, out, *flags):
    """The rows of metrics.jsonl of a run of `main`."""
    argv = ["--model", graded["llama"], "--data", graded["data"], "--out", str(out), "--steps", "2"]
    argv += ["--group-size", "4", "--groups-per-batch", "4", "--max-new-tokens", "6"]
    assert grpo_rubric.main([*argv, "--patience", "0", *map(str, flags)]) in (None, 0)
    return read(out / "metrics.jsonl")


def kept_of(out, split="train", step=None):
    rows = [r for r in read(out / "rollouts.jsonl") if r["split"] == split]
    return [r for r in rows if step in (None, r["step"])]


def test_preflight_refuses_another_temperature(graded, tmp_path, monkeypatch):
    """If rollout and update see different distributions, the run must not start: here the sampler forgets --temperature."""
    real = grpo_rubric.sample

    def sample(model, tokenizer, prompts, n, limit, temperature, seed):
        return real(model, tokenizer, prompts, n, limit, 1.0, seed=seed)

    monkeypatch.setattr(grpo_rubric, "sample", sample)
    with pytest.raises(files.UserError, match="what is scored is not what was sampled"):
        run(graded, tmp_path / "run", "--temperature", 0.5)
    assert not (tmp_path / "run").exists()


def test_what_a_run_leaves(graded, tmp_path, capsys):
    """E1. Before step one, at temperature .7: log-probs of the rollout = teacher forcing, the token strip, one group as a
    table, criteria × answers. rollouts.jsonl: every answer with its verdicts, from which reward and advantage can be computed
    again; the log's means are those of the rows. Validation is greedy, the same prompts; the test rows are touched once,
    before and after, with n and interval. What comes next fits the data."""
    out = tmp_path / "run"
    rows = run(graded, out, "--eval-every", 2, "--temperature", 0.7, "--beta", 0.1)
    printed = capsys.readouterr().out
    assert "gap between the rollout's log-probs and teacher forcing: 0.0" in printed
    table = printed.partition("  1. text:max_chars × 1 ")[2].splitlines()[:6]
    assert "3. vowel × 2 " in table[2] and {*table[0].split()[-4:], *table[1].split()[-4:]} == {"yes"}  # fmt: skip
    reward, advantage = ([float(x) for x in line.split()[1:]] for line in table[4:6])
    assert advantage == pytest.approx([r - sum(reward) / 4 for r in reward], abs=0.011)

    assert [r["step"] for r in kept_of(out)] == [1] * 16 + [2] * 16
    for row in read(out / "rollouts.jsonl"):
        met = sum(c["weight"] for c in row["criteria"] if c["verdict"])
        assert row["reward"] == pytest.approx(met / 5) and len(row["criteria"]) == 4
        assert row["components"]["rubric" if row["split"] == "train" else "checks"] == row["reward"]
    group, first = kept_of(out, step=1), trained(rows)[0]
    rewards = torch.tensor([r["reward"] for r in group])
    passed = [c["verdict"] for r in group for c in r["criteria"]]
    expected = {"reward/mean": rewards.mean().item(), "reward/rubric": rewards.mean().item()}
    expected |= {"pass_rate": sum(passed) / 64, "pass_rate/vowel": sum(passed[2::4]) / 16}
    expected |= {"ratio/mean": 1, "clip_frac": 0}
    assert {k: first[k] for k in expected} == pytest.approx(expected, abs=1e-6)
    assert first["sample_gap"] < 5e-5 and abs(first["kl/ref"]) < 5e-5
    advantages = grpo_rubric.group_advantages(rewards.view(4, 4)).flatten().tolist()
    assert [r["advantage"] for r in group] == pytest.approx(advantages, abs=1e-6)
    for step in (0, 2):
        part = kept_of(out, "validation", step)
        value = next(r["val/score"] for r in rows if "val/score" in r and r["step"] == step)
        assert value == pytest.approx(sum(r["reward"] for r in part) / 2)
        assert [r["prompt"] for r in part] == PROMPTS[8:10]

    summary = json.loads((out / "summary.json").read_text())
    before = summary["test_before"]
    assert before["n"] == summary["test_after"]["n"] == 2
    assert before["low"] <= before["score"] <= before["high"]
    assert summary["stop_reason"] == "max_steps" and summary["last_step"] == 2
    assert f"test before: {before['score']:.3f} [" in printed
    assert f"next: python watch.py {out}" in printed


def test_each_step_has_its_own_prompts_and_draws(graded, tmp_path, monkeypatch):
    """A permutation of the eight training prompts an epoch in steps of three: the last of the pass has two, step 4 opens the
    next. An evaluation in between changes nothing of the training: its draws are its own."""
    kept, spy = {}, Spy(monkeypatch, grpo_rubric, "rollout")
    for every in (1, 0):
        out = tmp_path / str(every)
        flags = ("--steps", 4, "--groups-per-batch", 3, "--restore", "last")
        rows = trained(run(graded, out, *flags, "--eval-every", every))
        kept[every] = kept_of(out)
    assert kept[0] == kept[1]
    assert [call[4] for call in spy.calls] == 2 * [0, 1, 2, 3, 4]  # of the preflight, then a step
    asked = [[r["task_id"] for r in kept[0] if r["step"] == s][::4] for s in (1, 2, 3, 4)]
    assert [len(set(tasks)) for tasks in asked] == [3, 3, 2, 3]
    assert len(set(sum(asked[:3], []))) == 8 and len({r["answer"] for r in kept[0]}) > 35
    assert [(row["epoch"], row["episodes"]) for row in rows] == [(0, 12), (0, 12), (0, 8), (1, 12)]


def test_a_lost_grade_is_no_zero(graded, tmp_path, monkeypatch):
    """Answer 1 of group 0 and all but one of group 1 have no score: the group of three has its own mean, the group of one is
    skipped and out of the token count, and the logged reward is the mean of the twelve that were scored. The reward
    model did score them: the sum is void all the same, and `reward/voided` counts it."""
    lost, real = (1, 4, 5, 6), judge.grade_answers

    def grade(rows, answers, *rest, **more):
        grades = real(rows, answers, *rest, **more)
        for i in lost if len(answers) == 16 else ():
            grades[i].score, grades[i].error = None, "no reply"
        return grades

    monkeypatch.setattr(judge, "grade_answers", grade)
    spy = Spy(monkeypatch, grpo_rubric, "update")
    flags = ("--reward", "rubric", "--reward", "model", "--reward-model", graded["reward"])
    row = trained(run(graded, tmp_path / "run", "--steps", 1, *flags))[0]
    rewards = [r["reward"] for r in kept_of(tmp_path / "run")]
    assert tuple(i for i, r in enumerate(rewards) if r is None) == lost
    assert row["reward/mean"] == pytest.approx(sum(filter(None, rewards)) / 12, abs=1e-6)
    assert row["reward/unscored_frac"] == 0.25 and row["groups/scored"] == 3
    assert row["reward/voided"] == 4
    advantages, in_loss = spy.calls[-1][4:6]
    assert in_loss.tolist() == [i not in (*lost, 7) for i in range(16)]
    three = torch.tensor([rewards[i] for i in (0, 2, 3)])
    assert close(advantages[[0, 2, 3]], three - three.mean(), 1e-6)
    assert not advantages[[*lost, 7]].any()


@pytest.mark.parametrize("mode", ["keep", "mask", "penalty"])
def test_overlong(mode, graded, tmp_path, monkeypatch):
    """An answer that was cut: `keep` as any other; `mask` out of the loss, its reward still in its group's mean; `penalty` −1
    at the limit of 8 with a buffer of 1, beside the logged reward and not in it."""
    spy = Spy(monkeypatch, grpo_rubric, "update")
    flags = ("--overlong", mode, "--steps", 1, "--max-new-tokens", 8, "--temperature", 1.5)
    row = trained(run(graded, tmp_path / "run", *flags))[0]
    kept = kept_of(tmp_path / "run")
    finished, length = ([r[k] for r in kept] for k in ("finished", "tokens"))
    assert 0 < sum(finished) < 16 and max(length) == 8
    advantages, in_loss = spy.calls[0][4:6]
    assert in_loss.tolist() == (finished if mode == "mask" else [True] * 16)
    rewards = torch.tensor([r["reward"] for r in kept])
    penalty = [-float(n == 8) for n in length]  # 8 − 1 − 8, over 1
    shaped = rewards + torch.tensor(penalty) if mode == "penalty" else rewards
    assert close(advantages, grpo_rubric.group_advantages(shaped.view(4, 4)).view(-1), 1e-6)
    assert row["reward/mean"] == pytest.approx(rewards.mean().item(), abs=1e-6)
    if mode == "penalty":
        assert row["reward/overlong"] == pytest.approx(sum(penalty) / 16)
        assert [r["components"]["overlong"] for r in kept] == penalty


def test_rewards_are_mixed_by_weight(graded, tmp_path):
    """--reward checks:3 --reward model:1 is .75 of one and .25 of the other, each logged apart; validation by the reward model
    has scores, though no criteria."""
    flags = ("--reward", "checks:3", "--reward", "model", "--reward-model", graded["reward"])
    rows = run(graded, tmp_path / "run", *flags, "--val-metric", "model")
    kept, score = kept_of(tmp_path / "run", step=1), common.reward_function(graded["reward"])
    talks = [r for r in kept if isinstance(r["prompt"], list)]
    scores = score([r["prompt"] for r in talks], [r["answer"] for r in talks])
    for row, x in zip(talks, scores, strict=True):
        parts = row["components"]
        assert parts["model"] == pytest.approx(x, abs=1e-4)
        assert row["reward"] == pytest.approx(0.75 * parts["checks"] + 0.25 * x, abs=1e-4)
    for name in ("checks", "model"):
        part = sum(r["components"][name] for r in kept) / 16
        assert trained(rows)[0][f"reward/{name}"] == pytest.approx(part, abs=1e-5)
    first = [r["components"]["model"] for r in kept_of(tmp_path / "run", "validation", 0)]
    value = next(row["val/score"] for row in rows if "val/score" in row)
    assert len(talks) > 4 and value == pytest.approx(sum(first) / 2, abs=1e-5)


def test_checks_alone_ask_nobody(graded, tmp_path, monkeypatch):
    """--reward checks on rows that also have texts for a judge: no network, no judge made, the texts left out of the score."""
    rows = [{"prompt": p, "rubrics": ["Is polite.", *CHECKS[:2]]} for p in PROMPTS]
    own = graded | {"data": write_rows(tmp_path / "r.jsonl", rows)}
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("asked the network"))
    run(own, tmp_path / "run", "--reward", "checks")
    assert {c["id"] for r in read(tmp_path / "run/rollouts.jsonl") for c in r["criteria"]} == {2, 3}
    with pytest.raises(files.UserError, match="needs a judge"):
        run(own, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_system_message_and_longest_row(graded, tmp_path, monkeypatch):
    """--system stands before every prompt, in training and validation alike; --max-length leaves so many tokens for it."""
    spy = Spy(monkeypatch, grpo_rubric, "sample")
    run(graded, tmp_path / "run", "--system", "Be brief.", "--steps", 1)
    asked = [prompt for call in spy.calls for prompt in call[2]]
    assert len(asked) > 8 and {p[0]["content"] for p in asked} == {"Be brief."}
    spy.calls.clear()
    run(graded, tmp_path / "short", "--max-length", 26, "--steps", 1)
    assert max(len(prompt) for call in spy.calls for prompt in call[2]) == 20
