//! Node affinity, groups, limits, attachments, expansion, credentials and refreshes of volumes, with the
//! tests' own driver.

use std::os::unix::fs::MetadataExt as _;

use pod_sync_csi::paths::attachment_name;
use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_simulation::{LONG, NODE, Options, Sim};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use super::claims::{
    DRIVER, INTERNAL, bound_claim, csi_driver, is_mounted, mount_of, nothing_left, pod_with, start_driver,
    start_driver_with, with_claim,
};

const OUT_OF_RANGE: i32 = 11;
const FAILED_PRECONDITION: i32 = 9;
const RESOURCE_EXHAUSTED: i32 = 8;
const GIB: u64 = 1 << 30;

/// Starts a node with more arguments of pod-sync.
pub(super) async fn start_with(args: &[&str]) -> Sim {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(args);
    sim.start_all();
    sim
}

pub(super) async fn delete_all(sim: &Sim, pods: &[(&str, &str)]) {
    for (name, _) in pods {
        sim.delete(name, None);
    }
    for (name, _) in pods {
        sim.wait_gone(name).await;
    }
    for (_, uid) in pods {
        nothing_left(sim, uid).await;
    }
}

/// Adds a volume of a claim to a pod, with the name of the claim.
fn add_claim(pod: &mut Value, claim: &str) {
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}}));
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({"name": claim, "mountPath": format!("/{claim}")}));
}

/// Fails unless the first container of a pod still runs.
fn assert_undisturbed(sim: &Sim, name: &str, uid: &str) {
    let container = sim.runtime.newest(uid, &format!("c-{name}")).unwrap();
    let attempt = container.config.metadata.as_ref().unwrap().attempt;
    assert!(container.running() && attempt == 0, "{name}: attempt {attempt}");
}

/// Requests of a method, as the driver has recorded them.
pub(super) fn requests(driver: &DriverThread, method: &str) -> Vec<Value> {
    fault::requests(driver.state()).into_iter().filter(|request| request["method"] == method).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_of_another_zone_is_mounted_once_the_node_has_its_label() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
    bound_claim(&sim, "data", |volume| {
        volume["spec"]["nodeAffinity"] = json!({"required": {"nodeSelectorTerms": [term]}});
    });
    let uid = sim.create(with_claim("web", "data"));
    let text = "MountVolume.NodeAffinity check failed for volume \"pv-data\" : no matching NodeSelectorTerms";
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    assert_eq!(driver.calls_of("NodeStageVolume"), 0);
    sim.api.edit("nodes", "", NODE, |node| node["metadata"]["labels"]["zone"] = json!("a")).unwrap();
    sim.wait_ready("web").await;
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_group_of_a_volume_is_a_supplemental_group_of_its_pod() {
    let sim = Sim::start(Options::default()).await;
    let _driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    for (claim, group) in [("data", "4711"), ("own", "5")] {
        bound_claim(&sim, claim, |volume| {
            volume["metadata"]["annotations"] = json!({"pv.beta.kubernetes.io/gid": group});
        });
    }
    let mut pod = with_claim("web", "data");
    pod["spec"]["securityContext"] = json!({"supplementalGroups": [5]});
    add_claim(&mut pod, "own");
    let uid = sim.create(pod);
    sim.wait_ready("web").await;
    let container = sim.runtime.newest(&uid, "c-web").unwrap();
    let of_container = container.config.linux.clone().unwrap().security_context.unwrap().supplemental_groups;
    assert_eq!(of_container, [5, 4711]);
    let sandbox = sim.sandboxes(&uid).remove(0);
    let of_sandbox = sandbox.config.linux.clone().unwrap().security_context.unwrap().supplemental_groups;
    assert_eq!(of_sandbox, [4711, 5]);
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_rejected_when_the_node_has_no_room_for_its_volume_and_the_limit_is_read_again() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver_with(&sim, &["--max-volumes", "7"]);
    csi_driver(&sim, json!({"attachRequired": true, "nodeAllocatableUpdatePeriodSeconds": 3600}));
    bound_claim(&sim, "data", |_| {});
    // A claim that is not bound ends the wait at once.
    bound_claim(&sim, "late", |_| {});
    let pending = |claim: &mut Value| claim["status"]["phase"] = json!("Pending");
    sim.api.edit("persistentvolumeclaims/status", "default", "late", pending).unwrap();
    let attachment = json!({
        "metadata": {"name": attachment_name("vol-data", DRIVER, NODE)},
        "spec": {"attacher": DRIVER, "nodeName": NODE, "source": {"persistentVolumeName": "pv-data"}},
        "status": {"attached": false, "attachError": {"message": "full", "errorCode": RESOURCE_EXHAUSTED}},
    });
    let attachment = sim.api.create("volumeattachments", "", attachment).unwrap();
    let status =
        json!({"attached": false, "attachError": {"message": "full", "errorCode": RESOURCE_EXHAUSTED}});
    let name = attachment["metadata"]["name"].as_str().unwrap();
    sim.api.edit("volumeattachments/status", "", name, |object| object["status"] = status.clone()).unwrap();
    let limit =
        |count: u64| move |node: &Value| node["spec"]["drivers"][0]["allocatable"]["count"] == json!(count);
    sim.api.wait_for("csinodes", "", NODE, LONG, limit(7)).await;
    fault::set_max_volumes(driver.state(), 3).unwrap();
    let mut pod = with_claim("web", "data");
    add_claim(&mut pod, "late");
    let _uid = sim.create(pod);
    let text = "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[data late], \
                unattached volumes=[data], failed to process volumes=[late]: \
                error processing PVC default/late: PVC is not bound";
    let reason = "VolumeAttachmentLimitExceeded";
    sim.wait_event("web", text, |e| e.reason == reason && e.message == text).await;
    let rejected = sim.wait_pod("web", "Failed", |pod| pod.phase() == "Failed").await;
    assert_eq!(rejected.text("/status/reason"), reason);
    assert_eq!(rejected.text("/status/message"), format!("Pod was rejected: {text}"));
    sim.api.wait_for("csinodes", "", NODE, LONG, limit(3)).await;
    let events = sim.events("web");
    assert!(!events.iter().any(|e| e.message.starts_with("Unable to attach or mount volumes")), "{events:?}");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_of_a_driver_follows_the_driver_at_the_interval_of_its_object() {
    let sim = Sim::start(Options::default()).await;
    csi_driver(&sim, json!({"attachRequired": false, "nodeAllocatableUpdatePeriodSeconds": 1}));
    let driver = start_driver_with(&sim, &["--max-volumes", "7"]);
    for count in [7, 5, 2] {
        if count != 7 {
            fault::set_max_volumes(driver.state(), count).unwrap();
        }
        let reported = move |node: &Value| node["spec"]["drivers"][0]["allocatable"]["count"] == json!(count);
        sim.api.wait_for("csinodes", "", NODE, LONG, reported).await;
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_an_attaching_controller_only_volumes_that_need_no_attachment_are_mounted() {
    let sim = start_with(&["--enable-controller-attach-detach=false"]).await;
    let driver = start_driver(&sim);
    bound_claim(&sim, "data", |_| {});
    let uid = sim.create(with_claim("web", "data"));
    let text = "AttachVolume.Attach failed for volume \"pv-data\" : \
                attaching volumes from the kubelet is not supported";
    sim.wait_event("web", text, |e| e.reason == "FailedAttachVolume" && e.message == text).await;
    assert_eq!(driver.calls_of("NodeStageVolume"), 0);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "other", |_| {});
    let other = sim.create(with_claim("other", "other"));
    sim.wait_ready("other").await;
    assert!(is_mounted(&mount_of(&sim, &other, "pv-other")));
    delete_all(&sim, &[("web", &uid), ("other", &other)]).await;
    sim.finish().await;
}

/// Grows a PersistentVolume to 2 GiB, as the controller does. With `state`, the controller tracks the
/// expansion on the node.
fn grow(sim: &Sim, name: &str, state: Option<&str>) {
    let capacity = |volume: &mut Value| volume["spec"]["capacity"]["storage"] = json!("2Gi");
    sim.api.edit("persistentvolumes", "", &format!("pv-{name}"), capacity).unwrap();
    let status = |claim: &mut Value| {
        claim["status"]["conditions"] = json!([
            {"type": "FileSystemResizePending", "status": "True"}, {"type": "Mine", "status": "True"},
        ]);
        if let Some(state) = state {
            claim["status"]["allocatedResources"] = json!({"storage": "2Gi"});
            claim["status"]["allocatedResourceStatuses"] = json!({"storage": state});
        }
    };
    sim.api.edit("persistentvolumeclaims/status", "default", name, status).unwrap();
}

fn is_expanded(claim: &Value) -> bool {
    let state = &claim["status"]["allocatedResourceStatuses"]["storage"];
    let conditions = claim["status"]["conditions"].as_array();
    claim["status"]["capacity"]["storage"] == "2Gi"
        && state.is_null()
        && conditions.is_some_and(|list| list.len() == 1 && list[0]["type"] == "Mine")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_grows_while_its_pod_runs_and_the_claim_shows_the_new_size() {
    let sim = start_with(&["--sync-frequency=1s"]).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    sim.api
        .create("secrets", "default", json!({"metadata": {"name": "s"}, "data": {"expand-key": "eA=="}}))
        .unwrap();
    for (claim, state) in [("tracked", Some("NodeResizePending")), ("untracked", None)] {
        bound_claim(&sim, claim, |volume| {
            volume["spec"]["csi"]["nodeExpandSecretRef"] = json!({"namespace": "default", "name": "s"});
        });
        let uid = sim.create(with_claim(claim, claim));
        sim.wait_ready(claim).await;
        assert_eq!(driver.calls_of("NodeExpandVolume"), 0);
        grow(&sim, claim, state);
        sim.api.wait_for("persistentvolumeclaims", "default", claim, LONG, is_expanded).await;
        let text = format!("MountVolume.NodeExpandVolume succeeded for volume \"pv-{claim}\" {NODE}");
        // The events of the claim and of its pod, which have one name.
        until("events of pod and claim", LONG, async || {
            let events = sim.api.list("events");
            let found = events.iter().filter(|e| e["message"] == text.as_str());
            let mut kinds: Vec<_> =
                found.map(|e| e["involvedObject"]["kind"].as_str().unwrap().to_owned()).collect();
            kinds.sort();
            if kinds == ["PersistentVolumeClaim", "Pod"] { Ok(()) } else { Err(kinds) }
        })
        .await;
        let call = requests(&driver, "NodeExpandVolume").remove(0);
        let request = &call["request"];
        assert_eq!(
            (&request["bytes"], &request["secrets"]),
            (&json!(2 * GIB), &json!(["expand-key"])),
            "{call}"
        );
        assert_eq!(request["path"], mount_of(&sim, &uid, &format!("pv-{claim}")).to_str().unwrap());
        assert!(request["staging"].as_str().unwrap().ends_with("/globalmount"), "{call}");
        assert_eq!(driver.calls_of("NodeExpandVolume"), 1);
        sim.assert_started_once(claim, &uid);
        delete_all(&sim, &[(claim, &uid)]).await;
        std::fs::remove_file(driver.state().join("contexts.log")).unwrap();
        std::fs::remove_file(driver.state().join("calls.log")).unwrap();
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_waits_for_the_expansion_of_its_volume_which_is_repeated_after_a_failure() {
    let sim = Sim::start(Options::default()).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    bound_claim(&sim, "data", |_| {});
    grow(&sim, "data", Some("NodeResizePending"));
    fault::set(driver.state(), &[("NodeExpandVolume", Fault::Code(INTERNAL))]).unwrap();
    let uid = sim.create(with_claim("web", "data"));
    let cause = "Expander.NodeExpand failed to expand the volume : rpc error: code = Internal desc = injected by the test";
    let text = format!("MountVolume.Setup failed while expanding volume for volume \"pv-data\" : {cause}");
    sim.wait_event("web", &text, |e| e.reason == "FailedMount" && e.message == text).await;
    let failed = |claim: &Value| {
        let conditions = claim["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let message = json!(format!("failed to expand pvc with {cause}"));
        claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizeInProgress"
            && conditions.iter().any(|c| c["type"] == "NodeResizeError" && c["message"] == message)
    };
    sim.api.wait_for("persistentvolumeclaims", "default", "data", LONG, failed).await;
    assert!(sim.sandboxes(&uid).is_empty());
    fault::set(driver.state(), &[]).unwrap();
    sim.wait_ready("web").await;
    sim.api.wait_for("persistentvolumeclaims", "default", "data", LONG, is_expanded).await;
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expansion_that_is_impossible_or_refused_in_use_leaves_the_pod_running() {
    let sim = start_with(&["--sync-frequency=1s"]).await;
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false}));
    for claim in ["impossible", "in-use"] {
        bound_claim(&sim, claim, |_| {});
    }
    let impossible = sim.create(with_claim("impossible", "impossible"));
    let in_use = sim.create(with_claim("in-use", "in-use"));
    sim.wait_ready("impossible").await;
    sim.wait_ready("in-use").await;
    fault::set(driver.state(), &[("NodeExpandVolume", Fault::Code(OUT_OF_RANGE))]).unwrap();
    grow(&sim, "impossible", Some("NodeResizePending"));
    let text = "NodeExpandVolume.NodeExpandVolume failed for volume \"pv-impossible\" : Expander.NodeExpand failed to \
                expand the volume rpc error: code = OutOfRange desc = injected by the test";
    sim.wait_event("impossible", text, |e| e.reason == "VolumeResizeFailed" && e.message == text).await;
    let given_up =
        |claim: &Value| claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizeInfeasible";
    sim.api.wait_for("persistentvolumeclaims", "default", "impossible", LONG, given_up).await;
    fault::set(driver.state(), &[("NodeExpandVolume", Fault::Code(FAILED_PRECONDITION))]).unwrap();
    grow(&sim, "in-use", Some("NodeResizePending"));
    let failed = |claim: &Value| {
        let conditions = claim["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|c| c["type"] == "NodeResizeError")
    };
    sim.api.wait_for("persistentvolumeclaims", "default", "in-use", LONG, failed).await;
    // Later syncs call the driver for neither volume again.
    fault::set(driver.state(), &[]).unwrap();
    let calls = driver.calls_of("NodeExpandVolume");
    let reads = || sim.api.requests("get persistentvolumeclaims").len();
    let before = reads();
    until("later syncs have read the claims", LONG, async || {
        let read = reads() - before;
        if read >= 8 { Ok(()) } else { Err(read) }
    })
    .await;
    assert_eq!(driver.calls_of("NodeExpandVolume"), calls);
    assert_undisturbed(&sim, "impossible", &impossible);
    assert_undisturbed(&sim, "in-use", &in_use);
    delete_all(&sim, &[("impossible", &impossible), ("in-use", &in_use)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_gets_secrets_and_tokens_and_publishes_the_volume_again_at_each_sync() {
    let sim = start_with(&["--sync-frequency=1s"]).await;
    let driver = start_driver(&sim);
    csi_driver(
        &sim,
        json!({"attachRequired": false, "requiresRepublish": true,
            "tokenRequests": [{"audience": "vault", "expirationSeconds": 600}]}),
    );
    for name in ["stage", "publish"] {
        let secret = json!({"metadata": {"name": name}, "data": {format!("{name}-key"): "eA=="}});
        sim.api.create("secrets", "default", secret).unwrap();
    }
    bound_claim(&sim, "data", |volume| {
        volume["spec"]["csi"]["nodeStageSecretRef"] = json!({"namespace": "default", "name": "stage"});
        volume["spec"]["csi"]["nodePublishSecretRef"] = json!({"namespace": "default", "name": "publish"});
    });
    let uid = sim.create(with_claim("web", "data"));
    let text = "MountVolume.SetUp failed for volume \"pv-data\" : rpc error: code = Internal desc = injected by the test";
    sim.wait_ready("web").await;
    let staged = requests(&driver, "NodeStageVolume");
    assert_eq!(staged[0]["request"]["secrets"], json!(["stage-key"]));
    let published = requests(&driver, "NodePublishVolume");
    assert_eq!(published[0]["request"]["secrets"], json!(["publish-key"]));
    let context = &published[0]["request"]["context"];
    let tokens = context["csi.storage.k8s.io/serviceAccount.tokens"].as_str().unwrap();
    let tokens: Value = serde_json::from_str(tokens).unwrap();
    assert!(tokens["vault"]["token"].as_str().is_some_and(|token| !token.is_empty()), "{tokens}");
    let expires = tokens["vault"]["expirationTimestamp"].as_str().unwrap();
    assert!(expires.parse::<jiff::Timestamp>().is_ok(), "{expires}");
    let published_again = async |times: usize| {
        let before = driver.calls_of("NodePublishVolume");
        until("the volume is published again", LONG, async || {
            let more = driver.calls_of("NodePublishVolume") - before;
            if more >= times { Ok(()) } else { Err(more) }
        })
        .await;
    };
    published_again(2).await;
    // A refresh that fails is an event, and leaves the mount to the pod.
    fault::set(driver.state(), &[("NodePublishVolume", Fault::Code(INTERNAL))]).unwrap();
    sim.wait_event("web", text, |e| e.reason == "FailedMount" && e.message == text).await;
    assert!(is_mounted(&mount_of(&sim, &uid, "pv-data")));
    fault::set(driver.state(), &[]).unwrap();
    published_again(1).await;
    assert_eq!(requests(&driver, "NodeStageVolume").len(), 1);
    assert_undisturbed(&sim, "web", &uid);
    delete_all(&sim, &[("web", &uid)]).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fs_group_is_applied_by_the_driver_if_it_can_and_by_the_node_otherwise() {
    for by_driver in [false, true] {
        let sim = Sim::start(Options::default()).await;
        let capabilities = ["--capabilities", "STAGE_UNSTAGE_VOLUME,VOLUME_MOUNT_GROUP"];
        let driver = start_driver_with(&sim, if by_driver { &capabilities } else { &[] });
        csi_driver(&sim, json!({"attachRequired": false, "fsGroupPolicy": "File"}));
        bound_claim(&sim, "data", |_| {});
        let file = driver.backing("vol-data").join("f");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "").unwrap();
        let mut pod = with_claim("web", "data");
        pod["spec"]["securityContext"] = json!({"fsGroup": 4711});
        let uid = sim.create(pod);
        sim.wait_ready("web").await;
        let group = if by_driver { 0 } else { 4711 };
        assert_eq!(std::fs::metadata(&file).unwrap().gid(), group, "by driver: {by_driver}");
        for method in ["NodeStageVolume", "NodePublishVolume"] {
            let access = requests(&driver, method).remove(0)["access"].to_string();
            let has_group = access.contains("volume_mount_group: \\\"4711\\\"");
            assert_eq!(has_group, by_driver, "{method} {access}");
        }
        delete_all(&sim, &[("web", &uid)]).await;
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_pods_with_five_volumes_each_leave_no_mount_and_no_directory() {
    const PODS: usize = 100;
    let sim = Sim::start(Options::default()).await;
    // A service that is late on a busy machine logs it.
    sim.disturb();
    let driver = start_driver(&sim);
    csi_driver(&sim, json!({"attachRequired": false, "volumeLifecycleModes": ["Persistent", "Ephemeral"]}));
    sim.api.create("secrets", "default", json!({"metadata": {"name": "s"}, "data": {"k": "eA=="}})).unwrap();
    sim.api.create("configmaps", "default", json!({"metadata": {"name": "c"}, "data": {"k": "v"}})).unwrap();
    bound_claim(&sim, "shared", |volume| volume["spec"]["accessModes"] = json!(["ReadWriteMany"]));
    let sources = [
        json!({"emptyDir": {"medium": "Memory"}}),
        json!({"secret": {"secretName": "s", "defaultMode": 420}}),
        json!({"configMap": {"name": "c", "defaultMode": 420}}),
        json!({"csi": {"driver": DRIVER, "volumeAttributes": {"medium": "tmpfs"}}}),
        json!({"persistentVolumeClaim": {"claimName": "shared"}}),
    ];
    let state = || {
        let mut mounts = mounts_below(&sim.root_dir()).unwrap();
        mounts.sort();
        (mounts, tree(&sim.root_dir().join("pods")), tree(&sim.root_dir().join("plugins/kubernetes.io")))
    };
    // The first pod creates directories that stay.
    let first = sim.create(with_claim("first", "shared"));
    sim.wait_ready("first").await;
    delete_all(&sim, &[("first", &first)]).await;
    let before = state();
    for number in 0..PODS {
        let mut pod = pod_with(&format!("p{number}"), sources[0].clone());
        let (mut volumes, mut mounts) = (Vec::new(), Vec::new());
        for (index, source) in sources.iter().enumerate() {
            let mut volume = json!({"name": format!("v{index}")});
            volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            volumes.push(volume);
            mounts.push(json!({"name": format!("v{index}"), "mountPath": format!("/v{index}")}));
        }
        pod["spec"]["volumes"] = json!(volumes);
        pod["spec"]["containers"][0]["volumeMounts"] = json!(mounts);
        let _uid = sim.create(pod);
    }
    for number in 0..PODS {
        sim.wait_ready(&format!("p{number}")).await;
    }
    // tmpfs, Secret, inline volume and claim of each pod, and the staged claim.
    let mounted = mounts_below(&sim.root_dir()).unwrap().len() - before.0.len();
    assert_eq!(mounted, PODS * 4 + 1);
    assert_eq!(driver.calls_of("NodeStageVolume vol-shared"), 2);
    for number in 0..PODS {
        sim.delete(&format!("p{number}"), Some(0));
    }
    for number in 0..PODS {
        sim.wait_gone(&format!("p{number}")).await;
    }
    until("the node is as before", LONG, async || {
        let now = state();
        if now == before { Ok(()) } else { Err(now) }
    })
    .await;
    sim.finish().await;
}

/// Returns the paths below a directory.
fn tree(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let (mut found, mut todo) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                todo.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found.sort();
    found
}
