//! The manifest URL (`pkg/kubelet/config: sourceURL`): fetched periodically, and sent on if the body changed.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;

use super::decode::{self, ManifestOrigin};
use super::{MAX_MANIFEST, ManifestProblem, Snapshot, SourceEvent, SourceKind, SourceSender};
use quintlet_kit::redirect;

/// Timeout of a request (`pkg/kubelet/config: NewSourceURL`).
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a TLS configuration with the machine's trusted certificates. Without them no server is trusted.
///
/// # Panics
/// Never: the provider has the default protocol versions.
#[must_use]
pub fn system_tls() -> ClientConfig {
    let builder = || {
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has the default protocol versions")
    };
    let trusting = builder().with_native_roots().unwrap_or_else(|error| {
        tracing::info!(%error, "no certificate authorities found, https manifest URLs cannot be read");
        builder().with_root_certificates(RootCertStore::empty())
    });
    trusting.with_no_client_auth()
}

/// Fetches `url` every `period` until `stop`. A failed request or an invalid body changes only the reported problems. The
/// source is ready with the first valid body.
pub async fn run(
    url: String,
    headers: Vec<(String, String)>,
    node: String,
    period: Duration,
    tls: ClientConfig,
    out: SourceSender,
    stop: CancellationToken,
) {
    let fetcher = Fetcher::new(tls);
    let mut last: Option<Bytes> = None;
    // Problems of the last body. A failed request adds its own.
    let mut of_body = Vec::new();
    let mut of_fetch: Option<String> = None;
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        // An interrupted request is repeated at the next tick.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let update = match fetcher.fetch(&url, &headers).await {
            Ok(body) if last.as_ref() == Some(&body) => {
                if of_fetch.take().is_none() {
                    continue;
                }
                // The request succeeds again with the same body.
                SourceEvent::Problems(of_body.clone())
            }
            Ok(body) => {
                let update = read(&body, ManifestOrigin { kind: SourceKind::Http, place: &url, node: &node });
                last = Some(body);
                of_fetch = None;
                of_body = update.problems();
                update
            }
            Err(message) => {
                if of_fetch.as_ref() == Some(&message) {
                    continue;
                }
                tracing::warn!(url, error = message, "failed to read manifest URL");
                let problems = vec![problem(&url, message.clone())];
                of_fetch = Some(message);
                SourceEvent::Problems(problems)
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            sent = out.send((SourceKind::Http, update)) => if sent.is_err() { return },
        }
    }
}

// An invalid item makes the whole body invalid. An empty body is invalid as well.
fn read(body: &[u8], origin: ManifestOrigin<'_>) -> SourceEvent {
    let mut snapshot = Snapshot::default();
    if body.is_empty() {
        snapshot.problems.push(problem(origin.place, "zero-length body: no pods".to_owned()));
        return SourceEvent::Snapshot(snapshot);
    }
    decode::manifest(body, origin, &mut snapshot);
    if snapshot.problems.is_empty() {
        SourceEvent::Snapshot(snapshot)
    } else {
        SourceEvent::Problems(snapshot.problems)
    }
}

fn problem(url: &str, message: String) -> ManifestProblem {
    ManifestProblem { origin: url.to_owned(), field: String::new(), message }
}

struct Fetcher {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
}

impl Fetcher {
    fn new(tls: ClientConfig) -> Self {
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        Self { client: Client::builder(TokioExecutor::new()).build(connector) }
    }

    async fn fetch(&self, url: &str, headers: &[(String, String)]) -> Result<Bytes, String> {
        tokio::time::timeout(FETCH_TIMEOUT, self.follow(url, headers))
            .await
            .map_err(|_| format!("no answer within {FETCH_TIMEOUT:?}"))?
    }

    async fn follow(&self, url: &str, headers: &[(String, String)]) -> Result<Bytes, String> {
        let first: Uri = url.parse().map_err(|e| format!("invalid URL: {e}"))?;
        let mut headers = headers.iter().map(parsed).collect::<Result<HeaderMap, String>>()?;
        let mut at = first.clone();
        for _ in 0..redirect::MAX_REQUESTS {
            let mut request = Request::get(&at).body(Empty::new()).map_err(|e| e.to_string())?;
            *request.headers_mut() = headers.clone();
            let response = self.client.request(request).await.map_err(|e| quintlet_kit::error_chain(&e))?;
            let Some(next) = redirect::next(&at, &response) else {
                if response.status() != StatusCode::OK {
                    return Err(format!("status {}", response.status()));
                }
                let body = Limited::new(response.into_body(), MAX_MANIFEST - 1);
                return Ok(body.collect().await.map_err(|e| e.to_string())?.to_bytes());
            };
            at = next.map_err(|e| e.to_string())?;
            if at.host() != first.host() {
                // These headers are not sent to another host, as in Go's net/http.
                for secret in [header::AUTHORIZATION, header::COOKIE, header::WWW_AUTHENTICATE] {
                    headers.remove(secret);
                }
            }
        }
        Err(format!("stopped after {} redirects", redirect::MAX_REQUESTS))
    }
}

fn parsed((name, value): &(String, String)) -> Result<(HeaderName, HeaderValue), String> {
    let key = HeaderName::from_bytes(name.as_bytes()).map_err(|e| format!("header {name:?}: {e}"))?;
    // The value may be a password.
    let value =
        HeaderValue::from_str(value).map_err(|_| format!("header {name:?}: its value is not valid"))?;
    Ok((key, value))
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tokio::sync::mpsc;

    use super::*;
    use quintlet_testkit::http_server::HttpServer;

    const POD: &str = "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"NAME\"}, \
        \"spec\": {\"containers\": [{\"name\": \"c\", \"image\": \"i\"}]}}";

    fn pod(name: &str) -> String {
        POD.replace("NAME", name)
    }

    fn list(items: &[String]) -> String {
        format!("{{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": [{}]}}", items.join(","))
    }

    fn answer(status: u16, headers: &str, body: &str) -> String {
        format!(
            "HTTP/1.1 {status} X\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
            body.len()
        )
    }

    fn url(server: &HttpServer) -> String {
        format!("{}://127.0.0.1:{}/pods", server.scheme, server.port)
    }

    fn trust(roots: RootCertStore) -> ClientConfig {
        ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    /// A running source and its updates.
    struct Source {
        received: mpsc::Receiver<super::super::SourceMessage>,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    impl Source {
        fn start(url: &str, tls: ClientConfig) -> Self {
            let (tx, received) = mpsc::channel(1);
            let stop = CancellationToken::new();
            let headers = vec![("x-node".to_owned(), "mine".to_owned())];
            let run =
                run(url.to_owned(), headers, "N1".into(), Duration::from_millis(5), tls, tx, stop.clone());
            Self { received, stop, task: quintlet_kit::task::spawn("source", run) }
        }

        // Returns the names of the pods, empty for an update that only has problems.
        async fn next(&mut self, what: &str) -> (Option<Vec<String>>, Vec<String>) {
            let next = tokio::time::timeout(Duration::from_secs(10), self.received.recv()).await;
            let (_, update) = next.unwrap_or_else(|_| panic!("{what}: nothing came")).expect("it runs");
            let problems = update.problems().iter().map(|p| p.message.clone()).collect();
            let SourceEvent::Snapshot(snapshot) = update else { return (None, problems) };
            // Like a pod from a file, it has no default tolerations.
            assert!(snapshot.pods.iter().all(|p| p.spec.as_ref().unwrap().tolerations.is_none()), "{what}");
            let names = snapshot.pods.iter().filter_map(|p| p.metadata.name.clone());
            (Some(names.collect()), problems)
        }

        async fn end(mut self) {
            // A repeated update would arrive within a few periods.
            let again = tokio::time::timeout(Duration::from_millis(100), self.received.recv()).await;
            assert!(again.is_err(), "{again:?}");
            self.stop.cancel();
            self.task.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_url_response_is_parsed_as_in_the_kubelet() {
        let now = Arc::new(Mutex::new((200, String::new())));
        let two = list(&[pod("a"), pod("b")]);
        let bad = list(&[pod("a"), pod("Not_Valid")]);
        let some = |names: &[&str]| Some(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>());
        *now.lock() = (200, bad.clone());
        let answers = Arc::clone(&now);
        let server = HttpServer::start(false, move |_| {
            let (status, body) = answers.lock().clone();
            answer(status, "", &body)
        })
        .await;
        let mut source = Source::start(&url(&server), trust(RootCertStore::empty()));
        for (name, status, body, want, problem) in [
            ("the first is bad: the source is not seen", 200, bad.clone(), None, "RFC 1123"),
            ("nor is it by one that cannot be had", 500, String::new(), None, "status 500"),
            ("one pod", 200, pod("a"), some(&["a-n1"]), ""),
            ("a list", 200, two.clone(), some(&["a-n1", "b-n1"]), ""),
            ("one bad item rejects all", 200, bad.clone(), None, "RFC 1123"),
            ("not found", 404, String::new(), None, "status 404"),
            ("the same body again brings back what was wrong with it", 200, bad, None, "RFC 1123"),
            ("good again", 200, two.clone(), some(&["a-n1", "b-n1"]), ""),
            ("not found again", 404, String::new(), None, "status 404"),
            ("the same body again: nothing is wrong any more", 200, two, None, ""),
            ("no body", 200, String::new(), some(&[]), "zero-length"),
            ("back", 200, pod("c"), some(&["c-n1"]), ""),
        ] {
            *now.lock() = (status, body);
            let (names, problems) = source.next(name).await;
            assert_eq!(names, want, "{name}");
            assert_eq!(problems.is_empty(), problem.is_empty(), "{name}: {problems:?}");
            assert!(problems.iter().all(|p| p.contains(problem)), "{name}: {problems:?}");
        }
        assert!(server.requests().iter().all(|r| r.contains("x-node: mine")));
        source.end().await;
    }

    #[tokio::test]
    async fn redirects_are_followed_and_ten_are_too_many() {
        let to = |path: &str| answer(301, &format!("location: {path}\r\n"), "");
        let server = HttpServer::start(false, move |path| match path {
            "/pods" => to("/elsewhere"),
            "/elsewhere" => answer(200, "", &pod("a")),
            _ => to("/loop"),
        })
        .await;
        let mut source = Source::start(&url(&server), trust(RootCertStore::empty()));
        assert_eq!(source.next("redirected").await.0, Some(vec!["a-n1".to_owned()]));
        source.end().await;
        let mut source = Source::start(&url(&server).replace("pods", "loop"), trust(RootCertStore::empty()));
        assert_eq!(source.next("for ever").await, (None, vec!["stopped after 10 redirects".to_owned()]));
        source.end().await;
    }

    #[tokio::test]
    async fn sensitive_headers_are_not_sent_to_another_host() {
        let other = HttpServer::start(false, |_| answer(200, "", &pod("a"))).await;
        let away = format!("location: {}\r\n", url(&other).replace("127.0.0.1", "localhost"));
        let first = HttpServer::start(false, move |_| answer(302, &away, "")).await;
        let fetcher = Fetcher::new(trust(RootCertStore::empty()));
        let headers = [("authorization", "Bearer x"), ("x-node", "mine")];
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        fetcher.fetch(&url(&first), &headers).await.unwrap();
        assert!(first.requests()[0].contains("Bearer x"));
        let requests = other.requests()[0].clone();
        assert!(requests.contains("x-node: mine") && !requests.contains("Bearer"), "{requests}");
    }

    #[tokio::test]
    async fn an_https_url_is_read_from_a_server_that_is_trusted_and_from_no_other() {
        let server = HttpServer::start(true, |_| answer(200, "", &pod("a"))).await;
        let mut source = Source::start(&url(&server), trust(server.roots.clone()));
        assert_eq!(source.next("trusted").await, (Some(vec!["a-n1".to_owned()]), vec![]));
        source.end().await;
        let mut source = Source::start(&url(&server), system_tls());
        let (names, problems) = source.next("a stranger").await;
        assert_eq!(names, None);
        assert!(problems[0].contains("certificate"), "{problems:?}");
        source.end().await;
    }
}
