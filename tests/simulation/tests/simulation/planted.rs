//! Bugs of other node agents, planted into the services one at a time. Each history holds without the bug,
//! and reports a violation with it. docs/reliability.md has the list.

use std::time::Duration;

use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::volumes;
use quintlet_simulation::rules::{Rules, probe};
use quintlet_simulation::{LONG, Options, Seen, Service, Sim, pods};
use quintlet_testapi::Failure;
use quintlet_testkit::fake_runtime::{Behaviour, ContainerRecord, Method, Rule, StopReply};
use quintlet_testkit::wait::until;
use serde_json::{Value, json};
use tonic::Code;

use super::claims::{INTERNAL, bound_claim, csi_driver, mount_of, start_driver, with_claim};

/// A limit that each statement of a history keeps by far, in virtual time.
const SOON: Duration = Duration::from_secs(8);

/// A node with one of the histories.
struct Trial {
    sim: Sim,
    rules: Rules,
    violations: Vec<String>,
}

impl Trial {
    async fn start(planted: Option<&'static str>, args: &[&str]) -> Self {
        let mut sim = Sim::prepare(Options { planted, ..Options::default() }).await;
        sim.set_pod_sync_args(&[&["--max-container-restart-period=1s"], args].concat());
        let rules = Rules::start(&sim);
        sim.start_all();
        Self { sim, rules, violations: Vec::new() }
    }

    /// States that a pod becomes as wanted within [`SOON`].
    async fn expect(&mut self, pod: &str, what: &str, wanted: impl Fn(&Seen) -> bool) {
        let deadline = tokio::time::Instant::now() + SOON;
        while !wanted(&self.sim.pod(pod)) {
            if tokio::time::Instant::now() > deadline {
                return self.violations.push(format!("{pod} is not {what}: {:?}", self.sim.pod(pod)));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends the container `c-<pod>`. Returns its ID.
    fn exit(&self, uid: &str, pod: &str) -> String {
        let id = self.sim.runtime.newest(uid, &format!("c-{pod}")).unwrap().id().to_owned();
        assert!(self.sim.runtime.exit(&id, 1));
        id
    }

    /// Waits until another container `c-<pod>` than this one runs.
    async fn wait_replaced(&self, uid: &str, pod: &str, id: &str) {
        let name = format!("c-{pod}");
        let replaced = |c: ContainerRecord| c.running() && c.id() != id;
        self.sim.wait_runtime("another container", |r| r.newest(uid, &name).is_some_and(replaced)).await;
    }
}

/// Runs of a history with its bug. A bug that shows only for a moment may be missed in one of them on a
/// machine that is busy.
const RUNS: usize = 5;

/// Runs a history without the bug, and then with it until a rule or a statement is violated.
async fn is_found(bug: &'static str, args: &[&str], history: impl AsyncFn(&mut Trial)) {
    let mut trial = Trial::start(None, args).await;
    let violations = violations(&mut trial, &history).await;
    trial.sim.finish().await;
    assert_eq!(violations, [""; 0], "without the bug");
    for _ in 0..RUNS {
        let mut trial = Trial::start(Some(bug), args).await;
        if !self::violations(&mut trial, &history).await.is_empty() {
            return;
        }
    }
    panic!("{bug:?} is not found in {RUNS} runs");
}

async fn violations(trial: &mut Trial, history: &impl AsyncFn(&mut Trial)) -> Vec<String> {
    history(trial).await;
    let mut violations = trial.rules.violations();
    violations.append(&mut trial.violations);
    violations
}

fn probed(name: &str, kinds: &[&str]) -> Value {
    let mut pod = pods::single(name);
    for kind in kinds {
        pod["spec"]["containers"][0][format!("{kind}Probe")] = probe(kind, name);
    }
    pod
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_liveness_probe_before_the_startup_probe_is_found() {
    is_found("liveness before startup", &[], async |trial| {
        let mut pod = probed("web", &["startup", "liveness"]);
        pod["spec"]["containers"][0]["startupProbe"]["failureThreshold"] = json!(60);
        let uid = trial.sim.create(pod);
        trial.sim.wait_ready("web").await;
        let first = trial.sim.runtime.newest(&uid, "c-web").unwrap();
        trial.rules.set_failing("startup", "web", true);
        trial.rules.set_failing("liveness", "web", true);
        trial.wait_replaced(&uid, "web", first.id()).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_is_ready_before_its_own_probe_is_found() {
    is_found("ready before its own probe", &[], async |trial| {
        let mut pod = probed("web", &["readiness"]);
        pod["spec"]["containers"][0]["readinessProbe"]["initialDelaySeconds"] = json!(4);
        let uid = trial.sim.create(pod);
        trial.sim.wait_ready("web").await;
        trial.sim.api.faults().fail("patch pods/status", 1_000, Failure::Internal);
        let first = trial.exit(&uid, "web");
        trial.wait_replaced(&uid, "web", &first).await;
        trial.sim.restart(Service::PodSync).await;
        trial.sim.api.faults().clear();
        trial.sim.wait_ready("web").await;
        tokio::time::sleep(Duration::from_secs(5)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn init_containers_that_are_skipped_after_a_reboot_are_found() {
    is_found("init skipped after a reboot", &[], async |trial| {
        let sim = &trial.sim;
        let exits = |seconds| Behaviour {
            exit: Some((Duration::from_secs(seconds), 0)),
            stop: StopReply::Exits { after: Duration::ZERO, code: 143 },
        };
        let mut pod = pods::single("web");
        pod["spec"]["initContainers"] = json!([pods::container("i-web")]);
        sim.runtime.behave("i-web", exits(0));
        let uid = sim.create(pod);
        sim.wait_ready("web").await;
        // A container that was created and not started outlives the sandbox.
        sim.runtime.behave("i-web", exits(30));
        sim.runtime.script(Rule::on(Method::StartContainer).fail(Code::Unknown, "refused").times(1));
        trial.exit(&uid, "web");
        sim.wait_pod("web", "refused", |p| p.container("c-web").reason == "RunContainerError").await;
        let sandbox = sim.sandboxes(&uid).remove(0);
        assert!(sim.runtime.exit(sandbox.id(), 137));
        sim.wait_runtime("it runs again", |r| r.newest(&uid, "c-web").is_some_and(|c| c.running())).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_that_are_not_restarted_beside_a_sidecar_are_found() {
    is_found("sidecar's startup is forgotten", &[], async |trial| {
        let mut pod = pods::single("web");
        let mut sidecar = pods::container("s-web");
        sidecar["restartPolicy"] = json!("Always");
        sidecar["startupProbe"] = probe("startup", "web");
        pod["spec"]["initContainers"] = json!([sidecar]);
        let uid = trial.sim.create(pod);
        trial.sim.wait_ready("web").await;
        trial.sim.restart(Service::PodSync).await;
        trial.sim.wait_view("web", "known", |_| true).await;
        trial.exit(&uid, "web");
        trial.expect("web", "restarted", |p| p.is_ready() && p.container("c-web").restarts == 1).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_is_ready_for_a_moment_after_a_restart_is_found() {
    is_found("ready without a prober", &[], async |trial| {
        let _uid = trial.sim.create(probed("web", &["readiness"]));
        trial.sim.wait_ready("web").await;
        trial.rules.set_failing("readiness", "web", true);
        trial.sim.wait_pod("web", "not Ready", |p| !p.is_ready()).await;
        trial.sim.restart(Service::PodSync).await;
        trial.sim.wait_view("web", "known", |_| true).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_readiness_that_is_frozen_in_the_termination_is_found() {
    is_found("readiness frozen in termination", &[], async |trial| {
        let stop = StopReply::Exits { after: Duration::from_secs(20), code: 0 };
        trial.sim.runtime.behave("c-web", Behaviour { exit: None, stop });
        let _uid = trial.sim.create(probed("web", &["readiness"]));
        trial.sim.wait_ready("web").await;
        trial.sim.delete("web", None);
        trial.rules.set_failing("readiness", "web", true);
        trial.expect("web", "unready, and there", |p| !p.is_gone() && !p.is_ready()).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_in_each_sync_is_found() {
    is_found("event in each sync", &[], async |trial| {
        let mut pod = pods::single("web");
        pod["spec"]["volumes"] = json!([{"name": "files", "image": {"reference": "example.test/files:1"}}]);
        pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "files", "mountPath": "/files"}]);
        let _uid = trial.sim.create(pod);
        trial.sim.wait_ready("web").await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let occurrences = || trial.sim.events("web").iter().map(|e| e.count).sum::<i64>();
        let before = occurrences();
        tokio::time::sleep(SOON).await;
        let more = occurrences() - before;
        if more > 0 {
            trial.violations.push(format!("{more} events of a pod at rest"));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_pods_that_count_against_the_node_are_found() {
    is_found("rejected pods counted", &[], async |trial| {
        for (name, cpu) in [("large", "1000000"), ("small", "10m")] {
            let mut pod = pods::single(name);
            pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
            let _uid = trial.sim.create(pod);
            if name == "large" {
                trial.sim.wait_pod(name, "rejected", |p| p.phase() == "Failed").await;
            }
        }
        trial.expect("small", "Ready, although it fits", Seen::is_ready).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mirror_pod_that_stays_pending_is_found() {
    const NAME: &str = "web-sim-node";
    is_found("status of a former mirror pod", &[], async |trial| {
        trial.sim.manifest("web", &pods::manifest("web"));
        let first = trial.sim.wait_ready(NAME).await;
        trial.sim.delete(NAME, Some(30));
        let is_new = |p: &Seen| p.is_ready() && p.uid() != first.uid();
        trial.expect(NAME, "another mirror, Ready", is_new).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_directory_that_a_failed_publish_removes_is_found() {
    is_found("failed publish removes the mount", &["--sync-frequency=1s"], async |trial| {
        let sim = &trial.sim;
        let driver = start_driver(sim);
        csi_driver(sim, json!({"attachRequired": false, "requiresRepublish": true}));
        bound_claim(sim, "data", |_| {});
        let uid = sim.create(with_claim("web", "data"));
        sim.wait_ready("web").await;
        let mount = mount_of(sim, &uid, "pv-data");
        fault::set(driver.state(), &[("NodePublishVolume", Fault::Code(INTERNAL))]).unwrap();
        // The driver has lost its mount.
        volumes::unmount(&mount).unwrap();
        let calls = driver.calls_of("NodePublishVolume");
        until("the volume is published again", LONG, async || {
            let more = driver.calls_of("NodePublishVolume") - calls;
            if more >= 2 { Ok(()) } else { Err(more) }
        })
        .await;
        if !mount.is_dir() {
            trial.violations.push("the container has a directory that was removed".to_owned());
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_waits_for_ticks_is_found() {
    is_found("observation waits for a tick", &[], async |trial| {
        let _uid = trial.sim.create(pods::single("web"));
        trial.sim.wait_ready("web").await;
        trial.sim.delete("web", None);
        trial.expect("web", "gone", Seen::is_gone).await;
    })
    .await;
}
