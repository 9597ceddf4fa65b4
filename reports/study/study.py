"""python study.py prepare SEED | jobs: works through the queue, one lock file a job."""
import json, os, random, subprocess, sys, time
from pathlib import Path
ROOT = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
OUT = ROOT / "runs" / "study"
OUT.mkdir(parents=True, exist_ok=True)
PY = sys.executable
TRAIN = "data/prefs_train.jsonl"

def sh(args, log, **env):
    with open(log, "w") as f:
        code = subprocess.call([PY, *map(str, args)], stdout=f, stderr=f, cwd=ROOT, env={**os.environ, **env})
    assert code in (0, 3), (code, args, log)

def jl(path): return [json.loads(l) for l in open(path)]
def dump(path, rows):
    with open(path, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)

def rows_of(split):
    rows = [r for r in jl(ROOT / "data/prompts.jsonl") if r["split"] == split]
    return rows
def text(row): return row["prompt"][0]["content"]

def drawn(folder, rows, n, seed):
    import common, torch
    torch.set_num_threads(1)
    tok = common.load_tokenizer(str(folder)); model = common.load_policy(str(folder), trainable=False)
    r = common.sample(model, tok, [x["prompt"] for x in rows], n, 96, 1.0, seed)
    return [r.texts[i * n:(i + 1) * n] for i in range(len(rows))]

def gold(rows, answers):
    import recruiter
    return [[recruiter.utility(text(r), a) for a in some] for r, some in zip(rows, answers)]

def voted(pairs, name, seed):
    """pairs: (row, a, b); the simulated recruiters' noise, one vote a pair."""
    import recruiter
    out = []
    for i, (row, a, b) in enumerate(pairs):
        rng = random.Random(f"{name}-{seed}-{i}")
        who = rng.choice(sorted(recruiter.ANNOTATORS))
        choice, strength = recruiter.vote(who, text(row), a, b, rng)
        c, r = (b, a) if choice == "b" else (a, b)
        msg = lambda t: [{"role": "assistant", "content": t}]
        out.append(dict(prompt=row["prompt"], chosen=msg(c), rejected=msg(r), strength=strength, tie=choice == "tie", task=row["task"]))
    return out

def prepare(s):
    d = OUT / f"seed{s}"; d.mkdir(exist_ok=True)
    import make_data
    if not (OUT / "more4.jsonl").exists():
        pairs = make_data.policy_pairs("pair-more", make_data.cases("train"), 7200)
        votes = make_data.noisy_votes(pairs)
        dump(OUT / "more2.jsonl", votes[:2400]); dump(OUT / "more4.jsonl", votes)
    if not (d / "dpo/model.safetensors").exists():
        sh(["dpo.py", "--pairs", TRAIN, "--epochs", 3, "--seed", s, "--out", d / "dpo", "--overwrite"], d / "dpo.log")
    if not (d / "sft/model.safetensors").exists():
        sh(["sft.py", "--data", TRAIN, "--epochs", 1, "--seed", s, "--out", d / "sft", "--overwrite"], d / "sft.log")
    if not (d / "pools.json").exists():
        pools = {}
        for split, n, many in (("val", 60, 16), ("test", 102, 64)):
            rows = rows_of(split)[:n]
            for name, folder, k in (("base", ROOT / "data/tiny-base", many), ("dpo", d / "dpo", 16)):
                a = drawn(folder, rows, k, 1000 + s)
                pools[f"{split}-{name}"] = dict(answers=a, gold=gold(rows, a))
        json.dump(pools, open(d / "pools.json", "w"))
    if not (d / "ondpo.jsonl").exists():
        rows = rows_of("train")
        for name, folder in (("base", ROOT / "data/tiny-base"), ("dpo", d / "dpo")):
            a = drawn(folder, rows, 4, 2000 + s)
            pairs = [(r, x[0], x[1]) for r, x in zip(rows, a)] + [(r, x[2], x[3]) for r, x in zip(rows, a)]
            pairs = [p for p in pairs if p[1] != p[2]][:2400]
            dump(d / f"on{name}.jsonl", voted(pairs, name, s))
        half = [x for n in ("base", "dpo") for x in jl(d / f"on{n}.jsonl")[:1200]]
        dump(d / "onboth.jsonl", half)

BASE = "data/tiny-base"
def variants(s):
    d = f"runs/study/seed{s}"
    V = {
        "as it is": ([TRAIN], [], {}),
        "votes on base answers": ([f"{d}/onbase.jsonl"], [], {}),
        "votes on DPO answers": ([f"{d}/ondpo.jsonl"], [], {}),
        "writers + policy votes": ([TRAIN, f"{d}/onboth.jsonl"], [], {}),
        "LM head alive, 0.1": ([TRAIN], [], {"LM": "0.1"}),
        "LM head alive, 1": ([TRAIN], [], {"LM": "1"}),
        "from DPO": ([TRAIN], ["--model", f"{d}/dpo"], {}),
        "from SFT": ([TRAIN], ["--model", f"{d}/sft"], {}),
        "2x votes": ([TRAIN, "runs/study/more2.jsonl"], [], {}),
        "mean over tokens": ([TRAIN], [], {"HEAD": "mean"}),
        "sum over tokens": ([TRAIN], [], {"HEAD": "sum"}),
        "margin": ([TRAIN], ["--margin", "strength", "--margin-scale", "0.3"], {}),
        "centring": ([TRAIN], ["--center-coef", "0.01"], {}),
        "4x votes": ([TRAIN, "runs/study/more4.jsonl"], [], {}),
        "the recruiter itself": None,
    }
    return V

def slug(v): return v.replace(" ", "-").replace(",", "").replace("+", "and")

def measure(folder, s, env):
    os.environ.update({"HEAD": "last", "LM": "0", **env})
    import numpy as np, torch
    torch.set_num_threads(1)
    import variant, common, evaluate
    variant.HEAD, variant.LM = os.environ["HEAD"], 0.0
    from reward_train import pair_metrics
    f = common.reward_function(str(folder), raw=True)
    out = {}
    def acc(c, r):
        m = pair_metrics(torch.tensor(c), torch.tensor(r))
        return {k: m[k] for k in ("accuracy", "nll", "ece", "n")}
    test = [r for r in jl(ROOT / "data/prefs_test.jsonl") if not r["tie"]]
    say = lambda r, k: r[k][0]["content"]
    scores = f([r["prompt"] for r in test for _ in "ab"], [say(r, k) for r in test for k in ("chosen", "rejected")])
    out["pairs"] = acc(scores[::2], scores[1::2])
    pools = json.load(open(OUT / f"seed{s}/pools.json"))
    for key, pool in pools.items():
        rows = rows_of(key.split("-")[0])[:len(pool["answers"])]
        flat = [(r["prompt"], a) for r, some in zip(rows, pool["answers"]) for a in some]
        asked = list(dict.fromkeys((json.dumps(p), a) for p, a in flat))
        got = dict(zip(asked, f([json.loads(p) for p, _ in asked], [a for _, a in asked])))
        n = len(pool["answers"][0])
        proxy = np.array([got[json.dumps(p), a] for p, a in flat]).reshape(-1, n)
        g = np.array(pool["gold"])
        i, j = np.nonzero(np.abs(g[:, ::2] - g[:, 1::2]) >= 0.05)
        hi = g[i, 2 * j] > g[i, 2 * j + 1]
        a, b = proxy[i, 2 * j], proxy[i, 2 * j + 1]
        out[f"acc {key}"] = acc(np.where(hi, a, b), np.where(hi, b, a))
        if "base" in key:
            curves = np.array([evaluate.bon_curve(p, x) for p, x in zip(proxy, g)])
            out[f"bon {key}"] = {k: [float(curves[:, k - 1].mean()), float(curves[:, k - 1].std(ddof=1) / len(curves) ** 0.5)] for k in (1, 4, 16, 64) if k <= n}
    return out

def policy(folder, s):
    """gold and KL of a policy on the test prompts, 4 answers each."""
    import numpy as np, torch, common, evaluate
    rows = rows_of("test")[:102]
    tok = common.load_tokenizer(str(folder)); model = common.load_policy(str(folder), trainable=False)
    ref = common.load_policy(BASE, trainable=False)
    ids = [common.encode_prompt(tok, r["prompt"]) for r in rows]
    class A: max_new_tokens, temperature = 96, 1.0
    answers = evaluate.draw(A, model, tok, "x", rows, ids, 4, 3000 + s)
    evaluate.measure_kl(answers, model, ref, ids, common.pad_id(tok), 1.0)
    g = np.array(gold(rows, [[x["response"] for x in some] for some in answers])).mean(1)
    return {"gold": float(g.mean()), "se": float(g.std(ddof=1) / len(g) ** 0.5), "kl": float(evaluate.column(answers, "kl").mean())}

def warm(out):
    """The average of the weights of three seeds (arXiv 2401.12187), in the folder of the last."""
    import shutil, torch
    from safetensors.torch import load_file, save_file
    folders = [OUT / f"seed{k}" / "as-it-is/reward" for k in (0, 1, 2)]
    shutil.rmtree(out, ignore_errors=True); shutil.copytree(folders[0], out)
    states = [load_file(f / "model.safetensors") for f in folders]
    save_file({k: torch.stack([s[k].float() for s in states]).mean(0).to(states[0][k].dtype) for k in states[0]}, out / "model.safetensors", metadata={"format": "pt"})
    import common
    train = jl(ROOT / TRAIN)
    x = torch.tensor(common.reward_function(str(out), raw=True)([r["prompt"] for r in train for _ in "ab"], [r[k][0]["content"] for r in train for k in ("chosen", "rejected")]))
    c = json.load(open(out / "config.json"))
    print("WARM", c["reward_mean"], c["reward_std"], x.mean().item(), x.std().item(), flush=True)
    json.dump(c | {"reward_mean": x.mean().item(), "reward_std": x.std().item()}, open(out / "config.json", "w"))

def job(v, s):
    files, flags, env = variants(s).get(v) or ([], [], {})
    d = OUT / f"seed{s}" / slug(v); d.mkdir(exist_ok=True)
    done = d / "result.json"
    if done.exists(): return
    t = time.time()
    judge, out = ["--reward-model", d / "reward"], {"variant": v, "seed": s}
    if v == "WARM":
        warm(d / "reward")
    if v == "the recruiter itself":
        judge = ["--reward-fn", "data/recruiter.py:reward"]
    elif v != "WARM":
        sh(["variant.py", "reward_train", "--pairs", *files, *flags, "--epochs", 2, "--eval-every", 1000, "--seed", s, "--out", d / "reward", "--overwrite"], d / "reward.log", **env)
    t1 = time.time()
    if v != "the recruiter itself":
      out |= {"rm_seconds": t1 - t, "rm": json.loads(subprocess.check_output([PY, "study.py", "measure", str(d / "reward"), str(s), json.dumps(env)], cwd=ROOT).decode().strip().split("\n")[-1])}
      print(v, s, json.dumps(out["rm"]), flush=True)
    t = time.time()
    sh(["variant.py", "ppo", *judge, "--gold", "data/recruiter.py:reward", "--steps", 15, "--lr", "2e-4", "--eval-every", 3, "--patience", 0, "--on-hack", "warn", "--restore", "last", "--seed", s, "--out", d / "ppo", "--overwrite"], d / "ppo.log", **env)
    out["ppo_seconds"] = time.time() - t
    out["curve"] = [{k: m[k] for k in m if k in ("step", "val/gold", "val/kl", "val/reward", "eval/gold", "eval/kl", "eval/reward", "gold", "kl")} for m in jl(d / "ppo/metrics.jsonl") if any("gold" in k for k in m)]
    out["ppo"] = json.loads(subprocess.check_output([PY, "study.py", "policy", str(d / "ppo"), str(s)], cwd=ROOT).decode().strip().split("\n")[-1])
    print(v, s, out["ppo"], flush=True)
    json.dump(out, open(done, "w"))

if __name__ == "__main__":
    what = sys.argv[1]
    if what == "prepare": prepare(int(sys.argv[2]))
    elif what == "measure": print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))))
    elif what == "policy": print(json.dumps(policy(sys.argv[2], int(sys.argv[3]))))
    else:
        for s in map(int, sys.argv[2:]):
            for v in (["WARM"] if what == "warm" else variants(s)):
                lock = OUT / f"seed{s}" / (slug(v) + ".lock")
                try: os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
                except FileExistsError: continue
                try: job(v, s)
                except BaseException as e:
                    print("FAILED", v, s, repr(e), flush=True); lock.unlink()
                    if not isinstance(e, Exception): raise
