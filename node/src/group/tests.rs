use std::thread;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use chassis::Stream;
use engine::RowError;
use engine::cpu::Format;
use engine::remote::{StageInput, StageResults, StageRow, StageWeights};
use proto::v1;
use tokio::io::AsyncWriteExt as _;
use types::{BlockIdx, Fingerprint, TokenId};

use super::connection::{MessageReader, NotSent, WAITING_MAX, outgoing};
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
        is_wanted: start == 0,
        n_targets: start,
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
    assert_eq!(too_long, "a message of 4294967295 bytes is longer than the limit of 1073741824");
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
        assert_eq!(error, format!("message {number} arrived instead of message {expected}"));
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
    assert_eq!(error.to_string(), "message 1 arrived instead of message 2");
}

#[tokio::test(start_paused = true)]
async fn heartbeats_keep_an_idle_connection() {
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let (_, writer) = Stream::other(ours).into_split();
    let (reader, _kept) = Stream::other(theirs).into_split();
    let (out, writing) = outgoing(writer);
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
    };
    let within = tokio::time::timeout(Duration::from_secs(60), async {
        tokio::select! {
            error = writing.write_all(alive) => panic!("{error}"),
            () = read => {}
        }
    });
    within.await.expect("in time");
}

/// Returns a step with more bytes than the connections of the tests have room for.
fn large_step(number: u64) -> v1::StageInput {
    input_message(number, StageInput { hidden: vec![number as u8; 3 * ROOM].into(), ..step() })
}

/// The bytes for which a connection has room.
const ROOM: usize = 1 << 16;

#[tokio::test(start_paused = true)]
async fn messages_that_the_sender_cannot_write_arrive_in_order() {
    let (ours, theirs) = tokio::io::duplex(ROOM);
    let (_, writer) = Stream::other(ours).into_split();
    let (reader, _kept) = Stream::other(theirs).into_split();
    let (out, writing) = outgoing(writer);
    let mut reader = MessageReader::new(reader);
    let send = async {
        for number in 0..100 {
            let sent = match number % 3 {
                0 => out.send_now(step_from_head(large_step(number))),
                _ => out.send(step_from_head(input_message(number, step()))).await,
            };
            sent.expect("the connection lives");
        }
    };
    let read = async {
        for number in 0..100 {
            let message: v1::FromHead = reader.next().await.expect("a step");
            let Some(OfHead::Input(input)) = message.message else { panic!("no step") };
            assert_eq!(input.step, number);
        }
    };
    let both = async { tokio::join!(send, read) };
    let alive = from_head(OfHead::Alive(v1::Alive {}));
    tokio::select! {
        error = writing.write_all(alive) => panic!("{error}"),
        _ = both => {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_reads_nothing_is_lost_and_its_senders_end() {
    let (ours, _theirs) = tokio::io::duplex(ROOM);
    let (_, writer) = Stream::other(ours).into_split();
    let (out, writing) = outgoing(writer);
    let of_thread = out.clone();
    let thread = thread::spawn(move || {
        while of_thread.blocking_send(step_from_head(large_step(1))).is_ok() {}
        of_thread.send_now(step_from_head(large_step(1)))
    });
    let error = writing.write_all(from_head(OfHead::Alive(v1::Alive {}))).await;
    assert_eq!(error.to_string(), "it has read nothing for 5 s");
    assert_eq!(thread.join().expect("no panic"), Err(NotSent::Ended));
    assert_eq!(out.send(step_from_head(large_step(1))).await, Err(NotSent::Ended));
}

#[tokio::test(start_paused = true)]
async fn those_who_may_not_wait_learn_that_too_many_messages_wait() {
    let (ours, _theirs) = tokio::io::duplex(1);
    let (_, writer) = Stream::other(ours).into_split();
    let (out, _writing) = outgoing(writer);
    let alive = from_head(OfHead::Alive(v1::Alive {}));
    let sent = (0..1 << 20).map(|_| out.send_now(alive.clone()));
    assert_eq!(sent.take_while(Result::is_ok).count(), WAITING_MAX);
    assert_eq!(out.send_now(alive), Err(NotSent::Full));
}
