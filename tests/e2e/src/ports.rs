//! Ports for servers that a test starts.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// First port of all blocks. The blocks end below the ports that the kernel assigns to connections and to
/// listeners on port 0, which another test may get between the search and the use of a port.
const FIRST: u16 = 10_000;

/// Number of ports of a process.
const BLOCK: u16 = 16;

/// Number of blocks. The tests of quintlet-localnode use ports from 30,000 on.
const BLOCKS: u16 = 1_200;

/// Returns free ports from the block of this process. Another test, which is another process, has another
/// block.
///
/// # Panics
/// Panics if the block has too few free ports.
#[must_use]
pub fn free<const N: usize>() -> [u16; N] {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let block = u16::try_from(std::process::id() % u32::from(BLOCKS)).expect("a block has a small number");
    let mut candidates =
        (0..2 * BLOCK).map(|_| FIRST + block * BLOCK + NEXT.fetch_add(1, Ordering::Relaxed) % BLOCK);
    std::array::from_fn(|_| {
        candidates
            .find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok())
            .expect("the block of this process has free ports")
    })
}
