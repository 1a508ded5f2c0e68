#!/usr/bin/env bash
# Compares the structures and constants of device/src/verbs/layout.rs with rdma-core's headers, and checks that a
# wrong offset and a wrong number are found. It needs a C compiler and python3; cmake and libclang are fetched once.
set -euo pipefail
cd "$(dirname "$0")/../.."

tools=$PWD/.cache/verbs-layout
if [ ! -x "$tools/bin/cmake" ]; then
    python3 -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check -r tests/verbs-layout/requirements.txt
fi
native=("$tools"/lib/python3*/site-packages/clang/native)
export VERBS_CMAKE=$tools/bin/cmake LIBCLANG_PATH=${native[0]} CMAKE=$PWD/tests/verbs-layout/cmake.sh
# The package of libclang lacks the compiler's own headers.
BINDGEN_EXTRA_CLANG_ARGS="-isystem $(cc -print-file-name=include)"
export BINDGEN_EXTRA_CLANG_ARGS
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}/verbs-layout

compare() { cargo check --quiet --locked --manifest-path "$1/tests/verbs-layout/Cargo.toml"; }

compare "$PWD"

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir -p "$copy/device/src/verbs" "$copy/tests"
cp -r tests/verbs-layout "$copy/tests/"

# Changes the layout in a copy. The comparison must fail there, and say what differs.
must_find() {
    sed "$1" device/src/verbs/layout.rs >"$copy/device/src/verbs/layout.rs"
    ! cmp -s device/src/verbs/layout.rs "$copy/device/src/verbs/layout.rs" || { echo "nothing was planted: $1" >&2; exit 1; }
    if compare "$copy" 2>"$copy/said" || ! grep -q "$2" "$copy/said"; then
        cat "$copy/said" >&2
        echo "the comparison did not find a planted mistake: $2" >&2
        exit 1
    fi
}
must_find 's/sgid_index: u8/@: u8/; s/hop_limit: u8/sgid_index: u8/; s/@: u8/hop_limit: u8/' 'offset of AhAttr.sgid_index'
must_find 's/SEND_SIGNALED: c_uint = 2/SEND_SIGNALED: c_uint = 4/' 'value of SEND_SIGNALED'
echo "the declarations of device/src/verbs/layout.rs are those of rdma-core"
