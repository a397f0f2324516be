//! Runs the decisions against a model of a runtime with random faults: pods always settle, and no invariant
//! breaks on the way.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use proptest::prelude::*;
use quintlet_model::hash::container_hash;
use quintlet_model::ids::SandboxId;
use quintlet_model::labels::{CONTAINER_HASH, RESTART_COUNT};
use quintlet_model::pod;
use quintlet_model::probe::{ProbeResult, ProbeType};
use quintlet_model::runtime::{Container, ContainerState, PodRuntime, SandboxState};
use quintlet_testkit::pods::{RuntimeBuilder, at, id, pod_json};
use serde_json::{Value, json};

use super::actions::{ActionInput, PodActions, compute_pod_actions};
use super::backoff::{
    BackoffDecision, BackoffDelays, CrashLoopBackoffs, crash_loop_key, finished_ago, last_exit,
};
use super::grace::termination_plan;
use super::probes::ProbeResults;
use super::status::{NodeFacts, StatusInput, generate};
use super::sync::next_attempt;
use super::waiting::{StartBackoffs, from_status};

/// A random event between two syncs.
#[derive(Debug, Clone)]
enum Event {
    Exit(usize, i32),
    SandboxDies,
    Lost(usize),
    NewImage(usize),
    LivenessFails(usize),
    Forgotten(usize),
    LongTime,
}

struct Sim {
    pod: Pod,
    names: Vec<String>,
    runtime: PodRuntime,
    probes: ProbeResults,
    crash_loop: CrashLoopBackoffs,
    status: Option<PodStatus>,
    clock: i64,
    ids: u32,
}

impl Sim {
    fn new(pod: Pod) -> Self {
        let names = pod::init_containers(&pod)
            .iter()
            .chain(&pod::spec(&pod).containers)
            .map(|c| c.name.clone())
            .collect();
        Self {
            pod,
            names,
            runtime: RuntimeBuilder::none().build(),
            probes: ProbeResults::default(),
            crash_loop: CrashLoopBackoffs::default(),
            status: None,
            clock: 0,
            ids: 0,
        }
    }

    fn spec_of(&self, name: &str) -> &k8s_openapi::api::core::v1::Container {
        pod::init_containers(&self.pod)
            .iter()
            .chain(&pod::spec(&self.pod).containers)
            .find(|c| c.name == name)
            .unwrap()
    }

    fn start(&mut self, name: &str) {
        self.ids += 1;
        let attempt = next_attempt(&self.runtime, name, []);
        let spec = self.spec_of(name);
        let (image, probed) = (spec.image.clone().unwrap(), spec.startup_probe.is_some());
        let mut c: Container = RuntimeBuilder::ready().running(name).build().containers.remove(0);
        c.id = id(&format!("{name}-{}", self.ids));
        c.sandbox_id = self.runtime.sandboxes[0].id.clone();
        c.attempt = attempt;
        c.annotations = BTreeMap::from([
            (RESTART_COUNT.to_owned(), attempt.to_string()),
            (CONTAINER_HASH.to_owned(), container_hash(name, &image)),
        ]);
        c.created_unix_ns = i64::try_from(at(self.clock).as_nanosecond()).unwrap();
        c.started_unix_ns = c.created_unix_ns;
        if probed {
            self.probes.set(ProbeType::Startup, c.id.clone(), ProbeResult::Success);
        }
        self.runtime.containers.push(c);
        self.runtime.sort();
    }

    fn end(&mut self, which: impl Fn(&Container) -> bool, code: i32) {
        let now = i64::try_from(at(self.clock).as_nanosecond()).unwrap();
        for c in self.runtime.containers.iter_mut().filter(|c| which(c)) {
            if matches!(c.state, ContainerState::Running | ContainerState::Unknown) {
                c.state = ContainerState::Exited;
                c.exit_code = code;
                c.finished_unix_ns = now;
            }
        }
    }

    fn happen(&mut self, event: &Event) {
        let name = |i: &usize| self.names[i % self.names.len()].clone();
        match event {
            Event::Exit(i, code) => {
                let name = name(i);
                self.end(|c| c.name == name && c.state == ContainerState::Running, *code);
            }
            Event::SandboxDies => {
                self.runtime.sandboxes.iter_mut().for_each(|s| s.state = SandboxState::NotReady);
                self.end(|_| true, 137);
            }
            Event::Lost(i) => {
                let name = name(i);
                if let Some(c) = self
                    .runtime
                    .containers
                    .iter_mut()
                    .find(|c| c.name == name && c.state == ContainerState::Running)
                {
                    c.state = ContainerState::Unknown;
                }
            }
            Event::NewImage(i) => {
                let name = name(i);
                let image = Some(format!("i{}", self.clock));
                let spec = self.pod.spec.as_mut().unwrap();
                let all = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
                all.filter(|c| c.name == name).for_each(|c| c.image.clone_from(&image));
            }
            Event::LivenessFails(i) => {
                if let Some(c) = self.runtime.newest(&name(i)) {
                    self.probes.set(ProbeType::Liveness, c.id.clone(), ProbeResult::Failure);
                }
            }
            Event::Forgotten(i) => {
                let name = name(i);
                // The newest record of a container that must not run again is the only evidence of its exit:
                // GC keeps it.
                let kept = Some(pod::restart_policy(&self.pod))
                    .filter(|p| *p != "Always")
                    .and_then(|_| self.runtime.newest(&name).map(|c| c.id.clone()));
                self.runtime.containers.retain(|c| {
                    c.name != name || c.state == ContainerState::Running || Some(&c.id) == kept.as_ref()
                });
            }
            Event::LongTime => self.clock += 3600,
        }
    }

    /// Runs one sync; `None` once the pod has terminated.
    fn pass(&mut self) -> Option<PodActions> {
        self.clock += 1;
        let now = at(self.clock);
        let status = generate(&StatusInput {
            pod: &self.pod,
            old: self.status.as_ref(),
            runtime: &self.runtime,
            probes: &self.probes,
            waiting: &BTreeMap::new(),
            termination_messages: &HashMap::new(),
            resize: &[],
            actuated: None,
            node: &NodeFacts { runtime_name: "containerd".into(), ..NodeFacts::default() },
            is_terminal: false,
            now,
            unstepped: now,
        });
        self.status = Some(status.clone());
        let _ = from_status(&self.pod, &status, &StartBackoffs::new(), now);
        if pod::is_terminal_phase(status.phase.as_deref()) {
            return None;
        }
        let actions = compute_pod_actions(&ActionInput {
            pod: &self.pod,
            runtime: &self.runtime,
            probes: &self.probes,
            actuated: None,
            restart_all: false,
        });
        if actions.kill_pod {
            assert!(
                termination_plan(Some(&self.pod), &self.runtime).iter().all(|s| !s.after.contains(&s.name))
            );
            self.end(|_| true, 137);
            self.runtime.sandboxes.iter_mut().for_each(|s| s.state = SandboxState::NotReady);
        }
        for kill in &actions.containers_to_kill {
            self.end(|c| c.id == kill.id, 137);
        }
        self.runtime.containers.retain(|c| !actions.prune.contains(&c.id));
        if actions.create_sandbox {
            let mut s = RuntimeBuilder::ready().build().sandboxes.remove(0);
            s.attempt = actions.attempt;
            s.id = SandboxId::parse(&format!("s{}", self.clock)).unwrap();
            self.runtime.sandboxes.push(s);
            self.runtime.sort();
        }
        let spec = pod::spec(&self.pod).clone();
        let inits = spec.init_containers.unwrap_or_default();
        let starts: Vec<_> = actions
            .init_containers_to_start
            .iter()
            .map(|i| inits[*i].clone())
            .chain(actions.containers_to_start.iter().map(|i| spec.containers[*i].clone()))
            .collect();
        for c in starts {
            let boot = Duration::from_secs(u64::try_from(self.clock).unwrap() + 10_000);
            if let Some(ended) = last_exit(&self.runtime, &c.name) {
                let ago = finished_ago(ended, now);
                let key = crash_loop_key(&self.runtime.pod, &c);
                if self.crash_loop.decide(&key, ago, boot) != BackoffDecision::Start {
                    continue;
                }
                self.crash_loop.begin_restart(&key, &ended.id, ago, boot, BackoffDelays::default());
                self.crash_loop.end_restart(&key);
            }
            self.start(&c.name);
        }
        self.check();
        Some(actions)
    }

    fn check(&self) {
        for name in &self.names {
            let running = self.runtime.instances(name).filter(|c| c.state == ContainerState::Running).count();
            assert!(running <= 1, "{running} instances of {name} run");
            let attempts: Vec<_> = self.runtime.instances(name).map(|c| c.attempt).collect();
            assert!(attempts.is_sorted_by(|a, b| a > b), "attempts of {name}: {attempts:?}");
        }
        let plain = pod::init_containers(&self.pod).iter().filter(|c| !pod::is_sidecar(c));
        let running =
            |name: &str| self.runtime.newest(name).is_some_and(|c| c.state == ContainerState::Running);
        assert!(plain.filter(|c| running(&c.name)).count() <= 1, "two plain init containers run");
        let ready = self.runtime.sandboxes.iter().filter(|s| s.state == SandboxState::Ready).count();
        assert!(ready <= 1, "{ready} sandboxes are ready");
    }

    /// Plain init containers succeed, other containers keep running, and probes succeed.
    fn calm(&mut self) {
        let plain: Vec<String> = pod::init_containers(&self.pod)
            .iter()
            .filter(|c| !pod::is_sidecar(c))
            .map(|c| c.name.clone())
            .collect();
        self.end(|c| plain.contains(&c.name) && c.state == ContainerState::Running, 0);
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..6_usize, 0..3).prop_map(|(i, code)| Event::Exit(i, code)),
        1 => Just(Event::SandboxDies),
        1 => (0..6_usize).prop_map(Event::Lost),
        1 => (0..6_usize).prop_map(Event::NewImage),
        1 => (0..6_usize).prop_map(Event::LivenessFails),
        1 => (0..6_usize).prop_map(Event::Forgotten),
        1 => Just(Event::LongTime),
    ]
}

fn any_pod() -> impl Strategy<Value = Pod> {
    (
        prop_oneof![Just("Always"), Just("OnFailure"), Just("Never")],
        prop::collection::vec((any::<bool>(), any::<bool>()), 0..4),
        1..3_usize,
    )
        .prop_map(|(policy, init, regular)| {
            let probe = json!({"tcpSocket": {"port": 1}});
            let inits: Vec<Value> = init
                .iter()
                .enumerate()
                .map(|(i, (sidecar, probed))| {
                    let mut c = json!({"name": format!("i{i}"), "image": "i"});
                    if *sidecar {
                        c["restartPolicy"] = json!("Always");
                        c["livenessProbe"] = probe.clone();
                        if *probed {
                            c["startupProbe"] = probe.clone();
                        }
                    }
                    c
                })
                .collect();
            let regular: Vec<Value> =
                (0..regular).map(|i| json!({"name": format!("c{i}"), "image": "i"})).collect();
            pod_json(json!({"restartPolicy": policy, "initContainers": inits, "containers": regular}))
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(quintlet_testkit::budget::cases(1000)))]

    #[test]
    fn a_pod_settles_after_any_history(
        pod in any_pod(),
        events in prop::collection::vec((any_event(), 0..3_usize), 0..25),
    ) {
        let policy = pod::restart_policy(&pod).to_owned();
        let mut sim = Sim::new(pod);
        let mut over = sim.pass().is_none();
        for (event, passes) in &events {
            sim.happen(event);
            for _ in 0..*passes {
                over |= sim.pass().is_none();
            }
        }
        // From here on nothing fails. A back-off takes five minutes at most.
        let mut idle = 0;
        let mut left_for_dead = false;
        for _ in 0..2000 {
            if over || idle > 3 {
                break;
            }
            sim.calm();
            let before = sim.runtime.clone();
            match sim.pass() {
                None => over = true,
                // As in the kubelet, a pod with restartPolicy Never that loses its sandbox before its regular
                // containers ran is not started again and stays Pending.
                Some(actions) if actions.kill_pod && actions.is_idle(&before) => {
                    left_for_dead = true;
                    idle += 1;
                }
                Some(actions) if actions.is_idle(&before) => idle += 1,
                Some(_) => idle = 0,
            }
        }
        let status = sim.status.clone().unwrap();
        if over {
            prop_assert!(policy != "Always", "a pod of policy Always is never over");
        } else {
            prop_assert!(idle > 3, "it never settles: {:?}", sim.pass());
            prop_assert!(!left_for_dead || policy == "Never");
            prop_assert!(left_for_dead || status.phase.as_deref() == Some("Running"), "{:?}", status.phase);
            if policy == "Always" {
                let ready = status.conditions.iter().flatten().find(|c| c.type_ == "Ready").unwrap();
                prop_assert_eq!(&ready.status, "True", "{:?}", ready.message);
            }
        }
    }
}
