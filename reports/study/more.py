"""DPO on writers' and policy votes; PPO on the recruiter itself for 40 steps; seeds in turn."""
from study import *
for s in (0, 1, 2):
    d = OUT / f"seed{s}"
    if not (d / "dpo-both/model.safetensors").exists():
        sh(["dpo.py", "--pairs", TRAIN, d / "onboth.jsonl", "--epochs", 3, "--seed", s, "--out", d / "dpo-both", "--overwrite"], d / "dpo-both.log")
    print(s, "DPO writers + policy votes", subprocess.check_output([PY, "study.py", "policy", str(d / "dpo-both"), str(s)], cwd=ROOT).decode().strip().split("\n")[-1], flush=True)
for s in (0, 1, 2):
    d = OUT / f"seed{s}"
    sh(["variant.py", "ppo", "--reward-fn", "data/recruiter.py:reward", "--gold", "data/recruiter.py:reward", "--steps", 40, "--lr", "2e-4", "--eval-every", 5, "--patience", 0, "--on-hack", "warn", "--restore", "last", "--seed", s, "--out", d / "ppo-true40", "--overwrite"], d / "ppo-true40.log")
    print(s, "PPO recruiter itself, 40 steps", subprocess.check_output([PY, "study.py", "policy", str(d / "ppo-true40"), str(s)], cwd=ROOT).decode().strip().split("\n")[-1], flush=True)
