//! Reads the answer to an exec probe or a hook and keeps only the output that its caller reads.
//!
//! The output of a command has up to 16 MiB. The bytes after the limit of each stream are dropped as they
//! arrive, so that they take nothing from the limit of the socket (`crate::budget`), which all probes or
//! hooks share.

use http_body_util::BodyExt as _;
use prost::encoding::WireType;
use quintlet_cri_api::v1::ExecSyncResponse;
use tokio::time::Instant;
use tonic::Code;

use super::call::{Call, MAX_REPLY, no_room, outcome_of, too_large};
use super::upstreams::Upstreams;
use crate::budget::GrowingReservation;
use crate::reply::{self, Reply};
use crate::upstream::SendError;

/// Maximum output of a probe (`pkg/probe/exec: maxReadLength`).
pub const MAX_OUTPUT: usize = 10 * 1024;

/// Bytes before a gRPC message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Largest number of bytes of a varint.
const VARINT: u32 = 10;

/// The answer is no uncompressed ExecSyncResponse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the runtime's answer to ExecSync cannot be read")]
pub(super) struct Unreadable;

/// The next bytes of the answer.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// The gRPC prefix, of which some bytes were read.
    Prefix(usize),
    Tag(Varint),
    Length {
        field: u64,
        varint: Varint,
    },
    Number {
        field: u64,
        varint: Varint,
    },
    /// The content of a field.
    Content {
        field: u64,
        left: u64,
    },
}

/// A varint of which some bytes were read.
#[derive(Debug, Clone, Copy, Default)]
struct Varint {
    value: u64,
    read: u32,
}

impl Varint {
    /// Adds a byte. Returns the value with the last one.
    fn push(&mut self, byte: u8) -> Result<Option<u64>, Unreadable> {
        if self.read >= VARINT {
            return Err(Unreadable);
        }
        let shift = self.read.saturating_mul(7);
        self.value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        self.read = self.read.saturating_add(1);
        Ok((byte & 0x80 == 0).then_some(self.value))
    }
}

/// An answer that is being read.
#[derive(Debug)]
pub(super) struct ShortOutput {
    next: Next,
    answer: ExecSyncResponse,
    /// Bytes of each stream that are kept.
    max: usize,
}

impl ShortOutput {
    pub(super) fn new(max: usize) -> Self {
        Self { next: Next::Prefix(0), answer: ExecSyncResponse::default(), max }
    }

    /// Reads the next bytes.
    ///
    /// # Errors
    /// They do not belong to an ExecSyncResponse.
    pub(super) fn read(&mut self, mut bytes: &[u8]) -> Result<(), Unreadable> {
        while let Some((first, rest)) = bytes.split_first() {
            if let Next::Content { field, left } = self.next {
                let here = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let (content, behind) = bytes.split_at(here);
                self.keep(field, content);
                bytes = behind;
                self.next = content_of(field, left.saturating_sub(u64::try_from(here).unwrap_or(u64::MAX)));
                continue;
            }
            bytes = rest;
            self.next = self.after(*first)?;
        }
        Ok(())
    }

    /// Returns what follows a byte outside of a content.
    fn after(&mut self, byte: u8) -> Result<Next, Unreadable> {
        Ok(match self.next {
            Next::Prefix(0) if byte != 0 => return Err(Unreadable),
            Next::Prefix(read) if read.saturating_add(1) < PREFIX => Next::Prefix(read.saturating_add(1)),
            Next::Prefix(_) => Next::Tag(Varint::default()),
            Next::Tag(mut varint) => match varint.push(byte)? {
                Some(tag) => after_tag(tag)?,
                None => Next::Tag(varint),
            },
            Next::Length { field, mut varint } => match varint.push(byte)? {
                Some(length) => content_of(field, length),
                None => Next::Length { field, varint },
            },
            Next::Number { field, mut varint } => match varint.push(byte)? {
                Some(number) => {
                    if field == 3 {
                        // An int32 is sent as its 64 bits.
                        self.answer.exit_code =
                            u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0).cast_signed();
                    }
                    Next::Tag(Varint::default())
                }
                None => Next::Number { field, varint },
            },
            Next::Content { .. } => return Err(Unreadable),
        })
    }

    fn keep(&mut self, field: u64, content: &[u8]) {
        let output = match field {
            1 => &mut self.answer.stdout,
            2 => &mut self.answer.stderr,
            _ => return,
        };
        let room = self.max.saturating_sub(output.len()).min(content.len());
        output.extend_from_slice(&content[..room]);
    }

    /// Returns the answer, with the kept bytes of each stream.
    ///
    /// # Errors
    /// The answer ended within a field, or before its gRPC prefix.
    pub(super) fn finish(self) -> Result<ExecSyncResponse, Unreadable> {
        match self.next {
            Next::Tag(Varint { read: 0, .. }) => Ok(self.answer),
            Next::Prefix(_)
            | Next::Tag(_)
            | Next::Length { .. }
            | Next::Number { .. }
            | Next::Content { .. } => Err(Unreadable),
        }
    }
}

fn after_tag(tag: u64) -> Result<Next, Unreadable> {
    let field = tag >> 3;
    match WireType::try_from(tag & 7).map_err(|_| Unreadable)? {
        WireType::Varint => Ok(Next::Number { field, varint: Varint::default() }),
        WireType::LengthDelimited => Ok(Next::Length { field, varint: Varint::default() }),
        // A later version of the CRI may have other fields.
        WireType::SixtyFourBit => Ok(Next::Content { field: 0, left: 8 }),
        WireType::ThirtyTwoBit => Ok(Next::Content { field: 0, left: 4 }),
        WireType::StartGroup | WireType::EndGroup => Err(Unreadable),
    }
}

fn content_of(field: u64, left: u64) -> Next {
    if left == 0 { Next::Tag(Varint::default()) } else { Next::Content { field, left } }
}

/// Sends an exec of a command. Returns its reply with `max` bytes of each output stream at most.
pub(super) async fn exchange(
    upstreams: &Upstreams,
    call: &Call,
    max: usize,
    deadline: Option<Instant>,
) -> Result<Reply, SendError> {
    let method = call.policy.method;
    let response = upstreams.send_as(call, method, deadline).await?;
    let (head, mut body) = response.into_parts();
    let mut reply = Reply::from_head(head.status, head.headers);
    let (mut size, mut has_message) = (0_usize, false);
    let mut output = ShortOutput::new(max);
    let mut readable = Ok(());
    while let Some(frame) = body.frame().await {
        match frame.map_err(SendError::Interrupted)?.into_data() {
            Ok(data) => {
                has_message |= !data.is_empty();
                size = size.saturating_add(data.len());
                if size > MAX_REPLY {
                    return Ok(too_large(method, MAX_REPLY));
                }
                readable = readable.and_then(|()| output.read(&data));
            }
            Err(frame) => reply.trailers = frame.into_trailers().ok(),
        }
    }
    if has_message {
        match readable.and_then(|()| output.finish()) {
            Ok(answer) => {
                let data = reply::frame(&answer);
                let mut held = GrowingReservation::default();
                if let Err(full) = call.budget.reserve(&mut held, data.len()) {
                    return Ok(no_room(method, full));
                }
                reply.held = held.finish();
                reply.data.push(data);
            }
            Err(error) => {
                let (text, outcome) = (error.to_string(), quintlet_model::outcome::Outcome::Unknown);
                return Ok(Reply::local(Code::Internal, text, outcome, std::time::Duration::ZERO));
            }
        }
    }
    reply.outcome = outcome_of(method, &reply);
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_in_pieces(message: &ExecSyncResponse, piece: usize) -> ExecSyncResponse {
        let frame = reply::frame(message);
        let mut output = ShortOutput::new(MAX_OUTPUT);
        for piece in frame.chunks(piece) {
            output.read(piece).unwrap();
        }
        output.finish().unwrap()
    }

    #[test]
    fn an_answer_is_read_in_pieces_of_any_size_and_its_output_is_cut() {
        let text = |n: usize| (0..=255).cycle().take(n).collect::<Vec<u8>>();
        for (stdout, stderr, exit_code) in [
            (0, 0, 0),
            (1, 0, -1),
            (300, 200, 137),
            (MAX_OUTPUT, 1, 1),
            (3 * MAX_OUTPUT, 2 * MAX_OUTPUT, i32::MIN),
        ] {
            let message = ExecSyncResponse { stdout: text(stdout), stderr: text(stderr), exit_code };
            let mut want = message.clone();
            want.stdout.truncate(MAX_OUTPUT);
            want.stderr.truncate(MAX_OUTPUT);
            for piece in [1, 2, 3, 7, 1000, 1 << 20] {
                assert_eq!(read_in_pieces(&message, piece), want, "{stdout} {stderr} {piece}");
            }
        }
    }

    #[test]
    fn a_compressed_a_cut_and_a_corrupt_answer_are_errors() {
        let whole = reply::frame(&ExecSyncResponse { stdout: vec![7; 20], stderr: vec![], exit_code: 300 });
        for cut in 0..whole.len() {
            let mut output = ShortOutput::new(MAX_OUTPUT);
            output.read(&whole[..cut]).unwrap();
            // After the prefix or a field, the answer is a shorter one.
            assert_eq!(output.finish().is_ok(), cut == 5 || cut == 27, "{cut}");
        }
        assert_eq!(ShortOutput::new(MAX_OUTPUT).read(&[1]), Err(Unreadable));
        assert_eq!(ShortOutput::new(MAX_OUTPUT).read(&[0, 0, 0, 0, 9, 0x0b]), Err(Unreadable), "a group");
        let endless = [[0; 5].as_slice(), &[0xff; 11]].concat();
        assert_eq!(ShortOutput::new(MAX_OUTPUT).read(&endless), Err(Unreadable));
    }
}
