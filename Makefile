# Every target works on a fresh clone with only a Python and the usual package registries: it makes the environment first.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# The newest that runs. pyenv puts names on PATH that run only where a version is chosen; its own folder has them all.
PYTHONS := $(foreach name,python3.13 python3.12 python3.11,$(name) $(wildcard $(HOME)/.pyenv/versions/*/bin/$(name)))
PYTHON ?= $(shell for one in $(PYTHONS); do "$$one" -c "$(FITS)" 2> /dev/null && echo "$$one" && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTBED ?= tests/testbed
# These measure no speed, so other tests may run beside them.
UNMEASURED := $(addprefix tests/testbed/test_,lifecycle.py surviving.py wide_stages.py)
# Nothing that is started here may join a Ray that somebody else runs.
export RAY_ENABLE_AUTO_CONNECT = 0
export RAY_USAGE_STATS_ENABLED = 0
# Some shells forbid Python to keep bytecode: every process of the tests then compiles all modules again.
export PYTHONDONTWRITEBYTECODE =
PROCESSES ?= 2
# Ray's workers otherwise give way to every other program, and a busy machine starves them.
PYTEST = JAX_PLATFORMS=cpu RAY_worker_niceness=0 COVERAGE_FILE=build/coverage/.coverage.$@.$$$$ \
	$(BIN)/python -m pytest --durations=25 $(COVERED)
WRITTEN_BY_THE_RULE := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs hwaware

# Parts whose examples run without JAX, Ray and Alpa.
DOCTESTED := $(addprefix hwaware/,adapting cache_folder.py cli/_findings.py compat/absent.py compat/specs.py records.py history.py link_flags.py result.py schedules.py survival/pieces.py survival/points.py survival/handing.py survival/sending.py survival/vault.py cluster.py workload.py plans.py timeline.py formatting.py reference_kernel.py host_load.py errors.py deprecation.py device_places.py host_devices.py ray_cluster.py ray_jobs.py runtime/channels.py runtime/checkpoints.py runtime/settings.py runtime/step_recorder.py runtime/transfers.py runtime/mesh.py report/canvas.py report/flags.py report/bench_tables.py activation.py adapter.py patching/stage_option.py patching/steady.py survival/rescuer.py survival/messages.py survival/moving.py patching/choosing.py patching/even_layers.py profiler interop tracing/cutting.py tracing/scratch.py tracing/state.py costs calibration placement simulator models/__init__.py bench/statistics.py bench/differences.py bench/summary.py bench/alpa_mapping.py bench/pace.py bench/testbed/gpu.py bench/testbed/layout.py bench/testbed/scenarios.py)
# Those that need JAX.
DOCTESTED_WITH_JAX := $(addprefix hwaware/,bench/kills.py patching/layer_programs.py compiler/programs.py tracing/digest.py tracing/flops.py tracing/function.py patching/unequal.py)

.PHONY: env fuzz demo bench bench-short faults check test test-all coverage beside-alpa lint style docs unit ray alpa testbed package package-matrix versions losses examples parity clean

env: $(READY)

$(READY): requirements/pinned.txt requirements/alpa.txt setup.py pyproject.toml
	@"$(PYTHON)" -c "$(FITS)" 2> /dev/null || { echo "Found no Python 3.11, 3.12 or 3.13 that runs, under the name $(or $(PYTHON),python3.13, python3.12 or python3.11). To fix: install Python 3.13, or name one: make env PYTHON=/path/to/python3.13"; exit 2; }
	@# An environment of another Python cannot be brought up to date.
	@[ ! -e $(VENV)/pyvenv.cfg ] || [ "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" ] || rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/pinned.txt
	# Alpa pins jax==0.3.22 and ray==2.1.0; it runs on the pinned stock versions all the same.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/alpa.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

demo: env
	$(BIN)/hwaware demo --output demo

# Measure seven clusters: a small GPT, four mappings, two starts where half an hour allows. Needs root.
bench: env
	$(BIN)/hwaware bench five-unlike four-equal fast-and-slow two-racks one-bad-link directed inverted --model gpt-small --microbatch-size 2 --orders 1 --starts 2 --repeats 10 --within 29 --output results/bench

# The same in short: one of the clusters, two mappings, fewer steps; at most five minutes.
bench-short: env
	$(BIN)/hwaware bench fast-and-slow --model gpt-small --microbatch-size 2 --quick --mappings hwaware,alpa --output results/bench-short

# What it costs to survive, and how long recoveries take, on a cluster of their own. Needs root.
faults: env
	$(BIN)/hwaware bench fast-and-slow --faults --output results

# What a commit should pass.
check: env
	$(MAKE) --jobs=2 --output-sync=target lint unit

# What CI runs. Tests under Alpa mostly wait for workers, so the others run beside them. With three lines instead of two,
# a Ray node of a testbed sometimes took longer to start than the 30 s that Ray allows.
# Tests that measure on a testbed come last, with nothing beside them: hosts of a testbed have control groups of their own,
# and the processor divides its time between groups without regard to niceness.
test: env
	$(MAKE) --jobs=2 --output-sync=target alpa beside-alpa
	$(MAKE) testbed TESTBED="$(filter-out $(UNMEASURED),$(wildcard tests/testbed/test_*.py))"

# The same with every test, seed, model and way of splitting: hours.
test-all: export HWAWARE_ALL_CASES = 1
test-all: test

# The processes of tests are covered, those that they start are not.
coverage: env
	rm -rf build/coverage
	mkdir -p build/coverage
	$(MAKE) test COVERED="--cov=hwaware --cov-branch --cov-report="
	$(BIN)/coverage combine --quiet --data-file=build/coverage/.coverage build/coverage
	$(BIN)/coverage report --data-file=build/coverage/.coverage --skip-covered --precision=1

beside-alpa: env
	$(MAKE) --jobs=1 lint ray testbed package unit TESTBED="$(UNMEASURED)"

# Every check runs, also after one that fails.
lint: env
	@failed=; \
	run() { echo "$$*"; "$$@" || failed="$$failed; $$*"; }; \
	run $(BIN)/ruff check .; \
	run $(BIN)/ruff format --check .; \
	run $(BIN)/lint-imports --no-cache --no-logo; \
	run $(BIN)/mypy; \
	run $(BIN)/python -m hwaware.compat.scan; \
	run $(BIN)/python docs/prose.py $(WRITTEN_BY_THE_RULE); \
	$(BIN)/python benchmarks/style.py; \
	if [ -n "$$failed" ]; then echo "make lint failed in$${failed#;}"; exit 1; fi

# Figures of style, printed and not enforced.
style: env
	@$(BIN)/python benchmarks/style.py

# Not --quiet: MkDocs then counts no warnings, and --strict never fails. `make unit` builds the site too.
docs: env
	$(BIN)/mkdocs build --strict

unit: env
	$(PYTEST) -n $(PROCESSES) tests/unit $(DOCTESTED)

# Changed files and messages on every reader: so many cases (FUZZ=100000), or for a time (FUZZ=600s), from case SEED on.
FUZZ ?= 20000
SEED ?= 0
fuzz: env
	PYTHONPATH=tests/support JAX_PLATFORMS=cpu nice -n 10 $(BIN)/python tests/support/fuzzing.py $(FUZZ) --seed $(SEED) --processes $(PROCESSES)

ray: env
	$(PYTEST) tests/ray

# Programs of tests run for milliseconds, and XLA takes longer to optimise them; `make test-all` optimises as users do.
alpa: env
	$(if $(HWAWARE_ALL_CASES),,XLA_FLAGS=--xla_backend_optimization_level=0) NPROC=1 $(PYTEST) -n 2 --dist loadfile tests/alpa $(DOCTESTED_WITH_JAX)

# Every model, number of stages, way of splitting, with and without rematerialisation: a quarter of an hour.
losses: env
	rm -f benchmarks/results/losses.jsonl
	HWAWARE_ALL_CASES=1 HWAWARE_LOSSES_FILE=benchmarks/results/losses.jsonl NPROC=1 $(PYTEST) tests/alpa/test_sharded_stages.py -k test_losses

# Every example; `make alpa` runs none.
examples: env
	HWAWARE_ALL_CASES=1 $(PYTEST) tests/alpa/test_examples.py

# What Alpa's own tests check, with hwaware enabled, disabled, and both; `make alpa` has "enabled", and one of "both".
parity: env
	HWAWARE_ALL_CASES=1 NPROC=1 $(PYTEST) tests/alpa/test_parity.py

testbed: env
	@if [ "$$(id -u)" = 0 ]; then $(PYTEST) $(TESTBED); \
	else echo "SKIPPED: the testbed tests need root on Linux (network namespaces and CPU quotas)"; fi

# Which versions of JAX, Python and Ray Alpa runs on; makes an environment of its own for each, in .versions.
versions:
	python3 benchmarks/versions.py

package: env
	$(PYTEST) tests/package

# The wheel on every Python that setup.py names, and with Alpa on one; makes environments of its own, in .versions.
package-matrix: env
	$(BIN)/python benchmarks/packages.py --alpa

clean:
	rm -rf $(VENV) .versions build dist *.egg-info demo
