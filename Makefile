# Everything a fresh machine needs is set up by the targets themselves: Python 3.11 or newer, make and pip are enough.
# The system's Python, where it is new enough and has its headers: distributions build theirs with all optimizations.
SYSTEM_PYTHON := /usr/bin/python3
PYTHON ?= $(shell $(SYSTEM_PYTHON) -c 'import ensurepip, os, sys, sysconfig; \
	header = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	sys.exit(sys.version_info < (3, 11) or not os.path.exists(header))' 2>/dev/null && echo $(SYSTEM_PYTHON) || echo python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles what is imported, and keeps that; of what is installed most never is.
INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check
unexport PYTHONDONTWRITEBYTECODE
# The pip that Python brings looks at every file of every package for a minute; newer ones do in a tenth of that.
environment = test -x $(1)/bin/python || { $(PYTHON) -m venv $(1) && $(1)/bin/python $(INSTALL) 'pip>=25'; }

JITTOR_VENV := build/jittor-venv
JITTOR_STAMP := $(JITTOR_VENV)/.installed
KERAS_VENV := build/keras-venv
KERAS_STAMP := $(KERAS_VENV)/.installed
# Another version of PyTorch: `make test-torch TORCH=2.11.0`; with torchao, which transformers would load in every process.
TORCH ?= 2.14.1
TORCH_VENV := build/torch-$(TORCH)-venv
TORCH_STAMP := $(TORCH_VENV)/.installed
TORCH_ROOMS := tests/_torch tests/capture tests/recomputation tests/training tests/levers
PACKAGES_VENV := build/packages-venv
PACKAGES_STAMP := $(PACKAGES_VENV)/.installed
PACKAGES_REQUIREMENTS := benchmarks/packages/requirements.txt

.PHONY: setup environments demo docs test check lint types contracts unit test-more test-accelerator jittor test-jittor
.PHONY: test-torch test-keras test-wheel gpu packages format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call environment,$(VENV))
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# All that tests need: `make --jobs 2 environments` installs two at a time.
environments: $(STAMP) $(JITTOR_STAMP) $(KERAS_STAMP) $(TORCH_STAMP)

demo: $(STAMP)
	$(BIN)/memfit demo --out runs/demo --overwrite

# Into build/site, without network; the tests build it too.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: check

check: lint types contracts unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

# Two processes of one thread each: more threads than cores would wait for one another. Inductor believes the processor what
# vectors it has, which it would try for each cache.
MARKS ?= not ci
unit: $(STAMP)
	OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "$(MARKS)"

# More models and sizes of what `make test` has tested, and what takes longest of benchmarks, ranks, fleets and structure.
test-more:
	$(MAKE) unit MARKS=ci

# On an accelerator that lives on the CPU, and is then the only one of its process: what needs no GPU's own kernels.
test-accelerator: $(STAMP)
	MEMFIT_TEST_ACCELERATOR=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ci" tests/accelerator_device tests/accelerators

# Jittor needs NumPy 1 and compiles itself: an environment and a cache of its own, both kept in build/. It notes its home in
# the user's, which its compilers read while another writes it, and fail; with one and the same home it writes nothing.
JITTOR_HOMES := HOME=$(CURDIR)/build/jittor-home JITTOR_HOME=$(CURDIR)/build/jittor-home

# Jittor compiles each kernel that it meets, and what it includes is most of that: it is parsed once for the core, for kernels,
# and for those without fast mathematics. g++ parses it anew, and says nothing, where these options are not those that it is
# called with: two of a kernel's come from memfit's `jittor_doctor.py`, and one from Jittor's `asm_tuner.py`.
JITTOR_HEADER := $(CURDIR)/build/jittor-precompiled/precompiled.h
JITTOR_FLAGS := $(JITTOR_HOMES) cc_flags="-include $(JITTOR_HEADER)" kernel_flags="-DJIT=1"

jittor: $(JITTOR_STAMP) $(JITTOR_HEADER).gch/kernel
	mkdir -p build/jittor-home
	$(JITTOR_FLAGS) $(JITTOR_VENV)/bin/memfit tools doctor jittor

test-jittor: jittor
	$(JITTOR_FLAGS) $(JITTOR_VENV)/bin/python -m pytest tests/jittor

$(JITTOR_HEADER).gch/kernel: tests/jittor/precompiled.h $(JITTOR_STAMP)
	mkdir -p $(@D)
	cp $< $(JITTOR_HEADER)
	set -e; \
	python_headers=`$(JITTOR_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])'`; \
	jittor_headers=`echo $(JITTOR_VENV)/lib/python3*/site-packages/jittor/src`; \
	options="-x c++-header -std=c++14 -fPIC -march=native -I$$python_headers -I$$jittor_headers"; \
	g++ $(JITTOR_HEADER) $$options -O2 -o $(@D)/core; \
	kernel="-g -DJIT=1 -fopenmp -Ofast -fno-reciprocal-math -mno-recip"; \
	g++ $(JITTOR_HEADER) $$options $$kernel -fno-fast-math -ffp-contract=off -o $(@D)/strict; \
	g++ $(JITTOR_HEADER) $$options $$kernel -o $@

$(JITTOR_STAMP): pyproject.toml constraints.txt
	$(call environment,$(JITTOR_VENV))
	$(JITTOR_VENV)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[jittor]' pytest pytest-timeout
	touch $(JITTOR_STAMP)

# TensorFlow has as many threads as there are cores, which wait for one another where other tests run beside these.
test-keras: $(KERAS_STAMP)
	TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 $(KERAS_VENV)/bin/python -m pytest tests/keras

$(KERAS_STAMP): pyproject.toml constraints.txt
	$(call environment,$(KERAS_VENV))
	$(KERAS_VENV)/bin/python $(INSTALL) --constraint constraints.txt --editable . tensorflow-cpu pytest pytest-timeout
	touch $(KERAS_STAMP)

# The rooms that depend on PyTorch's internals, in an environment with another version of it.
test-torch: $(TORCH_STAMP)
	OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1 $(TORCH_VENV)/bin/python -m pytest -m "not ci" $(TORCH_ROOMS)

$(TORCH_STAMP): pyproject.toml constraints.txt
	$(call environment,$(TORCH_VENV))
	grep -v '^torch==' constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python $(INSTALL) --constraint $(TORCH_VENV)/constraints.txt torch==$(TORCH) torchao --editable '.[dev]'
	touch $(TORCH_STAMP)

# As its users install it: the wheel of this tree, in an environment of its own, used in another folder.
test-wheel: $(STAMP)
	MEMFIT_TEST_WHEEL=1 $(BIN)/python -m pytest tests/wheel

# On a card: measures what is to be measured there, in parts that go on where they stopped (status 75: run it again), and makes
# what follows: error bars and rates of such cards, and their page of the docs. Where the
# package registry is out of reach, `make gpu GPU_PYTHON=python3` takes an environment that has what is needed.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))
	PYTHONPATH=src:. CUBLAS_WORKSPACE_CONFIG=:4096:8 $(GPU_PYTHON) -m benchmarks.gpu $(GPU_OPTIONS)

# Other people's packages, for `python -m benchmarks.packages`. Their requirements are all listed, so that none is looked for
# and none brings another torch or CUDA's libraries.
packages: $(PACKAGES_STAMP)

$(PACKAGES_STAMP): pyproject.toml constraints.txt $(PACKAGES_REQUIREMENTS)
	$(call environment,$(PACKAGES_VENV))
	$(PACKAGES_VENV)/bin/python $(INSTALL) --constraint constraints.txt --editable .
	$(PACKAGES_VENV)/bin/python $(INSTALL) --no-deps --requirement $(PACKAGES_REQUIREMENTS)
	touch $(PACKAGES_STAMP)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
