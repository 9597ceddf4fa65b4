"""rank.py: a reward model's order of candidates, whatever the order of the file."""

import csv
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rank as stage
import tiny
from conftest import REPO
from parts import files, reward_models
from parts.blinding import blinded
from parts.reports import raw_scorer
from tiny import cases, error_of, printed


@pytest.fixture
def rank(monkeypatch, tmp_path):

    def scorer(folder, args):
        def score(items, cuts):
            run.seen = [answer[0]["content"] for _, answer in items]
            cuts += [False] * len(items)
            return np.array([[len(text)] for text in run.seen], float), None

        return score

    def run(people, *flags):
        if isinstance(people, list):
            people = tiny.write_rows(tmp_path / "people.jsonl", people)
        return ranked("rm", people, tmp_path / "out", *flags)

    monkeypatch.setattr(stage, "raw_scorer", scorer)
    return run


def ranked(rm, people, out, *flags):
    argv = ["--reward-model", rm, "--candidates", people, "--out", out, *flags]
    stage.main([*map(str, argv)])
    with open(out / "ranked.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_csv(path, header, rows, encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows([header, *rows])
    return path


PEOPLE = """
{"id": "b", "profile": "xxxx", "role": "chef", "note": "n1"}
{"id": "a", "profile": "yyyy", "role": "chef", "note": null}
{"id": "c", "profile": "x", "role": "chef", "note": ["u", 1]}
{"id": "d", "profile": "xxxxxxxx", "role": "chef", "note": "n4"}
{"id": 0, "profile": "zz", "role": "baker", "note": "n5"}
{"id": "e", "profile": "z", "role": "baker", "note": "n6"}
"""


def test_ranks_ties_and_percentiles_by_hand(rank):
    """Percentile = share below + half of the equals; chef: (3 + ½)/4, (1 + 1)/4, ½/4."""
    rows = rank([json.loads(line) for line in PEOPLE.strip().splitlines()])
    assert list(rows[0]) == [*stage.RANKED, "profile", "role", "note"]
    shown = ["{id} {rank} {percentile} {note}".format(**row) for row in rows]
    chefs = ["d 1 87.5 n4", "a 2 50.0 ", "b 2 50.0 n1", 'c 4 12.5 ["u", 1]']
    assert shown == ["0 1 75.0 n5", "e 2 25.0 n6", *chefs]
    assert (rows[2]["score"], rows[2]["truncated"]) == ("8.0", "False")


@pytest.fixture(scope="module")
def rm(tmp_path_factory):
    return tiny.tiny_reward_model("llama", tmp_path_factory.mktemp("rank"))


def test_any_row_order_gives_the_same_file(rm, tmp_path):
    """Batches differ with the order, and with them the last bits of a score: the same bytes."""
    rows = [{"id": f"c{i}", "profile": f"Used {'sql, ' * (i % 7)}{i % 5}.", "role": "x"} for i in range(60)]  # fmt: skip
    found = ranked(rm, tiny.write_rows(tmp_path / "a.jsonl", rows), tmp_path / "a")
    random.Random(0).shuffle(rows)
    path = write_csv(tmp_path / "b.csv", list(rows[0]), [list(row.values()) for row in rows])
    assert ranked(rm, path, tmp_path / "b") == found
    one, two = ((tmp_path / name / "ranked.csv").read_bytes() for name in "ab")
    assert one == two
    prompt = [{"role": "user", "content": "Which candidate fits this role?\nRole: x"}]
    function = reward_models.reward_function(rm, torch.device("cpu"), torch.float32)
    (alone,) = function([prompt], [found[0]["profile"]])
    assert float(found[0]["score"]) == pytest.approx(alone, abs=1e-4)
    scores = {(row["profile"], row["score"]) for row in found}
    assert len(scores) == len({row["profile"] for row in rows}) == 35


def test_csv_cells_come_through(rank, tmp_path):
    cells = ['a,b "c"', "zwei\nZeilen", "Übergrößenträger\u2028x", "-1.5", "👩🏽\u200d🚒"]
    rows = [[i, cell, f"p{'x' * i}"] for i, cell in enumerate(cells)]
    path = write_csv(tmp_path / "in.csv", ["id", "notiz", "profile"], rows, "utf-8-sig")
    found = rank(path, "--role", "Bäcker")
    assert [row["notiz"] for row in found] == cells[::-1]
    assert list(found[0])[-2:] == ["notiz", "profile"]


def test_a_cell_is_no_formula_and_the_file_is_private(rank, tmp_path):
    """A profile that began with =HYPERLINK(…) ran in the spreadsheet of whoever opened the list."""
    formulas = ["=1+1", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", " =1"]
    people = [{"id": i, "profile": x, "role": "r"} for i, x in enumerate(["+1", *formulas])]
    assert {row["profile"] for row in rank(people)} == {"+1", *(f"'{x}" for x in formulas)}
    for name in ("ranked.csv", "report.json", "report.html"):
        assert (tmp_path / "out" / name).stat().st_mode & 0o777 == 0o600


def test_blind_takes_the_names_out(rank, capsys):
    """First and last names, initials, addresses and pronouns stayed, and a profile without its name
    ended the run."""
    names = ("Ann Li", "Amy Lee", "Bo")
    texts = ["Ann Li, 3 years. Ann Li led.", "LEE, Amy, 3 years. Amy led.", "x"]
    people = [{"id": n, "name": n, "profile": x, "role": "r"} for n, x in zip(names, texts)]
    found = rank(people, "--blind", "name")
    assert sorted(rank.seen) == 2 * ["the candidate, 3 years. the candidate led."] + ["x"]
    shown = printed(capsys)
    for words in ("names are replaced in 2 profiles", "not nicknames", "No name in 1 profiles, such as Bo",
                  "titles (English, German, French, Spanish) and English pronouns; not",
                  "pronouns and titles of other languages"):  # fmt: skip
        assert words in shown
    assert {row["profile"] for row in found} == {*texts}
    assert {row["text_scored"] for row in found} == {*rank.seen}
    people = [people[1] | {"profile": "They led Leeds."}]
    line = error_of(rank, people, "--blind", "name", "--overwrite")
    assert "no profile has its name in it, such as 'Amy Lee'" in line


@cases("""
name | text | blind
José Müller | Jose Muller led. JOSÉ ran it. | the candidate led. the candidate ran it.
Anna-Lena Schmidt | Anna Schmidt; Lena's boss | the candidate; the candidate's boss
Amy Beth Lee | Amy B. Lee; Lee; Beth | the candidate; the candidate; the candidate
Amy Lee | A. Lee; A.L. and Amy L. in Leeds | the candidate; the candidate and the candidate in Leeds
Amy Lee | Dr. Lee (amy.lee@x.org, github.com/amylee) | the candidate ((contact), (contact))
Amy Lee | Ms. Lee said she's sure. Her team helps her. | the candidate said they're sure. Their team helps them.
Vincent van Gogh | V. van Gogh; van Gogh; Gogh | the candidate; the candidate; the candidate
Pat O'Brien | Pat O’Brien may pat a dog | the candidate may pat a dog
Lee, Amy | AMY LEE | the candidate
王小明 | 王小明在北京，小明 | the candidate在北京，the candidate
王 伟 | 王伟 led | the candidate led
Wang Wei 王伟 | Wei, 王伟, weighs Weight | the candidate, weighs Weight
Jörg Müller-Łuk | J. Mueller-Luk, Joerg | the candidate
Jean-Luc Picard | J.-L. Picard; JL Picard; Jean-Luc | the candidate; the candidate; the candidate
Ana María López Díaz | A. M. López; Ana López | the candidate; the candidate
Will | Will led. They will travel. | the candidate led. They will travel.
Grace May | May led in May 2020. | the candidate led in May 2020.
Amy Lee, PhD | Lee has a PhD | the candidate has a PhD
Dr. Amy Lee | A. Lee; Dr. Lee | the candidate; the candidate
Jürgen Müller | Herr Müller lobte Frau Prof. Dr. Groß, Hr. Mueller; Fr. 8 Uhr | the candidate lobte Groß, the candidate; Fr. 8 Uhr
Frau Dr. Eva Groß | Frau Groß (eva(at)x.de, e.g [at] mail [dot] org) | the candidate ((contact), (contact))
Léa Roux | Mme Roux; M. Roux; M. Sc. | the candidate; the candidate; M. Sc.
Ana López | Sra. López; Señorita Ana; Sr. Developer. He trabajado. | the candidate; the candidate; Sr. Developer. He trabajado.
Amy (Lin) Lee | Lin led | the candidate led
Jack Ma | Ma led | the candidate led
Amy Lee | amylee.dev, Amy_Lee | the candidate.dev, the candidate
Amy Lee | Miss deadlines: never. S/he led. | Miss deadlines: never. They led.
Ruby Lee | Uses Ruby. Lee led. | Uses Ruby. the candidate led.
- | A - b | A - b
Ruby Lee | Lee used Ruby. | the candidate used Ruby.
AMY LEE | Amy Lee, 6 years. Amy led. Ms. Lee built ETL. AMY | the candidate, 6 years. the candidate led. the candidate built ETL. the candidate
MCDONALD, SEAN | McDonald led; Sean ran; an MS and HR. Sean | the candidate led; the candidate ran; an MS and HR. the candidate
Marie DUPONT | Dupont dirige; dupont | the candidate dirige; dupont
Mcdonald Deshawn | McDonald; DeShawn | the candidate; the candidate
deShawn Lee | deShawn led | the candidate led
YILDIZ, Gül | Yildiz; Guel; YILDIZ | the candidate; the candidate; the candidate
Aslı Yıldız | YILDIZ and Asli | the candidate and the candidate
Ana de la Cruz | Mrs. de la Cruz; DR. DE LA CRUZ | the candidate; the candidate
Ursula von der Leyen | Frau von der Leyen; Ms von der Leyen | the candidate; the candidate
Lea BOOKER | MS. BOOKER led. MRS. Booker; MS Booker; an MS. Booker | the candidate led. the candidate; the candidate; an MS. the candidate
Gina d'Angelo | Mrs. d'Angelo; D'Angelo; D’ANGELO | the candidate; the candidate; the candidate
Amy Lee | Amy led. Lee ran; amy b. lee | the candidate led. the candidate ran; the candidate
GINA D'ANGELO | Mrs. d’Angelo; an angel | the candidate; an angel
Omar al-Amin | Mr. al-Amin; Al-Amin | the candidate; the candidate
Ana López | la señora López; madame López | la the candidate; the candidate
AMY LEE, MSC | Lee has an MSc in maths | the candidate has an MSc in maths
MS. AMY LEE | MS Office by Amy | MS Office by the candidate
""")
def test_forms_of_a_name(name, text, blind):
    assert blinded(text, name, "Must have: ruby, sql")[0] == blind


@cases("""
text | blind
Es ging hin und her. | Es ging hin und her.
Amy Lee kennt SQL von früher her. | the candidate kennt SQL von früher her.
Das ist lange her, und er lernte viel. | Das ist lange her, und er lernte viel.
Von der Ausbildung her Mechanikerin. | Von der Ausbildung her Mechanikerin.
Drei Jahre ist das her! Her team led. | Drei Jahre ist das her! Their team led.
Sie ist von der Statistik her gekommen. We saw her. | Sie ist von der Statistik her gekommen. We saw them.
She led her team at MIT. | They led their team at MIT.
Her boss trusted her. | Their boss trusted them.
Doubled her sales at Schmidt und Partner. | Doubled their sales at Schmidt und Partner.
Moved from der Spiegel und das Amt to her own firm. | Moved from der Spiegel und das Amt to their own firm.
Ludwig van der Rohe praised her. | Ludwig van der Rohe praised them.
Dr. von der Tann praised her. | Dr. von der Tann praised them.
Hin und her gelaufen. | Hin und her gelaufen.
DOUBLED HER SALES. | DOUBLED Their SALES.
""")
def test_german_her_is_no_pronoun(text, blind):
    """ "hin und their", "von früher them". Where the language is in doubt it is blinded: a sentence
    is German with "hin und her", or with two German words and no English one."""
    assert blinded(text, "Amy Lee")[0] == blind


def test_names_that_are_missing_or_words_are_said(rank, tmp_path, capsys):
    """ "-" was a crash, "unknown" was taken out of the text as a name, "May 2020" and a name that is
    a word of the role went unmentioned."""
    names = {"a": "Will Ma", "b": "unknown", "c": "", "d": "Ruby Fox", "e": "-"}
    texts = ["Will led.", "Of unknown soups.", "They will cook.", "Ruby Fox uses ruby.", "x"]
    people = [{"id": k, "name": v, "profile": x} for (k, v), x in zip(names.items(), texts)]
    found = rank(people, "--blind", "name", "--role", "Must have: ruby")
    said = printed(capsys).partition("Candidates in order")[2]
    assert {row["text_scored"] for row in found} > {"Of unknown soups.", "the candidate led."}
    assert "No name in the column of 3 candidates, such as b, c, e: look at them" in said
    assert "1 parts of names are words of the role and stay, such as Ruby (d)" in said
    assert "1 parts of names are words elsewhere, but replaced if they have a capital: Will (a)" in said  # fmt: skip


def test_what_an_order_cannot_say_stands_above_it(rank, tmp_path, capsys):
    """200 equal scores, a role without must-haves and one that the file had were not mentioned."""
    people = [{"id": i, "profile": "Uses C++.", "role": "r"} for i in range(20)]
    rank(people, "--role", "Role: dev")
    said = printed(capsys)
    assert "All candidates have the same score: the order says nothing there." in said
    assert "20 candidates share rank 1; the table shows some of them." in said
    assert "--role stands in place of the roles of the file." in said
    assert "Must-haves are not looked for where the role has no line such as" in said
    (row, *_) = rank(people[:1], "--role", "Role: dev\nMust-haves:\n- C\n- C++", "--overwrite")
    assert (row["must_haves_found"], row["must_haves_missing"]) == ("C++", "C")
    assert "1 candidate for 1 role," in printed(capsys)


def test_what_is_printed(rank, tmp_path, capsys):
    more = {"role": "Role: r\nMust have: bread, soup", "sex": "F", "race_ethnicity": "A"}
    found = rank([{"id": i, "profile": f"Baked {'bread ' * i}"} | more for i in range(3)])
    printed = capsys.readouterr().out.strip().splitlines()
    path = tmp_path / "out" / "ranked.csv"
    assert printed[-1] == f"next: python audit.py {path} --score percentile --select 0.3"
    assert [r["must_haves_found"] for r in found] == ["bread", "bread", ""]
    assert (found[0]["sex"], found[2]["must_haves_missing"]) == ("F", "bread, soup")
    assert any(line.split()[-2:] == ["bread", "soup"] for line in printed)


ASK = "Which candidate fits this role?\n"


@pytest.fixture
def folder_of_roles(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("role.txt").write_text("\ufeffRole: chef\nMust have: soups\n", encoding="utf-8")
    Path("README.md").write_text("secret")
    Path("cook").mkdir()


@cases(r"""
flag | role
'Role: chef\nMust have: soups' | 'Role: chef\nMust have: soups'
@role.txt | 'Role: chef\nMust have: soups'
'Which candidate fits this role?\nRole: chef\nMust have: soups' | 'Role: chef\nMust have: soups'
chef | Role: chef
cook | Role: cook
Node.js | Role: Node.js
.NET | Role: .NET
C++ | Role: C++
a.b c.txt | Role: a.b c.txt
""")
def test_a_role_is_text_and_a_file_has_an_at_sign(folder_of_roles, flag, role):
    """The cell "Node.js" was opened as a file, and "README.md" was read and ranked by; a folder's
    name is a role, too."""
    (message,) = stage.role_prompt(stage.role_of_flag(flag))
    assert message == {"role": "user", "content": ASK + role}


def test_a_bundled_role_is_asked_for_as_in_the_bundled_prompt():
    bundled = next(files.read_jsonl(REPO / "data/candidates.jsonl"))["prompt"]
    text = bundled[0]["content"].removeprefix(ASK)
    assert stage.role_prompt(stage.role_of_flag(text)) == bundled


@pytest.mark.parametrize("role", ["README.md", "@role.txt", "https://x.org/chef"])
def test_a_role_of_the_file_of_candidates_opens_nothing(folder_of_roles, rank, role):
    """It is never a file: its name, or a link, was ranked by as if it were the role."""
    line = error_of(rank, [{"id": 0, "profile": "x", "role": role}])
    assert re.search(":1: the role is .*; give its text: nothing is opened", line)


def test_a_link_is_not_fetched():
    line = error_of(stage.role_of_flag, "https://x.org/chef")
    assert "--role https://x.org/chef: nothing is fetched" in line


@cases(r"""
task | prompt | words
rank | p | 2 of them compare profiles
assess | 'Which candidate fits this role?\nRole: r' | 2 of them compare profiles
assess | p | none of them compares profiles for a role, so this order says nothing
None | p | which are no longer there
""")
def test_what_the_reward_model_saw_stands_at_the_order(tmp_path, rank, capsys, task, prompt, words):
    """A keyword-stuffed profile came first by a reward model that never saw profiles."""
    pairs = tiny.write_rows(tmp_path / "pairs.jsonl", [{"task": task, "prompt": prompt}] * 2)
    (tmp_path / "rm").mkdir()
    record = {"stage": "reward_train", "args": {"pairs": [pairs if task else "gone.jsonl"]}}
    files.write_json(tmp_path / "rm/args.json", record)
    log = '{"step": 6, "eval/accuracy": 0.61, "eval/accuracy_low": 0.511, "eval/accuracy_high": 0.694, "eval/n": 114}'
    (tmp_path / "rm/metrics.jsonl").write_text(f'{log}\n{{"step": 6}}\n')
    people = tmp_path / "p.jsonl"
    people.write_text(PEOPLE)
    ranked(tmp_path / "rm", people, tmp_path / "o")
    shown = printed(capsys)
    assert words in shown
    if task:  # its own quality, where the recruiter reads the order
        assert "On 114 held-out pairs it is right on 61.0 % [51.1, 69.4]." in shown
    ranked("unknown", people, tmp_path / "o", "--overwrite")
    assert "What unknown was trained on is not recorded" in capsys.readouterr().out


@cases(r"""
text | flags | message
 | () | is empty
'{"id": 1}\n' | () | no text in the column 'profile'; there is id
'{"id": 1, "profile": "x", "role": "r"}\n{"id": 1, "profile": "x", "role": "r"}\n' | () | :2: the id '1' is there twice
'{"id": "1 ", "profile": "x", "role": "r"}\n{"id": 1, "profile": "x", "role": "r"}\n' | () | :2: the id '1' is there twice
'{"id": 1, "profile": "x", "role": "Line Cook"}\n{"id": 2, "profile": "x", "role": "line-cook "}\n' | () | :2: the role differs from that of line 1 in case
'{"id": 1, "resume": "x", "role": "r"}\n' | () | there is id, resume, role; name the column of the profile with --text-column
'{"id": 1.5, "profile": "x", "role": "r"}\n' | () | no text in the column 'id', but 1.5
'{"id": 1, "profile": "x", "role": "r"}\n' | ('--role', '') | no role: say with --role
'id;profile\n1;"x;y"\n' | () | c.csv:2: no role: say with --role
'id2,profile\n1,x\n' | () | no text in the column 'id'; there is id2, profile; rename the column that tells them apart
'{"id": 1, "profile": " ", "role": "r"}\n' | () | :1: no text in the column 'profile'
'{"id": 1, "profile": "N/A", "role": "r"}\n' | () | :1: no text in the column 'profile'
'{"id": 1, "profile": "x", "role": "n/a"}\n' | () | :1: no role: say with --role
'{"id": 1, "profile": ["x"], "role": "r"}\n' | () | :1: no text in the column 'profile'
'{"id": null, "profile": "x", "role": "r"}\n' | () | no text in the column 'id'
'{"id": 1, "profile": "x"}\n' | () | :1: no role: say with --role
'{"id": 1, "profile": "x", "prompt": [{"role": "nobody"}]}\n' | () | c.jsonl:1
'{"id": 1, "profile": "\\ud800", "role": "r"}\n' | () | c.jsonl:1
{"id": 1, "profile": "x", "role": "r" | () | not valid JSON
'{"id": 1, "profile": "x", "role": "r"}\n' | ('--blind', 'name') | no text in the column 'name'
'{"id": 1, "profile": "x", "role": "r", "score": 1}\n' | () | rename 'score'
'{"id": 1, "profile": "x", "role": "r"}\n' | ('--role', 'role.txt') | --role role.txt: to read the file, --role @role.txt
'{"id": 1, "profile": "x", "role": "r"}\n' | ('--role', '@role.txt') | --role @role.txt: no such file
'{"id": 1, "profile": "x", "role": "r"}\n' | ('--role', ' ') | no role: say with --role
'{"id": 1, "profile": "x", "role": "r"}\n' | () | --reward-model nowhere
'id,profile\n1,x,y\n' | () | c.csv:2: more cells than the 2 columns
'id,profile\n1,"x\n' | () | unexpected end of data
'id,profile\n' | () | is empty
""")
def test_bad_candidates_are_named(tmp_path, text, flags, message):
    path = tmp_path / "c.csv" if text.startswith("id") else tmp_path / "c.jsonl"
    path.write_bytes(text.encode("latin-1"))
    assert message in error_of(ranked, "nowhere", path, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_no_file_of_the_user_is_replaced(tmp_path):
    """`--out .` replaced the input, or an older order, in silence; --overwrite is for a report."""
    header, own = ["id", "profile", "role"], [["1", "x", "r"]]
    ranked_csv = write_csv(tmp_path / "ranked.csv", header, own)
    content = ranked_csv.read_bytes()
    for people, words in (
        (ranked_csv, "ranked.csv in it is an input, and would be replaced"),
        (write_csv(tmp_path / "c.csv", header, own), "holds ranked.csv, which is of no report"),
    ):
        assert words in error_of(ranked, "nowhere", people, tmp_path, "--overwrite")
    assert ranked_csv.read_bytes() == content


def test_a_cut_profile_is_named(tmp_path, capsys):
    rm = Path(tiny.tiny_reward_model("llama", tmp_path))
    files.write_json(rm / "args.json", {"stage": "reward_train", "args": {"max_length": 100}})
    people = [{"id": "long", "profile": "python " * 90}, {"id": "short", "profile": "x"}]
    rows = ranked(rm, tiny.write_rows(tmp_path / "p.jsonl", people), tmp_path / "o", "--role", "r")
    assert "1 were cut to the reward model's --max-length, such as long" in capsys.readouterr().out
    found = {row["id"]: row["truncated"] for row in rows}
    assert found == {"long": "True", "short": "False"}


def test_a_reward_model_reads_what_it_was_trained_on(tmp_path):
    """Its positions (beyond them GPT-2 was a traceback), and the tools of a prompt."""
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    folder = tiny.tiny_reward_model("gpt2", tmp_path, tokenizer, max_position_embeddings=64)
    score = raw_scorer(folder, SimpleNamespace(device="cpu"))
    prompt, answers = [{"role": "user", "content": "word " * 200}], ("ab", "c")
    answers = [[{"role": "assistant", "content": text}] for text in answers]
    own = reward_models.reward_function(folder, torch.device("cpu"), torch.float32, raw=True)
    own = own([prompt] * 2, answers)
    alone = score([(prompt, answer) for answer in answers])[0, :, 0]
    assert alone.tolist() == pytest.approx(own, abs=1e-5)
    prompt[0]["content"] = "Hi"
    with_tools, without = score([(prompt, answers[0])] * 2, tools=[[{"name": "sum"}], None])[
        0, :, 0
    ]
    assert with_tools != without
