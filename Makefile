# `make reproduce` and `make test` are all that a newcomer needs. Both build .venv from requirements.lock first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
# The index of torch, for example TORCH_INDEX=https://download.pytorch.org/whl/cpu (see README, "Installation").
TORCH_INDEX ?=
SCALE ?= laptop
CORES ?= 2

BIN := .venv/bin
# The stamp's name has the checksum of the lock: another lock makes the environment stale, whatever its date.
READY := .venv/ready-$(shell cksum < requirements.lock | cut -d' ' -f1)
# Recordings are made with one torch thread per job.
export OMP_NUM_THREADS := 1
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: reproduce test stress smoke lint env clean
reproduce: $(READY)
	$(BIN)/snakemake --cores $(CORES) --config scale=$(SCALE) -- all

test: $(READY)
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile

stress: $(READY)
	$(BIN)/python -m pytest -n 0 -m stress

smoke: $(READY)
	$(BIN)/snakemake --cores $(CORES) -- smoke

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakemake --lint

env: $(READY)

$(READY):
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found. Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.lock)"
	@# A CUDA build of torch installs the triton that it was built with, which is kept.
	if $(BIN)/pip show --quiet triton 2>/dev/null; then skip='^triton=='; else skip='^$$'; fi; \
	grep -v "$$skip" requirements.lock > .venv/requirements && $(BIN)/pip install --quiet -r .venv/requirements
	touch $@

clean:
	rm -rf results figures paper_tables .snakemake
