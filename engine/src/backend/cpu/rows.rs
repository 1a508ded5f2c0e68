//! Rows that a stage passes on to another process, as bytes.

pub(super) fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(numbers)];
    for (bytes, number) in bytes.as_chunks_mut().0.iter_mut().zip(numbers) {
        *bytes = number.to_le_bytes();
    }
    bytes
}

/// Returns `None` if the last number is not whole.
pub(super) fn numbers_of(bytes: &[u8]) -> Option<Vec<f32>> {
    let (numbers, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}
