//! Pods that exit, as a client of the API server sees them.

use anyhow::Context as _;
use quintlet_cri_api::v1::ContainerStatusRequest;
use quintlet_e2e::work::LIMIT;
use quintlet_e2e::{Seen, pods};
use quintlet_kit::clock::Clock;
use quintlet_testapi::TestApi;
use serde_json::{Value, json};

use crate::raw::Runtime;

/// Returns, for each of `n` containers, the milliseconds from its exit in the runtime until the API server
/// has it. One more that exits before them is not counted, since the runtime may still be cleaning up.
pub(crate) async fn exits(api: &TestApi, runtime: &Runtime, n: usize) -> anyhow::Result<Vec<f64>> {
    let mut runtime = runtime.clone();
    let clock = Clock::system();
    let mut took = Vec::new();
    for i in 0..=n {
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
        if i > 0 {
            took.push((seen - i128::from(at)) as f64 / 1e6);
        }
        api.delete("pods", "default", &name, None).map_err(|e| anyhow::anyhow!("{e:?}"))?;
    }
    Ok(took)
}
