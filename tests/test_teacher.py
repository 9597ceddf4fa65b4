"""grpo_rubric.py --teacher and --teacher-system: the answers are trained towards a frozen model's
log-probs, which may have read an instruction that the student never sees."""

import json

import pytest
import torch

import common
import grpo_rubric
import judge
from conftest import REPO
from parts import files, rubrics, runs, sampling
from test_grpo import make_graded, run
from test_ppo import Spy, gap, trained
from tiny import TEMPLATE, cases, tiny_model, tiny_tokenizer, words

pytestmark = pytest.mark.usefixtures("quiet_process")
INSTRUCTION = "Name python, sql and kafka first. Then two strengths and a gap, in short."
DISTIL = "--eval-every 0 --warmup 0 --schedule constant --restore last"


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return make_graded(tmp_path_factory.mktemp("graded"))


def opened(graded, flags, model=None):
    """(args, run, teacher, b, what `update` gets) before the first step."""
    small = "--max-new-tokens 7 --out runs/none --micro-tokens 150 --group-size 4 --warmup 0"
    model = model or graded["llama"]
    argv = words(small, "--groups-per-batch 4 --model", model, "--data", graded["data"])
    args = grpo_rubric.parse_args([*argv, *map(str, flags)])
    run = runs.Run("grpo_rubric", args, [], (), ())
    policy, start, tokenizer = grpo_rubric.load_models(args, run, not args.teacher)
    run.state, run.planned, run.step = {"policy": policy}, 5, 1
    teacher = grpo_rubric.Teacher(args, run, start, tokenizer, graded["rows"])
    run.start(policy, tokenizer, 1e-3)
    b = grpo_rubric.rollout(args, policy, tokenizer, graded["rows"][:4], 3)
    return args, run, teacher, b, torch.zeros(16), torch.ones(16, dtype=torch.bool)


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_each_token_of_the_answer_has_the_teachers_log_prob(template, graded, tmp_path):
    """One answer at a time, without padding, behind the longer prompt: prompts and answers of all
    lengths, in micro-batches. With a template the instruction is a system message; without one it
    is text in front of the text."""
    model = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(template=template))
    _, run, teacher, b, *_ = opened(graded, ["--teacher-system", INSTRUCTION], model=model)
    for i in range(16):  # answers of 1 to 7 tokens
        cut = b["mask"][i].nonzero()[1 + i % 7 :, 0]
        b["mask"][i, cut] = b["attention_mask"][i, cut] = False
    logps, lengths = teacher.logps(run, b), set()
    assert logps.shape == b["ids"].shape and not logps[~b["mask"]].any()
    for i, row in enumerate(b["rows"]):
        system, turns = {"role": "system", "content": INSTRUCTION}, row.prompt
        if isinstance(turns, str) and template:
            turns = [{"role": "user", "content": turns}]
        text = f"{INSTRUCTION}\n\n{turns}" if isinstance(turns, str) else [system, *turns]
        prompt = common.encode_prompt(run.tokenizer, text)
        assert teacher.prompt(row) == prompt
        answer = b["ids"][i][b["mask"][i]].tolist()
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer]])
            scores = teacher.model(ids).logits[0].log_softmax(-1)
        start = ids.shape[1] - len(answer)
        expected = [scores[start + k - 1, token].item() for k, token in enumerate(answer)]
        assert logps[i][b["mask"][i]].tolist() == pytest.approx(expected, abs=1e-4)
        lengths.add((start, len(answer)))
    assert len(lengths) == 16


@pytest.mark.parametrize("rank", [0, 4])
def test_a_teacher_that_reads_what_the_student_reads_has_nothing_to_teach(rank, graded):
    """The start under the student's own system message: no KL, no gradient. Under another one, or
    none for the student, there is one; the text takes the place of --system."""
    flags = ["--system", INSTRUCTION, "--lora-rank", rank, "--teacher-system"]
    for text, is_same in ((INSTRUCTION, True), ("Say nothing.", False)):
        args, run, teacher, b, *rest = opened(graded, [*flags, text])
        assert (teacher.model is run.model) == (rank > 0)
        b["ref_logps"] = teacher.logps(run, b)
        assert (gap([b["ref_logps"]], [b["logps"]]) < 1e-4) == is_same
        row = grpo_rubric.update(args, run, None, b, *rest)
        assert (row["grad_norm"] < 1e-4, row["kl/k3"] < 1e-8) == (is_same, is_same)
        assert (row["forwarded"], row["kl/coef"]) == (16, 1)


def kl_to_teacher(policy, teacher, rows):
    """KL(policy ‖ teacher) over the vocabulary, the mean over answers that the policy draws."""
    prompts, means = [row.prompt for row in rows], []
    answers = sampling.sample(policy, teacher.tokenizer, prompts, 1, 12, seed=1)
    for row, prompt, answer in zip(rows, answers.prompt_ids, answers.response_ids, strict=True):
        log_probs = []
        for model, ids in ((policy, prompt), (teacher.model, teacher.prompt(row))):
            logits = model(torch.tensor([[*ids, *answer]])).logits[0, len(ids) - 1 : -1]
            log_probs.append(logits.float().log_softmax(-1))  # (T, V)
        log_p, log_q = log_probs
        means.append((log_p.exp() * (log_p - log_q)).sum(-1).mean().item())
    return sum(means) / len(means)


@pytest.mark.slow
def test_an_instruction_goes_into_the_weights(tmp_path):
    """Context distillation on the bundled base: on prompts that were not trained on, the student,
    which never reads the instruction, comes near to the start that does. Rewards are only logged."""
    splits = json.loads((REPO / "data/rubrics.json").read_text("utf-8"))
    data, instruction = tmp_path / "r.json", tmp_path / "instruction.txt"
    data.write_text(json.dumps({"train": splits["train"][:16], "validation": [], "test": []}))
    instruction.write_text("Recommendation: hold. " * 3, encoding="utf-8")
    own = {"llama": common.BASE, "data": str(data), "rows": rubrics.read_rubrics(str(data)).rows}
    flags = ["--teacher-system", instruction]
    teacher = opened(own, flags)[2]
    assert teacher.instruction == ("Recommendation: hold. " * 3).strip()
    log = trained(run(own, tmp_path / "run", DISTIL, "--steps 24 --lr 3e-4", *flags))
    student = common.load_policy(str(tmp_path / "run"), trainable=False)
    held_out = [judge.read_row(row) for row in splits["validation"][:12]]
    with torch.no_grad():
        before, after = (kl_to_teacher(x, teacher, held_out) for x in (teacher.model, student))
    assert after < 0.7 * before and before > 0.2, (before, after)
    assert log[-1]["kl/token"] < 0.7 * log[0]["kl/token"] and log[0]["reward/mean"] > 0


def test_a_run_with_a_teacher(graded, tmp_path, monkeypatch):
    teacher = tiny_model("llama", tmp_path, seed=9)
    spy = Spy(monkeypatch, grpo_rubric, "update")
    rows = trained(run(graded, tmp_path / "run", DISTIL, "--steps 40 --lr 0.03 --teacher", teacher))
    kinds = {(row["kl/coef"], row["forwarded"], row["updates"]) for row in rows}
    assert kinds == {(1.0, 16, 1)} and len(rows) == 40
    assert rows[-1]["kl/token"] < 0.67 * rows[0]["kl/token"], [row["kl/token"] for row in rows]
    own = common.load_policy(teacher)
    for _, _, reference, _, advantages, in_loss in spy.calls:
        assert reference is None and not advantages.any() and in_loss.all()
    b = spy.calls[-1][3]
    columns = (b[key] for key in ("ids", "attention_mask", "mask"))
    assert gap([b["ref_logps"]], [common.token_logps(own, *columns).detach()]) < 1e-4
    assert rows[0]["reward/mean"] > 0 and rows[0]["advantage/abs_mean"] > 0
    other = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(pad="<|other|>"))
    for path, message in ((other, "its tokens are not those of"), ("no/such", "")):
        with pytest.raises(files.UserError, match=f"--teacher {path}.*{message}"):
            run(graded, tmp_path / "no", "--teacher", path)


def prompt_of(graded, text, row, tokenizer):
    teacher = object.__new__(grpo_rubric.Teacher)
    teacher.args = grpo_rubric.parse_args(words("--model", graded["llama"]))
    teacher.tokenizer, teacher.instruction = tokenizer, grpo_rubric.read_instruction(text)
    return tokenizer.decode(teacher.prompt(judge.read_row({**row, "rubrics": ["Is short."]})))


def test_the_reference_of_a_row(graded, tmp_path):
    """A row without one keeps the other lines: "The answer is ." would teach a wrong one."""
    text, tokenizer = tmp_path / "text.txt", tiny_tokenizer()
    text.write_text("\ufeffAnswer in short.\nThe answer is {reference}.\n", encoding="utf-8")
    row = {"prompt": "sql?", "reference": "kafka"}
    shown = (
        "<|system|>Answer in short.\nThe answer is kafka.<|end|><|user|>sql?<|end|><|assistant|>"
    )
    assert prompt_of(graded, str(text), row, tokenizer) == shown
    del row["reference"]
    shown = "<|system|>Answer in short.<|end|><|user|>sql?<|end|><|assistant|>"
    assert prompt_of(graded, str(text), row, tokenizer) == shown
    with pytest.raises(files.UserError, match="has no reference, and each line asks for one"):
        prompt_of(graded, "The answer: {reference}", row, tokenizer)


@cases("""
text | template | prompt | message
instruction.txt | {{ messages[-1].content }} | sql? | instruction.txt: no such file
'' | {{ messages[-1].content }} | sql? | : no such file
Be short. | {{ messages[-1].content }} | sql? | the chat template shows nothing of it
Be short. | {{ raise_exception('no system role') if messages[1:] }}x | sql? | no system role
""")
def test_instructions_that_are_refused(text, template, prompt, message, graded):
    tokenizer = tiny_tokenizer(template=template)
    with pytest.raises(files.UserError, match=message):
        prompt_of(graded, text, {"prompt": prompt}, tokenizer)


def test_an_instruction_that_does_not_fit(graded):
    with pytest.raises(files.UserError, match="exceed what the teacher reads; shorten it"):
        opened(graded, ["--teacher-system", "word " * 5000])
