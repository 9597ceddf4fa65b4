"""How much memory training takes: the instrument of bench/memory.py, and the sums of parts/memory.py.

No GPU: steps run on fake tensors, see the top of bench/memory.py. A shape is run with two and three
layers; every moment of a run is linear in their number, which the first tests show.
"""

import contextlib
import importlib.util
import io
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

import common
from conftest import REPO
from parts import cache, memory, runs, sampling
from parts.files import read_jsonl
from test_half import BASE, make_files, train
from tiny import tiny_model, tiny_tokenizer

# not by sys.path: the name would hide docs/memory.py, or be hidden by it
spec = importlib.util.spec_from_file_location("bench_memory", REPO / "bench/memory.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
GB = bench.GB
HALF = torch.bfloat16


@contextlib.contextmanager
def loaded(folder, name, layers=None, lora_rank=0, dtype=HALF, gpu=True):
    """(ledger, fake policy) of a shape."""
    config = bench.config_of(name, layers)
    bench.write_inputs(folder, config, 9, 9, 2)
    ledger = bench.Ledger(config["vocab_size"])
    with bench.faked(ledger, gpu, None, None), ledger:
        model = common.load_policy(folder / "model", dtype, lora_rank=lora_rank)
        yield ledger, model


def quietly(function, *args, **keywords):
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args, **keywords)


def largest(peaks, phase):
    return max(bench.total(kinds) for (of, _), kinds in peaks.items() if of == phase) / GB


# ---- the instrument ----


def test_the_ledger_counts_what_mem_tracker_counts():
    """torch's own tracker sees one step of one module; on that step both have the same peak."""
    config = AutoConfig.for_model(**bench.config_of("SmolLM2-135M", 2))

    def start():
        model = AutoModelForCausalLM.from_config(config)
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def step(model, optimizer):
        with torch.autocast("cpu", HALF):
            loss = model(input_ids=torch.ones(2, 64, dtype=torch.long)).logits.float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with FakeTensorMode():
        model, optimizer = start()
        step(model, optimizer)  # makes the moments
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step(model, optimizer)
    (theirs,) = tracker.get_tracker_snapshot("peak").values()
    with bench.Ledger() as ledger:
        model, optimizer = start()
        step(model, optimizer)
        ledger.phase = "steps"
        step(model, optimizer)
    assert largest(ledger.peaks, "steps") * GB == pytest.approx(theirs["Total"], rel=1e-3)


def test_every_moment_is_linear_in_the_layers():
    """Else two and three layers say nothing about thirty."""
    flags = "--micro-tokens 1024 --batch-size 2 --max-new-tokens 4".split()
    two, three, four = (
        quietly(bench.peaks, "sft", "SmolLM2-135M", flags, layers=n, rows=5) for n in (2, 3, 4)
    )
    assert two.keys() == three.keys() == four.keys() and len(two) >= 5
    for moment in two:
        sizes = [bench.total(peaks[moment]) for peaks in (two, three, four)]
        assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=1e-3), moment


TRAINERS = {
    "sft": "--batch-size 2 --max-new-tokens 8",
    "reward_train": "--batch-size 2 --lora-rank 4",
    "dpo": "--batch-size 2 --loss-type kto --max-new-tokens 8",
    "ppo": "--rollouts 4 --batch-size 2 --ppo-epochs 1 --critic policy --max-new-tokens 8",
    "grpo_rubric": "--group-size 2 --groups-per-batch 2 --beta 0.1 --train-ratio 0.9 --max-new-tokens 8",
    "grpo_agent": "--group-size 2 --groups-per-batch 2 --max-length 99 --val-episodes 1 --test-episodes 0 --max-new-tokens 8",
}


@pytest.mark.parametrize("stage", TRAINERS)
def test_every_trainer_runs_on_fake_tensors(stage):
    """Weights of the policy and two moments for each trained one are there after the last step."""
    flags = TRAINERS[stage].split()
    sizes = {"prompt": 20, "answer": 20, "rows": 5, "layers": 2}
    peaks = quietly(bench.peaks, stage, "tiny-base", flags, "fp16", **sizes)
    kinds = max((k for (phase, _), k in peaks.items() if phase == "steps"), key=bench.total)
    trained = 4 * (2048 * 192 + 2 * 4 * 192 * 192 + 2 * 3 * 192 * 512)
    assert kinds["weights"] >= trained / 2 and kinds["moments"] > 0
    assert "lora" in TRAINERS[stage] or kinds["moments"] >= 2 * trained


# ---- the sums ----


@pytest.mark.parametrize("lora_rank", (0, 16))
@pytest.mark.parametrize("name", ("tiny-base", "Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.1-8B", "gpt2", "gemma-2-2b"))  # fmt: skip
def test_activation_bytes_bound_forward_and_backward(tmp_path, name, lora_rank):
    """On the safe side, by a quarter at most; with checkpointing, where one layer is a guess, by
    two fifths. The largest moment is that of the sums alone: gradients are there before."""
    rows, length = 16, 256  # so that the gradient of one weight is little beside them
    for dtype, checkpoint in ((HALF, False), (HALF, True), (torch.float32, False)):
        folder = tmp_path / f"{dtype}{checkpoint}"
        folder.mkdir()
        with loaded(folder, name, 3, lora_rank, dtype) as (ledger, model):
            expected = memory.activation_bytes(model, checkpoint, length) * rows * length
            runs.prepare(model, SimpleNamespace(grad_checkpoint=checkpoint, fsdp=False))
            mask = torch.ones(rows, length, dtype=torch.bool)
            mask[0, -9:] = False
            for weight in model.parameters():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
            before, ledger.phase = bench.total(ledger.live), "steps"
            common.hidden_states(model, mask.long(), mask).float().sum().backward()
            kinds = ledger.peaks["steps", "trunk"]
            taken = bench.total(kinds) - kinds["copies"]
        assert 1 <= expected / (taken - before) <= (1.4 if checkpoint else 1.3)


def test_activation_bytes_leave_nothing_behind(tmp_path):
    """A hook that returned what it was given made the graph hold itself: 1.2 GB for a 2B model."""
    with loaded(tmp_path, "SmolLM2-135M", 2) as (ledger, model):
        before = bench.total(ledger.live)
        memory.activation_bytes(model, length=64)
        assert bench.total(ledger.live) == before


def test_cache_bytes_are_those_of_the_sampler(tmp_path):
    """2 × 2 bytes × 24 layers × 2 heads × 64 = 12,288 per token of Qwen2.5-0.5B."""
    with loaded(tmp_path, "Qwen2.5-0.5B") as (_, model):
        assert cache.cache_bytes(model) == (12_288, 0)


def test_tokens_fit_what_is_free(tmp_path):
    """Powers of two, at least one row; a sentence with the flags that are still to give."""
    model = common.load_policy(tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer()))
    one = memory.activation_bytes(model)
    size = memory.default_micro_tokens
    assert size(model, None, 0, 100) == (1024, None)
    assert size(model, 600 * one / memory.MARGIN, 0, 100) == (512, None)
    assert size(model, (600 * one + 10**6) / memory.MARGIN, 10**6, 300) == (512, None)
    assert size(model, 600 * one / memory.MARGIN, 0, 590) == (590, None)
    tokens, sentence = size(model, 10**9, 2 * 10**9, 100)
    assert tokens == 100 and "2.0 of 1.0 GB: add --grad-checkpoint, --lora-rank 16" in sentence
    assert sentence.count("add") == 1
    assert "add --lora-rank 16" in size(model, 10**9, 2 * 10**9, 100, grad_checkpoint=True)[1]


@pytest.mark.parametrize("stage", ["ppo", "grpo_rubric", "grpo_agent"])
def test_rl_trainers_say_how_long_their_rows_are(stage, tmp_path, monkeypatch):
    """They said 1, so no free memory was too small for a row. An episode may fill --max-length."""
    pair = next(read_jsonl(REPO / "data/prefs_train.jsonl"))
    rows, lengths = make_files(tmp_path, [pair] * 4, split="train"), []
    prompt = common.encode_prompt(common.load_tokenizer(BASE), pair["prompt"])
    monkeypatch.setattr(runs.Run, "_fit", lambda run, longest: lengths.append(longest) or 1 / 0)
    for limit in (500, 70):
        with pytest.raises(ZeroDivisionError):
            train(stage, rows, BASE, tmp_path / "run", f"--max-length {limit}")
        row = limit if stage == "grpo_agent" else len(prompt) + 12
        assert lengths.pop() == min(limit, row)


def test_answers_at_once_take_half_of_what_is_free(tmp_path):
    with loaded(tmp_path, "Qwen2.5-0.5B") as (_, model):
        assert sampling.answers_at_once(model, None, 768) == 256
        assert sampling.answers_at_once(model, 10e9, 768) == 256
        few = sampling.answers_at_once(model, 1e9, 768)
        assert 0.3e9 < few * 768 * cache.cache_bytes(model)[0] + few * 28 * 151_936 < 0.5e9
        assert sampling.answers_at_once(model, 0, 768) == 1


def test_prompts_pass_in_forwards_of_bounded_size(tmp_path):
    """All of them in one took 3 GB here beside the cache, for 64 answers to 64 prompts."""
    with loaded(tmp_path, "Qwen2.5-0.5B", 2) as (ledger, model), torch.no_grad():
        before, cached = bench.total(ledger.live), 64 * 1032 * cache.cache_bytes(model)[0]
        ledger.peaks.clear()
        with common.autocast(model):
            sampling._prefill(model, [[i, *[0] * 1023] for i in range(64)], 8)
        beside = max(map(bench.total, ledger.peaks.values())) - before - cached
        # 16,384 tokens of cache, 46 kB of activations for each, compute copies of two layers
        assert 0.6 * GB < beside < 1.2 * GB


def test_free_memory_is_bounded_by_the_container(tmp_path, monkeypatch):
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or 0 < free < 2**50
    for name, text in zip(("max", "now"), ("3000", "2500")):
        (tmp_path / name).write_text(text)
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 700\n")
    monkeypatch.setattr(memory, "CGROUPS", [(tmp_path, "max", "now")])
    if free is not None:
        assert memory.free_memory(torch.device("cpu")) == 3000 - (2500 - 700)


# ---- what the pages promise ----


def defaults(folder, name, limit, longest, lora_rank=0, frozen=0):
    """(tokens per forward, answers at once) on a GPU of `limit` GB, beside `frozen` models."""
    with loaded(folder, name, lora_rank=lora_rank) as (ledger, model):
        free = limit * GB - bench.total(ledger.live) * (1 + frozen)
        reserved = memory.training_bytes([model])
        tokens, sentence = memory.default_micro_tokens(model, free, reserved, longest)
        assert sentence is None, sentence
        return tokens, sampling.answers_at_once(model, free, longest)


# two forwards per step allocate what sixteen do; a pair's forward holds the prompt and both answers
@pytest.mark.slow
@pytest.mark.parametrize("stage, longest, frozen, flags", (
    ("dpo", 1536, 0, "--batch-size 2"),
    ("reward_train", 1536, 0, "--batch-size 2"),
    ("ppo", 608, 1, "--batch-size 4 --rollouts 4 --reward-model REWARD"),
))  # fmt: skip
def test_the_readme_runs_on_a_t4(tmp_path, stage, longest, frozen, flags):
    """Qwen2.5-0.5B, all weights, prompts and answers of 512 tokens: under 15 GB. PPO shares the
    critic there of its own accord; a reference and a reward model are as large as one more policy."""
    sizes = defaults(tmp_path, "Qwen2.5-0.5B", 15, longest, frozen=frozen)
    words = [*flags.split(), *["--critic", "shared"][: 2 * frozen]]
    peaks = quietly(
        bench.deep_peaks, stage, "Qwen2.5-0.5B", words, "fp16", limit=15, prompt=512, answer=512,
        rows=6, sizes=sizes,
    )  # fmt: skip
    assert largest(peaks, "steps") < 15
    assert max(largest(peaks, "start"), largest(peaks, "end")) <= largest(peaks, "steps")


@pytest.mark.slow
def test_the_recipe_runs_on_80_gb(tmp_path):
    """Llama-3.1-8B, LoRA 32, answers of 2,048 tokens to prompts of 300: 256 at once were 79 GB of
    cache alone. Fewer at once and smaller forwards are the same numbers."""
    tokens, answers = sizes = defaults(tmp_path, "Llama-3.1-8B", 80, 2348, lora_rank=32)
    assert 2348 <= tokens <= 16384 and 32 <= answers < 256
    groups = -(-answers // 8)
    words = f"""--lora-rank 32 --group-size 8 --groups-per-batch {groups} --max-new-tokens 2048
        --train-ratio 0.99""".split()
    peaks = quietly(
        bench.deep_peaks, "grpo_rubric", "Llama-3.1-8B", words, limit=80, rows=2 * groups + 2,
        sizes=sizes,
    )  # fmt: skip
    assert largest(peaks, "steps") < 80
    assert largest(peaks, "end") <= largest(peaks, "steps")
