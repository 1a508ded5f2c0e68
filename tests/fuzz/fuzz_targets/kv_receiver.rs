//! See `baton_fuzz::kv_receiver`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_fuzz::kv_receiver(bytes));
