"""The bundled environments, without a model: what each promises to grpo_agent.py, the rules of
2048, the scores of an interview, the grades of answers about a mailbox.

bad_mailboxes.jsonl   changes of the bundled mailbox's text that are refused, with words of the message
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from statistics import fmean

import numpy as np
import pytest

import grpo_agent
from case_rows import each
from conftest import REPO
from envs.inbox import Inbox, read_mailbox
from envs.interview import Interview, read_bank, read_turn
from envs.twenty48 import TwentyFortyEight, after, legal_moves
from tiny import cases

BANK, BOX = REPO / "data" / "interview.json", REPO / "data" / "inbox.json"
VALIDATION, TEST = 10**9, 2 * 10**9  # where the seeds of the splits begin


def play(make, policy, *seeds):
    return grpo_agent.play(None, make, seeds, policy)


def means(make, name, seeds=range(200)):
    """Mean val_key and mean reward of a baseline."""
    env = make()
    episodes = play(make, env.baselines[name], *seeds)
    return fmean(e.metrics[env.val_key] for e in episodes), fmean(e.reward for e in episodes)


def changed(path, folder, change):
    """A copy of a bundled JSON file in which some texts are others."""
    text = path.read_text(encoding="utf-8")
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (folder / path.name).write_text(text, encoding="utf-8")
    return str(folder / path.name)


@pytest.mark.parametrize("make", [Interview, Inbox, TwentyFortyEight])
def test_what_an_environment_promises(make):
    """An episode is a function of its seed, also in an object that has played before; its reward
    lies between −1 and 1; info is flat numbers, and "invalid" counts the turns since the start."""
    env = make()
    for seed in (0, 1, VALIDATION, TEST + 5):
        for policy in (*env.baselines.values(), lambda env, rng: "What"):
            (one,), (two,) = play(lambda: env, policy, seed), play(make, policy, seed)
            assert vars(one) | {"rng": None} == vars(two) | {"rng": None}
            assert -1 <= one.reward <= 1
            assert {*map(type, one.metrics.values())} <= {int, float} and env.val_key in one.metrics
        missing = make is Interview  # its summary
        assert one.metrics["invalid"] == len(one.texts()) - missing


# ---- 2048 ----


def board_of(rows, **arguments):
    env = TwentyFortyEight(size=len(rows), **arguments)
    env.reset(0)
    env.board = [list(row) for row in rows]
    return env


@cases("""
text | moves
up? <move> UP </move> | ["up"]
<move>left</move> no, <move>down</move> | ["down"]
left | []
<move>sideways</move> | []
<move>left | []
""")
def test_moves_are_read_and_never_guessed(text, moves):
    """Of several the last counts, then comes one new tile; a reply without a move costs the game."""
    env = board_of([[0, 2, 0], [0, 0, 0], [0, 4, 0]])
    moved = [after(env.board, move) for move in moves]
    _, reward, done, info = env.step(text)
    outcome = reward, done, info["invalid"], info["win"], info["moves"]
    assert outcome == ((0, False, 0, 0, 1) if moves else (-1, True, 1, 0, 0))
    assert all(np.count_nonzero(np.array(board) != env.board) == 1 for board in moved)


@cases("""
board | move | reward | at_the_end
[[8, 4], [2, 0]] | left | 0.35 | 0.45
[[16, 16], [2, 0]] | left | 1.0 | 0.675
[[4, 8], [8, 0]] | right | None | 0.45
""")
def test_rewards_of_2048(board, move, reward, at_the_end):
    """p = log₂(max / 2) / log₂(target / 2): of 32 an 8 is 2/4, .9·p = .45, less .1 for the move that
    changed nothing and ended the game: where it only passed the turn, a blind cycle won 92 %."""
    env = board_of(board, show_legal=True)
    assert env.run_out()[0] == pytest.approx(at_the_end)
    message, got, done, info = env.step(f"<move>{move}</move>")
    assert done == (reward is not None) and got == pytest.approx(reward or 0)
    assert info["invalid"] == (reward == 0.35) and info["win"] == (reward == 1)
    if not done:  # the one free cell has a new tile, and what can still be done is shown
        assert re.fullmatch(r"[24] 4\n_ 8\nlegal: .*|. .\n. .\nlegal: .*", message["content"])
        assert message["content"].endswith(f"legal: {' '.join(legal_moves(env.board))}")


def test_baselines_of_2048():
    """Spawns are 2 in nine of ten: 2 000, so .9 ± .02 is three standard errors."""
    env, tiles = TwentyFortyEight(), []
    for seed in range(1000):
        env.reset(seed)
        tiles += filter(None, sum(env.board, []))
    assert len(tiles) == 2000 and abs(tiles.count(2) / 2000 - 0.9) < 0.02
    wins = {name: means(TwentyFortyEight, name)[0] for name in env.baselines}
    assert wins == pytest.approx({"random": 0.62, "corner": 0.90, "blind": 0.27}, abs=0.09)


# ---- the interview ----


@cases("""
text | expected
Thank you. Now, could you please tell me about a time you calmed a dispute? | 1 behavioural conflict
Great work on the budget. What exactly did you do? | 1 specific budgeting
Tell me about a time you coached a junior, and how did it end? | 2 behavioural coaching
**Describe how you** keep to a schedule. | 1 behavioural planning
I see. | 0 other
Ｗhat was the result of the neg\u200botiation？ | 1 specific negotiation
Did the budget hold after the new plan and schedule? | 1 other planning budgeting
""")
def test_free_questions_are_read(text, expected):
    n, kind, topics = read_turn(read_bank(str(BANK)), text)
    assert f"{n} {kind} {' '.join(topics)}".strip() == expected


def test_free_questions_are_read_rightly_nine_times_in_ten():
    bank, right = read_bank(str(BANK)), []
    for line in (REPO / "tests/interview_questions.tsv").read_text("utf-8").splitlines():
        requests, kind, topic, question = line.split("\t")
        n, found, topics = read_turn(bank, question)
        right.append((n == int(requests), found == kind, [*topics, "-"][0] == topic))
    assert len(right) >= 150 and np.mean(right, axis=0).min() >= 0.9


def test_a_bank_of_your_own(tmp_path):
    """Capitals, as German nouns have (a question is read in small letters; ß is ss to both), and
    names that look like list marks: the oracle's summary of "5S audits" held no line about them."""
    change = {
        '"conflict': '"5S audits', '"sold"': '"sold", "Großschadenslage"',
        r'"\\bwhen did': r'"Erzählen Sie", "\\bwhen did',
    }  # fmt: skip
    own = changed(BANK, tmp_path, change)
    question = read_turn(read_bank(own), "Erzählen Sie von einer Großschadenslage?")
    assert question == (1, "behavioural", ["sales"])
    assert means(partial(Interview, bank=own), "oracle", range(100)) == (1, 1)


def test_evidence_is_told_apart(tmp_path):
    """An item's text must hold its keys, or the candidate's own words are no correct line; no thing
    stands in another item, or a line about that one would be unsupported."""
    with pytest.raises(ValueError, match="interview.json.*lacks one of its keys"):
        Interview(bank=changed(BANK, tmp_path, {'"solar kit"': '"red car"'}))
    env = with_states()
    items = [item for c in env.bank["competencies"].values() for item in c["evidence"]]
    env.text = "full"
    for env.heard["any"] in items:
        assert env.read_line("any", env.heard["any"]["full"]) == "correct"
    assert len({item["keys"][0] for item in items}) == len(items) == 96


def with_states(*states):
    """An interview whose candidate is open, or reserved, or has none, in the order of its
    competencies."""
    env = Interview()
    env.reset(0)
    env.states = dict(zip(env.competencies, states or ("open",) * 4, strict=True))
    return env


def say(env, *texts):
    return [env.step(text) for text in texts][-1]


def ask_about(env, competencies):
    say(env, *(f"Tell me about a time you dealt with {c}." for c in competencies))


def told(env, c):
    """What the candidate tells about a competency: "thing, 4 percent."."""
    return env.items[c]["short"].split(": ")[1]


# a line about the first competency, of which the candidate has told, or has nothing to tell, and what
# it is worth before and after a question about that
@cases("""
state | unasked | asked | text
open | -0.15 | 0.25 | {a}: Solved the {thing}; complaints fell by {number}.
open | -0.15 | 0.25 | {a}: {own}
open | -0.15 | 0.25 | * **{a}**: {own}
open | -0.15 | 0.25 | 1. _{a}_: {own}
open | 0 | 0 | {a}: no evidence.
open | -0.15 | 0 | {a}: {thing}.
open | -0.15 | -0.15 | {a}: {own}, 99 percent.
open | -0.15 | -0.15 | {a}: led the red car project, 77 percent.
open | -0.15 | -0.15 | {a}: {other}
open | -0.15 | -0.15 | {a}: {own} {other}
open | -0.15 | -0.15 | {a}: a great talent.
open | -0.3 | -0.3 | {a}: {own}LINE{a}: no evidence
none | 0 | 0.25 | {a}: no evidence.
none | 0 | 0.25 | {a}: No evidence
none | -0.15 | -0.15 | {a}: no evidence, but a great talent
none | -0.15 | -0.15 | {a}: n/a
none | -0.15 | -0.15 | {a}: no experience
""")
@pytest.mark.parametrize("n_asked", [0, 1, 2])
def test_a_summary_line_is_worth(state, unasked, asked, text, n_asked):
    """1/4 of four for a correct line, also with words around the keys; 0 for less than was said; −.15
    for more: a number that nobody said, a fact of another competency, praise. The prompt asks for "no
    evidence"; no list of what else might mean it is searched."""
    env, reward = with_states(state, "open", "open", "open"), asked if n_asked else unasked
    a, b, *_ = env.competencies
    own, other = told(env, a), told(env, b)
    thing, number = own.rstrip(".").split(", ")
    text = text.format(a=a, own=own, thing=thing, number=number, other=other)
    asks = [f"Tell me about a time you dealt with {c}." for c in (a, b)[:n_asked]]
    said = f"Tell me about sales.\nSUMMARY\n{text}".replace("LINE", "\n")
    _, earned, done, info = say(env, *asks, said)
    assert earned == pytest.approx(reward) and done
    if state == "open" and asks:
        assert (info["revealed"], info["reported"]) == (n_asked / 4, (reward > 0) / n_asked)


def test_a_reward_is_never_below_minus_one():
    """Two lines about each of four would cost 4 · .3."""
    env = with_states()
    lines = [f"{c}: {told(env, c)}\n{c}: no evidence" for c in env.competencies]
    assert say(env, "\n".join(["SUMMARY", *lines]))[1] == -1


@cases("""
text | fine | faults
Are you married? | 0.25 | risky
Do you have a disability? Are you married? | 0.6 | risky prohibited many_questions
Tell me about a time you dealt with {}, {} and {}. | 0.1 | many_topics
Describe how you handled {}{long}. | 0.1 | over_long
How would you handle {}? | 0 |
I see. | 0 |
""")
def test_faults_and_what_they_cost(text, fine, faults):
    """As docs/train.md says. (The replies: test_data.py's hash of the corpus.)"""
    env = with_states()
    *_, info = env.step(text.format(*env.competencies, long=" on some day or other " * 9))
    assert [key[6:] for key, n in info.items() if key[:6] == "fault/" and n] == faults.split()
    assert info["revealed"] == 0 and info["invalid"] == (text == "I see.")
    assert env.run_out()[0] == pytest.approx(-fine - 0.25), "and there is no summary"


def test_a_repeated_question_costs():
    """Once about what was told; an outline may be followed up, but not asked for again. No summary
    costs .25 and ends the talk."""
    env = with_states("open", "reserved", "open", "open")
    a, b, *_ = env.competencies
    ask_about(env, (a, a, b, b))
    assert env.faults["repeated"] == 2 and not env.heard.get(b)
    say(env, f"What was the result of your work on {b}?", "I see.")
    assert env.faults["repeated"] == 2 and env.heard[b]
    _, reward, done, info = say(env, "Goodbye.")
    assert done and info["fault/no_summary"] == 1 and reward == pytest.approx(-0.25 - 0.2)
    assert say(with_states(), "SUMMARY")[1] == with_states().run_out()[0] == pytest.approx(-0.25)


def test_baselines_of_the_interview():
    """Two of four need a follow-up, and N = 6: a list alone gets half, blind follow-ups half of the
    rest, and cost .1 where they come too late to one that was told. Half of the candidates have
    nothing to tell about one competency."""
    env, states = Interview(), []
    exact = {"oracle": (1, 1), "fixed": (0.5, 0.5)}  # in each episode: fewer say as much
    assert {name: means(Interview, name, range(100)) for name in exact} == exact
    found = {name: means(Interview, name) for name in ("fixed+", "random")}
    assert found["fixed+"] == (pytest.approx(0.75, abs=0.02), pytest.approx(0.65, abs=0.03))
    assert 0.15 < found["random"][1] < 0.4
    for seed in range(400):
        env.reset(seed)
        states.append(" ".join(sorted(env.states.values())))
    assert {*states} == {"none open reserved reserved", "open open reserved reserved"}
    assert sum("none" in s for s in states) / 400 == pytest.approx(0.5, abs=0.1)
    assert (env.turns, env.max_turns) == (6, 7)


# ---- the mailbox ----


@cases(r"""
text | seen
'{"search": "Imke"}' | Imke Rauch
'I look.\n```json\n{"read": 2}\n```' | 2026-01-05
'{"read": 2, "why": "a hunch"}' | 2026-01-05
'{"search": ""}' | no message has these
I would search for Ada. | error
'{"search": "Ada"} {"read": 3}' | error
'{"find": "Ada"}' | error
'{}' | error
} { | error
'{"\\ud800": 1}' | error
'{"read": "2"}' | error
'{"read": 17.5}' | error
'{"read": 1e999}' | error
'{"read": 999}' | error
'{"read": 9999}' | error
'{"answer": ["a", "b"]}' | error
'{"search": {"a": 1}}' | error
'{{{{' | error
'{"a":{"a":{"a":{"a":1}}}}' | error
'[{"read": 2}, {"read": 3}]' | error
""")
@pytest.mark.parametrize("times", [1, 3000])
def test_calls_are_read_or_answered_with_their_form(text, seen, times):
    """A wrong call costs its turn, and the episode goes on. What the policy wrote is not said back:
    half a character in a key came back in the error, which no tokenizer reads, and the run ended."""
    env = Inbox()
    env.reset(0)
    for part in ("9999", "{{{{", '{"a":', "}}}}"):  # the same, of thousands of characters
        text = text.replace(part, part * times)
    message, reward, done, info = env.step(text)
    assert (reward, done, info["invalid"]) == (0.0, False, int(seen == "error"))
    assert seen in message["content"] and ("Imke" in seen or len(message["content"]) < 300)
    assert len(env.listed) == 6 * ("Imke" in seen) and [*env.opened] == [2] * ("2026" in seen)


@cases("""
answer | topic | source | reward
{form0} | notice | proof | 0.9875
{form0}. | notice | proof | 0.9875
notice period is {form0} | notice | proof | 0.9875
{form2} | notice | proof | 0.9875
{form0} | notice | 1 | 0.4
{form0} | notice | None | 0.4
I do not know | notice | proof | 0
i do not know. | notice | None | 0
I don't know | notice | None | -0.5
 | notice | proof | -0.5
{old} | notice | proof | -0.5
{form0} or {old} | notice | proof | -0.5
not {form0} | notice | proof | -0.5
1{form0} | notice | proof | -0.5
2 weeks 4 weeks 6 weeks 8 weeks | notice | proof | -0.5
{text} | pay | proof | -0.5
{plain} | pay | proof | 0.9875
{form0} a year | pay | proof | 0.9875
EUR {form0} | pay | proof | -0.5
{form1} | day | proof | 0.9875
{form3} | day | proof | 0.9875
on {form0} at | day | proof | 0.9875
{form0} or 1 May | day | proof | -0.5
planning, budgets, coaching, reporting, safety, service | skill | proof | -0.5
meet {form0} | manager | proof | 0.9875
Ms {form0} | manager | proof | -0.5
""")
def test_what_an_answer_about_the_mailbox_earns(answer, topic, source, reward):
    """Right is a spelling that the mailbox accepts, or a quotation of at most twelve words. A
    corrected fact no longer holds. A list of all is no answer (the four notice periods in a row
    earned .4 without a look), nor is a denial, nor a whole message."""
    env = Inbox()
    wanted = (q for q in env.questions[0] if q["topic"] == topic)
    question = next(q for q in wanted if q["outdated"] or topic != "notice")
    env.reset(env.questions[0].index(question))
    old = [*question["outdated"], ""][0]
    text = env.messages[question["source"]]["text"]
    forms = {f"form{i}": form for i, form in enumerate(question["answers"])}
    plain = question["answers"][0].replace(",", "")
    given = answer.format(**forms, old=old, text=text, plain=plain)
    call = {"answer": given, "source": question["source"] if source == "proof" else source}
    message, got, done, info = env.step(json.dumps(call))
    assert (message, got, done) == (None, pytest.approx(reward), True)
    found = [info[name] for name in ("correct", "right", "wrong", "unknown")]
    assert found == [got > 0.4, got > 0, got < 0, got == 0]


def blind(env, rng):
    """Looks at nothing: the commonest answer of the topic."""
    topic = env.question["topic"]
    answers = [q["answers"][0] for q in sum(env.questions, []) if q["topic"] == topic]
    return json.dumps({"answer": max(answers, key=answers.count)})


def test_the_mailbox_and_its_baselines(monkeypatch):
    """295 messages; what is asked of one side is about other people, and each is asked once: the
    64 validation questions that chose the weights were among the 80 of the test. One message proves
    each answer: three corrections said what the first message had said."""
    messages, _, sides = read_mailbox(str(BOX))
    assert len(messages) == 295 and [len(rows) for rows in sides] == [104, 48, 48]
    assert sum(len({q["about"] for q in rows}) for rows in sides) == 50
    for q in sum(sides, []):
        about = [m for m in messages.values() if q["about"] in str(m)]
        values = {m["id"]: {*re.findall(q["pattern"], m["text"])} for m in about}
        assert [i for i in values if values[i] & {*q["answers"]}] == [q["source"]]
        assert max(filter(values.get, values)) == q["source"]
    env = Inbox()
    for start, rows in zip((0, VALIDATION, TEST), sides):
        asked = [env.reset(start + i)[1]["content"] for i in range(len(rows))]
        assert sorted(asked) == sorted(q["question"] for q in rows)
    monkeypatch.setitem(Inbox.baselines, "blind", blind)
    found = {name: means(Inbox, name, range(TEST, TEST + 48)) for name in env.baselines}
    assert found == {
        "oracle": (1, pytest.approx(0.9625)), "exhaustive": (43 / 48, pytest.approx(0.79, abs=0.01)),
        "blind": (0, pytest.approx(-0.26, abs=0.01)),
    }  # fmt: skip
    (searching,) = play(partial(Inbox, max_turns=2), lambda env, rng: '{"search": "day"}', 0)
    assert searching.reward == -0.1


def test_a_search_is_the_same_in_every_process():
    """Weights were added in the order of a set, which differs from process to process: of hits whose
    sums were equal but for rounding, now one came first, now the other."""
    code = "import envs.inbox as e; env = e.Inbox(); env.reset(0); print(env.search('%s'))"
    words = [sys.executable, "-c", code % "is krueger pham raul about"]
    found = {
        subprocess.check_output(words, cwd=REPO, env=dict(os.environ, PYTHONHASHSEED=seed))
        for seed in "0123"
    }
    assert len(found) == 1 and found.pop().count(b"\n") == 6


@each("bad_mailboxes")
def test_mailboxes_that_are_refused(change, said, tmp_path):
    """An accepted answer without a word made every answer right."""
    with pytest.raises(ValueError, match=f"inbox.json: .*{said}"):
        Inbox(changed(BOX, tmp_path, change))


@cases("""
row | left
[2, 2, 4, 0] | [4, 4, 0, 0]
[2, 2, 2, 2] | [4, 4, 0, 0]
[0, 4, 4, 8] | [8, 8, 0, 0]
[2, 0, 2, 2] | [4, 2, 0, 0]
[0, 0, 0, 2] | [2, 0, 0, 0]
[4, 2, 0, 2] | [4, 4, 0, 0]
[2, 4, 8, 2] | [2, 4, 8, 2]
[8, 4, 4] | [8, 8, 0]
[0, 0] | [0, 0]
""")
def test_moves_of_2048(row, left):
    """Equal tiles join once, those in front first; the other moves are this one, turned."""
    n, still = len(row), [[0] * len(row)] * (len(row) - 1)
    for turns, move in enumerate(("left", "up", "right", "down")):
        board, moved = (np.rot90([x, *still], -turns).tolist() for x in (row, left))
        before = json.dumps(board)
        assert after(board, move) == moved and len(moved) == n
        assert (move in legal_moves(board)) == (row != left)
        assert json.dumps(board) == before, "looking changes nothing"


def test_another_mailbox(tmp_path):
    """To imitate more episodes than one mailbox has questions: all but two are for training."""
    out = tmp_path / "new" / "mailbox.json"
    script = [sys.executable, f"{REPO}/data/inbox.py", "--seed", "1", "--train-alone", "--out", out]
    subprocess.run(script, check=True)
    sides, bundled = (read_mailbox(str(path))[2] for path in (out, BOX))
    assert [len(rows) for rows in sides] == [198, 1, 1]
    held_out, asked = ({q["about"] for rows in x for q in rows} for x in (bundled[1:], sides))
    assert len(held_out) == 24 and len(asked) == 50 and not asked & held_out
