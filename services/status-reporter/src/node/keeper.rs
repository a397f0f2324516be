//! Registers the Node and updates its status.

use std::time::Duration;

use quintlet_kit::clock::Clock;
use quintlet_kit::server::{HealthHandle, NODE};
use quintlet_telemetry::propagate;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info, info_span, warn};

use super::FactBoard;
use super::cloud::CloudProvider;
use super::health::HealthBoard;
use super::own;
use super::own::LocalMachine;
use super::setters::{self, Ages, Due, View, Weight};
use super::startup::Startup;
use super::volumes::{self, Report, VolumeBoard};
use crate::api::{ApiClient, ApiFailure, node_path};
use crate::events::recorder::Recorder;
use crate::status::normalize::seconds;
use crate::status::text;

/// Interval between evaluations of readiness, since facts and health checks expire.
const EVALUATE_EVERY: Duration = Duration::from_secs(5);
/// Time for which the registration waits for facts, so that the Node is usually created complete.
const FACTS_WITHIN: Duration = Duration::from_secs(1);

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Number of failures of a server that answers after which the Node no longer delays the heartbeat.
const READ_FAILURES: u32 = 3;

/// The only writer of the Node object.
pub struct NodeKeeper {
    /// Client with the connections of the Node.
    pub api: ApiClient,
    /// Name of the Node.
    pub name: String,
    /// Whether to create the Node if it does not exist.
    pub register: bool,
    /// Taints of a Node that is created, as v1 Taints.
    pub taints: Vec<Value>,
    /// Labels of a Node that is created.
    pub labels: Vec<(String, String)>,
    /// `spec.providerID` of a Node that is created; may be empty.
    pub provider_id: String,
    /// The cloud that the node is in.
    pub cloud: CloudProvider,
    /// A controller attaches volumes to the node.
    pub controller_attaches: bool,
    /// Shortest interval between writes that are not urgent, and longest interval between reads of the Node.
    pub update_every: Duration,
    /// Interval between writes of an unchanged Node.
    pub report_every: Duration,
    /// Wall clock of heartbeats, and the clock of intervals.
    pub clock: Clock,
    /// Facts that the services reported.
    pub facts: FactBoard,
    /// No agent on another machine is known to have the Node. The Lease and the CSINode wait for it.
    pub is_free: watch::Sender<bool>,
    /// Whether an ID in a Node is one of this machine.
    pub machine: LocalMachine,
    /// The volumes of the node.
    pub volumes: VolumeBoard,
    /// Health of the services.
    pub health: HealthBoard,
    /// Records events of the Node.
    pub events: Recorder,
    /// Metrics of the registration.
    pub startup: Startup,
    /// Health of the Node's reads and writes.
    pub reached: HealthHandle,
}

impl NodeKeeper {
    /// Runs until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        // The next process repeats a dropped write.
        tokio::select! {
            () = self.keep() => {}
            () = stop.cancelled() => {}
        }
    }

    async fn keep(&self) {
        let started = self.clock.boot();
        let mut reports = self.volumes.reports();
        let mut csi_node = self.volumes.csi_node();
        let (mut live, made) = self.appear(started).await;
        let mut last_read = Instant::now();
        let mut last_update = made.then(Instant::now);
        let mut last_report = last_update;
        let mut report_every = self.spread();
        let mut failures = 0_u32;
        loop {
            if !*self.is_free.borrow() && self.is_own(&live) {
                self.is_free.send_replace(true);
            }
            // Other clients write the Node, too: the node controller sets conditions to Unknown, and users
            // cordon and label.
            let is_old = last_read.elapsed() >= self.update_every;
            let fresh = !is_old || self.read_again(&mut live, &mut failures).await;
            if is_old && fresh {
                last_read = Instant::now();
            }
            let report = reports.borrow_and_update().clone();
            self.events.set_node_uid(text(&live["metadata"], "uid"));
            self.volumes.publish(&live, &report);
            let (desired, events) = self.desired(&live, started, &report);
            let weight = setters::weigh(&live, &desired);
            let since = |at: Option<Instant>| at.map(|at| at.elapsed());
            let has_facts = !self.facts.is_empty();
            let ages = Ages { update: since(last_update), report: since(last_report) };
            let due = setters::due(weight, has_facts, ages, self.update_every, report_every);
            if due != Due::Nothing {
                match self.write(&live, &desired, due == Due::Report).await {
                    Ok(written) => {
                        self.reached.set_serving(NODE).await;
                        failures = 0;
                        last_update = Some(Instant::now());
                        // A periodic report keeps its interval; a change starts a new, random one.
                        let periodic = due == Due::Report && weight == Weight::Nothing;
                        report_every = if periodic { self.report_every } else { self.spread() };
                        last_report = last_update;
                        self.record_events(&live, &written, events);
                        live = written;
                        last_read = Instant::now();
                        self.volumes.publish(&live, &report);
                    }
                    Err(failure) => {
                        // After a conflict, the Node that another client wrote is read, and the write is
                        // decided again.
                        if !matches!(failure, ApiFailure::Conflict(_)) {
                            failures = failures.saturating_add(1);
                            if failures == 1 {
                                warn!(%failure, "write node status failed");
                                self.reached.set_not_serving(NODE).await;
                            }
                        }
                        if let Ok(read) = self.api.get(&node_path(&self.name)).await {
                            self.record_events(&live, &read, Vec::new());
                            live = read;
                            last_read = Instant::now();
                        }
                        let after = failure.retry_after().unwrap_or_else(|| pause(failures));
                        tokio::time::sleep(after).await;
                        continue;
                    }
                }
            }
            let look = match weight {
                _ if !fresh => LONGEST_PAUSE,
                Weight::Volumes => setters::VOLUMES_EVERY,
                Weight::Nothing | Weight::Changed | Weight::Turned => EVALUATE_EVERY,
            };
            let look = look.min(self.update_every).min(self.report_every);
            // A dropped arm loses nothing: the state is read again.
            tokio::select! {
                () = self.facts.changed() => {}
                // This keeper has a sender of both channels.
                Ok(()) = reports.changed() => {}
                Ok(()) = csi_node.changed() => {}
                () = quintlet_kit::timers::pause(look) => {}
            }
        }
    }

    /// Reads the Node from the cache of the API server, which costs no read of etcd
    /// (`pkg/kubelet: tryUpdateNodeStatus`). After a conflict, the Node is read from etcd. Returns false, and
    /// keeps the old object, if the read fails. A cache that has not seen the last write keeps the old
    /// object, too.
    async fn read_again(&self, live: &mut Value, failures: &mut u32) -> bool {
        match self.api.get(&format!("{}?resourceVersion=0", node_path(&self.name))).await {
            Ok(read) => {
                self.reached.set_serving(NODE).await;
                *failures = 0;
                if is_older(&read, live) {
                    return true;
                }
                self.record_events(live, &read, Vec::new());
                *live = read;
                true
            }
            Err(failure) => {
                *failures = failures.saturating_add(1);
                if *failures == 1 {
                    warn!(%failure, "read node failed");
                    self.reached.set_not_serving(NODE).await;
                }
                false
            }
        }
    }

    fn desired(
        &self,
        live: &Value,
        started: Duration,
        report: &Report,
    ) -> (Value, Vec<crate::events::Occurrence>) {
        let (facts, peers) = (self.facts.snapshot(), self.health.peers());
        let boot = self.clock.boot();
        let has_csi_node = *self.volumes.csi_node().borrow();
        let own = setters::csi_node_problem(live, has_csi_node, boot.saturating_sub(started));
        let readiness = setters::readiness(View { facts: &facts, peers: &peers, own, boot, started });
        let (mut node, events) = setters::desired(live, &facts, &readiness, &seconds(self.clock.wall()));
        volumes::set_in_use(&mut node, &report.volumes);
        self.cloud.set_addresses(&mut node, live);
        (node, events)
    }

    async fn write(&self, live: &Value, desired: &Value, heartbeat: bool) -> Result<Value, ApiFailure> {
        let Some(mut patch) = setters::patch(live, desired, heartbeat) else { return Ok(live.clone()) };
        self.cloud.guard_addresses(&mut patch, live);
        debug!(patch = %patch, "patching node status");
        let span = info_span!(parent: None, "write node", k8s.node.name = self.name);
        if let Some(reported) = self.facts.take_trace() {
            propagate::add_link(&span, &reported);
        }
        let path = format!("{}/status", node_path(&self.name));
        let written = self.api.patch(&path, &patch).instrument(span.clone()).await;
        if let Err(failure) = &written {
            propagate::record_error(&span, &failure.to_string());
        }
        written
    }

    fn record_events(&self, before: &Value, after: &Value, events: Vec<crate::events::Occurrence>) {
        if is_ready(after) {
            self.startup.ready(self.clock.boot());
        }
        for event in events.into_iter().chain(setters::schedulable_event(Some(before), after)) {
            // The recorder counts an event that is lost.
            self.events.record(event);
        }
    }

    /// Reads the Node, or creates it. Returns whether it was created.
    async fn appear(&self, started: Duration) -> (Value, bool) {
        let mut initial = setters::initial(&self.name, setters::go_arch(std::env::consts::ARCH));
        for (key, value) in &self.labels {
            initial["metadata"]["labels"][key] = json!(value);
        }
        if !self.controller_attaches
            && let Some(annotations) = initial["metadata"]["annotations"].as_object_mut()
        {
            annotations.remove(setters::CONTROLLER_ATTACHES);
        }
        let taints: Vec<Value> = self.taints.iter().cloned().chain(self.cloud.taint()).collect();
        if !taints.is_empty() {
            initial["spec"]["taints"] = json!(taints);
        }
        if !self.provider_id.is_empty() {
            initial["spec"]["providerID"] = json!(self.provider_id);
        }
        if self.register && self.facts.is_empty() {
            // Without facts after the timeout, the Node is created without them.
            let _no_facts = tokio::time::timeout(FACTS_WITHIN, self.facts.changed()).await;
        }
        let mut failures = 0_u32;
        let mut waited = false;
        loop {
            let attempt = if self.register {
                self.register(&initial, started).await
            } else {
                self.api.get(&node_path(&self.name)).await.map(|node| (node, false))
            };
            match attempt {
                Ok(found) => {
                    self.reached.set_serving(NODE).await;
                    if self.facts.is_empty() && !self.is_own(&found.0) {
                        if !waited {
                            info!(node = %self.name, "the node is that of another machine, waiting for pod-sync");
                        }
                        waited = true;
                        self.facts.changed().await;
                        continue;
                    }
                    return found;
                }
                Err(failure) => {
                    failures = failures.saturating_add(1);
                    // A renewal before pod-sync has read the Lease would look like that of an agent on
                    // another machine. The Lease cannot be renewed either while the server does not answer.
                    let is_unreadable =
                        !matches!(failure, ApiFailure::Unreachable(_)) && failures >= READ_FAILURES;
                    if is_unreadable || matches!(failure, ApiFailure::NotFound(_)) {
                        self.is_free.send_replace(true);
                    }
                    if failures == 1 {
                        warn!(%failure, node = %self.name, "register node failed, retrying");
                        self.reached.set_not_serving(NODE).await;
                    }
                    tokio::time::sleep(failure.retry_after().unwrap_or_else(|| pause(failures))).await;
                }
            }
        }
    }

    /// Returns the report interval with a jitter of 50 %, so that nodes do not report at the same time.
    fn spread(&self) -> Duration {
        self.report_every.mul_f64(0.5 + rand::random::<f64>())
    }

    /// Returns whether the Node is that of this machine, or of none yet. pod-sync reports facts after it has
    /// checked that no agent on another machine uses the name.
    fn is_own(&self, live: &Value) -> bool {
        let facts = self.facts.snapshot();
        self.machine.has(live) || facts.iter().any(|facts| own::is_same(live, &facts.node))
    }

    async fn register(&self, initial: &Value, started: Duration) -> Result<(Value, bool), ApiFailure> {
        let report = self.volumes.reports().borrow().clone();
        let (node, events) = self.desired(initial, started, &report);
        self.startup.attempt(self.clock.boot());
        match self.api.create("/api/v1/nodes", &node).await {
            Ok(made) => {
                info!(node = %self.name, "registered node");
                self.startup.registered(self.clock.boot());
                self.record_events(&json!({}), &made, events);
                Ok((made, true))
            }
            Err(ApiFailure::AlreadyExists(_) | ApiFailure::Denied(_)) => {
                let live = self.api.get(&node_path(&self.name)).await?;
                if self.facts.is_empty() && !self.is_own(&live) {
                    return Ok((live, false));
                }
                let adopted = setters::adopt(&live, initial);
                info!(node = %self.name, "found existing node");
                let node = match setters::patch(&live, &adopted, false) {
                    Some(patch) => {
                        self.api.patch(&format!("{}/status", node_path(&self.name)), &patch).await?
                    }
                    None => live,
                };
                Ok((node, false))
            }
            Err(failure) => Err(failure),
        }
    }
}

/// Returns whether an object is an earlier version of the same Node. A Node that was created again may have
/// any version.
fn is_older(read: &Value, live: &Value) -> bool {
    let metadata =
        |object: &Value, field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    let version = |object: &Value| metadata(object, "resourceVersion").parse::<u64>().ok();
    metadata(read, "uid") == metadata(live, "uid")
        && matches!((version(read), version(live)), (Some(read), Some(live)) if read < live)
}

fn is_ready(node: &Value) -> bool {
    let conditions = node["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1).min(10))).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_earlier_version_of_the_same_node_is_older() {
        let node = |uid: &str, version: &str| json!({"metadata": {"uid": uid, "resourceVersion": version}});
        for (read, live, want) in [
            (node("a", "9"), node("a", "10"), true),
            (node("a", "10"), node("a", "10"), false),
            (node("a", "11"), node("a", "10"), false),
            (node("b", "9"), node("a", "10"), false),
            (node("a", ""), node("a", "10"), false),
        ] {
            assert_eq!(is_older(&read, &live), want, "{read} {live}");
        }
    }
}
