// Operations of all GPUs of one model: each has a part of every sum, and all of them need the sum.
//
// They access each other's memory (NVLink). Few rows are pushed (ranks.cuh). Many rows are divided: a GPU
// fetches the others' parts of its own rows, computes these rows and writes them to all GPUs. Flags say when
// parts may be fetched and when all rows are written.
//
// All GPUs launch the same kernels in the same order.
// See `docs/decisions/0013-gpus-add-parts.md`.
constexpr u32 FEW_THREADS = 1024, MANY_THREADS = 256, GATHER_THREADS = 256;
constexpr u32 READY = 0, DONE = RANKS_MAX;  // indices of flags, one for each sender

__device__ __forceinline__ void raise(u64 flag, u32 round) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(flag), "r"(round) : "memory");
}

__device__ __forceinline__ void await(u64 flag, u32 round, const Ranks& ranks) {
    u32 seen;
    Waiting waiting;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    } while ((int)(seen - round) < 0 && !is_lost(waiting, ranks));
}

template <u32 THREADS>
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (u32 warp = 0; warp < THREADS / 32; warp++) sum += of_warp[warp];
    return sum;
}

// === few rows ===

// One block of threads for each row.
template <u32 PARTS>
__device__ __forceinline__ void sum_few(bf16* out, bf16* residual, const bf16* part, const bf16* weight, float epsilon, const Inboxes& inboxes) {
    in_turn();
    u32 row = blockIdx.x, n_packets = inboxes.n_packets, width = n_packets * 4;
    u64 first = (u64)row * width;
    Four mine[PARTS];
    u32 before[PARTS];
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = i * FEW_THREADS + threadIdx.x;
        if (at >= n_packets) break;
        mine[i] = *reinterpret_cast<const Four*>(part + first + at * 4);
        before[i] = *inboxes.rounds_of(row, at);
        float x[4];
        widen4(x, mine[i]);
        inboxes.give(row, at, x, before[i]);
    }
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = i * FEW_THREADS + threadIdx.x;
        if (at >= n_packets) break;
        Four* kept = reinterpret_cast<Four*>(residual + first + at * 4);
        Four old = *kept;
        float sum[4];
        widen4(sum, mine[i]);
        inboxes.take(sum, row, at, before[i]);
        mine[i].pair[0] = narrow(sum[0] + low(old.pair[0]), sum[1] + high(old.pair[0]));
        mine[i].pair[1] = narrow(sum[2] + low(old.pair[1]), sum[3] + high(old.pair[1]));
        *kept = mine[i];
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            float a = low(mine[i].pair[j]), b = high(mine[i].pair[j]);
            squares += a * a + b * b;
        }
    }
    float scale = rsqrtf(block_sum<FEW_THREADS>(squares) / width + epsilon);
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = i * FEW_THREADS + threadIdx.x;
        if (at >= n_packets) break;
        Four by = *reinterpret_cast<const Four*>(weight + at * 4), normed;
#pragma unroll
        for (u32 j = 0; j < 2; j++)
            normed.pair[j] = narrow(low(mine[i].pair[j]) * scale * low(by.pair[j]), high(mine[i].pair[j]) * scale * high(by.pair[j]));
        *reinterpret_cast<Four*>(out + first + at * 4) = normed;
    }
}

// residual += the sum of all ranks' parts; out = norm(residual)
extern "C" __global__ void __launch_bounds__(FEW_THREADS)
sum_few_rows(bf16* out, bf16* residual, const bf16* part, const bf16* weight, float epsilon, const __grid_constant__ Inboxes inboxes) {
    if (inboxes.n_packets <= FEW_THREADS) sum_few<1>(out, residual, part, weight, epsilon, inboxes);
    else sum_few<4>(out, residual, part, weight, epsilon, inboxes);
}

// === many rows, and columns ===

// The state of flag rounds on each GPU: the current round, and the number of blocks of threads that have
// finished it.
struct Turn { u32 round, n_through; };

// Waits until all ranks have reached this round. Afterwards their earlier results may be fetched, and their
// output buffers may be written.
__device__ __forceinline__ void meet(u32 round, const OfRanks& flags, const Ranks& ranks) {
    u32 rank = threadIdx.x;
    bool is_other = rank < ranks.n && rank != ranks.me;
    if (blockIdx.x == 0 && is_other) {
        __threadfence_system();
        raise(flags.at[rank] + 4 * (READY + ranks.me), round);
    }
    if (is_other) await(flags.at[ranks.me] + 4 * (READY + rank), round, ranks);
    __syncthreads();
}

// The last block of threads tells the other ranks that this rank has written everything, and waits for the
// same from them.
__device__ __forceinline__ void part_from(u32 round, Turn* turn, const OfRanks& flags, const Ranks& ranks) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        is_last = atomicAdd(&turn->n_through, 1) == gridDim.x - 1;
        if (is_last) turn->n_through = 0, turn->round = round;
    }
    __syncthreads();
    u32 rank = threadIdx.x;
    if (!is_last || rank >= ranks.n || rank == ranks.me) return;
    __threadfence_system();
    raise(flags.at[rank] + 4 * (DONE + ranks.me), round);
    await(flags.at[ranks.me] + 4 * (DONE + rank), round, ranks);
}

// One block of threads for each of this rank's rows: every n-th row.
template <u32 PARTS>
__device__ __forceinline__ void sum_many(const OfRanks& outs, bf16* residual, const OfRanks& parts, const bf16* weight, u32 width,
                                         float epsilon, const Ranks& ranks) {
    u64 first = ((u64)blockIdx.x * ranks.n + ranks.me) * width;
    Eight part[PARTS];
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = (i * MANY_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        Eight old = load8(residual + first + at);
        float sum[8] = {};
        for (u32 rank = 0; rank < ranks.n; rank++) {
            Eight x = once8(reinterpret_cast<const bf16*>(parts.at[rank]) + first + at);
#pragma unroll
            for (u32 j = 0; j < 4; j++) sum[2 * j] += low(x.pair[j]), sum[2 * j + 1] += high(x.pair[j]);
        }
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            part[i].pair[j] = narrow(sum[2 * j] + low(old.pair[j]), sum[2 * j + 1] + high(old.pair[j]));
            float a = low(part[i].pair[j]), b = high(part[i].pair[j]);
            squares += a * a + b * b;
        }
        store8(residual + first + at, part[i]);
    }
    float scale = rsqrtf(block_sum<MANY_THREADS>(squares) / width + epsilon);
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = (i * MANY_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        Eight by = load8(weight + at), normed;
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            normed.pair[j] = narrow(low(part[i].pair[j]) * scale * low(by.pair[j]), high(part[i].pair[j]) * scale * high(by.pair[j]));
        for (u32 rank = 0; rank < ranks.n; rank++) store8(reinterpret_cast<bf16*>(outs.at[rank]) + first + at, normed);
    }
}

// Like sum_few_rows, but each rank keeps the residual of its own rows only.
extern "C" __global__ void __launch_bounds__(MANY_THREADS)
sum_many_rows(const __grid_constant__ OfRanks outs, bf16* residual, const __grid_constant__ OfRanks parts, const bf16* weight,
              u32 n_rows, u32 width, float epsilon, const __grid_constant__ OfRanks flags, Turn* turn,
              const __grid_constant__ Ranks ranks) {
    in_turn();
    u32 round = turn->round + 1;
    meet(round, flags, ranks);
    if (blockIdx.x * ranks.n + ranks.me < n_rows) {
        if (width <= MANY_THREADS * 8) sum_many<1>(outs, residual, parts, weight, width, epsilon, ranks);
        else if (width <= 2 * MANY_THREADS * 8) sum_many<2>(outs, residual, parts, weight, width, epsilon, ranks);
        else sum_many<8>(outs, residual, parts, weight, width, epsilon, ranks);
    }
    part_from(round, turn, flags, ranks);
}

// Each rank has some columns of every row, all ranks the same number. All ranks get all columns. Padding
// columns of the last rank are left out.
extern "C" __global__ void __launch_bounds__(GATHER_THREADS)
gather_columns(const __grid_constant__ OfRanks outs, const float* part, u32 n_rows, u32 part_width, u32 width,
               const __grid_constant__ OfRanks flags, Turn* turn, const __grid_constant__ Ranks ranks) {
    in_turn();
    u32 round = turn->round + 1, n_fours = part_width / 4, first = ranks.me * part_width;
    meet(round, flags, ranks);
    u64 n_all = (u64)n_rows * n_fours;
    for (u64 nth = (u64)blockIdx.x * GATHER_THREADS + threadIdx.x; nth < n_all; nth += (u64)gridDim.x * GATHER_THREADS) {
        u32 row = nth / n_fours, column = first + nth % n_fours * 4;
        if (column >= width) continue;
        float4 four = reinterpret_cast<const float4*>(part)[nth];
        for (u32 rank = 0; rank < ranks.n; rank++)
            reinterpret_cast<float4*>(outs.at[rank])[((u64)row * width + column) / 4] = four;
    }
    part_from(round, turn, flags, ranks);
}
