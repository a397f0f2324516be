//! HTTP GET (`pkg/probe/http`): a new connection per request, no proxy, no verification of certificates,
//! redirects within the host.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::url_scheme::{SchemeError, UrlScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout, timeout_at};

use super::attempt::{Attempt, Broken, MAX_OUTPUT, USER_AGENT};
use super::dial::{self, Connection, DialError, Purpose, Route};
use super::tls::{self, Protocols};
use super::url::{self, Url};
use crate::target::HttpGet;

/// Requests of one attempt at most: the tenth redirect is an error.
const MAX_REQUESTS: usize = 10;
const TLS_HANDSHAKE: Duration = Duration::from_secs(10);
/// Largest header of an answer, in bytes. Go reads 10 MiB (`net/http: Transport.MaxResponseHeaderBytes`),
/// which times the probes of a node is too much memory.
const MAX_HEADER: u32 = 1 << 20;
/// Most header fields of an answer. hyper has room for all of them on each connection.
const MAX_HEADERS: usize = 8192;

const TIMED_OUT: &str = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
pub(super) const BODY_TIMED_OUT: &str =
    "context deadline exceeded (Client.Timeout or context cancellation while reading body)";

pub(super) async fn probe(get: &HttpGet, host: &str, port: u16, timeout: Duration) -> Attempt {
    let deadline = deadline_after(Instant::now(), timeout);
    let url = Url::of_probe(get.scheme == UrlScheme::Https, host, port, &get.path);
    if let UrlScheme::Unsupported(scheme) = &get.scheme {
        let error = SchemeError::new(scheme, &format!("{}{}", url.authority, url.target));
        return match &error {
            // The kubelet fails to make the request, or sends it in vain.
            SchemeError::Url { .. } => Attempt::unknown(error.to_string()),
            SchemeError::Protocol { .. } => Attempt::Failure(error.to_string()),
        };
    }
    let text_of = |url: &dyn std::fmt::Display, error: &str| format!("Get \"{url}\": {error}");
    let failure = |url: &dyn std::fmt::Display, error: &str| Attempt::Failure(text_of(url, error));
    let (headers, host_header) = match headers(&get.headers) {
        Ok(headers) => headers,
        Err(error) => return failure(&url, &error),
    };
    let mut request = Get { url, headers, host_header, h2c: get.h2c };
    let mut sent = 0_usize;
    loop {
        let exchange = match timeout_at(deadline, request.send()).await {
            Ok(Ok(exchange)) => exchange,
            Ok(Err(error)) => return error.outcome(|text| text_of(&request.url, text)),
            Err(_) => return failure(&request.url, TIMED_OUT),
        };
        sent = sent.saturating_add(1);
        let status = exchange.response.status();
        let location = exchange.response.headers().get(header::LOCATION);
        if let (true, Some(location)) = (is_redirect(status), location) {
            let location = String::from_utf8_lossy(location.as_bytes()).into_owned();
            let next = match request.url.join(&location) {
                Ok(next) => next,
                Err(error) => return failure(&location, &error.to_string()),
            };
            if next.host == host {
                if sent == MAX_REQUESTS {
                    return failure(&location, "stopped after 10 redirects");
                }
                if url::is_absolute(&location) {
                    request.host_header = None;
                }
                request.url = next;
                continue;
            }
        }
        let body = match timeout_at(deadline, exchange.body()).await {
            Ok(Ok(body)) => body,
            Ok(Err(error)) => return body_error(error),
            Err(_) => return body_error(BODY_TIMED_OUT.to_owned()),
        };
        return match status.as_u16() {
            200..300 => Attempt::Success(body),
            300..400 => Attempt::Warning(format!("Probe terminated redirects, Response body: {body}")),
            code => Attempt::Failure(format!("HTTP probe failed with statuscode: {code}")),
        };
    }
}

fn body_error(error: String) -> Attempt {
    Attempt::Broken(Broken { state: "failure", error, event: true })
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// Returns the headers of the request, and its `Host` if the probe sets it.
fn headers(given: &[(String, String)]) -> Result<(HeaderMap, Option<HeaderValue>), String> {
    let mut headers = HeaderMap::new();
    let mut host = None;
    for (key, value) in given {
        let name = HeaderName::from_bytes(key.as_bytes())
            .map_err(|_| format!("net/http: invalid header field name {key:?}"))?;
        let value = HeaderValue::from_str(value.trim())
            .map_err(|_| format!("net/http: invalid header field value for {key:?}"))?;
        if name == header::HOST {
            host = Some(value).filter(|v| !v.is_empty());
        } else {
            headers.append(name, value);
        }
    }
    if !headers.contains_key(header::USER_AGENT) {
        headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
    } else if headers[header::USER_AGENT].is_empty() {
        headers.remove(header::USER_AGENT);
    }
    if !headers.contains_key(header::ACCEPT) {
        headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
    } else if headers[header::ACCEPT].is_empty() {
        headers.remove(header::ACCEPT);
    }
    Ok((headers, host))
}

struct Get {
    url: Url,
    headers: HeaderMap,
    host_header: Option<HeaderValue>,
    /// Without TLS, HTTP/2 from the first byte on.
    h2c: bool,
}

impl Get {
    async fn send(&self) -> Result<Exchange, DialError> {
        let (tcp, route) = dial::dial(&self.url.host, self.url.port, Purpose::Request).await?;
        // Boxed, so that a probe without TLS has no room for it.
        let exchange = if self.url.tls {
            Box::pin(self.https(tcp, route)).await
        } else if self.h2c {
            Box::pin(self.http2(tcp, route)).await
        } else {
            self.http1(tcp, route).await
        };
        Ok(exchange?)
    }

    async fn https(&self, tcp: Connection, route: Route) -> Result<Exchange, String> {
        let handshake = tls::handshake(&self.url.host, Protocols::Http, tcp);
        let tls = timeout(TLS_HANDSHAKE, handshake).await;
        let tls = tls.map_err(|_| "net/http: TLS handshake timeout".to_owned())??;
        if tls.get_ref().1.alpn_protocol() == Some(b"h2") {
            return self.http2(tls, route).await;
        }
        self.http1(tls, route).await
    }

    async fn http1<I>(&self, io: I, route: Route) -> Result<Exchange, String>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let authority = HeaderValue::from_str(&self.url.authority);
        let host = self.host_header.clone().or(authority.ok()).ok_or("http: invalid Host header")?;
        let mut request = Request::get(self.url.target.as_str())
            .body(Empty::<Bytes>::new())
            .map_err(|e| format!("invalid URL: {e}"))?;
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(header::HOST, host);
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
            .title_case_headers(true)
            .max_headers(MAX_HEADERS)
            .max_buf_size(usize::try_from(MAX_HEADER).unwrap_or(usize::MAX))
            .handshake(TokioIo::new(io))
            .await
            .map_err(|e| go_error_text(&e, route))?;
        let mut connection = connection.map(drop).boxed().fuse();
        let response = alongside(&mut connection, sender.send_request(request)).await;
        let response = response.map_err(|e| go_error_text(&e, route))?;
        Ok(Exchange { response, connection: Box::pin(connection), route })
    }

    async fn http2<I>(&self, io: I, route: Route) -> Result<Exchange, String>
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let host = self.host_header.as_ref().and_then(|h| h.to_str().ok()).unwrap_or(&self.url.authority);
        let scheme = if self.url.tls { "https" } else { "http" };
        let mut request = Request::get(format!("{scheme}://{host}{}", self.url.target))
            .body(Empty::<Bytes>::new())
            .map_err(|e| format!("invalid URL: {e}"))?;
        *request.headers_mut() = self.headers.clone();
        let (mut sender, connection) = hyper::client::conn::http2::Builder::new(Tasks)
            .max_header_list_size(MAX_HEADER)
            .handshake(TokioIo::new(io))
            .await
            .map_err(|e| go_error_text(&e, route))?;
        let mut connection = connection.map(drop).boxed().fuse();
        let response = alongside(&mut connection, sender.send_request(request)).await;
        let response = response.map_err(|e| go_error_text(&e, route))?;
        Ok(Exchange { response, connection: Box::pin(connection), route })
    }
}

/// A response whose body has not been read.
struct Exchange {
    response: Response<Incoming>,
    connection: std::pin::Pin<Box<dyn Future<Output = ()> + Send>>,
    route: Route,
}

impl Exchange {
    /// Reads up to [`MAX_OUTPUT`] bytes of the body.
    async fn body(self) -> Result<String, String> {
        let Self { response, mut connection, route } = self;
        let mut body = response.into_body();
        let mut kept = Vec::new();
        let read = async {
            while kept.len() < MAX_OUTPUT {
                match body.frame().await {
                    Some(Ok(frame)) => kept.extend(frame.into_data().unwrap_or_default()),
                    Some(Err(error)) => {
                        let text = go_error_text(&error, route);
                        return Err(if text == "EOF" { "unexpected EOF".to_owned() } else { text });
                    }
                    None => break,
                }
            }
            Ok(())
        };
        alongside(&mut connection, read).await?;
        kept.truncate(MAX_OUTPUT);
        Ok(String::from_utf8_lossy(&kept).into_owned())
    }
}

/// Runs `work` and the connection that it uses in one task, so that a dropped attempt drops its connection.
async fn alongside<T>(
    connection: &mut (impl Future<Output = ()> + Unpin),
    work: impl Future<Output = T>,
) -> T {
    let mut work = pin!(work);
    std::future::poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(done);
        }
        // The work notices the end of the connection.
        let _ = connection.poll_unpin(cx);
        work.as_mut().poll(cx)
    })
    .await
}

/// Executor for the tasks of an HTTP/2 connection.
#[derive(Clone)]
struct Tasks;

impl<F> Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, work: F) {
        drop(quintlet_kit::task::spawn("http2-connection", work));
    }
}

/// Returns Go's text of a transport error.
fn go_error_text(error: &hyper::Error, route: Route) -> String {
    if error.is_incomplete_message() {
        return "EOF".to_owned();
    }
    if error.is_parse() {
        return "net/http: HTTP/1.x transport connection broken: malformed HTTP response".to_owned();
    }
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return match io.kind() {
                std::io::ErrorKind::UnexpectedEof => "EOF".to_owned(),
                _ => format!("read tcp {route}: read: {}", dial::go_error_text(io)),
            };
        }
        source = error.source();
    }
    quintlet_kit::error_chain(error)
}
