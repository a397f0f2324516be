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
                let empty = body.is_empty();
                if empty {
                    snapshot.problems.push(problem(&url, "zero-length body: no pods".to_owned()));
                } else {
                    decode::manifest(
                        &body,
                        Origin { kind: SourceKind::Http, place: &url, node: &node },
                        &mut snapshot,
                    );
                }
                last = Some(body);
                // Any bad item rejects the whole body: what ran goes on. Nothing at all is an answer, if an odd one.
                if empty || snapshot.problems.is_empty() || snapshot.pods.is_empty() && good.pods.is_empty() {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const POD: &str = "{\"apiVersion\": \"v1\", \"kind\": \"Pod\", \"metadata\": {\"name\": \"NAME\"}, \
        \"spec\": {\"containers\": [{\"name\": \"c\", \"image\": \"i\"}]}}";

    fn pod(name: &str) -> String {
        POD.replace("NAME", name)
    }

    fn list(items: &[String]) -> String {
        format!("{{\"apiVersion\": \"v1\", \"kind\": \"PodList\", \"items\": [{}]}}", items.join(","))
    }

    /// Serves whatever `answer` holds; what was asked with goes to `asked`.
    async fn serve(answer: Arc<Mutex<(u16, String)>>, asked: Arc<Mutex<String>>) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/pods", listener.local_addr().unwrap());
        quintlet_kit::task::spawn("manifests", async move {
            while let Ok((mut peer, _)) = listener.accept().await {
                let mut request = vec![0; 4096];
                let n = peer.read(&mut request).await.unwrap_or(0);
                *asked.lock() = String::from_utf8_lossy(&request[..n]).into_owned();
                let (status, body) = answer.lock().clone();
                let head = format!(
                    "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                    body.len()
                );
                let _ = peer.write_all((head + &body).as_bytes()).await;
            }
        });
        url
    }

    #[tokio::test]
    async fn a_url_is_read_as_the_kubelet_reads_it() {
        let answer = Arc::new(Mutex::new((200, String::new())));
        let asked = Arc::new(Mutex::new(String::new()));
        let url = serve(Arc::clone(&answer), Arc::clone(&asked)).await;
        let (tx, mut rx) = tokio::sync::mpsc::channel(1);
        let stop = CancellationToken::new();
        let headers = vec![("x-node".to_owned(), "mine".to_owned())];
        let run = run(url.clone(), headers, "N1".into(), Duration::from_millis(5), tx, stop.clone());
        let task = quintlet_kit::task::spawn("source", run);
        let two = list(&[pod("a"), pod("b")]);
        let bad = list(&[pod("a"), pod("Not_Valid")]);
        for (name, status, body, want, problems) in [
            ("one pod", 200, pod("a"), vec!["a-n1"], 0),
            ("a list", 200, two, vec!["a-n1", "b-n1"], 0),
            ("one bad item rejects all", 200, bad, vec!["a-n1", "b-n1"], 1),
            ("not found", 404, String::new(), vec!["a-n1", "b-n1"], 1),
            ("no body", 200, String::new(), vec![], 1),
            ("back", 200, pod("c"), vec!["c-n1"], 0),
        ] {
            *answer.lock() = (status, body);
            let mut last = (Vec::new(), usize::MAX);
            let found = tokio::time::timeout(Duration::from_secs(10), async {
                while let Some((_, s)) = rx.recv().await {
                    let names = s
                        .pods
                        .iter()
                        .map(|p| p.metadata.name.clone().unwrap_or_default())
                        .collect::<Vec<_>>();
                    last = (names, s.problems.len());
                    if last.0 == want && (last.1 > 0) == (problems > 0) {
                        return s;
                    }
                }
                panic!("the source ended");
            })
            .await;
            let snapshot = found.unwrap_or_else(|_| panic!("{name}: {last:?}"));
            // No toleration of its own, and the UID comes from the URL alone.
            assert!(snapshot.pods.iter().all(|p| p.spec.as_ref().unwrap().tolerations.is_none()), "{name}");
        }
        // The same body again says nothing.
        while rx.try_recv().is_ok() {}
        let again = tokio::time::timeout(Duration::from_millis(100), rx.recv()).await;
        assert!(again.is_err(), "{again:?}");
        assert!(asked.lock().contains("x-node: mine"));
        stop.cancel();
        task.await.unwrap();
    }
}
