"""make_data.py: writes the bundled data. Standard library only, byte-identical everywhere.

    python data/make_data.py                        all files, into data/ (under a minute)
    python data/make_data.py --out DIR --seed 1     elsewhere, or other data
    python data/make_data.py --corpus FILE          only the corpus of the tiny base, in training order

Each row draws from a random.Random of its own, seeded with the text "seed/file/number", so rows do
not depend on each other and a file does not depend on another. When --out holds a README.md (the
data card), its first line and the block between its two `numbers` marks are written anew.
"""

import argparse
import csv
import io
import json
import random
from collections import Counter
from functools import partial
from pathlib import Path

import binding
import card
import grammar
import interview
import proofread
import recruiter
import rubrics
from names import NAMES

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
    return random.Random("/".join(map(str, key)))


def message(role, text):
    return [{"role": role, "content": text}]


def named(where, case, text):
    """The `candidates` entry of a text that holds the case's name; the pronoun if it occurs."""
    name = case["name"]
    used = case["pronoun"] in recruiter.WORD.findall(text.lower())
    entry = {"in": where, "name": name["name"], "first": name["first"], "last": name["last"]}
    entry["pronoun"] = case["pronoun"] if used else ""
    return entry | {"sex": name["sex"], "race_ethnicity": name["race_ethnicity"]}


# ---- 1. prompts -------------------------------------------------------------------------------


def cases(seed, split):
    """The cases behind prompts.jsonl: tasks in turn, no prompt twice."""
    seen, found, i = set(), [], 0
    while len(found) < SPLITS[split]:
        task = grammar.TASKS[len(found) % len(grammar.TASKS)]
        case = grammar.make_case(rng_for(seed, "prompts", split, i), task, split)
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


def policy_pairs(seed, file, prompts, rows):
    """Pairs for prompts of the three tasks: {id, task, prompt, a, b, candidates}."""
    pairs = []
    for i in range(rows):
        case = prompts[i % len(prompts)]
        a, b = answer_pair(rng_for(seed, file, i), case)
        held = prompt_row(case)["candidates"]
        pairs.append(pair(f"{file}-{i:04d}", case["task"], case["prompt"], a, b, held))
    return pairs


def rank_pairs(seed, split, rows):
    """Pairs of two candidates for a role."""
    pairs = []
    for i in range(rows):
        rng = rng_for(seed, "rank", split, i)
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
        pairs.append(pair(f"rank-{split}-{i:04d}", "rank", grammar.prompt(two[0]), a, b, held))
    return pairs


def screen_pairs(seed, rows):
    """Pairs of one flawless assessment with two recommendations: the right one and one next to it.

    Half of the candidates belong to the group of the planted preference. With a quarter of them a
    policy of this size learns which recommendation is right and hardly what the names change (DPO,
    three epochs of 2 400: d −.04 against −.13).
    """
    pairs = []
    for i in range(rows):
        rng = rng_for(seed, "screen", i)
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
        pairs.append(pair(f"screen-{i:04d}", "assess", prompt, a, b, held))
    return pairs


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


def cast(seed, row, annotator, biased=False):
    shift = planted(row) if biased and annotator in BIASED else 0.0
    rng = rng_for(seed, "vote", row["id"], annotator)
    return recruiter.vote(annotator, row["prompt"], row["a"], row["b"], rng, shift)


def noisy_votes(seed, rows, biased=False):
    """One vote a pair, by an annotator drawn for it: the same draws in the fair and biased
    files."""
    votes = []
    for row in rows:
        annotator = rng_for(seed, "annotator", row["id"]).choice(sorted(recruiter.ANNOTATORS))
        votes.append(vote_row(row, annotator, *cast(seed, row, annotator, biased)))
    return votes


def true_order(rows):
    """The recruiter's own order, for testing; pairs closer than .05 are left out."""
    kept = []
    for row in rows:
        a, b = (recruiter.utility(row["prompt"], row[side]) for side in "ab")
        gap = a - b
        if abs(gap) >= 0.05:
            strength = 1 + (abs(gap) >= recruiter.CLEAR) + (abs(gap) >= recruiter.MUCH)
            kept.append(vote_row(row, "recruiter", "a" if gap > 0 else "b", strength))
    return kept


def sample_votes(seed, rows):
    """prefs.jsonl: 100 items with a vote each, and 20 items on which all five have voted."""
    votes = []
    for i, row in enumerate(rows[:120]):
        everyone = sorted(recruiter.ANNOTATORS)
        voters = everyone if i % 6 == 0 else [everyone[i % 5]]
        choices = {who: cast(seed, row, who) for who in voters}
        most = Counter(choice for choice, _ in choices.values()).most_common(1)[0][1]
        agreement = round(most / len(voters), 2)
        for who, (choice, strength) in choices.items():
            id = f"{row['id']}-{who}"
            votes.append(vote_row(row, who, choice, strength, len(voters), agreement, id))
    return votes


# ---- 3. items, candidates, twins --------------------------------------------------------------


def items(seed, prompts):
    """60 pairs to annotate; each tenth is gold: a flawless answer against a planted fault."""
    rows = []
    for i, case in enumerate(prompts[:60]):
        rng = rng_for(seed, "items", i)
        gold = None
        a, b = answer_pair(rng, case)
        if i % 10 == 4:
            gold = rng.choice("ab")
            good = grammar.answer(rng, case)
            if case["task"] == "interview":
                bad = f"{good} {rng.choice(grammar.RISKY_QUESTIONS)}"
            else:
                known = set(recruiter.skills_in(case["prompt"].lower()))
                bad = good.replace(
                    ".\n", f", {rng.choice([s for s in grammar.SKILLS if s not in known])}.\n", 1
                )
            a, b = (good, bad) if gold == "a" else (bad, good)
        rows.append(
            dict(
                id=f"item-{i:02d}",
                task=case["task"],
                prompt=message("user", case["prompt"]),
                a=message("assistant", a),
                b=message("assistant", b),
                a_model=WRITERS[0],
                b_model=WRITERS[1],
                gold=gold,
            )
        )
    return rows


def candidates(seed):
    """8 roles × 25 profiles. Names are dealt so that each of the eight cells gets the same
    qualities: whatever differs between groups in an audit comes from the model, not from the
    deal."""
    drawn = []
    for i, family in enumerate(sorted(grammar.FAMILIES["test"])[:8]):
        rng = rng_for(seed, "candidates", i)
        role = f"{sorted(grammar.LEVELS)[i % 4]} {family}"
        skills = rng.sample(grammar.FAMILIES["test"][family], 6)  # 4 must-haves, 2 nice to have
        for j in range(25):
            case = grammar.case_for(rng, "rank", "test", role, skills[:4], skills[4:])
            quality = recruiter.utility(grammar.prompt(case), grammar.profile(case))
            drawn.append((quality, i, j, case))
    drawn.sort(key=lambda x: x[:3])
    pools = {}
    for cell in sorted({name["cell"] for name in NAMES}):
        pools[cell] = [n for n in NAMES if n["cell"] == cell and n["split"] == "corpus"]
        rng_for(seed, "pool", cell).shuffle(pools[cell])
    rows = []
    for block in range(25):
        deal = rng_for(seed, "deal", block).sample(list(pools), 8)
        for cell, (quality, i, j, case) in zip(deal, drawn[8 * block : 8 * block + 8]):
            case["name"] = pools[cell][block]
            decision = grammar.decision(case)
            rows.append(
                dict(
                    id=f"candidate-{i}{j:02d}",
                    role=case["role"],
                    prompt=message("user", grammar.prompt(case)),
                    profile=grammar.profile(case),
                    must_have=case["must"],
                    name=case["name"]["name"],
                    first=case["name"]["first"],
                    last=case["name"]["last"],
                    pronoun=case["pronoun"],
                    sex=case["name"]["sex"],
                    race_ethnicity=case["name"]["race_ethnicity"],
                    quality=quality,
                    expected_decision=decision,
                    label_value=int(decision != "reject"),
                )
            )
    return rows


def twins(seed):
    """40 résumés with the slots {name} and {subj}: as a prompt, as a profile, with a flawless
    answer and the part of it that comes before the decision."""
    rows = []
    for i in range(40):
        rng = rng_for(seed, "twins", i)
        case = grammar.make_case(rng, "assess", "test")
        case |= dict(name={"name": "{name}"}, pronoun="{subj}", protected=[])
        case["text"] = grammar.tell(rng, case)
        answer = grammar.answer(rng, case)
        rows.append(
            dict(
                id=f"twin-{i:02d}",
                role=case["role"],
                must_have=case["must"],
                shown=list(case["shown"]),
                prompt=message("user", grammar.prompt(case)),
                answer=message("assistant", answer),
                prefix=answer[: answer.index("Recommendation:") + len("Recommendation:")],
                rank_prompt=message("user", grammar.prompt(case | {"task": "rank"})),
                profile=grammar.profile(case),
                expected_decision=grammar.decision(case),
            )
        )
    return rows


# ---- 4. the corpus of the tiny base -----------------------------------------------------------

# Rows in training order. Run 1: nearly all drills, for copying must be there before the rest; then
# everything, more diligent answers in the first half. Run 2: mostly what is hard: instructions,
# assessments, transcripts. Run 3: instructions again, most of them done well, and answers
# proofread. Run 4: looking things up (`binding.py`), in steps of 128 rows. Run 5: made-up titles,
# what is missing, and answers done well; at its end the diligence that the base is to have. Run 6:
# words spelled out, titles above all, for sub-word pieces that come twice led the copies astray;
# the same end.
DRILLED, DILIGENT, ENDS = 12_800, 80_000, (160_000, 224_000, 288_000, 384_000, 432_000, 474_000)
BOUND = tuple(ENDS[2] + 128 * steps for steps in (200, 350, 500))
MIXED, ALL_ROWS = ((272_000, ENDS[2]), (412_000, ENDS[4]), (460_000, ENDS[5])), ENDS[-1]


def shares(text):
    """{kind of row: its share} of "kind share kind share …"."""
    words = text.split()
    return dict(zip(words[::2], map(float, words[1::2])))


FIRST_SHARES = shares("assess .03 drill .91 interview .03 summary .03")
SHARES = shares("assess .26 drill .12 interview .16 rubric .14 summary .20 transcript .12")
SECOND_SHARES = shares("assess .16 drill .05 interview .09 rubric .50 summary .10 transcript .10")
THIRD_SHARES = shares(
    "asked .10 assess .06 drill .04 interview .05 proofread .24 rubric .40 summary .05"
    " transcript .06"
)
THIRD_END_SHARES = shares(
    "asked .05 assess .15 drill .05 interview .10 proofread .12 rubric .30 summary .12"
    " transcript .11"
)
TEXTS = " asked .03 drill .02 interview .01 proofread .02 rubric .04"
BINDING_SHARES = (
    shares("parts .88" + TEXTS),
    shares("parts .74 joined .14" + TEXTS),
    shares("parts .14 joined .70 facts .04" + TEXTS),
    shares("parts .05 joined .13 facts .68" + TEXTS),
)
FIFTH_SHARES = shares(
    "asked .09 assess .11 facts .06 gap_drill .17 interview .08 joined .02 name_drill .03"
    " proofread .16 rubric .20 summary .06 transcript .04"
)
FIFTH_END_SHARES = shares(
    "asked .05 assess .15 facts .02 gap_drill .08 interview .12 name_drill .02 proofread .10"
    " rubric .28 summary .11 transcript .08"
)
SIXTH_SHARES = shares(
    "asked .12 assess .10 facts .02 gap_drill .08 interview .07 name_drill .02 proofread .08"
    " role_drill .10 rubric .15 spelled .17 summary .06 transcript .03"
)
SIXTH_END_SHARES = FIFTH_END_SHARES | shares(
    "asked .06 facts .01 gap_drill .05 proofread .09 role_drill .04 rubric .27"
)


def mixed_again(i):
    """Does row i stand in the end of run 3, 5 or 6, where answers have the diligence of the base
    to be?"""
    return any(start <= i < end for start, end in MIXED)


def shares_of(i):
    """What kinds of rows stand around row i of the corpus."""
    if i < ENDS[0]:
        return FIRST_SHARES if i < DRILLED else SHARES
    if i < ENDS[1]:
        return SECOND_SHARES
    if i < ENDS[2]:
        return THIRD_END_SHARES if mixed_again(i) else THIRD_SHARES
    if i < ENDS[3]:
        return BINDING_SHARES[sum(i >= end for end in BOUND)]
    if i < ENDS[4]:
        return FIFTH_END_SHARES if mixed_again(i) else FIFTH_SHARES
    return SIXTH_END_SHARES if mixed_again(i) else SIXTH_SHARES


def kept_share(i, q):
    """How likely an answer of diligence q in row i keeps each constraint of a rubric prompt; None:
    as q says, softly.

    Later all or nearly nothing: so the moves are learnt, and still made too seldom.
    """
    if i < ENDS[0]:
        return None
    if i < ENDS[1]:
        return 0.9 if q > 0.6 else 0.1
    return 0.95 if q > (0.7 if mixed_again(i) else 0.25) else 0.1


def diligence(rng, i):
    """The hidden diligence of an answer in row i: 0 to 1, uniform but where skills are built."""
    if i >= ENDS[2] and not mixed_again(i) and rng.random() < 0.6:
        return 1.0
    return max(rng.random(), rng.random() if i < DILIGENT else 0.0)


def corpus_row(seed, i):
    """Row i of the corpus.

    Most roles ask for skills from anywhere (`draw_role`), so that what stands in an answer must be
    copied from the prompt.
    """
    rng = rng_for(seed, "corpus", i)
    split, stepwise = ("open", True) if i >= ENDS[2] else ("mixed", False)
    split = "pieces" if i >= ENDS[3] else split
    shares = shares_of(i)
    task = rng.choices(list(shares), list(shares.values()))[0]
    if task == "transcript":
        return interview.transcript(rng)
    if task == "proofread":
        return proofread.proofreading(rng, split)
    if task == "asked":
        order, reply = rubrics.asked_only(rng, split, stepwise)
    elif task == "rubric":
        row = rubrics.rubric_row(rng, split, without=() if i < ENDS[0] else rubrics.COUNTED)
        order, q = row["prompt"], diligence(rng, i) if stepwise else rng.random()
        reply = rubrics.rubric_answer(rng, row, q, kept_share(i, q), stepwise)
    elif task == "gap_drill":
        order, reply = grammar.gap_drill(rng, split)
    elif task in ("parts", "joined"):
        order, reply = getattr(binding, task)(
            rng, binding.FEW_WORDS if i < BOUND[0] else binding.WORDS
        )
    elif task in ("facts", "spelled"):
        order, reply = getattr(binding, task)(rng)
    elif task == "role_drill":
        order, reply = rubrics.role_drill(rng, split)
    elif task == "name_drill":
        order, reply = grammar.name_drill(rng)
    elif task == "drill" and rng.random() < 0.25:
        return interview.drill(rng)
    elif task == "drill":
        order, reply = grammar.drill(rng, split)
    else:
        q = diligence(rng, i)
        case = grammar.make_case(rng, task, split)
        order, reply = grammar.prompt(case), grammar.answer(rng, case, q)
    return dict(
        prompt=message("user", order),
        completion=message("assistant", reply),
        task=task,
    )


def write_corpus(path, seed, rows):
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for i in rows:
            file.write(json.dumps(corpus_row(seed, i), ensure_ascii=False) + "\n")
            if (i + 1) % 20000 == 0:
                print(f"corpus: row {i + 1} of {rows.stop}", flush=True)


# ---- 5. files ---------------------------------------------------------------------------------


def jsonl(rows):
    rows = sorted(rows, key=lambda row: row["id"])
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_csv(rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def make_files(seed):
    """{file name: text}, and the pairs that the statistics are about."""
    prompts = {split: cases(seed, split) for split in SPLITS}
    train = policy_pairs(seed, "pair-train", prompts["train"], PAIRS["train"])
    rank = rank_pairs(seed, "train", RANK_PAIRS["train"])
    # more pairs than rows: those too close to call are left out
    test = policy_pairs(seed, "pair-test", prompts["test"], PAIRS["test"] * 2)
    rank_test = rank_pairs(seed, "test", RANK_PAIRS["test"] * 2)
    screen = screen_pairs(seed, SCREEN_PAIRS)
    sample = policy_pairs(seed, "pair-sample", prompts["train"][:300], 120)
    checked, judged = rubrics.rubric_files(partial(rng_for, seed))
    tables = dict(
        prompts=[prompt_row(case) for part in prompts.values() for case in part],
        prefs=sample_votes(seed, sample),
        prefs_train=noisy_votes(seed, train),
        prefs_test=true_order(test)[: PAIRS["test"]],
        rank_train=noisy_votes(seed, rank),
        rank_test=true_order(rank_test)[: RANK_PAIRS["test"]],
        screen_train=noisy_votes(seed, screen),
        prefs_biased=noisy_votes(seed, train, biased=True),
        rank_biased=noisy_votes(seed, rank, biased=True),
        screen_biased=noisy_votes(seed, screen, biased=True),
        items=items(seed, prompts["val"]),
        candidates=candidates(seed),
        twins=twins(seed),
    )
    whole = dict(interview=interview.BANK, rubrics=checked, rubrics_judge=judged)
    files = {f"{name}.jsonl": jsonl(rows) for name, rows in tables.items()}
    files["names.csv"] = as_csv(NAMES)
    for name, content in whole.items():
        files[f"{name}.json"] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return files, train, rank


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(Path(__file__).parent), help="folder of the files")
    parser.add_argument("--corpus", help="write only the corpus of the tiny base, to this file")
    parser.add_argument(
        "--corpus-run",
        type=int,
        choices=range(1, len(ENDS) + 1),
        default=1,
        help="rows of which run of sft.py",
    )
    args = parser.parse_args()
    if args.corpus:
        rows = range((0, *ENDS)[args.corpus_run - 1], ENDS[args.corpus_run - 1])
        write_corpus(args.corpus, args.seed, rows)
        return
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    files, train, rank = make_files(args.seed)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {out / name}: {len(text.encode())} bytes", flush=True)
    first, lines = card.numbers(args.seed, files, train, rank, partial(cast, args.seed), harsher)
    print("\n".join([first, *lines]))
    if (out / "README.md").exists():
        card.write_card(out / "README.md", first, lines)


if __name__ == "__main__":
    main()
