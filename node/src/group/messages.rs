//! The engine's types as messages between processes.

use std::collections::HashMap;

use bytes::Bytes;
use engine::RowError;
use engine::cpu::Format;
use engine::remote::{StageInput, StageResults, StageRow, StageWeights};
use proto::{EndField, v1};
use types::{BlockIdx, Fingerprint, TokenId};

use super::connection::Written;
use super::error::GroupError;

pub(super) use v1::from_follower::Message as OfFollower;
pub(super) use v1::from_head::Message as OfHead;

/// The fields of messages that have rows, which are large.
const ROWS_OF_INPUT: EndField = EndField { message: 3, bytes: 3 };
const ROWS_OF_OUTPUT: EndField = EndField { message: 4, bytes: 2 };

pub(super) fn from_head(message: OfHead) -> Written {
    let message = proto::encode(&v1::FromHead { message: Some(message) });
    Written { message, end: Bytes::new() }
}

pub(super) fn from_follower(message: OfFollower) -> Written {
    let message = proto::encode(&v1::FromFollower { message: Some(message) });
    Written { message, end: Bytes::new() }
}

/// Returns the message of a step for a stage. Its rows are not copied.
pub(super) fn step_from_head(mut step: v1::StageInput) -> Written {
    let end = std::mem::take(&mut step.hidden);
    let message = v1::FromHead { message: Some(OfHead::Input(step)) };
    Written { message: proto::encode_before_bytes(&message, ROWS_OF_INPUT, end.len()), end }
}

/// Returns the message of a step's results. Its rows are not copied.
pub(super) fn results_from_follower(mut results: v1::StageOutput) -> Written {
    let end = std::mem::take(&mut results.hidden);
    let message = v1::FromFollower { message: Some(OfFollower::Output(results)) };
    Written { message: proto::encode_before_bytes(&message, ROWS_OF_OUTPUT, end.len()), end }
}

/// The message of a step for a stage.
pub(super) fn input_message(step: u64, input: StageInput) -> v1::StageInput {
    let StageInput { rows, hidden, routing_leads } = input;
    let row = |row: StageRow| v1::StageRow {
        tokens: row.tokens.into_iter().map(|token| token.0).collect(),
        start: row.start as u64,
        tables: row.tables.into_iter().map(table).collect(),
        failure: row.outcome.err().map(failure),
        is_wanted: row.is_wanted,
        n_targets: row.n_targets as u32,
    };
    let rows = rows.into_iter().map(row).collect();
    v1::StageInput { step, rows, hidden, routing_leads }
}

pub(super) fn input(message: v1::StageInput) -> StageInput {
    let v1::StageInput { rows, hidden, routing_leads, .. } = message;
    let row = |row: v1::StageRow| StageRow {
        tokens: row.tokens.into_iter().map(TokenId).collect(),
        start: row.start as usize,
        tables: row
            .tables
            .into_iter()
            .map(|table| table.blocks.into_iter().map(BlockIdx).collect())
            .collect(),
        is_wanted: row.is_wanted,
        n_targets: row.n_targets as usize,
        outcome: row.failure.map_or(Ok(()), |failure| Err(row_error(failure))),
    };
    StageInput { rows: rows.into_iter().map(row).collect(), hidden, routing_leads }
}

pub(super) fn output_message(step: u64, results: StageResults) -> v1::StageOutput {
    let StageResults { hidden, outcomes, routing_leads } = results;
    let of_row =
        |outcome: Result<(), RowError>| outcome.map_or_else(failure, |()| v1::PageFailure::default());
    let failures = outcomes.into_iter().map(of_row).collect();
    v1::StageOutput { step, hidden, failures, routing_leads }
}

pub(super) fn results(message: v1::StageOutput) -> StageResults {
    let v1::StageOutput { hidden, failures, routing_leads, .. } = message;
    let outcome = |failure: v1::PageFailure| match failure.reason.is_empty() {
        true => Ok(()),
        false => Err(row_error(failure)),
    };
    let outcomes = failures.into_iter().map(outcome).collect();
    StageResults { hidden, outcomes, routing_leads }
}

pub(super) fn loaded_message(weights: &StageWeights, kv_endpoint: &str) -> v1::Loaded {
    let StageWeights { model, formats } = weights;
    let bytes = |(format, bytes): &(Format, usize)| v1::FormatBytes {
        format: format_name(*format).to_owned(),
        bytes: *bytes as u64,
    };
    v1::Loaded {
        fingerprint: parts_of(model),
        formats: formats.iter().map(bytes).collect(),
        kv_endpoint: kv_endpoint.to_owned(),
    }
}

/// Returns the named parts of a fingerprint.
pub(super) fn parts_of(fingerprint: &Fingerprint) -> HashMap<String, String> {
    fingerprint.parts().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

pub(super) fn weights(message: v1::Loaded) -> Result<StageWeights, GroupError> {
    let of_format = |bytes: v1::FormatBytes| {
        let format = FORMATS.iter().find(|format| format_name(**format) == bytes.format);
        let unknown =
            || GroupError::Lost(format!("it has weights in {:?}, which is not known", bytes.format));
        Ok((*format.ok_or_else(unknown)?, bytes.bytes as usize))
    };
    let formats = message.formats.into_iter().map(of_format).collect::<Result<_, GroupError>>()?;
    Ok(StageWeights { model: Fingerprint::new(message.fingerprint), formats })
}

const FORMATS: [Format; 6] =
    [Format::F32, Format::Bf16, Format::F16, Format::Q8, Format::Fp8, Format::Fp8Blocks];

/// Returns a format's name in messages, which is its own for each format.
fn format_name(format: Format) -> &'static str {
    match format {
        Format::Fp8Blocks => "fp8-blocks",
        format => format.as_str(),
    }
}

fn table(blocks: Vec<BlockIdx>) -> v1::BlockTable {
    v1::BlockTable { blocks: blocks.into_iter().map(|block| block.0).collect() }
}

/// The only error of a row in a stage that samples nothing is that of a page.
fn failure(error: RowError) -> v1::PageFailure {
    match error {
        RowError::Page { layer, position, reason } => {
            v1::PageFailure { layer: layer.into(), position: position as u64, reason }
        }
        error => v1::PageFailure { layer: 0, position: 0, reason: error.to_string() },
    }
}

fn row_error(failure: v1::PageFailure) -> RowError {
    let v1::PageFailure { layer, position, reason } = failure;
    RowError::Page { layer: layer as u16, position: position as usize, reason }
}
