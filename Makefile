# What a person types. `make demo` builds and runs the main job; `make test` runs all the tests.
.PHONY: demo demo-smollm2 build setup test python-test bench docs lint

PYTHON := .venv/bin/python
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

# Tools and data that the tests need: cargo-nextest, a Python environment, BERT's tokenizer, SmolLM2.
setup:
	scripts/setup

test: setup
	cargo nextest run --workspace
	cargo test --doc --workspace -q

bench:
	cargo bench -p stillhouse-noise -p stillhouse-operators -p stillhouse-teacher

docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

lint:
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets -- -D warnings
