PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ARGS ?=
THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.PHONY: run test test-all test-gpu fuzz lint bench clean

run: $(VENV)/ready
	$(PY) -m bench.charlm $(ARGS)

# Two workers with two threads each: threads that wait sleep, and leave the cores to the others.
test: lint
	$(THREADS) $(PY) -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-all: lint
	$(THREADS) $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

# On a machine with a GPU, whose torch, Triton and pytest are used as they are. Most of the time is
# compilation: with pytest-xdist, ARGS="-n 8" shares it between processes.
test-gpu:
	$(PYTHON) -m pytest tests/gpu/test_gpu.py tests/gpu/test_nccl.py $(ARGS)

# Two thousand random cells, and scan blocks, others at each call; takes hours.
fuzz: $(VENV)/ready
	CELLS=2000 $(THREADS) $(PY) -m pytest -n 2 --dist worksteal tests/segment/test_random_cells.py \
	  tests/kernels/test_random_scans.py $(ARGS)

lint: $(VENV)/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/ready
	$(PY) -m bench.run $(ARGS)

# One local environment for everything, made anew when the pins change.
$(VENV)/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -r requirements.txt
	$(PY) -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
