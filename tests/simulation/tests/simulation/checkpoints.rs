//! Container checkpoints requested by node-api.

use std::os::unix::fs::PermissionsExt as _;

use quintlet_cri_api::v1;
use quintlet_kit::socket;
use quintlet_proto::podsync::v1::CheckpointRequest;
use quintlet_proto::podsync::v1::checkpoints_client::CheckpointsClient;
use quintlet_simulation::{Options, Sim, pods};
use quintlet_testkit::fake_runtime::{self, Method};
use tonic::Status;

async fn checkpoint(sim: &Sim, uid: &str, container: &str, timeout_seconds: i64) -> Result<String, Status> {
    let mut client = CheckpointsClient::new(socket::channel(sim.paths().podsync()));
    let (pod_uid, container) = (uid.to_owned(), container.to_owned());
    let request = CheckpointRequest { pod_uid, container, timeout_seconds };
    Ok(client.checkpoint(request).await?.into_inner().location)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_checkpoint_is_readable_only_by_root_in_the_root_directory() {
    let runtime = fake_runtime::Options { checkpoints: true, ..fake_runtime::Options::default() };
    let sim = Sim::start(Options { runtime, ..Options::default() }).await;
    let uid = sim.create(pods::pod("web", &[pods::container("main"), pods::container("other")]));
    sim.wait_ready("web").await;
    let id = sim.runtime.newest(&uid, "main").unwrap().id().to_owned();
    let file = checkpoint(&sim, &uid, "main", 5).await.unwrap();
    let dir = sim.root_dir().join("checkpoints");
    let name = file.strip_prefix(&format!("{}/", dir.display())).unwrap();
    assert!(name.starts_with("checkpoint-web_default-main-2") && name.ends_with(".tar"), "{name}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), id, "of that container");
    assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let seconds = |n: usize| {
        let request =
            sim.runtime.calls_of(Method::CheckpointContainer)[n].request::<v1::CheckpointContainerRequest>();
        request.timeout
    };
    assert_eq!(seconds(0), 120, "no less than any call may take");
    checkpoint(&sim, &uid, "other", 600).await.unwrap();
    assert_eq!(seconds(1), 600);
    for (uid, container, timeout, why) in [
        (uid.as_str(), "none", 0, "container none not found"),
        (uid.as_str(), "main", -1, "CheckpointContainer requires the timeout value to be > 0"),
        ("nobody", "main", 0, "pod does not exist"),
    ] {
        assert_eq!(checkpoint(&sim, uid, container, timeout).await.unwrap_err().message(), why);
    }
    assert_eq!(sim.runtime.count(Method::CheckpointContainer), 2, "the rest never got there");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_error_of_a_runtime_without_checkpoints_is_returned() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("web"));
    sim.wait_ready("web").await;
    let refused = checkpoint(&sim, &uid, "c-web", 0).await.unwrap_err();
    let want = "rpc error: code = Unimplemented desc = method CheckpointContainer not implemented";
    assert_eq!(refused.message(), want);
    sim.finish().await;
}
