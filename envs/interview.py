"""envs/interview.py: a job interview with a scripted candidate, an environment of grpo_agent.py.

    --env envs/interview.py:Interview --env-args '{"k": 4, "text": "full"}'

k           competencies to find out about, 1 to 6: no more than the bank's smallest role has
text        how the candidate speaks: "short", or "full" for chat models
bank        a file in the form of data/interview.json: roles, competencies, evidence, wordings

The candidate has a hidden profile. For each competency it is open (tells its evidence when asked
about past work), reserved (an outline first, the evidence after a specific follow-up), or has none.
The interviewer asks N = k + k // 2 questions, then writes SUMMARY and a line per competency:
"competency: what the candidate said", or "competency: no evidence".

R = max(−1, correct lines / k − Σ FINES), at the end. A line is correct if it has the thing and
the number that the candidate stated in this episode, or if the candidate said that there is none
and the line is "no evidence". It is unsupported, and fined, if it says what the candidate did not:
another thing of the bank, another number, or nothing of what was told.
"""

import functools
import json
import random
import re
from collections import Counter
from pathlib import Path

from parts.texts import asked_sentences, normal_form, number_of_requests, risky_questions

BANK = Path(__file__).resolve().parents[1] / "data/interview.json"
KINDS = ("behavioural", "hypothetical", "specific", "closed")  # the first match, else "other"
FINES = {  # for each turn or line that has the fault
    "risky": 0.25,
    "prohibited": 0.25,  # a risky question that the law prohibits costs both
    "many_questions": 0.1,
    "many_topics": 0.1,
    "over_long": 0.1,
    "repeated": 0.1,
    "unsupported": 0.15,
    "no_summary": 0.25,
}
SUMMARY = re.compile(r"(?im)^[\s*#>•_-]*summary\b.*")


# ---- reading ----


def words(text):
    """Words between blanks, so that " 4 percent " is not in " 34 percent ".

    >>> words("Ａ 4% rise.")
    ' a 4 percent rise '
    """
    found = re.findall(r"[^\W_]+", normal_form(text))
    return f" {' '.join(found)} "


@functools.lru_cache
def read_bank(path):
    """A bank with its cues compiled under "read", keys normalised; ValueError if one is missing."""
    bank = json.loads(Path(path).read_text(encoding="utf-8"))
    topics, things = {}, set()
    for name, competency in bank["competencies"].items():
        topics |= {normal_form(phrase): name for phrase in competency["phrases"]}
        for item in competency["evidence"]:
            item["keys"] = [words(key) for group in item["keys"] for key in group]
            things.add(item["keys"][0])
            if any(key not in words(item[f]) for f in ("full", "short") for key in item["keys"]):
                raise ValueError(f"{path}: {item['short']!r} lacks one of its keys in a text")
    longest = sorted(map(re.escape, topics), key=len, reverse=True)  # of nested phrases one counts
    bank["read"] = dict(
        lead_in=re.compile(rf"(?i)^(?:(?:{'|'.join(bank['cues']['lead_in'])})\b[ ,:.!]*)*"),
        kinds=[(kind, re.compile("(?i)" + "|".join(bank["cues"][kind]))) for kind in KINDS],
        phrase=re.compile(rf"\b(?:{'|'.join(longest)})\b"),
        topics=topics,
        things=things,
    )
    return bank


def read_turn(bank, text):
    """(number of requests, kind, competencies named: the one that the turn is about first)"""
    cues = bank["read"]
    requests = [cues["lead_in"].sub("", sentence) for _, sentence in asked_sentences(text)]
    kinds = [kind for kind, cue in cues["kinds"] if any(map(cue.search, requests))]
    find = cues["phrase"].findall
    phrases = find(" ".join(requests)) or find(normal_form(text))  # else beside the request
    topics = Counter(map(cues["topics"].get, dict.fromkeys(phrases)))
    by_phrases = sorted(topics, key=topics.get, reverse=True)  # of equal ones the first named
    return number_of_requests(text), [*kinds, "other"][0], by_phrases


# ---- the candidate ----


class Interview:
    """heard {competency: item told}, denied, outlined: what the candidate has said so far."""

    name, val_key, history = "interview", "correct", "all"

    def __init__(self, k=4, text="short", bank=BANK):
        self.bank, self.k, self.text = read_bank(bank), k, text
        self.turns = k + k // 2  # what an interviewer who listens needs
        self.max_turns = self.turns + 1  # and the summary

    def reset(self, seed):
        self.rng = rng = random.Random(seed)
        bank, k = self.bank, self.k
        self.role = rng.choice(sorted(bank["roles"]))
        self.competencies = rng.sample(bank["roles"][self.role], k)
        self.items = {c: rng.choice(bank["competencies"][c]["evidence"]) for c in self.competencies}
        states = ["reserved"] * (k // 2) + [rng.choice(("open", "none"))]
        states += ["open"] * (k - len(states))
        rng.shuffle(states)
        self.states = dict(zip(self.competencies, states))
        self.heard, self.denied, self.outlined, self.last = {}, set(), set(), None
        self.questions, self.correct, self.unread = [], 0, 0
        self.faults = Counter(dict.fromkeys(FINES, 0))
        opening = bank["opening"].format(
            role=self.role, competencies=", ".join(self.competencies), turns=self.turns
        )
        return [{"role": "user", "content": opening}]

    def step(self, text):
        question, *summary = SUMMARY.split(text, 1)
        severities = [found["severity"] for found in risky_questions(question)]
        self.faults.update(risky=bool(severities), prohibited="prohibited" in severities)
        if summary or len(self.questions) == self.turns:
            reward, info = self.run_out(*summary)
            return None, reward, True, info
        reply = self.reply(text, severities)
        if len(self.questions) == self.turns:
            reply += f" {self.rng.choice(self.bank['replies']['final'])}"
        return {"role": "user", "content": reply}, 0.0, False, self.info()

    def reply(self, text, risky):
        """The candidate's answer to a question; what is wrong with the question goes to faults."""
        requests, kind, topics = read_turn(self.bank, text)
        about = topics[0] if topics else self.last if kind == "specific" else None
        matter, turn_words = set(topics) or {about}, set(words(text).split())
        again = any(
            matter == m and len(turn_words & w) >= 0.8 * len(turn_words | w)
            for m, w in self.questions
        )
        follows = about in self.outlined and kind == "specific"
        answered = about in self.heard or about in self.denied
        flaws = dict(
            many_questions=requests >= 2,
            many_topics=len(topics) >= 3,
            over_long=len(text.split()) > 40,
        )
        self.faults.update(
            flaws, repeated=again or answered or (about in self.outlined and not follows)
        )
        self.questions.append((matter, turn_words))
        self.unread += not requests
        self.last = about
        reasons = dict(  # for an answer without evidence; the first one holds
            risky=risky,
            one_question=any(flaws.values()),
            repeated=again,
            no_request=not requests,
            small_talk=about is None,
            intentions=kind == "hypothetical",
            yes=kind not in ("behavioural", "specific"),
            exposure=about not in self.competencies,
            as_said=answered,
        )
        for reason, holds in reasons.items():
            if holds:
                return self.rng.choice(self.bank["replies"][reason])
        state = self.states[about]
        if state == "none":
            self.denied.add(about)
        elif state == "reserved" and not follows:
            self.outlined.add(about)
            state = "outline"
        else:
            self.heard[about] = item = self.items[about]
            return item[self.text]
        return self.rng.choice(self.bank["competencies"][about][state])

    def run_out(self, summary=""):
        """(reward, info) at the end: the lines of the summary are counted.

        A line may open with a list mark; bold and italics count for nothing. Two lines about one
        competency are both unsupported. No line at all is the fault `no_summary`.
        """
        summary = normal_form(summary)
        lines = {
            c: re.findall(rf"(?im)^[\W\d_]*{re.escape(c)}[\W_]*:(.*)", summary)
            for c in self.competencies
        }
        verdicts = Counter(
            self.read_line(c, text) if len(texts) == 1 else "unsupported"
            for c, texts in lines.items()
            for text in texts
        )
        self.correct = verdicts["correct"]
        self.faults.update(no_summary=not any(lines.values()), unsupported=verdicts["unsupported"])
        fines = sum(FINES[fault] * n for fault, n in self.faults.items())
        return max(-1.0, self.correct / self.k - fines), self.info()

    def read_line(self, competency, line):
        """Whether a line is "correct", "incomplete" (worth nothing) or "unsupported"."""
        line, own = words(line), self.heard.get(competency, {"keys": []})["keys"]
        if line == words(self.bank["no_evidence"]):
            return "correct" if competency in self.denied else "incomplete"
        told = " ".join(item[self.text] for item in self.heard.values())
        facts = {key for key in self.bank["read"]["things"] | {*own} if key in line}
        new = facts - {*own} | {*re.findall(r"\d+", line)} - {*re.findall(r"\d+", told)}
        if new or not facts:
            return "unsupported"
        return "correct" if len(facts) == len(own) else "incomplete"

    def info(self):
        revealed = len(self.heard) + len(self.denied)
        return {
            "correct": self.correct / self.k,
            "revealed": revealed / self.k,
            "reported": self.correct / max(1, revealed),
            "questions": len(self.questions),
            "invalid": self.unread,
            **{f"fault/{fault}": count for fault, count in self.faults.items()},
        }


# ---- baselines: (env, rng) → text; all are perfect reporters ----


def ask(env, rng, kind, competency):
    """A question of this kind about a competency, in one of the bank's wordings."""
    return rng.choice(env.bank["templates"][kind]).format(c=competency)


def report(env):
    lines = [
        env.heard[c]["short"] if c in env.heard else f"{c}: {env.bank['no_evidence']}."
        for c in env.competencies
    ]
    return "\n".join(["SUMMARY", *lines])


def oracle(env, rng):
    """Follows up where only an outline came: as good as one who sees the profile."""
    todo = [c for c in env.competencies if c not in env.heard and c not in env.denied]
    if not todo or len(env.questions) == env.turns:
        return report(env)
    return ask(env, rng, "specific" if todo[0] in env.outlined else "behavioural", todo[0])


def fixed(env, rng, follow_ups=False):
    """A behavioural question per competency, in order; with follow_ups blind specific ones, too."""
    n = len(env.questions)
    if n < env.k:
        return ask(env, rng, "behavioural", env.competencies[n])
    if follow_ups and n < env.turns:
        return ask(env, rng, "specific", env.competencies[n - env.k])
    return report(env)


def at_random(env, rng):
    """Behavioural and specific questions about any of the competencies."""
    if len(env.questions) == env.turns:
        return report(env)
    return ask(env, rng, rng.choice(("behavioural", "specific")), rng.choice(env.competencies))


Interview.baselines = {
    "oracle": oracle,
    "fixed": fixed,
    "fixed+": functools.partial(fixed, follow_ups=True),
    "random": at_random,
}
