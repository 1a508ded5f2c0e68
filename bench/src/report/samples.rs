//! Packs every record of a run into a few bytes: numbers as varints, deflated, as base64 inside the report.
//!
//! The `outcome` is 0 for finished, 1 for cancelled, and 2 or more for a failure. Python code that reads the records:
//!
//! ```python
//! import base64, json, zlib
//!
//! def records(path):
//!     samples = json.load(open(path))["samples"]
//!     data = zlib.decompress(base64.b64decode(samples["data"]), -15)
//!     at = 0
//!     def number():
//!         nonlocal at
//!         value = shift = 0
//!         while True:
//!             byte = data[at]; at += 1
//!             value |= (byte & 127) << shift; shift += 7
//!             if byte < 128: return value
//!     names = ("index session turn slice intended_us lag_us sent_us prompt_tokens cached_tokens wanted_tokens "
//!              "usage_tokens_plus_1 counted_by first_text_us_plus_1 end_us outcome").split()
//!     for _ in range(samples["n_requests"]):
//!         record = {name: number() for name in names}
//!         if record["outcome"] >= 2: record["error"] = samples["errors"][number()]
//!         record["chunks"], time = [], 0
//!         for _ in range(number()):
//!             time += number(); record["chunks"].append((time, number()))   # microseconds since intended, tokens
//!         yield record
//! ```

use std::io::{Read, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Result};
use crate::record::{Chunk, CountedBy, Failure, FailureKind, Outcome, RequestRecord};

const ENCODING: &str = "varint+deflate+base64";
/// The largest size of unpacked records in bytes. Larger ones are refused.
const UNPACKED_BYTES_MAX: u64 = 4 << 30;

/// The packed records of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Samples {
    pub encoding: String,
    pub n_requests: usize,
    /// The texts of failures without duplicates. A record refers to its text by position.
    pub errors: Vec<String>,
    pub data: String,
}

impl Samples {
    pub fn pack(records: &[RequestRecord]) -> Self {
        let mut errors = Vec::new();
        let mut packer = Packer { bytes: Vec::with_capacity(records.len() * 256) };
        for record in records {
            packer.record(record, &mut errors);
        }
        Self {
            encoding: ENCODING.to_owned(),
            n_requests: records.len(),
            errors,
            data: STANDARD.encode(deflate(&packer.bytes)),
        }
    }

    pub fn unpack(&self) -> Result<Vec<RequestRecord>> {
        if self.encoding != ENCODING {
            return Err(BenchError::Samples(format!("encoding {} is unknown", self.encoding)));
        }
        let packed = STANDARD.decode(&self.data).map_err(|error| BenchError::Samples(error.to_string()))?;
        let mut bytes = Vec::new();
        let mut inflated = DeflateDecoder::new(packed.as_slice()).take(UNPACKED_BYTES_MAX);
        inflated.read_to_end(&mut bytes).map_err(|error| BenchError::Samples(error.to_string()))?;
        let mut unpacker = Unpacker { bytes: &bytes, errors: &self.errors };
        (0..self.n_requests).map(|_| unpacker.record()).collect()
    }
}

fn deflate(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.expect("writing to memory does not fail")
}

struct Packer {
    bytes: Vec<u8>,
}

impl Packer {
    fn record(&mut self, record: &RequestRecord, errors: &mut Vec<String>) {
        for value in [record.index, record.session, record.turn, record.slice] {
            self.number(value.into());
        }
        self.number(record.intended_us);
        for value in
            [record.lag_us, record.sent_us, record.prompt_tokens, record.cached_tokens, record.wanted_tokens]
        {
            self.number(value.into());
        }
        self.optional(record.usage_tokens);
        self.number(record.counted_by as u64);
        self.optional(record.first_text_us);
        self.number(record.end_us.into());
        self.outcome(&record.outcome, errors);
        self.chunks(&record.chunks);
    }

    fn outcome(&mut self, outcome: &Outcome, errors: &mut Vec<String>) {
        match outcome {
            Outcome::Finished => self.number(0),
            Outcome::Cancelled => self.number(1),
            Outcome::Failed(failure) => {
                self.number(2 + failure.kind as u64);
                let known = errors.iter().position(|error| *error == failure.message);
                self.number(known.unwrap_or(errors.len()) as u64);
                if known.is_none() {
                    errors.push(failure.message.clone());
                }
            }
        }
    }

    /// Writes chunks. Each time is the difference to the time before, because most differences fit two bytes.
    fn chunks(&mut self, chunks: &[Chunk]) {
        self.number(chunks.len() as u64);
        let mut before = 0;
        for chunk in chunks {
            self.number(u64::from(chunk.at_us - before));
            self.number(chunk.tokens.into());
            before = chunk.at_us;
        }
    }

    /// Writes an optional number plus 1; 0 means none.
    fn optional(&mut self, value: Option<u32>) {
        self.number(value.map_or(0, |value| u64::from(value) + 1));
    }

    /// Writes a number with seven bits per byte, the lowest first. A high bit of 1 means that more bytes
    /// follow.
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }
}

struct Unpacker<'a> {
    bytes: &'a [u8],
    errors: &'a [String],
}

impl Unpacker<'_> {
    /// Reads a record. Its fields are in the order in which [`Packer::record`] writes them, because the
    /// fields of a struct literal are evaluated in the order of the text.
    fn record(&mut self) -> Result<RequestRecord> {
        Ok(RequestRecord {
            index: self.small()?,
            session: self.small()?,
            turn: self.small()?,
            slice: self.small()?,
            intended_us: self.number()?,
            lag_us: self.small()?,
            sent_us: self.small()?,
            prompt_tokens: self.small()?,
            cached_tokens: self.small()?,
            wanted_tokens: self.small()?,
            usage_tokens: self.optional()?,
            counted_by: self.counted_by()?,
            first_text_us: self.optional()?,
            end_us: self.small()?,
            outcome: self.outcome()?,
            chunks: self.chunks()?,
            explanation: None,
        })
    }

    fn counted_by(&mut self) -> Result<CountedBy> {
        match self.number()? {
            0 => Ok(CountedBy::TokenIds),
            1 => Ok(CountedBy::Usage),
            2 => Ok(CountedBy::Chunks),
            3 => Ok(CountedBy::Total),
            other => Err(BenchError::Samples(format!("way of counting {other}"))),
        }
    }

    fn outcome(&mut self) -> Result<Outcome> {
        match self.number()? {
            0 => Ok(Outcome::Finished),
            1 => Ok(Outcome::Cancelled),
            tag => {
                let kind = FailureKind::ALL.get(tag as usize - 2);
                let (kind, _) = kind.ok_or_else(|| BenchError::Samples(format!("outcome {tag}")))?;
                let message = self.errors.get(self.number()? as usize).cloned().unwrap_or_default();
                Ok(Outcome::Failed(Failure { kind: *kind, message }))
            }
        }
    }

    fn chunks(&mut self) -> Result<Vec<Chunk>> {
        let n_chunks = self.number()?;
        let mut at_us = 0u32;
        (0..n_chunks)
            .map(|_| {
                at_us = at_us.saturating_add(self.small()?);
                Ok(Chunk { at_us, tokens: self.small()? })
            })
            .collect()
    }

    fn optional(&mut self) -> Result<Option<u32>> {
        let value = self.number()?;
        Ok(value.checked_sub(1).map(|value| value as u32))
    }

    fn small(&mut self) -> Result<u32> {
        u32::try_from(self.number()?).map_err(|error| BenchError::Samples(error.to_string()))
    }

    fn number(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) =
                self.bytes.split_first().ok_or_else(|| BenchError::Samples("cut short".to_owned()))?;
            self.bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(BenchError::Samples("a number without end".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunks() -> impl Strategy<Value = Vec<Chunk>> {
        proptest::collection::vec((0u32..1_000_000, 0u32..9), 0..20).prop_map(|mut pairs| {
            pairs.sort_unstable();
            pairs.into_iter().map(|(at_us, tokens)| Chunk { at_us, tokens }).collect()
        })
    }

    fn outcome() -> impl Strategy<Value = Outcome> {
        let failed = (0..FailureKind::ALL.len(), "[a-c]{0,2}")
            .prop_map(|(nth, message)| Outcome::Failed(Failure { kind: FailureKind::ALL[nth].0, message }));
        prop_oneof![Just(Outcome::Finished), Just(Outcome::Cancelled), failed]
    }

    prop_compose! {
        fn record()(numbers: [u32; 9], intended_us in 0u64..1 << 40, usage_tokens: Option<u16>,
                    counted_by in proptest::sample::select(vec![CountedBy::TokenIds, CountedBy::Usage, CountedBy::Chunks, CountedBy::Total]),
                    first_text_us: Option<u16>, outcome in outcome(), chunks in chunks()) -> RequestRecord {
            let [index, session, turn, slice, lag_us, sent_us, prompt_tokens, cached_tokens, wanted_tokens] = numbers;
            RequestRecord {
                index, session, turn, slice, intended_us, lag_us, sent_us, prompt_tokens, cached_tokens, wanted_tokens,
                usage_tokens: usage_tokens.map(u32::from), counted_by, first_text_us: first_text_us.map(u32::from),
                end_us: index, outcome, chunks, explanation: None,
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_out(records in proptest::collection::vec(record(), 0..8)) {
            prop_assert_eq!(Samples::pack(&records).unpack().expect("sound"), records);
        }
    }

    #[test]
    fn damage_is_an_error() {
        let mut samples = Samples::pack(&[]);
        samples.n_requests = 1;
        assert!(samples.unpack().is_err());
        samples.data = "!".to_owned();
        assert!(samples.unpack().is_err());
    }
}
