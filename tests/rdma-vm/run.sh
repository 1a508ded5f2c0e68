#!/usr/bin/env bash
# Runs the tests of the rdma connector in a VM with RDMA devices, over Soft-RoCE. See README.md beside this file.
# Usage: run.sh [NAME...]   parts of the job: verbs conformance walk; all of them by default
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=$PWD/.cache/rdma-vm
harness=$PWD/tests/rdma-vm
parts=("$@")
[ $# -gt 0 ] || parts=(verbs conformance walk)
jobs=$(mktemp -d "${TMPDIR:-/tmp}/rdma-jobs.XXXXXX")
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$jobs"' EXIT

# Puts a program into one of the VMs, without its debug information and with its libraries.
put() {
    local job=$jobs/$1 library
    mkdir -p "$job/job"
    strip -o "$job/job/$3" "$2"
    for library in $(ldd "$2" | grep -oE '/[^ ]+'); do
        mkdir -p "$job$(dirname "$library")" && cp -L "$library" "$job$library"
    done
}

# The executable of an integration test. It is built like the other tests in test.sh, so that both share one build.
test_called() {
    cargo test --quiet --workspace --features baton-tests/mutations --test "$1" --no-run --message-format=json \
        | grep -o '"executable":"[^"]*/'"$1"'-[^"]*"' | tail -1 | cut -d'"' -f4
}

# Several calls at once would build the same cache.
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if ! cat "$harness/prepare.sh" "$harness/init" | cmp -s - "$cache/built-by"; then
    "$harness/prepare.sh" "$cache"
fi
flock -u 9

# Two VMs, each on its own core: one for the connector alone, one for whole nodes.
for part in "${parts[@]}"; do
    vm=wire
    case $part in
        verbs) put wire "$(test_called verbs)" verbs ;;
        conformance) put wire "$(test_called rdma)" conformance ;;
        walk)
            vm=walk
            cargo build --quiet --package baton --features gguf
            put walk "${CARGO_TARGET_DIR:-$PWD/target}/debug/baton" baton
            put walk "$(test_called rdma_walk)" walk
            # Its models, where the test looks for them.
            mkdir -p "$jobs/walk$PWD/tests" "$jobs/walk$PWD/engine/tests/models"
            cp -r tests/mocks "$jobs/walk$PWD/tests/"
            cp -r engine/tests/models/llama "$jobs/walk$PWD/engine/tests/models/"
            ;;
        *) echo "there is no part $part" >&2 && exit 2 ;;
    esac
    echo "$part" >>"$jobs/$vm/job/parts"
done

boot() {
    cp "$harness/job" "$jobs/$1/job/run"
    "$harness/boot.sh" "$cache" "$jobs/$1" "${TEST_VM_SECONDS:-900}"
}

status=0
if [ -d "$jobs/walk" ] && [ -d "$jobs/wire" ]; then
    boot walk >"$jobs/said" 2>&1 &
    boot wire || status=$?
    wait $! || status=$?
    cat "$jobs/said"
else
    for one in "$jobs"/w*; do boot "$(basename "$one")" || status=$?; done
fi
exit $status
