//! See `baton_fuzz::proto`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_fuzz::proto(bytes));
