"""bench/work.py: what both sides are given, the same bytes every time, and the clock both carry.

Weights    Llama, 6 layers, hidden 256, 8 heads, 4 key/value heads, vocabulary 4096, tied: 5.2 M
           random numbers
Tokenizer  byte-level BPE trained on the drafts of the first 512 rows; ids 0 to 63 are end tokens,
           of which <|end|> closes an answer; the others matter to a generation_config with 64 ends
Pairs      prompt + chosen answer: log-normal, median 140, 90th percentile 365, cut at 384 when the
           text is made, so that no truncation rule matters; each answer takes 20 to 40 % of that,
           its end token included
Words      invented, drawn by Zipf's law: nothing is learned here but how long it takes

A pre-tokeniser that splits before a blank makes counts add up: tokens of a text = sum over its
words. So a row is cut to its length exactly, and prompt and answer have the same ids apart and
joined.
"""

import functools
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))  # a script's own folder is on the path, the project above it is not
from parts import files  # noqa: E402

LONGEST, MEDIAN = 384, 140
BATCH = 16  # rows per optimiser step
SIGMA = math.log(365 / MEDIAN) / 1.2816  # 1.2816: the 90th percentile of N(0, 1)
ENDS = ["<|end|>"] + [f"<|end{i}|>" for i in range(1, 64)]
MODEL = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=640,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=len(ENDS),
)


@functools.cache
def words():
    """6000 invented words, the likeliest first, and their probabilities."""
    rng = np.random.default_rng([0, 1])
    syllables = [a + b for a in "bdfghklmnprstvz" for b in "a e i o u an er is".split()]
    found = dict.fromkeys(" " + "".join(rng.choice(syllables, 1 + i % 4)) for i in range(20_000))
    found = np.array(list(found)[:6000])
    weights = 1 / np.arange(10, 10 + len(found))
    return found, weights / weights.sum()


def row_lengths(i):
    """Tokens of (prompt, chosen, rejected) of row i; the end token counts as the answer's."""
    rng = np.random.default_rng([0, 2, i])
    total = int(np.clip(round(math.exp(rng.normal(math.log(MEDIAN), SIGMA))), 16, LONGEST))
    chosen, rejected = (max(3, round(total * share)) for share in rng.uniform(0.2, 0.4, 2))
    return total - chosen, chosen, min(rejected, LONGEST - (total - chosen))


def draft(i, probabilities):
    """Word numbers enough for the three texts of row i, whatever their lengths."""
    rng = np.random.default_rng([0, 3, i])
    return rng.choice(len(probabilities), (3, LONGEST), p=probabilities)


def make_tokenizer():
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    vocabulary, probabilities = words()
    texts = ("".join(vocabulary[draft(i, probabilities)].ravel()) for i in range(512))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts,
        MODEL["vocab_size"],
        min_frequency=0,
        show_progress=False,
        special_tokens=[*ENDS, "<|pad|>"],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()),
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )


def make_rows(n, tokenizer):
    """Yield n preference rows; row i depends on i alone."""
    vocabulary, probabilities = words()
    counts = np.array([len(ids) for ids in tokenizer(vocabulary.tolist())["input_ids"]])
    singles = np.flatnonzero(counts == 1)
    for i in range(n):
        a, b, c = row_lengths(i)
        texts = []
        for drawn, tokens in zip(draft(i, probabilities), (a, b - 1, c - 1), strict=True):
            spent = counts[drawn].cumsum()
            kept = drawn[spent <= tokens]
            left = tokens - (spent[len(kept) - 1] if len(kept) else 0)
            texts.append("".join(vocabulary[[*kept, *singles[: int(left)]]]))
        yield dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))


def real_rows(n):
    """n bundled comparisons as plain text, which both sides continue as it stands."""
    rows = files.read_jsonl(REPO / "data" / "prefs_train.jsonl")
    for row in (row for row in itertools.islice(rows, 2 * n) if not row["tie"]):
        answers = {key: " " + row[key][0]["content"] for key in ("chosen", "rejected")}
        yield {"prompt": f"Human: {row['prompt'][0]['content']}\n\nAssistant:", **answers}


def make_folder(folder, n, ends=1, model=None, **shape):
    """Weights (`model`, and `reward` with a score head), and the rows in two orders: `pairs.jsonl`,
    which ours shuffles, and `peer.jsonl` as shuffled, for a peer that reads from the top.

    model: a Llama folder, which is trained on bundled rows; else random weights of a shape
    """
    import torch
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    import common

    folder, real = Path(folder), model
    tokenizer = AutoTokenizer.from_pretrained(real) if real else make_tokenizer()
    tokenizer.chat_template = None
    rows = [*itertools.islice(real_rows(n), n)] if real else [*make_rows(n, tokenizer)]
    files.write_jsonl(folder / "pairs.jsonl", rows)
    steps = range(1, math.ceil(n / BATCH) + 1)
    order = [int(i) for s in steps for i in common.batch_indices(n, BATCH, 0, s)[0]]
    files.write_jsonl(folder / "peer.jsonl", (rows[i] for i in order))
    torch.manual_seed(0)
    if real:
        model = LlamaForCausalLM.from_pretrained(real, dtype=torch.float32)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(common.pad_id(tokenizer))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**MODEL, **shape}))
        model.generation_config.eos_token_id = list(range(ends)) if ends > 1 else 0
    config = model.config
    model.save_pretrained(folder / "model")
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    # a head of small random numbers, so that neither side makes one of its own
    head = LlamaForSequenceClassification(config)
    head.model.load_state_dict(model.model.state_dict())
    head.save_pretrained(folder / "reward")
    for name in ("model", "reward"):
        tokenizer.save_pretrained(folder / name)
    prompts = [row["prompt"] for row in rows[:512]]
    rubrics = {"train": rubric_rows(prompts[:8]), "validation": [], "test": []}
    files.write_json(folder / "rubrics.json", rubrics)
    files.write_jsonl(folder / "prompts.jsonl", ({"prompt": p} for p in prompts))
    files.write_json(folder / "prompt_ids.json", tokenizer(prompts)["input_ids"])


STAGES = {"sft": "sft", "reward": "reward_train", "dpo": "dpo"}
SAMPLERS = {"ppo": "ppo", "grpo": "grpo_rubric"}  # they draw their own answers


EVERY_RUN = "--schedule constant --warmup 0 --eval-every 100000"
OWN = {
    "ppo": "--prompts {0}/prompts.jsonl --reward-model {0}/reward --critic separate --rollouts 64"
    " --batch-size 16 --ppo-epochs 4 --beta 0.05 --max-length 512 --eval-fraction 0 --lr 1e-5",
    "grpo": "--data {0}/rubrics.json --group-size 8 --groups-per-batch 8 --lr 1e-4",
    "dpo": "--pairs {0}/pairs.jsonl --max-new-tokens 1 --nll-coef 0",  # TRL has no such term
    "sft": "--data {0}/pairs.jsonl --max-new-tokens 1",  # no time for the sample answers
    "reward": "--pairs {0}/pairs.jsonl",
}


def stage_flags(
    task, folder, out, steps=None, new_tokens=None, seed=0, device="cpu", dtype="fp32", **more
):
    """(stage, {flag: value}) of our run of a task: no evaluation, a constant learning rate.

    The stages of pairs make one pass in the peer's order, unless `steps` is given.
    """
    start = "reward" if task == "reward" else "model"
    line = f"{OWN[task]} --model {{0}}/{start} --out {out} {EVERY_RUN}"
    line += f" --device {device} --dtype {dtype}"
    if task in SAMPLERS:
        line += f" --max-new-tokens {new_tokens} --steps {steps} --restore last --seed {seed}"
    else:
        line += f" --batch-size {BATCH} --lr {more.get('lr', 1e-4)} --max-length {LONGEST} --seed 0 --eval-fraction 0"
        line += f" --steps {steps}" if steps else " --epochs 1"
    if more.get("micro_tokens"):
        line += f" --micro-tokens {more['micro_tokens']}"
    words = line.format(folder).split()
    return {**STAGES, **SAMPLERS}[task], dict(zip(words[::2], words[1::2]))


# what an answer is worth in the GRPO bench: the share of letters met often enough; cheap, and
# seldom equal in a group
LETTERS = {"a": 20, "e": 30, "i": 40, "n": 25, "s": 10}


def letter_reward(text):
    text = text.casefold()  # as the check does; random weights write any byte
    return sum(text.count(letter) >= n for letter, n in LETTERS.items()) / len(LETTERS)


def rubric_rows(prompts):
    """The same reward as checks of a rubric, in the form that grpo_rubric.py reads."""
    same = dict(check="keywords:letter_frequency", let_relation="at least")
    checks = [dict(same, letter=a, let_frequency=n) for a, n in LETTERS.items()]
    return [dict(task_id=f"bench-{i}", prompt=p, rubrics=checks) for i, p in enumerate(prompts)]


class Clock:
    """Seconds of the work: on a CPU of this process's CPU time, on a GPU of wall time, each read
    when all that the GPU was asked for is done. `write` leaves them where the driver looks."""

    def __init__(self, device):
        self.on_gpu, self.spent = device == "cuda", 0.0

    def now(self):
        if not self.on_gpu:
            return time.process_time()
        import torch

        torch.cuda.synchronize()
        return time.perf_counter()

    def add(self, start):
        """Add the time since `start = self.now()`."""
        self.spent += self.now() - start

    def timed(self, function):
        """The same function with its time added."""

        def wrapper(*args, **kwargs):
            start = self.now()
            out = function(*args, **kwargs)
            self.add(start)
            return out

        return wrapper

    def write(self, path, **more):
        """On a GPU the largest sum of its tensors, too, in place of the memory of the process."""
        if self.on_gpu:
            import torch

            more["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
        Path(path).write_text(json.dumps({"loop_seconds": self.spent} | more))


def peak_mb(usage):
    """Peak memory in MiB. A child inherits its parent's peak, so the driver must weigh less."""
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def weight_norm(folder):
    """Euclidean norm over all weights of a saved folder, in float64."""
    from safetensors.numpy import load_file

    tensors = load_file(Path(folder) / "model.safetensors").values()
    return math.sqrt(sum(float((t.astype(np.float64) ** 2).sum()) for t in tensors))


def settings():
    """What the driver asks of this child: one JSON object on the command line."""
    return json.loads(sys.argv[1])


if __name__ == "__main__":  # in a process of its own: the driver must weigh less than its children
    make_folder(**settings())
