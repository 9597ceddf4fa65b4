"""envs/interview.py: a job interview with a scripted candidate, an environment of grpo_agent.py.

    --env envs/interview.py:Interview --env-args '{"k": 4, "text": "full"}'

k           competencies to find out about, 2 to 6
text        how the candidate speaks: "short", or "full" for chat models
bank        a file in the form of data/interview.json: roles, competencies, evidence, wordings

The candidate has a hidden profile. For each competency it is open (tells its evidence when asked
about past work), reserved (an outline first, the evidence after a specific follow-up), or has none.
The interviewer asks N = k + k // 2 questions, then writes SUMMARY and a line per competency.

R = clip(correct summary lines / k − Σ penalties, −1, 1), at the end. A line is correct if it has
the thing and the number that the candidate stated in this episode, or if the candidate said that
there is none and the line says "no evidence".
"""

import functools
import json
import random
import re
from collections import Counter
from pathlib import Path

from checks.risky import asked_sentences, normal_form, number_of_requests, risky_questions

BANK = Path(__file__).resolve().parent.parent / "data" / "interview.json"
KINDS = ("behavioural", "hypothetical", "specific", "closed")  # the first match, else "other"
FINES = {
    "many_questions": 0.1,
    "many_topics": 0.1,
    "over_long": 0.1,
    "repeated": 0.1,
    "unsupported": 0.15,
    "no_summary": 0.25,
}
MARKS = re.compile(r"^[\s#>•\d.)-]+|[*_]")  # of a list and of bold type; a name may hold them, too
SUMMARY = re.compile(r"^[\s*#>•_-]*summary\b.*", re.I | re.M)


# ---- reading ----


def words(text):
    """Words between blanks, so that " 4 percent " is not in " 34 percent ".

    >>> words("Ａ 4% rise.")
    ' a 4 percent rise '
    """
    return " " + " ".join(re.findall(r"\w+", normal_form(text))) + " "


@functools.lru_cache
def read_bank(path):
    """A bank with its cues compiled under "read", keys normalised; ValueError if it is wrong."""
    bank = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    cues, phrases, items = bank["cues"], {}, []
    for name, competency in bank["competencies"].items():
        items += competency["evidence"]
        # the longest first, so that nested phrases count once
        longest = sorted(map(normal_form, competency["phrases"]), key=len, reverse=True)
        phrases[name] = re.compile(rf"\b(?:{'|'.join(map(re.escape, longest))})\b")
    for item in items:
        item["keys"] = [[words(key) for key in group] for group in item["keys"]]
    first = [key for item in items for key in item["keys"][0]]
    bank["read"] = {
        "lead_in": re.compile(rf"^(?:(?:{'|'.join(cues['lead_in'])})\b[ ,:.!]*)*", re.I),
        "kinds": {kind: re.compile("|".join(cues[kind]), re.I) for kind in KINDS},
        "no_evidence": re.compile("|".join(cues["no_evidence"]), re.I),
        "phrases": phrases,
        "first": {*first},
    }
    for item in items:  # else a line would be correct by accident, or never
        matches = has_keys(item, words(item["full"])) + has_keys(item, words(item["short"]))
        if not all(matches) or any(first.count(key) > 1 for key in item["keys"][0]):
            raise ValueError(
                f"{item['short']!r} lacks its keys in a text, "
                "or has the same first key as another item"
            )
    return bank


def has_keys(item, text):
    """For the thing and for the number of an item: is one of its keys in the text?"""
    return [any(key in text for key in group) for group in item["keys"]]


def read_turn(bank, text):
    """(number of requests, kind, competencies named: the one that the turn is about first)"""
    cues = bank["read"]
    requests = [cues["lead_in"].sub("", sentence) for _, _, sentence in asked_sentences(text)]
    kinds = (kind for kind, cue in cues["kinds"].items() if any(map(cue.search, requests)))
    for place in (" ".join(requests), normal_form(text)):  # else what stands beside the request
        topics = sorted(
            (-len(set(cue.findall(place))), cue.search(place).start(), name)
            for name, cue in cues["phrases"].items()
            if cue.search(place)
        )
        if topics:
            break
    return number_of_requests(text), next(kinds, "other"), [name for *_, name in topics]


# ---- the candidate ----


class Interview:
    """heard {competency: item told}, denied, outlined: what the candidate has said so far."""

    name, val_key, reward_range, history = "interview", "correct", (-1, 1), "all"

    def __init__(self, k=4, text="short", bank=BANK):
        self.bank, self.k, self.text = read_bank(bank), k, text
        fewest = min(map(len, self.bank["roles"].values()))
        if not 2 <= k <= fewest:
            raise ValueError(f"k {k}: expected 2 to {fewest}, what each role of the bank has")
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
        self.states = dict(zip(self.competencies, states, strict=True))
        self.heard, self.denied, self.outlined, self.last = {}, set(), set(), None
        self.questions, self.moves, self.numbers = [], [], set()  # numbers: all in the replies
        self.faults, self.fines, self.correct, self.unread = Counter(), 0.0, 0, 0
        names = ", ".join(self.competencies)
        opening = bank["opening"].format(role=self.role, competencies=names, turns=self.turns)
        return [{"role": "user", "content": opening}]

    def fine(self, name, amount=None):
        self.faults[name] += 1
        self.fines += amount or FINES[name]

    def step(self, text):
        question, *summary = SUMMARY.split(text, 1)
        risky = risky_questions(question)
        if risky:  # the worst of the turn
            self.fine("risky", 0.5 if any(r["severity"] == "prohibited" for r in risky) else 0.25)
        if not summary and len(self.questions) < self.turns:
            reply = self.reply(text, risky)
            if len(self.questions) == self.turns:
                reply += f" {self.say('final')}"
            return {"role": "user", "content": reply}, 0.0, False, self.info()
        reward, info = self.run_out(*summary)
        return None, reward, True, info

    def say(self, key):
        return self.rng.choice(self.bank["replies"][key])

    def reply(self, text, risky):
        requests, kind, topics = read_turn(self.bank, text)
        about = topics[0] if topics else self.last if kind == "specific" else None
        matter, turn_words = set(topics) or {about}, set(words(text).split())
        again = any(
            matter == m and len(turn_words & w) >= 0.8 * len(turn_words | w)
            for m, w in self.questions
        )
        follows = about in self.outlined and kind == "specific"
        answered = about in self.heard or about in self.denied
        faults = {
            "many_questions": requests >= 2,
            "many_topics": len(topics) >= 3,
            "over_long": len(text.split()) > 40,
            "repeated": again or answered or (about in self.outlined and not follows),
        }
        for name, occurred in faults.items():
            if occurred:
                self.fine(name)
        place = self.competencies.index(about) if about in self.competencies else -1
        self.questions.append((matter, turn_words))
        self.moves.append((kind, place))
        self.unread += not requests
        self.last = about
        clumsy = faults["many_questions"] or faults["many_topics"] or faults["over_long"]
        reasons = {  # for an answer without evidence; the first one holds
            "risky": risky,
            "one_question": clumsy,
            "repeated": again,
            "no_request": not requests,
            "small_talk": about is None,
            "intentions": kind == "hypothetical",
            "yes": kind not in ("behavioural", "specific"),
            "exposure": place < 0,
            "as_said": answered,
        }
        key = next((key for key, holds in reasons.items() if holds), None)
        return self.say(key) if key else self.evidence(about, follows)

    def evidence(self, about, follows):
        """What the candidate tells about a competency when asked about past work."""
        wordings = self.bank["competencies"][about]
        if self.states[about] == "none":
            self.denied.add(about)
            return self.rng.choice(wordings["none"])
        if self.states[about] == "reserved" and not follows:
            self.outlined.add(about)
            return self.rng.choice(wordings["outline"])
        self.heard[about] = self.items[about]
        text = self.items[about][self.text]
        self.numbers |= set(re.findall(r"\d+", text))
        return text

    def run_out(self, summary=""):
        """(reward, info) at the end: correct lines are counted, unsupported ones fined.

        List marks and bold count for nothing. No line at all is the fault `no_summary`.
        """
        lines, names = {}, {normal_form(MARKS.sub("", c)): c for c in self.competencies}
        for line in summary.splitlines():
            name, colon, text = MARKS.sub("", line.strip()).partition(":")
            if colon and normal_form(name) in names:
                text = " ".join(text.split()[:40])  # words after the 40th are not read
                lines.setdefault(names[normal_form(name)], []).append(text)
        if not lines:
            self.fine("no_summary")
        for competency, texts in lines.items():
            for text in texts:  # two lines about one competency are both unsupported
                verdict = self.read_line(competency, text) if len(texts) == 1 else None
                self.correct += verdict is True
                if verdict is None:
                    self.fine("unsupported")
        return max(-1.0, min(1.0, self.correct / self.k - self.fines)), self.info()

    def read_line(self, competency, line):
        """True: correct; False: worth nothing; None: unsupported, nobody said so about it."""
        text, item, cues = words(line), self.heard.get(competency), self.bank["read"]
        if cues["no_evidence"].search(normal_form(line).strip(" .")):
            return competency in self.denied
        foreign = {key for key in cues["first"] if key in text} - {*item["keys"][0]} if item else 1
        if foreign or not set(re.findall(r"\d+", text)) <= self.numbers:
            return None
        matches = has_keys(item, text)
        return True if all(matches) else False if any(matches) else None

    def info(self):
        revealed, n = len(self.heard) + len(self.denied), max(1, len(self.questions))
        kinds = Counter(kind for kind, _ in self.moves)
        return {
            "correct": self.correct / self.k,
            "revealed": revealed / self.k,
            "reported": self.correct / max(1, revealed),
            "questions": len(self.questions),
            "invalid": self.unread,
            **{f"fault/{name}": self.faults[name] for name in ("risky", *FINES)},
            **{f"kind/{kind}": kinds[kind] / n for kind in (*KINDS, "other")},
        }


# ---- baselines: (env, rng) → text; all are perfect reporters ----


def ask(env, rng, kind, competency):
    """A question of this kind about a competency, in one of the bank's wordings."""
    d, e = rng.sample([c for c in env.bank["competencies"] if c != competency], 2)
    return rng.choice(env.bank["templates"][kind]).format(c=competency, d=d, e=e)


def report(env):
    none = env.bank["no_evidence"]
    lines = [env.heard[c]["short"] if c in env.heard else f"{c}: {none}." for c in env.competencies]
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
        env.plan = [*env.competencies, *rng.sample(env.competencies, env.turns - env.k)]
        return ask(env, rng, "behavioural", env.competencies[n])
    return ask(env, rng, "specific", env.plan[n]) if follow_ups and n < env.turns else report(env)


def at_random(env, rng, kinds=("behavioural", "specific")):
    if len(env.questions) == env.turns:
        return report(env)
    return ask(env, rng, rng.choice(kinds), rng.choice(env.competencies))


def uniform(env, rng):
    """Any question of the bank, risky ones too."""
    kinds = [kind for kind, texts in env.bank["templates"].items() for _ in texts]
    return at_random(env, rng, kinds)


Interview.baselines = {
    "oracle": oracle,
    "fixed": fixed,
    "fixed+": functools.partial(fixed, follow_ups=True),
    "random": at_random,
    "uniform": uniform,
}
