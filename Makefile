# `make` installs into .venv; nothing here needs root or a system package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without a GPU: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu (about 200 MB instead of 2.5 GB)
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH_PIP := $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
SOURCES := pyproject.toml constraints.txt setup.py

.DEFAULT_GOAL := install
.PHONY: install install-test demo test test-slow lint bench bench-gpu test-gpu wheel clean

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pasta-otel needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.torch: $(VENV)/.created constraints.txt
	@echo "Setting up .venv: about 80 MB of packages and PyTorch (about 200 MB for CPU, about 2.5 GB with CUDA;"
	@echo "TORCH_INDEX=https://download.pytorch.org/whl/cpu chooses the CPU build)."
	$(TORCH_PIP) torch
	@touch $@

# setuptools warns about folders that lie beside an editable package: that is how this repository is laid out
$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	PYTHONWARNINGS=ignore $(PIP) -e '.[demo,gpu]'
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) --group lint --group test
	@touch $@

install: $(VENV)/.installed
install-test: $(VENV)/.test

demo: install
	$(BIN)/pasta-otel demo $(DEMO_ARGS)

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two processes take the tests file by file, in the order of collection: eBPF, which mostly waits for the kernel, begins
test: install-test
	tests/prepare_host.sh
	tests/tools.sh
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n 2 --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: install-test
	tests/prepare_host.sh
	tests/tools.sh
	$(BIN)/python -m pytest -m 'not gpu' --timeout 900 $(PYTEST_ARGS)

test-gpu: 
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . -m gpu tests/gpu $(PYTEST_ARGS)

bench: install-test
	$(BIN)/python -m benchmarks $(BENCH)

# PART=cost, decode, batch, clocks or memory: each takes less than nine minutes
bench-gpu:
	$(PYTHON) -m benchmarks.gpu $(PART)

wheel: install-test
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) .cache build dist *.egg-info
