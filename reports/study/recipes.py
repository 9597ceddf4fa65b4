import json, sys, subprocess
from study import *
def ranked(folder, rm, s, out, salt):
    import common, torch
    torch.set_num_threads(1)
    rows = rows_of("train")[:500]
    answers = drawn(folder, rows, 8, 4000 + 10 * s + salt)
    f = common.reward_function(str(rm))
    score = f([r["prompt"] for r in rows for _ in range(8)], [a for some in answers for a in some])
    lines = []
    for i, (r, some) in enumerate(zip(rows, answers)):
        order = sorted(zip(score[8 * i:8 * i + 8], some))
        msg = lambda t: [{"role": "assistant", "content": t}]
        lines.append({"prompt": r["prompt"], "chosen": msg(order[-1][1]), "rejected": msg(order[0][1])})
    dump(out, lines)
def main(s):
    d = OUT / f"seed{s}"; r = d / "recipes"; r.mkdir(exist_ok=True)
    rm, out = d / "as-it-is/reward", {}
    def say(name, folder):
        out[name] = json.loads(subprocess.check_output([PY, "study.py", "policy", str(folder), str(s)], cwd=ROOT).decode().strip().split("\n")[-1])
        print(s, name, out[name], flush=True)
    say("base", ROOT / "data/tiny-base"); say("dpo", d / "dpo")
    for name, start in (("base", ROOT / "data/tiny-base"), ("dpo", d / "dpo")):
        ranked(start, rm, s, r / f"{name}.jsonl", 0)
        sh(["sft.py", "--data", r / f"{name}.jsonl", "--model", start, "--seed", s, "--out", r / f"bo8-{name}", "--overwrite"], r / "log1")
        say(f"best of 8 from {name}", r / f"bo8-{name}")
        sh(["dpo.py", "--pairs", r / f"{name}.jsonl", "--model", start, "--seed", s, "--out", r / f"online-{name}", "--overwrite"], r / "log2")
        say(f"online DPO from {name}, 1 round", r / f"online-{name}")
        ranked(r / f"online-{name}", rm, s, r / f"{name}2.jsonl", 1)
        sh(["dpo.py", "--pairs", r / f"{name}2.jsonl", "--model", r / f"online-{name}", "--seed", s, "--out", r / f"online2-{name}", "--overwrite"], r / "log3")
        say(f"online DPO from {name}, 2 rounds", r / f"online2-{name}")
    json.dump(out, open(r / "result.json", "w"))
if __name__ == "__main__": main(int(sys.argv[1]))
