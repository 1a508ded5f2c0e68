//! See `baton_fuzz::kv_frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_fuzz::kv_frame(bytes));
