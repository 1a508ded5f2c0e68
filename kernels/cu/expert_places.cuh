// Common code of experts.cu and experts_ring_fp8.cu: the places of choices, expert by expert.
constexpr u32 PLACE_THREADS = 512, EXPERTS_MAX = 512;

// items: see expert_rows.cuh.
// tiles: the expert of each tile of places, if there are tiles, and their number at the end. choices: the choice at each
// place, or NOWHERE. places: the place of each choice, or NOWHERE.
struct Places { Item* items; u32 *tiles, *choices, *places; };
// An expert's places begin at a multiple of tile_rows.
struct PlacesShape { u32 n_choices, n_experts, tile_rows, n_tiles_max, n_items_max; };

__device__ __forceinline__ u32 in_tiles(u32 count, u32 tile_rows) { return (count + tile_rows - 1) / tile_rows * tile_rows; }

// Counts the choices of all experts, and places those of one: a block for each expert.
__device__ __forceinline__ void place_expert(const Places& to, const u32* experts, const PlacesShape& shape) {
    __shared__ u32 counts[EXPERTS_MAX], before[2], of_warp[PLACE_THREADS / 32];
    u32 expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 at = threadIdx.x; at < shape.n_experts; at += PLACE_THREADS) counts[at] = 0;
    if (threadIdx.x < 2) before[threadIdx.x] = 0;
    __syncthreads();
    for (u32 at = threadIdx.x; at < shape.n_choices; at += PLACE_THREADS) {
        u32 chosen = experts[at];
        if (chosen < shape.n_experts) atomicAdd(&counts[chosen], 1);
        else if (expert == 0) to.places[at] = NOWHERE;
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < expert; at += PLACE_THREADS)
        if (counts[at] > 0) {
            atomicAdd(&before[0], in_tiles(counts[at], shape.tile_rows));
            atomicAdd(&before[1], n_items(counts[at]));
        }
    __syncthreads();
    u32 start = before[0], count = counts[expert], end = start + in_tiles(count, shape.tile_rows);
    if (threadIdx.x == 0 && expert == shape.n_experts - 1) {
        to.items[shape.n_items_max].count = before[1] + n_items(count);
        to.tiles[shape.n_tiles_max] = end / shape.tile_rows;
    }
    for (u32 nth = threadIdx.x; nth < n_items(count); nth += PLACE_THREADS) to.items[before[1] + nth] = {expert, nth, start, count};
    if (shape.tile_rows > 1)
        for (u32 tile = start / shape.tile_rows + threadIdx.x; tile < end / shape.tile_rows; tile += PLACE_THREADS) to.tiles[tile] = expert;
    for (u32 at = start + count + threadIdx.x; at < end; at += PLACE_THREADS) to.choices[at] = NOWHERE;
    if (count == 0) return;
    u32 place = start;
    for (u32 first = 0; first < shape.n_choices; first += PLACE_THREADS) {
        u32 at = first + threadIdx.x;
        bool is_here = at < shape.n_choices && experts[at] == expert;
        u32 here = __ballot_sync(FULL_WARP, is_here), earlier = 0, all = 0;
        if (lane == 0) of_warp[warp] = __popc(here);
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < PLACE_THREADS / 32; i++) {
            if (i < warp) earlier += of_warp[i];
            all += of_warp[i];
        }
        if (is_here) {
            u32 mine = place + earlier + __popc(here & ((1u << lane) - 1));
            to.choices[mine] = at, to.places[at] = mine;
        }
        place += all;
        __syncthreads();
    }
}
