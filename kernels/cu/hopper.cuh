// Hopper's own instructions (sm_90a): barriers in shared memory that count bytes, tile copies issued by one
// thread, and products of four warps.
//
// A tile is rows of 64 bf16 numbers (128 bytes), as the copy engine writes them with its 128-byte swizzle:
// chunk c (16 bytes) of row r is at r * 128 + (c ^ r % 8) * 16. A tile is aligned to 1,024 bytes. Adjacent
// tiles form one taller tile. Numbers outside of the map are zero.
struct alignas(64) TensorMap { u64 words[16]; };

constexpr u32 TILE_COLUMNS = 64, TILE_ROW_BYTES = 2 * TILE_COLUMNS;
// Data that is read once is evicted first, data that all blocks read last. The values are those that
// createpolicy returns.
enum Policy : u64 { EVICT_NORMAL = 0x1000000000000000ull, EVICT_FIRST = 0x12f0000000000000ull, EVICT_LAST = 0x14f0000000000000ull };

__device__ __forceinline__ u32 chunk_place(u32 row, u32 chunk) { return row * TILE_ROW_BYTES + (chunk ^ (row & 7)) * 16; }

// === Barriers in shared memory ===

__device__ __forceinline__ void barrier_start(u32 barrier, u32 n_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine. A barrier of all threads must follow.
__device__ __forceinline__ void barriers_started() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when all copies that this thread issued before have landed.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity is over. The hardware suspends the thread for a while in each try.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred over;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n@over bra done;\nbra again;\ndone:\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

// Tiles in shared memory that are filled and emptied in turn, with one barrier for each.
struct Ring { u32 at, full, empty; };

// Initialises the barriers of a ring whose tiles n_writers fill and n_readers empty. One thread calls this, and a barrier of
// all threads must follow.
template <u32 STAGES>
__device__ __forceinline__ void ring_started(const Ring& ring, u32 n_readers, u32 n_writers = 1) {
    for (u32 i = 0; i < STAGES; i++) {
        barrier_start(ring.full + i * 8, n_writers);
        barrier_start(ring.empty + i * 8, n_readers);
    }
    barriers_started();
}

// A hardware barrier of THREADS threads; barrier 0 is for all threads.
template <u32 THREADS>
__device__ __forceinline__ void threads_wait(u32 barrier) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }
template <u32 THREADS>
__device__ __forceinline__ void threads_arrive(u32 barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory"); }

// === The copy engine ===

// Copies the box at column x and row y of the map into shared memory. The barrier counts its bytes.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap& map, u32 x, u32 y, u32 barrier, Policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"((u64)policy) : "memory");
}
// Copies the box from column x on, of eight rows of gate and of up for each unit from `unit` on, of an expert's matrix.
__device__ __forceinline__ void copy_units(u32 to, const TensorMap& map, u32 x, u32 unit, u32 expert, u32 barrier, Policy policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(0), "r"(unit), "r"(expert), "l"((u64)policy) : "memory");
}
// The copy of copy_tile, to the same place and for the same barrier, in each block of the cluster that the mask
// names.
__device__ __forceinline__ void copy_tile_to_all(u32 to, const TensorMap& map, u32 x, u32 y, u32 barrier, Policy policy, u32 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %6, %5;"
        ::"r"(to), "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"((u64)policy), "h"((unsigned short)blocks) : "memory");
}
// Copies a box of shared memory to its place in the map. Numbers outside of the map are not written. The
// issuing thread waits for its boxes: until they are read, or until they are visible to others.
__device__ __forceinline__ void copy_tile_out(const TensorMap& map, u32 x, u32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(from), "r"(x), "r"(y) : "memory");
}
// The same, but adds to the existing numbers: each one separately, rounded to nearest.
__device__ __forceinline__ void add_tile_to(const TensorMap& map, u32 x, u32 y, u32 from) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(from), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void tiles_committed() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void tiles_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tiles_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Makes ordinary stores to shared memory visible to later copies and products.
__device__ __forceinline__ void stores_shown() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// === Clusters ===

// All threads of all blocks arrive; the threads of a warp arrive together.
__device__ __forceinline__ void cluster_arrive() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// The same, without making writes visible to other blocks.
__device__ __forceinline__ void cluster_arrive_silently() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The same address in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 place_in(u32 at, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ __forceinline__ float4 cluster_load4(u32 at) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void cluster_store(u32 at, float x) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
// Arrives without ordering other accesses: the reads of a tile are done when its product is done.
__device__ __forceinline__ void barrier_arrive_in(u32 there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// === Products of a group of four warps ===
//
// product<N> starts c[64][N] += a[64][16] * b[16][N] and does not wait. Lane (g, t) of warp w of the group
// holds rows 16w + g and 16w + g + 8: c[4i + 0..1] are columns 8i + 2t, 8i + 2t + 1 of the first, c[4i +
// 2..3] of the second.

// The descriptor of a tile for a product: its address, and the distance between groups of 8 rows (for a
// transposed tile, between groups of 64 columns). The next 16 numbers along the columns are 32 bytes further:
// + 2.
__device__ __forceinline__ u64 tile_of(u32 at, u32 columns_apart) {
    return (u64)((at & 0x3ffff) >> 4) | (u64)(columns_apart >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
template <u32 N>
__device__ __forceinline__ void held(float (&x)[N]) {  // the compiler must not move these across
#pragma unroll
    for (u32 i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_committed() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <u32 N>
__device__ __forceinline__ void products_done_but() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// asm takes each register as an operand of its own: the names and the registers of the first 64 sums.
#define SUM_NAMES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_64(c) \
    "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), \
    "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
    "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), \
    "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), \
    "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), \
    "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), \
    "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), \
    "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])

__device__ __forceinline__ void product(float (&c)[4], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void product(float (&c)[8], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void product(float (&c)[16], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void product(float (&c)[32], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "l"(a), "l"(b));
}
__device__ __forceinline__ void product(float (&c)[64], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        SUM_NAMES_64 "}, %64, %65, 1, 1, 1, 0, 0;"
        : SUMS_64(c)
        : "l"(a), "l"(b));
}
// Starts the products of two tiles of bf16. When it returns, the products that were started before are done.
template <u32 SUMS>
__device__ __forceinline__ void add_products(float (&sum)[SUMS], u64 a, u64 b) {
    held(sum);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < TILE_COLUMNS / 16; i++) product(sum, a + 2 * i, b + 2 * i);
    products_committed();
    held(sum);
    products_done_but<1>();
}
// The same as `product` for 128 columns. It overwrites c if `adds` is false.
__device__ __forceinline__ void product(float (&c)[64], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        SUM_NAMES_64 "}, %64, %65, adds, 1, 1, 0, 0;\n}"
        : SUMS_64(c)
        : "l"(a), "l"(b), "r"((u32)adds));
}
// The same for 256 columns.
__device__ __forceinline__ void product(float (&c)[128], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        SUM_NAMES_64 ", "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, adds, 1, 1, 0, 0;\n}"
        : SUMS_64(c), SUMS_64((c + 64))
        : "l"(a), "l"(b), "r"((u32)adds));
}
// The first factor comes from registers, in the layout of `mma`. b is transposed: the sum is over its rows.
__device__ __forceinline__ void product_turned(float (&c)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        SUM_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : SUMS_64(c)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}
