use std::time::Duration;

use bytes::{Buf as _, Bytes};
use chassis::Stream;
use engine::RowError;
use engine::cpu::Format;
use engine::remote::{StageInput, StageResults, StageRow, StageWeights};
use proto::v1;
use tokio::io::AsyncWriteExt as _;
use types::{BlockIdx, Fingerprint, TokenId};

use super::connection::{MessageReader, MessageWriter, outgoing};
use super::messages::{
    OfFollower, OfHead, from_head, input, input_message, loaded_message, output_message, results,
    results_from_follower, step_from_head, weights,
};

fn page_error() -> RowError {
    RowError::Page { layer: 3, position: 70, reason: "it is being written".to_owned() }
}

fn step() -> StageInput {
    let row = |start, outcome| StageRow {
        tokens: vec![TokenId(7), TokenId(u32::MAX)],
        start,
        tables: vec![vec![BlockIdx(1), BlockIdx::GONE], Vec::new()],
        outcome,
    };
    StageInput {
        rows: vec![row(0, Ok(())), row(64, Err(page_error()))],
        hidden: vec![0, 7, 255].into(),
        routing_leads: vec![0.25],
    }
}

#[test]
fn a_step_and_its_results_arrive_with_every_bit() {
    assert_eq!(input(input_message(5, step())), step());
    let computed = StageResults {
        hidden: vec![1, 2].into(),
        outcomes: vec![Ok(()), Err(page_error())],
        routing_leads: vec![f32::MAX],
    };
    assert_eq!(results(output_message(5, computed.clone())), computed);
    let model = Fingerprint::new([("weights".to_owned(), "0123".to_owned())]);
    let formats = vec![(Format::Fp8, 10), (Format::Fp8Blocks, 3), (Format::Bf16, 1 << 40)];
    let loaded = StageWeights { model, formats };
    assert_eq!(weights(loaded_message(&loaded, "10.0.0.2:7002")).expect("weights"), loaded);
}

#[test]
fn rows_that_are_not_copied_belong_to_their_message() {
    for hidden in [vec![], vec![7], (0..=255).cycle().take(70_000).collect()] {
        let hidden = Bytes::from(hidden);
        let input = input_message(5, StageInput { hidden: hidden.clone(), ..step() });
        let written = step_from_head(input.clone());
        let message: v1::FromHead = proto::decode(written.message.chain(written.end)).expect("a message");
        assert_eq!(message.message, Some(OfHead::Input(input)));
        let computed = StageResults { hidden, outcomes: vec![Ok(())], routing_leads: vec![1.0] };
        let output = output_message(6, computed);
        let written = results_from_follower(output.clone());
        let message: v1::FromFollower = proto::decode(written.message.chain(written.end)).expect("a message");
        assert_eq!(message.message, Some(OfFollower::Output(output)));
    }
}

#[test]
fn weights_in_an_unknown_format_are_refused() {
    let formats = vec![v1::FormatBytes { format: "int3".to_owned(), bytes: 1 }];
    let unknown = v1::Loaded { formats, ..v1::Loaded::default() };
    let error = weights(unknown).expect_err("no such format");
    assert_eq!(error.to_string(), "it has weights in \"int3\", which is not known");
}

/// Writes bytes as a peer and returns the error of the reader.
async fn error_after(bytes: &[u8]) -> String {
    let (ours, mut theirs) = tokio::io::duplex(1 << 16);
    theirs.write_all(bytes).await.expect("room");
    let (reader, _writer) = Stream::other(ours).into_split();
    let read = MessageReader::new(reader).next::<v1::FromHead>().await;
    drop(theirs);
    read.expect_err("no message").to_string()
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_sends_no_messages_is_lost() {
    assert_eq!(error_after(&[]).await, "it was silent for 5 s");
    assert_eq!(error_after(&numbered(0, 9, &[1])).await, "it was silent for 5 s");
    let too_long = error_after(&numbered(0, u32::MAX, &[])).await;
    assert_eq!(too_long, "a message of 4294967295 bytes is longer than any may be");
    let error = error_after(&numbered(0, 1, &[0xFF])).await;
    assert!(error.starts_with("a message cannot be read: "), "{error}");
}

/// Returns the bytes of a message: its length, its number and its body.
fn numbered(number: u64, length: u32, body: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes()[..], &number.to_le_bytes(), body].concat()
}

#[tokio::test(start_paused = true)]
async fn a_message_that_is_not_the_next_one_ends_the_connection() {
    for (number, expected) in [(1, 0), (u64::MAX, 0)] {
        let error = error_after(&numbered(number, 0, &[])).await;
        assert_eq!(error, format!("message {number} has come instead of message {expected}"));
    }
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let (reader, _kept) = Stream::other(ours).into_split();
    let (_kept, mut writer) = Stream::other(theirs).into_split();
    let mut reader = MessageReader::new(reader);
    let alive = from_head(OfHead::Alive(v1::Alive {})).message;
    for number in [0, 1, 1] {
        writer.write_all(&numbered(number, alive.len() as u32, &alive)).await.expect("room");
    }
    for _ in 0..2 {
        reader.next::<v1::FromHead>().await.expect("the next one");
    }
    let error = reader.next::<v1::FromHead>().await.expect_err("a message twice");
    assert_eq!(error.to_string(), "message 1 has come instead of message 2");
}

#[tokio::test(start_paused = true)]
async fn heartbeats_keep_an_idle_connection() {
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let (_, writer) = Stream::other(ours).into_split();
    let (reader, _kept) = Stream::other(theirs).into_split();
    let (out, queue) = outgoing();
    let alive = from_head(OfHead::Alive(v1::Alive {}));
    let mut reader = MessageReader::new(reader);
    let read = async {
        for _ in 0..20 {
            let message: v1::FromHead = reader.next().await.expect("a heartbeat");
            assert!(matches!(message.message, Some(OfHead::Alive(_))));
        }
        out.send(step_from_head(input_message(1, step()))).await.expect("room");
        let message: v1::FromHead = reader.next().await.expect("a step");
        assert_eq!(message.message, Some(OfHead::Input(input_message(1, step()))));
        drop(out);
    };
    let within = tokio::time::timeout(Duration::from_secs(60), async {
        tokio::join!(MessageWriter::new(writer).write_all(queue, alive), read)
    });
    within.await.expect("in time").0.expect("the queue has ended");
}
