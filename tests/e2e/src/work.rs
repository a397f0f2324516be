//! Pods that are created, become Ready and are deleted, as a client of the API server sees them.

use std::time::Duration;

use quintlet_testapi::TestApi;
use serde_json::Value;
use tokio::time::Instant;

use crate::pods;

/// Limit for all pods of a round.
pub const LIMIT: Duration = Duration::from_secs(300);

fn name(i: usize) -> String {
    format!("bench-{i}")
}

// Looks at the pod in place, since all pods are looked at after each change.
fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// The times of a burst, from its first POST.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Burst {
    /// Seconds until half of the pods are Ready in the API server.
    pub half_ready: f64,
    /// Seconds until all pods are Ready.
    pub ready: f64,
}

impl Burst {
    /// Returns the times of a burst from the seconds of its pods.
    #[must_use]
    pub fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let at = |index: usize| seconds.get(index).copied().unwrap_or_default();
        Self {
            half_ready: at(seconds.len().div_ceil(2).saturating_sub(1)),
            ready: at(seconds.len().saturating_sub(1)),
        }
    }
}

/// Creates pods and waits until all are Ready.
pub async fn burst(api: &TestApi, n: usize) -> Burst {
    burst_of(api, n, pods::sleeper).await
}

/// Like [`burst`], with the pods of `pod`, by name.
pub async fn burst_of(api: &TestApi, n: usize, pod: impl Fn(&str) -> Value) -> Burst {
    let began = Instant::now();
    for i in 0..n {
        api.create_pod(pods::bound(pod(&name(i))));
    }
    let ready = (0..n).map(|i| async move {
        api.wait_for("pods", "default", &name(i), LIMIT, is_ready).await;
        began.elapsed().as_secs_f64()
    });
    Burst::of(futures::future::join_all(ready).await)
}

/// Returns the seconds from the first DELETE until the API server has no pod.
pub async fn remove(api: &TestApi, n: usize) -> f64 {
    let began = Instant::now();
    for i in 0..n {
        // The pod was created before. If it does not exist, it is gone, which is what is measured.
        let _gone = api.delete("pods", "default", &name(i), None);
    }
    for i in 0..n {
        api.wait_for("pods", "default", &name(i), LIMIT, Value::is_null).await;
    }
    began.elapsed().as_secs_f64()
}

/// Returns the milliseconds to start each of `n` more pods on a full node, one after the other.
pub async fn one_more(api: &TestApi, n: usize) -> Vec<f64> {
    let mut took = Vec::new();
    for i in 0..n {
        let name = format!("more-{i}");
        let began = Instant::now();
        api.create_pod(pods::bound(pods::sleeper(&name)));
        api.wait_for("pods", "default", &name, LIMIT, is_ready).await;
        took.push(began.elapsed().as_secs_f64() * 1000.0);
        // It was Ready just now.
        let _gone = api.delete("pods", "default", &name, None);
        api.wait_for("pods", "default", &name, LIMIT, Value::is_null).await;
    }
    took
}
