"""docs/memory.py: the bytes that a stage needs on a GPU, as arithmetic; it fills the tables of docs/scale.md.

Nothing here was measured on a GPU. W are the weights of a model, A those of its adapters, in numbers; bytes each:

    trained weights      4 fp32 master + 4 gradient + 8 Adam (two moments)      = 16·W  (LoRA: 16·A)
    their compute copy   what autocast makes of them in fp16 or bf16            =  2·W  (LoRA:  2·A)
    frozen weights       fp16 or bf16: LoRA's base, the reference, the reward   =  2·W each
    activations          a token and layer: 34·h + 8·m; with --grad-checkpoint 4·h a layer, and one layer in full
    head                 256 MiB of fp32 logits at a time; they, their gradient and two steps between = 4 times that
    --fsdp, N GPUs       16·W/N, but the fp32 weights whole while they load, frozen models whole, and to draw answers the
                         weights whole in the compute dtype; for a pass two blocks and the embedding
    key-value cache      keys and values, 2 bytes: 2·2·layers·kv heads·head size a token of every answer

h is the hidden size, m the width of the MLP. 34 and 8 were counted, not thought out: `saved_tensors_hooks` around a Qwen2
layer under autocast (tests/test_docs.py counts again; 29 and 8 over a frozen base, so LoRA is a little on the safe side).

Run          python docs/memory.py --stage ppo --hidden 2048 --layers 24 --mlp 8192 --heads 16 --kv-heads 8 --vocab 128000
"""

import argparse
from dataclasses import dataclass

GB = 1e9
# of 16 and 80 GB: what the context and the allocator's gaps leave, a guess on the safe side
T4, BIG = 15e9, 76e9


@dataclass
class Shape:
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool  # the head is the embedding
    bias: bool = False  # on queries, keys and values: Qwen2

    @property
    def linears(self):
        """[(in, out)] of a block's linear layers: queries, keys, values, output; gate, up, down of the MLP."""
        h, q, kv = self.hidden, self.heads * self.head_size, self.kv_heads * self.head_size
        return [(h, q), (h, kv), (h, kv), (q, h), (h, self.mlp), (h, self.mlp), (self.mlp, h)]

    @property
    def weights(self):
        block = sum(i * o for i, o in self.linears) + 2 * self.hidden
        block += self.bias * sum(o for _, o in self.linears[:3])
        head = self.vocab * self.hidden
        return self.layers * block + self.hidden + head * (1 if self.tied else 2)

    def adapter(self, rank):
        return self.layers * rank * sum(i + o for i, o in self.linears)


SHAPES = {
    "0.5B": Shape(24, 896, 4864, 14, 2, 64, 151_936, True, True),  # Qwen2.5-0.5B
    "1.5B": Shape(28, 1536, 8960, 12, 2, 128, 151_936, True, True),  # Qwen2.5-1.5B
    "7B": Shape(28, 3584, 18_944, 28, 4, 128, 152_064, False, True),  # Qwen2.5-7B
    "70B": Shape(80, 8192, 28_672, 64, 8, 128, 128_256, False),  # Llama-3.1-70B
}
# beside the trained model: how many frozen ones of its size, and how many whole models are trained
STAGES = {
    "sft": ("`sft.py`, `reward_train.py`, `dpo.py`", 0, 1),
    "ppo": ("`ppo.py --critic shared`", 2, 1),
    "ppo-rm": ("`ppo.py`, a critic of its own", 2, 2),
    "grpo": ("`grpo_rubric.py`, `grpo_agent.py`", 0, 1),
    "grpo-beta": ("the same with `--beta`", 1, 1),
}
ANSWERS, LENGTH = 64, 768  # of a rollout: answers at once, tokens of prompt and answer together


def parts(stage, shape, rank=0, tokens=2048, checkpoint=True, gpus=1):
    """{part: bytes on each GPU}; tokens: --micro-tokens; gpus: --fsdp cuts training state in so many pieces.

    By hand, W = 10, h = m = 1, one layer: 160 bytes of training state and a compute copy of 20.
    >>> toy = Shape(1, 1, 1, 1, 1, 1, 0, True)
    >>> toy.weights, parts("sft", toy, tokens=0)["trained"], parts("sft", toy, tokens=0)["compute copy"]
    (10, 160.0, 20)
    """
    _, frozen, trained = STAGES[stage]
    W, A = shape.weights, shape.adapter(rank)
    if rank:  # the reference is the policy with its adapter off
        frozen = {"ppo": 2, "ppo-rm": 3}.get(stage, 1)  # LoRA's base; the reward; the critic's base
    learns = trained * (A if rank else W)
    one = 34 * shape.hidden + 8 * shape.mlp  # bytes of a token and layer
    kept = 4 * shape.hidden * shape.layers + one if checkpoint else one * shape.layers
    found = {"trained": 16 * learns / gpus, "frozen": 2 * frozen * W}
    found["compute copy"] = 2 * learns
    if gpus > 1:  # one block in use and one on its way; embedding and head travel in fp32
        found["compute copy"] = 2 * 2 * W / shape.layers + 4 * shape.vocab * shape.hidden * 2
    found["activations"] = tokens * kept
    found["head"] = 4 * 256 * 2**20
    cache = 2 * 2 * shape.layers * shape.kv_heads * shape.head_size
    rollout = stage[:3] in ("ppo", "grp")
    found["cache"] = ANSWERS * LENGTH * cache if rollout else 0
    found["whole to draw"] = 2 * W if rollout and gpus > 1 else 0
    return found


def total(found):
    """Update and rollout take turns, so the larger of the two counts."""
    update = found["compute copy"] + found["activations"] + found["head"]
    rollout = max(found["compute copy"], found["whole to draw"]) + found["cache"]
    return found["trained"] + found["frozen"] + max(update, rollout)


def loading(stage, shape):
    """Before FSDP2 cuts them every process holds the fp32 weights whole, beside the frozen models."""
    _, frozen, trained = STAGES[stage]
    return (4 * trained + 2 * frozen) * shape.weights


def place(stage, shape, rank=0, **how):
    """What it fits on: (bytes on one GPU without FSDP2, words)."""
    whole = total(parts(stage, shape, rank, **how))
    if whole <= BIG:
        return whole, "T4" if whole <= T4 else "one 80 GB"
    if not rank and loading(stage, shape) <= BIG:  # --fsdp excludes LoRA
        for gpus in (2, 4, 8, 16, 32):
            if total(parts(stage, shape, gpus=gpus, **how)) <= BIG:
                return whole, f"{gpus} × 80 GB"
    return whole, "not here"


def fits_table(rank=0):
    """Markdown: a row a stage, a column a size; GB that one GPU would need, and what the run fits on."""
    lines = [["", *(f"{name} ({shape.weights / GB:.2f}·10⁹)" for name, shape in SHAPES.items())]]
    for stage, (words, *_) in STAGES.items():
        if rank and stage == "grpo-beta":  # the adapter off is the reference: the same bytes
            continue
        found = [place(stage, shape, rank) for shape in SHAPES.values()]
        lines.append([words, *(f"{size / GB:,.0f} GB: {where}" for size, where in found)])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parts_table(name="1.5B", stage="ppo"):
    """Markdown: the sum for one stage and size, all weights and LoRA, with and without the two that save activations."""
    shape = SHAPES[name]
    ways = {
        "all weights": parts(stage, shape),
        "`--lora-rank 16`": parts(stage, shape, 16),
        "all weights, 16 384 tokens, no checkpointing": parts(stage, shape, 0, 16384, False),
    }
    lines = [["", *ways], ["---"] * (1 + len(ways))]
    lines += [
        [key, *(f"{p[key] / GB:.2f}" for p in ways.values())]
        for key in ways["all weights"]
        if ways["all weights"][key]
    ]
    sums = [f"**{total(p) / GB:.1f}**" for p in ways.values()]
    lines.append(["**sum, the larger of update and rollout**", *sums])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_hand(name="0.5B"):
    """Markdown: the formulas of the page with one model's numbers in them."""
    s = SHAPES[name]
    W, one = s.weights, 34 * s.hidden + 8 * s.mlp
    cache = 2 * 2 * s.layers * s.kv_heads * s.head_size
    columns = 256 * 2**20 // (4 * s.vocab)
    plain, kept = s.layers * one, s.layers * 4 * s.hidden + one
    return f"""- weights {W:,}; training state 16 × {W / GB:.3f}·10⁹ = {16 * W / GB:.2f} GB, compute copy {2 * W / GB:.2f} GB, a frozen copy {2 * W / GB:.2f} GB
- adapters of rank 16: {s.adapter(16):,} weights, 16 bytes each: {16 * s.adapter(16) / GB:.2f} GB
- activations of a token: {s.layers} × (34 × {s.hidden} + 8 × {s.mlp:,}) = {plain / 1e6:.2f} MB; with `--grad-checkpoint` {s.layers} × 4 × {s.hidden} + one layer = {kept / 1e6:.2f} MB; times `--micro-tokens`: 16 384 and 2 048 tokens give {16384 * plain / GB:.1f} and {2048 * plain / GB:.1f} GB, checkpointed {16384 * kept / GB:.1f} and {2048 * kept / GB:.1f} GB
- logits: {columns} columns × {s.vocab:,} entries × 4 bytes = 256 MiB at a time. All columns of eight rows of 512 tokens would be {8 * 512 * s.vocab * 4 / GB:.1f} GB, and autograd keeps several such
- key-value cache: 2 × 2 bytes × {s.layers} layers × {s.kv_heads} heads × {s.head_size} = {cache:,} bytes a token; {ANSWERS} answers with room for {LENGTH} tokens: {ANSWERS * LENGTH * cache / GB:.2f} GB"""


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="The bytes of a stage on a GPU, as arithmetic.")
    add = parser.add_argument
    add("--stage", choices=STAGES, default="sft", help="(default sft: also reward_train, dpo)")
    for flag in ("--layers", "--hidden", "--mlp", "--heads", "--kv-heads", "--vocab"):
        add(flag, type=int, required=True, help="from the model's config.json")
    add("--head-size", type=int, help="(default hidden / heads)")
    add("--untied", action="store_true", help="the head has weights of its own")
    add("--lora-rank", type=int, default=0)
    add("--micro-tokens", type=int, default=2048, help="padded tokens per forward")
    add("--grad-checkpoint", action="store_true")
    add("--gpus", type=int, default=1, help="with --fsdp: how many share the weights")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    size = args.head_size or args.hidden // args.heads
    shape = Shape(args.layers, args.hidden, args.mlp, args.heads, args.kv_heads, size, args.vocab, not args.untied)  # fmt: skip
    if args.lora_rank and args.gpus > 1:
        raise SystemExit("--gpus: with LoRA each GPU holds all of it; leave the flag out")
    found = parts(args.stage, shape, args.lora_rank, args.micro_tokens, args.grad_checkpoint, args.gpus)  # fmt: skip
    print(f"{shape.weights / GB:.3f}·10⁹ weights")
    if args.gpus > 1:
        print(f"{loading(args.stage, shape) / GB:.2f} GB on each GPU while loading")
    for name, size in found.items():
        print(f"{name:>14}  {size / GB:9.2f} GB")
    print(f"{'sum':>14}  {total(found) / GB:9.2f} GB on each of {args.gpus} GPU(s), arithmetic")


if __name__ == "__main__":
    main()
