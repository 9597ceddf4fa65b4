"""base_card.py: measures a base model on roles it never saw and writes its README.md.

    python data/base_card.py data/tiny-base

The measures are the gates that tests/test_base.py holds; the ten answers are drawn by seed, not chosen.
"""

import hashlib
import json
import random
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common
import grammar
import interview
import recruiter
from parts import files

HERE = Path(__file__).resolve().parent
LABELS = {
    "assess": ["Strengths:", "Gaps:", "Recommendation:"],
    "summary": ["Skills:", "Teamwork:", "Concerns:"],
}


def draw(model, tokenizer, prompts_a_task=30, n=16, seed=0):
    """n answers at temperature 1 to the same number of test prompts a task: (rows, one an answer; rollout)."""
    by_task = defaultdict(list)
    for row in files.read_jsonl(HERE / "prompts.jsonl"):
        if row["split"] == "test":
            by_task[row["task"]].append(row)
    rows = [
        row
        for task in sorted(by_task)
        for row in random.Random(seed).sample(by_task[task], prompts_a_task)
    ]
    prompts = [row["prompt"] for row in rows]
    drawn = common.sample(model, tokenizer, prompts, n=n, max_new_tokens=96, seed=seed)
    return [row for row in rows for _ in range(n)], drawn


def measure(rows, drawn, n):
    """{measure: value} of the answers that draw() gave."""
    prompts, tasks = [row["prompt"] for row in rows], [row["task"] for row in rows]
    utility = recruiter.reward(prompts, drawn.texts)
    copied = [c for c in recruiter.copied(prompts, drawn.texts) if c is not None]
    formed = [
        re.findall(r"^(\w+:)", text, re.M) == LABELS[task]
        for text, task in zip(drawn.texts, tasks, strict=True)
        if task in LABELS
    ]
    groups = range(0, len(rows), n)
    found = {
        "ended": statistics.mean(drawn.finished),
        "form": statistics.mean(formed),
        "copied": statistics.mean(copied),
        "distinct": statistics.mean(len(set(drawn.texts[i : i + n])) / n for i in groups),
        "utility": statistics.mean(utility),
        "best": statistics.mean(max(utility[i : i + n]) for i in groups),
    }
    for task in sorted(set(tasks)):
        of_task = [u for u, t in zip(utility, tasks, strict=True) if t == task]
        found[f"utility, {task}"] = statistics.mean(of_task)
    return found


def measure_summaries(model, tokenizer, n=60):
    """After n ideal interviews the base writes the summary, greedy.

    heard: of its lines that claim evidence, the share that is word for word right; lines: of all lines wanted, the
    share that is right; claims: how many lines claimed evidence.
    """
    bank, prompts, truth = interview.bank(), [], []
    for i in range(n):
        rng = random.Random(f"base_card/{i}")
        person = interview.Candidate(rng, bank)
        prompts.append(interview.play(rng, bank, person, "listening"))
        truth.append(set(interview.summary(rng, person).split("\n")[1:]))
    texts = common.sample(model, tokenizer, prompts, max_new_tokens=120, temperature=0).texts
    right = claims = 0
    lines = []
    for text, correct in zip(texts, truth, strict=True):
        said = [line for line in text.split("\n")[1:] if re.match(r"\w+: ", line)]
        claimed = [line for line in said if "no evidence" not in line]
        claims, right = claims + len(claimed), right + sum(line in correct for line in claimed)
        lines.append(sum(line in correct for line in said) / len(correct))
    return {"heard": right / max(claims, 1), "lines": statistics.mean(lines), "claims": claims}


def measure_lookup(model, tokenizer, n=120):
    """Asked to go through the must-haves of a case of the test roles, greedy.

    facts: of the facts quoted for shown skills, the share that is that skill's own, not another's; chance: what a model
    that quotes any fact of the prompt would have; gaps: the share of cases whose gaps are named exactly.
    """
    cases = [grammar.make_case(random.Random(f"lookup/{i}"), "assess", "test") for i in range(n)]
    prompts = [
        f"{grammar.MUST_HAVES}\n{grammar.prompt(case).partition(chr(10))[2]}" for case in cases
    ]
    prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = common.sample(model, tokenizer, prompts, max_new_tokens=96, temperature=0).texts
    right, chance, gaps = [], [], []
    for case, text in zip(cases, texts, strict=True):
        for skill, fact in re.findall(r"^(.+) \((.+)\)$", text, re.M):
            if skill in case["shown"] and fact != "claimed":
                right.append(fact == case["shown"][skill])
                chance.append(1 / len(case["shown"]))
        named = re.search(r"Gaps: (.*)\.", text)
        told = set(named.group(1).split(", ")) if named else set()
        gaps.append(told == set(grammar.gaps(case) or ["none"]))
    return {"facts": statistics.mean(right or [0]), "chance": statistics.mean(chance or [0]), "gaps": statistics.mean(gaps)}  # fmt: skip


def measure_roles(model, tokenizer, n=120):
    """Asked for the role and nothing else, in the words of the corpus, greedy, on titles of validation and test.

    roles: the share of cases whose role is named to the letter; titles: how many there are; never: those of which no case is.
    """
    prompts, roles = [], []
    for i in range(n):
        rng = random.Random(f"roles/{i}")
        case = grammar.make_case(rng, rng.choice(grammar.TASKS), rng.choice(("val", "test")))
        about = grammar.prompt(case).partition("\n")[2]
        prompts.append(
            [{"role": "user", "content": f"Write only what is asked.\n{about}\nName the role."}]
        )
        roles.append(case["role"])
    texts = common.sample(model, tokenizer, prompts, max_new_tokens=32, temperature=0).texts
    right = defaultdict(list)
    for role, text in zip(roles, texts, strict=True):
        right[role.partition(" ")[2]].append(role in text)
    share = statistics.mean(hit for hits in right.values() for hit in hits)
    never = sorted(title for title, hits in right.items() if not any(hits))
    return {"roles": share, "titles": len(right), "never": never}


GATES = {
    "ended": "answers that ended by themselves (≥ .98)",
    "form": "answers with the three labelled lines, in order (≥ .85)",
    "copied": "skills named and facts quoted that stand in the prompt (≥ .85)",
    "distinct": "distinct answers among 16 to a prompt (≥ .9)",
    "utility": "mean utility by the simulated recruiter (.35 to .55)",
    "best": "mean utility of the best of 16 (≥ the mean + .2)",
}


def write_card(folder):
    model, tokenizer = common.load_policy(folder, trainable=False), common.load_tokenizer(folder)
    rows, drawn = draw(model, tokenizer)
    found, summaries = measure(rows, drawn, 16), measure_summaries(model, tokenizer)
    lookup, roles = measure_lookup(model, tokenizer), measure_roles(model, tokenizer)
    weights = sum(p.numel() for p in model.parameters())
    lines = [
        "# tiny-base",
        "",
        f"A Llama of {weights / 1e6:.2f} M weights, trained from scratch on invented text by `make base`"
        " (`data/make_data.py --corpus`, `data/train_tokenizer.py` and `sft.py`, six runs, seed 0)."
        " It writes answers of mixed quality on purpose: alignment needs something to choose from."
        " It knows the demo's closed vocabulary and nothing else.",
        "",
        "| file | SHA-256 |",
        "|---|---|",
    ]
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        digest = hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest()
        lines.append(f"| `{name}` | `{digest}` |")
    lines += ["", "The weights' bytes may differ between machines; the measures should not.", ""]
    lines += ["| on test roles, temperature 1, 90 prompts × 16 answers | |", "|---|---|"]
    lines += [f"| {text} | {found[key]:.3f} |" for key, text in GATES.items()]
    for key in found.keys() - GATES.keys():
        lines.append(f"| {key} (≥ .25) | {found[key]:.3f} |")
    lines[-len(found.keys() - GATES.keys()) :] = sorted(lines[-len(found.keys() - GATES.keys()) :])
    lines += [
        f"| summary lines that claim evidence and are right, after an ideal interview (≥ .8) | {summaries['heard']:.3f} |",
        f"| summary lines wanted that are right (≥ .6) | {summaries['lines']:.3f} |",
        f"| facts quoted for a shown skill that are its own, asked for each must-have (chance {lookup['chance']:.2f}) | {lookup['facts']:.3f} |",
        f"| cases whose gaps are named exactly, asked in the same way | {lookup['gaps']:.3f} |",
        f"| roles of {roles['titles']} titles of validation and test named to the letter, greedy, asked for nothing else (never: {', '.join(roles['never']) or 'none'}) | {roles['roles']:.3f} |",
        "",
        "Ten answers, drawn by seed:",
        "",
    ]
    for i in sorted(random.Random(1).sample(range(len(rows)), 10)):
        prompt = rows[i]["prompt"][0]["content"]
        lines += ["```", prompt, "→", drawn.texts[i].replace("```", "'''"), "```", ""]
    (Path(folder) / "README.md").write_text("\n".join(lines), encoding="utf-8")
    print(json.dumps({**found, **summaries, **lookup, **roles}, indent=1))


if __name__ == "__main__":
    write_card(sys.argv[1] if len(sys.argv) > 1 else HERE / "tiny-base")
