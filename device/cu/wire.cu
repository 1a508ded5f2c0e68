// Copies KV between two GPUs: runs of bytes, from and to mapped addresses, digested in the same pass.
//
// A page is [K|V][kv_head][token][dim]. A warp takes one head's K and V in one page: two runs of contiguous
// bytes, in steps of 2 KiB of each. The next steps are already in flight, so few multiprocessors fill a link
// with a latency of microseconds. If the two sides divide heads differently among ranks, only some
// neighbouring heads of each page are moved. The distance from K's run to V's then depends on the page's
// other heads.
// From sm_90 on, the multiprocessor's copy engine moves the bytes through shared memory. On older GPUs each
// lane moves 16 bytes at a time.
//
// The digest is XXH3-64 with the default secret, the same as on the CPU. Its 8 sums over a block of 1 KiB are
// sums over stripes of 64 bytes, in any order: a group of 4 lanes takes half a block, each lane 2 of the 8
// sums. Only the mixing between blocks is serial.
//
// Tables and digests are in host memory: they are small, and no further copy is needed.
constexpr u32 WIRE_STEP = 2048;       // bytes of each run in one step: 2 blocks
constexpr u32 WIRE_BLOCKS = WIRE_STEP / 1024;
constexpr u32 WIRE_WARPS = 16;        // in a block of threads
constexpr u32 WIRE_PAGES_MAX = 1024;  // in one launch

constexpr u64 P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr u64 P64_1 = 0x9E3779B185EBCA87ull, P64_2 = 0xC2B2AE3D27D4EB4Full, P64_3 = 0x165667B19E3779F9ull;
constexpr u64 P64_4 = 0x85EBCA77C2B2AE63ull, P64_5 = 0x27D4EB2F165667C5ull;
constexpr u64 MX_1 = 0x165667919E3779F9ull, MX_2 = 0x9FB21C651E98DF25ull;

__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// 8 bytes of the secret, from any byte.
__device__ __forceinline__ u64 secret(u32 at) {
    u32 word = at / 8, shift = at % 8 * 8;
    u64 low = SECRET[word];
    return shift == 0 ? low : low >> shift | SECRET[word + 1] << (64 - shift);
}

struct alignas(16) Sixteen { u64 low, high; };

__device__ __forceinline__ Sixteen once16(const unsigned char* from) {
    Sixteen bytes;
    asm volatile("ld.global.L1::no_allocate.v2.u64 {%0, %1}, [%2];" : "=l"(bytes.low), "=l"(bytes.high) : "l"(from) : "memory");
    return bytes;
}

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }
__device__ __forceinline__ u64 turn(u64 x, u32 by) { return x << by | x >> (64 - by); }
__device__ __forceinline__ u64 avalanche(u64 h) {
    h = (h ^ h >> 37) * MX_1;
    return h ^ h >> 32;
}
__device__ __forceinline__ u64 swapped(u64 x) {
    return (u64)__byte_perm((u32)x, 0, 0x0123) << 32 | __byte_perm((u32)(x >> 32), 0, 0x0123);
}
__device__ __forceinline__ u64 mix16(const unsigned char* at, u32 key) {
    Sixteen bytes = *reinterpret_cast<const Sixteen*>(at);
    return fold(bytes.low ^ secret(key), bytes.high ^ secret(key + 8));
}

// The digest of 16 bytes. It also combines the digests of K and V.
__device__ __forceinline__ u64 digest_16(u64 low, u64 high) {
    low ^= secret(24) ^ secret(32);
    high ^= secret(40) ^ secret(48);
    return avalanche(16 + swapped(low) + high + fold(low, high));
}
__device__ __forceinline__ u64 digest_8(u64 word) {
    u64 h = turn(word, 32) ^ secret(8) ^ secret(16);
    h ^= turn(h, 49) ^ turn(h, 24);
    h *= MX_2;
    h ^= (h >> 35) + 8;
    h *= MX_2;
    return h ^ h >> 28;
}

// The digest of at most 240 bytes, a multiple of 16. One lane computes it.
__device__ u64 digest_short(const unsigned char* at, u32 len) {
    if (len == 16) {
        Sixteen bytes = *reinterpret_cast<const Sixteen*>(at);
        return digest_16(bytes.low, bytes.high);
    }
    u64 sum = len * P64_1;
    if (len <= 128) {
        for (u32 pair = 0; pair < (len + 31) / 32; pair++) {
            sum += mix16(at + 16 * pair, 32 * pair);
            sum += mix16(at + len - 16 - 16 * pair, 32 * pair + 16);
        }
        return avalanche(sum);
    }
    for (u32 i = 0; i < 8; i++) sum += mix16(at + 16 * i, 16 * i);
    sum = avalanche(sum);
    for (u32 i = 8; i < len / 16; i++) sum += mix16(at + 16 * i, 16 * (i - 8) + 3);
    return avalanche(sum + mix16(at + len - 16, 136 - 17));
}

// Accumulates this lane's part of a stripe into its two sums; the data is added crosswise.
__device__ __forceinline__ void accumulate(u64 (&sum)[2], Sixteen bytes, u64 low_key, u64 high_key) {
    u64 low = bytes.low ^ low_key, high = bytes.high ^ high_key;
    sum[0] += bytes.high + (u64)(u32)low * (u32)(low >> 32);
    sum[1] += bytes.low + (u64)(u32)high * (u32)(high >> 32);
}

// The role of a lane: it sums words 2 * pair and 2 * pair + 1 of half a block of K or of V, with these keys.
//
// The two halves visit their stripes in different orders, to avoid bank conflicts in shared memory.
struct WireLane {
    u32 lane, pair, half, block, part;
    u64 keys[8][2], last[2], scramble[2], merge[2], first[2];

    __device__ __forceinline__ explicit WireLane(u32 nth) : lane(nth), pair(nth % 4), half(nth / 4 % 2), block(nth / 8 % 2), part(nth / 16) {
#pragma unroll
        for (u32 word = 0; word < 2; word++) {
            u32 at = 8 * (2 * pair + word);
#pragma unroll
            for (u32 i = 0; i < 8; i++) keys[i][word] = secret(8 * stripe(i) + at);
            last[word] = secret(121 + at);
            scramble[word] = secret(128 + at);
            merge[word] = secret(11 + at);
        }
        first[0] = pair == 0 ? P32_3 : pair == 1 ? P64_2 : pair == 2 ? P64_4 : P64_5;
        first[1] = pair == 0 ? P64_1 : pair == 1 ? P64_3 : pair == 2 ? P32_2 : P32_1;
    }

    __device__ __forceinline__ u32 stripe(u32 i) const { return 8 * half + (i ^ half); }
};

// The state of the digests of a head's two runs. All lanes take part; lanes with the same pair and part hold
// the same state.
struct WireDigest {
    u64 sums[2];
    u32 valid, n_blocks, n_stripes;  // whole blocks before the last one, and its stripes before the last stripe

    __device__ __forceinline__ void begin(WireLane const& lane, u32 valid_bytes) {
        sums[0] = lane.first[0];
        sums[1] = lane.first[1];
        valid = valid_bytes;
        n_blocks = (valid - 1) / 1024;
        n_stripes = (valid - 1) % 1024 / 64;
    }

    // Adds the bytes of a step at `start` of this lane's run. `run` is the start of the whole run.
    __device__ __forceinline__ void take(WireLane const& lane, const unsigned char* bytes, const unsigned char* run, u32 start) {
        u32 first_block = start / 1024;
        if (valid <= 240 || first_block > n_blocks) return;
        u32 block = first_block + lane.block;
        u32 n_here = block < n_blocks ? 16 : block == n_blocks ? n_stripes : 0;
        const unsigned char* mine = bytes + lane.block * 1024 + lane.pair * 16;
        u64 part[2] = {0, 0};
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 stripe = lane.stripe(i);
            if (stripe < n_here) accumulate(part, at(mine + stripe * 64), lane.keys[i][0], lane.keys[i][1]);
        }
        // The last stripe is the last 64 bytes, at any alignment.
        if (block == n_blocks && n_stripes / 8 == lane.half) {
            const unsigned char* end = valid % 64 == 0 ? mine + n_stripes * 64 : run + valid - 64 + lane.pair * 16;
            accumulate(part, at(end), lane.last[0], lane.last[1]);
        }
        __syncwarp();
        add(lane, part, first_block);
    }

    __device__ __forceinline__ static Sixteen at(const unsigned char* bytes) { return *reinterpret_cast<const Sixteen*>(bytes); }

    // Adds up the halves of each block, then mixes the blocks in order.
    __device__ __forceinline__ void add(WireLane const& lane, u64 (&part)[2], u32 first_block) {
#pragma unroll
        for (u32 word = 0; word < 2; word++) part[word] += __shfl_xor_sync(FULL_WARP, part[word], 4);
#pragma unroll
        for (u32 i = 0; i < WIRE_BLOCKS; i++) {
            if (first_block + i > n_blocks) break;
#pragma unroll
            for (u32 word = 0; word < 2; word++) {
                sums[word] += __shfl_sync(FULL_WARP, part[word], lane.part * 16 + i * 8 + lane.pair);
                if (first_block + i < n_blocks) sums[word] = (sums[word] ^ sums[word] >> 47 ^ lane.scramble[word]) * P32_1;
            }
        }
    }

    // The digest of the head, from both runs or the only one. The result is valid in the first lane.
    __device__ __forceinline__ u64 end(WireLane const& lane, const unsigned char* run, u32 n_parts) const {
        u64 whole = 0;
        if (valid <= 240) {
            if (lane.lane % 16 == 0 && lane.part < n_parts) whole = digest_short(run, valid);
            __syncwarp();
        } else {
            u64 merged = fold(sums[0] ^ lane.merge[0], sums[1] ^ lane.merge[1]);
            merged += __shfl_xor_sync(FULL_WARP, merged, 1);
            merged += __shfl_xor_sync(FULL_WARP, merged, 2);
            whole = avalanche(valid * P64_1 + merged);
        }
        u64 other = __shfl_xor_sync(FULL_WARP, whole, 16);
        return n_parts == 2 ? digest_16(whole, other) : digest_8(whole);
    }
};

// Pages of layers with equal layout, layer by layer. `partial` is the page of each layer whose tokens are not
// all valid. `from_part` and `to_part` are the distances from K's runs to V's, at the source and at the
// destination.
struct WirePages {
    u32 n_pages, n_heads, n_parts, run_bytes, valid, layer_pages, partial, partial_valid, n_stages, from_part, to_part;

    __device__ __forceinline__ u32 valid_in(u32 page) const { return page % layer_pages == partial ? partial_valid : valid; }
};

// The source and destination addresses of a page's first head.
struct alignas(16) WirePage { const unsigned char* from; unsigned char* to; };

// A warp's position in its work: a step in the runs of a head of a page.
struct WireCursor {
    u32 page, head, start;

    __device__ __forceinline__ WireCursor(WirePages const& pages, u32 nth) : page(nth / pages.n_heads), head(nth % pages.n_heads), start(0) {}

    // Moves to the next step. After the last step of a head it advances by `stride`: x pages and y heads.
    __device__ __forceinline__ void next(WirePages const& pages, uint2 stride) {
        start += WIRE_STEP;
        if (start < pages.run_bytes) return;
        start = 0;
        page += stride.x;
        head += stride.y;
        if (head >= pages.n_heads) { head -= pages.n_heads; page++; }
    }

    // The offset of K's or V's run from the first head's.
    __device__ __forceinline__ u64 from(WirePages const& pages, u32 part) const {
        return (u64)part * pages.from_part + (u64)head * pages.run_bytes;
    }
    __device__ __forceinline__ u64 to(WirePages const& pages, u32 part) const {
        return (u64)part * pages.to_part + (u64)head * pages.run_bytes;
    }
    __device__ __forceinline__ u32 bytes(WirePages const& pages) const { return min(WIRE_STEP, pages.run_bytes - start); }
    __device__ __forceinline__ bool is_last(WirePages const& pages) const { return start + WIRE_STEP >= pages.run_bytes; }
};

// Moves a warp's steps from memory into shared memory and back.
#if __CUDA_ARCH__ >= 900
constexpr u32 WIRE_STAGES_MAX = 4;            // steps of a warp in shared memory
constexpr u32 WIRE_STAGE = 2 * WIRE_STEP;      // for both runs
extern __shared__ __align__(128) unsigned char wire_stages[];

__device__ __forceinline__ u32 shared_at(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

struct WireStages {
    unsigned char* mine;
    u64* full;
    u32 n_stages, stage, phase;

    __device__ __forceinline__ WireStages(u64* barriers, u32 warp, u32 lane, u32 n)
        : mine(wire_stages + warp * n * WIRE_STAGE), full(barriers + warp * WIRE_STAGES_MAX), n_stages(n), stage(0), phase(0) {
        if (lane == 0) {
            for (u32 i = 0; i < n; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_at(full + i)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
    }

    // One lane requests the load of a step into this stage.
    __device__ __forceinline__ void ask(u32 nth, const unsigned char* page, WireCursor const& at, WirePages const& pages) {
        u32 barrier = shared_at(full + nth), bytes = at.bytes(pages);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes * pages.n_parts) : "memory");
        for (u32 part = 0; part < pages.n_parts; part++)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared_at(mine + nth * WIRE_STAGE + part * WIRE_STEP)), "l"(page + at.from(pages, part) + at.start),
                           "r"(bytes), "r"(barrier)
                         : "memory");
    }

    __device__ __forceinline__ const unsigned char* wait() {
        u32 barrier = shared_at(full + stage), is_full = 0;
        while (!is_full)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(is_full) : "r"(barrier), "r"(phase) : "memory");
        return mine + stage * WIRE_STAGE;
    }

    // One lane starts the write of the step in this stage.
    __device__ __forceinline__ void put(unsigned char* page, WireCursor const& at, WirePages const& pages) {
        for (u32 part = 0; part < pages.n_parts; part++)
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                         ::"l"(page + at.to(pages, part) + at.start), "r"(shared_at(mine + stage * WIRE_STAGE + part * WIRE_STEP)),
                           "r"(at.bytes(pages))
                         : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    __device__ __forceinline__ void wait_put() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
    __device__ __forceinline__ void wait_all_put() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

    __device__ __forceinline__ void next() {
        if (++stage < n_stages) return;
        stage = 0;
        phase ^= 1;
    }
};

template <bool COPIES, bool DIGESTS>
__device__ __forceinline__ void wire_pages(u64* digests, const WirePage* table, WirePages pages) {
    __shared__ u64 barriers[WIRE_WARPS * WIRE_STAGES_MAX];
    u32 warp = threadIdx.x / 32, n_warps = gridDim.x * WIRE_WARPS;
    uint2 stride = make_uint2(n_warps / pages.n_heads, n_warps % pages.n_heads);
    WireLane lane(threadIdx.x % 32);
    WireStages stages(barriers, warp, lane.lane, pages.n_stages);
    // Warps of different blocks take neighbouring heads, so that all blocks have work until the end.
    WireCursor now(pages, warp * gridDim.x + blockIdx.x), ahead = now;
    auto ask = [&](u32 stage) {
        if (ahead.page >= pages.n_pages) return;
        if (lane.lane == 0) stages.ask(stage, table[ahead.page].from, ahead, pages);
        ahead.next(pages, stride);
    };
    for (u32 i = 0; i < pages.n_stages; i++) ask(i);
    WireDigest digest;
    u64 whole = 0;
    for (; now.page < pages.n_pages; now.next(pages, stride)) {
        const unsigned char* stage = stages.wait();
        if (COPIES && lane.lane == 0) stages.put(table[now.page].to, now, pages);
        if (DIGESTS) {
            // Without a second run, its lanes repeat the first one.
            u32 part = lane.part < pages.n_parts ? lane.part : 0;
            bool is_first = now.start == 0;
            const unsigned char* bytes = stage + part * WIRE_STEP;
            const unsigned char* run = is_first ? bytes : table[now.page].from + now.from(pages, part);
            if (is_first) digest.begin(lane, pages.valid_in(now.page));
            digest.take(lane, bytes, run, now.start);
            // A digest of few bytes reads them directly, so it is computed while they are in shared memory.
            if (digest.valid <= 240 ? is_first : now.is_last(pages)) whole = digest.end(lane, run, pages.n_parts);
            if (now.is_last(pages) && lane.lane == 0) digests[now.page * pages.n_heads + now.head] = whole;
        }
        __syncwarp();
        if (COPIES && lane.lane == 0) stages.wait_put();
        ask(stages.stage);
        stages.next();
    }
    if (COPIES && lane.lane == 0) stages.wait_all_put();
}
#else
template <bool COPIES, bool DIGESTS>
__device__ __forceinline__ void wire_pages(u64* digests, const WirePage* table, WirePages pages) {
    u32 warp = threadIdx.x / 32, n_warps = gridDim.x * WIRE_WARPS;
    uint2 stride = make_uint2(n_warps / pages.n_heads, n_warps % pages.n_heads);
    WireLane lane(threadIdx.x % 32);
    WireDigest digest;
    for (WireCursor now(pages, warp * gridDim.x + blockIdx.x); now.page < pages.n_pages; now.next(pages, stride)) {
        WirePage page = table[now.page];
        if (COPIES) {
            for (u32 part = 0; part < pages.n_parts; part++) {
                const unsigned char* from = page.from + now.from(pages, part) + now.start + lane.lane * 16;
                unsigned char* to = page.to + now.to(pages, part) + now.start + lane.lane * 16;
                u32 n_bytes = now.bytes(pages);
                Sixteen bytes[WIRE_STEP / 512];
#pragma unroll
                for (u32 i = 0; i < WIRE_STEP / 512; i++)
                    if (i * 512 + lane.lane * 16 < n_bytes) bytes[i] = once16(from + i * 512);
#pragma unroll
                for (u32 i = 0; i < WIRE_STEP / 512; i++)
                    if (i * 512 + lane.lane * 16 < n_bytes) *reinterpret_cast<Sixteen*>(to + i * 512) = bytes[i];
            }
            // The digest reads the bytes just written: they are in the cache, and visible to the whole warp.
            __syncwarp();
        }
        if (!DIGESTS) continue;
        u32 part = lane.part < pages.n_parts ? lane.part : 0;
        const unsigned char* run = COPIES ? page.to + now.to(pages, part) : page.from + now.from(pages, part);
        if (now.start == 0) digest.begin(lane, pages.valid_in(now.page));
        digest.take(lane, run + now.start, run, now.start);
        if (!now.is_last(pages)) continue;
        u64 whole = digest.end(lane, run, pages.n_parts);
        if (lane.lane == 0) digests[now.page * pages.n_heads + now.head] = whole;
    }
}
#endif

// Each block loads the table from the host once.
template <bool COPIES, bool DIGESTS>
__device__ __forceinline__ void wire_block(u64* digests, const WirePage* table, WirePages pages) {
    __shared__ WirePage here[WIRE_PAGES_MAX];
    for (u32 i = threadIdx.x; i < pages.n_pages; i += blockDim.x) here[i] = table[i];
    __syncthreads();
    wire_pages<COPIES, DIGESTS>(digests, here, pages);
}

extern "C" __global__ void __launch_bounds__(WIRE_WARPS * 32, 1)
wire_pull(u64* digests, const WirePage* table, WirePages pages) { wire_block<true, true>(digests, table, pages); }

extern "C" __global__ void __launch_bounds__(WIRE_WARPS * 32, 1)
wire_digest(u64* digests, const WirePage* table, WirePages pages) { wire_block<false, true>(digests, table, pages); }

// The same copy without digests. The difference is the cost of digests.
extern "C" __global__ void __launch_bounds__(WIRE_WARPS * 32, 1)
wire_copy(u64* digests, const WirePage* table, WirePages pages) { wire_block<true, false>(digests, table, pages); }
