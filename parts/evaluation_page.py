"""parts/evaluation_page.py: what evaluate.py found, as sentences and as the sections of a page.

`in_words` makes the sentences of a comparison; `compare_sections`, `reward_sections` and
`human_sections` turn a report.json into the sections that parts/pages.py prints and writes.
"""

from parts import pages
from parts.frontier import COSTS, GOAL, curve_of, same_scorer
from parts.pages import ends
from parts.pages import number as show
from parts.reports import appendix, labels

# below, no rate at equal length, no score at equal KL, and exact tests alone
FEW_PROMPTS = 20


def score_names(setup):
    """{scorer: what it is called}: "the recruiter's score" is that of the bundled recruiter alone.

    >>> score_names({"gold": "my_task.py:score"})["gold"]
    'gold score'
    """
    recruiter = setup["gold"].endswith("recruiter.py:reward")
    gold = "recruiter's score" if recruiter else "gold score"
    return {"gold": gold, "proxy": "reward model's score"}


def distance(sqrt_kl):
    """√KL as text; a small one keeps a digit: "0.00" reads like no distance at all."""
    return f"{sqrt_kl:.2f}" if sqrt_kl >= 0.01 else f"{sqrt_kl:.1g}"


def power(n, detectable):
    """How small a difference n prompts can find, in words; the same whatever they found."""
    if detectable is None:
        return f"{f'{n} prompts are' if n != 1 else '1 prompt is'} too few for any finding"
    return f"{n} prompts find a true win rate of {100 * detectable:.0f} % or more in 4 of 5 studies"


WORDS = {  # a verdict about a and b
    "better": "{0} beats {1}: {0} wins",
    "worse": "{1} beats {0}: {0} wins only",
    "inconclusive": "Whether {0} is better than {1} stays open: {0} wins",
}


def in_words(report):
    """(sentences that answer the question, notes that limit them), from the report's numbers."""
    by, report = report["scorers"][0], renamed(report)
    names = score_names(report["setup"])
    base = report["models"][0]["name"]
    answer, notes = [], ["One seed: a statement about these weights, not about the method."]
    for row in report["comparisons"]:
        a, b, rate = row["a"], row["b"], row["win_rate"]
        if row["scorer"] == by and (b == base or "best of" not in a) and rate["value"] is not None:
            answer.append(comparison_in_words(row, names[by]))
    if equal := report["equal_kl"]:
        scores = ", ".join(f"{row['model']} {show(row[by])}" for row in equal["table"])
        answer.append(
            f"At the same distance from {base} (√KL {distance(equal['sqrt_kl'])}) "
            f"the {names[by]} is: {scores}."
        )
    if all(row[by]["value"] is None for row in report["models"]):
        answer.append(f"No answer has a {names[by]}, so it says nothing about any model.")
    for run in report["frontier"]:
        if mark := run["overoptimised"]:
            answer.append(
                f"{run['model']} is over-optimised from step {mark['step']} on: the "
                f"{names['gold']} falls while the training score rises."
            )
    if report["equal_kl"]:
        notes.append("Scores at equal KL are interpolated, without intervals.")
    if few := [run["model"] for run in report["frontier"] if not run.get("judged", True)]:
        with_gold = f"Too few evaluations with a {names['gold']}"
        notes.append(f"{with_gold} to see over-optimisation: {', '.join(few)}.")
    if left := (report.get("best_of_n") or [{}])[-1].get("unscored"):
        notes.append(f"{left} answers drawn for best of n lack a score and are never picked.")
    if report["setup"].get("n_prompts", FEW_PROMPTS) < FEW_PROMPTS:
        few = "no wins at equal length and no score at equal KL"
        notes.append(f"Fewer than {FEW_PROMPTS} prompts: {few}.")
    for run in report["runs"]:
        reward = run.get("reward_model") or run.get("reward_fn")
        if by == "gold" and same_scorer(reward, report["setup"]["gold"]):
            notes.append(f"{run['name']} was trained on the {names[by]}, which it may exploit.")
        if k := run.get("trained_prompts"):
            of = f"a file with {k} of these {report['setup']['n_prompts']} prompts"
            notes.append(f"{run['name']} was trained on {of}: on new ones it may do worse.")
    runs = {run["name"] for run in report["runs"]}
    folders = [row["name"] for row in report["models"][1:] if "best of" not in row["name"]]
    if unknown := [name for name in folders if name not in runs]:
        notes.append(f"No args.json, so no curve and no cost: {', '.join(unknown)}.")
    if by == "proxy":
        notes.append("No gold score: the reward model decides, and training may have used it.")
    for row in report["models"]:
        if row["length"]["value"] < 2:
            notes.append(f"{row['name']}: answers are empty; do prompts end as in training?")
        if unscored := row["length"]["n"] - row[by]["n"]:
            total = row["length"]["n"]
            notes.append(f"{row['name']}: {unscored} of {total} answers have no {names[by]}.")
    return answer, notes


def comparison_in_words(row, score):
    """The sentence of a comparison by `score`."""
    if row["verdict"] == "no verdict":
        same = f"The {score} is the same for every answer"
        return f"{same}, so it says nothing about {row['a']} and {row['b']}."
    sentence = WORDS[row["verdict"]].format(row["a"], row["b"])
    sentence += f" {show(row['win_rate'], 1, True)} of the comparisons by the {score}"
    return f"{sentence}{why_open(row, row['p_holm'])}."


def why_open(row, p):
    """What an interval beside ½ and an open verdict need: the p that decided."""
    rate = row["win_rate"]
    if row["verdict"] != "inconclusive" or rate.get("low") is None:
        return ""
    inside = rate["low"] <= 0.5 <= rate["high"]
    return (
        "" if inside else f"; the test over prompts gives p {pages.p_value(p)}, which is no finding"
    )


def renamed(report):
    """The report with the short `labels` of its models.

    >>> renamed({"models": [{"name": "runs/dpo"}], "comparisons": [{"a": "runs/dpo"}]})
    {'models': [{'name': 'DPO'}], 'comparisons': [{'a': 'DPO'}]}
    """
    names = labels([row["name"] for row in report["models"]])

    def walk(value):
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [*map(walk, value)] if isinstance(value, list | tuple) else names.get(value, value)

    return walk(report)


def rates(title, records, axis, open_rows=()):
    """(table, chart) of shares with their intervals; ½ is no difference; open_rows: without a
    finding, whatever the interval."""
    cells = [[key, show(part, 1, True), part["n"]] for key, part in records.items()]
    bars = [(key, *ends(part)) for key, part in records.items()]
    look = {"x": axis, "digits": 1, "percent": True, "open_rows": open_rows}
    return pages.table(["", "share", "n"], cells, title), pages.interval_plot(
        title, bars, 0.5, **look
    )


def compare_sections(report):
    """A comparison, for the terminal and the page: a section per question."""
    setup, folders = report["setup"], [row["name"] for row in report["models"]]
    limits = [
        f"Gold is {setup['gold']}: what that score does not see, this report does not see.",
        "No person and no LLM compared these answers.",
        f"One temperature ({setup['temperature']:g}) and one set of prompts; others may differ.",
        "Curves during training are measured on validation prompts, end points on test prompts.",
        "Fairness is not measured here.",
    ]
    paths = [f"{name} is {folder}." for folder, name in labels(folders).items()]
    last, report = appendix(report, limits, paths), renamed(report)
    parts = answer_section, proxy_section, tasks_section, diversity_section, samples_section
    return [*(section(report) for section in parts), *last]


def answer_section(report):
    by, setup, cells = report["scorers"][0], report["setup"], []
    equal, names = report["equal_kl"], score_names(setup)
    there = {row["model"]: row[by] for row in equal["table"]} if equal else {}
    wins, verdicts, open_rows = {}, {}, set()
    for row in report["comparisons"]:
        if row["scorer"] == by:
            pair = f"{row['a']} against {row['b']}"
            wins[pair] = row["win_rate"]
            open_rows |= {pair} if row["verdict"] in ("inconclusive", "no verdict") else set()
            verdicts.setdefault(row["a"], row["verdict"])  # the first is against the baseline
    for row in report["models"]:
        numbers = [show(row[scorer]) for scorer in report["scorers"]] + [show(row["kl"], 2)]
        numbers += [show(there.get(row["name"]))] * bool(equal)
        numbers += [verdicts.get(row["name"], "the baseline")]
        cells.append([row["name"], *numbers])
    caption = (
        f"{setup['n_prompts']} prompts of {setup['prompts']}, {setup['samples']} answers to each; "
        f"95 % intervals; {names['gold']}: {setup['gold']}; reward model: {setup['reward_model']}"
        + (f"; equal KL: √KL {distance(equal['sqrt_kl'])}" if equal else "")
    )
    scores = [names[scorer] for scorer in report["scorers"]]
    columns = ["model", *scores, "KL, nats per answer", f"against {report['models'][0]['name']}"]
    columns[-1:-1] = [f"{scores[0]} at equal KL"] * bool(equal)
    tables = pages.table(columns, cells, caption), pairs_table(report, by), cost_table(report)
    charts = (
        rates("Win rates", wins, f"comparisons won by {scores[0]}, ties ½", open_rows)[1],
        kl_plot(report, by),
    )
    title, texts = "Which model is better?", report["answer"] + report["notes"]
    return pages.section(title, texts, None, charts, "answer", tables=tables)


def pairs_table(report, scorer):
    """Every pair of models by one score."""
    pairs = [row for row in report["comparisons"] if row["scorer"] == scorer]
    cells, caption = [], f"By the {score_names(report['setup'])[scorer]}"
    for r in pairs:
        rates = [show(r[key], 1, True) for key in ("win_rate", "length_controlled")]
        cells.append(
            [f"{r['a']} against {r['b']}", *rates, pages.p_value(r["p_holm"]), r["verdict"]]
        )
    if pairs and "detectable" in (first := pairs[0]):
        caption += f"; {power(first['win_rate']['n'], first['detectable'])}"
    header = ["pair", "wins", "wins at equal length", "p (Holm)", "verdict"]
    return pages.table(header, cells, caption)


def kl_plot(report, scorer):
    """The score over √KL: what each run passed, where each model ended, best of n."""
    series, best, names = {}, report.get("best_of_n"), score_names(report["setup"])
    # a run on another scorer logs other numbers: no curve to this end point
    for run in report["frontier"]:
        if run.get("same", {"gold": True}).get(scorer):  # reports of schema 3 have no "same"
            series[f"{run['model']}, during training"] = curve_of(run["points"], scorer)
    for row in report["models"]:
        series[row["name"]] = curve_of([row], scorer)
    if best:  # of N and of fewer
        series[report["models"][-1]["name"]] = curve_of(best, scorer)
    title = f"The {names[scorer]} against KL"
    return pages.line_plot(title, series, "√KL, nats per answer", names[scorer], x_range=(0,))


def proxy_section(report):
    texts = [
        "During training: on validation prompts; in the end: on the test prompts. Best of n: the "
        "answer of the baseline that the reward model likes best, at its bound log n − (n−1)/n.",
        "Scores at equal √KL: linear between evaluations, or from the baseline to the end, as a "
        "gain over the start of the same curve.",
        f"Costs: {'; '.join(COSTS.values())}.",
    ]
    others = report["scorers"][1:]
    plots, tables = ([make(report, x) for x in others] for make in (kl_plot, pairs_table))
    return pages.section("The reward model's view", texts, plots=plots, tables=tables)


def cost_table(report):
    """What each run spent, in all and until its gold was near the best."""
    part = report["efficiency"] or {"table": ()}
    rows = [(f"{row['name']}, in all", row) for row in report["runs"]]
    for row in part["table"]:
        goal, missed = row.get("goal", part.get("goal")), row.get("step", 0) is None
        words = f"{row['name']}, to a score of {goal:.3f}" + ": not reached" * missed
        rows.append((words, row))
    for run in report["frontier"]:
        if mark := run["overoptimised"]:
            rows.append((f"{run['model']}, until over-optimised, step {mark['step']}", mark))
    cells = [[label, *(show(row[cost], 0) for cost in COSTS)] for label, row in rows]
    gold = score_names(report["setup"])["gold"]
    best = f"largest gain in {gold} of any run" if "gain" in part else f"best {gold}"
    caption = f"Spent in all, and to {100 * GOAL:.0f} % of the {best}"
    return pages.table(["run", *COSTS], cells, caption) if cells else None


def tasks_section(report):
    cells, models = {}, [row["name"] for row in report["models"]]
    for row in report["tasks"]:
        name = f"{row['task']}: {row['metric']}"
        cells.setdefault(name, dict.fromkeys(models, "–"))[row["model"]] = show(row["mean"])
    table = pages.table(["", *models], [[metric, *line.values()] for metric, line in cells.items()])
    return pages.section("Tasks", "Mean score of each task.", table)


METRICS = {  # of report["models"], beside its scores
    "length": "tokens",
    "ended": "share that ended by itself",
    "unique": "share of different answers to a prompt",
}


def diversity_section(report):
    models = report["models"]
    rows = [[words, *(show(row.get(key)) for row in models)] for key, words in METRICS.items()]
    table = pages.table(["", *(row["name"] for row in models)], rows)
    return pages.section("Diversity and length", "", table)


def samples_section(report):
    cards = []
    for row in report["samples"]:
        texts = [("prompt", row["prompt"])]
        texts += [(f"{x['model']}: {show(x['score'])}", x["text"]) for x in row["answers"]]
        cards.append(pages.card(row["id"], texts))
    text = "The first answer of each model to prompts drawn by seed."
    return pages.section("Samples side by side", text, cards=cards)


def reward_sections(report):
    """The report of a reward model, for the terminal and the page."""
    rows = {"all pairs": report["accuracy"], "the longer answer wins": report["length_baseline"]}
    texts, counts = reward_in_words(report), report["counts"]
    if report.get("drawn", {}).get("n"):
        rows["pairs that models wrote"] = report["drawn"]
    texts += ["Pairs that a tuned policy wrote (annotate.py draw) predict better what PPO gains."]
    for key in ("task", "strength"):
        rows |= {f"{key} {value}": part for value, part in report[f"by_{key}"].items()}
    table, chart = rates("Pairs on which it is right", rows, "share right")
    gain = report["against_length"]
    cells = {
        "right more often than the rule, percentage points": show(gain, 1, True),
        f"p of that ({gain.get('test', 't')}, over prompts)": pages.p_value(gain["p"]),
    }
    caption = (
        f"{report['accuracy']['n']} pairs of {gain.get('clusters', gain['n'])} prompts; left out: "
        f"{counts['ties']} ties, {counts['equal']} pairs of equal answers"
    )
    tables = [table, pages.table(["", "value"], cells.items(), caption)]
    limits = [
        "Accuracy on these pairs, by these annotators; nothing about other roles or people.",
        "How well a policy trained on it does: it looks for answers on which this model is wrong.",
    ]
    answer = pages.section(
        "Is the reward model right?", texts, None, [chart], "answer", tables=tables
    )
    return [answer, *appendix(report, limits)]


def reward_in_words(report):
    """[sentence] on how good a reward model is."""
    words = {"better": "is better than", "worse": "is worse than"}
    word = words.get(report["verdict"], "cannot be told from")
    right, longer = (show(report[key], 1, True) for key in ("accuracy", "length_baseline"))
    texts = [
        f"The reward model {word} the rule “the longer answer wins”: it is right on {right} of "
        f"{report['accuracy']['n']} pairs, the rule on {longer}."
    ]
    n_trained = report.get("seen_pairs")
    if n_trained or report.get("seen"):
        of = f"{n_trained} of these {report['counts']['rows']} rows stand in a file"
        words = f"{of} that it was trained on" if n_trained else "It was trained on this file"
        texts += [f"{words}: on pairs it has not seen it is right less often."]
    return texts


def human_sections(report):
    """The report of people's votes, for the terminal and the page."""
    a, b, row = report["a"], report["b"], report["comparison"]
    rate = row["win_rate"]
    judges = report.get("judges", [])  # reports before 0.2 have none
    n_people = len(report["annotators"]) - len(judges)
    voters = ["people" if n_people > 1 else "one person"] * (n_people > 0)
    people = " and ".join([*voters, *judges])
    texts = [
        f"{WORDS[row['verdict']].format(a, b)} {show(rate, 1, True)} of the items that {people} "
        f"compared{why_open(row, row['p'])}.",
        *report["caveats"],
    ]
    if row["verdict"] == "inconclusive":
        missed = "; a smaller one can be missed" if row["detectable"] else ""
        texts.append(f"{power(rate['n'], row['detectable'])}{missed}.")
    records = {f"prompts that {a} wins, ties ½": rate}
    records[f"prompts that {a} wins at equal length"] = row["length_controlled"]
    for person in report["annotators"]:
        records[f"votes of {person['annotator']} for {a}"] = person["win_rate"]
    open_rows = set(records) if row["verdict"] == "inconclusive" else ()
    table, chart = rates(f"{a} against {b}", records, "share, ties ½", open_rows)
    counts = {
        "items with a vote": report["items"],
        "items offered": report["offered"],
        "decided votes": report["decided"],
        "annotators": len(report["annotators"]),
    }
    if left := report.get("left_out"):  # reports before 0.2 have none
        counts |= {
            "left out: skips": left["skips"],
            "left out: repeated items": left.get("repeats", 0),
        }
        gold = f"{left['gold_right']} of {left['gold']} right"
        counts["left out: items with a known answer"] = gold if left["gold"] else 0
        counts["left out: votes of models"] = left.get("judge_votes", 0)
    counts |= {
        "p (exact sign test over prompts)": pages.p_value(row["p"]),
        "true win rate that these prompts find in 4 of 5 studies": show(row["detectable"], 0, True),
    }
    tables = [table, pages.table(["", "n"], counts.items())]
    limits = [
        "Ties and both bad count one half, and a prompt with several votes counts once.",
        f"Interval: {rate['method']}. Test: exact sign test over prompts.",
        "Prompts to which both models gave the same answer were not shown.",
        "Agreement, position bias and each annotator: python annotate.py agreement.",
    ]
    whom = "people and language models" if judges and voters else "models" if judges else "people"
    answer = pages.section(
        f"Which model do {whom} prefer?", texts, None, [chart], "answer", tables=tables
    )
    paths = [f"{name} is {folder}." for folder, name in zip(report["models"], (a, b))]
    return [answer, *appendix(report, limits, paths)]


PAGES = {  # title, and the sections of a report
    "compare": ("Which model is better, by how much, at what cost", compare_sections),
    "reward": ("How good is the reward model?", reward_sections),
    "human": ("Two models compared by people", human_sections),
}
