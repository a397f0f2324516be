//! A pod in each waiting state, and its reason in podsync.v1.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags};
use parking_lot::Mutex;
use pod_sync_decisions::waiting::Waiting;
use quintlet_cri_api::v1;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::watch_pods_event::Event;
use quintlet_proto::podsync::v1::{ExplainRequest, WatchPodsRequest};
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, Rule, StopReply};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

// The rows of each test. Together they cover every reason.
const BEFORE: [&str; 3] = ["PreviousPodTerminating", "NotAdmitted", "RuntimeNotRead"];
const START: [&str; 28] = [
    "CgroupFailing",
    "ContainerCreating",
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "CreatePodSandboxError",
    "DirectoriesFailing",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "ImagePulling",
    "InvalidImageName",
    "PodInitializing",
    "PostStartHook",
    "PostStartHookError",
    "ReadinessGates",
    "ReadinessProbe",
    "Refused",
    "RegistryUnavailable",
    "ResizeDeferred",
    "ResizeInfeasible",
    "RestartingAllContainers",
    "RunContainerError",
    "SandboxCreating",
    "SignatureValidationFailed",
    "StartupProbe",
    "VolumesNotMounted",
];
const END: [&str; 14] = [
    "CgroupRemoval",
    "DirectoriesRemoval",
    "FinalDelete",
    "PreemptingPods",
    "NetworkNotReady",
    "PreStopHook",
    "RemovalFailing",
    "SandboxStopping",
    "ServiceNotReachable",
    "StaticPodNameTaken",
    "StatusNotWritten",
    "StopFailing",
    "Terminating",
    "VolumesUnmounting",
];

// Covered by the tests of `containment`, `devices`, `cpus` and `resource_claims`.
const ELSEWHERE: [&str; 5] = [
    "InternalError",
    "DevicesNotAllocated",
    "ResourcesNotRecorded",
    "ClaimsNotPrepared",
    "ClaimsUnpreparing",
];

#[test]
fn every_reason_has_a_row() {
    let rows: BTreeSet<&str> = BEFORE.into_iter().chain(START).chain(END).chain(ELSEWHERE).collect();
    assert_eq!(rows, Waiting::reasons());
    assert_eq!(rows.len(), BEFORE.len() + START.len() + END.len() + ELSEWHERE.len(), "each has one");
}

/// A node, and all waiting reasons that were seen.
struct Table {
    sim: Sim,
    reported: Arc<Mutex<BTreeSet<(String, String)>>>,
    watching: tokio::task::JoinHandle<()>,
    rows: BTreeSet<&'static str>,
}

impl Table {
    fn of(sim: Sim) -> Self {
        let reported: Arc<Mutex<BTreeSet<(String, String)>>> = Arc::default();
        let (all, socket) = (Arc::clone(&reported), sim.paths().podsync());
        let watching = quintlet_kit::task::spawn("said", async move {
            let mut client = PodSyncClient::new(quintlet_kit::socket::channel(socket));
            loop {
                let request =
                    WatchPodsRequest { hello: Some(quintlet_proto::hello()), ..WatchPodsRequest::default() };
                if let Ok(stream) = client.watch_pods(request).await {
                    let mut stream = stream.into_inner();
                    while let Ok(Some(event)) = stream.message().await {
                        if let Some(Event::Pod(pod)) = event.event
                            && let Some(waiting) = pod.waiting
                        {
                            all.lock().insert((pod.name, waiting.reason));
                        }
                    }
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { sim, reported, watching, rows: BTreeSet::new() }
    }

    /// Waits until the pod has had this waiting reason.
    async fn row(&mut self, pod: &str, want: &'static str) {
        until(&format!("{pod} waits with {want}"), LONG, async || {
            let reported = self.reported.lock().clone();
            let of_pod: Vec<String> =
                reported.into_iter().filter(|(p, _)| p == pod).map(|(_, r)| r).collect();
            if of_pod.iter().any(|r| r == want) { Ok(()) } else { Err(of_pod) }
        })
        .await;
        self.rows.insert(want);
    }

    async fn end(self, rows: &[&str]) {
        assert_eq!(self.rows.iter().copied().collect::<Vec<_>>(), sorted(rows));
        self.watching.abort();
        self.sim.finish().await;
    }
}

fn sorted<'a>(rows: &[&'a str]) -> Vec<&'a str> {
    let mut rows = rows.to_vec();
    rows.sort_unstable();
    rows
}

/// Returns the waiting reason of a pod, as `quintctl explain` shows it.
async fn reason(sim: &Sim, pod: &str) -> String {
    let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    match client.explain(ExplainRequest { pod: format!("default/{pod}") }).await {
        Ok(reply) => reply.into_inner().pod.and_then(|p| p.waiting).map(|w| w.reason).unwrap_or_default(),
        Err(status) => status.message().to_owned(),
    }
}

/// Waits until `quintctl explain` has a text in the wait or the errors of a pod.
async fn explained(sim: &Sim, pod: &str, text: &str) {
    until(&format!("{pod} is explained by {text:?}"), LONG, async || {
        let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
        let reply = client.explain(ExplainRequest { pod: format!("default/{pod}") }).await;
        let reply = reply.map_err(|status| vec![status.message().to_owned()])?.into_inner();
        let wait = reply.pod.and_then(|p| p.waiting).map(|w| w.message);
        let texts: Vec<String> = reply.last_errors.into_iter().chain(wait).collect();
        if texts.iter().any(|t| t.contains(text)) { Ok(()) } else { Err(texts) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_that_refuses_writes_is_named_and_its_removal_ends_the_wait() {
    let sim = Sim::start(Options::default()).await;
    let denied = |code| {
        let message = "ValidatingAdmissionPolicy 'freeze' with binding 'all' denied request".to_owned();
        Failure::Declined { code, message }
    };
    for name in ["held", "ended"] {
        let _uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
    }
    sim.api.faults().fail("patch pods/status default/hidden", usize::MAX, denied(422));
    sim.api.faults().fail("patch pods/status default/ended", usize::MAX, denied(400));
    sim.api.faults().fail("delete pods default/held", usize::MAX, denied(400));
    let _uid = sim.create(pods::single("hidden"));
    for name in ["held", "ended"] {
        sim.delete(name, Some(1));
    }
    explained(&sim, "hidden", "failed to write the status: invalid: ").await;
    let deletion =
        "the API server has not deleted the object yet: refused: ValidatingAdmissionPolicy 'freeze'";
    for name in ["held", "ended"] {
        explained(&sim, name, deletion).await;
    }
    assert!(!sim.pod("held").is_gone() && !sim.pod("hidden").is_ready());
    sim.api.faults().clear();
    sim.wait_gone("held").await;
    sim.wait_gone("ended").await;
    sim.wait_ready("hidden").await;
    sim.finish().await;
}

/// Allocatable CPU of the node, in millicores.
fn cpu_milli() -> usize {
    std::thread::available_parallelism().unwrap().get() * 1000
}

fn asking(name: &str, milli: usize) -> Value {
    main_with(name, "resources", json!({"requests": {"cpu": format!("{milli}m")}}))
}

fn with(name: &str, edit: impl FnOnce(&mut Value)) -> Value {
    let mut pod = pods::single(name);
    edit(&mut pod["spec"]);
    pod
}

fn main_with(name: &str, field: &str, value: Value) -> Value {
    with(name, |spec| spec["containers"][0][field] = value)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wait_before_a_worker_starts_is_reported() {
    let mut options = Options::default();
    options.runtime.features =
        Some(v1::RuntimeFeatures { supplemental_groups_policy: true, ..Default::default() });
    options.runtime.handlers = vec![v1::RuntimeHandler::default()];
    let sim = Sim::prepare(options).await;
    let unread = sim.runtime.hang(Method::Status);
    sim.start_all();
    let mut table = Table::of(sim);
    let _uid = table.sim.create(with("w-features", |spec| {
        spec["securityContext"] = json!({"supplementalGroupsPolicy": "Strict"});
    }));
    let _uid = table.sim.create(pods::single("w-runtime"));
    table.row("w-features", "NotAdmitted").await;
    table.row("w-runtime", "RuntimeNotRead").await;
    table.sim.runtime.unscript(unread);
    for name in ["w-features", "w-runtime"] {
        table.sim.wait_ready(name).await;
    }

    // A manifest that returns while its previous pod terminates.
    let mut fixed = pods::manifest("w-again");
    fixed["metadata"]["uid"] = json!("w-again-uid");
    table.sim.manifest("w-again", &fixed);
    let name = "w-again-sim-node";
    table.sim.wait_ready(name).await;
    table.sim.kill(Service::PodSync).await;
    table.sim.remove_manifest("w-again");
    std::fs::remove_dir_all(table.sim.paths().state_dir()).unwrap();
    let hang = table.sim.runtime.script(Rule::on(Method::StopPodSandbox).hang());
    table.sim.up(Service::PodSync);
    table.sim.wait_runtime("the orphan is stopped", |r| r.in_flight(Method::StopPodSandbox) > 0).await;
    table.sim.manifest("w-again", &fixed);
    table.row(name, "PreviousPodTerminating").await;
    table.sim.runtime.unscript(hang);
    table.sim.wait_ready(name).await;
    table.end(&BEFORE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_wait_during_a_start_is_reported() {
    let mut table = Table::of(Sim::start(Options::default()).await);
    // The pod's cgroup cannot be created.
    let tier = group(&table.sim, "besteffort", "").with_file_name("");
    std::fs::create_dir_all(&tier).unwrap();
    mount(Path::new("closed"), &tier, Some("tmpfs"), MsFlags::MS_RDONLY);
    let _uid = table.sim.create(pods::single("w-cgroup"));
    table.row("w-cgroup", "CgroupFailing").await;
    unmount(&tier);

    let sim = &table.sim;
    // Commands: `no` fails, `long` takes an hour.
    sim.runtime.on_exec(|_, command| match command.first().map(String::as_str) {
        Some("long") => ExecReply { after: Duration::from_secs(3600), ..ExecReply::default() },
        Some("no") => ExecReply { exit_code: 1, ..ExecReply::default() },
        _ => ExecReply::default(),
    });
    let exec =
        |command: &str| json!({"exec": {"command": [command]}, "periodSeconds": 1, "failureThreshold": 1000});
    let script = |rule: Rule| {
        let _until_the_end = sim.runtime.script(rule);
    };
    // A start concerns an ID that is not known yet, so only one pod starts now.
    script(Rule::on(Method::StartContainer).fail(Code::Unknown, "no").times(1));
    let _uid = sim.create(pods::single("w-run"));
    table.row("w-run", "RunContainerError").await;

    let sim = &table.sim;
    let script = |rule: Rule| {
        let _until_the_end = sim.runtime.script(rule);
    };
    script(Rule::on(Method::RunPodSandbox).about("w-sandbox").hang());
    script(Rule::on(Method::RunPodSandbox).about("w-no-sandbox").fail(Code::Unknown, "no"));
    script(Rule::on(Method::PullImage).about("example.test/slow:1").hang());
    script(Rule::on(Method::PullImage).about("example.test/none:1").fail(Code::Unknown, "no"));
    script(Rule::on(Method::ImageStatus).about("example.test/odd:1").fail(Code::Unknown, "no"));
    for (image, why) in [
        ("example.test/away:1", "RegistryUnavailable"),
        ("example.test/forged:1", "SignatureValidationFailed"),
    ] {
        script(Rule::on(Method::PullImage).about(image).fail(Code::Unknown, why));
    }
    script(Rule::on(Method::CreateContainer).about("c-w-create").fail(Code::Unknown, "no"));
    script(Rule::on(Method::CreateContainer).about("c-w-slow-create").hang());
    sim.runtime.behave(
        "c-w-crash",
        Behaviour { exit: Some((Duration::from_millis(10), 1)), ..Behaviour::default() },
    );
    sim.runtime.behave(
        "c-w-all",
        Behaviour { exit: Some((Duration::from_millis(300), 42)), ..Behaviour::default() },
    );
    let rows: Vec<(&'static str, Value)> = vec![
        ("SandboxCreating", pods::single("w-sandbox")),
        ("CreatePodSandboxError", pods::single("w-no-sandbox")),
        ("ImagePulling", main_with("w-pull", "image", json!("example.test/slow:1"))),
        ("ImagePullBackOff", main_with("w-no-image", "image", json!("example.test/none:1"))),
        (
            "ErrImageNeverPull",
            with("w-never", |spec| {
                spec["containers"][0]["image"] = json!("example.test/never:1");
                spec["containers"][0]["imagePullPolicy"] = json!("Never");
            }),
        ),
        ("InvalidImageName", main_with("w-name", "image", json!("Not A Name"))),
        (
            "CreateContainerConfigError",
            main_with("w-config", "envFrom", json!([{"secretRef": {"name": "none"}}])),
        ),
        ("CreateContainerError", pods::single("w-create")),
        ("ContainerCreating", pods::single("w-slow-create")),
        ("ErrImagePull", main_with("w-no-image-once", "image", json!("example.test/none:1"))),
        ("ImageInspectError", main_with("w-odd-image", "image", json!("example.test/odd:1"))),
        ("RegistryUnavailable", main_with("w-away", "image", json!("example.test/away:1"))),
        ("SignatureValidationFailed", main_with("w-forged", "image", json!("example.test/forged:1"))),
        (
            "PostStartHookError",
            main_with("w-bad-hook", "lifecycle", json!({"postStart": {"exec": {"command": ["no"]}}})),
        ),
        ("CrashLoopBackOff", pods::single("w-crash")),
        (
            "RestartingAllContainers",
            with("w-all", |spec| {
                let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}});
                spec["containers"] = json!([pods::container("c-w-stays"), pods::container("c-w-all")]);
                spec["containers"][1]["restartPolicy"] = json!("Never");
                spec["containers"][1]["restartPolicyRules"] = json!([rule]);
            }),
        ),
        (
            "PostStartHook",
            main_with("w-hook", "lifecycle", json!({"postStart": {"exec": {"command": ["long"]}}})),
        ),
        (
            "PodInitializing",
            with("w-init", |spec| spec["initContainers"] = json!([pods::container("init-for-ever")])),
        ),
        ("StartupProbe", main_with("w-startup", "startupProbe", exec("no"))),
        ("ReadinessProbe", main_with("w-ready", "readinessProbe", exec("no"))),
        (
            "ReadinessGates",
            with("w-gate", |spec| spec["readinessGates"] = json!([{"conditionType": "example.test/gate"}])),
        ),
        (
            "VolumesNotMounted",
            with("w-volume", |spec| {
                spec["volumes"] = json!([{"name": "v", "configMap": {"name": "none"}}]);
                spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
            }),
        ),
        ("Refused", with("w-refused", |spec| spec["nodeSelector"] = json!({"no": "such-label"}))),
    ];
    for (_, pod) in &rows {
        let _uid = sim.create(pod.clone());
    }
    // A file in place of the pod's directory.
    script(Rule::on(Method::RunPodSandbox).about("w-dirs").fail(Code::Unknown, "no"));
    let no_dirs = sim.create(pods::single("w-dirs"));
    sim.wait_event("w-dirs", "no sandbox", |e| e.reason == "FailedCreatePodSandBox").await;
    let dir = sim.root_dir().join("pods").join(&no_dirs);
    std::fs::remove_dir_all(&dir).unwrap();
    std::fs::write(&dir, "").unwrap();
    // One resize does not fit now, and a static pod is never resized.
    for (name, milli) in [("w-large", cpu_milli() - 500), ("w-deferred", 100)] {
        let _uid = sim.create(asking(name, milli));
        sim.wait_ready(name).await;
    }
    let more = json!({"requests": {"cpu": format!("{}m", cpu_milli() - 200)}});
    let edit = |pod: &mut Value| pod["spec"]["containers"][0]["resources"] = more;
    sim.api.edit("pods/resize", "default", "w-deferred", edit).unwrap();
    let mut fixed = asking("w-infeasible", 100);
    fixed["spec"].as_object_mut().unwrap().remove("nodeName");
    fixed["metadata"]["uid"] = json!("w-infeasible-uid");
    sim.manifest("w-infeasible", &fixed);
    sim.wait_ready("w-infeasible-sim-node").await;
    fixed["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "200m"}});
    sim.manifest("w-infeasible", &fixed);
    let more = [
        ("DirectoriesFailing", "w-dirs"),
        ("ResizeDeferred", "w-deferred"),
        ("ResizeInfeasible", "w-infeasible-sim-node"),
    ];
    let rows = rows.iter().map(|(want, pod)| (*want, pod["metadata"]["name"].as_str().unwrap()));
    for (want, pod) in rows.chain(more) {
        table.row(pod, want).await;
    }
    table.end(&START).await;
}

/// Returns a directory of a pod's cgroup.
fn group(sim: &Sim, class: &str, uid: &str) -> PathBuf {
    let root = PathBuf::from("/sys/fs/cgroup");
    let root = if root.join("cgroup.controllers").exists() { root } else { root.join("memory") };
    let kubepods = root.join(sim.cgroup_root().trim_start_matches('/')).join("kubepods");
    kubepods.join(class).join(format!("pod{uid}"))
}

fn mount(source: &Path, at: &Path, kind: Option<&str>, flags: MsFlags) {
    nix::mount::mount(Some(source), at, kind, flags, None::<&str>).unwrap();
}

fn unmount(at: &Path) {
    nix::mount::umount2(at, MntFlags::MNT_DETACH).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_waiting_reason_of_a_termination_and_for_other_pods_is_reported() {
    let mut table = Table::of(Sim::start(Options::default()).await);
    table.sim.runtime.on_exec(|_, _| ExecReply { after: Duration::from_secs(3600), ..ExecReply::default() });
    for name in ["c-w-stop", "c-w-static", "c-w-victim"] {
        let stop = StopReply::Exits { after: Duration::from_secs(20), code: 0 };
        table.sim.runtime.behave(name, Behaviour { exit: None, stop });
    }
    table.sim.runtime.behave(
        "c-w-done",
        Behaviour { exit: Some((Duration::from_millis(300), 0)), ..Behaviour::default() },
    );
    let hook = json!({"preStop": {"exec": {"command": ["long"]}}});
    let memory = with("w-unmount", |spec| {
        spec["volumes"] = json!([{"name": "v", "emptyDir": {"medium": "Memory"}}]);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    });
    let mut uids = BTreeMap::new();
    for (name, pod) in [
        ("w-stop", pods::single("w-stop")),
        ("w-delete", pods::single("w-delete")),
        ("w-pre-stop", main_with("w-pre-stop", "lifecycle", hook)),
        ("w-no-stop", pods::single("w-no-stop")),
        ("w-no-removal", pods::single("w-no-removal")),
        ("w-unmount", memory),
        ("w-group", pods::single("w-group")),
        ("w-rest", pods::single("w-rest")),
        ("w-victim", asking("w-victim", cpu_milli() - 500)),
    ] {
        uids.insert(name, table.sim.create(pod));
    }
    table.sim.manifest("w-static", &pods::manifest("w-static"));
    for name in uids.keys().copied().chain(["w-static-sim-node"]) {
        table.sim.wait_ready(name).await;
    }

    table.sim.delete("w-stop", None);
    table.row("w-stop", "Terminating").await;
    table.sim.api.faults().block("delete pods");
    table.sim.delete("w-delete", None);
    table.row("w-delete", "FinalDelete").await;
    table.sim.api.faults().clear();
    table.sim.delete("w-pre-stop", None);
    table.row("w-pre-stop", "PreStopHook").await;

    // The call that each fails once, and what ends the failure.
    let id = |name: &str| {
        table.sim.runtime.newest(&uids[name], &format!("c-{name}")).expect("it runs").id().to_owned()
    };
    let refuse = |method: Method, id: &str| Rule::on(method).about(id).fail(Code::Unknown, "no");
    let no_stop = table.sim.runtime.script(refuse(Method::StopContainer, &id("w-no-stop")));
    let no_removal = table.sim.runtime.script(refuse(Method::RemoveContainer, &id("w-no-removal")));
    let dir = |name: &str| table.sim.root_dir().join("pods").join(&uids[name]);
    let volume = dir("w-unmount").join("volumes/kubernetes.io~empty-dir/v/open");
    let open = std::fs::File::create(&volume).unwrap();
    let rest = dir("w-rest").join("rest");
    std::fs::create_dir(&rest).unwrap();
    mount(Path::new("rest"), &rest, Some("tmpfs"), MsFlags::empty());
    let group = group(&table.sim, "besteffort", &uids["w-group"]);
    mount(&group, &group, None, MsFlags::MS_BIND);
    let rows = [
        ("w-no-stop", "StopFailing"),
        ("w-no-removal", "RemovalFailing"),
        ("w-unmount", "VolumesUnmounting"),
        ("w-group", "CgroupRemoval"),
        ("w-rest", "DirectoriesRemoval"),
    ];
    for (name, _) in rows {
        table.sim.delete(name, Some(1));
    }
    for (name, want) in rows {
        table.row(name, want).await;
    }
    table.sim.runtime.unscript(no_stop);
    table.sim.runtime.unscript(no_removal);
    drop(open);
    unmount(&rest);
    unmount(&group);
    for (name, _) in rows {
        table.sim.wait_nothing_left(&uids[name]).await;
    }

    let mut critical = asking("w-critical", 1000);
    critical["spec"]["priority"] = json!(2_000_000_000);
    let _uid = table.sim.create(critical);
    table.row("w-critical", "PreemptingPods").await;

    let mut next = pods::manifest("w-static");
    next["metadata"]["labels"] = json!({"second": "one"});
    table.sim.manifest("w-static", &next);
    table.row("w-static-sim-node", "StaticPodNameTaken").await;

    let hang = table.sim.runtime.script(Rule::on(Method::StopPodSandbox).hang());
    let mut done = pods::single("w-done");
    done["spec"]["restartPolicy"] = json!("Never");
    let _uid = table.sim.create(done);
    table.row("w-done", "SandboxStopping").await;
    table.sim.api.faults().block("patch pods/status");
    table.sim.runtime.unscript(hang);
    table.row("w-done", "StatusNotWritten").await;
    table.sim.api.faults().clear();

    table.sim.runtime.set_condition("NetworkReady", false, "NoNetwork", "no network");
    until("pod-sync knows", LONG, async || {
        let (sim, name) = (&table.sim, "w-network");
        if sim.pod(name).is_gone() {
            let _uid = sim.create(pods::single(name));
        }
        let got = reason(sim, name).await;
        match got.as_str() {
            "NetworkNotReady" => Ok(()),
            // It changed before the runtime state was observed.
            "" => {
                if sim.pod(name).is_ready() {
                    sim.delete(name, Some(0));
                }
                Err(got)
            }
            _ => Err(got),
        }
    })
    .await;
    table.row("w-network", "NetworkNotReady").await;
    table.sim.runtime.set_condition("NetworkReady", true, "", "");

    table.sim.kill(Service::Pleg).await;
    let _uid = table.sim.create(pods::single("w-service"));
    table.row("w-service", "ServiceNotReachable").await;
    table.sim.up(Service::Pleg);
    table.sim.wait_ready("w-service").await;
    table.end(&END).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_snapshot_of_a_watch_has_the_pods_in_the_order_of_their_names() {
    let sim = Sim::start(Options::default()).await;
    for name in ["c", "a", "b"] {
        let _uid = sim.create(pods::single(name));
        sim.wait_ready(name).await;
    }
    let mut client = PodSyncClient::new(quintlet_kit::socket::channel(sim.paths().podsync()));
    let mut events = client.watch_pods(WatchPodsRequest::default()).await.unwrap().into_inner();
    let mut names = Vec::new();
    loop {
        match events.message().await.unwrap().unwrap().event {
            Some(Event::Pod(view)) => names.push(view.name),
            Some(Event::SnapshotEnd(_)) => break,
            _ => {}
        }
    }
    assert_eq!(names, ["a", "b", "c"]);
    drop(events);
    sim.finish().await;
}
