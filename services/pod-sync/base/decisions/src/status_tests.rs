use quintlet_model::probe::{ProbeResult, ProbeType};
use quintlet_model::runtime::SandboxState;
use quintlet_testkit::pods::{RuntimeBuilder, at, id, pod_json, status_json, time};
use serde_json::{Value, json};

use super::*;

struct World {
    pod: Pod,
    runtime: PodRuntime,
    probes: ProbeResults,
    waiting: BTreeMap<String, WaitingReason>,
    messages: HashMap<ContainerId, String>,
    node: NodeFacts,
    is_terminal: bool,
    actuated: Option<PodResources>,
}

impl World {
    fn new(spec: Value, runtime: RuntimeBuilder) -> Self {
        Self {
            pod: pod_json(spec),
            runtime: runtime.build(),
            probes: ProbeResults::default(),
            waiting: BTreeMap::new(),
            messages: HashMap::new(),
            node: NodeFacts {
                runtime_name: "containerd".into(),
                host_ips: vec!["192.168.0.2".parse().unwrap()],
                recursive_read_only: false,
                stop_signals: false,
            },
            is_terminal: false,
            actuated: None,
        }
    }

    fn at(&self, old: Option<&PodStatus>, now: i64) -> PodStatus {
        generate(&StatusInput {
            pod: &self.pod,
            old,
            runtime: &self.runtime,
            probes: &self.probes,
            waiting: &self.waiting,
            termination_messages: &self.messages,
            resize: &[],
            actuated: self.actuated.as_ref(),
            node: &self.node,
            is_terminal: self.is_terminal,
            now: at(now),
            unstepped: at(now),
        })
    }
}

#[test]
fn a_status_that_was_never_shown_takes_the_times_of_equal_conditions_of_the_mirror_pod() {
    let condition = |type_: &str, status: &str, at: i64| PodCondition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        last_transition_time: Some(time(at)),
        ..PodCondition::default()
    };
    let with = |start: Option<i64>, conditions: &[(&str, &str, i64)]| PodStatus {
        start_time: start.map(time),
        conditions: Some(conditions.iter().map(|(t, s, at)| condition(t, s, *at)).collect()),
        ..PodStatus::default()
    };
    let own =
        with(Some(50), &[("Initialized", "True", 50), ("Ready", "False", 50), ("PodScheduled", "True", 50)]);
    let shown = with(Some(1), &[("Initialized", "True", 2), ("Ready", "True", 3), ("Another", "True", 4)]);
    let want =
        with(Some(1), &[("Initialized", "True", 2), ("Ready", "False", 50), ("PodScheduled", "True", 50)]);
    assert_eq!(with_times_of(own.clone(), &shown), want);
    assert_eq!(with_times_of(own.clone(), &PodStatus::default()), own, "a mirror pod that was just created");
}

fn one(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "c", "image": "i"}]})
}

fn cond<'a>(s: &'a PodStatus, type_: &str) -> &'a PodCondition {
    s.conditions.iter().flatten().find(|c| c.type_ == type_).unwrap()
}

#[test]
fn the_status_of_a_running_pod_has_the_resources_of_its_cgroup_and_its_allocation() {
    let resources = |cpu: &str, memory: &str| json!({"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}});
    let parsed = |cpu: &str, memory: &str| serde_json::from_value(resources(cpu, memory)).unwrap();
    let shown = |own: Value, actuated: Option<PodResources>, runtime: RuntimeBuilder| {
        let container = json!({"name": "c", "image": "i", "resources": resources("100m", "64Mi")});
        let mut w = World::new(json!({"resources": own, "containers": [container]}), runtime);
        w.actuated = actuated;
        let s = w.at(None, 5);
        assert_eq!(s.allocated_resources, Some(qos::to_api(&qos::pod_requests(&w.pod))));
        serde_json::to_value(s.resources).unwrap()
    };
    let given = |pod_level, c| PodResources {
        pod_level,
        containers: [("c".to_owned(), c)].into(),
        ..PodResources::default()
    };
    let running = || RuntimeBuilder::ready().running("c");
    let has = |requests: [&str; 2], limits: [&str; 2]| {
        let list = |l: [&str; 2]| json!({"cpu": l[0], "memory": l[1]});
        json!({"requests": list(requests), "limits": list(limits)})
    };
    let none = || given(None, parsed("100m", "64Mi"));
    let whole = || resources("300m", "8Mi");
    for (what, own, actuated, runtime, want) in [
        ("nothing known", Value::Null, None, running(), has(["100m", "64Mi"], ["100m", "64Mi"])),
        ("as allocated", Value::Null, Some(none()), running(), has(["100m", "64Mi"], ["100m", "64Mi"])),
        (
            "a container on its way",
            Value::Null,
            Some(given(None, parsed("200m", "96Mi"))),
            running(),
            has(["200m", "64Mi"], ["200m", "96Mi"]),
        ),
        (
            "the pod on its way",
            whole(),
            Some(given(Some(parsed("400m", "96Mi")), parsed("100m", "64Mi"))),
            running(),
            has(["400m", "8Mi"], ["400m", "96Mi"]),
        ),
        ("no group yet", whole(), Some(none()), running(), has(["300m", "8Mi"], ["300m", "8Mi"])),
        (
            "not running",
            whole(),
            Some(given(Some(parsed("400m", "96Mi")), parsed("100m", "64Mi"))),
            RuntimeBuilder::none(),
            has(["300m", "8Mi"], ["300m", "8Mi"]),
        ),
    ] {
        assert_eq!(shown(own, actuated, runtime), want, "{what}");
    }
}

#[test]
fn a_new_pod_is_pending_with_a_start_time_and_all_conditions() {
    let s = World::new(one("Always"), RuntimeBuilder::none()).at(None, 5);
    assert_eq!(s.phase.as_deref(), Some("Pending"));
    assert_eq!(s.start_time, Some(time(5)));
    assert_eq!(s.qos_class.as_deref(), Some("BestEffort"));
    assert_eq!(s.host_ip.as_deref(), Some("192.168.0.2"));
    assert_eq!((s.pod_ip.clone(), s.observed_generation), (None, Some(1)));
    let list: Vec<_> = s.conditions.iter().flatten().map(|c| (c.type_.as_str(), c.status.as_str())).collect();
    assert_eq!(
        list,
        [
            ("PodReadyToStartContainers", "False"),
            ("Initialized", "True"),
            ("Ready", "False"),
            ("ContainersReady", "False"),
            ("PodScheduled", "True"),
        ]
    );
    assert!(s.conditions.iter().flatten().all(|c| c.last_transition_time == Some(time(5))));
    assert!(s.conditions.iter().flatten().all(|c| c.observed_generation == Some(1)));
}

#[test]
fn a_running_pod_is_ready_and_nothing_moves_while_nothing_changes() {
    let w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    let first = w.at(None, 5);
    assert_eq!(first.phase.as_deref(), Some("Running"));
    assert_eq!(cond(&first, "Ready").status, "True");
    assert_eq!(first.pod_ip.as_deref(), Some("10.0.0.5"));
    assert_eq!(w.at(Some(&first), 500), first);
}

#[test]
fn a_transition_time_moves_with_the_status_and_not_with_the_reason() {
    let w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    let first = w.at(None, 5);
    let w = World::new(one("Always"), RuntimeBuilder::ready().exited("c", 1));
    let second = w.at(Some(&first), 9);
    assert_eq!(cond(&second, "Ready").last_transition_time, Some(time(9)));
    assert_eq!(cond(&second, "Ready").reason.as_deref(), Some("ContainersNotReady"));
    assert_eq!(cond(&second, "PodScheduled").last_transition_time, Some(time(5)));
    let w = World::new(one("Never"), RuntimeBuilder::ready().exited("c", 1));
    let third = w.at(Some(&second), 12);
    assert_eq!(third.phase.as_deref(), Some("Failed"));
    assert_eq!(cond(&third, "Ready").reason.as_deref(), Some("PodFailed"));
    assert_eq!(cond(&third, "Ready").last_transition_time, Some(time(9)));
    assert_eq!(third.start_time, Some(time(5)));
}

#[test]
fn a_terminal_phase_is_never_taken_back() {
    let old = status_json(json!({"phase": "Failed", "reason": "Evicted", "message": "m"}));
    let w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    let s = w.at(Some(&old), 1);
    assert_eq!(
        (s.phase.as_deref(), s.reason.as_deref(), s.message.as_deref()),
        (Some("Failed"), Some("Evicted"), Some("m"))
    );
    let mut w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    w.pod.status = Some(status_json(json!({"phase": "Succeeded"})));
    assert_eq!(w.at(Some(&status_json(json!({"phase": "Running"}))), 1).phase.as_deref(), Some("Succeeded"));
    // A terminal phase in the API server is never replaced, not even by another terminal phase.
    assert_eq!(w.at(Some(&old), 1).phase.as_deref(), Some("Succeeded"));
}

#[test]
fn a_pod_past_its_deadline_fails() {
    let mut spec = one("Always");
    spec["activeDeadlineSeconds"] = json!(30);
    let w = World::new(spec, RuntimeBuilder::ready().running("c"));
    let first = w.at(None, 0);
    assert_eq!(w.at(Some(&first), 29).phase.as_deref(), Some("Running"));
    assert_eq!(until_active_deadline(&w.pod, &first, at(10)), Some(Duration::from_secs(20)));
    let late = w.at(Some(&first), 30);
    assert_eq!((late.phase.as_deref(), late.reason.as_deref()), (Some("Failed"), Some("DeadlineExceeded")));
    assert_eq!(until_active_deadline(&w.pod, &first, at(40)), Some(Duration::ZERO));
}

#[test]
fn foreign_conditions_of_the_api_are_kept_and_owned_ones_are_recomputed() {
    let mut w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    w.pod.status = Some(status_json(json!({"conditions": [
        {"type": "x/gate", "status": "True"}, {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}]})));
    let s = w.at(None, 3);
    assert_eq!(s.conditions.as_ref().unwrap()[0].type_, "x/gate");
    assert_eq!(s.conditions.as_ref().unwrap()[0].observed_generation, None);
    assert_eq!(cond(&s, "Ready").status, "True");
    assert_eq!(cond(&s, "Ready").last_transition_time, Some(time(3)));
}

#[test]
fn a_readiness_gate_holds_ready_back() {
    let mut spec = one("Always");
    spec["readinessGates"] = json!([{"conditionType": "x/gate"}]);
    let mut w = World::new(spec, RuntimeBuilder::ready().running("c"));
    let s = w.at(None, 1);
    assert_eq!(
        (cond(&s, "Ready").status.as_str(), cond(&s, "ContainersReady").status.as_str()),
        ("False", "True")
    );
    w.pod.status = Some(status_json(json!({"conditions": [{"type": "x/gate", "status": "True"}]})));
    assert_eq!(cond(&w.at(Some(&s), 2), "Ready").status, "True");
}

#[test]
fn a_pod_has_one_address_per_family_with_the_nodes_family_first() {
    let ips = |r: RuntimeBuilder, ips: &[&str]| {
        let ips = ips.iter().map(|i| i.parse().unwrap()).collect();
        r.edit_sandbox(|s| s.ips = ips)
    };
    let all = ["fd00::5", "10.0.0.5", "10.0.0.6"];
    let mut w = World::new(one("Always"), ips(RuntimeBuilder::ready(), &all));
    let got = |w: &World| w.at(None, 1).pod_ips.unwrap().into_iter().map(|p| p.ip).collect::<Vec<_>>();
    assert_eq!(got(&w), ["10.0.0.5", "fd00::5"]);
    w.node.host_ips = vec!["fd00::1".parse().unwrap()];
    assert_eq!(got(&w), ["fd00::5", "10.0.0.5"]);
}

#[test]
fn a_stopped_pod_keeps_its_address_and_a_host_network_pod_has_the_nodes() {
    let first = World::new(one("Never"), RuntimeBuilder::ready().running("c")).at(None, 1);
    let stopped = RuntimeBuilder::ready().exited("c", 0).edit_sandbox(|s| {
        s.state = SandboxState::NotReady;
        s.ips.clear();
    });
    let mut w = World::new(one("Never"), stopped);
    assert_eq!(w.at(Some(&first), 2).pod_ip.as_deref(), Some("10.0.0.5"));
    w.runtime = RuntimeBuilder::none().build();
    w.is_terminal = true;
    assert_eq!(w.at(Some(&first), 2).pod_ip.as_deref(), Some("10.0.0.5"));

    let mut spec = one("Always");
    spec["hostNetwork"] = json!(true);
    let host = RuntimeBuilder::ready().edit_sandbox(|s| {
        s.ips.clear();
        s.host_network = true;
    });
    let mut w = World::new(spec, host);
    let first = w.at(None, 1);
    assert_eq!(first.pod_ip.as_deref(), Some("192.168.0.2"));
    w.node.host_ips = vec!["192.168.0.9".parse().unwrap(), "fd00::1".parse().unwrap()];
    let ips: Vec<_> = w.at(Some(&first), 2).pod_ips.unwrap().into_iter().map(|p| p.ip).collect();
    assert_eq!(ips, ["192.168.0.2", "fd00::1"]);
}

#[test]
fn the_address_of_a_finished_pod_is_that_of_the_api_server_when_another_agent_made_it() {
    let stopped = |code| {
        RuntimeBuilder::ready().exited("c", code).edit_sandbox(|s| {
            s.state = SandboxState::NotReady;
            s.ips.clear();
        })
    };
    // The phase in the API server, the restart policy, the exit code, and whether the address stays.
    let cases =
        [("Succeeded", "Never", 0, true), ("Failed", "Never", 1, true), ("Running", "Never", 0, true)];
    for (phase, policy, code, stays) in cases.into_iter().chain([("Running", "Always", 0, false)]) {
        let mut w = World::new(one(policy), stopped(code));
        let status = json!({"phase": phase, "podIP": "10.0.0.5", "podIPs": [{"ip": "10.0.0.5"}]});
        w.pod.status = Some(serde_json::from_value(status).unwrap());
        let ip = w.at(None, 1).pod_ip;
        assert_eq!(ip.as_deref(), stays.then_some("10.0.0.5"), "{phase} {policy}");
    }
}

#[test]
fn a_deleted_pod_gets_its_phase_from_exit_codes_and_a_static_pod_keeps_its_phase() {
    let mut w = World::new(one("Always"), RuntimeBuilder::ready().exited("c", 0));
    w.is_terminal = true;
    assert_eq!(w.at(None, 1).phase.as_deref(), Some("Succeeded"));
    let mut w = World::new(one("Always"), RuntimeBuilder::ready().exited("c", 137));
    w.is_terminal = true;
    assert_eq!(w.at(None, 1).phase.as_deref(), Some("Failed"));
    w.pod.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    assert_eq!(w.at(None, 1).phase.as_deref(), Some("Running"));
}

#[test]
fn a_container_that_ended_for_good_does_not_come_back() {
    let ended = World::new(one("Never"), RuntimeBuilder::ready().exited("c", 1)).at(None, 1);
    let w = World::new(one("Never"), RuntimeBuilder::ready().running("c"));
    assert_eq!(w.at(Some(&ended), 2), ended);
    let failed = World::new(one("OnFailure"), RuntimeBuilder::ready().exited("c", 1)).at(None, 1);
    let w = World::new(one("OnFailure"), RuntimeBuilder::ready().exited("c", 1).running("c"));
    let s = w.at(Some(&failed), 2);
    assert!(s.container_statuses.unwrap()[0].state.as_ref().unwrap().running.is_some());
}

#[test]
fn times_lose_their_fractions_and_messages_share_the_room() {
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "b", "image": "i"}, {"name": "a", "image": "i"}]});
    let runtime =
        RuntimeBuilder::ready().exited("b", 1).exited("a", 1).edit(|c| c.message = "é".repeat(6000));
    let s = World::new(spec, runtime).at(None, 1);
    let list = s.container_statuses.unwrap();
    assert_eq!((list[0].name.as_str(), list[1].name.as_str()), ("a", "b"));
    let t = list[0].state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!(t.message.as_ref().unwrap().len(), 6144);
    assert_eq!(t.finished_at.as_ref().unwrap().0.subsec_nanosecond(), 0);
}

#[test]
fn the_last_status_has_no_health_of_volumes() {
    let health =
        k8s_openapi::api::core::v1::PodVolumeHealth { name: "data".to_owned(), ..Default::default() };
    let old = PodStatus { volume_health: Some(vec![health]), ..PodStatus::default() };
    assert_eq!(terminate(&Pod::default(), Some(&old), at(1)).volume_health, None);
}

#[test]
fn the_last_status_has_only_terminated_containers() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}], "initContainers": [{"name": "n", "image": "i"}, {"name": "m", "image": "i"}]});
    let pod = pod_json(spec);
    let status = |list: Value, init: Value| {
        let fill = |l: Value| {
            l.as_array()
                .unwrap()
                .iter()
                .map(|s| {
                    let mut all = json!({"image": "", "imageID": "", "ready": true, "restartCount": 0});
                    all.as_object_mut().unwrap().extend(s.as_object().unwrap().clone());
                    all
                })
                .collect::<Vec<_>>()
        };
        status_json(
            json!({"phase": "Running", "containerStatuses": fill(list), "initContainerStatuses": fill(init)}),
        )
    };
    let waits = json!({"waiting": {"reason": "PodInitializing"}});
    let runs = json!({"running": {}});
    let done = json!({"terminated": {"exitCode": 0}});
    let reason = |s: &ContainerStatus| {
        s.state.as_ref().unwrap().terminated.as_ref().map(|t| t.reason.clone().unwrap_or_default())
    };
    // Not initialized: neither the regular container nor the second init container ever ran.
    let old = status(
        json!([{"name": "c", "state": waits}]),
        json!([{"name": "n", "state": runs}, {"name": "m", "state": waits}]),
    );
    let mut p = pod.clone();
    p.status = Some(old.clone());
    let s = terminate(&p, Some(&old), at(1));
    assert_eq!(s.phase.as_deref(), Some("Failed"));
    assert_eq!(reason(&s.container_statuses.as_ref().unwrap()[0]), None);
    let init = s.init_container_statuses.as_ref().unwrap();
    assert_eq!(
        (reason(&init[0]).as_deref(), reason(&init[1]).as_deref()),
        (Some("ContainerStatusUnknown"), None)
    );
    // Not initialized: an init container that was OOMKilled has not completed.
    let killed = json!({"terminated": {"exitCode": 0, "reason": "OOMKilled"}});
    for m in
        [json!({"name": "m", "state": killed}), json!({"name": "m", "state": waits, "lastState": killed})]
    {
        let old = status(json!([{"name": "c", "state": waits}]), json!([{"name": "n", "state": done}, m]));
        p.status = Some(old.clone());
        let s = terminate(&p, Some(&old), at(1));
        assert_eq!(reason(&s.container_statuses.as_ref().unwrap()[0]), None, "{m}");
    }
    // Initialized: containers that are not terminated yet are set to terminated.
    let old = status(
        json!([{"name": "c", "state": runs}]),
        json!([{"name": "n", "state": done}, {"name": "m", "state": done}]),
    );
    p.status = Some(old.clone());
    let s = terminate(&p, Some(&old), at(1));
    let c = &s.container_statuses.as_ref().unwrap()[0];
    assert_eq!((reason(c).as_deref(), c.ready), (Some("ContainerStatusUnknown"), false));
    // A succeeded pod stays so; a static pod keeps its phase.
    let mut ok = old.clone();
    ok.phase = Some("Succeeded".into());
    assert_eq!(terminate(&p, Some(&ok), at(1)).phase.as_deref(), Some("Succeeded"));
    p.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    assert_eq!(terminate(&p, Some(&old), at(1)).phase.as_deref(), Some("Running"));
}

#[test]
fn a_kill_by_the_agent_sets_phase_reason_and_condition() {
    let w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    let s = w.at(None, 1);
    let why = |cause| KillOverride { cause, message: "low".into(), disruption: Some("low".into()) };
    let got = with_kill_override(&w.pod, s.clone(), &why(KillCause::Evicted), at(2));
    assert_eq!((got.phase.as_deref(), got.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    assert_eq!(cond(&got, "DisruptionTarget").reason.as_deref(), Some("TerminationByKubelet"));
    assert_eq!(cond(&got, "DisruptionTarget").last_transition_time, Some(time(2)));
    // The next status built on it keeps both.
    let next = w.at(Some(&got), 3);
    assert_eq!((next.phase.as_deref(), next.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    assert_eq!(cond(&next, "DisruptionTarget").status, "True");
    let mut done = s;
    done.phase = Some("Succeeded".into());
    let got = with_kill_override(&w.pod, done, &why(KillCause::NodeShutdown), at(2));
    assert_eq!((got.phase.as_deref(), got.reason.as_deref()), (Some("Succeeded"), Some("Terminated")));
}

#[test]
fn a_rejected_pod_has_reason_and_message_and_nothing_else() {
    let w = World::new(one("Always"), RuntimeBuilder::none());
    let s = rejected(&w.pod, "OutOfcpu", "no", at(1));
    assert_eq!((s.phase.as_deref(), s.reason.as_deref()), (Some("Failed"), Some("OutOfcpu")));
    assert_eq!(s.message.as_deref(), Some("Pod was rejected: no"));
    assert_eq!((s.conditions, s.container_statuses, s.start_time), (None, None, Some(time(1))));
}

#[test]
fn an_agent_restart_changes_no_status() {
    let probe = json!({"tcpSocket": {"port": 1}});
    let spec =
        json!({"containers": [{"name": "c", "image": "i", "startupProbe": probe, "readinessProbe": probe}]});
    let mut w = World::new(spec, RuntimeBuilder::ready().exited("c", 1).running("c"));
    w.probes.set(ProbeType::Startup, id("c-1"), ProbeResult::Success);
    w.probes.set(ProbeType::Readiness, id("c-1"), ProbeResult::Success);
    let before = w.at(None, 1);
    // Probe memory is lost, and only the API server has a previous status.
    w.probes = ProbeResults::default();
    w.pod.status = Some(before.clone());
    assert_eq!(w.at(None, 100), before);
}

#[test]
fn a_restart_of_all_containers_sets_and_clears_its_condition() {
    let spec = json!({"restartPolicy": "Never", "containers": [
        {"name": "c", "image": "i", "restartPolicy": "Never", "restartPolicyRules":
            [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]},
        {"name": "d", "image": "i"}]});
    let mut w = World::new(spec, RuntimeBuilder::ready().running("c").running("d"));
    w.pod.metadata.generation = Some(3);
    let s = w.at(None, 1);
    assert_eq!(cond(&s, "AllContainersRestarting").status, "False");
    assert_eq!(cond(&s, "Ready").observed_generation, Some(3));
    assert_eq!(cond(&s, "AllContainersRestarting").observed_generation, None, "as the kubelet");
    w.runtime = RuntimeBuilder::ready().exited("c", 42).running("d").build();
    let s = w.at(Some(&s), 2);
    assert_eq!(
        (cond(&s, "AllContainersRestarting").status.as_str(), s.phase.as_deref()),
        ("True", Some("Running"))
    );
    w.runtime = RuntimeBuilder::ready().build();
    let s = w.at(Some(&s), 3);
    assert_eq!(cond(&s, "AllContainersRestarting").status, "False");
    assert_eq!(s.phase.as_deref(), Some("Running"));
    assert!(s.container_statuses.iter().flatten().all(|c| c.restart_count == 1));
    let next = w.at(Some(&s), 4);
    assert!(next.container_statuses.iter().flatten().all(|c| c.restart_count == 1));
    assert_eq!(next.phase.as_deref(), Some("Running"));
}

mod over_time {
    use super::*;
    use proptest::prelude::*;
    use quintlet_model::runtime::ContainerState as State;

    /// A change of runtime state between two statuses.
    #[derive(Debug, Clone)]
    enum Step {
        Create(usize),
        Run(usize),
        Exit(usize, i32),
        Lose(usize),
        Forget(usize),
        LoseSandbox,
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..3_usize).prop_map(Step::Create),
            (0..3_usize).prop_map(Step::Run),
            (0..3_usize, 0..3).prop_map(|(c, code)| Step::Exit(c, code)),
            (0..3_usize).prop_map(Step::Lose),
            (0..3_usize).prop_map(Step::Forget),
            Just(Step::LoseSandbox),
        ]
    }

    fn apply(runtime: &mut PodRuntime, step: &Step, clock: &mut i64) {
        *clock += 1;
        let names = ["n", "c", "d"];
        let newest = |r: &PodRuntime, i: usize| r.containers.iter().position(|c| c.name == names[i]);
        match step {
            Step::Create(i) => {
                let attempt = runtime.newest(names[*i]).map_or(0, |c| c.attempt + 1);
                let mut c = RuntimeBuilder::ready().created(names[*i]).build().containers.remove(0);
                c.attempt = attempt;
                c.created_unix_ns = *clock;
                c.id = id(&format!("{}-{clock}", names[*i]));
                c.annotations.insert(quintlet_model::labels::RESTART_COUNT.to_owned(), attempt.to_string());
                runtime.containers.push(c);
                runtime.sort();
            }
            Step::Run(i) => {
                if let Some(at) =
                    newest(runtime, *i).filter(|at| runtime.containers[*at].state == State::Created)
                {
                    runtime.containers[at].state = State::Running;
                }
            }
            Step::Exit(i, code) => {
                if let Some(at) =
                    newest(runtime, *i).filter(|at| runtime.containers[*at].state == State::Running)
                {
                    runtime.containers[at].state = State::Exited;
                    runtime.containers[at].exit_code = *code;
                }
            }
            Step::Lose(i) => {
                if let Some(at) = newest(runtime, *i) {
                    runtime.containers[at].state = State::Unknown;
                }
            }
            Step::Forget(i) => runtime.containers.retain(|c| c.name != names[*i]),
            Step::LoseSandbox => runtime.sandboxes.clear(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(quintlet_testkit::budget::cases(500)))]

        #[test]
        fn a_status_never_regresses_and_changes_only_with_its_input(
            policy in prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
            steps in prop::collection::vec(any_step(), 1..20),
        ) {
            let spec = json!({"restartPolicy": policy, "initContainers": [{"name": "n", "image": "i"}],
                "containers": [{"name": "c", "image": "i"}, {"name": "d", "image": "i"}]});
            let mut w = World::new(spec, RuntimeBuilder::ready());
            let mut old = w.at(None, 0);
            let mut clock = 0;
            for (i, step) in steps.iter().enumerate() {
                apply(&mut w.runtime, step, &mut clock);
                let now = i64::try_from(i).unwrap() + 1;
                let next = w.at(Some(&old), now);
                prop_assert_eq!(&w.at(Some(&next), now + 100), &next, "settled at once");
                let counts = |s: &PodStatus| -> BTreeMap<String, i32> {
                    s.container_statuses.iter().flatten().chain(s.init_container_statuses.iter().flatten())
                        .map(|c| (c.name.clone(), c.restart_count)).collect()
                };
                let before = counts(&old);
                for (name, count) in counts(&next) {
                    prop_assert!(count >= before[&name], "{name}: {count} after {}", before[&name]);
                    prop_assert!(count <= before[&name] + i32::try_from(steps.len()).unwrap());
                }
                prop_assert_eq!(&next.start_time, &old.start_time);
                if matches!(old.phase.as_deref(), Some("Succeeded" | "Failed")) {
                    prop_assert_eq!(&next.phase, &old.phase);
                }
                let ready = cond(&next, "Ready").status == "True";
                prop_assert!(!ready || !matches!(next.phase.as_deref(), Some("Succeeded" | "Failed")));
                for c in next.conditions.iter().flatten() {
                    let same = old.conditions.iter().flatten().find(|o| o.type_ == c.type_ && o.status == c.status);
                    let want = same.map_or(Some(time(now)), |o| o.last_transition_time.clone());
                    prop_assert_eq!(&c.last_transition_time, &want);
                }
                old = next;
            }
        }
    }
}
