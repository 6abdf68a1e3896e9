# What a person types. `make demo` builds and runs the main job; `make test` runs all the tests; `make soak` runs those that find
# what is rare for as long as that takes.
.PHONY: check compile format unit-test maze methods text noise-bytes official proof proof-setup demo demo-smollm2 build setup test soak rust-test service-test service-setup python python-setup python-test python-wheel python-tree bench bench-peers docs lint features cluster cluster-program cluster-test

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

# The program with Ballista, whose own crates are compiled beside those that are there (tests/features lists the features that it needs of the others).
cluster-program:
	cargo build -p stillhouse -p stillhouse-cluster --features stillhouse/distributed
	mkdir -p target/cluster && ln -f $(STILLHOUSE) target/cluster/stillhouse

# What is tested: all crates, with the cluster. One selection everywhere (also in tests/src/lib.rs): another one has other features, and what depends on
# them would be compiled a second time.
TESTED := --workspace --features stillhouse/distributed,stillhouse-tests/distributed

# All tests in `make soak`; else those that .config/nextest.toml leaves.
NEXTEST := cargo nextest run $(TESTED) $(if $(STILLHOUSE_SOAK),--ignore-default-filter)

# Whatever is tested or only has to compile: tests, benchmarks, examples, and CUDA.
compile:
	cargo build $(TESTED) --all-targets
	cargo build -p stillhouse-teacher -p stillhouse-gpu --features stillhouse-teacher/cuda --lib --example gpu_check

# Tools and data that the tests need: cargo-nextest, a Python environment, BERT's tokenizer, SmolLM2, vocabularies of real models.
setup:
	scripts/setup

# Everything: the program with its cluster, the service, the package. One after the other, whatever make's -j says: they share two cores and one target
# folder. The time of each goes to stdout, and into the file $TIMES.
test:
	@set -e; for part in rust-test service-test python-test; do \
		began=$$(date +%s); $(MAKE) $$part; \
		printf '%5d s  %s\n' $$(($$(date +%s) - began)) $$part | tee -a "$${TIMES:-/dev/null}"; \
	done

rust-test: setup
	$(NEXTEST)
	cargo test --doc $(TESTED) -q

# Of these, the tests of a cluster.
cluster-test: setup
	$(NEXTEST) -E 'package(stillhouse-cluster) or (package(stillhouse-tests) and test(/^cluster/))'

# Of these, the ones that scripts/check chooses.
unit-test:
	$(NEXTEST) -E '$(FILTER)'

# What CI does a few times or not at all, as often as it takes to believe it: kills, faults of storage, random jobs and requests. Also the
# instructions that fixed work takes, to compare with earlier ones.
soak: setup python
	STILLHOUSE_SOAK=1 $(MAKE) rust-test
	scripts/instructions
	cd python && STILLHOUSE_SOAK=1 ../.venv-torch/bin/pytest -q tests/test_kills.py tests/test_frameworks.py tests/test_damage.py

# The service: attacks, schemathesis, and its page in Chromium. Of the program that `cargo build -p stillhouse` makes, which the Rust tests do not build.
service-test: service-setup build
	.venv-service/bin/pytest -q tests/service
	node --test tests/page/page.test.mjs

service-setup: setup
	scripts/setup-service

# The package of python/, into .venv-torch: its core in the profile of the tests. Its dependencies are compiled once more, with the features of a wheel:
# with those of the workspace, tokio has the locks of parking_lot, and a forked process that takes one crashes.
python: python-setup
	VIRTUAL_ENV=$(CURDIR)/.venv-torch PATH="$(CURDIR)/.venv/bin:$$PATH" .venv-torch/bin/maturin develop --quiet --uv --profile dev -m python/Cargo.toml

python-setup: setup
	scripts/setup-python

# The check of GPUs is here for torch, and for the package whose replay it checks.
python-test: python build
	cargo build -q -p stillhouse-gpu --example gpu_check
	PYTHON=$(CURDIR)/.venv-torch/bin/python scripts/gpu-check --host --json target/gpu-check.json >target/gpu-check.txt
	cd python && ../.venv-torch/bin/ruff check && ../.venv-torch/bin/ruff format --check
	cd python && ../.venv-torch/bin/mypy
	cd python && node ../tests/pyright/node_modules/pyright/index.js --pythonpath ../.venv-torch/bin/python stillhouse
	cd python && ../.venv-torch/bin/pytest -n 2 --dist worksteal
	cd research && ../.venv-torch/bin/ruff check && ../.venv-torch/bin/ruff format --check
	cd research && ../.venv-torch/bin/pytest -n 2 --dist worksteal

# Wheels with the program, for every Python from 3.10 on and every Linux from glibc 2.17 on, x86-64 and aarch64, in dist/.
python-wheel: setup
	scripts/python-wheels

# What the package's core is compiled from.
python-tree:
	cargo tree --locked -p stillhouse-python -e normal

bench:
	cargo bench -p stillhouse-noise -p stillhouse-signals -p stillhouse-operators -p stillhouse-teacher

# The program beside datasets, datatrove, Megatron-style preprocessing, PyTorch and llama.cpp: make bench-peers ARGS='--quick --only tokenize'
bench-peers:
	research/bench-peers $(ARGS)

# The proofs: every experiment is made anew in $(FRESH), whatever docs/proof holds (a run that was stopped goes on there, and seeds can be added: make maze
# ARGS='--seeds 7'), shown in $(FRESH).md and $(FRESH)/*.md, and compared with docs/proof: whether the figures agree within their intervals. PUBLISH=1 puts them into docs/proof then,
# and makes docs/PROOF.md and docs/proof/*.md.
FRESH := demo-out/proof
PROOF := .venv-torch/bin/python research/proof
told = $(if $(PUBLISH),$(PROOF)/agree.py docs/proof $(FRESH) --publish --only $(1) && $(PROOF)/page.py, \
	$(PROOF)/page.py --results $(FRESH) --page $(FRESH).md && $(PROOF)/agree.py docs/proof $(FRESH) --only $(1))

# Table 7 of the Gumbel paper (research/maze), five seeds of three students; with other settings: make maze RUN=maze-constant, or RUN=maze-small.
RUN := maze
maze-constant := --constant-rate --lr 3e-4 --epochs 200 --teacher-epochs 200 --seeds 1
maze-small := --constant-rate --lr 2e-3 --epochs 40 --width 64 --layers 2 --seeds 5

maze: python build proof-setup
	.venv-torch/bin/python research/maze/run.py --work demo-out/$(RUN) --program $(STILLHOUSE) --json $(FRESH)/$(RUN).json $($(RUN)) $(ARGS)
	$(call told,$(RUN))

# Each other method once, and tolerance at small vocabularies (research/proof/methods); some of them: make methods METHODS='pgm tolerance-512'.
METHODS := pgm prime armd bd3lm medusa distill tolerance-28 tolerance-512
tolerance-512 := --vocab 512 --steps 1500
result = $(if $(filter tolerance-%,$(1)),$(1),methods-$(1))
program = $(firstword $(subst -, ,$(1))).py

methods: python build proof-setup
	set -e; $(foreach method,$(METHODS),OMP_NUM_THREADS=1 $(PROOF)/methods/$(call program,$(method)) --work demo-out/methods --program $(STILLHOUSE) --json $(FRESH)/$(call result,$(method)).json $($(method)) $(ARGS);)
	$(call told,$(foreach method,$(METHODS),$(call result,$(method))))

# Students of the nano GPT-2 at V = 50,257 (research/proof/text.py).
text: python build proof-setup
	$(PROOF)/text.py --work demo-out/text --program $(STILLHOUSE) --teacher assets/teacher-nano-gpt2 --corpus assets/corpus/sotu-small.jsonl.gz \
		--json $(FRESH)/text.json $(ARGS)
	$(call told,text)

# What another coding of the corrections would cost (research/proof/noise_bytes.py), for SmolLM2 and for the demo's teacher.
noise-bytes: python build proof-setup
	$(PROOF)/noise_bytes.py --work demo-out/noise-bytes/smollm2 --program $(STILLHOUSE) --teacher .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --tokens 4000 \
		--json $(FRESH)/noise_bytes-smollm2.json $(ARGS)
	$(PROOF)/noise_bytes.py --work demo-out/noise-bytes/nano-gpt2 --program $(STILLHOUSE) --teacher assets/teacher-nano-gpt2 --tokens 1000 \
		--json $(FRESH)/noise_bytes-nano-gpt2.json $(ARGS)
	$(if $(PUBLISH),cp $(FRESH)/noise_bytes-*.json docs/proof/ && $(PROOF)/page.py,$(PROOF)/page.py --results $(FRESH) --page $(FRESH).md)

# One batch through the authors' code and through ours (research/proof/official). THEIRS is a folder with checkouts, which
# `cd research/proof && ../../.venv-torch/bin/python -m official --list` names.
official: python build proof-setup
	$(if $(THEIRS),,$(error THEIRS: missing, valid: a folder with the checkouts that `python -m official --list` names))
	cd research/proof && OMP_NUM_THREADS=1 $(CURDIR)/.venv-torch/bin/python -m official --theirs $(abspath $(THEIRS)) --program $(CURDIR)/$(STILLHOUSE) $(ARGS)
	$(MAKE) proof

# What the proofs need beside .venv-torch: matplotlib, and scikit-learn for its images.
proof-setup: python-setup
	.venv/bin/python -m uv pip install --quiet --python .venv-torch/bin/python --require-hashes -r scripts/pins/proof.txt

# docs/PROOF.md and its plots out of docs/proof/*.json.
proof: proof-setup
	.venv-torch/bin/python research/proof/page.py

# What to run after every change: format, lints, unit tests of the crates that have changed.
check:
	scripts/check

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc $(TESTED) --no-deps

format:
	scripts/prose
	cargo fmt --all -- --check

# What `.ci/run` finds with `make compile`.
lint: format
	cargo clippy $(TESTED) --all-targets -- -D warnings
	cargo clippy -p stillhouse-teacher -p stillhouse-gpu --features stillhouse-teacher/cuda --lib --example gpu_check -- -D warnings

# The features of the whole workspace, which cargo-hakari writes into tests/features/Cargo.toml: after a change of a dependency.
features:
	scripts/features
