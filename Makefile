# The gates and the ways to run. Everything works on a fresh Debian machine with a Rust toolchain.

BINS := cri-proxy pleg-service probe-service status-reporter pod-sync quintctl
BIN_FLAGS := $(foreach bin,$(BINS),-p $(bin))
CARGO := cargo

# Releases of Debian whose containerd `make test-runtimes` runs on: 1.7 and 2.
RUNTIMES := trixie sid
# What every runtime has to pass.
RUNTIME_TESTS := $(foreach test,start_stop exits manifests api kill races features housekeeping reboot resize,--test $(test))
TEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo nextest run || echo test)

.PHONY: all install build check test fuzz test-runtimes histories vm bench bench-scale run

all: build

# Packages that are missing.
install:
	scripts/install.sh

# All of them are one file, run by its name: their common code is in memory once.
build: install
	$(CARGO) build --locked --release -p quintlet
	for bin in $(BINS); do ln -sf quintlet target/release/$$bin; done

# What a change must pass before its tests matter.
check: install
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	scripts/crate-lints.sh
	$$(scripts/tool.sh cargo-deny) --locked --all-features check --hide-inclusion-graph bans licenses sources
	cd proto && buf=$$(../scripts/tool.sh buf) && $$buf lint && $$buf format --diff --exit-code && $$buf breaking --against baseline.binpb
	scripts/helm-lint.sh
	tests/systemd.sh
	tests/docs.py

# All tests, those with a real containerd included; as root.
test:
	scripts/install.sh test
	$(CARGO) build --locked --bins $(BIN_FLAGS) -p quintlet
	BIN_DIR=$(CURDIR)/target/debug tests/compose.sh
	$(CARGO) $(TEST) --workspace --locked

# Each fuzz target for 30 s, two at a time. What is found is kept in tests/fuzz/corpus and is to be committed with its mend.
fuzz:
	QUINTLET_FUZZ_SECONDS=30 $(CARGO) $(TEST) --locked -p quintlet-fuzz

# The end-to-end tests that matter on each runtime, with the containerd of other releases; nothing is installed.
test-runtimes:
	scripts/install.sh test
	$(CARGO) build --locked --bins $(BIN_FLAGS)
	for release in $(RUNTIMES); do \
		containerd=$$(scripts/containerd.sh $$release) || exit 1; \
		$$containerd --version; \
		QUINTLET_CONTAINERD=$$containerd $(CARGO) $(TEST) --locked -p quintlet-e2e $(RUNTIME_TESTS) || exit 1; \
		QUINTLET_CONTAINERD=$$containerd $(CARGO) $(TEST) --locked -p quintlet-localnode --test containerd || exit 1; \
	done

# The systemd units in a virtual machine, with the debug build; as root. docs/vm.md says what it installs. ACCEL=kvm: not emulated.
vm:
	scripts/install.sh vm
	$(CARGO) build --locked --bins -p quintlet -p quintlet-testapi
	BIN_DIR=$(CURDIR)/target/debug tests/vm/run.sh

# Random histories of a simulated node, as root; CASES of them, where `make test` has 60. What fails prints its seed.
histories:
	QSIM_CASES=$(or $(CASES),2000) $(CARGO) test --locked -p quintlet-simulation --test simulation whatever_happens -- --nocapture

# Against the raw runtime in the same run; wants an idle machine. ARGS="--pods 20 --rounds 1" for a quick look.
bench: build
	$(CARGO) build --locked --release -p quintlet-e2e --bin bench
	mkdir -p target/bench
	target/release/bench $(ARGS) > target/bench/result.json
	cat target/bench/result.json

# A relist of 18,000 containers on a runtime in memory: CPU, memory, messages, what watchers notice. Wants an idle machine.
bench-scale: build
	$(CARGO) build --locked --release -p quintlet-e2e --bin scale
	mkdir -p target/bench
	target/release/scale $(ARGS) > target/bench/scale.json
	cat target/bench/scale.json

# The five services with a private containerd and the manifests of examples/. ONCE=1: end when all has settled, and compare.
# CONFIG=FILE: the configuration of the services.
run: build
	ONCE=$(ONCE) CONFIG=$(CONFIG) scripts/run.sh
