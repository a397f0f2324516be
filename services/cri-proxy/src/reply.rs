//! Answers as frames: what the runtime said, untouched, and our trailers behind it.
use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use quintlet_kit::contain::Panic;
use quintlet_model::outcome::{OUTCOME_TRAILER, Outcome, QUEUED_MS_TRAILER};
use tonic::{Code, Status};

use crate::budget::Held;

/// Any error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// A body on its way in either direction.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Reply {
    /// HTTP status, 200 from every gRPC server.
    pub http: StatusCode,
    /// Leading metadata.
    pub headers: HeaderMap,
    /// Body bytes as they came.
    pub data: Vec<Bytes>,
    /// Trailing metadata; None when the answer was one header block.
    pub trailers: Option<HeaderMap>,
    /// What became of the call.
    pub outcome: Outcome,
    /// How long it waited before it was sent.
    pub queued: Duration,
    /// Whether this proxy made it and not the runtime.
    ours: bool,
    /// What its body holds of the budget of its socket.
    pub held: Held,
}

impl Reply {
    /// An answer of this proxy's own.
    #[must_use]
    pub fn refused(code: Code, message: impl Into<String>, outcome: Outcome, queued: Duration) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        let status = Status::new(code, message);
        if status.add_header(&mut headers).is_err() {
            headers.insert("grpc-status", HeaderValue::from(code as i32));
        }
        let held = Held::default();
        Self {
            http: StatusCode::OK,
            headers,
            data: Vec::new(),
            trailers: None,
            outcome,
            queued,
            ours: true,
            held,
        }
    }

    /// The answer to a call whose handling panicked. The call may have been sent before.
    #[must_use]
    pub fn panicked(panic: &Panic) -> Self {
        let message = format!("cri-proxy {panic}");
        Self::refused(Code::Internal, message, Outcome::Unknown, Duration::ZERO)
    }

    /// An answer of the runtime, frames and outcome still to come.
    #[must_use]
    pub fn begun(http: StatusCode, headers: HeaderMap) -> Self {
        let (outcome, queued) = (Outcome::Unknown, Duration::ZERO);
        let held = Held::default();
        Self { http, headers, data: Vec::new(), trailers: None, outcome, queued, ours: false, held }
    }

    /// Whether this proxy made it and not the runtime.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.ours
    }

    /// The gRPC status. An answer without one is none of a gRPC server: code Unknown.
    #[must_use]
    pub fn status(&self) -> Status {
        status_in(self.trailers.as_ref().unwrap_or(&self.headers))
            .or_else(|| status_in(&self.headers))
            .unwrap_or_else(|| Status::unknown(format!("HTTP {} without a gRPC status", self.http)))
    }

    /// What comes behind an answer that has begun: data, and the status with our trailers.
    #[must_use]
    pub fn into_last_frames(self) -> VecDeque<Frame<Bytes>> {
        let status = self.status();
        let mut trailers = self.trailers.unwrap_or_default();
        if status_in(&trailers).is_none() && status.add_header(&mut trailers).is_err() {
            trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
        }
        mark(&mut trailers, self.outcome, self.queued);
        self.data.into_iter().map(Frame::data).chain([Frame::trailers(trailers)]).collect()
    }

    /// As an HTTP answer with our trailers.
    #[must_use]
    pub fn into_response(mut self) -> Response<Body> {
        let mut frames: VecDeque<Frame<Bytes>> = self.data.into_iter().map(Frame::data).collect();
        if let Some(mut trailers) = self.trailers {
            mark(&mut trailers, self.outcome, self.queued);
            frames.push_back(Frame::trailers(trailers));
        } else {
            mark(&mut self.headers, self.outcome, self.queued);
        }
        let mut response = Response::new(Body::new(Frames { frames, _held: self.held }));
        *response.status_mut() = self.http;
        *response.headers_mut() = self.headers;
        response
    }
}

/// Adds our trailers.
pub fn mark(trailers: &mut HeaderMap, outcome: Outcome, queued: Duration) {
    trailers.insert(OUTCOME_TRAILER, HeaderValue::from_static(outcome.name()));
    let ms = u64::try_from(queued.as_millis()).unwrap_or(u64::MAX);
    trailers.insert(QUEUED_MS_TRAILER, HeaderValue::from(ms));
}

/// The gRPC status in a header block, if there is one.
#[must_use]
pub fn status_in(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers)
}

/// Frames at hand. Its size stays unsaid, or hyper would add a content-length the runtime did not send.
#[derive(Debug)]
pub struct Frames {
    frames: VecDeque<Frame<Bytes>>,
    _held: Held,
}

impl Frames {
    /// A body of these frames, which holds nothing of a budget.
    #[must_use]
    pub fn new(frames: VecDeque<Frame<Bytes>>) -> Self {
        Self { frames, _held: Held::default() }
    }

    /// One body of bytes.
    #[must_use]
    pub fn of(data: Vec<Bytes>) -> Body {
        Body::new(Self::new(data.into_iter().map(Frame::data).collect()))
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(self.frames.pop_front().map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
    }
}

/// Headers that belong to one hop, or that this proxy sets itself.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection" | "keep-alive" | "proxy-connection" | "te" | "transfer-encoding" | "upgrade" | "host"
    )
}

/// The caller's metadata as the runtime gets it: hop-by-hop headers and our own `quintlet-*` are left out.
#[must_use]
pub fn forwardable(headers: &HeaderMap) -> HeaderMap {
    let mut out: HeaderMap = headers
        .iter()
        .filter(|(name, _)| !is_hop_by_hop(name) && !name.as_str().starts_with("quintlet-"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect::<Vec<_>>()
        .into_iter()
        .fold(HeaderMap::new(), |mut map, (name, value)| {
            map.append(name, value);
            map
        });
    out.insert(http::header::TE, HeaderValue::from_static("trailers"));
    out
}

/// A request to the runtime.
#[must_use]
pub fn request(path: &str, headers: HeaderMap, body: Body) -> Request<Body> {
    let mut request = Request::new(body);
    *request.method_mut() = http::Method::POST;
    *request.version_mut() = http::Version::HTTP_2;
    // The path came in as a valid path; what does not fit behind an authority goes to "/" and is refused there.
    *request.uri_mut() = http::Uri::builder()
        .scheme("http")
        .authority("localhost")
        .path_and_query(path)
        .build()
        .unwrap_or_else(|_| http::Uri::from_static("http://localhost/"));
    *request.headers_mut() = headers;
    request
}

/// Any body as [`Body`].
pub fn boxed<B>(body: B) -> Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

/// What is wrong with the frames of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    /// Fewer bytes than the prefix promises, or none.
    #[error("the body is cut: {got} bytes where the gRPC prefix promises {promised}")]
    Cut {
        /// Bytes there.
        got: usize,
        /// Bytes promised, prefix included.
        promised: usize,
    },
    /// More bytes than one message.
    #[error("the body has bytes behind its one message")]
    Trailing,
    /// The flag byte is neither 0 nor 1.
    #[error("the gRPC prefix begins with {0}, neither 0 nor 1")]
    Flag(u8),
    /// A compressed message cannot be read, hence not fenced.
    #[error("compressed messages are not taken here")]
    Compressed,
}

/// The one message in the body of a unary call.
///
/// # Errors
/// When the body is not exactly one uncompressed gRPC frame.
pub fn message(body: &Bytes) -> Result<Bytes, BadFrame> {
    let Some((prefix, rest)) = body.split_at_checked(5) else {
        return Err(BadFrame::Cut { got: body.len(), promised: 5 });
    };
    let &[flag, a, b, c, d] = prefix else { return Err(BadFrame::Cut { got: body.len(), promised: 5 }) };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    match (flag, rest.len()) {
        (0, got) if got == length => Ok(body.slice(5..)),
        (0, got) if got > length => Err(BadFrame::Trailing),
        (0, _) => Err(BadFrame::Cut { got: body.len(), promised: length.saturating_add(5) }),
        (1, _) => Err(BadFrame::Compressed),
        (flag, _) => Err(BadFrame::Flag(flag)),
    }
}

/// A message in its gRPC frame.
#[must_use]
pub fn framed(message: &impl prost::Message) -> Bytes {
    let encoded = message.encode_to_vec();
    let mut out = Vec::with_capacity(encoded.len().saturating_add(5));
    out.push(0);
    out.extend_from_slice(&u32::try_from(encoded.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(&encoded);
    out.into()
}

/// Reads `grpc-timeout`.
#[must_use]
pub fn grpc_timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(n.saturating_mul(60))),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

/// Writes `grpc-timeout`: at most eight digits.
#[must_use]
pub fn grpc_timeout_value(timeout: Duration) -> HeaderValue {
    let ms = timeout.as_millis();
    let text =
        if ms <= 99_999_999 { format!("{ms}m") } else { format!("{}S", timeout.as_secs().min(99_999_999)) };
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("99999999S"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_one_message_or_refused() {
        let read = |bytes: &'static [u8]| message(&Bytes::from_static(bytes));
        assert_eq!(read(&[0, 0, 0, 0, 2, 7, 8]), Ok(Bytes::from_static(&[7, 8])));
        assert_eq!(read(&[0, 0, 0, 0, 0]), Ok(Bytes::new()));
        assert_eq!(read(&[]), Err(BadFrame::Cut { got: 0, promised: 5 }));
        assert_eq!(read(&[0, 0, 0, 0, 3, 7]), Err(BadFrame::Cut { got: 6, promised: 8 }));
        assert_eq!(read(&[0, 0, 0, 0, 1, 7, 8]), Err(BadFrame::Trailing));
        assert_eq!(read(&[9, 0, 0, 0, 0]), Err(BadFrame::Flag(9)));
        assert_eq!(read(&[1, 0, 0, 0, 0]), Err(BadFrame::Compressed));
        assert!(matches!(read(&[0, 255, 255, 255, 255]), Err(BadFrame::Cut { .. })));
    }

    #[test]
    fn timeouts_survive_the_round_trip() {
        for ms in [0, 1, 1500, 120_000, 99_999_999, 100_000_000_000] {
            let timeout = Duration::from_millis(ms);
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", grpc_timeout_value(timeout));
            let back = grpc_timeout(&headers).unwrap();
            assert_eq!(back.as_secs(), timeout.as_secs().min(99_999_999), "{ms}");
        }
        for bad in ["", "m", "1", "1x", "123456789S", "-1S", "é"] {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", HeaderValue::from_bytes(bad.as_bytes()).unwrap());
            assert_eq!(grpc_timeout(&headers), None, "{bad}");
        }
    }

    #[test]
    fn our_own_and_hop_by_hop_headers_stay_here() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("quintlet-owner-epoch", "1"),
            ("connection", "x"),
            ("te", "trailers"),
            ("containerd-namespace", "k8s.io"),
            ("x-many", "a"),
            ("x-many", "b"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        let out = forwardable(&headers);
        assert_eq!(out.get_all("x-many").iter().count(), 2);
        assert_eq!(out.get("containerd-namespace").unwrap(), "k8s.io");
        assert_eq!(out.get("te").unwrap(), "trailers");
        assert_eq!(out.len(), 4);
    }
}
