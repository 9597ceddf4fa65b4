"""proofread.py: an answer, and what is right and wrong about it, in words. Part of the base's corpus.

    findings(prompt, answer)     lines such as "Strengths: left out sql; invented kafka."
    proofreading(rng, split)     a row of the corpus: prompt, answer, "Proofread this answer." → the findings

A reward model starts from the base. If the base never had to compare an answer with its prompt, the
reward model judges by form and length. These rows teach the comparison, and say nothing about what
anybody prefers.
"""

import grammar
import recruiter
from grammar import message

ORDER = "Proofread this answer."


def listed(found):
    """ "left out sql, python; invented kafka" from {words: skills}; "all right" if there is
    nothing to say."""
    said = [f"{words} {', '.join(skills)}" for words, skills in found.items() if skills]
    return "; ".join(said) or "all right"


def right_or(right, words):
    return "all right" if right else words


def skill_findings(line, wanted, allowed, truth):
    """What is wrong with a line of skills with evidence in brackets, as `recruiter.skill_line`
    counts it."""
    named, invented, quoted = recruiter.named_skills(line, allowed)
    facts = truth.shown | dict.fromkeys(truth.claimed, "claimed")
    wrong = [s for s, told in quoted.items() if s in allowed and told != facts.get(s)]
    missing = [s for s in wanted if s not in named]
    bare = [s for s in wanted if s in truth.shown and s in named and s not in quoted]
    return listed(
        {"left out": missing, "invented": invented, "wrong fact for": wrong, "no fact for": bare}
    )


def assess(truth, answer):
    (strong, gaps, verdict), _, outside = recruiter.labelled(answer, recruiter.LABELS["assess"])
    proven = [s for s in truth.must if s in truth.shown]
    told = recruiter.skills_in(gaps or "")
    found = {
        "left out": [s for s in truth.gaps if s not in told],
        "not a gap:": [s for s in told if s not in truth.gaps],
    }
    right = recruiter.DECISION.findall(verdict or "") == [truth.decision]
    short = recruiter.ending(verdict, outside, len(answer.split()), 70)
    return [
        f"Strengths: {skill_findings(strong or '', proven, truth.shown, truth)}.",
        f"Gaps: {listed(found)}.",
        f"Recommendation: {right_or(right, f'has to be {truth.decision}')}.",
        f"Length: {right_or(short, 'too much')}.",
    ]


def summary(truth, answer):
    (skills, teamwork, concerns), _, outside = recruiter.labelled(
        answer, recruiter.LABELS["summary"]
    )
    known = list(truth.shown) + truth.claimed
    short = recruiter.ending(concerns, outside, len(answer.split()), 80)
    return [
        f"Skills: {skill_findings(skills or '', known, known, truth)}.",
        f"Teamwork: {told(teamwork, truth.teamwork, 'not discussed')}.",
        f"Concerns: {told(concerns, truth.concerns, 'none')}.",
        f"Length: {right_or(short, 'too much')}.",
    ]


def told(line, facts, none):
    """What is wrong with a line of teamwork or concerns."""
    right = recruiter.observed(line, facts, none)
    return right_or(right, f"has to be {', '.join(facts) or none}")


def interview(truth, answer):
    parts = recruiter.interview(truth, answer)
    asked = recruiter.requests(answer)
    named = sorted(set(recruiter.skills_in(" ".join(asked))))
    kinds = [f"{s}, a gap" if s in truth.gaps else f"{s}, shown" if s in truth.shown else f"{s}, not asked for" for s in named]  # fmt: skip
    yes = {name: right_or(value, "no") for name, (_, value) in parts.items()}
    return [
        f"One question: {yes['one question']}.",
        f"Skill: {'; '.join(kinds) or 'none'}.",
        f"Open: {yes['open']}.",
        f"Picks up what was said: {yes['picks up']}.",
    ]


def rank(truth, profile):
    shown, claimed, _ = recruiter.sort_out(profile)
    sides = {
        "Shown": [s for s in truth.must if s in shown],
        "Claimed": [s for s in truth.must if s in claimed and s not in shown],
        "Missing": [s for s in truth.must if s not in shown and s not in claimed],
    }
    return [f"{side}: {', '.join(skills) or 'none'}." for side, skills in sides.items()]


def findings(prompt, answer):
    """The lines of a proofreader, by the same readers as the recruiter's."""
    truth = recruiter.read(prompt)
    parts = {"assess": assess, "interview": interview, "summary": summary, "rank": rank}
    lines = parts[truth.task](truth, answer.strip().lower())
    if truth.task != "rank" and recruiter.gated(answer.lower()):
        lines.append("Not to be said.")  # a private fact, or the same sentence twice
    return "\n".join(lines)


def proofreading(rng, split):
    """A row of the corpus: three messages and the findings."""
    task = rng.choices(("assess", "interview", "rank", "summary"), (4, 2, 2, 3))[0]
    case = grammar.make_case(rng, task, split)
    prompt = grammar.prompt(case)
    answer = grammar.profile(case) if task == "rank" else grammar.answer(rng, case, rng.random())
    turns = message("user", prompt) + message("assistant", answer) + message("user", ORDER)
    completion = message("assistant", findings(prompt, answer))
    return dict(prompt=turns, completion=completion, task="proofread")
