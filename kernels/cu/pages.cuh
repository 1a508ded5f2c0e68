// Pages of KV: [K|V][kv_head][token][dim], BLOCK_TOKENS tokens each.
constexpr u32 BLOCK_TOKENS = 16;
