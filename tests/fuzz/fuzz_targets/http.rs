//! See `baton_fuzz::http`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_fuzz::http(bytes));
