"""One table of short trainings, a row per trainer and what is special, for tests that all of them owe.

world = files_of_jobs(tmp_path)
stage, argv = job("dpo-lora", world, tmp_path / "run", "--steps 2")     # later flags win
"""

from conftest import REPO
from test_agent import echo
from tiny import pair_rows, tiny_model, tiny_reward_model, words, write_pairs, write_rows

SHARED = "--steps 6 --eval-every 2 --save-every 3 --device cpu --warmup 0 --lr 1e-2"
COMPARED = "--pairs PAIRS --eval-pairs HELD --batch-size 5 --micro-tokens 150"
PREFERRED = f"{COMPARED} --max-new-tokens 4 --nll-coef 0.1 --prompts HELD --gold VOWELS"
DRAWN = "--max-new-tokens 4 --restore best --patience 0 --on-hack warn"
SCORED = f"{DRAWN} --prompts PROMPTS --rollouts 6 --batch-size 4 --reward-model REWARD --critic"
GROUPS = f"{DRAWN} --group-size 4 --groups-per-batch 4 --num-substeps 2 --beta 0.1"
JOBS = {  # a stage, with a hyphen and what is special; the words in capitals are files
    "sft": "--data PAIRS --eval-fraction 0.3 --batch-size 5 --micro-tokens 60 --max-new-tokens 4",
    "reward_train": COMPARED,
    "reward_train-lora": f"{COMPARED} --lora-rank 2",
    "dpo": PREFERRED,
    "dpo-lora": f"{PREFERRED} --lora-rank 2",
    "ppo-separate": f"{SCORED} separate --kl-target 3",
    "ppo-shared": f"{SCORED} shared",
    "grpo_rubric": f"{GROUPS} --data RUBRICS",
    "grpo_agent": f"{GROUPS} --env ENV --val-episodes 2",
}
VOWEL = {"check": "regex:match", "pattern": "[aeiou]"}
FAULTS = [VOWEL | {"weight": -1}, "Is kind."]


def files_of_jobs(home):
    prompts = [{"prompt": row["prompt"]} for row in pair_rows(9, seed=2)]
    splits = ["train"] * 6 + ["val"] * 2 + ["test"]
    graded = [dict(row, rubrics=[VOWEL], split=split) for row, split in zip(prompts, splits)]
    return {
        "MODEL": tiny_model("llama", home, max_position_embeddings=512),
        "REWARD": tiny_reward_model("llama", home / "reward"),
        "LABELS": tiny_reward_model("llama", home / "labels", num_labels=3),
        "PAIRS": write_pairs(home / "pairs.jsonl", 11),
        "HELD": write_pairs(home / "held.jsonl", 5, seed=1),
        "ONE": write_pairs(home / "one.jsonl", 1, seed=2),
        "PROMPTS": write_rows(home / "prompts.jsonl", prompts),
        "RUBRICS": write_rows(home / "rubrics.jsonl", graded),
        "ENV": echo(home),
        "FAULTS": write_rows(home / "faults.jsonl", [{"prompt": "Hi.", "rubrics": FAULTS}]),
        "VOWELS": f"{REPO}/tests/tiny.py:share_of_vowels",
        "NONE_SUCH": f"{REPO}/tests/tiny.py:none_such",
    }


def job(name, world, out, *flags):
    """(stage, its argv)."""
    argv = words("--model MODEL", SHARED, JOBS[name], *flags, "--out", out)
    return name.partition("-")[0], [world.get(word, word) for word in argv]
