//! The first bytes of a link's first stream: the addresses of both ends' queue pairs, and of the receiver's memory.
//!
//! | who | bytes |
//! |---|---|
//! | both, first | magic `BTRD`, number of the stream or of the receiver's ranks (2), number of queue pairs (2) |
//! | both, then | GID (16), LID (2), largest packet (2) |
//! | both, then, each queue pair | its number (4), its first packet (4) |
//! | receiver, then, each rank | key of its memory (4), number of regions (2) |
//! | receiver, then, each region of it | start address (8) |
//!
//! All numbers are little-endian. Other streams of the link send the first line only, and get no answer.

use std::io;

use device::verbs::QueuePairAddress;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use types::layout::RANKS_MAX;

const MAGIC: [u8; 4] = *b"BTRD";
/// Limit of queue pairs of one link.
pub(super) const PAIRS_MAX: u16 = 8;
/// Limit of regions of one rank's memory. A model has fewer layers.
const REGIONS_MAX: u16 = 8192;

/// The first line of a stream's greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct First {
    /// The stream's number; in an answer, the number of ranks.
    pub(super) n: u16,
    pub(super) pairs: u16,
}

/// One end's description of its queue pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) pairs: Vec<QueuePairAddress>,
    pub(super) mtu: u32,
    /// The memory that the end that reads this may write into. Only a receiver sends it.
    pub(super) ranks: Vec<RankThere>,
}

/// The memory of one rank of the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankThere {
    pub(super) key: u32,
    /// The start addresses of the memory's regions, as the other end's device uses them.
    pub(super) starts: Vec<u64>,
}

pub(super) async fn read_first(from: &mut (impl AsyncRead + Unpin)) -> io::Result<First> {
    let mut magic = [0; 4];
    from.read_exact(&mut magic).await?;
    let first = First { n: from.read_u16_le().await?, pairs: from.read_u16_le().await? };
    if magic == MAGIC && first.pairs <= PAIRS_MAX { Ok(first) } else { Err(not_ours()) }
}

pub(super) async fn write_first(to: &mut (impl AsyncWrite + Unpin), first: First) -> io::Result<()> {
    let mut bytes = Vec::new();
    put_first(&mut bytes, first);
    to.write_all(&bytes).await
}

/// Reads the rest of a sender's greeting, after its first line.
pub(super) async fn read_end(from: &mut (impl AsyncRead + Unpin), pairs: u16) -> io::Result<End> {
    let mut gid = [0; 16];
    from.read_exact(&mut gid).await?;
    let (lid, mtu) = (from.read_u16_le().await?, from.read_u16_le().await?.into());
    let mut end = End { pairs: Vec::new(), mtu, ranks: Vec::new() };
    for _ in 0..pairs {
        let (number, first_packet) = (from.read_u32_le().await?, from.read_u32_le().await?);
        end.pairs.push(QueuePairAddress { gid, lid, number, first_packet });
    }
    Ok(end)
}

/// Reads a receiver's whole answer.
pub(super) async fn read_answer(from: &mut (impl AsyncRead + Unpin), pairs: u16) -> io::Result<End> {
    let first = read_first(from).await?;
    if first.n > RANKS_MAX || first.pairs != pairs {
        return Err(not_ours());
    }
    let mut end = read_end(from, pairs).await?;
    for _ in 0..first.n {
        end.ranks.push(read_rank(from).await?);
    }
    Ok(end)
}

async fn read_rank(from: &mut (impl AsyncRead + Unpin)) -> io::Result<RankThere> {
    let (key, n_regions) = (from.read_u32_le().await?, from.read_u16_le().await?);
    if n_regions > REGIONS_MAX {
        return Err(not_ours());
    }
    let mut starts = Vec::new();
    for _ in 0..n_regions {
        starts.push(from.read_u64_le().await?);
    }
    Ok(RankThere { key, starts })
}

/// Writes a sender's greeting, which has no ranks, or a receiver's answer.
pub(super) async fn write_end(to: &mut (impl AsyncWrite + Unpin), end: &End) -> io::Result<()> {
    let mut bytes = Vec::new();
    put_first(&mut bytes, First { n: end.ranks.len() as u16, pairs: end.pairs.len() as u16 });
    let (gid, lid) = end.pairs.first().map_or(([0; 16], 0), |pair| (pair.gid, pair.lid));
    bytes.extend(gid);
    bytes.extend(lid.to_le_bytes());
    bytes.extend((end.mtu as u16).to_le_bytes());
    for pair in &end.pairs {
        bytes.extend(pair.number.to_le_bytes());
        bytes.extend(pair.first_packet.to_le_bytes());
    }
    for rank in &end.ranks {
        bytes.extend(rank.key.to_le_bytes());
        bytes.extend((rank.starts.len() as u16).to_le_bytes());
        bytes.extend(rank.starts.iter().flat_map(|start| start.to_le_bytes()));
    }
    to.write_all(&bytes).await
}

fn put_first(bytes: &mut Vec<u8>, first: First) {
    bytes.extend(MAGIC);
    bytes.extend(first.n.to_le_bytes());
    bytes.extend(first.pairs.to_le_bytes());
}

fn not_ours() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer does not speak this protocol")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(ranks: &[&[u64]]) -> End {
        let pair = |number| QueuePairAddress { gid: [7; 16], lid: 9, number, first_packet: number * 2 };
        let rank = |starts: &&[u64]| RankThere { key: 0xdead_beef, starts: starts.to_vec() };
        End { pairs: vec![pair(1), pair(0x00ab_cdef)], mtu: 5, ranks: ranks.iter().map(rank).collect() }
    }

    #[tokio::test]
    async fn both_greetings_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        write_end(&mut bytes, &end(&[])).await.expect("a vector takes all");
        let mut from = &bytes[..];
        assert_eq!(read_first(&mut from).await.expect("it is there"), First { n: 0, pairs: 2 });
        assert_eq!(read_end(&mut from, 2).await.expect("it is there"), end(&[]));
        assert!(from.is_empty());
        let answer = end(&[&[1 << 40, u64::MAX], &[], &[3]]);
        bytes.clear();
        write_end(&mut bytes, &answer).await.expect("a vector takes all");
        assert_eq!(read_answer(&mut &bytes[..], 2).await.expect("it is there"), answer);
        assert!(read_answer(&mut &bytes[..], 1).await.is_err(), "it is an answer to another question");
        for cut in 0..bytes.len() {
            assert!(read_answer(&mut &bytes[..cut], 2).await.is_err(), "{cut} bytes are not all");
        }
    }

    #[tokio::test]
    async fn nothing_beyond_the_bounds_is_read() {
        assert!(read_first(&mut &b"GET / HTTP/1.1"[..]).await.is_err());
        for (first, wanted) in
            [(First { n: 0, pairs: PAIRS_MAX + 1 }, PAIRS_MAX + 1), (First { n: RANKS_MAX + 1, pairs: 0 }, 0)]
        {
            let mut bytes = Vec::new();
            write_first(&mut bytes, first).await.expect("a vector takes all");
            bytes.resize(1000, 0);
            assert!(read_answer(&mut &bytes[..], wanted).await.is_err(), "{first:?}");
        }
    }
}
