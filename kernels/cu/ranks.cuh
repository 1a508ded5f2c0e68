// Sends numbers between the GPUs of one model. Kernels that add up few rows over all ranks include this.
//
// A GPU writes its part into the inboxes of the others. Every second word also holds the number of the round, so that the
// reader sees what has arrived; the only wait is one way over the link.
//
// A GPU that does not arrive within `patience` is lost, and the host is told. The GPUs that wait for it go on with undefined
// numbers.
constexpr u32 RANKS_MAX = 8;
constexpr u32 LOOK_AFTER = 1024;       // failed tries before anything but the packet is read
constexpr u64 ASK_AFTER = 50'000'000;  // nanoseconds of waiting before the host's word is read: all threads read it, which is slow

// The address of the same buffer on each rank's GPU.
struct OfRanks { u64 at[RANKS_MAX]; };

struct Ranks {
    u64 lost;      // a word of the host's memory: not zero once a GPU did not arrive
    u64 known;     // a word of this GPU's: not zero once it knows of the loss
    u64 patience;  // nanoseconds
    u32 n, me;
};

// 4 numbers and, twice, their round: halves of 8 bytes arrive whole. The first 24 bits of a number in f32 are sent: 256 times
// finer than bf16, so several GPUs round no more than one GPU does. 16 bits of the round's number are sent: an old packet is
// from the round before the last, or empty.
struct alignas(16) Packet { u32 words[4]; };

__device__ __forceinline__ float as_thrown(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffff00u); }
__device__ __forceinline__ void pack_half(u32 (&words)[2], float a, float b, u32 round) {
    u32 of_a = __float_as_uint(a), of_b = __float_as_uint(b);
    words[0] = of_a >> 8 | (of_b & 0xff00u) << 16;
    words[1] = of_b >> 16 | round << 16;
}
__device__ __forceinline__ void unpack_half(float& a, float& b, u32 first, u32 second) {
    a = __uint_as_float(first << 8);
    b = __uint_as_float(second << 16 | (first >> 16 & 0xff00u));
}

struct Waiting {
    u32 tries = 0;
    u64 since = 0;
};

// Called after each failed try. Returns whether to stop waiting. A failed try must be cheap, or a GPU that waits would be late
// itself.
__device__ __forceinline__ bool is_lost(Waiting& waiting, const Ranks& ranks) {
    if (++waiting.tries % LOOK_AFTER != 0) return false;
    volatile u32* known = reinterpret_cast<volatile u32*>(ranks.known);
    if (*known != 0) return true;
    u64 now = nanoseconds();
    if (waiting.since == 0) waiting.since = now;
    if (now - waiting.since < ASK_AFTER) return false;
    volatile u32* lost = reinterpret_cast<volatile u32*>(ranks.lost);
    bool is_over = now - waiting.since >= ranks.patience;
    if (!is_over && *lost == 0) return false;
    if (is_over) *lost = 1;
    *known = 1;
    __threadfence_system();
    return true;
}

__device__ __forceinline__ void throw_packet(u64 to, const float (&x)[4], u32 round) {
    u32 low[2], high[2];
    pack_half(low, x[0], x[1], round), pack_half(high, x[2], x[3], round);
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(low[0]), "r"(low[1]), "r"(high[0]), "r"(high[1]) : "memory");
}

__device__ __forceinline__ void catch_packet(float (&x)[4], u64 at, u32 round, const Ranks& ranks) {
    Packet packet;
    Waiting waiting;
    do {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(packet.words[0]), "=r"(packet.words[1]), "=r"(packet.words[2]), "=r"(packet.words[3])
                     : "l"(at) : "memory");
    } while ((packet.words[1] >> 16 != (round & 0xffffu) || packet.words[3] >> 16 != (round & 0xffffu)) && !is_lost(waiting, ranks));
    unpack_half(x[0], x[1], packet.words[0], packet.words[1]);
    unpack_half(x[2], x[3], packet.words[2], packet.words[3]);
}

// The inboxes for rows of 4 * n_packets numbers, [round % 2][sender][row][packet], and the number of sends of
// each packet. A GPU sends round r + 2 after it has received round r + 1, which the other GPU started after
// it had received round r. All GPUs send the same packets, in kernels of the same order. Each kernel decides
// which threads send.
struct Inboxes {
    OfRanks at;
    u32* rounds;  // [row][packet]
    u32 rows_max, n_packets;
    Ranks ranks;

    __device__ __forceinline__ u32* rounds_of(u32 row, u32 packet) const { return rounds + (u64)row * n_packets + packet; }
    __device__ __forceinline__ u64 place(u32 before, u32 sender, u32 row, u32 packet) const {
        return (((u64)(before % 2 * ranks.n + sender) * rows_max + row) * n_packets + packet) * sizeof(Packet);
    }
    // Sends to all other GPUs; `before` rounds have been sent before.
    __device__ __forceinline__ void give(u32 row, u32 packet, const float (&mine)[4], u32 before) const {
        for (u32 rank = 0; rank < ranks.n; rank++)
            if (rank != ranks.me) throw_packet(at.at[rank] + place(before, ranks.me, row, packet), mine, before + 1);
    }
    // Replaces this GPU's numbers by the sum over all GPUs, in the same order on all of them.
    __device__ __forceinline__ void take(float (&x)[4], u32 row, u32 packet, u32 before) const {
        float sum[4] = {};
        for (u32 rank = 0; rank < ranks.n; rank++) {
            float of_rank[4] = {as_thrown(x[0]), as_thrown(x[1]), as_thrown(x[2]), as_thrown(x[3])};
            if (rank != ranks.me) catch_packet(of_rank, at.at[ranks.me] + place(before, rank, row, packet), before + 1, ranks);
#pragma unroll
            for (u32 i = 0; i < 4; i++) sum[i] += of_rank[i];
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] = sum[i];
        *rounds_of(row, packet) = before + 1;
    }
};
