//! Replies as frames: the runtime's reply, unchanged, with the proxy's trailers. Helpers for gRPC over raw
//! HTTP/2.
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

use crate::budget::Reservation;

/// An error of the body of a request or response, which ends its stream.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// The body of a response: bytes of gRPC frames, then trailers.
pub type Body = UnsyncBoxBody<Bytes, BoxError>;

/// A complete reply.
#[derive(Debug, Clone)]
pub struct Reply {
    /// HTTP status: 200 from every gRPC server.
    pub http: StatusCode,
    /// Leading metadata.
    pub headers: HeaderMap,
    /// Frames of the body.
    pub data: Vec<Bytes>,
    /// Trailing metadata. None for a trailers-only response.
    pub trailers: Option<HeaderMap>,
    /// Whether the runtime executed the call, for the trailers.
    pub outcome: Outcome,
    /// Time that the call waited before it was sent.
    pub queued: Duration,
    /// Whether the proxy made the reply, not the runtime.
    is_local: bool,
    /// Reservation of its body.
    pub held: Reservation,
}

impl Reply {
    /// Creates a reply of the proxy itself.
    #[must_use]
    pub fn local(code: Code, message: impl Into<String>, outcome: Outcome, queued: Duration) -> Self {
        let mut headers = HeaderMap::new();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        let status = Status::new(code, message);
        if status.add_header(&mut headers).is_err() {
            headers.insert("grpc-status", HeaderValue::from(code as i32));
        }
        let held = Reservation::default();
        Self {
            http: StatusCode::OK,
            headers,
            data: Vec::new(),
            trailers: None,
            outcome,
            queued,
            is_local: true,
            held,
        }
    }

    /// Creates the reply to a call whose handling panicked. The call may have been sent.
    #[must_use]
    pub fn panicked(panic: &Panic) -> Self {
        let message = format!("cri-proxy {panic}");
        Self::local(Code::Internal, message, Outcome::Unknown, Duration::ZERO)
    }

    /// Creates a reply of the runtime from its head.
    #[must_use]
    pub fn from_head(http: StatusCode, headers: HeaderMap) -> Self {
        let (outcome, queued) = (Outcome::Unknown, Duration::ZERO);
        let held = Reservation::default();
        Self { http, headers, data: Vec::new(), trailers: None, outcome, queued, is_local: false, held }
    }

    /// Returns whether the proxy made the reply, not the runtime.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// Returns the gRPC status. A response without one is not from a gRPC server and has code Unknown.
    #[must_use]
    pub fn status(&self) -> Status {
        status_from(self.trailers.as_ref().unwrap_or(&self.headers))
            .or_else(|| status_from(&self.headers))
            .unwrap_or_else(|| Status::unknown(format!("HTTP {} without a gRPC status", self.http)))
    }

    /// Returns the frames after the head: data, and trailers with status and outcome.
    #[must_use]
    pub fn into_last_frames(self) -> VecDeque<Frame<Bytes>> {
        let status = self.status();
        let mut trailers = self.trailers.unwrap_or_default();
        if status_from(&trailers).is_none() && status.add_header(&mut trailers).is_err() {
            trailers.insert("grpc-status", HeaderValue::from(status.code() as i32));
        }
        insert_trailers(&mut trailers, self.outcome, self.queued);
        self.data.into_iter().map(Frame::data).chain([Frame::trailers(trailers)]).collect()
    }

    /// Converts the reply to an HTTP response with the proxy's trailers.
    #[must_use]
    pub fn into_response(mut self) -> Response<Body> {
        let mut frames: VecDeque<Frame<Bytes>> = self.data.into_iter().map(Frame::data).collect();
        if let Some(mut trailers) = self.trailers {
            insert_trailers(&mut trailers, self.outcome, self.queued);
            frames.push_back(Frame::trailers(trailers));
        } else {
            insert_trailers(&mut self.headers, self.outcome, self.queued);
        }
        let mut response = Response::new(Body::new(Frames { frames, _held: self.held }));
        *response.status_mut() = self.http;
        *response.headers_mut() = self.headers;
        response
    }
}

/// Adds the outcome and the queue time to trailers.
pub fn insert_trailers(trailers: &mut HeaderMap, outcome: Outcome, queued: Duration) {
    trailers.insert(OUTCOME_TRAILER, HeaderValue::from_static(outcome.name()));
    let ms = u64::try_from(queued.as_millis()).unwrap_or(u64::MAX);
    trailers.insert(QUEUED_MS_TRAILER, HeaderValue::from(ms));
}

/// Returns the gRPC status in headers, if there is one.
#[must_use]
pub fn status_from(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers)
}

/// A body of frames. It reports no size hint, so that hyper does not add a content-length.
#[derive(Debug)]
pub struct Frames {
    frames: VecDeque<Frame<Bytes>>,
    _held: Reservation,
}

impl Frames {
    /// Creates a body without a reservation.
    #[must_use]
    pub fn new(frames: VecDeque<Frame<Bytes>>) -> Self {
        Self { frames, _held: Reservation::default() }
    }

    /// Creates a body of data frames.
    #[must_use]
    pub fn from_data(data: Vec<Bytes>) -> Body {
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

/// Returns whether a header belongs to one hop, or is set by the proxy itself.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection" | "keep-alive" | "proxy-connection" | "te" | "transfer-encoding" | "upgrade" | "host"
    )
}

/// Returns the caller's metadata without hop-by-hop headers and without `quintlet-*`.
#[must_use]
pub fn forwardable_headers(headers: &HeaderMap) -> HeaderMap {
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

/// Creates a request to the runtime.
#[must_use]
pub fn request(path: &str, headers: HeaderMap, body: Body) -> Request<Body> {
    let mut request = Request::new(body);
    *request.method_mut() = http::Method::POST;
    *request.version_mut() = http::Version::HTTP_2;
    // The path was received as a valid path. If it is invalid behind an authority, the request goes to "/",
    // which the runtime refuses.
    *request.uri_mut() = http::Uri::builder()
        .scheme("http")
        .authority("localhost")
        .path_and_query(path)
        .build()
        .unwrap_or_else(|_| http::Uri::from_static("http://localhost/"));
    *request.headers_mut() = headers;
    request
}

/// Erases the type of a body.
pub fn boxed<B>(body: B) -> Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

/// An invalid gRPC frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadFrame {
    /// The body has fewer bytes than its prefix says.
    #[error("the body is truncated: {got} bytes, want {expected} by its gRPC prefix")]
    Truncated {
        /// Received bytes, with the prefix.
        got: usize,
        /// Expected bytes, including the prefix.
        expected: usize,
    },
    /// A unary body has a second message, or other bytes.
    #[error("the body has data after its message")]
    Trailing,
    /// The first byte of a frame, which is the compression flag, has an unknown value.
    #[error("the gRPC prefix begins with {0}, neither 0 nor 1")]
    Flag(u8),
    /// Compressed messages are not supported, since they could not be fenced.
    #[error("compressed messages are not supported")]
    Compressed,
}

/// Returns the message of a unary call's body.
///
/// # Errors
/// Fails if the body is not exactly one uncompressed gRPC frame.
pub fn unframe(body: &Bytes) -> Result<Bytes, BadFrame> {
    let Some((prefix, rest)) = body.split_at_checked(5) else {
        return Err(BadFrame::Truncated { got: body.len(), expected: 5 });
    };
    let &[flag, a, b, c, d] = prefix else {
        return Err(BadFrame::Truncated { got: body.len(), expected: 5 });
    };
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    match (flag, rest.len()) {
        (0, got) if got == length => Ok(body.slice(5..)),
        (0, got) if got > length => Err(BadFrame::Trailing),
        (0, _) => Err(BadFrame::Truncated { got: body.len(), expected: length.saturating_add(5) }),
        (1, _) => Err(BadFrame::Compressed),
        (flag, _) => Err(BadFrame::Flag(flag)),
    }
}

/// Encodes a message with its gRPC prefix.
#[must_use]
pub fn frame(message: &impl prost::Message) -> Bytes {
    let encoded = message.encode_to_vec();
    let mut out = Vec::with_capacity(encoded.len().saturating_add(5));
    out.push(0);
    out.extend_from_slice(&u32::try_from(encoded.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(&encoded);
    out.into()
}

/// Parses `grpc-timeout`.
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

/// Formats `grpc-timeout`, with at most eight digits.
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
    fn a_body_that_is_not_one_message_is_refused() {
        let read = |bytes: &'static [u8]| unframe(&Bytes::from_static(bytes));
        assert_eq!(read(&[0, 0, 0, 0, 2, 7, 8]), Ok(Bytes::from_static(&[7, 8])));
        assert_eq!(read(&[0, 0, 0, 0, 0]), Ok(Bytes::new()));
        assert_eq!(read(&[]), Err(BadFrame::Truncated { got: 0, expected: 5 }));
        assert_eq!(read(&[0, 0, 0, 0, 3, 7]), Err(BadFrame::Truncated { got: 6, expected: 8 }));
        assert_eq!(read(&[0, 0, 0, 0, 1, 7, 8]), Err(BadFrame::Trailing));
        assert_eq!(read(&[9, 0, 0, 0, 0]), Err(BadFrame::Flag(9)));
        assert_eq!(read(&[1, 0, 0, 0, 0]), Err(BadFrame::Compressed));
        assert!(matches!(read(&[0, 255, 255, 255, 255]), Err(BadFrame::Truncated { .. })));
    }

    #[test]
    fn timeouts_are_parsed_as_they_are_formatted() {
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
    fn hop_by_hop_headers_and_those_of_the_proxy_are_not_forwarded() {
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
        let out = forwardable_headers(&headers);
        assert_eq!(out.get_all("x-many").iter().count(), 2);
        assert_eq!(out.get("containerd-namespace").unwrap(), "k8s.io");
        assert_eq!(out.get("te").unwrap(), "trailers");
        assert_eq!(out.len(), 4);
    }
}
