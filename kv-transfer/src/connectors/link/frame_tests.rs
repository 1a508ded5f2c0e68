use proptest::prelude::*;
use types::prompt::TokenId;
use types::step::{FinishReason, Logprobs, Step};
use types::{GroupIdx, KvSpan};

use super::*;

fn hello() -> Hello {
    let protocol = ProtocolRange { min: 1, max: 2 };
    Hello { protocol, node: NodeId::new("prefill-0"), epoch: Epoch(7), link: 9, stream: 1 }
}

fn span() -> KvSpan {
    KvSpan { group: GroupIdx(1), blocks: 3..7, layers: 0..2 }
}

fn handoff() -> Handoff {
    let logprobs = Logprobs { chosen: -0.5, top: vec![(TokenId(3), -0.5), (TokenId(9), -2.0)] };
    let first =
        Step { token: TokenId(3), index: 4, logprobs: Some(logprobs), finish: Some(FinishReason::Length) };
    Handoff { transfer: TransferId(5), n_tokens: 99, first }
}

fn every_body() -> Vec<Body> {
    let open = Credentials {
        grant: Grant::from_bytes([3; 16]),
        epoch: Epoch(1),
        n_tokens: 40,
        held_tokens: 16,
        tp_size: 1,
        layout: 11,
        fingerprint: 12,
    };
    vec![
        Body::Open(Credentials { tp_size: 4, ..open }),
        Body::Hello(hello()),
        Body::Welcome { version: 1, node: NodeId::new("d"), epoch: Epoch(3) },
        Body::Incompatible { protocol: ProtocolRange { min: 2, max: 3 } },
        Body::Open(open),
        Body::Accepted,
        Body::Span { span: span(), digests: vec![Digest(1), Digest(2)] },
        Body::Handoff(handoff()),
        Body::Refetch { spans: vec![span(), span()] },
        Body::Done,
        Body::Failed { code: 4, detail: "why".to_owned() },
        Body::Alive,
        Body::SpanAt {
            span: span(),
            slot: Some(3),
            pieces: vec![Piece { offset: 1 << 40, bytes: 9 }],
            digests: vec![Digest(1)],
        },
        Body::Taken { slot: 3 },
        Body::SpanWritten { span: span(), number: 0xffff_0001, digests: vec![Digest(7)] },
        Body::Quiet,
        Body::Shown { span: span(), pieces: vec![Piece { offset: 64, bytes: 32 }] },
        Body::Digests { span: span(), digests: vec![Digest(3)] },
        Body::Queued { number: 4, bytes: 640, span: span(), digests: vec![Digest(3)] },
        Body::Coming { number: 5, bytes: 640, span: span() },
    ]
}

fn encoded(body: Body) -> Vec<u8> {
    let mut bytes = Vec::new();
    Frame::new(TransferId(5), body).encode(&mut bytes);
    bytes
}

#[test]
fn every_frame_is_read_as_it_was_written() {
    for body in every_body() {
        let bytes = encoded(body.clone());
        let frame = parse(&bytes).unwrap();
        assert_eq!(frame, Frame::new(TransferId(5), body));
    }
}

#[test]
fn spans_say_between_which_ranks_they_go_and_nothing_else_does() {
    let lane = Lane { from: 3, to: 63 };
    for body in every_body() {
        let frame = Frame::new(TransferId(5), body).on(lane);
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        match frame.body {
            Body::Span { .. }
            | Body::SpanAt { .. }
            | Body::SpanWritten { .. }
            | Body::Shown { .. }
            | Body::Digests { .. }
            | Body::Queued { .. }
            | Body::Coming { .. }
            | Body::Refetch { .. } => {
                assert_eq!(parse(&bytes), Ok(frame));
            }
            _ => assert_eq!(parse(&bytes), Err(FrameError::Reserved), "{frame:?}"),
        }
    }
}

/// Between nodes of one rank, version 2 is version 1.
#[test]
fn one_rank_is_not_spoken_of() {
    let open = Credentials {
        grant: Grant::from_bytes([3; 16]),
        epoch: Epoch(1),
        n_tokens: 40,
        held_tokens: 16,
        tp_size: 1,
        layout: 11,
        fingerprint: 12,
    };
    assert_eq!(encoded(Body::Open(open)).len(), HEADER_BYTES + 16 + 8 + 4 + 4 + 8 + 8);
    let span = encoded(Body::Span { span: span(), digests: vec![] });
    assert_eq!(span[5..8], [0; 3]);
}

#[test]
fn every_cut_off_frame_is_incomplete() {
    for body in every_body() {
        let bytes = encoded(body);
        for len in 0..bytes.len() {
            let error = parse(&bytes[..len]).unwrap_err();
            assert!(matches!(error, FrameError::Incomplete { .. }), "{len}: {error}");
        }
    }
}

#[test]
fn every_flipped_bit_of_a_frame_is_noticed() {
    for body in every_body() {
        let bytes = encoded(body.clone());
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&bad).is_err(), "bit {bit} of {body:?}");
        }
    }
}

#[test]
fn lengths_are_refused_before_anything_is_read() {
    let with = |offset: usize, value: u32, body: Body| {
        let mut bytes = encoded(body);
        bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        Header::parse(&bytes).map(|_| ()).unwrap_err()
    };
    let span = Body::Span { span: span(), digests: vec![] };
    assert_eq!(
        with(8, u32::MAX, Body::Alive),
        FrameError::BodyTooLong { len: u32::MAX as usize, max: SMALL_BODY_BYTES_MAX }
    );
    assert_eq!(
        with(8, SPAN_BODY_BYTES_MAX as u32 + 1, span.clone()),
        FrameError::BodyTooLong { len: SPAN_BODY_BYTES_MAX + 1, max: SPAN_BODY_BYTES_MAX }
    );
    assert_eq!(
        with(12, u32::MAX, span),
        FrameError::PayloadTooLong { len: u32::MAX as usize, max: PAYLOAD_BYTES_MAX }
    );
    assert_eq!(with(12, 1, Body::Alive), FrameError::PayloadTooLong { len: 1, max: 0 });
}

#[test]
fn long_texts_are_cut_and_stay_text() {
    let detail = "é".repeat(2000);
    let Body::Failed { detail: read, .. } = parse(&encoded(Body::Failed { code: 1, detail })).unwrap().body
    else {
        panic!("another kind")
    };
    assert_eq!(read, "é".repeat(512));
}

#[test]
fn an_empty_span_is_malformed() {
    let empty = KvSpan { group: GroupIdx(0), blocks: 3..3, layers: 0..1 };
    let error = parse(&encoded(Body::Span { span: empty, digests: vec![] })).unwrap_err();
    assert_eq!(error, FrameError::Body("a span is empty"));
}

proptest! {
    #[test]
    fn garbage_is_never_a_frame(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        prop_assert!(parse(&bytes).is_err());
    }

    /// Past the checksum, which random bytes do not get through, a body must still never panic.
    #[test]
    fn no_body_panics(kind in 0u8..16, body in proptest::collection::vec(any::<u8>(), 0..256)) {
        let _ = parse_body(kind, TransferId(0), &mut Reader::new(&body));
    }
}
