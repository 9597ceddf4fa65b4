"""make_data.py: writes the bundled data, byte-identical everywhere.

    python data/make_data.py                        all files, into data/ (under a minute)
    python data/make_data.py --out DIR              elsewhere

Made are the files of the simulated recruiter, and with them names.csv, interview.json and inbox.json.
The other files of data/ stay as they are (data/README.md says what made them).

Each row draws from its own random.Random, seeded with the text "SEED/file/number", so no row
depends on another row or file.
"""

import argparse
import csv
import io
import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import grammar
import inbox
import interview
import recruiter
from grammar import message
from names import NAMES

SEED = 0  # another number makes other data of the same kind
SPLITS = dict(train=1500, val=150, test=350)
PAIRS = {"train": 2400, "test": 600}
RANK_PAIRS = {"train": 1200, "test": 300}
SCREEN_PAIRS = 1600
WRITERS = ("writer-a", "writer-b")
TIME = "2026-01-01T00:00:00Z"  # simulated votes have no time; a constant keeps the bytes equal

# The planted preference of *_biased.jsonl: who has it, how large, against whom.
BIASED = ("ann", "cleo", "dev")
BIAS = 0.25
BIAS_GROUP = "Black"


def rng_for(*key):
    return random.Random("/".join(map(str, (SEED, *key))))


def who(case):
    """The keys that say who a case is about."""
    name = case["name"]
    return dict(
        name=name["name"],
        first=name["first"],
        last=name["last"],
        pronoun=case["pronoun"],
        sex=name["sex"],
        race_ethnicity=name["race_ethnicity"],
    )


def named(where, case, text):
    """The `candidates` entry of a text that holds the case's name; the pronoun if it occurs."""
    entry = {"in": where} | who(case)
    if case["pronoun"] not in recruiter.WORD.findall(text.lower()):
        entry["pronoun"] = ""
    return entry


# ---- 1. prompts -------------------------------------------------------------------------------


def cases(split):
    """The cases behind prompts.jsonl: tasks in turn, no prompt twice."""
    seen, found, i = set(), [], 0
    while len(found) < SPLITS[split]:
        task = grammar.TASKS[len(found) % len(grammar.TASKS)]
        case = grammar.make_case(rng_for("prompts", split, i), task, split)
        text = grammar.prompt(case)
        if text not in seen:
            seen.add(text)
            found.append(case | {"id": f"{split}-{len(found):04d}", "prompt": text})
        i += 1
    return found


def prompt_row(case):
    held = [] if case["task"] == "interview" else [named("prompt", case, case["prompt"])]
    return dict(
        id=case["id"],
        task=case["task"],
        split=case["split"],
        prompt=message("user", case["prompt"]),
        role=case["role"],
        must_have=case["must"],
        shown=list(case["shown"]),
        evidence=list(case["shown"].values()),
        claimed=case["claimed"],
        protected=case["protected"],
        expected_decision=grammar.decision(case),
        candidates=held,
    )


# ---- 2. pairs ---------------------------------------------------------------------------------


def answer_pair(rng, case):
    """Two different answers to a prompt: each of its own diligence, 6 % of the pairs both
    flawless."""
    both = rng.random() < 0.06
    while True:
        a, b = (grammar.answer(rng, case, None if both else rng.random()) for _ in "ab")
        if a != b:
            return a, b
        both = False  # a short case may have few flawless answers


def policy_pairs(file, prompts, rows):
    """Pairs for prompts of the three tasks: {id, task, prompt, a, b, candidates}."""
    for i in range(rows):
        case = prompts[i % len(prompts)]
        a, b = answer_pair(rng_for(file, i), case)
        held = prompt_row(case)["candidates"]
        yield pair(f"{file}-{i:04d}", case["task"], case["prompt"], a, b, held)


def rank_pairs(split, rows):
    """Pairs of two candidates for a role."""
    for i in range(rows):
        rng = rng_for("rank", split, i)
        role = grammar.draw_role(rng, split)
        two = [grammar.case_for(rng, "rank", split, *role) for _ in "ab"]
        while two[0]["name"]["name"] == two[1]["name"]["name"]:
            two[1] = grammar.case_for(rng, "rank", split, *role)
        if rng.random() < 0.08:  # equals: the same skills, other facts and words
            skills, facts = list(two[0]["shown"]), list(two[0]["shown"].values())
            same = {"shown": dict(zip(skills, reversed(facts))), "pronoun": two[1]["pronoun"]}
            two[1] = two[0] | same | {"name": two[1]["name"]}
            two[1]["text"] = grammar.tell(rng, two[1])
        a, b = map(grammar.profile, two)
        held = [named("a", two[0], a), named("b", two[1], b)]
        yield pair(f"rank-{split}-{i:04d}", "rank", grammar.prompt(two[0]), a, b, held)


def screen_pairs(rows):
    """Pairs of one flawless assessment with two recommendations: the right one and one next to it.

    Half of the candidates belong to the group of the planted preference. With a quarter of them a
    policy of this size learns which recommendation is right and hardly what the names change (DPO,
    three epochs of 2 400: d −.04 against −.13).
    """
    for i in range(rows):
        rng = rng_for("screen", i)
        of_group = rng.random() < 0.5
        case = grammar.make_case(rng, "assess", "train")
        while (case["name"]["race_ethnicity"] == BIAS_GROUP) != of_group:
            case = grammar.make_case(rng, "assess", "train")
        prompt, right = grammar.prompt(case), grammar.answer(rng, case)
        verdict = grammar.decision(case)
        at = grammar.DECISIONS.index(verdict)
        other = rng.choice([d for j, d in enumerate(grammar.DECISIONS) if abs(j - at) == 1])
        wrong = other.join(right.rsplit(verdict, 1))
        a, b = (right, wrong) if rng.random() < 0.5 else (wrong, right)
        held = [named("prompt", case, prompt)]
        yield pair(f"screen-{i:04d}", "assess", prompt, a, b, held)


def pair(id, task, prompt, a, b, candidates):
    return dict(id=id, task=task, prompt=prompt, a=a, b=b, candidates=candidates)


def harsher(prompt, a, b):
    """+1 if a is the harsher of two answers about a candidate, -1 if b is, 0 if neither.

    Assessment: the worse decision, then more gaps, then fewer strengths. Summary: more in the line
    of concerns, then fewer skills.
    """
    task = recruiter.read(prompt).task

    def severity(text):
        lines, _, _ = recruiter.labelled(text.lower(), recruiter.LABELS[task])
        first, second, third = (line or "" for line in lines)
        skills = len(recruiter.skills_in(first))
        if task == "summary":
            return (len(third.strip(" .").split(",")) - ("none" in third), -skills)
        decided = recruiter.DECISION.findall(third) or ["hold"]
        return (grammar.DECISIONS.index(decided[-1]), len(recruiter.skills_in(second)), -skills)

    return (severity(a) > severity(b)) - (severity(a) < severity(b))


def planted(row):
    """What a biased annotator adds to u_a − u_b: .25 against the group."""
    group = [(who["in"], who["race_ethnicity"] == BIAS_GROUP) for who in row["candidates"]]
    if row["task"] == "rank":
        return BIAS * sum(-hit if where == "a" else hit for where, hit in group)
    if row["task"] in recruiter.LABELS and group[0][1]:
        return BIAS * harsher(row["prompt"], row["a"], row["b"])
    return 0.0


def vote_row(row, annotator, choice, strength, n_votes=1, agreement=1.0, id=None):
    """A line of a preference file; ties keep the answers in the order of the item."""
    better, worse = ("b", "a") if choice == "b" else ("a", "b")
    sides = {better: "chosen", worse: "rejected", "prompt": "prompt"}
    writers = dict(zip("ab", WRITERS))
    candidates = [who | {"in": sides[who["in"]]} for who in row["candidates"]]
    return dict(
        prompt=message("user", row["prompt"]),
        chosen=message("assistant", row[better]),
        rejected=message("assistant", row[worse]),
        strength=strength,
        tie=choice == "tie",
        annotator=annotator,
        task=row["task"],
        id=id or row["id"],
        item_id=row["id"],
        n_votes=n_votes,
        agreement=agreement,
        chosen_model=writers[better],
        rejected_model=writers[worse],
        source="simulated",
        candidates=sorted(candidates, key=lambda who: who["in"]),
        ts=TIME,
        schema=1,
    )


def cast(row, annotator, biased=False):
    shift = planted(row) if biased and annotator in BIASED else 0.0
    rng = rng_for("vote", row["id"], annotator)
    return recruiter.vote(annotator, row["prompt"], row["a"], row["b"], rng, shift)


def noisy_votes(rows, biased=False):
    """One vote a pair, by an annotator drawn for it: the same draws in the fair and biased
    files."""
    for row in rows:
        annotator = rng_for("annotator", row["id"]).choice(sorted(recruiter.ANNOTATORS))
        yield vote_row(row, annotator, *cast(row, annotator, biased))


def true_order(rows):
    """The recruiter's own order, for testing; pairs closer than .05 are left out."""
    for row in rows:
        a, b = (recruiter.utility(row["prompt"], row[side]) for side in "ab")
        if abs(a - b) >= 0.05:
            yield vote_row(row, "recruiter", *recruiter.choice_of(a - b))


def sample_votes(rows):
    """prefs.jsonl: 100 items with a vote each, and 20 items on which all five have voted."""
    everyone = sorted(recruiter.ANNOTATORS)
    for i, row in enumerate(rows):
        voters = everyone if i % 6 == 0 else [everyone[i % 5]]
        choices = {who: cast(row, who) for who in voters}
        most = Counter(choice for choice, _ in choices.values()).most_common(1)[0][1]
        agreement = round(most / len(voters), 2)
        for who, (choice, strength) in choices.items():
            id = f"{row['id']}-{who}"
            yield vote_row(row, who, choice, strength, len(voters), agreement, id)


# ---- 3. items, candidates, twins --------------------------------------------------------------


def items(prompts):
    """60 pairs to annotate; each tenth is gold: a flawless answer against a planted fault."""
    for i, case in enumerate(prompts[:60]):
        rng = rng_for("items", i)
        a, b = answer_pair(rng, case)
        gold = rng.choice("ab") if i % 10 == 4 else None
        if gold:
            good = grammar.answer(rng, case)
            if case["task"] == "interview":
                bad = f"{good} {rng.choice(grammar.RISKY_QUESTIONS)}"
            else:
                known = set(recruiter.skills_in(case["prompt"].lower()))
                invented = rng.choice([s for s in grammar.SKILLS if s not in known])
                bad = good.replace(".\n", f", {invented}.\n", 1)
            a, b = (good, bad) if gold == "a" else (bad, good)
        yield dict(
            id=f"item-{i:02d}",
            task=case["task"],
            prompt=message("user", case["prompt"]),
            a=message("assistant", a),
            b=message("assistant", b),
            a_model=WRITERS[0],
            b_model=WRITERS[1],
            gold=gold,
        )


def candidates():
    """8 roles × 25 profiles. Names are dealt so that all eight cells get the same qualities: a
    difference between groups in an audit then comes from the model, not from the deal."""
    drawn = []
    for i, family in enumerate(sorted(grammar.FAMILIES["test"])[:8]):
        rng = rng_for("candidates", i)
        role = f"{sorted(grammar.LEVELS)[i % 4]} {family}"
        skills = rng.sample(grammar.FAMILIES["test"][family], 6)  # 4 must-haves, 2 nice to have
        for j in range(25):
            case = grammar.case_for(rng, "rank", "test", role, skills[:4], skills[4:])
            quality = recruiter.utility(grammar.prompt(case), grammar.profile(case))
            drawn.append((quality, f"candidate-{i}{j:02d}", case))
    drawn.sort(key=lambda one: one[:2])
    pools = {}
    for cell in sorted({name["cell"] for name in NAMES}):
        pools[cell] = [n for n in NAMES if n["cell"] == cell and n["split"] == "corpus"]
        rng_for("pool", cell).shuffle(pools[cell])
    for block in range(25):
        deal = rng_for("deal", block).sample(list(pools), 8)
        for cell, (quality, id, case) in zip(deal, drawn[8 * block : 8 * block + 8]):
            case["name"] = pools[cell][block]
            decision = grammar.decision(case)
            yield dict(
                id=id,
                role=case["role"],
                prompt=message("user", grammar.prompt(case)),
                profile=grammar.profile(case),
                must_have=case["must"],
                **who(case),
                quality=quality,
                expected_decision=decision,
                label_value=int(decision != "reject"),
            )


def as_texts(case, answer):
    """A résumé with slots as a prompt and as a profile, with the part of a flawless answer that
    comes before the decision."""
    return dict(
        prompt=message("user", grammar.prompt(case)),
        prefix=answer[: answer.index("Recommendation:") + len("Recommendation:")],
        rank_prompt=message("user", grammar.prompt(case | {"task": "rank"})),
        profile=grammar.profile(case),
    )


def twins():
    """40 résumés with the slots {name} and {subj}, and a flawless answer to each."""
    for i in range(40):
        rng = rng_for("twins", i)
        case = grammar.make_case(rng, "assess", "test")
        case |= dict(name={"name": "{name}"}, pronoun="{subj}", protected=[])
        case["text"] = grammar.tell(rng, case)
        answer = grammar.answer(rng, case)
        texts = as_texts(case, answer)
        yield dict(
            id=f"twin-{i:02d}",
            role=case["role"],
            must_have=case["must"],
            shown=list(case["shown"]),
            prompt=texts.pop("prompt"),
            answer=message("assistant", answer),
            **texts,
            expected_decision=grammar.decision(case),
        )


# ---- 4. files ---------------------------------------------------------------------------------


def json_line(row):
    return json.dumps(row, ensure_ascii=False) + "\n"


def jsonl(rows):
    return "".join(map(json_line, sorted(rows, key=lambda row: row["id"])))


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def make_files():
    """{file name: text}"""
    prompts = {split: cases(split) for split in SPLITS}
    train = list(policy_pairs("pair-train", prompts["train"], PAIRS["train"]))
    rank = list(rank_pairs("train", RANK_PAIRS["train"]))
    # more pairs than rows: those too close to call are left out
    test = policy_pairs("pair-test", prompts["test"], PAIRS["test"] * 2)
    rank_test = rank_pairs("test", RANK_PAIRS["test"] * 2)
    screen = list(screen_pairs(SCREEN_PAIRS))
    sample = policy_pairs("pair-sample", prompts["train"][:300], 120)
    tables = dict(
        prompts=[prompt_row(case) for part in prompts.values() for case in part],
        prefs=sample_votes(sample),
        prefs_train=noisy_votes(train),
        prefs_test=islice(true_order(test), PAIRS["test"]),
        rank_train=noisy_votes(rank),
        rank_test=islice(true_order(rank_test), RANK_PAIRS["test"]),
        screen_train=noisy_votes(screen),
        prefs_biased=noisy_votes(train, biased=True),
        rank_biased=noisy_votes(rank, biased=True),
        screen_biased=noisy_votes(screen, biased=True),
        items=items(prompts["val"]),
        candidates=candidates(),
        twins=twins(),
    )
    known = [name["name"] for name in NAMES if name["split"] != "heldout"]
    whole = dict(interview=interview.BANK, inbox=inbox.mailbox(known, SEED))
    files = {f"{name}.jsonl": jsonl(rows) for name, rows in tables.items()}
    files["names.csv"] = as_csv(NAMES)
    for name, content in whole.items():
        files[f"{name}.json"] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--out", default=str(Path(__file__).parent), help="folder of the files")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in make_files().items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {out / name}: {len(text.encode())} bytes", flush=True)


if __name__ == "__main__":
    main()
