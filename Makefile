# What a person types. `make demo` builds and runs the main job; `make test` runs all the tests; `make soak` runs those that find
# what is rare for as long as that takes.
.PHONY: maze methods text official proof proof-setup demo demo-smollm2 build setup test soak rust-test service-test service-setup python python-setup python-test python-wheel python-tree bench bench-peers docs lint cluster cluster-program cluster-test

STILLHOUSE := target/debug/stillhouse

build:
	cargo build -p stillhouse

demo: build
	$(STILLHOUSE) run jobs/examples/demo.yaml
	$(STILLHOUSE) inspect demo-out/demo

demo-smollm2: build
	scripts/fetch-assets
	$(STILLHOUSE) run jobs/examples/demo-smollm2.yaml
	$(STILLHOUSE) inspect demo-out/demo-smollm2

# A cluster on this machine: a scheduler and two executors on loopback, until Ctrl-C.
cluster: cluster-program
	scripts/cluster

# The program with Ballista, whose own crates are compiled beside those that are there (tests/features asks for what it asks of others).
CLUSTER := -p stillhouse -p stillhouse-cluster --features stillhouse/distributed

cluster-program:
	cargo build $(CLUSTER)
	mkdir -p target/cluster && ln -f $(STILLHOUSE) target/cluster/stillhouse

cluster-test: setup cluster-program
	cargo clippy $(CLUSTER) -p stillhouse-tests --features stillhouse-tests/distributed --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc -p stillhouse-cluster --features distributed --no-deps
	cargo nextest run -p stillhouse-cluster --features distributed
	STILLHOUSE_BIN=$(CURDIR)/target/cluster/stillhouse cargo nextest run -p stillhouse-tests --features distributed -E 'test(/^cluster/)'

# Tools and data that the tests need: cargo-nextest, a Python environment, BERT's tokenizer, SmolLM2, vocabularies of real models.
setup:
	scripts/setup

# Everything: the program, the cluster, the service, the package. One after the other, whatever make's -j says: they share two cores and one target
# folder.
test:
	$(MAKE) rust-test
	$(MAKE) cluster-test
	$(MAKE) service-test
	$(MAKE) python-test

rust-test: setup
	cargo nextest run --workspace
	cargo test --doc --workspace -q
	scripts/instructions

# What CI does a few times, as often as it takes to believe it: kills, faults of storage, random jobs and requests.
soak: setup python
	STILLHOUSE_SOAK=1 cargo nextest run --workspace
	STILLHOUSE_SOAK=1 $(MAKE) cluster-test
	cd python && STILLHOUSE_SOAK=1 ../.venv-torch/bin/pytest -q tests/test_kills.py tests/test_frameworks.py tests/test_damage.py

# The service: attacks, schemathesis, and its page in Chromium. With the selection of the Rust tests, so that the program is built once.
service-test: service-setup
	cargo build --quiet --workspace --tests --bin stillhouse
	.venv-service/bin/pytest -q tests/service
	node --test tests/page/page.test.mjs

service-setup: setup
	scripts/setup-service

# The package of python/, into .venv-torch: its core in the profile of the tests.
python: python-setup
	VIRTUAL_ENV=$(CURDIR)/.venv-torch PATH="$(CURDIR)/.venv/bin:$$PATH" .venv-torch/bin/maturin develop --quiet --uv --profile dev -m python/Cargo.toml

python-setup: setup
	scripts/setup-python

# With the selection of the Rust tests, so that the program is built once. The check of GPUs is here for torch, and for the package whose
# replay it checks.
python-test: python
	cargo build --quiet --workspace --tests --bin stillhouse
	cargo build -q -p stillhouse-gpu --example gpu_check
	PYTHON=$(CURDIR)/.venv-torch/bin/python scripts/gpu-check --host --json target/gpu-check.json >target/gpu-check.txt
	cd python && ../.venv-torch/bin/ruff check && ../.venv-torch/bin/ruff format --check
	cd python && ../.venv-torch/bin/mypy
	cd python && ../.venv-torch/bin/pytest

# Wheels for every Python from 3.10 on and every Linux from glibc 2.17 on, x86-64 and aarch64, in dist/.
python-wheel: setup
	scripts/python-wheels

# What the package's core is compiled from.
python-tree:
	cargo tree --locked -p stillhouse-python -e normal

bench:
	cargo bench -p stillhouse-noise -p stillhouse-operators -p stillhouse-teacher

# The program beside datasets, datatrove, Megatron-style preprocessing, PyTorch and llama.cpp: make bench-peers ARGS='--quick --only tokenize'
bench-peers:
	scripts/bench-peers $(ARGS)

# Table 7 of the Gumbel paper (python/examples/maze), five seeds of four students, and the page of all proofs. Results are raw JSON; what is in
# demo-out/maze and in the JSON is not made again, so that a run may be stopped, and seeds added: make maze ARGS='--seeds 7'.
maze: python build proof-setup
	.venv-torch/bin/python python/examples/maze/run.py --work demo-out/maze --program $(STILLHOUSE) --json docs/proof/maze.json $(ARGS)
	$(MAKE) proof

# Each other method once, and tolerance at small vocabularies (python/examples/proof/methods); what is in the JSON files is kept: make methods ARGS='--seeds 3'.
METHODS := pgm prime armd bd3lm medusa distill
METHOD := OMP_NUM_THREADS=1 .venv-torch/bin/python python/examples/proof/methods

methods: python build proof-setup
	set -e; for method in $(METHODS); do $(METHOD)/$$method.py --work demo-out/methods --program $(STILLHOUSE) --json docs/proof/methods-$$method.json $(ARGS); done
	$(METHOD)/tolerance.py --work demo-out/methods --program $(STILLHOUSE) --json docs/proof/tolerance-28.json $(ARGS)
	$(MAKE) proof

# Students of the nano GPT-2 at V = 50,257 (python/examples/proof/text.py).
text: python build proof-setup
	.venv-torch/bin/python python/examples/proof/text.py --work demo-out/text --program $(STILLHOUSE) --teacher assets/teacher-nano-gpt2 \
		--corpus assets/corpus/sotu-small.jsonl.gz --json docs/proof/text.json $(ARGS)
	$(MAKE) proof

# One batch through the authors' code and through ours (python/examples/proof/official). THEIRS is a folder with checkouts, which
# `cd python/examples/proof && ../../../.venv-torch/bin/python -m official --list` names.
official: python build proof-setup
	$(if $(THEIRS),,$(error THEIRS: missing, valid: a folder with the checkouts that `python -m official --list` names))
	cd python/examples/proof && OMP_NUM_THREADS=1 $(CURDIR)/.venv-torch/bin/python -m official --theirs $(abspath $(THEIRS)) --program $(CURDIR)/$(STILLHOUSE) $(ARGS)
	$(MAKE) proof

# What the proofs need beside .venv-torch: matplotlib, and scikit-learn for its images.
proof-setup: python-setup
	.venv/bin/python -m uv pip install --quiet --python .venv-torch/bin/python --require-hashes -r scripts/pins/proof.txt

# docs/PROOF.md and its plots out of docs/proof/*.json.
proof: proof-setup
	.venv-torch/bin/python python/examples/proof/page.py

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

lint:
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p stillhouse-teacher --features cuda --all-targets -- -D warnings
