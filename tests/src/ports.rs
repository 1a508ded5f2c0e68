//! Free ports, for processes that need fixed ones.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns an address with a free port. It is below the range from which the kernel takes ports for
/// connections, so it stays free until it is bound.
pub fn free_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 12_000 + (std::process::id() % 1_000) as u16 * 16;
    let next = || first + NEXT.fetch_add(1, Ordering::Relaxed) % 4_000;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let port = std::iter::repeat_with(next).take(4_000).find(is_free).expect("a free port");
    SocketAddr::from(([127, 0, 0, 1], port))
}
