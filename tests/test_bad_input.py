"""What a user does wrong, and the one line that tells him: flag, file, line, the fix; status 2."""

import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
import dpo
import ppo
import reward_train
import sft
from parts import files
from tiny import (
    cases,
    error_of,
    pair_rows,
    table,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    write_rows,
)

FLAGS = {sft: "--data", reward_train: "--pairs", dpo: "--pairs", ppo: "--prompts"}
ALL = [*FLAGS]  # ppo.py reads prompts and draws its own answers
each_stage = pytest.mark.parametrize("stage", ALL[:3], ids=lambda s: s.__name__)
every_stage = pytest.mark.parametrize("stage", ALL, ids=lambda s: s.__name__)
VOWELS = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"
GOOD = pair_rows(1)[0]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, quiet_process):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)


MINE = {  # what lies in the folder of the table
    "empty.jsonl": "\n \n",
    "bad.jsonl": '{"prompt": "fine"}\n{"text": "no"}\n',
    "split.jsonl": '{"prompt": "a", "split": "moon"}\n{"prompt": "b"}\n',
    "two.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n',
    "below.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": -0.5}',
    "vit/config.json": '{"model_type": "vit"}',
    "few/config.json": '{"model_type": "gpt2", "vocab_size": 99, "n_layer": 1}',
    "leaves.py": "raise SystemExit",
    "broken.py": "def f(:",
    "needs.py": "import no_package",
    "g.py": """from __future__ import annotations; from dataclasses import dataclass
def short(prompts, answers, rows): return [1.0]
def none(prompts, answers, rows): return None
def infinite(prompts, answers, rows): return [0.5] * (len(answers) - 1) + [float("inf")]
def text(prompts, answers, rows): return ["good"] * len(answers)
def raises(prompts, answers, rows): return {}["missing"]
value = 3
@dataclass
class Score:
    value: float
def good(prompts, answers, rows): return [Score(1.0).value] * len(answers)
""",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world = {
        "folder": folder,
        "policy": tiny_model("llama", folder),
        "reward": tiny_reward_model("llama", folder / "reward"),
        "pairs": write_rows(folder / "pairs.jsonl", pair_rows(12)),
    }
    for name in ("vit", "few"):
        copy_of(world["policy"], folder / name, "*.safetensors")
    for name, text in MINE.items():
        (folder / name).write_text(text)
    for stage in ALL:
        assert not stage.main(argv_of(stage, world, folder / stage.__name__))
    return world


def argv_of(stage, world, out, *flags):
    argv = f"{FLAGS[stage]} {world['pairs']} --steps 2 --batch-size 4"
    argv += "" if "--init-config" in flags else f" --model {world['policy']}"
    argv += "" if stage is reward_train else " --max-new-tokens 4"
    if stage is ppo:
        argv += " --rollouts 4 --ppo-epochs 1 --eval-fraction 0.2"
        argv += "" if "--reward-model" in flags else f" --reward-fn {VOWELS}"
    return [*argv.split(), "--out", str(out), *map(str, flags)]


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(world):
    return lambda stage, *given: stage.main(argv_of(stage, world, *given))


@pytest.fixture
def refused(run, world, capsys):
    """refused(stage, words, *flags): over a finished run, which stays; one line with the words."""

    def check(stage, words, *flags):
        out = world["folder"] / stage.__name__
        before = files_of(out)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            files.command(lambda: run(stage, out, "--overwrite", *flags))
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
        assert len(said) < 600 and files_of(out) == before, "the run that lay there was damaged"
        assert [word for word in words.split(" ~ ") if word not in said] == [], said

    return check


# stages, flags ({} for the data's), words of the line, between ~. A flag that would be ignored is
# refused: its user believes that it acts. The functions for --gold are the same code.
@cases("""
stages | flags | words
sft reward_train dpo ppo | {} nope.jsonl | {} nope.jsonl: no such file
sft reward_train dpo | {} empty.jsonl | {} empty.jsonl: no usable row (the file is empty)
sft reward_train dpo | {} {pairs} empty.jsonl | {} empty.jsonl: no usable row (the file is empty)
ppo | {} empty.jsonl | {} empty.jsonl: no prompt
reward_train dpo | --eval-pairs no.jsonl | --eval-pairs no.jsonl: no
sft dpo ppo | --prompts bad.jsonl | --prompts bad.jsonl:2: "prompt"
ppo | --prompts split.jsonl | --prompts split.jsonl: no row has "split": "train"
ppo | --prompts two.jsonl --eval-fraction 0.999 | --prompts two.jsonl: all 2 prompts are held out
sft reward_train dpo ppo | --device cuda | --device cuda: expected auto, cpu, cuda, cuda:1 or mps (
sft reward_train dpo ppo | --device tpu9 | --device tpu9: expected auto, cpu, cuda, cuda:1 or mps (
sft reward_train dpo ppo | --device meta | --device meta: expected auto, cpu, cuda, cuda:1 or mps (
sft reward_train dpo ppo | --wandb-project mine | wandb ~ ; install it with pip
ppo | --prompts {pairs} --reward-model {policy} | --reward-model ~ not a reward model; train one with
ppo | --prompts {pairs} --critic rm --reward-model {policy} | --reward-model ~ not a reward model;
dpo | --label-smoothing 0.1 --loss-type ipo | --loss-type ipo smooths no labels, sigmoid and robust do
sft dpo | --gold {gold} | --gold scores ~ add --prompts FILE
ppo | --reward-model x --reward-fn g.py:f | give one reward: --reward-model
ppo | --critic rm | --critic rm: there is no --reward-model to copy ~ shared
ppo | --max-length 4 | --max-length 4: leaves no room ~ --max-new-tokens 4 ~ raise
sft | --init-config c.json --lora-rank 2 | leave --lora-rank out
sft | --init-config none | --init-config none: no such folder
sft | --init-config few --model few | --model has no effect: --init-config starts from random weights
ppo | --reward-fn r.py:good --beta 0 --kl-target 6 | --kl-target has no effect
sft | --init-config vit | --init-config vit: cannot be loaded (
sft | --init-config few | --data ~ no place in the embedding of 99 rows
reward_train | --margin strength | --margin strength: ~ :1 has no "strength"
reward_train | {} below.jsonl --margin margin | below.jsonl:1 has -0.5, below 0 ~ swap
ppo | --reward-fn no.py:f | --reward-fn no.py:f: expected FILE:FUNCTION with an existing Python file
ppo | --reward-fn two.jsonl:f | --reward-fn ~ expected FILE:FUNCTION with an existing Python file
ppo | --reward-fn g.py:value | --reward-fn ~ g.py has no function 'value'
ppo | --reward-fn leaves.py:f | --reward-fn ~ SystemExit ~ leaves.py, line 1
ppo | --reward-fn broken.py:f | --reward-fn broken.py:f: SyntaxError ~ line 1
ppo | --reward-fn needs.py:f | --reward-fn ~ ModuleNotFoundError ~ no_package ~ line 1
ppo | --reward-fn g.py:short | --reward-fn ~ expected 8 finite numbers or None, found [1.0]
ppo | --reward-fn g.py:none | --reward-fn ~ found None
ppo | --reward-fn g.py:infinite | --reward-fn ~ expected 8 finite numbers or None, found [0.5 ~ inf]
ppo | --reward-fn g.py:text | --reward-fn ~ 'good'
ppo | --reward-fn g.py:raises | --reward-fn ~ KeyError: 'missing' ~ g.py, line 6
sft dpo | --prompts {pairs} --gold g.py:value | --gold ~ g.py has no function 'value'
sft dpo | --prompts {pairs} --gold g.py:short | --gold ~ expected 12 finite numbers or None, found [1.0]
""")
def test_one_line_names_what_is_wrong(stages, flags, words, world, monkeypatch, refused):
    monkeypatch.chdir(world["folder"])
    for stage in [stage for stage in ALL if stage.__name__ in stages.split()]:
        argv = [flag.format(FLAGS[stage], gold=VOWELS, **world) for flag in flags.split()]
        refused(stage, words.replace("{}", FLAGS[stage]), *argv)


@cases("""
row | words
{"prompt": "a", "completion": ""} | "completion" is empty ~ fill it in or delete the line
{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]} | both
{"completion": "b"} | "prompt" is missing ~ expected text or a list
{"messages": "hello"} | "messages" holds no assistant turn
{"messages": [{"role": "user", "content": "x"}]} | no assistant turn ~ nothing to train
{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}]} | "weight" ~ 0.5; expected 0 or 1
{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "label": 0} | "label" is 0; expected true or false
{"prompt": "a", "completion": "b", "label": "False"} | "label" is 'False'; expected true or false
{"text": "Hi", "role": "prompter"} | one message of a conversation ~ "messages"
{"text": 7} | expected "prompt" and "completion" ~ found ['text']
""")
def test_malformed_row(row, words, refused):
    data = write_rows("mine.jsonl", [GOOD, row])
    refused(sft, f"error: --data mine.jsonl:2: ~ {words}", "--data", data)


@every_stage
def test_longer_than_the_model(stage, world, capsys, run, refused):
    policy = tiny_model("gpt2", ".", max_position_embeddings=40, n_layer=1)
    if stage is not ppo:
        assert not run(stage, "new", "--model", policy)
        said = capsys.readouterr().out
        assert "rows 12, " in said and ("cut 12" if stage is sft else "prompts cut 12") in said
    if stage is not reward_train:
        flags = ("--prompts", world["pairs"], "--model", policy, "--max-new-tokens")
        assert not run(stage, "cut", *flags, 8)
        assert " prompts cut to 32 tokens" in capsys.readouterr().out
        words = "--max-new-tokens 40: leaves no room for a prompt in the model's 40 positions"
        refused(stage, words, *flags, 40)


def copy_of(folder, name, *without):
    shutil.copytree(folder, name)
    for file in (file for pattern in without for file in Path(name).glob(pattern)):
        file.unlink()
    return name


def test_a_folder_that_is_no_policy(world, run, refused):
    base = copy_of(world["policy"], "base")
    flags = ("--model", base, "--lora-rank", 2, "--steps", 1)
    assert not run(reward_train, "lora", *flags)
    refused(dpo, "--model lora: this is a reward model", "--model", "lora")
    words = "--model lora/adapter: holds an adapter (adapter_config.json); lora holds it merged"
    refused(sft, words, "--model", "lora/adapter")
    words = "--model lora/checkpoint: not a model folder (config.json is missing); lora is a run"
    refused(sft, words, "--model", "lora/checkpoint")


@each_stage
def test_a_tokenizer_that_does_not_fit(stage, world, run, refused, capsys):
    """The embedding lacks a token: the setup is broken. The template refuses a row: it is dropped."""
    more = common.load_tokenizer(world["policy"])
    more.add_tokens(["<|new|>"])
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    strict = tiny_tokenizer(template=refuse + more.chat_template)
    new = {**GOOD, "chosen": [{"role": "assistant", "content": "The <|new|> one."}]}
    system = {**GOOD, "prompt": [{"role": "system", "content": "Be kind."}, *GOOD["prompt"]]}
    call = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    for name, tokenizer, row, reason in (
        ("more", more, new, ""),
        ("strict", strict, system, "the chat template of --model refuses ['system', 'user'"),
        ("call", strict, {**GOOD, "chosen": call}, "shows nothing of an answer's tool_calls"),
    ):
        copy_of(world["policy"], name, "token*", "*.jinja", "generation*")
        tokenizer.save_pretrained(name)
        path = write_rows("mine.jsonl", [row, GOOD])
        flags = "--model", name, FLAGS[stage]
        if not reason:
            words = "mine.jsonl:1: ~ the token '<|new|>' (id 300) ~ 300 rows ~ resize"
            refused(stage, f"{FLAGS[stage]} {words}", *flags, path)
            continue
        assert not run(stage, f"{name}-run", *flags, path), "one such row is a row"
        assert reason in capsys.readouterr().out
        refused(stage, f"no usable row ~ {reason}", *flags, write_rows("mine.jsonl", [row]))
    assert not run(stage, "new", "--model", "more")


@pytest.mark.parametrize("lora", [0, 2])
@every_stage
def test_nan_in_the_weights(stage, lora, world, refused):
    file = Path(copy_of(world["policy"], "broken")) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    words = "--model broken: ~ is nan, expected ~ broken weights"
    refused(stage, words, "--model", "broken", "--lora-rank", lora)


@every_stage
def test_nan_while_training(stage, run):
    flags = "--lr 1e30 --schedule constant --warmup 0 --steps 9 --eval-every 0".split()
    rows = r"rows \[.*\] of step " if stage is ppo else "rows .*pairs.jsonl:"
    line = error_of(run, stage, "new", *flags)
    assert re.match(f"loss .*not finite; {rows}.*Lower --lr", line)
    assert not Path("new/config.json").exists(), "no model before the run has ended"
    assert [*Path("new/checkpoint").iterdir()] == []


# flags, each with the values that it refuses; the range in words
SHARED_NUMBERS = """
--epochs 0 -1 1.5 nan --steps 0 1e3 --batch-size 0 all --micro-tokens 0 | a whole number at least 1
--stop-after 0 --save-every 0 | a whole number at least 1
--eval-every -1 --lora-rank -1 0.5 | a whole number at least 0
--max-length 1 | a whole number at least 2
--seed -1 0.5 9223372036854775808 | a whole number at least 0 and below 9223372036854775808
--lr 0 -1 nan inf fast | a number above 0
--warmup 1 -0.1 nan | a number at least 0 and below 1
--schedule fancy | cosine
--dtype fancy --save-dtype fancy | bf16"""
HELD = """
--eval-fraction 1 1.5 -0.1 | a number at least 0 and below 1"""
LONGEST = f"""{HELD}
--max-new-tokens 0 nan | a whole number at least 1"""
OWN_NUMBERS = {
    sft: LONGEST,
    reward_train: f"""{HELD}
--label-smoothing 0.5 -0.1 | a number at least 0 and below 0.5
--margin-scale -1 --center-coef nan | a number at least 0
--margin fancy | strength
--ties fancy | drop""",
    dpo: f"""{LONGEST}
--label-smoothing 0.5 -0.1 | a number at least 0 and below 0.5
--beta 0 nan inf | a number above 0
--nll-coef -1 nan --simpo-gamma nan | a number at least 0
--loss-type fancy | sigmoid_norm""",
    ppo: f"""{LONGEST}
--rollouts 1 | a whole number at least 2
--ppo-epochs 0 | a whole number at least 1
--critic fancy | shared
--temperature 0 nan --kl-target 0 nan --clip-high 0 nan | a number above 0
--beta -0.1 inf --no-end-penalty -0.1 inf | a number at least 0""",
}


@every_stage
def test_a_flag_outside_its_range(stage):
    """NaN compares with nothing and must not slip through."""
    for flags, words in table(SHARED_NUMBERS + OWN_NUMBERS[stage]):
        for value in flags.split():
            if value.startswith("--"):
                flag = value
                continue
            line = error_of(stage.parse_args, [flag, value])
            assert line.startswith(f"argument {flag}: ") and f"'{value}'" in line
            assert words in line and line.endswith("; --help lists the flags")
    line = error_of(stage.parse_args, ["--lr"])
    assert "expected one argument; --help lists the flags" in line
    if stage is ppo:
        line = error_of(ppo.main, ["--prompts", "two.jsonl"])
        assert re.search("give one reward: --reward-model .*--reward-fn", line)


def test_a_good_gold_function_and_an_empty_prompt(world, run):
    gold = f"{world['folder'] / 'g.py'}:good"
    flags = ("--prompts", write_rows("empty.jsonl", [{"prompt": ""}]), "--gold", gold)
    for stage in (sft, dpo):
        assert not run(stage, stage.__name__, *flags)
        assert '"val/gold": 1.0' in Path(stage.__name__, "metrics.jsonl").read_text()


@every_stage
def test_the_run_of_a_stage_is_guarded(stage, world, run, refused):
    data, model = shutil.copy(world["pairs"], "own.jsonl"), copy_of(world["policy"], "own")
    inputs = {FLAGS[stage]: data, "--model": model}
    if stage in (dpo, ppo):
        inputs |= {"--prompts": data}
    if stage is ppo:
        inputs |= {"--reward-model": copy_of(world["reward"], "rm")}
    flags = [*(each for pair in inputs.items() for each in pair), "--steps", 1]
    assert not run(stage, "run", *flags)
    inputs = sorted({*inputs.values()})
    for path in inputs:
        out = path if Path(path).is_dir() else "."
        refused(stage, f"--out {out}: it contains the input", "--out", out, *flags)
        file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        file.write_text(file.read_text() + "\n")
    other = ALL[ALL.index(stage) - 1]
    line = error_of(run, stage, "run", *flags, "--resume")
    assert all(f"{path} has changed" in line for path in inputs)
    line = error_of(run, other, world["folder"] / stage.__name__, "--resume")
    assert f"made by {stage.__name__}.py" in line
