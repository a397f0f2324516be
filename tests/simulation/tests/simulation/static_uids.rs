//! Static pods that a kubelet made.

use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use pod_sync_layout::SourceKind;
use pod_sync_sources::Snapshot;
use pod_sync_sources::decode::{ManifestOrigin, manifest_keeping_uids};
use pod_sync_sources::kubelet_uid::{ComputedUids, KubeletVersion};
use quintlet_simulation::LONG;
use quintlet_simulation::watch::actions_on;
use quintlet_simulation::{Options, Seen, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

const NAME: &str = "web-sim-node";
const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";
/// A UID as a kubelet computes it.
const UID: &str = "0123456789abcdef0123456789abcdef";

/// A static pod that a kubelet made, and its mirror pod.
struct KubeletPod {
    uid: String,
    mirror: Seen,
    sandbox: String,
    subjects: Vec<String>,
    /// Time at which the kubelet saw the manifest.
    seen: jiff::Timestamp,
}

impl KubeletPod {
    // Leaves a node without a node agent, on which the pod runs. A kubelet leaves the same as Quintlet with
    // its UID, other than the records of pod-sync and the mark of the sandbox.
    async fn make(sim: &Sim, uid: &str) -> Self {
        sim.start_all();
        let mut with_uid = probed();
        with_uid["metadata"]["uid"] = json!(uid);
        sim.manifest("web", &with_uid);
        let mirror = sim.wait_ready(NAME).await;
        assert_eq!(mirror.0["metadata"]["annotations"][CONFIG_MIRROR], uid);
        for service in Service::ALL {
            sim.stop(service).await;
        }
        std::fs::remove_dir_all(sim.paths().state_dir()).unwrap();
        sim.manifest("web", &probed());
        let file = std::fs::metadata(sim.manifests_dir().join("web.yaml")).unwrap();
        let changed = jiff::Timestamp::new(file.ctime(), i32::try_from(file.ctime_nsec()).unwrap()).unwrap();
        let seen = changed + Duration::from_nanos(1);
        let [sandbox] = &sim.sandboxes(uid)[..] else { panic!("{:?}", sim.sandboxes(uid)) };
        let sandbox = sandbox.id().to_owned();
        sim.runtime.edit_sandbox(&sandbox, |status| {
            status.annotations.remove("quintlet.dev/node");
            status.annotations.insert("kubernetes.io/config.seen".to_owned(), seen.to_string());
        });
        let containers = sim.runtime.containers().into_iter().map(|container| container.id().to_owned());
        let subjects = containers.chain([sandbox.clone(), uid.to_owned()]).collect();
        sim.runtime.forget_calls();
        // A time of the status that is new differs from the kubelet's.
        tokio::time::sleep(Duration::from_secs(3)).await;
        Self { uid: uid.to_owned(), mirror: sim.pod(NAME), sandbox, subjects, seen }
    }

    // Waits until pod-sync has the pod, and checks that nothing has changed.
    async fn check_kept(&self, sim: &Sim, what: &str) {
        let view = sim.wait_view(NAME, "it runs", |view| view.status == "Running").await;
        assert_eq!(view.uid, self.uid, "{what}");
        // Housekeeping ends pods without a source every two seconds.
        tokio::time::sleep(Duration::from_secs(5)).await;
        // The readiness probe continues. A line begins with the method.
        let mut actions = actions_on(&sim.runtime, &self.subjects);
        actions.retain(|action| !action.starts_with("ExecSync "));
        assert_eq!(actions, Vec::<String>::new(), "{what}");
        assert_eq!(sim.runtime.count(Method::RunPodSandbox), 0, "{what}");
        let mirror = sim.pod(NAME);
        assert_eq!(mirror.0["metadata"]["uid"], self.mirror.0["metadata"]["uid"], "{what}");
        assert_eq!(mirror.0["metadata"]["annotations"], self.mirror.0["metadata"]["annotations"], "{what}");
        assert_eq!(mirror.0["status"], self.mirror.0["status"], "{what}");
    }
}

/// A manifest with a probe: the pod is Ready by the kubelet's results until the next one.
fn probed() -> Value {
    let mut manifest = pods::manifest("web");
    manifest["spec"]["containers"][0]["readinessProbe"] =
        json!({"exec": {"command": ["ready"]}, "initialDelaySeconds": 3, "periodSeconds": 1});
    manifest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_of_a_kubelet_keeps_its_uid_until_its_manifest_changes() {
    let sim = Sim::prepare(Options::default()).await;
    let pod = KubeletPod::make(&sim, UID).await;
    let writes = || sim.api.counts().of("patch pods/status");
    let before = writes();
    sim.start_all();
    pod.check_kept(&sim, "taken over").await;
    assert_eq!(writes(), before, "the status of the mirror pod does not change");

    sim.restart(Service::PodSync).await;
    pod.check_kept(&sim, "restarted").await;

    sim.kill(Service::PodSync).await;
    std::fs::remove_dir_all(sim.paths().state_dir()).unwrap();
    let file = std::fs::File::options().write(true).open(sim.manifests_dir().join("web.yaml")).unwrap();
    file.set_modified(std::time::SystemTime::from(pod.seen) + Duration::from_secs(3600)).unwrap();
    sim.up(Service::PodSync);
    pod.check_kept(&sim, "touched").await;

    let mut changed = probed();
    changed["spec"]["containers"][0]["image"] = json!("example.test/app:2");
    sim.manifest("web", &changed);
    let is_new =
        |mirror: &Seen| mirror.is_ready() && mirror.0["metadata"]["annotations"][CONFIG_MIRROR] != UID;
    let mirror = sim.wait_pod(NAME, "the mirror pod of the new pod, Ready", is_new).await;
    assert_ne!(mirror.uid(), pod.mirror.uid());
    sim.wait_runtime("the pod of the kubelet has ended", |runtime| {
        !runtime.sandboxes().iter().any(|sandbox| sandbox.id() == pod.sandbox && sandbox.ready())
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_of_a_kubelet_stays_ready_if_its_mirror_is_read_late_and_its_probe_has_no_result() {
    let sim = Sim::prepare(Options::default()).await;
    let pod = KubeletPod::make(&sim, UID).await;
    sim.runtime.script(Rule::on(Method::ExecSync).fail(Code::Unavailable, "no answer"));
    sim.api.faults().block("list pods");
    sim.start_all();
    let running = async || sim.wait_view(NAME, "it runs", |view| view.status == "Running").await;
    let _view = running().await;
    sim.restart(Service::PodSync).await;
    let _view = running().await;
    until("its probe was tried", LONG, async || {
        let count = sim.runtime.count(Method::ExecSync);
        if count > 1 { Ok(()) } else { Err(count) }
    })
    .await;
    sim.api.faults().clear();
    pod.check_kept(&sim, "with a late mirror").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_whose_manifest_changed_after_the_kubelet_is_a_new_pod() {
    let sim = Sim::prepare(Options::default()).await;
    let pod = KubeletPod::make(&sim, UID).await;
    let file = std::fs::File::options().write(true).open(sim.manifests_dir().join("web.yaml")).unwrap();
    file.set_modified(std::time::SystemTime::from(pod.seen)).unwrap();
    sim.start_all();
    let is_new =
        |mirror: &Seen| mirror.is_ready() && mirror.0["metadata"]["annotations"][CONFIG_MIRROR] != UID;
    sim.wait_pod(NAME, "the mirror pod of the new pod, Ready", is_new).await;
    sim.finish().await;
}

// Returns the UIDs that node agents compute for a manifest.
fn computed(sim: &Sim, name: &str, manifest: &Value) -> ComputedUids {
    let place = sim.manifests_dir().join(format!("{name}.yaml")).display().to_string();
    let origin = ManifestOrigin { kind: SourceKind::File, place: &place, node: "sim-node" };
    let mut computed = None;
    let mut collect = |_: &Pod, uids: &ComputedUids| {
        computed = Some(uids.clone());
        None
    };
    let bytes = manifest.to_string();
    manifest_keeping_uids(bytes.as_bytes(), origin, &mut collect, &mut Snapshot::default());
    computed.expect("a manifest of a pod")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_of_a_former_version_or_an_older_kubelet_keeps_its_uid_and_new_ones_get_the_kubelets() {
    for kubelet in [None, Some(KubeletVersion::V1_36)] {
        let sim = Sim::prepare(Options::default()).await;
        let uids = computed(&sim, "web", &probed());
        let pod =
            KubeletPod::make(&sim, kubelet.map_or(uids.former(), |version| uids.of_kubelet(version))).await;
        // Its time does not decide.
        let file = std::fs::File::options().write(true).open(sim.manifests_dir().join("web.yaml")).unwrap();
        file.set_modified(std::time::SystemTime::from(pod.seen) + Duration::from_secs(3600)).unwrap();
        sim.start_all();
        pod.check_kept(&sim, "started").await;
        sim.restart(Service::PodSync).await;
        pod.check_kept(&sim, "restarted").await;

        let new = pods::manifest("new");
        sim.manifest("new", &new);
        let mirror = sim.wait_ready("new-sim-node").await;
        let uids = computed(&sim, "new", &new);
        let wanted = uids.of_kubelet(kubelet.unwrap_or(KubeletVersion::NEWEST));
        assert_eq!(mirror.0["metadata"]["annotations"][CONFIG_MIRROR], wanted, "{kubelet:?}");
        sim.finish().await;
    }
}
