//! General statements about pods with exec probes and init containers, checked after every change.
//!
//! - A liveness probe runs only after the startup probe of the same instance passed.
//! - An instance becomes Ready in the API server at most as often as its readiness probe began to pass.
//! - A regular container runs in a sandbox only if each init container of its pod succeeded in the same
//!   sandbox.
//!
//! [`Rules::watch_mounts_and_calm`] adds a statement about volumes:
//!
//! - A path of the pod that a running container mounts exists.
//!
//! And statements about a node that is calm ([`Rules::set_calm`]):
//!
//! - A terminating pod whose readiness probe fails is not Ready.
//! - A terminating pod is gone eight seconds after its containers have ended.
//! - A pod that is Ready and whose object does not change has no new event.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_cri_api::v1::ContainerState;
use quintlet_kit::clock::Clock;
use quintlet_testapi::TestApi;
use quintlet_testkit::fake_runtime::{ExecReply, FakeRuntime};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::Sim;

/// Interval of the checks of mounts and of a calm node.
const SAMPLE: Duration = Duration::from_millis(250);
/// Limit of the time until a terminating pod whose readiness probe fails is not Ready: the probes of
/// [`probe`] run each second.
const UNREADY: Duration = Duration::from_secs(4);
/// Limit of the time until a terminating pod without a running container is gone.
const DELETED: Duration = Duration::from_secs(8);
/// Age of an unchanged pod from which on it is at rest, in seconds.
const AT_REST: i64 = 3;
/// Seconds in which the change of a pod becomes visible that is the reason of an event.
const SHOWN: i64 = 2;

/// Probes of one container instance.
#[derive(Debug, Default)]
struct InstanceProbes {
    has_started: bool,
    is_passing: bool,
    // How often the readiness probe passed after it had not.
    passing_runs: u32,
    is_shown_ready: bool,
    became_ready: u32,
}

#[derive(Debug, Default)]
struct RuleState {
    // By container ID.
    instances: HashMap<String, InstanceProbes>,
    // Kind of probe and name of the pod.
    failing: BTreeSet<(String, String)>,
    // Sandbox and name of each init container that succeeded.
    initialized: HashSet<(String, String)>,
    // By UID, while the node is calm.
    calm: Option<HashMap<String, CalmPod>>,
    violations: BTreeSet<String>,
}

/// A pod of a calm node.
#[derive(Debug, Default)]
struct CalmPod {
    // Since when it is terminating while its readiness probe fails in a running container.
    failing: Option<Instant>,
    // It has or had a container.
    had_container: bool,
    // Since when it is terminating and no container of it runs any more.
    ended: Option<Instant>,
    // Version of the object, and when it was read first while the pod was Ready and its probes passed.
    version: Option<(String, jiff::Timestamp)>,
}

/// Answers the probes of pods, and checks the statements until it is dropped.
#[derive(Debug)]
pub struct Rules {
    state: Arc<Mutex<RuleState>>,
    checks: Vec<JoinHandle<()>>,
}

/// Returns an exec probe that [`Rules`] answers, each second and with a threshold of one. A container with a
/// liveness probe needs a startup probe, too.
#[must_use]
pub fn probe(kind: &str, pod: &str) -> Value {
    json!({"exec": {"command": [kind, pod]}, "periodSeconds": 1, "failureThreshold": 1})
}

impl Rules {
    /// Starts the checks of a node. All probes pass.
    #[must_use]
    pub fn start(sim: &Sim) -> Self {
        let state: Arc<Mutex<RuleState>> = Arc::default();
        let answers = Arc::clone(&state);
        sim.runtime.on_exec(move |id, command| answers.lock().answer(id, command));
        let (of_api, of_runtime) = (Arc::clone(&state), Arc::clone(&state));
        let (api, pods) = (sim.api.clone(), sim.api.clone());
        let runtime = sim.runtime.clone();
        let statuses = async move {
            api.wait(|api| {
                of_api.lock().check_statuses(api);
                false
            })
            .await;
        };
        let sandboxes = async move {
            runtime
                .wait(|runtime| {
                    of_runtime.lock().check_initialized(runtime, &pods);
                    false
                })
                .await;
        };
        let checks = vec![
            quintlet_kit::task::spawn("rules-of-statuses", statuses),
            quintlet_kit::task::spawn("rules-of-sandboxes", sandboxes),
        ];
        Self { state, checks }
    }

    /// Checks mounts, and what holds while the node is calm, from now on.
    pub fn watch_mounts_and_calm(&mut self, sim: &Sim) {
        let (api, runtime) = (sim.api.clone(), sim.runtime.clone());
        let (pods, state) = (sim.root_dir().join("pods"), Arc::clone(&self.state));
        let samples = async move {
            loop {
                tokio::time::sleep(SAMPLE).await;
                let missing = missing_mounts(&runtime, &pods);
                let mut state = state.lock();
                state.violations.extend(missing);
                state.check_calm(&api, &runtime);
            }
        };
        self.checks.push(quintlet_kit::task::spawn("rules-of-calm", samples));
    }

    /// Declares that the node is calm, or not any more. It is calm if no fault is pending, each pod is as it
    /// should be, and since then only users change something, containers exit or probes fail.
    pub fn set_calm(&self, yes: bool) {
        let calm = &mut self.state.lock().calm;
        match yes {
            true if calm.is_none() => *calm = Some(HashMap::new()),
            true => {}
            false => *calm = None,
        }
    }

    /// Makes the probes of a kind fail or pass in all containers of a pod.
    pub fn set_failing(&self, kind: &str, pod: &str, yes: bool) {
        let key = (kind.to_owned(), pod.to_owned());
        let failing = &mut self.state.lock().failing;
        if yes {
            failing.insert(key);
        } else {
            failing.remove(&key);
        }
    }

    /// Asserts that no statement was violated so far.
    ///
    /// # Panics
    /// Panics with the violations.
    pub fn assert_kept(&self) {
        assert_eq!(self.violations(), Vec::<String>::new());
    }

    /// Returns the violations so far.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.state.lock().violations.iter().cloned().collect()
    }
}

impl Drop for Rules {
    fn drop(&mut self) {
        self.checks.iter().for_each(JoinHandle::abort);
    }
}

/// Returns the paths below the directory of pods that do not exist while a running container mounts them.
fn missing_mounts(runtime: &FakeRuntime, pods: &Path) -> Vec<String> {
    let (_, containers) = runtime.records();
    let mut missing = Vec::new();
    for container in containers.iter().filter(|c| c.running()) {
        let paths = container.config.mounts.iter().map(|m| PathBuf::from(&m.host_path));
        for path in paths.filter(|path| path.starts_with(pods) && !path.exists()) {
            // The container may have ended, and its pod be cleaned up.
            if runtime.container(container.id()).is_some_and(|c| c.running()) {
                missing.push(format!("{} of a running container does not exist", path.display()));
            }
        }
    }
    missing
}

/// Returns how long something has held that holds now, or `None` if it does not.
fn lasts(began: &mut Option<Instant>, holds: bool) -> Option<Duration> {
    if !holds {
        *began = None;
    } else if began.is_none() {
        *began = Some(Instant::now());
    }
    began.map(|began| began.elapsed())
}

impl RuleState {
    fn check_calm(&mut self, api: &TestApi, runtime: &FakeRuntime) {
        let Some(calm) = &mut self.calm else { return };
        let (pods, events) = (api.share_all("pods"), api.share_all("events"));
        let (_, containers) = runtime.records();
        let wall = Clock::system().wall();
        for pod in &pods {
            let text = |pointer: &str| pod.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            let (name, uid) = (text("/metadata/name"), text("/metadata/uid"));
            let is_terminating = !text("/metadata/deletionTimestamp").is_empty();
            let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
            let is_ready = conditions.into_iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
            let running: Vec<&str> =
                containers.iter().filter(|c| c.running() && c.pod_uid() == uid).map(|c| c.name()).collect();
            let specs = pod["spec"]["containers"].as_array().into_iter().flatten();
            let is_probed = specs
                .filter(|c| c["name"].as_str().is_some_and(|name| running.contains(&name)))
                .any(|c| c["readinessProbe"]["exec"]["command"][0] == "readiness");
            let fails = self.failing.contains(&("readiness".to_owned(), name.to_owned()));
            let seen = calm.entry(uid.to_owned()).or_default();
            let failing = lasts(&mut seen.failing, is_terminating && is_probed && fails);
            if is_ready && failing.is_some_and(|time| time > UNREADY) {
                self.violations.insert(format!("{name} terminates, its readiness probe fails, it is Ready"));
            }
            seen.had_container |= containers.iter().any(|c| c.pod_uid() == uid);
            // The containers of a static pod do not have the UID of its mirror pod.
            let is_mirror = pod.pointer("/metadata/annotations/kubernetes.io~1config.mirror").is_some();
            let ends = is_terminating && !is_mirror && running.is_empty() && seen.had_container;
            let ended = lasts(&mut seen.ended, ends);
            if ended.is_some_and(|time| time > DELETED) {
                self.violations.insert(format!("{name} is not deleted after its containers have ended"));
            }
            if !is_ready || is_terminating || self.failing.iter().any(|(_, pod)| pod == name) {
                seen.version = None;
                continue;
            }
            let version = text("/metadata/resourceVersion");
            let read = match &seen.version {
                Some((known, read)) if known == version => *read,
                _ => seen.version.insert((version.to_owned(), wall)).1,
            };
            let (first, last) = (read.as_second() + AT_REST, wall.as_second() - SHOWN);
            for event in events.iter().filter(|e| e["involvedObject"]["uid"] == uid) {
                let time = event["lastTimestamp"].as_str().and_then(|t| t.parse::<jiff::Timestamp>().ok());
                if time.is_some_and(|time| time.as_second() > first && time.as_second() < last) {
                    let (reason, message) = (&event["reason"], &event["message"]);
                    self.violations.insert(format!("event of {name}, which is at rest: {reason} {message}"));
                }
            }
        }
    }

    fn answer(&mut self, id: &str, command: &[String]) -> ExecReply {
        let [kind, pod] = command else { return ExecReply::default() };
        let passes = !self.failing.contains(&(kind.clone(), pod.clone()));
        let instance = self.instances.entry(id.to_owned()).or_default();
        match kind.as_str() {
            "startup" => instance.has_started |= passes,
            "liveness" if !instance.has_started => {
                self.violations.insert(format!(
                    "liveness probe of a container of {pod} before its startup probe passed"
                ));
            }
            "readiness" => {
                if passes && !instance.is_passing {
                    instance.passing_runs += 1;
                }
                instance.is_passing = passes;
            }
            _ => {}
        }
        ExecReply { exit_code: i32::from(!passes), ..ExecReply::default() }
    }

    fn check_statuses(&mut self, api: &TestApi) {
        for pod in api.share_all("pods") {
            let has_probe = |name: &Value| {
                let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
                containers
                    .filter(|c| c["name"] == *name)
                    .any(|c| c["readinessProbe"]["exec"]["command"][0] == "readiness")
            };
            let statuses = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
            for status in statuses.filter(|s| has_probe(&s["name"])) {
                let Some((_, id)) = status["containerID"].as_str().and_then(|id| id.split_once("://")) else {
                    continue;
                };
                let is_ready = status["ready"] == true;
                let instance = self.instances.entry(id.to_owned()).or_default();
                if is_ready && !instance.is_shown_ready {
                    instance.became_ready += 1;
                }
                instance.is_shown_ready = is_ready;
                let (times, runs) = (instance.became_ready, instance.passing_runs);
                if times > runs {
                    let name = status["name"].as_str().unwrap_or_default();
                    self.violations.insert(format!(
                        "{name} became Ready {times} times, its probe began to pass {runs} times"
                    ));
                }
            }
        }
    }

    fn check_initialized(&mut self, runtime: &FakeRuntime, api: &TestApi) {
        let pods = api.share_all("pods");
        let (_, containers) = runtime.records();
        let succeeded = containers
            .iter()
            .filter(|c| c.status.state() == ContainerState::ContainerExited && c.status.exit_code == 0);
        self.initialized.extend(succeeded.map(|c| (c.sandbox_id.clone(), c.name().to_owned())));
        for container in containers.iter().filter(|c| c.running()) {
            let Some(pod) = pods.iter().find(|p| p["metadata"]["uid"] == container.pod_uid()) else {
                continue;
            };
            let has = |list: &str| {
                pod["spec"][list].as_array().into_iter().flatten().any(|c| c["name"] == container.name())
            };
            if !has("containers") {
                continue;
            }
            let inits = pod["spec"]["initContainers"].as_array().into_iter().flatten();
            for init in inits.filter(|c| c["restartPolicy"].is_null()).filter_map(|c| c["name"].as_str()) {
                if !self.initialized.contains(&(container.sandbox_id.clone(), init.to_owned())) {
                    self.violations.insert(format!(
                        "{} runs in a sandbox in which {init} has not succeeded",
                        container.name()
                    ));
                }
            }
        }
    }
}
