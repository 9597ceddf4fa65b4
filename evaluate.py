"""evaluate.py: models, a reward model or votes in, an answer out: which is better, and how sure?

Objective    P(an answer of A is preferred to one of B) on held-out prompts, 95 % interval, p
Algorithm    of compare:
             (1) draw prompts of one split; load what scores the answers
             (2) answers of every model, and their KL from the first model
             (3) scores: --gold, which no training saw, decides; without it the reward model
             (4) check the judge: does it prefer cut or repetitive answers? is it right on pairs?
             (5) means, win rates, what the runs reached; the report
             of reward: score held-out pairs, beside the rule "the longer answer wins"
             of human: find who wrote what; the win rate in people's votes
Conventions  every answer of A meets every answer of B to the same prompt; equal scores, ties and
             "both bad" count ½; each prompt weighs the same, and a prompt counts where every model
             has a score. Rate, interval and p are of one estimator over prompts (parts/stats.py);
             the verdict goes by p, adjusted for all comparisons (Holm)
Left out     fairness (fairness.py), a single overall score, an LLM's opinion (ruler.py)
Run          python evaluate.py compare --model data/tiny-base runs/dpo --gold data/recruiter.py:reward
             python evaluate.py reward --reward-model runs/reward --pairs data/prefs_test.jsonl
             python evaluate.py human --votes runs/ab/annotations.jsonl
Writes       report.html and report.json; of compare also samples.jsonl
Reference    Gao et al. 2022, arXiv 2210.10760 (√KL); Dubois et al. 2024, 2404.04475 (equal length)
"""

import itertools
import shlex
from os.path import realpath
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit
from statsmodels.genmod.families import Binomial
from statsmodels.genmod.generalized_estimating_equations import GEE

from parts import contest, curves, files, report, stats
from parts.files import UserError, number
from parts.report import show
from parts.stats import FEWEST_CLUSTERS, FOUND, NONE, OPEN, UNMEASURED
from parts.texts import plain_text

NEVER = "this judge cannot be trusted here"  # the verdict where the judge fails its check
VERDICTS = {  # of the first model of a row against the second
    FOUND: "better", NONE: "about equal", OPEN: "no difference shown",
    UNMEASURED: f"{UNMEASURED}: fewer than {FEWEST_CLUSTERS} prompts, or all scores are the same",
}  # fmt: skip
ALIKE = 0.05  # models are about equal where the interval of the win rate lies within ½ ± this
COMPARED = "a, verdict, b, wins, equal_length, p_holm"  # columns of comparisons
NOTE = (
    "At equal length, –: few prompts, one is longer nearly everywhere, all are as long, or length alone "
    "decides."
)

# ---- the math ----


def preference(a, b, wins, lengths, prompts):
    """A row {"a", "b", "wins", "equal_length", "p"} with the winner as "a".

    wins      (n,) 1 A won, ½ tie, 0 B won;  lengths  (n,) of A's answer − of B's
    prompts   (n,) labels. The estimate "wins" is the mean over prompts of each prompt's mean

    By hand: won and a tie on x, lost on y: (¾ + 0)/2, so B won 1 − .375.
    >>> row = preference("A", "B", *map(pd.Series, ([1, 0.5, 0], [0, 0, 0], ["x", "x", "y"])))
    >>> row["a"], round(float(row["wins"]["value"]), 6), row["equal_length"]
    ('B', 0.625, None)
    """
    rates = wins.groupby(prompts).mean()
    if round(rates.mean(), 9) < 0.5:  # last bits order nothing
        return preference(b, a, 1 - wins, -lengths, prompts)
    share = stats.mean_share(rates)
    return {
        "a": a, "b": b, "wins": share,
        "equal_length": equal_length(wins, lengths, prompts), "p": share["p"],
    }  # fmt: skip


def equal_length(wins, lengths, prompts):
    """The win rate of A over B if both answered at equal length: {"value", "low", "high"}.

    wins     (n,) 1 A won, ½ tie, 0 B won;  lengths  (n,) of A's answer − of B's, in tokens
    It is σ(θ) of logit P(A wins) = θ + φ·tanh(Δ/sd(Δ)), clustered by prompt [Dubois et al. 2024].
    None where there are fewer than 20 prompts, or no win or no loss; where one model is longer in
    more than 95 % of rows: equal lengths were then not seen; and where length alone tells wins from
    losses, or all lengths are the same: φ is then infinite, or unknown [Albert & Anderson 1984].
    """
    n_prompts = prompts.nunique()
    if n_prompts < FEWEST_CLUSTERS or wins.nunique() == 1:
        return None
    won, lost = lengths[wins > 0], lengths[wins < 1]  # ties are both
    is_separated = won.min() >= lost.max() or lost.min() >= won.max()
    if is_separated or min((lengths >= 0).mean(), (lengths <= 0).mean()) < 0.05:
        return None
    x = pd.DataFrame({"theta": 1.0, "phi": np.tanh(lengths / lengths.std(ddof=0))})
    weights = 1 / wins.groupby(prompts).transform("size")  # each prompt counts once
    fit = GEE(wins, x, prompts, family=Binomial(), weights=weights).fit(
        scaling_factor=n_prompts / (n_prompts - 1)  # of the clustered covariance
    )
    theta = stats.estimate(fit.params.theta, fit.bse.theta, len(wins), n_prompts)
    return {key: expit(theta[key]) for key in ("value", "low", "high")}


def judged(rows):
    """The rows of `preference` with "p_holm" and "verdict"."""
    for row in stats.holm(rows):
        row["verdict"] = VERDICTS[stats.verdict(row["wins"] | row, 0.5 - ALIKE, 0.5 + ALIKE)]
    return rows


def compare_answers(answers, score):
    """Each two models as a row of `judged`: all their answers to the same prompt meet.

    answers   a frame of model, p (the prompt), length and `score`, all known. Where all scores are
              the same there is nothing to test, and p is None.
    """
    rows = []
    for (a, one), (b, two) in itertools.combinations(answers.groupby("model", sort=False), 2):
        met = one.merge(two, on="p", suffixes=("", "_b"))
        wins = np.heaviside(met[score] - met[f"{score}_b"], 0.5)
        rows.append(preference(a, b, wins, met.length - met.length_b, met.p))
        if answers[score].nunique() == 1:
            rows[-1]["p"] = None
    return judged(rows)


# ---- the arguments ----


def parse_args(argv=None):
    parser = files.parser(
        "evaluate.py command [flags]",
        "Models, a reward model or votes in, an answer out: which is better, and how sure?",
    )
    parser.epilog = "flags: python evaluate.py compare --help"
    commands, adders = parser.add_subparsers(dest="command", metavar="command", required=True), {}
    for name, (function, out) in COMMANDS.items():
        command = commands.add_parser(
            name, help=function.__doc__, formatter_class=parser.formatter_class
        )
        adders[name] = command.add_argument
        report.add_flags(command, out)
    whole, some = number(int, at_least=0), number(int, at_least=1)
    # fmt: off
    add = adders["compare"]
    add("--model", nargs="+", required=True, help="two or more folders or hub ids; KL is measured from the first")
    add("--name", nargs="+", help="what the report calls them, in the same order (default: the last part of each path)")
    add("--prompts", metavar="FILE", default="data/prompts.jsonl", help="JSONL of prompt, split, task")
    add("--split", default="test", help='use only prompts with this "split", where rows have one; all: every prompt')
    add("--n", type=whole, default=200, help="prompts, drawn by --seed, 50 to 800; 0: all")
    add("--gold", default="none", help="the score that decides and that no training saw: FILE:FUNCTION, such as data/recruiter.py:reward for the bundled prompts")
    add("--reward-model", default="none", help="folder of a reward model; it decides where there is no --gold")
    add("--pairs", metavar="FILE", help="held-out pairs, JSONL: is --reward-model right on them?")
    add("--samples", type=some, default=4, help="answers per prompt and model, 1 to 8")
    add("--bon", type=whole, default=0, help="compare also the best of this many answers of the first model by --reward-model, 4 to 64; 0: off")
    add("--temperature", type=number(at_least=0), default=1.0, help="of sampling and of the KL; 0: one greedy answer per prompt, as trainers show it, and no KL")
    add("--max-new-tokens", type=some, default=96, help="longest answer, 64 to 512 tokens")
    add("--chat", action="store_true", help="a prompt given as text is a user's message, instead of text to continue")
    add("--seed", type=whole, default=0, help="of prompts and answers")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add = adders["reward"]
    add("--reward-model", default="runs/reward", help="folder or hub id")
    add("--pairs", metavar="FILE", default="data/prefs_test.jsonl", help="held-out pairs, JSONL")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    adders["human"]("--votes", metavar="FILE", default="runs/ab/annotations.jsonl", help="log of annotate.py, with items.jsonl beside it")
    # fmt: on
    return parser.parse_args(argv)


# ---- compare ----


def compare(args):
    """which model is better, by how much, at what KL"""
    # (1) prompts, and what scores the answers
    if not args.temperature:
        args.samples = 1  # greedy answers are all the same
        if args.bon:
            raise UserError("--bon: needs a --temperature above 0")
    if not 2 <= len({*map(realpath, args.model)}) == len(args.model) <= report.N_COLOURS:
        raise UserError(f"--model: name two or more different models, {report.N_COLOURS} at most")
    names = report.names_of(args.model, args.name)
    if args.reward_model == "none" and (args.bon or args.pairs):
        raise UserError("--bon, --pairs: need a --reward-model")
    page = report.Report(
        "Which model is better?", args, [args.prompts, args.pairs, args.gold.rpartition(":")[0]]
    )
    rows = contest.load_prompts(args)
    ids, cut = contest.encode_alike(args.model, rows, args.max_new_tokens)
    scorers = contest.load_scorers(args, rows)  # {"gold", "reward": (function, its flag)}
    judge, *_ = scorers  # the first one decides
    judge_flag = scorers[judge][1]
    if args.pairs:
        pairs = contest.judge_pairs(args.pairs, scorers["reward"][0])
    # (2) answers and their KL
    answers = contest.answer_all(args, names, rows, ids)
    # (3) scores; of the answers for --bon the one that the reward model likes best
    for key, scorer in scorers.items():
        answers[key] = contest.score(*scorer, answers, rows)
    if args.bon:
        pool = answers[~answers.model.isin(names.values())].sort_values("reward", ascending=False)
        answers = answers.drop(pool.index[pool.p.duplicated()])
    # (4) is the judge to be trusted?
    scored = answers.dropna(subset=judge)
    labels = scored.groupby(["model", "p"]).ngroup(), scored.p
    checks = contest.check_judge(scored[judge], labels, scored.response_ids, scored.finished)
    distrust, accuracy = any(row["wrong"] for row in checks), None
    remarks = contest.sentences(checks)
    if args.pairs:
        accuracy = stats.mean_share(pairs.right, pairs.label)
        end = "low" if accuracy["clusters"] >= FEWEST_CLUSTERS else "value"
        is_chance = accuracy[end] <= 0.5
        distrust |= judge == "reward" and is_chance
        remarks.append(
            f"The reward model is right on {show(accuracy, '.1%')} of {len(pairs)} pairs of "
            f"{args.pairs}{', no better than chance' * is_chance}."
            f"{' A win rate is its opinion of new answers, which pairs may not hold.' * (judge == 'reward')}"
        )
    # (5) means, win rates, what the runs reached
    n_models = scored.groupby("p").model.transform("nunique")
    compared = scored[n_models == answers.model.nunique()]
    missing = answers[judge].isna().groupby(answers.model).sum()
    if compared.empty:
        raise UserError(
            f"{judge_flag}: there is no prompt where every model has a score; answers without one: "
            f"{missing.to_dict()}"
        )
    models = [
        {"model": name, "missing": missing[name]} | means(part)
        for name, part in compared.groupby("model")
    ]
    models.sort(key=lambda row: -row[judge]["value"])
    comparisons = compare_answers(compared, judge)
    for row in comparisons if distrust else ():
        row["verdict"] = NEVER
    of_models = [row for row in comparisons if {row["a"], row["b"]} <= {*names.values()}]
    page.answer(
        headline(of_models),
        f"Mean score by {judge_flag}: {', '.join(row['model'] + ' ' + show(row[judge]['value'], '.3f') for row in models)}.",
        *remarks, *advice(args, names, of_models, len(comparisons)),
    )  # fmt: skip
    page.intervals(
        "How often the first of two is preferred",
        [(f"{row['a']} over {row['b']}", row["wins"], row["a"]) for row in comparisons],
        null=0.5,
    )  # fmt: skip
    page.table("Does the judge prefer what nobody wants?", checks, *contest.KINDS)
    page.table(
        f"Comparisons on {compared.p.nunique()} of {len(rows)} prompts where every model has a score, "
        "winner first", comparisons, COMPARED, NOTE,
    )  # fmt: skip
    page.table(
        "Models, highest mean score first",
        models,
        f"model, {', '.join(scorers)}, kl, length, finished, missing",
    )
    runs = {name: run for folder, name in names.items() if (run := curves.read_run(folder))}
    page.table(
        "Two policies at the smaller √KL of the two", curves.equal_kl(runs), note=curves.AT_KL
    )
    page.table(
        "What it cost", curves.efficiency(runs),
        "model, until, pairs, reward calls, tokens, seconds", curves.COSTLY,
    )  # fmt: skip
    texts = answers.pivot_table(
        "response", answers.prompt.map(plain_text), "model", "first", sort=False
    )
    some = texts[[*names.values()]][:3].reset_index(names="The prompt").to_dict("records")
    page.table("Answers side by side", some, side_by_side=True)
    page.limit(
        cut,
        f"{judge_flag} favours a policy that was trained with it.",
        "Each model was trained once; another seed of its training may give another order.",
        f"The numbers hold for prompts like these, at temperature {args.temperature:g}.",
        "No person compared these answers. Fairness is measured by fairness.py.",
    )
    page.write(models=models, comparisons=comparisons, judge=checks, accuracy=accuracy)
    files.write_jsonl(page.out / "samples.jsonl", answers.drop(columns="p").to_dict("records"))


def means(answers):
    """{"gold", "reward", "kl", "length", "finished": estimate} of a model's answers, over prompts."""
    of_prompts = answers.groupby("p").mean(numeric_only=True).dropna(axis="columns", how="all")
    return {
        key: (stats.mean_share if key == "finished" else stats.mean)(values.dropna())
        for key, values in of_prompts.items()
    }


def headline(comparisons):
    """The first sentence: who is better than whom, of rows of `judged` on the same prompts."""
    parts = [
        f"{row['a']} is better than {row['b']}: preferred in {show(row['wins']['value'], '.1%')} of "
        "comparisons"
        if row["verdict"] == "better"
        else f"{row['a']} and {row['b']}: {row['verdict']}"
        for row in comparisons
    ]
    return f"{'; '.join(parts)}."


def advice(args, names, comparisons, n_tested):
    """What to do where no difference between two models is shown, or no judge can be trusted."""
    unclear = [row for row in comparisons if row["verdict"] in (VERDICTS[OPEN], NEVER)]
    for row in unclear:
        if row["verdict"] != NEVER:
            yield (
                f"{row['a']} against {row['b']}: {row['verdict']}. "
                f"{to_see_more(row['wins'], n_tested)}"
            )
    for row in unclear[:1]:
        pair = [shlex.quote(key) for key in names if names[key] in (row["a"], row["b"])]
        yield (
            f"To let people compare them: python annotate.py draw --model {' --model-b '.join(pair)} "
            f"--prompts {shlex.quote(args.prompts)} --split {shlex.quote(args.split)} "
            f"--max-new-tokens {args.max_new_tokens} --temperature {args.temperature or 1:g} "
            f"{'--chat ' * args.chat}--out runs/ab"
        )


def to_see_more(wins, n_tested=1):
    """What would show a win rate of ½ + ALIKE in one of n_tested comparisons, if prompts vary as these do."""
    more = stats.needed(wins["se"], wins["clusters"], ALIKE, n_tested) - wins["clusters"]
    if more <= 0:
        return "A preference of 55 % would probably have been seen: the two are close."
    return f"To see a preference of 55 %, compare answers to {more:,} more prompts."


# ---- reward ----


def reward(args):
    """how good a reward model is on held-out pairs, beside the rule 'the longer answer wins'"""
    page = report.Report("Is the reward model right?", args, [args.pairs], private=True)
    pairs = contest.judge_pairs(args.pairs, contest.load_judge(args))
    right, longer = (stats.mean_share(pairs[key], pairs.label) for key in ("right", "longer"))
    gain = stats.mean(pairs.right - pairs.longer, pairs.label)
    page.answer(
        f"The reward model is right on {show(right, '.1%')} of {len(pairs)} pairs of {args.pairs}.",
        f"The rule “the longer answer wins” is right on {show(longer, '.1%')}. The model's share less "
        f"the rule's is {show(gain, '+.1%')}: {stats.verdict(gain, -ALIKE, ALIKE)}.",
    )
    page.intervals(
        f"Right on pairs of {args.pairs}",
        [("reward model", right, "model"), ("the longer answer", longer, "rule")], null=0.5,
    )  # fmt: skip
    page.limit(
        "Pairs that a reward model was trained on flatter it.",
        "Policies may write answers of a kind that these pairs do not hold. To see whether it is "
        "right on those, let people vote on them: python annotate.py draw",
    )
    page.write(accuracy=right, length_baseline=longer, against_length=gain)


# ---- human ----


def human(args):
    """two models compared by people, blind: the votes of annotate.py with their models"""
    from parts.agreement import VOTE, unblinded
    from parts.votes import load_items, read_log, replay

    path = Path(args.votes)
    read = path, path.with_name("items.jsonl")
    items = load_items(read[1], "--votes")
    page = report.Report("Which model do people prefer?", args, read, private=True)
    every = replay(read_log(path, items))
    votes = pd.DataFrame(unblinded(every, items), columns=VOTE)
    models = sorted({*votes.model, *votes.other})
    if len(models) != 2:
        raise UserError(
            f"--votes {path}: expected votes on answers of two models; found "
            f"{', '.join(models) or 'none'}; python annotate.py draw --model A --model-b B"
        )
    (row,) = judged([preference(*models, votes.wins, votes.lengths, votes.prompt)])
    a, wins = row["a"], row["wins"]
    votes["wins"] = votes.wins if a == models[0] else 1 - votes.wins
    people = [
        {"annotator": person, "votes": len(part), "wins": stats.mean_share(part.wins, part.prompt)}
        for person, part in votes.groupby("annotator")
    ]
    page.answer(
        f"By {len(people)} people: {headline([row])}",
        f"{len(votes)} votes on {wins['clusters']} prompts. {a} is preferred in {show(wins, '.1%')}, each "
        f"prompt counting once. At equal length: {show(row['equal_length'] or 'not measured', '.1%')}.",
    )
    if row["verdict"] == VERDICTS[OPEN]:
        page.answer(to_see_more(wins))
    page.intervals(
        f"How often {a} is preferred",
        [("everyone", wins, a)],
        null=0.5,
    )  # fmt: skip
    page.table("The comparison, winner first", [row], COMPARED, NOTE)
    page.table("Each annotator", people, note=f"Preferred: {a}.")
    page.limit(
        "The verdict is on these people. Others may prefer the other model: see how far the rates of "
        "annotators differ.",
        "Ties and both bad count one half. How far people agree: python annotate.py agreement",
        f"{len(every) - len(votes)} further votes do not count: on items whose better answer is known, "
        "or that do not name two models.",
    )
    page.write(comparison=row, annotators=people)


COMMANDS = {  # function, and the default of --out
    "compare": (compare, "runs/evaluate"),
    "reward": (reward, "runs/evaluate-reward"),
    "human": (human, "runs/human-report"),
}


def main(argv=None):
    args = parse_args(argv)
    COMMANDS[args.command][0](args)


if __name__ == "__main__":
    files.command(main)
