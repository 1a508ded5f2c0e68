//! The fingerprint of a model, which two nodes compare before they exchange KV.

use std::hash::Hasher;

use twox_hash::XxHash3_64;
use types::{Fingerprint, KvLayout};

use super::checkpoint::Checkpoint;
use super::safetensors::TensorFile;

/// Data up to this size is hashed completely: 64 MiB take about ten milliseconds.
const WHOLE_BYTES_MAX: usize = 64 << 20;
/// The number of evenly spaced samples that are hashed in larger data.
const N_SAMPLES: usize = 4096;
const SAMPLE_BYTES: usize = 1024;

/// Makes a model's fingerprint: the parts of the layout, and the other `parts`.
pub fn fingerprint(
    layout: &KvLayout,
    parts: impl IntoIterator<Item = (&'static str, String)>,
) -> Fingerprint {
    let named = parts.into_iter().map(|(name, value)| (name.to_owned(), value));
    Fingerprint::new(layout.fingerprint_parts().into_iter().chain(named))
}

/// Returns the fingerprint of the weights, from their files' headers and data.
///
/// The header has the names, types, shapes and order of all tensors. Data beyond 64 MiB is sampled: 4096
/// places of a kilobyte. So starting does not read gigabytes that are mapped and not yet needed. Other
/// training, another precision or a truncated file changes nearly every place. A few edited numbers may not
/// be detected.
pub fn of_weights(checkpoint: &Checkpoint) -> String {
    let mut hasher = XxHash3_64::with_seed(0);
    let bytes: usize = checkpoint.files().iter().map(|file| file.data().len()).sum();
    for file in checkpoint.files() {
        hasher.write(file.header());
        hash_data(&mut hasher, file, bytes);
    }
    let how = if bytes <= WHOLE_BYTES_MAX { "whole" } else { "sampled" };
    format!("{:016x} of {bytes} bytes, {how}", hasher.finish())
}

fn hash_data(hasher: &mut XxHash3_64, file: &TensorFile, bytes_in_all: usize) {
    let data = file.data();
    if bytes_in_all <= WHOLE_BYTES_MAX {
        return hasher.write(data);
    }
    let step = (bytes_in_all / N_SAMPLES).max(SAMPLE_BYTES);
    for first in (0..data.len()).step_by(step) {
        hasher.write(&data[first..(first + SAMPLE_BYTES).min(data.len())]);
    }
}

/// Returns the fingerprint of a `tokenizer.json`: the first half of its BLAKE3 hash, in hexadecimal. A router
/// computes the same for its own copy of the file.
pub fn of_tokenizer(tokenizer: Option<&[u8]>) -> String {
    match tokenizer {
        Some(bytes) => format!("blake3:{}", &blake3::hash(bytes).to_hex()[..32]),
        None => "none".to_owned(),
    }
}
