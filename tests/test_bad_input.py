"""What a user does wrong, and the one line that tells him: flag, file, line; status 2; nothing lost."""

import importlib
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import common
from parts import files
from tiny import (
    cases,
    pair_rows,
    read_json,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    write_pairs,
    write_rows,
)

STAGES = ["dpo", "reward_train"]
every_stage = pytest.mark.parametrize("stage", STAGES)
VOWELS = f"{Path(__file__).with_name('tiny.py')}:share_of_vowels"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch, quiet_process):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)


MINE = {  # what lies in the folder of the table
    "empty.jsonl": "\n \n",
    "bad.jsonl": '{"prompt": "fine"}\n{"text": "no"}\n',
    "g.py": """
def short(prompts, answers, rows): return [1.0]
def none(prompts, answers, rows): return None
def infinite(prompts, answers, rows): return [0.5] * (len(answers) - 1) + [float("inf")]
def text(prompts, answers, rows): return ["good"] * len(answers)
value = 3
""",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The paths of a policy, a reward model, pairs and prompts; beside them a run of each stage."""
    folder = tmp_path_factory.mktemp("world")
    prompts = [{"prompt": f"Which {i}?"} for i in range(12)]
    world = {
        "folder": folder,
        "policy": tiny_model("llama", folder),
        "reward": tiny_reward_model("llama", folder / "reward"),
        "pairs": write_pairs(folder / "pairs.jsonl", 12),
        "prompts": write_rows(folder / "prompts.jsonl", prompts),
    }
    for name, text in MINE.items():
        (folder / name).write_text(text)
    for stage in STAGES:
        assert not main(stage, world, folder / stage)
    return world


def main(stage, world, out, *flags):
    argv = ["--pairs", world["pairs"], "--model", world["policy"], "--out", out, "--steps", 2]
    argv += ["--max-new-tokens", 4] if stage == "dpo" else []
    argv += ["--batch-size", 4, *flags]
    return importlib.import_module(stage).main(list(map(str, argv)))


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refused(world, capsys):
    """refused(stage, words, *flags): over a finished run, which stays; one line with the words."""

    def check(stage, words, *flags):
        out = world["folder"] / stage
        before = files_of(out)
        with pytest.raises(SystemExit) as stop:
            files.command(lambda: main(stage, world, out, "--overwrite", *flags))
        said = capsys.readouterr().err
        line = said.splitlines()[-1]  # argparse prints its usage before it
        assert stop.value.code == 2 and "error: " in line and len(line) < 1200, said
        assert files_of(out) == before, "the run that lay there was damaged"
        assert [word for word in words.split(" ~ ") if word not in line] == [], line

    return check


# stages, flags, words of the line, between ~
@cases("""
stages | flags | words
dpo reward_train | --pairs nope.jsonl | --pairs ~ nope.jsonl: no such file
dpo | --pairs .. | --pairs ~ ..: no such file
dpo reward_train | --pairs empty.jsonl | --pairs: no usable row (the file is empty)
dpo reward_train | --eval-pairs no.jsonl | --eval-pairs ~ no.jsonl: no such file
dpo reward_train | --pairs bad.jsonl | --pairs bad.jsonl:1: "chosen"
dpo | --prompts bad.jsonl | --prompts bad.jsonl:2: "prompt"
dpo | --prompts empty.jsonl | --prompts empty.jsonl: no prompt
dpo reward_train | --device cuda | --device cuda
dpo reward_train | --device tpu9 | --device tpu9
dpo reward_train | --device meta | --device meta
dpo reward_train | --wandb-project mine | wandb
dpo reward_train | --model org/none | --model org/none: no such folder
dpo | --model {reward} | --model ~ a reward model
dpo | --label-smoothing 0.1 --loss-type ipo | --label-smoothing ~ ipo
dpo | --gold {gold} | --gold scores ~ --prompts
dpo | --max-length 4 | --max-new-tokens ~ --max-length
reward_train | --margin strength | --margin strength ~ :1
dpo | --prompts {prompts} --gold no.py:f | --gold no.py:f: expected FILE:FUNCTION
dpo | --prompts {prompts} --gold g.py | --gold g.py: expected FILE:FUNCTION
dpo | --prompts {prompts} --gold g.py:value | --gold ~ g.py has no function 'value'
dpo | --prompts {prompts} --gold g.py:short | --gold ~ [1.0] ~ 12
dpo | --prompts {prompts} --gold g.py:none | --gold ~ None ~ 12
dpo | --prompts {prompts} --gold g.py:infinite | --gold ~ inf ~ 12
dpo | --prompts {prompts} --gold g.py:text | --gold ~ 'good' ~ 12
dpo reward_train | --epochs 0 | --epochs
dpo reward_train | --steps 1e3 | --steps
dpo reward_train | --lr nan | --lr
dpo reward_train | --lr inf | --lr
dpo reward_train | --warmup 1 | --warmup
dpo reward_train | --max-length 1 | --max-length
dpo reward_train | --seed -1 | --seed
dpo reward_train | --lora-rank 0.5 | --lora-rank
dpo reward_train | --eval-fraction 1 | --eval-fraction
dpo reward_train | --dtype fancy | --dtype ~ bf16
dpo reward_train | --label-smoothing 0.5 | --label-smoothing
dpo | --beta 0 | --beta
dpo | --nll-coef nan | --nll-coef
dpo reward_train | --lrr 1 | --lrr
""")
def test_one_line_names_what_is_wrong(stages, flags, words, world, monkeypatch, refused):
    monkeypatch.chdir(world["folder"])
    for stage in stages.split():
        refused(stage, words, *[flag.format(gold=VOWELS, **world) for flag in flags.split()])


@every_stage
def test_longer_than_the_model(stage, world, capsys, refused):
    """Pairs are cut to the model's positions, and so are prompts to answer."""
    policy = tiny_model("gpt2", ".", max_position_embeddings=40, n_layer=1)
    flags = ["--model", policy, *["--prompts", world["prompts"]] * (stage == "dpo")]
    assert not main(stage, world, "new", *flags)
    assert "cut to --max-length 40" in capsys.readouterr().out
    if stage == "dpo":
        refused(stage, "--max-new-tokens", *flags, "--max-new-tokens", 40)


@pytest.mark.parametrize("pad", [None, "[PAD]"], ids=["in an answer", "pad, as Alpaca's"])
@every_stage
def test_a_tokenizer_that_does_not_fit(stage, pad, world, refused):
    """A token without a row in the embedding."""
    tokenizer = tiny_tokenizer(pad=None)
    tokenizer.add_special_tokens({"pad_token": pad}) if pad else tokenizer.add_tokens(["<|new|>"])
    shutil.copytree(world["policy"], "more", ignore=shutil.ignore_patterns("token*", "*.jinja"))
    tokenizer.save_pretrained("more")
    rows = pair_rows(8)
    if not pad:
        assert not main(stage, world, "new", "--model", "more"), "a token that nobody uses"
        rows[1]["chosen"] = [{"role": "assistant", "content": "The <|new|> one."}]
    refused(stage, "--model", "--model", "more", "--pairs", write_rows("mine.jsonl", rows))


@pytest.mark.parametrize("lora", [0, 2])
@every_stage
def test_nan_in_the_weights(stage, lora, world, refused):
    shutil.copytree(world["policy"], "broken")
    weights = load_file("broken/model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, "broken/model.safetensors", metadata={"format": "pt"})
    words = "--model broken: ~ is nan, expected ~ broken weights"
    refused(stage, words, "--model", "broken", "--lora-rank", lora)


KEYS = """vocab_size hidden_size max_position_embeddings pad_token_id eos_token_id architectures
model_type dtype num_hidden_layers tie_word_embeddings sliding_window layer_types"""


@pytest.mark.parametrize("key", KEYS.split())
def test_a_config_of_another_type_is_one_line(key, world):
    """A model, or one line."""
    shutil.copytree(world["policy"], "odd")
    config = read_json("odd/config.json")
    for wrong in ("many", [1], {"a": 1}, -3):
        files.write_json("odd/config.json", config | {key: wrong})
        try:
            common.max_positions(common.load_model("odd", "cpu", torch.float32).config) + 1
        except files.UserError as error:
            assert "\n" not in str(error) and str(error).startswith("--model odd")
