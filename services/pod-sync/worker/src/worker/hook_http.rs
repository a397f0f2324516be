//! The httpGet handler of lifecycle hooks (`pkg/kubelet/lifecycle`). Every answer is a success, and
//! certificates are not verified.

use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, HTTPHeader};

use pod_sync_decisions::probes::resolve_port;
use quintlet_kit::url_scheme::{SchemeError, UrlScheme};
use quintlet_kit::{lookup, redirect};
use quintlet_model::kubernetes::HOOK_USER_AGENT as USER_AGENT;

/// Most header fields of an answer. hyper reads 100 by default, Go any number.
const MAX_HEADERS: usize = 8192;

/// The scheme of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sent {
    Unchanged,
    /// Plain HTTP, because the server answered an HTTPS request in plain HTTP.
    Plain(String),
}

/// Sends the request. `ip` is the address of the pod, for a handler without a host.
///
/// # Errors
/// The handler is invalid, or the server did not answer.
pub(super) async fn get(
    get: &HTTPGetAction,
    container: Option<&Container>,
    ip: Option<String>,
) -> Result<Sent, String> {
    let host =
        get.host.clone().filter(|h| !h.is_empty()).or(ip).ok_or("failed to find networking container")?;
    let port = resolve_port(&get.port, container).map_err(|e| e.to_string())?;
    let scheme = UrlScheme::parse(get.scheme.as_deref().unwrap_or_default());
    let bracketed = if host.contains(':') { format!("[{host}]") } else { host };
    let path = redirect::encode_path(get.path.as_deref().unwrap_or_default());
    let slash = if path.starts_with('/') { "" } else { "/" };
    let rest = format!("{bracketed}:{port}{slash}{path}");
    let url = |scheme: &str| -> Result<Uri, String> {
        format!("{scheme}://{rest}").parse().map_err(|e| format!("invalid URL: {e}"))
    };
    if let UrlScheme::Unsupported(scheme) = &scheme {
        return Err(SchemeError::new(scheme, &rest).to_string());
    }
    let (headers, host_header) = headers(get.http_headers.as_deref().unwrap_or_default())?;
    if scheme == UrlScheme::Http {
        let sent = follow(url("http")?, &headers, host_header.as_ref()).await;
        return sent.map(|()| Sent::Unchanged).map_err(|e| e.to_string());
    }
    match follow(url("https")?, &headers, host_header.as_ref()).await {
        Err(e) if e.is_plain_answer() => {
            tracing::info!(
                host = bracketed,
                port,
                "server answered HTTPS hook in plain HTTP, repeating the request"
            );
            let mut headers = headers;
            // Credentials must not be sent unencrypted.
            headers.remove(header::AUTHORIZATION);
            let sent = follow(url("http")?, &headers, host_header.as_ref()).await;
            sent.map(|()| Sent::Plain(format!("{bracketed}:{port}"))).map_err(|e| e.to_string())
        }
        other => other.map(|()| Sent::Unchanged).map_err(|e| e.to_string()),
    }
}

/// Returns the headers to send, and the Host header if it differs from the host that is connected to.
fn headers(given: &[HTTPHeader]) -> Result<(HeaderMap, Option<HeaderValue>), String> {
    let (mut headers, mut host) = (HeaderMap::new(), None);
    for HTTPHeader { name, value } in given {
        let key = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| format!("net/http: invalid header field name {name:?}"))?;
        let value = HeaderValue::from_str(value.trim())
            .map_err(|_| format!("net/http: invalid header field value for {name:?}"))?;
        if key == header::HOST {
            host = Some(value).filter(|v| !v.is_empty());
        } else {
            headers.append(key, value);
        }
    }
    for (name, value) in [(header::USER_AGENT, USER_AGENT), (header::ACCEPT, "*/*")] {
        match headers.get(&name) {
            None => {
                headers.insert(name, HeaderValue::from_static(value));
            }
            // As in Go, an empty value suppresses the header.
            Some(v) if v.is_empty() => {
                headers.remove(&name);
            }
            Some(_) => {}
        }
    }
    Ok((headers, host))
}

#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error("Get \"{url}\": {}", words(.url, .error))]
    Transport { url: Uri, error: hyper_util::client::legacy::Error },
    #[error("stopped after 10 redirects")]
    Redirects,
    #[error("{0}")]
    Invalid(String),
}

impl NoAnswer {
    // An answer in plain HTTP is no TLS record.
    fn is_plain_answer(&self) -> bool {
        let Self::Transport { error, .. } = self else { return false };
        sources(error).any(is_no_tls)
    }
}

fn sources(
    error: &hyper_util::client::legacy::Error,
) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(error), |e| e.source())
}

/// Returns the text of Go's error for a failed connection, as the kubelet reports it; other errors keep their
/// own text.
fn words(url: &Uri, error: &hyper_util::client::legacy::Error) -> String {
    let refused = sources(error)
        .filter_map(|e| e.downcast_ref::<std::io::Error>())
        .find(|e| error.is_connect() && e.raw_os_error().is_some());
    match (refused, url.authority()) {
        (Some(e), Some(authority)) => {
            let text = e.to_string();
            let text = text.split(" (os error").next().unwrap_or(&text).to_lowercase();
            format!("dial tcp {authority}: connect: {text}")
        }
        _ => quintlet_kit::error_chain(error),
    }
}

// `io::Error::source` skips the wrapped error itself.
fn is_no_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    if let Some(io) = error.downcast_ref::<std::io::Error>() {
        return io.get_ref().is_some_and(|inner| is_no_tls(inner));
    }
    let error = error.downcast_ref::<rustls::Error>();
    matches!(error, Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)))
}

/// Follows redirects within the host. A redirect to another host counts as an answer.
async fn follow(first: Uri, headers: &HeaderMap, host: Option<&HeaderValue>) -> Result<(), NoAnswer> {
    let (mut url, mut host) = (first.clone(), host);
    for _ in 0..redirect::MAX_REQUESTS {
        let response = send(&url, headers, host).await?;
        let Some(next) = redirect::next(&url, &response) else { return Ok(()) };
        let next = next.map_err(|error| NoAnswer::Invalid(error.to_string()))?;
        if next.host() != first.host() {
            return Ok(());
        }
        host = None;
        url = next;
    }
    Err(NoAnswer::Redirects)
}

async fn resolve(host: Name) -> io::Result<std::vec::IntoIter<SocketAddr>> {
    lookup::addresses(host.as_str(), 0).await.map(Vec::into_iter)
}

async fn send(
    url: &Uri,
    headers: &HeaderMap,
    host: Option<&HeaderValue>,
) -> Result<Response<Incoming>, NoAnswer> {
    let mut request =
        Request::get(url).body(Empty::<Bytes>::new()).map_err(|e| NoAnswer::Invalid(e.to_string()))?;
    *request.headers_mut() = headers.clone();
    if let Some(host) = host {
        request.headers_mut().insert(header::HOST, host.clone());
    }
    let mut tcp = HttpConnector::new_with_resolver(tower::service_fn(resolve));
    tcp.enforce_http(false);
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(quintlet_kit::tls::unverified())
        .https_or_http()
        .enable_http1()
        .wrap_connector(tcp);
    // One client per request: hooks are rare, and no connection is reused.
    let client = Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .http1_max_headers(MAX_HEADERS)
        .build(connector);
    client.request(request).await.map_err(|error| NoAnswer::Transport { url: url.clone(), error })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use quintlet_testkit::http_server::HttpServer as Server;

    fn status(code: u16) -> String {
        format!("HTTP/1.1 {code} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    }

    fn to(location: &str) -> String {
        format!("HTTP/1.1 302 X\r\nlocation: {location}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    }

    async fn hook(handler: Value) -> Result<Sent, String> {
        let handler: HTTPGetAction = serde_json::from_value(handler).unwrap();
        let container: Container =
            serde_json::from_value(json!({"name": "c", "ports": [{"name": "web", "containerPort": 1}]}))
                .unwrap();
        get(&handler, Some(&container), Some("127.0.0.1".to_owned())).await
    }

    #[tokio::test]
    async fn an_answer_may_have_a_thousand_headers() {
        let many: String = (0..1000).map(|n| format!("x-{n}: 1\r\n")).collect();
        let answer = format!("HTTP/1.1 200 X\r\n{many}content-length: 0\r\nconnection: close\r\n\r\n");
        let server = Server::start(false, move |_| answer.clone()).await;
        assert_eq!(hook(json!({"port": server.port})).await, Ok(Sent::Unchanged));
    }

    #[tokio::test]
    async fn any_answer_is_a_success_over_http_and_https() {
        for tls in [false, true] {
            for code in [200, 404, 500] {
                let server = Server::start(tls, move |_| status(code)).await;
                let scheme = if tls { "HTTPS" } else { "HTTP" };
                let path = "/a b?x=1";
                let sent = hook(json!({"port": server.port, "scheme": scheme, "path": path})).await;
                assert_eq!(sent, Ok(Sent::Unchanged));
                assert!(
                    server.requests()[0].starts_with("GET /a%20b?x=1 HTTP/1.1\r\n"),
                    "{:?}",
                    server.requests()
                );
            }
        }
    }

    #[tokio::test]
    async fn a_path_of_20_000_levels_is_sent_as_it_is() {
        let server = Server::start(false, |_| status(414)).await;
        let path = "/a".repeat(20_000);
        assert_eq!(hook(json!({"port": server.port, "path": path})).await, Ok(Sent::Unchanged));
        assert!(server.requests()[0].starts_with(&format!("GET {path} HTTP/1.1\r\n")));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_may_take_a_day() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let slow = async {
            let (mut peer, _) = listener.accept().await.unwrap();
            let _ = peer.read(&mut [0; 4096]).await.unwrap();
            tokio::time::sleep(std::time::Duration::from_secs(24 * 3600)).await;
            peer.write_all(status(200).as_bytes()).await.unwrap();
        };
        let (sent, ()) = tokio::join!(hook(json!({"port": port})), slow);
        assert_eq!(sent, Ok(Sent::Unchanged));
    }

    #[tokio::test]
    async fn headers_are_the_handlers_and_the_kubelets() {
        let server = Server::start(false, |_| status(200)).await;
        hook(json!({"port": server.port})).await.unwrap();
        let given = json!([{"name": "Host", "value": "inner.test"}, {"name": "X-A", "value": "1"},
            {"name": "X-A", "value": "2"}, {"name": "User-Agent", "value": "mine"}, {"name": "Accept", "value": ""}]);
        hook(json!({"port": server.port, "path": "p", "httpHeaders": given})).await.unwrap();
        let requests = server.requests();
        let lines = |i: usize| requests[i].to_lowercase();
        assert!(lines(0).starts_with("get / http"), "{requests:?}");
        for line in [
            format!("host: 127.0.0.1:{}", server.port),
            format!("user-agent: {USER_AGENT}"),
            "accept: */*".to_owned(),
        ] {
            assert!(lines(0).contains(&line), "{line} in {requests:?}");
        }
        assert!(lines(1).starts_with("get /p http"), "{requests:?}");
        for line in ["host: inner.test", "x-a: 1", "x-a: 2", "user-agent: mine"] {
            assert!(lines(1).contains(line), "{line} in {requests:?}");
        }
        assert!(!lines(1).contains("accept:"), "{requests:?}");
        for (headers, want) in [
            (json!([{"name": "a b", "value": ""}]), "invalid header field name"),
            (json!([{"name": "a", "value": "x\ny"}]), "invalid header field value"),
        ] {
            let error = hook(json!({"port": server.port, "httpHeaders": headers})).await.unwrap_err();
            assert!(error.contains(want), "{error}");
        }
    }

    #[tokio::test]
    async fn https_that_is_answered_in_plain_http_is_sent_again_without_authorization() {
        let server = Server::start(false, |path| {
            if path == "/done" { status(200) } else { "HTTP/1.1 400 Bad Request\r\n\r\n".to_owned() }
        })
        .await;
        let headers = json!([{"name": "Authorization", "value": "Bearer x"}, {"name": "X-A", "value": "1"}]);
        let sent =
            hook(json!({"port": server.port, "scheme": "HTTPS", "path": "/done", "httpHeaders": headers}))
                .await;
        assert_eq!(sent, Ok(Sent::Plain(format!("127.0.0.1:{}", server.port))));
        let requests = server.requests();
        assert_eq!(requests.len(), 2, "{requests:?}");
        let plain = requests[1].to_lowercase();
        assert!(plain.starts_with("get /done") && plain.contains("x-a: 1"), "{plain}");
        assert!(!plain.contains("authorization"), "{plain}");
    }

    #[tokio::test]
    async fn redirects_are_followed_within_the_host_and_ten_are_too_many() {
        let server = Server::start(false, |path| match path {
            "/away" => to("http://elsewhere.invalid/x"),
            "/dir/rel" => to("next"),
            "/abs" => to("/end"),
            "/loop" => to("/loop"),
            _ => status(200),
        })
        .await;
        let ask = |path: &str| hook(json!({"port": server.port, "path": path}));
        for (path, last) in [("/away", "/away"), ("/dir/rel", "/dir/next"), ("/abs", "/end")] {
            ask(path).await.unwrap();
            let requests = server.requests();
            assert!(requests.last().unwrap().starts_with(&format!("GET {last} ")), "{requests:?}");
        }
        let before = server.requests().len();
        assert_eq!(ask("/loop").await.unwrap_err(), "stopped after 10 redirects");
        assert_eq!(server.requests().len() - before, redirect::MAX_REQUESTS);
    }

    #[tokio::test]
    async fn a_handler_that_cannot_be_sent_says_why() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let refused = |scheme: &str, path: &str| {
            let address = format!("127.0.0.1:{closed}");
            format!("Get \"{scheme}://{address}{path}\": dial tcp {address}: connect: connection refused")
        };
        for (handler, want) in [
            (json!({"port": "web"}), "connect: connection refused"),
            (json!({"port": closed, "path": "/x"}), &refused("http", "/x")),
            (json!({"port": closed, "scheme": "HTTPS"}), &refused("https", "/")),
            (
                json!({"port": 80, "scheme": "Sideways", "path": "/a b"}),
                "Get \"sideways://127.0.0.1:80/a%20b\": unsupported protocol scheme \"sideways\"",
            ),
            (
                json!({"port": 80, "scheme": "1st", "host": "::1"}),
                "parse \"1st://[::1]:80/\": first path segment in URL cannot contain colon",
            ),
            (json!({"port": "none"}), "strconv.Atoi: parsing \"none\": invalid syntax"),
            (json!({"port": 0}), "invalid port number: 0"),
            (json!({"port": 70000}), "invalid port number: 70000"),
        ] {
            let error = hook(handler.clone()).await.unwrap_err();
            assert!(error.contains(want), "{handler}: {error}");
        }
        let handler: HTTPGetAction = serde_json::from_value(json!({"port": 1})).unwrap();
        let error = get(&handler, None, None).await.unwrap_err();
        assert_eq!(error, "failed to find networking container");
    }
}
