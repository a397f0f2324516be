//! Authentication: tokens, certificates, anonymous requests, and errors at startup.

use http::{Method, StatusCode};
use node_api::{NodeApi, StartError};
use node_api_access::limits::Limits;
use quintlet_kit::clock::Clock;
use tokio::io::AsyncWriteExt as _;

use crate::common::{Api, TEST_TIMEOUT, args, new_ca};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reviews_are_cached_and_a_token_is_reviewed_once() {
    let api = Api::start(Limits::default(), &[]).await;
    api.test_api.set_token("t", "u", &["g"]);
    api.test_api.allow("g", "get", "nodes/proxy");
    for _ in 0..3 {
        assert_eq!(api.get("/pods", Some("t")).await.0, StatusCode::OK);
    }
    let reviews = api.test_api.reviews();
    let kinds: Vec<&str> = reviews.iter().map(|r| r["kind"].as_str().unwrap()).collect();
    // One review of the token, then `pods` (denied) and `proxy` (allowed).
    assert_eq!(kinds, ["TokenReview", "SubjectAccessReview", "SubjectAccessReview"]);
    let spec = &reviews[2]["spec"];
    assert_eq!(spec["groups"], serde_json::json!(["g", "system:authenticated"]));
    assert_eq!(spec["resourceAttributes"]["name"], "n1");
    assert_eq!(spec["resourceAttributes"]["subresource"], "proxy");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_certificate_of_the_configured_ca_authenticates_and_the_ca_is_reloaded() {
    let (ca, other) = (new_ca(), new_ca());
    let api = Api::start_with(Limits::default(), |dir| {
        std::fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
        vec![format!("--client-ca-file={}", dir.join("ca.pem").display())]
    })
    .await;
    use quintlet_testkit::certificates::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    api.test_api.allow("team", "get", "nodes/pods");
    let ask = async |identity, token| api.request(Method::GET, "/pods", token, Some(identity)).await.0;
    let right = ca.client("alice", "team", ClientAuth);
    assert_eq!(ask(&right, None).await, StatusCode::OK);
    let (others, server) = (ca.client("alice", "others", ClientAuth), ca.client("alice", "team", ServerAuth));
    assert_eq!(ask(&others, None).await, StatusCode::FORBIDDEN);
    assert_eq!(ask(&server, None).await, StatusCode::UNAUTHORIZED);
    let foreign = other.client("alice", "team", ClientAuth);
    assert_eq!(ask(&foreign, None).await, StatusCode::UNAUTHORIZED);
    // A certificate without a user does not exclude a token.
    api.test_api.set_token("t", "bob", &["team"]);
    assert_eq!(ask(&foreign, Some("t")).await, StatusCode::OK);

    std::fs::write(api.dir.path().join("ca.pem"), "rubbish").unwrap();
    tokio::time::sleep(std::time::Duration::from_millis(1500)).await;
    assert_eq!(ask(&right, None).await, StatusCode::OK, "what cannot be used must leave the CA of before");
    std::fs::write(api.dir.path().join("ca.pem"), other.pem()).unwrap();
    let deadline = tokio::time::Instant::now() + TEST_TIMEOUT;
    while ask(&foreign, None).await != StatusCode::OK {
        assert!(tokio::time::Instant::now() < deadline, "the new CA is not read");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(ask(&right, None).await, StatusCode::UNAUTHORIZED);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_credentials_is_anonymous_only_if_allowed_and_a_bad_token_never_is() {
    let api = Api::start(Limits::default(), &["--anonymous-auth=true"]).await;
    api.test_api.allow("system:unauthenticated", "get", "nodes/pods");
    assert_eq!(api.get("/pods", None).await.0, StatusCode::OK);
    assert_eq!(api.get("/pods", Some("bad")).await.0, StatusCode::UNAUTHORIZED);
    let too_long = "x".repeat(40_000);
    assert_eq!(api.get("/pods", Some(&too_long)).await.0, StatusCode::UNAUTHORIZED);
    let protocol = |value: &str| {
        format!(
            "GET /pods HTTP/1.1\r\nhost: n\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-protocol: {value}\r\n\r\n"
        )
    };
    for (value, want) in [("v4.channel.k8s.io", "200"), ("base64url.bearer.authorization.k8s.io.!!", "401")] {
        let mut client = api.tls(None).await;
        client.write_all(protocol(value).as_bytes()).await.unwrap();
        let head = crate::common::head(&mut client).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {want}")), "{value}: {head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_also_found_by_the_uid_of_its_mirror_pod() {
    let (api, _runtime) =
        Api::with_runtime(Limits::default(), &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"])
            .await;
    for (uid, want) in [("u1", StatusCode::OK), ("m1", StatusCode::OK), ("x", StatusCode::NOT_FOUND)] {
        let path = format!("/run/default/web/{uid}/main?cmd=true");
        assert_eq!(api.request(Method::POST, &path, None, None).await.0, want, "{uid}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_metrics_report_that_probe_service_is_unavailable() {
    let api =
        Api::start(Limits::default(), &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"]).await;
    let (code, page) = api.get("/metrics/probes", None).await;
    assert_eq!(code, StatusCode::OK);
    for line in [
        "quintlet_service_up{service=\"probe-service\"} 0",
        "quintlet_service_metrics_stale{service=\"probe-service\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line}: {page}");
    }
    assert!(!page.contains("pleg-service"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_fails_while_the_sync_loop_is_stuck() {
    let api =
        Api::start(Limits::default(), &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"]).await;
    assert_eq!(api.get("/healthz", None).await, (StatusCode::OK, "ok".to_owned()));
    let (_, verbose) = api.get("/healthz?verbose", None).await;
    assert_eq!(verbose, "[+]ping ok\n[+]log ok\n[+]syncloop ok\nhealthz check passed\n");
    api.podsync.set_not_serving("syncloop").await;
    let want = "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\nhealthz check failed\n";
    assert_eq!(api.get("/healthz", None).await, (StatusCode::INTERNAL_SERVER_ERROR, want.to_owned()));
    assert_eq!(api.get("/healthz?exclude=syncloop", None).await.0, StatusCode::OK);
    assert_eq!(api.get("/healthz/ping", None).await.0, StatusCode::OK);
    assert_eq!(api.get("/healthz/syncloop", None).await.0, StatusCode::INTERNAL_SERVER_ERROR);
}

#[tokio::test]
async fn an_authentication_without_a_method_or_an_api_server_is_a_startup_error() {
    let dir = tempfile::tempdir().unwrap();
    let start = async |line: &[&str]| {
        NodeApi::bind(&args(dir.path(), line), Limits::default(), Clock::system()).await.unwrap_err()
    };
    assert!(matches!(start(&[]).await, StartError::NoClientForTokens));
    let off = "--authentication-token-webhook=false";
    assert!(matches!(start(&[off]).await, StartError::NoAuthentication));
    assert!(matches!(start(&[off, "--anonymous-auth=true"]).await, StartError::NoClientForAccess));
    let always = "--authorization-mode=AlwaysAllow";
    let error = start(&[off, "--anonymous-auth=true", always, "--tls-min-version=VersionTLS10"]).await;
    assert!(matches!(error, StartError::Tls(_)), "{error}");
}
