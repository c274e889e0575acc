# Tasks.  Each one sets up what it needs; CI calls the same names (.ci/run).
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The tests start some hundred processes: each would compile its sources where none are kept.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PYTHON) -m pytest

.PHONY: setup demo demo-remote test test-rest test-slow clusters slurm fuzz soak remote-soak adversary places check conformance bench-quick format clean

setup:
	@scripts/setup

# Trains a family of models, adds, merges and mounts it, and generates text from the mount.
demo: setup
	@$(PYTHON) examples/demo.py

# Pushes a small family to a server of its own, clones, merges and pulls it.
demo-remote: setup
	@$(PYTHON) examples/demo_remote.py

# A worker for each core, up to four.  Tests go to the workers in long runs of neighbours, which
# share what their module made.
WORKERS := -n auto --maxprocesses 4 --dist worksteal

# A test that waits for ever fails, and is named; no test takes a tenth of this on a busy machine.
HANGS := --timeout 900 --timeout-method signal

# What is cheap, and of what is dear enough to prove each feature: docs/testing.md, "Lanes".
test: setup
	@$(PYTEST) -q -m "not slow and not rest" $(WORKERS) $(HANGS)

# The dear tests, and cases of tests, that `make test` leaves out.  PART=1/6 runs a sixth of them.
test-rest: setup
	@TEST_PART=$(PART) $(PYTEST) -q -m "rest and not slow" $(WORKERS) $(HANGS)

test-slow: setup
	@$(PYTEST) -q -m slow

# Merges on Dask and Ray, whose workers and schedulers are killed (Ray: 270 MB are installed).
clusters: setup
	@$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[ray]"
	@$(PYTEST) -q -m slow tests/test_cluster_engines.py tests/test_howto_cluster.py

# Merges on a Slurm of this machine, which is started for it (scripts/slurm; as root, on Debian).
slurm: setup
	@$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[slurm]"
	@$(PYTEST) -q -m slow tests/test_cluster_slurm.py

# Changed inputs for every parser, for SECONDS; guided by coverage where atheris is installed.
SECONDS ?= 600
fuzz: setup
	@$(PYTHON) tests/fuzz/run.py $(SECONDS)

# Eight processes at work in one store at once, for SECONDS: is anything ever lost?
soak: setup
	@$(PYTHON) tests/soak.py --seconds $(SECONDS)

# Eight processes that push to one remote and pull from it, for SECONDS: is anything ever lost?
remote-soak: setup
	@$(PYTHON) tests/remote_soak.py --seconds $(SECONDS)

# Stores whose index, statistics, memo or mirror is damaged, for SECONDS: is anything ever lost?
# Then stores whose entries somebody replaces by links and the like: is anything outside touched?
# SEED=N does the same trials again.
adversary: setup
	@$(PYTHON) tests/adversary/trials.py $(SECONDS) $(if $(SEED),--seed $(SEED))
	@$(PYTHON) tests/adversary/hostile.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# Installs the package as users do, and runs it where little is allowed: a table of what works.
places: setup
	@$(PYTHON) tests/places.py

check: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@lint-imports --no-logo

# Compares merges with mergekit's, and those of diffusers' pipelines with torch's, in a virtual
# environment of its own (.venv-conformance).
# PART=1/6 compares a sixth of the cases.
conformance: setup
	@TEST_PART=$(PART) scripts/conformance

# The main ratios, beside the recorded ones; on a quiet machine, in under two minutes.
bench-quick: setup
	@$(PYTHON) bench/quick.py

format: setup
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

# Removes what tests, checks and builds leave behind; `rm -r .venv*` removes the set-ups too.
clean:
	@rm -rf build dist demo demo-remote .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
