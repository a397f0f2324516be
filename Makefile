# The gates and the ways to run. Everything works on a fresh Debian machine with a Rust toolchain.

BINS := cri-proxy pleg-service probe-service status-reporter pod-sync quintctl
BIN_FLAGS := $(foreach bin,$(BINS),-p $(bin))
CARGO := cargo

.PHONY: all install build check test bench run

all: build

# Packages that are missing.
install:
	scripts/install.sh

build: install
	$(CARGO) build --locked --release --bins $(BIN_FLAGS)

# What a change must pass before its tests matter.
check: install
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	scripts/helm-lint.sh

# All tests, those with a real containerd included; as root.
test:
	scripts/install.sh test
	$(CARGO) build --locked --bins $(BIN_FLAGS)
	BIN_DIR=$(CURDIR)/target/debug tests/compose.sh
	if $(CARGO) nextest --version >/dev/null 2>&1; then \
		$(CARGO) nextest run --workspace --locked; \
	else \
		$(CARGO) test --workspace --locked; \
	fi

# Against the raw runtime in the same run; wants an idle machine. ARGS="--pods 20 --rounds 1" for a quick look.
bench: build
	$(CARGO) build --locked --release -p quintlet-e2e --bin bench
	mkdir -p target/bench
	target/release/bench $(ARGS) > target/bench/result.json
	cat target/bench/result.json

# The five services with a private containerd and the manifests of examples/. ONCE=1: end when all has settled, and compare.
# CONFIG=FILE: the configuration of the services.
run: build
	ONCE=$(ONCE) CONFIG=$(CONFIG) scripts/run.sh
