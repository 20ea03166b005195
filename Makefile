# Everything runs in .venv, which the first command that needs it creates.
# A stamp in .venv is written after its install succeeded, so nothing is installed twice
# and an interrupted install is taken up again.

PYTHON ?= python3

VENV := .venv
VPY := $(VENV)/bin/python
CORE := $(VENV)/.core.stamp
PAPERS := $(VENV)/.papers.stamp
DEV := $(VENV)/.dev.stamp
DOCS := $(VENV)/.docs.stamp
# Exists while pip runs. Found at the start, it means that pip was interrupted: such a .venv is
# made anew, because pip trusts the metadata of a package whose files are only partly there.
UNFINISHED := $(VENV)/.unfinished

# timm is installed without all that it asks for (below), which pip would report at every later install
pip = $(VPY) -m pip install -qq --disable-pip-version-check --no-warn-conflicts -c constraints.txt
install = touch $(UNFINISHED) && $(pip) -e $(1) $(if $(2),&& $(pip) --no-deps $(2)) && rm $(UNFINISHED) && touch $@

# timm for its tests, as it is: pip would look for a torch to go with torchvision, and the tests need no torchvision
TIMM := timm torchvision

TYPES := $(VPY) -m basedpyright --pythonpath $(VPY)

SEED ?= 0
SEEDS ?= 20
MINUTES ?= 5
COUNT ?= 200
JOBS ?= 2

.PHONY: help demo test lint style seeds fuzz mutate docs dist bench clean
# two pips must not write to one environment
.NOTPARALLEL:

help:
	@echo 'make demo    re-run the headline claims of three papers and report which hold (runs/reproduce-quick)'
	@echo 'make test    lint, then all tests and the examples in the documentation; SEED=n: other numbers and order'
	@echo 'make lint    ruff and basedpyright'
	@echo 'make seeds   every quick test from SEEDS=20 seeds, the first of them SEED=0'
	@echo 'make fuzz    property tests with fresh examples and mutated files, for MINUTES=5; SEED=n repeats a run'
	@echo 'make mutate  change COUNT=200 places of the code, one at a time, and list what no test notices; SEED=n, JOBS=2'
	@echo 'make docs    build the documentation site (site/index.html)'
	@echo 'make dist    build wheel, sdist and bill of materials into dist/, twice, and compare'
	@echo 'make bench   time the layer against the dense convolution, and trials at once'
	@echo 'make clean   remove the environment, caches and the built site; runs/ stays'
	@echo
	@echo 'PYTHON=python3.12 make ... makes .venv with that Python (3.11 or later).'

demo: $(PAPERS)
	$(VENV)/bin/moesaic reproduce --preset quick

# Bytecode is kept even where the environment says otherwise: rewriting the asserts of all tests takes seconds, in each
# worker, and every process that a test starts would compile its modules again.
# So are the kernels that torch.compile has g++ make, of which most machines forget those in /tmp when they restart.
# Types are checked while the tests run: alone, the checker would leave all cores but one idle.
test: style
	$(TYPES) & types=$$!; \
	MOESAIC_TEST_SEED=$(SEED) PYTHONDONTWRITEBYTECODE= TORCHINDUCTOR_CACHE_DIR="$(CURDIR)/.cache/inductor" \
		$(VPY) -m pytest -n auto --maxprocesses 8 --dist worksteal; \
	tests=$$?; wait $$types && exit $$tests

lint: style
	$(TYPES)

style: $(DEV)
	$(VPY) -m ruff check
	$(VPY) -m ruff format --check

seeds: $(DEV)
	PYTHONDONTWRITEBYTECODE= $(VPY) tools/many_seeds.py --seeds $(SEEDS) --first $(SEED)

fuzz: $(DEV)
	$(VPY) tools/fuzz.py --minutes $(MINUTES) $(if $(filter command environment,$(firstword $(origin SEED))),--seed $(SEED))

mutate: $(DEV)
	$(VPY) tools/mutate.py --count $(COUNT) --seed $(SEED) --jobs $(JOBS)

docs: $(DOCS)
	$(VPY) -m zensical build --clean --strict

dist: $(DEV)
	$(VPY) tools/dist.py

bench: $(PAPERS)
	$(VPY) benchmarks/layer.py
	$(VPY) benchmarks/trials.py

clean:
	rm -rf $(VENV) site dist .cache .pytest_cache .ruff_cache .hypothesis
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt $(wildcard $(UNFINISHED))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: moesaic needs Python 3.11 or later; name one with: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'make: $(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@if test -e $(UNFINISHED) || ! $(VPY) -m pip --version >/dev/null 2>&1; then \
		echo 'Creating $(VENV)' && $(PYTHON) -m venv --clear $(VENV); fi
	@echo 'Installing moesaic and its dependencies; the first time takes a few minutes'
	@$(call install,.)

$(PAPERS): $(CORE)
	@echo 'Installing what the papers need'
	@$(call install,'.[papers]')

$(DEV): $(CORE)
	@echo 'Installing the tools for tests and lint'
	@$(call install,'.[dev]',$(TIMM))

$(DOCS): $(CORE)
	@echo 'Installing the tools for documentation'
	@$(call install,'.[docs]')
