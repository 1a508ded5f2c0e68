#!/usr/bin/env bash
# Makes the table of docs/measurements/two-gpus.md, on a machine with two GPUs, from a built executable: one prefill
# and one decode node over each connector, two colocated nodes, and the effect of prompts on running streams.
# Usage: bench/two-gpus.sh OUT [BATON]       reports go to OUT, one JSON file each
# PREFILL_STAGES=2 gives the prefill node two pipeline stages; the second one shares the decode node's GPU.
# PARTS chooses: "ipc picture seeds colocated disturbance kills nccl tcp shm" by default. "never-worse" measures the table
# of docs/measurements/never-worse.md. It starts four nodes on the two GPUs: one prefill node and one decode node, and two
# colocated nodes. Then it sends the same load to the first pair and to the second pair, in turn. "processes" measures a
# node with two pipeline stages twice: first both stages run in one process, then each stage runs in a process of its own.
# "four" needs four GPUs, and the Mooncake conversation trace in DATA. It compares two prefill and two decode nodes with
# four colocated nodes.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 baton=${2:-target/release/baton}
parts=${PARTS:-ipc picture seeds colocated disturbance kills nccl tcp shm}
shape=${SHAPE:-bench/shapes/llama-3.1-8b}
devices=(${DEVICES:-cuda:0 cuda:1})
prompt=${PROMPT:-8192} answer=${ANSWER:-256} rates=${RATES:-1 3 5}
url=http://127.0.0.1:8000
mkdir -p "$out"

export BATON_EXPERT__MODEL__LOAD_FORMAT=dummy BATON_MODEL__KV_MEMORY=${KV_MEMORY:-40GiB}
# A prompt is one step on a prefill node. Waiting prompts queue in the node.
export BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=${STEP_TOKENS:-8192} BATON_EXPERT__SCHEDULER__QUEUE_MS_MAX=60000
export BATON_LOG__LEVEL=${LEVEL:-warn}

pids=()
node() { # ROLE DEVICE PORT [VARIABLE=VALUE…]
    local role=$1 device=$2 id=$1-$3
    shift 3
    env BATON_NODE__ID="$id" BATON_MODEL__PATH="$shape" BATON_MODEL__DEVICE="$device" "$@" \
        "$baton" "$role" >>"$out/$id.log" 2>&1 &
    pids+=($!)
}

# Starts a router beside the nodes started before. The first start on a GPU takes longer, because products are
# measured.
serve() { # NODES [VARIABLE=VALUE…]
    local n_nodes=$1
    shift
    # The variables for nodes are no settings of a router.
    env -i PATH="$PATH" HOME="${HOME:-/tmp}" BATON_LOG__LEVEL="$BATON_LOG__LEVEL" BATON_ROUTER__WAIT_MS=120000 "$@" \
        "$baton" router >>"$out/router.log" 2>&1 &
    pids+=($!)
    for _ in $(seq 300); do
        ready=$(curl -s $url/debug/cluster | grep -o '"state": *"ready"' | wc -l)
        [ "$ready" -ge "$n_nodes" ] && return 0
        sleep 0.5
    done
    echo "the nodes were not ready" >&2
    return 1
}

stop() {
    kill "${pids[@]}" 2>/dev/null
    wait "${pids[@]}" 2>/dev/null
    pids=()
}
trap stop EXIT

bench() { # NAME ARGUMENT…
    local name=$1
    shift
    timeout "${PATIENCE:-150}" "$baton" bench serve --url $url --seed "${SEED:-1}" --quiet --label "$name" --out "$out/$name.json" "$@" \
        >"$out/$name.txt" 2>&1
    local code=$?
    echo "== $name: $code" && tail -n 24 "$out/$name.txt"
    # Exit code 3: the report explains why it is not valid.
    [ $code -eq 0 ] || [ $code -eq 3 ]
}

rates() { # NAME RATE…
    local name=$1
    shift
    bench "$name-warm" --concurrency 2 --requests 4 --input-tokens "$prompt" --output-tokens 32 || return
    for rate in "$@"; do
        bench "$name-${rate}rps" --arrivals "bench/traces/arrivals_${rate}rps.txt" --requests 60 \
            --input-tokens "$prompt" --output-tokens "$answer" --slo ttft=2s,tbt=25ms
    done
}

pair() { # CONNECTOR
    node prefill "${devices[0]}" 0 "BATON_TRANSFER__CONNECTORS=[\"$1\"]" "BATON_EXPERT__MODEL__GPU_ARCH=${PREFILL_ARCH:-}" \
        "BATON_EXPERT__MODEL__STAGES=${PREFILL_STAGES:-1}"
    node decode "${devices[1]}" 0 "BATON_TRANSFER__CONNECTORS=[\"$1\"]"
    serve 2
}

# 32 streams decode all the time, without and with a prompt of eight output tokens every 400 ms.
disturbance() {
    local steady=(--concurrency 32 --requests 32 --input-tokens 1024 --output-tokens 2200)
    bench steady "${steady[@]}"
    bench disturbed "${steady[@]}" &
    sleep 3
    bench disturbing --rate 2.5 --process constant --requests 30 --input-tokens "$prompt" --output-tokens 8 >/dev/null
    wait $!
}

# Draws one request of the 3 req/s run. The nodes log each mark of the walk, so it is a separate run.
picture() {
    local logs=(BATON_LOG__FORMAT=json BATON_LOG__LEVEL=warn,walk=trace)
    node prefill "${devices[0]}" picture 'BATON_TRANSFER__CONNECTORS=["cuda-ipc"]' "${logs[@]}"
    node decode "${devices[1]}" picture 'BATON_TRANSFER__CONNECTORS=["cuda-ipc"]' "${logs[@]}"
    serve 2 "${logs[@]}" || return
    rates picture 3
    bench/timeline.py "$out/one-request.svg" "$out/router.log" "$out"/*-picture.log
}

# Four GPUs: separate prefill and decode nodes, and four nodes that do both, on a window of a recorded conversation
# trace.
four() {
    local slow load
    devices=(${DEVICES:-cuda:0 cuda:1 cuda:2 cuda:3})
    load=(--workload mooncake --data "$DATA" --input-max "${INPUT_MAX:-16384}" --output-max "$answer"
        --warmup 5s --slo ttft=2s,tbt=25ms)
    for shape_of in apart colocated; do
        for nth in 0 1; do
            if [ $shape_of = apart ]; then
                node prefill "${devices[nth]}" $nth 'BATON_TRANSFER__CONNECTORS=["cuda-ipc"]'
                node decode "${devices[nth + 2]}" $nth 'BATON_TRANSFER__CONNECTORS=["cuda-ipc"]'
            else
                local chunks=BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=${COLOCATED_STEP_TOKENS:-2048}
                node both "${devices[nth]}" $nth "$chunks" && node both "${devices[nth + 2]}" $((nth + 2)) "$chunks"
            fi
        done
        serve 4 || return
        bench "four-$shape_of-warm" --concurrency 8 --requests 16 --input-tokens "$prompt" --output-tokens 32
        for slow in ${SLOWDOWNS:-1 0.5}; do
            bench "four-$shape_of-slowdown-$slow" "${load[@]}" --slowdown "$slow" \
                --requests "$(awk "BEGIN { print int(${WINDOW:-45} * 3.4 / $slow) }")"
        done
        stop
    done
}

# Fixed arms against the policy `cost`: a pair of nodes with all prompts on the prefill node, two colocated nodes, and
# the pair under `cost`, with steps of the decode node bounded to GAP_MS.
never_worse() {
    local kv=$BATON_MODEL__KV_MEMORY apart=BATON_REGISTRY__URL=embedded://127.0.0.1:50061 nth
    local addresses=(BATON_ROUTER__HTTP=127.0.0.1:8010 BATON_ROUTER__ADMIN=127.0.0.1:8011 BATON_ROUTER__GRPC=127.0.0.1:50061)
    local chunks=BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=${COLOCATED_STEP_TOKENS:-2048}
    export BATON_MODEL__KV_MEMORY=${NEVER_WORSE_KV:-14GiB}
    node prefill "${devices[0]}" 0 'BATON_TRANSFER__CONNECTORS=["cuda-ipc"]'
    node decode "${devices[1]}" 0 'BATON_TRANSFER__CONNECTORS=["cuda-ipc"]' "$chunks" \
        "BATON_EXPERT__SCHEDULER__GAP_MS_MAX=${GAP_MS:-25}"
    for nth in 0 1; do node both "${devices[nth]}" $nth "$apart" "$chunks"; done
    serve 2 BATON_ROUTER__POLICY=least-loaded || return
    never_worse_rows remote
    kill "${pids[-1]}" && wait "${pids[-1]}" && unset "pids[-1]"
    serve 2 BATON_ROUTER__POLICY=cost || return
    never_worse_rows cost
    curl -s "$url/debug/cluster" >"$out/cost-cluster.json"
    curl -s "$url/metrics" | grep -E "^baton_router_(routes|route_)" >"$out/cost-metrics.txt"
    # The worst gap of each request, with the steps in it, and the predicted times of its route.
    ROWS="long summary" never_worse_rows cost-explained --explain
    url=http://127.0.0.1:8010
    serve 2 BATON_ROUTER__POLICY=least-loaded "${addresses[@]}" || return
    never_worse_rows colocated
    export BATON_MODEL__KV_MEMORY=$kv
}

never_worse_rows() { # NAME [ARGUMENT…]
    local row name arguments
    bench "$1-warm" --concurrency 4 --requests 24 --input-tokens lognormal:3000,0.8 --output-tokens 64
    for row in \
        "mixed --rate 4 --requests 120 --input-tokens lognormal:3000,0.8 --output-tokens lognormal:120,0.6" \
        "long --arrivals bench/traces/arrivals_3rps.txt --requests 60 --input-tokens 8192 --output-tokens 256" \
        "chat --rate 12 --requests 240 --input-tokens lognormal:600,0.6 --output-tokens 200" \
        "prefix --workload shared-prefix --prefix-groups 8 --prefix-tokens 4000 --rate 6 --requests 120 --input-tokens 500 --output-tokens 128" \
        "summary --rate 2.5 --requests 60 --input-tokens lognormal:6000,0.5 --output-tokens 32"; do
        read -r name arguments <<<"$row"
        case " ${ROWS:-$name} " in *" $name "*) ;; *) continue ;; esac
        # shellcheck disable=SC2086
        bench "$1-$name" $arguments --slo ttft=2s,tbt=25ms "${@:2}"
    done
}

# Two pipeline stages in one process, and in two: one sequence, and prompts that wait for each other.
processes() {
    local kind join=127.0.0.1:7411
    export BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=2048
    for kind in ${KINDS:-one several}; do
        if [ "$kind" = one ]; then
            node both "${devices[0]}" 0 BATON_EXPERT__MODEL__STAGES=2
        else
            local group=(BATON_EXPERT__MODEL__PROCESSES=2 "BATON_EXPERT__MODEL__JOIN=$join" 'BATON_TRANSFER__CONNECTORS=["tcp"]')
            node both "${devices[1]}" 1 "${group[@]}"
            node rank "${devices[0]}" 1 "${group[@]}" "BATON_RANK_OF=$join" BATON_RANK_PLACE=0
        fi
        serve 1 || return
        bench "$kind-warm" --concurrency 4 --requests 8 --input-tokens 4096 --output-tokens 32 &&
            bench "$kind-alone" --concurrency 1 --requests 6 --input-tokens 1024 --output-tokens 256 &&
            bench "$kind-first" --concurrency 1 --requests 6 --input-tokens 8192 --output-tokens 2 &&
            bench "$kind-backlog" --concurrency 16 --requests 48 --input-tokens 8192 --output-tokens 1 &&
            bench "$kind-streams" --concurrency 256 --requests 512 --input-tokens 256 --output-tokens 128
        stop
    done
    export BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=${STEP_TOKENS:-8192}
}

# The same rate with other arrival times.
seeds() { # RATE
    for seed in 2 3 4 5 6; do
        SEED=$seed bench "ipc-${1}rps-seed$seed" --rate "$1" --requests 60 --input-tokens "$prompt" \
            --output-tokens "$answer" --slo ttft=2s,tbt=25ms
    done
}

# Two nodes of each kind. One is killed while streams run: all streams must complete.
kills() {
    local kv=$BATON_MODEL__KV_MEMORY wire='BATON_TRANSFER__CONNECTORS=["cuda-ipc"]'
    export BATON_MODEL__KV_MEMORY=20GiB
    for nth in 0 1; do
        node prefill "${devices[0]}" $nth "$wire" && node decode "${devices[1]}" $nth "$wire"
    done
    serve 4 || return
    bench kills-warm --concurrency 4 --requests 8 --input-tokens 2048 --output-tokens 32
    bench kills --concurrency 16 --requests 64 --input-tokens 2048 --output-tokens "$answer" &
    sleep 4 && kill -9 "${pids[1]}" && sleep 3 && kill -9 "${pids[0]}"
    wait $!
    export BATON_MODEL__KV_MEMORY=$kv
}

for part in $parts; do
    case $part in
        ipc) pair cuda-ipc && rates ipc $rates ;;
        nccl) pair nccl && rates nccl $rates ;;
        tcp) pair tcp && rates tcp 3 ;;
        shm) pair shm && rates shm 3 ;;
        colocated)
            # Prompts in chunks, because the node also decodes.
            export BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=${COLOCATED_STEP_TOKENS:-2048}
            node both "${devices[0]}" 0 && node both "${devices[1]}" 1 && serve 2 && rates colocated $rates
            export BATON_EXPERT__SCHEDULER__STEP_TOKENS_MAX=${STEP_TOKENS:-8192}
            ;;
        picture) picture ;;
        four) four ;;
        never-worse) never_worse ;;
        processes) processes ;;
        seeds) pair cuda-ipc && seeds 3 ;;
        kills) kills ;;
        disturbance) pair cuda-ipc && disturbance ;;
    esac
    stop
done
