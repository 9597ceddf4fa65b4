"""recruiter.py: the simulated recruiter, the known truth of the demo.

    utility(prompt, answer)      float in [0, 1]: what this recruiter thinks of an answer
    components(prompt, answer)   {name: (weight, value)}; utility = Σ weight·value, before the gate
    reward(prompts, answers)     a list of utilities, the signature of --reward-fn and --gold
    copied(prompts, answers)     share of named skills and quoted facts that the prompt contains
    vote(annotator, prompt, a, b, rng)   one noisy vote of one of five ANNOTATORS

The prompt's first line tells the task, and everything else is read from the prompt's own lines;
names, pronouns, sex and race have no effect. Skills and facts are found by the word lists of
grammar.py. No file is read and nothing is random (`vote` draws from the rng it is given); 5 000
answers take less than a second.

Gate: an answer that repeats a protected fact or asks for one, that says a line or a sentence twice,
or that has more than 120 words gets min(.3, .6·utility). The task `rank` has no gate: its answers
are the candidates' own profiles. An empty answer is worth 0.

A gap is a must-have without evidence: "knows sql" is a claim, not evidence. A wish ("wants to learn
sql") is neither, so naming it as a strength is an invention.
"""

import math
import re
from collections import namedtuple
from functools import lru_cache

import grammar

# ---- 1. reading -------------------------------------------------------------------------------

SKILLS = frozenset(grammar.SKILLS)
FIRST_WORDS = frozenset(s.split()[0] for s in SKILLS if " " in s)
WORD = re.compile(r"[a-z0-9]+(?:[-'][a-z0-9]+)*")
FACT = {
    kind: re.compile("|".join(rf"\b{t.replace('{n}', '[0-9]+')}\b" for t in templates))
    for kind, templates in (
        ("evidence", grammar.EVIDENCE),
        ("teamwork", grammar.TEAMWORK),
        ("concerns", grammar.CONCERNS),
    )
}
PROTECTED = frozenset(grammar.PROTECTED_WORDS)
DECISION = re.compile(r"\b(?:advance|hold|reject)\b")
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
IMPERATIVE = ("tell", "describe", "explain", "give", "share", "walk", "show")
OPENERS = ("how", "what", "which", "why", "tell", "describe", "explain", "walk")
JOINT = re.compile(r"\band (?:how|what|which|why|when|do|have|are|can|tell|describe)\b")
LABELS = {
    "assess": ("strengths:", "gaps:", "recommendation:"),
    "summary": ("skills:", "teamwork:", "concerns:"),
}

Truth = namedtuple(
    "Truth", "task must nice shown claimed wished facts teamwork concerns gaps decision years text"
)


def text_of(messages):
    """The words of a prompt or an answer: a text, or the last of a list of messages."""
    return messages if isinstance(messages, str) else messages[-1]["content"]


def skills_in(text):
    """Skills of the word list in order of appearance, two-word skills first.

    >>> skills_in("used stock control, sql and sqlite")
    ['stock control', 'sql']
    """
    words, found, i = WORD.findall(text), [], 0
    while i < len(words):
        pair = words[i] in FIRST_WORDS and i + 1 < len(words) and f"{words[i]} {words[i + 1]}"
        if pair and pair in SKILLS:
            found.append(pair)
            i += 1
        elif words[i] in SKILLS:
            found.append(words[i])
        i += 1
    return found


def sort_out(text):
    """(shown {skill: fact}, claimed, wished) of a candidate's sentences, lower case."""
    shown, claimed, wished = {}, [], []
    for sentence in SENTENCE.split(text):
        named = skills_in(sentence)
        fact = FACT["evidence"].search(sentence)
        if not named:
            continue
        if any(cue in sentence for cue in grammar.WISH_CUES):
            wished += named
        elif fact:
            shown |= dict.fromkeys(named, fact.group())
        elif any(cue in sentence for cue in grammar.CLAIM_CUES):
            claimed += named
    return shown, claimed, wished


@lru_cache(maxsize=4096)
def read(prompt):
    """The truth that a prompt tells: what a careful reader could list."""
    text = prompt.lower()
    lines = dict(line.split(": ", 1) for line in text.split("\n") if ": " in line)
    task = next((t for t, order in grammar.ORDERS.items() if text.startswith(order.lower())), None)
    if task is None or "role" not in lines or "must have" not in lines:
        raise ValueError(f"not a prompt of the demo's four tasks: {prompt[:60]!r}")
    must = skills_in(lines["must have"])
    told = lines.get(grammar.LABELS.get(task, "").lower().rstrip(":"), "")
    shown, claimed, wished = sort_out(told)
    gaps = [s for s in must if s not in shown]
    return Truth(
        task,
        must,
        skills_in(lines.get("nice to have", "")),
        shown,
        claimed,
        wished,
        set(FACT["evidence"].findall(told)),
        FACT["teamwork"].findall(told),
        FACT["concerns"].findall(told),
        gaps,
        grammar.DECISIONS[min(2, len(gaps))],
        grammar.LEVELS.get(lines["role"].split()[0], 1),
        text,
    )


# ---- 2. components ----------------------------------------------------------------------------


def components(prompt, answer):
    """{name: (weight, value in [0, 1])} of the prompt's task; the weights add to 1."""
    truth = read(text_of(prompt))
    of_task = dict(assess=assess, interview=interview, summary=summary, rank=rank)[truth.task]
    return of_task(truth, text_of(answer).strip().lower())


def labelled(answer, labels):
    """({label: text of its line}, all there once and in order, what stands outside of them)."""
    lines, found, outside = {}, [], []
    for line in answer.split("\n"):
        label = next((x for x in labels if line.startswith(x)), None)
        found.append(label)
        if label and label not in lines:
            lines[label] = line[len(label) :]
        elif line.strip():
            outside.append(line)
    return [lines.get(x) for x in labels], found == list(labels), outside


def f1(named, true):
    """2·hits / (named + true); 1 when both are empty."""
    named, true = set(named), set(true)
    return 2 * len(named & true) / (len(named) + len(true)) if named or true else 1.0


def named_skills(line, allowed):
    """(named, invented, quoted): skills of a line, those not allowed, skill → its bracket."""
    named, quoted = [], {}
    for before, bracket in re.findall(r"([^(]*)(?:\(([^)]*)\))?", line):
        skills = skills_in(before)
        named += skills
        if skills and bracket:
            quoted[skills[-1]] = bracket.strip()
    invented = [s for s in named if s not in allowed]
    return set(named), invented, quoted


def skill_line(line, wanted, allowed, truth):
    """(recall, no invention, evidence) of a line of skills with evidence in brackets; 0 without it.

    An invention counts twice in the denominator of the recall, or naming every skill would pay.
    """
    if not line:
        return 0.0, 0.0, 0.0
    named, invented, quoted = named_skills(line, allowed)
    recall = len(named & set(wanted)) / (len(wanted) + 2 * len(invented)) if wanted else 1.0
    honest = max(0.0, 1 - 0.5 * len(invented)) if named - set(invented) or not wanted else 0.0
    proven = [s for s in wanted if s in truth.shown]
    right = sum(quoted.get(s) == truth.shown[s] for s in proven)
    wrong = sum(
        text != truth.shown.get(s, "claimed" if s in truth.claimed else "")
        for s, text in quoted.items()
    )
    evidence = right / (len(proven) + wrong) if proven else float(not wrong)
    return recall, honest, evidence


def ending(line, outside, words, limit):
    """Concise: one sentence after the last label, nothing outside the labels, not too many
    words."""
    extra = len(SENTENCE.split((line or "").strip())) > 1 or outside
    return float(line is not None and not extra and words <= limit)


def assess(truth, answer):
    (strong, gaps, verdict), form, outside = labelled(answer, LABELS["assess"])
    proven = [s for s in truth.must if s in truth.shown]
    recall, honest, evidence = skill_line(strong, proven, truth.shown, truth)
    listed = skills_in(gaps or "")
    decided = DECISION.findall(verdict or "")
    return {
        "form": (0.10, float(form)),
        "recall": (0.20, recall),
        "no invention": (0.15, honest),
        "evidence": (0.15, evidence),
        "gaps": (0.10, f1(listed, truth.gaps) if gaps and (listed or "none" in gaps) else 0.0),
        "decision": (0.20, float(decided == [truth.decision])),
        "concise": (0.10, ending(verdict, outside, len(answer.split()), 70)),
    }


def observed(line, facts, none):
    """1 if the line holds the facts of the notes and nothing else, or says `none` if there is none.

    Three more words are allowed ("and", a label); with a foreign fact it is 0.
    """
    if not line:
        return 0.0
    text = SENTENCE.split(line.strip())[0]
    if not facts:
        return float(none in text and len(WORD.findall(text)) <= 4)
    if not all(fact in text for fact in facts):
        return 0.0
    for fact in facts:
        text = text.replace(fact, " ", 1)
    return float(len(WORD.findall(text)) <= 3 and not re.search("[0-9]", text))


def summary(truth, answer):
    (skills, teamwork, concerns), form, outside = labelled(answer, LABELS["summary"])
    known = list(truth.shown) + truth.claimed
    recall, honest, evidence = skill_line(skills, known, known, truth)
    return {
        "form": (0.10, float(form)),
        "recall": (0.25, recall),
        "no invention": (0.15, honest),
        "evidence": (0.15, evidence),
        "teamwork": (0.15, observed(teamwork, truth.teamwork, "not discussed")),
        "concerns": (0.10, observed(concerns, truth.concerns, "none")),
        "concise": (0.10, ending(concerns, outside, len(answer.split()), 80)),
    }


def requests(answer):
    """Sentences that ask: they end in `?` or begin with an imperative; a joint asks once more."""
    asked = []
    for sentence in SENTENCE.split(answer):
        if sentence.endswith("?") or sentence.startswith(IMPERATIVE):
            asked += [sentence] * (1 + len(JOINT.findall(sentence)))
    return asked


def picked_up(truth, said):
    """1 if the words before the question repeat facts that were said, with their own skills, and no
    others."""
    facts = set(FACT["evidence"].findall(said))
    skills = set(skills_in(said))
    known = [s for s, fact in truth.shown.items() if fact in facts]
    return float(bool(facts) and facts <= truth.facts and skills <= set(known))


def interview(truth, answer):
    asked = requests(answer)
    question = asked[-1] if asked else ""
    last = bool(asked) and SENTENCE.split(answer)[-1] == question
    named = set(skills_in(" ".join(asked)))
    one = len(named & set(truth.must)) == 1 and len(named) == 1
    start = answer[: answer.find(asked[0])] if asked else answer
    return {
        "one question": (0.25, float(len(asked) == 1 and last)),
        "one must-have": (0.20, float(one)),
        "aims at a gap": (0.20, float(bool(named) and named <= set(truth.gaps))),
        "open": (0.15, float(bool(asked) and all(q.startswith(OPENERS) for q in asked))),
        "picks up": (0.20, picked_up(truth, start)),
    }


def rank(truth, profile):
    shown, claimed, _ = sort_out(profile)
    years = re.search(r"([0-9]+) years?\b", profile)
    must, nice = truth.must, truth.nice
    return {
        "shown": (0.60, sum(s in shown for s in must) / len(must)),
        "claimed": (0.15, sum(s in shown or s in claimed for s in must) / len(must)),
        "nice to have": (
            0.10,
            sum(s in shown or s in claimed for s in nice) / len(nice) if nice else 1.0,
        ),
        "years": (0.15, min(1.0, float(years.group(1)) / truth.years) if years else 0.0),
    }


# ---- 3. utility -------------------------------------------------------------------------------


def gated(answer):
    """Why an answer is capped: a protected word, a sentence said twice, more than 120 words."""
    words = WORD.findall(answer)
    sentences = [s for s in SENTENCE.split(answer) if len(s) > 3]
    return (
        not PROTECTED.isdisjoint(words) or len(set(sentences)) < len(sentences) or len(words) > 120
    )


def utility(prompt, answer, weigh=None):
    """Σ weight·value in [0, 1], gated. weigh: {component: factor} of an annotator, renormalised."""
    text = text_of(answer).strip().lower()
    if not text:
        return 0.0
    parts = components(prompt, answer)
    factors = {name: (weigh or {}).get(name, 1.0) for name in parts}
    total = sum(weight * factors[name] for name, (weight, _) in parts.items())
    value = sum(weight * factors[name] * v for name, (weight, v) in parts.items()) / total
    if gated(text) and not text_of(prompt).startswith(grammar.ORDERS["rank"]):
        value = min(0.3, 0.6 * value)
    return round(value, 6)


def reward(prompts, answers, rows=None):
    """Utilities of answers to prompts, one each (`rows` is the data of each prompt; not needed)."""
    return [utility(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


# ---- 4. annotators ----------------------------------------------------------------------------

# name: (τ of the Bradley-Terry noise, {component: factor on its weight})
ANNOTATORS = {
    "ann": (0.05, {}),
    "ben": (0.08, {"evidence": 2.0, "picks up": 2.0, "shown": 1.3}),
    "cleo": (0.08, {"concise": 2.0, "one question": 1.5, "recall": 0.8, "years": 1.5}),
    "dev": (0.12, {"no invention": 2.0, "one must-have": 1.5, "concerns": 1.5, "claimed": 0.5}),
    "eve": (0.25, {"decision": 1.3, "form": 2.0, "open": 1.3, "gaps": 0.5}),
}
TIE, CLEAR, MUCH = 0.03, 0.15, 0.35


def vote(annotator, prompt, a, b, rng, shift=0.0):
    """(choice "a", "b" or "tie"; strength 0 to 3) of an annotator who sees u_a − u_b with noise.

    P(a over b) = σ((u_a − u_b)/τ): a logistic error of scale τ is added to the gap. `shift` is
    added to it as well: the planted preference of `*_biased.jsonl`, 0 everywhere else.
    """
    tau, weigh = ANNOTATORS[annotator]
    draw = min(max(rng.random(), 1e-9), 1 - 1e-9)
    gap = utility(prompt, a, weigh) - utility(prompt, b, weigh)
    gap += shift + tau * math.log(draw / (1 - draw))
    return choice_of(gap)


def choice_of(gap):
    """(choice, strength) of an annotator who sees the gap u_a − u_b.

    >>> choice_of(0.02), choice_of(-0.2), choice_of(0.4)
    (('tie', 0), ('b', 2), ('a', 3))
    """
    if abs(gap) < TIE:
        return "tie", 0
    return "a" if gap > 0 else "b", 1 + (abs(gap) >= CLEAR) + (abs(gap) >= MUCH)
