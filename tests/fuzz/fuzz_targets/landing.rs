//! See `baton_fuzz::landing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_fuzz::landing(bytes));
