//! The conformance tests of networks, run on each of them.

use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::*;

const WITHIN: Duration = Duration::from_secs(10);

async fn listen(net: &dyn Net) -> (Box<dyn Listener>, String) {
    let listener = net.listen("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound").to_string();
    (listener, addr)
}

async fn pair(net: &dyn Net) -> (Stream, Stream) {
    let (mut listener, addr) = listen(net).await;
    let (near, far) = tokio::join!(net.connect(&addr), listener.accept());
    (near.expect("connected"), far.expect("accepted").0)
}

async fn conformance(net: &dyn Net) {
    let all = async {
        bytes_arrive_in_many_buffers(net).await;
        halves_work_from_two_tasks(net).await;
        a_connection_without_listener_is_refused(net).await;
        an_address_is_taken_once(net).await;
        dropping_one_end_ends_the_other(net).await;
    };
    timeout(WITHIN, all).await.expect("in time");
}

#[tokio::test]
async fn tcp_conforms() {
    conformance(&TcpNet).await;
}

#[tokio::test(start_paused = true)]
async fn memory_conforms() {
    conformance(&MemoryNet::new()).await;
}

/// Writes eight bytes and reads them in pieces: how many reads it takes depends on the network, the order
/// does not.
async fn bytes_arrive_in_many_buffers(net: &dyn Net) {
    let (mut near, mut far) = pair(net).await;
    near.write_all(b"abcdefgh").await.expect("room");
    near.shutdown().await.expect("open");
    let mut received = Vec::new();
    loop {
        let (mut first, mut second) = ([0; 4], [0; 4]);
        let mut bufs = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        let n = far.read_vectored(&mut bufs).await.expect("open");
        received.extend_from_slice(&[first, second].concat()[..n]);
        if n == 0 {
            break;
        }
    }
    assert_eq!(received, b"abcdefgh");
}

async fn halves_work_from_two_tasks(net: &dyn Net) {
    let (near, far) = pair(net).await;
    let (mut near_reader, mut near_writer) = near.into_split();
    let (mut far_reader, mut far_writer) = far.into_split();
    let echo = async {
        let n = tokio::io::copy(&mut far_reader, &mut far_writer).await;
        far_writer.shutdown().await.and(n)
    };
    let send = async {
        near_writer.write_all(&[7; 1_000_000]).await?;
        near_writer.shutdown().await
    };
    let mut received = Vec::new();
    let (echoed, sent, read) = tokio::join!(echo, send, near_reader.read_to_end(&mut received));
    sent.expect("sent");
    assert_eq!((echoed.expect("echoed"), read.expect("read")), (1_000_000, 1_000_000));
}

async fn a_connection_without_listener_is_refused(net: &dyn Net) {
    let (listener, addr) = listen(net).await;
    drop(listener);
    let error = net.connect(&addr).await.expect_err("no listener");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

async fn an_address_is_taken_once(net: &dyn Net) {
    let (listener, addr) = listen(net).await;
    let error = net.listen(&addr).await.expect_err("it is taken");
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    drop(listener);
    net.listen(&addr).await.expect("it is free again");
}

async fn dropping_one_end_ends_the_other(net: &dyn Net) {
    let (near, mut far) = pair(net).await;
    drop(near);
    assert_eq!(far.read(&mut [0; 4]).await.expect("an end, not an error"), 0);
}

#[tokio::test]
async fn tcp_reads_into_many_buffers_at_once() {
    let check = async {
        let (mut near, mut far) = pair(&TcpNet).await;
        near.write_all(b"abcdefgh").await.expect("room");
        let (mut first, mut second) = ([0; 4], [0; 4]);
        let mut bufs = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
        assert_eq!(far.read_vectored(&mut bufs).await.expect("open"), 8);
        assert_eq!((&first, &second), (b"abcd", b"efgh"));
    };
    timeout(WITHIN, check).await.expect("in time");
}

#[tokio::test]
async fn tcp_is_tuned() {
    let (near, far) = timeout(WITHIN, pair(&TcpNet)).await.expect("in time");
    for stream in [&near, &far] {
        let Inner::Tcp(tcp) = &stream.0 else { panic!("not tcp") };
        assert!(tcp.nodelay().expect("a socket"));
        assert!(SockRef::from(tcp).keepalive().expect("a socket"));
        assert!(stream.is_write_vectored());
    }
}
