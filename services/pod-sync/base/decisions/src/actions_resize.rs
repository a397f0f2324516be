//! Tests each branch of `pkg/kubelet/kuberuntime: computePodResizeAction` with a row.

use quintlet_model::runtime::SandboxState;
use quintlet_testkit::pods::{RuntimeBuilder, id, pod_json};
use serde_json::{Value, json};

use super::tests::container;
use super::*;
use crate::resize::allocation::of_pod;

fn sized(name: &str, cpu: &str) -> Value {
    let mut c = container(name);
    c["resources"] = json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}});
    c
}

fn restarting(name: &str, cpu: &str) -> Value {
    let mut c = sized(name, cpu);
    c["resizePolicy"] = json!([{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]);
    c
}

fn sidecar(mut c: Value) -> Value {
    c["restartPolicy"] = json!("Always");
    c
}

fn pod(init: Value, regular: Value) -> Pod {
    pod_json(json!({"initContainers": init, "containers": regular}))
}

type Probes = &'static [(ProbeType, &'static str, ProbeResult)];

/// `cpu a-0`, `memory a-0`, `pod`, `kill a-0 Resize`, `start 0`, `init 0`, `kill-pod`.
fn decide(before: &Pod, after: &Pod, runtime: RuntimeBuilder, probes: Probes) -> Vec<String> {
    let mut view = ProbeResults::default();
    for (probe, container, result) in probes {
        view.set(*probe, id(container), *result);
    }
    let (runtime, actuated) = (runtime.build(), of_pod(before));
    let a = compute_pod_actions(&ActionInput {
        pod: after,
        runtime: &runtime,
        probes: &view,
        actuated: Some(&actuated),
        restart_all: false,
    });
    let mut out = Vec::new();
    if a.kill_pod {
        out.push("kill-pod".to_owned());
    }
    out.extend(a.containers_to_kill.iter().map(|k| format!("kill {} {:?}", k.id, k.reason)));
    out.extend(a.resize.memory.iter().map(|u| format!("memory {}", u.id)));
    out.extend(a.resize.cpu.iter().map(|u| format!("cpu {}", u.id)));
    if a.resize.pod {
        out.push("pod".to_owned());
    }
    out.extend(a.init_containers_to_start.iter().map(|i| format!("init {i}")));
    out.extend(a.containers_to_start.iter().map(|i| format!("start {i}")));
    assert_eq!(a.is_idle(&runtime), out.is_empty(), "{a:?}");
    out
}

#[test]
fn every_branch_of_a_resize_has_a_row() {
    let ready = RuntimeBuilder::ready;
    let one = |cpu: &str| pod(json!([]), json!([sized("a", cpu), container("b")]));
    let again = |cpu: &str| pod(json!([]), json!([restarting("a", cpu), container("b")]));
    let alone = |cpu: &str| pod(json!([]), json!([restarting("a", cpu)]));
    let plain = |cpu: &str| pod(json!([sized("i", cpu)]), json!([container("a")]));
    let plain_again = |cpu: &str| pod(json!([restarting("i", cpu)]), json!([container("a")]));
    let side = |cpu: &str| pod(json!([sidecar(sized("s", cpu))]), json!([container("a")]));
    let side_again = |cpu: &str| pod(json!([sidecar(restarting("s", cpu))]), json!([container("a")]));
    let probed = |cpu: &str| {
        let mut s = sidecar(sized("s", cpu));
        s["startupProbe"] = json!({"exec": {"command": ["x"]}});
        s["livenessProbe"] = s["startupProbe"].clone();
        pod(json!([s]), json!([container("a")]))
    };
    let level =
        |cpu: &str| pod_json(json!({"resources": {"limits": {"cpu": cpu}}, "containers": [container("a")]}));
    let level_and_own = |cpu: &str| {
        pod_json(json!({"resources": {"limits": {"cpu": cpu}}, "containers": [sized("a", "500m")]}))
    };
    type Case = (&'static str, Pod, Pod, RuntimeBuilder, Probes, &'static [&'static str]);
    let rows: Vec<Case> = vec![
        ("NotRequired: in place", one("1"), one("2"), ready().running("a").running("b"), &[], &["cpu a-0"]),
        ("nothing differs: keep", one("1"), one("1000m"), ready().running("a").running("b"), &[], &[]),
        (
            "RestartContainer: kill and start, the pod's group follows",
            again("1"),
            again("2"),
            ready().running("a").running("b"),
            &[],
            &["kill a-0 Resize", "pod", "start 0"],
        ),
        (
            "the only container restarts: the pod is not killed for it",
            alone("1"),
            alone("2"),
            ready().running("a"),
            &[],
            &["kill a-0 Resize", "pod", "start 0"],
        ),
        (
            "not running: the container starts with its allocation",
            one("1"),
            one("2"),
            ready().exited("a", 1).running("b"),
            &[],
            &["start 0"],
        ),
        (
            "same sandbox: a failed probe comes before a resize",
            one("1"),
            one("2"),
            ready().running("a").running("b"),
            &[(ProbeType::Liveness, "a-0", ProbeResult::Failure)],
            &["kill a-0 LivenessProbe", "start 0"],
        ),
        (
            "same sandbox: another definition comes before a resize",
            again("1"),
            again("2"),
            ready().running("b").running("a").edit(|c| c.annotations.clear()),
            &[],
            &["kill a-0 DefinitionChanged", "start 0"],
        ),
        (
            "init: a running plain init: in place",
            plain("1"),
            plain("2"),
            ready().running("i"),
            &[],
            &["cpu i-0"],
        ),
        (
            "init: a running plain init that restarts",
            plain_again("1"),
            plain_again("2"),
            ready().running("i"),
            &[],
            &["kill i-0 Resize", "pod", "init 0"],
        ),
        (
            "init: a plain init that is done is not looked at",
            plain("1"),
            plain("2"),
            ready().exited("i", 0).running("a"),
            &[],
            &[],
        ),
        (
            "init: a sidecar: in place",
            side("1"),
            side("2"),
            ready().running("s").running("a"),
            &[],
            &["cpu s-0"],
        ),
        (
            "init: a sidecar that restarts",
            side_again("1"),
            side_again("2"),
            ready().running("s").running("a"),
            &[],
            &["kill s-0 Resize", "pod", "init 0"],
        ),
        (
            "init: a sidecar that has not started is not resized yet",
            probed("1"),
            probed("2"),
            ready().running("s"),
            &[],
            &[],
        ),
        (
            "init: a sidecar's failed probe comes before its resize",
            probed("1"),
            probed("2"),
            ready().running("s").running("a"),
            &[
                (ProbeType::Startup, "s-0", ProbeResult::Success),
                (ProbeType::Liveness, "s-0", ProbeResult::Failure),
            ],
            &["kill s-0 LivenessProbe", "init 0"],
        ),
        (
            "the pod level: its group, and the container without a limit of its own",
            level("1"),
            level("2"),
            ready().running("a"),
            &[],
            &["cpu a-0", "pod"],
        ),
        (
            "the pod level: a container with a limit of its own keeps it",
            level_and_own("1"),
            level_and_own("2"),
            ready().running("a"),
            &[],
            &["pod"],
        ),
        (
            "new sandbox: all containers start with their allocation",
            one("1"),
            one("2"),
            ready().running("a").running("b").edit_sandbox(|s| s.state = SandboxState::NotReady),
            &[],
            &["kill-pod", "start 0", "start 1"],
        ),
    ];
    let mut wrong = Vec::new();
    for (name, before, after, runtime, probes, want) in rows {
        let got = decide(&before, &after, runtime, probes);
        if got != want {
            wrong.push(format!("{name}: {got:?}, want {want:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_restart_for_a_resize_has_the_kubelets_message() {
    let with_cpu = |cpu: &str| pod(json!([]), json!([restarting("a", cpu)]));
    let (runtime, actuated) = (RuntimeBuilder::ready().running("a").build(), of_pod(&with_cpu("1")));
    let got = compute_pod_actions(&ActionInput {
        pod: &with_cpu("2"),
        runtime: &runtime,
        probes: &ProbeResults::default(),
        actuated: Some(&actuated),
        restart_all: false,
    });
    assert_eq!(got.containers_to_kill[0].message, "Container a resize requires restart");
}
