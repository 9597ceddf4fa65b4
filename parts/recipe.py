"""parts/recipe.py: lines of the rubric recipe, name=value pairs, as flags of grpo_rubric.py.

    python grpo_rubric.py model_name=Qwen/Qwen3-0.6B data_path=mine.json group_size=8

A pair may name one of the recipe's settings or any of our flags; once one pair is given, the
recipe's defaults hold for all that the line leaves out.
"""

import os

from parts.files import UserError

# the recipe's names, our flags, and the recipe's defaults
RECIPE = {
    "model_name": "--model=meta-llama/Llama-3.1-8B",
    "load_checkpoint_path": "--model",  # after model_name: a checkpoint is the model
    "lora_rank": "--lora-rank=32",
    "data_path": "--data",
    "train_ratio": "--train-ratio=0.9",
    "data_seed": "--data-seed=42",
    "group_size": "--group-size=8",
    "groups_per_batch": "--groups-per-batch=32",
    "learning_rate": "--lr=4e-5",
    "max_tokens": "--max-new-tokens=2048",
    "temperature": "--temperature=1.0",
    "kl_penalty_coef": "--beta=0.0",
    "num_substeps": "--num-substeps=1",
    "judge_model": "--judge-model=gpt-5-mini",
    "judge_temperature": "--judge-temperature",  # the recipe's gpt-5-mini refuses its default, 0
    "judge_max_retries": "--judge-max-retries=3",
    "log_path": "--out=",
    "wandb_project": "--wandb-project",
    "wandb_name": "",
    "eval_every": "--eval-every=10",
    "save_every": "--save-every=20",
    "system_message": "--system",
    "behavior_if_log_dir_exists": "",
}


def recipe_arguments(argv, flags):
    """(our flags for a line of the recipe's name=value pairs, what to do if --out exists).

    flags   {flag: does it take a value?}; any of our flags may be given as name=value, too
    Without a pair the line comes back as it is, with None.

    >>> recipe_arguments(["--seed", "1"], {})
    (['--seed', '1'], None)
    """
    given, line, exists = {}, [], None
    for before, word in zip(["", *argv], argv):
        name, equals, value = word.partition("=")
        flag = "--" + name.replace("_", "-")
        if not equals or not name.isidentifier() or flags.get(before):
            line.append(word)
            continue
        exists = "ask"
        if name in RECIPE:
            given |= {} if value.lower() in ("", "none") else {name: value}
        elif flags.get(flag, True):  # an unknown name is refused as a flag, with the closest one
            line.append(f"{flag}={value}")
        elif value.lower() in ("true", "false"):
            line += [flag] * (value.lower() == "true")
        else:
            raise UserError(f"{word}: expected true or false")
    if not exists:
        return line, None
    if "wandb_name" in given:
        os.environ["WANDB_NAME"] = given.pop("wandb_name")
    exists = given.pop("behavior_if_log_dir_exists", exists)
    if exists not in ("delete", "resume", "raise", "ask"):
        raise UserError(
            f"behavior_if_log_dir_exists={exists}: expected delete, resume, raise or ask"
        )
    flags_given, ours, left_out = {word.partition("=")[0] for word in line}, [], []
    for name, spec in RECIPE.items():
        flag, equals, default = spec.partition("=")
        if name in given or equals:
            ours.append(f"{flag}={given.get(name, default)}")
        if default and name not in given and flag not in flags_given:
            left_out.append(name)
    print(f"recipe: its defaults hold for what the line leaves out: {', '.join(left_out)}")
    if "judge_temperature" not in given and "--judge-temperature" not in flags_given:
        print("recipe: judge_temperature=0.0 is not sent unless the line gives it: gpt-5-mini "
              "refuses it, and other judges use their server's own")  # fmt: skip
    return ours + line, exists
