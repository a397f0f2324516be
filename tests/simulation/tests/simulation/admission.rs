//! Admission and preemption.

use quintlet_cri_api::v1;
use quintlet_proto::podsync::v1::PodView;
use quintlet_simulation::{LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::Method;
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

/// Allocatable CPU of the node, in millicores.
fn cpu_milli() -> usize {
    std::thread::available_parallelism().unwrap().get() * 1000
}

fn requesting(name: &str, milli: usize, priority: i64) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": format!("{milli}m")}});
    pod["spec"]["priority"] = json!(priority);
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_needs_a_feature_is_not_rejected_before_the_runtimes_features_are_known() {
    let strict = |name: &str| {
        let mut pod = pods::single(name);
        pod["spec"]["securityContext"] = json!({"supplementalGroupsPolicy": "Strict"});
        pod
    };
    for able in [true, false] {
        let mut options = Options::default();
        options.runtime.features =
            Some(v1::RuntimeFeatures { supplemental_groups_policy: able, ..Default::default() });
        options.runtime.handlers = vec![v1::RuntimeHandler::default()];
        let sim = Sim::prepare(options).await;
        sim.runtime.down();
        for service in Service::ALL {
            sim.up(service);
        }
        let _uid = sim.create(strict("strict"));
        let _uid = sim.create(pods::single("plain"));
        sim.wait_view("plain", "known", |_| true).await;
        let waits = |p: &PodView| p.waiting.as_ref().is_some_and(|w| w.reason == "NotAdmitted");
        sim.wait_view("strict", "not decided on", waits).await;
        assert_eq!(sim.pod("strict").phase(), "Pending", "nothing is decided yet");
        sim.runtime.up().unwrap();
        if able {
            sim.wait_ready("strict").await;
        } else {
            let reason = |p: &quintlet_simulation::Seen| p.text("/status/reason").to_owned();
            sim.wait_pod("strict", "refused", |p| reason(p) == "SupplementalGroupsPolicyNotSupported").await;
        }
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_critical_pod_starts_once_the_preempted_pods_have_terminated() {
    const CRITICAL: i64 = 2_000_000_000;
    let sim = Sim::start(Options::default()).await;
    let victim = sim.create(requesting("victim", cpu_milli() - 500, 0));
    let _uid = sim.create(requesting("small", 100, 0));
    for name in ["victim", "small"] {
        sim.wait_ready(name).await;
    }
    let hung = sim.runtime.hang(Method::StopContainer);
    let critical = sim.create(requesting("critical", 1000, CRITICAL));
    sim.wait_event("victim", "Preempting", |e| {
        e.kind == "Warning"
            && e.reason == "Preempting"
            && e.message == "Preempted in order to admit critical pod"
    })
    .await;
    let id = sim.runtime.newest(&victim, "c-victim").unwrap().id().to_owned();
    sim.wait_calls(Method::StopContainer, &id, 1).await;
    assert!(sim.sandboxes(&critical).is_empty(), "it waits for the room");
    sim.runtime.unscript(hung);
    sim.wait_ready("critical").await;
    let seen = sim
        .wait_pod("victim", "Preempting", |p| {
            p.phase() == "Failed" && p.text("/status/reason") == "Preempting"
        })
        .await;
    assert_eq!(seen.text("/status/message"), "Preempted in order to admit critical pod");
    until("the preemption is counted", LONG, async || {
        let metrics = quintlet_telemetry::metrics::text();
        let counted = metrics.contains("kubelet_preemptions{preemption_signal=\"cpu\"} 1\n");
        if counted { Ok(()) } else { Err(metrics) }
    })
    .await;
    let conditions = seen.0["status"]["conditions"].as_array().unwrap();
    let disruption = conditions.iter().find(|c| c["type"] == "DisruptionTarget").unwrap();
    assert_eq!(
        (disruption["status"].as_str(), disruption["reason"].as_str(), disruption["message"].as_str()),
        (
            Some("True"),
            Some("TerminationByKubelet"),
            Some("Pod was preempted by Kubelet to accommodate a critical pod.")
        )
    );
    assert!(sim.pod("small").is_ready(), "no more go than needed");

    // Preempting all other pods would not suffice, so none is preempted.
    let _uid = sim.create(requesting("too-large", cpu_milli() + 1, CRITICAL));
    let seen = sim.wait_pod("too-large", "refused", |p| p.phase() == "Failed").await;
    assert_eq!(seen.text("/status/reason"), "UnexpectedAdmissionError");
    let missing = 1 + 1000;
    let text = format!(
        "Pod was rejected: Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: {missing}), ]"
    );
    assert_eq!(seen.text("/status/message"), text);
    assert!(sim.pod("small").is_ready() && sim.pod("critical").is_ready());

    let _uid = sim.create(requesting("plain", cpu_milli(), 0));
    let seen = sim.wait_pod("plain", "refused", |p| p.phase() == "Failed").await;
    assert_eq!(seen.text("/status/reason"), "OutOfcpu");

    // A restart does not admit a rejected pod.
    sim.restart(Service::PodSync).await;
    let _uid = sim.create(requesting("later", 10, 0));
    sim.wait_ready("later").await;
    assert_eq!(sim.pod("victim").text("/status/reason"), "Preempting");
    assert!(sim.pod("critical").is_ready() && sim.pod("small").is_ready());
    assert_eq!(sim.pod("critical").restarts(), 0);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_pod_fails_with_the_reason_and_nothing_is_created_for_it() {
    let sim = Sim::start(Options::default()).await;
    let mut taken = pods::single("taken");
    let port = json!([{"containerPort": 80, "hostPort": 8099}]);
    taken["spec"]["containers"][0]["ports"] = port.clone();
    let _uid = sim.create(taken);
    sim.wait_ready("taken").await;
    let edit = |name: &str, edit: &dyn Fn(&mut Value)| {
        let mut pod = pods::single(name);
        edit(&mut pod["spec"]);
        sim.create(pod)
    };
    let cases: [(&str, &str, &str); 4] = [
        (
            "affinity",
            "NodeAffinity",
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ),
        (
            "ports",
            "NodePorts",
            "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports",
        ),
        ("sysctl", "SysctlForbidden", "forbidden sysctl: \"kernel.panic\" not allowlisted"),
        ("os", "PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"),
    ];
    edit("affinity", &|s| s["nodeSelector"] = json!({"kubernetes.io/arch": "other"}));
    edit("ports", &|s| s["containers"][0]["ports"] = port.clone());
    edit("sysctl", &|s| s["securityContext"] = json!({"sysctls": [{"name": "kernel.panic", "value": "1"}]}));
    edit("os", &|s| s["os"] = json!({"name": "windows"}));
    for (name, reason, message) in cases {
        let seen = sim.wait_pod(name, reason, |p| p.phase() == "Failed").await;
        assert_eq!(seen.text("/status/reason"), reason);
        assert_eq!(seen.text("/status/message"), format!("Pod was rejected: {message}"));
        sim.wait_event(name, reason, |e| e.kind == "Warning" && e.reason == reason && e.message == message)
            .await;
        assert!(sim.sandboxes(seen.uid()).is_empty(), "{name}");
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_pod_does_not_count_against_the_resources_of_the_node() {
    let sim = Sim::start(Options::default()).await;
    let requesting = |name: &str, cpu: &str| {
        let mut pod = pods::single(name);
        pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
        sim.create(pod)
    };
    let _large = requesting("large", "1000000");
    let _small = requesting("small", "10m");
    let seen = sim.wait_pod("large", "rejected", |p| p.phase() == "Failed").await;
    assert_eq!(seen.text("/status/reason"), "OutOfcpu");
    sim.wait_ready("small").await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_is_not_ready_delays_only_pods_that_need_it() {
    let sim = Sim::prepare(Options::default()).await;
    sim.runtime.set_condition("NetworkReady", false, "NetworkPluginNotReady", "no plugin");
    for service in Service::ALL {
        sim.up(service);
    }
    let needs = sim.create(pods::single("needs"));
    let mut host = pods::single("host");
    host["spec"]["hostNetwork"] = json!(true);
    let _uid = sim.create(host);
    sim.wait_ready("host").await;
    sim.wait_event("needs", "NetworkNotReady", |e| {
        e.kind == "Warning"
            && e.reason == "NetworkNotReady"
            && e.message
                .starts_with("network is not ready: container runtime network not ready: NetworkReady=false")
    })
    .await;
    assert!(sim.sandboxes(&needs).is_empty());
    sim.runtime.set_condition("NetworkReady", true, "", "");
    sim.wait_ready("needs").await;
    // A pod that has its sandbox does not need the network plugin.
    sim.runtime.set_condition("NetworkReady", false, "NetworkPluginNotReady", "no plugin");
    let id = sim.runtime.newest(&needs, "c-needs").unwrap().id().to_owned();
    sim.runtime.exit(&id, 1);
    sim.wait_pod("needs", "restarted", |p| p.is_ready() && p.restarts() == 1).await;
    assert_eq!(sim.sandboxes(&needs).len(), 1);
    let handed = sim.runtime.calls_of(Method::RunPodSandbox);
    let handed = handed.iter().map(|c| c.request::<v1::RunPodSandboxRequest>().config.unwrap_or_default());
    assert_eq!(handed.filter(|c| c.hostname.is_empty()).count(), 1, "the host's has no name of its own");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_is_read_again_before_a_pod_is_rejected_by_a_stale_watch() {
    let sim = Sim::start(Options::default()).await;
    let _uid = sim.create(pods::single("first"));
    sim.wait_ready("first").await;
    // From here on pod-sync does not see changes of the Node.
    sim.api.faults().block("watch nodes");
    sim.api.faults().drop_watches();
    let label = |n: &mut Value| n["metadata"]["labels"]["for-this-pod"] = json!("yes");
    sim.api.edit("nodes", "", quintlet_simulation::NODE, label).unwrap();
    let mut pod = pods::single("labelled");
    pod["spec"]["nodeSelector"] = json!({"for-this-pod": "yes"});
    let _uid = sim.create(pod.clone());
    sim.wait_ready("labelled").await;
    assert_eq!(sim.warnings("labelled"), []);
    pod["metadata"]["name"] = json!("other");
    pod["spec"]["nodeSelector"] = json!({"for-this-pod": "no"});
    let _uid = sim.create(pod);
    let seen = sim.wait_pod("other", "refused", |p| p.phase() == "Failed").await;
    assert_eq!(seen.text("/status/reason"), "NodeAffinity");
    sim.api.faults().clear();
    sim.finish().await;
}

fn manifest_with_port(name: &str, revision: &str) -> Value {
    let mut pod = pods::manifest(name);
    pod["metadata"]["labels"] = json!({"revision": revision});
    pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 8099}]);
    pod
}

// The manifest of an API server has host ports, and an upgrade may change it while the node agent is stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_pod_that_is_changed_while_pod_sync_is_down_replaces_the_one_with_its_ports() {
    let sim = Sim::start(Options::default()).await;
    sim.manifest("web", &manifest_with_port("web", "1"));
    let before = sim.wait_ready("web-sim-node").await;
    sim.stop(Service::PodSync).await;
    sim.manifest("web", &manifest_with_port("web", "2"));
    sim.up(Service::PodSync);
    let after = sim
        .wait_pod("web-sim-node", "the new revision, Ready", |p| {
            p.is_ready() && p.text("/metadata/labels/revision") == "2"
        })
        .await;
    assert_ne!(after.container("c-web").id, before.container("c-web").id);
    let rejected: Vec<_> =
        sim.warnings("web-sim-node").into_iter().filter(|e| e.reason == "NodePorts").collect();
    assert!(rejected.is_empty(), "{rejected:?}");
    sim.finish().await;
}

// The pods of the API server are unknown until this static pod, which may be the API server, runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_only_records_name_do_not_count_against_a_static_pod() {
    let sim = Sim::start(Options::default()).await;
    let mut recorded = pods::single("recorded");
    recorded["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 8099}]);
    let _uid = sim.create(recorded);
    sim.wait_ready("recorded").await;
    sim.stop(Service::PodSync).await;
    sim.api.faults().set_down(true);
    sim.manifest("web", &manifest_with_port("web", "1"));
    sim.up(Service::PodSync);
    until("the static pod started", LONG, async || {
        let started = sim.runtime.calls_of(Method::CreateContainer);
        let count = started.iter().filter(|call| call.subjects.iter().any(|s| s == "c-web")).count();
        if count == 1 { Ok(()) } else { Err(count) }
    })
    .await;
    sim.api.faults().set_down(false);
    sim.wait_ready("web-sim-node").await;
    assert!(sim.pod("recorded").is_ready());
    sim.finish().await;
}
