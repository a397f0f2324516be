//! Requests every endpoint with every kind of credentials. A binary of its own, whose counters it reads.
#![allow(clippy::disallowed_methods, clippy::unwrap_used, unreachable_pub, dead_code)]

mod common;

use http::{Method, StatusCode};
use node_api::counters::ShareOf;
use node_api_access::limits::{Limits, Pool, Share, Shares};
use quintlet_testkit::certificates::{Authority, Identity};

use common::{Api, new_ca};

/// Returns the value of a counter on the page of metrics: the sum over all servers of this process.
fn counted(name: &str, labels: &str) -> u64 {
    let series = format!("{name}_total{{{labels}}} ");
    let page = quintlet_telemetry::metrics::text();
    page.lines().filter_map(|line| line.strip_prefix(&series)).map(|n| n.parse::<u64>().unwrap()).sum()
}

/// Every endpoint, the permissions of which each suffices, and the status for an authorized user without a
/// runtime or an upgrade.
const ENDPOINTS: &[(&str, &str, &[&str], u16)] = &[
    ("GET", "/healthz", &["healthz", "proxy"], 200),
    ("GET", "/healthz/ping", &["healthz", "proxy"], 200),
    ("GET", "/healthz/log", &["healthz", "proxy"], 200),
    ("GET", "/healthz/syncloop", &["healthz", "proxy"], 200),
    ("GET", "/healthz/nothing", &["healthz", "proxy"], 404),
    ("GET", "/pods", &["pods", "proxy"], 200),
    ("POST", "/pods", &["pods", "proxy"], 405),
    ("GET", "/runningpods/", &["pods", "proxy"], 500),
    ("GET", "/allocatedPods", &["pods", "proxy"], 404),
    ("GET", "/containerLogs/default/web/main", &["proxy"], 400),
    ("GET", "/containerLogs/default/none/main", &["proxy"], 404),
    ("GET", "/exec/default/web/main?output=1&command=true", &["proxy"], 500),
    ("POST", "/exec/default/web/main?output=1&command=true", &["proxy"], 500),
    ("POST", "/exec/default/web/main?command=true", &["proxy"], 400),
    ("GET", "/attach/default/web/main?output=1", &["proxy"], 500),
    ("POST", "/attach/default/none/main?output=1", &["proxy"], 404),
    ("POST", "/portForward/default/web", &["proxy"], 500),
    ("GET", "/portForward/default/web/other-uid", &["proxy"], 404),
    ("POST", "/run/default/web/main?cmd=true", &["proxy"], 500),
    ("GET", "/nothing", &["proxy"], 404),
    ("PUT", "/exec/default/web/main", &["proxy"], 405),
    ("GET", "/stats/summary", &["stats"], 500),
    ("POST", "/stats/summary", &["stats"], 500),
    ("GET", "/stats/other", &["stats"], 404),
    ("GET", "/metrics", &["metrics"], 200),
    ("GET", "/metrics/resource", &["metrics"], 200),
    ("GET", "/metrics/cadvisor", &["metrics"], 500),
    ("GET", "/metrics/probes", &["metrics"], 200),
    ("GET", "/metrics/slis", &["metrics"], 200),
    ("GET", "/configz", &["configz", "proxy"], 200),
    ("GET", "/flagz", &["configz"], 200),
    ("GET", "/statusz", &["statusz"], 200),
    ("GET", "/logs/", &["log"], 200),
    ("GET", "/logs/../../etc/passwd", &["log"], 404),
    ("GET", "/checkpoint/default/web/main", &["checkpoint"], 405),
    ("POST", "/checkpoint/default/web/main", &["checkpoint"], 200),
    ("POST", "/checkpoint/default/web/main?timeout=5", &["checkpoint"], 200),
    ("POST", "/checkpoint/default/none/main", &["checkpoint"], 404),
    ("HEAD", "/checkpoint/default/web/main", &["checkpoint"], 405),
    ("OPTIONS", "/checkpoint/default/web/main", &["checkpoint"], 405),
    ("POST", "/checkpoint", &["checkpoint"], 404),
    ("GET", "/debug/pprof/", &["proxy"], 200),
    ("GET", "/debug/pprof/cmdline", &["proxy"], 200),
    ("GET", "/debug/pprof/symbol", &["proxy"], 200),
    ("GET", "/debug/pprof/profile?seconds=61", &["proxy"], 400),
    ("GET", "/debug/pprof/heap", &["proxy"], 404),
    ("GET", "/debug/pprof/trace", &["proxy"], 404),
    ("POST", "/debug/pprof/profile", &["proxy"], 405),
    ("PUT", "/debug/flags/v", &["proxy"], 400),
    ("DELETE", "/pods", &["pods", "proxy"], 405),
    ("HEAD", "/pods", &["pods", "proxy"], 405),
    ("OPTIONS", "/exec/default/web/main", &["proxy"], 405),
    ("PATCH", "/stats/summary", &["stats"], 405),
    ("GET", "/logs/?query=kubelet", &["log"], 200),
    ("POST", "/logs/", &["log"], 405),
    ("PUT", "/logs/?query=kubelet", &["log"], 405),
    ("DELETE", "/logs/", &["log"], 405),
];

fn verb(method: &str) -> &'static str {
    match method {
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        "HEAD" | "OPTIONS" => "",
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_endpoint_requires_an_authorized_user() {
    let (ca, foreign) = (new_ca(), new_ca());
    let api = Api::start_with(Limits::default(), |dir| {
        std::fs::write(dir.join("ca.pem"), ca.pem()).unwrap();
        vec![format!("--client-ca-file={}", dir.join("ca.pem").display())]
    })
    .await;
    let certificate = |ca: &Authority, user: &str| {
        ca.client(user, "walkers", quintlet_testkit::certificates::ExtendedKeyUsagePurpose::ClientAuth)
    };
    let (mallory, nobody) = (certificate(&ca, "mallory"), certificate(&foreign, "right-0-healthz"));
    api.test_api.set_token("wrong", "mallory", &[]);
    // Permissions for other subresources.
    for other in ["spec", "status", "eviction"] {
        api.test_api.allow("mallory", "*", &format!("nodes/{other}"));
    }
    for (i, (method, _, rights, _)) in ENDPOINTS.iter().enumerate() {
        for right in *rights {
            let user = format!("right-{i}-{right}");
            api.test_api.set_token(&user, &user, &[]);
            api.test_api.allow(&user, verb(method), &format!("nodes/{right}"));
        }
    }
    let refused = |code: StatusCode| {
        counted("quintlet_node_api_refused_requests", &format!("code=\"{}\"", code.as_u16()))
    };
    let before = (refused(StatusCode::UNAUTHORIZED), refused(StatusCode::FORBIDDEN));
    for (i, (method, path, rights, wanted)) in ENDPOINTS.iter().enumerate() {
        let ask = async |token: Option<&str>, identity: Option<&Identity>| {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            api.request(method, path, token, identity).await
        };
        // The response to HEAD has no body.
        let body_of = |text: &str| if *method == "HEAD" { String::new() } else { text.to_owned() };
        for (token, identity) in [(None, None), (Some("bad"), None), (None, Some(&nobody))] {
            let got = ask(token, identity).await;
            assert_eq!(got, (StatusCode::UNAUTHORIZED, body_of("Unauthorized")), "{path} {token:?}");
        }
        let want = body_of(&format!(
            "Forbidden (user=mallory, verb={}, resource=nodes, subresource(s)=[{}])\n",
            verb(method),
            rights.join(" ")
        ));
        for (token, identity) in [(Some("wrong"), None), (None, Some(&mallory))] {
            assert_eq!(ask(token, identity).await, (StatusCode::FORBIDDEN, want.clone()), "{path}");
        }
        for right in *rights {
            let user = format!("right-{i}-{right}");
            let shown = certificate(&ca, &user);
            for (token, identity) in [(Some(user.as_str()), None), (None, Some(&shown))] {
                let (code, body) = ask(token, identity).await;
                assert_eq!(code.as_u16(), *wanted, "{method} {path} with {right}: {body}");
            }
        }
    }
    let count = ENDPOINTS.len() as u64;
    assert_eq!(refused(StatusCode::UNAUTHORIZED) - before.0, 3 * count);
    assert_eq!(refused(StatusCode::FORBIDDEN) - before.1, 2 * count);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_above_the_share_of_its_user_is_counted() {
    for limit in [ShareOf::Connections, ShareOf::Requests] {
        let none = Share { all: 0, each: 0 };
        let mut limits = Limits::default();
        match limit {
            ShareOf::Connections => limits.connections = Shares { others: none, ..limits.connections },
            ShareOf::Requests => limits.requests = Shares { others: none, ..limits.requests },
        }
        let api = Api::start(limits, &[]).await;
        api.test_api.set_token("t", "u", &[]);
        api.test_api.allow("u", "get", "nodes/healthz");
        let limited = || {
            Pool::ALL.map(|pool| {
                let labels = format!("client=\"{}\",limit=\"{}\"", pool.name(), limit.name());
                counted("quintlet_node_api_limited_requests", &labels)
            })
        };
        let before = limited();
        assert_eq!(api.get("/healthz", Some("t")).await.0, StatusCode::TOO_MANY_REQUESTS, "{limit:?}");
        assert_eq!(limited(), [before[0], before[1] + 1], "{limit:?}");
    }
}
