# make demo   the whole loop on the bundled base, on two CPU cores: reward model, DPO, evaluation
# make test   every test, with ruff and the docstring examples
#
# make report  the demo with three seeds, into reports/      make data, make base  the bundled files from their generator
# make test-fast, make lint, make format, make clean
#
# Both make the environment in .venv first.  make demo PYTHON=python3.12  picks the interpreter for it;
# make demo PY=python  uses an environment of your own as it is and installs nothing.

PYTHON ?= python3
VENV ?= .venv
SEEDS ?= 0 1 2

ifdef PY
RUNTIME :=
DEV :=
else
PY := $(VENV)/bin/python
RUNTIME := $(VENV)/.runtime
DEV := $(VENV)/.dev
endif

.PHONY: help demo test test-fast lint format report data base clean $(SEEDS:%=report-%)
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(VENV)/.runtime: requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -r requirements.txt -c constraints.txt
	@touch $@

# torch is there when trl and peft ask for it, so they fetch no other build of it
$(VENV)/.dev: requirements-dev.txt $(VENV)/.runtime
	$(VENV)/bin/pip install -r requirements-dev.txt -c constraints.txt
	@touch $@

demo: $(RUNTIME)
	$(PY) reward_train.py --pairs data/prefs_train.jsonl data/rank_train.jsonl --epochs 2 --out runs/demo/reward --overwrite
	$(PY) dpo.py --pairs data/prefs_train.jsonl --nll-coef 1 --epochs 3 --out runs/demo/dpo --overwrite
	$(PY) evaluate.py reward --reward-model runs/demo/reward --pairs data/prefs_test.jsonl --out runs/demo/reward-report --overwrite
	$(PY) evaluate.py compare --model data/tiny-base runs/demo/dpo --reward-model runs/demo/reward --out runs/demo/report --overwrite
	@echo "report: runs/demo/report/report.json, reward model: runs/demo/reward-report/report.json"

test: lint
	$(PY) -m pytest

test-fast: $(DEV)
	$(PY) -m pytest -m "not slow"

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# the demo with three seeds; what reports/demo holds is made by this and by nothing else
report: $(SEEDS:%=report-%)

$(SEEDS:%=report-%): report-%: $(RUNTIME)
	$(PY) reward_train.py --pairs data/prefs_train.jsonl data/rank_train.jsonl --epochs 2 --seed $* --out runs/report/reward-$* --overwrite
	$(PY) dpo.py --pairs data/prefs_train.jsonl --nll-coef 1 --epochs 3 --seed $* --out runs/report/dpo-$* --overwrite
	$(PY) evaluate.py reward --reward-model runs/report/reward-$* --pairs data/prefs_test.jsonl --out runs/report/reward-report-$* --overwrite
	$(PY) evaluate.py compare --model data/tiny-base runs/report/dpo-$* --reward-model runs/report/reward-$* --seed $* --out runs/report/compare-$* --overwrite
	@mkdir -p reports/demo
	cp runs/report/reward-report-$*/report.json reports/demo/reward-seed-$*.json
	cp runs/report/compare-$*/report.json reports/demo/compare-seed-$*.json

# every file of data/ but the base: the same bytes on every machine
data: $(RUNTIME)
	$(PY) data/make_data.py

# the base from its corpus, about 50 minutes on two idle cores; data/tiny-base holds what this makes
base: $(RUNTIME)
	@mkdir -p runs
	$(PY) data/make_data.py --corpus runs/corpus.jsonl
	$(PY) sft.py --init-config data/tiny-base/config.json --data runs/corpus.jsonl --keep-order --lr 1.5e-3 --warmup 0.03 --micro-tokens 2048 --eval-fraction 0.004 --eval-every 500 --save-every 500 --prompts data/prompts.jsonl --split val --gold data/recruiter.py:copied --save-dtype fp16 --out runs/base --overwrite

clean:
	rm -rf runs/demo
