//! Tests each branch of `pkg/kubelet/kuberuntime: computePodActions` with a row.

use quintlet_model::runtime::SandboxState;
use quintlet_testkit::pods::{RuntimeBuilder, id, pod_json, time};
use serde_json::json;

use super::tests::{container, pod, simple, with_init, with_sidecars};
use super::*;

type Probes = &'static [(ProbeType, &'static str, ProbeResult)];

/// Name, pod, runtime, probes, restart of all; what is done.
type Row = (&'static str, Pod, RuntimeBuilder, Probes, bool, &'static [&'static str]);

/// An action in short: `sandbox@1`, `kill-pod`, `init 0`, `start 0`, `ephemeral 0`, `kill a-0 LivenessProbe`,
/// `prune i0-0`, `reset a-0`, `reset! a-0` where it is killed first.
fn short(a: &PodActions) -> Vec<String> {
    let mut out = Vec::new();
    if a.kill_pod {
        out.push("kill-pod".to_owned());
    }
    if a.create_sandbox {
        out.push(format!("sandbox@{}", a.attempt));
    }
    out.extend(a.containers_to_kill.iter().map(|k| format!("kill {} {:?}", k.id, k.reason)));
    out.extend(a.reset.iter().map(|r| format!("reset{} {}", if r.kill { "!" } else { "" }, r.id)));
    out.extend(a.prune.iter().map(|p| format!("prune {p}")));
    out.extend(a.ephemeral_containers_to_start.iter().map(|i| format!("ephemeral {i}")));
    out.extend(a.init_containers_to_start.iter().map(|i| format!("init {i}")));
    out.extend(a.containers_to_start.iter().map(|i| format!("start {i}")));
    out
}

fn decide(pod: &Pod, runtime: RuntimeBuilder, probes: Probes, restart_all: bool) -> Vec<String> {
    let mut view = ProbeResults::default();
    for (probe, container, result) in probes {
        view.set(*probe, id(container), *result);
    }
    let runtime = runtime.build();
    short(&compute_pod_actions(&ActionInput {
        pod,
        runtime: &runtime,
        probes: &view,
        actuated: None,
        restart_all,
    }))
}

#[test]
fn every_branch_of_the_kubelet_has_a_row() {
    use ProbeResult::{Failure, Success, Unknown};
    use ProbeType::{Liveness, Startup};
    let none = RuntimeBuilder::none;
    let ready = RuntimeBuilder::ready;
    let gone = |r: RuntimeBuilder| r.edit_sandbox(|s| s.state = SandboxState::NotReady);
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let restart = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [7]}}]);
    let all = pod(
        "Always",
        json!([container("i0")]),
        json!([container("a"), {"name": "b", "image": "i", "restartPolicy": "Never", "restartPolicyRules": rules}]),
    );
    let own = |policy: &str| {
        pod(
            "Always",
            json!([]),
            json!([{"name": "a", "image": "i", "restartPolicy": policy}, container("b")]),
        )
    };
    let host = pod_json(json!({"hostNetwork": true, "containers": [container("a")]}));
    let mut ephemeral = simple("Always");
    ephemeral.spec.as_mut().unwrap().ephemeral_containers =
        Some(vec![serde_json::from_value(json!({"name": "e", "image": "i"})).unwrap()]);
    let mut deleted = simple("Always");
    deleted.metadata.deletion_timestamp = Some(time(0));
    let ruled = pod(
        "Never",
        json!([]),
        json!([{"name": "a", "image": "i", "restartPolicy": "Never", "restartPolicyRules": restart}]),
    );
    let unkept = pod("Never", json!([]), json!([{"name": "a", "image": "i", "restartPolicyRules": restart}]));
    let started: Probes = &[(Startup, "s0-0", Success)];
    let changed = |r: RuntimeBuilder| r.edit(|c| c.annotations.clear());

    let rows: Vec<Row> = vec![
        // PodSandboxChanged
        (
            "sandbox: none: create, attempt 0",
            simple("Always"),
            none(),
            &[],
            false,
            &["kill-pod", "sandbox@0", "start 0", "start 1"],
        ),
        (
            "sandbox: more than one ready: recreate",
            simple("Always"),
            ready().sandbox(SandboxState::Ready),
            &[],
            false,
            &["kill-pod", "sandbox@2", "start 0", "start 1"],
        ),
        (
            "sandbox: newest not ready: recreate",
            simple("Always"),
            gone(ready()),
            &[],
            false,
            &["kill-pod", "sandbox@1", "start 0", "start 1"],
        ),
        (
            "sandbox: network mode differs: recreate",
            host.clone(),
            ready(),
            &[],
            false,
            &["kill-pod", "sandbox@1", "start 0"],
        ),
        (
            "sandbox: network without address: recreate",
            simple("Always"),
            ready().edit_sandbox(|s| s.ips.clear()),
            &[],
            false,
            &["kill-pod", "sandbox@1", "start 0", "start 1"],
        ),
        (
            "sandbox: host network without address: keep",
            host,
            ready()
                .edit_sandbox(|s| {
                    s.ips.clear();
                    s.host_network = true;
                })
                .running("a"),
            &[],
            false,
            &[],
        ),
        // RestartAllContainers
        (
            "restart all: targets, init, sources; what runs is killed",
            all.clone(),
            ready().exited("i0", 0).running("a").exited("b", 42),
            &[],
            true,
            &["reset! a-0", "reset i0-0", "reset b-0"],
        ),
        // computePodActions: the sandbox is created
        (
            "new sandbox: Never, not the first attempt, ran before: only kill",
            simple("Never"),
            gone(ready().exited("a", 0)),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "new sandbox: Never, nothing ran yet: recreate",
            simple("Never"),
            gone(ready()),
            &[],
            false,
            &["kill-pod", "sandbox@1", "start 0", "start 1"],
        ),
        (
            "new sandbox: OnFailure leaves out what exited 0",
            simple("OnFailure"),
            gone(ready().exited("a", 0).exited("b", 1)),
            &[],
            false,
            &["kill-pod", "sandbox@1", "start 1"],
        ),
        (
            "new sandbox: its own OnFailure leaves it out too",
            own("OnFailure"),
            gone(ready().exited("a", 0).exited("b", 0)),
            &[],
            false,
            &["kill-pod", "sandbox@1", "start 1"],
        ),
        (
            "new sandbox: nothing to start and something was created: only kill",
            simple("OnFailure"),
            gone(ready().exited("a", 0).exited("b", 0)),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "new sandbox: init containers: only the first, all their records go",
            with_init("Always"),
            gone(ready().exited("i0", 0).exited("a", 1)),
            &[],
            false,
            &["kill-pod", "sandbox@1", "prune i0-0", "init 0"],
        ),
        // computePodActions: the sandbox is kept
        (
            "same sandbox: ephemeral without status starts",
            ephemeral.clone(),
            ready().running("a").running("b"),
            &[],
            false,
            &["ephemeral 0"],
        ),
        (
            "same sandbox: ephemeral is never restarted",
            ephemeral,
            ready().running("a").running("b").exited("e", 1),
            &[],
            false,
            &[],
        ),
        (
            "same sandbox: not initialized: no regular container",
            with_init("Always"),
            ready().running("i0"),
            &[],
            false,
            &[],
        ),
        ("same sandbox: absent starts", simple("Always"), ready().running("a"), &[], false, &["start 1"]),
        (
            "same sandbox: unknown is killed and started",
            simple("Always"),
            ready().unknown("a").running("b"),
            &[],
            false,
            &["kill a-0 UnknownState", "start 0"],
        ),
        (
            "same sandbox: definition changed: restart whatever the policy",
            simple("Never"),
            changed(ready().running("b").running("a")),
            &[],
            false,
            &["kill a-0 DefinitionChanged", "start 0"],
        ),
        (
            "same sandbox: liveness failure: kill and start",
            simple("Always"),
            ready().running("a").running("b"),
            &[(Liveness, "a-0", Failure)],
            false,
            &["kill a-0 LivenessProbe", "start 0"],
        ),
        (
            "same sandbox: startup failure: kill and start",
            simple("OnFailure"),
            ready().running("a").running("b"),
            &[(Startup, "a-0", Failure)],
            false,
            &["kill a-0 StartupProbe", "start 0"],
        ),
        (
            "same sandbox: liveness before startup",
            simple("Always"),
            ready().running("a").running("b"),
            &[(Startup, "a-0", Failure), (Liveness, "a-0", Failure)],
            false,
            &["kill a-0 LivenessProbe", "start 0"],
        ),
        (
            "same sandbox: kill under Never: no start",
            simple("Never"),
            ready().running("a").running("b"),
            &[(Liveness, "a-0", Failure)],
            false,
            &["kill a-0 LivenessProbe"],
        ),
        (
            "same sandbox: its own Never overrides: no start",
            own("Never"),
            ready().running("a").running("b"),
            &[(Liveness, "a-0", Failure)],
            false,
            &["kill a-0 LivenessProbe"],
        ),
        (
            "same sandbox: keep",
            simple("Always"),
            ready().running("a").running("b"),
            &[(Liveness, "a-0", Success), (Startup, "b-0", Unknown)],
            false,
            &[],
        ),
        (
            "same sandbox: nothing kept, nothing to start: the pod is killed",
            simple("Never"),
            ready().exited("a", 0).exited("b", 1),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "same sandbox: in the start list is enough to live on",
            simple("Always"),
            ready().exited("a", 1).exited("b", 1),
            &[],
            false,
            &["start 0", "start 1"],
        ),
        // computeInitContainerActions
        (
            "init: no init containers: initialized",
            simple("Always"),
            ready(),
            &[],
            false,
            &["start 0", "start 1"],
        ),
        ("init: none ran: the first", with_init("Always"), ready(), &[], false, &["init 0"]),
        ("init: created: again", with_init("Always"), ready().created("i0"), &[], false, &["init 0"]),
        (
            "init: plain init runs: wait",
            with_init("Always"),
            ready().exited("i0", 0).running("i1"),
            &[],
            false,
            &[],
        ),
        ("init: succeeded: the next", with_init("Always"), ready().exited("i0", 0), &[], false, &["init 1"]),
        (
            "init: a regular container of the previous sandbox was created: the next",
            with_init("Always"),
            gone(ready().exited("i0", 0).exited("i1", 0).created("a"))
                .sandbox(SandboxState::Ready)
                .exited("i0", 0),
            &[],
            false,
            &["prune i0-0", "init 1"],
        ),
        (
            "init: a regular container of the previous sandbox counts as running: the next",
            with_init("Always"),
            gone(ready().exited("i0", 0).exited("i1", 0).running("a"))
                .sandbox(SandboxState::Ready)
                .exited("i0", 0),
            &[],
            false,
            &["prune i0-0", "init 1"],
        ),
        (
            "init: sidecars after those of the previous sandbox: in order",
            with_sidecars("Always"),
            gone(ready().running("s0").exited("i1", 0).running("s2").created("a"))
                .sandbox(SandboxState::Ready),
            &[],
            false,
            &["init 0"],
        ),
        (
            "init: the last succeeded: initialized",
            with_init("Always"),
            ready().exited("i0", 0).exited("i1", 0),
            &[],
            false,
            &["start 0"],
        ),
        (
            "init: a regular one created or running: initialized",
            with_init("Always"),
            ready().running("a"),
            &[],
            false,
            &[],
        ),
        (
            "init: a regular one that exited does not count",
            with_init("Always"),
            ready().exited("a", 1),
            &[],
            false,
            &["init 0"],
        ),
        (
            "init: failed and restartable: again",
            with_init("OnFailure"),
            ready().exited("i0", 1),
            &[],
            false,
            &["init 0"],
        ),
        (
            "init: failed for good: the pod is killed",
            with_init("Never"),
            ready().exited("i0", 1),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "init: OOMKilled with code 0 is a failure",
            with_init("Never"),
            ready().exited("i0", 0).edit(|c| c.reason = "OOMKilled".into()),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "init: unknown plain init, restartable: kill and start",
            with_init("Always"),
            ready().unknown("i0"),
            &[],
            false,
            &["kill i0-0 UnknownState", "init 0"],
        ),
        (
            "init: unknown plain init, Never: the pod is killed",
            with_init("Never"),
            ready().unknown("i0"),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "init: unknown sidecar: kill and start",
            with_sidecars("Never"),
            ready().unknown("s0"),
            &[],
            false,
            &["kill s0-0 UnknownState", "init 0"],
        ),
        (
            "init: sidecar's startup has no result: wait",
            with_sidecars("Always"),
            ready().running("s0"),
            &[],
            false,
            &[],
        ),
        (
            "init: sidecar's startup is neither: wait",
            with_sidecars("Always"),
            ready().running("s0"),
            &[(Startup, "s0-0", Unknown)],
            false,
            &[],
        ),
        (
            "init: sidecar's startup failed: kill and start",
            with_sidecars("Always"),
            ready().running("s0"),
            &[(Startup, "s0-0", Failure)],
            false,
            &["kill s0-0 StartupProbe", "init 0"],
        ),
        (
            "init: sidecar started: the next",
            with_sidecars("Always"),
            ready().running("s0"),
            started,
            false,
            &["init 1"],
        ),
        (
            "init: the last sidecar started: initialized",
            with_sidecars("Always"),
            ready().running("s0").exited("i1", 0).running("s2"),
            started,
            false,
            &["start 0"],
        ),
        (
            "init: sidecar's definition changed: kill and start",
            with_sidecars("Always"),
            changed(ready().exited("i1", 0).running("s2").running("a").running("s0")),
            started,
            false,
            &["kill s0-0 DefinitionChanged", "init 0"],
        ),
        (
            "init: sidecar's liveness failed: kill and start",
            with_sidecars("Always"),
            ready().running("s0").exited("i1", 0).running("s2").running("a"),
            &[(Startup, "s0-0", Success), (Liveness, "s0-0", Failure)],
            false,
            &["kill s0-0 LivenessProbe", "init 0"],
        ),
        (
            "init: sidecar exited: start",
            with_sidecars("Always"),
            ready().running("s0").exited("i1", 0).exited("s2", 1).running("a"),
            started,
            false,
            &["init 2"],
        ),
        (
            "init: sidecar absent beside regular ones: start",
            with_sidecars("Always"),
            ready().running("s0").exited("i1", 0).running("a"),
            started,
            false,
            &["init 2"],
        ),
        (
            "6.2 older dead init instances go",
            with_init("Always"),
            ready().exited("i0", 1).exited("i0", 0).exited("i1", 0).running("a"),
            &[],
            false,
            &["prune i0-0"],
        ),
        // ShouldContainerBeRestarted
        (
            "restart policy: deleted: nothing starts",
            deleted,
            ready().running("a").exited("b", 1),
            &[],
            false,
            &[],
        ),
        (
            "restart policy: created: start",
            simple("Never"),
            ready().created("a").running("b"),
            &[],
            false,
            &["start 0"],
        ),
        (
            "restart policy: rule Restart matches under Never: start",
            ruled.clone(),
            ready().exited("a", 7),
            &[],
            false,
            &["start 0"],
        ),
        (
            "restart policy: no rule matches: the policy",
            ruled,
            ready().exited("a", 8),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "restart policy: rules without a policy of its own do not count",
            unkept,
            ready().exited("a", 7),
            &[],
            false,
            &["kill-pod"],
        ),
        (
            "restart policy: a rule that restarts all restarts where nobody resets",
            all,
            ready().exited("i0", 0).running("a").exited("b", 42),
            &[],
            false,
            &["start 1"],
        ),
    ];
    let mut wrong = Vec::new();
    for (name, pod, runtime, probes, restart_all, want) in rows {
        let got = decide(&pod, runtime, probes, restart_all);
        if got != want {
            wrong.push(format!("{name}: {got:?}, want {want:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
