//! The frames of the KV wire, one at a time.

use kv_transfer::connectors::tcp::frame::{Frame, FrameError, HEADER_BYTES, parse};
use twox_hash::XxHash3_64;

/// Parses the bytes unchanged, and once more with a valid checksum, so that the code behind the checksum runs
/// too.
pub fn kv_frame(bytes: &[u8]) {
    check(bytes, parse(bytes));
    let mut sealed = bytes.to_vec();
    seal(&mut sealed);
    check(&sealed, parse(&sealed));
}

fn check(bytes: &[u8], parsed: Result<Frame, FrameError>) {
    let Ok(frame) = parsed else { return };
    let mut again = Vec::new();
    frame.encode(&mut again);
    // The printed frames are compared, because NaN is not equal to itself.
    let (said, understood) =
        (format!("{frame:?}"), format!("{:?}", parse(&again).expect("it was understood")));
    assert_eq!(said, understood, "{bytes:?}");
}

/// Writes the correct length and checksum into the header of a frame that ends with `bytes`.
pub(crate) fn seal(bytes: &mut [u8]) {
    const CHECKED_BYTES: usize = 32;
    let Some(n_body) = bytes.len().checked_sub(HEADER_BYTES) else { return };
    bytes[8..12].copy_from_slice(&(n_body as u32).to_le_bytes());
    let header = XxHash3_64::oneshot(&bytes[..CHECKED_BYTES]);
    let checksum = XxHash3_64::oneshot_with_seed(header, &bytes[HEADER_BYTES..]);
    bytes[CHECKED_BYTES..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
}
