#!/usr/bin/env bash
# Runs the tests of the rdma connector in a VM that has RDMA devices, over Soft-RoCE. See README.md beside this file.
# Usage: run.sh [NAME...]   only these of the job's parts: verbs conformance
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=$PWD/.cache/rdma-vm
harness=$PWD/tests/rdma-vm
parts=("$@")
[ $# -gt 0 ] || parts=(verbs conformance)
job=$(mktemp -d "${TMPDIR:-/tmp}/rdma-job.XXXXXX")
trap 'rm -rf "$job"' EXIT

# Puts a program into the VM, without its debug information and with the libraries that it is linked to.
put() {
    local library
    mkdir -p "$job/job"
    strip -o "$job/job/$2" "$1"
    for library in $(ldd "$1" | grep -oE '/[^ ]+'); do
        mkdir -p "$job$(dirname "$library")" && cp -L "$library" "$job$library"
    done
}

# The executable of one of a package's integration tests.
test_of() {
    cargo test --quiet --package "$1" --test "$2" --no-run --message-format=json \
        | grep -o '"executable":"[^"]*/'"${2//-/_}"'-[^"]*"' | tail -1 | cut -d'"' -f4
}

# Several calls at once would build the same cache.
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if ! cat "$harness/prepare.sh" "$harness/init" | cmp -s - "$cache/built-by"; then
    "$harness/prepare.sh" "$cache"
fi
flock -u 9

for part in "${parts[@]}"; do
    case $part in
        verbs) put "$(test_of baton-kernels verbs)" verbs ;;
        conformance) put "$(test_of baton-kv-transfer rdma)" conformance ;;
        *) echo "there is no part $part" >&2 && exit 2 ;;
    esac
done
cp "$harness/job" "$job/job/run"
printf '%s\n' "${parts[@]}" >"$job/job/parts"
"$harness/boot.sh" "$cache" "$job" "${TEST_VM_SECONDS:-600}"
