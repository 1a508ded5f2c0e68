use chassis::Shutdown;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use super::*;

const FROM: ([u8; 4], u16) = ([10, 0, 0, 2], 41_000);

/// The settings of a head or a follower.
fn settings(parts: &[(&str, &str)]) -> Fingerprint {
    Fingerprint::new(parts.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
}

/// Returns the head's port for followers, without a socket. Two processes compute beside the head.
fn entrance(common: Fingerprint) -> Entrance {
    Entrance {
        world: World::seeded(1),
        gate: Gate::new("entrance"),
        common,
        grid: ProcessGrid::new(3, 3, 2).expect("they divide"),
        layers: StageLayers::one(),
        processes: Arc::new(Mutex::new(vec![None; 2])),
        attempts: mpsc::channel(1).0,
    }
}

#[test]
fn a_refusal_names_both_values_and_what_to_do() {
    let ours = [
        ("executable", "blake3:11"),
        ("model.kv_dtype", "bf16"),
        ("protocol", "3..7"),
        ("version", "0.1.0"),
        ("weights", "blake3:aa"),
    ];
    let executable = "run the same executable in all processes of the node";
    let rest = "give all processes of the node the same model files and settings";
    let differs = |name: &str, ours: &str, theirs: &str| {
        format!("{name} is {ours} at the head and {theirs} at 10.0.0.2:41000")
    };
    for (name, theirs, expected) in [
        (
            "executable",
            Some("blake3:22"),
            format!("{}: {executable}", differs("executable", "blake3:11", "blake3:22")),
        ),
        ("executable", None, format!("{}: {executable}", differs("executable", "blake3:11", "absent"))),
        ("protocol", Some("3..8"), format!("{}: {executable}", differs("protocol", "3..7", "3..8"))),
        ("version", Some("0.2.0"), format!("{}: {executable}", differs("version", "0.1.0", "0.2.0"))),
        ("a_newer_setting", Some("on"), format!("{}: {rest}", differs("a_newer_setting", "absent", "on"))),
        ("model.kv_dtype", Some("f32"), format!("{}: {rest}", differs("model.kv_dtype", "bf16", "f32"))),
        ("weights", Some("blake3:bb"), format!("{}: {rest}", differs("weights", "blake3:aa", "blake3:bb"))),
    ] {
        let others = ours.iter().copied().filter(|(other, _)| *other != name);
        let theirs: Vec<_> = others.chain(theirs.map(|theirs| (name, theirs))).collect();
        let why = difference(&settings(&ours), &settings(&theirs), FROM.into());
        assert_eq!(why, Some(expected));
    }
    assert_eq!(difference(&settings(&ours), &settings(&ours), FROM.into()), None);
}

/// Returns a request to join, and the follower's end of the connection.
fn request(place: usize) -> (JoinRequest, DuplexStream) {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let (reader, writer) = Stream::other(ours).into_split();
    let (out, writing) = outgoing(writer);
    let reader = MessageReader::new(reader);
    let (name, from) = (format!("stage {place}"), FROM.into());
    (JoinRequest { place, name, n_blocks: 8, layers_end: 1, from, reader, out, writing }, theirs)
}

/// Both requests were read before either process had its place.
#[tokio::test(start_paused = true)]
async fn one_of_two_processes_for_a_place_is_refused() {
    let entrance = entrance(settings(&[]));
    let ((first, _kept), (second, _second), (other, _other)) = (request(0), request(0), request(1));
    entrance.take_place(first).expect("the place is free");
    let refused = entrance.take_place(second).expect_err("the place is taken");
    assert_eq!(
        refused.why,
        "the process of stage 0 at 10.0.0.2:41000 is there already: end it first, or join another head or `--place`"
    );
    entrance.take_place(other).expect("the other place is free");
    let lost: Vec<Shutdown> = {
        let processes = entrance.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.iter().flatten().map(|process| process.lost.clone()).collect()
    };
    assert_eq!(lost.len(), 2);
    assert!(!lost.iter().any(Shutdown::requested), "the processes in the places go on");
    lost[0].trigger();
    entrance.take_place(request(0).0).expect("a lost process leaves its place");
    let refused = entrance.take_place(request(2).0).expect_err("no such place");
    assert_eq!(refused.why, "place 2 is none of the 2 of other processes: `--place` counts from 0");
}

/// Sends bytes to the head as the first ones of a connection. Returns the head's reason for the refusal, and its
/// answer.
async fn answer_to(bytes: &[u8]) -> (String, Vec<u8>) {
    let (ours, mut theirs) = tokio::io::duplex(1 << 16);
    theirs.write_all(bytes).await.expect("room");
    let entrance = entrance(settings(&[("version", "0.1.0")]));
    let joined = entrance.join(Stream::other(ours), FROM.into()).await;
    let mut answer = Vec::new();
    theirs.read_to_end(&mut answer).await.expect("the end");
    (joined.expect_err("no follower that fits").to_string(), answer)
}

/// Returns the bytes of a message: its length, its number, and its body.
fn first(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes()[..], &[0; 8], body].concat()
}

/// All versions read these bytes, so that a process of another version is told why it is refused. They never change.
#[tokio::test(start_paused = true)]
async fn a_follower_of_another_version_is_told_so() {
    // A `FromFollower` with a `Join`: 5 blocks, and one setting.
    let body = b"\x0a\x14\x10\x05\x1a\x10\x0a\x07version\x12\x050.0.9";
    let (why, answer) = answer_to(&first(body)).await;
    let expected = "version is 0.1.0 at the head and 0.0.9 at 10.0.0.2:41000: run the same executable in all processes of \
                    the node";
    assert_eq!(why, expected);
    // A `FromHead` with the sentence.
    let body = [&[0x12, expected.len() as u8][..], expected.as_bytes()].concat();
    assert_eq!(answer, first(&body));
}

#[tokio::test(start_paused = true)]
async fn what_sends_no_request_to_join_is_refused() {
    for (bytes, why) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "message 3544139754885357615 arrived instead of message 0"),
        (&first(&[0x32, 0]), "its first message is not a request to join"),
        (&first(&[]), "its first message is not a request to join"),
        (&[], "it was silent for 5 s"),
    ] {
        let (refused, answer) = answer_to(bytes).await;
        let expected = format!(
            "it has sent no request to join ({why}): `baton rank` needs the same executable, `cluster.secret_file` and \
             certificates as the head"
        );
        assert_eq!(refused, expected);
        assert_eq!(answer, b"");
    }
}
