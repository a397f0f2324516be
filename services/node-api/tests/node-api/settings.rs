//! Effects of the configuration: ports, handlers, TLS, and cache times of reviews.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use node_api::{NodeApi, StartError};
use node_api_access::limits::Limits;
use quintlet_kit::clock::Clock;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

use crate::common::{Api, TEST_TIMEOUT, args, new_ca, plain};

const OPEN: [&str; 3] =
    ["--authentication-token-webhook=false", "--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

/// Returns an unused port.
async fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port()
}

/// Retries a request until the port is open.
async fn ask(port: u16, path: &str) -> (StatusCode, String) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        match plain(SocketAddr::from(([127, 0, 0, 1], port)), Method::GET, path).await {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < deadline, "{port}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_configured_address_and_ports_are_used() {
    let [main, read_only, healthz] = [free_port().await, free_port().await, free_port().await];
    let flags = [
        format!("--port={main}"),
        format!("--read-only-port={read_only}"),
        format!("--healthz-port={healthz}"),
        "--healthz-bind-address=127.0.0.1".to_owned(),
    ];
    let flags: Vec<&str> = OPEN.into_iter().chain(flags.iter().map(String::as_str)).collect();
    let api = Api::start(Limits::default(), &flags).await;
    assert_eq!(api.address, SocketAddr::from(([127, 0, 0, 1], main)));
    assert_eq!(api.get("/pods", None).await.0, StatusCode::OK);

    assert_eq!(ask(read_only, "/pods").await.0, StatusCode::OK);
    assert_eq!(ask(read_only, "/healthz").await, (StatusCode::OK, "ok".to_owned()));
    for acting in [
        "/exec/default/web/main?output=1",
        "/containerLogs/default/web/main",
        "/runningpods/",
        "/debug/pprof/",
        "/logs/",
    ] {
        let (code, body) = ask(read_only, acting).await;
        let want = (StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n");
        assert_eq!((code, body.as_str()), want, "{acting}");
    }

    // A checkpoint fills the disk (CVE-2025-0426), so it is created only for authorized users, on the
    // authenticated port.
    let checkpoint =
        |port| plain(SocketAddr::from(([127, 0, 0, 1], port)), Method::POST, "/checkpoint/default/web/main");
    assert_eq!(checkpoint(read_only).await.unwrap().0, StatusCode::NOT_FOUND);
    assert_eq!(api.checkpoints.0.lock().len(), 0);
    let (code, _) = api.request(Method::POST, "/checkpoint/default/web/main", None, None).await;
    assert_eq!((code, api.checkpoints.0.lock().len()), (StatusCode::OK, 1), "the other port makes one");

    assert_eq!(ask(healthz, "/healthz").await, (StatusCode::OK, "ok".to_owned()));
    for other in ["/pods", "/debug/pprof/", "/debug/pprof/heap", "/metrics", "/logs/"] {
        assert_eq!(ask(healthz, other).await.0, StatusCode::NOT_FOUND, "{other}");
    }

    // A port that is used twice is an error that names the port.
    let dir = tempfile::tempdir().unwrap();
    let again = NodeApi::bind(&args(dir.path(), &flags), Limits::default(), Clock::system()).await;
    let error = again.unwrap_err();
    assert!(matches!(&error, StartError::Listen { address, .. } if address.port() == main), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_server_only_health_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let [read_only, healthz] = [free_port().await, free_port().await];
    let ports = [format!("--read-only-port={read_only}"), format!("--healthz-port={healthz}")];
    let flags: Vec<&str> =
        OPEN.into_iter().chain(ports.iter().map(String::as_str)).chain(["--enable-server=false"]).collect();
    let api = NodeApi::bind(&args(dir.path(), &flags), Limits::default(), Clock::system()).await.unwrap();
    assert_eq!(api.address(), None);
    let stop = CancellationToken::new();
    let ended = quintlet_kit::task::spawn("node-api", api.serve(stop.clone()));
    assert_eq!(ask(healthz, "/healthz").await, (StatusCode::OK, "ok".to_owned()));
    assert!(TcpStream::connect(("127.0.0.1", read_only)).await.is_err());
    stop.cancel();
    ended.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn allocated_pods_have_no_status_and_are_served_behind_their_gate() {
    let port = free_port().await;
    let read_only = format!("--read-only-port={port}");
    let flags = ["--feature-gates=KubeletAllocatedPodsEndpoint=true", &read_only];
    let api = Api::start(Limits::default(), &[&OPEN[..], &flags].concat()).await;
    let web = json!({
        "kind": "Pod", "apiVersion": "v1", "status": {},
        "metadata": {"name": "web", "namespace": "default", "uid": "u1"},
        "spec": {"containers": [{"name": "main"}]},
    });
    let (code, body) = api.get("/allocatedPods", None).await;
    let list: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((code, &list["kind"], &list["items"]), (StatusCode::OK, &json!("PodList"), &json!([web])));
    for path in ["default/web", "default/web/u1", "default/web/m1"] {
        let (code, body) = api.get(&format!("/allocatedPods/{path}"), None).await;
        assert_eq!(
            (code, serde_json::from_str::<Value>(&body).unwrap()),
            (StatusCode::OK, web.clone()),
            "{path}"
        );
    }
    for path in ["default/none", "default/web/u2", "default", "default/web/u1/main"] {
        assert_eq!(api.get(&format!("/allocatedPods/{path}"), None).await.0, StatusCode::NOT_FOUND, "{path}");
    }
    let (code, _) = api.request(Method::POST, "/allocatedPods", None, None).await;
    assert_eq!(code, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(ask(port, "/allocatedPods").await.0, StatusCode::NOT_FOUND, "not without authentication");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_that_are_off_answer_405() {
    let off = ["--enable-debugging-handlers=false", "--enable-system-log-handler=false"];
    let api = Api::start(Limits::default(), &[&OPEN[..], &off].concat()).await;
    for path in [
        "/runningpods/",
        "/containerLogs/default/web/main",
        "/exec/default/web/main?output=1",
        "/attach/default/web/main?output=1",
        "/portForward/default/web",
        "/run/default/web/main",
        "/debug/pprof/",
        "/logs/",
    ] {
        let (code, body) = api.get(path, None).await;
        let want = (StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n");
        assert_eq!((code, body.as_str()), want, "{path}");
    }
    for path in ["/healthz", "/pods", "/metrics"] {
        assert_eq!(api.get(path, None).await.0, StatusCode::OK, "{path}");
    }
    let api = Api::start(Limits::default(), &[&OPEN[..], &off[1..]].concat()).await;
    let want = (StatusCode::METHOD_NOT_ALLOWED, "logs endpoint is disabled.\n".to_owned());
    assert_eq!(api.get("/logs/", None).await, want);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_query_of_logs_may_be_posted_if_queries_are_on() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("own"), "line\n").unwrap();
    let logs = format!("--system-log-dir={}", dir.path().display());
    let allowed = (StatusCode::OK, "line\n".to_owned());
    let refused = (StatusCode::METHOD_NOT_ALLOWED, "405: Method Not Allowed\n".to_owned());
    for (is_on, posted) in [(true, &allowed), (false, &refused)] {
        let query = format!("--enable-system-log-query={is_on}");
        let api = Api::start(Limits::default(), &[&OPEN[..], &[&*logs, &*query]].concat()).await;
        for (method, want) in [
            (Method::GET, &allowed),
            (Method::POST, posted),
            (Method::PUT, &refused),
            (Method::PATCH, &refused),
            (Method::DELETE, &refused),
        ] {
            let path = if is_on { "/logs/?query=/own" } else { "/logs/own" };
            let got = api.request(method.clone(), path, None, None).await;
            assert_eq!(&got, want, "{method} with {query}");
        }
    }
}

/// Returns the certificate for a client that supports only this version.
async fn handshake(
    address: SocketAddr,
    version: &'static rustls::SupportedProtocolVersion,
) -> std::io::Result<Vec<u8>> {
    let stream = shake(address, rustls::crypto::ring::default_provider(), version).await?;
    Ok(stream.get_ref().1.peer_certificates().unwrap()[0].to_vec())
}

/// Handshakes with a client that supports only this configuration.
async fn shake(
    address: SocketAddr,
    provider: rustls::crypto::CryptoProvider,
    version: &'static rustls::SupportedProtocolVersion,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[version])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(quintlet_kit::tls::unverified_certificate())
        .with_no_client_auth();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("n1").unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_versions_of_tls_that_are_allowed_are_accepted() {
    let api = Api::start(Limits::default(), &OPEN).await;
    assert!(handshake(api.address, &rustls::version::TLS12).await.is_ok());
    assert!(handshake(api.address, &rustls::version::TLS13).await.is_ok());
    let newest = [&OPEN[..], &["--tls-min-version=VersionTLS13"]].concat();
    let api = Api::start(Limits::default(), &newest).await;
    assert!(handshake(api.address, &rustls::version::TLS12).await.is_err());
    assert!(handshake(api.address, &rustls::version::TLS13).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_suites_and_groups_of_the_configuration_are_accepted() {
    use rustls::version::{TLS12, TLS13};
    // The certificate has an ECDSA key.
    let ours = "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256";
    let flags = [
        format!("--tls-cipher-suites={ours},TLS_RSA_WITH_AES_128_GCM_SHA256"),
        "--tls-curve-preferences=4588,24".to_owned(),
    ];
    let flags: Vec<&str> = OPEN.into_iter().chain(flags.iter().map(String::as_str)).collect();
    let api = Api::start(Limits::default(), &flags).await;
    let all = rustls::crypto::ring::default_provider;
    for suite in all().cipher_suites {
        let name = format!("{:?}", suite.suite());
        let version = if suite.tls13().is_some() { &TLS13 } else { &TLS12 };
        let provider = rustls::crypto::CryptoProvider { cipher_suites: vec![suite], ..all() };
        let is_accepted = shake(api.address, provider, version).await.is_ok();
        assert_eq!(is_accepted, name == ours || name.starts_with("TLS13_"), "{name}");
    }
    for group in all().kx_groups {
        let provider = rustls::crypto::CryptoProvider { kx_groups: vec![group], ..all() };
        for version in [&TLS12, &TLS13] {
            let is_accepted = shake(api.address, provider.clone(), version).await.is_ok();
            assert_eq!(is_accepted, u16::from(group.name()) == 24, "{:?} {version:?}", group.name());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_serving_certificate_is_reloaded() {
    let ca = new_ca();
    let write = |dir: &std::path::Path, name: &str| {
        let server = ca.server(name);
        // The key is replaced first. A key that does not match the certificate changes nothing.
        std::fs::write(dir.join("tls.key"), server.key_pem()).unwrap();
        std::fs::write(dir.join("tls.crt"), server.pem()).unwrap();
    };
    let api = Api::start_with(Limits::default(), |dir| {
        write(dir, "first");
        let [cert, key] = ["tls.crt", "tls.key"].map(|f| dir.join(f).display().to_string());
        let files = [format!("--tls-cert-file={cert}"), format!("--tls-private-key-file={key}")];
        OPEN.into_iter().map(str::to_owned).chain(files).collect()
    })
    .await;
    let first = handshake(api.address, &rustls::version::TLS13).await.unwrap();
    let mut kept = api.tls(None).await;
    write(api.dir.path(), "second");
    let deadline = Instant::now() + TEST_TIMEOUT;
    while handshake(api.address, &rustls::version::TLS13).await.unwrap() == first {
        assert!(Instant::now() < deadline, "the new certificate is not served");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // An earlier connection stays open.
    assert_eq!(crate::common::get_on(&mut kept, "/healthz").await, "ok");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reviews_are_cached_for_the_configured_time() {
    let ttls = |ttl: &str| {
        ["authentication-token-webhook-cache-ttl", "authorization-webhook-cache-authorized-ttl"]
            .into_iter()
            .chain(["authorization-webhook-cache-unauthorized-ttl"])
            .map(|flag| format!("--{flag}={ttl}"))
            .collect::<Vec<_>>()
    };
    for (ttl, reviewed_again) in [("1h", false), ("0s", true)] {
        let flags = ttls(ttl);
        let api = Api::start(Limits::default(), &flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
        api.test_api.set_token("t", "u", &[]);
        api.test_api.allow("u", "get", "nodes/proxy");
        assert_eq!(api.get("/pods", Some("t")).await.0, StatusCode::OK);
        let once = api.test_api.reviews().len();
        // One review each of the token, of `pods` (denied) and of `proxy` (allowed).
        assert_eq!(once, 3);
        assert_eq!(api.get("/pods", Some("t")).await.0, StatusCode::OK);
        let twice = api.test_api.reviews().len();
        assert_eq!(twice, if reviewed_again { 6 } else { 3 }, "{ttl}");
    }
}
