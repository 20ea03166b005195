# Everything runs in .venv, which the first command that needs it creates.
# A stamp in .venv is written after its install succeeded, so nothing is installed twice
# and an interrupted install is taken up again.

PYTHON ?= python3

VENV := .venv
VPY := $(VENV)/bin/python
CORE := $(VENV)/.core.stamp
DEV := $(VENV)/.dev.stamp
DOCS := $(VENV)/.docs.stamp
# Exists while pip runs. Found at the start, it means that pip was interrupted: such a .venv is
# made anew, because pip trusts the metadata of a package whose files are only partly there.
UNFINISHED := $(VENV)/.unfinished

pip = $(VPY) -m pip install -qq --disable-pip-version-check -c constraints.txt
install = touch $(UNFINISHED) && $(pip) -e $(1) $(if $(2),&& $(pip) --no-deps $(2)) && rm $(UNFINISHED) && touch $@

# timm for its tests, as it is: pip would look for a torch to go with torchvision, and the tests need no torchvision
TIMM := timm torchvision

.PHONY: help demo test lint docs bench clean
# two pips must not write to one environment
.NOTPARALLEL:

help:
	@echo 'make demo    re-run the headline claims of three papers and report which hold (runs/reproduce-quick)'
	@echo 'make test    lint, then all tests and the examples in the documentation'
	@echo 'make lint    ruff and basedpyright'
	@echo 'make docs    build the documentation site (site/index.html)'
	@echo 'make bench   time the layer against the dense convolution, and trials at once'
	@echo 'make clean   remove the environment, caches and the built site; runs/ stays'
	@echo
	@echo 'PYTHON=python3.12 make ... makes .venv with that Python (3.11 or later).'

demo: $(CORE)
	$(VENV)/bin/moesaic reproduce --preset quick

test: lint
	$(VPY) -m pytest -n auto --maxprocesses 8

lint: $(DEV)
	$(VPY) -m ruff check
	$(VPY) -m ruff format --check
	$(VPY) -m basedpyright --pythonpath $(VPY)

docs: $(DOCS)
	$(VPY) -m zensical build --clean --strict

bench: $(CORE)
	$(VPY) benchmarks/layer.py
	$(VPY) benchmarks/trials.py

clean:
	rm -rf $(VENV) site dist .cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt $(wildcard $(UNFINISHED))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: moesaic needs Python 3.11 or later; name one with: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'make: $(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@if test -e $(UNFINISHED) || ! $(VPY) -m pip --version >/dev/null 2>&1; then \
		echo 'Creating $(VENV)' && $(PYTHON) -m venv --clear $(VENV); fi
	@echo 'Installing moesaic and its dependencies; the first time takes a few minutes'
	@$(call install,.)

$(DEV): $(CORE)
	@echo 'Installing the tools for tests and lint'
	@$(call install,'.[dev]',$(TIMM))

$(DOCS): $(CORE)
	@echo 'Installing the tools for documentation'
	@$(call install,'.[docs]')
