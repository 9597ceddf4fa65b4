"""base_card.py: measures a base model on roles it never saw and writes its README.md.

    python data/base_card.py data/tiny-base

The measures are the gates that tests/test_base.py holds; the ten answers are drawn by seed, not
chosen.
"""

import hashlib
import random
import re
import sys
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import grammar
import interview
import recruiter
import rubrics
from common import Policy, encode_prompt, load_model, load_tokenizer
from parts import files
from parts.sampling import sample

HERE = Path(__file__).resolve().parent


def load(folder):
    """(policy, tokenizer) of a model folder."""
    return Policy(load_model(folder, "cpu", torch.float32), torch.float32), load_tokenizer(folder)


def draw(policy, tokenizer, prompts_a_task=30, n=16, seed=0):
    """n answers at temperature 1 to as many test prompts of each task: (rows, one per answer;
    rollout)."""
    test = [row for row in files.read_jsonl(HERE / "prompts.jsonl") if row["split"] == "test"]
    rows = []
    for task in sorted(grammar.TASKS):
        of_task = [row for row in test if row["task"] == task]
        rows += random.Random(seed).sample(of_task, prompts_a_task)
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    drawn = sample(policy, tokenizer, prompts, n=n, max_new_tokens=96, seed=seed)
    return [row for row in rows for _ in range(n)], drawn


def measure(rows, drawn, n):
    """{measure: value} of the answers that draw() gave."""
    prompts, tasks = [row["prompt"] for row in rows], [row["task"] for row in rows]
    utility = recruiter.reward(prompts, drawn.texts)
    formed = [
        tuple(re.findall(r"^(\w+:)", text.lower(), re.M)) == recruiter.LABELS[task]
        for text, task in zip(drawn.texts, tasks)
        if task in recruiter.LABELS
    ]
    groups = [slice(i, i + n) for i in range(0, len(rows), n)]
    found = dict(
        ended=mean(drawn.finished),
        form=mean(formed),
        copied=mean(c for c in recruiter.copied(prompts, drawn.texts) if c is not None),
        distinct=mean(len(set(drawn.texts[group])) / n for group in groups),
        utility=mean(utility),
        best=mean(max(utility[group]) for group in groups),
    )
    for task in sorted(grammar.TASKS):
        found[f"utility, {task}"] = mean(u for u, t in zip(utility, tasks) if t == task)
    return found


def greedy(base, prompts, longest):
    """The base's answers to prompts (texts or messages), greedy."""
    policy, tokenizer = base
    said = [grammar.message("user", p) if isinstance(p, str) else p for p in prompts]
    ids = [encode_prompt(tokenizer, prompt) for prompt in said]
    return sample(policy, tokenizer, ids, max_new_tokens=longest, temperature=0).texts


def measure_summaries(base, n=60):
    """After n ideal interviews the base writes the summary.

    heard: of its lines that claim evidence, the share that is word for word right; lines: of all
    lines wanted, the share that is right; claims: how many lines claimed evidence.
    """
    prompts, truth = [], []
    for i in range(n):
        rng = random.Random(f"base_card/{i}")
        person = interview.Candidate(rng)
        prompts.append(interview.play(rng, person, "listening"))
        truth.append(interview.summary(rng, person).split("\n")[1:])
    claimed, lines = [], []
    for text, correct in zip(greedy(base, prompts, 120), truth):
        said = re.findall(r"^\w+: .*", text.partition("\n")[2], re.M)
        claimed += [line in correct for line in said if "no evidence" not in line]
        lines.append(sum(line in correct for line in said) / len(correct))
    return dict(heard=sum(claimed) / max(len(claimed), 1), lines=mean(lines), claims=len(claimed))


def measure_lookup(base, n=120):
    """Asked to go through the must-haves of a case of the test roles.

    facts: of the facts quoted for shown skills, the share that is that skill's own, not another's;
    chance: what a model that quotes any fact of the prompt would have; gaps: the share of cases
    whose gaps are named exactly.
    """
    cases = [grammar.make_case(random.Random(f"lookup/{i}"), "assess", "test") for i in range(n)]
    orders = [f"{grammar.MUST_HAVES}\n{grammar.about(case)}" for case in cases]
    texts = greedy(base, orders, 96)
    right, chance, gaps = [], [], []
    for case, text in zip(cases, texts):
        for skill, fact in re.findall(r"^(.+) \((.+)\)$", text, re.M):
            if skill in case["shown"] and fact != "claimed":
                right.append(fact == case["shown"][skill])
                chance.append(1 / len(case["shown"]))
        named = re.search(r"Gaps: (.*)\.", text)
        told = set(named[1].split(", ")) if named else set()
        gaps.append(told == set(grammar.gaps(case) or ["none"]))
    return dict(facts=mean(right or [0]), chance=mean(chance or [0]), gaps=mean(gaps))


def measure_roles(base, n=120):
    """Asked for the role and nothing else, in the words of the corpus, on titles of validation and
    test. roles: the share of cases whose role is named to the letter; titles: how many there
    are."""
    prompts, roles = [], []
    for i in range(n):
        rng = random.Random(f"roles/{i}")
        case = grammar.make_case(rng, rng.choice(grammar.TASKS), rng.choice(("val", "test")))
        prompts.append(rubrics.name_the_role(case))
        roles.append(case["role"])
    right = [role in text for role, text in zip(roles, greedy(base, prompts, 32))]
    return dict(roles=mean(right), titles=len({role.partition(" ")[2] for role in roles}))


LINES = """
ended: answers that ended by themselves (≥ .98)
form: answers with the three labelled lines, in order (≥ .85)
copied: skills named and facts quoted that stand in the prompt (≥ .85)
distinct: distinct answers among 16 to a prompt (≥ .9)
utility: mean utility by the simulated recruiter (.35 to .55)
best: mean utility of the best of 16 (≥ the mean + .2)
utility, assess: utility, assess (≥ .25)
utility, interview: utility, interview (≥ .25)
utility, summary: utility, summary (≥ .25)
heard: greedy: summary lines that claim evidence and are right, after an ideal interview (≥ .8)
lines: greedy: summary lines wanted that are right (≥ .6)
facts: greedy: facts quoted for a shown skill that are its own, asked for each must-have (≥ .5)
chance: the same for a model that quotes any fact of the prompt
gaps: greedy: cases whose gaps are named exactly, asked in the same way
roles: greedy: roles of unseen titles named to the letter, asked for nothing else (≥ .8)
"""
INTRO = """# tiny-base

A Llama of {:.2f} M weights, trained from scratch on invented text by `make base`
(`data/make_data.py --corpus`, `data/train_tokenizer.py` and `sft.py`, six runs, seed 0; the
[data card](../README.md#how-the-base-was-made) says what each run is for). It writes answers of mixed
quality on purpose: alignment needs something to choose from. It knows the demo's closed vocabulary
and nothing else.

| file | SHA-256 |
|---|---|"""


def write_card(folder):
    base = load(folder)
    rows, drawn = draw(*base)
    found = measure(rows, drawn, 16) | measure_summaries(base) | measure_lookup(base)
    found |= measure_roles(base)
    lines = [INTRO.format(base[0].model.num_parameters() / 1e6)]
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        digest = hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest()
        lines.append(f"| `{name}` | `{digest}` |")
    lines += ["", "The weights' bytes may differ between machines; the measures should not.", ""]
    lines += ["| on test roles, temperature 1, 90 prompts × 16 answers | |", "|---|---|"]
    for key, text in (line.split(": ", 1) for line in LINES.strip().split("\n")):
        lines.append(f"| {text} | {found[key]:.3f} |")
    lines += ["", "Ten answers, drawn by seed:", ""]
    for i in sorted(random.Random(1).sample(range(len(rows)), 10)):
        prompt = rows[i]["prompt"][0]["content"]
        lines += ["```", prompt, "→", drawn.texts[i].replace("```", "'''"), "```", ""]
    (Path(folder) / "README.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_card(sys.argv[1] if len(sys.argv) > 1 else HERE / "tiny-base")
