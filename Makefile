# Builds, checks, tests and runs Quintlet. Every target works on a fresh Debian machine with a Rust toolchain.

BINS := cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl
BIN_FLAGS := $(foreach bin,$(BINS),-p $(bin))
CARGO := cargo
PACKAGED = $(or $(BINARY),target/pgo/bin/quintlet)
QUICK_BIN_DIR := $(CURDIR)/target/quick
# Environment of a build that denies the lints of clippy. clippy is a compiler with lints, so this build is that of the tests, too.
LINTED := $(if $(shell command -v clippy-driver),RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings)
# The dependencies have these settings in each build (Cargo.toml), so that they are compiled once.
RELEASE_SEMANTICS := CARGO_PROFILE_DEV_OVERFLOW_CHECKS=false CARGO_PROFILE_DEV_DEBUG_ASSERTIONS=false
# Records the time of a step, for the table at the end of .ci/run.
STEP := scripts/step.sh

# Releases of Debian whose containerd `make test-runtimes` runs on: 1.7 and 2.
RUNTIMES := trixie sid
# Tests that every runtime must pass.
RUNTIME_TESTS := cdi:: start_stop:: exits:: manifests:: api::start kill:: races:: features:: housekeeping:: reboot:: resize::
# End-to-end tests wait for most of their time, so more tests run at a time than there are processors.
export NEXTEST_TEST_THREADS ?= $(shell echo $$((2 * $$(nproc))))
TEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo nextest run || echo test)
ifeq ($(TEST),test)
# Without nextest, tests are threads of one process, and nothing keeps those apart that need the machine for themselves.
export RUST_TEST_THREADS ?= 1
endif

.PHONY: all install build quick pgo dist test-dist check check-files test soak flaky fuzz test-skew test-chart test-takeover test-devices test-certificates test-rotation idle-writes conformance test-runtimes histories vm bench bench-cluster bench-scale profile profile-heap run

all: build

# Installs missing packages.
install:
	scripts/install.sh

# One binary with a link per service: the code that services share is in memory once.
build: install
	$(CARGO) build --locked --release -p quintlet
	scripts/shipped-names.py target/release/quintlet
	scripts/shipped-flags.sh target/release/quintlet
	scripts/shipped-size.sh target/release/quintlet
	for bin in $(BINS); do ln -sf quintlet target/release/$$bin; done

# The same binary without optimization, in target/quick: the profile of the tests, with the semantics of the release in the crates of this
# repository, where arithmetic wraps and debug assertions are off. It shares all dependencies with the tests (tests/support/features).
quick: install
	$(STEP) "binary" env $(RELEASE_SEMANTICS) $(CARGO) build --locked -p quintlet -p quintlet-test-features
	mkdir -p $(QUICK_BIN_DIR) && ln -f target/debug/quintlet $(QUICK_BIN_DIR)/quintlet
	for bin in $(BINS); do ln -sf quintlet $(QUICK_BIN_DIR)/$$bin; done

# The release optimized by counts of its own execution, in target/pgo/bin. Needs root and an idle machine; takes as long as three builds.
# PROFDATA=FILE repeats the build of another run, with its target/pgo/merged.profdata.
pgo: install
	BINS="$(BINS)" PROFDATA="$(PROFDATA)" scripts/pgo.sh

# Packages of the binary of `make pgo`, or of BINARY, in target/dist: a tarball, .deb, .rpm, bill of materials, checksums.
dist:
	scripts/install.sh dist
	scripts/shipped-names.py $(PACKAGED)
	scripts/shipped-flags.sh $(PACKAGED)
	scripts/dist.sh $(PACKAGED) target/dist

# Makes the packages twice, compares them, and installs the .deb files into a root of Debian. Needs root.
test-dist:
	scripts/install.sh dist
	tests/dist.sh $(PACKAGED)

# The gate. It needs PyPI once, for tools that are not installed. clippy is the compiler of the build that the tests use, too, so that
# each crate is compiled once.
check: install
	$(STEP) "format" $(CARGO) fmt --all --check
	clippy-driver --version
	$(STEP) "checks of files" $(MAKE) --no-print-directory check-files
	$(STEP) "build and lints" env $(LINTED) $(CARGO) build --workspace --all-targets --locked
	$(STEP) "documentation" env $(LINTED) scripts/doc.sh

# The checks that need no build, as many at a time as there are processors. All failures are reported, each check's output as a whole.
FILE_CHECKS := words docs helm-lint blocking parts comment-width unused-dependencies cargo-deny file-writes crate-lints module-graph public-paths paused-clock imports \
	systemd test-targets proto message-limits dockerfile shared-dependencies
check-files:
	$(MAKE) --no-print-directory --keep-going --output-sync=target -j$$(nproc) $(FILE_CHECKS:%=check-%)

CHECKS_OF_SCRIPTS := $(foreach check,$(FILE_CHECKS),$(if $(wildcard scripts/$(check).*),check-$(check)))
CHECKS_OF_TESTS := $(foreach check,$(FILE_CHECKS),$(if $(wildcard tests/$(check).*),check-$(check)))
.PHONY: $(FILE_CHECKS:%=check-%)
$(CHECKS_OF_SCRIPTS): check-%:
	$(wildcard scripts/$*.*)
$(CHECKS_OF_TESTS): check-%:
	$(wildcard tests/$*.*)
check-cargo-deny:
	$$(scripts/tool.sh cargo-deny) --locked --all-features check --hide-inclusion-graph bans licenses sources
check-proto:
	cd proto && buf=$$(../scripts/tool.sh buf) && $$buf lint && $$buf format --diff --exit-code && $$buf breaking --against baseline.binpb

# All tests, including those with a real containerd, which run the binary of `make quick`. Needs root. FAST=1: the tests that need neither
# that binary nor a minute. CHANGED=1: the tests of the crates that depend on what has changed since main or BASE. Both are for the work
# between two whole runs.
test:
	scripts/install.sh test
	$(STEP) "build of the tests" env $(LINTED) $(CARGO) build --workspace --all-targets --locked
ifdef FAST
	$(STEP) "fast tests" env $(LINTED) $(CARGO) nextest run --workspace --locked --profile fast
else ifdef CHANGED
	$(MAKE) --no-print-directory quick
	$(STEP) "tests of changes" env $(LINTED) QUINTLET_BIN_DIR=$(QUICK_BIN_DIR) $(CARGO) nextest run --workspace --locked --no-tests=pass -E "$$(scripts/changed.py $(BASE))"
else
	$(MAKE) --no-print-directory quick
	$(STEP) "shipped names" scripts/shipped-names.py $(QUICK_BIN_DIR)/quintlet
	$(STEP) "tests" env $(LINTED) QUINTLET_BIN_DIR=$(QUICK_BIN_DIR) $(CARGO) $(TEST) --workspace --locked
endif

# The tests whose budget is a number of cases, with a multiple of that of `make test`: properties, fuzz targets, histories. Takes hours.
soak: install
	env $(LINTED) QUINTLET_SOAK=1 QSIM_CASES=$(or $(CASES),5000) $(CARGO) nextest run --workspace --locked --profile soak

# Runs the tests that are new or were changed since main or BASE 20 times beside two busy loops (scripts/flaky.sh). Needs root.
flaky: quick
	env $(LINTED) QUINTLET_BIN_DIR=$(QUICK_BIN_DIR) scripts/flaky.sh

# Runs services of this version beside those of BASE, by default the commit at which the branch left main: each is replaced by the other one, in
# both directions, under pods that start and are probed. Needs root. Builds the crates of this repository a second time.
test-skew: install
	scripts/install.sh test
	$(STEP) "binary of the other version" scripts/other-binary.sh target/skew/bin $(BASE)
	$(MAKE) --no-print-directory quick
	$(STEP) "versions side by side" env $(LINTED) QUINTLET_BIN_DIR=$(QUICK_BIN_DIR) QUINTLET_OTHER_BIN_DIR=$(CURDIR)/target/skew/bin $(CARGO) nextest run --workspace --locked --run-ignored only -E 'package(quintlet-e2e) & test(/^skew::/)'

# Installs the chart in a cluster of this machine. KUBERNETES is a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler,
# kubelet and kubectl. Needs root.
test-chart: quick
	scripts/install.sh test
	$(STEP) "chart in a cluster" env BIN_DIR=$(QUICK_BIN_DIR) KUBERNETES=$(KUBERNETES) scripts/with-helm.sh tests/cluster/chart.sh

# Exchanges the agent of a node with pods of many kinds, from a kubelet to Quintlet and back, twice. KUBERNETES is as for test-chart. Needs root.
test-takeover: quick
	scripts/install.sh test
	env $(LINTED) $(CARGO) build --workspace --all-targets --locked
	$(STEP) "take-over" env BIN_DIR=$(QUICK_BIN_DIR) KUBERNETES=$(KUBERNETES) tests/cluster/takeover.sh

# Runs pods with the sample device plugin and the DRA test driver of Kubernetes, and kills each service 20 times. KUBERNETES has sample-device-plugin and
# dra-test-driver, too. Needs root.
test-devices: quick
	scripts/install.sh test
	$(STEP) "devices and claims" env BIN_DIR=$(QUICK_BIN_DIR) KUBERNETES=$(KUBERNETES) tests/cluster/devices.sh

# Runs pods with certificates of their own and with trust bundles at a real API server. KUBERNETES is as for test-chart, without a kubelet. Needs root.
test-certificates: quick
	scripts/install.sh test
	$(STEP) "certificates of pods" env BIN_DIR=$(QUICK_BIN_DIR) KUBERNETES=$(KUBERNETES) tests/cluster/certificates.sh

# Rotates client and serving certificates of a minute under open streams, at a real API server. KUBERNETES is as for test-certificates. Needs root.
test-rotation: quick
	scripts/install.sh test
	$(STEP) "rotation of certificates" env BIN_DIR=$(QUICK_BIN_DIR) KUBERNETES=$(KUBERNETES) tests/cluster/rotation.sh

# Measures for 20 minutes what a node at rest writes to its disk; STANDALONE=yes is a node without an API server. KUBERNETES is as for test-chart. Needs root.
idle-writes: build
	scripts/install.sh test
	$(STEP) "writes of a node at rest" env BIN_DIR=$(CURDIR)/target/release KUBERNETES=$(KUBERNETES) tests/cluster/idle-writes.sh

# Runs the upstream NodeConformance specs on a node of this machine (docs/conformance.md). KUBERNETES has e2e.test, ginkgo and agnhost, too. Needs root.
conformance: quick
	scripts/install.sh test
	$(STEP) "conformance" env BIN_DIR=$(QUICK_BIN_DIR) KUBERNETES=$(KUBERNETES) tests/cluster/conformance.sh

# Runs each fuzz target for 30 s, two at a time. Commit additions to tests/fuzz/corpus together with the fix.
fuzz:
	QUINTLET_FUZZ_SECONDS=30 $(CARGO) $(TEST) --locked -p quintlet-fuzz

# Runs the end-to-end tests that depend on the runtime, with containerd of other Debian releases. Installs none of them.
test-runtimes:
	scripts/install.sh test
	$(CARGO) build --locked --bins $(BIN_FLAGS)
	for release in $(RUNTIMES); do \
		containerd=$$(scripts/containerd.sh $$release) || exit 1; \
		$$containerd --version; \
		QUINTLET_CONTAINERD=$$containerd $(CARGO) $(TEST) --locked -p quintlet-e2e --test e2e -- $(RUNTIME_TESTS) || exit 1; \
		QUINTLET_CONTAINERD=$$containerd $(CARGO) $(TEST) --locked -p quintlet-localnode --test containerd || exit 1; \
	done

# Tests the node in a virtual machine, with the release. Needs root; docs/vm.md lists packages and cases. CASES="A B" runs some,
# FROM=CASE those from one on, ACCEL=kvm uses KVM. NUMA=yes CASES=devices runs what needs two NUMA nodes. KUBELET=FILE also runs the case replace.
vm: build
	scripts/install.sh vm
	scripts/install.sh dist
	$(CARGO) build --locked --release -p quintlet-testapi -p quintlet-device-plugin -p quintlet-dra-driver
	quota_test=$$($(CARGO) test --locked --no-run --lib -p pod-sync-direct-volumes 2>&1 | sed -n 's/.*Executable.*(\(.*\))$$/\1/p') && \
	BIN_DIR=$(CURDIR)/target/release QUOTA_TEST=$$quota_test CASES="$(CASES)" FROM="$(FROM)" ACCEL="$(ACCEL)" NUMA="$(NUMA)" KILLS="$(KILLS)" SEED="$(SEED)" KUBELET="$(KUBELET)" tests/vm/run.sh
	[ -n "$(CASES)" ] || BIN_DIR=$(CURDIR)/target/release CASES=devices ACCEL="$(ACCEL)" NUMA=yes tests/vm/run.sh
	[ -n "$(CASES)" ] || BIN_DIR=$(CURDIR)/target/release CASES=package ACCEL="$(ACCEL)" tests/vm/run.sh
	[ -n "$(CASES)" ] || [ -z "$(KUBELET)" ] || BIN_DIR=$(CURDIR)/target/release CASES=replace KUBELET="$(KUBELET)" ACCEL="$(ACCEL)" tests/vm/run.sh
	[ -n "$(CASES)" ] || BIN_DIR=$(CURDIR)/target/release CASES=power KILLS="$(KILLS)" SEED="$(SEED)" ACCEL="$(ACCEL)" tests/vm/run.sh

# Runs CASES random histories of a simulated node (`make test`: 60). A failure prints its seed. Needs root.
histories:
	QSIM_CASES=$(or $(CASES),2000) $(CARGO) test --locked -p quintlet-simulation --test simulation random:: -- --nocapture

# Measures the release, that of `make pgo` if it was built, and a kubelet beside a real control plane. KUBERNETES is as for test-chart. Needs root and an
# idle machine. ARGS="PODS=50 ROUNDS=1" are variables of the script.
bench-cluster: build
	scripts/install.sh test
	$(STEP) "costs in a cluster" env KUBERNETES=$(KUBERNETES) $(ARGS) tests/cluster/cost.sh

# Compares with the raw runtime in the same run, and with the kubelet that KUBELET names. Needs an idle machine.
# ARGS="--pods 20 --rounds 1" for a quick look.
bench: build
	$(CARGO) build --locked --release -p quintlet-e2e --bin bench
	mkdir -p target/bench
	target/release/bench $(if $(KUBELET),--kubelet $(KUBELET)) $(ARGS) > target/bench/result.json
	cat target/bench/result.json

# Samples each service during a burst of pods and its deletion: flame graphs, folded stacks and counts of system calls in target/profile.
# Needs an idle machine.
profile: build
	scripts/install.sh profile
	$(CARGO) install --locked --root target/tools inferno@0.12.8
	$(CARGO) build --locked --release -p quintlet-e2e --bin bench
	mkdir -p target/bench
	PATH=$(CURDIR)/target/tools/bin:$$PATH target/release/bench --rounds 1 --in-flight 16 --profile target/profile $(ARGS) > target/bench/profile.json
	ls target/profile

# Records where the services allocate memory during a burst of pods and its deletion: flame graphs of what is in use and of all
# allocations in target/profile. The build has a directory of its own, since the allocator has another feature.
profile-heap: install
	scripts/install.sh profile
	$(CARGO) install --locked --root target/tools inferno@0.12.8
	$(CARGO) build --locked --release -p quintlet-e2e --bin bench
	$(CARGO) build --locked --release -p quintlet --features heap-profile --target-dir target/heap
	for bin in $(BINS); do ln -sf quintlet target/heap/release/$$bin; done
	rm -rf target/profile/heap && mkdir -p target/profile/heap
	_RJEM_MALLOC_CONF=prof:true,prof_accum:true,lg_prof_sample:14,lg_prof_interval:24,prof_prefix:$(CURDIR)/target/profile/heap/dump \
		QUINTLET_BIN_DIR=$(CURDIR)/target/heap/release target/release/bench --rounds 1 --confined-rounds 0 --in-flight 16 --no-volumes $(ARGS) > /dev/null
	PATH=$(CURDIR)/target/tools/bin:$$PATH scripts/heap-graphs.sh target/heap/release/quintlet target/profile/heap target/profile

# Measures a relist of 18,000 containers on an in-memory runtime (CPU, memory, messages, latency of 50 watchers) and the lag of 1,000 HTTP
# and 200 exec probes, with ARGS such as --probe-instances 3 and --busy 4. Needs an idle machine.
bench-scale: build
	$(CARGO) build --locked --release -p quintlet-e2e --bin scale
	mkdir -p target/bench
	target/release/scale $(ARGS) > target/bench/scale.json
	cat target/bench/scale.json

# Runs the five services with a private containerd and the manifests of examples/. ONCE=1: ends when all pods have settled, and compares
# them with their annotations. CONFIG=FILE: the configuration of the services. After `make build`, BIN_DIR=target/release scripts/run.sh
# runs the release.
run: quick
	BIN_DIR=$(QUICK_BIN_DIR) ONCE=$(ONCE) CONFIG=$(CONFIG) scripts/run.sh
