"""bench/memory.py: the peak memory of a real step of a trainer, for a model's shape, without a GPU.

The stage's own `main` runs: it loads, checks, samples, trains two steps, writes checkpoint and
model. Weights, and what is computed from them, are FakeTensors: shape and type, no numbers. Every
integer is real, so masks, `nonzero` and gathers have their true shapes. What is read out of fake
floats is a constant: a number is 1, a sampled token 0, a comparison True. `Ledger` sees each
operation below autograd and keeps the sum of all live storages by kind.

Cut short    the sampler: its own function runs for the prompts and the first token, and again for
             the last three tokens, where the cache is longest
Passed over  the preflight's identities; weight files are neither read nor written
As on a GPU  unless --cpu: its chunks of logits, its fused AdamW, its number of tokens per forward;
             what moves to the host does not count. Attention is the CPU's flash kernel, which keeps
             what the GPU's keeps
Not seen     the CUDA context (about 0.5 GB), gaps between blocks, the workspace of a kernel; the
             0.5 GB that a Python process with torch weighs by itself; --fsdp
Checked      tests/test_memory.py: against torch's MemTracker, to the byte; all moments are linear in
             the layers, so that a named shape is run with two and three. SmolLM2 on a CPU, dpo.py
             with forwards of 512 and 1024 tokens: 3.18 and 3.99 GB here, 3.80 and 4.25 of a process
Run          python bench/memory.py --model Qwen2.5-0.5B --stage dpo --micro-tokens 2048
             python bench/memory.py --model CONFIG.json --stage ppo --limit 15 --reward-model REWARD
"""

import argparse
import contextlib
import importlib
import json
import math
import shutil
import sys
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors.torch
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import common  # noqa: E402
from parts import identities, memory, prompting, runs, sampling  # noqa: E402

GB = 1e9
AUTO = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
# a float tensor of fewer numbers is real when it is made, and so is a mask made of it
SMALL = 2**20
aten = torch.ops.aten
KEYS = """
    model_type num_hidden_layers hidden_size intermediate_size num_attention_heads
    num_key_value_heads head_dim vocab_size tie_word_embeddings
""".split()
# from the published configs: the values of KEYS, in their order
SHAPES = """
Qwen2.5-0.5B   qwen2   24   896   4864  14   2   64  151936  true
Qwen2.5-1.5B   qwen2   28  1536   8960  12   2  128  151936  true
Qwen2.5-7B     qwen2   28  3584  18944  28   4  128  152064  false
Llama-3.1-8B   llama   32  4096  14336  32   8  128  128256  false
Llama-3.1-70B  llama   80  8192  28672  64   8  128  128256  false
SmolLM2-135M   llama   30   576   1536   9   3   64   49152  true
Qwen3-0.6B     qwen3   28  1024   3072  16   8  128  151936  true
gemma-2-2b     gemma2  26  2304   9216   8   4  256  256000  true
gpt2           gpt2    12   768   3072  12  12   64   50257  true
tiny-base      llama    4   192    512   6   6   32    2048  true
"""
SHAPES = {
    name: dict(zip(KEYS, [family, *map(json.loads, sizes)], strict=True))
    for name, family, *sizes in map(str.split, SHAPES.strip().splitlines())
}
GPT2 = dict(  # its own names of the keys
    n_layer="num_hidden_layers",
    n_embd="hidden_size",
    n_head="num_attention_heads",
    n_inner="intermediate_size",
    vocab_size="vocab_size",
    model_type="model_type",
)
ENVIRONMENT = """
class Environment:
    name, val_key, reward_range, history, baselines = "e", "reward", (0, 2), "all", {}
    max_turns = 2
    def reset(self, seed):
        return [{"role": "user", "content": PROMPT}]
    def step(self, text):
        self.turns = getattr(self, "turns", 0) + 1
        reward = float("team" in text)
        return ({"role": "user", "content": " go on"} if self.turns < 2 else None), reward, self.turns > 1, {"reward": reward}
def score(prompts, answers, rows):
    return [float("team" in answer) for answer in answers]
"""


class Ledger(TorchDispatchMode):
    """Live bytes by kind; `peaks` holds {(phase, moment): {kind: bytes}} where the sum was largest.

    Moments (logits in memory; the embedding's gradient; sampling; the rest) are kept apart because
    the bytes of each are linear in the number of layers, and their maximum is not.
    """

    def __init__(self, vocabulary=0):
        super().__init__()
        self.fake, self.vocabulary = FakeTensorMode(allow_non_fake_inputs=True), vocabulary
        self.entries, self.live, self.peaks = {}, Counter(), {}
        self.phase, self.moment = "start", "trunk"
        self.special = None  # "host", "cache" or "step": what is being made

    def __enter__(self):
        hooks = sys.modules["torch.optim.optimizer"], torch.nn.modules.module
        self.hooks = [
            hooks[0].register_optimizer_step_pre_hook(lambda *_: setattr(self, "special", "step")),
            hooks[0].register_optimizer_step_post_hook(lambda *_: setattr(self, "special", None)),
            hooks[1].register_module_parameter_registration_hook(self.weight),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def weight(self, module, name, weight):
        """A fake weight in place of a small real one."""
        if weight is not None:
            if type(weight) is torch.nn.Parameter:
                data = self.fake.from_tensor(weight.detach())
                weight = torch.nn.Parameter(data, weight.requires_grad)
            self.count(weight, "weights")
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(
                    lambda weight: self.count(weight.grad, "gradients")
                )
        return weight

    def count(self, tensor, kind):
        """Book a storage under this kind, whatever it was before."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.entries:
            self.live[self.entries[key][0]] -= size
            self.entries[key][0] = kind
        else:
            entry = [kind, None]

            def freed(_):
                self.live[entry[0]] -= size
                self.entries.pop(key)

            entry[1] = weakref.ref(storage, freed)
            self.entries[key] = entry
        self.live[kind] += size
        moment = "head" if self.live["logits"] else self.moment
        moment = "sampling" if self.special == "cache" else moment
        if total(self.live) > total(self.peaks.get((self.phase, moment), {})):
            self.peaks[self.phase, moment] = Counter(self.live)

    def kind_of(self, function, tensors, result):
        before = {self.entries.get(x.untyped_storage()._cdata, [None])[0] for x in tensors}
        if self.special == "host" or before == {"host"}:
            return "host"
        if function is aten._to_copy.default and before <= {"weights", "copies"}:
            return "copies"
        if self.special == "step":
            return "moments" if function is aten.zeros_like.default else "temporaries"
        if self.special == "cache" and function is aten.new_empty.default:
            return "cache"
        if result.ndim < 3 and result.shape[-1:] == (self.vocabulary,):
            return "logits"
        in_graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return "activations" if in_graph else "temporaries"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors):
            if function is aten._local_scalar_dense.default:
                return 1.0
            first = function._schema.arguments[0].alias_info
            if first and first.is_write and type(args[0]) is torch.Tensor:
                return args[0]  # a real tensor stays as it is
            if "index" in function.name() and len(args) > 1 and isinstance(args[1], (list, tuple)):
                places = [
                    x.nonzero().unbind(1) if x is not None and x.dtype == torch.bool else [x]
                    for x in args[1]
                ]
                args = args[0], sum(map(list, places), []), *args[2:]
        result = None
        if not tensors:
            with self.fake:
                result = function(*args, **kwargs)
        if tensors or not torch.is_tensor(result) or not is_fake(result, SMALL):
            result = function(*args, **kwargs)
        if not function._schema.is_mutable:
            result = tree_map(constant, result)
        if function is aten.embedding_dense_backward.default:
            self.moment = "embedding"
        elif function is aten.embedding.default:
            self.moment = "trunk"
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.entries:
                self.count(x, self.kind_of(function, tensors, x))
        return result


def is_fake(x, least=0):
    """Does this FakeTensor stay one?"""
    return (x.is_floating_point() or x.is_complex()) and x.numel() >= least


def constant(x):
    """A fake integer becomes real: 0, or True."""
    if isinstance(x, FakeTensor) and not is_fake(x):
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)
    return x


def total(kinds):
    return sum(size for kind, size in kinds.items() if kind != "host")


def move(module, function, recurse=True):
    """nn.Module._apply, which cannot swap fake weights."""
    for child in module.children():
        move(child, function)
    for table in (module._parameters, module._buffers):
        for key, x in table.items():
            with torch.no_grad():
                moved = x if x is None else function(x)
            if moved is not x and table is module._buffers:
                table[key] = moved
            elif moved is not x:
                module.register_parameter(key, torch.nn.Parameter(moved, x.requires_grad))
    return module


@contextlib.contextmanager
def faked(ledger, gpu, limit, sizes):
    """Replace what needs numbers, files, a GPU or patience; see the top of this file.

    limit   GB of the machine, for `free_memory`; sizes as in `peaks`
    """
    decode, steps, adamw = sampling._decode, runs.Run.steps, torch.optim.AdamW

    def short_decode(model, prompts, uniform, ends, *more):
        rows, most = uniform.shape
        ledger.special = "cache"
        decode(model, prompts, uniform, [0], *more)  # prompts and first token: 0 ends all rows
        if most > 3:
            longest = [0] * (max(map(len, prompts)) + most - 3)
            decode(model, [longest] * rows, uniform[:, :3], [-1], *more)
        ledger.special = None
        tokens = torch.full((rows, most), 317)  # " the", but some of the first group say " team"
        tokens[1:8:2] = 469
        return tokens, torch.from_numpy(np.zeros((rows, most), np.float32))

    def phased(run):
        for step in steps(run):
            ledger.phase = "steps"
            yield step
        ledger.phase = "end"

    def from_pretrained(kind):
        def load(name, config, dtype, **_):
            return kind.from_config(config, dtype=dtype), {"missing_keys": []}

        return load

    def to_host(tensor):
        ledger.special, before = "host", ledger.special
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        ledger.special = before
        return copy

    def no_answers(model, tokenizer, prompts, *_, **__):
        nothing = [[317]] * len(prompts)
        return prompting.Answers(nothing, nothing, [True] * len(prompts), [" the"] * len(prompts))

    def ones(tensor, *_, **__):
        return np.ones(tensor.shape)

    files = memory, common, sampling  # which import names of it
    patches = [
        (torch.nn.Module, "_apply", move),
        (sampling, "_decode", short_decode),
        (runs.Run, "steps", phased),
        (identities, "identity", lambda *_: None),
        *((kind, "from_pretrained", from_pretrained(kind)) for kind in AUTO),
        (transformers.PreTrainedModel, "save_pretrained", lambda *_, **__: None),
        (safetensors.torch, "save_file", lambda state, file, **_: Path(file).touch()),
        (torch, "save", lambda *_: None),
        (shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1, 0, 10**15)),
        (FakeTensor, "tolist", lambda x: np.ones(x.shape).tolist()),
        (FakeTensor, "__array__", ones),
        (FakeTensor, "numpy", ones),
        (FakeTensor, "__format__", lambda x, form: format(1.0, form)),
        # of log-probs and scores, which are no numbers here
        (prompting, "generate", no_answers),
        (math, "isfinite", lambda x: True),
        *((f, "free_memory", lambda _: limit and limit * GB - total(ledger.live)) for f in files),
    ]
    if gpu:
        patches += [
            (FakeTensor, "cpu", to_host),
            (FakeTensor, "is_cuda", True),
            (torch.optim, "AdamW", lambda groups, **kw: adamw(groups, **{**kw, "fused": True})),
            *((f, "HEAD_CHUNK_BYTES", {"cpu": memory.HEAD_CHUNK_BYTES["cuda"]}) for f in files),
            (memory, "FASTEST_TOKENS", {"cpu": 16384}),
            *((f, "micro_tokens", lambda model: 16384) for f in files[1:]),
        ]
    if sizes:
        patches += [
            (memory, "default_micro_tokens", lambda *_: (sizes[0], None)),
            *((f, "answers_at_once", lambda *_: sizes[1]) for f in files),
        ]
    with contextlib.ExitStack() as stack:
        for place, name, replacement in patches:
            stack.enter_context(mock.patch.object(place, name, replacement, create=True))
        yield


def write_inputs(folder, config, prompt, answer, rows):
    """A model folder without weights, a reward model's, and data of these lengths in tokens."""
    base, no_weights = ROOT / "data/tiny-base", shutil.ignore_patterns("*.safetensors")
    for name, kind in {"model": "CausalLM", "reward": "ForSequenceClassification"}.items():
        shutil.copytree(base, folder / name, ignore=no_weights)
        made = {**config, "architectures": [kind], "num_labels": 1, "eos_token_id": 1}
        made.setdefault("max_position_embeddings", 131072)
        (folder / name / "config.json").write_text(json.dumps(made))
    check = {"check": "keywords:existence", "keywords": ["team"]}
    texts = [" the" * i + " years" + " the" * (prompt - 1 - i) for i in range(rows)]  # as long
    pairs = [{"prompt": t, "chosen": " the" * answer, "rejected": " team" * answer} for t in texts]
    prompts = [{"prompt": t, "rubrics": [check], "split": "train"} for t in texts]
    for name, lines in {"pairs": pairs, "prompts": prompts}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = ENVIRONMENT.replace("PROMPT", repr(texts[0]))
    (folder / "code.py").write_text(text)


def peaks(
    stage, name, flags=(), dtype="bf16", gpu=True, limit=None, prompt=300, answer=300, rows=8,
    sizes=None, layers=None,
):  # fmt: skip
    """{(phase, moment): Counter of bytes by kind} of a run of `stage`.py with these flags.

    prompt, answer, rows   of the files that it reads, in tokens
    sizes                  (tokens per forward, answers at once), in place of the defaults
    """
    config = config_of(name, layers)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_inputs(folder, config, prompt, answer, rows)
        inputs = {
            "sft": ["--data", folder / "pairs.jsonl"],
            "ppo": ["--prompts", folder / "prompts.jsonl"],
            "grpo_rubric": ["--data", folder / "prompts.jsonl", "--reward", "checks"],
            "grpo_agent": ["--env", f"{folder}/code.py:Environment", "--val-episodes", 2],
        }.get(stage, ["--pairs", folder / "pairs.jsonl"])
        if stage == "ppo" and "--reward-model" not in flags:
            inputs += ["--reward-fn", f"{folder}/code.py:score"]
        words = [*inputs, "--model", folder / "model", "--out", folder / "out", "--device", "cpu"]
        words += ["--dtype", dtype, "--steps", 2, *flags]
        words = [str(folder / "reward") if w == "REWARD" else str(w) for w in words]
        ledger = Ledger(config["vocab_size"])
        with faked(ledger, gpu, limit, sizes), ledger:
            status = importlib.import_module(stage).main(words)
        assert not status, f"{stage} ended with status {status}"
        return ledger.peaks


def deep_peaks(stage, name, *more, **keywords):
    """`peaks` of all layers of a shape, from a run with two and one with three."""
    two, three = (peaks(stage, name, *more, layers=n, **keywords) for n in (2, 3))
    added = SHAPES[name]["num_hidden_layers"] - 2
    return {
        moment: {k: two[moment][k] + added * (kinds[k] - two[moment][k]) for k in kinds}
        for moment, kinds in three.items()
    }


def config_of(name, layers=None):
    """The config of a name in SHAPES, with other layers if asked, or of a config.json."""
    if name not in SHAPES:
        file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
        return json.loads(file.read_text())
    shape = SHAPES[name] | ({"num_hidden_layers": layers} if layers else {})
    if shape["model_type"] == "gpt2":
        return {key: shape[usual] for key, usual in GPT2.items()}
    return shape


def parse_args(argv=None):
    """(args, what is left for the stage)"""
    words = "Peak memory of a trainer's step by kind; all other flags go to the trainer."
    parser = argparse.ArgumentParser(description=words)
    add = parser.add_argument
    add("--model", default="Qwen2.5-0.5B", help=f"config.json, its folder, or {', '.join(SHAPES)}")
    add("--stage", default="dpo", help="sft, reward_train, dpo, ppo, grpo_rubric, grpo_agent")
    add("--dtype", default="bf16", help="fp32, bf16 or fp16")
    add("--cpu", action="store_true", help="as on a CPU, not as on a GPU")
    add("--limit", type=float, help="GB of the machine, from which the trainer takes its defaults")
    add("--prompt", type=int, default=300, help="tokens of a prompt")
    add("--answer", type=int, default=300, help="tokens of an answer in a file")
    add("--rows", type=int, default=8, help="rows of the file")
    args, flags = parser.parse_known_args(argv)
    if args.limit is None and "--micro-tokens" not in flags:
        parser.error("pass --micro-tokens or --limit")
    return args, flags


def main(argv=None):
    args, flags = parse_args(argv)
    run = deep_peaks if args.model in SHAPES and args.limit is None else peaks
    sizes = args.prompt, args.answer, args.rows
    with contextlib.redirect_stdout(sys.stderr):
        found = run(args.stage, args.model, flags, args.dtype, not args.cpu, args.limit, *sizes)
    for (phase, moment), kinds in found.items():
        parts = "  ".join(f"{k} {v / GB:.2f}" for k, v in sorted(kinds.items()) if v > GB / 200)
        print(f"{phase:6} {moment:10} {total(kinds) / GB:7.2f} GB   {parts}")


if __name__ == "__main__":
    main()
