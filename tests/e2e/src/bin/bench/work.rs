//! The work that is measured: pods that are created, become Ready, exit and are deleted, as an API client sees them.

use std::time::Duration;

use anyhow::Context as _;
use k8s_cri::v1::ContainerStatusRequest;
use quintlet_e2e::{Seen, pods};
use quintlet_kit::clock::Clock;
use quintlet_testapi::TestApi;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::raw::Runtime;

/// Limit for all pods of a round.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);

fn name(i: usize) -> String {
    format!("bench-{i}")
}

fn is_ready(pod: &Value) -> bool {
    Seen::from_api(pod.clone()).is_ready()
}

/// Returns the seconds from the first POST until all pods are Ready in the API server.
pub(crate) async fn burst(api: &TestApi, n: usize) -> f64 {
    let began = Instant::now();
    for i in 0..n {
        api.create_pod(pods::bound(pods::sleeper(&name(i))));
    }
    for i in 0..n {
        api.wait_for("pods", "default", &name(i), LIMIT, is_ready).await;
    }
    began.elapsed().as_secs_f64()
}

/// Returns the seconds from the first DELETE until the API server has no pod.
pub(crate) async fn remove(api: &TestApi, n: usize) -> f64 {
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
pub(crate) async fn one_more(api: &TestApi, n: usize) -> Vec<f64> {
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

/// Returns, for each of `n` containers, the milliseconds from its exit in the runtime until the API server has it.
pub(crate) async fn exits(api: &TestApi, runtime: &Runtime, n: usize) -> anyhow::Result<Vec<f64>> {
    let mut runtime = runtime.clone();
    let clock = Clock::system();
    let mut took = Vec::new();
    for i in 0..n {
        let mut pod = pods::bound(pods::script(&format!("exit-{i}"), "sleep 1"));
        pod["spec"]["restartPolicy"] = json!("Never");
        api.create_pod(pod);
        let name = format!("exit-{i}");
        let has_ended = |p: &Value| p["status"]["containerStatuses"][0]["state"]["terminated"].is_object();
        let ended = api.wait_for("pods", "default", &name, LIMIT, has_ended).await;
        let seen = clock.wall().as_nanosecond();
        let id = Seen::from_api(ended).container("main").id;
        let container_id = id.trim_start_matches("containerd://").to_owned();
        let status =
            runtime.container_status(ContainerStatusRequest { container_id, verbose: false }).await?;
        let at = status.into_inner().status.context("the runtime has the container")?.finished_at;
        took.push((seen - i128::from(at)) as f64 / 1e6);
        api.delete("pods", "default", &name, None).map_err(|e| anyhow::anyhow!("{e:?}"))?;
    }
    Ok(took)
}
