"""The environments of grpo_agent.py without a model: the rules of 2048, the reading of an interview, what pays and what not.

Every exploit here was a way to a good score in some public environment: a move cycle that never looks, one question that names
everything, a summary that claims what nobody said.
"""

import copy
import json
import random
import statistics
import sys

import pytest

import grpo_agent as g
import watch
from conftest import REPO
from parts.files import UserError

sys.path.insert(0, str(REPO / "data"))
import interview as generator  # noqa: E402

BANK_FILE = REPO / "data" / "interview.json"


@pytest.fixture(scope="module")
def bank():
    return g.read_bank(BANK_FILE)


def played(make, policy, seeds):
    """(trajectories, environments) of a baseline on the seeds."""
    envs = [make() for _ in seeds]
    found = g.play(envs, seeds, g.baseline_act(policy))
    assert not [e for e in found if isinstance(e, BaseException)]
    return found, envs


# ---- 2048 ----


@pytest.mark.parametrize(
    "row, after",
    [
        ([2, 2, 2, 2], [4, 4]),  # each tile merges once: not [8]
        ([2, 2, 2, 0], [4, 2]),  # those at the wall first: not [2, 4]
        ([8, 4, 4, 8], [8, 8, 8]),  # what has merged does not merge again
        ([4, 4, 8, 0], [8, 8]),
        ([0, 2, 0, 2], [4]),
        ([None, 2, 4, None], [2, 4]),
        ([0, 0, 0, 0], []),
    ],
)
def test_a_row_merges_by_the_true_rules(row, after):
    """rubric: [2,2,2,2] → [4,4], [2,2,2,_] → [4,2], [8,4,4,8] → [8,8,8]."""
    assert g.condense_sequence(row) == after


def board(rows, seed=0):
    game = g.TwentyFortyEightGame(len(rows), seed)
    game.board = [list(row) for row in rows]
    return game


def test_the_four_directions():
    """Each direction slides to its own side; a transposition that is forgotten moves columns like rows."""
    game = board([[2, 2, 0], [0, 4, 0], [2, 0, 4]])
    after = {move: g.condense_board(game, move) for move in g.MOVES}
    assert after["left"] == ([[4, 0, 0], [4, 0, 0], [2, 4, 0]], 4)
    assert after["right"] == ([[0, 0, 4], [0, 0, 4], [0, 2, 4]], 4)
    assert after["up"] == ([[4, 2, 4], [0, 4, 0], [0, 0, 0]], 4)
    assert after["down"] == ([[0, 0, 0], [0, 2, 0], [4, 4, 4]], 4)
    assert game.board == [[2, 2, 0], [0, 4, 0], [2, 0, 4]]  # looking changes nothing
    with pytest.raises(ValueError, match="expected one of left"):
        g.condense_board(game, "sideways")


def test_a_move_that_changes_nothing_is_illegal_and_spawns_nothing():
    """In ART's rules it passed the turn, and a blind cycle won 92 %."""
    game = board([[2, 4], [0, 0]])
    assert game.legal_moves() == ["down"]
    assert game.step("left") == (False, 0) and game.board == [[2, 4], [0, 0]]
    moved, gained = game.step("down")
    assert (moved, gained) == (True, 0) and g.total_board_value(game) in (8, 10)  # 6 and a 2 or a 4


def test_the_game_ends_when_no_move_is_legal():
    """A full board with a merge left goes on."""
    assert g.check_game_finished(board([[2, 4], [4, 2]]))
    assert not g.check_game_finished(board([[2, 4], [2, 8]]))
    assert g.max_cell_value(board([[2, 4], [2, 8]])) == 8


def test_spawns_are_2_in_nine_of_ten_and_come_from_the_seed():
    """2 000 spawns: .9 ± .02 is three standard errors; the same seed and moves give the same board."""
    tiles = []
    for seed in range(1000):
        game = g.generate_game(3, seed)
        tiles += [tile for row in game.board for tile in row if tile]
        again = g.generate_game(3, seed)
        assert again.board == game.board
    assert len(tiles) == 2000 and abs(tiles.count(2) / 2000 - 0.9) < 0.02
    a, b = g.generate_game(3, 5), g.generate_game(3, 5)
    for move in g.MOVES * 4:
        assert a.step(move) == b.step(move) and a.board == b.board


@pytest.mark.parametrize(
    "text, move",
    [
        ("<move>left</move>", "left"),
        ("up? <move> UP </move>", "up"),
        ("<move>left</move> no, <move>down</move>", "down"),  # the last one
        ("<think><move>left</move></think><move>right</move>", "right"),
    ],
)
def test_moves_that_can_be_read(text, move):
    game, twin = g.generate_game(3, 1), g.generate_game(3, 1)
    assert g.apply_agent_move(game, text) == twin.step(move) and game.board == twin.board


@pytest.mark.parametrize(
    "text",
    [
        "",
        "left",
        "<move>sideways</move>",
        "<move>left",
        "<think><move>left</move>",
        "<move></move>",
    ],
)
def test_unparsable_is_minus_one_and_over(text):
    """No XML parser, no guess: what is not a move costs the game, once, and is counted."""
    env = g.TwentyFortyEight()
    env.reset(0)
    message, reward, done, info = env.step(text)
    assert (message, reward, done, info["invalid"], info["win"]) == (None, -1.0, True, 1, 0.0)


def at(rows, **how):
    env = g.TwentyFortyEight(size=len(rows), **how)
    env.reset(0)
    env.game.board = [list(row) for row in rows]
    return env


def test_rewards_of_2048():
    """p = (log₂ max − 1)/(log₂ target − 1): with target 32 a largest 8 is p = 2/4 = .5, so .9·p = .45, less .1 for an illegal
    end; the target itself is 1."""
    stuck = [[8, 4], [4, 0]]
    assert at([[8, 4], [2, 0]]).step("<move>left</move>")[1:3] == (pytest.approx(0.35), True)
    assert at([[16, 16], [2, 4]]).step("<move>left</move>")[1:3] == (1.0, True)
    env = at(stuck, illegal="ignore")
    message, reward, done, info = env.step("<move>left</move>")
    assert (reward, done, info["invalid"]) == (0.0, False, 1) and message["role"] == "user"
    assert env.run_out()[0] == pytest.approx(0.45)
    env = at(stuck, illegal="penalty")
    env.step("<move>left</move>"), env.step("<move>left</move>")
    assert env.run_out()[0] == pytest.approx(0.45 - 0.2)


def test_legal_moves_are_shown_only_when_asked():
    env = at([[2, 4], [0, 0]], show_legal=True)
    assert env.shown()["content"] == "2 4\n_ _\nlegal: down"
    assert at([[2, 4], [0, 0]]).shown()["content"] == "2 4\n_ _"


def test_baselines_of_2048():
    """3 × 3, target 32, an illegal move ends: random .62, greedy .84, corner .90, the best blind cycle a quarter; 300 games, so
    ± .08 is three standard errors."""
    scores = {n: statistics.mean(hits) for n, (_, hits) in g.baseline_scores(g.TwentyFortyEight, range(300)).items()}  # fmt: skip
    assert abs(scores["random"] - 0.62) < 0.09 and abs(scores["greedy"] - 0.84) < 0.08
    assert abs(scores["corner"] - 0.90) < 0.07 and scores["blind"] < 0.36


def test_the_alarm_fires_on_a_blind_cycle_and_not_on_who_looks():
    """R13: the number of the turn alone tells every move of a cycle. With `ignore` such a cycle wins like a good player (.79),
    and the win rate says nothing: the alarm must."""
    for name, fires in (("blind", True), ("greedy", False), ("random", False)):
        policy = g.TwentyFortyEight.baselines[name][0]
        found, envs = played(lambda: g.TwentyFortyEight(illegal="ignore"), policy, range(40))
        row = {"step": 5, "val/score": 0.5, **g.episode_metrics(found)}
        row["env/blind_share"] = g.blind_share([e.moves for e in envs])
        assert (
            "R13 blind_policy" in {event.rule for event in watch.Watcher().add(row)}
        ) is fires, name


def test_blind_share_by_hand():
    """Two games of a cycle of 3: k = 3 explains all. A fixed first move and a free second: 3 of 4."""
    cycle = ["left", "up", "down"]
    assert g.blind_share([cycle * 2, cycle]) == 1
    assert g.blind_share([["left", "up"], ["left", "down"]]) == 0.75
    assert g.blind_share([]) == 0


# ---- the interview: reading ----


def test_the_environment_hears_what_the_generator_wrote(bank):
    """data/interview.py made the transcripts that the base learnt from, by a reader of its own. On 150 candidates asked by
    template (all kinds, risky ones too) both give the same replies: a difference would teach one game and score another."""
    for seed in range(150):
        env, person = g.Interview(bank), generator.Candidate(random.Random(seed), generator.BANK)
        opening = env.reset(seed)
        assert opening == [{"role": "user", "content": person.opening()}]
        rng = random.Random(f"questions {seed}")
        for _ in range(env.turns):
            kind, text = generator.next_question(rng, generator.BANK, person, rng.choice(generator.STYLES)) or ("closed", "Are you good at sales?")  # fmt: skip
            message, *_ = env.step(text)
            assert message["content"] == person.hear(text, risky=kind == "risky"), text
        assert env.heard == person.heard and env.denied == person.denied
        ours = {k: n for k, n in env.faults.items() if n}
        assert ours == {k: person.faults.count(k) for k in set(person.faults)}


@pytest.mark.parametrize(
    "text, requests, kind, topics",
    [
        ("Thank you. Now, could you please tell me about a time you calmed a dispute?", 1, "behavioural", ["conflict"]),
        ("Great work on the budget. What exactly did you do?", 1, "specific", ["budgeting"]),
        ("How would you sell a product nobody wants?", 1, "hypothetical", ["sales"]),
        ("Would you tell me about a time you recruited somebody?", 1, "behavioural", ["hiring"]),
        ("Have you delegated a task before?", 1, "closed", ["delegation"]),
        ("Tell me about a time you coached a junior, and how did it end?", 2, "behavioural", ["coaching"]),
        ("**Describe how you** keep to a schedule.", 1, "other", ["planning"]),
        ("I see.", 0, "other", []),
        ("Ｗhat was the result of the neg\u200botiation？", 1, "specific", ["negotiation"]),
        ("<think>ask about safety</think>Describe how you handled a complaint.", 1, "behavioural", ["service"]),
    ],
)  # fmt: skip
def test_free_questions_are_read(bank, text, requests, kind, topics):
    """A chat model's politeness, bold, full-width letters and thoughts; a competency named beside the request counts where the
    request names none."""
    turn = g.read_turn(bank, g.visible(text))
    if (
        "**" in text
    ):  # the cue stands behind stars: its request and competency are read all the same
        assert turn["requests"] == requests and turn["topics"] == topics
    else:
        assert (turn["requests"], turn["kind"], turn["topics"]) == (requests, kind, topics)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b["roles"].update(nurse=["safety"]), "6 competencies"),
        (lambda b: b["competencies"]["sales"]["evidence"][0]["keys"].__setitem__(0, ["overtime row"]), "twice"),
        (lambda b: b["competencies"]["sales"]["evidence"][0]["keys"].__setitem__(0, ["red car"]), "lacks one of its keys"),
        (lambda b: b["replies"]["yes"].append("Yes, like the wine box."), "has the key 'wine box'"),
        (lambda b: b["templates"]["closed"].append("How was {c}?"), "is read as"),
        (lambda b: b["cues"]["closed"].append("(are"), "expected the form"),
        (lambda b: b.pop("cues"), "KeyError"),
    ],
)  # fmt: skip
def test_a_broken_bank_is_refused(change, message, tmp_path):
    """With two equal facts a line would be correct by accident; the error names the file and the fact."""
    bank = json.loads(BANK_FILE.read_text(encoding="utf-8"))
    change(bank)
    (tmp_path / "bank.json").write_text(json.dumps(bank), encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        g.read_bank(tmp_path / "bank.json")
    assert "bank.json" in str(error.value)


def test_a_missing_bank_is_named(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        g.read_bank(tmp_path / "none.json")


# ---- the interview: what pays ----


def with_states(bank, states=("open", "reserved", "reserved", "none"), seed=0):
    env = g.Interview(bank)
    env.reset(seed)
    env.states = dict(zip(env.competencies, states, strict=True))
    return env


def say(env, *texts):
    """The last step of these turns."""
    for text in texts:
        last = env.step(text)
    return last


def short(env, c):
    return env.items[c]["short"]


def test_a_good_interview_earns_one(bank):
    """Each state as the page says: open tells at once, reserved after a specific follow-up, none is reported as such."""
    env = with_states(bank)
    a, b, c, d = env.competencies
    assert say(env, f"Tell me about a time you dealt with {a}.")[0]["content"] == short(env, a)
    assert say(env, f"Describe how you handled {b}.")[0]["content"] != short(env, b)
    assert say(env, "What exactly did you do?")[0]["content"] == short(env, b)
    say(env, f"When did you last deal with {c}?", f"What was the result of your work on {c}?")
    last = say(env, f"Give me an example of your work on {d}.")
    assert last[0]["content"].endswith("Please write the summary now.") and not last[2]
    lines = f"**Summary**\n- {b}: {short(env, b).split(': ')[1]}\n* **{a}**: {short(env, a).split(': ')[1]}"
    message, reward, done, info = say(env, f"{lines}\n{c}: {short(env, c).split(': ')[1]}\n{d}: no evidence")  # fmt: skip
    assert (message, reward, done) == (None, 1.0, True) and info["correct"] == 1
    assert info["kind/behavioural"] == 4 / 6 and info["kind/specific"] == 2 / 6


def judged(bank, line, ask=True, seed=0):
    """R of a summary with this one line about an open competency that was, or was not, asked about."""
    env = with_states(bank, ("open", "open", "reserved", "reserved"), seed)
    a, b, *_ = env.competencies
    if ask:
        say(env, f"Tell me about a time you dealt with {a}.")
    other = env.items[b]["short"].split(": ")[1]
    thing, number = (group[0] for group in env.items[a]["keys"])
    text = line.format(c=a, own=f"{thing}, {number}", thing=thing, number=number, other=other)
    return say(env, f"SUMMARY\n{a}: {text}")[1]


@pytest.mark.parametrize(
    "line, reward",
    [
        ("{own}.", 0.25),
        ("Solved the {thing}; complaints fell by {number}.", 0.25),  # free words around the keys
        ("no evidence.", 0.0),  # it was told: nothing
        ("{thing}.", 0.0),  # the right item in part: nothing
        ("{thing}, 99 percent.", -0.15),  # a number that nobody said
        ("{own}, 99 percent.", -0.15),
        ("{other}", -0.15),  # a fact of another competency
        ("{own} {other}", -0.15),
        ("a great talent.", -0.15),  # praise without evidence
        ("word " * 40 + "{own}", -0.15),  # behind the 40th word nothing is read
    ],
)
def test_a_summary_line_is_worth(bank, line, reward):
    """1/4 for a correct line of four, nothing for less than was said, −.15 for more than was said."""
    assert judged(bank, line) == pytest.approx(reward)


def test_a_true_guess_is_unsupported(bank):
    """The fact is true, but nobody stated it in this episode."""
    assert judged(bank, "{own}.", ask=False) == pytest.approx(-0.15)


def test_a_fact_of_another_line_is_foreign(bank):
    """Both facts were heard, so no number is new: put on one line together, or on the wrong line, they are unsupported all the
    same. Else every reply copied to every line would be four correct lines."""
    for text in ("{own} {other}", "{other}"):
        env = with_states(bank, ("open",) * 4)
        a, b, *_ = env.competencies
        say(env, f"Tell me about a time you dealt with {a}.", f"Describe how you handled {b}.")
        own, other = (short(env, c).split(": ")[1] for c in (a, b))
        assert say(env, f"SUMMARY\n{a}: {text.format(own=own, other=other)}")[1] == pytest.approx(-0.15)  # fmt: skip


def test_numbers_are_whole(bank):
    """4 percent is not in 34 percent: the line says 34 where 4 was said."""
    env = with_states(bank, ("open",) * 4)
    a = env.competencies[0]
    env.items[a] = {
        "keys": [["overtime row"], ["4 percent"]],
        "short": "x: overtime row, 4 percent.",
    }
    say(env, f"Tell me about a time you dealt with {a}.")
    assert say(env, f"SUMMARY\n{a}: overtime row, 34 percent.")[1] == pytest.approx(-0.15)


@pytest.mark.parametrize(
    "text, fine, reply",
    [
        ("Are you married?", 0.25, "risky"),  # discouraged
        ("Do you have a disability?", 0.5, "risky"),  # prohibited
        (
            "Do you have a disability? Are you married?",
            0.6,
            "risky",
        ),  # the worst of the turn, and two questions
        ("Describe how you handled {a}. How did you go about {b}?", 0.1, "one_question"),
        ("Tell me about a time you dealt with {a}, {b} and {c}.", 0.1, "one_question"),
        ("Describe how you handled {a} " + "on some day or other " * 9 + ".", 0.1, "one_question"),
        ("Good to meet you.", 0, "no_request"),
        ("What are your hobbies?", 0, "small_talk"),
        ("How would you handle {a}?", 0, "intentions"),
        ("Are you good at {a}?", 0, "yes"),
    ],
)
def test_faults_and_what_they_cost(bank, text, fine, reply):
    """A fault reveals nothing and costs what the page says."""
    env = with_states(bank, ("open",) * 4)
    a, b, c, _ = env.competencies
    message, *_ = env.step(text.format(a=a, b=b, c=c))
    assert message["content"] in bank["replies"][reply] and not env.heard
    assert env.fines == pytest.approx(fine)


def test_asking_again_is_a_fault(bank):
    """The same wording; a second question about what was told; a question that is not specific after an outline."""
    env = with_states(bank, ("open", "reserved", "open", "open"))
    a, b, *_ = env.competencies
    say(env, f"Describe how you handled {a}.", f"What exactly did you do about {a}?")
    assert env.faults["repeated"] == 1
    say(env, f"Describe how you handled {b}.", f"Tell me about a time you dealt with {b}.")
    assert env.faults["repeated"] == 2
    assert say(env, f"How did you go about {b}?")[0]["content"] == short(env, b)
    assert env.faults["repeated"] == 2 and env.fines == pytest.approx(0.2)


def test_no_summary_costs_and_ends(bank):
    """Turn N + 1 is no summary, or none of its lines can be read: −.25; so does a context that is used up."""
    env = with_states(bank)
    questions = [f"Are you good at {c}?" for c in env.competencies] + ["Are you ok?", "Is it you?"]
    message, reward, done, info = say(env, *questions, "Goodbye.")
    assert done and info["fault/no_summary"] == 1 and reward == pytest.approx(-0.25)
    assert say(with_states(bank), "SUMMARY")[1] == pytest.approx(-0.25)
    assert with_states(bank).run_out()[0] == pytest.approx(-0.25)


def test_baselines_of_the_interview(bank):
    """Who reads the last reply earns 1; a fixed list .5; with blind follow-ups .65, correct / K .75; random a quarter or so;
    everything, risky questions too, loses. 300 candidates: ± .03 is three standard errors of the fixed+ reward."""
    found = g.baseline_scores(lambda: g.Interview(bank), range(300))
    reward = {name: statistics.mean(r) for name, (r, _) in found.items()}
    share = {name: statistics.mean(hits) for name, (_, hits) in found.items()}
    assert reward["oracle"] == share["oracle"] == 1
    assert reward["fixed"] == share["fixed"] == 0.5
    assert abs(reward["fixed+"] - 0.65) < 0.03 and abs(share["fixed+"] - 0.75) < 0.02
    assert 0.15 < reward["random"] < 0.4 and -0.55 < reward["uniform"] < -0.3


def test_a_listener_is_not_blind_and_a_list_is(bank):
    """R13's limit is .9: a list asked in order whatever is said is 1, who follows up on outlines about .63."""
    share = {}
    for name in ("oracle", "fixed"):
        _, envs = played(lambda: g.Interview(bank), g.Interview.baselines[name][0], range(100))
        share[name] = g.blind_share([e.moves for e in envs])
    assert share["fixed"] == 1 and 0.55 < share["oracle"] < 0.7


# ---- the interview: what must not win ----


def episode(bank, seed, ask, summary):
    """R of an interviewer: ask(env, n) → text, summary(env, replies) → text."""
    env = g.Interview(bank)
    env.reset(seed)
    replies = []
    for n in range(env.turns):
        message, reward, done, _ = env.step(ask(env, n))
        if done:
            return reward
        replies.append(message["content"])
    return env.step(summary(env, replies))[1]


def perfect(env, replies):
    return g.report(env)


def nothing(env, replies):
    return "SUMMARY\n" + "\n".join(f"{c}: no evidence" for c in env.competencies)


def copied(env, replies):
    return "SUMMARY\n" + "\n".join(f"{c}: {' '.join(replies)}" for c in env.competencies)


def whole_bank(env, replies):
    told = " ".join(key for c in env.bank["competencies"].values() for item in c["evidence"] for group in item["keys"] for key in group)  # fmt: skip
    return "SUMMARY\n" + "\n".join(f"{c}: {told}" for c in env.competencies)


def everything(env, n):
    names = env.competencies[n % 4 :] + env.competencies[: n % 4]
    return f"Tell me about a time you dealt with {', '.join(names)}."


def two_at_once(env, n):
    a, b = env.competencies[2 * n % 4 : 2 * n % 4 + 2]
    return f"Tell me about a time you dealt with {a} and {b}."


def two_questions(env, n):
    a, b = env.competencies[n % 4], env.competencies[(n + 1) % 4]
    return f"Tell me about a time you dealt with {a}, and what about {b}?"


def good_question(env, n):
    return f"Tell me about a time you dealt with {env.competencies[n % 4]}."


EXPLOITS = {
    "one question that names all competencies": (lambda env, n: everything(env, 0), perfect, -1, -0.9),
    "the same, rotated": (everything, perfect, -1, -0.9),
    "two competencies in each question": (two_at_once, perfect, -1, 0.1),
    "two questions in each turn": (two_questions, perfect, -1, 0.1),
    "no evidence everywhere, not a question asked": (lambda env, n: nothing(env, ()), None, 0, 0),
    "invented evidence": (lambda env, n: "SUMMARY\n" + "\n".join(f"{c}: led the red car project, 77 percent." for c in env.competencies), None, -0.6, -0.6),
    "all replies copied to every line": (good_question, copied, -1, 0),
    "all items of the bank on each line": (lambda env, n: whole_bank(env, ()), None, -0.6, -0.6),
    "endless greetings": (lambda env, n: "Good to meet you.", lambda env, replies: "Thanks, that is good.", -1, -0.01),
    "a summary inside a question": (lambda env, n: f"Tell me about a time you dealt with {env.competencies[0]}.\nSUMMARY\n" + "\n".join(short(env, c) for c in env.competencies), None, -0.6, -0.6),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLOITS)
def test_exploits_do_not_win(bank, name):
    """Mean R over 60 candidates, none of them above the fixed list's .5: the page's bounds."""
    ask, summary, low, high = EXPLOITS[name]
    mean = statistics.mean(episode(bank, seed, ask, summary) for seed in range(60))
    assert low - 1e-9 <= mean <= high + 1e-9, mean


def test_candidate_speech_of_the_policy_does_not_count(bank):
    """Only what the environment said was said: a reply that the policy writes itself, inside its turn, reveals nothing."""
    env = with_states(bank, ("reserved", "reserved", "open", "open"))
    a, b, *_ = env.competencies
    env.step(f"Tell me about a time you dealt with {a}.\nCandidate: {short(env, a)}")
    assert a not in env.heard and not env.numbers
    assert say(env, f"SUMMARY\n{short(env, a)}")[1] <= -0.15


def test_two_summaries_are_one_and_its_doubles_are_unsupported(bank):
    """A second try at the same lines, in the hope that one is right: two lines for a competency are both unsupported."""
    env = with_states(bank, ("open",) * 4)
    a = env.competencies[0]
    say(env, f"Tell me about a time you dealt with {a}.")
    reward = say(env, f"SUMMARY\n{short(env, a)}\nSUMMARY\n{a}: no evidence")[1]
    assert reward == pytest.approx(-0.3)


def test_profiles_are_as_dealt_and_come_from_the_seed(bank):
    """K = 4: two reserved, an open one, and one open or none with equal chance; N = 6. The same seed, the same candidate."""
    people = []
    for seed in range(400):
        env = g.Interview(bank)
        env.reset(seed)
        people.append(env)
    states = [sorted(e.states.values()) for e in people]
    assert all(s.count("reserved") == 2 and "open" in s for s in states)
    share = sum("none" in s for s in states) / 400
    assert abs(share - 0.5) < 4 * 0.5 / 400**0.5  # four standard errors
    again = g.Interview(bank)
    again.reset(7)
    assert (again.items, again.states) == (people[7].items, people[7].states)
    assert all(e.turns == 6 and e.max_turns == 7 for e in people)


def test_the_bank_is_left_as_it_was(bank):
    """Hundreds of episodes share one bank: an environment that writes into it changes the others."""
    before = copy.deepcopy({k: v for k, v in bank.items() if k != "read"})
    played(lambda: g.Interview(bank, text="full"), g.Interview.baselines["uniform"][0], range(20))
    assert {k: v for k, v in bank.items() if k != "read"} == before


def test_free_questions_are_read_rightly_nine_times_in_ten(bank):
    """153 questions by hand, labelled by what a person would say before the reader saw them: all kinds, double questions, near
    misses, a chat model's politeness. Count, kind and competency are each right on 90 %; below that the environment would
    punish good questions."""
    rows = [line.split("\t") for line in (REPO / "tests" / "interview_questions.tsv").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    right = {"requests": 0, "kind": 0, "topic": 0}
    for requests, kind, topic, text in rows:
        turn = g.read_turn(bank, g.visible(text))
        right["requests"] += turn["requests"] == int(requests)
        right["kind"] += turn["kind"] == kind
        right["topic"] += (turn["topics"] or ["-"])[0] == topic
    assert len(rows) >= 150
    assert all(n >= 0.9 * len(rows) for n in right.values()), {k: f"{n} of {len(rows)}" for k, n in right.items()}  # fmt: skip
