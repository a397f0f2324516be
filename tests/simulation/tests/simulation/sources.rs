//! Invalid manifests.

use quintlet_kit::messages::whole;
use quintlet_proto::podsync::v1::ListPodsRequest;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_simulation::{LONG, Options, Sim, pods};
use quintlet_testkit::fake_runtime::Method;
use quintlet_testkit::wait::until;

async fn problems(sim: &Sim, want: usize) {
    let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    until(&format!("{want} problems of manifests"), LONG, async || {
        let request = ListPodsRequest { brief: true };
        let reply = whole(client.list_pods(request)).await.map_err(|e| format!("{e:?}"))?.into_inner();
        if reply.problems.len() == want { Ok(()) } else { Err(format!("{:?}", reply.problems)) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_that_is_written_in_steps_does_not_affect_its_pod() {
    let mut sim = Sim::prepare(Options::default()).await;
    // No periodic read intervenes.
    sim.set_pod_sync_args(&["--file-check-frequency=1h"]);
    sim.start_all();
    let path = sim.manifests_dir().join("web.yaml");
    let text = pods::manifest("web").to_string();
    std::fs::write(&path, &text).unwrap();
    let before = sim.wait_ready("web-sim-node").await;
    let half = &text[..text.len() / 2];
    for step in ["", half] {
        std::fs::write(&path, step).unwrap();
        problems(&sim, 1).await;
        std::fs::write(&path, &text).unwrap();
        problems(&sim, 0).await;
    }
    // A manifest later in the directory is started once all manifests of the read are being handled.
    sim.manifest("zz-after", &pods::manifest("zz-after"));
    sim.wait_ready("zz-after-sim-node").await;
    assert_eq!(sim.runtime.count(Method::StopContainer), 0, "{:?}", sim.instances(""));
    let after = sim.wait_ready("web-sim-node").await;
    assert_eq!(after.uid(), before.uid());
    let containers = sim.runtime.containers();
    let made = containers.iter().filter(|c| c.name() == "c-web").count();
    assert_eq!(made, 1, "{:?}", sim.instances(""));
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_with_habits_of_installers_becomes_a_running_pod() {
    let sim = Sim::start(Options::default()).await;
    let manifest = "
apiVersion: v1
kind: Pod
metadata:
  creationTimestamp: null
  name: balancer
  labels:
    tier:
  annotations: {example.com/note: null}
spec:
  automountServiceAccountToken: false
  containers:
  - name: proxy
    image: none.test/first:1
    image: none.test/web:1
    resources: {}
    args: [--run, null]
    volumeMounts: [{name: run, mountPath: /run/proxy}]
  volumes:
  - name: run
status: {}
";
    let manifest = manifest.replace("none.test/web:1", &image_of(&pods::manifest("web")));
    std::fs::write(sim.manifests_dir().join("balancer.yaml"), manifest).unwrap();
    let seen = sim.wait_ready("balancer-sim-node").await;
    problems(&sim, 1).await;
    assert_eq!(seen.0["metadata"]["labels"]["tier"], "");
    let containers = sim.runtime.containers();
    let config = &containers.iter().find(|c| c.name() == "proxy").unwrap().config;
    assert_eq!(config.args, ["--run", ""]);
    let mount = config.mounts.iter().find(|m| m.container_path == "/run/proxy").unwrap();
    assert!(mount.host_path.ends_with("volumes/kubernetes.io~empty-dir/run"), "{}", mount.host_path);
    sim.finish().await;
}

fn image_of(pod: &serde_json::Value) -> String {
    pod["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()
}
