//! Lists: by stream where the runtime has it, in whole where not, and to the caller as it asked.
//!
//! A list is taken in whole before its caller gets any of it: one that fails in the middle leaves nothing half read, may be asked
//! for again, and a slow caller holds up neither the lane nor the connection.
use super::*;
use crate::lists::{self, CHUNK, Twins};

/// All of a list may be this large: 18,000 containers with 4 KiB of labels and annotations each are 72 MiB.
const MAX_LIST: usize = 128 << 20;

impl Forwarder {
    /// Asks for a list once. What the runtime lacks is remembered for as long as the connection lasts.
    pub(super) async fn list_once(
        &self,
        call: &Call,
        twins: Twins,
        deadline: Option<Instant>,
    ) -> Result<Reply, SendError> {
        let path = format!("/{}/{}", call.policy.service, call.policy.method);
        let connection = self.upstream_of(&path).connection().await?;
        if !self.lacking.has(twins.stream, connection) {
            let reply = self.exchange(call, twins.stream, deadline, MAX_LIST).await?;
            if !(reply.data.is_empty() && reply.status().code() == Code::Unimplemented) {
                return Ok(if twins.streamed {
                    reshaped(reply, call, chunks)
                } else {
                    reshaped(reply, call, whole)
                });
            }
            self.lacking.note(twins.stream, connection);
            tracing::debug!(method = twins.stream, "the runtime has no such stream");
        }
        let reply = self.exchange(call, twins.list, deadline, MAX_ANSWER).await?;
        Ok(if twins.streamed { reshaped(reply, call, cut_up) } else { reply })
    }
}

/// Why an answer cannot be passed on.
struct Unusable(Code, String);

/// A stream's messages as a stream.
fn chunks(messages: &[Bytes]) -> Result<Vec<Bytes>, Unusable> {
    Ok(lists::chunked(messages, CHUNK))
}

/// A stream's messages as one answer.
fn whole(messages: &[Bytes]) -> Result<Vec<Bytes>, Unusable> {
    let one = lists::joined(messages, MAX_ANSWER - 5).ok_or_else(|| {
        let text = format!("the list is larger than {MAX_ANSWER} bytes: its stream must be asked for");
        Unusable(Code::ResourceExhausted, text)
    })?;
    Ok(vec![one])
}

/// One answer as a stream.
fn cut_up(messages: &[Bytes]) -> Result<Vec<Bytes>, Unusable> {
    let mut parts = Vec::new();
    for message in messages {
        parts.extend(lists::fields(message).map_err(|e| Unusable(Code::Internal, e.to_string()))?);
    }
    Ok(lists::chunked(&parts, CHUNK))
}

/// The answer with its messages made anew; of one that failed nothing but the failure.
fn reshaped(mut reply: Reply, call: &Call, shape: fn(&[Bytes]) -> Result<Vec<Bytes>, Unusable>) -> Reply {
    if reply.status().code() != Code::Ok {
        reply.data.clear();
        return reply;
    }
    let body = Bytes::from(std::mem::take(&mut reply.data).concat());
    let made = lists::messages(body).map_err(|e| Unusable(Code::Internal, e.to_string()));
    match made.and_then(|messages| shape(&messages)) {
        Ok(data) => {
            reply.headers.remove(http::header::CONTENT_LENGTH);
            reply.data = data;
            reply
        }
        Err(Unusable(code, why)) => {
            let message = format!("the runtime's answer to {}: {why}", call.policy.method);
            Reply::refused(code, message, Outcome::Unknown, Duration::ZERO)
        }
    }
}
