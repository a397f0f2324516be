//! Frames of SPDY/3.1 that a client sends.

use std::io;

use flate2::{Compress, FlushCompress, Status};

/// Largest stream ID, which has 31 bits.
pub(crate) const MAX_STREAM_ID: u32 = 0x7fff_ffff;
/// Distinguishes control frames from data frames.
pub(crate) const CONTROL_BIT: u32 = 0x8000_0000;
pub(crate) const VERSION: u16 = 3;
pub(crate) const SYN_STREAM: u16 = 1;
pub(crate) const RST_STREAM: u16 = 3;
pub(crate) const PING: u16 = 6;
pub(crate) const GOAWAY: u16 = 7;
/// Flag of the last frame of a half of a stream.
pub(crate) const FIN: u8 = 1;

fn frame(head: u32, flags: u8, body: &[u8]) -> Vec<u8> {
    // The length has 24 bits, far more than a block needs.
    let length = u32::try_from(body.len()).unwrap_or(0) & 0x00ff_ffff;
    let mut out = Vec::with_capacity(body.len().saturating_add(8));
    out.extend(head.to_be_bytes());
    out.extend((u32::from(flags) << 24 | length).to_be_bytes());
    out.extend(body);
    out
}

/// Returns a control frame: SYN_STREAM, PING and so on.
pub(crate) fn control(kind: u16, flags: u8, body: &[u8]) -> Vec<u8> {
    frame(CONTROL_BIT | u32::from(VERSION) << 16 | u32::from(kind), flags, body)
}

/// Returns a frame with data of a stream.
pub(crate) fn data(stream: u32, flags: u8, body: &[u8]) -> Vec<u8> {
    frame(stream, flags, body)
}

/// Compresses the headers of a stream. All blocks of a connection are one zlib stream.
pub(crate) fn header_block(zlib: &mut Compress, headers: &[(&str, &str)]) -> io::Result<Vec<u8>> {
    let mut plain = Vec::new();
    let number = |out: &mut Vec<u8>, n: usize| out.extend(u32::try_from(n).unwrap_or(0).to_be_bytes());
    number(&mut plain, headers.len());
    for (name, value) in headers {
        for text in [name.to_ascii_lowercase().as_str(), value] {
            number(&mut plain, text.len());
            plain.extend(text.as_bytes());
        }
    }
    // Twice the length, and room for the flush, suffices for short headers.
    let mut out = Vec::with_capacity(plain.len().saturating_mul(2).saturating_add(64));
    match zlib.compress_vec(&plain, &mut out, FlushCompress::Sync) {
        Ok(Status::Ok | Status::BufError) => Ok(out),
        Ok(Status::StreamEnd) | Err(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}
