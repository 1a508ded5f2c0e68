//! See `baton_fuzz::identity`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| baton_fuzz::identity(bytes));
