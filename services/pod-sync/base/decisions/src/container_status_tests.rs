use quintlet_testkit::pods::{RuntimeBuilder, at, id, pod_json, time};
use serde_json::{Value, json};

use super::*;

struct World {
    pod: Pod,
    runtime: PodRuntime,
    probes: ProbeResults,
    waiting: BTreeMap<String, WaitingReason>,
    messages: HashMap<ContainerId, String>,
    restarting_all: bool,
    stop_signals: bool,
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
            restarting_all: false,
            stop_signals: false,
            actuated: None,
        }
    }

    fn context(&self) -> Context<'_> {
        Context {
            pod: &self.pod,
            runtime: &self.runtime,
            probes: &self.probes,
            waiting: &self.waiting,
            termination_messages: &self.messages,
            runtime_name: "containerd",
            recursive_read_only: false,
            stop_signals: self.stop_signals,
            restarting_all: self.restarting_all,
            actuated: self.actuated.as_ref(),
        }
    }

    fn regular(&self, old: &[ContainerStatus]) -> ContainerStatus {
        convert(&self.context(), List::Regular, &pod::spec(&self.pod).containers, old).remove(0)
    }

    fn init(&self, old: &[ContainerStatus]) -> ContainerStatus {
        convert(&self.context(), List::Init, pod::init_containers(&self.pod), old).remove(0)
    }
}

fn one(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "c", "image": "i"}]})
}

fn inits() -> Value {
    json!({"containers": [{"name": "c", "image": "i"}], "initContainers": [{"name": "n", "image": "i"}]})
}

fn old(name: &str, restarts: i32, state: Value, last: Value) -> Vec<ContainerStatus> {
    let status = json!({"name": name, "image": "i", "imageID": "x", "ready": true, "restartCount": restarts,
        "containerID": format!("containerd://{name}-0"), "state": state, "lastState": last, "started": true});
    vec![serde_json::from_value(status).unwrap()]
}

fn running() -> Value {
    json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}})
}

fn ended(code: i32) -> Value {
    json!({"terminated": {"exitCode": code, "reason": "Error", "containerID": "containerd://c-0"}})
}

/// (state, detail) in short.
fn brief(s: Option<&ContainerState>) -> (String, String, i32) {
    match s {
        None => ("none".into(), String::new(), 0),
        Some(s) => {
            if let Some(w) = &s.waiting {
                ("waiting".into(), w.reason.clone().unwrap_or_default(), 0)
            } else if let Some(t) = &s.terminated {
                ("terminated".into(), t.reason.clone().unwrap_or_default(), t.exit_code)
            } else if s.running.is_some() {
                ("running".into(), String::new(), 0)
            } else {
                ("empty".into(), String::new(), 0)
            }
        }
    }
}

fn want(kind: &str, reason: &str, code: i32) -> (String, String, i32) {
    (kind.into(), reason.into(), code)
}

#[test]
fn a_container_the_runtime_does_not_have_is_waiting_by_default() {
    let w = World::new(one("Always"), RuntimeBuilder::ready());
    let s = w.regular(&[]);
    assert_eq!(brief(s.state.as_ref()), want("waiting", "ContainerCreating", 0));
    assert_eq!((s.ready, s.started, s.restart_count, s.image.as_str()), (false, Some(false), 0, "i"));
    assert_eq!(s.container_id, None);
    let w = World::new(inits(), RuntimeBuilder::ready());
    assert_eq!(brief(w.regular(&[]).state.as_ref()), want("waiting", "PodInitializing", 0));
    assert_eq!(brief(w.init(&[]).state.as_ref()), want("waiting", "PodInitializing", 0));
}

#[test]
fn the_status_of_a_lost_container_is_kept() {
    let w = World::new(one("Always"), RuntimeBuilder::ready());
    let s = w.regular(&old("c", 3, ended(2), json!(null)));
    assert_eq!(brief(s.state.as_ref()), want("terminated", "Error", 2));
    assert_eq!(s.restart_count, 3);
    let s = w.regular(&old("c", 3, json!({"waiting": {"reason": "CrashLoopBackOff"}}), ended(2)));
    assert_eq!(brief(s.state.as_ref()), want("waiting", "ContainerCreating", 0));
    assert_eq!(brief(s.last_state.as_ref()), want("terminated", "Error", 2));
    assert_eq!(s.restart_count, 3);
}

#[test]
fn a_container_that_ran_and_is_lost_counts_as_ended() {
    let mut w = World::new(one("Always"), RuntimeBuilder::ready());
    let s = w.regular(&old("c", 3, running(), json!(null)));
    assert_eq!(brief(s.state.as_ref()), want("waiting", "ContainerCreating", 0));
    assert_eq!(brief(s.last_state.as_ref()), want("terminated", "ContainerStatusUnknown", 137));
    assert_eq!(s.restart_count, 4);
    assert_eq!(
        s.last_state.unwrap().terminated.unwrap().message.unwrap(),
        "The container could not be located when the pod was deleted.  The container used to be Running"
    );
    // An end already known is not overwritten.
    let s = w.regular(&old("c", 3, running(), ended(2)));
    assert_eq!(brief(s.last_state.as_ref()), want("terminated", "Error", 2));
    assert_eq!(s.restart_count, 3);
    w.pod.metadata.deletion_timestamp = Some(time(0));
    assert_eq!(w.regular(&old("c", 3, running(), json!(null))).restart_count, 3);
}

#[test]
fn each_runtime_state_has_its_api_state() {
    for (name, runtime, was, state, restarts) in [
        ("running", RuntimeBuilder::ready().running("c"), json!({"waiting": {}}), want("running", "", 0), 1),
        ("created", RuntimeBuilder::ready().created("c"), json!({"waiting": {}}), want("waiting", "", 0), 1),
        (
            "exited",
            RuntimeBuilder::ready().exited("c", 7),
            json!({"waiting": {}}),
            want("terminated", "Error", 7),
            1,
        ),
        ("unknown", RuntimeBuilder::ready().unknown("c"), json!({"waiting": {}}), want("waiting", "", 0), 1),
        (
            "unknown that ran",
            RuntimeBuilder::ready().unknown("c"),
            running(),
            want("terminated", "ContainerStatusUnknown", 137),
            2,
        ),
    ] {
        let s = World::new(one("Always"), runtime).regular(&old("c", 1, was, json!(null)));
        assert_eq!(brief(s.state.as_ref()), state, "{name}");
        assert_eq!(s.restart_count, restarts, "{name}");
        assert_eq!(s.container_id.as_deref(), Some("containerd://c-0"), "{name}");
        assert_eq!((s.image.as_str(), s.image_id.as_str()), ("i", "i@sha256:1"), "{name}");
    }
    let w = World::new(one("Always"), RuntimeBuilder::ready().unknown("c"));
    let first = w.regular(&old("c", 1, running(), json!(null)));
    assert_eq!(w.regular(std::slice::from_ref(&first)), first, "an unknown one that ran stays ended");
    let s = World::new(one("Always"), RuntimeBuilder::ready().exited("c", 7)).regular(&[]);
    let t = s.state.unwrap().terminated.unwrap();
    assert_eq!(t.started_at.unwrap().0, at(2));
    assert_eq!(t.container_id.as_deref(), Some("containerd://c-0"));
}

#[test]
fn the_newest_instance_is_the_state_and_the_second_newest_the_last_state() {
    let runtime = RuntimeBuilder::ready().exited("c", 1).exited("c", 2).running("c");
    let s = World::new(one("Always"), runtime).regular(&[]);
    assert_eq!(brief(s.state.as_ref()), want("running", "", 0));
    assert_eq!(brief(s.last_state.as_ref()), want("terminated", "Error", 2));
    assert_eq!(s.restart_count, 2);
}

#[test]
fn the_previous_termination_becomes_the_last_state_when_its_instance_is_removed() {
    let runtime = || RuntimeBuilder::ready().running("c").edit(|c| c.id = id("c-9"));
    let s = World::new(one("Always"), runtime()).regular(&old("c", 0, ended(5), json!(null)));
    assert_eq!(brief(s.last_state.as_ref()), want("terminated", "Error", 5));
    // The annotation was lost with the records: the count still moves forward.
    assert_eq!(s.restart_count, 1);
}

#[test]
fn the_restart_count_never_goes_down_and_does_not_move_without_a_restart() {
    let w = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    assert_eq!(w.regular(&old("c", 5, running(), json!(null))).restart_count, 5);
    let again = w.regular(&[w.regular(&old("c", 5, running(), json!(null)))]);
    assert_eq!(again.restart_count, 5);
    let w = World::new(one("Always"), RuntimeBuilder::ready().exited("c", 1));
    let first = w.regular(&[]);
    assert_eq!(w.regular(std::slice::from_ref(&first)), first);
}

#[test]
fn a_container_with_a_failed_start_is_waiting_until_it_starts() {
    let reason = WaitingReason { reason: "CrashLoopBackOff".into(), message: "back-off 10s".into() };
    let with = |policy: &str, runtime: RuntimeBuilder| {
        let mut w = World::new(one(policy), runtime);
        w.waiting.insert("c".into(), reason.clone());
        w
    };
    let w = with("Always", RuntimeBuilder::ready().exited("c", 1));
    let s = w.regular(&[]);
    assert_eq!(brief(s.state.as_ref()), want("waiting", "CrashLoopBackOff", 0));
    assert_eq!(brief(s.last_state.as_ref()), want("terminated", "Error", 1));
    // And again from its own result.
    assert_eq!(w.regular(std::slice::from_ref(&s)), s);
    let s = with("Never", RuntimeBuilder::ready().exited("c", 1)).regular(&[]);
    assert_eq!(brief(s.state.as_ref()), want("terminated", "Error", 1));
    let s = with("Always", RuntimeBuilder::ready().running("c")).regular(&[]);
    assert_eq!(brief(s.state.as_ref()), want("running", "", 0));
    let s = with("Always", RuntimeBuilder::ready()).regular(&[]);
    assert_eq!(brief(s.state.as_ref()), want("waiting", "CrashLoopBackOff", 0));
    let mut w = with("Always", RuntimeBuilder::ready().exited("c", 1));
    w.pod.metadata.deletion_timestamp = Some(time(0));
    assert_eq!(brief(w.regular(&[]).state.as_ref()), want("terminated", "Error", 1));
}

#[test]
fn an_init_container_that_ended_well_is_not_waiting_for_anything() {
    let mut w = World::new(inits(), RuntimeBuilder::ready().exited("n", 0));
    w.waiting.insert("n".into(), WaitingReason { reason: "X".into(), message: String::new() });
    let s = w.init(&[]);
    assert_eq!(brief(s.state.as_ref()), want("terminated", "Completed", 0));
    assert!(s.ready);
}

#[test]
fn an_init_container_that_was_oom_killed_has_not_completed_whatever_its_exit_code() {
    let killed = || RuntimeBuilder::ready().exited("n", 0).edit(|c| c.reason = "OOMKilled".to_owned());
    let with = |policy: &str| {
        let mut spec = inits();
        spec["restartPolicy"] = json!(policy);
        let mut w = World::new(spec, killed());
        let reason = WaitingReason { reason: "CrashLoopBackOff".into(), message: "back-off 10s".into() };
        w.waiting.insert("n".into(), reason);
        w
    };
    for (policy, state) in [
        ("Always", want("waiting", "CrashLoopBackOff", 0)),
        ("OnFailure", want("waiting", "CrashLoopBackOff", 0)),
        ("Never", want("terminated", "OOMKilled", 0)),
    ] {
        let w = with(policy);
        let s = w.init(&[]);
        assert_eq!((brief(s.state.as_ref()), s.ready), (state, false), "{policy}");
        let initialized =
            crate::conditions::initialized(&w.pod, Some(&[s]), &[], crate::phase::PodPhase::Pending, false);
        assert_eq!(initialized.status, "False", "{policy}");
    }
    let mut w = with("Always");
    w.pod.metadata.deletion_timestamp = Some(time(0));
    assert_eq!(brief(w.init(&[]).state.as_ref()), want("terminated", "OOMKilled", 0), "it is not restarted");
}

#[test]
fn an_init_container_lost_after_the_pod_was_initialised_ended_well() {
    let w = World::new(inits(), RuntimeBuilder::ready().exited("c", 1));
    let s = w.init(&[]);
    assert_eq!(brief(s.state.as_ref()), want("terminated", "Completed", 0));
    assert!(s.ready);
    let sidecar = json!({"containers": [{"name": "c", "image": "i"}],
        "initContainers": [{"name": "n", "image": "i", "restartPolicy": "Always"}]});
    let w = World::new(sidecar, RuntimeBuilder::ready().exited("c", 1));
    assert_eq!(brief(w.init(&[]).state.as_ref()), want("waiting", "PodInitializing", 0));
}

#[test]
fn during_a_restart_of_all_containers_removed_ones_are_restarting() {
    let mut w = World::new(one("Always"), RuntimeBuilder::ready());
    w.restarting_all = true;
    for was in [running(), ended(42)] {
        let s = w.regular(&old("c", 1, was, json!(null)));
        assert_eq!(brief(s.state.as_ref()), want("waiting", "RestartingAllContainers", 0));
        assert_eq!(brief(s.last_state.as_ref()), want("terminated", "RestartingAllContainers", 137));
        assert_eq!(s.restart_count, 2);
    }
    let s = w.regular(&old("c", 2, json!({"waiting": {}}), ended(1)));
    assert_eq!(s.restart_count, 2);
}

#[test]
fn a_restart_count_saturates() {
    let mut w = World::new(one("Always"), RuntimeBuilder::ready());
    w.restarting_all = true;
    assert_eq!(w.regular(&old("c", i32::MAX, running(), json!(null))).restart_count, i32::MAX);
    let came_back = World::new(one("Always"), RuntimeBuilder::ready().running("c"));
    assert_eq!(came_back.regular(&old("c", i32::MAX, ended(1), json!(null))).restart_count, i32::MAX);
}

#[test]
fn the_termination_message_is_appended_to_the_runtimes() {
    let mut w =
        World::new(one("Never"), RuntimeBuilder::ready().exited("c", 1).edit(|c| c.message = "oom".into()));
    w.messages.insert(id("c-0"), "bye".into());
    let message = |w: &World| w.regular(&[]).state.unwrap().terminated.unwrap().message;
    assert_eq!(message(&w).as_deref(), Some("oom: bye"));
    w.runtime.containers[0].message.clear();
    assert_eq!(message(&w).as_deref(), Some("bye"));
}

#[test]
fn started_and_ready_follow_the_probes_of_the_instance() {
    use ProbeResult::{Failure, Success, Unknown};
    let spec = |probes: &[&str]| {
        let mut c = json!({"name": "c", "image": "i"});
        for p in probes {
            c[*p] = json!({"tcpSocket": {"port": 1}});
        }
        json!({"containers": [c]})
    };
    let (s, r) = ("startupProbe", "readinessProbe");
    let was = |started: bool, ready: bool| {
        let mut old = old("c", 0, running(), json!(null));
        old[0].started = Some(started);
        old[0].ready = ready;
        old
    };
    for (name, probes, startup, readiness, old, want) in [
        ("no probes", vec![], None, None, vec![], (true, true)),
        ("readiness without a result", vec![r], None, None, vec![], (true, false)),
        ("readiness failed", vec![r], None, Some(Failure), was(true, true), (true, false)),
        ("readiness passed", vec![r], None, Some(Success), was(true, false), (true, true)),
        ("startup without a result", vec![s], None, None, vec![], (false, false)),
        ("startup unknown", vec![s], Some(Unknown), None, was(true, true), (false, false)),
        ("startup failed", vec![s, r], Some(Failure), Some(Success), vec![], (false, false)),
        ("startup passed", vec![s], Some(Success), None, vec![], (true, true)),
        ("both passed", vec![s, r], Some(Success), Some(Success), vec![], (true, true)),
        (
            "nothing remembered, the same instance was ready",
            vec![s, r],
            None,
            None,
            was(true, true),
            (true, true),
        ),
        (
            "nothing remembered, the same instance was not ready",
            vec![s, r],
            None,
            None,
            was(true, false),
            (true, false),
        ),
        (
            "nothing remembered, the same instance had not started",
            vec![s],
            None,
            None,
            was(false, false),
            (false, false),
        ),
    ] {
        let mut w = World::new(spec(&probes), RuntimeBuilder::ready().running("c"));
        if let Some(result) = startup {
            w.probes.set(ProbeType::Startup, id("c-0"), result);
        }
        if let Some(result) = readiness {
            w.probes.set(ProbeType::Readiness, id("c-0"), result);
        }
        let got = w.regular(&old);
        assert_eq!((got.started.unwrap(), got.ready), want, "{name}");
    }
}

#[test]
fn a_new_instance_inherits_neither_started_nor_ready() {
    let c = json!({"name": "c", "image": "i", "startupProbe": {"tcpSocket": {"port": 1}}, "readinessProbe": {"tcpSocket": {"port": 1}}});
    let runtime = RuntimeBuilder::ready().exited("c", 137).running("c");
    let mut w = World::new(json!({"containers": [c]}), runtime);
    w.probes.set(ProbeType::Startup, id("c-0"), ProbeResult::Success);
    w.probes.set(ProbeType::Readiness, id("c-0"), ProbeResult::Success);
    let got = w.regular(&old("c", 0, running(), json!(null)));
    assert_eq!((got.started, got.ready), (Some(false), false));
}

#[test]
fn a_container_that_does_not_run_is_not_ready() {
    let mut w = World::new(one("Always"), RuntimeBuilder::ready().exited("c", 0));
    w.probes.set(ProbeType::Readiness, id("c-0"), ProbeResult::Success);
    let got = w.regular(&old("c", 0, running(), json!(null)));
    assert_eq!((got.started, got.ready), (Some(false), false));
}

#[test]
fn resources_are_the_allocated_ones_corrected_by_the_runtime() {
    let spec = json!({"containers": [{"name": "c", "image": "i", "resources":
        {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}}}]});
    let shown = |runtime: RuntimeBuilder| {
        let s = World::new(spec.clone(), runtime).regular(&[]);
        let r = s.resources.unwrap();
        let get = |l: &Option<BTreeMap<String, ApiQuantity>>, k: &str| l.as_ref().unwrap()[k].0.clone();
        assert_eq!(s.allocated_resources.unwrap()["cpu"].0, "100m");
        (get(&r.requests, "cpu"), get(&r.limits, "cpu"), get(&r.limits, "memory"))
    };
    let plain = ("100m".to_owned(), "1".to_owned(), "128Mi".to_owned());
    assert_eq!(shown(RuntimeBuilder::ready().exited("c", 1)), plain);
    assert_eq!(shown(RuntimeBuilder::ready().running("c")), plain);
    let actual = |shares, quota, memory| {
        shown(RuntimeBuilder::ready().running("c").edit(|c| {
            c.resources = Some(quintlet_model::runtime::Resources {
                cpu_shares: shares,
                cpu_quota: quota,
                cpu_period: 100_000,
                memory_limit_bytes: memory,
            });
        }))
    };
    assert_eq!(actual(102, 100_000, 128 << 20), plain);
    assert_eq!(actual(204, 50_000, 64 << 20), ("200m".into(), "500m".into(), "64Mi".into()));
}

#[test]
fn the_status_keeps_the_previous_memory_request_until_a_resize_is_actuated() {
    let spec =
        json!({"containers": [{"name": "c", "image": "i", "resources": {"requests": {"memory": "64Mi"}}}]});
    for (what, given, runtime, want) in [
        ("not made yet", Some("32Mi"), RuntimeBuilder::ready().running("c"), "32Mi"),
        ("made", Some("64Mi"), RuntimeBuilder::ready().running("c"), "64Mi"),
        ("nothing noted", None, RuntimeBuilder::ready().running("c"), "64Mi"),
        ("it does not run", Some("32Mi"), RuntimeBuilder::ready().exited("c", 1), "64Mi"),
    ] {
        let mut world = World::new(spec.clone(), runtime);
        world.actuated = given.map(|memory| {
            serde_json::from_value(json!({"ContainerResources": {"c": {"requests": {"memory": memory}}}}))
                .unwrap()
        });
        let status = world.regular(&[]);
        assert_eq!(status.resources.unwrap().requests.unwrap()["memory"].0, want, "{what}");
        assert_eq!(status.allocated_resources.unwrap()["memory"].0, "64Mi", "{what}");
    }
}

#[test]
fn the_status_of_a_container_without_resources_has_an_empty_object() {
    let shown = |runtime: RuntimeBuilder| {
        let status = World::new(one("Always"), runtime).regular(&[]);
        assert_eq!(status.allocated_resources, None);
        status.resources
    };
    assert_eq!(shown(RuntimeBuilder::ready()), None);
    for runtime in [RuntimeBuilder::ready().running("c"), RuntimeBuilder::ready().exited("c", 1)] {
        assert_eq!(shown(runtime), Some(ResourceRequirements::default()));
    }
}

#[test]
fn a_container_that_ended_without_having_run_started_at_the_epoch() {
    let runtime = RuntimeBuilder::ready().exited("c", 128).edit(|c| c.started_unix_ns = 0);
    let state = World::new(one("Never"), runtime).regular(&[]).state.unwrap().terminated.unwrap();
    assert_eq!(serde_json::to_value(state).unwrap()["startedAt"], json!("1970-01-01T00:00:00Z"));
}

#[test]
fn volume_mounts_are_listed_and_stay_as_first_shown() {
    let spec = json!({"containers": [{"name": "c", "image": "i", "volumeMounts": [
        {"name": "v", "mountPath": "/v", "readOnly": true, "recursiveReadOnly": "IfPossible"}, {"name": "w", "mountPath": "/w"}]}]});
    let w = World::new(spec, RuntimeBuilder::ready().running("c"));
    let mounts = w.regular(&[]).volume_mounts.unwrap();
    assert_eq!(mounts[0].recursive_read_only.as_deref(), Some("Disabled"));
    assert_eq!((mounts[0].read_only, mounts[1].read_only), (Some(true), None));
    assert_eq!(mounts[1].recursive_read_only, None);
}

#[test]
fn the_stop_signal_of_the_runtime_is_in_the_status_with_the_feature_gate() {
    let stop_signal = |signal: &str, gate| {
        let runtime = RuntimeBuilder::ready().running("c").edit(|c| c.stop_signal = signal.to_owned());
        World { stop_signals: gate, ..World::new(one("Always"), runtime) }.regular(&[]).stop_signal
    };
    assert_eq!(stop_signal("SIGUSR1", true).as_deref(), Some("SIGUSR1"));
    assert_eq!(stop_signal("", true), None, "a runtime that does not report it");
    assert_eq!(stop_signal("SIGUSR1", false), None);
}
