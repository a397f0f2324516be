//! The manifest URL (`pkg/kubelet/config: sourceURL`): fetched periodically, and sent on if the body changed.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_layout::{ManifestProblem, SourceKind};
use quintlet_kit::{redirect, task};
use quintlet_model::ids::PodUid;
use rustls::{ClientConfig, RootCertStore};
use tokio_util::sync::CancellationToken;

use super::adoption::{StaticSandbox, made_uid, version_of_kubelet};
use super::decode::{self, ManifestOrigin};
use super::kubelet_uid::{ComputedUids, KubeletVersion};
use super::proxy::{Proxies, ProxyConnector};
use super::static_uids::{SandboxListing, UNDECIDED_WAIT, list_sandboxes};
use super::{MAX_MANIFEST, Snapshot, SourceEvent, SourceSender};

/// Timeout of a request (`pkg/kubelet/config: NewSourceURL`).
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns a TLS configuration with the machine's trusted certificates. Without them no server is trusted.
///
/// # Panics
/// Never: the provider has the default protocol versions.
#[must_use]
fn system_tls() -> ClientConfig {
    let builder = || {
        ClientConfig::builder_with_provider(Arc::new(quintlet_kit::crypto::provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider has the default protocol versions")
    };
    let trusting = builder().with_native_roots().unwrap_or_else(|error| {
        tracing::info!(%error, "no certificate authorities found, https manifest URLs cannot be read");
        builder().with_root_certificates(RootCertStore::empty())
    });
    trusting.with_no_client_auth()
}

/// How servers of manifests are reached.
#[derive(Debug, Clone)]
pub struct Transport {
    /// TLS settings with the node's trust anchors.
    pub tls: ClientConfig,
    /// Proxies from the environment.
    pub proxies: Proxies,
}

impl Transport {
    /// Returns the machine's trusted certificates, and the proxies of the environment
    /// (`net/http: ProxyFromEnvironment`).
    #[must_use]
    pub fn system() -> Self {
        Self { tls: system_tls(), proxies: Proxies::from_env() }
    }
}

/// The manifest URL of a node.
#[derive(Debug, Clone)]
pub struct ManifestUrl {
    /// An `http` or `https` URL.
    pub url: String,
    /// Headers of each request.
    pub headers: Vec<(String, String)>,
    /// Name of the node.
    pub node: String,
}

impl ManifestUrl {
    fn origin(&self) -> ManifestOrigin<'_> {
        ManifestOrigin { kind: SourceKind::Http, place: &self.url, node: &self.node }
    }
}

/// UIDs of the pods of the URL.
#[derive(Debug, Default)]
struct UrlUids {
    /// Sandboxes of pods of a URL at the start. A pod keeps the UID of the one that was surely made from its
    /// manifest.
    sandboxes: Vec<StaticSandbox>,
    /// Pods of a URL in the records of an earlier run, for those without a sandbox.
    recorded: Vec<StaticSandbox>,
    /// Version of the kubelet whose UIDs the other pods get, if the sandboxes show one.
    kubelet: Option<KubeletVersion>,
}

impl UrlUids {
    /// Lists the sandboxes. The pods show the version of the kubelet.
    async fn list(
        listing: &Arc<dyn SandboxListing>,
        recorded: &[StaticSandbox],
        pods: &[(Pod, ComputedUids)],
    ) -> Self {
        let sandboxes = list_sandboxes(listing, "http", UNDECIDED_WAIT).await.unwrap_or_default();
        let kubelet = version_of_kubelet(pods, &sandboxes).or_else(|| version_of_kubelet(pods, recorded));
        Self { sandboxes, recorded: recorded.to_vec(), kubelet }
    }

    fn uid(&self, pod: &Pod, computed: &ComputedUids) -> Option<PodUid> {
        let made = |sandboxes: &[StaticSandbox]| made_uid(pod, computed, sandboxes);
        made(&self.sandboxes).or_else(|| made(&self.recorded)).or_else(|| {
            PodUid::parse(computed.of_kubelet(self.kubelet.unwrap_or(KubeletVersion::NEWEST))).ok()
        })
    }
}

/// Returns the pods of a body without a UID of their own; none if the body has a problem.
fn undecided(body: &[u8], origin: ManifestOrigin<'_>) -> Vec<(Pod, ComputedUids)> {
    let mut pods = Vec::new();
    let mut collect = |pod: &Pod, computed: &ComputedUids| {
        pods.push((pod.clone(), computed.clone()));
        None
    };
    let mut snapshot = Snapshot::default();
    decode::manifest_keeping_uids(body, origin, &mut collect, &mut snapshot);
    if snapshot.problems.is_empty() { pods } else { Vec::new() }
}

/// Fetches the manifests every `period` until `stop`. A failed request or an invalid body changes only the
/// reported problems. The source is ready with the first valid body. `sandboxes` decides which pods keep
/// their UID, and then `recorded`, the pods of a URL in the records of an earlier run.
pub async fn run(
    manifests: ManifestUrl,
    period: Duration,
    transport: Transport,
    sandboxes: Option<Arc<dyn SandboxListing>>,
    recorded: Vec<StaticSandbox>,
    out: SourceSender,
    stop: CancellationToken,
) {
    let manifests = Arc::new(manifests);
    let ManifestUrl { url, headers, .. } = &*manifests;
    let fetcher = Fetcher::new(transport);
    let mut uids: Option<Arc<UrlUids>> = None;
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
        let update = match fetcher.fetch(url, headers).await {
            Ok(body) if last.as_ref() == Some(&body) => {
                if of_fetch.take().is_none() {
                    continue;
                }
                // The request succeeds again with the same body.
                SourceEvent::Problems(of_body.clone())
            }
            Ok(body) => {
                if let (None, Some(sandboxes)) = (&uids, &sandboxes) {
                    let (pending, source) = (body.clone(), Arc::clone(&manifests));
                    let pods = task::blocking(move || undecided(&pending, source.origin())).await;
                    if !pods.is_empty() {
                        let listing = UrlUids::list(sandboxes, &recorded, &pods);
                        let Some(listed) = stop.run_until_cancelled(listing).await else { return };
                        uids = Some(Arc::new(listed));
                    }
                }
                // A large body takes long to decode.
                let (pending, source) = (body.clone(), Arc::clone(&manifests));
                let known = uids.clone();
                let update = task::blocking(move || read(&pending, source.origin(), known.as_deref())).await;
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
                let problems = vec![problem(url, message.clone())];
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
fn read(body: &[u8], origin: ManifestOrigin<'_>, uids: Option<&UrlUids>) -> SourceEvent {
    let mut snapshot = Snapshot::default();
    if body.is_empty() {
        snapshot.problems.push(problem(origin.place, "zero-length body: no pods".to_owned()));
        return SourceEvent::Snapshot(snapshot);
    }
    let mut kept = |pod: &Pod, computed: &ComputedUids| uids.and_then(|uids| uids.uid(pod, computed));
    decode::manifest_keeping_uids(body, origin, &mut kept, &mut snapshot);
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
    client: Client<HttpsConnector<ProxyConnector>, Empty<Bytes>>,
    proxies: Arc<Proxies>,
}

impl Fetcher {
    fn new(Transport { tls, proxies }: Transport) -> Self {
        let proxies = Arc::new(proxies);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(ProxyConnector::new(Arc::clone(&proxies)));
        Self { client: Client::builder(TokioExecutor::new()).build(connector), proxies }
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
            // A tunnel has its own credentials.
            let proxy = self.proxies.for_url(&at)?.filter(|_| at.scheme() == Some(&Scheme::HTTP));
            if let Some(value) = proxy.and_then(|proxy| proxy.authorization.clone()) {
                request.headers_mut().insert(header::PROXY_AUTHORIZATION, value);
            }
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
    use crate::proxy::tests::proxies;
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
        ClientConfig::builder_with_provider(Arc::new(quintlet_kit::crypto::provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    fn fetcher(proxies: Proxies) -> Fetcher {
        Fetcher::new(Transport { tls: trust(RootCertStore::empty()), proxies })
    }

    #[tokio::test]
    async fn a_url_is_read_through_the_proxy_of_the_environment() {
        let server = HttpServer::start(false, |target| match target {
            "http://manifests.example/pods" => answer(200, "", "proxied"),
            _ => answer(200, "", "direct"),
        })
        .await;
        let at = format!("http://user:pass@127.0.0.1:{}", server.port);
        let fetcher = fetcher(proxies(&[("HTTP_PROXY", &at), ("HTTPS_PROXY", "socks5://p")]));
        assert_eq!(fetcher.fetch("http://manifests.example/pods", &[]).await.unwrap(), "proxied");
        let request = server.requests().remove(0).to_lowercase();
        assert!(request.contains("proxy-authorization: basic dxnlcjpwyxnz"), "{request}");
        assert_eq!(fetcher.fetch(&url(&server), &[]).await.unwrap(), "direct", "loopback has no proxy");
        assert!(!server.requests()[1].to_lowercase().contains("proxy-authorization"));
        let error = fetcher.fetch("https://manifests.example/pods", &[]).await.unwrap_err();
        assert!(error.contains("HTTPS_PROXY") && error.contains("socks5"), "{error}");
    }

    #[tokio::test]
    async fn a_tunnel_leads_to_the_server_or_its_refusal_is_reported() {
        let server = HttpServer::start(true, |_| answer(200, "", &pod("a"))).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = format!("127.0.0.1:{}", listener.local_addr().unwrap().port());
        let port = server.port;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let requests = Arc::clone(&seen);
        let serve = async move {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            while let Ok((mut peer, _)) = listener.accept().await {
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    request.push(peer.read_u8().await.unwrap());
                }
                let request = String::from_utf8(request).unwrap();
                let refuses = request.contains("refused.example");
                requests.lock().push(request);
                if refuses {
                    peer.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").await.unwrap();
                    continue;
                }
                peer.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                let mut server = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut peer, &mut server).await;
            }
        };
        let task = quintlet_kit::task::spawn("proxy", serve);
        let proxies = proxies(&[("HTTPS_PROXY", &at)]);
        let fetcher = Fetcher::new(Transport { tls: trust(server.roots.clone()), proxies });
        let error = fetcher.fetch("https://manifests.example/pods", &[]).await.unwrap_err();
        assert!(
            error.contains("not valid for name"),
            "the server behind the tunnel has another name: {error}"
        );
        let error = fetcher.fetch("https://refused.example:8443/pods", &[]).await.unwrap_err();
        assert!(error.contains("the proxy refused CONNECT: HTTP/1.1 403 Forbidden"), "{error}");
        let lines: Vec<String> =
            seen.lock().iter().filter_map(|r| r.lines().next().map(str::to_owned)).collect();
        assert_eq!(
            lines,
            ["CONNECT manifests.example:443 HTTP/1.1", "CONNECT refused.example:8443 HTTP/1.1"]
        );
        task.abort();
    }

    /// A running source and its updates.
    struct Source {
        received: mpsc::Receiver<super::super::SourceMessage>,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    impl Source {
        fn start(url: &str, tls: ClientConfig) -> Self {
            Self::start_with(url, tls, None)
        }

        fn start_with(url: &str, tls: ClientConfig, sandboxes: Option<Arc<dyn SandboxListing>>) -> Self {
            let (tx, received) = quintlet_kit::queue::channel("test", 1);
            let stop = CancellationToken::new();
            let headers = vec![("x-node".to_owned(), "mine".to_owned())];
            let transport = Transport { tls, proxies: Proxies::default() };
            let period = Duration::from_millis(5);
            let manifests = ManifestUrl { url: url.to_owned(), headers, node: "N1".to_owned() };
            let run = run(manifests, period, transport, sandboxes, Vec::new(), tx, stop.clone());
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

    #[derive(Default)]
    struct CountingListing(Mutex<usize>);

    #[async_trait::async_trait]
    impl SandboxListing for CountingListing {
        async fn static_sandboxes(&self, _: &str) -> Result<Vec<StaticSandbox>, String> {
            let mut calls = self.0.lock();
            *calls = calls.saturating_add(1);
            Ok(Vec::new())
        }
    }

    #[tokio::test]
    async fn sandboxes_are_listed_once_a_body_has_a_pod_and_no_problem() {
        let now = Arc::new(Mutex::new(String::new()));
        let body = Arc::clone(&now);
        let server = HttpServer::start(false, move |_| answer(200, "", &body.lock())).await;
        let listing = Arc::new(CountingListing::default());
        let sandboxes: Arc<dyn SandboxListing> = Arc::<CountingListing>::clone(&listing);
        let mut source = Source::start_with(&url(&server), trust(RootCertStore::empty()), Some(sandboxes));
        for (text, calls) in
            [(String::new(), 0), (pod("Not_Valid"), 0), (list(&[]), 0), (pod("a"), 1), (pod("b"), 1)]
        {
            now.lock().clone_from(&text);
            let _ = source.next(&text).await;
            assert_eq!(*listing.0.lock(), calls, "{text}");
        }
        source.end().await;
    }

    #[tokio::test]
    async fn redirects_are_followed_and_ten_are_too_many() {
        let redirect = |path: &str| answer(301, &format!("location: {path}\r\n"), "");
        let server = HttpServer::start(false, move |path| match path {
            "/pods" => redirect("/elsewhere"),
            "/elsewhere" => answer(200, "", &pod("a")),
            _ => redirect("/loop"),
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
        let fetcher = fetcher(Proxies::default());
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

    #[test]
    fn a_pod_keeps_the_uid_of_a_sandbox_that_was_made_from_its_manifest() {
        let origin = ManifestOrigin { kind: SourceKind::Http, place: "http://pods.test", node: "N1" };
        let mut computed = None;
        let mut collect = |_: &Pod, uids: &ComputedUids| {
            computed = Some(uids.clone());
            None
        };
        decode::manifest_keeping_uids(pod("web").as_bytes(), origin, &mut collect, &mut Snapshot::default());
        let computed = computed.unwrap();
        let older = computed.of_kubelet(KubeletVersion::V1_36);
        let sandbox = |uid: &str| StaticSandbox {
            id: uid.to_owned(),
            uid: uid.to_owned(),
            name: "web-n1".to_owned(),
            namespace: "default".to_owned(),
            created_unix_ns: 1,
            config_hash: uid.to_owned(),
            seen: None,
            containers: Vec::new(),
        };
        let other = "0123456789abcdef0123456789abcdef";
        for (uid, recorded, kubelet, want) in [
            (older, other, None, older),
            (older, computed.former(), None, older),
            (computed.former(), older, None, computed.former()),
            (other, computed.former(), None, computed.former()),
            (other, other, None, computed.newest()),
            (other, other, Some(KubeletVersion::V1_36), older),
        ] {
            let uids = UrlUids { sandboxes: vec![sandbox(uid)], recorded: vec![sandbox(recorded)], kubelet };
            let SourceEvent::Snapshot(read) = read(pod("web").as_bytes(), origin, Some(&uids)) else {
                panic!("no snapshot")
            };
            assert_eq!(read.pods[0].metadata.uid.as_deref(), Some(want), "{uid} {kubelet:?}");
        }
    }
}
