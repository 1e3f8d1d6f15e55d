# Every target sets up its own environment. Variables: VENV, PYTHON (for setup), EXTRAS, WORKDIR, ARGS, PYTEST_ARGS, JOBS.

VENV ?= .venv
PYTHON ?=
EXTRAS ?=
WORKDIR ?= runs/tiny
ABLATION ?= runs/ablation
RL_WORKDIR ?= runs/rl
CONFIG ?= configs/pretrain.py:scale=tiny,stage=8k,shrink=16
ARGS ?=
DATA ?= runs/data
LADDER ?= runs/ladder
# Recall from the first step; weights of 1 / sqrt(128), the width. Times: docs/curriculum.md.
CURRICULUM = --mix=recall --steps=320,120,24,4 --floor=1 --tasks=needle,multi_query --config.data.batch_size=16 \
  --config.model.init_std=0.08 --config.optim.schedule=wsd --config.optim.warmup=0.06 --config.optim.decay=0.06 \
  --config.train.eval_every=0 --config.train.eval_batches=2 --config.train.sample_tokens=0 --answers=32 \
  --eval_tokens=16384 --eval_focus=32 --eval_rows=4 --eval_chunk=256 --eval_threads=2 --reach=4 --longest=16384 \
  --generate=0
PYTEST_ARGS ?=
# Test processes: one a core, at most 8 (each holds its own JAX).
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -le 8 ] || n=8; echo $$n)

run = $(VENV)/bin/python -m
pytest = pytest -q -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup train ablation curriculum vision data rl notebooks test test-all test-transformers lint lock clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: ## make .venv from the locks: make setup [EXTRAS="gpu notebooks"] [PYTHON=/path/to/python]
	@VENV="$(VENV)" PYTHON="$(PYTHON)" tools/setup_env.sh $(EXTRAS)

train: setup ## train the tiny model on this machine: make train [WORKDIR=runs/tiny] [CONFIG=...] [ARGS=...]
	$(run) experiments.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

# The vision extra holds data (handwritten digits, photographs) that the generators and their tests read.
vision test: override EXTRAS += vision

vision: setup ## train the tiny model on text and pictures: make vision [WORKDIR=runs/vision] [ARGS=...]
	$(run) experiments.train --config=configs/vision.py:scale=tiny --workdir=$(if $(filter file,$(origin WORKDIR)),runs/vision,$(WORKDIR)) $(ARGS)

data: setup ## fetch captioned and named pictures of three Debian packages with apt-get into DATA: make data [DATA=runs/data]
	$(VENV)/bin/python tools/stamps.py $(DATA)
	$(VENV)/bin/python tools/emoji.py $(DATA)
	$(VENV)/bin/python tools/clipart.py $(DATA)

curriculum: setup ## train the tiny model through four growing windows: make curriculum [LADDER=runs/ladder] [ARGS=...]
	$(run) experiments.curriculum --config=configs/pretrain.py:scale=tiny,shrink=64 --workdir=$(LADDER) $(CURRICULUM) $(ARGS)

# 8 runs of 100 steps, two at a time.
ablation: setup ## compare four ways of balancing experts on the tiny model: make ablation [ABLATION=runs/ablation]
	$(run) experiments.sweep --sweep=configs/ablations/balancing.py:seeds=2,steps=100,shrink=64 --workdir=$(ABLATION) \
	  --parallel=2 $(ARGS)

notebooks: ## execute the notebooks and write their .ipynb, in .venv with the extra notebooks
	@VENV="$(VENV)" PYTHON="$(PYTHON)" tools/setup_env.sh notebooks $(EXTRAS)
	$(VENV)/bin/python tools/notebooks.py

rl: setup ## reinforcement learning on this machine: format SFT, RL, report, 3 seeds: make rl [RL_WORKDIR=runs/rl] [ARGS=...]
	JAX_COMPILATION_CACHE_DIR=.cache/jax $(run) experiments.rl --workdir=$(RL_WORKDIR) $(ARGS)

test: setup ## run the tests, without the slow ones: make test [PYTEST_ARGS=tests/data] [JOBS=2]
	$(run) $(pytest) $(PYTEST_ARGS)

# In an environment of its own: with the compilers for absent chips in it, every start of JAX prints that they are absent.
test-all: ## run every test, in .venv-aot: also the slow ones and those that compile for TPUs and an H200
	@VENV="$(VENV)-aot" PYTHON="$(PYTHON)" tools/setup_env.sh aot vision
	$(VENV)-aot/bin/python -m $(pytest) -m "" $(PYTEST_ARGS)

# In an environment of its own: torch (5 GB) pins other CUDA libraries than jax[cuda13].
test-transformers: ## load exported checkpoints in Hugging Face's code, in .venv-transformers
	@VENV="$(VENV)-transformers" PYTHON="$(PYTHON)" tools/setup_env.sh transformers
	$(VENV)-transformers/bin/python -m pytest -q -m "" tests/trillium_moe/test_interop_transformers.py $(PYTEST_ARGS)

lint: setup ## check the code with ruff
	$(run) ruff check .

lock: ## write requirements.lock and requirements/*.lock from setup.py: make lock [UPGRADE=1]
	@VENV="$(VENV)" PYTHON="$(PYTHON)" UPGRADE="$(UPGRADE)" tools/lock.sh

clean: ## remove caches and build outputs; runs and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . \( -name '.venv*' -o -name .git \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
