#!/usr/bin/env bash
# Runs compute-sanitizer over every kernel, on a machine with a GPU: memcheck (accesses out of bounds) and racecheck
# (races in shared memory). The checks are those of gpu_check with small sizes, because each access takes a hundred
# times as long.
# Usage: bench/gpu-sanitize.sh OUT [EXAMPLES]     a log for each tool and part goes to OUT; EXAMPLES has gpu_check and
# gpu_wire
# TOOLS and PARTS choose; `ranks` and `wire` need two GPUs, `many_rows` a Hopper GPU. PATIENCE is the longest time of
# one part in seconds. All parts of a tool run at once.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 examples=${2:-target/release/examples}
tools=${TOOLS:-memcheck racecheck} parts=${PARTS:-rows products many_rows endings fp8 attention sample ranks wire}
mkdir -p "$out"

command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH" >&2; exit 2; }
words_of() {
    case $1 in
        wire) words=("$examples/gpu_wire" --small yes --cache "$out/cache") ;;
        *) words=("$examples/gpu_check" --measure no --small yes --cache "$out/cache" --only "$1") ;;
    esac
}
# Compiled once, and correct without the tool: findings then come from the kernels.
for part in $parts; do
    words_of "$part"
    timeout "${PATIENCE:-120}" "${words[@]}" >"$out/plain-$part.log" 2>&1 ||
        { tail -n 5 "$out/plain-$part.log" >&2; exit 1; }
done

failed=0
for tool in $tools; do
    declare -A pids=()
    for part in $parts; do
        words_of "$part"
        timeout "${PATIENCE:-120}" compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
            "${words[@]}" >"$out/$tool-$part.log" 2>&1 &
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
