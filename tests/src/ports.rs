//! Ports for the processes of a test.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};

/// Returns an address that no other test gets, until this process ends. It is below the ports that the system gives to clients.
///
/// A listener opens the port some time later. Until then a UDP socket with the same number shows tests in other processes that
/// it is taken.
pub fn free_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static TAKEN: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    let first = 12_000 + (std::process::id() % 1_000) as u16 * 16;
    let next = || SocketAddr::from(([127, 0, 0, 1], first + NEXT.fetch_add(1, Ordering::Relaxed) % 4_000));
    let taken = |addr| {
        let mark = UdpSocket::bind(addr).ok()?;
        TcpListener::bind(addr).ok().map(|_| (mark, addr))
    };
    let (mark, addr) = std::iter::repeat_with(next).take(4_000).find_map(taken).expect("a free port");
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner).push(mark);
    addr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_given_once() {
        let first = free_addr();
        UdpSocket::bind(first).expect_err("other tests see that it is taken");
        drop(TcpListener::bind(first).expect("its process can listen"));
        assert_ne!(free_addr(), first);
    }
}
