#!/usr/bin/env bash
# compute-sanitizer over every kernel, on a machine with a GPU: memcheck (accesses out of bounds) and racecheck (shared memory
# that two threads touch in no order). The checks are gpu_check's, of the small sizes: each access costs a hundredfold.
# Usage: bench/gpu-sanitize.sh OUT [GPU_CHECK]     a log for each tool and part goes to OUT
# TOOLS and PARTS choose; PATIENCE is what one of them may take, in seconds. All parts of a tool run at once.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 check=${2:-target/release/examples/gpu_check}
tools=${TOOLS:-memcheck racecheck} parts=${PARTS:-rows products fp8 attention sample}
mkdir -p "$out"

command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH" >&2; exit 2; }
# Compiled once, and right without the tool: what it finds is then the kernels' own.
words=(--measure no --small yes --cache "$out/cache")
for part in $parts; do
    timeout "${PATIENCE:-120}" "$check" "${words[@]}" --only "$part" >"$out/plain-$part.log" 2>&1 ||
        { tail -n 5 "$out/plain-$part.log" >&2; exit 1; }
done

failed=0
for tool in $tools; do
    declare -A pids=()
    for part in $parts; do
        timeout "${PATIENCE:-120}" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
            "$check" "${words[@]}" --only "$part" >"$out/$tool-$part.log" 2>&1 &
        pids[$part]=$!
    done
    for part in $parts; do
        wait "${pids[$part]}"
        code=$?
        [ $code -eq 0 ] || failed=1
        echo "$tool, $part: $code; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$tool-$part.log" | tail -n 1)"
    done
done
exit $failed
