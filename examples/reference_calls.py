"""A score for summaries of reference calls, and preference pairs from a model's own answers.

python examples/reference_calls.py written --out written.jsonl    summaries made of the facts, for sft.py
python examples/reference_calls.py pairs --model MODEL --out pairs.jsonl    several answers, best and worst
python examples/reference_calls.py answers --model MODEL --out answers.jsonl    one to each test call

data/reference_calls.jsonl has a call in each prompt and, beside it, what a good summary holds:

    strengths, concerns   [{"said": …, "keys": ["waste", "14", "9"]}], word beginnings, | between equals
    hire                  yes, no or unsure: would the referee hire the person again?
    small_talk            [[key, …]]: what no summary should hold

    score = .5·kept + .2·hire + .3·(1 − new)
            − .2·invented − .1·small talk − .2·first person − .3·repeated − over

    kept          mean over strengths and concerns of the share of keys that the summary has
    hire          1 if the summary's last sentence on hiring says what the referee said
    new           share of its longer words that begin like no word of the call
    invented      numbers and names that the call does not have, at most 2
    small talk    topics of small talk in it, at most 2
    over          words beyond 50 ÷ 50, at most .5
    An empty answer, and one of fewer than 8 words, is worth 0.

`reward` has the signature of --gold and --reward-fn. Copy this file to score a task of your own.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # to be run from anywhere

CALLS = ROOT / "data" / "reference_calls.jsonl"
MOST_WORDS = 50  # that the prompt asks for
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+")
# words of any summary, which no call needs to hold
SUMMARY = """strengths strength concerns concern evidence referee reference summary would hire rehire
again candidate their they them with from that this which while when where have does also about into
than being been were said says stated praised noted mentioned described recommends recommended
overall including such despite although however none positive employee worked works role""".split()
FIRST_PERSON = {"i", "i'd", "i'm", "i've", "i'll", "my", "me", "we", "we'd", "our", "us", "mine"}
AGAIN = re.compile(r"\b(?:again|back|rehire|re-hire|rehired)\b")
UNSURE = re.compile(
    r"\b(?:unsure|sure|depend|depends|maybe|might|perhaps|uncertain|unclear|hesitant|hesitate)\b"
)
NO = re.compile(r"\b(?:not|no|never|n't|wouldn't|won't|cannot|can't)\b")


def words(text):
    """Words and numbers in lower case.

    >>> words("Cut waste by 14%, didn't she?")
    ['cut', 'waste', 'by', '14', "didn't", 'she']
    """
    return WORD.findall(text.lower().replace("’", "'"))


def has(key, text):
    """Does a word of the text begin with the key, or with one of its alternatives? A number is
    meant whole.

    >>> has("scrap|waste", "cut wasted food"), has("14", "in 2014"), has("14", "14.5")
    (True, False, False)
    """
    equals = [re.escape(k) + r"(?!\.?\d)" * k[-1].isdigit() for k in key.split("|")]
    return bool(re.search(rf"(?<![a-z0-9.])(?:{'|'.join(equals)})", text))


def verdict(text):
    """yes, no or unsure by the last sentence that speaks of hiring again; None if none does. The
    task itself ("whether the referee would hire her again") is no verdict.

    >>> verdict("Good with people. Would not hire him again."), verdict("Fast and kind.")
    ('no', None)
    """
    sentences = re.split(r"[.!?\n]+", text.lower().replace("’", "'"))
    about = [s for s in sentences if AGAIN.search(s) or ("hire" in s and "would" in s)]
    about = [s for s in about if "whether" not in s]
    if not about:
        return None
    if UNSURE.search(about[-1]):
        return "unsure"
    return "no" if NO.search(about[-1]) else "yes"


def note(row):
    """The call, without the task that stands before it."""
    return row["prompt"][-1]["content"].partition("\n\n")[2]


def marks(row, answer):
    """{"score", "kept", "hire", "new", "invented", …} of one answer; see the head of this file.

    row: one of CALLS
    """
    call, text = note(row), answer.lower().replace("’", "'")
    said, heard = words(answer), set(words(f"{row['name']} {row['role']} {call}"))
    facts = row["strengths"] + row["concerns"]
    kept = fmean(fmean(has(key, text) for key in fact["keys"]) for fact in facts)
    long = [w for w in said if len(w) > 3 and w not in SUMMARY and not w.isdigit()]
    begins = {w[:5] for w in heard}
    new = fmean([w[:5] not in begins for w in long] or [0])
    names = re.findall(r"(?<=[a-z,;] )[A-Z][a-z]+", answer)  # capitals inside a sentence
    invented = {w for w in said if w.isdigit() and w not in heard}
    invented |= {n for n in names if n.lower() not in heard and n.lower() not in SUMMARY}
    sentences = [s.strip() for s in re.split(r"[.!?\n]+", text) if s.strip()]
    m = {
        "kept": kept,
        "hire": float(verdict(answer) == row["hire"]),
        "new": new,
        "invented": len(invented),
        "small_talk": sum(all(has(k, text) for k in topic) for topic in row["small_talk"]),
        "first_person": float(bool(FIRST_PERSON & set(said))),
        "repeated": float(len(set(sentences)) < len(sentences)),
        "words": len(answer.split()),
    }
    over = min(0.5, max(0, m["words"] - MOST_WORDS) / MOST_WORDS)
    score = 0.5 * kept + 0.2 * m["hire"] + 0.3 * (1 - new) - 0.2 * min(2, m["invented"])
    score -= 0.1 * min(2, m["small_talk"]) + 0.2 * m["first_person"] + 0.3 * m["repeated"] + over
    return {"score": 0.0 if m["words"] < 8 else score, **m}


def reward(prompts, answers, rows):
    """The scores of answers, for --gold and --reward-fn. rows: those of CALLS."""
    return [marks(row, answer)["score"] for row, answer in zip(rows, answers)]


# ---- summaries made of the facts, answers of a model, and pairs of them ----

AGAIN_SAID = {
    "yes": "would hire {} again",
    "no": "would not hire {} again",
    "unsure": "is unsure about hiring {} again",
}


def written(row):
    """The summary that the facts make: what a person who took notes would write.

    >>> row = {"name": "Amy Ng", "hire": "no", "strengths": [{"said": "cut waste by 14 percent"}]}
    >>> written({**row, "concerns": []})
    'Strengths: cut waste by 14 percent. Concerns: none. The referee would not hire Amy again.'
    """
    said = {k: "; ".join(f["said"] for f in row[k]) or "none" for k in ("strengths", "concerns")}
    again = AGAIN_SAID[row["hire"]].format(row["name"].split()[0])
    return f"Strengths: {said['strengths']}. Concerns: {said['concerns']}. The referee {again}."


def calls(split, skip=0, limit=None):
    """Rows of CALLS of one split, in the file's order."""
    rows = [json.loads(line) for line in CALLS.open(encoding="utf-8")]
    return [row for row in rows if row["split"] == split][skip : limit and skip + limit]


def draw(args, rows):
    """--samples answers to each row, lists of texts."""
    from parts.votes import sample

    n = args.samples
    texts = sample("--model", args.model, rows, args, args.seed, n)
    return [texts[i : i + n] for i in range(0, len(texts), n)]


def summary(marked):
    """A line of means of `marks`."""
    names = ("score", "kept", "hire", "new", "invented", "first_person", "small_talk", "words")
    return "  ".join(f"{name} {fmean(m[name] for m in marked):.2f}" for name in names)


def write_written(args):
    """Training calls with the summaries that their facts make."""
    from parts.files import write_jsonl

    rows, texts = calls("train", args.skip, args.limit), []
    for row in rows:
        texts.append([{"role": "assistant", "content": written(row)}])
    write_jsonl(args.out, [{"prompt": r["prompt"], "completion": t} for r, t in zip(rows, texts)])
    print(f"{len(rows)} summaries   {summary([marks(row, written(row)) for row in rows])}")


def write_pairs(args):
    """The best and the worst of --samples answers to each training call, where they differ."""
    from parts.files import write_jsonl

    rows = calls("train", args.skip, args.limit)
    pairs, drawn = [], []
    for row, texts in zip(rows, draw(args, rows)):
        marked = sorted(((marks(row, t), t) for t in texts), key=lambda m: m[0]["score"])
        drawn += [m for m, _ in marked]
        (least, worst), (most, best) = marked[0], marked[-1]
        if most["score"] - least["score"] >= args.gap:
            answers = {"chosen": best, "rejected": worst}
            sides = {k: [{"role": "assistant", "content": t}] for k, t in answers.items()}
            pairs.append({"prompt": row["prompt"], **sides})
    write_jsonl(args.out, pairs)
    print(f"{len(drawn)} answers   {summary(drawn)}")
    print(f"{len(pairs)} pairs of {len(rows)} calls written to {args.out}")


def write_answers(args):
    """--samples answers to each call of --split, with their marks."""
    from parts.files import write_jsonl

    rows = calls(args.split, args.skip, args.limit)
    out = []
    for row, texts in zip(rows, draw(args, rows)):
        out += [{"id": row["id"], "answer": t, **marks(row, t)} for t in texts]
    write_jsonl(args.out, out)
    print(f"{len(out)} answers   {summary(out)}")


def main(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("written", "pairs", "answers"))
    parser.add_argument("--model", help="model folder or hub id, of pairs and answers")
    parser.add_argument("--out", required=True, help="JSONL to write")
    parser.add_argument("--split", default="test", help="of answers: train, val or test")
    parser.add_argument("--samples", type=int, help="answers to a call (pairs 6, answers 1)")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out the first calls of the split"
    )
    parser.add_argument("--limit", type=int, help="at most this many calls")
    parser.add_argument(
        "--gap", type=float, default=0.1, help="least difference of a pair's scores"
    )
    parser.add_argument("--temperature", type=float, default=0.9, help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    args = parser.parse_args(argv)
    if args.command != "written" and not args.model:
        parser.error(f"--model is needed for {args.command}")
    args.samples = args.samples or {"pairs": 6}.get(args.command, 1)
    run = {"written": write_written, "pairs": write_pairs, "answers": write_answers}
    run[args.command](args)


if __name__ == "__main__":
    main()
