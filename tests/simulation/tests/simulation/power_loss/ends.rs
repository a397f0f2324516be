//! The machine loses power at any step of the end of a pod: its hook, its stop, its volumes, its files, its
//! status, and its mirror pod.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_csi_driver::volumes::mounts_below;
use quintlet_kit::failpoint::{Kind, When};
use quintlet_simulation::cuts::CutPoint;
use quintlet_simulation::{LONG, Seen, pods};
use quintlet_testkit::budget;
use quintlet_testkit::fake_runtime::{Call, Method, Rule};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};

use super::{HOOK, LOSSES, Loss, Scene, assert_logged_once};
use crate::devices::{devices_of, dir, holders};
use crate::{cleaning, resource_claims};

/// Interval between looks at the calls.
const LOOK: Duration = Duration::from_millis(5);
/// Time in which a call or a request has had its effect.
const EFFECT: Duration = Duration::from_millis(100);
/// Delay of a response that never arrives.
const NEVER: Duration = Duration::from_hours(1);
/// Time after the end of a pod in which its last files are written.
const REST: Duration = Duration::from_secs(5);

/// How a pod ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// The object of the pod is deleted.
    Deleted,
    /// The manifest of the pod is removed.
    ManifestRemoved,
}

/// A step of the end of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum EndStep {
    /// The first failpoint of pod-sync with this name.
    File(&'static str),
    /// The first status that pod-sync sends.
    Status(&'static str),
    /// A call of the runtime about the pod.
    Call(Method),
    /// A request about the object of the pod.
    Request(&'static str),
}

const CALLS: [Method; 5] = [
    Method::ExecSync,
    Method::StopContainer,
    Method::StopPodSandbox,
    Method::RemoveContainer,
    Method::RemovePodSandbox,
];
const DELETE: &str = "delete pods";
const REQUESTS: [&str; 2] = ["patch pods/status", DELETE];

/// A pod that ends.
struct EndingPod {
    /// Name of its object in the API server.
    shown: String,
    uid: String,
    /// ID of its container.
    container: String,
    /// ID of its sandbox.
    sandbox: String,
}

impl EndingPod {
    fn has(&self, call: &Call, method: Method) -> bool {
        let is_hook = || call.request::<v1::ExecSyncRequest>().cmd == [HOOK];
        let is_about = |id: &String| call.subjects.contains(id);
        call.method == method
            && (is_about(&self.container) || is_about(&self.sandbox))
            && (method != Method::ExecSync || is_hook())
    }
}

fn is_below(dir: &Path, text: &str) -> bool {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).any(|name| name.contains(text))
}

impl Scene {
    async fn ready_to_end(&self, name: &str, ending: Ending) -> EndingPod {
        let shown = match ending {
            Ending::Deleted => {
                let _uid = self.create(name);
                name.to_owned()
            }
            Ending::ManifestRemoved => {
                let mut pod = pods::manifest(name);
                pod["spec"]["terminationGracePeriodSeconds"] = json!(2);
                pod["spec"]["volumes"] = json!([
                    {"name": "disk", "emptyDir": {}},
                    {"name": "memory", "emptyDir": {"medium": "Memory"}},
                ]);
                let main = &mut pod["spec"]["containers"][0];
                main["volumeMounts"] = json!([
                    {"name": "disk", "mountPath": "/disk"},
                    {"name": "memory", "mountPath": "/memory"},
                ]);
                main["lifecycle"] = json!({"preStop": {"exec": {"command": [HOOK]}}});
                self.sim.manifest(name, &pod);
                format!("{name}-sim-node")
            }
        };
        self.sim.wait_ready(&shown).await;
        let containers = self.sim.runtime.containers();
        let container = containers.iter().find(|c| c.name() == format!("c-{name}")).unwrap();
        let uid = container.pod_uid().to_owned();
        let sandbox = self.sim.sandboxes(&uid)[0].id().to_owned();
        EndingPod { shown, uid, container: container.id().to_owned(), sandbox }
    }

    fn begin_end(&self, name: &str, ending: Ending) {
        match ending {
            Ending::Deleted => self.sim.delete(name, None),
            Ending::ManifestRemoved => self.sim.remove_manifest(name),
        }
    }

    /// Waits until a pod has ended, with all that belongs to it.
    async fn ended(&self, pod: &EndingPod, what: &str) {
        self.sim.wait_pod(&pod.shown, what, Seen::is_gone).await;
        self.sim.wait_nothing_left(&pod.uid).await;
        let csi = self.sim.root_dir().join("plugins/kubernetes.io/csi").join(crate::claims::DRIVER);
        until(&format!("{what}: nothing is left"), LONG, async || {
            let mut left = Vec::new();
            let groups = ["besteffort/", "burstable/", ""].map(|class| format!("{class}pod{}", pod.uid));
            let groups = groups.iter().flat_map(|group| cleaning::groups(&self.sim, group));
            left.extend(groups.filter(|group| group.exists()).map(|group| group.display().to_string()));
            let mounts = mounts_below(&self.sim.root_dir()).unwrap();
            let mounts = mounts.iter().map(|mount| mount.display().to_string());
            left.extend(mounts.filter(|mount| mount.contains(&pod.uid)));
            if is_below(&self.sim.pod_logs_dir(), &pod.uid) {
                left.push("logs".to_owned());
            }
            // The volume of the other pod stays.
            let staged = std::fs::read_dir(&csi).into_iter().flatten().count();
            if staged > 1 {
                left.push(format!("{staged} staged volumes"));
            }
            let held = holders(&dir(&self.sim));
            if held != [self.keeper.as_str()] {
                left.push(format!("devices of {held:?}"));
            }
            let held = resource_claims::holders(&self.sim);
            if held != [self.keeper.as_str()] {
                left.push(format!("claims of {held:?}"));
            }
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }

    /// Ends a pod without a loss. Returns the steps at which the power is lost later, with the number of
    /// times that each was passed.
    async fn steps_of_end(&self, ending: Ending) -> Vec<(EndStep, usize)> {
        let mut steps: Vec<(EndStep, usize)> = Vec::new();
        for (kind, step) in [
            (Kind::File, EndStep::File as fn(&'static str) -> EndStep),
            (Kind::Status, EndStep::Status as fn(&'static str) -> EndStep),
        ] {
            let name = format!("whole-{kind:?}").to_lowercase();
            let pod = self.ready_to_end(&name, ending).await;
            self.sim.cuts().arm(kind, When::After, None);
            self.begin_end(&name, ending);
            self.ended(&pod, "without a loss").await;
            for passed in self.sim.cuts().disarm().into_iter().map(step) {
                match steps.iter_mut().find(|(step, _)| *step == passed) {
                    Some((_, count)) => *count += 1,
                    None => steps.push((passed, 1)),
                }
            }
        }
        steps.extend(CALLS.map(|method| (EndStep::Call(method), 1)));
        steps.extend(REQUESTS.map(|request| (EndStep::Request(request), 1)));
        steps
    }

    /// Waits until the end of a pod reaches this step.
    async fn reached_end(&self, pod: &EndingPod, when: When, step: EndStep, requests: u64) {
        match (step, when) {
            (EndStep::File(_) | EndStep::Status(_), _) => self.sim.cuts().reached().await,
            (EndStep::Call(method), _) => {
                // The runtime does not change when a call arrives, so it is polled.
                while self.sim.runtime.count_calls(|call| pod.has(call, method)) == 0 {
                    tokio::time::sleep(LOOK).await;
                }
            }
            (EndStep::Request(DELETE), When::After) => self.sim.wait_gone(&pod.shown).await,
            (EndStep::Request(request), _) => {
                self.sim.api.wait_for_requests(request, requests + 1, LONG).await;
            }
        }
        if matches!(step, EndStep::Call(_) | EndStep::Request(_)) {
            tokio::time::sleep(EFFECT).await;
        }
    }

    /// Loses the power at this step of the end of a pod. Returns whether the pod reached the step.
    async fn at_end(
        &mut self,
        name: &str,
        ending: Ending,
        (when, step, number, loss): (When, EndStep, usize, Loss),
    ) -> bool {
        let what = format!("{name}: {when:?} {step:?} {number}, {loss:?}");
        let pod = self.ready_to_end(name, ending).await;
        let device = devices_of(&self.sim, &self.keeper, "keeper");
        let mut requests = 0;
        match step {
            EndStep::File(kind) => {
                let point = CutPoint { kind: kind.to_owned(), number };
                self.sim.cuts().arm(Kind::File, when, Some(point));
            }
            EndStep::Status(kind) => {
                let point = CutPoint { kind: kind.to_owned(), number };
                self.sim.cuts().arm(Kind::Status, when, Some(point));
            }
            EndStep::Call(method) => {
                for id in [&pod.container, &pod.sandbox] {
                    let rule = Rule::on(method).about(id);
                    let rule = if when == When::Before { rule.hang() } else { rule.answer_latency(NEVER) };
                    self.sim.runtime.script(rule);
                }
            }
            EndStep::Request(request) => {
                requests = self.sim.api.counts().of(request);
                if when == When::Before {
                    let request = format!("{request} default/{}", pod.shown);
                    self.sim.api.faults().block(request.as_str());
                }
            }
        }
        self.begin_end(name, ending);
        let ended = async {
            self.ended(&pod, &what).await;
            tokio::time::sleep(REST).await;
        };
        let is_reached = tokio::select! {
            () = self.reached_end(&pod, when, step, requests) => true,
            () = ended => false,
        };
        self.sim.cuts().disarm();
        let started = self.started(&pod.uid);
        let lines = self.sim.log().len();
        self.reboot(loss, &pod.uid).await;

        let restarts = self.losses;
        self.sim.wait_pod("keeper", &what, |seen| seen.is_ready() && seen.restarts() == restarts).await;
        self.sim
            .wait_pod("static-sim-node", &what, |seen| seen.is_ready() && seen.restarts() == restarts)
            .await;
        self.ended(&pod, &what).await;
        assert_eq!(self.started(&pod.uid), started, "{what}: a pod that ends is not started");
        let hooks = self.sim.runtime.count_calls(|call| pod.has(call, Method::ExecSync));
        assert!(hooks <= 1, "{what}: {hooks} hooks");
        assert_eq!(devices_of(&self.sim, &self.keeper, "keeper"), device, "{what}");
        if ending == Ending::Deleted {
            let unprepared = self.calls_of_claims(&format!("NodeUnprepareResources {name}"));
            assert!(unprepared > 0, "{what}: its claim was not unprepared");
        }
        assert_logged_once(&self.sim.log()[lines..], &what);
        is_reached
    }

    /// Returns the number of sandboxes and containers that were created for a pod.
    fn started(&self, uid: &str) -> usize {
        let methods = [Method::RunPodSandbox, Method::CreateContainer];
        self.sim.runtime.count_calls(|call| {
            methods.contains(&call.method) && call.subjects.iter().any(|subject| subject == uid)
        })
    }
}

/// Every so many pairs of a step and a loss are tried, but for a long run, which tries all. It has no common
/// divisor with the number of losses and sides.
const EVERY: usize = 23;

/// Loses the power at steps of the end of pods, with each kind of loss, and asserts that the steps were
/// reached.
#[allow(clippy::print_stderr, reason = "the test prints the steps and the number of cuts")]
async fn at_steps_of_the_end(ending: Ending) {
    let mut scene = Scene::new().await;
    let steps = scene.steps_of_end(ending).await;
    eprintln!("steps: {steps:?}");
    let is_long = budget::is_long_run();
    let mut all = Vec::new();
    for (step, count) in &steps {
        for number in 1..=if is_long { *count } else { 1 } {
            for when in [When::Before, When::After] {
                all.extend(LOSSES.map(|loss| (when, *step, number, loss)));
            }
        }
    }
    let mut reached = HashSet::new();
    let cuts: Vec<_> = all.into_iter().step_by(if is_long { 1 } else { EVERY }).collect();
    eprintln!("{} cuts", cuts.len());
    for (number, cut) in cuts.iter().enumerate() {
        if scene.at_end(&format!("end-{number}"), ending, *cut).await {
            reached.insert(cut.1);
        }
    }
    let missed: Vec<EndStep> = cuts.iter().map(|cut| cut.1).filter(|step| !reached.contains(step)).collect();
    assert_eq!(missed, [], "steps that no cut has reached");
    let left = scene.sim.api.share_all("pods");
    let mut left: Vec<&Value> = left.iter().map(|pod| &pod["metadata"]["name"]).collect();
    left.sort_by_key(|name| name.to_string());
    assert_eq!(left, ["keeper", "static-sim-node"]);
    scene.sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_power_at_any_step_of_its_end_a_pod_ends_and_another_keeps_its_own() {
    at_steps_of_the_end(Ending::Deleted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_loss_of_power_at_any_step_of_its_end_a_static_pod_and_its_mirror_end() {
    at_steps_of_the_end(Ending::ManifestRemoved).await;
}
