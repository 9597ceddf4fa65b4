"""parts/draft.py: a task in words → prompts, and criteria for each, for `judge.py draft`.

(1) inputs: prompts of many kinds, written by the server; or those of --answers, --from-comments
(2) criteria: 5 to 15 for each prompt, from the task and from what annotators wrote
(3) answers to try them on: sampled from the server in four manners, or those that came with (1)
(4) try: the judge rates every answer; a criterion that all meet, or none, tells nothing apart
A person reads the rows that are left. After ART's AutoRL (OpenPipe), whose rewards are RULER's.
"""

import re
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

from parts import votes
from parts.files import UserError, number
from parts.messages import visible
from parts.questions import block, lists_in, message, parse_entries, shown, talk
from parts.rubrics import read_criterion, read_responses, read_row
from parts.server import Call

FEWEST, MOST = 5, 15  # criteria of a prompt, as drafted
LEFT = 2  # criteria that a row must have after the trial
TOGETHER = 8  # inputs that one call asks for
OTHERS = 20  # comments on other items that are shown beside those on an item
WITHOUT_BLANKS = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff"  # Thai, Lao, kana, Chinese characters
ALIKE = 0.8  # of the words of two texts in common: the second repeats the first
MANNERS = (  # so that sampled answers differ, as those of a model in training do
    "Answer as well as you can.",
    "Answer in a hurry: brief, and with a part of what was asked for left out.",
    "Answer at length and in general terms, with little that fits this case.",
    "Answer fluently, but with two mistakes that a careful reader finds.",
)
WRITER = "You write material to train a language model on. Reply with one JSON object alone."
INPUTS = """Write {n} new inputs as users would send them: each whole, with all facts that the task
needs, and each of another situation, length and difficulty. In this form, ids 1 to {n}:
{{"inputs": [{{"id": 1, "input": "…"}}]}}"""
CRITERIA = f"""Write {FEWEST} to {MOST} criteria that tell a good answer to this input from a poor
one. Each is one sentence about one thing, which the answer alone decides with yes or no. Points are
1 to 5; a fault has points below 0. In this form:
{{"criteria": [{{"criterion": "…", "points": 2}}]}}"""


def add_draft_arguments(parser):
    add = parser.add_argument
    # fmt: off
    add("--task", required=True, help="what the model is to do, in words, such as 'Summarise interview notes'")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--n", type=number(int, at_least=1), default=32, help="inputs to write (default %(default)s)")
    add("--answers", metavar="FILE", help='JSONL of {"prompt", "response"}: in place of --n: its prompts, if they have two answers')
    add("--from-comments", metavar="FOLDER", help="of annotate.py: its items are the inputs, its comments become criteria")
    # fmt: on
    parser.set_defaults(out="runs/judge/draft.json")


# ---- what is asked, and how the reply is read ----


def messages(*parts):
    return [message("system", WRITER), message("user", "\n".join(parts))]


def inputs_call(task, n, earlier):
    """The Call for n inputs that differ from the earlier ones: {number: (input, "")}."""
    user = ["The task:", block("task", task)]
    if earlier:
        user += ["These exist:", block("inputs", "\n".join(text[:100] for text in earlier))]
    ids = {str(i): i for i in range(1, n + 1)}
    parse = partial(parse_entries, key="inputs", field="input", read=sentence, ids=ids)
    return Call(messages(*user, INPUTS.format(n=n)), parse, expected=100 * n)


def criteria_call(task, prompt, comments=()):
    """The Call for the criteria of one prompt: [{"criterion", "points"}, …]."""
    user = ["The task:", block("task", task), "An input:", block("input", shown(prompt))]
    if comments:
        user += ["Base the criteria on what people wrote about answers, to this input and others:"]
        user += [block("comments", "\n".join(comments))]
    return Call(messages(*user, CRITERIA), parse_criteria, expected=30 * MOST)


def answer_calls(prompt):
    """The Calls for an answer in each manner."""

    def parse(reply):
        text = visible(reply).strip()
        return text or None, None if text else "an answer without text"

    turns = talk(prompt, None)[:-1]
    return [Call([message("system", manner), *turns], parse, expected=300) for manner in MANNERS]


def sentence(value):
    """A text of some words, else None: "…" is the form that was shown. Chinese, Japanese and Thai
    write no blanks between words."""
    words = rf"\w\W+\w|[{WITHOUT_BLANKS}]{{4}}"
    return value.strip() if isinstance(value, str) and re.search(words, value) else None


def parse_criteria(reply):
    """([{"criterion", "points"}, …], None), or (None, what is wrong with the reply).

    >>> parse_criteria('{"criteria": [{"criterion": "Names the gap.", "points": 2}]}')[1]
    '1 criteria; expected 5 to 15'
    """
    criteria, lists = [], lists_in(reply, "criteria", "criterion")
    if not lists:
        return None, "no JSON object with a list of criteria was found"
    for i, entry in enumerate(lists[-1], 1):
        criteria.append({key: entry[key] for key in ("criterion", "points") if key in entry})
        try:
            weight = read_criterion(criteria[-1]).weight
        except ValueError as error:
            return None, f"criterion {i}: {error}"
        if not 0 < abs(weight) <= 10 or not sentence(entry["criterion"]):
            return None, f"criterion {i}: expected a sentence, and points from -10 to 10, not 0"
    if not FEWEST <= len(criteria) <= MOST:
        return None, f"{len(criteria)} criteria; expected {FEWEST} to {MOST}"
    return criteria, None


# ---- inputs that exist already: [(prompt, answers, comments)] ----


def read_source(args):
    """Of --answers, the prompts that have two different answers; or of --from-comments; or []."""
    if args.from_comments or not args.answers:
        return read_comments(args.from_comments) if args.from_comments else []
    prompts, answers = {}, defaultdict(set)
    for row, text, _ in read_responses(args.answers, flag="--answers"):
        prompts[row.task_id] = row.prompt
        answers[row.task_id].add(text)
    source = [(prompts[key], sorted(texts), []) for key, texts in answers.items() if len(texts) > 1]
    print(f"{args.answers}: {len(source)} of {len(prompts)} prompts have two different answers")
    if not source:
        raise UserError(f"--answers {args.answers}: no prompt with two different answers")
    return source


def read_comments(folder):
    """Of a folder of annotate.py, the items with comments: with each what its annotator saw."""
    items = votes.load_items(Path(folder) / "items.jsonl", "--from-comments")
    log = votes.read_log(Path(folder) / "annotations.jsonl", items)
    comments = defaultdict(dict)  # {item: {comment: the same with both answers}}
    for vote in votes.ordinary_votes(votes.replay(log)):
        if text := " ".join(vote["comment"].split()):
            item, sides = items[vote["item_id"]], vote["shown"]
            shown_answers = [f"Answer {name}: {votes.plain_text(item[sides[side]])}"
                    for name, side in (("A", "left"), ("B", "right"))]  # fmt: skip
            better = {sides["left"]: "A", sides["right"]: "B"}.get(vote["choice"], vote["choice"])
            lines = [*shown_answers, f"Better: {better}. {text}"]
            comments[vote["item_id"]][text] = "\n".join(lines)
    if not comments:
        raise UserError(f"--from-comments {folder}: no vote has a comment")
    print(f"{folder}: {sum(map(len, comments.values()))} comments on {len(comments)} items")
    source = []
    for key, own in comments.items():
        others = [text for other, texts in comments.items() if other != key for text in texts]
        answers = [votes.plain_text(items[key][side]) for side in "ab"]
        source.append((items[key]["prompt"], answers, [*own.values(), *others[:OTHERS]]))
    return source


class Unusable(Exception):
    """More than half of the replies of a kind could not be used."""


class Drafter:
    """A server that drafts; counts: of what it was asked for, lost: {reason: texts} left out."""

    def __init__(self, judge):
        self.judge, self.failed = judge, False
        self.counts, self.lost = Counter(), defaultdict(list)

    def check(self, kind, errors):
        """Count what failed; Unusable if that is most of what was asked for."""
        self.counts[kind] += len(errors)
        lost = self.lost[f"{kind} that could not be used"]
        lost += filter(None, errors)
        self.failed |= bool(lost)
        if 2 * len(lost) > self.counts[kind]:
            raise Unusable(kind)

    def report(self):
        """A line for each number, with the first of what was left out."""
        lost = [(reason, texts) for reason, texts in self.lost.items() if texts]
        lines = [f"{n} {kind}" for kind, n in self.counts.items()]
        return lines + [f"{len(t)} {reason}, the first: {t[0][:200]}" for reason, t in lost]

    def ask(self, calls, kind):
        """The value of each call, None where the reply cannot be used."""
        replies = self.judge.ask(calls)
        self.check(kind, [reply.error for reply in replies])
        return [reply.value for reply in replies]

    def different(self, items, text, kind):
        """The items whose text has too few words in common with those before."""
        different, words_before = [], []
        for item in items:
            words = set(re.findall(r"\w+", text(item).casefold()))
            if any(len(words & w) >= ALIKE * len(words | w) for w in words_before):
                self.lost[f"{kind} that repeat another"].append(text(item))
                continue
            different.append(item)
            words_before.append(words)
        return different

    def write_inputs(self, args):
        inputs = []
        for start in range(0, args.n, TOGETHER):  # (1) every call shows what there is already
            call = inputs_call(args.task, min(TOGETHER, args.n - start), inputs)
            (entries,) = self.ask([call], "replies with inputs")
            inputs += [text for text, _ in (entries or {}).values()]
        return [(text, [], []) for text in self.different(inputs, str, "inputs")]

    def write_criteria(self, args, source):
        """[(Row, answers)]: (2) criteria for each prompt, (3) the answers to try them on."""
        calls = [criteria_call(args.task, prompt, comments) for prompt, _, comments in source]
        drafts = []
        for (prompt, answers, _), criteria in zip(source, self.ask(calls, "replies with criteria")):
            rubrics = self.different(criteria or (), lambda c: c["criterion"], "criteria")
            row = {"task_id": f"draft-{len(drafts) + 1}", "prompt": prompt, "rubrics": rubrics}
            if has_points(rubrics):
                drafts.append((read_row(row), answers))
        unanswered = [row.prompt for row, answers in drafts if not answers]
        texts = iter(self.ask([c for p in unanswered for c in answer_calls(p)], "answers"))
        return [(row, answers or [next(texts) for _ in MANNERS]) for row, answers in drafts]

    def try_criteria(self, drafts, grade):
        """(4) The rows, with the criteria that some of their answers meet and others do not."""
        drafts = [(row, [text for text in texts if text]) for row, texts in drafts]
        pairs = [(row, text) for row, texts in drafts for text in texts]
        grades, rows = grade(*zip(*pairs), self.judge), []
        self.check("verdicts on answers", [graded.error for graded in grades])
        verdicts = iter([graded.criteria for graded in grades])
        for row, texts in drafts:
            own, left = [next(verdicts) for _ in texts], []
            for k, c in enumerate(row.criteria):
                rated = [graded[k]["verdict"] for graded in own if graded[k]["verdict"] is not None]
                if len({*rated}) == 2:
                    left.append(row.raw["rubrics"][k])
                    continue
                who = "every answer meets" if rated[:1] == [True] else "no answer meets"
                self.lost[f"criteria that {who if rated[1:] else 'nobody could try'}"].append(
                    c.text
                )
            if len(left) >= LEFT and has_points(left):
                rows.append(row.raw | {"rubrics": left})
            else:
                self.lost["inputs with too few criteria left"].append(shown(row.prompt))
        return rows


def has_points(rubrics):
    return any(c.get("points", 1) > 0 for c in rubrics)
