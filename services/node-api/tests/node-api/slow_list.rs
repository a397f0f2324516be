//! Lists that take longer than a call may.

use std::time::Duration;

use node_api_base::services::Services;
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::{PodStorage, PodView};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::common::serve_slow_podsync;

/// Calls node-api's client of a pod-sync that has `pods` pods and pauses before it sends each of them.
/// Returns the number of pods that it gets, or the code of the error, and the time that it takes.
async fn list<T>(
    pods: usize,
    pause: Duration,
    call: impl AsyncFnOnce(Services) -> Result<Vec<T>, Status>,
) -> (Result<usize, Code>, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let paths = Paths::new(dir.path());
    let _podsync = serve_slow_podsync(&paths, pods, pause).await;
    let start = Instant::now();
    let listed = call(Services::new(paths)).await;
    (listed.map(|pods| pods.len()).map_err(|status| status.code()), start.elapsed())
}

async fn pods(services: Services) -> Result<Vec<PodView>, Status> {
    let mut snapshot = services.pods().await?;
    let mut pods = Vec::new();
    while let Some(pod) = snapshot.next().await? {
        pods.push(pod);
    }
    Ok(pods)
}

async fn volumes(services: Services) -> Result<Vec<PodStorage>, Status> {
    services.storage().await.map(|reply| reply.pods)
}

#[tokio::test(start_paused = true)]
async fn lists_may_take_long_while_pods_arrive() {
    let pause = Duration::from_secs(3);
    let of_statistics = async |services: Services| services.pods_for_statistics().await;
    let lists =
        [list(10, pause, pods).await, list(10, pause, of_statistics).await, list(10, pause, volumes).await];
    for (listed, time) in lists {
        assert!(listed == Ok(10) && time >= Duration::from_secs(30), "{listed:?} {time:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_sync_that_sends_nothing_is_given_up_after_five_seconds() {
    let pause = Duration::from_secs(3600);
    for (listed, time) in [list(1, pause, pods).await, list(1, pause, volumes).await] {
        let is_in_time = (Duration::from_secs(5)..Duration::from_secs(10)).contains(&time);
        assert!(listed == Err(Code::DeadlineExceeded) && is_in_time, "{listed:?} {time:?}");
    }
}
