//! General statements about pods with exec probes and init containers, checked after every change.
//!
//! - A liveness probe runs only after the startup probe of the same instance passed.
//! - An instance becomes Ready in the API server at most as often as its readiness probe began to pass.
//! - A regular container runs in a sandbox only if each init container of its pod succeeded in the same
//!   sandbox.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_cri_api::v1::ContainerState;
use quintlet_testapi::TestApi;
use quintlet_testkit::fake_runtime::{ExecReply, FakeRuntime};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::Sim;

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
    violations: BTreeSet<String>,
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

impl RuleState {
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
