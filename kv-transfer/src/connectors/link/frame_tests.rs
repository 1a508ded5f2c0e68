use proptest::prelude::*;
use types::prompt::TokenId;
use types::step::{FinishReason, Logprobs, Step};
use types::{GroupIdx, KvSpan};

use super::*;
use crate::fields::PIECES_MAX;

fn hello() -> Hello {
    let protocol = ProtocolRange { min: 1, max: 2 };
    Hello { protocol, node: NodeId::new("prefill-0"), epoch: Epoch(7), link: 9, stream: 1 }
}

fn span() -> KvSpan {
    KvSpan { group: GroupIdx(1), blocks: 3..7, layers: 0..2 }
}

fn kv(digests: impl Into<Option<Vec<Digest>>>, place: KvPlace) -> Body {
    Body::Kv { span: span(), digests: digests.into(), place }
}

fn pieces() -> KvPlace {
    KvPlace::Pieces(vec![Piece { offset: 64, bytes: 32 }, Piece { offset: 8, bytes: 9 }])
}

fn handoff() -> Handoff {
    let logprobs = Logprobs { chosen: -0.5, top: vec![(TokenId(3), -0.5), (TokenId(9), -2.0)] };
    let first =
        Step { token: TokenId(3), index: 4, logprobs: Some(logprobs), finish: Some(FinishReason::Length) };
    Handoff { transfer: TransferId(5), n_tokens: 99, first }
}

fn two_processes(ranks: [Range<u16>; 2]) -> Vec<ProcessAddress> {
    let process =
        |layers, ranks, endpoint: &str| ProcessAddress { layers, ranks, endpoint: endpoint.to_owned() };
    let [first, second] = ranks;
    vec![process(0..2, first, "10.0.0.1:4000"), process(2..5, second, "[fd00::1]:4001")]
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
        Body::Welcome { version: 3, node: NodeId::new("d"), epoch: Epoch(3), others: Vec::new() },
        Body::Welcome {
            version: 6,
            node: NodeId::new("d"),
            epoch: Epoch(3),
            others: two_processes([0..u16::MAX, 0..u16::MAX]),
        },
        Body::Welcome {
            version: 7,
            node: NodeId::new("d"),
            epoch: Epoch(3),
            others: two_processes([0..2, 2..4]),
        },
        Body::Incompatible { protocol: ProtocolRange { min: 2, max: 3 } },
        Body::Open(open),
        Body::Accepted,
        kv(vec![Digest(1), Digest(2)], KvPlace::Inline),
        Body::Handoff(handoff()),
        Body::Refetch { spans: vec![span(), span()] },
        Body::Done,
        Body::Failed { code: 4, detail: "why".to_owned() },
        Body::Alive,
        kv(vec![Digest(1)], KvPlace::Slot { slot: 3, piece: Piece { offset: 1 << 40, bytes: 9 } }),
        kv(vec![Digest(4)], pieces()),
        kv(vec![], pieces()),
        Body::Taken { slot: 3 },
        kv(vec![Digest(7)], KvPlace::Written { number: 0xffff_0001 }),
        Body::Quiet,
        kv(None, pieces()),
        Body::Digests { span: span(), digests: vec![Digest(3)] },
        kv(vec![Digest(3)], KvPlace::Message { number: 4, bytes: 640 }),
        kv(None, KvPlace::Message { number: 5, bytes: 640 }),
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
            Body::Kv { .. } | Body::Digests { .. } | Body::Refetch { .. } => {
                assert_eq!(parse(&bytes), Ok(frame));
            }
            _ => assert_eq!(parse(&bytes), Err(FrameError::Reserved), "{frame:?}"),
        }
    }
}

#[test]
fn only_inline_kv_has_a_payload() {
    for place in [KvPlace::Inline, pieces(), KvPlace::Written { number: 3 }] {
        let frame = Frame { payload_bytes: 64, ..Frame::new(TransferId(5), kv(None, place.clone())) };
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        match place {
            KvPlace::Inline => assert_eq!(parse(&bytes), Ok(frame)),
            _ => {
                let refusal = FrameError::Body("a payload after KV that is not inline");
                assert_eq!(parse(&bytes), Err(refusal));
            }
        }
    }
}

/// A frame with digests of 8192 heads and 1024 pieces, the most that a sender puts into one frame, fits.
#[test]
fn the_largest_kv_frame_fits() {
    let pieces = KvPlace::Pieces(vec![Piece { offset: 64, bytes: 32 }; PIECES_MAX]);
    let body = kv(vec![Digest(1); crate::pages::FRAME_DIGESTS_MAX], pieces);
    assert_eq!(parse(&encoded(body.clone())).map(|frame| frame.body), Ok(body));
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
    let span = kv(vec![], KvPlace::Inline);
    assert_eq!(
        with(8, u32::MAX, Body::Alive),
        FrameError::BodyTooLong { len: u32::MAX as usize, max: SMALL_BODY_BYTES_MAX }
    );
    assert_eq!(
        with(8, KV_BODY_BYTES_MAX as u32 + 1, span.clone()),
        FrameError::BodyTooLong { len: KV_BODY_BYTES_MAX + 1, max: KV_BODY_BYTES_MAX }
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
    let error = parse(&encoded(Body::Kv { span: empty, digests: None, place: pieces() })).unwrap_err();
    assert_eq!(error, FrameError::Body("a span is empty"));
}

proptest! {
    #[test]
    fn garbage_is_never_a_frame(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        prop_assert!(parse(&bytes).is_err());
    }

    /// Random bytes do not pass the checksum, so this test parses bodies without it: no body may panic.
    #[test]
    fn no_body_panics(kind in 0u8..32, body in proptest::collection::vec(any::<u8>(), 0..256)) {
        let _ = parse_body(kind, TransferId(0), &mut Reader::new(&body));
    }
}
