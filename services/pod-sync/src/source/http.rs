//! The manifest URL (pkg/kubelet/config/http.go): fetched every period, handed on when the body changed.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio_util::sync::CancellationToken;

use super::decode::{self, Origin};
use super::{MAX_MANIFEST, Problem, Snapshot, SourceKind, SourceSender};

/// Limit of one fetch (pkg/kubelet/config/http.go).
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Fetches `url` every `period` until told to stop. A fetch that fails changes nothing but the problems shown.
pub async fn run(
    url: String,
    headers: Vec<(String, String)>,
    node: String,
    period: Duration,
    out: SourceSender,
    stop: CancellationToken,
) {
    let client: Client<HttpConnector, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut last: Option<Bytes> = None;
    let mut good = Snapshot::default();
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        // A cut fetch is repeated at the next tick.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let snapshot = match fetch(&client, &url, &headers).await {
            Ok(body) if last.as_ref() == Some(&body) => continue,
            Ok(body) => {
                let mut snapshot = Snapshot::default();
                if body.is_empty() {
                    snapshot.problems.push(problem(&url, "zero-length body: no pods".to_owned()));
                } else {
                    decode::manifest(
                        &body,
                        Origin { kind: SourceKind::Http, place: &url, node: &node },
                        &mut snapshot,
                    );
                }
                last = Some(body);
                // Any bad item rejects the whole body: what ran goes on.
                if snapshot.problems.is_empty() || snapshot.pods.is_empty() && good.pods.is_empty() {
                    good = snapshot.clone();
                } else {
                    good.problems = snapshot.problems;
                }
                good.clone()
            }
            Err(message) => {
                tracing::warn!(url, message, "manifest URL not read");
                if last.is_none() {
                    continue;
                }
                Snapshot { problems: vec![problem(&url, message)], ..good.clone() }
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            sent = out.send((SourceKind::Http, snapshot)) => if sent.is_err() { return },
        }
    }
}

fn problem(url: &str, message: String) -> Problem {
    Problem { origin: url.to_owned(), field: String::new(), message }
}

async fn fetch(
    client: &Client<HttpConnector, Empty<Bytes>>,
    url: &str,
    headers: &[(String, String)],
) -> Result<Bytes, String> {
    let mut request = http::Request::get(url);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(Empty::new()).map_err(|e| e.to_string())?;
    let work = async {
        let response = client.request(request).await.map_err(|e| quintlet_kit::error_chain(&e))?;
        if response.status() != http::StatusCode::OK {
            return Err(format!("status {}", response.status()));
        }
        let body = Limited::new(response.into_body(), MAX_MANIFEST - 1)
            .collect()
            .await
            .map_err(|e| e.to_string())?;
        Ok(body.to_bytes())
    };
    tokio::time::timeout(FETCH_TIMEOUT, work)
        .await
        .map_err(|_| format!("no answer within {FETCH_TIMEOUT:?}"))?
}
