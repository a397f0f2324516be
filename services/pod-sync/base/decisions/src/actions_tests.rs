use proptest::prelude::*;
use quintlet_model::runtime::SandboxState;
use quintlet_testkit::pods::{RuntimeBuilder, id, pod_json, time};
use serde_json::{Value, json};

use super::*;
use crate::sandbox::SandboxChange;

pub(super) fn container(name: &str) -> Value {
    json!({"name": name, "image": "i"})
}

pub(super) fn pod(policy: &str, init: Value, regular: Value) -> Pod {
    pod_json(json!({"restartPolicy": policy, "initContainers": init, "containers": regular}))
}

pub(super) fn simple(policy: &str) -> Pod {
    pod(policy, json!([]), json!([container("a"), container("b")]))
}

pub(super) fn with_init(policy: &str) -> Pod {
    pod(policy, json!([container("i0"), container("i1")]), json!([container("a")]))
}

/// Two sidecars around a plain init container; the first sidecar has startup and liveness probes.
pub(super) fn with_sidecars(policy: &str) -> Pod {
    let probe = json!({"tcpSocket": {"port": 1}});
    pod(
        policy,
        json!([
            {"name": "s0", "image": "i", "restartPolicy": "Always", "startupProbe": probe, "livenessProbe": probe},
            container("i1"),
            {"name": "s2", "image": "i", "restartPolicy": "Always"},
        ]),
        json!([container("a")]),
    )
}

fn compute(pod: &Pod, runtime: RuntimeBuilder, probes: &[(ProbeType, &str, ProbeResult)]) -> PodActions {
    let mut view = ProbeResults::default();
    for (probe, container, result) in probes {
        view.set(*probe, id(container), *result);
    }
    compute_pod_actions(&ActionInput {
        pod,
        runtime: &runtime.build(),
        probes: &view,
        actuated: None,
        restart_all: false,
    })
}

/// The lists that say what starts: init, regular, ephemeral.
fn starts(a: &PodActions) -> (Vec<usize>, Vec<usize>) {
    (a.init_containers_to_start.clone(), a.containers_to_start.clone())
}

fn kills(a: &PodActions) -> Vec<(&str, &str, KillReason)> {
    a.containers_to_kill.iter().map(|k| (k.id.as_str(), k.message.as_str(), k.reason)).collect()
}

#[test]
fn the_sandbox_is_kept_only_while_it_is_usable() {
    let p = simple("Always");
    let host = pod_json(json!({"hostNetwork": true, "containers": [container("a")]}));
    let stopped = || RuntimeBuilder::none().sandbox(SandboxState::NotReady);
    let s0 = || Some(SandboxId::parse("s0").unwrap());
    let s1 = || Some(SandboxId::parse("s1").unwrap());
    for (name, pod, runtime, want) in [
        (
            "none",
            &p,
            RuntimeBuilder::none(),
            SandboxDecision::Create { attempt: 0, replaces: None, why: SandboxChange::None },
        ),
        (
            "not ready",
            &p,
            stopped(),
            SandboxDecision::Create { attempt: 1, replaces: s0(), why: SandboxChange::NotReady },
        ),
        (
            "two ready",
            &p,
            RuntimeBuilder::ready().sandbox(SandboxState::Ready),
            SandboxDecision::Create { attempt: 2, replaces: s1(), why: SandboxChange::SeveralReady },
        ),
        (
            "older ready, newest not",
            &p,
            RuntimeBuilder::ready().sandbox(SandboxState::NotReady),
            SandboxDecision::Create { attempt: 2, replaces: s1(), why: SandboxChange::NotReady },
        ),
        (
            "network mode differs",
            &p,
            RuntimeBuilder::ready().edit_sandbox(|s| s.host_network = true),
            SandboxDecision::Create { attempt: 1, replaces: None, why: SandboxChange::NetworkMode },
        ),
        (
            "no address",
            &p,
            RuntimeBuilder::ready().edit_sandbox(|s| s.ips.clear()),
            SandboxDecision::Create { attempt: 1, replaces: s0(), why: SandboxChange::NoAddress },
        ),
        (
            "no network reported",
            &p,
            RuntimeBuilder::ready().edit_sandbox(|s| {
                s.ips.clear();
                s.has_network = false;
            }),
            SandboxDecision::Keep { id: s0().unwrap(), attempt: 0 },
        ),
        (
            "host network without address",
            &host,
            RuntimeBuilder::ready().edit_sandbox(|s| {
                s.ips.clear();
                s.host_network = true;
            }),
            SandboxDecision::Keep { id: s0().unwrap(), attempt: 0 },
        ),
        (
            "ready, older stopped",
            &p,
            stopped().sandbox(SandboxState::Ready),
            SandboxDecision::Keep { id: s1().unwrap(), attempt: 1 },
        ),
    ] {
        assert_eq!(sandbox_decision(pod, &runtime.build()), want, "{name}");
    }
}

#[test]
fn a_pod_without_a_sandbox_gets_one_and_starts_from_the_beginning() {
    let got = compute(&simple("Always"), RuntimeBuilder::none(), &[]);
    assert!(got.kill_pod && got.create_sandbox);
    assert_eq!((got.attempt, got.sandbox_id.clone()), (0, None));
    assert_eq!(starts(&got), (vec![], vec![0, 1]));
    let got = compute(&with_init("Always"), RuntimeBuilder::none(), &[]);
    assert_eq!(starts(&got), (vec![0], vec![]));
}

#[test]
fn a_pod_that_lost_its_sandbox_follows_its_restart_policy() {
    let lost = |r: RuntimeBuilder| r.edit_sandbox(|s| s.state = SandboxState::NotReady);
    let both = |x: i32, y: i32| lost(RuntimeBuilder::ready().exited("a", x).exited("b", y));
    for (name, policy, runtime, create, start) in [
        ("Never is not run twice", "Never", both(0, 1), false, vec![]),
        ("Never without a container yet", "Never", lost(RuntimeBuilder::ready()), true, vec![0, 1]),
        ("OnFailure leaves out what succeeded", "OnFailure", both(0, 1), true, vec![1]),
        ("OnFailure, all succeeded", "OnFailure", both(0, 0), false, vec![]),
        ("Always starts all", "Always", both(0, 1), true, vec![0, 1]),
    ] {
        let got = compute(&simple(policy), runtime, &[]);
        assert!(got.kill_pod, "{name}");
        assert_eq!((got.create_sandbox, got.containers_to_start.clone()), (create, start), "{name}");
    }
}

#[test]
fn a_containers_own_policy_applies_when_the_sandbox_is_recreated() {
    let p = pod(
        "Always",
        json!([]),
        json!([{"name": "a", "image": "i", "restartPolicy": "OnFailure"}, container("b")]),
    );
    let runtime = RuntimeBuilder::ready()
        .exited("a", 0)
        .exited("b", 0)
        .edit_sandbox(|s| s.state = SandboxState::NotReady);
    assert_eq!(compute(&p, runtime, &[]).containers_to_start, [1]);
}

#[test]
fn a_new_sandbox_runs_the_init_containers_again_and_drops_their_records() {
    let runtime = RuntimeBuilder::ready()
        .exited("i0", 1)
        .exited("i0", 0)
        .exited("i1", 0)
        .exited("a", 1)
        .edit_sandbox(|s| s.state = SandboxState::NotReady);
    let got = compute(&with_init("Always"), runtime, &[]);
    assert_eq!(starts(&got), (vec![0], vec![]));
    assert_eq!(got.prune, [id("i0-1"), id("i0-0"), id("i1-0")]);
}

#[test]
fn init_containers_of_an_earlier_sandbox_do_not_count_in_this_one() {
    let runtime = RuntimeBuilder::ready()
        .exited("i0", 0)
        .exited("i1", 0)
        .exited("a", 1)
        .edit_sandbox(|s| s.state = SandboxState::NotReady)
        .sandbox(SandboxState::Ready);
    let got = compute(&with_init("Always"), runtime, &[]);
    assert!(!got.kill_pod);
    assert_eq!(starts(&got), (vec![0], vec![]));
}

#[test]
fn regular_containers_start_again_by_policy() {
    let ran = |x: i32, y: i32| RuntimeBuilder::ready().exited("a", x).exited("b", y);
    for (name, policy, runtime, kill_pod, start) in [
        ("nothing started yet", "Never", RuntimeBuilder::ready(), false, vec![0, 1]),
        ("Always", "Always", ran(0, 1), false, vec![0, 1]),
        ("OnFailure", "OnFailure", ran(0, 1), false, vec![1]),
        ("OnFailure, all succeeded", "OnFailure", ran(0, 0), true, vec![]),
        ("Never, all ended", "Never", ran(0, 1), true, vec![]),
        (
            "created is started again",
            "Always",
            RuntimeBuilder::ready().running("a").created("b"),
            false,
            vec![1],
        ),
        ("all run", "Always", RuntimeBuilder::ready().running("a").running("b"), false, vec![]),
        (
            "one runs, one ended for good",
            "Never",
            RuntimeBuilder::ready().running("a").exited("b", 1),
            false,
            vec![],
        ),
    ] {
        let got = compute(&simple(policy), runtime, &[]);
        assert_eq!(
            (got.kill_pod, got.create_sandbox, got.containers_to_start.clone()),
            (kill_pod, false, start),
            "{name}"
        );
    }
}

#[test]
fn a_deleted_pod_starts_nothing() {
    let mut p = simple("Always");
    p.metadata.deletion_timestamp = Some(time(0));
    let got = compute(&p, RuntimeBuilder::ready().running("a").exited("b", 1), &[]);
    assert!(got.is_idle(&RuntimeBuilder::ready().running("a").build()));
    let got = compute(&p, RuntimeBuilder::ready().exited("a", 1).exited("b", 1), &[]);
    assert!(got.kill_pod && !got.create_sandbox);
}

#[test]
fn an_unknown_container_is_killed_before_it_is_started() {
    let got = compute(&simple("Never"), RuntimeBuilder::ready().unknown("a").running("b"), &[]);
    assert_eq!(got.containers_to_start, [0]);
    assert_eq!(
        kills(&got),
        [(
            "a-0",
            "Container is in \"unknown\" state, try killing it before restart",
            KillReason::UnknownState
        )]
    );
}

#[test]
fn a_running_container_is_killed_for_the_first_cause_that_holds() {
    use ProbeResult::{Failure, Success, Unknown};
    use ProbeType::{Liveness, Readiness, Startup};
    let image = |r: RuntimeBuilder| r.edit(|c| c.annotations.clear());
    let two = || RuntimeBuilder::ready().running("b").running("a");
    let liveness = "Container a failed liveness probe, will be restarted";
    let startup = "Container a failed startup probe, will be restarted";
    let changed = "Container a definition changed, will be restarted";
    for (name, runtime, probes, want) in [
        ("nothing", two(), vec![], None),
        ("probes well", two(), vec![(Liveness, "a-0", Success), (Startup, "a-0", Unknown)], None),
        ("readiness has no say", two(), vec![(Readiness, "a-0", Failure)], None),
        ("a result of another instance", two(), vec![(Liveness, "a-7", Failure)], None),
        (
            "liveness",
            two(),
            vec![(Liveness, "a-0", Failure), (Startup, "a-0", Failure)],
            Some((liveness, KillReason::LivenessProbe)),
        ),
        ("startup", two(), vec![(Startup, "a-0", Failure)], Some((startup, KillReason::StartupProbe))),
        (
            "definition goes first",
            image(two()),
            vec![(Liveness, "a-0", Failure)],
            Some((changed, KillReason::DefinitionChanged)),
        ),
    ] {
        let got = compute(&simple("Always"), runtime, &probes);
        match want {
            None => assert!(got.is_idle(&RuntimeBuilder::ready().running("a").build()), "{name}: {got:?}"),
            Some((message, reason)) => {
                assert_eq!(kills(&got), [("a-0", message, reason)], "{name}");
                assert_eq!(got.containers_to_start, [0], "{name}");
            }
        }
    }
}

#[test]
fn a_probe_kill_restarts_by_policy_and_a_changed_definition_always() {
    let failed = [(ProbeType::Liveness, "a-0", ProbeResult::Failure)];
    let two = || RuntimeBuilder::ready().running("b").running("a");
    let got = compute(&simple("Never"), two(), &failed);
    assert_eq!(kills(&got), [("a-0", "Container a failed liveness probe", KillReason::LivenessProbe)]);
    assert_eq!(got.containers_to_start, Vec::<usize>::new());
    let own = |policy: &str| {
        pod("Never", json!([]), json!([{"name": "a", "image": "i", "restartPolicy": policy}, container("b")]))
    };
    assert_eq!(compute(&own("OnFailure"), two(), &failed).containers_to_start, [0]);
    let got = compute(&simple("Never"), two().edit(|c| c.annotations.clear()), &[]);
    assert_eq!(got.containers_to_start, [0]);
    assert_eq!(got.containers_to_kill[0].message, "Container a definition changed, will be restarted");
}

#[test]
fn a_pod_without_a_container_to_keep_is_killed() {
    let p = pod("Never", json!([]), json!([container("a")]));
    let got = compute(
        &p,
        RuntimeBuilder::ready().running("a"),
        &[(ProbeType::Liveness, "a-0", ProbeResult::Failure)],
    );
    assert!(got.kill_pod && !got.create_sandbox);
    assert!(got.containers_to_kill.is_empty());
    // The grace period of the probe applies.
    assert_eq!(got.failed_probes, [(id("a-0"), KillReason::LivenessProbe)]);
    let mut p = with_sidecars("Never");
    p.spec.as_mut().unwrap().ephemeral_containers =
        Some(vec![serde_json::from_value(json!({"name": "e", "image": "i"})).unwrap()]);
    let runtime = RuntimeBuilder::ready().running("s0").exited("i1", 0).running("s2").exited("a", 0);
    let got = compute(&p, runtime, &[(ProbeType::Startup, "s0-0", ProbeResult::Success)]);
    assert!(got.kill_pod);
    assert!(got.ephemeral_containers_to_start.is_empty() && got.init_containers_to_start.is_empty());
}

#[test]
fn ephemeral_containers_start_once_and_do_not_wait_for_init() {
    let mut p = with_init("Always");
    p.spec.as_mut().unwrap().ephemeral_containers =
        Some(["e0", "e1"].map(|n| serde_json::from_value(json!({"name": n, "image": "i"})).unwrap()).into());
    let got = compute(&p, RuntimeBuilder::ready().running("i0").exited("e0", 1), &[]);
    assert_eq!(got.ephemeral_containers_to_start, [1]);
    assert_eq!(starts(&got), (vec![], vec![]));
}

#[test]
fn plain_init_containers_run_one_after_the_other() {
    for (name, runtime, want) in [
        ("none yet", RuntimeBuilder::ready(), (vec![0], vec![])),
        ("first created", RuntimeBuilder::ready().created("i0"), (vec![0], vec![])),
        ("first runs", RuntimeBuilder::ready().running("i0"), (vec![], vec![])),
        ("first done", RuntimeBuilder::ready().exited("i0", 0), (vec![1], vec![])),
        ("second runs", RuntimeBuilder::ready().exited("i0", 0).running("i1"), (vec![], vec![])),
        ("second done", RuntimeBuilder::ready().exited("i0", 0).exited("i1", 0), (vec![], vec![0])),
        ("first is gone, second done", RuntimeBuilder::ready().exited("i1", 0), (vec![], vec![0])),
        ("both gone, regular runs", RuntimeBuilder::ready().running("a"), (vec![], vec![])),
        ("both gone, regular created", RuntimeBuilder::ready().created("a"), (vec![], vec![0])),
        ("both gone, regular ended", RuntimeBuilder::ready().exited("a", 1), (vec![0], vec![])),
    ] {
        let got = compute(&with_init("Always"), runtime, &[]);
        assert!(!got.kill_pod, "{name}");
        assert_eq!(starts(&got), want, "{name}");
    }
}

#[test]
fn a_failed_init_container_follows_the_restart_policy() {
    let oom = |r: RuntimeBuilder| r.edit(|c| c.reason = "OOMKilled".to_owned());
    for (name, policy, runtime, kill_pod, start, kill) in [
        ("Always", "Always", RuntimeBuilder::ready().exited("i0", 1), false, vec![0], false),
        ("OnFailure", "OnFailure", RuntimeBuilder::ready().exited("i0", 1), false, vec![0], false),
        ("Never", "Never", RuntimeBuilder::ready().exited("i0", 1), true, vec![], false),
        (
            "out of memory with code 0",
            "OnFailure",
            oom(RuntimeBuilder::ready().exited("i0", 0)),
            false,
            vec![0],
            false,
        ),
        ("the same under Never", "Never", oom(RuntimeBuilder::ready().exited("i0", 0)), true, vec![], false),
        ("unknown", "Always", RuntimeBuilder::ready().unknown("i0"), false, vec![0], true),
        ("unknown under Never", "Never", RuntimeBuilder::ready().unknown("i0"), true, vec![], false),
    ] {
        let got = compute(&with_init(policy), runtime, &[]);
        assert_eq!(
            (got.kill_pod, got.init_containers_to_start.clone(), !got.containers_to_kill.is_empty()),
            (kill_pod, start, kill),
            "{name}"
        );
    }
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
    let p = pod(
        "Never",
        json!([{"name": "i0", "image": "i", "restartPolicy": "Never", "restartPolicyRules": rules}]),
        json!([container("a")]),
    );
    assert_eq!(compute(&p, RuntimeBuilder::ready().exited("i0", 42), &[]).init_containers_to_start, [0]);
    assert!(compute(&p, RuntimeBuilder::ready().exited("i0", 1), &[]).kill_pod);
}

#[test]
fn init_containers_after_a_sidecar_wait_for_its_startup() {
    use ProbeResult::{Failure, Success, Unknown};
    use ProbeType::{Liveness, Startup};
    let s0 = || RuntimeBuilder::ready().running("s0");
    let startup_failed = ("s0-0", "Init container s0 failed startup probe", KillReason::StartupProbe);
    let liveness_failed = ("s0-0", "Init container s0 failed liveness probe", KillReason::LivenessProbe);
    let changed = ("s0-0", "Init container s0 definition changed", KillReason::DefinitionChanged);
    for (name, runtime, probes, start, kill) in [
        ("not started", RuntimeBuilder::ready(), vec![], vec![0], None),
        ("no result", s0(), vec![], vec![], None),
        ("unknown", s0(), vec![(Startup, "s0-0", Unknown)], vec![], None),
        ("failed", s0(), vec![(Startup, "s0-0", Failure)], vec![0], Some(startup_failed)),
        ("started", s0(), vec![(Startup, "s0-0", Success)], vec![1], None),
        ("started, next done", s0().exited("i1", 0), vec![(Startup, "s0-0", Success)], vec![2], None),
        ("started, next failed", s0().exited("i1", 1), vec![(Startup, "s0-0", Success)], vec![1], None),
        ("liveness has no result", s0(), vec![(Startup, "s0-0", Success)], vec![1], None),
        (
            "liveness failed",
            s0(),
            vec![(Startup, "s0-0", Success), (Liveness, "s0-0", Failure)],
            vec![0, 1],
            Some(liveness_failed),
        ),
        (
            "definition changed",
            s0().edit(|c| c.annotations.clear()),
            vec![(Startup, "s0-0", Success)],
            vec![0, 1],
            Some(changed),
        ),
        ("ended", RuntimeBuilder::ready().exited("s0", 0), vec![], vec![0], None),
        ("created", RuntimeBuilder::ready().created("s0"), vec![], vec![0], None),
        (
            "ended while the next runs",
            RuntimeBuilder::ready().exited("s0", 0).running("i1"),
            vec![],
            vec![0],
            None,
        ),
        ("gone while the next runs", RuntimeBuilder::ready().running("i1"), vec![], vec![0], None),
    ] {
        let got = compute(&with_sidecars("OnFailure"), runtime, &probes);
        assert_eq!(starts(&got), (start, vec![]), "{name}");
        assert_eq!(kills(&got), kill.into_iter().collect::<Vec<_>>(), "{name}");
    }
    let got = compute(&with_sidecars("Never"), RuntimeBuilder::ready().unknown("s0"), &[]);
    assert_eq!(starts(&got), (vec![0], vec![]));
    assert_eq!(
        kills(&got),
        [(
            "s0-0",
            "Init container is in \"unknown\" state, try killing it before restart",
            KillReason::UnknownState
        )]
    );
}

#[test]
fn regular_containers_wait_for_the_last_sidecar_and_sidecars_are_kept_up_beside_them() {
    let started = [(ProbeType::Startup, "s0-0", ProbeResult::Success)];
    let all = || RuntimeBuilder::ready().running("s0").exited("i1", 0).running("s2");
    assert_eq!(starts(&compute(&with_sidecars("Never"), all(), &started)), (vec![], vec![0]));
    // Regular containers start without a startup result of the first sidecar: only the last one delays them.
    assert_eq!(starts(&compute(&with_sidecars("Never"), all(), &[])), (vec![], vec![0]));
    let runs = RuntimeBuilder::ready().exited("s0", 1).exited("i1", 0).exited("s2", 0).running("a");
    assert_eq!(starts(&compute(&with_sidecars("Never"), runs, &[])), (vec![0, 2], vec![]));
    let gone = RuntimeBuilder::ready().running("a");
    assert_eq!(starts(&compute(&with_sidecars("Never"), gone, &[])), (vec![0, 2], vec![]));
}

#[test]
fn older_dead_init_instances_are_pruned() {
    let runtime = RuntimeBuilder::ready()
        .exited("i0", 1)
        .unknown("i0")
        .exited("i0", 0)
        .running("i1")
        .exited("a", 1)
        .exited("a", 1);
    assert_eq!(compute(&with_init("Always"), runtime, &[]).prune, [id("i0-1"), id("i0-0")]);
}

#[test]
fn a_restart_of_all_resets_every_instance_with_the_source_last() {
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let p = pod(
        "Always",
        json!([container("i0"), {"name": "i1", "image": "i", "restartPolicy": "Always", "restartPolicyRules": rules}]),
        json!([container("a"), {"name": "b", "image": "i", "restartPolicy": "Never", "restartPolicyRules": rules}]),
    );
    let runtime = RuntimeBuilder::ready()
        .exited("i0", 0)
        .running("i1")
        .exited("a", 1)
        .running("a")
        .exited("b", 42)
        .build();
    let got = compute_pod_actions(&ActionInput {
        pod: &p,
        runtime: &runtime,
        probes: &ProbeResults::default(),
        actuated: None,
        restart_all: true,
    });
    let reset: Vec<_> = got.reset.iter().map(|r| (r.id.as_str(), r.kill)).collect();
    assert_eq!(reset, [("a-1", true), ("a-0", false), ("i0-0", false), ("i1-0", true), ("b-0", false)]);
    assert_eq!(
        got,
        PodActions { sandbox_id: got.sandbox_id.clone(), reset: got.reset.clone(), ..PodActions::default() }
    );
}

#[derive(Debug, Clone)]
struct Case {
    pod: Pod,
    runtime: PodRuntime,
    probes: ProbeResults,
    restart_all: bool,
}

fn any_state() -> impl Strategy<Value = (ContainerState, i32)> {
    prop_oneof![
        Just((ContainerState::Created, 0)),
        Just((ContainerState::Running, 0)),
        Just((ContainerState::Unknown, 0)),
        (0..3).prop_map(|code| (ContainerState::Exited, code)),
    ]
}

prop_compose! {
    fn any_case()(
        policy in prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        init in prop::collection::vec((any::<bool>(), any::<bool>()), 0..4),
        regular in 1..4_usize,
        ephemeral in 0..2_usize,
        deleted in prop::bool::weighted(0.1),
        sandboxes in prop::collection::vec(prop::bool::weighted(0.8), 0..3),
        instances in prop::collection::vec((0..8_usize, any_state(), prop::bool::weighted(0.1)), 0..10),
        results in prop::collection::vec((0..8_usize, 0..3_usize, 0..2_usize, 0..3_usize), 0..8),
        restart_all in prop::bool::weighted(0.1),
    ) -> Case {
        let names: Vec<String> = (0..init.len()).map(|i| format!("i{i}"))
            .chain((0..regular).map(|i| format!("c{i}")))
            .chain((0..ephemeral).map(|i| format!("e{i}"))).collect();
        let probe = json!({"tcpSocket": {"port": 1}});
        let inits: Vec<Value> = init.iter().enumerate().map(|(i, (sidecar, probed))| {
            let mut c = container(&format!("i{i}"));
            if *sidecar {
                c["restartPolicy"] = json!("Always");
                if *probed { c["startupProbe"] = probe.clone(); c["livenessProbe"] = probe.clone(); }
            }
            c
        }).collect();
        let mut pod = pod_json(json!({
            "restartPolicy": policy,
            "initContainers": inits,
            "containers": (0..regular).map(|i| container(&format!("c{i}"))).collect::<Vec<_>>(),
            "ephemeralContainers": (0..ephemeral).map(|i| container(&format!("e{i}"))).collect::<Vec<_>>(),
        }));
        if deleted { pod.metadata.deletion_timestamp = Some(time(0)); }
        let mut runtime = RuntimeBuilder::none();
        for ready in sandboxes {
            runtime = runtime.sandbox(if ready { SandboxState::Ready } else { SandboxState::NotReady });
        }
        for (which, (state, code), changed) in instances {
            runtime = runtime.add(&names[which % names.len()], state, code);
            if changed { runtime = runtime.edit(|c| c.annotations.clear()); }
        }
        let mut probes = ProbeResults::default();
        for (which, attempt, probe, result) in results {
            let result = [ProbeResult::Unknown, ProbeResult::Success, ProbeResult::Failure][result];
            let probe = [ProbeType::Startup, ProbeType::Liveness][probe];
            probes.set(probe, id(&format!("{}-{attempt}", names[which % names.len()])), result);
        }
        Case { pod, runtime: runtime.build(), probes, restart_all }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(quintlet_testkit::budget::cases(2000)))]

    #[test]
    fn actions_satisfy_the_invariants_of_the_worker(case in any_case()) {
        let Case { pod, runtime, probes, restart_all } = &case;
        let got = compute_pod_actions(&ActionInput { pod, runtime, probes, actuated: None, restart_all: *restart_all });
        let spec = pod::spec(pod);
        let inits = pod::init_containers(pod);

        // Every index is of the spec, and none comes twice.
        for (list, len) in [
            (&got.init_containers_to_start, inits.len()),
            (&got.containers_to_start, spec.containers.len()),
            (&got.ephemeral_containers_to_start, spec.ephemeral_containers.as_ref().map_or(0, Vec::len)),
        ] {
            prop_assert!(list.is_sorted_by(|a, b| a < b), "{:?}", list);
            prop_assert!(list.iter().all(|i| *i < len));
        }

        // A running container is started only if it, or the whole pod, is killed first.
        let started = got.init_containers_to_start.iter().map(|i| &inits[*i].name)
            .chain(got.containers_to_start.iter().map(|i| &spec.containers[*i].name));
        for name in started {
            if let Some(c) = runtime.newest(name).filter(|c| c.state == ContainerState::Running) {
                let killed = got.kill_pod || got.containers_to_kill.iter().any(|k| k.id == c.id);
                prop_assert!(killed, "{name} runs");
            }
        }

        // One plain init container at a time, and none beside a running one of the same sandbox.
        let plain = |i: &usize| !pod::is_sidecar(&inits[*i]);
        prop_assert!(got.init_containers_to_start.iter().filter(|i| plain(i)).count() <= 1);
        if !got.kill_pod && got.init_containers_to_start.iter().any(plain) {
            let sandbox = got.sandbox_id.clone().unwrap();
            let other = inits.iter().filter(|c| !pod::is_sidecar(c)).filter_map(|c| runtime.newest(&c.name))
                .filter(|c| c.sandbox_id == sandbox && c.state == ContainerState::Running)
                .filter(|c| inits.iter().position(|i| i.name == c.name) > got.init_containers_to_start.iter().copied().find(|i| plain(i)))
                .count();
            prop_assert_eq!(other, 0);
        }
        // Plain init containers and regular ones never start together.
        prop_assert!(got.containers_to_start.is_empty() || !got.init_containers_to_start.iter().any(plain));

        if got.kill_pod {
            prop_assert!(got.containers_to_kill.is_empty() && got.ephemeral_containers_to_start.is_empty());
            if !got.create_sandbox {
                prop_assert!(got.containers_to_start.is_empty() && got.init_containers_to_start.is_empty());
            }
        } else {
            prop_assert!(!got.create_sandbox);
        }
        if got.create_sandbox {
            prop_assert!(!got.containers_to_start.is_empty() || !got.init_containers_to_start.is_empty());
            prop_assert!(runtime.sandboxes.iter().all(|s| s.attempt < got.attempt || got.attempt == 0));
        }
        for k in &got.containers_to_kill {
            let c = runtime.containers.iter().find(|c| c.id == k.id).unwrap();
            prop_assert!(matches!(c.state, ContainerState::Running | ContainerState::Unknown));
        }
        for p in &got.prune {
            prop_assert!(!got.containers_to_kill.iter().any(|k| &k.id == p));
        }
        if *restart_all {
            prop_assert!(!got.kill_pod && got.containers_to_start.is_empty() && got.init_containers_to_start.is_empty() && got.containers_to_kill.is_empty());
            prop_assert!(got.reset.iter().all(|r| runtime.containers.iter().any(|c| c.id == r.id)));
        }
        if pod.metadata.deletion_timestamp.is_some() && !got.create_sandbox {
            prop_assert!(got.containers_to_start.is_empty() || got.containers_to_kill.iter().any(|k| k.reason != KillReason::UnknownState));
        }
    }
}
