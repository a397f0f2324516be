//! Lists of pods that take longer than a call may.

use std::time::Duration;

use node_api::services::Services;
use quintlet_kit::paths::Paths;
use tokio::time::Instant;
use tonic::Code;

use crate::common::serve_slow_podsync;

/// Returns the number of pods that node-api gets, or the code of the error, and the time that it takes.
async fn list(pods: usize, pause: Duration) -> (Result<usize, Code>, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths::new(dir.path());
    let _podsync = serve_slow_podsync(&paths, pods, pause).await;
    let start = Instant::now();
    let listed = Services::new(paths).pods().await;
    (listed.map(|pods| pods.len()).map_err(|status| status.code()), start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn a_list_of_pods_may_take_long_while_pods_arrive() {
    let (pods, time) = list(10, Duration::from_secs(3)).await;
    assert!(pods == Ok(10) && time >= Duration::from_secs(30), "{pods:?} {time:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_sync_that_sends_nothing_is_given_up_after_five_seconds() {
    let (pods, time) = list(1, Duration::from_secs(3600)).await;
    let is_in_time = (Duration::from_secs(5)..Duration::from_secs(10)).contains(&time);
    assert!(pods == Err(Code::DeadlineExceeded) && is_in_time, "{pods:?} {time:?}");
}
